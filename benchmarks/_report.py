"""How every benchmark reports: a table for people, one JSON file for the record."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Row:
    """One measured number beside a peer's, measured in the same run.

    Attributes:
        case: What was run.
        metric: What was measured, with its unit.
        ours, peer_value: The two numbers.
        peer: What it is compared with.
        target: The least `ratio` that is wanted; None where the row only informs.
        more_is_better: Whether larger numbers are better (tokens/s) or smaller ones (seconds).
    """

    case: str
    metric: str
    ours: float
    peer: str
    peer_value: float
    target: float | None = None
    more_is_better: bool = True

    @property
    def ratio(self) -> float:
        """How many times better we are than the peer."""
        ours, peer = self.ours, self.peer_value
        return ours / peer if self.more_is_better else peer / ours

    @property
    def met(self) -> bool | None:
        """Whether the target is reached; None without one."""
        return None if self.target is None else self.ratio >= self.target


def report(
    benchmark: str,
    rows: Sequence[Row],
    packages: Sequence[str] = (),
    peers: Mapping[str, str] | None = None,
) -> None:
    """Print the rows as a table and write `benchmarks/results/<benchmark>.json`.

    Args:
        benchmark: Name of the script, without its suffix.
        rows: What was measured.
        packages: Distributions whose versions matter to the numbers.
        peers: Versions of peers that are installed elsewhere, by name.
    """
    table = Table(title=benchmark)
    for title in ("case", "metric", "ours", "peer", "peer's", "ratio", "target", "met"):
        table.add_column(title, justify="left" if title in ("case", "metric", "peer") else "right")
    for row in rows:
        target = "" if row.target is None else f"{row.target:g}"
        met = {None: "", True: "yes", False: "[red]no[/red]"}[row.met]
        numbers = f"{row.ours:,.4g}", row.peer, f"{row.peer_value:,.4g}", f"{row.ratio:.2f}"
        table.add_row(row.case, row.metric, *numbers, target, met)
    Console(width=None if os.isatty(1) else 140).print(table)
    record = {
        "benchmark": benchmark,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": _hardware(),
        "versions": {"python": platform.python_version(), **_versions(packages), **(peers or {})},
        "rows": [{**_shown(row), "ratio": round(row.ratio, 3), "met": row.met} for row in rows],
    }
    RESULTS.mkdir(exist_ok=True)
    unfinished = RESULTS / f".{benchmark}.json"
    unfinished.write_text(json.dumps(record, indent=1) + "\n")
    unfinished.replace(RESULTS / f"{benchmark}.json")


def _shown(row: Row) -> dict[str, object]:
    shown = asdict(row)
    del shown["more_is_better"]
    return shown


def _hardware() -> str:
    """Processor, cores, and the accelerator where there is one."""
    name = platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        models = [
            line.split(":", 1)[1].strip()
            for line in cpuinfo.read_text().splitlines()
            if line.startswith("model name")
        ]
        name = models[0] if models else name
    parts = [name, f"{os.cpu_count()} cores"]
    try:
        import torch
    except ImportError:
        return ", ".join(parts)
    if torch.cuda.is_available():
        parts.append(torch.cuda.get_device_name())
    return ", ".join(parts)


def _versions(packages: Sequence[str]) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found
