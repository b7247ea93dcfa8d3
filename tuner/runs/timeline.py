"""Timeline of a run, as a trace that Perfetto and chrome://tracing open.

`timeline.json` is Chrome's JSON array of events, written as things end. Its closing bracket, which
the format allows to omit, is never written, so a killed run leaves a readable file and a resumed
run appends to it. Times are microseconds of Unix time.

Rows of the process "trainer" are the activities of the loop; each row of "rollouts" holds one
rollout at a time, with its answers and its judge inside it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import time
from typing import Any, TextIO

from tuner.traces import Call, Trace
from tuner.traces.store import cut_torn_line

_TRAINER, _ROLLOUTS = 1, 2


class Timeline:
    """Appends to one file.

    Args:
        path: `timeline.json`; opened at the first event.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO | None = None
        self._busy_until: list[float] = []  # end of each row of rollouts, Unix seconds

    @contextmanager
    def span(self, name: str, **args: Any) -> Iterator[None]:
        """Record an activity of the loop while the block runs."""
        started = time()
        try:
            yield
        finally:
            self._span(_TRAINER, 0, name, started, time() - started, args)

    def rollout(self, trace: Trace) -> None:
        """Record an attempt at a rollout after its end."""
        if not trace.started:
            return
        workflow = trace.seconds.get("workflow", 0.0)
        judge = trace.seconds.get("judge", 0.0)
        row = self._row(trace.started, trace.started + workflow + judge)
        about = {
            "outcome": trace.outcome.value,
            "reward": trace.reward,
            "queue": trace.seconds.get("queue", 0.0),
            "attempt": trace.attempt,
        }
        self._span(_ROLLOUTS, row, str(trace.id), trace.started, workflow + judge, about)
        for start, end, calls in _answering(trace.calls):
            versions = sorted({version for call in calls for version in call.versions})
            tokens = sum(call.sampled_tokens for call in calls)
            self._span(
                _ROLLOUTS, row, "generation", start, end - start,
                {"calls": len(calls), "tokens": tokens, "versions": versions},
            )  # fmt: skip
        if judge:
            self._span(_ROLLOUTS, row, "judge", trace.started + workflow, judge, {})

    def _row(self, start: float, end: float) -> int:
        """The first row that is free from `start` to `end`."""
        for row, until in enumerate(self._busy_until):
            if until <= start:
                self._busy_until[row] = end
                return row
        self._busy_until.append(end)
        return len(self._busy_until) - 1

    def _span(
        self, process: int, row: int, name: str, start: float, seconds: float, args: dict[str, Any]
    ) -> None:
        if self._file is None:
            self._file = self._open()
        times = {"ts": round(start * 1e6), "dur": round(seconds * 1e6)}
        event = {"ph": "X", "name": name, "pid": process, "tid": row, **times, "args": args}
        self._file.write(json.dumps(event) + ",\n")
        self._file.flush()

    def _open(self) -> TextIO:
        cut_torn_line(self._path)
        file = self._path.open("a", encoding="utf-8")
        if not file.tell():
            file.write("[\n")
            for process, name in ((_TRAINER, "trainer"), (_ROLLOUTS, "rollouts")):
                event = {"ph": "M", "name": "process_name", "pid": process, "tid": 0}
                file.write(json.dumps({**event, "args": {"name": name}}) + ",\n")
        return file

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _answering(calls: tuple[Call, ...]) -> Iterator[tuple[float, float, list[Call]]]:
    """Intervals in which at least one call was in flight, with the calls that began in each."""
    stretch: list[Call] = []
    end = 0.0
    for call in sorted(calls, key=lambda call: call.started):
        if stretch and call.started >= end:
            yield stretch[0].started, end, stretch
            stretch, end = [], 0.0
        stretch.append(call)
        end = max(end, call.started + call.seconds)
    if stretch:
        yield stretch[0].started, end, stretch
