"""The judge: the user's function that scores the workflow's response."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from pydantic import Field

from tuner.errors import FunctionError
from tuner.workflow import (
    FunctionOutput,
    Signature,
    TaskRow,
    call_function,
    check_function,
    where,
    wrong_return,
)


class JudgeOutput(FunctionOutput):
    """What a judge returns.

    Attributes:
        reward: The score; required.
        metrics: Numbers to log besides the reward.
    """

    reward: float = Field()
    metrics: dict[str, float] | None = Field(default=None)


JudgeType = Callable[..., Awaitable[JudgeOutput]]

JUDGE = Signature(
    "judge", ("task", "response"), ("auxiliary_models", "logger"), JudgeOutput.__name__
)


def check_judge_function(func: Callable[..., Any]) -> None:
    """Check that `func` can be called as a judge; imports nothing and calls nothing.

    Raises:
        FunctionError: It is no function, or its parameters do not fit.
    """
    check_function(func, JUDGE)


async def call_judge(
    func: Callable[..., Any],
    *,
    task: Mapping[str, Any],
    response: Any,
    auxiliary_models: Mapping[str, Any],
    logger: Any,
) -> JudgeOutput:
    """Run a judge with the arguments it takes.

    Raises:
        FunctionError: It returned something that is not a judge's output, or no reward.
    """
    arguments = {
        "task": TaskRow(task),
        "response": response,
        "auxiliary_models": auxiliary_models,
        "logger": logger,
    }
    return as_judge_output(await call_function(func, arguments), func)


def as_judge_output(value: Any, func: Callable[..., Any]) -> JudgeOutput:
    """`value`, which `func` returned, as our `JudgeOutput`; AgentScope's is taken too.

    Raises:
        FunctionError: It is something else, or has no reward.
    """
    if isinstance(value, JudgeOutput):
        return value
    named_alike = type(value).__name__ == JudgeOutput.__name__
    if named_alike and hasattr(value, "reward") and hasattr(value, "metrics"):
        if value.reward is None:
            raise FunctionError(
                f"{where(func)} returned a JudgeOutput without a reward: a judge must score every "
                "response"
            )
        return JudgeOutput(reward=value.reward, metrics=value.metrics)
    raise wrong_return(value, func, JUDGE)
