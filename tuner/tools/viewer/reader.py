"""What the page shows of a run, read from its directory while it may still be written."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from tuner.config.source import lookup
from tuner.errors import TunerError
from tuner.runs.directory import OBJECTS, RunDirectory
from tuner.runs.estimates import check_is_run
from tuner.tasks.datasets import row_text
from tuner.tools.viewer.facts import clean
from tuner.tools.viewer.follow import MetricsFollower, branch_rows
from tuner.tools.viewer.index import TraceIndex, identity
from tuner.tools.viewer.queries import tree
from tuner.traces import RolloutId
from tuner.traces.store import SERVED, unpack

FILE = "tokenizer.json"
# What decoding gives for bytes that are only a part of a character.
PARTIAL = "\ufffd"
# Shown for the tokens of a character before its last; UTF-8 has at most four bytes.
BEGINS_CHARACTER = "\u22ef"
LONGEST_CHARACTER = 4


class Vocabulary:
    """Token ids as text.

    Attributes:
        problem: Why there is no text, or None.
    """

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
        self.problem = f"there is no {FILE} in {looked}, so tokens are shown as ids"

    def _open(self, path: Path) -> None:
        try:
            from tokenizers import Tokenizer

            self._tokenizer = Tokenizer.from_file(str(path))
            # A word to stand before each token: alone, some decoders drop its leading space.
            self._anchor = self._tokenizer.encode("a", add_special_tokens=False).ids[:1]
            self._anchor_text = self._decode(self._anchor)
        except Exception as error:  # the library raises bare Exception
            self._tokenizer = None
            self.problem = f"{path} cannot be read ({error}), so tokens are shown as ids"

    def texts(self, ids: set[int]) -> dict[int, str]:
        """Text of each of `ids`, seen alone; empty without a tokenizer."""
        if self._tokenizer is None:
            return {}
        for id in ids - self._known.keys():
            text = self._decode([*self._anchor, id])
            self._known[id] = text.removeprefix(self._anchor_text)
        return {id: self._known[id] for id in sorted(ids)}

    def characters(self, ids: Sequence[int]) -> dict[int, str]:
        """By position: text of tokens that only together make a character.

        The last of them has the character, those before it a mark.
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


# JavaScript's numbers are floats of 64 bits: integers beyond this are rounded.
EXACT_INTEGER = 2**53 - 1


class RunReader:
    """A run directory, read again and again.

    Attributes:
        metrics: Rows of `metrics.jsonl`.
        traces: What can be asked of its traces.
    """

    def __init__(self, path: Path, *, keep: bool = False) -> None:
        """
        Args:
            path: The run directory.
            keep: Keep the index of its traces beside them, for the next time.

        Raises:
            TunerError: `path` is not a run directory.
        """
        self.directory = RunDirectory(path.resolve())
        check_is_run(path)
        self.metrics = MetricsFollower(self.directory.metrics)
        field = lookup(self.directory.stored_config(), "tuner.tasks.selector.field")
        field = field if isinstance(field, str) else None
        self.traces = TraceIndex(self.directory.traces, keep=keep, field=field)
        self._vocabulary: Vocabulary | None = None

    @property
    def problems(self) -> list[str]:
        """Lines of metrics and traces that are left out."""
        return [*self.metrics.problems, *self.traces.problems]

    def info(self) -> dict[str, Any]:
        """Name, status and the settings worth seeing; no secrets, so no whole configuration."""
        config = self.directory.stored_config()
        completed = self.directory.result.is_file()
        return {
            "name": self.directory.path.name,
            "project": config.get("project") or self.directory.path.parent.name,
            "status": "completed" if completed else "no result yet",
            "total_steps": self._total_steps(config, completed),
            "updated": self._updated(),
            "served": served(self.directory.path / SERVED),
            "settings": {
                "model": _short(lookup(config, "model.model_path")),
                "algorithm": lookup(config, "algorithm.algorithm_type"),
                "learning rate": lookup(config, "algorithm.optimizer.lr"),
                **_size_of_a_step(config),
            },
        }

    def trace(self, file: str, offset: int) -> dict[str, Any]:
        """One trace as stored, with the text of its tokens.

        Returns:
            `trace`, packed as it was stored; `branches`, its branches with their causes; `tree`,
            what `tuner.tools.viewer.queries.tree` gives of a final attempt, else None;
            `vocabulary`, text by id; `characters`, for each call and then for "prompt" and
            "completion" the text of tokens that only together make a character, by position;
            `no_text`, why there is no text, or None.

        Raises:
            TunerError: No trace begins there, or none that this version knows.
        """
        stored = self.traces.read(file, offset)
        found = branch_rows(stored, f"{file}:{offset}")
        calls = unpack(stored)["calls"]
        ids: set[int] = set()
        for call in calls:
            ids.update(call["prompt_ids"], call["completion_ids"])
        vocabulary = self.vocabulary()
        id_ = RolloutId(**stored["id"] | {"split": clean(stored["id"]["split"])})
        return {
            "trace": stored,
            "branches": found,
            "tree": tree(self.traces, id_) if stored["final"] else None,
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

    def task_of(self, file: str, offset: int) -> tuple[str, bytes]:
        """The split of a trace, and the identity of its task, in this run and in others.

        Raises:
            TunerError: No trace begins there.
        """
        stored = self.traces.read(file, offset)
        return str(stored["id"]["split"]), identity(row_text(stored["task"]))

    def vocabulary(self) -> Vocabulary:
        """Of the newest checkpoint, else of the model that the run started from."""
        if self._vocabulary is None or self._vocabulary.problem is not None:
            steps = self.directory.checkpoint_steps() if self.directory.checkpoints.is_dir() else []
            folders: list[str | Path] = [self.directory.checkpoint(step) for step in steps[-1:]]
            model = lookup(self.directory.stored_config(), "model.model_path")
            named = [model] if isinstance(model, str) else []
            self._vocabulary = Vocabulary([*folders, *named])
        return self._vocabulary

    def _total_steps(self, config: dict[str, Any], completed: bool) -> int | None:
        """None where it follows from the length of the dataset, which is not in the directory, and
        of a search, which has no steps."""
        if completed:
            steps = OBJECTS.document(self.directory.result, "delete it").get("steps")
        else:
            steps = lookup(config, "buffer.total_steps")
        return steps if isinstance(steps, int) else None

    def _updated(self) -> float:
        """Unix time of the last write to metrics or traces."""
        files = [self.directory.metrics, *self.directory.traces.glob("*step_*.jsonl")]
        return max((file.stat().st_mtime for file in files if file.is_file()), default=0.0)


# The latest decisions, as many as one reads.
DECISIONS = 50


def served(path: Path) -> dict[str, Any] | None:
    """What a server did so far, and what it decided about new weights; None where nothing served.

    Args:
        path: Its store.

    Returns:
        `sessions`, how many there are in each state; `decisions`, the latest first.

    Raises:
        TunerError: The file cannot be read.
    """
    if not path.is_file():
        return None
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as file:
            counts = file.execute(
                "SELECT COALESCE(SUM(ended IS NULL), 0), COALESCE(SUM(ended IS NOT NULL), 0), "
                "COALESCE(SUM(NOT judged), 0), COALESCE(SUM(judged AND trained IS NULL), 0), "
                "COALESCE(SUM(trained IS NOT NULL), 0) FROM sessions"
            ).fetchone()
            learns = file.execute("SELECT 1 FROM sqlite_master WHERE name = 'decisions'").fetchone()
            decisions = (
                []
                if learns is None
                else file.execute(
                    "SELECT at, kind, version, serving, why FROM decisions "
                    "ORDER BY number DESC LIMIT ?",
                    (DECISIONS,),
                ).fetchall()
            )
    except sqlite3.Error as error:
        raise TunerError(f"{path} cannot be read as the store of a server: {error}") from error
    names = ("open", "ended", "not judged", "judged, not trained", "trained")
    columns = ("at", "decision", "version", "beside", "why")
    return {
        "sessions": dict(zip(names, counts, strict=True)),
        "decisions": [dict(zip(columns, row, strict=True)) for row in decisions],
    }


def to_json(value: Any) -> str:
    """JSON that JavaScript reads without loss.

    Numbers that it has not or would round become text: "NaN", "9007199254740993".
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


def _size_of_a_step(config: dict[str, Any]) -> dict[str, Any]:
    size = lookup(config, "buffer.batch_size")
    if config.get("mode") == "train":
        return {"rows per step": size}
    return {
        "rollouts per task": lookup(config, "algorithm.repeat_times"),
        "tasks per step": size,
        "temperature": lookup(config, "model.temperature"),
    }


def _short(model: Any) -> Any:
    """The name of a model's folder; a name on the Hub as it is."""
    return Path(model).name if isinstance(model, str) and Path(model).is_absolute() else model
