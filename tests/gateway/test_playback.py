"""Recorded rollouts are given back by what requests say: no tokenizer, no template, no model."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from dataclasses import replace
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gateway.again import recorded, seen
from tests.gateway.test_recording_property import MOVES, Agent, Ledger
from tests.gateway.test_script import BODIES, TEXT, asked, posted
from tests.kit.chat_server import chat_server
from tests.kit.examples import few
from tests.kit.toy import ADD_TOOL, StubEngine, gateway_of
from tuner.errors import TunerError
from tuner.gateway import Session
from tuner.gateway.playback import MessageScript, Playback
from tuner.gateway.relay import Relay
from tuner.traces import Trace

# What the text and Anthropic APIs ask of a tokenizer, or what a request may do with one.
WITHOUT_TOKENS = [
    name for name in MOVES if name not in ("cancel", "close_early", "abandon_choices")
]


def playback(trace: Trace, calls: int | None = None, **options: Any) -> tuple[Playback, Session]:
    gateway = Playback("tiny")
    script = MessageScript(trace, calls, context=4096, **options)
    return gateway, gateway.open_session("again", script=script)


def without_counts(value: Any) -> Any:
    """What needs a tokenizer to count is 0."""
    if isinstance(value, dict):
        return {k: without_counts(v) for k, v in value.items() if k != "reasoning_tokens"}
    return [without_counts(one) for one in value] if isinstance(value, list) else value


@pytest.mark.parametrize("path", BODIES)
async def test_every_dialect_gets_the_same_answer_again(path: str) -> None:
    async with gateway_of(StubEngine([TEXT])) as gateway:
        session = gateway.open_session("first", seed=1)
        said = await posted(session, path, BODIES[path])
        calls = session.seal()
    again, session = playback(recorded(calls))
    assert without_counts(await posted(session, path, BODIES[path])) == without_counts(said)
    assert session.script is not None
    assert session.script.end() is None
    given_back = session.seal()
    assert [replace(call, replayed=0) for call in given_back] == [
        replace(old, started=new.started, seconds=0.0)
        for old, new in zip(calls, given_back, strict=True)
    ]
    await again.aclose()


def whole(events: list[dict[str, Any]], path: str) -> Any:
    """What all events of a stream together say."""
    if path == "/v1/responses":
        return without_counts(events[-1]["response"])
    if path == "/v1/messages":
        deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
        text = "".join(delta.get("text", "") for delta in deltas)
        return text, [d["partial_json"] for d in deltas if "partial_json" in d], events[-2]
    choices = [choice for event in events for choice in event["choices"]]
    parts = [choice.get("delta", choice) for choice in choices]
    text = "".join(part.get("content") or part.get("text") or "" for part in parts)
    calls = [part["tool_calls"] for part in parts if "tool_calls" in part]
    return text, calls, choices[-1]["finish_reason"], {event["id"] for event in events}


@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_says_the_same(path: str) -> None:
    body = BODIES[path] | {"stream": True}
    if path == "/v1/completions":
        body = {"model": "tiny", "prompt": "one", "stream": True}
    async with gateway_of(StubEngine([TEXT])) as gateway:
        session = gateway.open_session("first", seed=1)
        said = await posted(session, path, body)
        calls = session.seal()
    again, session = playback(recorded(calls))
    assert whole(await posted(session, path, body), path) == whole(said, path)
    await again.aclose()


@settings(max_examples=few(60), deadline=None)
@given(st.lists(st.sampled_from(WITHOUT_TOKENS), min_size=1, max_size=7), st.integers(0, 2**32))
def test_random_agents_get_their_rollout_again(moves: list[str], seed: int) -> None:
    async def main() -> None:
        async with gateway_of(Ledger(max_model_len=4096)) as gateway:
            first = Agent(gateway.open_session("first", seed=1), random.Random(seed), "agent")
            for name in moves:
                await first.move(name)
            calls = first.session.seal()
        again, session = playback(recorded(calls))
        second = Agent(session, random.Random(seed), "agent")
        for name in moves:
            await second.move(name)
        assert session.script is not None
        assert session.script.end() is None
        assert second.conversations == first.conversations
        old = {call.id: seen(replace(call, seconds=0.0)) for call in calls}
        assert {call.id: seen(call) for call in session.seal()} == old
        await again.aclose()

    asyncio.run(main())


async def two(**fields: Any) -> Trace:
    async with gateway_of(StubEngine(["a", "b"])) as gateway:
        session = gateway.open_session("first", seed=1)
        for content in ("one", "two"):
            await asked(session, content, **fields)
        return recorded(session.seal())


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"temperature": 0.5}, "temperature is 0.5 and was 1.0"),
        ({"max_tokens": 50}, "max_tokens is 50 and was 60"),
        ({"seed": 3}, "seed is 3 and was"),
        ({"stop": ["x"]}, "stop is"),
        ({"n": 2}, "the request has 2 choices and had 1"),
        ({"tools": [ADD_TOOL]}, "the tools are"),
    ],
)
async def test_other_settings_are_named(fields: dict[str, Any], what: str) -> None:
    _, session = playback(await two(max_tokens=60))
    with pytest.raises(openai.ConflictError, match=what):
        await asked(session, "one", **({"max_tokens": 60} | fields))
    assert session.script is not None
    divergence = session.script.end()
    assert divergence is not None
    assert divergence.call == 0
    assert divergence.tools == fields.get("tools", [])


async def test_fields_that_say_nothing_do_not_count() -> None:
    _, session = playback(await two())
    message: Any = {"role": "user", "content": "one", "name": None}
    answer = await session.async_client().chat.completions.create(
        model="tiny", messages=[message], tools=[]
    )
    assert answer.choices[0].message.content == "a"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2  # with the end of the turn, as recorded


async def test_behind_the_point_nobody_answers_and_it_is_said_which_call_is_asked_for() -> None:
    reached: asyncio.Queue[int] = asyncio.Queue()
    _, session = playback(await two(), 1, beyond=reached.put_nowait)
    assert await asked(session, "one") == "a"
    waiting = asyncio.ensure_future(asked(session, "two"))
    assert await reached.get() == 1
    session.seal()
    with pytest.raises(openai.ConflictError, match="has ended"):
        await waiting


async def test_what_needs_a_tokenizer_is_refused_by_name() -> None:
    _, session = playback(await two())
    with pytest.raises(openai.BadRequestError, match="log-probs name tokens"):
        await asked(session, "one", logprobs=True)
    with pytest.raises(openai.NotFoundError, match="count_tokens is not given back"):
        await session.async_client().post("/messages/count_tokens", body={}, cast_to=object)


# A model behind a URL: chat completions as they were sent


PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}


async def relayed(*requests: dict[str, Any]) -> tuple[list[Any], Trace]:
    with chat_server(lambda body: f"seen {len(body['messages'])}") as server:
        gateway = Relay(openai.AsyncOpenAI(base_url=server.base_url, api_key="k"), "tiny")
        session = gateway.open_session("r")
        client = session.async_client()
        said = [await client.chat.completions.create(**request) for request in requests]
        calls = session.seal()
        await gateway.aclose()
    return said, recorded(calls)


async def test_a_rollout_of_a_model_behind_a_url_is_given_back_as_it_was() -> None:
    """Also with what our own gateway would refuse: images, settings of that API alone."""
    request = {
        "model": "tiny",
        "messages": [{"role": "user", "content": [PICTURE]}],
        "temperature": 0.3,
        "reasoning_effort": "low",
    }
    (said,), trace = await relayed(request)
    gateway, session = playback(json_round(trace))
    client = openai.AsyncOpenAI(base_url=session.base_url, api_key=session.key, max_retries=0)
    again = await client.chat.completions.create(**request)
    assert (again.id, again.choices[0].message.content) == (said.id, "seen 1")
    assert again.usage is not None
    assert again.usage.completion_tokens == said.usage.completion_tokens == 2
    with pytest.raises(openai.ConflictError, match="a further call"):
        await client.chat.completions.create(**request)
    with pytest.raises(openai.NotFoundError, match="behind a URL"):
        await client.responses.create(model="tiny", input="hi")
    await client.close()
    await gateway.aclose()


def json_round(trace: Trace) -> Trace:
    from tuner.traces.store import trace_from_json, trace_to_json

    return trace_from_json(json.loads(json.dumps(trace_to_json(trace))))


async def test_its_streams_too() -> None:
    request = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    _, trace = await relayed(request)
    _, session = playback(trace)
    stream = await session.async_client().chat.completions.create(
        **request, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "seen 1"
    assert chunks[-1].usage is not None


async def test_its_settings_are_compared() -> None:
    request = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
    _, trace = await relayed(request)
    _, session = playback(trace)
    with pytest.raises(openai.ConflictError, match="max_tokens is 8 and was 9"):
        await session.async_client().chat.completions.create(**request | {"max_tokens": 8})


def test_calls_of_a_chat_model_of_the_users_own_are_refused() -> None:
    _, trace = asyncio.run(relayed({"model": "tiny", "messages": []}))
    own = [replace(call, id="4ac2") for call in trace.calls]
    with pytest.raises(TunerError, match=r"the workflow's own chat model"):
        MessageScript(replace(trace, calls=tuple(own)))


@pytest.mark.long
def test_it_needs_no_torch() -> None:
    code = "import sys, tuner.gateway.playback; print({'torch', 'transformers'} & {*sys.modules})"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "set()\n"
