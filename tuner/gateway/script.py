"""A script: recorded calls that answer a session before anything is sampled.

An unchanged workflow runs again, and its requests get the answers of an earlier rollout until the
*point* where the two diverge. In order of commitment, the point after call 2 and 3 tokens:

    recorded    c0   c1   c2 = a b c d e f <end>    c3
    replayed    c0   c1   c2 = a b c + what is sampled now
                                                    whatever the agent asks for after that

A request matches the script if it has the prompt ids and the settings of a recorded one that was
not asked for yet; of several with one prompt it is the one that began first. So parallel requests
may arrive in any order, and those that were recorded after the point are sampled.

Up to the first sampled token, an agent that does the same asks for what is recorded. An agent that
asks for something else, or that ends before it has asked for everything, has *diverged*: from there
on everything is sampled, and the script says where that was and what differed.

Calls are counted from 0 here; messages count from 1, as the page of a run does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from tuner.engines.base import FINISH_REASONS, Generation, SamplingParams
from tuner.errors import TunerError
from tuner.gateway.request_error import shown
from tuner.traces import Call, FunctionResult, Trace


@dataclass(frozen=True)
class ScriptedAnswer:
    """The script's answer to one choice of a request.

    Attributes:
        generation: Its first tokens, or all.
        whole: Whether it is complete: nothing is sampled.
        tool_call_ids: Ids of the tool calls in it, if it is complete.
    """

    generation: Generation
    whole: bool
    tool_call_ids: tuple[str, ...] = ()


@dataclass(frozen=True)
class Divergence:
    """Where an agent left the script.

    Attributes:
        call: The first call of the recorded rollout, in order of commitment, that the agent had
            not asked for; the number of calls if there was none.
        what: What differed, one line.
        expected: The expected call: of those, the one most similar to what the agent asked for.
            None if nothing more was expected.
        asked: The messages that the agent sent instead, or None if it ended.
        tools: The tools that it sent with them.
        number: Number of the call `expected`.
    """

    call: int
    what: str
    expected: Call | None
    asked: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    number: int | None = None

    def __str__(self) -> str:
        return f"at call {1 + (self.call if self.number is None else self.number)}: {self.what}"


@dataclass(frozen=True)
class RecordedRequest:
    """A request of the recorded rollout.

    Attributes:
        id: The response id that the agent saw.
        started: Unix time, seconds.
        first: The number of its first call.
        calls: Its calls by the index of their choice.
        given: Number of tokens of each before the point.
    """

    id: str
    started: float
    first: int
    calls: Mapping[int, Call]
    given: Mapping[int, int]

    @property
    def scripted(self) -> bool:
        """Whether any of it is before the point."""
        return any(self.given.values())

    def has_prompts(self, prompts: Sequence[tuple[int, ...]]) -> bool:
        return all(
            index < len(prompts) and prompts[index] == call.compared.prompt_ids
            for index, call in self.calls.items()
        )


class Script:
    """Answers one session up to a point; each session has its own script.

    Args:
        trace: The rollout that is run again.
        calls: Number of its calls, in order of commitment, before the point; None: all.
        token: Number of tokens of the call at the point before it.
        ends: Whether a request that diverges is rejected, with all that follow.
        beyond: For a session without a model: receives the number of each recorded call that is
            asked for and not replayed completely. None: the rest is sampled.

    Attributes:
        divergence: Where the agent left it, or None.

    Raises:
        TunerError: A call before the point cannot be replayed, or there is no such point.
    """

    def __init__(
        self,
        trace: Trace,
        calls: int | None = None,
        token: int = 0,
        *,
        ends: bool = False,
        beyond: Callable[[int], None] | None = None,
    ) -> None:
        self.trace = trace
        self.ends = ends
        self._beyond = beyond
        self.calls = len(trace.calls) if calls is None else calls
        self.token = token
        self.divergence: Divergence | None = None
        self._sampled = False
        self._check()
        self._left = self._requests()
        self._results = {_key(one): one for one in trace.results if one.calls <= self.calls}

    def _check(self) -> None:
        known, name = self.trace.calls, self.trace.id
        if not 0 <= self.calls <= len(known):
            raise TunerError(
                f"{name} has {len(known)} calls: there is no point after {self.calls} calls"
            )
        longest = self._whole(known[self.calls]) if self.calls < len(known) else 1
        if not 0 <= self.token < longest:
            raise TunerError(
                f"call {self.calls} of {name} has {longest} tokens: a point inside it is 0 to "
                f"{longest - 1}"
            )
        for number, call in enumerate(known[: self.calls + bool(self.token)]):
            if (why := self._unfit(call)) is not None:
                raise TunerError(f"call {number + 1} of {name} cannot be replayed: {why}")

    def _unfit(self, call: Call) -> str | None:
        """Why a call cannot be replayed, or None."""
        return call.invalid

    def _requests(self) -> list[RecordedRequest]:
        """In the order in which they began."""
        members: dict[str, dict[int, tuple[int, Call]]] = {}
        for number, call in enumerate(self.trace.calls):
            id_, _, index = call.id.rpartition("-")
            if not index.isdecimal():
                raise TunerError(
                    f"call {number + 1} of {self.trace.id} cannot be replayed: it was made by the "
                    "workflow's own chat model"
                )
            members.setdefault(id_, {})[int(index)] = number, call
        found = []
        for id_, calls in members.items():
            given = {
                index: self._whole(call)
                if number < self.calls
                else self.token * (number == self.calls)
                for index, (number, call) in calls.items()
            }
            first = min(number for number, _ in calls.values())
            by_index = {index: call for index, (_, call) in calls.items()}
            found.append(
                RecordedRequest(id_, by_index[min(by_index)].started, first, by_index, given)
            )
        return sorted(found, key=lambda request: (request.started, request.first))

    def _whole(self, call: Call) -> int:
        """Number of tokens of a completely replayed call."""
        return len(call.completion_ids)

    def given(
        self,
        prompts: Sequence[tuple[int, ...]],
        settings: Sequence[SamplingParams],
        *,
        free: Collection[str],
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]],
        can_go_on: Callable[[SamplingParams], bool],
    ) -> tuple[str, Mapping[int, ScriptedAnswer]] | None:
        """The id of a request's response and the known part of its choices; None: sample it.

        Args:
            prompts, settings: Of each choice.
            free: Settings that may differ from the recorded ones, since they do not follow from the
                request.
            messages, tools: The request's, for messages.
            can_go_on: Whether the engine can continue partial completions with such settings.
        """
        found = self._taken(
            [one for one in self._left if one.has_prompts(prompts)],
            lambda one: others(one, settings, free),
            messages,
            tools,
        )
        if found is None:
            return None
        given = {
            index: _given(call, found.given[index])
            for index, call in found.calls.items()
            if found.given[index]
        }
        parts = [index for index, one in given.items() if not one.whole]
        if parts or len(given) < len(prompts):
            self._goes_on(self.calls)
        if not all(can_go_on(settings[index]) for index in parts):
            what = "the engine cannot continue a partial completion with these settings"
            self.divergence = Divergence(found.first, what, found.calls[parts[0]], messages, tools)
            return None
        return found.id, given

    def _taken(
        self,
        alike: Sequence[RecordedRequest],
        differing: Callable[[RecordedRequest], str],
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]],
    ) -> RecordedRequest | None:
        """The recorded request that matches, if any of it is before the point; None: sample it.

        Args:
            alike: The candidates.
            differing: Names the settings that differ from one of these; "": none.
            messages, tools: The request's, for messages.
        """
        if self.divergence is not None:
            return None
        found = next((one for one in alike if not differing(one)), None)
        if found is None:
            if not self._sampled:
                expected = alike[0] if alike else self._nearest(messages)
                self._diverges(expected, differing(alike[0]) if alike else "", messages, tools)
            return None
        self._left.remove(found)
        if found.scripted:
            return found
        self._goes_on(found.first)
        return None

    def _goes_on(self, number: int) -> None:
        """Note that a recorded call is not replayed completely: the rest is sampled."""
        if self._beyond is None:
            self._sampled = True
        else:
            self._beyond(number)

    def _diverges(
        self,
        expected: RecordedRequest | None,
        found: str,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]],
    ) -> None:
        """Record a request that matches nothing."""
        if expected is None:
            what = "the agent asked for a further call, and the recorded rollout had ended"
            self.divergence = Divergence(len(self.trace.calls), what, None, messages, tools)
            return
        call = expected.calls[min(expected.calls)]
        what = found or difference(messages, call.messages, tools=tools, recorded_tools=call.tools)
        first = min(one.first for one in self._left)
        self.divergence = Divergence(first, what, call, messages, tools, number=expected.first)

    def _nearest(self, messages: Sequence[Mapping[str, Any]]) -> RecordedRequest | None:
        """The expected request: the one whose messages agree longest with these, and of several the
        first. Parallel agents ask in any order."""

        def begins(one: RecordedRequest) -> tuple[int, int]:
            recorded = one.calls[min(one.calls)].messages
            pairs = list(zip(messages, recorded, strict=False))
            same = _parting(messages, recorded)
            return same, _parting(*map(_text, pairs[same])) if same < len(pairs) else 0

        first = sorted(self._left, key=lambda one: one.first)
        return max(first, key=begins, default=None)

    def result(
        self, function: str, arguments: Mapping[str, Any], occurrence: int
    ) -> FunctionResult | None:
        """The recorded result of a function before the point; None: run it.

        Args:
            function, arguments, occurrence: As in `FunctionResult`.
        """
        if self.divergence is not None:
            return None
        key = function, json.dumps(arguments, sort_keys=True), occurrence
        return self._results.get(key)

    def end(self) -> Divergence | None:
        """Call when the agent has ended. Returns where it diverged, if it did."""
        left = [one for one in self._left if one.scripted]
        if self.divergence is None and left:
            one = min(left, key=lambda request: request.first)
            what = f"the agent ended without asking for it ({len(left)} requests are left)"
            self.divergence = Divergence(one.first, what, one.calls[min(one.calls)])
        return self.divergence


def _given(call: Call, count: int) -> ScriptedAnswer:
    whole = count == len(call.completion_ids) and not call.undelivered
    reason = "stop" if call.finish_reason == "tool_calls" else call.finish_reason
    kept = call.kept[:count] or ("",) * (count if call.sampling.cuts else 0)
    generation = Generation(
        completion_ids=call.completion_ids[:count],
        logprobs=call.logprobs[:count],
        versions=call.versions[:count],
        finish_reason=FINISH_REASONS.get(reason, "length"),
        top_logprobs=call.top_logprobs[:count],
        cached_tokens=call.cached_tokens,
        kept=kept,
    )
    ids = [one["id"] for one in call.response.get("tool_calls") or ()] if whole else []
    return ScriptedAnswer(generation, whole, tuple(ids))


def others(
    request: RecordedRequest, settings: Sequence[SamplingParams], free: Collection[str]
) -> str:
    """Names of the settings of a request with these prompts that differ from the recorded ones; "":
    none."""
    names = [field.name for field in fields(SamplingParams) if field.name not in free]
    found = [
        f"{name} is {shown(getattr(settings[index], name))} and was {shown(getattr(old, name))}"
        for index, old in ((index, call.sampling) for index, call in request.calls.items())
        for name in names
        if getattr(settings[index], name) != getattr(old, name)
    ]
    return ", ".join(dict.fromkeys(found))


def _key(result: FunctionResult) -> tuple[str, str, int]:
    return result.function, json.dumps(result.arguments, sort_keys=True), result.occurrence


def difference(
    asked: Sequence[Mapping[str, Any]],
    recorded: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Any] = (),
    recorded_tools: Sequence[Any] = (),
) -> str:
    """The first difference of two requests, in one line.

    Args:
        asked, recorded: Their messages.
        tools, recorded_tools: Their tools.
    """
    for number, (new, old) in enumerate(zip(asked, recorded, strict=False)):
        for name in {**old, **new}:
            if new.get(name) != old.get(name):
                now, before = _parted(_text(new.get(name)), _text(old.get(name)))
                return f"messages[{number}].{name} is {now} and was {before}"
    if len(asked) != len(recorded):
        return f"the request has {len(asked)} messages and had {len(recorded)}"
    if list(tools) != list(recorded_tools):
        now, before = _parted(_text(tools), _text(recorded_tools))
        return f"the tools are {now} and were {before}"
    return "the messages are equal but their prompts differ: another template or tokenizer"


_AROUND = 40


def _parted(new: str, old: str) -> tuple[str, str]:
    """Two texts, shortened to the place where they differ."""
    start = max(0, _parting(new, old) - _AROUND // 2)
    dots = "..." if start else ""
    return tuple(repr(dots + text[start : start + _AROUND]) for text in (new, old))  # type: ignore[return-value]


def _parting(new: Sequence[Any], old: Sequence[Any]) -> int:
    """The first index where two sequences differ, or where one ends."""
    places = enumerate(zip(new, old, strict=False))
    return next((i for i, (a, b) in places if a != b), min(len(new), len(old)))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=repr)
