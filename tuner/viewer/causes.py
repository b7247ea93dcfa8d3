"""Why traces branch, counted along with the list of traces and after it.

To know a trace's branches takes its tokens and messages, and so much longer than to list it. The
list comes first, and the causes of ten thousand traces follow in parts.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from tuner.traces import branches
from tuner.traces.plain import from_plain
from tuner.traces.trace import Trace
from tuner.viewer.follow import TraceIndex, TraceRow

Causes = dict[str, int]


class CauseIndex:
    """How many branches of each cause each listed trace has.

    Attributes:
        counts: For the first traces of the list, in its order.
        generation: Of the list of traces that `counts` belongs to.
    """

    def __init__(self, traces: TraceIndex) -> None:
        self._traces = traces
        self.counts: list[Causes] = []
        self.generation = traces.generation

    def refresh(self, seconds: float | None = None) -> bool:
        """Look at listed traces for at most about `seconds`; returns whether that was all."""
        if self.generation != self._traces.generation:
            self.counts, self.generation = [], self._traces.generation
        deadline = None if seconds is None else time.monotonic() + seconds
        for row in self._traces.rows[len(self.counts) :]:
            self.counts.append(causes(self._traces, row))
            if deadline is not None and time.monotonic() > deadline:
                break
        return len(self.counts) == len(self._traces.rows)


def causes(traces: TraceIndex, row: TraceRow) -> Causes:
    """How many branches of each cause a listed trace has; reads it unless it has none."""
    if row.one_path:
        return {}
    found = branch_rows(traces.read(row.file, row.offset))
    return dict(Counter(branch["cause"] for branch in found))


def branch_rows(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """The branches of a trace read as plain data, as the page gets them.

    Returns:
        For each the index of the `call`, the `cause`, and the index of the `earlier` call that it
        was compared with, or None.
    """
    return [
        {"call": branch.call, "cause": branch.cause.value, "earlier": branch.earlier}
        for branch in branches(from_plain(Trace, trace).calls)
    ]
