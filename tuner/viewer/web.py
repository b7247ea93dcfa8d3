"""`tuner view`: the page on a loopback port, behind a token that only its link knows."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tuner.errors import TunerError
from tuner.viewer.page import page
from tuner.viewer.reader import RunReader, to_json

# Rows of one answer, and how long one request may read traces: the page asks again for the rest.
ROWS = 2000
READING_SECONDS = 0.5
# The same for the causes of branches; opening a trace may have to wait for this long.
CAUSE_SECONDS = 0.2
_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",  # the link holds the token
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


def viewer_app(run: Path, token: str) -> Starlette:
    """The page at `/<token>/` and its data below; anything else is 404.

    `api/metrics?from=N&generation=G` gives the rows from N on, and what the header shows;
    `api/traces?from=N&generation=G` at most 2000 rows of the list; both begin anew at row 0 when
    G is not the current generation. `api/causes?from=N&generation=G` follows the list with the
    branches of each trace by cause. `api/trace?file=F&offset=B` gives one trace.

    Raises:
        TunerError: `run` is not a run directory.
    """
    reader = RunReader(run)
    lock = threading.Lock()

    def metrics(query: dict[str, str]) -> dict[str, Any]:
        reader.metrics.refresh()
        return {"run": reader.info(), **_rows(query, reader.metrics, reader.metrics.rows)}

    def traces(query: dict[str, str]) -> dict[str, Any]:
        complete = reader.traces.refresh(READING_SECONDS)
        found = _rows(query, reader.traces, reader.traces.rows)
        rows = [row.to_json() for row in found["rows"][:ROWS]]
        more = not complete or len(found["rows"]) > ROWS
        return {**found, "rows": rows, "more": more, "problems": reader.traces.problems}

    def causes(query: dict[str, str]) -> dict[str, Any]:
        complete = reader.causes.refresh(CAUSE_SECONDS)
        found = _rows(query, reader.causes, reader.causes.counts)
        return {**found, "more": not complete, "problems": reader.causes.problems}

    def trace(query: dict[str, str]) -> dict[str, Any]:
        return reader.trace(query.get("file", ""), _number(query, "offset"))

    def answer(read: Callable[[dict[str, str]], dict[str, Any]]) -> Any:
        def locked(query: dict[str, str]) -> dict[str, Any]:
            with lock:
                return read(query)

        async def endpoint(request: Request) -> Response:
            if not _allowed(request, token):
                return _refusal()
            try:
                data = await run_in_threadpool(locked, dict(request.query_params))
            except TunerError as error:
                return _response(to_json({"error": str(error)}), "application/json", status=400)
            return _response(to_json(data), "application/json")

        return endpoint

    async def index(request: Request) -> Response:
        if not _allowed(request, token):
            return _refusal()
        return _response(page({"mode": "live"}), "text/html")

    async def nothing(_: Request) -> Response:
        return _refusal()

    return Starlette(
        routes=[
            Route("/{token}/", index),
            Route("/{token}/api/metrics", answer(metrics)),
            Route("/{token}/api/traces", answer(traces)),
            Route("/{token}/api/causes", answer(causes)),
            Route("/{token}/api/trace", answer(trace)),
            Route("/{rest:path}", nothing),
        ]
    )


def serve(run: Path, *, port: int, announce: Callable[[str], None]) -> None:
    """Serve the page until it is interrupted.

    Args:
        run: The run directory.
        port: Port on 127.0.0.1; 0 takes a free one.
        announce: Receives the link.

    Raises:
        TunerError: `run` is not a run directory, or the port is taken.
    """
    import uvicorn

    token = secrets.token_urlsafe(24)
    config = uvicorn.Config(
        viewer_app(run, token), host="127.0.0.1", port=port, log_level="warning", access_log=False
    )
    socket = _bind(port)
    announce(f"http://127.0.0.1:{socket.getsockname()[1]}/{token}/")
    with socket:
        uvicorn.Server(config).run(sockets=[socket])


def _bind(port: int) -> Any:
    import socket

    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
        listener.listen()  # who opens the link at once waits for the server
    except OSError as error:
        listener.close()
        raise TunerError(
            f"port {port} on 127.0.0.1 cannot be used ({error.strerror}); give another --port, or "
            "none to take a free one"
        ) from error
    return listener


def _allowed(request: Request, token: str) -> bool:
    given = str(request.path_params["token"])
    return secrets.compare_digest(given.encode(), token.encode())


def _refusal() -> Response:
    text = "Nothing is here. Open the whole link that `tuner view` printed: its path is the key.\n"
    return _response(text, "text/plain", status=404)


def _response(text: str, kind: str, *, status: int = 200) -> Response:
    return Response(text, status_code=status, media_type=kind, headers=_HEADERS)


def _rows(query: dict[str, str], source: Any, rows: list[Any]) -> dict[str, Any]:
    """The rows that the asker has not; all of them if it knows those of a file that is gone."""
    first = _number(query, "from") if _number(query, "generation") == source.generation else 0
    return {"from": first, "generation": source.generation, "rows": rows[first:]}


def _number(query: dict[str, str], name: str) -> int:
    value = query.get(name, "0")
    if not (value.isascii() and value.isdecimal() and len(value) <= 18):
        raise TunerError(f"{name} is {value!r}: it must be a whole number, 0 or more")
    return int(value)
