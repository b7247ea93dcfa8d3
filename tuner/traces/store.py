"""Traces on disk: one JSONL per step, written as rollouts end, readable while the run goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tuner.errors import TunerError
from tuner.traces.packing import Packer, pack, unpack
from tuner.traces.plain import from_plain, to_plain
from tuner.traces.trace import RolloutId, Trace

# What reading something else than a trace raises.
NOT_A_TRACE = (ValueError, LookupError, TypeError, AttributeError)

SERVED = "serving.sqlite"
"""The file in its run directory that a server keeps its sessions in."""


class TraceStore:
    """Appends traces to `<folder>/<split>_step_<n>.jsonl` (`step_<n>.jsonl` for training).

    Each line is one trace, packed as `tuner.traces.packing` says, so that it grows with what is new
    in each call; files of earlier versions are read too.

    A line is written and flushed when its rollout ends, so a process that is killed loses at most
    the line it was writing; `read` leaves such a torn last line out and `append` cuts it off.

    Args:
        folder: Where the files are.
        vocabulary: How many tokens the model has that is trained on what is read; None where
            nothing is trained.
    """

    def __init__(self, folder: Path, vocabulary: int | None = None) -> None:
        self.folder = folder
        self._vocabulary = vocabulary
        folder.mkdir(parents=True, exist_ok=True)
        self._mended: dict[tuple[str, int], str] = {}  # of each split and step

    def path(self, split: str, step: int) -> Path:
        prefix = "" if split == "train" else f"{split}_"
        return self.folder / f"{prefix}step_{step:06d}.jsonl"

    def append(self, trace: Trace) -> None:
        of = trace.id.split, trace.id.step
        if of not in self._mended:
            cut_torn_line(self.path(*of))
            self._mended[of] = str(self.path(*of))
        with open(self._mended[of], "ab") as file:
            file.write(trace_line(trace_to_json(trace)))

    def read(self, split: str, step: int) -> list[Trace]:
        """Every attempt recorded so far for one step of one split, in order of arrival.

        Raises:
            TunerError: A line is not a trace, or has a token id that the model does not have.
        """
        path = self.path(split, step)
        traces = list(read_traces(path))
        if self._vocabulary is not None:
            for trace in traces:
                for call in trace.calls:
                    for token in {*call.prompt_ids, *call.completion_ids}:
                        if not 0 <= token < self._vocabulary:
                            raise TunerError(
                                f"{path}: {trace.id} has the token id {token}, and the model has "
                                f"{self._vocabulary} tokens: it is damaged or of another model; "
                                "move the file away, and its rollouts are run again"
                            )
        return traces


def read_traces(path: str | Path) -> Iterator[Trace]:
    """The traces of one file, one for each attempt; none where there is no file.

    Of lines about one attempt the last counts: a process that is killed between two attempts leaves
    the first behind, and the rollout is begun again.

    Raises:
        TunerError: A line other than a torn last one is not a trace; names file and line.
    """
    found: dict[tuple[RolloutId, int], Trace] = {}
    for number, line in complete_lines(Path(path)):
        try:
            trace = trace_from_json(json.loads(line))
        except NOT_A_TRACE as error:
            raise TunerError(f"{path}, line {number} is not a trace: {error!r}") from error
        found.pop((trace.id, trace.attempt), None)
        found[trace.id, trace.attempt] = trace
    yield from found.values()


def trace_to_json(trace: Trace) -> dict[str, Any]:
    """A trace as plain data in the stored form; `trace_from_json` gives an equal trace back."""
    return pack(to_plain(trace), _AS_ASCII)


def trace_from_json(data: dict[str, Any]) -> Trace:
    """The trace again, from data of this version or of an earlier one.

    Calls share the messages and lists of tools that are equal: do not change them.

    Raises:
        ValueError, LookupError, TypeError: It is not a trace.
    """
    return from_plain(Trace, unpack(data))


def call_packer() -> Packer:
    """What packs the calls of one trace, as they come."""
    return Packer(_AS_ASCII)


def trace_line(data: dict[str, Any]) -> bytes:
    """Data that hold a trace in the stored form, as a line of JSON."""
    try:
        return f"{_AS_TEXT(data)}\n".encode()
    except UnicodeEncodeError:  # half a pair of UTF-16, which JSON can spell and UTF-8 cannot
        return f"{_AS_ASCII(data)}\n".encode()


def _unserializable(value: Any) -> Any:
    """Dataset rows may hold dates, arrays or images; keep what reads well, else its repr."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "isoformat"):
        return value.isoformat()
    return repr(value)


# Made once: `json.dumps` makes an encoder each time that it is told something.
_AS_TEXT = json.JSONEncoder(default=_unserializable, ensure_ascii=False).encode
_AS_ASCII = json.JSONEncoder(default=_unserializable).encode


def complete_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(number from 1, line) of a file that may not be there; a torn last line is left out."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.endswith(b"\n"):
                yield number, line


def cut_torn_line(path: Path) -> None:
    """Let a file, which may not be there, end with a complete line, so that one can follow."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        content = file.read()
        if content and not content.endswith(b"\n"):
            file.truncate(content.rfind(b"\n") + 1)
