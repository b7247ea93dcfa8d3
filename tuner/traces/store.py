"""Traces on disk: one JSONL file per step, written as rollouts end, readable while the run
continues."""

from __future__ import annotations

import hashlib
import json
import os
import re
import types
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, Literal, NotRequired, TypeVar, Union, get_args, get_origin, get_type_hints

from typing_extensions import TypedDict

from tuner.engines.images import ALBUM
from tuner.errors import TunerError
from tuner.traces.call import Call
from tuner.traces.reading import (
    Count,
    Integer,
    InvalidRecord,
    JsonReader,
    Number,
    Text,
    TokenId,
    whole_file,
)
from tuner.traces.trace import RolloutId, Trace

# The stored form of a trace: what its calls have in common is written once.
#
# Each turn of a conversation sends all earlier ones again. Written in full, the calls of n turns
# take
# O(n^2); packed, a trace takes what is new in each call:
#
#     "format": 2
#     "distinct"       {"messages": [...], "tools": [...]}: each message (responses too) and each
#                      list of tools of the trace once
#     in each call
#       "prompt_ids"   [e, k, ids]: the first k of call e's prompt_ids + completion_ids, then ids
#       "messages"     [e, k, numbers]: likewise of call e's messages + response, each message by
#                      its number in "distinct"
#       "response"     number of a message
#       "tools"        number of a list of tools
#
# e counts from 0 and is less than the call's own index; if a call shares nothing, k is 0.
# Everything else is as in format 1, which has no "format" and contains everything in each call.


FORMAT = 2

Reference = tuple[int, int, Sequence[int]]


def pack(trace: dict[str, Any], text: Callable[[Any], str]) -> dict[str, Any]:
    """Convert a trace of format 1 to the stored form.

    Args:
        trace: Result of `tuner.traces.store.to_plain` for a trace.
        text: A message, or a list of tools, as JSON.
    """
    packer = Packer(text)
    calls = [packer.call(call) for call in trace["calls"]]
    return {"format": FORMAT, **trace, "distinct": packer.distinct, "calls": calls}


def unpack(data: dict[str, Any]) -> dict[str, Any]:
    """Convert a stored trace of any format to format 1.

    Messages and lists of tools are objects that calls share: do not change them.

    Raises:
        LookupError: A call refers to something missing.
    """
    if "format" not in data:
        return data
    trace = {name: value for name, value in data.items() if name != "format"}
    distinct = trace.pop("distinct")
    all_ids: list[list[int]] = []
    all_talks: list[list[int]] = []
    calls = []
    for call in trace["calls"]:
        prompt_ids = _resolve(call["prompt_ids"], all_ids)
        sent = _resolve(call["messages"], all_talks)
        all_ids.append(prompt_ids + call["completion_ids"])
        all_talks.append([*sent, call["response"]])
        calls.append(
            {
                **call,
                "prompt_ids": prompt_ids,
                "messages": [distinct["messages"][number] for number in sent],
                "response": distinct["messages"][call["response"]],
                "tools": distinct["tools"][call["tools"]],
            }
        )
    return {**trace, "calls": calls}


def is_one_path(data: dict[str, Any]) -> bool:
    """Whether a stored trace is known to have no branches, without unpacking it.

    True if the prompt of each call contains the whole sequence of the previous one. False means
    unknown; `tuner.traces.branches` determines it.
    """
    if len(data["calls"]) < 2:
        return True
    if "format" not in data or any(call.get("images") for call in data["calls"]):
        return False
    length = 0
    for index, call in enumerate(data["calls"]):
        _, shared, new = call["prompt_ids"]
        # Lengths never fall up to here, so only the previous sequence has this many ids.
        if index and shared != length:
            return False
        length = shared + len(new) + len(call["completion_ids"])
    return True


def _resolve(reference: Reference, earlier: Sequence[list[int]]) -> list[int]:
    call, shared, new = reference
    if not shared:
        return list(new)
    if shared > len(earlier[call]):
        raise LookupError(f"a call has {shared} items of call {call}, which has fewer")
    return [*earlier[call][:shared], *new]


class Packer:
    """Packs the calls of one trace, one after the other.

    Args:
        text: A message, or a list of tools, as JSON.

    Attributes:
        distinct: The distinct messages and lists of tools of the calls so far; append-only.
    """

    def __init__(self, text: Callable[[Any], str]) -> None:
        self._messages, self._tools = _Distinct(text), _Distinct(text)
        self._ids, self._talks = _Earlier(), _Earlier()
        self.distinct = {"messages": self._messages.items, "tools": self._tools.items}

    def call(self, call: dict[str, Any]) -> dict[str, Any]:
        """The stored form of the next call of a trace of format 1."""
        sent = tuple(self._messages.number(message) for message in call["messages"])
        response = self._messages.number(call["response"])
        begin, end = tuple(call["prompt_ids"]), tuple(call["completion_ids"])
        return {
            **call,
            "prompt_ids": self._ids.refer(begin, end),
            "messages": self._talks.refer(sent, (response,)),
            "response": response,
            "tools": self._tools.number(call["tools"]),
        }


class _Distinct:
    """Items by number, each JSON text once."""

    def __init__(self, text: Callable[[Any], str]) -> None:
        self.items: list[Any] = []
        self._text = text
        self._numbers: dict[str, int] = {}

    def number(self, item: Any) -> int:
        # By text: in Python 1, 1.0 and True are equal, and so are dicts in another order.
        number = self._numbers.setdefault(self._text(item), len(self.items))
        if number == len(self.items):
            self.items.append(item)
        return number


class _Earlier:
    """The sequences of earlier calls, in lexicographic order.

    The neighbours of a sequence's position share the longest prefix with it, so two comparisons
    find the best of all calls.
    """

    def __init__(self) -> None:
        self._sequences: list[tuple[int, ...]] = []
        self._calls: list[int] = []

    def refer(self, begin: tuple[int, ...], end: tuple[int, ...]) -> Reference:
        """`begin` as a reference to the earlier call that shares most of it; keeps `begin +
        end` for later."""
        at = bisect(self._sequences, begin)
        near = range(max(at - 1, 0), min(at + 1, len(self._sequences)))
        candidates = [(_shared(begin, self._sequences[i]), self._calls[i]) for i in near]
        shared, call = max(candidates, default=(0, 0))
        whole = begin + end
        at = bisect(self._sequences, whole, at)
        self._sequences.insert(at, whole)
        self._calls.insert(at, len(self._calls))
        return (call, shared, begin[shared:]) if shared else (0, 0, begin)


def _shared(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Length of the common prefix of two sequences."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:  # a[:low] == b[:low], a[:high] != b[:high]
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


# Conversion of dataclasses to plain data and back, by the types of their fields.
#
# A field that is added to a dataclass needs no change here, and older data are read with its
# default. Fields may be of JSON's own types, `Any`, enums, dataclasses, tuples, lists and dicts of
# these, and each of them or None.


T = TypeVar("T")

_AS_IT_IS = (str, int, float, bool, type(None), Any, dict, list)
# None means unchanged: most fields, and each of thousands of token ids, need no call.
_Convert = Callable[[Any], Any] | None


def to_plain(value: Any) -> dict[str, Any]:
    """A dataclass as a dict for `json.dumps`, which writes tuples as lists.

    Values that are already plain are not copied.

    Raises:
        TypeError: A field has a type that this module does not support.
    """
    cls: Any = type(value)
    plain: dict[str, Any] = _of_dataclass(cls, write=True)(value)
    return plain


def from_plain(cls: type[T], data: dict[str, Any]) -> T:
    """The dataclass from the result of `json.loads`; equal to the one that was written.

    Raises:
        TypeError, ValueError: `data` lacks a field without a default, has an unknown field, or has
            a value of a wrong type.
    """
    kind: Any = cls
    value: T = _of_dataclass(kind, write=False)(data)
    return value


@cache
def _convert(hint: Any, write: bool) -> _Convert:
    origin, args = get_origin(hint), get_args(hint)
    kind: Any = hint  # mypy: a dataclass might not be hashable, its type always is
    if is_dataclass(hint):
        return _of_dataclass(kind, write)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return (lambda member: member.value) if write else hint
    if hint in _AS_IT_IS or origin is Literal:
        return None
    if origin in (Union, types.UnionType):
        return _of_union(hint, args, write)
    if origin is tuple and len(args) == 2 and args[1] is Ellipsis:
        return _of_items(_convert(args[0], write), list if write else tuple, bare=write)
    if origin is tuple:
        return _of_places([_convert(arg, write) for arg in args], write)
    if origin is list:
        return _of_items(_convert(args[0], write), list, bare=True)
    if origin is dict:
        inner = _convert(args[1], write)
        return None if inner is None else lambda items: {k: inner(v) for k, v in items.items()}
    raise TypeError(f"{hint} has no plain form; tuner/traces/store.py says which types have")


@cache
def _of_dataclass(cls: Any, write: bool) -> Callable[[Any], Any]:
    hints = get_type_hints(cls)
    converts = {field.name: _convert(hints[field.name], write) for field in fields(cls)}
    named = [(name, convert) for name, convert in converts.items() if convert is not None]

    def to_data(value: Any) -> dict[str, Any]:
        data = {name: getattr(value, name) for name in converts}
        return data | {name: convert(data[name]) for name, convert in named}

    def from_data(data: dict[str, Any]) -> Any:
        return cls(**data | {name: convert(data[name]) for name, convert in named if name in data})

    return to_data if write else from_data


def _of_union(hint: Any, args: tuple[Any, ...], write: bool) -> _Convert:
    members = [arg for arg in args if arg is not type(None)]
    converts = [convert for member in members if (convert := _convert(member, write)) is not None]
    if not converts:
        return None
    if len(members) > 1:
        raise TypeError(f"{hint}: plain data do not say which of these a value is")
    (convert,) = converts
    return lambda value: None if value is None else convert(value)


def _of_items(inner: _Convert, sequence: Any, *, bare: bool) -> _Convert:
    """Convert each item; `bare` leaves the sequence unchanged if the items need no conversion."""
    if inner is None:
        return None if bare else sequence
    return lambda items: sequence(map(inner, items))


def _of_places(inner: list[_Convert], write: bool) -> _Convert:
    def convert(items: Any) -> Any:
        pairs = zip(items, inner, strict=True)
        return (list if write else tuple)(item if f is None else f(item) for item, f in pairs)

    return convert


# Types of stored forms, derived from those of the dataclasses, for checking lines.


def stored_form(hint: Any, packed: Mapping[str, Any] | None = None) -> Any:
    """The type of a value's plain form, made at run time, which mypy cannot follow.

    Args:
        hint: The value's type.
        packed: Fields of a dataclass that differ in the stored form, or are added to it.
    """
    if hint in (int, float, str):
        return {int: Integer, float: Number, str: Text}[hint]
    if is_dataclass(hint):
        hints, forms = get_type_hints(hint, include_extras=True), dict(packed or {})
        for one in fields(hint):
            form = forms.get(one.name) or stored_form(hints[one.name])
            needed = one.default is MISSING and one.default_factory is MISSING
            forms[one.name] = form if needed else NotRequired[form]
        return closed(hint.__name__, forms)  # type: ignore[union-attr]
    if isinstance(hint, type) and issubclass(hint, Enum):
        return Literal[tuple(member.value for member in hint)]
    origin, args = get_origin(hint), get_args(hint)
    if origin is tuple and args[-1] is Ellipsis:
        return list[stored_form(args[0])]  # type: ignore[misc]
    if origin in (tuple, list, dict):
        return origin[tuple(map(stored_form, args))]
    if origin in (Union, types.UnionType):
        return Union[tuple(map(stored_form, args))]  # noqa: UP007
    return hint


def closed(name: str, forms: Mapping[str, Any]) -> Any:
    """The type of a dict with exactly these fields."""
    # Types made at run time: mypy and the linter know only those written in full.
    made = TypedDict(name, dict(forms))  # type: ignore[misc]  # noqa: UP013
    setattr(made, "__pydantic_config__", {"extra": "forbid"})  # noqa: B010
    return made


_MESSAGES = list[dict[Text, Any]]
_DISTINCT = {"messages": _MESSAGES, "tools": list[_MESSAGES]}


def _packed_call() -> Any:
    ids, numbers = tuple[Count, Count, list[TokenId]], tuple[Count, Count, list[Count]]
    packed = {"prompt_ids": ids, "messages": numbers, "response": Count, "tools": Count}
    return stored_form(Call, packed)


def _packed_trace() -> Any:
    distinct, calls = closed("Distinct", _DISTINCT), list[_packed_call()]  # type: ignore[misc]
    return stored_form(Trace, {"format": Literal[FORMAT], "distinct": distinct, "calls": calls})


class _StoredReader(JsonReader[dict[str, Any]]):
    def parse(self, text: bytes) -> dict[str, Any]:
        try:
            return super().parse(text)
        except InvalidRecord as error:
            if str(error).startswith("format: input"):
                raise InvalidRecord(f"{error}: it is of another version of tuner") from None
            if not str(error).startswith("format: field required"):
                raise
        return _FIRST_FORMAT.parse(text)


class _TraceReader(JsonReader[Trace]):
    def parse(self, text: bytes) -> Trace:
        try:
            return trace_from_json(STORED.parse(text))
        except LookupError as error:
            raise InvalidRecord(f"calls refer to something missing ({error})") from None


_FIRST_FORMAT = JsonReader[dict[str, Any]](lambda: stored_form(Trace), "a trace")
STORED = _StoredReader(_packed_trace, "a trace")
"""Traces in the stored form, as plain data."""
TRACES = _TraceReader(None, "a trace")
STORED_CALLS = JsonReader[dict[str, Any]](
    lambda: closed("StoredCall", {"call": _packed_call(), **_DISTINCT}), "a call"
)
"""Calls in a server's store: each with the messages and tools that are new in it."""

IMAGES = "images"
"""The folder, beside the files of steps, with the images of their prompts, each once."""

SERVED = "serving.sqlite"
"""The file in a server's run directory with its sessions."""


class TraceStore:
    """Appends traces to `<folder>/<split>_step_<n>.jsonl` (`step_<n>.jsonl` for training).

    Each line is one packed trace, so that it grows with what is new in each call; files of earlier
    versions are also read. Images are in `<folder>/images/<sha256>.<png, jpg, ...>`, as they were
    sent.

    A line is written and flushed when its rollout ends, so a killed process loses at most the line
    it was writing; `read` skips such a torn last line and `append` cuts it off.

    Args:
        folder: Folder of the files.
        vocabulary: Number of token ids of the model that is trained on what is read; None if
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
        for sha256 in {image.sha256 for call in trace.calls for image in call.images}:
            ALBUM.keep(sha256, self.folder / IMAGES)
        with open(self._mended[of], "ab") as file:
            file.write(trace_line(trace_to_json(trace)))

    def read(self, split: str, step: int) -> list[Trace]:
        """Every attempt recorded so far for one step of one split, in order of arrival.

        Raises:
            TunerError: A line is not a trace, or has a token id that the model does not have.
        """
        path = self.path(split, step)
        traces = list(read_traces(path, remedy="move the file away to run its rollouts again"))
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


def read_traces(path: str | Path, *, remedy: str = "", skip: bool = False) -> Iterator[Trace]:
    """The traces of one file, one for each attempt; none if there is no file.

    The last line of an attempt counts: a process that is killed between two attempts leaves the
    first one in the file, and the rollout starts again.

    Args:
        remedy: What to do about a damaged line.
        skip: Skip damaged lines and log how many and which, instead of raising.

    Raises:
        TunerError: A line other than a torn last one is not a trace; names file, line and field.
    """
    found: dict[tuple[RolloutId, int], Trace] = {}
    for _, _, trace in TRACES.lines(Path(path), remedy, skip=skip):
        for sha256 in {image.sha256 for call in trace.calls for image in call.images}:
            ALBUM.find(sha256, Path(path).parent / IMAGES)
        found.pop((trace.id, trace.attempt), None)
        found[trace.id, trace.attempt] = trace
    yield from found.values()


def trace_to_json(trace: Trace) -> dict[str, Any]:
    """A trace as plain data in the stored form; inverse of `trace_from_json`."""
    return pack(to_plain(trace), _AS_ASCII)


def trace_from_json(data: dict[str, Any]) -> Trace:
    """The trace from data of this version or an earlier one.

    Calls share equal messages and lists of tools: do not change them.

    Raises:
        LookupError: A call refers to something missing.
    """
    return from_plain(Trace, unpack(data))


def call_packer() -> Packer:
    """A packer for the calls of one trace."""
    return Packer(_AS_ASCII)


def trace_line(data: dict[str, Any]) -> bytes:
    """A trace in the stored form as a line of JSON."""
    try:
        return f"{_AS_TEXT(data)}\n".encode()
    except UnicodeEncodeError:  # half a UTF-16 pair, which JSON can hold and UTF-8 cannot
        return f"{_AS_ASCII(data)}\n".encode()


def text_of(value: Any, form: Callable[[Any], str] = repr) -> str:
    """`form(value)` of a user's object, whose own code may fail."""
    try:
        return form(value)
    except Exception as error:
        return f"<a {type(value).__name__} that cannot be shown: {type(error).__name__}>"


_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def same_text(value: Any) -> str:
    """The repr of a user's object, which is the same in every process: instead of an address in
    memory it has a digest of the content, such as an image's."""

    def digest(value: Any) -> str:
        return f" of {hashlib.blake2b(value.tobytes(), digest_size=16).hexdigest()}"

    text = text_of(value)
    if not _ADDRESS.search(text):
        return text
    content = text_of(value, digest) if hasattr(value, "tobytes") else ""
    return _ADDRESS.sub("", text) + content


def _unserializable(value: Any) -> Any:
    """Dataset rows may contain dates, arrays or images: keep what is readable, else the repr."""
    form = getattr(value, "tolist", None) or getattr(value, "isoformat", None)
    return same_text(value) if form is None else text_of(value, lambda _: form())


# Created once: `json.dumps` creates an encoder in each call with options.
_AS_TEXT = json.JSONEncoder(default=_unserializable, ensure_ascii=False).encode
_AS_ASCII = json.JSONEncoder(default=_unserializable).encode


def cut_torn_line(path: Path) -> None:
    """Cut a file, if it exists, at the end of its last complete line, so that one can follow."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        content = file.read()
        if content and not content.endswith(b"\n"):
            file.truncate(content.rfind(b"\n") + 1)


# Saved rollouts: what a test of an agent needs, without the run.
#
# A line of JSON for each:
#
#     {"name": "refund", "model": "Qwen/Qwen3-8B", "defaults": {"temperature": 1.0, ...},
#      "context": 4096, "trace": {...}}
#
# `trace` is in the stored form (`tuner.traces.store`).


@dataclass(frozen=True)
class SavedRollout:
    """A rollout that can be replayed without its run.

    Attributes:
        name: Unique in its file.
        trace: Its calls, task and answer.
        model: The `model` that requests must name.
        defaults: Sampling settings of requests that do not set them: "temperature", "top_p",
            "top_k", "max_tokens"; empty for a remote model.
        context: Maximum of prompt and answer tokens together; None if limits of answers depended
            on something else.
    """

    name: str
    trace: Trace
    model: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    context: int | None = None


_SAVED = JsonReader[dict[str, Any]](
    lambda: stored_form(SavedRollout, {"trace": dict[Text, Any]}), "a saved rollout"
)


def read_rollouts(path: str | Path) -> dict[str, SavedRollout]:
    """The rollouts of a file by their names, in its order; none if there is no file.

    Raises:
        TunerError: A line is not a saved rollout, or has the name of an earlier one.
    """
    found: dict[str, SavedRollout] = {}
    path = Path(path)
    for number, line in enumerate(whole_file(path).split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            data = _SAVED.parse(line)
            trace = TRACES.parse(json.dumps(data["trace"]).encode())
        except InvalidRecord as error:
            raise TunerError(
                f"{path}, line {number} is not a saved rollout: {error}; delete the line, and "
                "record or save it again"
            ) from error
        one = SavedRollout(**data | {"trace": trace})
        if one.name in found:
            raise TunerError(
                f"{path}, line {number}: there is a rollout {one.name!r} above; delete one of them"
            )
        found[one.name] = one
    return found


def write_rollouts(path: str | Path, rollouts: Iterable[SavedRollout]) -> None:
    """Add rollouts to a file, creating it if necessary and replacing those with the same names.

    Raises:
        TunerError: The file has other content.
    """
    known = read_rollouts(path)
    known |= {one.name: one for one in rollouts}
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(b"".join(map(_line, known.values())))
    os.replace(temporary, path)


def _line(one: SavedRollout) -> bytes:
    return trace_line(
        {
            "name": one.name,
            "model": one.model,
            "defaults": dict(one.defaults),
            "context": one.context,
            "trace": trace_to_json(one.trace),
        }
    )
