"""Any gymnasium environment as an `EnvironmentService`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tuner.areal.queues import EnvironmentService, Step
from tuner.areal.registry import register_environment
from tuner.errors import MissingDependencyError
from tuner.functions.calling import in_thread


class GymnasiumEnvironment(EnvironmentService):
    """A gymnasium environment whose calls run in a thread each, one after the other.

    Args:
        id: A registered id such as "FrozenLake-v1", or an environment.
        read_action: Turns what the agent gives `step` into the environment's action.
        make_args: Given to `gymnasium.make`.

    Raises:
        MissingDependencyError: An id is given and gymnasium is not installed.
    """

    def __init__(
        self, id: str | Any, read_action: Callable[[Any], Any] | None = None, **make_args: Any
    ) -> None:
        self.env: Any = _make(id, **make_args) if isinstance(id, str) else id
        self._read_action = read_action

    async def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """As gymnasium's `Env.reset`."""
        answer: tuple[Any, dict[str, Any]] = await in_thread(
            functools.partial(self.env.reset, seed=seed, options=options)
        )
        return answer

    async def step(self, action: Any) -> Step:
        """As gymnasium's `Env.step`."""
        if self._read_action is not None:
            action = self._read_action(action)
        answer: Step = await in_thread(functools.partial(self.env.step, action))
        return answer

    async def close(self) -> None:
        """As gymnasium's `Env.close`."""
        await in_thread(self.env.close)


def _make(id: str, **args: Any) -> Any:
    try:
        import gymnasium
    except ImportError as error:
        raise MissingDependencyError(
            f"environment {id!r} needs gymnasium, which does not import ({error}): "
            "pip install 'agentscope-tuner[gymnasium]'"
        ) from error
    return gymnasium.make(id, **args)


register_environment("gymnasium", GymnasiumEnvironment)
