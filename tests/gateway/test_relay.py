"""A model elsewhere behind the gateway's doors: handed on as it is, and recorded. Real HTTP."""

import json

import openai
import pytest

from tests.kit.builders import trace
from tests.kit.chat_server import Refusal, chat_server
from tuner.gateway import SessionLimits
from tuner.gateway.relay import ELSEWHERE, Relay
from tuner.rollouts.chat_models import chat_model
from tuner.traces import Usage
from tuner.traces.store import trace_from_json, trace_to_json

MESSAGES = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hi"}]


def relay(server, **client):
    return Relay(openai.AsyncOpenAI(base_url=server.base_url, api_key="k-elsewhere", **client), "m")


async def test_an_answer_is_handed_on_and_recorded_with_what_was_billed():
    with chat_server(lambda body: "two words") as server:
        gateway = relay(server)
        session = gateway.open_session("r")
        model = chat_model(session, kind="plain").role("writer")
        answer = await model(MESSAGES, temperature=0.3, max_tokens=9)
        calls = session.seal()
        await gateway.aclose()
    assert answer.content == "two words"
    (sent,) = server.requests
    assert sent["messages"] == MESSAGES
    assert (sent["temperature"], sent["max_tokens"]) == (0.3, 9)
    assert sent["headers"]["authorization"] == "Bearer k-elsewhere"
    (call,) = calls
    assert (call.messages, call.response["content"], call.role) == (MESSAGES, "two words", "writer")
    assert call.usage == Usage(7, 2)
    assert call.invalid == ELSEWHERE
    kept = trace(0, 0, [call])
    assert trace_from_json(json.loads(json.dumps(trace_to_json(kept)))) == kept


async def test_a_signed_url_of_an_image_is_handed_on_and_recorded_without_its_signature():
    def asked(*urls):
        images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        return [{"role": "user", "content": [{"type": "text", "text": "?"}, *images]}]

    data = "data:image/png;base64,AA=="
    sent = asked("https://me:pw@host/a.png?sig=secret#x", "https://host/b@1.png", data)
    with chat_server(lambda body: "a cat") as server:
        gateway = relay(server)
        session = gateway.open_session("r")
        await session.async_client().chat.completions.create(model="m", messages=sent)
        (call,) = session.seal()
        await gateway.aclose()
    assert server.requests[0]["messages"] == sent
    assert call.messages == asked("https://host/a.png?<redacted>", "https://host/b@1.png", data)


@pytest.mark.parametrize("usage", [False, True])
async def test_a_stream_is_handed_on_as_it_comes_and_recorded_whole(usage):
    options = {"stream_options": {"include_usage": True}} if usage else {}
    with chat_server(lambda body: "some words in pieces") as server:
        gateway = relay(server)
        session = gateway.open_session("r")
        client = openai.AsyncOpenAI(base_url=session.base_url, api_key=session.key, max_retries=0)
        stream = await client.chat.completions.create(
            model="m", messages=MESSAGES, stream=True, **options
        )
        chunks = [chunk async for chunk in stream]
        (call,) = session.seal()
        await client.close()
        await gateway.aclose()
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == call.response["content"] == "some words in pieces"
    assert any(chunk.usage for chunk in chunks) == usage
    assert call.usage == Usage(7, 4)
    assert call.streamed


async def test_a_stream_that_is_left_is_recorded_as_undelivered():
    with chat_server(lambda body: "some words in pieces") as server:
        gateway = relay(server)
        session = gateway.open_session("r")
        stream = await session.async_client().chat.completions.create(
            model="m", messages=MESSAGES, stream=True
        )
        await anext(aiter(stream))
        (call,) = session.seal()
        await stream.close()
        await gateway.aclose()
    assert call.undelivered


async def test_what_the_api_says_is_said_by_name():
    def refuse(body):
        raise Refusal(400, "no such voice")

    with chat_server(refuse) as server:
        gateway = relay(server, max_retries=0)
        session = gateway.open_session("r")
        with pytest.raises(openai.BadRequestError, match=f"{server.base_url}.*no such voice"):
            await chat_model(session, kind="plain")(MESSAGES)
        assert session.seal() == ()
        await gateway.aclose()


async def test_a_url_where_nobody_is_gives_an_error_that_names_it():
    gateway = Relay(
        openai.AsyncOpenAI(base_url="http://127.0.0.1:9/v1", api_key="k", max_retries=0), "m"
    )
    session = gateway.open_session("r")
    with pytest.raises(openai.InternalServerError, match=r"127\.0\.0\.1:9"):
        await chat_model(session, kind="plain")(MESSAGES)
    await gateway.aclose()


async def test_limits_hold_for_what_is_handed_on():
    with chat_server(lambda body: "one two three") as server:
        gateway = relay(server)
        session = gateway.open_session("r", limits=SessionLimits(tokens=3))
        model = chat_model(session, kind="plain")
        await model(MESSAGES)
        with pytest.raises(openai.PermissionDeniedError, match="may sample 3"):
            await model(MESSAGES)
        session.seal()
        with pytest.raises(openai.ConflictError, match="has ended"):
            await model(MESSAGES)
        await gateway.aclose()


async def test_what_is_not_handed_on_is_refused_by_name():
    with chat_server(lambda body: "x") as server:
        gateway = relay(server)
        client = gateway.open_session("r").async_client()
        with pytest.raises(openai.NotFoundError, match="v1/responses"):
            await client.responses.create(model="m", input="hi")
        with pytest.raises(openai.NotFoundError, match="this key's model is 'm'"):
            await client.chat.completions.create(model="other", messages=MESSAGES)
        await gateway.aclose()
    nobody = Relay(None, "none")
    with pytest.raises(openai.NotFoundError, match="brings its own model"):
        await chat_model(nobody.open_session("r"), kind="plain")(MESSAGES)
