"""Who calls the user's functions for a rollout: this process, or another."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from tuner.functions.calling import call_group_judge, call_judge, call_workflow
from tuner.functions.outputs import JudgeOutput, WorkflowOutput
from tuner.gateway import Session
from tuner.gateway.access import Access
from tuner.rollout.limits import contained
from tuner.rollout.watchdog import Running, Watchdog
from tuner.traces import RolloutId

T = TypeVar("T")
logger = logging.getLogger("tuner.rollout")


class Caller(Protocol):
    """Calls the user's functions for one attempt at a rollout, or for one group.

    Each raises what the function does, or `Elsewhere` for what it did in another process. When one
    is cancelled the session is sealed before the function hears of it.
    """

    async def workflow(self, task: Mapping[str, Any], feedback: str | None) -> WorkflowOutput: ...

    async def judge(self, task: Mapping[str, Any], response: Any) -> JudgeOutput: ...

    async def group_judge(
        self, task: Mapping[str, Any], responses: Sequence[Any]
    ) -> list[JudgeOutput]: ...


class Workers(Protocol):
    """Processes that the functions run in; where there is none any more, this process is."""

    @property
    def count(self) -> int: ...

    def calling(
        self, session: Session, auxiliary: Mapping[str, Any], id: RolloutId, *, seed: int | None
    ) -> AbstractAsyncContextManager[Caller]:
        """A caller for the time of the block.

        Args:
            session: The attempt's, or the group's.
            auxiliary: The models that both functions get.
            id: Of the rollout, or the group's first.
            seed: For the process's global random states, or None.
        """
        ...


@dataclass(frozen=True)
class Here:
    """Calls them in this process.

    Args:
        workflow_func, judge_func: The user's functions.
        make_model: The chat model that a session's agent gets.
        watchdog: Looks after the functions.
        session: The attempt's, or the group's.
        auxiliary: The models that both functions get.
    """

    workflow_func: Callable[..., Any]
    judge_func: Callable[..., Any] | None
    make_model: Callable[[Any], Any]
    watchdog: Watchdog
    session: Access
    auxiliary: Mapping[str, Any]

    async def workflow(self, task: Mapping[str, Any], feedback: str | None) -> WorkflowOutput:
        model = self.make_model(self.session)
        work = self._of(call_workflow, self.workflow_func, task, model=model, feedback=feedback)
        output = await self._looked_after("workflow", work)
        if hasattr(model, "workflow_ended"):  # frameworks whose agents can stop half-way
            model.workflow_ended()
        return output

    async def judge(self, task: Mapping[str, Any], response: Any) -> JudgeOutput:
        work = self._of(call_judge, self.judge_func, task, response=response)
        return await self._looked_after("judge", work)

    async def group_judge(
        self, task: Mapping[str, Any], responses: Sequence[Any]
    ) -> list[JudgeOutput]:
        work = self._of(call_group_judge, self.judge_func, task, responses=responses)
        return await self._looked_after("judge", work)

    def _of(
        self,
        call: Callable[..., Coroutine[Any, Any, T]],
        func: Callable[..., Any] | None,
        task: Mapping[str, Any],
        **own: Any,
    ) -> Coroutine[Any, Any, T]:
        """A call of a function with what all of them get, and what is its own."""
        shared = {"auxiliary_models": self.auxiliary, "logger": logger}
        return call(func, task=dict(task), **shared, **own, apart=self.watchdog.apart)

    async def _looked_after(self, role: str, work: Coroutine[Any, Any, T]) -> T:
        others = (getattr(model, "session", None) for model in self.auxiliary.values())
        sessions = [self.session, *(other for other in others if isinstance(other, Access))]
        with self.watchdog.watching(Running(role, sessions, work)):
            return await contained(work, self.session)
