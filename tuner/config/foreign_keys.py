"""Keys of Trinity-RFT 0.6 that the local backend has no use for.

Each is accepted at the values under which one process on one machine does exactly what the key
asks, and refused by name otherwise. A key in neither this table nor the schema is unknown.
"""

from __future__ import annotations

from tuner.config.explorer import RolloutModelSection
from tuner.config.foreign import Accepts, Anything, Foreign, Same, Values


def _rows(prefix: str, why: str, accepts: Accepts, *names: str) -> list[Foreign]:
    return [Foreign(f"{prefix}{name}", accepts, why) for name in names]


_NONE = Values(())
_OFF = Values((False,))
_ON = Values((True,))
_ANY = Anything()

_ONE_ENGINE = "the local backend has one engine, with one copy of the weights"
_SET_BY_TRINITY = "Trinity-RFT fills this in itself"
_SHARED = "weights are shared in place, or handed over as files"
_ONE_ADAPTER = "the engine serves the one adapter that is trained, with the trainer's weights"
_ENGINE = "auxiliary models are not served by vLLM or SGLang"
_ENGINE_MEMORY = "the local engine takes the memory that tuner.max_slots answers need"
_TRAINS = "rollouts and training are in one process"
_FORMAT = "the workflow gets the whole row and picks its fields itself"
_FUNCTIONS = "the workflow and judge are the functions given to tune(), or tuner.workflow and judge"

_TOP = [
    *_rows("", "runs are not grouped further than by project", Values(("",)), "group"),
    *_rows("", "the local backend does not use Ray", _ANY, "ray_namespace"),
    *_rows("", _SET_BY_TRINITY, Values(("",)), "checkpoint_job_dir"),
    *_rows("", "it is about Trinity-RFT's own advice", _ANY, "ignore_validator_suggestions"),
    *_rows("", "one run has one stage", Values(([],)), "stages"),
    *_rows("", "not in this version", _NONE, "cod.**", "service.**"),
    *_rows("log.", "there is one process and one log", Values(("INFO",)), "level"),
    *_rows("log.", "there is one process and one log", _ANY, "group_by_node", "save_dir"),
    *_rows("data_processor.", "not in this version", _NONE, "task_pipeline.**"),
    *_rows(
        "data_processor.experience_pipeline.",
        "not in this version",
        Values(([], {})),
        "operators",
        "inputs",
    ),
    *_rows("data_processor.experience_pipeline.", "not in this version", _NONE, "output.**"),
    *_rows(
        "data_processor.experience_pipeline.",
        "every call of a run is kept, in its traces folder",
        _ON,
        "save_input",
    ),
    *_rows("data_processor.experience_pipeline.", "see traces/", _NONE, "input_save_path"),
    *_rows("cluster.", "the local backend does not use Ray", _ANY, "ray_address"),
    *_rows("cluster.", "the local backend is one machine", Values((0, 1)), "node_num"),
    *_rows("cluster.", "the local backend uses at most one GPU", Values((0, 1)), "gpu_per_node"),
    *_rows(
        "cluster.",
        _SET_BY_TRINITY,
        _ANY,
        "total_gpu_num",
        "rollout_gpu_num",
        "auxiliary_model_gpu_num",
        "explorer_gpu_num",
        "trainer_gpu_num",
        "trainer_node_num",
        "trainer_gpu_num_per_node",
    ),
    *_rows(
        "synchronizer.",
        _SHARED,
        _ANY,
        "sync_method",
        "sync_timeout",
        "group_name",
        "wait_for_checkpoint",
        "ray_namespace",
        "explorer_world_size",
    ),
    *_rows(
        "synchronizer.",
        "the engine always has the newest weights",
        Values(
            (
                "fixed",
                "explorer_driven",
                "trainer_driven",
                "dynamic_by_explorer",
                "dynamic_by_trainer",
            )
        ),
        "sync_style",
    ),
    *_rows(
        "synchronizer.",
        "the engine has the new weights after every step",
        Values((1,)),
        "sync_interval",
        "explorer_sync_interval",
        "trainer_sync_interval",
    ),
]

_ALGORITHM = [
    *_rows("algorithm.optimizer.", "deprecated", _NONE, "warmup_style"),
    *_rows(
        "algorithm.optimizer.",
        "the limit of the gradient's norm",
        Same("trainer.grad_clip"),
        "clip_grad",
    ),
    *_rows(
        "algorithm.", "mixture-of-experts routing is not replayed", _OFF, "enable_router_replay"
    ),
    *_rows("algorithm.", "set tuner.algorithm.proximal", _ON, "bypass_old_logprobs"),
    *_rows(
        "algorithm.",
        "set tuner.algorithm.importance_sampling and rejection_low, rejection_high",
        _NONE,
        "rollout_correction.**",
    ),
    *_rows(
        "algorithm.advantage_fn_args.",
        "a reward belongs to the rollout, not to a single call",
        _OFF,
        "enable_step_norm",
    ),
    *_rows(
        "algorithm.advantage_fn_args.",
        "a step trains on its own rollouts, each once",
        _OFF,
        "duplicate_experiences",
    ),
    *_rows("algorithm.advantage_fn_args.", "not in this version", _NONE, "rank_penalty"),
    *_rows(
        "algorithm.policy_loss_fn_args.",
        "not in this version",
        _OFF,
        "enable_sequence_masking",
        "fallback_to_policy_gradient",
        "enable_mask_clip",
    ),
    *_rows(
        "algorithm.policy_loss_fn_args.",
        "not read unless enable_mask_clip",
        _ANY,
        "mask_clip_range_low",
        "mask_clip_range_high",
    ),
    *_rows(
        "algorithm.policy_loss_fn_args.",
        "not read unless enable_sequence_masking",
        _ANY,
        "delta_sequence_masking",
    ),
    *_rows(
        "algorithm.policy_loss_fn_args.",
        "the losses share one aggregation",
        Same("algorithm.loss_agg_mode"),
        "loss_agg_mode",
    ),
    *_rows("algorithm.kl_loss_fn_args.", "the coefficient is constant", _OFF, "adaptive"),
    *_rows("algorithm.kl_loss_fn_args.", "not read unless adaptive", _ANY, "target_kl", "horizon"),
    *_rows("algorithm.kl_penalty_fn_args.", "the coefficient is constant", _OFF, "adaptive"),
    *_rows(
        "algorithm.kl_penalty_fn_args.", "not read unless adaptive", _ANY, "target_kl", "horizon"
    ),
]

_MODEL = [
    *_rows("model.", "code from a model's folder is not run", _OFF, "trust_remote_code"),
    *_rows("model.", "a request says itself which log-probs it wants", Values((0,)), "logprobs"),
    *_rows("model.", "a prompt may take what max_model_len leaves", _NONE, "max_prompt_tokens"),
    *_rows("model.", "an answer may be short", Values((0,)), "min_response_tokens"),
    *_rows("model.", "prompts are never cut", _ANY, "enable_prompt_truncation"),
    *_rows(
        "model.",
        "it would change the distribution that is trained",
        Values((1,)),
        "repetition_penalty",
    ),
    *_rows("model.lora_configs.*.", _ONE_ADAPTER, _ANY, "name"),
    *_rows("model.lora_configs.*.", _SET_BY_TRINITY, _OFF, "is_dummy"),
    *_rows("model.", _ONE_ADAPTER, _ANY, "fully_sharded_loras", "max_cpu_loras"),
    *_rows("model.", "it is read from the model's own config.json", _NONE, "rope_theta"),
    *_rows("model.", "it is read from the model's own config.json", _NONE, "rope_scaling.**"),
    *_rows("model.tinker.", "the local backend does not use Tinker", _OFF, "enable"),
    *_rows("model.", "not read unless model.tinker.enable", _ANY, "tinker.**"),
    *_rows("model.external_model.", "an external API cannot be trained", _OFF, "enable"),
    *_rows("model.", "not read unless model.external_model.enable", _ANY, "external_model.**"),
]

_TASKSET_KEYS: list[tuple[str, Accepts, str]] = [
    ("storage_type", Values(("file",)), "tasks are read from files or the Hub"),
    ("default_workflow_type", Values(("agentscope_workflow_adapter_v1",)), _FUNCTIONS),
    ("default_reward_fn_type", _NONE, _FUNCTIONS),
    ("workflow_args", Values(({},)), _FUNCTIONS),
    ("reward_fn_args", Values(({},)), _FUNCTIONS),
    ("format.**", _ANY, _FORMAT),
    ("max_retry_times", _ANY, "it is about reading from SQL"),
    ("max_retry_interval", _ANY, "it is about reading from SQL"),
    ("enable_progress_bar", _ANY, "it is about showing progress"),
    ("index", Values((0,)), "a run goes on by itself where it stopped"),
    ("is_eval", _ANY, _SET_BY_TRINITY),
    ("batch_size", Values((0,)), "set buffer.batch_size"),
    ("total_epochs", Values((1,)), "set buffer.total_epochs"),
    ("total_steps", _NONE, "set buffer.total_steps"),
    ("ray_namespace", _ANY, "the local backend does not use Ray"),
    ("rollout_args.logprobs", Values((0,)), "a request says itself which log-probs it wants"),
    ("rollout_args.n", Values((1,)), "set algorithm.repeat_times"),
]

_INPUT = "buffer.explorer_input."
_RECORDED = "buffer.trainer_input.experience_buffer."
_BUFFER = [
    *[Foreign(f"{_INPUT}taskset.{key}", accepts, why) for key, accepts, why in _TASKSET_KEYS],
    *[
        Foreign(f"{_INPUT}eval_tasksets.*.{key}", accepts, why)
        for key, accepts, why in _TASKSET_KEYS
    ],
    *_rows(f"{_INPUT}taskset.", "group size", Same("algorithm.repeat_times"), "repeat_times"),
    *_rows(
        f"{_INPUT}eval_tasksets.*.", "each task is evaluated once", Values((1,)), "repeat_times"
    ),
    *_rows(f"{_INPUT}taskset.", "deprecated; set data_selector", _NONE, "task_selector.**"),
    *_rows(f"{_INPUT}eval_tasksets.*.", "deprecated", _NONE, "task_selector.**"),
    *_rows(
        f"{_INPUT}taskset.data_selector.",
        "it is about difficulty-based selection",
        Values(([], {})),
        "feature_keys",
        "kwargs",
    ),
    *_rows(
        f"{_INPUT}eval_tasksets.*.",
        "an evaluation goes through its tasks in order",
        _NONE,
        "data_selector.**",
    ),
    *_rows(_INPUT, "there is one set of training tasks, taskset", Values(([],)), "tasksets"),
    *_rows(
        _INPUT,
        _FUNCTIONS,
        Values(("agentscope_workflow_adapter_v1",)),
        "default_workflow_type",
        "default_eval_workflow_type",
    ),
    *_rows(_INPUT, _FUNCTIONS, _NONE, "default_reward_fn_type"),
    *_rows(
        "buffer.trainer_input.",
        "a step trains on its own rollouts, nothing is stored between",
        Values(({},)),
        "auxiliary_buffers",
    ),
    *_rows(
        f"{_RECORDED}replay_buffer.",
        "old rollouts are not trained again",
        _OFF,
        "enable",
    ),
    *_rows(_RECORDED, "not read unless replay_buffer.enable", _ANY, "replay_buffer.**"),
    *_rows(
        _RECORDED,
        "it is about handing rollouts from one process to another",
        _ANY,
        "name",
        "capacity",
        "max_read_timeout",
        "max_retry_times",
        "max_retry_interval",
        "ray_namespace",
    ),
    *_rows(_RECORDED, "it is about showing progress", _ANY, "enable_progress_bar"),
    *_rows(_RECORDED, "a run goes on by itself where it stopped", Values((0,)), "index"),
    *_rows(
        _RECORDED,
        _SET_BY_TRINITY,
        _ANY,
        "schema_type",
        "batch_size",
        "tokenizer_path",
        "total_epochs",
        "total_steps",
    ),
    *_rows(f"{_RECORDED}format.", "text models only in this version", _NONE, "image_key"),
    *_rows(f"{_RECORDED}format.", "text models only in this version", _NONE, "video_key"),
    *_rows(
        f"{_RECORDED}format.",
        "data and rollouts have one chat template",
        Same("model.custom_chat_template"),
        "chat_template",
    ),
    *_rows(
        f"{_RECORDED}format.",
        "data and rollouts have one chat template",
        Same("model.enable_thinking"),
        "enable_thinking",
    ),
    *_rows(
        f"{_RECORDED}format.",
        "it is about tasks, not about recorded data",
        _ANY,
        "reply_prefix",
        "workflow_key",
        "reward_fn_key",
    ),
    *_rows(
        f"{_RECORDED}data_selector.",
        "it is about difficulty-based selection",
        Values(([], {})),
        "feature_keys",
        "kwargs",
    ),
    # Compared with `mode` in tuner.config.conflicts.
    *_rows(_RECORDED, "rollouts are handed over, recorded data is read", _ANY, "storage_type"),
    # Compared with other keys in tuner.config.conflicts.
    *_rows("buffer.", "a step trains on all of its rollouts", _ANY, "train_batch_size"),
    *_rows("buffer.", _SET_BY_TRINITY, _NONE, "explorer_output.**", "tokenizer_path", "cache_dir"),
]

_LORA = "model.lora_configs is what trains an adapter; other models are served as they are"
_ENGINE_KEYS: list[tuple[str, Accepts, str]] = [
    ("trust_remote_code", _OFF, "code from a model's folder is not run"),
    ("engine_type", Values(("vllm", "sglang")), "the local engine stands in for it"),
    ("engine_num", Values((1,)), _ONE_ENGINE),
    ("tensor_parallel_size", Values((1,)), _ONE_ENGINE),
    ("data_parallel_size", Values((1,)), _ONE_ENGINE),
    ("pipeline_parallel_size", Values((1,)), _ONE_ENGINE),
    ("enable_expert_parallel", _OFF, _ONE_ENGINE),
    ("gpu_per_engine", Values((0, 1)), _SET_BY_TRINITY),
    ("extra_engine_args", Values(({},)), _ENGINE),
    ("use_v1", _ANY, "there is one kind of engine"),
    ("enforce_eager", _ANY, _ENGINE),
    ("enable_prefix_caching", _ON, "common prefixes are always computed once"),
    ("enable_chunked_prefill", _ANY, "it does not change what is sampled"),
    ("gpu_memory_utilization", _NONE, _ENGINE_MEMORY),
    ("dtype", Same("tuner.dtype"), "engine and trainer have one precision"),
    ("seed", Same("tuner.seed"), "a run has one seed"),
    ("logprobs", Values((0,)), "a request says itself which log-probs it wants"),
    ("max_prompt_tokens", _NONE, "a prompt may take what max_model_len leaves"),
    ("min_response_tokens", Values((0,)), "an answer may be short"),
    ("enable_prompt_truncation", _ANY, "prompts are never cut"),
    ("repetition_penalty", Values((1,)), "it would change the distribution that is trained"),
    ("ignore_eos", _OFF, "an answer ends at its end token"),
    ("enable_multimodal", _OFF, "text models only in this version"),
    ("enable_log_requests", _OFF, "requests are recorded in traces/"),
    ("base_port", _NONE, "a port is opened only when model.base_url is used, a free one"),
    ("api_key", Values(("EMPTY",)), "each rollout has an API key of its own"),
    ("enable_auto_tool_choice", _ON, "models may always choose tools themselves"),
    ("enable_openai_api", _ON, "agents always reach the model over the OpenAI API"),
    ("external_model_config.**", _NONE, "name a URL under tuner.auxiliary_models"),
    ("nnodes", Values((1,)), "the local backend is one machine"),
    ("node_rank", Values((0,)), "the local backend is one machine"),
    ("enable_return_routed_experts", _OFF, "mixture-of-experts routing is not replayed"),
    ("weight_sync_buffer_size", _ANY, _SHARED),
    ("bundle_indices", _ANY, _SET_BY_TRINITY),
    ("engine_id", _ANY, _SET_BY_TRINITY),
    ("ray_namespace", _ANY, _SET_BY_TRINITY),
    ("ray_actor_name", _ANY, _SET_BY_TRINITY),
    ("sync_method", _ANY, _SHARED),
    ("checkpoint_job_dir", _ANY, _SET_BY_TRINITY),
    ("cuda_visible_devices", _NONE, "set the environment variable CUDA_VISIBLE_DEVICES"),
    ("enable_lora", _OFF, _LORA),
    ("enable_runtime_lora_updating", _OFF, _LORA),
    ("lora_modules", Values(([],)), _LORA),
    ("lora_kwargs", Values(({},)), _LORA),
    ("rope_scaling.**", _NONE, "it is read from the model's own config.json"),
    ("rope_theta", _NONE, "it is read from the model's own config.json"),
]

_ONE_MODEL = "the rollout model is the model that is trained"
_EXPLORER = [
    *[
        Foreign(f"explorer.rollout_model.{key}", accepts, why)
        for key, accepts, why in _ENGINE_KEYS
        if key not in RolloutModelSection.model_fields
    ],
    *[
        Foreign(f"explorer.auxiliary_models.*.{key}", accepts, why)
        for key, accepts, why in _ENGINE_KEYS
    ],
    *[
        Foreign(f"explorer.rollout_model.{key}", Same(f"model.{other}"), _ONE_MODEL)
        for key, other in {
            "model_path": "model_path",
            "max_model_len": "max_model_len",
            "max_response_tokens": "max_response_tokens",
            "temperature": "temperature",
            "top_p": "top_p",
            "top_k": "top_k",
            "enable_thinking": "enable_thinking",
            "chat_template": "custom_chat_template",
        }.items()
    ],
    *_rows("explorer.rollout_model.", "the policy has no other name", _NONE, "name"),
    *_rows("explorer.rollout_model.", "every call is always recorded", _ON, "enable_history"),
    *_rows("explorer.auxiliary_models.*.", "they are never recorded", _OFF, "enable_history"),
    *_rows(
        "explorer.",
        "workflows run in this process",
        _ANY,
        "name",
        "runner_prepare_concurrency",
        "runner_prepare_max_retries",
        "runner_state_report_interval",
        "service_status_check_interval",
        "min_running_model_num",
        "max_repeat_times_per_runner",
        "proxy_port",
        "listen_address",
        "db_url",
    ),
    *_rows("explorer.", _TRAINS, Values(("both",)), "mode"),
    *_rows("explorer.", _TRAINS, _OFF, "bench_on_latest_checkpoint"),
    *_rows("explorer.", "set the environment of this process instead", Values(({},)), "env_vars"),
    *_rows("explorer.", "deprecated; set runner_per_model", _NONE, "runner_num"),
    *_rows(
        "explorer.",
        "the rollouts of a group run concurrently, up to runner_per_model",
        Values(("asynchronous", "multi-threading")),
        "concurrent_mode",
    ),
    *_rows("explorer.dynamic_timeout.", "max_timeout is the limit", _OFF, "enable"),
    *_rows("explorer.", "not read unless dynamic_timeout.enable", _ANY, "dynamic_timeout.**"),
    *_rows("explorer.", "set synchronizer.sync_offset", _ANY, "max_inflight_batches"),
]

_ONE_GPU = "the local trainer is one process on one device"
_TRAINER = [
    # Another name of buffer.total_steps, which tuner.config.load puts there.
    *_rows("trainer.", "it is buffer.total_steps", _ANY, "total_steps"),
    *_rows("trainer.", _ONE_GPU, _ANY, "name", "enable_preview", "trainer_config_path"),
    *_rows("trainer.", _ONE_GPU, Values(("verl",)), "trainer_type"),
    *_rows("trainer.", _ONE_GPU, Values(("fsdp", "fsdp2")), "trainer_strategy"),
    *_rows("trainer.", _ONE_GPU, Values((1,)), "ulysses_sequence_parallel_size"),
    *_rows("trainer.", _ONE_GPU, _OFF, "param_offload", "grad_offload"),
    *_rows("trainer.", _ONE_GPU, _OFF, "offload_policy"),
    *_rows("trainer.", _ONE_GPU, _ANY, "megatron.**"),
    *_rows("trainer.", _ONE_GPU, Values(({},)), "trainer_config"),
    *_rows(
        "trainer.", "every checkpoint is in that format", Values(("always",)), "save_hf_checkpoint"
    ),
    *_rows("trainer.", "micro-batches are cut by max_token_len_per_gpu", _ON, "use_dynamic_bsz"),
    *_rows("trainer.", "it does not change the gradient", _ANY, "use_remove_padding"),
    *_rows("trainer.", "it does not change the gradient", _ANY, "balance_batch"),
    *_rows(
        "trainer.", "the loss does not depend on the split", _ANY, "fix_actor_microbatch_loss_scale"
    ),
    *_rows("trainer.", "checkpoints are written by one process", _ANY, "save_strategy"),
    *_rows("trainer.", "code from a model's folder is not run", _OFF, "trust_remote_code"),
    *_rows("monitor.", "evaluations log their mean", _OFF, "detailed_stats"),
    *_rows("monitor.", "the local backend does not use Ray", _OFF, "enable_ray_timeline"),
    *_rows("monitor.", "monitors write to the run directory", Values(("",)), "cache_dir"),
]

FOREIGN: tuple[Foreign, ...] = tuple(_TOP + _ALGORITHM + _MODEL + _BUFFER + _EXPLORER + _TRAINER)


def find_foreign(path: str) -> Foreign | None:
    """The first row for a key, more special ones being listed before `.**`."""
    return next((row for row in FOREIGN if row.matches(path)), None)
