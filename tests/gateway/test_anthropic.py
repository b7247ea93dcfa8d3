"""Anthropic's messages: the real client, whole and streamed, recorded like any other call."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import Message

from tests.engines.models import until
from tests.gateway import again
from tests.kit.toy import StubEngine, gateway_of, text_of
from tuner.engines.base import EngineError
from tuner.errors import MissingDependencyError
from tuner.gateway import Session
from tuner.gateway.app import Reply
from tuner.rollouts.without_framework import PlainChatModel
from tuner.traces import TokenTree

USER: list[Any] = [{"role": "user", "content": "hi"}]
ADD: dict[str, Any] = {
    "name": "add",
    "description": "Add two integers.",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    },
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1,  "b": 2}}\n</tool_call>'
REASONED = f"<think>\nadd them\n</think>\n\nI add.\n{CALL}"


@pytest.fixture(params=["in process", "over HTTP", "over HTTP, base_url as it is"])
async def door(request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    """Gives the client of a session."""
    clients: list[Any] = []

    def client_of(session: Session) -> anthropic.AsyncAnthropic:
        if request.param == "in process":
            return session.async_anthropic()
        base_url = session.base_url
        if request.param == "over HTTP":
            base_url = base_url.removesuffix("/v1")
        clients.append(
            anthropic.AsyncAnthropic(base_url=base_url, api_key=session.key, max_retries=0)
        )
        return clients[-1]

    yield client_of
    for client in clients:
        await client.close()


def asked(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "max_tokens": 200, "messages": USER, **fields}


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_an_agent_goes_back_into_a_recorded_rollout(door: Any, streamed: bool) -> None:
    async def agent(session: Session) -> str:
        client, messages = door(session), [{"role": "user", "content": again.QUESTION}]
        while True:
            request = asked(messages=messages, tools=[ADD])
            if streamed:
                async with client.messages.stream(**request) as stream:
                    said = await stream.get_final_message()
            else:
                said = await client.messages.create(**request)
            results = [
                {
                    "type": "tool_result",
                    "tool_use_id": block.id,
                    "content": str(block.input["a"] + block.input["b"]),
                }
                for block in said.content
                if block.type == "tool_use"
            ]
            if not results:
                return str(said.content[-1].text)
            messages = [*messages, {"role": "assistant", "content": said.content}]
            messages.append({"role": "user", "content": results})

    await again.check_goes_back(agent, dialect="messages", streamed=streamed)


async def test_an_answer_has_anthropics_form_and_is_recorded(door: Any) -> None:
    engine = StubEngine([REASONED])
    async with gateway_of(engine) as gateway:
        session = gateway.open_session("r")
        got = await door(session).messages.create(**asked(tools=[ADD], system="Be brief."))
        Message.model_validate(got.to_dict(), strict=True)
        assert got.id.startswith("msg_")
        assert (got.role, got.model, got.type) == ("assistant", "tiny", "message")
        thinking, text, use = got.content
        assert (thinking.type, thinking.thinking) == ("thinking", "add them")
        assert thinking.signature
        assert (text.type, text.text) == ("text", "I add.")
        assert (use.type, use.name, use.input) == ("tool_use", "add", {"a": 1, "b": 2})
        assert (got.stop_reason, got.stop_sequence) == ("tool_use", None)
        (call,) = session.calls
        assert call.id == f"{got.id}-0"
        assert call.dialect == "messages"
        assert text_of(call.completion_ids) == f"{REASONED}<|im_end|>"
        assert call.messages == [{"role": "system", "content": "Be brief."}, *USER]
        assert call.response["tool_calls"][0]["id"] == use.id
        assert call.tools[0]["function"]["parameters"] == ADD["input_schema"]
        usage = got.usage
        assert usage.cache_read_input_tokens == 7
        assert usage.input_tokens + 7 == len(call.prompt_ids)
        assert usage.output_tokens == len(call.completion_ids)


STREAMED = [
    REASONED,
    "plain words",
    "<think>\nonly thought",
    "",
    f"{CALL}\n{CALL}",
    f"before\n{CALL}\nafter",
    f"<think>\n\n</think>\n\n{CALL}",
    '<tool_call>\n{"name": "add", "arguments": {"a": 1e999, "b": "\\ud800", "c": "é\\n"}}'
    "\n</tool_call>",
]


@pytest.mark.parametrize("text", STREAMED)
async def test_a_stream_adds_up_to_the_answer_that_is_not_streamed(door: Any, text: str) -> None:
    async with gateway_of(StubEngine([text])) as gateway:
        whole = await door(gateway.open_session("r", seed=1)).messages.create(**asked(tools=[ADD]))
        session = gateway.open_session("r", seed=1)
        async with door(session).messages.stream(**asked(tools=[ADD])) as stream:
            got = await stream.get_final_message()
        assert got.to_dict() == whole.to_dict()
        assert session.calls[0].streamed
        assert [call.undelivered for call in session.calls] == [False]
        text_of_whole = [block.text for block in whole.content if block.type == "text"]
        assert "".join(text_of_whole) == (session.calls[0].response["content"] or "")


@pytest.mark.parametrize("text", STREAMED)
async def test_every_block_of_a_stream_begins_and_ends_once(text: str) -> None:
    async with gateway_of(StubEngine([text])) as gateway:
        client = gateway.open_session("r", seed=1).async_anthropic()
        whole = await client.messages.create(**asked(tools=[ADD]))
        client = gateway.open_session("r", seed=1).async_anthropic()
        types = []
        async with client.messages.stream(**asked(tools=[ADD])) as stream:
            async for event in stream:
                types.append(event.type)
            got = await stream.get_final_message()
        assert got.to_dict() == whole.to_dict()
        assert types.count("content_block_start") == len(whole.content)
        assert types.count("content_block_stop") == len(whole.content)


async def test_a_streams_events_come_in_anthropics_order() -> None:
    async with gateway_of(StubEngine([REASONED])) as gateway:
        session = gateway.open_session("r")
        stream = await session.async_anthropic().messages.create(**asked(tools=[ADD], stream=True))
        names = []
        async for event in stream:
            names.append(event.type)
            if event.type == "message_delta":
                assert len(session.calls) == 1  # committed before its end is told
        assert names[0] == "message_start"
        assert names[-2:] == ["message_delta", "message_stop"]
        assert names.count("content_block_start") == names.count("content_block_stop") == 3


async def test_arguments_that_no_client_could_read_are_answered_as_valid_json() -> None:
    async with gateway_of(StubEngine([STREAMED[-1]])) as gateway:
        headers = {"authorization": f"Bearer {gateway.open_session('r').key}"}
        body = json.dumps(asked(tools=[ADD])).encode()
        reply = await gateway.handle("POST", "/v1/messages", headers, body)
        assert isinstance(reply, Reply)
        answer = json.loads(reply.body, parse_constant=pytest.fail)
        assert answer["content"][0]["input"] == {"a": sys.float_info.max, "b": "\ufffd", "c": "é\n"}


async def test_stop_reasons() -> None:
    engine = StubEngine(["Some words END more", "long answer", "fine"])
    async with gateway_of(engine) as gateway:
        client = gateway.open_session("r").async_anthropic()
        stops = ["no", "a", "few", "more", "END"]
        stopped = await client.messages.create(**asked(stop_sequences=[*stops[:1], "END"]))
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "END")
        assert stopped.content[0].text == "Some words "  # type: ignore[union-attr]
        cut = await client.messages.create(**asked(max_tokens=4))
        assert (cut.stop_reason, cut.stop_sequence) == ("max_tokens", None)
        assert cut.usage.output_tokens == 4
        ended = await client.messages.create(**asked(stop_sequences=["x", *stops]))
        assert (ended.stop_reason, ended.stop_sequence) == ("end_turn", None)
        assert len(engine.requests[-1][1].stop) == 6


async def test_sampling_settings_reach_the_engine() -> None:
    engine = StubEngine()
    async with gateway_of(engine) as gateway:
        client = gateway.open_session("r").async_anthropic()
        settings = {"temperature": 0.25, "top_p": 0.5, "top_k": 3, "seed": 11}
        await client.messages.create(**asked(max_tokens=9, extra_body=settings))
        sampling = engine.requests[0][1]
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.25, 0.5, 3)
        assert (sampling.max_tokens, sampling.seed) == (9, 11)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    "written",
    [
        '{"a": %d, "b": 2}',
        '{"a":%d,"b":2}',
        '{ "b": 2.0,\n "a" : %d }',
        '{"a": %d, "b": 1e3, "c": -0.0, "d": 12345678901234567890}',
        '{"a": %d, "b": "\\u00e9 é \\/"}',
        '{"a": 0, "a": %d}',
        '{"a": %d, "b": [1, 2.50, {"x": null}], "c": true}',
    ],
)
async def test_a_conversation_with_tools_goes_on_with_the_sampled_ids(
    written: str, streamed: bool
) -> None:
    turns = [
        f"<think>\nturn {i}\n</think>\n\nStep {i}.\n"
        f'<tool_call>\n{{"name": "add", "arguments": {written % i}}}\n</tool_call>'
        for i in range(4)
    ]
    engine = StubEngine([*turns, "Done."], max_model_len=8000)
    async with gateway_of(engine) as gateway:
        session = gateway.open_session("r")
        client = session.async_anthropic()
        messages: list[Any] = [{"role": "user", "content": "Go."}]
        for turn in range(5):
            question = asked(messages=messages, tools=[ADD])
            if streamed:
                async with client.messages.stream(**question) as stream:
                    got: Any = await stream.get_final_message()
            else:
                got = await client.messages.create(**question)
            messages.append({"role": "assistant", "content": got.content})
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": f"result {turn}"}
                for block in got.content
                if block.type == "tool_use"
            ]
            messages.append({"role": "user", "content": results or "thanks"})
        calls = session.calls
        assert len(calls) == 5
        for before, after in pairwise(calls):
            assert after.rerendered is None
            known = (*before.prompt_ids, *before.completion_ids)
            assert after.prompt_ids[: len(known)] == known
            assert after.reused_ids == len(known)
        tree = TokenTree.build(calls)  # one path: as many nodes as the last call has tokens
        assert len(tree.token) == len(calls[-1].prompt_ids) + len(calls[-1].completion_ids)


async def test_blocks_become_the_messages_of_chat_completions() -> None:
    engine = StubEngine()
    async with gateway_of(engine) as gateway:
        session = gateway.open_session("r")
        cached = {"cache_control": {"type": "ephemeral"}}
        await session.async_anthropic().messages.create(
            **asked(
                system=[{"type": "text", "text": "One.", **cached}, {"type": "text", "text": "2"}],
                tools=[{**ADD, **cached}],
                messages=[
                    {"role": "user", "content": [{"type": "text", "text": "Go.", **cached}]},
                    {
                        "role": "assistant",
                        "content": [
                            {"type": "thinking", "thinking": "Hm, ", "signature": "s"},
                            {"type": "redacted_thinking", "data": "x"},
                            {"type": "thinking", "thinking": "yes.", "signature": "s"},
                            {"type": "text", "text": "I "},
                            {"type": "text", "text": "add."},
                            {"type": "tool_use", "id": "x", "name": "add", "input": {"a": 1}},
                            {"type": "tool_use", "id": "y", "name": "add", "input": {}},
                        ],
                    },
                    {
                        "role": "user",
                        "content": [
                            {"type": "text", "text": "Here."},
                            {"type": "tool_result", "tool_use_id": "x", "content": "3"},
                            {
                                "type": "tool_result",
                                "tool_use_id": "y",
                                "content": [{"type": "text", "text": "no a"}],
                                "is_error": True,
                                **cached,
                            },
                            {"type": "text", "text": "And now?"},
                        ],
                    },
                    {"role": "system", "content": "Note."},
                    {"role": "assistant", "content": "Fine."},
                    {"role": "user", "content": "Sure?"},
                ],
            )
        )

        def call(id: str, arguments: str) -> dict[str, Any]:
            function = {"name": "add", "arguments": arguments}
            return {"id": id, "type": "function", "function": function}

        assert session.calls[0].messages == [
            {
                "role": "system",
                "content": [{"type": "text", "text": "One."}, {"type": "text", "text": "2"}],
            },
            {"role": "user", "content": "Go."},
            {
                "role": "assistant",
                "content": "I add.",
                "reasoning_content": "Hm, yes.",
                "tool_calls": [call("x", '{"a": 1}'), call("y", "{}")],
            },
            {"role": "user", "content": "Here."},
            {"role": "tool", "tool_call_id": "x", "content": "3"},
            {"role": "tool", "tool_call_id": "y", "content": "Error: no a"},
            {"role": "user", "content": "And now?"},
            {"role": "system", "content": "Note."},
            {"role": "assistant", "content": "Fine."},
            {"role": "user", "content": "Sure?"},
        ]


@pytest.mark.parametrize(
    ("thinking", "ending"),
    [
        (None, "assistant\n"),
        ({"type": "enabled", "budget_tokens": 1024}, "assistant\n"),
        ({"type": "adaptive"}, "assistant\n"),
        ({"type": "disabled"}, "</think>\n\n"),
    ],
)
async def test_thinking_is_what_the_template_calls_enable_thinking(
    thinking: Any, ending: str
) -> None:
    async with gateway_of(StubEngine()) as gateway:
        session = gateway.open_session("r")
        fields = {} if thinking is None else {"thinking": thinking}
        await session.async_anthropic().messages.create(**asked(**fields))
        assert text_of(session.calls[0].prompt_ids).endswith(ending)


async def test_tools_are_hidden_with_tool_choice_none() -> None:
    async with gateway_of(StubEngine([CALL])) as gateway:
        session = gateway.open_session("r")
        got = await session.async_anthropic().messages.create(
            **asked(tools=[ADD], tool_choice={"type": "none"})
        )
        assert "<tools>" not in text_of(session.calls[0].prompt_ids)
        assert [block.type for block in got.content] == ["text"]


async def test_tokens_are_counted_as_a_request_would_have_them(door: Any) -> None:
    async with gateway_of(StubEngine(["Yes."])) as gateway:
        session = gateway.open_session("r")
        client = door(session)
        question: dict[str, Any] = {"model": "tiny", "messages": USER, "tools": [ADD]}
        for _ in range(2):
            counted = await client.messages.count_tokens(**question, system="Be brief.")
            got = await client.messages.create(**question, system="Be brief.", max_tokens=9)
            assert counted.input_tokens == len(session.calls[-1].prompt_ids)
            question["messages"] = [
                *USER,
                {"role": "assistant", "content": got.content},
                {"role": "user", "content": "Sure?"},
            ]
        assert len(session.calls) == 2
        question["messages"] = question["messages"][:2]  # an agent looks whether it has room left
        assert (await client.messages.count_tokens(**question)).input_tokens > 0


async def test_the_beta_client_and_the_models_are_served(door: Any) -> None:
    async with gateway_of(StubEngine([REASONED])) as gateway:
        session = gateway.open_session("r")
        client = door(session)
        got = await client.beta.messages.create(**asked(tools=[ADD]), betas=["any-2025-01-01"])
        assert [block.type for block in got.content] == ["thinking", "text", "tool_use"]
        models = [model async for model in client.models.list()]
        assert [(model.id, model.type) for model in models] == [("tiny", "model")]


async def test_a_stream_that_is_closed_early_leaves_an_undelivered_call(door: Any) -> None:
    engine = StubEngine(["abcdef"], hold_after=3)
    engine.gate.clear()
    async with gateway_of(engine) as gateway:
        session = gateway.open_session("r")
        stream = await door(session).messages.create(**asked(stream=True))

        async def read() -> None:
            async for _ in stream:
                pass

        reading = asyncio.ensure_future(read())
        await until(lambda: engine.sampling == 1)
        reading.cancel()
        await asyncio.wait({reading})
        await stream.close()
        await until(lambda: bool(session.calls))
        assert [call.undelivered for call in session.calls] == [True]
        assert session.calls[0].dialect == "messages"
        assert len(session.calls[0].completion_ids) <= 3
        await until(lambda: engine.cancelled == 1)


async def test_a_key_that_is_wrong_or_sealed_is_refused_in_anthropics_form(door: Any) -> None:
    async with gateway_of(StubEngine()) as gateway:
        session = gateway.open_session("r")
        client = door(session)
        wrong = client.with_options(api_key="sk-wrong")
        for ask in (wrong.messages.create, wrong.messages.stream):
            with pytest.raises(anthropic.AuthenticationError, match="no open session") as caught:
                async with await ask(**asked()) if ask == wrong.messages.create else ask(**asked()):
                    pass
            assert caught.value.body["error"]["type"] == "authentication_error"
        with pytest.raises(anthropic.AuthenticationError, match="no open session"):
            await wrong.messages.count_tokens(model="tiny", messages=USER)
        session.seal()
        with pytest.raises(anthropic.ConflictError, match="has ended"):
            await client.messages.create(**asked())


async def test_the_key_may_come_as_anthropic_clients_sent_it_before() -> None:
    async with gateway_of(StubEngine()) as gateway:
        session = gateway.open_session("r")
        async with httpx.AsyncClient() as client:
            url = f"{session.base_url}/messages"
            headers = {"x-api-key": session.key_of("planner")}
            reply = await client.post(url, json=asked(), headers=headers)
        assert reply.status_code == 200
        assert session.calls[0].role == "planner"


async def test_errors_have_anthropics_form(door: Any) -> None:
    engine = StubEngine([EngineError("the engine broke")], max_model_len=300)
    async with gateway_of(engine) as gateway:
        session = gateway.open_session("r")
        client = door(session)
        with pytest.raises(anthropic.NotFoundError, match="'tiny'"):
            await client.messages.create(**asked(model="claude"))
        with pytest.raises(anthropic.BadRequestError, match="leaves no room"):
            await client.messages.create(**asked(system="x" * 400))
        with pytest.raises(anthropic.NotFoundError, match="not served here"):
            await client.messages.batches.list()
        assert session.errors == []
        with pytest.raises(anthropic.InternalServerError, match="the engine broke") as caught:
            await client.messages.create(**asked())
        assert caught.value.body["error"]["type"] == "api_error"
        with pytest.raises(anthropic.APIStatusError, match="the engine broke") as caught:
            async with client.messages.stream(**asked()) as stream:
                await stream.get_final_message()
        assert caught.value.body["error"]["type"] == "api_error"


async def test_a_body_that_is_too_large_is_refused_in_anthropics_form(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tuner.gateway.http.MAX_BODY_BYTES", 1000)
    async with gateway_of(StubEngine()) as gateway:
        session = gateway.open_session("r")
        async with anthropic.AsyncAnthropic(
            base_url=session.base_url, api_key=session.key, max_retries=0
        ) as client:
            with pytest.raises(anthropic.APIStatusError, match="larger than 1000") as caught:
                await client.messages.create(**asked(system="x" * 2000))
        assert caught.value.status_code == 413
        assert caught.value.body["error"]["type"] == "request_too_large"  # type: ignore[index]


async def test_the_chat_model_has_anthropics_client_too() -> None:
    async with gateway_of(StubEngine(["x"])) as gateway:
        session = gateway.open_session("r")
        model = PlainChatModel(session).role("planner")
        assert model.anthropic_client is model.anthropic_client
        got = await model.anthropic_client.messages.create(**asked())
        assert got.content[0].text == "x"  # type: ignore[union-attr]
        (call,) = session.calls
        assert (call.role, call.dialect) == ("planner", "messages")


@pytest.mark.long
def test_anthropic_is_not_imported_unless_its_client_is_asked_for() -> None:
    program = (
        "import sys, tuner, tuner.rollouts.without_framework, tuner.gateway.app\n"
        "import tuner.gateway.clients\n"
        "sys.exit('anthropic' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


async def test_an_idempotency_key_replays_the_answer(door: Any) -> None:
    engine = StubEngine(["one", "two"])
    async with gateway_of(engine) as gateway:
        session = gateway.open_session("r")
        client = door(session)
        headers = {"Idempotency-Key": "k"}
        for _ in range(2):
            async with client.messages.stream(**asked(), extra_headers=headers) as stream:
                assert await stream.get_final_text() == "one"
        assert len(session.calls) == 1


async def test_a_header_of_anthropics_does_not_change_another_dialect() -> None:
    async with gateway_of(StubEngine(["x"])) as gateway:
        client = gateway.open_session("r").async_client()
        got = await client.chat.completions.create(
            model="tiny",
            messages=USER,
            extra_headers={"anthropic-version": "2023-06-01"},
        )
        assert got.choices[0].message.content == "x"


async def test_no_client_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "anthropic", None)
    async with gateway_of(StubEngine()) as gateway:
        with pytest.raises(MissingDependencyError, match="pip install anthropic"):
            gateway.open_session("r").async_anthropic()
