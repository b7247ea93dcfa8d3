"""`RunConfig`: all settings of a run, in the structure of Trinity-RFT's YAML.

Attributes are YAML keys: `config.algorithm.optimizer.lr`. Our own keys are under `config.tuner`.
Every value here is used by the local backend; keys that it does not support are refused when the
configuration is loaded (`tuner.config.foreign`).
"""

from __future__ import annotations

import functools
import os
import re
import secrets
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PrivateAttr,
    Tag,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)

from tuner.config.algorithms import (
    ADVANTAGES,
    ALGORITHMS,
    NOT_HERE,
    POLICY_LOSSES,
    TURN_DISCOUNTED,
    AdvantageArgs,
    AdvantageName,
    Aggregation,
    Algorithm,
    AlgorithmName,
    Args,
    EntropyLoss,
    EntropyName,
    GiGPOAdvantage,
    KLLoss,
    KLName,
    KLPenalty,
    PolicyLossArgs,
    PolicyLossName,
    PromptTeacher,
)
from tuner.config.source import as_yaml, concealed, secret_variable
from tuner.encoding import displayable
from tuner.errors import ConfigError

# Base class of all sections: strict names, typed values.


def null_is(empty: Callable[[], Any]) -> BeforeValidator:
    """Treat a key without a value (`monitor_args:`) like one that is missing."""
    return BeforeValidator(lambda given: empty() if given is None else given)


def numeric(annotation: Any) -> bool:
    """Whether a type is a number, or holds numbers (`tuple[float, float]`, `dict[str, float]`)."""
    return annotation in (int, float) or any(map(numeric, get_args(annotation)))


def _inside(value: Any) -> Iterator[Any]:
    """`value`, or the values in it if it is a list or has keys."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if not isinstance(value, list | tuple):
        yield value
        return
    for one in value:
        yield from _inside(one)


# The name of an environment variable with a key.
KeyVariable = Annotated[str, Field(min_length=1), AfterValidator(secret_variable)]
# Passed on unchanged.
Arguments = Annotated[dict[str, Any], null_is(dict)]


# The largest number of any setting: the largest seed, and a float32 whose square is one, too.
MOST = 2**63 - 1
# A number of tasks, tokens or steps.
Count = Annotated[int, Field(le=2**31 - 1)]
# Bounds where each one takes memory or a process from the start.
MOST_AT_ONCE = 2**16
# Concurrent rollouts where nothing says how many are possible; Trinity-RFT's default.
FEW_ROLLOUTS = 8
MOST_PROCESSES = 2**10


class Section(BaseModel):
    """A section of the configuration. Unknown keys, booleans in place of numbers, and numbers that
    are not finite or beyond `MOST` are refused."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        coerce_numbers_to_str=True,
        protected_namespaces=(),
        allow_inf_nan=False,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_bool_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        if cls._is_numeric(info) and any(isinstance(one, bool) for one in _inside(value)):
            raise ValueError("Input should be a number, not true or false")
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _is_text(cls, value: Any, info: ValidationInfo) -> Any:
        if info.field_name not in cls._fields()[1] and displayable(value) != value:
            raise ValueError("Input should be text that can be encoded in UTF-8")
        return value

    @field_validator("*", mode="after")
    @classmethod
    def _within_reach(cls, value: Any, info: ValidationInfo) -> Any:
        if cls._is_numeric(info):
            for one in _inside(value):
                if isinstance(one, int | float) and abs(one) > MOST:
                    raise ValueError(f"Input should be between -{MOST:.0e} and {MOST:.0e}")
        return value

    @classmethod
    def _is_numeric(cls, info: ValidationInfo) -> bool:
        return info.field_name in cls._fields()[0]

    @classmethod
    @functools.cache
    def _fields(cls) -> tuple[frozenset[str], frozenset[str]]:
        """Names of the fields with numbers, and of those that are sections."""
        types = {name: info.annotation for name, info in cls.model_fields.items()}
        return (
            frozenset(name for name, kind in types.items() if numeric(kind)),
            frozenset(name for name, kind in types.items() if section_of(kind) is not None),
        )

    @classmethod
    def takes_more(cls, given: Mapping[str, Any]) -> bool:
        """Whether this section may have keys that it does not define."""
        return False

    def is_default(self, name: str) -> bool:
        """Whether a setting has its default value."""
        usual = type(self).model_fields[name].get_default(call_default_factory=True)
        return bool(getattr(self, name) == usual)


def section_of(annotation: Any) -> type[Section] | None:
    """The section in a field's type: the type itself, or in a union, tuple or dict."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    if get_origin(annotation) is Annotated:
        return section_of(get_args(annotation)[0])
    if get_origin(annotation) in (tuple, dict, Union, UnionType):
        found = (section_of(argument) for argument in get_args(annotation))
        return next((section for section in found if section is not None), None)
    return None


# `algorithm.*`: how rewards become a gradient, and the optimizer.
#
# Defaults come from the table of algorithms when the configuration is loaded: components from the
# algorithm's row, their arguments from the components (`tuner.config.algorithms`). An argument that
# the chosen component does not use stays null, so one that is not null was set, and is refused
# (`tuner.config.rules`).


def _two_numbers(value: Any) -> Any:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError("Input should be two numbers, as in [0, 1]")
    return value


Decay = Annotated[float, Field(ge=0, lt=1)]
Decays = Annotated[tuple[Decay, Decay], BeforeValidator(_two_numbers)]
# Adam moves each weight by about the learning rate; decay beyond 1 / lr would flip its sign.
LearningRate = Annotated[float, Field(gt=0, le=1)]
WeightDecay = Annotated[float, Field(ge=0, le=100)]
# Below the longest wait of Python's threads.
Seconds = Annotated[float, Field(le=1e9)]


class OptimizerSection(Section):
    """`algorithm.optimizer.*`"""

    optimizer_type: Literal["adam"] = Field(
        default="adam", description="Adam with decoupled weight decay."
    )
    lr: LearningRate = Field(default=1e-6, description="Learning rate after the warmup.")
    betas: Decays = Field(
        default=(0.9, 0.999), description="Decay rates of Adam's two moving averages."
    )
    weight_decay: WeightDecay = Field(default=0.01, description="Decoupled weight decay.")
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="Schedule of the learning rate after the warmup."
    )
    lr_warmup_steps: Count = Field(
        default=-1,
        ge=-1,
        description="Steps of linear warmup; -1 uses `lr_warmup_steps_ratio`.",
    )
    lr_warmup_steps_ratio: float = Field(
        default=0.0, ge=0, le=1, description="Steps of linear warmup as a fraction of all steps."
    )
    min_lr_ratio: float = Field(
        default=0.01,
        ge=0,
        le=1,
        description="Final learning rate of `linear` and `cosine`, as a fraction of `lr`.",
    )

    def warmup_steps(self, total_steps: int) -> int:
        """Steps of linear warmup in a run of `total_steps`."""
        if self.lr_warmup_steps >= 0:
            return self.lr_warmup_steps
        return int(self.lr_warmup_steps_ratio * total_steps)


def _arguments(name: str, parts: Iterable[type[Args]]) -> type[Section]:
    """A section with every argument of `parts`; null if the chosen part does not use it."""
    found: dict[str, Any] = {}
    for part in parts:
        for key, info in part.model_fields.items():
            kind: Any = info.annotation
            field = Field(description=info.description)
            found.setdefault(key, (Annotated[(kind | None, *info.metadata, field)], None))
    return create_model(name, __base__=Section, __doc__=f"`algorithm.{name}.*`", **found)


AdvantageArguments = _arguments("advantage_fn_args", ADVANTAGES.values())
PolicyLossArguments = _arguments("policy_loss_fn_args", POLICY_LOSSES.values())
KLPenaltyArguments = _arguments("kl_penalty_fn_args", [KLPenalty])
KLLossArguments = _arguments("kl_loss_fn_args", [KLLoss])
EntropyLossArguments = _arguments("entropy_loss_fn_args", [EntropyLoss])


class SampleStrategyArgs(Section):
    """`algorithm.sample_strategy_args.*`"""

    max_staleness: Count | None = Field(
        default=None,
        ge=0,
        description="Maximum age of a trained token, in updates; older tokens are not trained. "
        "Required by staleness_control.",
    )


class AlgorithmSection(Section):
    """`algorithm.*`"""

    algorithm_type: AlgorithmName = Field(
        default="multi_step_grpo",
        description="A row of [this table](reference/algorithms.md), which gives the defaults "
        "of the keys below.",
    )
    repeat_times: int = Field(
        default=8,
        ge=1,
        le=MOST_AT_ONCE,
        description="Group size: rollouts per task in a step. 1 is allowed only if the "
        "advantage does not compare the rollouts of a group: ppo, reinforceplusplus, reinforce, "
        "on_policy_distill, prompt_distill. Ignored without rollouts. Trinity-RFT's default is "
        "1.",
    )
    optimizer: OptimizerSection = OptimizerSection()
    advantage_fn: AdvantageName = Field(
        default="step_wise_grpo",
        description="How rewards become advantages; `none` for algorithms without rollouts.",
    )
    advantage_fn_args: AdvantageArguments = AdvantageArguments()  # type: ignore[valid-type]
    policy_loss_fn: PolicyLossName = Field(
        default="ppo", description="Loss of a token, given its advantage."
    )
    policy_loss_fn_args: PolicyLossArguments = PolicyLossArguments()  # type: ignore[valid-type]
    kl_penalty_fn: KLName = Field(
        default="none",
        description="Estimate of KL(policy || reference) that is subtracted from the rewards. "
        "Not for raft.",
    )
    kl_penalty_fn_args: KLPenaltyArguments = KLPenaltyArguments()  # type: ignore[valid-type]
    kl_loss_fn: KLName = Field(
        default="k2",
        description="Estimate of KL(policy || reference) that is added to the loss. The default "
        "shown is that of multi_step_grpo.",
    )
    kl_loss_fn_args: KLLossArguments = KLLossArguments()  # type: ignore[valid-type]
    entropy_loss_fn: EntropyName = Field(
        default="default", description="Entropy bonus; not computed while its coefficient is 0."
    )
    entropy_loss_fn_args: EntropyLossArguments = EntropyLossArguments()  # type: ignore[valid-type]
    loss_agg_mode: Aggregation = Field(
        default="token-mean",
        description="Weight of each trained token of a step ([algorithms](algorithms.md)). "
        "Trinity-RFT does not have `rollout-mean`. The default shown is that of "
        "multi_step_grpo.",
    )
    sample_strategy: Literal["default", "staleness_control"] = Field(
        default="default",
        description="What to do about slow groups when collection runs ahead "
        "(`synchronizer.sync_offset`): wait for them before they become too old (`default`), or "
        "continue and skip tokens that are too old (`staleness_control`).",
    )
    sample_strategy_args: SampleStrategyArgs = SampleStrategyArgs()

    @model_validator(mode="before")
    @classmethod
    def _from_the_table(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        filled = {key: value for key, value in given.items() if value is not None}
        row = ALGORITHMS.get(filled.setdefault("algorithm_type", "multi_step_grpo"))
        if row is None:
            return filled
        for key in PARTS:
            filled.setdefault(key, getattr(row, key, "none"))
        filled.setdefault("loss_agg_mode", row.loss_agg_mode)
        for key in PARTS:
            args = filled.setdefault(f"{key}_args", {})
            part = part_of(key, filled[key])
            if isinstance(args, Mapping) and part is not None:
                own = filled[key] == getattr(row, key, "none")
                other = row.policy_loss_args if own and key == "policy_loss_fn" else {}
                filled[f"{key}_args"] = part.completed(args, other)
        return filled

    @field_validator("algorithm_type", mode="before")
    @classmethod
    def _on_this_backend(cls, value: Any) -> Any:
        if isinstance(value, str) and value in NOT_HERE:
            raise ValueError(f"not on this backend: {NOT_HERE[value]}")
        return value

    @property
    def row(self) -> Algorithm:
        """The algorithm's row of the table."""
        return ALGORITHMS[self.algorithm_type]

    @property
    def discounts_turns(self) -> bool:
        """Whether its advantage may credit calls with later rewards."""
        return self.advantage_fn in TURN_DISCOUNTED

    @property
    def uses_critic(self) -> bool:
        return self.advantage_fn == "ppo"

    @property
    def kl_in_loss(self) -> bool:
        """Whether the distance to the reference is added to the loss."""
        return self.kl_loss_fn != "none" and self.kl_loss.kl_coef != 0

    @property
    def penalizes_kl(self) -> bool:
        """Whether the distance to the reference is subtracted from the rewards."""
        return self.kl_penalty_fn != "none" and self.kl_penalty.kl_coef != 0

    @property
    def advantage(self) -> AdvantageArgs:
        """The advantage with its arguments."""
        return _read(ADVANTAGES[self.advantage_fn], self.advantage_fn_args)

    @property
    def policy_loss(self) -> PolicyLossArgs:
        """The policy loss with its arguments."""
        return _read(POLICY_LOSSES[self.policy_loss_fn], self.policy_loss_fn_args)

    @property
    def kl_penalty(self) -> KLPenalty:
        """Arguments of the KL penalty."""
        return _read(KLPenalty, self.kl_penalty_fn_args)

    @property
    def kl_loss(self) -> KLLoss:
        """Arguments of the KL term of the loss."""
        return _read(KLLoss, self.kl_loss_fn_args)

    @property
    def entropy_loss(self) -> EntropyLoss:
        """Arguments of the entropy bonus."""
        return _read(EntropyLoss, self.entropy_loss_fn_args)

    def unused(self) -> Iterator[tuple[str, str]]:
        """(dotted key, components that use it) of each argument that was set and is not used."""
        for key in PARTS:
            used = part_of(key, getattr(self, key))
            for name, value in getattr(self, f"{key}_args"):
                if value is not None and used is not None and name not in used.model_fields:
                    users = [
                        other
                        for other in get_args(type(self).model_fields[key].annotation)
                        if name in getattr(part_of(key, other), "model_fields", {})
                    ]
                    yield f"algorithm.{key}_args.{name}", " or ".join(users)


PARTS = ("advantage_fn", "policy_loss_fn", "kl_penalty_fn", "kl_loss_fn", "entropy_loss_fn")


ArgsT = TypeVar("ArgsT", bound=Args)


def _read(part: type[ArgsT], given: Section) -> ArgsT:
    """The arguments in a section that a component uses."""
    return part.model_validate({name: getattr(given, name) for name in part.model_fields})


def part_of(key: str, name: Any) -> type[Args] | None:
    """The component that `algorithm.<key>: <name>` chooses, or None if it does not exist."""
    if key == "advantage_fn":
        return ADVANTAGES.get(name)
    if key == "policy_loss_fn":
        return POLICY_LOSSES.get(name)
    if name == "none":
        return Args
    return {"kl_penalty_fn": KLPenalty, "kl_loss_fn": KLLoss}.get(key, EntropyLoss)


class CriticSection(Section):
    """`tuner.critic.*`: the critic of `algorithm.algorithm_type: ppo`, with Trinity-RFT's defaults.

    Its path is `model.critic_model_path`, its gradient is clipped by `trainer.grad_clip`, and it is
    trained alone during `trainer.critic_warmup`.
    """

    lr: LearningRate = Field(default=1e-5, description="Learning rate of the critic; constant.")
    betas: Decays = Field(
        default=(0.9, 0.999), description="Decay rates of Adam's two moving averages."
    )
    weight_decay: WeightDecay = Field(default=0.01, description="Decoupled weight decay.")
    cliprange_value: float = Field(
        default=0.5,
        gt=0,
        description="How far a value may move from its value at the start of the step before "
        "its gradient is clipped.",
    )


class ImagesSection(Section):
    """`tuner.images.*`: images in prompts ([images](images.md))."""

    max_count: Count = Field(
        default=32, ge=1, description="Maximum number of images in the messages of a request."
    )
    max_bytes: Count = Field(default=20 << 20, ge=1, description="Maximum bytes of an image.")
    max_pixels: Count = Field(default=1 << 25, ge=1, description="Maximum pixels of an image.")
    folder: str | None = Field(
        default=None,
        min_length=1,
        description="Folder whose images requests may name by `file:` URLs. Not set: none.",
    )
    hosts: tuple[str, ...] = Field(
        default=(),
        description="Names of the hosts from which images with `http:` and `https:` URLs are "
        "fetched, each once in a process. Empty: none.",
    )
    load_vision: bool = Field(
        default=False,
        description="Load a model that transformers also has as a language model with its vision "
        "tower, such as Qwen3.5, so that it reads images.",
    )
    train_vision: bool = Field(
        default=False,
        description="Whether the vision tower, and what connects it to the language model, is "
        "trained too; with an adapter, whether it gets one.",
    )


class AlgorithmExtras(Section):
    """`tuner.algorithm.*`"""

    reward_scale: float = Field(
        default=1.0,
        gt=0,
        description="The trained reward is `(reward + reward_bias) * reward_scale`.",
    )
    reward_bias: float = Field(default=0.0, description="See `reward_scale`.")
    overlong_buffer: Count | None = Field(
        default=None,
        ge=1,
        description="DAPO's soft penalty for long answers: the reward falls over the last "
        "`overlong_buffer` tokens of the maximum answer length. Not set: no penalty.",
    )
    overlong_penalty: float = Field(
        default=1.0, gt=0, description="Penalty for an answer of maximum length."
    )
    dynamic_sampling: bool | None = Field(
        default=None,
        description="Skip groups whose rewards are all equal, unless calls have their own "
        "rewards. Not set: the algorithm's default (true for `dapo`).",
    )
    success_rate_lb: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Groups with a smaller fraction of rewards above 0 are skipped as too hard.",
    )
    success_rate_ub: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="Groups with a larger fraction of rewards above 0 are skipped as too easy.",
    )
    turn_discount: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Discount from a call to the previous one. Each call is then credited with "
        "the rewards that follow it ([algorithms](algorithms.md)). Not set: all calls of a "
        "rollout get its reward. For grpo, rloo, opmd, asymre and reinforce.",
    )
    updates: Count = Field(
        default=1, ge=1, description="Weight updates per step, all on the step's batch."
    )
    proximal: Literal["auto", "recorded", "recompute", "loglinear"] = Field(
        default="auto",
        description="Decoupled PPO: source of the log-probs under the weights at the start of "
        "the step. `auto` is `recorded` for tokens sampled with these weights, otherwise "
        "`recompute`.",
    )
    importance_sampling: Literal["truncate", "none"] = Field(
        default="truncate",
        description="Whether tokens sampled with other weights get importance weights. No "
        "effect if the log-probs are `recorded`.",
    )
    importance_cap: float = Field(
        default=2.0, gt=0, description="Upper bound of the importance weight. Not with `none`."
    )
    rejection_low: float | None = Field(
        default=None,
        ge=0,
        description="Tokens with a smaller importance weight are ignored; set both bounds or "
        "neither.",
    )
    rejection_high: float | None = Field(
        default=None, gt=0, description="Tokens with a larger importance weight are ignored."
    )
    teacher: str | None = Field(
        default=None,
        min_length=1,
        description="Name of the `explorer.auxiliary_models` entry that is the teacher of "
        "on_policy_distill. Not set: the first.",
    )
    prompt: str | None = Field(
        default=None,
        min_length=1,
        description="The system prompt that prompt_distill trains into the weights. It replaces "
        "the agent's system prompt, if there is one.",
    )
    prompt_teacher: PromptTeacher = Field(
        default="start",
        description="Model that reads this prompt: the initial model of the run (`start`), or "
        "the trained model at the start of each step (`policy`).",
    )

    @property
    def cap(self) -> float | None:
        """Upper bound of importance weights; None if tokens are not weighted."""
        return None if self.importance_sampling == "none" else self.importance_cap

    @property
    def rejection(self) -> tuple[float, float] | None:
        """Bounds of the importance weight of trained tokens; None: no bounds."""
        if self.rejection_low is None or self.rejection_high is None:
            return None
        return self.rejection_low, self.rejection_high


# `buffer.*`: tasks or recorded data, their order, and how many each step uses.


class DataSelector(Section):
    """`data_selector.*`: the order of the tasks."""

    selector_type: Literal["sequential", "shuffle"] = Field(
        default="sequential",
        description="Order of the tasks; `shuffle` draws a new order for each epoch.",
    )
    seed: int = Field(default=42, description="Seed of `shuffle`.")


class FormatSection(Section):
    """`buffer.trainer_input.experience_buffer.format.*`: the columns of recorded data."""

    prompt_type: Literal["messages", "plaintext"] | None = Field(
        default=None,
        description="`messages`: a list of messages; `plaintext`: text. Not set: `messages` if "
        "a row has `messages_key`, otherwise `plaintext`.",
    )
    messages_key: str = Field(
        default="messages",
        min_length=1,
        description="Column of messages: for sft the conversation, for dpo the messages before "
        "both answers. Trinity-RFT's default is `message`.",
    )
    prompt_key: str = Field(
        default="prompt", min_length=1, description="Column of the user's message, for text."
    )
    response_key: str = Field(
        default="response", min_length=1, description="Column of the assistant's answer. For sft."
    )
    system_prompt_key: str | None = Field(
        default=None, min_length=1, description="Column of the system prompt, for text."
    )
    system_prompt: str | None = Field(
        default=None, description="System prompt of all rows; `system_prompt_key` takes precedence."
    )
    tools_key: str = Field(
        default="tools", min_length=1, description="Column of tools, as a list or JSON text."
    )
    chosen_key: str = Field(
        default="chosen", min_length=1, description="Column of the better answer. For dpo."
    )
    rejected_key: str = Field(
        default="rejected", min_length=1, description="Column of the worse answer. For dpo."
    )
    enable_concatenated_multi_turn: bool = Field(
        default=True,
        description="Train every assistant turn of a conversation; false: only the last "
        "message, which is Trinity-RFT's default. For sft.",
    )


class ExperienceBufferSection(Section):
    """`buffer.trainer_input.experience_buffer.*`: read only with `mode: train`."""

    path: str | None = Field(
        default=None,
        min_length=1,
        description="Recorded data, in the same form as a taskset's `path`. Read only with "
        "`mode: train`.",
    )
    split: str = Field(default="train", min_length=1, description="Same as a taskset's.")
    subset_name: str | None = Field(default=None, min_length=1, description="Same as a taskset's.")
    format: FormatSection = FormatSection()
    data_selector: DataSelector = DataSelector()


class TrainerInput(Section):
    """`buffer.trainer_input.*`"""

    experience_buffer: ExperienceBufferSection = ExperienceBufferSection()


def _not_too_cold(value: float) -> float:
    if 0 < value < 1e-6:
        raise ValueError("Input should be 0, or 1e-06 or more")
    return value


# The engines' bound (`COLDEST`).
Temperature = Annotated[float, AfterValidator(_not_too_cold)]


def _some_tokens(value: int) -> int:
    if value == 0:
        raise ValueError("Input should be -1 (all tokens) or at least 1")
    return value


TopKNumber = Annotated[Count, Field(ge=-1), AfterValidator(_some_tokens)]


class RolloutArgs(Section):
    """`rollout_args.*` of the training tasks: sampling; defaults are those of `model.*`."""

    temperature: Temperature | None = Field(
        default=None, ge=0, description="Sampling temperature; not set: `model.temperature`."
    )
    top_p: float | None = Field(default=None, gt=0, le=1, description="Not set: `model.top_p`.")
    top_k: TopKNumber | None = Field(default=None, description="Not set: `model.top_k`.")
    max_tokens: Count | None = Field(
        default=None,
        ge=1,
        description="Maximum tokens of an answer; not set: `model.max_response_tokens`.",
    )


class EvalRolloutArgs(RolloutArgs):
    """`rollout_args.*` of an evaluation set; greedy by default."""

    temperature: Temperature | None = Field(
        default=0.0,
        ge=0,
        description="Sampling temperature; 0 is greedy. Trinity-RFT evaluates at the training "
        "temperature instead, as null does here.",
    )


class _TasksetBase(Section):
    path: str | None = Field(
        default=None,
        min_length=1,
        description="A folder, a .json, .jsonl or .csv file, which may be compressed (.jsonl.gz), "
        "a .parquet file, or a name on the Hugging Face Hub. Relative paths start at the "
        "configuration file's folder.",
    )
    split: str = Field(
        default="train", min_length=1, description="Split: `train` means `train.jsonl`."
    )
    subset_name: str | None = Field(
        default=None,
        min_length=1,
        description="Subset (the Hub's config), if the dataset has several.",
    )


class TasksetSection(_TasksetBase):
    """`buffer.explorer_input.taskset.*`: the training tasks."""

    name: str = Field(default="train", min_length=1, description="A label; no effect on training.")
    rollout_args: RolloutArgs = RolloutArgs()
    data_selector: DataSelector = DataSelector()


class EvalTasksetSection(_TasksetBase):
    """`buffer.explorer_input.eval_tasksets[]`: tasks that are never trained."""

    name: str = Field(
        default="eval",
        min_length=1,
        pattern=r"^[\w.-]+$",
        description="Name of the set in metrics and results; `train` is reserved.",
    )
    split: str = Field(
        default="test", min_length=1, description="Split: `test` means `test.jsonl`."
    )
    repeat_times: Count = Field(
        default=1,
        ge=1,
        description="Rollouts per task, n. From 2 on, the metrics include `pass_at_<n>` and "
        "`pass_hat_<n>`, and the temperature must not be 0 "
        "([commands](reference/commands.md#tuner-eval)).",
    )
    rollout_args: EvalRolloutArgs = EvalRolloutArgs()


class ExplorerInput(Section):
    """`buffer.explorer_input.*`"""

    taskset: TasksetSection = TasksetSection()
    eval_tasksets: Annotated[tuple[EvalTasksetSection, ...], null_is(tuple)] = Field(
        default=(), description="Evaluation sets, each with the keys below."
    )


class BufferSection(Section):
    """`buffer.*`"""

    batch_size: Count = Field(
        default=32,
        ge=1,
        description="Tasks per step, or rows of recorded data. Trinity-RFT's default is 1, "
        "AgentScope's 32.",
    )
    total_epochs: Count = Field(default=1, ge=1, description="Passes over the tasks.")
    total_steps: Count | None = Field(
        default=None,
        ge=1,
        description="Number of steps, with as many passes over the tasks as they need; takes "
        "precedence over `total_epochs`. `trainer.total_steps` is another name of this key.",
    )
    explorer_input: ExplorerInput = ExplorerInput()
    trainer_input: TrainerInput = TrainerInput()


# `explorer.*`, `model.*`, `synchronizer.*`, `tuner.engine.*`: models, engines and their settings.


EngineType = Literal["transformers", "vllm", "sglang"]

DEFAULT_RANK = 32
DEFAULT_ALPHA = 32
DEFAULT_TARGETS = "all-linear"

WHERE = ("spread", "uncertain", "best")
_FUNCTION = re.compile(r"[^:]+:[^:]+")

_OF_PATH = "or that of the adapter at `path`"
FROZEN = "frozen"
ANY_ROLE = "default"
"""The key of `model.adapters` for calls of other roles, and of none."""
RoleName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
TOOL_CALL_PARSER = "Reads tool calls out of the model's text; null leaves the text as it is."
REASONING_PARSER = "Reads `<think>` out of the model's text; null leaves the text as it is."

# Settings of both the policy and auxiliary models.
TopK = Annotated[
    TopKNumber, Field(description="Sample only from the k most probable tokens; -1 is all.")
]
ResponseTokens = Annotated[
    Count | None,
    Field(ge=1, description="Maximum tokens of an answer; not set: the room left in the context."),
]
Thinking = Annotated[
    bool | None,
    Field(description="Passed to the chat template; null leaves the choice to the template."),
]
ChatTemplate = Annotated[str | None, Field(description="Custom chat template, as text.")]


class RolloutModelSection(Section):
    """`explorer.rollout_model.*`: the policy's engine and output parsers."""

    engine_type: EngineType | Literal["auto"] = Field(
        default="auto",
        description="The engine: transformers with the trainer's weights, or vLLM or SGLang "
        "with a copy. `auto` is vLLM on a GPU if it is installed and supports the other "
        "settings, otherwise transformers; the reason is logged "
        "([engines](operations.md#engines)).",
    )
    engine_num: int = Field(
        default=1,
        ge=1,
        le=MOST_PROCESSES,
        description="Number of servers to start. For vllm; otherwise 1.",
    )
    tensor_parallel_size: int = Field(
        default=1, ge=1, le=MOST_PROCESSES, description="GPUs per engine. For vllm; otherwise 1."
    )
    gpu_memory_utilization: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Fraction of a GPU's memory for one engine. For vllm. Not set: the memory "
        "that the trainer leaves if they share the GPU, otherwise vLLM's default.",
    )
    enforce_eager: bool = Field(
        default=False,
        description="Do not capture CUDA graphs. For vllm and transformers.",
    )
    extra_engine_args: Arguments = Field(
        default_factory=dict,
        description="Additional arguments of vLLM's `AsyncEngineArgs`, by name. For vllm.",
    )
    tool_call_parser: str | None = Field(default="hermes", description=TOOL_CALL_PARSER)
    reasoning_parser: str | None = Field(default="deepseek_r1", description=REASONING_PARSER)


class AuxiliaryModelSection(Section):
    """`explorer.auxiliary_models[]`: a frozen model for workflows and judges, served here."""

    name: str = Field(
        min_length=1, description="Key of the model in the functions' `auxiliary_models`."
    )
    model_path: str = Field(min_length=1, description="Same as `model.model_path`.")
    max_model_len: Count | None = Field(
        default=None, ge=2, description="Same as `model.max_model_len`."
    )
    temperature: Temperature = Field(
        default=1.0, ge=0, description="Sampling temperature; 0 is greedy."
    )
    top_p: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Probability mass of nucleus sampling; 1 is all tokens.",
    )
    top_k: TopK = -1
    max_response_tokens: ResponseTokens = None
    enable_thinking: Thinking = None
    chat_template: ChatTemplate = None
    tool_call_parser: str | None = Field(default="hermes", description=TOOL_CALL_PARSER)
    reasoning_parser: str | None = Field(default="deepseek_r1", description=REASONING_PARSER)


class OverRolloutSection(Section):
    """`explorer.over_rollout.*`: early stop of the slowest groups."""

    ratio: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Fraction of a step's tasks that it need not wait for: once all others are "
        "complete, the remaining rollouts are stopped. 0: it waits for all.",
    )
    wait_after_min: Seconds = Field(
        default=30.0, ge=0, description="Seconds that the remaining rollouts then get."
    )
    return_partial_tasks: bool = Field(
        default=False,
        description="Train the finished rollouts of a stopped task; false: skip its group.",
    )


class ExplorerSection(Section):
    """`explorer.*`"""

    runner_per_model: Annotated[int, Field(ge=1, le=MOST_AT_ONCE)] | Literal["auto"] = Field(
        default="auto",
        description="Maximum number of concurrent rollouts. `auto`: as many as a step has, up to "
        "the number of answers that the engine generates concurrently (`tuner.max_slots`), and at "
        "least 8. It is 8 if the engine's servers are at `tuner.engine.urls`, and for "
        "`environment: program` and `harbor`, whose rollouts have their own processes; 16 on the "
        "backend `trinity`.",
    )
    max_timeout: Seconds = Field(
        default=1800, gt=0, description="Time limit of one attempt at a rollout, in seconds."
    )
    max_retry_times: Count = Field(
        default=2,
        ge=0,
        description="Additional attempts after a failure or timeout, each from the start.",
    )
    over_rollout: OverRolloutSection = OverRolloutSection()
    rollout_model: RolloutModelSection = RolloutModelSection()
    auxiliary_models: tuple[AuxiliaryModelSection, ...] = Field(
        default=(), description="Frozen models, each with the keys below."
    )
    eval_interval: Count = Field(
        default=100,
        ge=0,
        description="Steps between evaluations; 0: only at the start and the end.",
    )
    eval_on_startup: bool = Field(default=True, description="Evaluate before the first step.")

    @field_validator("runner_per_model", mode="before")
    @classmethod
    def _rollouts(cls, value: Any) -> Any:
        if isinstance(value, bool) or (isinstance(value, str) and value != "auto"):
            raise ValueError("Input should be a number of rollouts, or auto")
        return value


class SynchronizerSection(Section):
    """`synchronizer.*`"""

    sync_offset: Count = Field(
        default=0,
        ge=0,
        description="Steps by which collection may run ahead of training "
        "([asynchronous](training.md#asynchronous-collection)). The weights that sampled a "
        "trained token are at most this many updates old. 0: collection and training alternate.",
    )


class RaySection(Section):
    """`tuner.ray.*`: workers on the machines of a Ray cluster, for `tuner.workers: ray`."""

    workers: Count | None = Field(
        default=None,
        ge=1,
        description="Number of workers. Not set: as many as the cluster has room for at the "
        "start of the run, up to `explorer.runner_per_model`.",
    )
    cpus: float = Field(default=1.0, gt=0, description="CPUs per worker, as counted by Ray.")
    resources: Annotated[dict[str, Annotated[float, Field(gt=0)]], null_is(dict)] = Field(
        default_factory=dict,
        description="Additional resources per worker, by the names given to Ray's machines "
        "(`ray start --resources`).",
    )
    runtime_env: Arguments = Field(
        default_factory=dict,
        description="Ray's runtime environment: `working_dir`, `pip`, `env_vars` and its other "
        "keys.",
    )
    gateway: str | None = Field(
        default=None,
        pattern=r"^(\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+)(:\d{1,5})?$",
        description="Address of this machine at which workers reach the gateway, with or "
        "without a port (`10.0.0.1`, `10.0.0.1:8700`). The gateway listens there during the "
        "run; every request needs its rollout's key. Required by `ray`.",
    )
    base_url: str | None = Field(
        default=None,
        pattern=r"^https?://\S+/v1$",
        description="URL that the workers use instead, for a proxy in front of the gateway "
        "(`https://trainer.example/v1`).",
    )

    @property
    def gateway_host(self) -> str | None:
        """`gateway` without its port."""
        return None if self.gateway is None else self.gateway.partition(":")[0]


class EngineSection(Section):
    """`tuner.engine.*`: vLLM and SGLang servers, in addition to `explorer.rollout_model`."""

    urls: tuple[str, ...] = Field(
        default=(),
        description="URLs of remote servers ([engines](operations.md#engines)), such as "
        "`http://10.0.0.2:8100`. Not set: vLLM is started here; SGLang is not.",
    )
    api_key_env: KeyVariable = Field(
        default="TUNER_ENGINE_KEY",
        description="Environment variable with the API key of the servers at `urls`. Optional "
        "for SGLang.",
    )
    max_restarts: Count = Field(
        default=3,
        ge=0,
        description="Total number of restarts of servers that died; after that the run fails.",
    )

    weights: Literal["auto", "cuda_ipc", "nccl", "shared_memory", "disk"] = Field(
        default="auto",
        description="How vLLM gets new weights ([engines](operations.md#engines)): read on a "
        "shared GPU (`cuda_ipc`), broadcast to other GPUs (`nccl`), or as a checkpoint in "
        "`shared_memory` or on `disk`. `auto` is the fastest possible; the reason is logged.",
    )
    sleep: bool | None = Field(
        default=None,
        description="Whether vLLM releases its GPU memory to the trainer during an update, if "
        "they share a GPU. Not set: yes, unless collection runs ahead of training "
        "(`synchronizer.sync_offset`).",
    )

    @property
    def servers(self) -> int:
        """Number of remote servers."""
        return len(self.urls)

    @field_validator("urls")
    @classmethod
    def _are_urls(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for url in value:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"{url!r} does not start with http:// or https://")
        return value


class LoraSection(Section):
    """`model.lora_configs[]`, `model.adapters.*`: an adapter that is trained."""

    path: str | None = Field(
        default=None,
        min_length=1,
        description="Folder or Hub name of an adapter to start from; the reference is then the "
        "model with this adapter. Not set: a new adapter, which initially changes nothing.",
    )
    base_model_name: str | None = Field(
        default=None,
        min_length=1,
        description="Name of the model in adapters: compared with the name in the adapter at "
        "`path` and written to checkpoints. Not set: `model.model_path`.",
    )
    lora_rank: int | None = Field(
        default=None,
        ge=1,
        le=MOST_AT_ONCE,
        description=f"Rank. Not set: {DEFAULT_RANK}, {_OF_PATH}.",
    )
    lora_alpha: Count | None = Field(
        default=None,
        ge=1,
        description="The adapter's output is scaled by lora_alpha / lora_rank. Not set: "
        f"{DEFAULT_ALPHA}, {_OF_PATH}.",
    )
    lora_dtype: Literal["auto", "float32"] = Field(
        default="auto", description="Data type of the adapter's weights; `auto` is float32."
    )
    target_modules: str | tuple[str, ...] | None = Field(
        default=None,
        description="Layers that get an adapter: `all-linear` (all except the output layer), a "
        "list of names or name endings, or a regular expression for whole names. Not set: "
        f"`{DEFAULT_TARGETS}`, {_OF_PATH}.",
    )
    exclude_modules: str | tuple[str, ...] | None = Field(
        default=None,
        description="Layers to exclude: a list of names or name endings, or a regular "
        "expression for whole names.",
    )

    @field_validator("target_modules", "exclude_modules")
    @classmethod
    def _names_something(cls, value: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        if value is not None and (not value or any(not name for name in value)):
            raise ValueError("must name at least one layer; remove it for the default")
        return value


RoleAdapter = Annotated[
    Annotated[LoraSection, Tag("adapter")] | Annotated[Literal["frozen"], Tag("frozen")],
    Discriminator(lambda given: FROZEN if isinstance(given, str) else "adapter"),
]
"""Weights of a role: its adapter, or `frozen` for the model without one."""


def role_key(roles: Container[str], role: str | None) -> str | None:
    """The key of `model.adapters` for a call's role; None if the call has no adapter and is not
    frozen."""
    if role is not None and role in roles:
        return role
    return ANY_ROLE if ANY_ROLE in roles else None


class ModelSection(Section):
    """`model.*`: the policy."""

    model_path: str = Field(
        default="",
        description="A causal language model: a Hugging Face folder or Hub name, a GGUF file, "
        "or `package:NAME` ([model paths](model_families.md#model-paths)). Not set: the tiny "
        "model included in tuner.",
    )
    critic_model_path: str = Field(
        default="",
        description="Initial model of ppo's critic, in the same form as `model.model_path`, "
        "with the policy's tokenizer. Not set: `model.model_path`.",
    )
    max_model_len: Count | None = Field(
        default=None,
        ge=2,
        description="Maximum tokens of prompt and answer together. Not set: the model's own "
        "maximum, or less if its RoPE frequencies depend on length (`longrope`, `dynamic`).",
    )
    max_response_tokens: ResponseTokens = None
    temperature: Temperature = Field(
        default=1.0, gt=0, description="Sampling temperature during training."
    )
    top_p: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Probability mass of nucleus sampling; 1 is all tokens.",
    )
    top_k: TopK = -1
    enable_thinking: Thinking = None
    custom_chat_template: ChatTemplate = None
    chat_template_path: Path | None = Field(
        default=None,
        description="File with a custom chat template; not together with `custom_chat_template`.",
    )
    lora_configs: tuple[LoraSection, ...] = Field(
        default=(),
        description="Train a LoRA adapter with the keys below ([training](training.md#lora)); "
        "maximum of one. Not set: all weights are trained.",
    )

    @field_validator("lora_configs", mode="before")
    @classmethod
    def _one_at_most(cls, value: Any) -> Any:
        if isinstance(value, (list, tuple)) and len(value) > 1:
            raise ValueError("only one adapter can be trained; keep one of them")
        return () if value is None else value

    adapters: Annotated[dict[RoleName, RoleAdapter], null_is(dict)] = Field(
        default_factory=dict,
        description="A LoRA adapter for each role that calls (`model.role(name)`, or `name` as a "
        "request's model), with the keys of `lora_configs`; or `frozen`: the model without one. "
        "`default` is for other calls ([training](agents.md#a-policy-for-each-role)). Not set: "
        "all calls have the same weights.",
    )

    @field_validator("adapters", mode="before")
    @classmethod
    def _of_roles(cls, value: Any) -> Any:
        if isinstance(value, dict) and value and all(one == FROZEN for one in value.values()):
            raise ValueError("Input should have an adapter: nothing is trained if all are frozen")
        return value

    @property
    def lora(self) -> LoraSection | None:
        """The adapter that is trained for all calls; None if all weights are, or roles have
        their own."""
        return self.lora_configs[0] if self.lora_configs else None

    @property
    def trained_roles(self) -> tuple[str, ...]:
        """The roles with an adapter, in order."""
        return tuple(role for role, one in self.adapters.items() if one != FROZEN)

    @property
    def loras(self) -> dict[str, LoraSection]:
        """Every adapter that is trained, by the key of its settings."""
        found = {f"model.lora_configs.{i}": one for i, one in enumerate(self.lora_configs)}
        of_roles = {f"model.adapters.{role}": one for role, one in self.adapters.items()}
        return found | {key: one for key, one in of_roles.items() if isinstance(one, LoraSection)}


class BranchingSection(Section):
    """`tuner.branching.*`: how the `algorithm.repeat_times` rollouts of a task are divided."""

    ends: int = Field(
        default=4,
        ge=2,
        le=MOST_AT_ONCE,
        description="Rollouts that continue from each branch point, including the original one. "
        "Not with `best`, which chooses the number.",
    )
    trunks: Count | None = Field(
        default=None,
        ge=2,
        description="Rollouts that start at the beginning. Not set: `repeat_times` / `ends`, at "
        "least 2. Not with `best`.",
    )
    where: str = Field(
        default="spread",
        description="Where other rollouts branch: anywhere (`spread`), before calls at which "
        "the model was uncertain (`uncertain`), where earlier steps show a benefit, which may "
        "be nowhere (`best`), or where a function decides (`package.module:function`, "
        "`path/file.py:function`; [branches](sampling.md#branches)).",
    )
    inside: bool = Field(
        default=False,
        description="Whether a branch may start inside an answer; false: only before one.",
    )
    rounds: Count = Field(
        default=1,
        ge=1,
        description="Number of rounds of branching; from the second on, branches may also start "
        "inside those of the previous round.",
    )
    on_divergence: Literal["drop", "sample"] = Field(
        default="drop",
        description="If the agent's requests differ from the original before the branch point: "
        "end the rollout and skip it (`drop`), or sample from there (`sample`).",
    )
    seed_functions: bool = Field(
        default=False,
        description="Seed the random states of Python, NumPy and PyTorch before each rollout, "
        "identically for rollouts with the same start. Requires `explorer.runner_per_model: 1`.",
    )

    @property
    def fewest_trunks(self) -> int:
        """Minimum number of rollouts that start at the beginning."""
        return self.trunks or 2

    @field_validator("where")
    @classmethod
    def _known(cls, value: str) -> str:
        if value == "open":
            raise ValueError("open was removed: set it to best, or to spread")
        if value not in WHERE and not _FUNCTION.fullmatch(value):
            raise ValueError(f"Input should be {', '.join(WHERE)} or module:function")
        return value


# `tuner.history.*`: recorded rollouts as training data.


Names = Annotated[tuple[str, ...], null_is(tuple)]


class HistorySection(Section):
    """`tuner.history.*`: selection of recorded rollouts to train on; sets `mode` to `train`."""

    sources: Names = Field(
        default=(),
        description="Run directories, trace files, folders of them, a server's "
        "`serving.sqlite`, or logs without tokens ([recorded data](recorded_data.md)). Set by "
        "`tuner train`.",
    )
    held_out: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Fraction of tasks, chosen by a hash of each task, that are not trained and "
        "whose loss is logged.",
    )
    min_reward: float | None = Field(
        default=None,
        description="Skip rollouts with a smaller reward.",
    )
    max_reward: float | None = Field(
        default=None, description="Skip rollouts with a larger reward."
    )
    after: str | None = Field(
        default=None,
        description="Skip rollouts that started before this time: an ISO 8601 date or time (UTC "
        "unless it has a zone), or Unix seconds.",
    )
    before: str | None = Field(
        default=None, description="Skip rollouts that started at this time or later."
    )
    min_version: Count | None = Field(
        default=None,
        ge=0,
        description="Skip rollouts with a token from weights with fewer updates.",
    )
    max_version: Count | None = Field(
        default=None, ge=0, description="Skip rollouts with a token from weights with more updates."
    )
    min_step: Count | None = Field(
        default=None, ge=0, description="Skip rollouts of earlier steps of their run."
    )
    max_step: Count | None = Field(
        default=None, ge=0, description="Skip rollouts of later steps of their run."
    )
    split: str | None = Field(
        default=None,
        min_length=1,
        description="Use the rollouts of this evaluation set. Not set: training rollouts and "
        "served sessions.",
    )
    roles: Names = Field(default=(), description="Train only calls with these roles. Not set: all.")
    outcomes: Names = Field(
        default=(), description="Use only rollouts with these outcomes. Not set: all."
    )
    tags: Names = Field(
        default=(),
        description="Use only served sessions that have all of these tags. Not set: all.",
    )
    metadata: Arguments = Field(
        default_factory=dict,
        description="Use only rollouts with these values in their session's metadata or in "
        "their task.",
    )
    best: Count = Field(
        default=1, ge=1, description="Number of best rollouts per task to imitate. For sft."
    )
    pairs: Literal["best", "all"] = Field(
        default="best",
        description="Rollouts of a task that form pairs: the best and the worst (`best`), or "
        "any two with different rewards (`all`). For dpo.",
    )
    min_gap: float = Field(
        default=0.0,
        ge=0,
        description="Minimum difference of rewards in a pair. For dpo.",
    )
    min_effective_samples: float = Field(
        default=0.3,
        ge=0,
        le=1,
        description="Minimum effective sample size, as a fraction of the number of tokens; the "
        "run stops before an update below it ([recorded "
        "data](recorded_data.md#how-far-the-weights-may-go)). 0: never. Not for sft and dpo.",
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
    """Convert a time of `tuner.history` to Unix seconds.

    Raises:
        ValueError: It is neither a number nor an ISO 8601 time.
    """
    try:
        return float(text)
    except ValueError:
        pass
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(
            f"{text!r} is not a time: write 2026-11-24, 2026-11-24T18:00+01:00 or Unix seconds"
        ) from None
    return (found if found.tzinfo is not None else found.replace(tzinfo=UTC)).timestamp()


# `tuner.serving.*`: read only by `tuner serve`.


class PromotionSection(Section):
    """`tuner.serving.promotion.*`: conditions for serving new weights, with `tuner serve
    --train`."""

    by: Literal["held_out", "live", "both", "always"] = Field(
        default="held_out",
        description="Evidence that a candidate is better: the evaluation sets "
        "(`buffer.explorer_input.eval_tasksets`), new sessions that it serves (`live`), first "
        "the one and then the other (`both`), or none (`always`: each update serves "
        "immediately).",
    )
    effect: float = Field(
        default=0.05,
        gt=0,
        description="Gain in mean reward that a comparison is planned to detect; a candidate "
        "proven to gain less is not promoted.",
    )
    level: float = Field(
        default=0.05,
        gt=0,
        lt=0.5,
        description="Maximum probability of promoting a candidate that is not better, however "
        "often the comparison is checked.",
    )
    margin: float = Field(
        default=0.0,
        description="Minimum gain of a candidate; a negative value is the maximum loss.",
    )
    reward_range: Annotated[tuple[float, float], BeforeValidator(_two_numbers)] = Field(
        default=(0.0, 1.0),
        description="Bounds of every reward; a reward outside of them stops learning.",
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
                f"margin {self.margin:g} must be below effect {self.effect:g}, and both must be "
                f"differences of rewards in reward_range, smaller than {width:g}"
            )
        return self


class ServingSection(Section):
    """`tuner.serving.*`: keys, limits and storage of a server."""

    admin_key_env: KeyVariable = Field(
        default="TUNER_ADMIN_KEY",
        description="Environment variable with the admin key. If it is not set, a key for this "
        "start is generated and printed, on loopback only.",
    )
    allowed_hosts: Annotated[tuple[str, ...], null_is(tuple)] = Field(
        default=(),
        description="Allowed values of the `Host` header in addition to loopback, without a "
        "port: those of the reverse proxy or of the machine.",
    )
    session_header: str = Field(
        default="x-tuner-session",
        pattern=r"^[A-Za-z0-9-]+$",
        description="Header in which a request may name its session (one name per conversation) "
        "and a response returns the session's id.",
    )
    max_body_bytes: Count = Field(
        default=32 * 1024 * 1024, ge=1024, description="Maximum size of a request body, in bytes."
    )
    requests_per_minute: Count | None = Field(
        default=None,
        ge=1,
        description="Maximum requests per key and minute, with bursts of ten seconds' worth; "
        "excess requests get 429 with `Retry-After`. Not set: unlimited.",
    )
    idle_minutes: float | None = Field(
        default=None,
        gt=0,
        description="Minutes without a call after which a session ends automatically. Not set: "
        "never.",
    )
    keep_days: float | None = Field(
        default=None,
        gt=0,
        description="Days after which ended sessions are deleted. Not set: never.",
    )
    redact: str | None = Field(
        default=None,
        description="Function that removes private text before storage: "
        "`package.module:function` or `path/file.py:function`. It takes a list of messages and "
        "returns the list to store. A call that it changes is stored without token ids and "
        "never trained.",
    )
    log: bool = Field(
        default=True,
        description="Write one line of JSON per request to standard error, without contents or "
        "keys.",
    )
    promotion: PromotionSection = PromotionSection()
    canary: float = Field(
        default=0.2,
        gt=0,
        lt=1,
        description="Fraction of new sessions served by a candidate, with `promotion.by` `live` "
        "or `both`.",
    )
    max_staleness: Count = Field(
        default=1,
        ge=0,
        description="Maximum number of promotions between the weights that sampled a token and "
        "the serving weights; older tokens are not trained, but counted.",
    )

    @field_validator("allowed_hosts", mode="before")
    @classmethod
    def _one_or_many(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value


# `tuner.*`: our own keys.


class Penalize(Section):
    """`tuner.on_failure: {penalize: value}`"""

    penalize: float = Field(description="Reward of a rollout that fails to give one.")


class RemoteModel(Section):
    """A frozen model behind an OpenAI-compatible URL, for workflows and judges."""

    model_config = ConfigDict(hide_input_in_errors=True)  # a key, or a URL with one
    base_url: str = Field(
        pattern=r"^https?://", description="URL of the API, usually ending in `/v1`."
    )
    model_name: str = Field(min_length=1, description="Name of the model at that URL.")
    api_key_env: str | None = Field(
        default=None, min_length=1, description="Environment variable with the API key."
    )
    max_concurrent: Count | None = Field(
        default=None,
        ge=1,
        description="Maximum concurrent requests from all rollouts. Not set: unlimited.",
    )
    input_price: float | None = Field(
        default=None,
        ge=0,
        description="Price per million input tokens.",
    )
    output_price: float | None = Field(
        default=None,
        ge=0,
        description="Price per million output tokens.",
    )

    @field_validator("api_key_env")
    @classmethod
    def _names_a_variable(cls, value: str | None) -> str | None:
        return None if value is None else secret_variable(value)

    @property
    def prices(self) -> tuple[float, float]:
        """Prices per million input and output tokens; 0 if not set."""
        return self.input_price or 0.0, self.output_price or 0.0

    def api_key(self, setting: str) -> str:
        """The API key; "none" if none is needed.

        Args:
            setting: Name of this model's setting, for the message.

        Raises:
            ConfigError: The environment variable is not set.
        """
        key = os.environ.get(self.api_key_env) if self.api_key_env else "none"
        if key is None:
            raise ConfigError(
                f"{setting}.api_key_env = {self.api_key_env!r}: this environment variable is not "
                "set; set it, or remove api_key_env if no key is needed"
            )
        return key

    def cost(self, input_tokens: int, output_tokens: int) -> float | None:
        """Price of a number of tokens; None if neither price is set."""
        if self.input_price is None and self.output_price is None:
            return None
        read, written = self.prices
        return (input_tokens * read + output_tokens * written) / 1e6


class NamedClass(Section):
    """`tuner.agent.*`: a class by name, and its constructor's arguments."""

    type: str = Field(
        min_length=1,
        description="Registered name, `package.module:Class`, or `path/file.py:Class`.",
    )
    args: Arguments = Field(
        default_factory=dict,
        description="Arguments of its constructor, passed unchanged, except that `gconfig` "
        "becomes a `GenerationHyperparameters`.",
    )


SELECTORS = ("success", "stratified")
Weight = Annotated[float, Field(gt=0)]


class SelectorSection(Section):
    """`tuner.tasks.selector.*`: selection of each step's tasks, instead of a fixed order."""

    kind: str = Field(
        default="success",
        description="`success`: tasks that are always or never solved are drawn less often; "
        "`stratified`: each value of `field` has its share and its own order; or a function "
        "that gives each task a weight (`package.module:function`, `path/file.py:function`; "
        "[selectors](sampling.md#tasks-drawn-by-success)).",
    )
    field: str | None = Field(
        default=None,
        min_length=1,
        description="A field of the tasks. Each of its values gets its share of every step, "
        "rounded to whole tasks; `kind` draws within it. Required by `stratified`.",
    )
    weights: Annotated[dict[str, Weight], null_is(dict)] = Field(
        default_factory=dict,
        description="Relative share of a step for each value of `field`; name all of them. Not "
        "set: proportional to their numbers of tasks.",
    )
    floor: float = Field(
        default=0.1,
        gt=0,
        le=1,
        description="Minimum weight of a task, as a fraction of the maximum, so every task is "
        "still drawn. 1 draws all equally. Not with `stratified`.",
    )

    @field_validator("kind")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in SELECTORS and not _FUNCTION.fullmatch(value):
            raise ValueError(f"Input should be {', '.join(SELECTORS)} or module:function")
        return value


class TasksSection(Section):
    """`tuner.tasks.*`: selection of a step's tasks."""

    selector: SelectorSection | None = None


KINDS = (
    "verifiers",
    "openenv",
    "trl",
    "gymnasium",
    "reasoning_gym",
    "textarena",
    "areal",
    "program",
    "harbor",
    "mixture",
)


class EnvironmentSection(Section):
    """`tuner.environment.*`: an environment in one of `KINDS`, or a queue agent's."""

    model_config = ConfigDict(extra="allow")

    kind: Literal[KINDS] | None = Field(  # type: ignore[valid-type]  # the table is elsewhere too
        default=None,
        description="The format. All other keys are arguments of its class "
        "([environments](environments.md)).",
    )
    type: str | None = Field(
        default=None,
        min_length=1,
        description="For a queue agent, instead of `kind`: same as `tuner.agent.type`.",
    )
    args: Arguments = Field(default_factory=dict, description="With `type`: same as the agent's.")

    @classmethod
    def takes_more(cls, given: Mapping[str, Any]) -> bool:
        return "kind" in given

    @model_validator(mode="after")
    def _one_form(self) -> EnvironmentSection:
        if (self.kind is None) == (self.type is None):
            raise ValueError(f"give either kind ({', '.join(KINDS)}), or, with tuner.agent, type")
        return self

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of the class of `kind`."""
        own = {"args": self.args} if "args" in self.model_fields_set else {}
        return {**own, **(self.model_extra or {})}


NamedOrMade = Annotated[
    Annotated[str, Tag("named")] | Annotated[EnvironmentSection, Tag("made")],
    Discriminator(lambda given: "named" if isinstance(given, str) else "made"),
]


class TrinitySection(Section):
    """`tuner.trinity.*`: read only by the backend `trinity`."""

    experiences: Literal["merged", "calls"] = Field(
        default="merged",
        description="Experiences for Trinity-RFT: the calls of a rollout, merged if one "
        "continues another (`merged`), or separate (`calls`). With `token-mean` the gradient is "
        "the same.",
    )


Layout = Literal["tree", "packed", "padded"]
LayoutSetting = Literal["auto", "tree", "packed", "padded"]
Checkpointing = bool | Literal["auto"]


class TunerSection(Section):
    """`tuner.*`: our own keys, unknown to Trinity-RFT."""

    workflow: str | None = Field(
        default=None,
        description="The workflow for `tuner run` and `tuner check`: `package.module:function` "
        "or `path/file.py:function`.",
    )
    judge: str | None = Field(default=None, description="The judge, in the same form.")
    agent: NamedClass | None = Field(
        default=None,
        description="A queue agent instead of a workflow, with the keys below "
        "([AReaL](migrating.md#areal)).",
    )
    environment: NamedOrMade | None = Field(
        default=None,
        description="Workflow, judge and datasets together, for the commands: the keys below, "
        "`kind:name` such as `reasoning_gym:chain_sum`, or `package.module:name` or "
        "`path/file.py:name` of an environment or of a function that returns one "
        "([environments](environments.md)).",
    )
    imports: tuple[str, ...] = Field(
        default=(),
        description="Modules that register agents and environments, including gymnasium's: "
        "`package.module` or `path/file.py`.",
    )
    backend: Literal["auto", "local", "trinity"] = Field(
        default="auto",
        description="Where the training loop runs: this process (`local`), or [Trinity-RFT on "
        "Ray](trinity.md). `auto` is `trinity` if `cluster.node_num` x `cluster.gpu_per_node` "
        "is more than 1 or `model.tinker.enable` is true, otherwise `local`.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto",
        description="`auto` uses the GPU if there is one. On `trinity`, `cpu` means that the "
        "GPUs declared in `cluster` are only counted, as in a test.",
    )
    placement: Literal["auto", "colocate", "separate"] = Field(
        default="auto",
        description="Location of an engine with a copy of the weights: the trainer's GPU "
        "(`colocate`) or other GPUs (`separate`). `auto` chooses by what fits; the reason is "
        "logged ([engines](operations.md#engines)).",
    )
    engine: EngineSection = EngineSection()
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto",
        description="Data type of the weights of policy, engine and reference. `auto` is "
        "`bfloat16` on a GPU that supports it, otherwise `float32`. With `bfloat16` the "
        "optimizer keeps a float32 copy of the policy's weights.",
    )
    optimizer_state: Literal["float32", "8bit"] = Field(
        default="float32",
        description="Precision of Adam's two moments; `8bit` requires bitsandbytes (extra `gpu`).",
    )
    activation_checkpointing: Checkpointing = Field(
        default="auto",
        description="Recompute layers in the backward pass to save memory. `auto`: only on a "
        "GPU with too little memory otherwise.",
    )
    compile: bool | None = Field(
        default=None,
        description="Compile the layers for training: less time and memory, but the first start "
        "takes about a minute longer. Not set: true on a GPU.",
    )
    seed: int = Field(default=42, ge=0, description="Seed of sampling and initialization.")
    deterministic: bool = Field(
        default=False,
        description="The same seed gives the same weights, bit for bit, even after a kill. "
        "Rollouts run concurrently; plain (not async) functions one at a time. "
        "Where a trial at start finds that a model's rows change each other's bits, answers are "
        "generated one at a time.",
    )
    on_failure: Literal["drop", "abort"] | Penalize = Field(
        default="drop",
        description="A rollout without a reward: skip it (`drop`), give it a reward "
        "(`{penalize: value}`), or stop the run (`abort`).",
    )
    tasks: TasksSection = TasksSection()
    workers: Annotated[int, Field(ge=0, le=MOST_PROCESSES)] | Literal["auto", "ray"] = Field(
        default=0,
        description="Processes that run the workflow and the judge, in addition to the main "
        "process with gateway, engine and trainer; 0: the main process runs them. `auto` starts "
        "one per core and logs after the first step how many remain and why "
        "([workers](operations.md#workers)). `ray`: on the machines of the cluster at "
        "`cluster.ray_address`, configured by `tuner.ray`.",
    )
    ray: RaySection = RaySection()
    branching: BranchingSection | None = None
    history: HistorySection | None = None
    algorithm: AlgorithmExtras = AlgorithmExtras()
    critic: CriticSection = CriticSection()
    images: ImagesSection = ImagesSection()
    pass_reward: float = Field(
        default=1.0,
        description="Minimum reward of a rollout that counts as passed: for `pass_at_<n>` and "
        "`pass_hat_<n>` of evaluations (no effect on training), `feedback_attempts` and "
        "`tasks.selector`.",
    )
    feedback_attempts: Count = Field(
        default=0,
        ge=0,
        description="Maximum number of times that the workflow runs again in the same rollout, "
        "with the judge's feedback as its argument `feedback`, while the reward is below "
        "`pass_reward`. The rollout's reward is the last one.",
    )
    signal_patience: Count = Field(
        default=3,
        ge=1,
        description="Consecutive steps with nothing to learn. Then a run that has never learned "
        "anything stops, as does one whose rollouts fail. A run whose rollouts all have the "
        "maximum reward ends early as complete. Any other run continues with a warning.",
    )
    max_slots: int = Field(
        default=64,
        ge=1,
        le=MOST_AT_ONCE,
        description="Maximum number of answers generated concurrently.",
    )
    max_calls: Count | None = Field(
        default=None, ge=1, description="Maximum number of calls per rollout. Not set: unlimited."
    )
    max_tokens: Count | None = Field(
        default=None,
        ge=1,
        description="Maximum number of generated tokens per rollout. Not set: unlimited.",
    )
    max_tool_seconds: Seconds | None = Field(
        default=None,
        gt=0,
        description="Maximum seconds per attempt in the agent's code and tools, while no call "
        "is in flight. Not set: limited only by `explorer.max_timeout`.",
    )
    reasoning: Literal["template", "keep"] = Field(
        default="template",
        description="Earlier reasoning that the chat template or the agent omits from a prompt: "
        "leave it out (`template`), or restore it as sampled (`keep`).",
    )
    layout: LayoutSetting = Field(
        default="auto",
        description="How a micro-batch is computed: each distinct token once (`tree`), or rows "
        "of calls, concatenated (`packed`) or side by side (`padded`). `auto`: for each step the "
        "one that takes least time by its passes, tokens and attended pairs; with "
        "`tuner.deterministic` `tree`. If the model does not support a layout, the next one is "
        "used and the reason is logged. The gradient is the same.",
    )
    auxiliary_models: Annotated[dict[str, RemoteModel], null_is(dict)] = Field(
        default_factory=dict,
        description="Frozen models behind OpenAI-compatible URLs, by name, each with the keys "
        "below.",
    )
    trinity: TrinitySection = TrinitySection()
    serving: ServingSection = ServingSection()

    @property
    def exact_layout(self) -> LayoutSetting:
        """`layout`, without a choice by measured time where results must not depend on it."""
        return "tree" if self.layout == "auto" and self.deterministic else self.layout

    @field_validator("on_failure", mode="before")
    @classmethod
    def _known_policy(cls, value: Any) -> Any:
        if not isinstance(value, (dict, Penalize)) and value not in ("drop", "abort"):
            raise ValueError("Input should be drop, abort or {penalize: value}")
        return value

    @field_validator("workers", mode="before")
    @classmethod
    def _here(cls, value: Any) -> Any:
        if isinstance(value, bool) or (isinstance(value, str) and value not in ("auto", "ray")):
            raise ValueError("Input should be 0, a number of processes, auto or ray")
        return value

    @field_validator("imports", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value or ()


MonitorName = Literal["tensorboard", "wandb", "mlflow", "swanlab"]


class TrainerSection(Section):
    """`trainer.*`"""

    save_interval: Count = Field(
        default=0, ge=0, description="Steps between checkpoints; 0: only at the end."
    )
    grad_clip: float = Field(default=1.0, gt=0, description="Maximum norm of the gradient.")
    max_token_len_per_gpu: Count | None = Field(
        default=None,
        ge=1,
        description="Maximum tokens in a micro-batch; no effect on the gradient. Not set: 2 "
        "contexts.",
    )
    optimizer_offload: bool = Field(
        default=False,
        description="Keep the optimizer state in main memory and compute its step on the CPU. "
        "Affects memory and speed, not the result.",
    )
    critic_warmup: Count = Field(
        default=0,
        ge=0,
        description="Number of initial steps in which only the critic is trained. For ppo.",
    )
    max_checkpoints_to_keep: Count = Field(
        default=0,
        ge=0,
        description="Maximum number of checkpoints; older ones are deleted. 0 keeps all.",
    )

    @property
    def micro_batch_tokens(self) -> int:
        """`max_token_len_per_gpu`; a run sets it to 2 contexts if it is not set."""
        return self.max_token_len_per_gpu or 16384


class ClusterSection(Section):
    """`cluster.*`"""

    ray_address: str | None = Field(
        default=None,
        description="Address of the Ray cluster, `host:port`, for the workers of "
        "`tuner.workers: ray`; the local backend does not use it for anything else.",
    )


class MonitorSection(Section):
    """`monitor.*`"""

    monitor_type: tuple[MonitorName, ...] = Field(
        default=("tensorboard",),
        description="Destinations of metrics in addition to the console and `metrics.jsonl`: "
        "tensorboard, wandb, mlflow, swanlab, or a list of them.",
    )
    monitor_args: Arguments = Field(
        default_factory=dict,
        description="Passed to each monitor unchanged; arguments below a monitor's name are "
        "only for that one ([trackers](looking.md#trackers)). Give passwords and keys as "
        "`${oc.env:NAME}`.",
    )

    @field_validator("monitor_type", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value


class RunConfig(Section):
    """Every setting of a run."""

    _references: dict[str, str] = PrivateAttr(default_factory=dict)
    mode: Literal["both", "explore", "train"] = Field(
        default="both",
        description="Rollouts and training (`both`); rollouts that are recorded, without "
        "training (`explore`); or training on recorded data (`train`). Not set: the mode "
        "required by the algorithm and `tuner.history`.",
    )
    project: str = Field(default="runs", min_length=1, description="Folder of related runs.")
    name: str = Field(
        # Runs that start in the same second are different runs.
        default_factory=lambda: f"{datetime.now():Experiment-%Y%m%d%H%M%S}-{secrets.token_hex(4)}",
        min_length=1,
        description="Name of the run. Not set: `Experiment-<time>`, a new run each time.",
    )
    checkpoint_root_dir: Path = Field(
        default=Path("./checkpoints"),
        description="The run directory is `<checkpoint_root_dir>/<project>/<name>`.",
    )
    continue_from_checkpoint: bool = Field(
        default=True,
        description="Resume a run of this name. false: start a new run next to it.",
    )
    algorithm: AlgorithmSection = AlgorithmSection()
    model: ModelSection = ModelSection()
    buffer: BufferSection = BufferSection()
    explorer: ExplorerSection = ExplorerSection()
    synchronizer: SynchronizerSection = SynchronizerSection()
    trainer: TrainerSection = TrainerSection()
    monitor: MonitorSection = MonitorSection()
    cluster: ClusterSection = ClusterSection()
    tuner: TunerSection = TunerSection()

    @model_validator(mode="before")
    @classmethod
    def _mode_of_the_algorithm(cls, given: Any) -> Any:
        if not isinstance(given, dict) or given.get("mode") is not None:
            return given
        algorithm, tuner = given.get("algorithm"), given.get("tuner")
        name = algorithm.get("algorithm_type") if isinstance(algorithm, dict) else None
        recorded = any(row.recorded and key == name for key, row in ALGORITHMS.items())
        if isinstance(tuner, dict) and tuner.get("history") is not None:
            recorded = True
        return {**given, "mode": "train" if recorded else "both"}

    @property
    def run_dir(self) -> Path:
        """`<checkpoint_root_dir>/<project>/<name>`."""
        return self.checkpoint_root_dir / self.project / self.name

    def rollout_args(self, taskset: TasksetSection | EvalTasksetSection) -> RolloutArgs:
        """Sampling settings of a set of tasks, with defaults from `model.*`.

        Only `max_tokens` may still be None: the room left in the context.
        """
        own, model = taskset.rollout_args, self.model
        return RolloutArgs(
            temperature=model.temperature if own.temperature is None else own.temperature,
            top_p=model.top_p if own.top_p is None else own.top_p,
            top_k=model.top_k if own.top_k is None else own.top_k,
            max_tokens=model.max_response_tokens if own.max_tokens is None else own.max_tokens,
        )

    @property
    def call_discount(self) -> float | None:
        """Discount from one call to the next; None: calls are not credited with later rewards."""
        advantage = self.algorithm.advantage
        if isinstance(advantage, GiGPOAdvantage):
            return advantage.gamma
        return self.tuner.algorithm.turn_discount

    @property
    def uses_reference(self) -> bool:
        """Whether training needs the initial policy."""
        algorithm = self.algorithm
        teaches = algorithm.advantage_fn == "prompt_distill"
        return (
            algorithm.kl_in_loss
            or algorithm.penalizes_kl
            or algorithm.policy_loss_fn == "dpo"
            or (teaches and self.tuner.algorithm.prompt_teacher == "start")
        )

    @property
    def concurrent_rollouts(self) -> int:
        """Maximum number of concurrent rollouts: `explorer.runner_per_model`, or for `auto` those
        under way, up to the number that the engine generates for at once."""
        explorer = self.explorer
        if explorer.runner_per_model != "auto":
            return explorer.runner_per_model
        if self.tuner.engine.urls:  # servers may have room for any number
            return FEW_ROLLOUTS
        steps = 1 + self.synchronizer.sync_offset
        under_way = self.buffer.batch_size * self.algorithm.repeat_times * steps
        held = self.tuner.max_slots * explorer.rollout_model.engine_num
        return max(FEW_ROLLOUTS, min(held, under_way, MOST_AT_ONCE))

    @property
    def longest_answer(self) -> int | None:
        """Maximum tokens of an answer during training; None if only the context limits it."""
        return self.rollout_args(self.buffer.explorer_input.taskset).max_tokens

    def to_yaml(self) -> str:
        """The effective configuration as YAML; `load_config` reads it back unchanged, except for
        secrets that were given in clear text."""
        return as_yaml(concealed(_escaped(self.model_dump(mode="json")), self._references))

    def public(self) -> dict[str, Any]:
        """The effective configuration without secrets, as JSON."""
        return dict(concealed(self.model_dump(mode="json"), {}))


def _escaped(value: Any) -> Any:
    """`value` with every `${` escaped, so it is not an interpolation."""
    if isinstance(value, dict):
        return {key: _escaped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escaped(item) for item in value]
    return value.replace("${", r"\${") if isinstance(value, str) else value
