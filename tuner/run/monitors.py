"""The file of metrics, which a run goes on from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tuner.run.directory import write_atomically


class JsonlMonitor:
    """One line per step in `metrics.jsonl`: the record that a run resumes and reports from.

    Args:
        path: The file; rewritten to hold `rows` only.
        rows: What an interrupted run had logged up to the step it goes on from.
    """

    def __init__(self, path: Path, rows: list[dict[str, Any]]) -> None:
        write_atomically(path, "".join(json.dumps(row) + "\n" for row in rows))
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._file.write(json.dumps({"step": step, **metrics}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()
