"""One rollout: the workflow and the judge on one task, in a separate session."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

from tuner.config.source import without_secrets
from tuner.errors import FunctionError, RewardError, RewardTimeout, WorkerError
from tuner.gateway import Gateway, SamplingDefaults, Session, SessionLimits
from tuner.gateway.script import Divergence, Script
from tuner.gateway.sessions import Access
from tuner.rollouts.limits import (
    FunctionExit,
    RolloutEnd,
    RunningFunction,
    ToolTime,
    Watchdog,
    contained,
)
from tuner.tasks.functions import (
    SPENT,
    JudgeOutput,
    Rejected,
    WorkflowOutput,
    WrongReturnError,
    call_group_judge,
    call_judge,
    call_workflow,
    judges_groups,
    raised_in,
    response_text,
    traceback_of,
    where,
)
from tuner.tasks.random_states import RandomStates
from tuner.tasks.selection import derive_seed
from tuner.traces import Call, FunctionResult, Origin, Outcome, RolloutId, Trace
from tuner.traces.store import text_of

# One attempt at a rollout: its state so far, and its trace.


@dataclass(frozen=True)
class BranchStart:
    """Another rollout, inside which one begins.

    Attributes:
        trace: That rollout.
        root: The rollout and attempt that its beginning comes from; its functions get their seed.
        calls, token: Number of calls before the branch point, in commit order, and of tokens of the
            next.
        ends: Whether the rollout ends at a divergence.
    """

    trace: Trace
    root: tuple[RolloutId, int]
    calls: int
    token: int = 0
    ends: bool = False

    def script(self) -> Script:
        """Recorded answers for one attempt; raises TunerError if the branch point does not
        exist."""
        return Script(self.trace, self.calls, self.token, ends=self.ends)

    def origin(self, left: Divergence | None) -> Origin:
        """Its origin, for the trace."""
        return Origin(
            self.trace.id,
            self.trace.attempt,
            self.calls,
            self.token,
            diverged=None if left is None else str(left),
            left_at=None if left is None else left.call,
        )


@dataclass
class Attempt:
    """State of an attempt, numbered from 1, at a rollout."""

    id: RolloutId
    task: dict[str, Any]
    number: int
    outcome: Outcome = Outcome.COMPLETED
    reward: float | None = None
    error: str | None = None
    response: Any = None
    feedback: str | None = None
    suspect: bool = False
    metrics: dict[str, float] = field(default_factory=dict)
    workflow_seconds: float = 0.0
    judge_seconds: float = 0.0
    origin: Origin | None = None
    started: float = field(default_factory=time.time)

    def check_reward(self, *, needed: bool) -> None:
        """Refuse a missing reward and record one that is not finite; a judge's was checked
        earlier."""
        if self.reward is None:
            if not needed:
                return
            raise FunctionError(
                "there is no reward: no judge was given, and the workflow returned a response "
                "alone (reward=None); return a number or WorkflowOutput(reward=...), or pass "
                "judge_func"
            )
        if not math.isfinite(self.reward):
            self.outcome, self.error = Outcome.INVALID_REWARD, not_finite("workflow", self.reward)

    def follow(self, again: BranchStart, script: Script) -> None:
        """Record where the attempt began, and whether it diverged before the branch point."""
        found = script.end()
        self.origin = again.origin(found)
        if found is not None and again.ends:
            self.outcome = Outcome.DIVERGED
            self.error = f"it repeats {again.trace.id} and has diverged {found}"

    def trace(
        self,
        calls: Sequence[Call],
        *,
        results: Sequence[FunctionResult],
        generation: float,
        needs_calls: bool,
    ) -> Trace:
        """Its trace, once its session is sealed; with `needs_calls`, one that read no answer has
        failed."""
        unread = all(call.undelivered for call in calls) and needs_calls
        if self.outcome is Outcome.COMPLETED and unread:
            self.outcome = Outcome.NO_CALLS
            self.error = (
                "the workflow read no answer of `model` to its end: there is nothing to train"
                if calls
                else "the workflow never called `model`: there is nothing to train"
            )
        return Trace(
            id=self.id,
            task=self.task,
            calls=tuple(calls),
            outcome=self.outcome,
            reward=self.reward if self.outcome is Outcome.COMPLETED else None,
            metrics=self.metrics,
            response=response_text(self.response),
            feedback=self.feedback,
            error=self.error,
            attempt=self.number,
            started=self.started,
            seconds={
                "workflow": self.workflow_seconds,
                "judge": self.judge_seconds,
                "generation": generation,
            },
            origin=self.origin,
            results=tuple(results),
        )


# Calls of the user's functions for a rollout, in this process or another.


T = TypeVar("T")
logger = logging.getLogger("tuner.rollout")


class Caller(Protocol):
    """Calls the user's functions for one attempt at a rollout, or for one group.

    Raises the function's exceptions, or `RemoteFailure` for those in another process. On
    cancellation the session is sealed before the function is notified.
    """

    @property
    def suspect(self) -> bool:
        """Whether its process ended with other rollouts in it, any of which may be the cause."""
        ...

    async def workflow(self, task: Mapping[str, Any], feedback: str | None) -> WorkflowOutput: ...

    async def judge(self, task: Mapping[str, Any], response: Any) -> JudgeOutput: ...

    async def group_judge(
        self, task: Mapping[str, Any], responses: Sequence[Any]
    ) -> list[JudgeOutput]: ...


class Workers(Protocol):
    """Worker processes for the functions; without any left, this process runs them."""

    @property
    def count(self) -> int: ...

    def calling(
        self,
        session: Session,
        auxiliary: Mapping[str, Any],
        id: RolloutId,
        *,
        seed: int | None,
        alone: bool = False,
    ) -> AbstractAsyncContextManager[Caller]:
        """A caller for the duration of the block.

        Args:
            seed: Sets the process's random states.
            alone: Whether its process runs nothing else meanwhile.
        """
        ...

    def lost(self, response: Any) -> str | None:
        """How the process with a workflow's response has ended, if it has."""
        ...


@dataclass(frozen=True)
class InProcessFunctions:
    """Calls the user's functions in this process."""

    workflow_func: Callable[..., Any]
    judge_func: Callable[..., Any] | None
    make_model: Callable[[Any], Any]
    watchdog: Watchdog
    session: Access
    auxiliary: Mapping[str, Any]
    states: RandomStates | None = None
    suspect: bool = field(default=False, init=False)

    async def workflow(self, task: Mapping[str, Any], feedback: str | None) -> WorkflowOutput:
        model = self.make_model(self.session)
        work = self._of(call_workflow, self.workflow_func, task, model=model, feedback=feedback)
        try:
            output = await self._looked_after("workflow", work)
        except WrongReturnError as error:
            raise FunctionError(await self._mistakes(error, task)) from None
        if hasattr(model, "workflow_ended"):  # frameworks whose agents can stop half-way
            model.workflow_ended()
        return output

    async def _mistakes(self, error: WrongReturnError, task: Mapping[str, Any]) -> str:
        """The workflow's mistake, and the judge's, which is tried on what the workflow returned."""
        if self.judge_func is None:
            return str(error)
        try:
            if judges_groups(self.judge_func):
                await self.group_judge(task, [error.value])
            else:
                await self.judge(task, error.value)
        except FunctionError as another:
            return f"{error}\n{another}"
        except Exception as another:
            place = place_of_error(another) or where(self.judge_func)
            return f"{error}\n{place}, tried on this value: {describe(another, None)}"
        return str(error)

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
        """A call of a function with the arguments common to all of them, and its own."""
        shared = {"auxiliary_models": self.auxiliary, "logger": logger}
        return call(func, task=dict(task), **shared, **own, apart=self.watchdog.apart)

    async def _looked_after(self, role: str, work: Coroutine[Any, Any, T]) -> T:
        others = (getattr(model, "session", None) for model in self.auxiliary.values())
        sessions = [self.session, *(other for other in others if isinstance(other, Access))]
        with self.watchdog.watching(RunningFunction(role, sessions, work)):
            if self.states is not None:
                work = self.states.stepping(work)
            return await contained(work, self.session)


# Failures of the user's functions, as an outcome and a line for people.


def not_finite(who: str, reward: float) -> str:
    return f"the {who} gave reward {reward}; a reward must be a finite number"


@dataclass(frozen=True)
class JudgeResult:
    """A judge's reward for one response, or its failure.

    `outcome` is the rollout's. Without a finite reward, `error` is a line for people and `kind` is
    the error's class or "invalid reward".
    """

    outcome: Outcome
    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    feedback: str | None = None
    error: str | None = None
    kind: str = ""

    @staticmethod
    def of(output: JudgeOutput) -> JudgeResult:
        feedback = None if output.feedback is None else without_secrets(output.feedback)
        said = output.metrics or {}, feedback
        if math.isfinite(output.reward):
            return JudgeResult(Outcome.COMPLETED, output.reward, *said)
        error = not_finite("judge", output.reward)
        return JudgeResult(Outcome.INVALID_REWARD, None, *said, error, "invalid reward")

    @staticmethod
    def failed(error: BaseException) -> JudgeResult:
        described = describe(error, None)
        return JudgeResult(of_judge(error), error=described, kind=described.partition(":")[0])

    def on(self, trace: Trace) -> Trace:
        """The trace with this judgement in place of an earlier one, if any."""
        finite = {name: value for name, value in self.metrics.items() if math.isfinite(value)}
        return replace(
            trace,
            outcome=self.outcome,
            error=self.error,
            reward=self.reward,
            feedback=self.feedback,
            metrics={**trace.metrics, **finite},
        )


async def judgements(
    ask: Callable[[], Awaitable[Sequence[JudgeOutput]]],
    count: int,
    *,
    retries: int,
    on_failure: Callable[[BaseException, JudgeResult], None] = lambda error, judgement: None,
) -> list[JudgeResult]:
    """Judgements of `count` responses; a judge that fails is called again up to `retries` times."""
    for tries_left in range(retries, -1, -1):
        try:
            return [JudgeResult.of(output) for output in await ask()]
        except (FunctionError, WorkerError):
            raise
        except (Exception, asyncio.CancelledError) as error:
            if being_cancelled():
                raise
            failure = JudgeResult.failed(error)
            if failure.outcome is Outcome.WORKER_DIED:  # with the response
                break
            if not tries_left:
                on_failure(error, failure)
    return [failure] * count


class RemoteFailure(Exception):
    """A failure of a user's function in another process; `place` and `frames` are in the user's
    code."""

    def __init__(
        self, outcome: Outcome, described: str, place: str | None = None, frames: str = ""
    ) -> None:
        super().__init__(described)
        self.outcome = outcome
        self.described = described
        self.place = place
        self.frames = frames


def of_workflow(error: BaseException, session: Access) -> tuple[Outcome, str]:
    """Outcome and message of a rollout whose workflow raised an error."""
    if isinstance(error, RemoteFailure):
        own = error.outcome is Outcome.WORKFLOW_ERROR and session.errors
        return error.outcome, describe(session.errors[-1] if own else error, None)
    if isinstance(error, Rejected):
        said = without_secrets(text_of(error, str))
        return Outcome.REJECTED, said or "the workflow rejected the rollout"
    if isinstance(error, RewardError):
        return of_judge(error), describe(error, None)
    return Outcome.WORKFLOW_ERROR, describe(error, session)


def of_judge(error: BaseException) -> Outcome:
    """Outcome of an error in the judge; a failed reward function is the judge's, whoever called
    it."""
    if isinstance(error, RemoteFailure):
        return error.outcome
    return Outcome.JUDGE_TIMEOUT if isinstance(error, RewardTimeout) else Outcome.JUDGE_ERROR


def being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


# Explanations of common Python errors.
_HINTS = {
    "'coroutine' object": " (is an `await` missing?)",
    "cannot be called from a running event loop": " (`await` the coroutine in place of that)",
}


def place_of_error(error: BaseException) -> str | None:
    """Location in the user's code at which an error was raised; None if it was not raised there."""
    return error.place if isinstance(error, RemoteFailure) else raised_in(error)


def describe(error: BaseException, session: Access | None) -> str:
    """One line for people, without secrets. An engine error says more than the client's error that
    results from it."""
    cause = session.errors[-1] if session is not None and session.errors else error
    if isinstance(cause, RemoteFailure):
        return without_secrets(cause.described)
    text = without_secrets(" ".join(text_of(cause, str).split()))
    text += next((hint for sign, hint in _HINTS.items() if sign in text), "")
    if isinstance(cause, FunctionExit):
        return text
    return f"{type(cause).__name__}: {text}" if text else type(cause).__name__


_RETRIED = (Outcome.WORKFLOW_ERROR, Outcome.TIMEOUT, Outcome.WORKER_DIED)


@dataclass(frozen=True)
class RolloutSettings:
    """Limits of one rollout.

    Attributes:
        timeout: Maximum seconds of one attempt (workflow and judge together).
        max_retries: Additional attempts after a workflow error, a timeout or the death of its
            process; a
            judge that fails is called again as many times, with the same response.
        seed: Seed of the run, from which each rollout's is derived.
        limits: Limits of the calls of one attempt.
        tool_seconds: Maximum seconds of one attempt without a call in flight; None: unlimited.
        seeds_functions: Seed the global random states of Python, NumPy and torch for each attempt
            (`RandomStates`).
        needs_reward: Whether a rollout without a reward is a bug in the program.
        feedback_attempts: Maximum number of times that the workflow runs again in the same rollout,
            with the judge's feedback on the previous attempt, while the reward is below
            `pass_reward`.
        pass_reward: See `feedback_attempts`.
        needs_calls: Whether a rollout without calls has failed; false if nothing is trained and the
            workflow has its own model.
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
    """Runs the user's functions and converts the results to traces.

    Args:
        gateway: Opens the sessions.
        workflow, judge: The user's functions; without a judge the workflow gives the reward.
        make_model: Makes the chat model of a session's agent.
        auxiliary_models: Opens the frozen models, by name, for one attempt and its seed; both
            functions get them.
        settings: Limits.
        told: Warnings that were logged, each once. Shared, like `watchdog`, with runners made from
            this one by `dataclasses.replace`.
        watchdog: Monitors the functions.
        workers: Processes that run the functions, with `make_model`, `workflow` and `judge`; None:
            this process.
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
        """Whether the judge rates a whole group; `run` then leaves rollouts unjudged."""
        return self.judge is not None and judges_groups(self.judge)

    async def run(
        self,
        task: dict[str, Any],
        id: RolloutId,
        defaults: SamplingDefaults,
        *,
        ending: RolloutEnd | None = None,
        queued: float = 0.0,
        keep: Callable[[Any], None] = lambda response: None,
        again: BranchStart | None = None,
        earlier: Sequence[Trace] = (),
    ) -> list[Trace]:
        """All attempts at one rollout; the last is final and is the one that counts.

        Args:
            defaults: Sampling settings of calls that do not set them.
            ending: Ends the rollout from outside.
            queued: Seconds that the rollout waited for a free slot.
            keep: Receives the response of the last attempt, as returned by the workflow.
            again: The rollout inside which it begins, if any.
            earlier: Attempts that are done, and come first.

        Raises:
            FunctionError: A function returned a value of the wrong type, which no retry fixes.
        """
        traces = [*earlier]
        retries = 0
        while True:
            number = len(traces) + 1
            if ending is not None and (why := ending.reason) is not None:
                never = Trace(id, task, (), Outcome.CANCELLED, None, error=why, attempt=number)
                return [*traces, never]
            alone = any(earlier.outcome is Outcome.WORKER_DIED for earlier in traces)
            trace, state = await self._attempt(
                task, id, number, defaults, ending or RolloutEnd(), again, alone
            )
            if not traces:
                trace.seconds["queue"] = queued
            died = trace.outcome is Outcome.WORKER_DIED
            if died and not state.suspect:
                found = f"no other rollout was in it, and its task is {text_of(task):.200}"
                trace = replace(trace, error=f"{trace.error}; {found}")
                logger.warning("%s, attempt %d: %s", id, number, trace.error)
            if died and state.suspect:
                logger.info("%s, attempt %d: %s; beginning again alone", id, number, trace.error)
            elif trace.outcome not in _RETRIED or retries == self.settings.max_retries:
                keep(state.response)
                return [*traces, trace]
            else:
                retries += 1
                logger.info("%s, attempt %d: %s; trying again", id, number, trace.error)
            traces.append(replace(trace, final=False))

    async def _attempt(
        self,
        task: dict[str, Any],
        id: RolloutId,
        number: int,
        defaults: SamplingDefaults,
        ending: RolloutEnd,
        again: BranchStart | None,
        alone: bool,
    ) -> tuple[Trace, Attempt]:
        seed = derive_seed(self.settings.seed, id, number)
        drawn = seed if again is None else derive_seed(self.settings.seed, *again.root)
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
                    self._calling(session, dict(auxiliary), id, drawn, alone=alone) as caller,
                    asyncio.timeout(self.settings.timeout) as deadline,
                ):
                    with ending.of(deadline), session.results.collecting():
                        limited = partial(tools.limiting, deadline)
                        await self._run_functions(task, session, caller, state, limited)
                    state.suspect = caller.suspect
        except TimeoutError:
            pass
        finally:
            calls = session.seal()
        if deadline.expired():  # also if the workflow swallowed its cancellation
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
        return trace, state

    def _calling(
        self,
        session: Session,
        auxiliary: dict[str, Any],
        id: RolloutId,
        drawn: int,
        *,
        alone: bool = False,
    ) -> AbstractAsyncContextManager[Caller]:
        """A caller of the functions, with the models of an attempt or of a group.

        Args:
            drawn: Seed of their random states.
        """
        seed = drawn if self.settings.seeds_functions else None
        if self.workers is not None and self.workers.count:
            return self.workers.calling(session, auxiliary, id, seed=seed, alone=alone)
        return nullcontext(
            InProcessFunctions(
                self.workflow,
                self.judge,
                self.make_model,
                self.watchdog,
                session,
                auxiliary,
                None if seed is None else RandomStates(seed),
            )
        )

    async def _run_functions(
        self,
        task: dict[str, Any],
        session: Session,
        caller: Caller,
        state: Attempt,
        limited: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Run the workflow and the judge, repeatedly if the judge gives feedback."""
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
                own: list[float] = []  # empty if another process runs it
                SPENT.set(own)
                try:
                    await self._run_judge(task, caller, state)
                finally:
                    state.judge_seconds += sum(own) if own else time.perf_counter() - started
            if state.outcome is Outcome.COMPLETED:
                needed = self.settings.needs_reward and not self.judges_groups
                state.check_reward(needed=needed)
            if state.outcome is not Outcome.COMPLETED or not self._tries_again(state, attempt):
                return

    def _tries_again(self, state: Attempt, attempt: int) -> bool:
        """Whether the judge gave feedback and another attempt is allowed."""
        if not self.settings.feedback_attempts or state.reward is None:
            return False
        state.metrics.setdefault("first_reward", state.reward)
        state.metrics["feedback_attempts"] = attempt
        return state.feedback is not None and state.reward < self.settings.pass_reward

    async def _run_workflow(
        self, task: dict[str, Any], session: Session, caller: Caller, state: Attempt
    ) -> bool:
        """Whether the workflow returned; if not, `state` has the reason."""
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
            said = any(isinstance(known, FunctionExit) for known in session.errors)
            if state.outcome is Outcome.WORKFLOW_ERROR and not said:
                self._say_where(error, state.error)
            logger.debug("%s failed", session.id, exc_info=True)
        else:
            state.response, state.reward = output.response, output.reward
            state.metrics |= self.noted(output.metrics)
            return True
        return False

    def noted(self, metrics: Mapping[str, float] | None) -> dict[str, float]:
        """The user's metrics without those that cannot be averaged, which are logged."""
        found = {}
        for name, value in (metrics or {}).items():
            if math.isfinite(value):
                found[name] = value
            elif name not in self.told:
                self.told.add(name)
                logger.warning(
                    "metric %r is %s: values that are not finite are skipped", name, value
                )
        return found

    def _say_where(self, error: BaseException, described: str) -> None:
        """Warn of an error in the user's code with its frames, once per line."""
        place = place_of_error(error)
        if place is not None and place not in self.told:
            self.told.add(place)
            frames = error.frames if isinstance(error, RemoteFailure) else traceback_of(error)
            logger.warning("%s: %s\n%s", place, described, frames.rstrip())

    async def _run_judge(self, task: dict[str, Any], caller: Caller, state: Attempt) -> None:
        async def ask() -> list[JudgeOutput]:
            return [await caller.judge(task, state.response)]

        (found,) = await self._judgements(ask, 1)
        if found.outcome in (Outcome.COMPLETED, Outcome.INVALID_REWARD):
            state.reward, state.feedback = found.reward, found.feedback
            state.metrics |= found.metrics
        state.outcome, state.error = found.outcome, found.error

    async def judge_group(
        self, task: dict[str, Any], id: RolloutId, responses: Sequence[Any], *, alone: bool
    ) -> list[JudgeResult] | None:
        """Judgements of a group's responses, in order; None if a response was lost with its
        process, and perhaps not by the judge.

        Args:
            id: The id of the group's first rollout.
            alone: Whether the judge's process runs nothing else meanwhile.
        """
        seed = derive_seed(self.settings.seed, id, "judge")
        session = self.gateway.open_session(f"{id}-judge", seed=seed, recorded=False)
        try:
            with self.auxiliary_models(session.id, seed) as auxiliary:
                async with (
                    self._calling(session, dict(auxiliary), id, seed, alone=alone) as caller,
                    asyncio.timeout(self.settings.timeout),
                ):
                    if any(self.lost(response) for response in responses):
                        return None
                    ask = partial(caller.group_judge, task, responses)
                    found = await self._judgements(ask, len(responses))
                    return None if caller.suspect else found
        except TimeoutError:
            took = f"no verdict within {self.settings.timeout:g} s (explorer.max_timeout)"
            return [JudgeResult(Outcome.JUDGE_TIMEOUT, error=took)] * len(responses)
        finally:
            session.seal()

    def lost(self, response: Any) -> str | None:
        """How the process with a workflow's response has ended, if it has."""
        return None if self.workers is None else self.workers.lost(response)

    async def _judgements(
        self, ask: Callable[[], Awaitable[Sequence[JudgeOutput]]], count: int
    ) -> list[JudgeResult]:
        found = await judgements(
            ask,
            count,
            retries=self.settings.max_retries,
            on_failure=lambda error, failure: self._say_where(error, failure.error or ""),
        )
        return [replace(one, metrics=self.noted(one.metrics)) for one in found]


# A group whose rollouts are judged together after the last one has ended.


class EndedRollout(NamedTuple):
    """The attempts at a rollout, its response, and how it is run."""

    attempts: list[Trace]
    response: Any
    make: Callable[..., Any]


@dataclass(eq=False)
class Panel:
    """Waits for the rollouts of a group, then judges the completed ones together."""

    runner: RolloutRunner
    task: dict[str, Any]
    ids: Sequence[RolloutId]
    _ended: dict[RolloutId, EndedRollout] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._judged: asyncio.Future[dict[RolloutId, Trace]] = loop.create_future()

    async def run(self, id: RolloutId, make: Callable[..., Any]) -> list[Trace]:
        """All attempts at one rollout, the last one judged; `make` makes them."""
        await self._make(id, make)
        if len(self._ended) == len(self.ids):
            try:
                self._judged.set_result(await self._verdicts())
            except Exception as error:
                self._judged.set_exception(error)
        judged = (await self._judged).get(id)
        attempts = self._ended[id].attempts
        return attempts if judged is None else [*attempts[:-1], judged]

    async def _make(self, id: RolloutId, make: Callable[..., Any], *earlier: Trace) -> None:
        responses: list[Any] = []
        attempts = await make(keep=responses.append, earlier=earlier)
        self._ended[id] = EndedRollout(attempts, responses[-1] if responses else None, make)

    async def _make_lost_again(self) -> None:
        """Run again, alone, the rollouts whose response was lost with its process."""
        while lost := {
            id: f"its response was lost: its {how}"
            for id, ended in self._ended.items()
            if (how := self.runner.lost(ended.response)) is not None
        }:
            for id, error in lost.items():
                *before, last = self._ended[id].attempts
                died = replace(
                    last, outcome=Outcome.WORKER_DIED, error=error, reward=None, final=False
                )
                await self._make(id, self._ended[id].make, *before, died)

    async def _verdicts(self) -> dict[RolloutId, Trace]:
        """The last attempts of the judged rollouts."""
        found, alone = None, False
        while found is None:
            await self._make_lost_again()
            last = {id: self._ended[id].attempts[-1] for id in sorted(self.ids)}
            completed = [id for id, trace in last.items() if trace.outcome is Outcome.COMPLETED]
            if not completed:
                return {}
            started = time.perf_counter()
            responses = [self._ended[id].response for id in completed]
            found = await self.runner.judge_group(self.task, completed[0], responses, alone=alone)
            alone = True
        seconds = time.perf_counter() - started
        return {
            id: replace(judgement.on(last[id]), seconds={**last[id].seconds, "judge": seconds})
            for id, judgement in zip(completed, found, strict=True)
        }


def panels_of(
    runner: RolloutRunner, wanted: Mapping[RolloutId, dict[str, Any]]
) -> dict[tuple[int, int], Panel]:
    """Groups of rollouts that are judged together, by step and task; none if each is judged
    alone."""
    if not runner.judges_groups:
        return {}
    groups = defaultdict[tuple[int, int], list[RolloutId]](list)
    for id in wanted:
        groups[id.step, id.task].append(id)
    return {key: Panel(runner, wanted[ids[0]], ids) for key, ids in groups.items()}
