"""Causes of branches: why a call of a trace did not extend an earlier path.

A branch depends only on ids; its cause is read from messages and tools. The words
*repeats* and *shares* below compare messages as they are (fields without a value dropped, text
parts joined, arguments of tool calls as the JSON they spell), then without reasoning, then also
without whitespace, then also without the ids of tool calls.

- Call c **repeats** an earlier call e when its messages are those of e, or begin with those of e
  and then e's response. Of several, the one that repeats most messages counts, then the strictest
  comparison, then the latest.
- c **shares** as many messages with e as the two have in common at their beginning, including e's
  response, without reasoning, whitespace and ids.

The first line that holds is the cause:

    resampled       c has the prompt ids of an earlier call
    other           c has only system messages: there is nothing to compare
    If c repeats e, and shares with no earlier call more messages than that:
    fork            c extends e by its ids: another call has already continued e
    tools_changed   the tools of c are not those of e
    reasoning       equal as they are, with reasoning in e, even an empty block; or equal without
                    it
    template        equal as they are, without reasoning: the chat template or the tokenizer
                    made other ids of the same messages
    whitespace      equal without whitespace
    tool_ids        equal without the ids of tool calls
    If not:
    compaction      c shares its first message after the system messages with an earlier call; and
                    is shorter than e with its response, e the latest of those that share most
    rewrite         the same, but c is not shorter
    system_changed  c begins with the messages of an earlier call and its response, except for the
                    system messages at the start
    compaction      messages of c are also in an earlier call with the same system messages, or in
                    its response; and c is shorter than e with its response, e the latest of those
                    that have most
    sub_agent       the system messages of c, or its first message after them, are its own
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from itertools import takewhile
from typing import Any

from tuner.traces.call import Call
from tuner.traces.tree import HasIds, sequence_keys

Message = dict[str, Any]


class BranchCause(StrEnum):
    """Cause of a branch; see the module for the rules."""

    RESAMPLED = "resampled"
    FORK = "fork"
    TOOLS_CHANGED = "tools_changed"
    REASONING = "reasoning"
    TEMPLATE = "template"
    WHITESPACE = "whitespace"
    TOOL_IDS = "tool_ids"
    SYSTEM_CHANGED = "system_changed"
    COMPACTION = "compaction"
    REWRITE = "rewrite"
    SUB_AGENT = "sub_agent"
    OTHER = "other"


@dataclass(frozen=True)
class Branch:
    """A call that did not extend the end of a path of its trace.

    Attributes:
        call: Its index among the trace's calls.
        cause: The cause.
        earlier: Index of the call that it was compared with; None if no earlier call is related.
    """

    call: int
    cause: BranchCause
    earlier: int | None


def branches(calls: Sequence[Call]) -> tuple[Branch, ...]:
    """The branches of one trace, in order of its calls.

    A call is a branch unless it is the first, or its prompt begins with the
    `prompt_ids + completion_ids` of an earlier call that is the end of a path, which means that no
    other earlier call continues it. The token tree of the calls has at most one row more than there
    are branches; two calls with equal ids make it fewer.

    Args:
        calls: One trace's calls in order of commitment.
    """
    keys = sequence_keys([call.compared for call in calls])
    prompts = [keys[i][: 4 * len(call.prompt_ids)] for i, call in enumerate(calls)]
    texts = _Texts()
    talks = [_Talk(call, texts) for call in calls]
    ends: set[bytes] = set()
    found = []
    for i, (key, prompt) in enumerate(zip(keys, prompts, strict=True)):
        if ends and not any(prompt.startswith(end) for end in ends):
            found.append(Branch(i, *_cause(talks[: i + 1], keys, prompts)))
        if not any(end.startswith(key) for end in ends):
            ends = {end for end in ends if not key.startswith(end)} | {key}
    return tuple(found)


def _cause(
    talks: Sequence[_Talk], keys: Sequence[bytes], prompts: Sequence[bytes]
) -> tuple[BranchCause, int | None]:
    """Cause of the branch at the last of `talks`, and index of the call it was compared with."""
    *earlier, new = talks
    prompt = prompts[len(earlier)]
    if prompt in prompts[: len(earlier)]:
        return BranchCause.RESAMPLED, prompts.index(prompt)
    if not new.turns(_LOOSEST):
        return BranchCause.OTHER, None

    shared = [
        _common(new.messages(_LOOSEST), old.messages(_LOOSEST, response=True)) for old in earlier
    ]
    most = max(shared)
    repeated = _repeated(new, earlier)
    if repeated is not None and repeated[0] >= most:
        _, view, e = repeated
        if prompt.startswith(keys[e]):
            return BranchCause.FORK, e
        if new.tools != earlier[e].tools:
            return BranchCause.TOOLS_CHANGED, e
        return _CAUSE_OF_VIEW[view] or earlier[e].unseen_cause, e

    if most > len(new.system):
        e = max(i for i, count in enumerate(shared) if count == most)
        return (BranchCause.COMPACTION if new.is_shorter(earlier[e]) else BranchCause.REWRITE), e
    other_system = [
        (len(turns), i)
        for i, old in enumerate(earlier)
        if (turns := old.turns(_LOOSEST, response=True)) == new.turns(_LOOSEST)[: len(turns)]
    ]
    if other_system:
        return BranchCause.SYSTEM_CHANGED, max(other_system)[1]
    akin = [i for i, old in enumerate(earlier) if old.system == new.system]
    sent = set(new.turns(_LOOSEST))
    kept = [(len(sent & set(earlier[i].turns(_LOOSEST, response=True))), i) for i in akin]
    count, e = max(kept, default=(0, 0))
    if count and new.is_shorter(earlier[e]):
        return BranchCause.COMPACTION, e
    return BranchCause.SUB_AGENT, None


def _repeated(new: _Talk, earlier: Sequence[_Talk]) -> tuple[int, int, int] | None:
    """The earlier call that `new` repeats: messages repeated, strictest view, index."""
    counts = [_repeats(new, old, _LOOSEST) for old in earlier]
    most = max(counts)
    if not most:
        return None
    view, latest = min(
        (next(view for view in range(_LOOSEST + 1) if _repeats(new, earlier[i], view)), -i)
        for i, count in enumerate(counts)
        if count == most
    )
    return most, view, -latest


def _repeats(new: _Talk, old: _Talk, view: int) -> int:
    """Number of messages of `old`, including its response, that `new` repeats; 0 unless it
    repeats it."""
    ours, theirs = new.messages(view), old.messages(view, response=True)
    if ours[: len(theirs)] == theirs:
        return len(theirs)
    return len(ours) if ours == theirs[:-1] else 0


def _common(ours: Sequence[str], theirs: Sequence[str]) -> int:
    """Number of messages that two lists have in common at their beginning."""
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))


# Comparisons of messages: as they are, then each view ignores one thing more.
_AS_IS, _NO_REASONING, _NO_WHITESPACE, _NO_TOOL_IDS = range(4)
_LOOSEST = _NO_TOOL_IDS
_CAUSE_OF_VIEW = (None, BranchCause.REASONING, BranchCause.WHITESPACE, BranchCause.TOOL_IDS)

# The end of reasoning inside the content; its beginning may be in the prompt.
_END_OF_REASONING = "</think>"

_to_text = json.JSONEncoder(sort_keys=True, default=repr).encode


class _Texts:
    """Text of messages by view; an object shared by many calls, as in a stored trace, is read
    once."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], str] = {}

    def of(self, message: Message, view: int) -> str:
        key = (id(message), view)  # the calls keep their messages alive
        if key not in self._known:
            self._known[key] = _text(message, view)
        return self._known[key]


class _Talk:
    """A call's messages and response as text, by view."""

    def __init__(self, call: Call, texts: _Texts) -> None:
        self._call = call
        self._texts = texts
        self.messages = cache(self._messages)
        self.tools = call.tools

    def _messages(self, view: int, *, response: bool = False) -> list[str]:
        if response:
            return [*self.messages(view), self._texts.of(self._call.response, view)]
        return [self._texts.of(message, view) for message in self._call.messages]

    @property
    def system(self) -> list[str]:
        """The system messages at the start."""
        return self.messages(_LOOSEST)[: self._system_count]

    def turns(self, view: int, *, response: bool = False) -> list[str]:
        """The messages after the system messages at the start."""
        return self.messages(view, response=response)[self._system_count :]

    def is_shorter(self, old: _Talk) -> bool:
        """Whether this call has fewer messages than `old` with its response."""
        return len(self.turns(_LOOSEST)) < len(old.turns(_LOOSEST, response=True))

    @property
    def unseen_cause(self) -> BranchCause:
        """Why a call that repeats this one exactly has other ids."""
        said = [*self._call.messages, self._call.response]
        # The gateway answers "" for a block without reasoning, which is dropped like any other.
        empty_block = self._call.response.get("reasoning_content") == ""
        has_reasoning = empty_block or any(map(_has_reasoning, said))
        return BranchCause.REASONING if has_reasoning else BranchCause.TEMPLATE

    @property
    def _system_count(self) -> int:
        return sum(1 for _ in takewhile(_is_system, self._call.messages))


def _is_system(message: Message) -> bool:
    return message.get("role") in ("system", "developer")


def _has_reasoning(message: Message) -> bool:
    if message.get("role") != "assistant":
        return False
    if message.get("reasoning_content") or message.get("reasoning"):
        return True
    return _END_OF_REASONING in _content(message)


def _text(message: Message, view: int) -> str:
    """A message as one string; equal to another's if the view sees no difference."""
    shown = {key: value for key, value in message.items() if value not in (None, "", [])}
    if _is_system(message):
        shown["role"] = "system"
    content = _content(message)
    if view >= _NO_REASONING and message.get("role") == "assistant":
        shown.pop("reasoning_content", None)
        shown.pop("reasoning", None)
        if _END_OF_REASONING in content:
            content = content.split(_END_OF_REASONING, 1)[1].lstrip()
    if view >= _NO_WHITESPACE:
        content = "".join(content.split())
    if view >= _NO_TOOL_IDS:
        shown.pop("tool_call_id", None)
    shown["content"] = content
    if "tool_calls" in shown:
        shown["tool_calls"] = [_tool_call(call, view) for call in shown["tool_calls"]]
    # Interned, because each message of a long trace is compared again and again.
    return sys.intern(_to_text(shown))


def _content(message: Message) -> str:
    """A message's text; parts that are not text become JSON."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "\n".join(
        part["text"]
        if isinstance(part, dict) and isinstance(part.get("text"), str)
        else _to_text(part)
        for part in content
    )


def _tool_call(call: dict[str, Any], view: int) -> list[Any]:
    function = call.get("function") or {}
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = "".join(arguments.split()) if view >= _NO_WHITESPACE else arguments
    return [function.get("name"), arguments, None if view >= _NO_TOOL_IDS else call.get("id")]


# Calls of a rollout that continue other calls: read from token ids, never from the order of
# arrival.
#
# A call continues another if that one's `prompt_ids + completion_ids` is the beginning of its
# prompt; of several such calls, the longest. With each completion in brackets:
#
#     a   s [1 2]                     ─ a ─┬─ b ── d
#     b   s 1 2 u [3]                      └─ c          b and c are answers to the same turn
#     c   s 1 2 u [4]
#     d   s 1 2 u 3 v [5]             ─ e                a sub-agent with a prompt of its own
#     e   t [6]
#
# d continues b and not c, whichever of them came first. Calls with equal ids cannot be told apart:
# a call that continues one continues each. A prompt that was rendered again (history rewritten or
# compacted, reasoning dropped by the template) continues none.


def successors(calls: Sequence[HasIds], rollouts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """For each of C calls, the calls of its rollout that continue it.

    Args:
        calls: In any order; a call has a completion.
        rollouts: Index of each call's rollout.

    Returns:
        C tuples of indices into `calls`, in rising order; empty for a call that is a leaf.

    Raises:
        ValueError: A token id is negative or needs more than 32 bits.
    """
    keys = sequence_keys(calls)
    members: dict[int, list[int]] = defaultdict(list)
    for call, rollout in enumerate(rollouts):
        members[rollout].append(call)
    found: list[tuple[int, ...]] = [()] * len(calls)
    for mine in members.values():
        for call, after in _of_rollout(calls, keys, mine).items():
            found[call] = tuple(sorted(after))
    return tuple(found)


def _of_rollout(
    calls: Sequence[HasIds], keys: Sequence[bytes], mine: Sequence[int]
) -> dict[int, list[int]]:
    # In lexicographic order the extensions of a sequence follow right after it, so the sequences
    # that a prompt begins with are the open ones. A prompt comes after a sequence that equals it.
    ends = [(keys[call], 0, call) for call in mine]
    prompts = [(keys[call][: 4 * len(calls[call].prompt_ids)], 1, call) for call in mine]
    open_: list[tuple[bytes, list[int]]] = []
    found: dict[int, list[int]] = {}
    for key, is_prompt, call in sorted(ends + prompts):
        while open_ and not key.startswith(open_[-1][0]):
            open_.pop()
        if is_prompt:
            for before in open_[-1][1] if open_ else ():
                found.setdefault(before, []).append(call)
        elif open_ and open_[-1][0] == key:
            open_[-1][1].append(call)
        else:
            open_.append((key, [call]))
    return found
