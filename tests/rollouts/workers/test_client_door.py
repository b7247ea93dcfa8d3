"""What a worker on another machine asks the gateway by."""

import asyncio

import pytest

from tuner.gateway.sessions import InFlight
from tuner.rollouts.worker_session import HttpClientDoor, LineDoor, Opened, RemoteSession

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
        door = HttpClientDoor(f"http://127.0.0.1:{port}/v1", InFlight())
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


async def test_a_stream_that_breaks_off_is_an_error_with_the_gateways_address():
    with pytest.raises(ConnectionError, match=r"the gateway at http://127\.0\.0\.1:\d+/v1/chat"):
        await answered(b"data: 1\n\n", b"data", None)


@pytest.mark.parametrize(
    ("base_url", "kind"), [(None, LineDoor), ("http://10.0.0.1:8700/v1", HttpClientDoor)]
)
def test_a_session_asks_by_the_line_unless_it_is_told_an_address(base_url, kind):
    opened = Opened(1, 0, "r", "k", "m", 8, keeps_calls=True, scripted=False, base_url=base_url)
    assert isinstance(RemoteSession(None, opened).host, kind)
