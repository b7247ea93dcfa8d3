"""How far collection may run ahead of training: pure rules, in groups and updates.

A group that begins at version b has tokens of version b and later. In the step that makes update
v + 1 (the weights have seen v) its staleness is at most v - b: within a bound s its *deadline* is
the step at v = b + s. `admissible` begins no more groups than steps can take before their
deadlines; `in_time` keeps a step from leaving behind more than the later steps can take.
"""

from __future__ import annotations

from collections.abc import Iterable


def admissible(
    *, max_running: int, running: int, accepted: int, batch: int, version: int, staleness: int
) -> int:
    """Groups that may be begun, at least 0 (AReaL, arXiv 2505.24298, equation 3).

    A step uses up `batch` groups, so those that are begun now are trained once everything before
    them is: `(accepted + running) // batch` steps from the start, `version` of which are over.
    A staleness of 0 is synchronous.

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


def in_time(left: Iterable[int], *, batch: int, version: int, staleness: int) -> bool:
    """Whether every group that a step leaves behind can still be trained within the bound.

    The groups whose deadline is d or earlier must fit into the steps up to the one at d: for every
    d, `#{begun + staleness <= d} <= (d - version) * batch`.

    Args:
        left: The version at which each group began that is neither trained nor in this step.
        batch: Groups in a step.
        version: Updates that the weights have seen which this step trains.
        staleness: The bound.
    """
    deadlines = sorted(begun + staleness for begun in left)
    return all(
        count <= max(0, deadline - version) * batch for count, deadline in enumerate(deadlines, 1)
    )
