"""The user's YAML and Python objects become a configuration that Trinity-RFT accepts."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.integration.trinity.conftest import REPOSITORY, TINY
from tuner import AlgorithmConfig, Dataset, TunerModelConfig
from tuner.config.load import read_layers
from tuner.errors import ConfigError, MissingDependencyError
from tuner.tasks.settings import location, settings_of
from tuner.trinity.endpoints import ENGINE_ARGS
from tuner.trinity.handover import CALL_REWARDS, WORKFLOW, checked, install, resolve
from tuner.trinity.workflow import _adapter_folder

CLUSTER = ["cluster.node_num=1", "cluster.gpu_per_node=2"]
SMALL = [f"model.model_path={TINY}", "model.max_model_len=512", *CLUSTER]


async def workflow(task, model): ...


@pytest.fixture
def trinity(tmp_path):
    """Trinity-RFT's own configuration, checked by it, for what `tune()` was given."""

    def make(*overrides, path=None, settings=None, train=None, small=True):
        given = [*(SMALL if small else CLUSTER), f"checkpoint_root_dir={tmp_path}", *overrides]
        resolved = resolve(read_layers(path, settings, given, train=train, backend="trinity"))
        taskset = resolved.tree["buffer"]["explorer_input"]["taskset"]
        taskset["path"] = taskset.get("path") or str(tmp_path)
        return checked(install(resolved, workflow="a:b", judge=None))

    return make


def refusal(*overrides, settings=None):
    with pytest.raises(ConfigError) as caught:
        resolve(read_layers(None, settings, overrides, backend="trinity"))
    return str(caught.value)


def value(config, key):
    for part in key.split("."):
        if isinstance(config, dict):
            config = config[part]
        else:
            config = config[int(part)] if part.isdecimal() else getattr(config, part)
    return config


def test_the_repositorys_file_passes_trinitys_check(trinity):
    config = trinity(path=REPOSITORY / "config.yaml", small=False)
    assert (config.project, config.name) == ("AgentScope", "GSM8K-tiny")
    assert config.algorithm.optimizer.lr == 5e-4  # ${tuner.when_set:...}
    (tasks,) = config.buffer.explorer_input.tasksets
    assert tasks.default_workflow_type == WORKFLOW
    assert tasks.path == str(REPOSITORY / "examples" / "gsm8k" / "data")
    assert config.buffer.explorer_input.eval_tasksets[0].default_workflow_type == WORKFLOW


@pytest.mark.parametrize(
    ("override", "key", "expected"),
    [
        ("mode=explore", "mode", "explore"),
        ("project=p", "project", "p"),
        ("group=g", "group", "g"),
        ("algorithm.algorithm_type=grpo", "algorithm.algorithm_type", "grpo"),
        ("algorithm.repeat_times=5", "algorithm.repeat_times", 5),
        ("algorithm.optimizer.lr=1e-3", "algorithm.optimizer.lr", 1e-3),
        ("algorithm.optimizer.betas=[0.8,0.9]", "algorithm.optimizer.betas", [0.8, 0.9]),
        ("algorithm.kl_loss_fn=k3", "algorithm.kl_loss_fn", "k3"),
        ("algorithm.loss_agg_mode=seq-mean-token-sum", "algorithm.loss_agg_mode",
         "seq-mean-token-sum"),
        ("buffer.batch_size=7", "buffer.batch_size", 7),
        ("buffer.train_batch_size=21", "buffer.train_batch_size", 21),
        ("buffer.total_steps=9", "buffer.total_steps", 9),
        ("trainer.total_steps=11", "trainer.total_steps", 11),
        ("trainer.save_interval=3", "trainer.save_interval", 3),
        ("trainer.grad_clip=0.5", "trainer.grad_clip", 0.5),
        ("trainer.grad_clip=0.5", "algorithm.optimizer.clip_grad", 0.5),
        ("explorer.eval_interval=4", "explorer.eval_interval", 4),
        ("explorer.runner_per_model=3", "explorer.runner_per_model", 3),
        ("explorer.runner_per_model=auto", "explorer.runner_per_model", 16),
        ("explorer.rollout_model.engine_type=auto", "explorer.rollout_model.engine_type", "vllm"),
        ("explorer.rollout_model.engine_num=1", "explorer.rollout_model.engine_num", 1),
        ("explorer.rollout_model.seed=7", "explorer.rollout_model.seed", 7),
        ("explorer.env_vars.KEY=1", "explorer.env_vars", {"KEY": 1}),
        ("model.temperature=0.7", "model.temperature", 0.7),
        ("model.temperature=0.7", "buffer.explorer_input.tasksets.0.rollout_args.temperature",
         0.7),
        ("model.top_p=0.9", "buffer.explorer_input.tasksets.0.rollout_args.top_p", 0.9),
        ("model.top_k=5", "buffer.explorer_input.tasksets.0.rollout_args.top_k", 5),
        ("model.max_response_tokens=20",
         "buffer.explorer_input.tasksets.0.rollout_args.max_tokens", 20),
        ("model.enable_thinking=false", "explorer.rollout_model.enable_thinking", False),
        ("synchronizer.sync_interval=2", "synchronizer.sync_interval", 2),
        ("algorithm.algorithm_type=gspo", "algorithm.loss_agg_mode", "seq-mean-token-mean"),
        ("algorithm.algorithm_type=multi_step_grpo", "algorithm.advantage_fn", CALL_REWARDS),
        ("algorithm.advantage_fn=grpo", "algorithm.advantage_fn", "grpo"),
        *(("algorithm.algorithm_type=gigpo", f"buffer.explorer_input.tasksets.0.{key}", expected)
          for key, expected in (
              ("workflow_args.tuner.states", True),
              ("workflow_args.tuner.experiences", "calls"),
              ("repeat_times", 8),
          )),
        ("explorer.rollout_model.extra_engine_args={max_num_seqs: 4}",
         "explorer.rollout_model.extra_engine_args", {"max_num_seqs": 4, **ENGINE_ARGS}),
    ],
)  # fmt: skip
def test_a_setting_arrives(trinity, override, key, expected):
    assert value(trinity(override), key) == expected


MODEL = {"model_path": str(TINY), "max_model_len": 512}


@pytest.mark.parametrize(
    ("given", "key", "expected"),
    [
        ({"model": TunerModelConfig(**MODEL)}, "model.model_path", str(TINY)),
        ({"model": TunerModelConfig(**MODEL)}, "model.max_model_len", 512),
        ({"model": TunerModelConfig(**MODEL, temperature=0.6)}, "model.temperature", 0.6),
        ({"model": TunerModelConfig(**MODEL, top_p=0.8)}, "model.top_p", 0.8),
        ({"model": TunerModelConfig(**MODEL, max_tokens=33)}, "model.max_response_tokens", 33),
        ({"model": TunerModelConfig(**MODEL, enable_thinking=False)},
         "explorer.rollout_model.enable_thinking", False),
        ({"model": TunerModelConfig(**MODEL, tensor_parallel_size=1)},
         "explorer.rollout_model.tensor_parallel_size", 1),
        ({"model": TunerModelConfig(**MODEL, inference_engine_num=1)},
         "explorer.rollout_model.engine_num", 1),
        ({"model": TunerModelConfig(**MODEL, tool_call_parser="llama3_json")},
         "explorer.rollout_model.tool_call_parser", "llama3_json"),
        ({"model": TunerModelConfig(**MODEL, reasoning_parser="qwen3")},
         "buffer.explorer_input.tasksets.0.workflow_args.tuner.reasoning_parser", "qwen3"),
        ({"algorithm": AlgorithmConfig(algorithm_type="grpo")}, "algorithm.algorithm_type", "grpo"),
        ({"algorithm": AlgorithmConfig(learning_rate=2e-5)}, "algorithm.optimizer.lr", 2e-5),
        ({"algorithm": AlgorithmConfig(group_size=6)}, "algorithm.repeat_times", 6),
        ({"algorithm": AlgorithmConfig(batch_size=12)}, "buffer.batch_size", 12),
        ({"algorithm": AlgorithmConfig(save_interval_steps=5)}, "trainer.save_interval", 5),
        ({"algorithm": AlgorithmConfig(eval_interval_steps=6)}, "explorer.eval_interval", 6),
        ({"project_name": "mine"}, "project", "mine"),
        ({"experiment_name": "this"}, "name", "this"),
        ({"train_dataset": Dataset(path="openai/gsm8k", name="main", split="test")},
         "buffer.explorer_input.tasksets.0.subset_name", "main"),
        ({"train_dataset": Dataset(path="openai/gsm8k", split="test")},
         "buffer.explorer_input.tasksets.0.split", "test"),
        ({"train_dataset": Dataset(path="openai/gsm8k", total_epochs=3)}, "buffer.total_epochs", 3),
        ({"train_dataset": Dataset(path="openai/gsm8k", total_steps=4)}, "buffer.total_steps", 4),
        ({"eval_dataset": Dataset(path="openai/gsm8k", split="test")},
         "buffer.explorer_input.eval_tasksets.0.split", "test"),
        ({"auxiliary_models": {"helper": TunerModelConfig(model_path="Qwen/Qwen3-0.6B",
                                                          max_model_len=256)}},
         "explorer.auxiliary_models.0.name", "helper"),
    ],
)  # fmt: skip
def test_what_is_given_to_tune_arrives(trinity, given, key, expected):
    settings = settings_of(workflow, **given)
    more = ["cluster.gpu_per_node=3"] if "auxiliary_models" in given else []
    base = [] if "model" in given else SMALL
    train = location(given["train_dataset"]) if "train_dataset" in given else None
    config = trinity(*base, *more, settings=settings, train=train, small=False)
    assert value(config, key) == expected


def test_only_what_was_given_changes_the_file(trinity, tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text(
        "algorithm: {repeat_times: 3, optimizer: {lr: 1.0e-4}}\n"
        "explorer: {rollout_model: {gpu_memory_utilization: 0.4}}\n"
    )
    settings = settings_of(
        workflow, config_path=file, algorithm=AlgorithmConfig(learning_rate=2e-5)
    )
    config = trinity(path=file, settings=settings)
    assert config.algorithm.optimizer.lr == 2e-5
    assert config.algorithm.repeat_times == 3
    assert config.explorer.rollout_model.gpu_memory_utilization == 0.4


@pytest.mark.parametrize("algorithm", ["multi_step_grpo", "grpo", "dapo", "gspo", "opmd"])
def test_a_group_is_never_one_rollout_for_want_of_a_setting(trinity, algorithm):
    config = trinity(f"algorithm.algorithm_type={algorithm}")
    assert config.algorithm.repeat_times == 8
    assert config.buffer.explorer_input.tasksets[0].repeat_times == 8


def test_time_limits_and_retries_are_ours_and_trinity_waits_for_all_of_them(trinity):
    config = trinity("explorer.max_timeout=100", "explorer.max_retry_times=3")
    assert config.explorer.max_retry_times == 0
    assert config.explorer.max_timeout == 460
    ours = config.buffer.explorer_input.tasksets[0].workflow_args["tuner"]
    assert (ours["timeout"], ours["max_retries"]) == (100.0, 3)


def test_several_trackers_and_none_between_the_ends(trinity):
    config = trinity("monitor.monitor_type=[tensorboard,wandb]", "explorer.eval_interval=0")
    assert config.monitor.monitor_args["tuner"]["trackers"] == ["tensorboard", "wandb"]
    assert config.explorer.eval_interval >= 10**9


def test_evaluations_are_greedy_unless_said_otherwise(trinity, tmp_path):
    sets = f"buffer.explorer_input.eval_tasksets=[{{name: a, path: {tmp_path}}}, \
        {{name: b, path: {tmp_path}, rollout_args: {{temperature: 0.5}}}}]"
    greedy, warm = trinity(sets).buffer.explorer_input.eval_tasksets
    assert (greedy.rollout_args.temperature, warm.rollout_args.temperature) == (0.0, 0.5)


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("algorithm.learning_rate=1", "did you mean algorithm.optimizer.lr?"),
        ("explorer.runer_per_model=3", "did you mean explorer.runner_per_model?"),
        ("buffer.explorer_input.eval_tasksets=[{pth: a}]",
         "unknown key buffer.explorer_input.eval_tasksets.0.pth; did you mean "
         "buffer.explorer_input.eval_tasksets.0.path?"),
        ("tuner.sed=3", "unknown key tuner.sed; did you mean tuner.seed?"),
        ("algorithm.advantage_fn_args={std_cal_level: none}", "only group and batch"),
        ("algorithm.loss_agg_mode=rollout-mean", "rollout-mean"),
        ("algorithm.advantage_fn=best_of_group", "Trinity-RFT does not have this advantage"),
        ("algorithm.optimizer.lr_scheduler_type=linear", "constant and cosine"),
        ("cluster.ray_address=auto", "any cluster that runs on this machine"),
        ("explorer.rollout_model.enable_openai_api=false", "remove it"),
        ("explorer.rollout_model.engine_type=sglang", "vLLM"),
        ("model.external_model.enable=true", "an actor that it never creates"),
        ("model.repetition_penalty=1.1", "compare two policies"),
        ("model.min_response_tokens=4", "an API without such a limit"),
        ("explorer.rollout_model.ignore_eos=true", "ends answers at their end"),
        ("explorer.rollout_model.extra_engine_args.structured_outputs_config={backend: auto}",
         "which is set here"),
        ("explorer.rollout_model.extra_engine_args.speculative_config={method: ngram}",
         "log-probs of Trinity-RFT's vLLM"),
        ("mode=both3", "Trinity-RFT has both, colocate"),
        ("tuner.deterministic=true", "only the local backend does this"),
        ("buffer.explorer_input.taskset={rollout_args: {temperature: 0.5}}",
         "rollout_args.temperature 0.5, but Trinity-RFT trains at model.temperature 1"),
        ("tuner.algorithm.updates=2", "only the local backend does this"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_there_is_refused_by_name(override, text):
    message = refusal(override)
    assert text in message
    assert override.split("=")[0].split(".")[-1] in message


def test_calls_whose_states_are_compared_are_not_merged():
    merged = "tuner.trinity.experiences=merged"
    assert "tuner.trinity.experiences is merged, but gigpo" in refusal(
        "algorithm.algorithm_type=gigpo", merged
    )
    for other in ("algorithm.algorithm_type=grpo", "algorithm.advantage_fn=grpo"):
        resolve(read_layers(None, None, [other, merged], backend="trinity"))


def test_all_problems_are_reported_together_with_where_they_are(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("algorithm:\n  repeat_time: 3\ntuner:\n  seed: x\n")
    with pytest.raises(ConfigError) as caught:
        resolve(read_layers(file, None, ["buffer.batchsize=2"], backend="trinity"))
    message = str(caught.value)
    assert message.startswith("3 problems")
    assert f"{file}:2: unknown key algorithm.repeat_time; did you mean algorithm.repeat_times?" in (
        message
    )
    assert f"{file}:4: tuner.seed is 'x'" in message
    assert "override 'buffer.batchsize=2'" in message


def test_trinitys_own_message_is_quoted(trinity):
    with pytest.raises(ConfigError, match=r"rejects this configuration: ValueError.*GPU"):
        trinity("explorer.rollout_model.engine_num=8")


def test_an_adapter_is_refused_where_it_would_be_saved_without_weights(trinity, monkeypatch):
    from tuner.trinity import installed

    versions = {"peft": "0.21.2", "trinity-rft": "0.6.0"}
    monkeypatch.setattr(installed.metadata, "version", versions.__getitem__)
    with pytest.raises(MissingDependencyError, match=r"no weights, and 0\.21\.2 is installed"):
        trinity("model.lora_configs=[{lora_rank: 8}]")


def test_an_adapter_passes_trinitys_check_and_can_be_asked_for_by_its_version(trinity):
    config = trinity("model.lora_configs=[{lora_rank: 8, lora_alpha: 16}]")
    model = config.explorer.rollout_model
    assert model.enable_lora
    assert model.enable_runtime_lora_updating
    assert model.lora_kwargs["max_lora_rank"] == 8
    assert model.lora_modules[0]["lora_name"] == "adapter"
    assert config.synchronizer.sync_method.value == "checkpoint"
    assert (Path(_adapter_folder(model, 0)) / "adapter_config.json").is_file()
    assert Path(_adapter_folder(model, 3)) == (
        Path(config.checkpoint_job_dir) / "global_step_3" / "actor" / "lora_adapter"
    )


def test_a_saved_configuration_is_read_back_by_trinity_itself(trinity, tmp_path):
    from trinity.common.config import load_config

    resolved = resolve(
        read_layers(None, None, [*SMALL, f"checkpoint_root_dir={tmp_path}"], backend="trinity")
    )
    resolved.tree["buffer"]["explorer_input"]["taskset"]["path"] = str(tmp_path)
    tree = install(resolved, workflow="pickle:gAWV", judge=None)
    file = tmp_path / "saved.yaml"
    OmegaConf.save(OmegaConf.create(tree), file)
    config = load_config(str(file)).check_and_update()
    ours = config.buffer.explorer_input.tasksets[0].workflow_args["tuner"]
    assert ours["workflow"] == "pickle:gAWV"
    config.save(str(tmp_path / "again.yaml"))


# In the form of Trinity-RFT's examples for agents; what they need of a cluster is declared.
EXAMPLES = {
    "an agent with tools, several engines": """
project: AGENTSCOPE-ReAct
name: GSM8K-Qwen3-8B
checkpoint_root_dir: ${oc.env:TRINITY_CHECKPOINT_ROOT_DIR,./checkpoints}
algorithm: {algorithm_type: multi_step_grpo, repeat_times: 8, optimizer: {lr: 1e-6}}
model: {model_path: Qwen/Qwen3-8B, max_response_tokens: 16384, max_model_len: 24576}
cluster: {node_num: 1, gpu_per_node: 8}
buffer:
  total_epochs: 1
  batch_size: 32
  train_batch_size: 256
  explorer_input:
    taskset:
      name: gsm8k
      storage_type: file
      path: openai/gsm8k
      subset_name: main
      split: train
      format: {prompt_key: question, response_key: answer}
      rollout_args: {temperature: 1.0}
      default_workflow_type: as_react_workflow
    eval_tasksets: []
  trainer_input: {experience_buffer: {name: buf, storage_type: queue}}
explorer:
  eval_interval: 50
  runner_per_model: 16
  max_timeout: 1800
  rollout_model:
    engine_type: vllm
    engine_num: 4
    tensor_parallel_size: 1
    enable_prefix_caching: false
    enforce_eager: true
    enable_openai_api: true
    enable_history: true
    enable_auto_tool_choice: true
    tool_call_parser: hermes
    reasoning_parser: deepseek_r1
    enable_thinking: true
    dtype: bfloat16
    seed: 42
synchronizer: {sync_style: dynamic_by_explorer, sync_method: nccl, sync_interval: 5}
trainer: {trainer_type: verl, save_interval: 100, use_dynamic_bsz: true, grad_clip: 1.0}
monitor: {monitor_type: tensorboard}
""",
    "an environment, with a judge model beside": """
project: EMAIL
name: search
mode: both
algorithm:
  algorithm_type: multi_step_grpo
  repeat_times: 8
  optimizer: {lr: 1e-6}
  advantage_fn_args: {epsilon: 1e-6, std_threshold: 0.0001}
model: {model_path: Qwen/Qwen3-4B, max_model_len: 20480, max_response_tokens: 4096}
cluster: {node_num: 1, gpu_per_node: 8}
buffer:
  total_epochs: 20
  batch_size: 6
  train_batch_size: 288
  explorer_input:
    taskset: {name: t, path: some/enron, workflow_args: {max_turns: 10, tool_limit: 3}}
    eval_tasksets: [{name: e, path: some/enron, split: test, workflow_args: {max_turns: 10}}]
    default_workflow_type: email_search_workflow
  trainer_input:
    experience_buffer:
      name: buf
      storage_type: queue
      replay_buffer: {enable: true, priority_fn: linear_decay, priority_fn_args: {decay: 0.1}}
explorer:
  eval_on_startup: false
  runner_per_model: 16
  max_repeat_times_per_runner: 1
  rollout_model: {engine_num: 4, enable_openai_api: true, enable_history: true}
  auxiliary_models: [{model_path: Qwen/Qwen2.5-7B-Instruct, engine_num: 1, max_model_len: 8192}]
synchronizer: {sync_style: dynamic_by_explorer, sync_interval: 10, sync_timeout: 3600}
trainer: {save_interval: 100, ulysses_sequence_parallel_size: 1}
""",
    "several tasksets and operators": """
project: MIX
name: two-sets
group: g
algorithm: {algorithm_type: grpo, repeat_times: 16, kl_loss_fn: none}
model: {model_path: Qwen/Qwen2.5-1.5B, max_prompt_tokens: 1024, max_response_tokens: 1024}
cluster: {node_num: 2, gpu_per_node: 8, ray_address: "10.0.0.1:6379"}
data_processor:
  experience_pipeline:
    operators: [{name: reward_shaping_mapper, args: {reward_shaping_configs: []}}]
buffer:
  batch_size: 64
  total_steps: 100
  explorer_input:
    tasksets:
      - {name: a, path: some/a, data_selector: {selector_type: shuffle, seed: 3}}
      - {name: b, path: some/b}
explorer: {runner_per_model: 8, rollout_model: {engine_num: 2, tensor_parallel_size: 4}}
synchronizer: {sync_method: nccl, sync_interval: 2}
""",
    "rollouts alone, for a trainer elsewhere": """
mode: explore
project: SPLIT
name: explorer
algorithm: {algorithm_type: grpo, repeat_times: 8}
model: {model_path: Qwen/Qwen2.5-1.5B-Instruct, max_model_len: 2048}
cluster: {node_num: 1, gpu_per_node: 1}
buffer:
  batch_size: 16
  explorer_input: {taskset: {name: a, path: some/a}}
  trainer_input:
    experience_buffer: {name: buf, storage_type: sql, path: "sqlite:////tmp/buf.db"}
explorer: {rollout_model: {engine_num: 1}}
synchronizer: {sync_method: checkpoint, sync_interval: 10}
""",
    "one GPU for everything": """
mode: colocate
project: ONE
name: gpu
algorithm: {algorithm_type: gspo, repeat_times: 8, policy_loss_fn_args: {clip_range_low: 0.0003}}
model: {model_path: Qwen/Qwen2.5-0.5B-Instruct, max_model_len: 2048}
cluster: {node_num: 1, gpu_per_node: 1}
buffer: {batch_size: 16, explorer_input: {taskset: {name: a, path: some/a}}}
explorer: {rollout_model: {engine_num: 1, gpu_memory_utilization: 0.2}}
synchronizer: {sync_method: memory}
trainer: {use_dynamic_bsz: true, max_token_len_per_gpu: 16384}
""",
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_files_in_trinitys_own_form_pass_its_check(name, tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text(EXAMPLES[name])
    resolved = resolve(
        read_layers(file, None, [f"checkpoint_root_dir={tmp_path}"], backend="trinity")
    )
    before = OmegaConf.to_container(OmegaConf.load(file), resolve=True)
    config = checked(install(resolved, workflow="a:b", judge=None))
    assert config.algorithm.repeat_times == before["algorithm"]["repeat_times"]
    assert config.buffer.batch_size == before["buffer"]["batch_size"]
    assert Path(config.checkpoint_job_dir) == resolved.run_dir
    for tasks in config.buffer.explorer_input.tasksets:
        assert tasks.default_workflow_type == WORKFLOW


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["algorithm.policy_loss_fn_args={clip_range_high: 0.28}"],
            {"clip_range": 0.2, "clip_range_high": 0.28, "clip_ratio_c": 3.0},
        ),
        (
            ["algorithm.algorithm_type=gspo", "algorithm.policy_loss_fn_args={clip_range: 0.1}"],
            {"clip_range": 0.1},
        ),
    ],
)
def test_one_number_of_a_part_leaves_its_others_as_they_are(trinity, overrides, expected):
    from trinity.algorithm import POLICY_LOSS_FN

    algorithm = trinity(*overrides).algorithm
    args = algorithm.policy_loss_fn_args
    assert {**args, **expected} == args
    POLICY_LOSS_FN.get(algorithm.policy_loss_fn)(**args)  # Trinity-RFT's trainer does this
