"""`buffer.*`: which tasks or recorded data, in which order, how many for each step."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tuner.config.section import Section, null_is


class DataSelector(Section):
    """`data_selector.*`: the order of the tasks."""

    selector_type: Literal["sequential", "shuffle"] = Field(
        default="sequential", description="`shuffle` draws a new order for each epoch."
    )
    seed: int = Field(default=42, description="Seed of `shuffle`.")


class FormatSection(Section):
    """`buffer.trainer_input.experience_buffer.format.*`: the columns of recorded data."""

    prompt_type: Literal["messages", "plaintext"] | None = Field(
        default=None,
        description="`messages`: a list of messages; `plaintext`: text. Not set: `messages` where "
        "a row has `messages_key`, else `plaintext`.",
    )
    messages_key: str = Field(
        default="messages",
        min_length=1,
        description="Messages: for sft the conversation, for dpo what both answers follow. "
        "Trinity-RFT's default is `message`.",
    )
    prompt_key: str = Field(
        default="prompt", min_length=1, description="What the user says, where it is text."
    )
    response_key: str = Field(
        default="response", min_length=1, description="What the assistant answers. For sft."
    )
    system_prompt_key: str | None = Field(
        default=None, min_length=1, description="The system prompt, where it is text."
    )
    system_prompt: str | None = Field(
        default=None, description="One system prompt for all rows; `system_prompt_key` wins."
    )
    tools_key: str = Field(
        default="tools", min_length=1, description="Tools, as a list or as JSON text."
    )
    chosen_key: str = Field(default="chosen", min_length=1, description="The better end. For dpo.")
    rejected_key: str = Field(
        default="rejected", min_length=1, description="The worse end. For dpo."
    )
    enable_concatenated_multi_turn: bool = Field(
        default=True,
        description="Train every assistant turn of a conversation; false: the last message only, "
        "which is Trinity-RFT's default. For sft.",
    )


class ExperienceBufferSection(Section):
    """`buffer.trainer_input.experience_buffer.*`: read with `mode: train` only."""

    path: str | None = Field(
        default=None,
        min_length=1,
        description="Recorded data, as a taskset's `path`. Read with `mode: train` only.",
    )
    split: str = Field(default="train", min_length=1, description="As a taskset's.")
    subset_name: str | None = Field(default=None, min_length=1, description="As a taskset's.")
    format: FormatSection = FormatSection()
    data_selector: DataSelector = DataSelector()


class TrainerInput(Section):
    """`buffer.trainer_input.*`"""

    experience_buffer: ExperienceBufferSection = ExperienceBufferSection()


class RolloutArgs(Section):
    """`rollout_args.*` of the training tasks: how answers are sampled; not set: as `model.*`."""

    temperature: float | None = Field(
        default=None, ge=0, description="Sampling temperature; not set: `model.temperature`."
    )
    top_p: float | None = Field(default=None, gt=0, le=1, description="Not set: `model.top_p`.")
    top_k: int | None = Field(default=None, ge=-1, description="Not set: `model.top_k`.")
    max_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Tokens for one answer; not set: `model.max_response_tokens`.",
    )


class EvalRolloutArgs(RolloutArgs):
    """`rollout_args.*` of an evaluation set; greedy unless said otherwise."""

    temperature: float | None = Field(
        default=0.0,
        ge=0,
        description="Sampling temperature. 0 is greedy, unlike Trinity-RFT, which evaluates at "
        "the training temperature; null does that here too.",
    )


class _TasksetBase(Section):
    path: str | None = Field(
        default=None,
        min_length=1,
        description="A folder, a .json, .jsonl, .csv or .parquet file, or a name on the Hugging "
        "Face Hub. Relative paths start at the folder of the configuration file.",
    )
    split: str = Field(
        default="train", min_length=1, description="Split: `train` means `train.jsonl`."
    )
    subset_name: str | None = Field(
        default=None, min_length=1, description="Subset, where the dataset has several."
    )


class TasksetSection(_TasksetBase):
    """`buffer.explorer_input.taskset.*`: the training tasks."""

    name: str = Field(default="train", min_length=1, description="A name for people.")
    rollout_args: RolloutArgs = RolloutArgs()
    data_selector: DataSelector = DataSelector()


class EvalTasksetSection(_TasksetBase):
    """`buffer.explorer_input.eval_tasksets[]`: tasks that are never trained on."""

    name: str = Field(
        default="eval",
        min_length=1,
        pattern=r"^[\w.-]+$",
        description="Names the set in metrics and results; `train` is taken.",
    )
    split: str = Field(
        default="test", min_length=1, description="Split: `test` means `test.jsonl`."
    )
    repeat_times: int = Field(
        default=1,
        ge=1,
        description="Rollouts of each task, n. From 2 on the metrics have `pass_at_<n>` and "
        "`pass_hat_<n>` too, and the temperature must not be 0 ([commands](commands.md)).",
    )
    rollout_args: EvalRolloutArgs = EvalRolloutArgs()


class ExplorerInput(Section):
    """`buffer.explorer_input.*`"""

    taskset: TasksetSection = TasksetSection()
    eval_tasksets: Annotated[tuple[EvalTasksetSection, ...], null_is(tuple)] = Field(
        default=(), description="Sets for evaluation, each with the keys below."
    )


class BufferSection(Section):
    """`buffer.*`"""

    batch_size: int = Field(
        default=32,
        ge=1,
        description="Tasks in one step, or rows of recorded data. Trinity-RFT's default is 1, "
        "AgentScope's 32.",
    )
    total_epochs: int = Field(default=1, ge=1, description="How often to go through the tasks.")
    total_steps: int | None = Field(
        default=None,
        ge=1,
        description="Steps to run, going through the tasks as often as that takes; wins over "
        "`total_epochs`. `trainer.total_steps` says the same.",
    )
    explorer_input: ExplorerInput = ExplorerInput()
    trainer_input: TrainerInput = TrainerInput()
