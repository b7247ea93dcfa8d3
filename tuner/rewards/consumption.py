"""Judges of `select_model()` for the fastest candidate and for the most sparing one.

They have the names, arguments and metrics of AgentScope 1.0.21's, and read what `select_model()`
hands to judges: `{"response": ..., "metrics": {"execution_time": ..., "total_tokens": ..., ...}}`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tuner.errors import RewardError
from tuner.functions.outputs import JudgeOutput, shown


async def avg_time_judge(_task: Mapping[str, Any], response: Any) -> JudgeOutput:
    """The seconds that the workflow took, with a minus: the fastest is best.

    Returns:
        The reward, and the metric "avg_time_seconds".

    Raises:
        RewardError: `response` is not what `select_model()` hands to judges.
    """
    seconds = _measured(response, "execution_time")
    return JudgeOutput(reward=-seconds, metrics={"avg_time_seconds": seconds})


async def avg_token_consumption_judge(_task: Mapping[str, Any], response: Any) -> JudgeOutput:
    """The tokens that the candidate read and wrote, with a minus: the most sparing is best.

    Returns:
        The reward, and the metric "token_consumed".

    Raises:
        RewardError: `response` is not what `select_model()` hands to judges, or no token was seen:
            a candidate that does not say what it uses is not the most sparing.
    """
    tokens = _measured(response, "total_tokens")
    if not tokens:
        raise RewardError(
            "no tokens are known of this rollout: the workflow did not call `model` itself, or the "
            "API does not say what it used"
        )
    return JudgeOutput(reward=-tokens, metrics={"token_consumed": tokens})


def _measured(response: Any, name: str) -> float:
    metrics = response.get("metrics") if isinstance(response, Mapping) else None
    if not isinstance(metrics, Mapping) or name not in metrics:
        raise RewardError(
            f"the response is {shown(response)}: this judge is for select_model(), which hands it "
            f"a dict with metrics, and {name} among them"
        )
    return float(metrics[name])
