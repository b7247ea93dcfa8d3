"""How a function of the user's failed, as an outcome and in a line for people."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from tuner.errors import RewardError, RewardTimeout
from tuner.functions.outputs import Rejected, text_of
from tuner.functions.places import raised_in
from tuner.gateway.access import Access
from tuner.rollout.limits import Exited
from tuner.traces import Outcome


class JudgeFailure(NamedTuple):
    """How a judge failed, and what it says."""

    outcome: Outcome
    error: str


class Elsewhere(Exception):
    """How a function of the user's failed in another process, as it was described there.

    Attributes:
        outcome: The rollout's.
        described: One line for people.
        place: Where in the user's own code it came up, or None.
    """

    def __init__(self, outcome: Outcome, described: str, place: str | None = None) -> None:
        super().__init__(described)
        self.outcome = outcome
        self.described = described
        self.place = place


def of_workflow(error: BaseException, session: Access) -> tuple[Outcome, str]:
    """What a workflow's error makes of its rollout, and what it says."""
    if isinstance(error, Elsewhere):
        own = error.outcome is Outcome.WORKFLOW_ERROR and session.errors
        return error.outcome, describe(session.errors[-1] if own else error, None)
    if isinstance(error, Rejected):
        return Outcome.REJECTED, str(error) or "the workflow rejected the rollout"
    if isinstance(error, RewardError):
        return of_judge(error), describe(error, None)
    return Outcome.WORKFLOW_ERROR, describe(error, session)


def of_judge(error: BaseException) -> Outcome:
    """A reward function that failed is the judge's failure, whoever called it."""
    if isinstance(error, Elsewhere):
        return error.outcome
    return Outcome.JUDGE_TIMEOUT if isinstance(error, RewardTimeout) else Outcome.JUDGE_ERROR


def being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


# What an error of Python's own means here.
_HINTS = {
    "'coroutine' object": " (is an `await` missing?)",
    "cannot be called from a running event loop": " (`await` the coroutine in place of that)",
}


def place_of_error(error: BaseException) -> str | None:
    """Where in the user's own code an error came up; None where it did not."""
    return error.place if isinstance(error, Elsewhere) else raised_in(error)


def describe(error: BaseException, session: Access | None) -> str:
    """One line for people. An error of the engine says more than what the client made of it."""
    cause = session.errors[-1] if session is not None and session.errors else error
    if isinstance(cause, Elsewhere):
        return cause.described
    text = " ".join(text_of(cause, str).split())
    text += next((hint for sign, hint in _HINTS.items() if sign in text), "")
    if isinstance(cause, Exited):
        return text
    return f"{type(cause).__name__}: {text}" if text else type(cause).__name__
