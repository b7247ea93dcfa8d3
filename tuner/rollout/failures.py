"""How a function of the user's failed, as an outcome and in a line for people."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from tuner.errors import RewardTimeout
from tuner.functions.outputs import text_of
from tuner.gateway import Session
from tuner.rollout.limits import Exited
from tuner.traces import Outcome


class JudgeFailure(NamedTuple):
    """How a judge failed, and what it says."""

    outcome: Outcome
    error: str


def of_judge(error: BaseException) -> Outcome:
    """A reward function that failed is the judge's failure, whoever called it."""
    return Outcome.JUDGE_TIMEOUT if isinstance(error, RewardTimeout) else Outcome.JUDGE_ERROR


def being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


# What an error of Python's own means here.
_HINTS = {
    "'coroutine' object": " (is an `await` missing?)",
    "cannot be called from a running event loop": " (`await` the coroutine in place of that)",
}


def describe(error: BaseException, session: Session | None) -> str:
    """One line for people. An error of the engine says more than what the client made of it."""
    cause = session.errors[-1] if session is not None and session.errors else error
    text = " ".join(text_of(cause, str).split())
    text += next((hint for sign, hint in _HINTS.items() if sign in text), "")
    if isinstance(cause, Exited):
        return text
    return f"{type(cause).__name__}: {text}" if text else type(cause).__name__
