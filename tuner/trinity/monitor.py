"""Trinity-RFT's metrics in the run's folder, and in as many of its trackers as the user named."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trinity.utils.monitor import MONITOR, Monitor

from tuner.trinity.journal import report_file


class TunerMonitor(Monitor):  # type: ignore[misc]  # untyped
    """A Trinity-RFT monitor; each of its processes (`role`) makes one.

    Writes `tuner/<role>.jsonl`, a line per report, and passes everything on to the trackers named
    in `monitor.monitor_args.tuner.trackers`.
    """

    def __init__(self, project: str, group: str, name: str, role: str, config: Any = None) -> None:
        ours = config.monitor.monitor_args["tuner"]
        folder = Path(config.checkpoint_job_dir) / ours["folder"]
        self._path = report_file(folder, role)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._trackers = [
            MONITOR.get(kind)(project=project, group=group, name=name, role=role, config=config)
            for kind in ours["trackers"]
        ]

    def log(self, data: Mapping[str, Any], step: int, commit: bool = False) -> None:
        row = {"step": step, **{name: float(value) for name, value in data.items()}}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        for tracker in self._trackers:
            tracker.log(dict(data), step, commit)

    def log_table(self, table_name: str, experiences_table: Any, step: int) -> None:
        for tracker in self._trackers:
            tracker.log_table(table_name, experiences_table, step)

    def close(self) -> None:
        for tracker in getattr(self, "_trackers", ()):
            tracker.close()
