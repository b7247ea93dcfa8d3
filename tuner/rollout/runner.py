"""One rollout: the workflow and the judge on one task, in a session of its own."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from tuner.data.order import derive_seed, seed_everything
from tuner.errors import FunctionError, WorkerError
from tuner.functions.calling import judges_groups
from tuner.functions.outputs import JudgeOutput
from tuner.gateway import Gateway, SamplingDefaults, Session, SessionLimits
from tuner.rollout.attempt import Again, Attempt
from tuner.rollout.caller import Caller, Here, Workers
from tuner.rollout.failures import (
    JudgeFailure,
    being_cancelled,
    describe,
    of_judge,
    of_workflow,
    place_of_error,
)
from tuner.rollout.limits import Ending, Exited, ToolTime
from tuner.rollout.watchdog import Watchdog
from tuner.traces import Outcome, RolloutId, Trace

T = TypeVar("T")
logger = logging.getLogger("tuner.rollout")
_RETRIED = (Outcome.WORKFLOW_ERROR, Outcome.TIMEOUT, Outcome.WORKER_DIED)


@dataclass(frozen=True)
class RolloutSettings:
    """Limits of one rollout.

    Attributes:
        timeout: Seconds that one attempt (workflow and judge together) may take.
        max_retries: Further attempts after a workflow error, a timeout or the death of the process
            that it ran in; a judge that fails is asked again as often, with the same response.
        seed: Seed of the run; each rollout derives its own from it.
        limits: What the calls of one attempt may come to.
        tool_seconds: Seconds that one attempt may spend while no call is in flight; None: any.
        seeds_functions: Set the global random states of Python, NumPy and torch at the start of
            each attempt; only one may then run at a time.
        needs_reward: Whether a rollout without a reward is a mistake in the program.
        feedback_attempts: How often the workflow runs again in the same rollout, with what the
            judge said of the attempt before, while the reward is below `pass_reward`.
        pass_reward: See `feedback_attempts`.
        needs_calls: Whether a rollout without calls has failed: not where nothing is trained, and
            the workflow brings a model of its own.
    """

    timeout: float
    max_retries: int
    seed: int
    limits: SessionLimits = field(default_factory=SessionLimits)
    tool_seconds: float | None = None
    seeds_functions: bool = False
    needs_reward: bool = True
    needs_calls: bool = True
    feedback_attempts: int = 0
    pass_reward: float = 1.0


@dataclass(eq=False)
class RolloutRunner:
    """Runs the user's functions and turns what happens into traces.

    Args:
        gateway: Where sessions are opened.
        workflow, judge: The user's functions; without a judge the workflow gives the reward.
        make_model: The chat model that a session's agent gets.
        auxiliary_models: Opens, for one attempt and its seed, the frozen models by the user's
            names; both functions get them.
        settings: Limits.
        told: What was warned of, once. As `watchdog` it is another runner's too that is made of
            this one by `dataclasses.replace`.
        watchdog: Looks after the functions.
        workers: Processes that the functions run in; None: this one. Then `make_model`, `workflow`
            and `judge` are called there.
    """

    gateway: Gateway
    workflow: Callable[..., Any]
    judge: Callable[..., Any] | None
    _: KW_ONLY
    make_model: Callable[[Session], Any]
    auxiliary_models: Callable[[str, int], AbstractContextManager[Mapping[str, Any]]]
    settings: RolloutSettings
    told: set[str] = field(default_factory=set)
    watchdog: Watchdog = None  # type: ignore[assignment]  # made of the settings
    workers: Workers | None = None

    def __post_init__(self) -> None:
        self.watchdog = self.watchdog or Watchdog(self.settings.timeout)

    @property
    def judges_groups(self) -> bool:
        """Whether the judge takes a group together: `run` then leaves rollouts unjudged."""
        return self.judge is not None and judges_groups(self.judge)

    async def run(
        self,
        task: dict[str, Any],
        id: RolloutId,
        defaults: SamplingDefaults,
        *,
        ending: Ending | None = None,
        queued: float = 0.0,
        keep: Callable[[Any], None] = lambda response: None,
        again: Again | None = None,
    ) -> list[Trace]:
        """All attempts at one rollout; the last is final and is the one that counts.

        Args:
            task: The dataset's row.
            id: Which rollout this is.
            defaults: What calls that do not say are sampled with.
            ending: Who may end it from outside.
            queued: Seconds that it waited until there was room for it.
            keep: Is given the response of the last attempt, as the workflow returned it.
            again: The rollout that it begins inside of, if it does.

        Raises:
            FunctionError: A function returned something of the wrong type: a mistake in the
                program, which no retry and no training would mend.
        """
        traces: list[Trace] = []
        while True:
            number = len(traces) + 1
            if ending is not None and (why := ending.reason) is not None:
                never = Trace(id, task, (), Outcome.CANCELLED, None, error=why, attempt=number)
                return [*traces, never]
            trace, response = await self._attempt(
                task, id, number, defaults, ending or Ending(), again
            )
            if not traces:
                trace.seconds["queue"] = queued
            if trace.outcome not in _RETRIED or number > self.settings.max_retries:
                keep(response)
                return [*traces, trace]
            logger.info("%s, attempt %d: %s; trying again", id, number, trace.error)
            traces.append(replace(trace, final=False))

    async def _attempt(
        self,
        task: dict[str, Any],
        id: RolloutId,
        number: int,
        defaults: SamplingDefaults,
        ending: Ending,
        again: Again | None,
    ) -> tuple[Trace, Any]:
        seed = derive_seed(self.settings.seed, id, number)
        drawn = seed if again is None else derive_seed(self.settings.seed, *again.root)
        if self.settings.seeds_functions:
            seed_everything(drawn)
        script = None if again is None else again.script()
        session = self.gateway.open_session(
            f"{id}-{number}",
            seed=seed,
            defaults=defaults,
            limits=self.settings.limits,
            script=script,
        )
        state = Attempt(id, task, number)
        tools = ToolTime(self.settings.tool_seconds, session)
        try:
            with self.auxiliary_models(session.id, seed) as auxiliary:
                async with (
                    self._calling(session, dict(auxiliary), id, drawn) as caller,
                    asyncio.timeout(self.settings.timeout) as deadline,
                ):
                    with ending.of(deadline), session.results.collecting():
                        limited = partial(tools.limiting, deadline)
                        await self._run_functions(task, session, caller, state, limited)
        except TimeoutError:
            pass
        finally:
            calls = session.seal()
        if deadline.expired():  # also when the workflow swallowed its cancellation
            state.outcome = Outcome.TIMEOUT
            state.error = f"no result within {self.settings.timeout:g} s (explorer.max_timeout)"
            if ending.reason is not None:
                state.outcome, state.error = Outcome.CANCELLED, ending.reason
            elif tools.exceeded:
                state.error = (
                    f"{self.settings.tool_seconds:g} s in the agent's own code and tools "
                    "(tuner.max_tool_seconds)"
                )
        if again is not None and script is not None:
            state.follow(again, script)
        trace = state.trace(
            calls,
            results=session.results.kept,
            generation=session.in_flight.seconds,
            needs_calls=self.settings.needs_calls,
        )
        return trace, state.response

    def _calling(
        self, session: Session, auxiliary: dict[str, Any], id: RolloutId, seed: int | None = None
    ) -> AbstractAsyncContextManager[Caller]:
        """Who calls the functions, with the models of an attempt or of a group."""
        if self.workers is not None and self.workers.count:
            seed = seed if self.settings.seeds_functions else None
            return self.workers.calling(session, auxiliary, id, seed=seed)
        return nullcontext(
            Here(self.workflow, self.judge, self.make_model, self.watchdog, session, auxiliary)
        )

    async def _run_functions(
        self,
        task: dict[str, Any],
        session: Session,
        caller: Caller,
        state: Attempt,
        limited: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """The workflow and the judge; and again where the judge says how to do better."""
        for attempt in range(self.settings.feedback_attempts + 1):
            started = time.perf_counter()
            try:
                with limited():
                    returned = await self._run_workflow(task, session, caller, state)
            finally:
                state.workflow_seconds += time.perf_counter() - started
            if not returned:
                return
            if self.judge is not None and not self.judges_groups:
                started = time.perf_counter()
                try:
                    await self._run_judge(task, caller, state)
                finally:
                    state.judge_seconds += time.perf_counter() - started
            if state.outcome is Outcome.COMPLETED:
                needed = self.settings.needs_reward and not self.judges_groups
                state.check_reward(judged=self.judge is not None, needed=needed)
            if state.outcome is not Outcome.COMPLETED or not self._tries_again(state, attempt):
                return

    def _tries_again(self, state: Attempt, attempt: int) -> bool:
        """Whether the judge said how to do better, and there may be a further attempt."""
        if not self.settings.feedback_attempts or state.reward is None:
            return False
        state.metrics.setdefault("first_reward", state.reward)
        state.metrics["feedback_attempts"] = attempt
        return state.feedback is not None and state.reward < self.settings.pass_reward

    async def _run_workflow(
        self, task: dict[str, Any], session: Session, caller: Caller, state: Attempt
    ) -> bool:
        """Whether it returned; if not, `state` says why."""
        try:
            output = await caller.workflow(task, state.feedback)
        except asyncio.CancelledError:
            if being_cancelled():
                raise
            state.outcome, state.error = Outcome.CANCELLED, "the workflow cancelled itself"
        except (FunctionError, WorkerError):
            raise
        except Exception as error:
            state.outcome, state.error = of_workflow(error, session)
            said = any(isinstance(known, Exited) for known in session.errors)
            if state.outcome is Outcome.WORKFLOW_ERROR and not said:
                self._say_where(error, state.error)
            logger.debug("%s failed", session.id, exc_info=True)
        else:
            state.response, state.reward = output.response, output.reward
            state.metrics |= self.noted(output.metrics)
            return True
        return False

    def noted(self, metrics: Mapping[str, float] | None) -> dict[str, float]:
        """The user's metrics but those that no mean can be taken of, which the log names."""
        found = {}
        for name, value in (metrics or {}).items():
            if math.isfinite(value):
                found[name] = value
            elif name not in self.told:
                self.told.add(name)
                logger.warning(
                    "metric %r is %s: it is left out wherever it is not finite", name, value
                )
        return found

    def _say_where(self, error: BaseException, described: str) -> None:
        """Warn of an error in the user's own code, once for each line."""
        where = place_of_error(error)
        if where is not None and where not in self.told:
            self.told.add(where)
            logger.warning("%s: %s", where, described)

    async def _run_judge(self, task: dict[str, Any], caller: Caller, state: Attempt) -> None:
        verdict = await self._verdict(partial(caller.judge, task, state.response))
        if isinstance(verdict, JudgeFailure):
            state.outcome, state.error = verdict
            return
        state.reward, state.feedback = verdict.reward, verdict.feedback
        state.metrics |= self.noted(verdict.metrics)

    async def judge_group(
        self, task: dict[str, Any], id: RolloutId, responses: Sequence[Any]
    ) -> list[JudgeOutput] | JudgeFailure:
        """What the judge says of the responses of a group, in their order.

        Args:
            task: The group's.
            id: Of its first rollout.
            responses: As the workflow returned them.

        Raises:
            FunctionError: It returned something else than an output for each.
        """
        seed = derive_seed(self.settings.seed, id, "judge")
        session = self.gateway.open_session(f"{id}-judge", seed=seed, recorded=False)
        try:
            with self.auxiliary_models(session.id, seed) as auxiliary:
                async with (
                    self._calling(session, dict(auxiliary), id) as caller,
                    asyncio.timeout(self.settings.timeout),
                ):
                    return await self._verdict(partial(caller.group_judge, task, responses))
        except TimeoutError:
            took = f"no verdict within {self.settings.timeout:g} s (explorer.max_timeout)"
            return JudgeFailure(Outcome.JUDGE_TIMEOUT, took)
        finally:
            session.seal()

    async def _verdict(self, ask: Callable[[], Awaitable[T]]) -> T | JudgeFailure:
        """What a judge says, which is asked again as often as a rollout may be tried again."""
        for tries_left in range(self.settings.max_retries, -1, -1):
            try:
                return await ask()
            except (FunctionError, WorkerError):
                raise
            except (Exception, asyncio.CancelledError) as error:
                if being_cancelled():
                    raise
                failure = JudgeFailure(of_judge(error), describe(error, None))
                if failure.outcome is Outcome.WORKER_DIED:  # with the response
                    break
                if not tries_left:
                    self._say_where(error, failure.error)
        return failure
