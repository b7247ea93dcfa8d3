"""AReaL's queue agents with their environments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tuner.areal.queue_workflow import AgentAbstraction, EnvServiceAbstraction, QueueWorkflow
from tuner.errors import ConfigError
from tuner.runs.environment import Environment
from tuner.tasks.loading import import_module_or_file


class Areal(Environment):
    """A queue agent and its environment: `QueueWorkflow`, with datasets.

    Args:
        agent, environment: Like those of `QueueWorkflow`; or `{"type": ..., "args": {...}}`, like
            `tuner.agent` and `tuner.environment` in the file.
        imports: Modules that register them, `package.module` or `path/file.py`.
        train_dataset, eval_dataset: Like those of `tune()`.

    Raises:
        ConfigError, FunctionError: Like `QueueWorkflow`; or a module cannot be imported.
    """

    def __init__(
        self,
        agent: Any,
        environment: Any,
        *,
        imports: str | tuple[str, ...] | list[str] = (),
        train_dataset: Any = None,
        eval_dataset: Any = None,
    ) -> None:
        for module in [imports] if isinstance(imports, str) else imports:
            import_module_or_file(module, setting="imports of the environment")
        self._queue = QueueWorkflow(
            _named(agent, AgentAbstraction), _named(environment, EnvServiceAbstraction)
        )
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset

    @property
    def workflow(self) -> Callable[..., Any]:
        """The `QueueWorkflow` itself."""
        return self._queue

    async def close(self) -> None:
        """Close every environment without a running episode."""
        await self._queue.run_ended()


def _named(given: Any, abstraction: Callable[..., Any]) -> Any:
    if not isinstance(given, Mapping):
        return given
    if unknown := {*given} - {"type", "args"} or "type" not in given:
        raise ConfigError(f"{dict(given)!r:.80}: use only the keys type and args ({unknown})")
    return abstraction(given["type"], given.get("args") or {})
