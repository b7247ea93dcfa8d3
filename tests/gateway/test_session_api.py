"""A session over HTTP, as another process has it."""

import asyncio
import json
import resource
from pathlib import Path

import httpx
import pytest

from tests.kit.toy import StubEngine, gateway_of
from tuner.engines.base import EngineError
from tuner.errors import TunerError
from tuner.gateway.request_error import RequestError
from tuner.gateway.service import Reply
from tuner.gateway.session_api import RemoteDoor, RemoteSession, shared, value_of
from tuner.gateway.sessions import InFlight

USER = [{"role": "user", "content": "hi"}]


async def ask(session):
    client = session.async_client()
    await client.chat.completions.create(model=session.model_name, messages=USER)


async def in_a_thread(function):
    """What code gets that waits without awaiting; the gateway's event loop is this one."""
    return await asyncio.to_thread(function)


@pytest.mark.parametrize("by_port", [False, True])
async def test_calls_and_what_is_said_of_them_are_the_sessions(by_port):
    async with gateway_of(StubEngine(["one", "two"])) as gateway:
        session = gateway.open_session("r")
        with shared(session, gateway.base_url if by_port else None) as opened:
            remote = RemoteSession(opened)
            await ask(remote)
            (first,) = await in_a_thread(remote.calls_so_far)
            await ask(remote)
            calls = await in_a_thread(remote.calls_so_far)
            assert [call.call for call in calls] == [*session.calls]
            assert calls[0].call is first.call  # known, and not sent again

            def say():
                calls[0].reward = 0.5
                calls[0].state = "room 3"
                calls[1].mask(0, 1)
                calls[1].mask(1, 2)

            await in_a_thread(say)
            assert await in_a_thread(lambda: remote.base_url) == gateway.base_url
    assert [call.reward for call in session.calls] == [0.5, None]
    assert [call.state for call in session.calls] == ["room 3", None]
    assert session.calls[1].masked == ((0, 1), (1, 2))


async def test_a_tokenizer_that_was_exchanged_on_the_way_is_not_unpickled():
    async with gateway_of(StubEngine([])) as gateway:
        session = gateway.open_session("r")
        with shared(session, gateway.base_url) as opened:
            other = RemoteSession(opened._replace(tokenizer_digest="0" * 64))
            with pytest.raises(TunerError, match="is not the run's"):
                await in_a_thread(lambda: other.tokenizer)
            found = await in_a_thread(lambda: RemoteSession(opened).tokenizer)
            assert found.get_vocab() == session.tokenizer.get_vocab()


async def test_an_answer_that_names_a_function_as_error_calls_nothing():
    told = {"module": "builtins", "class": "exec", "message": "raise SystemExit"}
    reply = Reply(500, json.dumps({"error": told}).encode())
    with pytest.raises(RuntimeError, match="exec: raise SystemExit"):
        value_of(reply)


async def test_agents_cannot_reward_themselves_and_a_key_ends_with_its_rollout():
    async with gateway_of(StubEngine(["one"])) as gateway:
        session = gateway.open_session("r")
        await ask(session)
        said = {"call": session.calls[0].id, "what": "reward", "value": 9.0}

        async def credited(key):
            async with httpx.AsyncClient() as client:
                headers = {"authorization": f"Bearer {key}"} if key else {}
                url = f"{gateway.base_url}/session/credit"
                return (await client.post(url, json=said, headers=headers)).status_code

        with shared(session) as opened:
            assert await credited(session.key) == 401
            assert await credited("") == 401
            assert session.calls[0].reward is None
            assert await credited(opened.owner_key) == 200
        assert await credited(opened.owner_key) == 401
        with pytest.raises(TunerError, match="asked of a rollout that has ended"):
            await in_a_thread(RemoteSession(opened).calls_so_far)
    assert session.calls[0].reward == 9.0


async def test_errors_come_back_in_their_own_class():
    async with gateway_of(StubEngine()) as gateway:
        session = gateway.open_session("r")

        async def fails(prompt_ids, **settings):
            raise errors.pop()

        session.complete_tokens = fails
        errors = [EngineError("it broke"), ValueError("no"), json.JSONDecodeError("no", "", 0)]
        with shared(session) as opened:
            remote = RemoteSession(opened)
            with pytest.raises(RuntimeError, match="JSONDecodeError: no"):
                await remote.complete_tokens([1])
            with pytest.raises(ValueError, match="no"):
                await remote.complete_tokens([1])
            with pytest.raises(EngineError, match="it broke"):
                await remote.complete_tokens([1])
            del session.complete_tokens
            with pytest.raises(RequestError) as refused:
                await remote.complete_tokens([])
    assert (refused.value.status, refused.value.path) == (400, ("prompt",))


async def test_one_connection_serves_calls_one_after_the_other(monkeypatch):
    opened_connections = 0
    connect = asyncio.open_unix_connection

    async def counted(path):
        nonlocal opened_connections
        opened_connections += 1
        return await connect(path)

    monkeypatch.setattr(asyncio, "open_unix_connection", counted)
    async with gateway_of(StubEngine(["a", "b", "c"])) as gateway:
        with shared(gateway.open_session("r")) as opened:
            for _ in range(3):
                await ask(RemoteSession(opened))
            socket = Path(opened.url.removeprefix("unix:"))
            assert socket.parent.stat().st_mode & 0o77 == 0  # nobody else may ask
    assert opened_connections == 1
    assert not socket.parent.exists()


async def test_thousands_of_calls_may_be_in_flight():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        async with gateway_of(StubEngine()) as gateway:
            assert gateway.socket_url
        raised, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert raised == (65536 if hard == resource.RLIM_INFINITY else min(65536, hard))


async def test_a_line_break_in_a_header_is_refused():
    door = RemoteDoor("http://127.0.0.1:1", InFlight())
    with pytest.raises(ValueError, match="line break"):
        await door.handle("GET", "/v1/models", {"x": "a\r\nhost: b"}, b"")


async def test_nobody_listening_is_an_error_with_the_address():
    door = RemoteDoor("http://127.0.0.1:1", InFlight())
    with pytest.raises(ConnectionError, match=r"at http://127\.0\.0\.1:1 gave no answer"):
        await door.handle("GET", "/v1/models", {}, b"")


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ntransfer-encoding: chunked\r\n\r\n"


async def answered(*parts, kind=b"text/event-stream"):
    """What a door makes of an answer that comes in these parts; None: the connection ends."""
    asked = asyncio.Event()

    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD % kind)
        for part in parts:
            await writer.drain()
            await asked.wait()
            if part is None:
                writer.transport.abort()
                return
            writer.write(b"%x\r\n%s\r\n" % (len(part), part))
            asked.clear()
        writer.write(b"0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        door = RemoteDoor(f"http://127.0.0.1:{port}", InFlight())
        reply = await door.handle("GET", "/v1/chat/completions", {}, b"")
        found = []
        while True:
            asked.set()
            coming = asyncio.ensure_future(anext(reply.events, None))
            while not coming.done():
                asked.set()  # the next part, of which an event may have several
                await asyncio.wait([coming], timeout=0.01)
            if (event := coming.result()) is None:
                return found
            found.append(event)


async def test_events_come_whole_however_they_were_cut():
    parts = b"data: 1\n", b"\nda", b"ta: 2\n\ndata: 3\n\n"
    assert await answered(*parts) == [b"data: 1\n\n", b"data: 2\n\n", b"data: 3\n\n"]


async def test_a_stream_that_breaks_off_is_an_error():
    with pytest.raises(ConnectionError, match="the gateway broke off a stream"):
        await answered(b"data: 1\n\n", b"data", None)
