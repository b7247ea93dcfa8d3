"""Index of a run's traces: a database next to them, so that the page does not read all files.

Each line of a trace file is read once, when it is complete, and adds a row, its texts, and its
share of the sums. The database is a cache: if it does not match the files, it is rebuilt.
"""

from __future__ import annotations

import json
import math
import secrets
import sqlite3
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, fields
from hashlib import blake2b
from pathlib import Path
from typing import Any

from tuner.errors import TunerError
from tuner.runs.directory import METRICS
from tuner.tasks.datasets import ALIKE, common_beginning, row_text, shortened
from tuner.traces import Origin, branches
from tuner.traces.reading import InvalidRecord, open_file
from tuner.traces.store import STORED, is_one_path, trace_from_json
from tuner.traces.trace import failed_result

Json = dict[str, Any]

# Maximum characters of a text or an error in lists and searches; the trace has the full text.
SHOWN = 160
SEARCHED = 2000
# Fields of a task with the question; lists show them first.
ASKING = ("question", "prompt", "problem", "instruction", "query", "input", "task", "messages")
UNREADABLE = "(unreadable call)"
NOT_OFFERED = "(not offered)"


@dataclass(frozen=True)
class TraceRow:
    """A trace as a list shows it, and the position of its line.

    `one_path` is True if it certainly has no branches. A rollout that starts `within` another one
    of its group does so after `at_call` calls and `at_token` tokens of the next call. Traces of the
    same task share the number `same`. `session` is the id of a server's session, whose `outcome` is
    its state.
    """

    file: str
    offset: int
    size: int
    split: str
    step: int
    task: int
    rollout: int
    attempt: int
    final: bool
    outcome: str
    reward: float | None
    calls: int
    tokens: int
    error: str | None
    one_path: bool
    within: int | None = None
    at_call: int = 0
    at_token: int = 0
    diverged: str | None = None
    asked: str = ""
    answered: str = ""
    same: int = 0
    session: str | None = None

    @property
    def key(self) -> str:
        """Name of the trace in links: `<file>:<offset>`."""
        return f"{self.file}:{self.offset}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def row(file: str, offset: int, size: int, trace: Json) -> TraceRow:
    """A stored trace as a list shows it; for the full texts use `asked` and `answered`."""
    error, reward = trace["error"], trace["reward"]
    return TraceRow(
        file=file,
        offset=offset,
        size=size,
        split=clean(trace["id"]["split"]),
        step=int(trace["id"]["step"]),
        task=int(trace["id"]["task"]),
        rollout=int(trace["id"]["rollout"]),
        attempt=int(trace["attempt"]),
        final=bool(trace["final"]),
        outcome=clean(trace["outcome"]),
        reward=None if reward is None else float(reward),
        calls=len(trace["calls"]),
        tokens=sum(map(sampled, trace["calls"])),
        error=None if error is None else clean(error[:SHOWN]),
        one_path=is_one_path(trace),
        **_begins(trace.get("origin")),
    )


def _begins(stored: Json | None) -> Json:
    if stored is None:
        return {}
    origin = Origin(**stored)
    call, token = origin.position
    return {
        "within": int(stored["rollout"]["rollout"]),
        "at_call": call,
        "at_token": token,
        "diverged": None if origin.diverged is None else clean(origin.diverged[:SHOWN]),
    }


def sampled(call: Json) -> int:
    """Sampled tokens of an answer, without those that another rollout sampled.

    For a remote model, which returns no ids, the billed tokens.
    """
    billed = call.get("billed")
    if billed is not None:
        return int(billed["output_tokens"])
    return len(call["completion_ids"]) - int(call.get("replayed", 0))


def given_back(call: Json) -> bool:
    """True for a stored call that another rollout sampled and counts."""
    return 0 < int(call.get("replayed", 0)) == len(call["completion_ids"])


def asked(task: Json) -> str:
    """The task as text: the question first, then its other fields."""
    order = {name: place for place, name in enumerate(ASKING)}
    names = sorted(task, key=lambda name: order.get(name, len(order)))
    return " · ".join(_text(task[name]) for name in names if task[name] not in (None, ""))


def answered(trace: Json) -> str:
    """The workflow's response as text, or if it gave none the last answer of the model."""
    if trace["response"]:
        return str(trace["response"])
    *_, last = ({}, *(call["response"] for call in _calls(trace)))
    return _text(last.get("content") or "")


def clean(text: str) -> str:
    """Remove lone surrogates, which JSON can contain but a database cannot."""
    return text.encode("utf-8", "replace").decode()


def folded(text: str) -> bytes:
    """Text in one line and lower case, as UTF-8, for searching."""
    return " ".join(text.split()).casefold().encode("utf-8", "replace")


@dataclass
class Tally:
    """Sums in a row of a table: over calls of a tool or a role, or over rollouts.

    `failures` are failed results of a tool, or a role's calls that were cut off at the token limit;
    `timed` and `rewarded` count items with known seconds, and with a reward.
    """

    n: int = 0
    failures: int = 0
    tokens: int = 0
    seconds: float = 0.0
    timed: int = 0
    reward: float = 0.0
    rewarded: int = 0

    def add(
        self, *, failed: bool = False, tokens: int = 0, seconds: float | None, reward: float | None
    ) -> None:
        self.n += 1
        self.failures += failed
        self.tokens += tokens
        self.timed += seconds is not None
        self.seconds += seconds or 0.0
        self.rewarded += reward is not None
        self.reward += reward or 0.0

    def values(self) -> tuple[float, ...]:
        return astuple(self)


def tallies(trace: Json) -> dict[tuple[str, str], Tally]:
    """Contribution of a final attempt to the sums, by ("outcome" | "tool" | "role", name).

    A call has its own reward or its rollout's; the role "" has the calls without a role. Replayed
    calls add nothing: they count in the rollout that sampled them.
    """
    found: dict[tuple[str, str], Tally] = defaultdict(Tally)
    reward, seconds = trace["reward"], trace["seconds"]
    tokens = 0
    for call in trace["calls"]:
        if given_back(call):
            continue
        own = call.get("reward")
        new = sampled(call)
        tokens += new
        found["role", clean(call.get("role") or "")].add(
            failed=call["finish_reason"] == "length",
            tokens=new,
            seconds=call["seconds"],
            reward=reward if own is None else own,
        )
    for name, failed, took in tool_uses(trace):
        found["tool", clean(name)].add(failed=failed, seconds=took, reward=reward)
    took = seconds["workflow"] + seconds.get("judge", 0.0) if "workflow" in seconds else None
    found["outcome", clean(trace["outcome"])].add(tokens=tokens, seconds=took, reward=reward)
    return found


def tool_uses(trace: Json) -> Iterator[tuple[str, bool, float | None]]:
    """(name, failed, seconds) of each tool call of a stored trace.

    A tool failed if the text of its result starts like an error of agent frameworks, or is a JSON
    object with an `error`, or if its request offered other tools only: then its name, which the
    model invented, is `NOT_OFFERED`. Its seconds run from the answer that calls it to the request
    that has its result, including the agent's own work; None if no request has it. Calls in
    replayed answers are skipped.
    """
    pending: dict[str, tuple[str, float]] = {}
    for call in _calls(trace):
        for message in call["messages"]:
            key = message.get("tool_call_id") if isinstance(message, dict) else None
            if key in pending:
                name, ended = pending.pop(key)
                yield name, failed_result(_text(message.get("content"))), call["started"] - ended
        if given_back(call):
            continue
        offered = {tool.get("function", tool).get("name") for tool in call["tools"]}
        for number, tool in enumerate(call["response"].get("tool_calls") or ()):
            made = tool.get("id") or f"{call['id']}/{number}"
            name = str(tool["function"]["name"])
            if offered and name not in offered:
                yield NOT_OFFERED, True, None
            else:
                pending[made] = (name, call["started"] + call["seconds"])
        for _ in range(call.get("malformed_tool_calls", 0)):
            yield UNREADABLE, True, None
    for name, _ in pending.values():
        yield name, False, None


def _calls(trace: Json) -> Iterator[dict[str, Any]]:
    """The calls with their answers, tools, and the messages that no earlier call had, as
    objects."""
    distinct = trace["distinct"] if "format" in trace else None
    for call in trace["calls"]:
        if distinct is None:
            yield call
            continue
        messages: Sequence[Any] = distinct["messages"]
        yield {
            **call,
            "messages": [messages[number] for number in call["messages"][2]],
            "response": messages[call["response"]],
            "tools": distinct["tools"][call["tools"]],
        }


def _text(value: Any) -> str:
    """A value as text; for messages and parts of content, their text."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(item, dict) for item in value):
        said = [item.get("content", item.get("text")) for item in value]
        return " ".join(_text(part) for part in said if part is not None)
    return json.dumps(value, ensure_ascii=False)


NAME = ".traces.sqlite"
VERSION = 4
BUSY_SECONDS = 10.0

TEXTS = ("asked", "answered", "same")
COLUMNS = tuple(one.name for one in fields(TraceRow) if one.name not in (*TEXTS, "session"))
SUMS = tuple(field.name for field in fields(Tally))
_SCHEMA = f"""
CREATE TABLE born (token TEXT);
CREATE TABLE files (name TEXT PRIMARY KEY, offset INTEGER, tail BLOB, stamp TEXT) WITHOUT ROWID;
CREATE TABLE problems (text TEXT);
CREATE TABLE texts (id INTEGER PRIMARY KEY, hash BLOB UNIQUE, shown TEXT, folded BLOB);
CREATE TABLE traces (
    id INTEGER PRIMARY KEY, {", ".join(COLUMNS)}, asked INTEGER, answered INTEGER, counted INTEGER
);
CREATE INDEX of_task ON traces (asked, split, step);
CREATE INDEX of_group ON traces (split, step, task);
CREATE INDEX to_count ON traces (id) WHERE NOT counted;
CREATE TABLE branches (cause TEXT, trace INTEGER, PRIMARY KEY (cause, trace)) WITHOUT ROWID;
CREATE TABLE tallies (
    kind TEXT, name TEXT, split TEXT, step INTEGER, {", ".join(SUMS)},
    PRIMARY KEY (kind, name, split, step)
) WITHOUT ROWID;
CREATE TABLE tasks (
    split TEXT, asked INTEGER, step INTEGER, n INTEGER, reward REAL, stratum TEXT,
    PRIMARY KEY (split, asked, step)
) WITHOUT ROWID;
PRAGMA user_version = {VERSION};
"""
# A cache may be lost in a crash (synchronous is off) and may come from somebody else (its schema is
# not trusted). `fill` fills the temporary tables.
_SETTINGS = """
PRAGMA trusted_schema = OFF;
PRAGMA synchronous = OFF;
PRAGMA cache_size = -65536;
CREATE TEMP TABLE hit (id INTEGER PRIMARY KEY);
CREATE TEMP TABLE change (asked INTEGER, split, by, PRIMARY KEY (asked, split)) WITHOUT ROWID;
"""


class Database:
    """The tables of the index of traces; rebuilt if the existing ones do not match.

    If a kept database cannot be opened or written, a temporary one replaces it.

    Attributes:
        folder: Folder of the trace files.
        field: The task field whose values the selector draws by, or None.
    """

    def __init__(self, folder: Path, *, keep: bool = False, field: str | None = None) -> None:
        """Args:
        folder: Folder of the trace files.
        keep: Keep the database in a hidden file of the folder.
        field: The task field whose values the selector draws by, or None."""
        self.folder, self.field = folder, field
        self._connection = self._open(str(folder / NAME) if keep else "")

    def _open(self, name: str) -> sqlite3.Connection:
        """Open a database of this version; if that fails, a temporary one ("")."""
        self._name = name
        self._filled: dict[str, tuple[str, tuple[Any, ...], str]] = {}
        connection: sqlite3.Connection | None = None
        try:
            connection = sqlite3.connect(
                name, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
            connection.executescript(_SETTINGS)
            connection.execute("BEGIN IMMEDIATE")
            if connection.execute("PRAGMA user_version").fetchone() != (VERSION,):
                _make(connection)
            connection.execute("COMMIT")
        except sqlite3.DatabaseError as error:
            if connection is not None:
                connection.close()
            if not name:
                raise
            if isinstance(error, sqlite3.OperationalError):  # not writable, or in use
                return self._open("")
            Path(name).unlink()  # damaged
            return self._open(name)
        return connection

    def close(self) -> None:
        self._connection.close()

    @property
    def total(self) -> int:
        """Number of traces."""
        return int(self.ask("SELECT COALESCE(MAX(id), 0) FROM traces")[0][0])

    @property
    def state(self) -> str:
        """Changes whenever the listed traces change."""
        ((token,),) = self.ask("SELECT token FROM born")
        return f"{token}.{self.total}"

    def ask(self, query: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """The rows that a query returns."""
        try:
            return self._connection.execute(query, values).fetchall()
        except sqlite3.DatabaseError as error:
            raise TunerError(
                f"cannot read {self._name or 'the temporary index of traces'} ({error}); delete it "
                "and start again: it is rebuilt from the traces"
            ) from error

    def fill(self, table: str, query: str, values: Sequence[Any] = ()) -> None:
        """Fill a temporary table (`hit` or `change`) from a query."""
        what = query, tuple(values), self.state
        if self._filled.get(table) == what:
            return
        self._connection.execute(f"DELETE FROM {table}")
        self._connection.execute(f"INSERT INTO {table} {query}", values)
        self._filled[table] = what

    def insert(self, table: str, *values: Any) -> int:
        """Add a row; returns its number."""
        marks = ", ".join("?" * len(values))
        number = self.execute(f"INSERT INTO {table} VALUES ({marks})", *values).lastrowid
        return number or 0

    def execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
        """Execute a change; call it inside `write`."""
        return self._connection.execute(statement, values)

    def begin_anew(self) -> None:
        """Empty all tables; call it inside `write`."""
        _make(self._connection)

    def write(self, work: Callable[[], bool]) -> bool:
        """Run `work` as one transaction, and return its result.

        A kept database that cannot be written is replaced by a temporary one; then nothing is done,
        and the result is False.
        """
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            done = work()
            self._connection.execute("COMMIT")
            return done
        except BaseException as error:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            if not isinstance(error, sqlite3.OperationalError):
                raise
            if not self._name:
                raise TunerError(
                    f"cannot write the index of the traces in {self.folder} ({error}); free space "
                    "there, or in the folder for temporary files"
                ) from error
            self._connection.close()
            self._connection = self._open("")
            return False


def _make(connection: sqlite3.Connection) -> None:
    """Create empty tables, replacing existing ones."""
    for (table,) in connection.execute(
        "SELECT name FROM sqlite_master WHERE type = 'table'"
    ).fetchall():
        connection.execute(f"DROP TABLE {table}")
    for statement in _SCHEMA.strip().rstrip(";").split(";"):
        connection.execute(statement)
    connection.execute("INSERT INTO born VALUES (?)", (secrets.token_hex(8),))


# Raised by messages whose parts, which are the agent's own, are not of the usual types.
NO_MESSAGES = (ValueError, LookupError, TypeError, AttributeError)
# Number of bytes at the end of the last line read that must be unchanged for it to be the same
# file.
TAIL = 256


class LineFollower:
    """The complete lines of a growing file. An incomplete last line is read once it is complete.

    The file is the one read before if the end of what was read (`tail`, up to `offset`) is
    unchanged. So a copy counts as the same file, and a rewritten one does not.
    """

    def __init__(self, path: Path, offset: int = 0, tail: bytes = b"") -> None:
        self.path = path
        self.offset = offset
        self.tail = tail

    def replaced(self) -> bool:
        """True if the file was replaced; then starts over."""
        try:
            with open_file(self.path) as file:
                file.seek(self.offset - len(self.tail))
                changed = file.read(len(self.tail)) != self.tail
        except FileNotFoundError:
            changed = self.offset > 0
        if changed:
            self.offset, self.tail = 0, b""
        return changed

    def new_lines(self) -> Iterator[tuple[int, bytes]]:
        """(byte offset, line) of each line completed since the last call."""
        try:
            file = open_file(self.path)
        except FileNotFoundError:
            return
        with file:
            file.seek(self.offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                start = self.offset
                self.offset += len(line)
                self.tail = line[-TAIL:]
                yield start, line


class MetricsFollower:
    """The rows of a `metrics.jsonl`; `generation` increases when a resumed run rewrote the file.

    Invalid lines are in `problems`.
    """

    def __init__(self, path: Path) -> None:
        self._file = LineFollower(path)
        self.rows: list[dict[str, Any]] = []
        self.generation = 0
        self.problems: list[str] = []

    def refresh(self) -> None:
        """Read new rows."""
        if self._file.replaced():
            self.rows, self.problems = [], []
            self.generation += 1
        for start, line in self._file.new_lines():
            try:
                self.rows.append(METRICS.parse(line))
            except InvalidRecord as error:
                name = self._file.path.name
                self.problems.append(f"{name}, byte {start}: not {METRICS.what}: {error}")


def branch_rows(trace: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """The branches of a stored trace: `call`, `cause`, and the `earlier` call or None."""
    try:
        found = branches(trace_from_json(trace).calls)
    except NO_MESSAGES as error:
        raise TunerError(f"{name} is not a trace of a supported version: {error!r}") from error
    return [
        {"call": branch.call, "cause": branch.cause.value, "earlier": branch.earlier}
        for branch in found
    ]


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
# Of tasks that begin alike: the first and the last in alphabetical order, whose common beginning is
# that of all.
_ALIKE = f"""
SELECT SUBSTR(shown, 1, {ALIKE}), MIN(shown), MAX(shown) FROM texts
WHERE id IN (SELECT asked FROM traces) GROUP BY 1 HAVING MIN(shown) < MAX(shown)
"""


class TraceIndex(Database):
    """A row for each trace of a folder, and sums over them.

    Traces are numbered from 1 in reading order: files by step, lines as written.
    """

    _alike_of = ""
    _alike: Mapping[str, int] = {}

    @property
    def counted(self) -> int:
        """Number of traces whose branches are known."""
        return self.total - int(self.ask("SELECT COUNT(*) FROM traces WHERE NOT counted")[0][0])

    @property
    def problems(self) -> list[str]:
        """Invalid lines, and traces whose branches cannot be determined, by file and byte."""
        kept = [text for (text,) in self.ask("SELECT text FROM problems")]
        no_files = sorted(path.name for path in self.folder.glob(FILES) if not path.is_file())
        return kept + [f"{name} is left out: it is not a file" for name in no_files]

    def rows(self, numbers: Sequence[int] | None = None) -> list[TraceRow]:
        """The traces with these numbers, in that order; all by default."""
        common = self._beginnings()
        if numbers is None:
            return [self._row(found, common) for found in self.ask(f"{_ROWS} ORDER BY traces.id")]
        marks = ", ".join("?" * len(numbers))
        found = self.ask(
            f"{_ROWS.replace('SELECT', 'SELECT traces.id,')} WHERE traces.id IN ({marks})", numbers
        )
        by_number = {number: self._row(values, common) for number, *values in found}
        return [by_number[number] for number in numbers]

    def task(self, shown: str) -> str:
        """A task's text, without most of a beginning that other tasks share."""
        return shortened(shown, self._beginnings().get(shown[:ALIKE], 0))[:SHOWN]

    def _beginnings(self) -> Mapping[str, int]:
        """For the first characters of tasks that begin alike, how many they have in common."""
        if self._alike_of != self.state:
            self._alike_of, found = self.state, self.ask(_ALIKE)
            self._alike = {key: common_beginning(ends) for key, *ends in found}
        return self._alike

    def _row(self, values: Sequence[Any], common: Mapping[str, int]) -> TraceRow:
        named = dict(zip((*COLUMNS, *TEXTS), values, strict=True))
        named |= {name: bool(named[name]) for name in ("final", "one_path")}
        task = named["asked"]
        return TraceRow(**named | {"asked": shortened(task, common.get(task[:ALIKE], 0))[:SHOWN]})

    def read(self, file: str, offset: int) -> dict[str, Any]:
        """The trace whose line starts at byte `offset` of `file`, as stored."""
        path = self.folder / file
        if path.name != file or not path.match(FILES) or not path.is_file():
            raise TunerError(f"this run has no trace file {file!r}")
        with path.open("rb") as stream:
            # There is no line beyond the end, or at an offset too large for the file system.
            stream.seek(min(offset, path.stat().st_size))
            line = stream.readline()
        try:
            return STORED.parse(line)
        except InvalidRecord as error:
            raise TunerError(f"{file}, byte {offset}: no trace starts here: {error}") from error

    def refresh(self, seconds: float = math.inf) -> bool:
        """Read new lines, for about `seconds` at most; returns True if all were read."""
        deadline = time.monotonic() + seconds
        known = dict(self.ask("SELECT name, stamp FROM files"))
        stamps = {name: stamp_of(self.folder / name) for name in self._names()}
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
            task = self._text(asked(trace["task"]), row_text(trace["task"]), SEARCHED)
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

    def _text(self, text: str, whole: str, most: int = SHOWN) -> int:
        """The number of a text, which is stored once per distinct full text, to show `most` of its
        characters."""
        digest = identity(whole)
        if found := self.ask("SELECT id FROM texts WHERE hash = ?", (digest,)):
            return int(found[0][0])
        shown = " ".join(clean(text[: 2 * most]).split())[:most]
        return self.insert("texts", None, digest, shown, folded(text[:SEARCHED]))

    def _tally(self, kind: str, name: str, split: str, step: int, *sums: float) -> None:
        missing = (0,) * (len(SUMS) - len(sums))
        self.execute(_ADD, kind, name, split, step, *sums, *missing)

    def _problem(self, text: str) -> None:
        self.insert("problems", text)

    def count_branches(self, seconds: float = math.inf) -> bool:
        """Find the causes of branches, for about `seconds` at most; returns True if all are known.

        This decodes a trace's tokens and messages, so it takes much longer than listing it.
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
    return blake2b(text.encode("utf-8", "replace"), digest_size=16).digest()


def causes(traces: TraceIndex, file: str, offset: int) -> Counter[str]:
    """Number of branches by cause in a trace, without replayed calls; reads the trace."""
    trace = traces.read(file, offset)
    found = branch_rows(trace, f"{file}:{offset}")
    return Counter(one["cause"] for one in found if not given_back(trace["calls"][one["call"]]))


def stamp_of(path: Path) -> str:
    """Changes whenever the file changes."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return ""
    return f"{status.st_ino}.{status.st_size}.{status.st_mtime_ns}"


def _by_step(name: str) -> tuple[str, str]:
    prefix, _, number = name.removesuffix(".jsonl").rpartition("step_")
    return number, prefix
