"""Configurations as dataclasses that users derive from, by AReaL's names; and reading them.

Each setting is one of `tuner.config`, which is what the run gets (`GRPOConfig.run_config`): there
is no second place where a default or a check lives. Other settings go into `tuner`, by the names of
docs/reference/configuration.md. They are read and checked before PyTorch is imported.
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
from tuner.config.source import parse_override, read_yaml
from tuner.errors import ConfigError

if TYPE_CHECKING:
    from tuner.areal.queue_workflow import AgentAbstraction, EnvServiceAbstraction, QueueWorkflow
    from tuner.areal.shared_run import Run


class _RunSection:
    """A section; it knows the run that its configuration describes."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    _run: Callable[[], Run] | None = None

    @property
    def run(self) -> Run:
        """The run that the actor and the rollout engine of one configuration share.

        Raises:
            ConfigError: The section was made alone.
        """
        if self._run is None:
            raise ConfigError(
                f"this {type(self).__name__} belongs to no configuration, so it does not say which "
                "model is trained: pass the section of a GRPOConfig (config.actor, config.rollout)"
            )
        return self._run()


@dataclass
class OptimizerConfig:
    """`actor.optimizer`: AdamW."""

    lr: float = setting(1e-6, "learning rate")
    weight_decay: float = setting(0.01, "decoupled weight decay")
    beta1: float = setting(0.9, "decay of the first moment")
    beta2: float = setting(0.999, "decay of the second moment")
    lr_scheduler_type: str = setting("constant", "constant, linear or cosine")
    min_lr_ratio: float = setting(0.01, "where linear and cosine end, as a share of lr")
    warmup_steps_proportion: float = setting(0.0, "share of the steps in which lr rises")
    gradient_clipping: float = setting(1.0, "upper limit of the gradient's norm")


@dataclass
class PPOActorConfig(_RunSection):
    """`actor`: the model and how it is trained."""

    path: str = setting("", "folder or Hub name of the model; empty: tuner's tiny one")
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    eps_clip: float = setting(0.2, "how far the ratio may fall below 1, and rise above it")
    eps_clip_higher: float | None = setting(None, "how far it may rise, where that differs")
    c_clip: float = setting(3.0, "dual clip: bound of the ratio for negative advantages")
    kl_ctl: float = setting(0.0, "what rewards are charged for the distance to the reference (k1)")
    reward_scaling: float = setting(1.0, "rewards become (reward + reward_bias) * this")
    reward_bias: float = setting(0.0, "see reward_scaling")
    behav_imp_weight_cap: float = setting(2.0, "bound of the weight of tokens of older weights")
    max_tokens_per_mb: int | None = setting(None, "tokens in one micro-batch")


@dataclass
class InferenceEngineConfig(_RunSection):
    """`rollout`: running workflows."""

    max_concurrent_rollouts: int = setting(16, "rollouts that run at the same time")
    max_head_offpolicyness: int = setting(0, "updates by which a sample may be too old")
    request_timeout: float = setting(3600.0, "seconds for one attempt at a rollout")
    request_retries: int = setting(0, "further attempts at a rollout that failed")


@dataclass
class DatasetConfig:
    """`train_dataset`."""

    path: str = setting("", "folder, file or Hub name")
    batch_size: int = setting(8, "tasks in one step")
    shuffle: bool = setting(True, "draw a new order for each epoch")


@dataclass
class GRPOConfig:
    """A run. Derive from it to add settings of your own; a `__post_init__` of your own calls
    `super().__post_init__()`."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    experiment_name: str = setting("areal", "folder of related runs")
    trial_name: str = setting("trial", "name of the run")
    fileroot: str = setting("./checkpoints", "runs lie in fileroot/experiment_name/trial_name")
    seed: int = setting(42, "seed of sampling and of the dataset's order")
    total_train_epochs: int = setting(1, "how often to go through the tasks")
    gconfig: GenerationHyperparameters = field(default_factory=GenerationHyperparameters)
    actor: PPOActorConfig = field(default_factory=PPOActorConfig)
    rollout: InferenceEngineConfig = field(default_factory=InferenceEngineConfig)
    train_dataset: DatasetConfig = field(default_factory=DatasetConfig)
    success_rate_lb: float = setting(0.0, "groups with fewer successes are left out: too hard")
    success_rate_ub: float = setting(1.0, "groups with more successes are left out: too easy")
    turn_discount: float | None = setting(
        None, "what a turn gets of what the next one leads to; not set: a reward is for all turns"
    )
    tuner: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "any other setting, by the names of tuner.config"}
    )

    def __post_init__(self) -> None:
        self.actor._run = self.rollout._run = cache(self._new_run)

    def _new_run(self) -> Run:
        from tuner.areal.shared_run import Run  # imports PyTorch: once the settings are in order

        return Run(self.run_config)

    @property
    def tokenizer_path(self) -> str:
        """Where the model's tokenizer is: beside the model."""
        return self.actor.run.config.model.model_path

    def run_config(self) -> RunConfig:
        """The settings of the run that this describes.

        Raises:
            ConfigError: A value is out of its range, or in conflict with another.
        """
        actor, optimizer = self.actor, self.actor.optimizer
        higher = actor.eps_clip if actor.eps_clip_higher is None else actor.eps_clip_higher
        limit: int | None = self.gconfig.max_new_tokens
        if limit == GenerationHyperparameters().max_new_tokens:
            limit = None  # the room that is left
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
        """The agent by its registered name."""
        raise _missing(self, "agent", "AgentAbstraction")

    @property
    def env(self) -> EnvServiceAbstraction:
        """The environment by its registered name."""
        raise _missing(self, "env", "EnvServiceAbstraction")

    def workflow(self) -> QueueWorkflow:
        """Both as a workflow.

        Raises:
            ConfigError: There is no such agent or environment, or it does not take the arguments.
        """
        from tuner.areal.queue_workflow import QueueWorkflow

        return QueueWorkflow(self.agent, self.env)


def _missing(config: AgentExperiment, name: str, kind: str) -> ConfigError:
    return ConfigError(
        f"{type(config).__name__} does not say its {name}: give it a property `{name}` that "
        f"returns an {kind}"
    )


ConfigT = TypeVar("ConfigT")


def load_expr_config(argv: Sequence[str], config_class: type[ConfigT]) -> tuple[ConfigT, str]:
    """A configuration from a YAML file and `key=value` overrides, checked.

    `--help` prints every setting with its type, default and meaning. The configuration as it is in
    the end is written to `<fileroot>/<experiment_name>/<trial_name>/areal.yaml`.

    Args:
        argv: `--config FILE`, which may be missing, and overrides such as `actor.eps_clip=0.3`.
        config_class: A dataclass, derived from `GRPOConfig`.

    Returns:
        The configuration, and the path of the file that was written.

    Raises:
        ConfigError: The file or an override cannot be read, or a key is unknown or of the wrong
            type; all of them are named.
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
        config.run_config()  # refuses what is in conflict
    from tuner.runs.directory import make_private

    make_private(folder)
    written = folder / "areal.yaml"
    plain = TypeAdapter(config_class).dump_python(config, mode="json")
    written.write_text(OmegaConf.to_yaml(OmegaConf.create(plain)))
    return config, str(written)


def _sentence(problem: ErrorDetails, known: Sequence[str]) -> str:
    """The problem of a setting, and what to do."""
    key = ".".join(map(str, problem["loc"]))
    if problem["type"] == "unexpected_keyword_argument":
        meant = get_close_matches(key, known, n=1)
        return f"{key} is unknown{f': is {meant[0]} meant?' if meant else ''} (--help lists all)"
    return f"{key} is {problem['input']!r}: {problem['msg'].replace('Input should', 'must')}"


def help_lines(config_class: type[Any], prefix: str = "") -> list[str]:
    """One line for each setting: key, type, default, meaning."""
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
