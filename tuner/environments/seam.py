"""The seam: what somebody's environment has to be for `tune(environment=...)`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from importlib import import_module
from typing import Any

from tuner.errors import FunctionError
from tuner.functions.outputs import WorkflowOutput, shown

# Package whose class was given -> who brings it.
_BRINGERS: dict[str, str] = {}


class Environment(ABC):
    """A workflow, a judge and datasets that belong together.

    A format is one subclass. What fails inside the environment is raised by `workflow` or `judge`,
    and so becomes the rollout's outcome; what is wrong before any rollout is an error of the
    constructor.

    Attributes:
        judge: A judge's function, as `tune()` takes it; None where `workflow` gives the reward.
        train_dataset, eval_dataset: As `tune()` takes them; None where the caller names them.
    """

    judge: Callable[..., Any] | None = None
    train_dataset: Any = None
    eval_dataset: Any = None

    @abstractmethod
    async def workflow(self, task: dict[str, Any], model: Any) -> WorkflowOutput:
        """Run the environment's agent once; a subclass may take a workflow's other arguments."""

    async def close(self) -> None:
        """Give back what the environment holds; called once, however the run ended."""
        return None


def brought(found: Any) -> Environment:
    """What was given as an environment, as ours.

    Args:
        found: An `Environment`, or an object of a library that is known here.

    Raises:
        FunctionError: It is neither.
    """
    if isinstance(found, Environment):
        return found
    for made in type(found).__mro__:
        if bringer := _BRINGERS.get(made.__module__.partition(".")[0]):
            module, _, name = bringer.partition(":")
            environment: Environment = getattr(import_module(module), name)(found)
            return environment
    raise FunctionError(
        f"environment is {shown(found)}: pass a tuner.environments.Environment, or an object of "
        f"{', '.join(_BRINGERS)}"
    )
