"""Pure tensor functions: advantages, policy losses, KL, aggregation; the table of algorithms.

Names are imported when they are asked for: the table is read without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tuner.algorithms.advantages import (
        call_normalized,
        distilled,
        gae,
        group_normalized,
        group_std,
        leave_one_out,
        mirror_descent,
        shifted_mean,
        turn_returns,
        whitened,
        whitened_returns,
    )
    from tuner.algorithms.losses import (
        KL_ESTIMATORS,
        PolicyLoss,
        Preference,
        clipped_value_loss,
        dpo,
        ppo_clip,
        row_weights,
    )

_MODULES = {
    "KL_ESTIMATORS": "losses",
    "PolicyLoss": "losses",
    "Preference": "losses",
    "call_normalized": "advantages",
    "clipped_value_loss": "losses",
    "gae": "advantages",
    "distilled": "advantages",
    "dpo": "losses",
    "group_normalized": "advantages",
    "group_std": "advantages",
    "leave_one_out": "advantages",
    "mirror_descent": "advantages",
    "ppo_clip": "losses",
    "row_weights": "losses",
    "shifted_mean": "advantages",
    "turn_returns": "advantages",
    "whitened": "advantages",
    "whitened_returns": "advantages",
}

__all__ = [
    "KL_ESTIMATORS",
    "PolicyLoss",
    "Preference",
    "call_normalized",
    "clipped_value_loss",
    "distilled",
    "dpo",
    "gae",
    "group_normalized",
    "group_std",
    "leave_one_out",
    "mirror_descent",
    "ppo_clip",
    "row_weights",
    "shifted_mean",
    "turn_returns",
    "whitened",
    "whitened_returns",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
