"""`buffer.trainer_input.*`: recorded data, for algorithms that make no rollouts."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tuner.config.section import Section


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
