"""Configuration dataclasses with AReaL's names, for users to subclass, and their loader.

Each setting corresponds to one of `tuner.config`, which the run receives (`GRPOConfig.run_config`),
so defaults and checks exist only there. Other settings go into `tuner`, with the names of
docs/reference/configuration.md. They are checked before PyTorch is imported.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from omegaconf import OmegaConf
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from tuner.areal.hyperparameters import GenerationHyperparameters, setting
from tuner.config import RunConfig, load_config
from tuner.config.foreign import read_table
from tuner.config.source import as_yaml, parse_override, read_yaml
from tuner.errors import ConfigError, problem_text

if TYPE_CHECKING:
    from tuner.areal.queue_workflow import AgentAbstraction, EnvServiceAbstraction, QueueWorkflow
    from tuner.areal.shared_run import Run


class _RunSection:
    """A section with a reference to the run that its configuration describes."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    _run: Callable[[], Run] | None = None

    @property
    def run(self) -> Run:
        """The run shared by the actor and the rollout engine of one configuration.

        Raises:
            ConfigError: The section does not belong to a configuration.
        """
        if self._run is None:
            raise ConfigError(
                f"this {type(self).__name__} belongs to no configuration, so the trained model is "
                "unknown: pass the section of a GRPOConfig (config.actor, config.rollout)"
            )
        return self._run()


@dataclass
class OptimizerConfig:
    """`actor.optimizer`: AdamW."""

    lr: float = setting(1e-6, "learning rate")
    weight_decay: float = setting(0.01, "decoupled weight decay")
    beta1: float = setting(0.9, "decay rate of the first moment")
    beta2: float = setting(0.999, "decay rate of the second moment")
    lr_scheduler_type: str = setting("constant", "constant, linear or cosine")
    min_lr_ratio: float = setting(0.01, "final lr of linear and cosine, as a fraction of lr")
    warmup_steps_proportion: float = setting(0.0, "fraction of the steps in which lr rises")
    gradient_clipping: float = setting(1.0, "maximum norm of the gradient")


@dataclass
class PPOActorConfig(_RunSection):
    """`actor`: the model and how it is trained."""

    path: str = setting("", "folder or Hub name of the model; empty: tuner's tiny one")
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    eps_clip: float = setting(0.2, "maximum distance of the ratio from 1, in both directions")
    eps_clip_higher: float | None = setting(None, "maximum distance above 1, if different")
    c_clip: float = setting(3.0, "dual clip: bound of the ratio for negative advantages")
    kl_ctl: float = setting(0.0, "weight of the KL penalty (k1) on rewards")
    reward_scaling: float = setting(1.0, "rewards become (reward + reward_bias) * reward_scaling")
    reward_bias: float = setting(0.0, "see reward_scaling")
    behav_imp_weight_cap: float = setting(2.0, "maximum importance weight of older tokens")
    max_tokens_per_mb: int | None = setting(None, "maximum tokens in a micro-batch")


@dataclass
class InferenceEngineConfig(_RunSection):
    """`rollout`: execution of workflows."""

    max_concurrent_rollouts: int = setting(16, "maximum number of concurrent rollouts")
    max_head_offpolicyness: int = setting(0, "maximum age of a sample, in updates")
    request_timeout: float = setting(3600.0, "time limit of an attempt at a rollout, in seconds")
    request_retries: int = setting(0, "additional attempts at a failed rollout")


@dataclass
class DatasetConfig:
    """`train_dataset`."""

    path: str = setting("", "folder, file or Hub name")
    batch_size: int = setting(8, "tasks per step")
    shuffle: bool = setting(True, "draw a new order for each epoch")


@dataclass
class GRPOConfig:
    """A run. Subclass it to add settings; a `__post_init__` of the subclass must call
    `super().__post_init__()`."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    experiment_name: str = setting("areal", "folder of related runs")
    trial_name: str = setting("trial", "name of the run")
    fileroot: str = setting("./checkpoints", "runs are in fileroot/experiment_name/trial_name")
    seed: int = setting(42, "seed of sampling and of the dataset's order")
    total_train_epochs: int = setting(1, "passes over the tasks")
    gconfig: GenerationHyperparameters = field(default_factory=GenerationHyperparameters)
    actor: PPOActorConfig = field(default_factory=PPOActorConfig)
    rollout: InferenceEngineConfig = field(default_factory=InferenceEngineConfig)
    train_dataset: DatasetConfig = field(default_factory=DatasetConfig)
    success_rate_lb: float = setting(0.0, "groups with fewer successes are skipped as too hard")
    success_rate_ub: float = setting(1.0, "groups with more successes are skipped as too easy")
    turn_discount: float | None = setting(
        None, "discount from a turn to the previous one; not set: all turns get the reward"
    )
    tuner: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "any other setting, with the names of tuner.config"}
    )

    def __post_init__(self) -> None:
        self.actor._run = self.rollout._run = cache(self._new_run)

    def _new_run(self) -> Run:
        # imports PyTorch, so only after the settings are checked
        from tuner.areal.shared_run import Run

        return Run(self.run_config)

    @property
    def tokenizer_path(self) -> str:
        """Location of the model's tokenizer: the model's folder."""
        return self.actor.run.config.model.model_path

    def run_config(self) -> RunConfig:
        """The settings of the run.

        Raises:
            ConfigError: A value is out of range or conflicts with another.
        """
        actor, optimizer = self.actor, self.actor.optimizer
        higher = actor.eps_clip if actor.eps_clip_higher is None else actor.eps_clip_higher
        limit: int | None = self.gconfig.max_new_tokens
        if limit == GenerationHyperparameters().max_new_tokens:
            limit = None  # the remaining room
        table = read_table(Path(__file__).with_name("areal_keys.yaml"))
        selector = "buffer.explorer_input.taskset.data_selector"
        given: dict[str, Any] = {key: attrgetter(field)(self) for field, key in table.items()} | {
            "model.max_response_tokens": limit,
            "algorithm.repeat_times": max(2, self.gconfig.n_samples),
            "algorithm.optimizer.betas": [optimizer.beta1, optimizer.beta2],
            "algorithm.policy_loss_fn_args.clip_range_high": higher,
            "algorithm.kl_loss_fn": "none",
            "algorithm.kl_penalty_fn": "k1" if actor.kl_ctl else "none",
            "algorithm.kl_penalty_fn_args.kl_coef": actor.kl_ctl or None,
            "buffer.explorer_input.taskset.path": self.train_dataset.path or None,
            f"{selector}.selector_type": "shuffle" if self.train_dataset.shuffle else "sequential",
            f"{selector}.seed": self.seed,
        }
        settings = OmegaConf.create({})
        for key, value in given.items():
            if value is not None:
                OmegaConf.update(settings, key, value)
        merged: Any = OmegaConf.to_container(OmegaConf.merge(settings, self.tuner))
        return load_config(None, settings=merged)


class AgentExperiment:
    """Second base class of a configuration whose `agent` and `env` are properties."""

    @property
    def agent(self) -> AgentAbstraction:
        """The agent, by its registered name."""
        raise _missing(self, "agent", "AgentAbstraction")

    @property
    def env(self) -> EnvServiceAbstraction:
        """The environment, by its registered name."""
        raise _missing(self, "env", "EnvServiceAbstraction")

    def workflow(self) -> QueueWorkflow:
        """Agent and environment as a workflow.

        Raises:
            ConfigError: The agent or environment does not exist, or does not take the arguments.
        """
        from tuner.areal.queue_workflow import QueueWorkflow

        return QueueWorkflow(self.agent, self.env)


def _missing(config: AgentExperiment, name: str, kind: str) -> ConfigError:
    return ConfigError(
        f"{type(config).__name__} does not set its {name}: add a property `{name}` that "
        f"returns an {kind}"
    )


ConfigT = TypeVar("ConfigT")


def load_expr_config(argv: Sequence[str], config_class: type[ConfigT]) -> tuple[ConfigT, str]:
    """Load and check a configuration from a YAML file and `key=value` overrides.

    `--help` prints every setting with its type, default and meaning. The resulting configuration is
    written to `<fileroot>/<experiment_name>/<trial_name>/areal.yaml`.

    Args:
        argv: `--config FILE`, which is optional, and overrides such as `actor.eps_clip=0.3`.
        config_class: A dataclass, derived from `GRPOConfig`.

    Returns:
        The configuration, and the path of the file that was written.

    Raises:
        ConfigError: The file or an override cannot be read, or keys are unknown or of the wrong
            type; names all of them.
    """
    parser = argparse.ArgumentParser(
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="\n".join([f"Settings of {config_class.__name__}:", *help_lines(config_class)]),
    )
    parser.add_argument("--config", type=Path, help="YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_args(list(argv))
    tree = OmegaConf.create({} if arguments.config is None else read_yaml(arguments.config).tree)
    for text in arguments.overrides:
        override = parse_override(text)
        OmegaConf.update(tree, override.key, override.value, force_add=True)
    values = OmegaConf.to_container(tree, resolve=True)
    try:
        config = TypeAdapter(config_class).validate_python(values)
    except ValidationError as error:
        known = [line.split(" (")[0].strip() for line in help_lines(config_class)]
        lines = [_sentence(problem, known) for problem in error.errors()]
        raise ConfigError(f"{config_class.__name__}: {'; '.join(lines)}") from None
    folder = Path(config.fileroot) / config.experiment_name / config.trial_name  # type: ignore[attr-defined]
    if isinstance(config, GRPOConfig):
        config.run_config()  # raises on conflicts
    from tuner.runs.directory import make_private

    make_private(folder)
    written = folder / "areal.yaml"
    plain = TypeAdapter(config_class).dump_python(config, mode="json")
    written.write_text(as_yaml(plain))
    return config, str(written)


def _sentence(problem: ErrorDetails, known: Sequence[str]) -> str:
    """A problem with a setting, and its fix."""
    key = ".".join(map(str, problem["loc"]))
    if problem["type"] == "unexpected_keyword_argument":
        meant = get_close_matches(key, known, n=1)
        return f"{key} is unknown{f': is {meant[0]} meant?' if meant else ''} (--help lists all)"
    return f"{key} is {problem['input']!r}: {problem_text(problem).replace('Input should', 'must')}"


def help_lines(config_class: type[Any], prefix: str = "") -> list[str]:
    """One line per setting: key, type, default, meaning."""
    instance, lines = config_class(), []
    for info in fields(config_class):
        value = getattr(instance, info.name)
        if is_dataclass(value):
            lines += help_lines(type(value), f"{prefix}{info.name}.")
            continue
        meaning = info.metadata.get("help", "")
        kind = getattr(info.type, "__name__", info.type)
        lines.append(f"  {prefix}{info.name} ({kind}, {value!r})  {meaning}".rstrip())
    return lines
