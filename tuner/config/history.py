"""`tuner.history.*`: rollouts that were recorded before, as what a run learns from."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from tuner.config.section import Arguments, Section, null_is

Names = Annotated[tuple[str, ...], null_is(tuple)]


class HistorySection(Section):
    """`tuner.history.*`: which recorded rollouts a run learns from; with it `mode` is `train`."""

    sources: Names = Field(
        default=(),
        description="Run directories, files of traces, folders of them, a server's "
        "`serving.sqlite`, or logs without tokens ([history](history.md)). `tuner train` sets it.",
    )
    held_out: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Share of the tasks that is not trained and whose loss is logged, chosen by a "
        "hash of each task.",
    )
    min_reward: float | None = Field(
        default=None,
        allow_inf_nan=False,
        description="Rollouts with a smaller one are left out.",
    )
    max_reward: float | None = Field(
        default=None, allow_inf_nan=False, description="Those with a larger one are."
    )
    after: str | None = Field(
        default=None,
        description="Rollouts that began before this are left out: a date or time in ISO 8601, in "
        "UTC where it names no zone, or Unix seconds.",
    )
    before: str | None = Field(
        default=None, description="Those that began at this time or later are."
    )
    min_version: int | None = Field(
        default=None,
        ge=0,
        description="Rollouts with a token of weights that had seen fewer updates are left out.",
    )
    max_version: int | None = Field(
        default=None, ge=0, description="Those with a token of weights that had seen more are."
    )
    min_step: int | None = Field(
        default=None, ge=0, description="Rollouts of earlier steps of their run are left out."
    )
    max_step: int | None = Field(default=None, ge=0, description="Those of later steps are.")
    split: str | None = Field(
        default=None,
        min_length=1,
        description="Whose rollouts: the name of an evaluation set. Not set: those that were for "
        "training, and served sessions.",
    )
    roles: Names = Field(
        default=(), description="Only calls of these roles are trained. Not set: of all."
    )
    outcomes: Names = Field(
        default=(), description="Only rollouts that ended like this. Not set: all."
    )
    tags: Names = Field(
        default=(), description="Only served sessions with all of these tags. Not set: any."
    )
    metadata: Arguments = Field(
        default_factory=dict,
        description="Only rollouts with these values in the metadata of their session, or in their "
        "task.",
    )
    best: int = Field(
        default=1, ge=1, description="How many rollouts of a task are imitated, the best. For sft."
    )
    pairs: Literal["best", "all"] = Field(
        default="best",
        description="Which rollouts of a task are a pair: the best and the worst, or any two with "
        "different rewards. For dpo.",
    )
    min_gap: float = Field(
        default=0.0,
        ge=0,
        allow_inf_nan=False,
        description="Pairs whose rewards differ by less are none. For dpo.",
    )
    min_effective_samples: float = Field(
        default=0.3,
        ge=0,
        le=1,
        description="The run stops before an update for which the tokens are worth a smaller share "
        "of as many new ones ([history](history.md#how-far-the-weights-may-go)); 0: never. Not for "
        "sft and dpo.",
    )

    @field_validator("after", "before")
    @classmethod
    def _is_a_time(cls, value: str | None) -> str | None:
        if value is not None:
            unix_seconds(value)
        return value

    @field_validator("after", "before", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        return value.isoformat() if hasattr(value, "isoformat") else value


def unix_seconds(text: str) -> float:
    """A time of `tuner.history` in Unix seconds.

    Raises:
        ValueError: It is neither a number nor a time in ISO 8601.
    """
    try:
        return float(text)
    except ValueError:
        pass
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(
            f"{text!r} is no time: write 2026-11-24, 2026-11-24T18:00+01:00 or Unix seconds"
        ) from None
    return (found if found.tzinfo is not None else found.replace(tzinfo=UTC)).timestamp()
