"""An API that answers 429: all rollouts wait as it says, and nothing is recorded twice."""

import asyncio
import time
from email.utils import formatdate

import openai
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from tuner.gateway.clients import http_library
from tuner.rollouts import patience
from tuner.rollouts.chat_models import remote_chat_model
from tuner.rollouts.patience import PatientClient

http = http_library(openai.DefaultAsyncHttpxClient)

ANSWER = {
    "id": "c",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [
        {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "ho"}}
    ],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}
MESSAGES = [{"role": "user", "content": "hi"}]


class Api:
    """A server on a loopback port that refuses its first requests."""

    def __init__(self, refusals, status=429, headers=None):
        self.refusals, self.status = refusals, status
        self.headers = {"retry-after": "0.05"} if headers is None else headers
        self.times = []

    async def answer(self, request):
        self.times.append(time.monotonic())
        if len(self.times) <= self.refusals:
            return JSONResponse({"error": "slower"}, self.status, headers=self.headers)
        return JSONResponse(ANSWER)

    async def __aenter__(self):
        app = Starlette(routes=[Route("/v1/chat/completions", self.answer, methods=["POST"])])
        self.server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
        self.task = asyncio.ensure_future(self.server.serve())
        while not self.server.started:  # noqa: ASYNC110  # uvicorn has no event for this
            await asyncio.sleep(0.001)
        port = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}/v1"
        return self

    async def __aexit__(self, *error):
        self.server.should_exit = True
        await self.task


def model(api, **options):
    return remote_chat_model(base_url=api.url, api_key="k", model_name="m", kind="plain", **options)


async def ask(remote):
    completion = await remote.client.chat.completions.create(model="m", messages=MESSAGES)
    return completion.choices[0].message.content


async def test_a_refused_request_is_sent_again_when_the_api_allows_it():
    async with Api(refusals=2) as api:
        assert await ask(model(api)) == "ho"
    assert len(api.times) == 3
    assert min(b - a for a, b in zip(api.times, api.times[1:], strict=False)) >= 0.05


async def test_while_one_is_refused_no_other_rollout_asks(monkeypatch):
    refused, asked_to_wait = asyncio.Event(), patience._asked_to_wait

    def seen(response, number):
        wait = asked_to_wait(response, number)
        if wait is not None:
            refused.set()
        return wait

    monkeypatch.setattr(patience, "_asked_to_wait", seen)
    async with Api(refusals=1, headers={"retry-after-ms": "80"}) as api:
        remote = model(api)
        first = asyncio.ensure_future(ask(remote))
        await refused.wait()
        others = [asyncio.ensure_future(ask(remote)) for _ in range(3)]
        await asyncio.gather(first, *others)
    assert len(api.times) == 5
    assert min(api.times[1:]) - api.times[0] >= 0.08


async def test_no_more_requests_than_allowed_are_in_flight():
    started, answered = [], asyncio.Semaphore(0)

    async def answer(request):
        started.append(request)
        await answered.acquire()
        return http.Response(200)

    client = PatientClient(max_concurrent=2, transport=http.MockTransport(answer))
    requests = [asyncio.ensure_future(client.post("http://api/v1")) for _ in range(8)]
    for ended in range(8):
        for _ in range(100):  # whoever may begin has begun
            await asyncio.sleep(0)
        assert len(started) == min(ended + 2, 8)
        answered.release()
    await asyncio.gather(*requests)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "3"}, 3),
        ({"retry-after-ms": "250"}, 0.25),
        ({"retry-after": "soon"}, 2.0),
        ({}, 2.0),
    ],
)
def test_the_wait_is_what_the_api_says_or_doubles(headers, seconds):
    assert patience._asked_to_wait(http.Response(429, headers=headers), 3) == seconds


def test_the_wait_may_be_until_a_date():
    date = formatdate(time.time() + 300, usegmt=True)
    wait = patience._asked_to_wait(http.Response(429, headers={"retry-after": date}), 1)
    assert 200 < wait <= 300


def test_other_answers_are_passed_on():
    assert patience._asked_to_wait(http.Response(200), 1) is None
    assert patience._asked_to_wait(http.Response(503), 1) is None
    assert patience._asked_to_wait(http.Response(503, headers={"retry-after": "1"}), 1) == 1


async def test_an_api_that_never_gives_in_is_given_up():
    sent = []

    async def refuse(request):
        sent.append(request)
        return http.Response(429, headers={"retry-after": "0"})

    client = PatientClient(transport=http.MockTransport(refuse))
    response = await client.post("http://api/v1", json={})
    assert response.status_code == 429
    assert len(sent) == patience.TRIES


async def test_the_library_does_not_try_again_what_was_given_up(monkeypatch):
    monkeypatch.setattr(patience, "TRIES", 3)
    async with Api(refusals=100, headers={"retry-after": "0"}) as api:
        with pytest.raises(openai.RateLimitError):
            await ask(model(api))
    assert len(api.times) == 3
