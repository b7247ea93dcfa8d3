"""`explorer.*`, `model.*`, `synchronizer.*`, `tuner.engine.*`: who answers, and what with."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from tuner.config.section import Arguments, Section, null_is

EngineType = Literal["transformers", "vllm", "sglang"]

DEFAULT_RANK = 32
DEFAULT_ALPHA = 32
DEFAULT_TARGETS = "all-linear"

WHERE = ("spread", "uncertain", "best")
_FUNCTION = re.compile(r"[^:]+:[^:]+")

_OF_PATH = "or that of the adapter at `path`"
TOOL_CALL_PARSER = "Reads tool calls out of the model's text; null leaves the text as it is."
REASONING_PARSER = "Reads `<think>` out of the model's text; null leaves the text as it is."

# What the policy and auxiliary models are both asked.
TopK = Annotated[int, Field(ge=-1, description="Keep the k most probable tokens; -1 keeps all.")]
ResponseTokens = Annotated[
    int | None,
    Field(ge=1, description="Tokens for one answer; not set: the room left in the context."),
]
Thinking = Annotated[
    bool | None, Field(description="Given to the chat template; null leaves it to the template.")
]
ChatTemplate = Annotated[str | None, Field(description="A chat template of your own, as text.")]


class RolloutModelSection(Section):
    """`explorer.rollout_model.*`: the policy as the agents see it, and what generates."""

    engine_type: EngineType | Literal["auto"] = Field(
        default="auto",
        description="What generates: transformers on the trainer's own weights, or vLLM or SGLang "
        "with a copy. `auto` is vLLM on a GPU where it is installed and can do what the other "
        "settings ask for, else transformers, and says why ([engines](engines.md)).",
    )
    engine_num: int = Field(
        default=1, ge=1, description="Servers that are started. For vllm; otherwise 1."
    )
    tensor_parallel_size: int = Field(
        default=1, ge=1, description="GPUs of one engine. For vllm; otherwise 1."
    )
    gpu_memory_utilization: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Part of a GPU's memory for one engine. For vllm. Not set: what the trainer "
        "leaves where they share the GPU, else vLLM's own.",
    )
    enforce_eager: bool = Field(
        default=False,
        description="Do not capture CUDA graphs. For vllm and transformers.",
    )
    extra_engine_args: Arguments = Field(
        default_factory=dict,
        description="Further arguments of vLLM's `AsyncEngineArgs`, by name. For vllm.",
    )
    tool_call_parser: str | None = Field(default="hermes", description=TOOL_CALL_PARSER)
    reasoning_parser: str | None = Field(default="deepseek_r1", description=REASONING_PARSER)


class AuxiliaryModelSection(Section):
    """`explorer.auxiliary_models[]`: a frozen model for workflows and judges, served here."""

    name: str = Field(min_length=1, description="Key in the functions' `auxiliary_models`.")
    model_path: str = Field(min_length=1, description="As `model.model_path`.")
    max_model_len: int | None = Field(default=None, ge=2, description="As `model.max_model_len`.")
    temperature: float = Field(default=1.0, ge=0, description="Sampling temperature; 0 is greedy.")
    top_p: float = Field(default=1.0, gt=0, le=1, description="Nucleus mass; 1 keeps every token.")
    top_k: TopK = -1
    max_response_tokens: ResponseTokens = None
    enable_thinking: Thinking = None
    chat_template: ChatTemplate = None
    tool_call_parser: str | None = Field(default="hermes", description=TOOL_CALL_PARSER)
    reasoning_parser: str | None = Field(default="deepseek_r1", description=REASONING_PARSER)


class OverRolloutSection(Section):
    """`explorer.over_rollout.*`: ending the slowest groups early."""

    ratio: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Share of a step's tasks that need not be waited for: once all others are "
        "complete, the rollouts that are left are ended. 0: all are waited for.",
    )
    wait_after_min: float = Field(
        default=30.0, ge=0, description="Seconds that those that are left are given then."
    )
    return_partial_tasks: bool = Field(
        default=False,
        description="Train the rollouts that a task had finished, or leave its group out.",
    )


class ExplorerSection(Section):
    """`explorer.*`"""

    runner_per_model: int = Field(
        default=8, ge=1, description="Rollouts that run at the same time."
    )
    max_timeout: float = Field(
        default=1800, gt=0, description="Seconds for one attempt at a rollout."
    )
    max_retry_times: int = Field(
        default=2,
        ge=0,
        description="Further attempts after a failure or timeout, each from the start.",
    )
    over_rollout: OverRolloutSection = OverRolloutSection()
    rollout_model: RolloutModelSection = RolloutModelSection()
    auxiliary_models: tuple[AuxiliaryModelSection, ...] = Field(
        default=(), description="Frozen models, each with the keys below."
    )
    eval_interval: int = Field(
        default=100, ge=0, description="Evaluate after every so many steps; 0: only at both ends."
    )
    eval_on_startup: bool = Field(default=True, description="Evaluate before the first step.")


class SynchronizerSection(Section):
    """`synchronizer.*`"""

    sync_offset: int = Field(
        default=0,
        ge=0,
        description="Steps by which collection may run ahead of training "
        "([asynchronous](asynchronous.md)): a token is trained at most so many updates after the "
        "one whose weights sampled it. 0: collection and training take turns.",
    )


class RaySection(Section):
    """`tuner.ray.*`: workers on the machines of a Ray cluster, where `tuner.workers` is `ray`."""

    workers: int | None = Field(
        default=None,
        ge=1,
        description="How many. Not set: as many as the cluster has room for when the run begins, "
        "and no more than `explorer.runner_per_model`.",
    )
    cpus: float = Field(default=1.0, gt=0, description="CPUs of each, as Ray counts them.")
    resources: Annotated[dict[str, Annotated[float, Field(gt=0)]], null_is(dict)] = Field(
        default_factory=dict,
        description="What else each asks for, by the names that Ray's machines were given "
        "(`ray start --resources`).",
    )
    runtime_env: Arguments = Field(
        default_factory=dict,
        description="Ray's runtime environment: `working_dir`, `pip`, `env_vars` and what else it "
        "knows.",
    )
    gateway: str | None = Field(
        default=None,
        pattern=r"^(\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+)(:\d{1,5})?$",
        description="Address of this machine at which the workers find the gateway, with a port or "
        "without (`10.0.0.1`, `10.0.0.1:8700`): it listens there while the run lasts, and every "
        "request needs its rollout's key. Needed for `ray`.",
    )
    base_url: str | None = Field(
        default=None,
        pattern=r"^https?://\S+/v1$",
        description="What the workers ask instead, where a proxy is before the gateway "
        "(`https://trainer.example/v1`).",
    )

    def problems(self, address: str | None, *, own_models: bool) -> Iterator[str]:
        """What lacks or does not go together where `tuner.workers` is `ray`.

        Args:
            address: `cluster.ray_address`.
            own_models: Whether frozen models are served here.
        """
        if address in (None, "auto", "local"):
            yield (
                f"tuner.workers is ray, and cluster.ray_address is {address}: write the cluster's "
                "address, host:port"
            )
        if self.gateway is None:
            yield (
                "tuner.workers is ray, and tuner.ray.gateway is not set: write an address of this "
                "machine that the workers' machines reach"
            )
        elif self.gateway.partition(":")[0] == "0.0.0.0" and self.base_url is None:
            yield (
                f"tuner.ray.gateway is {self.gateway}, which is no address to be reached at: write "
                "this machine's, or what the workers ask as tuner.ray.base_url"
            )
        if self.base_url is not None and own_models:
            yield (
                "tuner.ray.base_url is set, but explorer.auxiliary_models each have a door of "
                "their own: remove it, or serve them elsewhere (tuner.auxiliary_models)"
            )


class EngineSection(Section):
    """`tuner.engine.*`: vLLM and SGLang servers, beyond what `explorer.rollout_model` says."""

    urls: tuple[str, ...] = Field(
        default=(),
        description="Servers that run elsewhere ([engines](engines.md)), as in "
        "`http://10.0.0.2:8100`. Not set: vLLM is started here; SGLang is not.",
    )
    api_key_env: str = Field(
        default="TUNER_ENGINE_KEY",
        min_length=1,
        description="Environment variable that holds the key of the servers at `urls`. SGLang's "
        "may have none.",
    )
    max_restarts: int = Field(
        default=3,
        ge=0,
        description="How often servers that died are started again, in all; then the run fails.",
    )

    weights: Literal["auto", "cuda_ipc", "nccl", "shared_memory", "disk"] = Field(
        default="auto",
        description="How new weights get to vLLM ([engines](engines.md)): read out of the GPU that "
        "both use (`cuda_ipc`), broadcast to other GPUs (`nccl`), or as a checkpoint in "
        "`shared_memory` or on `disk`. `auto` is the fastest that is possible, and says why.",
    )
    sleep: bool | None = Field(
        default=None,
        description="Whether vLLM gives the GPU's memory to the trainer during an update, where "
        "they share one. Not set: yes, unless collection runs ahead of training "
        "(`synchronizer.sync_offset`).",
    )

    @field_validator("urls")
    @classmethod
    def _are_urls(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for url in value:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"{url!r} does not start with http:// or https://")
        return value


class LoraSection(Section):
    """`model.lora_configs[]`: the adapter that is trained."""

    path: str | None = Field(
        default=None,
        min_length=1,
        description="Folder or Hub name of an adapter to start from; the reference is then the "
        "model with this adapter. Not set: a new one, which changes nothing until it is trained.",
    )
    base_model_name: str | None = Field(
        default=None,
        min_length=1,
        description="What adapters call the model they belong to: compared with the one at `path`, "
        "and written into checkpoints. Not set: `model.model_path`.",
    )
    lora_rank: int | None = Field(
        default=None, ge=1, description=f"Rank. Not set: {DEFAULT_RANK}, {_OF_PATH}."
    )
    lora_alpha: int | None = Field(
        default=None,
        ge=1,
        description="The adapter's part is multiplied by lora_alpha / lora_rank. Not set: "
        f"{DEFAULT_ALPHA}, {_OF_PATH}.",
    )
    lora_dtype: Literal["auto", "float32"] = Field(
        default="auto", description="Type of the adapter's weights; `auto` is float32."
    )
    target_modules: str | tuple[str, ...] | None = Field(
        default=None,
        description="Which layers get an adapter: `all-linear` (all but the output layer), a list "
        "of names or ends of names, or a regular expression for whole names. Not set: "
        f"`{DEFAULT_TARGETS}`, {_OF_PATH}.",
    )
    exclude_modules: str | tuple[str, ...] | None = Field(
        default=None,
        description="Layers among those that get none: a list of names or ends of names, or a "
        "regular expression for whole names.",
    )

    @field_validator("target_modules", "exclude_modules")
    @classmethod
    def _names_something(cls, value: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        if value is not None and (not value or any(not name for name in value)):
            raise ValueError("must name at least one layer; remove it for the default")
        return value


class ModelSection(Section):
    """`model.*`: the policy."""

    model_path: str = Field(
        default="",
        description="A causal language model: a Hugging Face folder or Hub name, a GGUF file, or "
        "`package:NAME` ([model paths](models.md#model-paths)). Not set: the tiny model that comes "
        "with tuner.",
    )
    critic_model_path: str = Field(
        default="",
        description="The model that ppo's critic starts from, as `model.model_path`, with the "
        "tokenizer of the policy. Not set: `model.model_path`.",
    )
    max_model_len: int | None = Field(
        default=None,
        ge=2,
        description="Tokens of prompt and answer together; not set: the model's own, less where "
        "its RoPE frequencies depend on length (`longrope`, `dynamic`).",
    )
    max_response_tokens: ResponseTokens = None
    temperature: float = Field(
        default=1.0, gt=0, description="Sampling temperature while training."
    )
    top_p: float = Field(default=1.0, gt=0, le=1, description="Nucleus mass; 1 keeps every token.")
    top_k: TopK = -1
    enable_thinking: Thinking = None
    custom_chat_template: ChatTemplate = None
    chat_template_path: Path | None = Field(
        default=None, description="The same from a file; set one of the two at most."
    )
    lora_configs: tuple[LoraSection, ...] = Field(
        default=(),
        description="Train a LoRA adapter with the keys below ([training](training.md#lora)), one "
        "at most. Not set: all weights are trained.",
    )

    @field_validator("lora_configs", mode="before")
    @classmethod
    def _one_at_most(cls, value: Any) -> Any:
        if isinstance(value, (list, tuple)) and len(value) > 1:
            raise ValueError("one adapter is trained at most; keep one of them")
        return () if value is None else value

    @property
    def lora(self) -> LoraSection | None:
        """The adapter that is trained; None where all weights are."""
        return self.lora_configs[0] if self.lora_configs else None


class BranchingSection(Section):
    """`tuner.branching.*`: how the `algorithm.repeat_times` rollouts of a task are divided."""

    ends: int = Field(
        default=4,
        ge=2,
        description="Rollouts that go on from each point, the one that is branched from included. "
        "Not with `best`, which chooses it.",
    )
    trunks: int | None = Field(
        default=None,
        ge=2,
        description="Rollouts that start at the beginning. Not set: `repeat_times` / `ends`, at "
        "least 2. Not with `best`.",
    )
    where: str = Field(
        default="spread",
        description="Where the others begin: anywhere (`spread`), at calls before which the model "
        "was unsure (`uncertain`), where earlier steps have shown that it pays, nowhere included "
        "(`best`), or as a function says (`package.module:function`, `path/file.py:function`; "
        "[branching](branching.md)).",
    )
    inside: bool = Field(
        default=False,
        description="Whether they may begin inside an answer. Else before one.",
    )
    rounds: int = Field(
        default=1,
        ge=1,
        description="Further rollouts begin in so many rounds; from the second on also inside "
        "those of the round before.",
    )
    on_divergence: Literal["drop", "sample"] = Field(
        default="drop",
        description="An agent that asks for something else than it did before the point: the "
        "rollout ends and is left out (`drop`), or goes on from there (`sample`).",
    )
    seed_functions: bool = Field(
        default=False,
        description="Set the random states of Python, NumPy and PyTorch before each rollout, to "
        "the same for those with one beginning. Needs `explorer.runner_per_model: 1`.",
    )

    @field_validator("where")
    @classmethod
    def _known(cls, value: str) -> str:
        if value == "open":
            raise ValueError("open was removed: set it to best, or to spread")
        if value not in WHERE and not _FUNCTION.fullmatch(value):
            raise ValueError(f"Input should be {', '.join(WHERE)} or module:function")
        return value
