"""The Responses API: answers, streams and conversations, with the real client."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
from typing import Any

import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from tests.gateway import drift
from tests.kit.toy import StubEngine, gateway_of, ids_of, text_of
from tuner.engines.base import EngineError, Generation
from tuner.traces import TokenTree, branches

ADD: dict[str, Any] = {
    "type": "function",
    "name": "add",
    "description": "Add two integers.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    },
    "strict": False,
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1,  "b": 2}}\n</tool_call>'
REASONED = f"<think>\nadd them\n</think>\n\nI add.\n{CALL}"
LOGPROBS: Any = ["message.output_text.logprobs"]


def dumped(answer: pydantic.BaseModel) -> dict[str, Any]:
    return answer.model_dump(mode="json", exclude_unset=True, by_alias=True)


_OTHERWISE = ("created_at", "completed_at", "parsed", "parsed_arguments")


def plain(value: Any) -> Any:
    """An answer as JSON without its times, and without what the client's helper adds."""
    if isinstance(value, pydantic.BaseModel):
        value = dumped(value)
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items() if key not in _OTHERWISE}
    return [plain(item) for item in value] if isinstance(value, list) else value


def check_known(value: Any) -> None:
    """Every field is one of the client's types."""
    if isinstance(value, pydantic.BaseModel):
        assert not value.model_extra, f"{type(value).__name__} got {value.model_extra}"
        for name in type(value).model_fields:
            check_known(getattr(value, name))
    elif isinstance(value, list):
        for item in value:
            check_known(item)


async def test_the_answer_is_reasoning_message_and_calls(door: Any) -> None:
    async with gateway_of(StubEngine([REASONED])) as gateway:
        session = gateway.open_session("r")
        answer = await door(session).responses.create(model="tiny", input="hi", tools=[ADD])
        reasoning, message, call = answer.output
        assert (answer.status, answer.output_text) == ("completed", "I add.")
        assert [part.text for part in reasoning.content] == ["add them"]
        assert (message.role, message.content[0].annotations) == ("assistant", [])
        assert (call.name, call.arguments) == ("add", '{"a": 1,  "b": 2}')
        assert call.id.startswith("fc_")
        assert all(item.status == "completed" for item in answer.output)
        (recorded,) = session.calls
        assert recorded.dialect == "responses"
        assert recorded.messages == [{"role": "user", "content": "hi"}]
        assert recorded.tools[0]["function"]["name"] == "add"
        assert recorded.response["tool_calls"][0]["id"] == call.call_id
        assert text_of(recorded.completion_ids) == f"{REASONED}<|im_end|>"
        assert answer.usage.input_tokens == len(recorded.prompt_ids)
        assert answer.usage.output_tokens == len(recorded.completion_ids)
        assert answer.usage.input_tokens_details.cached_tokens == 7


@pytest.mark.parametrize("tools", [[], [ADD]], ids=["plain", "tools"])
async def test_the_body_is_of_openais_types_field_for_field(tools: list[Any]) -> None:
    async with gateway_of(StubEngine([REASONED])) as gateway:
        session = gateway.open_session("r")
        body = {"model": "tiny", "input": "hi", "tools": tools, "include": LOGPROBS}
        reply = await gateway.handle(
            "POST",
            "/v1/responses",
            {"authorization": f"Bearer {session.key}"},
            json.dumps(body).encode(),
        )
        written = json.loads(reply.body)
        answer = pydantic.TypeAdapter(Response).validate_python(written)
        check_known(answer)
        assert dumped(answer) == written


async def test_the_answer_repeats_what_was_asked_for() -> None:
    async with gateway_of(StubEngine()) as gateway:
        asked: dict[str, Any] = {
            "instructions": "Be brief.",
            "temperature": 0.5,
            "top_p": 0.9,
            "max_output_tokens": 20,
            "metadata": {"a": "b"},
            "user": "u",
            "tool_choice": "none",
            "tools": [ADD],
        }
        session = gateway.open_session("r")
        answer = await session.async_client().responses.create(model="tiny", input="hi", **asked)
        assert {name: dumped(answer)[name] for name in asked} == asked
        (call,) = session.calls
        assert call.messages[0] == {"role": "system", "content": "Be brief."}
        assert (call.sampling.temperature, call.sampling.top_p) == (0.5, 0.9)
        assert call.sampling.max_tokens == 20


async def test_a_stream_adds_up_to_the_answer_that_is_not_streamed(door: Any) -> None:
    async with gateway_of(StubEngine([REASONED])) as gateway:
        asked = {"model": "tiny", "input": "hi", "tools": [ADD], "include": LOGPROBS}
        whole = await door(gateway.open_session("r", seed=1)).responses.create(**asked)
        session = gateway.open_session("r", seed=1)
        events: list[Any] = []
        async with door(session).responses.stream(**asked) as stream:
            async for event in stream:
                events.append(event)
            got = await stream.get_final_response()
        assert plain(got) == plain(whole)
        types = [event.type.removeprefix("response.") for event in events]
        assert types[:2] == ["created", "in_progress"]
        assert types[-1] == "completed"
        assert types.count("output_item.added") == types.count("output_item.done") == 3
        said = {
            kind: "".join(e.delta for e in events if e.type == f"response.{kind}.delta")
            for kind in ("reasoning_text", "output_text", "function_call_arguments")
        }
        assert said == {
            "reasoning_text": "add them",
            "output_text": "I add.",
            "function_call_arguments": '{"a": 1,  "b": 2}',
        }
        assert [call.streamed for call in session.calls] == [True]


async def test_every_event_is_of_openais_types_and_numbered() -> None:
    async with gateway_of(StubEngine([REASONED])) as gateway:
        session = gateway.open_session("r")
        body = {"model": "tiny", "input": "hi", "stream": True, "tools": [ADD]}
        reply: Any = await gateway.handle(
            "POST",
            "/v1/responses",
            {"authorization": f"Bearer {session.key}"},
            json.dumps(body).encode(),
        )
        events = []
        async for event in reply.events:
            name, data = event.decode().rstrip("\n").split("\n")
            written = json.loads(data.removeprefix("data: "))
            assert name == f"event: {written['type']}"
            typed = pydantic.TypeAdapter(ResponseStreamEvent).validate_python(written)
            check_known(typed)
            assert dumped(typed) == written
            events.append(written)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        items = [e["item"]["id"] for e in events if e["type"] == "response.output_item.added"]
        assert items == [item["id"] for item in events[-1]["response"]["output"]]


async def test_a_call_is_committed_before_what_is_done_is_said(door: Any) -> None:
    async with gateway_of(StubEngine(["abc"])) as gateway:
        session = gateway.open_session("r")
        stream = await door(session).responses.create(model="tiny", input="hi", stream=True)
        async for event in stream:
            if event.type in ("response.output_item.done", "response.completed"):
                assert [call.undelivered for call in session.calls] == [False]
        assert event.type == "response.completed"


async def test_a_stream_that_is_closed_early_leaves_an_undelivered_call(door: Any) -> None:
    engine = StubEngine(["abcdef"], hold_after=2)
    engine.gate.clear()
    async with gateway_of(engine) as gateway:
        session = gateway.open_session("r")
        stream = await door(session).responses.create(model="tiny", input="hi", stream=True)
        events = aiter(stream)
        assert [(await anext(events)).type for _ in range(2)][-1] == "response.in_progress"
        reading = asyncio.ensure_future(anext(events))
        async with asyncio.timeout(60):
            while not engine.sampling:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            for _ in range(10):
                await asyncio.sleep(0)
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reading
            await stream.close()
            while not session.calls or engine.sampling:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        (call,) = session.calls
        assert call.undelivered
        assert call.completion_ids == ids_of("ab")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text", ["abcdef", "<think>\nabc"])
async def test_an_answer_cut_at_its_limit_is_incomplete(text: str, stream: bool) -> None:
    async with gateway_of(StubEngine([text])) as gateway:
        client = gateway.open_session("r").async_client()
        asked: dict[str, Any] = {"model": "tiny", "input": "hi", "max_output_tokens": 4}
        if stream:
            events = [event async for event in await client.responses.create(**asked, stream=True)]
            assert events[-1].type == "response.incomplete"
            answer = events[-1].response
        else:
            answer = await client.responses.create(**asked)
        assert answer.status == "incomplete"
        assert answer.incomplete_details.reason == "max_output_tokens"
        assert answer.completed_at is None
        assert [item.status for item in answer.output] == ["incomplete"]


async def test_an_engine_that_fails_ends_the_stream_with_response_failed(door: Any) -> None:
    async with gateway_of(StubEngine([EngineError("the engine broke")])) as gateway:
        session = gateway.open_session("r")
        stream = await door(session).responses.create(model="tiny", input="hi", stream=True)
        events = [event async for event in stream]
        assert [event.type for event in events] == [
            "response.created",
            "response.in_progress",
            "response.failed",
        ]
        assert "the engine broke" in events[-1].response.error.message
        assert session.calls == ()
        with pytest.raises(openai.InternalServerError, match="the engine broke"):
            await door(session).responses.create(model="tiny", input="hi")


async def test_a_conversation_that_is_too_long_names_the_input() -> None:
    async with gateway_of(StubEngine(max_model_len=16)) as gateway:
        client = gateway.open_session("r").async_client()
        with pytest.raises(openai.BadRequestError, match="context of 16") as caught:
            await client.responses.create(model="tiny", input="hi")
        assert (caught.value.param, caught.value.code) == ("input", "context_length_exceeded")


class Numbered(StubEngine):
    """The log-prob of each token is its place: 0, -1, -2, ..."""

    async def generate(self, *args: Any, **options: Any) -> Generation:
        generation = await super().generate(*args, **options)
        places = tuple(-float(place) for place in range(len(generation.completion_ids)))
        return dataclasses.replace(generation, logprobs=places)


async def test_logprobs_are_those_of_the_messages_tokens() -> None:
    before = "<think>\nI add. So: \n</think>\n\n"
    async with gateway_of(Numbered([f"{before}I add.\n{CALL}"])) as gateway:
        client = gateway.open_session("r").async_client()
        answer: Any = await client.responses.create(
            model="tiny", input="hi", tools=[ADD], include=LOGPROBS, top_logprobs=2
        )
        tokens = answer.output[1].content[0].logprobs
        assert "".join(token.token for token in tokens) == "I add."
        first = len(ids_of(before))
        assert [token.logprob for token in tokens] == [-(first + place) for place in range(6)]
        assert {len(token.top_logprobs) for token in tokens} == {2}


async def test_bytes_that_are_not_known_are_an_empty_list(monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway_of(StubEngine(["a"])) as gateway:
        monkeypatch.setattr(gateway.renderer, "token_bytes", lambda token_id: None)
        client = gateway.open_session("r").async_client()
        answer: Any = await client.responses.create(
            model="tiny", input="hi", include=LOGPROBS, top_logprobs=1
        )
        (token,) = answer.output[0].content[0].logprobs
        assert [token.bytes, token.top_logprobs[0].bytes] == [[], []]


async def test_a_model_that_reasons_after_its_message_streams_whole_items() -> None:
    channel = "<|start|>assistant<|channel|>"
    text = f"<|channel|>commentary<|message|>what<|end|>{channel}analysis<|message|>why<|end|>"
    engine = StubEngine([text])
    forms = {"reasoning_parser": "openai_gptoss", "tool_call_parser": None}
    async with gateway_of(engine, **forms) as gateway:
        client = gateway.open_session("r").async_client()
        async with client.responses.stream(model="tiny", input="hi") as stream:
            done = {
                event.output_index: plain(event.item)
                async for event in stream
                if event.type == "response.output_item.done"
            }
            answer = await stream.get_final_response()
        assert [item.type for item in answer.output] == ["message", "reasoning"]
        assert [done[0], done[1]] == plain(answer)["output"]


async def test_reasoning_tokens_are_counted_up_to_the_end_of_the_reasoning() -> None:
    async with gateway_of(StubEngine([REASONED, "no reasoning"])) as gateway:
        client = gateway.open_session("r").async_client()
        for expected in (len(ids_of("<think>\nadd them")), 0):
            answer = await client.responses.create(model="tiny", input="hi")
            assert answer.usage is not None
            assert answer.usage.output_tokens_details.reasoning_tokens == expected


def output_of(answer: Any, result: str) -> list[Any]:
    return [
        {"type": "function_call_output", "call_id": item.call_id, "output": result}
        for item in answer.output
        if item.type == "function_call"
    ]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("way", ["items", "items without ids", "previous_response_id"])
async def test_five_tool_turns_are_one_path(way: str, stream: bool) -> None:
    # The model writes letter by letter, as the tokenizer never would: text alone is not enough.
    script = drift.letters(f"<think>\nthe user\n</think>\n\nI add.\n{drift.CALL}")
    gateway = drift.gateway_of(script)
    session = gateway.open_session("r")
    client = session.async_client()
    sent: list[Any] = [{"role": "user", "content": "2+40?"}]
    previous: str | None = None
    for turn in range(5):
        asked: dict[str, Any] = {"model": "tiny", "tools": [ADD], "input": sent}
        if previous is not None:
            asked["previous_response_id"] = previous
        if stream:
            async with client.responses.stream(**asked) as events:
                answer: Any = await events.get_final_response()
        else:
            answer = await client.responses.create(**asked)
        results = output_of(answer, f"the answer is {turn}")
        if way == "previous_response_id":
            sent, previous = results, answer.id
            continue
        sent += [*answer.output, *results]
        if way == "items without ids":
            for item in answer.output:
                item.id = None
    calls = session.calls
    assert len(calls) == 5
    assert all(drift.continues(later, earlier) for earlier, later in itertools.pairwise(calls))
    assert len(list(TokenTree.build(calls).rows())) == 1
    assert branches(calls) == ()
    roles = [message["role"] for message in calls[-1].messages]
    assert roles == ["user", *["assistant", "tool"] * 4]
    assert calls[-1].messages[1]["reasoning_content"] == "the user"
    assert drift.decoded(calls[-1].prompt_ids) == drift.rendered(gateway, calls[-1])


async def test_both_dialects_make_the_same_prompt_of_a_conversation() -> None:
    prompts = []
    for dialect in ("chat", "responses"):
        gateway = drift.gateway_of(drift.letters(f"{drift.CALL}\n{drift.CALL}"))
        session = gateway.open_session("r")
        client: Any = session.async_client()
        function = {key: ADD[key] for key in ("name", "description", "parameters")}
        if dialect == "chat":
            asked = {"model": "tiny", "tools": [{"type": "function", "function": function}]}
            messages: list[Any] = [{"role": "user", "content": "2+40?"}]
            answer = (await client.chat.completions.create(**asked, messages=messages)).choices[0]
            results = [
                {"role": "tool", "tool_call_id": call.id, "content": "42"}
                for call in answer.message.tool_calls
            ]
            await client.chat.completions.create(
                **asked, messages=[*messages, answer.message, *results]
            )
        else:
            sent: list[Any] = [{"role": "user", "content": "2+40?"}]
            first = await client.responses.create(model="tiny", tools=[ADD], input=sent)
            # Each call with its result, as a loop over the output sends them.
            for item in first.output:
                sent += [item, *output_of(Response.model_construct(output=[item]), "42")]
            await client.responses.create(model="tiny", tools=[ADD], input=sent)
        prompts.append(session.calls[-1].prompt_ids)
    assert prompts[0] == prompts[1]


class Sum(pydantic.BaseModel):
    total: int


async def test_a_pydantic_model_is_parsed(door: Any) -> None:
    async with gateway_of(StubEngine(['{"total": 3}'], grammars=True)) as gateway:
        session = gateway.open_session("r")
        answer = await door(session).responses.parse(model="tiny", input="1+2", text_format=Sum)
        assert answer.output_parsed == Sum(total=3)
        assert session.calls[0].constrained
