"""Long requests: refused by their length, or worked on beside the event loop; in order."""

from __future__ import annotations

import asyncio
import copy
import json
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.engines.models import until
from tests.kit.toy import StubEngine, text_of, tokenizer
from tuner.gateway import ChatRenderer, Gateway, Session
from tuner.gateway.dialects.text import complete_tokens
from tuner.gateway.families import values as grammar_rules
from tuner.gateway.request_error import RequestError
from tuner.gateway.service import Reply

LONG = "a long text. " * 1500  # 19,500 characters, and as many tokens
HUGE = "a" * 4 * 2**20
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
COUNT = "/v1/messages/count_tokens"


class Held:
    """A function of which calls with a long text are held until they are let go."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.begun = 0
        self.lengths: list[int] = []
        self.threads: list[threading.Thread] = []
        self.let_go = threading.Event()

    def __call__(self, text: Any, *args: Any, **kwargs: Any) -> Any:
        self.lengths.append(len(text))
        self.threads.append(threading.current_thread())
        if len(text) >= len(LONG):
            self.begun += 1
            if threading.current_thread() is threading.main_thread():
                raise RuntimeError("the event loop itself works on a long text")
            if not self.let_go.wait(60):
                raise TimeoutError("nothing else was done while a long text was worked on")
        return self._function(text, *args, **kwargs)


@asynccontextmanager
async def holding(**engine: Any) -> AsyncIterator[tuple[Gateway, Held]]:
    """A gateway with room for long prompts, and its tokenizer's `encode`."""
    spoken = copy.deepcopy(tokenizer())
    held = spoken.encode = Held(spoken.encode)
    renderer = ChatRenderer(spoken)
    gateway = Gateway(StubEngine(**{"max_model_len": 10**6, **engine}), renderer, model_name="tiny")
    held.lengths.clear()
    held.threads.clear()
    try:
        yield gateway, held
    finally:
        held.let_go.set()
        await gateway.aclose()


async def post(session: Session, path: str = CHAT, text: str = "hi", **fields: Any) -> Reply:
    said: dict[str, Any] = {"messages": [{"role": "user", "content": text}]}
    if path == TEXT:
        said = {"prompt": text}
    body = json.dumps({"model": "tiny", **said, **fields}).encode()
    headers = {"authorization": f"Bearer {session.key}"}
    reply = await session.host.handle("POST", path, headers, body)
    assert isinstance(reply, Reply)
    return reply


def asked(gateway: Gateway) -> list[int]:
    """Lengths of the prompts that reached the engine."""
    return [len(prompt) for prompt, _, _ in gateway.engine.requests]


@pytest.mark.parametrize("path", [CHAT, TEXT, COUNT])
async def test_others_are_answered_while_a_long_text_is_tokenised(path: str) -> None:
    async with holding() as (gateway, held):
        one, other = gateway.open_session("one"), gateway.open_session("other")
        long = asyncio.ensure_future(post(one, path, LONG))
        await until(lambda: held.begun == 1 or long.done())
        assert (await post(other)).status == 200
        assert not long.done()
        held.let_go.set()
        reply = await long
        assert reply.status == 200, reply.body
        tokens = json.loads(reply.body).get("input_tokens")
        assert (one.calls == ()) if path == COUNT else (LONG in text_of(one.calls[0].prompt_ids))
        assert tokens is None or tokens > len(LONG)


async def test_others_are_answered_while_a_large_schema_is_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = Held(grammar_rules._schema_problem)
    monkeypatch.setattr(grammar_rules, "_schema_problem", held)
    properties = {f"field_{i}": {"type": "string"} for i in range(3000)}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    async with holding(grammars=True) as (gateway, _):
        one, other = gateway.open_session("one"), gateway.open_session("other")
        large = asyncio.ensure_future(post(one, response_format=wanted))
        await until(lambda: held.begun == 1 or large.done())
        assert (await post(other)).status == 200
        assert not large.done()
        held.let_go.set()
        assert (await large).status == 200
        assert "field_2999" in one.calls[0].sampling.grammar


async def test_requests_of_a_session_begin_in_the_order_in_which_they_come() -> None:
    texts = [LONG, "hi", LONG, LONG + "!", "hi"]
    async with holding() as (gateway, held):
        one, other = gateway.open_session("r"), gateway.open_session("other")
        work = [asyncio.ensure_future(post(one, text=text)) for text in texts]
        await until(lambda: held.begun == 1 or any(task.done() for task in work))
        await post(other)
        assert len(asked(gateway)) == 1
        held.let_go.set()
        await asyncio.gather(*work)
        together = asked(gateway)[1:]
        again = gateway.open_session("r")
        for text in texts:
            await post(again, text=text)
        assert together == asked(gateway)[1 + len(texts) :]
        # Ids and seeds count equal prompts in their order.
        drawn = [
            sorted((call.id, call.sampling.seed) for call in session.calls)
            for session in (one, again)
        ]
        assert drawn[0] == drawn[1]


async def test_a_request_cancelled_while_its_prompt_is_tokenised_leaves_nothing() -> None:
    async with holding() as (gateway, held):
        one, other = gateway.open_session("r"), gateway.open_session("other")
        gone = asyncio.ensure_future(post(one, text=LONG))
        await until(lambda: held.begun == 1 or gone.done())
        later = [asyncio.ensure_future(post(one, text=text)) for text in ("hi", LONG)]
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        await post(other)
        assert len(asked(gateway)) == 1  # the work goes on, and has the session's turn
        held.let_go.set()
        assert [reply.status for reply in await asyncio.gather(*later)] == [200, 200]
        assert len(one.calls) == 2
        again = gateway.open_session("r")
        assert (await post(again, text="hi")).status == 200
        assert (await post(again, text=LONG)).status == 200
        assert [call.id for call in again.calls] == [call.id for call in one.calls]


async def test_a_request_cancelled_before_its_turn_does_not_stop_the_next() -> None:
    async with holding() as (gateway, held):
        one = gateway.open_session("r")
        first = asyncio.ensure_future(post(one, text=LONG))
        await until(lambda: held.begun == 1 or first.done())
        gone, last = (asyncio.ensure_future(post(one, text=text)) for text in ("no", "hi"))
        await asyncio.sleep(0)
        gone.cancel()
        held.let_go.set()
        assert [(await first).status, (await last).status] == [200, 200]
        assert gone.cancelled()
        assert len(one.calls) == 2


async def test_a_session_sealed_while_a_prompt_is_tokenised_samples_nothing() -> None:
    async with holding() as (gateway, held):
        session = gateway.open_session("r")
        work = [asyncio.ensure_future(post(session, text=text)) for text in (LONG, LONG + "!")]
        await until(lambda: held.begun == 1 or work[0].done())
        assert session.seal() == ()
        held.let_go.set()
        for reply in await asyncio.gather(*work):
            assert reply.status == 409
            assert b"has ended" in reply.body
        assert asked(gateway) == []
        assert held.begun == 1  # what comes after the seal is not worked on


async def test_a_short_request_is_worked_on_at_once() -> None:
    async with holding() as (gateway, held):
        session = gateway.open_session("r")
        await post(session)
        assert held.threads == [threading.main_thread()]


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_a_text_too_long_by_its_bytes_is_refused_without_being_tokenised(path: str) -> None:
    async with holding(max_model_len=4096) as (gateway, held):
        held.let_go.set()
        session = gateway.open_session("r")
        reply = await post(session, path, HUGE)
        assert reply.status == 400
        error = json.loads(reply.body)["error"]
        assert error["code"] == "context_length_exceeded"
        assert "has at least" in error["message"]
        assert "within the context of 4096: raise model.max_model_len or" in error["message"]
        assert held.lengths == []


async def test_what_is_added_to_a_conversation_is_refused_likewise() -> None:
    async with holding(max_model_len=4096) as (gateway, held):
        held.let_go.set()
        session = gateway.open_session("r")
        client = session.async_client()
        history: list[Any] = [{"role": "user", "content": "hi"}]
        answer = await client.chat.completions.create(model="tiny", messages=history)
        history.append({"role": "assistant", "content": answer.choices[0].message.content})
        history.append({"role": "user", "content": HUGE})
        reply = await post(session, messages=history)
        assert (reply.status, b"has at least" in reply.body) == (400, True)
        assert max(held.lengths) < 1000
        history[-1] = {"role": "user", "content": "and?"}
        await client.chat.completions.create(model="tiny", messages=history)
        assert session.calls[1].reused_ids > 0


async def test_token_ids_too_many_for_the_context_are_not_decoded() -> None:
    async with holding(max_model_len=4096) as (gateway, _):
        spoken, decoded = gateway.renderer.tokenizer, []
        decode = spoken.decode
        spoken.decode = lambda ids, **kwargs: decoded.append(len(ids)) or decode(ids, **kwargs)
        session = gateway.open_session("r")
        assert (await post(session, TEXT, prompt=[65] * 4096)).status == 400
        with pytest.raises(RequestError, match="4096 tokens, which leaves no room"):
            await complete_tokens(session, [65] * 4096)
        assert decoded == []
        assert (await post(session, TEXT, prompt=[65] * 4000)).status == 200
        assert decoded[0] == 4000
