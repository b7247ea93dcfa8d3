"""Why traces branch, counted along with the list of traces and after it.

To know a trace's branches takes its tokens and messages, and so much longer than to list it. The
list comes first, and the causes of ten thousand traces follow in parts.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from tuner.errors import TunerError
from tuner.traces import branches
from tuner.traces.store import NOT_A_TRACE, trace_from_json
from tuner.viewer.follow import TraceIndex, TraceRow

Causes = dict[str, int]


class CauseIndex:
    """How many branches of each cause each listed trace has.

    Attributes:
        counts: For the first traces of the list, in its order.
        generation: Of the list of traces that `counts` belongs to.
        problems: Listed traces whose branches are not known, and why.
    """

    def __init__(self, traces: TraceIndex) -> None:
        self._traces = traces
        self._start()

    def _start(self) -> None:
        self.generation = self._traces.generation
        self.counts: list[Causes] = []
        self.problems: list[str] = []

    def refresh(self, seconds: float | None = None) -> bool:
        """Look at listed traces for at most about `seconds`; returns whether that was all."""
        if self.generation != self._traces.generation:
            self._start()
        deadline = None if seconds is None else time.monotonic() + seconds
        for row in self._traces.rows[len(self.counts) :]:
            try:
                self.counts.append(causes(self._traces, row))
            except TunerError as error:
                self.counts.append({})
                self.problems.append(str(error))
            if deadline is not None and time.monotonic() > deadline:
                break
        return len(self.counts) == len(self._traces.rows)


def causes(traces: TraceIndex, row: TraceRow) -> Causes:
    """How many branches of each cause a listed trace has; reads it unless it has none.

    Raises:
        TunerError: It cannot be read any more, or is none that this version knows.
    """
    if row.one_path:
        return {}
    found = branch_rows(traces.read(row.file, row.offset), row.key)
    return dict(Counter(branch["cause"] for branch in found))


def branch_rows(trace: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """The branches of a trace, as the page gets them.

    Args:
        trace: The trace as it was stored.
        name: What an error calls it.

    Returns:
        For each the index of the `call`, the `cause`, and the index of the `earlier` call that it
        was compared with, or None.

    Raises:
        TunerError: It is no trace that this version knows.
    """
    try:
        found = branches(trace_from_json(trace).calls)
    except NOT_A_TRACE as error:
        raise TunerError(f"{name} is no trace that this version knows: {error!r}") from error
    return [
        {"call": branch.call, "cause": branch.cause.value, "earlier": branch.earlier}
        for branch in found
    ]
