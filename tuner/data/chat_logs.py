"""Logs of chats without tokens as conversations: OpenAI's JSON lines, and spans of OpenTelemetry.

Each line is one of

    {"messages": [...], "tools": [...]}                               a conversation
    {"input": {"messages": [...]}, "preferred_output": [...],
     "non_preferred_output": [...]}                                   a pair, as for fine-tuning
    {"request": {"messages": [...]}, "response": {"choices": [...]}}  a request and its answer
    {"attributes": {"gen_ai.output.messages": ...}}                   a span of a model call
    {"resourceSpans": [...]}                                          many, as OTLP sends them

and becomes a row of `tuner.data.recorded`, of which the chat template makes ids. Nobody knows which
tokens were sampled, so there are no log-probs. Of a request and of a span the answer alone is
trained: the earlier turns are the answers of earlier ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.data.recorded import Unusable
from tuner.errors import DatasetError

Row = dict[str, Any]
Message = dict[str, Any]
# Spans of model calls, by `gen_ai.operation.name`; others are of agents, tools and embeddings.
OF_MODEL = ("chat", "text_completion", "generate_content")


@dataclass(frozen=True)
class Logged:
    """One line of a log.

    Attributes:
        row: What it holds, in the columns of `tuner.data.recorded`; None where it is nothing to
            learn from.
        started: Unix time, where it says.
        reason: Why there is no row.
    """

    row: Row | None
    started: float | None = None
    reason: str | None = None


def is_trace(line: Any) -> bool:
    """Whether a line holds a rollout that was recorded here."""
    return isinstance(line, Mapping) and {"id", "calls", "outcome"} <= line.keys()


def logged(line: Any) -> Iterator[Logged]:
    """What a line of a log holds: one conversation or pair, or the spans of several.

    Raises:
        DatasetError: It has none of the known forms.
    """
    if not isinstance(line, Mapping):
        raise DatasetError(f"{line!r:.80} is no object")
    for keys, read in _FORMS.items():
        if all(line.get(key) is not None for key in keys):
            yield from read(line)
            return
    raise DatasetError(
        f"it has the keys {', '.join(map(str, line)) or 'none'}: neither a recorded rollout, nor "
        "messages, a request with its response, a pair with preferred_output, or a span with "
        "attributes"
    )


def _conversation(line: Mapping[str, Any]) -> Iterator[Logged]:
    yield Logged({"messages": line["messages"], "tools": line.get("tools")})


def _pair(line: Mapping[str, Any]) -> Iterator[Logged]:
    asked = line["input"]
    if not isinstance(asked, Mapping):
        raise DatasetError(f"input is {asked!r:.80}: an object with messages is wanted")
    row = {
        "messages": asked.get("messages"),
        "tools": asked.get("tools"),
        "chosen": line["preferred_output"],
        "rejected": line.get("non_preferred_output"),
    }
    yield Logged(row)


def _exchange(line: Mapping[str, Any]) -> Iterator[Logged]:
    request, response = (_body(line, key) for key in ("request", "response"))
    created = response.get("created")
    started = float(created) if isinstance(created, int | float) else None
    choices = response.get("choices")
    if not isinstance(choices, list) or not choices:
        yield Logged(None, started, "no_answer")
        return
    if len(choices) > 1:
        raise DatasetError(f"the response has {len(choices)} choices: a line each is wanted")
    message = choices[0].get("message") if isinstance(choices[0], Mapping) else None
    if not isinstance(message, Mapping):
        raise DatasetError("response.choices[0] has no message")
    # What OpenAI's answers say beside the message itself.
    beside = ("refusal", "annotations", "audio", "function_call")
    answer = {key: value for key, value in message.items() if key not in beside or value}
    yield Logged(_answered(request.get("messages"), answer, request.get("tools")), started)


def _body(line: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = line[key]
    if isinstance(found, Mapping) and isinstance(found.get("body"), Mapping):
        found = found["body"]
    if not isinstance(found, Mapping):
        raise DatasetError(f"{key} is {found!r:.80}: the body of a chat completion is wanted")
    return found


def _answered(asked: Any, answer: Message, tools: Any) -> Row:
    """A row whose last message alone is trained."""
    if not isinstance(asked, list):
        raise DatasetError(f"the request's messages are {asked!r:.80}: a list is wanted")
    before = [
        {**one, "weight": 0} if isinstance(one, Mapping) and one.get("role") == "assistant" else one
        for one in asked
    ]
    return {"messages": [*before, answer], "tools": tools}


# Spans ------------------------------------------------------------------------------------------


def _batch(line: Mapping[str, Any]) -> Iterator[Logged]:
    for resource in line["resourceSpans"]:
        for scope in resource.get("scopeSpans", ()):
            for span in scope.get("spans", ()):
                yield from _span(span)


def _span(span: Mapping[str, Any]) -> Iterator[Logged]:
    attributes, started = _attributes(span.get("attributes")), _started(span)
    operation = attributes.get("gen_ai.operation.name")
    if operation is not None and operation not in OF_MODEL:
        yield Logged(None, started, "no_model_call")
        return
    status = span.get("status") or {}
    if status.get("status_code") == "ERROR" or status.get("code") in (2, "STATUS_CODE_ERROR"):
        yield Logged(None, started, "failed_call")
        return
    answers = _plain(attributes.get("gen_ai.output.messages"))
    if not answers:
        yield Logged(None, started, "no_answer")
        return
    if len(answers) > 1:
        raise DatasetError(f"gen_ai.output.messages has {len(answers)} choices: one is wanted")
    try:
        asked = [*_instructions(attributes), *_asked(attributes)]
        (answer,) = _of_parts(answers[0])
    except Unusable as unusable:
        yield Logged(None, started, unusable.reason)
        return
    if not asked:
        yield Logged(None, started, "no_prompt")
        return
    yield Logged(_answered(asked, answer, _tools(attributes)), started)


def _attributes(found: Any) -> dict[str, Any]:
    """Attributes by name: as a span prints itself, or in the list that OTLP has."""
    if isinstance(found, Mapping):
        return dict(found)
    return {one["key"]: _value(one.get("value")) for one in found or ()}


def _value(found: Any) -> Any:
    """A value as OTLP writes it: `{"stringValue": ...}`, `{"arrayValue": {"values": [...]}}`."""
    if not isinstance(found, Mapping):
        return found
    kind: str
    value: Any
    kind, value = next(iter(found.items()), ("", None))
    if kind == "arrayValue":
        return [_value(one) for one in value.get("values", ())]
    if kind == "kvlistValue":
        return {one["key"]: _value(one.get("value")) for one in value.get("values", ())}
    return value


def _plain(found: Any) -> Any:
    """Structured data, which spans may hold as JSON text."""
    if not isinstance(found, str):
        return found
    try:
        return json.loads(found)
    except ValueError:
        raise DatasetError(f"{found!r:.80} is not JSON") from None


def _started(span: Mapping[str, Any]) -> float | None:
    from datetime import datetime

    nanoseconds, text = span.get("startTimeUnixNano"), span.get("start_time")
    try:
        if nanoseconds is not None:
            return int(nanoseconds) / 1e9
        return datetime.fromisoformat(text).timestamp() if isinstance(text, str) else None
    except ValueError:
        raise DatasetError(f"{nanoseconds or text!r} is no time") from None


def _instructions(attributes: Mapping[str, Any]) -> list[Message]:
    parts = _plain(attributes.get("gen_ai.system_instructions"))
    if not parts:
        return []
    return _of_parts({"role": "system", "parts": parts})


def _asked(attributes: Mapping[str, Any]) -> list[Message]:
    """What the model was given. AgentScope 1.x leaves that to an attribute of its own."""
    found = _plain(attributes.get("gen_ai.input.messages"))
    if found is not None:
        return [message for one in found for message in _of_parts(one)]
    called = _plain(attributes.get("agentscope.function.input"))
    if not isinstance(called, Mapping):
        return []
    given, named = called.get("args") or (), called.get("kwargs") or {}
    messages = given[0] if given else named.get("messages")
    if not isinstance(messages, list):
        return []
    return [_without_nothing(one) for one in messages if isinstance(one, Mapping)]


def _without_nothing(message: Mapping[str, Any]) -> Message:
    """A message without the fields that hold nothing."""
    return {key: value for key, value in message.items() if value is not None}


def _tools(attributes: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Tools as OpenAI has them; the conventions leave out the level `function`."""
    return [
        one
        if "function" in one
        else {
            "type": one.get("type", "function"),
            "function": {key: value for key, value in one.items() if key != "type"},
        }
        for one in _plain(attributes.get("gen_ai.tool.definitions")) or ()
    ]


def _of_parts(message: Any) -> list[Message]:
    """A message of the conventions, made of parts, as OpenAI's; one for each result of a tool.

    Raises:
        Unusable: A part is neither text, reasoning, nor a tool's call or result.
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("parts"), list):
        raise DatasetError(f"{message!r:.80} is no message with parts")
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    results: list[Message] = []
    for part in message["parts"]:
        kind = part.get("type")
        if kind == "text":
            texts.append(part.get("content") or "")
        elif kind == "reasoning":
            reasoning.append(part.get("content") or "")
        elif kind == "tool_call":
            calls.append(_call(part))
        elif kind == "tool_call_response":
            results.append(_result(part))
        else:
            raise Unusable("not_text")
    if results:
        return results
    shaped: Message = {"role": message.get("role"), "content": "\n".join(texts)}
    if reasoning:
        shaped["reasoning_content"] = "\n".join(reasoning)
    if calls:
        shaped["tool_calls"] = calls
    return [shaped]


def _call(part: Mapping[str, Any]) -> dict[str, Any]:
    arguments = part.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    function = {"name": part.get("name"), "arguments": text}
    return {"id": part.get("id"), "type": "function", "function": function}


def _result(part: Mapping[str, Any]) -> Message:
    found = part.get("response", part.get("result"))
    text = found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)
    return {"role": "tool", "tool_call_id": part.get("id"), "content": text}


_FORMS = {
    ("resourceSpans",): _batch,
    ("attributes",): _span,
    ("input", "preferred_output"): _pair,
    ("request", "response"): _exchange,
    ("messages",): _conversation,
}


def read_log(path: Path, lines: Iterator[tuple[int, Any]]) -> Iterator[tuple[int, Logged]]:
    """What each line of a log holds, with the line's number.

    Raises:
        DatasetError: A line has none of the known forms; names file and line.
    """
    for number, line in lines:
        try:
            for found in logged(line):
                yield number, found
        except (DatasetError, AttributeError, LookupError, TypeError) as error:
            said = str(error) if isinstance(error, DatasetError) else f"cannot be read: {error!r}"
            raise DatasetError(f"{path}, line {number}: {said}") from None
