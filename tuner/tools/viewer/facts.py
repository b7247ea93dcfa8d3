"""What a list, a search and tables show of a stored trace; of its tokens only how many."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, dataclass
from typing import Any

from tuner.traces import Origin
from tuner.traces.store import is_one_path

Json = dict[str, Any]

# What a list shows of a text or an error, and what a search looks through; the trace has all of it.
SHOWN = 160
SEARCHED = 2000
# A task's fields that say what is asked, which a list shows before the others.
ASKING = ("question", "prompt", "problem", "instruction", "query", "input", "task", "messages")
# How frameworks begin a tool's result when the tool failed.
FAILED = ("error", "an error occurred", "traceback (most recent call last)", "exception:")
UNREADABLE = "(unreadable call)"


@dataclass(frozen=True)
class TraceRow:
    """A trace as a list shows it, and where its line begins.

    Attributes:
        file: Name of the file in the folder of traces.
        offset: Byte at which its line starts.
        size: Bytes of the line.
        tokens: Sampled tokens.
        error: The beginning of the error, or None.
        one_path: Whether it has no branches for certain; False says nothing.
        within: The rollout of its group that it begins inside of, or None.
        at_call, at_token: How many of that one's calls, and of the next one's tokens, lie before.
        diverged: How it left the other rollout before the point that was chosen, or None.
        asked: The beginning of the task, on one line.
        answered: The beginning of the workflow's response, or else of the last answer.
        same: A number that traces of the same task share.
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

    @property
    def key(self) -> str:
        """Names the trace in links: `<file>:<offset>`."""
        return f"{self.file}:{self.offset}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def row(file: str, offset: int, size: int, trace: Json) -> TraceRow:
    """A stored trace as a list shows it; the texts are to be had from `asked` and `answered`.

    Raises:
        LookupError, TypeError, ValueError, AttributeError: It is not a trace.
    """
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
    """Where a rollout begins, if inside another one."""
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
    """The tokens of an answer but for those that another rollout sampled; of a model elsewhere,
    which gives no ids, those that it bills."""
    billed = call.get("billed")
    if billed is not None:
        return int(billed["output_tokens"])
    return len(call["completion_ids"]) - int(call.get("replayed", 0))


def given_back(call: Json) -> bool:
    """Whether another rollout sampled all of a stored call, and counts it."""
    return 0 < int(call.get("replayed", 0)) == len(call["completion_ids"])


def asked(task: Json) -> str:
    """The task as text: what is asked first, then its other fields."""
    order = {name: place for place, name in enumerate(ASKING)}
    names = sorted(task, key=lambda name: order.get(name, len(order)))
    return " · ".join(_text(task[name]) for name in names if task[name] not in (None, ""))


def answered(trace: Json) -> str:
    """The workflow's response as text, or where it gave none the last answer of the model."""
    if trace["response"]:
        return str(trace["response"])
    *_, last = ({}, *(call["response"] for call in _calls(trace)))
    return _text(last.get("content") or "")


def clean(text: str) -> str:
    """Without halves of pairs of UTF-16, which JSON can spell and a database cannot keep."""
    return text.encode("utf-8", "replace").decode()


def folded(text: str) -> bytes:
    """One line in small letters, as UTF-8: what is searched, and what is searched for."""
    return " ".join(text.split()).casefold().encode("utf-8", "replace")


@dataclass
class Tally:
    """What the rows of a table add up, of a tool's or a role's calls or of rollouts.

    Attributes:
        n: How many.
        failures: Of these: tools whose result says that they failed; a role's calls that were cut
            at the limit of tokens.
        tokens: Sampled tokens.
        seconds: How long they took, as far as it is known.
        timed: Of how many it is known.
        reward: Sum of the rewards there are.
        rewarded: Of how many there is one.
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
    """What a final attempt adds to the tables, by ("outcome" | "tool" | "role", name).

    A call has its own reward or its rollout's; calls without a role are those of "". What another
    rollout sampled adds nothing: it counts there.
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
    """(name, whether it failed, seconds) of each tool call of a stored trace.

    A tool failed where the text of its result begins as errors do in agent frameworks, or is a JSON
    object with an `error`. It took from the answer that calls it to the request that brings its
    result, the agent's own work included; None where no request did. Those of answers that another
    rollout sampled are left out.
    """
    pending: dict[str, tuple[str, float]] = {}
    for call in _calls(trace):
        for message in call["messages"]:
            key = message.get("tool_call_id") if isinstance(message, dict) else None
            if key in pending:
                name, ended = pending.pop(key)
                yield name, _failed(_text(message.get("content"))), call["started"] - ended
        if given_back(call):
            continue
        for number, tool in enumerate(call["response"].get("tool_calls") or ()):
            made = tool.get("id") or f"{call['id']}/{number}"
            pending[made] = (str(tool["function"]["name"]), call["started"] + call["seconds"])
        for _ in range(call.get("malformed_tool_calls", 0)):
            yield UNREADABLE, True, None
    for name, _ in pending.values():
        yield name, False, None


def _failed(result: str) -> bool:
    start = result.lstrip()
    if start.startswith("{"):
        try:
            return bool(json.loads(start).get("error"))
        except ValueError:
            return False
    return start[:40].lower().startswith(FAILED)


def _calls(trace: Json) -> Iterator[dict[str, Any]]:
    """The calls with their answers, and the messages that are not an earlier call's, as objects."""
    messages: Sequence[Any] | None = trace["distinct"]["messages"] if "format" in trace else None
    for call in trace["calls"]:
        if messages is None:
            yield call
            continue
        fresh = [messages[number] for number in call["messages"][2]]
        yield {**call, "messages": fresh, "response": messages[call["response"]]}


def _text(value: Any) -> str:
    """A value as people read it: of messages and parts of content what they say."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(item, dict) for item in value):
        said = [item.get("content", item.get("text")) for item in value]
        return " ".join(_text(part) for part in said if part is not None)
    return json.dumps(value, ensure_ascii=False)
