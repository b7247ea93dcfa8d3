"""Which groups each step takes, noted before they are trained."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from tuner.errors import TunerError
from tuner.traces.store import complete_lines, cut_torn_line


class BatchLog:
    """One line per step, written before it is trained, so that a killed run takes it again.

        {"step": 3, "groups": [4, 5, 7]}

    Groups are numbered from 0 in the order of the tasks.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> dict[int, list[int]]:
        """The groups of each step; a torn last line is left out.

        Raises:
            TunerError: Another line is not of this form.
        """
        found = {}
        for number, line in complete_lines(self._path):
            try:
                row = json.loads(line)
                found[int(row["step"])] = [int(group) for group in row["groups"]]
            except (ValueError, LookupError, TypeError) as error:
                raise TunerError(f"{self._path}, line {number} is no batch: {error!r}") from error
        return found

    def cut(self, step: int) -> None:
        """Forget what this step and later ones took."""
        if not self._path.exists():
            return
        kept = [line for _, line in complete_lines(self._path) if json.loads(line)["step"] < step]
        unfinished = self._path.with_name(f".{self._path.name}")
        unfinished.write_bytes(b"".join(kept))
        unfinished.replace(self._path)

    def append(self, step: int, groups: Sequence[int]) -> None:
        """Note what a step takes."""
        cut_torn_line(self._path)
        with self._path.open("ab") as file:
            file.write(json.dumps({"step": step, "groups": list(groups)}).encode() + b"\n")


def taken_until(taken: Mapping[int, Sequence[int]], step: int, *, batch: int) -> set[int]:
    """The groups that the steps up to `step` took.

    Args:
        taken: Those of the steps of which it was noted; others took theirs in order.
        step: The last of them.
        batch: Groups in a step.
    """
    found: set[int] = set()
    for one in range(1, step + 1):
        found.update(taken.get(one, range((one - 1) * batch, one * batch)))
    return found
