"""What the logs of Trinity-RFT's processes say about a failure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trinity.common.config import Config

_LINE = re.compile(r"^(DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d [\d:]+ \[[^\]]+\] ?(.*)$")
_LONGEST = 30


def last_errors(folder: Path, *, newer_than: float = 0.0) -> str:
    """The end of the last error in each log, most recent log first; empty where there is none.

    Args:
        folder: `<run directory>/log`.
        newer_than: Unix time; logs that were not written since are those of another run.
    """
    parts = []
    logs = [path for path in folder.rglob("*.log") if path.stat().st_mtime >= newer_than]
    for path in sorted(logs, key=lambda path: -path.stat().st_mtime):
        if block := _last_error(path):
            parts.append(f"{path}:\n" + "\n".join(f"    {line}" for line in block))
    return "\n".join(parts)


def _last_error(path: Path) -> list[str]:
    block: list[str] = []
    inside = False
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        found = _LINE.match(line.strip("\r"))
        if found is None or found[1] not in ("ERROR", "CRITICAL"):
            inside = False
            continue
        if not inside:
            block, inside = [], True
        block.append(found[2])
    return block[-_LONGEST:]


def advice(said: str, config: Config) -> Iterator[str]:
    """What to try, from what an error says."""
    if "OutOfMemory" in said or "out of memory" in said or "unexpectedly exits" in said:
        yield (
            "Where memory ran out (of a killed process the kernel's log says so): lower "
            "trainer.max_token_len_per_gpu, explorer.rollout_model.gpu_memory_utilization, or "
            "model.max_model_len."
        )
    if "wait_new_model_state_dict" in said or "TimeoutError" in said:
        yield (
            "Where one of the two waited for the other longer than it may: raise "
            f"synchronizer.sync_timeout ({config.synchronizer.sync_timeout} s), "
            "explorer.max_timeout or buffer.trainer_input.experience_buffer.max_read_timeout "
            f"({config.buffer.trainer_input.experience_buffer.max_read_timeout} s)."
        )
