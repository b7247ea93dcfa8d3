"""The HTTP door: sync clients in threads, vanished clients, limits."""

from __future__ import annotations

import asyncio
import codecs
import gzip
import json
import subprocess
import sys
import tracemalloc
import zlib
from typing import Any

import httpx
import openai
import pytest

from tests.engines.models import until
from tests.kit.toy import StubEngine, gateway_of
from tuner.gateway import Gateway
from tuner.gateway import http as door_module
from tuner.gateway.request_error import RequestError

USER = [{"role": "user", "content": "hi"}]


async def test_sync_client_in_a_thread_is_answered_and_recorded() -> None:
    engine = StubEngine(["over http"])
    async with gateway_of(engine) as gateway:
        session = gateway.open_session("r")

        def agent() -> str:
            client = openai.OpenAI(base_url=session.base_url, api_key=session.key)
            with client:
                answer = client.chat.completions.create(model="tiny", messages=USER)
            return str(answer.choices[0].message.content)

        assert await asyncio.to_thread(agent) == "over http"
        assert len(session.calls) == 1
        assert session.base_url == gateway.base_url


async def test_subprocess_is_answered_while_the_workflow_waits_for_it() -> None:
    async with gateway_of(StubEngine(["from afar"])) as gateway:
        session = gateway.open_session("r")
        script = (
            "import json, sys, urllib.request as u\n"
            "url, key = sys.argv[1:]\n"
            "body = json.dumps({'model': 'tiny', 'messages': [{'role': 'user', 'content': 'x'}]})\n"
            "r = u.Request(url + '/chat/completions', body.encode(), "
            "{'Authorization': 'Bearer ' + key})\n"
            "print(json.load(u.urlopen(r))['choices'][0]['message']['content'])\n"
        )
        arguments = [sys.executable, "-c", script, session.base_url, session.key]
        process = await asyncio.to_thread(
            subprocess.run, arguments, capture_output=True, text=True, timeout=120, check=True
        )
        assert process.stdout.strip() == "from afar"


async def test_first_use_from_another_thread_opens_the_door() -> None:
    async with gateway_of(StubEngine()) as gateway:
        session = gateway.open_session("r")
        url = await asyncio.to_thread(lambda: session.base_url)
        async with httpx.AsyncClient() as client:
            answer = await client.get(
                f"{url}/models", headers={"Authorization": f"Bearer {session.key}"}
            )
        assert answer.json()["data"][0]["id"] == "tiny"


@pytest.mark.parametrize(
    ("method", "path", "key", "status", "sentence"),
    [
        ("POST", "/chat/completions", "wrong", 401, "no open session"),
        ("POST", "/chat/completions", "", 401, "no open session"),
        ("POST", "/embeddings", None, 404, "POST /v1/embeddings is not served"),
        ("GET", "/chat/completions", None, 404, "GET /v1/chat/completions is not served"),
    ],
)
async def test_refusals_have_openais_error_body(method, path, key, status, sentence) -> None:
    async with gateway_of(StubEngine()) as gateway:
        session = gateway.open_session("r")
        headers = {"Authorization": f"Bearer {session.key if key is None else key}".strip()}
        async with httpx.AsyncClient() as client:
            answer = await client.request(
                method,
                gateway.base_url + path,
                headers=headers,
                json={} if method == "POST" else None,
            )
        assert answer.status_code == status
        assert sentence in answer.json()["error"]["message"]


async def test_an_answer_without_a_body_is_not_held_back() -> None:
    async with gateway_of(StubEngine()) as gateway, httpx.AsyncClient() as client:
        session = gateway.open_session("r")
        for _ in range(2):  # on one connection
            answer = await client.head(
                f"{gateway.base_url}/models", headers={"Authorization": f"Bearer {session.key}"}
            )
            assert answer.status_code == 200
            assert answer.content == b""


@pytest.mark.parametrize("path", ["/v1/models", "/v1/chat/completions", "/v1/nothing"])
async def test_an_answer_to_head_ends_also_for_a_client_that_expects_a_body(path: str) -> None:
    async with gateway_of(StubEngine()) as gateway, asyncio.timeout(60):
        head = f"HEAD {path} HTTP/1.1\r\nhost: localhost\r\n\r\n"
        reader, writer = await connected(gateway)
        writer.write(head.encode())
        assert (await reader.read()).endswith(b"\r\n\r\n")
        writer.close()


async def connected(gateway: Gateway) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    url = httpx.URL(gateway.base_url)
    return await asyncio.open_connection(url.host, url.port)


BODIES = {
    "/v1/chat/completions": {"messages": USER},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": USER, "max_tokens": 9},
    "/v1/messages/count_tokens": {"messages": USER},
}


@pytest.mark.parametrize(
    "spelling",
    [
        "{0}/",
        "{0}//",
        "/{0}",
        "//{0}/",
        "/v1{0}",
        "/v1//{1}",
        "/v1/deployments/tiny/{1}",
        "/openai/deployments/tiny/{1}?api-version=1",
    ],
)
@pytest.mark.parametrize("door_of_server", [False, True])
async def test_paths_are_those_that_a_base_url_with_a_slash_makes(
    spelling: str, door_of_server: bool
) -> None:
    async def beside(scope: object, receive: object, send: object) -> None:
        raise AssertionError("the path belongs to the gateway")

    async with gateway_of(StubEngine(["a"] * 5)) as gateway, httpx.AsyncClient() as client:
        session = gateway.open_session("r")
        key = {"Authorization": f"Bearer {session.key}"}
        if door_of_server:
            # Starlette has its own types for an application, as uvicorn has.
            gateway._where = door_module.Opening(beside=beside)  # type: ignore[arg-type]
        root = gateway.base_url.removesuffix("/v1")
        for path, body in BODIES.items():
            url = root + spelling.format(path, path.removeprefix("/v1/"))
            answer = await client.post(url, json={"model": "tiny", **body}, headers=key)
            assert answer.status_code == 200, answer.text
        models = root + spelling.format("/v1/models", "models")
        assert (await client.get(models, headers=key)).json()["data"][0]["id"] == "tiny"
        assert len(session.calls) == 4


async def test_a_model_can_be_asked_for(door: Any) -> None:
    async with gateway_of(StubEngine()) as gateway:
        session = gateway.open_session("r")
        session.other_names = ("Org/Name",)
        client = door(session)
        for name in ("tiny", "Org/Name"):
            assert (await client.models.retrieve(name)).id == name
        with pytest.raises(openai.NotFoundError, match="this key's model is 'tiny'"):
            await client.models.retrieve("other")


async def test_azures_client_is_answered() -> None:
    async with gateway_of(StubEngine(["hello"])) as gateway:
        session = gateway.open_session("r")
        client = openai.AsyncAzureOpenAI(
            base_url=session.base_url, api_key=session.key, api_version="2024-10-21", max_retries=0
        )
        async with client:
            answer = await client.chat.completions.create(model="tiny", messages=USER)
        assert answer.choices[0].message.content == "hello"


PACKED = {
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "GZIP": gzip.compress,
    "deflate": zlib.compress,
    "identity": lambda body: body,
}


@pytest.mark.parametrize("path", BODIES)
async def test_compressed_bodies_and_a_byte_order_mark_change_nothing(path: str) -> None:
    async with gateway_of(StubEngine(["a"] * 9)) as gateway, httpx.AsyncClient() as client:
        session = gateway.open_session("r")
        body = json.dumps({"model": "tiny", **BODIES[path]}).encode()
        root = gateway.base_url.removesuffix("/v1")
        for mark in (b"", codecs.BOM_UTF8):
            for encoding, pack in PACKED.items():
                headers = {"Authorization": f"Bearer {session.key}", "Content-Encoding": encoding}
                answer = await client.post(root + path, content=pack(mark + body), headers=headers)
                assert answer.status_code == 200, answer.text
        assert len({(call.prompt_ids, str(call.messages)) for call in session.calls}) <= 1


@pytest.mark.parametrize(
    ("encoding", "packed", "status", "sentence"),
    [
        ("br", b"{}", 415, 'the Content-Encoding is "br": send gzip, deflate or no encoding'),
        ("gzip, gzip", b"{}", 415, "send gzip, deflate"),
        ("gzip", b"{}", 400, "is not gzip, as its Content-Encoding says"),
        ("deflate", b"{}", 400, "is not deflate"),
        ("gzip", gzip.compress(b"{}", mtime=0)[:-4], 400, "one complete gzip stream"),
        ("gzip", gzip.compress(b"{}", mtime=0) * 2, 400, "one complete gzip stream"),
        ("gzip", gzip.compress(b" " * 1001, mtime=0), 413, "larger than 1000 bytes"),
        ("deflate", zlib.compress(b" " * 10_000_000), 413, "larger than"),
    ],
)
async def test_bodies_that_cannot_be_unpacked_are_refused(
    encoding: str, packed: bytes, status: int, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door_module, "MAX_BODY_BYTES", max(1000, len(packed)))
    async with gateway_of(StubEngine()) as gateway, httpx.AsyncClient() as client:
        key = gateway.open_session("r").key
        headers = {"Authorization": f"Bearer {key}", "Content-Encoding": encoding}
        url = f"{gateway.base_url}/chat/completions"
        answer = await client.post(url, content=packed, headers=headers)
        assert answer.status_code == status
        assert sentence in answer.json()["error"]["message"]


def test_a_body_is_unpacked_only_up_to_the_limit() -> None:
    bomb = gzip.compress(b" " * 50_000_000, mtime=0)
    tracemalloc.start()
    try:
        with pytest.raises(RequestError, match="larger than 1000 bytes"):
            door_module._decompressed(bomb, "gzip", 1000)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("cut", [1, 40, 160, 250, 10_000])
async def test_an_offer_of_http_2_is_answered_in_http_1(cut: int) -> None:
    async with gateway_of(StubEngine(["a", "b"])) as gateway, asyncio.timeout(60):
        session = gateway.open_session("r")
        body = json.dumps({"model": "tiny", "messages": USER}).encode()
        request = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
            "connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"
            f"authorization: Bearer {session.key}\r\ncontent-length: {len(body)}\r\n\r\n"
        ).encode() + body
        reader, writer = await connected(gateway)
        for _ in range(2):  # on one connection
            writer.write(request[:cut])
            await asyncio.sleep(0)
            writer.write(request[cut:])
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            assert head.startswith("HTTP/1.1 200 ")
            await reader.readexactly(int(head.partition("content-length: ")[2].split()[0]))
        writer.close()
        assert [call.response["content"] for call in session.calls] == ["a", "b"]


async def test_body_over_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door_module, "MAX_BODY_BYTES", 1000)
    async with gateway_of(StubEngine()) as gateway:
        session = gateway.open_session("r")
        body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "x"}]})
        async with httpx.AsyncClient() as client:
            within, beyond = [
                await client.post(
                    gateway.base_url + "/chat/completions",
                    content=body.ljust(size),
                    headers={"Authorization": f"Bearer {session.key}"},
                )
                for size in (1000, 1001)
            ]
        assert within.status_code == 200
        assert beyond.status_code == 413
        assert "1000 bytes" in beyond.json()["error"]["message"]


async def test_body_that_does_not_come_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door_module, "STALLED_SECONDS", 0.05)
    async with gateway_of(StubEngine()) as gateway:
        url = httpx.URL(gateway.base_url)
        reader, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n{"
        )
        assert b" 408 " in await reader.readline()
        writer.close()


@pytest.mark.parametrize(
    "sent", [b"", b"GET /v1/models HTTP/1.1\r\nhost:"], ids=["nothing", "half the headers"]
)
@pytest.mark.parametrize("before", [False, True], ids=["at first", "after a request"])
async def test_headers_that_do_not_come_are_given_up(
    sent: bytes, before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with gateway_of(StubEngine()) as gateway, asyncio.timeout(60):
        url = httpx.URL(gateway.base_url)
        if before and not sent:  # uvicorn's clock, not ours
            assert gateway._door is not None
            gateway._door._server.config.timeout_keep_alive = 1
        else:
            monkeypatch.setattr(door_module, "STALLED_SECONDS", 0.2)
        reader, writer = await asyncio.open_connection(url.host, url.port)
        if before:
            writer.write(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            length = head.partition(b"content-length: ")[2].partition(b"\r\n")[0]
            await reader.readexactly(int(length))
        writer.write(sent)
        assert await reader.read() == b""
        writer.close()


async def test_request_that_takes_longer_than_headers_may_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(door_module, "STALLED_SECONDS", 0.2)
    engine = StubEngine(["late"])
    engine.gate.clear()
    async with gateway_of(engine) as gateway:
        session = gateway.open_session("r")
        client = openai.AsyncOpenAI(base_url=session.base_url, api_key=session.key, max_retries=0)
        async with client:
            call = asyncio.ensure_future(
                client.chat.completions.create(model="tiny", messages=USER)
            )
            await engine.until_waiting()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asyncio.shield(call), 0.5)
            engine.gate.set()
            assert (await call).choices[0].message.content == "late"


async def test_one_connection_too_many_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door_module, "MAX_CONNECTIONS", 1)
    async with gateway_of(StubEngine()) as gateway, asyncio.timeout(60):
        url = httpx.URL(gateway.base_url)
        _, writer = await asyncio.open_connection(url.host, url.port)
        async with httpx.AsyncClient() as client:
            answer = await client.get(gateway.base_url + "/models")
            assert answer.status_code == 503
            assert "1 connections are open" in answer.json()["error"]["message"]
            writer.close()
            while answer.status_code == 503:
                answer = await client.get(gateway.base_url + "/models")
            assert answer.status_code == 401


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:8000", 200),
        ("127.0.0.1:1", 200),
        ("[::1]:8000", 200),
        ("rebound.example", 421),
        ("rebound.example:80", 421),
        ("127.0.0.1.rebound.example", 421),
        ("localhost@rebound.example", 421),
        ("", 421),
    ],
)
async def test_names_of_other_hosts_are_refused(host: str, status: int) -> None:
    async with gateway_of(StubEngine()) as gateway:
        session = gateway.open_session("r")
        headers = {"Authorization": f"Bearer {session.key}", "Host": host}
        async with httpx.AsyncClient() as client:
            answer = await client.get(gateway.base_url + "/models", headers=headers)
        assert answer.status_code == status
        if status == 421:
            assert f'the Host header is "{host}"' in answer.json()["error"]["message"]


async def test_websocket_is_refused() -> None:
    async with gateway_of(StubEngine()) as gateway:
        session = gateway.open_session("r")
        headers = {
            "Authorization": f"Bearer {session.key}",
            "Connection": "Upgrade",
            "Upgrade": "websocket",
            "Sec-WebSocket-Version": "13",
            "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
        }
        async with httpx.AsyncClient() as client:
            answer = await client.get(gateway.base_url + "/models", headers=headers)
        assert answer.status_code == 400
        assert "WebSockets are not served" in answer.json()["error"]["message"]


async def test_client_that_stops_reading_a_stream_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(door_module, "STALLED_SECONDS", 0.05)
    engine = StubEngine(["abc"])
    async with gateway_of(engine) as gateway:
        session = gateway.open_session("r")
        body = json.dumps({"model": "tiny", "messages": USER, "stream": True}).encode()
        events = iter([{"type": "http.request", "body": body}])

        async def receive() -> dict[str, object]:
            for event in events:
                return event
            return await asyncio.Event().wait()  # type: ignore[return-value]

        async def send(message: dict[str, object]) -> None:
            if message["type"] == "http.response.body":
                await asyncio.Event().wait()

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/chat/completions",
            "headers": [(b"authorization", f"Bearer {session.key}".encode())],
        }
        async with asyncio.timeout(60):
            # A scope of the keys that are read.
            await door_module._Endpoint(gateway)(scope, receive, send)  # type: ignore[arg-type]
        assert engine.sampling == engine.waiting == 0
        assert not any(not call.undelivered for call in session.calls)


async def test_client_that_goes_away_frees_its_slot() -> None:
    engine = StubEngine()
    engine.gate.clear()
    async with gateway_of(engine) as gateway:
        session = gateway.open_session("r")
        client = openai.AsyncOpenAI(base_url=session.base_url, api_key=session.key, max_retries=0)
        async with client:
            call = asyncio.ensure_future(
                client.chat.completions.create(model="tiny", messages=USER)
            )
            await engine.until_waiting()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        await until(lambda: engine.cancelled == 1)
        assert session.calls == ()


async def test_client_that_goes_away_with_another_request_behind_frees_its_slot() -> None:
    engine = StubEngine()
    engine.gate.clear()
    async with gateway_of(engine) as gateway:
        session = gateway.open_session("r")
        url = httpx.URL(session.base_url)
        body = json.dumps({"model": "tiny", "messages": USER}).encode()
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
            f"authorization: Bearer {session.key}\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        _, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(2 * (head.encode() + body))
        await engine.until_waiting()
        writer.transport.abort()
        await until(lambda: engine.cancelled == 1)
        assert session.calls == ()


async def test_head_and_body_of_an_answer_are_one_packet() -> None:
    written: list[bytes] = []

    class Transport:
        def write(self, data: bytes) -> None:
            written.append(data)

    joined = door_module._Joined(Transport())
    joined.more_comes = True
    for data in (b"head", b"body", b"other"):
        joined.write(data)
    assert written == [b"headbody", b"other"]


async def test_idle_connections_live_longer_than_those_of_clients() -> None:
    """A request that is sent while both ends let go of a connection is lost."""
    async with gateway_of(StubEngine()) as gateway:
        assert gateway.open_session("idle").base_url
        assert gateway._door is not None
        kept = httpx._config.DEFAULT_LIMITS.keepalive_expiry
        assert kept is not None
        assert gateway._door._server.config.timeout_keep_alive > 2 * kept


async def test_closing_the_gateway_closes_the_door_and_seals_its_sessions() -> None:
    async with gateway_of(StubEngine()) as gateway:
        session = gateway.open_session("r")
        url = session.base_url
        await gateway.aclose()
        assert session.sealed
        async with httpx.AsyncClient() as client:
            with pytest.raises(httpx.ConnectError):
                await client.get(url + "/models")
