"""How many groups may be begun now, so that none is older than it may be when it is trained."""

from __future__ import annotations


def admissible(
    *, max_running: int, running: int, accepted: int, batch: int, version: int, staleness: int
) -> int:
    """Groups that may be begun, at least 0 (AReaL, arXiv 2505.24298, equation 3).

    A step uses up `batch` groups, so those that are begun now are trained once everything before
    them is: `(accepted + running) // batch` steps from the start, `version` of which are over.
    Nothing that was sampled is thrown away for its age. A staleness of 0 is synchronous.

    Args:
        max_running: Groups that may run at the same time.
        running: Groups that do.
        accepted: Groups that ended and are trained on, since the run began.
        batch: Groups in a step.
        version: Updates that the weights have seen.
        staleness: Updates by which a sample may be older than the weights that it trains.
    """
    ahead = (staleness + version + 1) * batch - (accepted + running)
    return max(0, min(max_running - running, ahead))
