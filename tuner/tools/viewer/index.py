"""What can be asked of the traces of a run without reading them: a database beside them.

Each line of a file of traces is read once, when it is complete, and leaves a row, its texts, and
what it adds to the tables. Where the database does not fit the files it is made anew.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from hashlib import blake2b
from pathlib import Path
from typing import Any

from tuner.errors import TunerError
from tuner.tasks.datasets import row_text
from tuner.tools.viewer.database import COLUMNS, SUMS, TEXTS, Database
from tuner.tools.viewer.facts import (
    SEARCHED,
    SHOWN,
    TraceRow,
    answered,
    asked,
    clean,
    folded,
    given_back,
    row,
    tallies,
)
from tuner.tools.viewer.follow import NO_MESSAGES, LineFollower, branch_rows
from tuner.traces.reading import InvalidRecord
from tuner.traces.store import STORED

FILES = "*step_*.jsonl"
_ADD = f"""
INSERT INTO tallies VALUES ({", ".join("?" * (4 + len(SUMS)))})
ON CONFLICT (kind, name, split, step) DO UPDATE SET
{", ".join(f"{column} = {column} + excluded.{column}" for column in SUMS)}
"""
_ROWS = f"""
SELECT {", ".join(f"traces.{name}" for name in COLUMNS)}, task.shown, answer.shown, traces.asked
FROM traces JOIN texts AS task ON task.id = traces.asked
JOIN texts AS answer ON answer.id = traces.answered
"""


class TraceIndex(Database):
    """A row for each trace of a folder, and sums over them.

    Traces have numbers, from 1, in order of reading: files by step, lines as they were written.
    """

    @property
    def counted(self) -> int:
        """Of how many the branches are known."""
        return self.total - int(self.ask("SELECT COUNT(*) FROM traces WHERE NOT counted")[0][0])

    @property
    def problems(self) -> list[str]:
        """Lines that are no trace, and traces whose branches are not known, by file and byte."""
        kept = [text for (text,) in self.ask("SELECT text FROM problems")]
        no_files = sorted(path.name for path in self.folder.glob(FILES) if not path.is_file())
        return kept + [f"{name} is left out: it is no file" for name in no_files]

    def rows(self, numbers: Sequence[int] | None = None) -> list[TraceRow]:
        """The traces of these numbers, in their order; all by default."""
        if numbers is None:
            return [_row(found) for found in self.ask(f"{_ROWS} ORDER BY traces.id")]
        marks = ", ".join("?" * len(numbers))
        found = self.ask(
            f"{_ROWS.replace('SELECT', 'SELECT traces.id,')} WHERE traces.id IN ({marks})", numbers
        )
        by_number = {number: _row(values) for number, *values in found}
        return [by_number[number] for number in numbers]

    def read(self, file: str, offset: int) -> dict[str, Any]:
        """The trace whose line starts at byte `offset` of `file`, as it was stored.

        Raises:
            TunerError: The folder has no such file, or no trace begins there.
        """
        path = self.folder / file
        if path.name != file or not path.match(FILES) or not path.is_file():
            raise TunerError(f"there is no file {file!r} among the traces of this run")
        with path.open("rb") as stream:
            # Beyond the end, or what a file system can count to, there is no line.
            stream.seek(min(offset, path.stat().st_size))
            line = stream.readline()
        try:
            return STORED.parse(line)
        except InvalidRecord as error:
            raise TunerError(f"{file}, byte {offset}: no trace begins there: {error}") from error

    def refresh(self, seconds: float = math.inf) -> bool:
        """Read what is new, for at most about `seconds`; returns whether that was everything."""
        deadline = time.monotonic() + seconds
        known = dict(self.ask("SELECT name, stamp FROM files"))
        stamps = {name: _stamp(self.folder / name) for name in self._names()}
        if stamps == known:
            return True
        return self.write(lambda: self._read(known, stamps, deadline))

    def _read(self, known: Mapping[str, str], stamps: Mapping[str, str], deadline: float) -> bool:
        changed = [name for name, stamp in stamps.items() if known.get(name) != stamp]
        followers = [self._follower(name) for name in changed]
        if known.keys() - stamps.keys() or any(one.replaced() for one in followers):
            self.begin_anew()
            followers = [self._follower(name) for name in stamps]
        followers.sort(key=lambda one: _by_step(one.path.name))
        return all(self._read_on(one, stamps[one.path.name], deadline) for one in followers)

    def _follower(self, name: str) -> LineFollower:
        found = self.ask("SELECT offset, tail FROM files WHERE name = ?", (name,))
        return LineFollower(self.folder / name, *(found[0] if found else ()))

    def _read_on(self, follower: LineFollower, stamp: str, deadline: float) -> bool:
        name, late = follower.path.name, False
        for start, line in follower.new_lines():
            self._add(name, start, line)
            if late := time.monotonic() > deadline:
                break
        self.execute(
            "INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?)",
            *(name, follower.offset, follower.tail, "" if late else stamp),
        )
        return not late

    def _add(self, name: str, start: int, line: bytes) -> None:
        try:
            trace = STORED.parse(line)
            listed = row(name, start, len(line), trace)
            added = tallies(trace) if listed.final else {}
            task = self._text(asked(trace["task"]), row_text(trace["task"]))
            answer = answered(trace)
        except NO_MESSAGES as error:
            said = error if isinstance(error, InvalidRecord) else repr(error)
            self._problem(f"{name}, byte {start}: not a trace: {said}")
            return
        values = *astuple(listed)[: len(COLUMNS)], task, self._text(answer, answer)
        self.insert("traces", None, *values, listed.one_path)
        at = listed.split, listed.step
        for (kind, called), tally in added.items():
            self._tally(kind, called, *at, *tally.values())
        self._tally("attempt", listed.outcome, *at, 1)
        if listed.final and listed.one_path:
            self._tally("counted", "", *at, 1)
        if listed.final and listed.reward is not None:
            self.execute(
                "INSERT INTO tasks VALUES (?, ?, ?, 1, ?, ?) ON CONFLICT (split, asked, step) "
                "DO UPDATE SET n = n + 1, reward = reward + excluded.reward",
                *(listed.split, task, listed.step, listed.reward, self._stratum(trace["task"])),
            )

    def _stratum(self, task: Mapping[str, Any]) -> str:
        return clean(str(task.get(self.field, ""))[:SHOWN]) if self.field else ""

    def _text(self, text: str, whole: str) -> int:
        """The number of a text, which is kept once for all that are the same as a whole."""
        digest = identity(whole)
        if found := self.ask("SELECT id FROM texts WHERE hash = ?", (digest,)):
            return int(found[0][0])
        shown = " ".join(clean(text[: 2 * SHOWN]).split())[:SHOWN]
        return self.insert("texts", None, digest, shown, folded(text[:SEARCHED]))

    def _tally(self, kind: str, name: str, split: str, step: int, *sums: float) -> None:
        missing = (0,) * (len(SUMS) - len(sums))
        self.execute(_ADD, kind, name, split, step, *sums, *missing)

    def _problem(self, text: str) -> None:
        self.insert("problems", text)

    def count_branches(self, seconds: float = math.inf) -> bool:
        """Find out why traces branch, for at most about `seconds`; returns whether that was all.

        It takes a trace's tokens and messages, and so much longer than to list it.
        """
        deadline = time.monotonic() + seconds
        waiting = (
            "SELECT id, file, offset, split, step, final FROM traces WHERE NOT counted "
            "ORDER BY id LIMIT 200"
        )
        while self.ask(waiting):
            done = self.write(lambda: all(self._count(deadline, *one) for one in self.ask(waiting)))
            if not done:
                break
        return self.counted == self.total

    def _count(
        self,
        deadline: float,
        number: int,
        file: str,
        offset: int,
        split: str,
        step: int,
        final: bool,
    ) -> bool:
        found: Counter[str] = Counter()
        try:
            found = causes(self, file, offset)
        except TunerError as error:
            self._problem(str(error))
        self.execute("UPDATE traces SET counted = 1 WHERE id = ?", number)
        for cause, times in found.items():
            self.insert("branches", cause, number)
            if final:
                self._tally("cause", cause, split, step, times)
        if final:
            self._tally("counted", "", split, step, 1)
        return time.monotonic() <= deadline

    def _names(self) -> list[str]:
        return [path.name for path in self.folder.glob(FILES) if path.is_file()]


def identity(text: str) -> bytes:
    """What tells a text from others."""
    return blake2b(text.encode("utf-8", "replace"), digest_size=16).digest()


def causes(traces: TraceIndex, file: str, offset: int) -> Counter[str]:
    """How many branches of each cause a trace has, of the calls that are its own; reads it.

    Raises:
        TunerError: It cannot be read any more, or is none that this version knows.
    """
    trace = traces.read(file, offset)
    found = branch_rows(trace, f"{file}:{offset}")
    return Counter(one["cause"] for one in found if not given_back(trace["calls"][one["call"]]))


def _row(values: Sequence[Any]) -> TraceRow:
    named = dict(zip((*COLUMNS, *TEXTS), values, strict=True))
    return TraceRow(**named | {name: bool(named[name]) for name in ("final", "one_path")})


def _stamp(path: Path) -> str:
    """Another text when the file has changed."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return ""
    return f"{status.st_ino}.{status.st_size}.{status.st_mtime_ns}"


def _by_step(name: str) -> tuple[str, str]:
    prefix, _, number = name.removesuffix(".jsonl").rpartition("step_")
    return number, prefix
