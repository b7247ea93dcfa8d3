"""`tuner.serving.*`: read by `tuner serve` alone."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from tuner.config.section import Section, null_is


class PromotionSection(Section):
    """`tuner.serving.promotion.*`: when new weights serve, with `tuner serve --train`."""

    by: Literal["held_out", "live", "both", "always"] = Field(
        default="held_out",
        description="What proves that a candidate is better: the evaluation sets "
        "(`buffer.explorer_input.eval_tasksets`), new sessions that are given to it (`live`), the "
        "first and then the second (`both`), or nothing (`always`: each update serves at once).",
    )
    effect: float = Field(
        default=0.05,
        gt=0,
        allow_inf_nan=False,
        description="The gain in mean reward that a comparison is planned for: a candidate of "
        "which it is proven that it gains less is not promoted.",
    )
    level: float = Field(
        default=0.05,
        gt=0,
        lt=0.5,
        description="Probability with which a candidate that is not better is promoted, at most, "
        "however often one looks.",
    )
    margin: float = Field(
        default=0.0,
        allow_inf_nan=False,
        description="By how much a candidate must at least be better; below 0: by how much it may "
        "be worse.",
    )
    reward_range: tuple[float, float] = Field(
        default=(0.0, 1.0),
        description="Between which bounds every reward is; one outside of them stops learning.",
    )

    @field_validator("reward_range")
    @classmethod
    def _rises(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not value[0] < value[1]:
            raise ValueError("Input should be two numbers, the smaller one first")
        return value

    @model_validator(mode="after")
    def _go_together(self) -> PromotionSection:
        width = self.reward_range[1] - self.reward_range[0]
        if not -width < self.margin < self.effect < width:
            raise ValueError(
                f"margin {self.margin:g} should be below effect {self.effect:g}, and both "
                f"differences of rewards in reward_range, of less than {width:g}"
            )
        return self


class ServingSection(Section):
    """`tuner.serving.*`: a server's keys, limits and what it keeps."""

    admin_key_env: str = Field(
        default="TUNER_ADMIN_KEY",
        min_length=1,
        description="Environment variable that holds the admin key. Where it is not set one is "
        "made for this start and printed, on loopback only.",
    )
    allowed_hosts: Annotated[tuple[str, ...], null_is(tuple)] = Field(
        default=(),
        description="Names that requests may have in `Host` besides those of loopback, without a "
        "port: those of the reverse proxy, or of the machine.",
    )
    session_header: str = Field(
        default="x-tuner-session",
        pattern=r"^[A-Za-z0-9-]+$",
        description="Header in which an application's requests may name their session (a name of "
        "its own for each conversation), and in which answers say its id.",
    )
    max_body_bytes: int = Field(
        default=32 * 1024 * 1024, ge=1024, description="Bytes of a request's body."
    )
    requests_per_minute: int | None = Field(
        default=None,
        ge=1,
        description="Requests with one key in a minute, as many at once as in ten seconds; more "
        "get 429 with `Retry-After`. Not set: any number.",
    )
    idle_minutes: float | None = Field(
        default=None,
        gt=0,
        description="Minutes after which a session without a call ends by itself. Not set: never.",
    )
    keep_days: float | None = Field(
        default=None,
        gt=0,
        description="Days after which ended sessions are deleted. Not set: never.",
    )
    redact: str | None = Field(
        default=None,
        description="What is not to be stored: `package.module:function` or "
        "`path/file.py:function`, which takes a list of messages and returns the list as it is "
        "stored. A call that it changes is stored without token ids, and never trained.",
    )
    log: bool = Field(
        default=True,
        description="Write a line of JSON for each request to the standard error, without contents "
        "and keys.",
    )
    promotion: PromotionSection = PromotionSection()
    canary: float = Field(
        default=0.2,
        gt=0,
        lt=1,
        description="Share of new sessions that a candidate gets, with `promotion.by` `live` or "
        "`both`.",
    )
    max_staleness: int = Field(
        default=1,
        ge=0,
        description="Promotions by which the weights that sampled a token may be older than those "
        "that serve; older tokens are not trained, and counted.",
    )

    @field_validator("allowed_hosts", mode="before")
    @classmethod
    def _one_or_many(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value
