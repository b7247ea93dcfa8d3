"""The page, one HTML file without requests to anywhere else, and `report.html` of a run."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from tuner.errors import TunerError
from tuner.runs.directory import write_atomically
from tuner.tools.viewer.facts import TraceRow
from tuner.tools.viewer.index import causes
from tuner.tools.viewer.queries import changes, summary, tasks_over_time
from tuner.tools.viewer.reader import RunReader, to_json

ASSETS = Path(__file__).with_name("assets")
# In the order in which they are read: later ones use earlier ones.
SCRIPTS = ("base", "charts", "metrics", "list", "tasks", "trace", "tree", "compare", "start")
# Inside a script element these could end it or begin a comment; in JSON they may all be escaped.
_ESCAPES = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


def template() -> str:
    """The page without data: `%NONCE%` and `%DATA%` stand for what is put in."""
    html = (ASSETS / "page.html").read_text(encoding="utf-8")
    style = (ASSETS / "page.css").read_text(encoding="utf-8")
    script = "".join((ASSETS / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS)
    return html.replace("%STYLE%", style).replace("%SCRIPT%", script)


def page(data: dict[str, Any]) -> str:
    """The page with `data` in it.

    Args:
        data: `{"mode": "live"}` to fetch everything from the server that served the page, or
            what `tuner.tools.viewer.page.report_data` gives.
    """
    # The nonce comes first: data might hold the text of the placeholder.
    html = template().replace("%NONCE%", secrets.token_urlsafe(16))
    return html.replace("%DATA%", to_json(data).translate(_ESCAPES))


NAME = "report.html"
TRACE_BYTES = 4 * 2**20
LOGPROB_DIGITS = 4
# How long traces that are not embedded are looked at for the causes of their branches.
CAUSE_SECONDS = 20.0


def write_report(run: Path, *, trace_bytes: int = TRACE_BYTES, stopped: str | None = None) -> Path:
    """Write `report.html` into a run directory, atomically.

    Args:
        run: The run directory.
        trace_bytes: The most bytes of stored traces that go into it.
        stopped: Why the run stopped before its end, where that is known.

    Raises:
        TunerError: `run` is not a run directory, or its files are damaged.
        OSError: It cannot be written.
    """
    reader = RunReader(run)
    path = reader.directory.path / NAME
    write_atomically(path, page(report_data(reader, trace_bytes=trace_bytes, stopped=stopped)))
    return path


def report_data(
    reader: RunReader, *, trace_bytes: int, stopped: str | None = None
) -> dict[str, Any]:
    """Everything that the page shows without a server."""
    reader.metrics.refresh()
    reader.traces.refresh()
    vocabulary: dict[int, str] = {}
    rows, bodies, size = [], {}, 0
    trees: dict[str, dict[str, Any]] = {}
    counts: dict[str, Mapping[str, int]] = {}
    problems = reader.problems
    listed = reader.traces.rows()
    deadline = time.monotonic() + CAUSE_SECONDS
    for row in selection(listed):
        embedded = size + row.size <= trace_bytes
        if embedded or time.monotonic() < deadline:
            try:
                counts[row.key] = (
                    {} if row.one_path else causes(reader.traces, row.file, row.offset)
                )
            except TunerError as error:
                problems.append(str(error))
                continue
        if not embedded:
            continue
        size += row.size
        body = reader.trace(row.file, row.offset)
        for call in body["trace"]["calls"]:
            call["logprobs"] = [round(value, LOGPROB_DIGITS) for value in call["logprobs"]]
            call.pop("kept", None)  # the page does not show them, and they may be most of a trace
        # One vocabulary for all of them, and one tree for all its ends.
        vocabulary |= body.pop("vocabulary")
        if (tree := body["tree"]) is not None:
            body["tree"] = f"{row.split}-{row.step}-{row.task}-{tree['trunk']}"
            trees[body["tree"]] = tree
        rows.append(row)
        bodies[row.key] = body
    order = {row.key: position for position, row in enumerate(listed)}
    change = changes(reader.traces)
    rows.sort(key=lambda row: order[row.key])
    return {
        "mode": "report",
        "run": reader.info() | ({} if stopped is None else {"status": "stopped"}),
        "stopped": stopped,
        "metrics": reader.metrics.rows,
        "traces": [
            {
                **row.to_json(),
                "change": change.get((row.split, row.same)),
                "causes": counts[row.key],
            }
            for row in rows
        ],
        "summary": summary(reader.traces)
        | {
            "causes": sorted({cause for row in rows for cause in counts[row.key]}),
            "branches": _training_branches(listed, counts),
        },
        "tasks": tasks_over_time(reader.traces),
        "total_traces": len(listed),
        "problems": problems,
        "bodies": bodies,
        "trees": trees,
        "vocabulary": vocabulary,
    }


def _training_branches(
    rows: Sequence[TraceRow], counts: Mapping[str, Mapping[str, int]]
) -> dict[str, Any]:
    """Branches of the traces that were looked at and are trained, and how many traces that are."""
    trained = [row for row in rows if row.split == "train" and row.final]
    looked_at = [counts[row.key] for row in trained if row.key in counts]
    total = sum(map(Counter, looked_at), Counter[str]())
    return {"traces": len(trained), "looked_at": len(looked_at), "counts": dict(total)}


def selection(rows: Sequence[TraceRow]) -> Iterator[TraceRow]:
    """`rows` with the ones worth keeping first, each once.

    In turn: one of the last training step, of the first, of the last evaluation, of the first,
    and a failure, newest first. What is in none of these follows, newest first.
    """
    training = [row for row in rows if row.split == "train"]
    evaluation = [row for row in rows if row.split != "train"]
    failures = [row for row in rows if row.outcome != "completed"]
    queues = [*_ends(training), *_ends(evaluation), failures[::-1]]
    seen: set[str] = set()
    for row in (*(row for turn in zip_longest(*queues) for row in turn), *rows[::-1]):
        if row is not None and row.key not in seen:
            seen.add(row.key)
            yield row


def _ends(rows: Sequence[TraceRow]) -> tuple[list[TraceRow], list[TraceRow]]:
    """The rows of the last step and of the first."""
    last = max((row.step for row in rows), default=0)
    first = min((row.step for row in rows), default=0)
    return [row for row in rows if row.step == last], [row for row in rows if row.step == first]
