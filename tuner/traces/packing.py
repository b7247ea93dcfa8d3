"""The stored form of a trace: what its calls have in common is written once.

Each turn of a conversation sends all earlier ones again. As they are, the calls of n turns take
O(n^2); packed, a trace takes what is new in each call:

    "format": 2
    "distinct"       {"messages": [...], "tools": [...]}: each message (responses too) and each
                     list of tools of the trace once
    in each call
      "prompt_ids"   [e, k, ids]: the first k of call e's prompt_ids + completion_ids, then ids
      "messages"     [e, k, numbers]: likewise of call e's messages + response, each message by
                     its number in "distinct"
      "response"     number of a message
      "tools"        number of a list of tools

e counts from 0 and is less than the call's own index; in a call that shares nothing, k is 0.
Everything else is as in format 1, which has no "format" and holds all of it in each call.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Sequence
from typing import Any

FORMAT = 2

Reference = tuple[int, int, Sequence[int]]


def pack(trace: dict[str, Any], text: Callable[[Any], str]) -> dict[str, Any]:
    """A trace of format 1 in the stored form.

    Args:
        trace: What `tuner.traces.plain.to_plain` gives for a trace.
        text: A message, or a list of tools, as JSON.
    """
    packer = Packer(text)
    calls = [packer.call(call) for call in trace["calls"]]
    return {"format": FORMAT, **trace, "distinct": packer.distinct, "calls": calls}


def unpack(data: dict[str, Any]) -> dict[str, Any]:
    """A stored trace of any format in format 1.

    Messages and lists of tools are objects that calls share: do not change them.

    Raises:
        ValueError: The format is of a later version.
        LookupError, TypeError: `data` is not a trace.
    """
    if "format" not in data:
        return data
    trace = dict(data)
    if (version := trace.pop("format")) != FORMAT:
        raise ValueError(f"format is {version!r}; this version reads up to {FORMAT}")
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
    """Whether a stored trace is known to have no branches without unpacking it.

    So it is when each call has the whole sequence of the one before it in its prompt. False says
    nothing: `tuner.traces.branches` does.
    """
    if len(data["calls"]) < 2:
        return True
    if "format" not in data:
        return False
    length = 0
    for index, call in enumerate(data["calls"]):
        _, shared, new = call["prompt_ids"]
        # Lengths never fall up to here, so nothing but the sequence before has this many ids.
        if index and shared != length:
            return False
        length = shared + len(new) + len(call["completion_ids"])
    return True


def _resolve(reference: Reference, earlier: Sequence[list[int]]) -> list[int]:
    call, shared, new = reference
    return [*earlier[call][:shared], *new] if shared else list(new)


class Packer:
    """Packs the calls of one trace, as they come.

    Args:
        text: A message, or a list of tools, as JSON.

    Attributes:
        distinct: The messages and lists of tools that were new in calls so far; it grows at its
            ends.
    """

    def __init__(self, text: Callable[[Any], str]) -> None:
        self._messages, self._tools = _Distinct(text), _Distinct(text)
        self._ids, self._talks = _Earlier(), _Earlier()
        self.distinct = {"messages": self._messages.items, "tools": self._tools.items}

    def call(self, call: dict[str, Any]) -> dict[str, Any]:
        """The next call of a trace of format 1 in the stored form."""
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
        # By its text: to Python 1, 1.0 and True are equal, and so are dicts in another order.
        number = self._numbers.setdefault(self._text(item), len(self.items))
        if number == len(self.items):
            self.items.append(item)
        return number


class _Earlier:
    """The sequences of earlier calls, in lexicographic order.

    Next to the place where a sequence belongs stands one that shares as much of its beginning with
    it as any, so that two comparisons find the best of all calls.
    """

    def __init__(self) -> None:
        self._sequences: list[tuple[int, ...]] = []
        self._calls: list[int] = []

    def refer(self, begin: tuple[int, ...], end: tuple[int, ...]) -> Reference:
        """`begin` by the earlier call that shares most of it; keeps `begin + end` for later."""
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
    """How many items two sequences share at their beginning."""
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
