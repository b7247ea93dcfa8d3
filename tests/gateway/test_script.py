"""A recorded rollout is run again: what was answered is given back, bit for bit, up to a point."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gateway.again import recorded, without_seed
from tests.gateway.test_recording_property import MOVES, Agent, Ledger
from tests.kit.examples import few
from tests.kit.toy import ADD_TOOL, StubEngine, gateway_of, ids_of
from tuner.engines.base import SamplingParams
from tuner.errors import TunerError
from tuner.gateway import Gateway, Session, SessionLimits
from tuner.gateway.script import Divergence, Script, difference
from tuner.traces import Call, Trace
from tuner.training.batch import build_batch

# What agents do whose next request depends on nothing but their answers and their own seed.
REPEATABLE = [name for name in MOVES if name not in ("cancel", "close_early", "abandon_choices")]


async def lived(agent: Agent, moves: Sequence[str]) -> tuple[Call, ...]:
    for name in moves:
        await agent.move(name)
    return agent.session.seal()


_LIFE = st.lists(st.sampled_from(REPEATABLE), min_size=1, max_size=7)


@settings(max_examples=few(60), deadline=None)
@given(_LIFE, st.integers(0, 2**32))
def test_a_whole_rollout_is_given_back(moves: list[str], seed: int) -> None:
    async def main() -> None:
        engine = Ledger(max_model_len=100_000)
        async with gateway_of(engine) as gateway:
            first = Agent(gateway.open_session("first", seed=1), random.Random(seed), "agent")
            calls = await lived(first, moves)
            sampled = len(engine.sampled)
            script = Script(recorded(calls), ends=True)
            session = gateway.open_session("second", seed=2, script=script)
            second = Agent(session, random.Random(seed), "agent")
            again = await lived(second, moves)
            assert script.end() is None
            assert len(engine.sampled) == sampled
            assert second.conversations == first.conversations
            assert {c.id: without_seed(c) for c in again} == {c.id: without_seed(c) for c in calls}
            assert all(call.replayed == len(call.completion_ids) for call in again)

    asyncio.run(main())


@settings(max_examples=few(120), deadline=None)
@given(_LIFE, st.integers(0, 2**32), st.data())
def test_a_branch_is_the_recorded_rollout_up_to_its_point(
    moves: list[str], seed: int, data: Any
) -> None:
    async def main() -> None:
        engine = Ledger(max_model_len=100_000, goes_on="always")
        async with gateway_of(engine) as gateway:
            first = Agent(gateway.open_session("first", seed=1), random.Random(seed), "agent")
            calls = await lived(first, moves)
            before = data.draw(st.integers(0, len(calls)))
            longest = len(calls[before].completion_ids) if before < len(calls) else 1
            token = data.draw(st.integers(0, longest - 1))
            engine.sampled.clear()
            script = Script(recorded(calls), before, token)
            session = gateway.open_session("second", seed=2, script=script)
            again = await lived(Agent(session, random.Random(seed), "agent"), moves)
            assert script.end() is None
            _check_branch(engine, calls, again, before, token)

    asyncio.run(main())


def _check_branch(
    engine: Ledger, calls: Sequence[Call], again: Sequence[Call], before: int, token: int
) -> None:
    by_id = {call.id: call for call in again}
    for call in calls[:before]:
        assert without_seed(by_id[call.id]) == without_seed(call)
        assert by_id[call.id].replayed == len(call.completion_ids)
    if token:
        old, new = calls[before], by_id[calls[before].id]
        assert new.prompt_ids == old.prompt_ids
        assert new.completion_ids[:token] == old.completion_ids[:token]
        assert new.logprobs[:token] == old.logprobs[:token]
        assert new.replayed == token
    replayed = sum(call.replayed for call in again)
    assert replayed == sum(len(call.completion_ids) for call in calls[:before]) + token
    sampled = sum(len(ids) for _, _, ids in engine.sampled)
    assert sum(len(call.completion_ids) for call in again) == sampled + replayed
    batch = build_batch([recorded(calls, 0), recorded(again, 1)])
    own = sum(len(call.completion_ids) for call in calls)
    assert batch.sampled_tokens == own + sampled
    # One that sampled nothing is nobody's peer.
    assert batch.trained_tokens == (own + sampled if sampled else 0)


# Every dialect, whole and streamed


CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "2+2?"}], "tools": [ADD_TOOL]}
CLAUDE_TOOL = {"name": "add", "description": "adds", "input_schema": {"type": "object"}}
RESPONSES_TOOL = {"type": "function", **ADD_TOOL["function"], "strict": False}
BODIES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": "tiny", "prompt": ["one", "two"], "n": 2},
    "/v1/responses": {"model": "tiny", "input": "2+2?", "tools": [RESPONSES_TOOL]},
    "/v1/messages": {
        "model": "tiny",
        "messages": [{"role": "user", "content": "2+2?"}],
        "tools": [CLAUDE_TOOL],
        "max_tokens": 500,
    },
}
TEXT = 'Hm.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
CLOCKS = ("created", "created_at", "completed_at")


def timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: timeless(v) for key, v in value.items() if key not in CLOCKS}
    return [timeless(v) for v in value] if isinstance(value, list) else value


async def posted(session: Session, path: str, body: dict[str, Any]) -> Any:
    """The whole answer, or what the events of a stream say."""
    headers = {"authorization": f"Bearer {session.key}"}
    async with httpx.AsyncClient(headers=headers) as client:
        url = session.base_url.removesuffix("/v1") + path
        answer = await client.post(url, json=body)
        assert answer.status_code == 200, answer.text
    if not body.get("stream"):
        return timeless(answer.json())
    data = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    return [timeless(json.loads(line)) for line in data]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_every_dialect_gets_the_same_answer_again(path: str, stream: bool) -> None:
    if stream and path == "/v1/completions":
        body = {"model": "tiny", "prompt": "one", "stream": True}
    else:
        body = BODIES[path] | ({"stream": True} if stream else {})
    engine = StubEngine([TEXT])
    async with gateway_of(engine) as gateway:
        session = gateway.open_session("first", seed=1)
        said = await posted(session, path, body)
        calls, asked = session.seal(), len(engine.requests)
        assert calls[0].response.get("tool_calls") or path == "/v1/completions"
        script = Script(recorded(calls), ends=True)
        again = gateway.open_session("second", seed=2, script=script)
        assert await posted(again, path, body) == said
        assert script.end() is None
        assert len(engine.requests) == asked
        assert [without_seed(call) for call in again.seal()] == list(map(without_seed, calls))


async def test_alternatives_are_given_back() -> None:
    body = CHAT | {"logprobs": True, "top_logprobs": 3, "return_token_ids": True}
    async with gateway_of(StubEngine()) as gateway:
        session = gateway.open_session("first", seed=1)
        said = await posted(session, "/v1/chat/completions", body)
        assert len(said["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 3
        again = gateway.open_session("again", script=Script(recorded(session.seal()), ends=True))
        assert await posted(again, "/v1/chat/completions", body) == said


# Divergence


async def asked(session: Session, content: str, **fields: Any) -> str:
    messages: Any = [{"role": "user", "content": content}]
    answer = await session.async_client().chat.completions.create(
        model="tiny", messages=messages, **fields
    )
    return answer.choices[0].message.content or ""


async def two_calls(gateway: Gateway, **fields: Any) -> Trace:
    session = gateway.open_session("first", seed=1)
    for content in ("one", "two"):
        await asked(session, content, **fields)
    return recorded(session.seal())


@pytest.mark.parametrize(
    ("asks", "call", "what"),
    [
        ([("one", {}), ("zwei", {})], 1, "messages[0].content is 'zwei' and was 'two'"),
        ([("one", {"temperature": 0.5}), ("two", {})], 0, "temperature is 0.5 and was 1.0"),
        ([("one", {}), ("two", {"seed": 7}), ("three", {})], 1, "seed is 7 and was"),
        ([("one", {}), ("two", {}), ("three", {})], 2, "a further call"),
        ([("one", {})], 1, "ended without asking for it (1 requests are left)"),
        ([("one", {}), ("two", {"max_tokens": 9})], 1, "max_tokens is 9 and was"),
        ([("one", {}), ("two", {"tools": [ADD_TOOL]})], 1, "the tools are"),
    ],
)
async def test_what_differs_is_named(asks: list[Any], call: int, what: str) -> None:
    async with gateway_of(StubEngine(["a", "b", "c", "d", "e"])) as gateway:
        trace = await two_calls(gateway)
        script = Script(trace)
        session = gateway.open_session("again", seed=2, script=script)
        for content, options in asks:
            await asked(session, content, **options)
        found = script.end()
        assert isinstance(found, Divergence)
        assert found.call == call
        assert what in str(found)
        # From there on all is sampled, also what stands in the script.
        own = [c.replayed for c in session.seal()]
        assert own == [2 if number < call else 0 for number in range(len(asks))]


async def test_a_rollout_that_ends_where_it_diverges_is_refused() -> None:
    async with gateway_of(StubEngine(["a", "b", "c"])) as gateway:
        trace = await two_calls(gateway)
        session = gateway.open_session("again", script=Script(trace, ends=True))
        assert await asked(session, "one") == "a"
        for _ in range(2):
            with pytest.raises(openai.ConflictError, match=r"has diverged at call 2.*'zwei'"):
                await asked(session, "zwei")


async def test_of_agents_in_parallel_the_one_that_diverges_is_named() -> None:
    """It is compared with its own call; the rollout was followed up to the first that is left."""
    async with gateway_of(StubEngine(["a", "b"])) as gateway:
        session = gateway.open_session("first", seed=1)
        for content in ("writer, it is ten", "critic, it is ten"):
            await asked(session, content)
        script = Script(recorded(session.seal()))
        await asked(gateway.open_session("again", script=script), "critic, it is noon")
        found = script.divergence
        assert found is not None
        assert (found.call, found.number) == (0, 1)
        assert found.expected == script.trace.calls[1]
        assert str(found).startswith("at call 2: messages[0].content is 'critic, it is noon'")


async def test_a_request_behind_the_point_is_no_divergence() -> None:
    """A sub-agent in parallel: its second call was committed behind the point of the first."""
    async with gateway_of(StubEngine(["a", "b", "c", "d"])) as gateway:
        trace = await two_calls(gateway)
        script = Script(trace, calls=1)
        session = gateway.open_session("again", script=script)
        assert await asked(session, "two") == "c"
        assert await asked(session, "one") == "a"
        assert await asked(session, "three") == "d"
        assert script.end() is None


async def test_settings_that_a_session_decides_are_free() -> None:
    """A budget leaves less to a request that comes later, whatever it asks for."""
    async with gateway_of(StubEngine(["a", "b", "c", "d"])) as gateway:
        trace = await two_calls(gateway, max_tokens=50)
        script = Script(trace)
        limits = SessionLimits(tokens=20)
        session = gateway.open_session("again", script=script, limits=limits)
        assert await asked(session, "one", max_tokens=50) == "a"
        assert await asked(session, "two", max_tokens=50) == "b"
        assert script.end() is None


async def test_a_retry_is_given_the_same_again_whatever_its_key_is() -> None:
    """Clients draw such keys, so that they are others in each rollout."""
    engine = StubEngine(["a", "b"])
    async with gateway_of(engine) as gateway:
        session = gateway.open_session("first", seed=1)
        for key in ("one", "one", "two"):
            await asked(session, "same", extra_headers={"Idempotency-Key": key})
        script = Script(recorded(session.seal()), ends=True)
        again = gateway.open_session("again", seed=2, script=script)
        for key, answer in (("x", "a"), ("x", "a"), ("y", "b")):
            headers = {"Idempotency-Key": key}
            assert await asked(again, "same", extra_headers=headers) == answer
        assert script.end() is None
        assert len(engine.requests) == len(again.seal()) == 2


async def test_a_failure_that_was_asked_again_is_not_repeated() -> None:
    engine = StubEngine([RuntimeError("no memory"), "a"])
    async with gateway_of(engine) as gateway:
        session = gateway.open_session("first", seed=1)
        with pytest.raises(openai.InternalServerError, match="no memory"):
            await asked(session, "one")
        assert await asked(session, "one") == "a"
        script = Script(recorded(session.seal()), ends=True)
        again = gateway.open_session("again", seed=2, script=script)
        assert await asked(again, "one") == "a"
        assert script.end() is None


async def test_what_an_agent_gave_up_is_sampled_on_from_where_it_was() -> None:
    engine = Ledger(max_model_len=1000, goes_on="always")
    async with gateway_of(engine) as gateway:
        first = gateway.open_session("first", seed=1)
        stream = await first.async_client().chat.completions.create(
            model="tiny", messages=CHAT["messages"], stream=True
        )
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                break
        await stream.close()
        (call,) = first.seal()
        assert call.undelivered
        script = Script(recorded([call]))
        again = gateway.open_session("again", seed=5, script=script)
        await again.async_client().chat.completions.create(
            model="tiny", messages=CHAT["messages"], stream=False
        )
        (whole,) = again.seal()
        assert whole.completion_ids[: len(call.completion_ids)] == call.completion_ids
        assert whole.replayed == len(call.completion_ids) < len(whole.completion_ids)


async def test_an_engine_that_cannot_go_on_samples_the_call_anew_and_says_so() -> None:
    async with gateway_of(StubEngine(["abc", "xyz"])) as gateway:
        session = gateway.open_session("first", seed=1)
        await asked(session, "one")
        script = Script(recorded(session.seal()), calls=0, token=2)
        again = gateway.open_session("again", script=script)
        assert await asked(again, "one") == "xyz"
        assert "cannot continue" in str(script.end())
        assert again.seal()[0].replayed == 0


@pytest.mark.parametrize(
    ("calls", "token", "message"),
    [
        (3, 0, "has 2 calls: there is no point after 3"),
        (1, 2, "has 2 tokens: a point inside it is 0 to 1"),
        (2, 1, "has 1 tokens"),
        (-1, 0, "no point after -1"),
    ],
)
async def test_points_that_are_not_there(calls: int, token: int, message: str) -> None:
    async with gateway_of(StubEngine(["a", "b"])) as gateway:
        trace = await two_calls(gateway)
        with pytest.raises(TunerError, match=message):
            Script(trace, calls, token)


def test_calls_without_tokens_cannot_be_given_back() -> None:
    call = Call(
        id="c-0",
        prompt_ids=(1,),
        completion_ids=ids_of("a"),
        logprobs=(float("nan"),),
        versions=(0,),
        sampling=SamplingParams(max_tokens=1),
        finish_reason="stop",
        messages=[],
        tools=[],
        response={},
        started=0.0,
        seconds=0.0,
    )
    with pytest.raises(TunerError, match="call 1 of train-1-0-0 cannot be replayed"):
        Script(recorded([call]))


def test_differences_are_short_and_begin_where_texts_part() -> None:
    old = [{"role": "user", "content": "x" * 1000 + " it is 10:41"}]
    new = [{"role": "user", "content": "x" * 1000 + " it is 10:42 now"}]
    found = difference(new, old)
    assert len(found) < 200
    assert "10:42" in found
    assert "10:41" in found
    assert difference([*old, *new], old) == "the request has 2 messages and had 1"
