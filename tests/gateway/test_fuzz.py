"""Thousands of wrong requests over every route: none breaks the gateway, and no token is lost."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import json
import operator
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tests.engines.models import until
from tests.gateway.fuzzing import BODIES, body_of
from tests.gateway.test_recording_property import Ledger
from tests.kit.examples import few
from tests.kit.toy import StubEngine, gateway_of, tokenizer
from tuner.engines.base import Generation, SamplingParams, TokenSink
from tuner.engines.grammar import Grammars
from tuner.gateway import Gateway, Session
from tuner.gateway.app import EXCHANGES, StreamReply
from tuner.gateway.service import Reply
from tuner.traces import Outcome, RolloutId, Trace
from tuner.traces.store import TRACES, trace_line, trace_to_json

ROUTES = (*EXCHANGES, "/v1/messages/count_tokens")
GRAMMARS = Grammars(tokenizer(), [tokenizer().eos_token_id])
IN_PROCESS, OVER_HTTP = few(9_600), 500  # bodies
AT_ONCE = 4  # clients of one session
EACH = 20  # bodies that one client sends
SECONDS = 30  # for one body; it takes milliseconds


@dataclass
class Watched(Ledger):
    """Knows how many generations are running, and compiles their grammars."""

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        session: str,
        sink: TokenSink | None = None,
    ) -> Generation:
        self.sampling += 1
        try:
            if sampling.grammar:
                GRAMMARS.start(sampling.grammar)  # refuses what the real engine refuses
            return await super().generate(prompt_ids, sampling, session, sink)
        finally:
            self.sampling -= 1


@dataclass
class Client:
    """Sends one wrong request after the other, and checks what comes back."""

    gateway: Gateway
    session: Session
    path: str
    rng: random.Random
    http: httpx.AsyncClient | None = None
    known: list[str] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)

    async def send(self) -> None:
        body = body_of(self.path, self.rng, self.known)
        headers = self.headers()
        ask = self.over_http if self.http else self.in_process
        try:
            async with asyncio.timeout(SECONDS):
                if self.rng.random() < 0.05:
                    await self.impatient(ask(body, headers))
                else:
                    await ask(body, headers)
        except Exception as error:
            error.add_note(f"{self.path} {headers} {body[:3000]!r}")
            raise
        assert self.session.errors == [], (self.path, headers, body[:3000])

    def headers(self) -> dict[str, str]:
        rng = self.rng
        key = rng.choice(
            [self.session.key] * 18 + [f"{self.session.key}.a", f"{self.session.key}.?!"]
        )
        headers = {"authorization": f"Bearer {key}"}
        if rng.random() < 0.1:
            headers = rng.choice(({"x-api-key": key}, {"authorization": key}, {}))
        if rng.random() < 0.15:
            headers["idempotency-key"] = rng.choice(("a", "b", "c", "", "\xff", "x" * 5000))
        return headers

    async def impatient(self, asking: Any) -> None:
        asked = asyncio.ensure_future(asking)
        for _ in range(self.rng.randint(0, 30)):
            await asyncio.sleep(0)
        asked.cancel()
        await asyncio.wait({asked})
        if not asked.cancelled():
            asked.result()

    async def in_process(self, body: bytes, headers: dict[str, str]) -> None:
        method, path = self.place()
        reply = await self.gateway.handle(method, path, headers, body)
        if isinstance(reply, StreamReply):
            await self.read(reply.events, whole=reply.events.aclose)
            return
        if reply.content_type == "application/json":
            self.check(reply.status, reply.body)

    async def over_http(self, body: bytes, headers: dict[str, str]) -> None:
        assert self.http is not None
        method, path = self.place()
        raw = {name: value.encode("latin-1") for name, value in headers.items()}
        async with self.http.stream(method, path, content=body, headers=raw) as response:
            if response.headers["content-type"].startswith("text/event-stream"):
                await self.read(response.aiter_bytes(), whole=response.aclose)
            else:
                self.check(response.status_code, await response.aread())

    def place(self) -> tuple[str, str]:
        if self.rng.random() < 0.98:
            return "POST", self.path
        return self.rng.choice(
            (
                ("GET", self.path),
                ("POST", f"{self.path}/x"),
                ("PUT", self.path),
                ("GET", "/v1/models"),
            )
        )

    async def read(self, events: AsyncIterator[bytes], *, whole: Any) -> None:
        """Some of a stream's events, or all."""
        left = self.rng.choice((None, None, 0, 1, 3))
        try:
            data = b""
            while left is None or left > 0:
                event = await anext(events, None)
                if event is None:
                    break
                data += event
                left = None if left is None else left - 1
        finally:
            await whole()
        self.statuses[200] += 1
        if left is None:
            for block in data.decode().strip().split("\n\n"):
                payload = block.split("data: ", 1)[1]
                if payload != "[DONE]":
                    strict(payload.encode())

    def check(self, status: int, body: bytes) -> None:
        assert status in (200, 400, 401, 404), (status, body)
        answer = strict(body)
        self.statuses[status] += 1
        if status != 200:
            assert answer["error"]["message"]
        elif answer.get("object") == "response":
            self.known.append(answer["id"])


def strict(data: bytes) -> Any:
    """What JSON says that every client can read: no half surrogate pairs, no NaN."""
    value = json.loads(data, parse_constant=_no_constant)
    json.dumps(value, ensure_ascii=False).encode()
    return value


def _no_constant(name: str) -> Any:
    raise AssertionError(f"{name} is no JSON")


def test_every_route_has_bodies_to_start_from() -> None:
    assert set(ROUTES) == set(BODIES)


@pytest.mark.parametrize("path", ROUTES)
async def test_no_wrong_request_breaks_the_gateway_or_loses_a_token(path: str) -> None:
    sessions = IN_PROCESS // len(ROUTES) // (AT_ONCE * EACH)
    statuses = Counter[int]()
    for number in range(sessions):
        statuses += await let_loose(path, f"{path}-{number}")
    check_mixture(statuses)


@pytest.mark.parametrize("path", ROUTES)
async def test_no_wrong_request_breaks_the_http_door(path: str) -> None:
    each = OVER_HTTP // len(ROUTES) // AT_ONCE
    check_mixture(await let_loose(path, f"{path}-http", each=each, over_http=True))


async def let_loose(
    path: str, seed: str, *, each: int = EACH, over_http: bool = False
) -> Counter[int]:
    """Several clients on one session at once; how often each status came."""
    troubles: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, trouble: troubles.append(trouble))
    tasks = asyncio.all_tasks()
    engine = Watched(max_model_len=100_000, grammars=True)
    async with gateway_of(engine) as gateway, contextlib.AsyncExitStack() as stack:
        session = gateway.open_session(seed, seed=1)
        http = None
        if over_http:
            url = gateway.base_url.removesuffix("/v1")
            http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=SECONDS))
        clients = [
            Client(gateway, session, path, random.Random(f"{seed}-{i}"), http)
            for i in range(AT_ONCE)
        ]
        await asyncio.gather(*(use(client, each) for client in clients))
        # What was cancelled ends a moment later; the server hears later of a client that has gone.
        await until(
            lambda: not (session.recording.carried or session.in_flight.tasks or engine.sampling)
        )
        assert_nothing_in_flight(engine, gateway, session)
        check_tokens(engine, session)
    # httpx ends a moment later what a client left.
    await until(lambda: asyncio.all_tasks() == tasks)
    assert not gateway._sessions
    assert troubles == []
    return sum((client.statuses for client in clients), Counter[int]())


async def use(client: Client, bodies: int) -> None:
    for _ in range(bodies):
        await client.send()


def assert_nothing_in_flight(engine: Watched, gateway: Gateway, session: Session) -> None:
    assert engine.sampling == engine.waiting == 0
    assert session.recording.carried == []
    assert not session.in_flight.tasks
    assert all(replay.done.is_set() for replay in gateway._sessions[session.key].replays.values())


def check_tokens(engine: Watched, session: Session) -> None:
    sampled = Counter((prompt, tuple(ids)) for _, prompt, ids in engine.sampled if ids)
    calls = session.calls
    assert Counter((call.prompt_ids, call.completion_ids) for call in calls) == sampled
    assert all(call.invalid is None for call in calls)
    assert len({call.id for call in calls}) == len(calls)


def check_mixture(statuses: Counter[int]) -> None:
    """Bodies that are all refused at the door would test the door alone."""
    total = statuses.total()
    assert statuses[200] > total / 8
    assert statuses[400] > total / 4


def leaves(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The place of every text in a JSON value."""
    if isinstance(node, str):
        yield path
    elif isinstance(node, dict | list):
        for key, item in node.items() if isinstance(node, dict) else enumerate(node):
            yield from leaves(item, (*path, key))


def with_text(body: Any, path: tuple[Any, ...], text: str) -> Any:
    body = copy.deepcopy(body)
    functools.reduce(operator.getitem, path[:-1], body)[path[-1]] = text
    return body


@pytest.mark.parametrize("path", ROUTES)
async def test_half_a_surrogate_pair_in_any_field_is_answered_like_its_replacement(
    path: str,
) -> None:
    engine = Watched(max_model_len=100_000, grammars=True)
    async with gateway_of(engine) as gateway:
        for body in [{"model": "tiny", **body} for body in BODIES[path]]:
            for place in leaves(body):
                seen = []
                for text in ("a\ud83d \udc00\udc00b", "a\ufffd \ufffd\ufffdb"):
                    session = gateway.open_session("r", seed=1)
                    headers = {"authorization": f"Bearer {session.key}"}
                    sent = json.dumps(with_text(body, place, text)).encode()
                    reply = await gateway.handle("POST", path, headers, sent)
                    assert isinstance(reply, Reply)
                    strict(reply.body)
                    assert reply.status in (200, 400, 404), (place, reply.body)
                    assert session.errors == []
                    for call in session.calls:
                        trace = Trace(RolloutId(0, 0, 0), {}, (call,), Outcome.COMPLETED, None)
                        assert TRACES.parse(trace_line(trace_to_json(trace))) == trace
                    seen.append((reply.status, [call.prompt_ids for call in session.calls]))
                assert seen[0] == seen[1], place


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
async def test_a_sampled_half_of_a_pair_is_no_obstacle_to_the_next_turn(path: str) -> None:
    sampled = '<tool_call>\n{"name": "add", "arguments": {"a": "\\ud83d"}}\n</tool_call>'
    user: Any = {"role": "user", "content": "hi"}
    engine = StubEngine([sampled], grammars=True)
    key = "input" if path == "/v1/responses" else "messages"
    (tool,) = next(
        body["tools"] for body in BODIES[path] if "tools" in body and len(body["tools"]) == 1
    )
    async with gateway_of(engine, tool_call_parser="hermes") as gateway:
        session = gateway.open_session("r", seed=1)

        async def turn(messages: list[Any]) -> Any:
            body = {"model": "tiny", key: messages, "tools": [tool], "max_tokens": 90}
            body |= {"max_output_tokens": body.pop("max_tokens")} if key == "input" else {}
            headers = {"authorization": f"Bearer {session.key}"}
            reply = await gateway.handle("POST", path, headers, json.dumps(body).encode())
            assert isinstance(reply, Reply)
            assert reply.status == 200, reply.body
            return strict(reply.body)

        answer = await turn([user])
        if path == "/v1/chat/completions":
            said = answer["choices"][0]["message"]
            result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"]}
            following = [said, {**result, "content": "\ud83d"}]
        elif path == "/v1/responses":
            (call,) = answer["output"]
            result = {"type": "function_call_output", "call_id": call["call_id"]}
            following = [call, {**result, "output": "\ud83d"}]
        else:
            (use,) = answer["content"]
            assert use["input"] == {"a": "\ufffd"}
            result = {"type": "tool_result", "tool_use_id": use["id"], "content": "\ud83d"}
            turn_of = {"role": "assistant", "content": [use]}
            following = [turn_of, {"role": "user", "content": [result]}]
        await turn([user, *following])
        first, second = session.calls
        whole = first.prompt_ids + first.completion_ids
        assert second.prompt_ids[: len(whole)] == whole
        assert second.rerendered is None
        assert "\ud83d" in second.messages[-1]["content"]
        assert "\ufffd" in tokenizer().decode(second.prompt_ids[len(whole) :])
