"""`model.lora_configs[]`: train a low-rank adapter and leave the model's own weights alone."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from tuner.config.section import Section

DEFAULT_RANK = 32
DEFAULT_ALPHA = 32
DEFAULT_TARGETS = "all-linear"

_OF_PATH = "or that of the adapter at `path`"


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
