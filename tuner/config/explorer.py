"""`explorer.*`: running workflows and generating their answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from tuner.config.lora import LoraSection
from tuner.config.section import Section
from tuner.config.synchronizer import OverRolloutSection

TOOL_CALL_PARSER = "Reads tool calls out of the model's text; null leaves the text as it is."
REASONING_PARSER = "Reads `<think>` out of the model's text; null leaves the text as it is."


class RolloutModelSection(Section):
    """`explorer.rollout_model.*`: the policy as the agents see it, and what generates."""

    engine_type: Literal["transformers", "vllm", "sglang"] = Field(
        default="transformers",
        description="What generates: transformers on the trainer's own weights, or vLLM or SGLang "
        "with a copy ([engines](engines.md)).",
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
        description="Do not capture CUDA graphs. For vllm; transformers captures none.",
    )
    extra_engine_args: dict[str, Any] = Field(
        default_factory=dict,
        description="Further arguments of vLLM's `AsyncEngineArgs`, by name. For vllm.",
    )
    tool_call_parser: str | None = Field(default="hermes", description=TOOL_CALL_PARSER)
    reasoning_parser: str | None = Field(default="deepseek_r1", description=REASONING_PARSER)

    @field_validator("extra_engine_args", mode="before")
    @classmethod
    def _from_nothing(cls, value: Any) -> Any:
        return {} if value is None else value


class AuxiliaryModelSection(Section):
    """`explorer.auxiliary_models[]`: a frozen model for workflows and judges, served here."""

    name: str = Field(min_length=1, description="Key in the functions' `auxiliary_models`.")
    model_path: str = Field(min_length=1, description="As `model.model_path`.")
    max_model_len: int | None = Field(default=None, ge=2, description="As `model.max_model_len`.")
    temperature: float = Field(default=1.0, ge=0, description="Sampling temperature; 0 is greedy.")
    top_p: float = Field(default=1.0, gt=0, le=1, description="Nucleus mass; 1 keeps every token.")
    top_k: int = Field(
        default=-1, ge=-1, description="Keep the k most probable tokens; -1 keeps all."
    )
    max_response_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Tokens for one answer; not set: the room left in the context.",
    )
    enable_thinking: bool | None = Field(
        default=None, description="Given to the chat template; null leaves it to the template."
    )
    chat_template: str | None = Field(
        default=None, description="A chat template of your own, as text."
    )
    tool_call_parser: str | None = Field(default="hermes", description=TOOL_CALL_PARSER)
    reasoning_parser: str | None = Field(default="deepseek_r1", description=REASONING_PARSER)


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


class ModelSection(Section):
    """`model.*`: the policy."""

    model_path: str = Field(
        default="",
        description="Folder or Hub name of a Hugging Face causal language model. Not set: the tiny "
        "model that is shipped with the repository.",
    )
    critic_model_path: str = Field(
        default="",
        description="Folder or Hub name of the model that ppo's critic starts from, with the "
        "tokenizer of the policy. Not set: `model.model_path`.",
    )
    max_model_len: int | None = Field(
        default=None,
        ge=2,
        description="Tokens of prompt and answer together; not set: the model's own.",
    )
    max_response_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Tokens for one answer; not set: the room left in the context.",
    )
    temperature: float = Field(
        default=1.0, gt=0, description="Sampling temperature while training."
    )
    top_p: float = Field(default=1.0, gt=0, le=1, description="Nucleus mass; 1 keeps every token.")
    top_k: int = Field(
        default=-1, ge=-1, description="Keep the k most probable tokens; -1 keeps all."
    )
    enable_thinking: bool | None = Field(
        default=None, description="Given to the chat template; null leaves it to the template."
    )
    custom_chat_template: str | None = Field(
        default=None, description="A chat template of your own, as text."
    )
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
