"""`tuner view`: serve the page on a loopback port, behind a secret token in the link."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tuner.errors import TunerError
from tuner.runs.estimates import check_is_run, differing_settings, find_runs, is_run, read_run
from tuner.tools.viewer.page import RunReader, page, to_json
from tuner.tools.viewer.queries import (
    TraceQuery,
    changes,
    count,
    find,
    number_of,
    same_task,
    tasks_over_time,
)
from tuner.traces.store import SERVED

# Maximum rows of one answer, more than fit on a screen.
ROWS = 200
# Maximum seconds that one request may spend on reading traces and their branches. The page requests
# the rest again; its other requests wait for this long.
READING_SECONDS = 0.1
# The same for another run whose rollouts of a task are requested.
OTHER_SECONDS = 1.0
_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",  # the link contains the token
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
Answer = Callable[[QueryParams], dict[str, Any]]


class Runs:
    """The runs of a folder, or next to a run; each is opened on first use."""

    def __init__(self, path: Path) -> None:
        path = path.resolve()
        self._folder = path.parent if is_run(path) else path
        self._depth = 1 if is_run(path) else 2
        self._readers: dict[str, RunReader] = {}
        names = self.names()
        if not names:
            check_is_run(path)
        self.first = path.name if is_run(path) else names[0]

    def names(self) -> list[str]:
        """Names of the runs by folder, read again on each call to include new runs."""
        self._paths = {
            path.relative_to(self._folder).as_posix(): path
            for path in find_runs(self._folder, depth=self._depth)
        }
        return list(self._paths)

    def path(self, name: str) -> Path:
        if name not in self._paths and name not in self.names():
            raise TunerError(f"{self._folder} has no run {name!r}")
        return self._paths[name]

    def open(self, name: str) -> RunReader:
        if name not in self._readers:
            self._readers[name] = RunReader(self.path(name), keep=True)
        return self._readers[name]


def answers(runs: Runs) -> dict[str, Answer]:
    """The functions that answer the page, by path; all take `run`, by default the first one.

    `run?from=N&generation=G` reads new data, and returns the metrics from row N on (from 0 if G is
    not the current generation), the header, and how far the traces are read.
    `list?split&step&outcome&cause&begins&low&high&text&order&first=N&count=M` returns the selected
    traces N to N + M, and the number selected; `position?key=F:B` with the same filters returns the
    position of that trace among them, which takes longer.
    `summary` has tables and names to choose from, `trace?file=F&offset=B` one trace, `tasks` the
    training tasks over time.
    `task?file=F&offset=B&with=RUN` has all rollouts of a trace's task, also those of other runs.
    `runs` has the names, and `compare?with=RUN&with=RUN` the settings and curves of several runs.
    """

    def opened(query: QueryParams) -> RunReader:
        return runs.open(query.get("run") or runs.first)

    def run(query: QueryParams) -> dict[str, Any]:
        reader = opened(query)
        reader.metrics.refresh()
        traces = reader.traces
        complete = traces.refresh(READING_SECONDS)
        done = complete and traces.count_branches(READING_SECONDS)
        rows, generation = reader.metrics.rows, reader.metrics.generation
        first = _number(query, "from") if _number(query, "generation") == generation else 0
        return {
            "run": reader.info(),
            "from": first,
            "generation": generation,
            "rows": rows[first:],
            "state": f"{traces.state} {reader.sessions.stamp}",
            "complete": complete,
            "counted": traces.counted,
            "more": not done,
            "problems": reader.problems,
        }

    def list_(query: QueryParams) -> dict[str, Any]:
        reader, wanted = opened(query), _wanted(query)
        traces, sessions = reader.traces, reader.sessions
        first, most = _number(query, "first"), min(_number(query, "count", ROWS), ROWS)
        served = sessions.numbers(wanted)
        shown = sessions.rows(served[first : first + most])
        found = find(traces, wanted, max(0, first - len(served)), most - len(shown))
        change = changes(traces) if wanted.order == "changed" else {}
        rows = [
            {**row.to_json(), "change": change.get((row.split, row.same))}
            for row in (*shown, *traces.rows(found))
        ]
        total = len(served) + count(traces, wanted)
        all_ = len(sessions.numbers(TraceQuery())) + traces.total
        return {"total": total, "all": all_, "first": first, "rows": rows}

    def position(query: QueryParams) -> dict[str, Any]:
        reader, wanted = opened(query), _wanted(query)
        file, _, offset = query.get("key", "").rpartition(":")
        start = int(offset) if offset.isdecimal() else -1
        served = reader.sessions.numbers(wanted)
        if file == SERVED:
            return {"at": served.index(start) if start in served else None}
        number = number_of(reader.traces, file, start)
        found = [] if number is None else find(reader.traces, wanted)
        return {"at": len(served) + found.index(number) if number in found else None}

    def trace(query: QueryParams) -> dict[str, Any]:
        reader = opened(query)
        return reader.trace(query.get("file", ""), _number(query, "offset"))

    def task(query: QueryParams) -> dict[str, Any]:
        reader = opened(query)
        split, identity = reader.task_of(query.get("file", ""), _number(query, "offset"))
        found = {query.get("run") or runs.first: same_task(reader.traces, split, identity)}
        for name in query.getlist("with"):
            other = runs.open(name)
            other.traces.refresh(OTHER_SECONDS)
            found[name] = same_task(other.traces, split, identity)
        return {"runs": {name: [row.to_json() for row in rows] for name, rows in found.items()}}

    def compare(query: QueryParams) -> dict[str, Any]:
        names = query.getlist("with")
        read = [read_run(runs.path(name)) for name in names]
        return {
            "runs": [
                {"name": name, "rows": one.metrics} for name, one in zip(names, read, strict=True)
            ],
            "settings": differing_settings(read),
        }

    return {
        "run": run,
        "list": list_,
        "position": position,
        "summary": lambda query: opened(query).summary(),
        "tasks": lambda query: tasks_over_time(opened(query).traces),
        "trace": trace,
        "task": task,
        "runs": lambda query: {"runs": runs.names(), "first": runs.first},
        "compare": compare,
    }


def viewer_app(run: Path, token: str) -> Starlette:
    """The page at `/<token>/` and its data at `/<token>/api/`; anything else is 404."""
    lock = threading.Lock()

    def endpoint(read: Answer) -> Any:
        def locked(query: QueryParams) -> dict[str, Any]:
            with lock:
                return read(query)

        async def endpoint(request: Request) -> Response:
            if not _allowed(request, token):
                return _refusal()
            try:
                data = await run_in_threadpool(locked, request.query_params)
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

    found = answers(Runs(run)).items()
    return Starlette(
        routes=[
            Route("/{token}/", index),
            *(Route(f"/{{token}}/api/{name}", endpoint(read)) for name, read in found),
            Route("/{rest:path}", nothing),
        ]
    )


def serve(run: Path, *, port: int, announce: Callable[[str], None]) -> None:
    """Serve the page until interrupted; `announce` is called with the link."""
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
        listener.listen()  # requests made right after the announcement wait for the server
    except OSError as error:
        listener.close()
        raise TunerError(
            f"cannot use port {port} on 127.0.0.1 ({error.strerror}); give another --port, or omit "
            "it for a free one"
        ) from error
    return listener


def _allowed(request: Request, token: str) -> bool:
    given = str(request.path_params["token"])
    return secrets.compare_digest(given.encode(), token.encode())


def _refusal() -> Response:
    text = "Not found. Open the full link that `tuner view` printed; its path is the key.\n"
    return _response(text, "text/plain", status=404)


def _response(text: str, kind: str, *, status: int = 200) -> Response:
    return Response(text, status_code=status, media_type=kind, headers=_HEADERS)


def _wanted(query: QueryParams) -> TraceQuery:
    texts = ("split", "outcome", "cause", "begins", "text", "order")
    return TraceQuery(
        **{name: query.get(name, "") for name in texts},
        step=_number(query, "step") if query.get("step") else None,
        low=_real(query, "low"),
        high=_real(query, "high"),
    )


def _number(query: QueryParams, name: str, default: int = 0) -> int:
    value = query.get(name) or str(default)
    if not (value.isascii() and value.isdecimal() and len(value) <= 18):
        raise TunerError(f"{name} is {value!r}: it must be a whole number, 0 or more")
    return int(value)


def _real(query: QueryParams, name: str) -> float | None:
    value = query.get(name)
    try:
        return float(value) if value else None
    except ValueError:
        raise TunerError(f"{name} is {value!r}: it must be a number") from None
