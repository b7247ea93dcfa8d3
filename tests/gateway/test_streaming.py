"""Streams: what they carry, when they are committed, and what is left of those that end early."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import openai
import pytest

from tests.engines.models import until
from tests.gateway.drift import encoded, letters
from tests.gateway.drift import gateway_of as drift_gateway_of
from tests.kit.toy import ADD_TOOL, StubEngine, gateway_of, ids_of, text_of
from tuner.engines.base import EngineError

USER: list[Any] = [{"role": "user", "content": "hi"}]
REASONED = (
    "<think>\nadd them\n</think>\n\nI add.\n"
    '<tool_call>\n{"name": "add", "arguments": {"a": 1,  "b": 2}}\n</tool_call>'
)


async def test_a_stream_adds_up_to_the_answer_that_is_not_streamed(door: Any) -> None:
    async with gateway_of(StubEngine([REASONED])) as gateway:
        client = door(gateway.open_session("r", seed=1))
        asked = {"model": "tiny", "messages": USER, "tools": [ADD_TOOL]}
        whole = await client.chat.completions.create(**asked)
        session = gateway.open_session("r", seed=1)
        async with door(session).chat.completions.stream(**asked) as stream:
            got = await stream.get_final_completion()
        message = got.choices[0].message
        expected = whole.choices[0].message
        assert got.id == whole.id
        assert got.choices[0].finish_reason == "tool_calls"
        assert message.content == expected.content == "I add."
        assert message.reasoning_content == expected.reasoning_content == "add them"
        assert [(c.id, c.function.name, c.function.arguments) for c in message.tool_calls] == [
            (c.id, c.function.name, c.function.arguments) for c in expected.tool_calls
        ]
        (call,) = session.calls
        assert call.streamed
        assert not call.undelivered
        assert text_of(call.completion_ids) == f"{REASONED}<|im_end|>"
        assert call.response["content"] == "I add."


@pytest.mark.parametrize("spell", [encoded, letters], ids=["tokens", "bytes"])
async def test_a_stream_in_any_vocabulary_adds_up(spell: Any, vocabulary: str, door: Any) -> None:
    said = f"{REASONED.replace('I add.', 'Ich füge 汉字 🙂 zusammen.')}"
    ids = spell(said) if spell is letters else spell(f"{said}<|im_end|>")
    gateway = drift_gateway_of(ids)
    client = door(gateway.open_session("r", seed=1))
    asked = {"model": "tiny", "messages": USER, "tools": [ADD_TOOL]}
    expected = (await client.chat.completions.create(**asked)).choices[0].message
    session = gateway.open_session("r", seed=1)
    pieces = []
    async with door(session).chat.completions.stream(**asked) as stream:
        async for event in stream:
            if event.type == "content.delta":
                pieces.append(event.delta)
        message = (await stream.get_final_completion()).choices[0].message
    assert "".join(pieces) == message.content == expected.content == "Ich füge 汉字 🙂 zusammen."
    assert len(pieces) > 4
    assert "\ufffd" not in "".join(pieces)
    assert message.reasoning_content == expected.reasoning_content == "add them"
    assert [call.id for call in message.tool_calls] == [call.id for call in expected.tool_calls]
    (call,) = session.calls
    assert call.completion_ids == ids
    await gateway.aclose()


async def test_a_call_is_committed_before_the_terminal_event(door: Any) -> None:
    async with gateway_of(StubEngine(["abc"])) as gateway:
        session = gateway.open_session("r")
        stream = await door(session).chat.completions.create(
            model="tiny", messages=USER, stream=True
        )
        async for chunk in stream:
            if chunk.choices[0].finish_reason:
                assert [call.undelivered for call in session.calls] == [False]
        assert len(session.calls) == 1


async def test_text_arrives_while_the_model_still_writes(door: Any) -> None:
    engine = StubEngine(["abcdef"], hold_after=3)
    engine.gate.clear()
    async with gateway_of(engine) as gateway:
        session = gateway.open_session("r")
        stream = await door(session).chat.completions.create(
            model="tiny", messages=USER, stream=True
        )
        text = ""
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
            if text == "abc":
                assert session.calls == ()
                engine.gate.set()
        assert text == "abcdef"


async def test_usage_comes_last_when_it_is_asked_for(door: Any) -> None:
    async with gateway_of(StubEngine(["abc"])) as gateway:
        session = gateway.open_session("r")
        stream = await door(session).chat.completions.create(
            model="tiny", messages=USER, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].choices == []
        assert chunks[-1].usage.completion_tokens == 4
        assert all(chunk.usage is None for chunk in chunks[:-1])


async def test_every_choice_of_a_stream_is_recorded(door: Any) -> None:
    async with gateway_of(StubEngine(["abc", "de", "f"])) as gateway:
        session = gateway.open_session("r")
        stream = await door(session).chat.completions.create(
            model="tiny", messages=USER, stream=True, n=3, logprobs=True
        )
        texts = ["", "", ""]
        scored = {}
        async for chunk in stream:
            (choice,) = chunk.choices
            texts[choice.index] += choice.delta.content or ""
            if choice.logprobs:
                scored[choice.index] = len(choice.logprobs.content)
        assert texts == ["abc", "de", "f"]
        assert scored == {0: 4, 1: 3, 2: 2}
        assert [text_of(call.completion_ids) for call in session.calls] == [
            "abc<|im_end|>",
            "de<|im_end|>",
            "f<|im_end|>",
        ]


async def test_a_stream_closed_early_keeps_what_was_sampled_as_undelivered(door: Any) -> None:
    engine = StubEngine(["abcdef"], hold_after=3)
    engine.gate.clear()
    async with gateway_of(engine) as gateway:
        session = gateway.open_session("r")
        stream = await door(session).chat.completions.create(
            model="tiny", messages=USER, stream=True
        )
        text = ""
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
            if text == "abc":
                break
        await stream.close()
        await until(lambda: bool(session.calls))
        (call,) = session.calls
        assert call.undelivered
        assert call.finish_reason == "abandoned"
        assert call.completion_ids == ids_of("abc")
        assert call.logprobs == (-0.25,) * 3
        assert call.versions == (3,) * 3
        await until(lambda: engine.cancelled == 1)
        assert engine.sampling == 0


async def test_sealing_keeps_what_a_stream_has_sampled(door: Any) -> None:
    engine = StubEngine(["abcdef"], hold_after=2)
    engine.gate.clear()
    async with gateway_of(engine) as gateway:
        session = gateway.open_session("r")
        stream = await door(session).chat.completions.create(
            model="tiny", messages=USER, stream=True
        )
        text = ""
        while text != "ab":
            text += (await anext(stream)).choices[0].delta.content or ""
        calls = session.seal()
        with pytest.raises(openai.APIError, match="has ended"):
            await anext(stream)
        assert [call.undelivered for call in calls] == [True]
        assert calls == session.calls


async def test_cancelling_a_call_that_is_not_streamed_keeps_what_was_sampled() -> None:
    engine = StubEngine(["abcdef"], hold_after=3)
    engine.gate.clear()
    async with gateway_of(engine) as gateway:
        session = gateway.open_session("r")
        client = session.async_client()
        call = asyncio.ensure_future(
            client.chat.completions.create(model="tiny", messages=USER, n=2)
        )
        await until(lambda: engine.sampling == 2)
        for _ in range(10):
            await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert [call.completion_ids for call in session.calls] == [ids_of("abc")] * 2
        assert all(call.undelivered for call in session.calls)


async def test_an_engine_that_fails_ends_the_stream_with_its_error(door: Any) -> None:
    async with gateway_of(StubEngine([EngineError("the engine broke")])) as gateway:
        session = gateway.open_session("r")
        stream = await door(session).chat.completions.create(
            model="tiny", messages=USER, stream=True
        )
        with pytest.raises(openai.APIError, match="the engine broke"):
            async for _ in stream:
                pass
        assert [str(error) for error in session.errors] == ["the engine broke"]
        assert session.calls == ()


async def test_a_bad_request_for_a_stream_gets_its_status(door: Any) -> None:
    async with gateway_of(StubEngine()) as gateway:
        client = door(gateway.open_session("r"))
        with pytest.raises(openai.BadRequestError, match="temperature"):
            await client.chat.completions.create(
                model="tiny", messages=USER, stream=True, temperature=9
            )


async def test_a_retried_stream_is_replayed_not_sampled_again(door: Any) -> None:
    engine = StubEngine(["abc", "other"])
    async with gateway_of(engine) as gateway:
        session = gateway.open_session("r")
        client = door(session)
        texts = []
        for _ in range(2):
            stream = await client.chat.completions.create(
                model="tiny",
                messages=USER,
                stream=True,
                extra_headers={"Idempotency-Key": "once"},
            )
            texts.append("".join([c.choices[0].delta.content or "" async for c in stream]))
        assert texts == ["abc", "abc"]
        assert len(engine.requests) == len(session.calls) == 1


async def test_a_retry_of_a_stream_that_was_never_read_is_sampled() -> None:
    async with gateway_of(StubEngine(["abc"])) as gateway:
        client = gateway.open_session("r").async_client()
        headers = {"Idempotency-Key": "once"}
        asked: dict[str, Any] = {"model": "tiny", "messages": USER, "stream": True}
        unread = await client.chat.completions.create(**asked, extra_headers=headers)
        await unread.close()
        stream = await client.chat.completions.create(**asked, extra_headers=headers)
        assert "".join([c.choices[0].delta.content or "" async for c in stream]) == "abc"


async def test_a_client_in_another_thread_and_loop_reads_a_stream() -> None:
    async with gateway_of(StubEngine(["abc"])) as gateway:
        session = gateway.open_session("r")

        async def read() -> str:
            client = session.async_client()
            stream = await client.chat.completions.create(model="tiny", messages=USER, stream=True)
            return "".join([c.choices[0].delta.content or "" async for c in stream])

        assert await asyncio.to_thread(asyncio.run, read()) == "abc"
        assert [call.undelivered for call in session.calls] == [False]


async def test_a_client_that_vanishes_frees_its_slot_and_is_recorded() -> None:
    engine = StubEngine(["abcdef"], hold_after=2)
    engine.gate.clear()
    async with gateway_of(engine) as gateway:
        session = gateway.open_session("r")
        headers = {"authorization": f"Bearer {session.key}"}
        body = {"model": "tiny", "messages": USER}
        async with httpx.AsyncClient() as client:
            url = f"{session.base_url}/chat/completions"
            call = asyncio.ensure_future(client.post(url, json=body, headers=headers))
            await until(lambda: engine.sampling == 1)
            call.cancel()
        await until(lambda: engine.cancelled == 1)
        await until(lambda: bool(session.calls))
        assert [call.undelivered for call in session.calls] == [True]


async def test_the_short_way_in_process_gives_the_chunks_that_the_librarys_own_way_gives() -> None:
    asked = {"model": "tiny", "messages": USER, "tools": [ADD_TOOL], "stream": True}
    more = {"logprobs": True, "stream_options": {"include_usage": True}}
    async with gateway_of(StubEngine([REASONED])) as gateway:
        ways = []
        for own in (False, True):
            client = gateway.open_session("r", seed=1).async_client()
            create = (client.with_options() if own else client).chat.completions.create
            stream = await create(**asked, **more)
            assert isinstance(stream, openai.AsyncStream)
            assert type(stream) is not openai.AsyncStream or own, "the short way was not taken"
            assert stream.response.status_code == 200
            ways.append([chunk.model_dump(exclude={"created"}) async for chunk in stream])
        assert ways[0] == ways[1]
        assert len(ways[0]) > 5


async def test_the_short_way_in_process_raises_what_the_librarys_own_way_raises() -> None:
    asked = {"model": "tiny", "messages": USER, "stream": True}
    async with gateway_of(StubEngine([EngineError("out of memory")])) as gateway:
        raised = []
        for own in (False, True):
            client = gateway.open_session("r", seed=1).async_client()
            create = (client.with_options() if own else client).chat.completions.create
            with pytest.raises(openai.APIError) as caught:
                async for _ in await create(**asked):
                    pass
            raised.append((type(caught.value), caught.value.message, caught.value.body))
        assert raised[0] == raised[1]
        assert "out of memory" in raised[0][1]
