"""The interface of an environment for `tune(environment=...)`."""

from __future__ import annotations

import asyncio
import difflib
import inspect
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from pydantic import ValidationError

from tuner.config.load import Layers, mode_of, read_layers
from tuner.config.schema import EnvironmentSection, TunerSection
from tuner.config.source import lookup
from tuner.errors import ConfigError, FunctionError, problem_text
from tuner.runs.directory import outside_event_loop
from tuner.tasks.functions import WorkflowOutput, end_run, shown
from tuner.tasks.loading import import_module_or_file, load_named
from tuner.tasks.settings import WITHOUT_FILE, TuneArguments, settings_of

# `kind` in the file -> its class.
CLASSES: dict[str, str] = {
    "areal": "tuner.environments.areal_environments:Areal",
    "gymnasium": "tuner.environments.gymnasium_environments:Gymnasium",
    "harbor": "tuner.environments.harbor_tasks:Harbor",
    "mixture": "tuner.environments.mixture:Mixture",
    "openenv": "tuner.environments.openenv:OpenEnv",
    "program": "tuner.environments.program:Program",
    "reasoning_gym": "tuner.environments.reasoning_gym_sets:ReasoningGym",
    "textarena": "tuner.environments.textarena_games:TextArena",
    "trl": "tuner.environments.trl:TRL",
    "verifiers": "tuner.environments.verifiers_environments:Verifiers",
}
# Kinds that a text names with the first argument: `reasoning_gym:chain_sum`. Each is the name of a
# library's package, so no module of the user's is meant.
_BY_NAME = ("gymnasium", "harbor", "openenv", "reasoning_gym", "textarena", "verifiers")
# Package of the given object's class -> our class for it.
_BRINGERS: dict[str, str] = {
    "gymnasium": "tuner.environments.gymnasium_environments:Gymnasium",
    "openenv": "tuner.environments.openenv:OpenEnv",
    "verifiers": "tuner.environments.verifiers_environments:Verifiers",
}
# First seed of evaluation.
HELD_OUT = 1_000_000


class Environment(ABC):
    """A workflow, a judge and datasets that belong together.

    Each format is a subclass. Failures inside the environment are raised by `workflow` or `judge`
    and become the rollout's outcome; errors known before any rollout are raised by the constructor.

    Attributes:
        judge: A judge's function, like that of `tune()`; None if `workflow` gives the reward.
        train_dataset, eval_dataset: Like those of `tune()`; None if the caller names them.
        settings: Settings of the environment by dotted key, used if nothing else sets them.
        named: Whether the file names it.
    """

    judge: Callable[..., Any] | None = None
    train_dataset: Any = None
    eval_dataset: Any = None
    settings: Mapping[str, Any] = {}
    named = False  # in the file, so a run's config.yaml names it, too
    _ended = False

    @abstractmethod
    async def workflow(self, task: dict[str, Any], model: Any) -> WorkflowOutput:
        """Run the environment's agent once; a subclass may take a workflow's other arguments."""

    async def close(self) -> None:
        """Release the environment's resources, however the run ended.

        Called in the event loop of the rollouts, after the last of them; without rollouts, in
        another loop. It may be used, and closed, again: each candidate of an evaluation has its own
        event loop.
        """
        return None

    async def run_ended(self) -> None:
        """Call `close()`, and record that it was called."""
        self._ended = True
        await self.close()

    def __getstate__(self) -> dict[str, Any]:
        """State for a Ray worker, with `workflow` and `judge` but without the datasets."""
        return {**self.__dict__, "train_dataset": None, "eval_dataset": None}


def seed_rows(
    train_tasks: int, eval_tasks: int
) -> tuple[list[dict[str, int]] | None, list[dict[str, int]] | None]:
    """Training and evaluation sets without common seeds, for an environment whose tasks are
    seeds."""
    train = [{"seed": seed} for seed in range(train_tasks)]
    held_out = [{"seed": HELD_OUT + number} for number in range(eval_tasks)]
    return train or None, held_out or None


def near(name: str, known: Iterable[str]) -> str:
    """The end of an error's sentence: the names that may be meant, else the first of them."""
    meant = difflib.get_close_matches(name, known, n=3) or [*sorted(known)[:20], "..."]
    return f"; there is {', '.join(meant)}"


def brought(found: Any) -> Environment:
    """Convert an environment to ours.

    Args:
        found: An `Environment`, an object of a supported library, or `kind:name`.

    Raises:
        FunctionError: It is neither.
    """
    if isinstance(found, Environment):
        return found
    if isinstance(found, str) and (named := _by_name(found, "environment")) is not None:
        return named
    for made in type(found).__mro__:
        if bringer := _BRINGERS.get(made.__module__.partition(".")[0]):
            environment: Environment = _class_of(bringer)(found)
            return environment
    hint = " (pass an instance)" if isinstance(found, type) else ""
    raise FunctionError(
        f"environment is {shown(found)}{hint}: pass a tuner.environments.Environment, an object "
        f"of {', '.join(_BRINGERS)}, or a text such as reasoning_gym:NAME ({', '.join(_BY_NAME)})"
    )


def _by_name(text: str, setting: str) -> Environment | None:
    """The environment `kind:name`, or None if the text is another reference."""
    kind, _, name = text.partition(":")
    if kind not in _BY_NAME:
        return None
    if not name:
        raise ConfigError(f"{setting} is {text!r}: expected '{kind}:' and its first argument")
    made: Environment = _class_of(CLASSES[kind])(name)
    return made


def from_settings(given: str | EnvironmentSection | Mapping[str, Any], setting: str) -> Environment:
    """The environment that a file names.

    Args:
        given: `package.module:name` or `path/file.py:name` of an environment, or of a function
            that makes one; `kind:name`; or `{kind: ...}` with the arguments of its class.
        setting: Its key, for error messages.

    Raises:
        ConfigError: It cannot be loaded or made.
        FunctionError: The loaded object is not an environment.
    """
    if isinstance(given, str):
        if (known := _by_name(given, setting)) is not None:
            known.named = True
            return known
        found = load_named(given, setting=setting, kind="environment")
        makes = inspect.isroutine(found) or isinstance(found, type)
        known = brought(_made(found, {}, f"{setting} is {given!r}") if makes else found)
        known.named = True
        return known
    if not isinstance(given, EnvironmentSection):
        try:
            given = EnvironmentSection.model_validate(dict(given))
        except ValidationError as error:
            said = problem_text(error.errors()[0])
            raise ConfigError(f"{setting} is {dict(given)!r:.120}: {said}") from None
    assert given.kind is not None, "that of a queue agent is made with it"
    what = f"{setting}.kind is {given.kind!r}"
    environment: Environment = _made(_class_of(CLASSES[given.kind]), given.arguments, what)
    environment.named = True
    return environment


def named_in(section: TunerSection) -> Environment | None:
    """The environment named in a file, or None; loads the file's `imports` first. Raises like
    `from_settings`."""
    if section.environment is None or section.agent is not None:
        return None
    for module in section.imports:
        import_module_or_file(module, setting="tuner.imports")
    return from_settings(section.environment, "tuner.environment")


def _class_of(reference: str) -> Any:
    module, _, name = reference.partition(":")
    return getattr(import_module(module), name)


def _made(maker: Callable[..., Any], arguments: Mapping[str, Any], what: str) -> Any:
    """Raises ConfigError if the maker does not take the arguments."""
    signature = inspect.signature(maker)
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise ConfigError(
            f"{what}, which is {getattr(maker, '__qualname__', maker)}{signature} and does not "
            f"take the arguments {', '.join(arguments) or 'none'}: {error}"
        ) from None
    return maker(**arguments)


@dataclass(frozen=True)
class Parts:
    """Arguments of `tune()`, with an environment split into its parts.

    Attributes:
        environment: The environment, or None.
        given: The other arguments, including those from the environment.
    """

    environment: Environment | None
    workflow: Callable[..., Any] | None
    judge: Callable[..., Any] | None
    train_dataset: Any
    given: TuneArguments

    @contextmanager
    def closing(self, *, unless_well: bool = False) -> Iterator[Parts]:
        """Close the environment when the block ends.

        Args:
            unless_well: Leave it open if nothing is raised, because the caller continues with it.
        """
        environment, well = self.environment, False
        if environment is not None:
            environment._ended = False
        try:
            yield self
            well = unless_well
        finally:
            if environment is not None and not environment._ended and not well:
                outside_event_loop(lambda: asyncio.run(end_run(environment.workflow)))


def parts_of(
    workflow: Callable[..., Any] | None,
    judge: Callable[..., Any] | None,
    train_dataset: Any,
    given: TuneArguments,
) -> Parts:
    """Put an environment's workflow, judge and datasets in their places.

    A dataset from the caller or the file wins over the environment's.

    Raises:
        FunctionError: It is not an environment, or a workflow or judge is given, too.
        ConfigError: The file cannot be read.
    """
    if given.get("environment") is None:
        return Parts(None, workflow, judge, train_dataset, given)
    for name, function in (("workflow_func", workflow), ("judge_func", judge)):
        if function is not None:
            raise FunctionError(
                f"environment and {name} are given, but an environment has its own workflow and "
                "judge: remove one of them"
            )
    environment = brought(given["environment"])
    layers = read_layers(
        given.get("config_path"),
        settings_of(None, None, None, **given),
        given.get("overrides", ()),
    )
    rest: TuneArguments = {**given, "environment": None}
    if rest.get("eval_dataset") is None and not _names_evaluation(layers):
        rest["eval_dataset"] = environment.eval_dataset
    if train_dataset is None and _rolls_out(layers) and not lookup(layers.tree, _TASKSET):
        train_dataset = environment.train_dataset
    own = _missing(environment.settings, layers, given)
    if not environment.named and lookup(layers.tree, "tuner.environment") is not None:
        own.append("tuner.environment=null")  # Python wins over the file
    rest["overrides"] = [*own, *given.get("overrides", ())]
    return Parts(environment, environment.workflow, environment.judge, train_dataset, rest)


_TASKSET = "buffer.explorer_input.taskset.path"


def _rolls_out(layers: Layers) -> bool:
    """Whether the environment's tasks are trained, and not recorded data."""
    return mode_of(layers.tree) != "train"


def _names_evaluation(layers: Layers) -> bool:
    found = lookup(layers.tree, "buffer.explorer_input.eval_tasksets") or ()
    return any(isinstance(one, Mapping) and one.get("path") for one in found)


def _missing(settings: Mapping[str, Any], layers: Layers, given: TuneArguments) -> list[str]:
    """An environment's settings that nothing else sets, as overrides."""
    unmade = WITHOUT_FILE if given.get("config_path") is None else {}
    return [
        f"{key}={json.dumps(value)}"
        for key, value in settings.items()
        if lookup(layers.tree, key) in (None, unmade.get(key))
    ]
