"""One rollout: the workflow and the judge on one task, in a session of its own."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

from tuner.data.order import derive_seed, seed_everything
from tuner.errors import FunctionError, RewardError, RewardTimeout
from tuner.functions.calling import call_judge, call_workflow
from tuner.functions.outputs import Rejected, text_of
from tuner.gateway import Gateway, SamplingDefaults, Session, SessionLimits
from tuner.rollout.limits import Ending, Exited, ToolTime, contained
from tuner.rollout.watchdog import Running, Watchdog, raised_in
from tuner.traces import Outcome, RolloutId, Trace

logger = logging.getLogger("tuner.rollout")


@dataclass(frozen=True)
class RolloutSettings:
    """Limits of one rollout.

    Attributes:
        timeout: Seconds that one attempt (workflow and judge together) may take.
        max_retries: Further attempts after a workflow error or a timeout; a judge that fails is
            asked again as often, with the same response.
        seed: Seed of the run; each rollout derives its own from it.
        limits: What the calls of one attempt may come to.
        tool_seconds: Seconds that one attempt may spend while no call is in flight; None: any.
        deterministic: Set the global random states of Python, NumPy and torch at the start of
            each attempt; only one may then run at a time.
        needs_reward: Whether a rollout without a reward is a mistake in the program.
        needs_calls: Whether a rollout without calls has failed: not where nothing is trained, and
            the workflow brings a model of its own.
    """

    timeout: float
    max_retries: int
    seed: int
    limits: SessionLimits = field(default_factory=SessionLimits)
    tool_seconds: float | None = None
    deterministic: bool = False
    needs_reward: bool = True
    needs_calls: bool = True


@dataclass
class _Attempt:
    """What is known of an attempt so far."""

    outcome: Outcome = Outcome.COMPLETED
    reward: float | None = None
    error: str | None = None
    response: Any = None
    feedback: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    workflow_seconds: float = 0.0
    judge_seconds: float = 0.0


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

    def __post_init__(self) -> None:
        self.watchdog = self.watchdog or Watchdog(self.settings.timeout)

    async def run(
        self,
        task: dict[str, Any],
        id: RolloutId,
        defaults: SamplingDefaults,
        *,
        ending: Ending | None = None,
        queued: float = 0.0,
    ) -> list[Trace]:
        """All attempts at one rollout; the last is final and is the one that counts.

        Args:
            task: The dataset's row.
            id: Which rollout this is.
            defaults: What calls that do not say are sampled with.
            ending: Who may end it from outside.
            queued: Seconds that it waited until there was room for it.

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
            trace = await self._attempt(task, id, number, defaults, ending or Ending())
            if not traces:
                trace.seconds["queue"] = queued
            retry = trace.outcome in (Outcome.WORKFLOW_ERROR, Outcome.TIMEOUT)
            if not retry or number > self.settings.max_retries:
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
    ) -> Trace:
        started = time.time()
        seed = derive_seed(self.settings.seed, id, number)
        if self.settings.deterministic:
            seed_everything(seed)
        session = self.gateway.open_session(
            f"{id}-{number}", seed=seed, defaults=defaults, limits=self.settings.limits
        )
        state = _Attempt()
        tools = ToolTime(self.settings.tool_seconds, session)
        try:
            with self.auxiliary_models(session.id, seed) as auxiliary:
                async with asyncio.timeout(self.settings.timeout) as deadline:
                    with ending.of(deadline):
                        limited = tools.limiting(deadline)
                        await self._run_functions(task, session, dict(auxiliary), state, limited)
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
        unread = all(call.undelivered for call in calls) and self.settings.needs_calls
        if state.outcome is Outcome.COMPLETED and unread:
            state.outcome = Outcome.NO_CALLS
            state.error = (
                "the workflow read no answer of `model` to its end: there is nothing to train"
                if calls
                else "the workflow never called `model`: there is nothing to train"
            )
        if state.outcome is not Outcome.COMPLETED:
            state.reward = None
        return Trace(
            id=id,
            task=task,
            calls=calls,
            outcome=state.outcome,
            reward=state.reward,
            metrics=state.metrics,
            response=_as_text(state.response),
            feedback=state.feedback,
            error=state.error,
            attempt=number,
            started=started,
            seconds={
                "workflow": state.workflow_seconds,
                "judge": state.judge_seconds,
                "generation": session.in_flight.seconds,
            },
        )

    async def _run_functions(
        self,
        task: dict[str, Any],
        session: Session,
        auxiliary: dict[str, Any],
        state: _Attempt,
        limited: AbstractContextManager[None],
    ) -> None:
        started = time.perf_counter()
        try:
            model = self.make_model(session)
            sessions = _sessions(session, auxiliary)
            with limited:
                work = call_workflow(
                    self.workflow,
                    task=dict(task),
                    model=model,
                    auxiliary_models=auxiliary,
                    logger=logger,
                    apart=self.watchdog.apart,
                )
                with self.watchdog.watching(Running("workflow", sessions, work)):
                    output = await contained(work, session)
            if hasattr(model, "workflow_ended"):  # frameworks whose agents can stop half-way
                model.workflow_ended()
        except asyncio.CancelledError:
            if _being_cancelled():
                raise
            state.outcome, state.error = Outcome.CANCELLED, "the workflow cancelled itself"
            return
        except FunctionError:
            raise
        except Rejected as rejection:
            state.outcome = Outcome.REJECTED
            state.error = str(rejection) or "the workflow rejected the rollout"
            return
        except RewardError as error:
            state.outcome, state.error = _of_judge(error), _describe(error, None)
            return
        except Exception as error:
            state.outcome, state.error = Outcome.WORKFLOW_ERROR, _describe(error, session)
            if not any(isinstance(known, Exited) for known in session.errors):  # which says it
                self._say_where(error, state.error)
            logger.debug("%s failed", session.id, exc_info=True)
            return
        finally:
            state.workflow_seconds = time.perf_counter() - started
        state.response, state.reward = output.response, output.reward
        self._note(state, output.metrics)
        if self.judge is not None:
            started = time.perf_counter()
            try:
                await self._run_judge(task, session, auxiliary, state)
            finally:
                state.judge_seconds = time.perf_counter() - started
        if state.outcome is Outcome.COMPLETED:
            _check_reward(state, judged=self.judge is not None, needed=self.settings.needs_reward)

    def _note(self, state: _Attempt, metrics: Mapping[str, float] | None) -> None:
        """Keep the user's metrics but those that no mean can be taken of, which the log names."""
        for name, value in (metrics or {}).items():
            if math.isfinite(value):
                state.metrics[name] = value
            elif name not in self.told:
                self.told.add(name)
                logger.warning(
                    "metric %r is %s: it is left out wherever it is not finite", name, value
                )

    def _say_where(self, error: BaseException, described: str) -> None:
        """Warn of an error in the user's own code, once for each line."""
        where = raised_in(error)
        if where is not None and where not in self.told:
            self.told.add(where)
            logger.warning("%s: %s", where, described)

    async def _run_judge(
        self,
        task: dict[str, Any],
        session: Session,
        auxiliary: dict[str, Any],
        state: _Attempt,
    ) -> None:
        assert self.judge is not None
        for tries_left in range(self.settings.max_retries, -1, -1):
            try:
                work = call_judge(
                    self.judge,
                    task=dict(task),
                    response=state.response,
                    auxiliary_models=auxiliary,
                    logger=logger,
                    apart=self.watchdog.apart,
                )
                with self.watchdog.watching(Running("judge", _sessions(session, auxiliary), work)):
                    verdict = await contained(work, session)
            except FunctionError:
                raise
            except (Exception, asyncio.CancelledError) as error:
                if _being_cancelled():
                    raise
                if tries_left:
                    continue
                state.outcome, state.error = _of_judge(error), _describe(error, None)
                self._say_where(error, state.error)
            else:
                state.reward, state.feedback = verdict.reward, verdict.feedback
                self._note(state, verdict.metrics)
            return


def _check_reward(state: _Attempt, *, judged: bool, needed: bool) -> None:
    if state.reward is None:
        if not needed:
            return
        # `as_judge_output` refuses a judge without a reward, so only the workflow can get here.
        raise FunctionError(
            "there is no reward: no judge was given and the workflow returned WorkflowOutput("
            "reward=None); set `reward` in the workflow or pass judge_func"
        )
    if not math.isfinite(state.reward):
        who = "judge" if judged else "workflow"
        state.outcome = Outcome.INVALID_REWARD
        state.error = f"the {who} gave reward {state.reward}; a reward must be a finite number"


def _sessions(session: Session, auxiliary: Mapping[str, Any]) -> list[Session]:
    """An attempt's session, and those of its auxiliary models that are served here."""
    found = (getattr(model, "session", None) for model in auxiliary.values())
    return [session, *(other for other in found if isinstance(other, Session))]


def _of_judge(error: BaseException) -> Outcome:
    """A reward function that failed is the judge's failure, whoever called it."""
    return Outcome.JUDGE_TIMEOUT if isinstance(error, RewardTimeout) else Outcome.JUDGE_ERROR


def _being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


# What an error of Python's own means here.
_HINTS = {
    "'coroutine' object": " (is an `await` missing?)",
    "cannot be called from a running event loop": " (`await` the coroutine in place of that)",
}


def _describe(error: BaseException, session: Session | None) -> str:
    """One line for people. An error of the engine says more than what the client made of it."""
    cause = session.errors[-1] if session is not None and session.errors else error
    text = " ".join(text_of(cause, str).split())
    text += next((hint for sign, hint in _HINTS.items() if sign in text), "")
    if isinstance(cause, Exited):
        return text
    return f"{type(cause).__name__}: {text}" if text else type(cause).__name__


def _as_text(response: Any) -> str:
    if response is None:
        return ""
    get_text = getattr(response, "get_text_content", None)
    if callable(get_text):
        return text_of(response, lambda _: get_text() or "")
    return response if isinstance(response, str) else text_of(response)
