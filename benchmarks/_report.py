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
from typing import Any

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"
COLUMNS = ("case", "metric", "ours", "peer", "peer's", "ratio", "target", "met")
_LEAST = 1e-12
"""What nothing counts as in a ratio."""


@dataclass(frozen=True)
class Row:
    """One measured number beside a peer's, measured in the same run.

    Attributes:
        case: What was run.
        metric: What was measured, with its unit.
        ours: Our number.
        peer: What it is compared with.
        peer_value: Its number; None where there is no peer.
        target: The least `ratio` that is wanted; None where the row only informs.
        more_is_better: Whether larger numbers are better (tokens/s) or smaller ones (seconds).
    """

    case: str
    metric: str
    ours: float
    peer: str = ""
    peer_value: float | None = None
    target: float | None = None
    more_is_better: bool = True

    @property
    def ratio(self) -> float | None:
        """How many times better we are than the peer; None without one."""
        if self.peer_value is None:
            return None
        ours, peer = max(self.ours, _LEAST), max(self.peer_value, _LEAST)
        return ours / peer if self.more_is_better else peer / ours

    @property
    def met(self) -> bool | None:
        """Whether the target is reached; None without one."""
        # NaN is not reached.
        return None if self.target is None or self.ratio is None else self.ratio >= self.target

    def shown(self) -> dict[str, Any]:
        """As it is recorded."""
        shown = asdict(self)
        del shown["more_is_better"]
        ratio = None if self.ratio is None else round(self.ratio, 3)
        return {**shown, "ratio": ratio, "met": self.met}


def cells(shown: Mapping[str, Any]) -> list[str]:
    """What stands of a recorded row under COLUMNS."""
    forms = {"ours": ",.4g", "peer_value": ",.4g", "ratio": ",.2f", "target": "g"}
    names = ("case", "metric", "ours", "peer", "peer_value", "ratio", "target")
    found = [
        "" if shown[name] is None else format(shown[name], forms.get(name, "")) for name in names
    ]
    return [*found, {None: "", True: "yes", False: "no"}[shown["met"]]]


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
    for title in COLUMNS:
        table.add_column(title, justify="left" if title in ("case", "metric", "peer") else "right")
    for row in rows:
        *others, met = cells(row.shown())
        table.add_row(*others, "[red]no[/red]" if met == "no" else met)
    Console(width=None if os.isatty(1) else 140).print(table)
    write(
        RESULTS / f"{benchmark}.json",
        {
            "benchmark": benchmark,
            **circumstances(packages, peers),
            "rows": [row.shown() for row in rows],
        },
    )


def write(path: Path, record: Mapping[str, object]) -> None:
    """The record as JSON, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}")
    unfinished.write_text(json.dumps(record, indent=1) + "\n")
    unfinished.replace(path)


def circumstances(
    packages: Sequence[str], peers: Mapping[str, str] | None = None
) -> dict[str, object]:
    """When, on what, and with which versions something was measured."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": _hardware(),
        "versions": {"python": platform.python_version(), **_versions(packages), **(peers or {})},
    }


def _hardware() -> str:
    """Processor, cores, and the accelerator with its memory where there is one."""
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
        memory = torch.cuda.get_device_properties(0).total_memory
        parts.append(f"{torch.cuda.get_device_name()} with {memory / 2**30:.0f} GiB")
    return ", ".join(parts)


def _versions(packages: Sequence[str]) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found
