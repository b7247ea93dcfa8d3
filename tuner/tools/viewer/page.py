"""The page of a run, one HTML file without external requests, and its data.

`RunReader` reads a run's directory while it may still be written; `write_report` writes
`report.html`.
"""

from __future__ import annotations

import base64
import json
import math
import secrets
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from itertools import zip_longest
from pathlib import Path
from typing import Any

from tuner.config.source import lookup
from tuner.engines import SamplingParams
from tuner.engines.images import REFERENCE
from tuner.errors import TunerError
from tuner.runs.directory import OBJECTS, RunDirectory, write_atomically
from tuner.runs.estimates import check_is_run
from tuner.tasks.datasets import row_text
from tuner.tools.viewer.index import (
    MetricsFollower,
    TraceIndex,
    TraceRow,
    branch_rows,
    causes,
    identity,
)
from tuner.tools.viewer.queries import TraceQuery, changes, summary, tasks_over_time, tree
from tuner.tools.viewer.served import ServedSessions
from tuner.traces import Call, RolloutId
from tuner.traces.store import IMAGES, SERVED, unpack

FILE = "tokenizer.json"
# Replacement character that decoding returns for incomplete bytes of a character.
PARTIAL = "\ufffd"
# Shown for the tokens of a character before its last; UTF-8 has a maximum of four bytes.
BEGINS_CHARACTER = "\u22ef"
LONGEST_CHARACTER = 4


class Vocabulary:
    """Token ids as text; `problem` says why text is missing."""

    def __init__(self, folders: Sequence[str | Path]) -> None:
        """The first `tokenizer.json` in `folders`: paths, or names of models in the local cache."""
        self._tokenizer: Any = None
        self._known: dict[int, str] = {}
        self.problem: str | None = None
        for folder in folders:
            path = _file_of(folder)
            if path is not None:
                self._open(path)
                return
        looked = " or ".join(str(folder) for folder in folders) or "the run directory"
        self.problem = f"{FILE} is missing in {looked}, so tokens are shown as ids"

    def _open(self, path: Path) -> None:
        try:
            from tokenizers import Tokenizer

            self._tokenizer = Tokenizer.from_file(str(path))
            # A word placed before each token: without it, some decoders drop the token's leading
            # space.
            self._anchor = self._tokenizer.encode("a", add_special_tokens=False).ids[:1]
            self._anchor_text = self._decode(self._anchor)
        except Exception as error:  # the library raises bare Exception
            self._tokenizer = None
            self.problem = f"cannot read {path} ({error}), so tokens are shown as ids"

    def texts(self, ids: set[int]) -> dict[int, str]:
        """Text of each of `ids`, decoded separately; empty without a tokenizer."""
        if self._tokenizer is None:
            return {}
        for id in ids - self._known.keys():
            text = self._decode([*self._anchor, id])
            self._known[id] = text.removeprefix(self._anchor_text)
        return {id: self._known[id] for id in sorted(ids)}

    def characters(self, ids: Sequence[int]) -> dict[int, str]:
        """Text of characters that span several tokens, by position.

        The last token has the character, the earlier ones a mark.
        """
        texts = self.texts(set(ids))
        found: dict[int, str] = {}
        position = 0
        while texts and position < len(ids):
            length = 1
            if PARTIAL in texts[ids[position]]:
                length, text = self._character(ids[position : position + LONGEST_CHARACTER])
                if length > 1:
                    found |= dict.fromkeys(range(position, position + length - 1), BEGINS_CHARACTER)
                    found[position + length - 1] = text
            position += length
        return found

    def _character(self, ids: Sequence[int]) -> tuple[int, str]:
        for length in range(2, len(ids) + 1):
            text = self._decode(ids[:length])
            if PARTIAL not in text:
                return length, text
        return 1, ""

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text


def _file_of(folder: str | Path) -> Path | None:
    path = Path(folder).expanduser() / FILE
    if path.is_file():
        return path
    if isinstance(folder, str) and folder.count("/") == 1 and not folder.startswith((".", "/")):
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(folder, FILE)
        return Path(cached) if isinstance(cached, str) else None
    return None


# JavaScript's numbers are 64-bit floats: larger integers are rounded.
EXACT_INTEGER = 2**53 - 1


IMAGE_BYTES = 32 << 20
"""Maximum bytes of the images of one trace."""


class RunReader:
    """Reads a run directory repeatedly; can keep the index of its traces there."""

    def __init__(self, path: Path, *, keep: bool = False) -> None:
        self.directory = RunDirectory(path.resolve())
        check_is_run(path)
        self.metrics = MetricsFollower(self.directory.metrics)
        field = lookup(self.directory.stored_config(), "tuner.tasks.selector.field")
        field = field if isinstance(field, str) else None
        self.traces = TraceIndex(self.directory.traces, keep=keep, field=field)
        self.sessions = ServedSessions(self.directory.path)
        self._vocabulary: Vocabulary | None = None

    @property
    def problems(self) -> list[str]:
        """Skipped lines of metrics and traces."""
        return [*self.metrics.problems, *self.traces.problems]

    def info(self) -> dict[str, Any]:
        """Name, status and main settings; no secrets, so not the whole configuration."""
        config = self.directory.stored_config()
        completed = self.directory.result.is_file()
        served = self.sessions.summary()
        status = "completed" if completed else "no result yet" if served is None else "server"
        return {
            "name": self.directory.path.name,
            "project": config.get("project") or self.directory.path.parent.name,
            "status": status,
            "total_steps": self._total_steps(config, completed) if served is None else None,
            "updated": self._updated(),
            "served": served,
            "settings": {
                "model": _short(lookup(config, "model.model_path")),
                **({} if status == "server" and not self.metrics.rows else _learning(config)),
            },
        }

    def trace(self, file: str, offset: int, image_bytes: int = IMAGE_BYTES) -> dict[str, Any]:
        """One trace as stored, with the text of its tokens and its images.

        Args:
            image_bytes: Maximum bytes of its images, as text; the others are only named.

        Returns:
            `trace`, packed as stored, without settings and fields of calls that have their
            defaults; `branches`, its branches with their causes; `tree`, the
                result of
            `tuner.tools.viewer.queries.tree` for a final attempt, else None; `vocabulary`, text by
                id;
            `characters`, for each call and then for "prompt" and "completion" the text of
                characters
            that span several tokens, by position; `no_text`, why text is missing, or None;
            `session`, what is known of a server's session, or None.
        """
        session = None
        if file == SERVED:
            stored, session = self.sessions.read(offset)
        else:
            stored = self.traces.read(file, offset)
        found = branch_rows(stored, f"{file}:{offset}")
        calls = unpack(stored)["calls"]
        stored["calls"] = [_without_defaults(call) for call in stored["calls"]]
        if any(call.get("images") for call in stored["calls"]):
            distinct, folder = stored["distinct"], self.directory.traces / IMAGES
            stored["distinct"] = {
                **distinct,
                "messages": with_images(distinct["messages"], folder, image_bytes),
            }
        ids: set[int] = set()
        for call in calls:
            ids.update(call["prompt_ids"], call["completion_ids"])
        vocabulary = self.vocabulary()
        return {
            "trace": stored,
            "branches": found,
            "session": session,
            "tree": tree(self.traces, RolloutId(**stored["id"]))
            if stored["final"] and session is None
            else None,
            "vocabulary": vocabulary.texts(ids),
            "characters": [
                {
                    "prompt": vocabulary.characters(call["prompt_ids"]),
                    "completion": vocabulary.characters(call["completion_ids"]),
                }
                for call in calls
            ],
            "no_text": vocabulary.problem,
        }

    def summary(self) -> dict[str, Any]:
        """Names to choose from, and sums over the traces; see `tuner.tools.viewer.queries`."""
        found = summary(self.traces)
        return found | {
            name: sorted({*found[name], *values}) for name, values in self.sessions.names().items()
        }

    def task_of(self, file: str, offset: int) -> tuple[str, bytes]:
        """The split of a trace, and the identity of its task, which is the same in other runs."""
        stored = self.traces.read(file, offset)
        return str(stored["id"]["split"]), identity(row_text(stored["task"]))

    def vocabulary(self) -> Vocabulary:
        """The newest checkpoint's, else that of the initial model."""
        if self._vocabulary is None or self._vocabulary.problem is not None:
            steps = self.directory.checkpoint_steps() if self.directory.checkpoints.is_dir() else []
            folders: list[str | Path] = [self.directory.checkpoint(step) for step in steps[-1:]]
            model = lookup(self.directory.stored_config(), "model.model_path")
            named = [model] if isinstance(model, str) else []
            self._vocabulary = Vocabulary([*folders, *named])
        return self._vocabulary

    def _total_steps(self, config: dict[str, Any], completed: bool) -> int | None:
        """None for a search, which has no steps, or if it depends on the dataset's length."""
        if completed:
            steps = OBJECTS.document(self.directory.result, "delete it").get("steps")
        else:
            steps = lookup(config, "buffer.total_steps")
        return steps if isinstance(steps, int) else None

    def _updated(self) -> float:
        """Unix time of the last write to metrics, traces or sessions."""
        traces = self.directory.traces.glob("*step_*.jsonl")
        files = [self.directory.metrics, *self.sessions.files, *traces]
        return max((file.stat().st_mtime for file in files if file.is_file()), default=0.0)


def with_images(messages: list[Any], folder: Path, room: int) -> list[Any]:
    """Stored messages with data URLs in place of references to the images in a folder, as far as
    there is room for them."""
    found = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            parts = []
            for part in content:
                shown = _data_url(part["image_url"]["url"], folder) if _is_image(part) else ""
                if shown and len(shown) <= room:
                    room -= len(shown)
                    part = {"type": "image_url", "image_url": {"url": shown}}
                parts.append(part)
            message = {**message, "content": parts}
        found.append(message)
    return found


def images_of(messages: list[Any]) -> Iterator[str]:
    """The data URLs in messages."""
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if _is_image(part) and part["image_url"]["url"].startswith("data:"):
                yield part["image_url"]["url"]


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "image_url"


def _data_url(reference: str, folder: Path) -> str:
    """The image that a reference names; "" if its file is missing."""
    sha256 = reference.removeprefix(REFERENCE)
    if not (reference.startswith(REFERENCE) and sha256.isalnum()):
        return ""
    file = next(iter(sorted(folder.glob(f"{sha256}.*"))), None)
    if file is None:
        return ""
    kind = "jpeg" if file.suffix == ".jpg" else file.suffix[1:]
    return f"data:image/{kind};base64,{base64.b64encode(file.read_bytes()).decode()}"


def to_json(value: Any) -> str:
    """JSON that JavaScript reads without loss.

    Numbers that it does not support or would round become strings: "NaN", "9007199254740993".
    """
    return json.dumps(_readable(value), allow_nan=False)


def _readable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _readable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_readable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, int) and abs(value) > EXACT_INTEGER:
        return str(value)
    return value


def _without_defaults(call: dict[str, Any]) -> dict[str, Any]:
    """A stored call without what a reader need not see: fields and settings at their defaults, and
    the kept and most probable tokens of each position."""
    shown = {name: v for name, v in call.items() if v != _CALL.get(name, _MISSING)}
    for name in ("kept", "top_logprobs"):
        shown.pop(name, None)
    sampling = call["sampling"].items()
    return shown | {
        "sampling": {name: v for name, v in sampling if v != _SAMPLING.get(name, _MISSING)}
    }


def _defaults(of: type) -> dict[str, Any]:
    """The defaults of a dataclass, as stored."""
    found = {one.name: one.default for one in fields(of) if one.default is not MISSING}
    plain: dict[str, Any] = json.loads(json.dumps(found))
    return plain


_MISSING = object()
_CALL, _SAMPLING = _defaults(Call), _defaults(SamplingParams)


def _learning(config: dict[str, Any]) -> dict[str, Any]:
    size = lookup(config, "buffer.batch_size")
    found = {
        "algorithm": lookup(config, "algorithm.algorithm_type"),
        "learning rate": lookup(config, "algorithm.optimizer.lr"),
    }
    if config.get("mode") == "train":
        return found | {"rows per step": size}
    return found | {
        "rollouts per task": lookup(config, "algorithm.repeat_times"),
        "tasks per step": size,
        "temperature": lookup(config, "model.temperature"),
    }


def _short(model: Any) -> Any:
    """The name of a model's folder; a name on the Hub is unchanged."""
    return Path(model).name if isinstance(model, str) and Path(model).is_absolute() else model


ASSETS = Path(__file__).with_name("assets")
# In load order: later ones use earlier ones.
SCRIPTS = ("base", "charts", "metrics", "list", "tasks", "trace", "tree", "compare", "start")
# Inside a script element these could end it or start a comment; JSON allows escaping all of them.
_ESCAPES = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


def template() -> str:
    """The page without data, with the placeholders `%NONCE%` and `%DATA%`."""
    html = (ASSETS / "page.html").read_text(encoding="utf-8")
    style = (ASSETS / "page.css").read_text(encoding="utf-8")
    script = "".join((ASSETS / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS)
    return html.replace("%STYLE%", style).replace("%SCRIPT%", script)


def page(data: dict[str, Any]) -> str:
    """The page with `data` in it: `report_data`, or `{"mode": "live"}` to fetch from its server."""
    # Replace the nonce first: data might contain its placeholder.
    html = template().replace("%NONCE%", secrets.token_urlsafe(16))
    return html.replace("%DATA%", to_json(data).translate(_ESCAPES))


NAME = "report.html"
TRACE_BYTES = 4 * 2**20
SESSIONS = 2000  # maximum number of sessions to look at, latest first
LOGPROB_DIGITS = 4
# Maximum seconds to look for causes of branches in traces that are not embedded.
CAUSE_SECONDS = 20.0


def write_report(run: Path, *, trace_bytes: int = TRACE_BYTES, stopped: str | None = None) -> Path:
    """Write `report.html` into a run directory, atomically.

    Args:
        run: The run directory.
        trace_bytes: Maximum bytes of stored traces to include.
        stopped: Why the run stopped early, if known.

    Raises:
        TunerError: `run` is not a run directory, or its files are damaged.
        OSError: The file cannot be written.
    """
    reader = RunReader(run)
    path = reader.directory.path / NAME
    write_atomically(path, page(report_data(reader, trace_bytes=trace_bytes, stopped=stopped)))
    return path


def report_data(
    reader: RunReader, *, trace_bytes: int, stopped: str | None = None
) -> dict[str, Any]:
    """All data that the page shows without a server."""
    reader.metrics.refresh()
    reader.traces.refresh()
    vocabulary: dict[int, str] = {}
    rows, bodies, size = [], {}, 0
    trees: dict[str, dict[str, Any]] = {}
    counts: dict[str, Mapping[str, int]] = {}
    problems = reader.problems
    sessions = reader.sessions
    latest = sessions.numbers(TraceQuery(order="new"))[:SESSIONS]
    listed = [*sessions.rows(latest[::-1]), *reader.traces.rows()]
    deadline = time.monotonic() + CAUSE_SECONDS
    for row in selection(listed):
        embedded = size + row.size <= trace_bytes
        if embedded or time.monotonic() < deadline:
            try:
                counts[row.key] = (
                    {}
                    if row.one_path or row.session
                    else causes(reader.traces, row.file, row.offset)
                )
            except TunerError as error:
                problems.append(str(error))
                continue
        if not embedded:
            continue
        size += row.size
        body = reader.trace(row.file, row.offset, max(0, trace_bytes - size))
        size += sum(map(len, images_of(body["trace"].get("distinct", {}).get("messages", []))))
        for call in body["trace"]["calls"]:
            call["logprobs"] = [round(value, LOGPROB_DIGITS) for value in call["logprobs"]]
        # One shared vocabulary, and one tree for all its ends.
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
        "summary": reader.summary()
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
    """Branches of examined training traces, and the number of those traces."""
    trained = [row for row in rows if row.split == "train" and row.final]
    looked_at = [counts[row.key] for row in trained if row.key in counts]
    total = sum(map(Counter, looked_at), Counter[str]())
    return {"traces": len(trained), "looked_at": len(looked_at), "counts": dict(total)}


def selection(rows: Sequence[TraceRow]) -> Iterator[TraceRow]:
    """`rows`, each once, sorted by importance.

    In turn: one of the last training step, of the first, of the last evaluation, of the first,
    and a failure, newest first. The rest follows, newest first.
    """
    training = [row for row in rows if row.split == "train"]
    evaluation = [row for row in rows if row.split != "train"]
    failures = [row for row in rows if row.outcome != "completed" and not row.session]
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
