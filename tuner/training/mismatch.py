"""An alarm for recorded log-probs that are not those of the weights that are trained."""

from __future__ import annotations

import logging
from collections.abc import Mapping

logger = logging.getLogger("tuner")

# Engine and trainer differ by 1e-6 nat in float32 and by up to 1e-2 in bfloat16; a mean beyond this
# is another distribution than the recorded one.
MISMATCH_ALARM = 0.05


class MismatchAlarm:
    """Says so once."""

    def __init__(self) -> None:
        self._given = False

    def check(self, metrics: Mapping[str, float], step: int) -> None:
        """Look at the metrics of a step; where it trained stale tokens they say nothing."""
        mismatch = metrics["logprob_mismatch_mean"]
        if self._given or metrics["stale_fraction"] or mismatch <= MISMATCH_ALARM:
            return
        self._given = True
        logger.warning(
            "step %d: recorded and recomputed log-probs of the same weights differ by %.3g nat in "
            "the mean (more than %g), so updates are not those of the policy that sampled; is the "
            "engine's precision, chat template or sampling another? tuner.algorithm.proximal: "
            "recompute corrects for it",
            step,
            mismatch,
            MISMATCH_ALARM,
        )
