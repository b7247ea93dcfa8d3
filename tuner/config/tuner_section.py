"""`tuner.*`: keys of our own, and the sections below them that are not in another file."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, field_validator, model_validator

from tuner.config.algorithm import AlgorithmExtras, CriticSection
from tuner.config.explorer import BranchingSection, EngineSection, RaySection
from tuner.config.history import HistorySection
from tuner.config.section import Arguments, Section, null_is
from tuner.config.serving import ServingSection
from tuner.errors import ConfigError


class Penalize(Section):
    """`tuner.on_failure: {penalize: value}`"""

    penalize: float = Field(
        allow_inf_nan=False, description="Reward of a rollout that gives none itself."
    )


class RemoteModel(Section):
    """A frozen model behind an OpenAI-compatible URL, for workflows and judges."""

    base_url: str = Field(
        pattern=r"^https?://", description="URL of the API, usually ending in `/v1`."
    )
    model_name: str = Field(min_length=1, description="The model's name at that URL.")
    api_key_env: str | None = Field(
        default=None, min_length=1, description="Environment variable that holds the API key."
    )
    max_concurrent: int | None = Field(
        default=None,
        ge=1,
        description="Requests to it at the same time, of all rollouts. Not set: any number.",
    )
    input_price: float | None = Field(
        default=None,
        ge=0,
        allow_inf_nan=False,
        description="Money for a million tokens that it reads.",
    )
    output_price: float | None = Field(
        default=None,
        ge=0,
        allow_inf_nan=False,
        description="Money for a million tokens that it writes.",
    )

    @property
    def prices(self) -> tuple[float, float]:
        """For a million tokens read, and written; 0 where it is not said."""
        return self.input_price or 0.0, self.output_price or 0.0

    def api_key(self, setting: str) -> str:
        """The API key; "none" where none is needed.

        Args:
            setting: Where this model is set, as the message names it.

        Raises:
            ConfigError: The environment variable that should hold it is not set.
        """
        key = os.environ.get(self.api_key_env) if self.api_key_env else "none"
        if key is None:
            raise ConfigError(
                f"{setting}.api_key_env = {self.api_key_env!r}: this environment variable is not "
                "set; set it, or leave api_key_env out if no key is needed"
            )
        return key

    def cost(self, input_tokens: int, output_tokens: int) -> float | None:
        """What so many tokens cost; None where neither price is set, of which one is else 0."""
        if self.input_price is None and self.output_price is None:
            return None
        read, written = self.prices
        return (input_tokens * read + output_tokens * written) / 1e6


class NamedClass(Section):
    """`tuner.agent.*`: a class by name, and what its constructor gets."""

    type: str = Field(
        min_length=1,
        description="The name it is registered under, or `package.module:Class`, or "
        "`path/file.py:Class`.",
    )
    args: Arguments = Field(
        default_factory=dict,
        description="Arguments of its constructor, given as they are; `gconfig` becomes a "
        "`GenerationHyperparameters`.",
    )


SELECTORS = ("success", "stratified")
Weight = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_FUNCTION = re.compile(r"[^:]+:[^:]+")


class SelectorSection(Section):
    """`tuner.tasks.selector.*`: which tasks a step draws, in place of one order of all of them."""

    kind: str = Field(
        default="success",
        description="`success`: tasks that are always or never solved are drawn less; "
        "`stratified`: of each value of `field` its share, each in an order of its own; or a "
        "function that gives each task a weight (`package.module:function`, "
        "`path/file.py:function`; [curriculum](curriculum.md)).",
    )
    field: str | None = Field(
        default=None,
        min_length=1,
        description="A field of the tasks. Each of its values has its share of every step, as far "
        "as whole tasks go, whichever `kind` draws inside it. Needed for `stratified`.",
    )
    weights: Annotated[dict[str, Weight], null_is(dict)] = Field(
        default_factory=dict,
        description="How much of a step goes to each value of `field`, in proportion; all of them "
        "are named. Not set: as many tasks as it has.",
    )
    floor: float = Field(
        default=0.1,
        gt=0,
        le=1,
        description="The lowest weight of a task, as a share of the highest: so often, beside the "
        "task that is drawn most, every task is still drawn. 1 draws all alike. Not with "
        "`stratified`.",
    )

    @field_validator("kind")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in SELECTORS and not _FUNCTION.fullmatch(value):
            raise ValueError(f"Input should be {', '.join(SELECTORS)} or module:function")
        return value


class TasksSection(Section):
    """`tuner.tasks.*`: which tasks a step trains on."""

    selector: SelectorSection | None = None


KINDS = ("verifiers", "openenv", "trl", "gymnasium", "areal", "program", "mixture")


class EnvironmentSection(Section):
    """`tuner.environment.*`: an environment in somebody's format; or that of a queue agent."""

    model_config = ConfigDict(extra="allow")

    kind: Literal[KINDS] | None = Field(  # type: ignore[valid-type]  # the table is elsewhere too
        default=None,
        description="The format. All further keys are arguments of its class "
        "([environments](environments.md)).",
    )
    type: str | None = Field(
        default=None,
        min_length=1,
        description="Of a queue agent, in place of `kind`: as `tuner.agent.type`.",
    )
    args: Arguments = Field(default_factory=dict, description="Beside `type`: as the agent's.")

    @classmethod
    def takes_more(cls, given: Mapping[str, Any]) -> bool:
        return "kind" in given

    @model_validator(mode="after")
    def _one_form(self) -> EnvironmentSection:
        if (self.kind is None) == (self.type is None):
            raise ValueError(f"give either kind ({', '.join(KINDS)}), or, beside tuner.agent, type")
        return self

    @property
    def arguments(self) -> dict[str, Any]:
        """What the class of `kind` is made with."""
        own = {"args": self.args} if "args" in self.model_fields_set else {}
        return {**own, **(self.model_extra or {})}


NamedOrMade = Annotated[
    Annotated[str, Tag("named")] | Annotated[EnvironmentSection, Tag("made")],
    Discriminator(lambda given: "named" if isinstance(given, str) else "made"),
]


class TrinitySection(Section):
    """`tuner.trinity.*`: read by the backend `trinity` alone."""

    experiences: Literal["merged", "calls"] = Field(
        default="merged",
        description="What Trinity-RFT trains on: a rollout's calls, merged where one continues the "
        "other, or each call by itself. With `token-mean` the gradient is the same.",
    )


class TunerSection(Section):
    """`tuner.*`: keys of our own; Trinity-RFT does not know them."""

    workflow: str | None = Field(
        default=None,
        description="The workflow for `tuner run` and `tuner check`: `package.module:function` "
        "or `path/file.py:function`.",
    )
    judge: str | None = Field(default=None, description="The judge, in the same form.")
    agent: NamedClass | None = Field(
        default=None,
        description="A queue agent instead of a workflow, with the keys below "
        "([from_areal](from_areal.md)).",
    )
    environment: NamedOrMade | None = Field(
        default=None,
        description="Workflow, judge and datasets in one, for the commands: the keys below, or "
        "`package.module:name` or `path/file.py:name` of an environment or of a function that "
        "makes one ([environments](environments.md)).",
    )
    imports: tuple[str, ...] = Field(
        default=(),
        description="Modules that register agents and environments, gymnasium's too: "
        "`package.module`, or `path/file.py`.",
    )
    backend: Literal["auto", "local", "trinity"] = Field(
        default="auto",
        description="Who runs the loop: this process, or [Trinity-RFT on Ray](trinity.md). `auto` "
        "is `trinity` where `cluster.node_num` x `cluster.gpu_per_node` is more than 1, or "
        "`model.tinker.enable` is true.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto",
        description="`auto` takes the GPU if there is one. On `trinity`, `cpu` says that the GPUs "
        "which `cluster` declares are only counted, as in a test.",
    )
    placement: Literal["auto", "colocate", "separate"] = Field(
        default="auto",
        description="Where an engine with weights of its own is: on the trainer's GPU "
        "(`colocate`), or on other GPUs (`separate`). `auto` takes what fits and says why "
        "([engines](engines.md)).",
    )
    engine: EngineSection = EngineSection()
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto",
        description="Type of the weights of policy, engine and reference. `auto` is `bfloat16` on "
        "a GPU that computes with it, and `float32` elsewhere. With `bfloat16` the optimizer keeps "
        "a float32 copy of the policy's.",
    )
    optimizer_state: Literal["float32", "8bit"] = Field(
        default="float32",
        description="Precision of Adam's two moments; `8bit` needs bitsandbytes (extra `gpu`).",
    )
    activation_checkpointing: bool | Literal["auto"] = Field(
        default="auto",
        description="Compute layers again for the backward pass: less memory. `auto`: on a GPU "
        "that has no room otherwise.",
    )
    compile: bool | None = Field(
        default=None,
        description="Compile the layers for training: less time and memory, for a first start that "
        "takes about a minute longer. Not set: on a GPU.",
    )
    seed: int = Field(default=42, ge=0, description="Seed of sampling and initialisation.")
    deterministic: bool = Field(
        default=False,
        description="Same weights, bit for bit, from the same seed, also after a kill. Rollouts "
        "and answers then come one after the other, so it is many times slower.",
    )
    on_failure: Literal["drop", "abort"] | Penalize = Field(
        default="drop",
        description="A rollout that gives no reward: leave it out (`drop`), give it one "
        "(`{penalize: value}`), or stop the run (`abort`).",
    )
    tasks: TasksSection = TasksSection()
    workers: Annotated[int, Field(ge=0)] | Literal["auto", "ray"] = Field(
        default=0,
        description="Processes that run the workflow and the judge, beside the one with gateway, "
        "engine and trainer; 0: that one runs them. `auto` begins with as many as there are cores, "
        "and says after the first step how many stay and why ([scaling](scaling.md)). `ray`: on "
        "the machines of the cluster at `cluster.ray_address`, as `tuner.ray` says.",
    )
    ray: RaySection = RaySection()
    branching: BranchingSection | None = None
    history: HistorySection | None = None
    algorithm: AlgorithmExtras = AlgorithmExtras()
    critic: CriticSection = CriticSection()
    pass_reward: float = Field(
        default=1.0,
        allow_inf_nan=False,
        description="A rollout has passed with at least this reward: for `pass_at_<n>` and "
        "`pass_hat_<n>` of evaluations, which change nothing that is trained, for "
        "`feedback_attempts` and for `tasks.selector`.",
    )
    feedback_attempts: int = Field(
        default=0,
        ge=0,
        description="How often the workflow runs again in the same rollout, with the judge's "
        "feedback as its argument `feedback`, while the reward is below `pass_reward`; the last "
        "reward is the rollout's.",
    )
    signal_patience: int = Field(
        default=3,
        ge=1,
        description="Steps in a row without anything to learn from. Then a run that never had any "
        "stops, and so does one whose rollouts fail; one whose rollouts all have the highest "
        "reward ends early, as completed; any other continues with a warning.",
    )
    max_slots: int = Field(default=64, ge=1, description="Answers generated together.")
    max_calls: int | None = Field(
        default=None, ge=1, description="Answers that one rollout may ask for. Not set: any number."
    )
    max_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Tokens that the model may write in one rollout. Not set: any number.",
    )
    max_tool_seconds: float | None = Field(
        default=None,
        gt=0,
        description="Seconds that one attempt at a rollout may spend in the agent's own code and "
        "tools, while no answer is awaited. Not set: `explorer.max_timeout` alone.",
    )
    reasoning: Literal["template", "keep"] = Field(
        default="template",
        description="Earlier reasoning that the chat template or the agent leaves out of a prompt: "
        "leave it out (`template`), or put it back as it was sampled (`keep`).",
    )
    layout: Literal["tree", "packed", "padded"] = Field(
        default="tree",
        description="Train each distinct token of a micro-batch once (`tree`), or rows of calls, "
        "one after another (`packed`) or side by side (`padded`). A model that cannot be computed "
        "so takes the next one, and the log says why. The gradient is the same.",
    )
    auxiliary_models: Annotated[dict[str, RemoteModel], null_is(dict)] = Field(
        default_factory=dict,
        description="Frozen models behind OpenAI-compatible URLs, by name, each with the keys "
        "below.",
    )
    trinity: TrinitySection = TrinitySection()
    serving: ServingSection = ServingSection()

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
