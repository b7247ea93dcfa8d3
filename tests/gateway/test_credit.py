"""Roles, rewards of single calls, exclusions, and limits of a rollout."""

from __future__ import annotations

from typing import Any, cast

import httpx
import openai
import pytest

from tests.kit.toy import StubEngine, gateway_of, ids_of
from tuner.errors import TunerError
from tuner.gateway import Roles, Session, SessionLimits
from tuner.rollouts.chat_models import PlainChatModel

USER: list[Any] = [{"role": "user", "content": "hi"}]


async def ask(session: Session, **fields: Any) -> Any:
    client = session.async_client()
    return await client.chat.completions.create(model="tiny", messages=USER, **fields)


async def test_a_role_names_the_calls_of_one_agent_in_process_and_over_http() -> None:
    async with gateway_of(StubEngine(["a", "b", "c"])) as gateway:
        model = PlainChatModel(gateway.open_session("r"))
        planner = model.role("planner")
        await planner(USER)
        async with openai.AsyncOpenAI(base_url=planner.base_url, api_key=planner.api_key) as client:
            await client.chat.completions.create(model="tiny", messages=USER)
        await model(USER)
        assert [call.role for call in model.calls] == ["planner", "planner", None]
        assert [call.response["content"] for call in planner.calls] == ["a", "b"]


ROLES = {"writer": "<writer>", "critic": "<critic>", "judge": None}


async def test_a_role_chooses_the_adapter_by_its_key_or_as_the_model_of_a_request() -> None:
    """In each dialect; the call is recorded under the role in either case."""
    engine = StubEngine(["x"])
    async with gateway_of(engine, Roles({**ROLES, "default": "<other>"})) as gateway:
        model = PlainChatModel(gateway.open_session("r"))
        for role in ("writer", "judge", "someone"):
            await model.role(role)(USER)
        await model(USER)
        client, claude = model.client, model.anthropic_client
        of_critic: dict[str, Any] = {"model": "critic"}
        await client.chat.completions.create(messages=USER, **of_critic)
        streamed = await client.chat.completions.create(messages=USER, stream=True, **of_critic)
        assert [chunk async for chunk in streamed]
        await client.completions.create(prompt="hi", **of_critic)
        await client.responses.create(input="hi", **of_critic)
        await claude.messages.create(messages=USER, max_tokens=9, **of_critic)
        assert engine.adapters == ["<writer>", None, "<other>", "<other>", *["<critic>"] * 5]
        named = ["writer", "judge", "someone", None, *["critic"] * 5]
        assert [call.role for call in model.calls] == named
        listed = [one.id async for one in client.models.list()]
        assert listed == ["tiny", "writer", "critic", "judge", "default"]


async def test_a_call_without_an_adapter_is_refused_and_the_roles_are_named() -> None:
    engine = StubEngine(["x"])
    async with gateway_of(engine, Roles(ROLES)) as gateway:
        session = gateway.open_session("r")
        model = PlainChatModel(session)
        both = model.role("writer").client.chat.completions.create(messages=USER, model="critic")
        for work, text in (
            (model(USER), "the call names no role: model.adapters has writer, critic, judge"),
            (model.role("editor")(USER), "role 'editor' has no adapter: model.adapters has writer"),
            (both, "model is 'critic', but the API key is that of role 'writer'"),
        ):
            with pytest.raises(openai.BadRequestError, match=text):
                await work
        assert engine.adapters == []
        assert session.calls == ()


@pytest.mark.parametrize("name", ["", "a b", "a.b", "x" * 65, "ä"])
async def test_a_role_must_be_a_name(name: str) -> None:
    async with gateway_of(StubEngine()) as gateway:
        with pytest.raises(ValueError, match="must be 1 to 64"):
            PlainChatModel(gateway.open_session("r")).role(name)


async def test_a_role_that_is_no_name_is_no_key() -> None:
    async with gateway_of(StubEngine()) as gateway:
        session = gateway.open_session("r")
        async with httpx.AsyncClient() as client:
            headers = {"authorization": f"Bearer {session.key}.a b"}
            answer = await client.get(f"{session.base_url}/models", headers=headers)
        assert answer.status_code == 401


async def test_rewards_and_exclusions_are_in_the_trace() -> None:
    async with gateway_of(StubEngine(["a", "b", "c"])) as gateway:
        session = gateway.open_session("r")
        model = PlainChatModel(session)
        for _ in range(3):
            await model(USER)
        model.calls[-1].reward = 1
        model.calls[0].exclude()
        assert model.calls[-1].reward == 1.0
        calls = session.seal()
        assert [call.reward for call in calls] == [None, None, 1.0]
        assert [call.excluded for call in calls] == [True, False, False]


async def test_a_reward_can_be_taken_back() -> None:
    async with gateway_of(StubEngine()) as gateway:
        session = gateway.open_session("r")
        model = PlainChatModel(session)
        await model(USER)
        model.calls[0].reward = 0.5
        model.calls[0].reward = None
        assert session.seal()[0].reward is None


async def test_the_state_of_a_call_is_a_text_and_of_a_long_one_its_digest() -> None:
    async with gateway_of(StubEngine(["a", "b", "c", "d"])) as gateway:
        session = gateway.open_session("r")
        model = PlainChatModel(session)
        for text in ("room 3", "x" * 65, "\ud800" * 70, None):
            await model(USER)
            model.calls[-1].state = text
        with pytest.raises(TypeError, match=r"state of call .* is 3: give a text"):
            model.calls[-1].state = cast(Any, 3)
        states = [call.state for call in session.seal()]
    assert (states[0], states[3]) == ("room 3", None)
    assert [len(state or "") for state in states[1:3]] == [64, 64]
    assert states[1] != states[2]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
async def test_a_reward_must_be_finite(value: float) -> None:
    async with gateway_of(StubEngine()) as gateway:
        model = PlainChatModel(gateway.open_session("r"))
        await model(USER)
        with pytest.raises(ValueError, match="finite"):
            model.calls[0].reward = value


async def test_credit_comes_too_late_after_the_rollout() -> None:
    async with gateway_of(StubEngine()) as gateway:
        session = gateway.open_session("r")
        model = PlainChatModel(session)
        await model(USER)
        (call,) = model.calls
        session.seal()
        with pytest.raises(TunerError, match="has ended"):
            call.reward = 1.0
        with pytest.raises(TunerError, match="has ended"):
            call.exclude()


async def test_a_rollout_may_ask_for_no_more_than_its_calls() -> None:
    engine = StubEngine()
    async with gateway_of(engine) as gateway:
        session = gateway.open_session("r", limits=SessionLimits(calls=3))
        await ask(session, n=2)
        with pytest.raises(openai.PermissionDeniedError, match=r"asked for 2 .*max_calls"):
            await ask(session, n=2)
        await ask(session)
        with pytest.raises(openai.PermissionDeniedError, match=r"asked for 3"):
            await ask(session)
        assert len(session.calls) == len(engine.requests) == 3


async def test_a_request_that_is_refused_does_not_count() -> None:
    async with gateway_of(StubEngine(max_model_len=300)) as gateway:
        session = gateway.open_session("r", limits=SessionLimits(calls=1))
        with pytest.raises(openai.BadRequestError, match="no room"):
            await session.async_client().completions.create(model="tiny", prompt="x" * 400)
        await ask(session)


async def test_a_rollout_samples_no_more_than_its_tokens() -> None:
    async with gateway_of(StubEngine(["abcdef"])) as gateway:
        session = gateway.open_session("r", limits=SessionLimits(tokens=10))
        first = await ask(session)
        second = await ask(session)
        assert first.choices[0].finish_reason == "stop"
        assert second.choices[0].finish_reason == "length"
        assert [len(call.completion_ids) for call in session.calls] == [7, 3]
        assert session.calls[1].completion_ids == ids_of("abc")
        with pytest.raises(openai.PermissionDeniedError, match=r"sampled 10 tokens .*max_tokens"):
            await ask(session)


async def test_masked_stretches_are_in_the_trace_and_what_cannot_be_masked_is_refused() -> None:
    async with gateway_of(StubEngine(["abcdef"])) as gateway:
        session = gateway.open_session("r")
        await ask(session)
        (call,) = session.recording.for_workflow()
        call.mask(0, 2)
        call.mask(4, 5)
        for start, stop in ((4, 6), (6, 6), (6, 9), (-1, 2)):
            with pytest.raises(ValueError, match="it has 7 tokens, and stretches are given in"):
                call.mask(start, stop)
        assert session.calls[0].masked == ((0, 2), (4, 5))
        assert session.calls[0].stretches == ((2, 4), (5, 7))
        session.seal()
        with pytest.raises(TunerError, match="has ended"):
            call.mask(5, 6)
