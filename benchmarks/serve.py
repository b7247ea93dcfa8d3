"""Calls per second and added latency of `tuner serve`, recording on disk, beside LiteLLM's proxy.

    python benchmarks/serve.py [--rounds 3] [--litellm .venv-litellm/bin/litellm]

The server is the one of the command, with its settings as they are. The same stub answers behind
both, 32 tokens without a model; it and the request are those of `benchmarks/gateway.py`, and each
session asks with it again and again. What is measured runs in a process of its own on one core, the
load on another, through plain sockets: one connection for each session, whose requests come one
after the other. Ours writes every call to its SQLite file before it answers; LiteLLM's proxy, which
forwards requests to a server that speaks OpenAI on the load's core, records nothing.

- `calls/s`: the stub answers at once.
- `added latency`: the stub takes 0.25 s for an answer, and what a request took beyond that is
  added. So 16 sessions ask 64 times a second, and 256 a thousand times, as agents do that wait for
  a model; where a server cannot keep up, the waiting is in the number. Timers and sockets add
  something too: what a server in asyncio adds that reads a request, waits 0.25 s and answers two
  bytes is measured likewise, a row of its own, and taken off everybody's.

- `computed by the server` is the time of its process alone while the stub answers at once, which is
  nearly the same where other work keeps the machine busy.

All take turns in every round; numbers are medians of the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
from _report import Row, report
from gateway import (
    LITELLM_KEY,
    MODEL,
    free_port,
    litellm_proxy,
    litellm_version,
    load,
    make_parts,
    percentiles,
    process,
    wait_for,
)

from tuner.traces.store import SERVED

SECONDS = 0.25
"""What the stub takes for an answer where latency is measured."""
SESSIONS = (1, 16, 256, 1000)
GOAL_RATIO = 10
GOAL_MS = 2.0
"""Added, the median, with 16 sessions."""
MILLISECONDS = {
    "cpu": "computed by the server, ms per call",
    "p50": "added latency, p50, ms",
    "p99": "added latency, p99, ms",
}
ADMIN_KEY = "sk-admin-of-the-benchmark"


@dataclass(frozen=True)
class Running:
    """A server that runs.

    Attributes:
        keys: Gives so many keys, each of a session of its own.
    """

    port: int
    pid: int
    keys: Callable[[int], Sequence[str]]

    @property
    def cpu(self) -> float:
        """Seconds that its process has computed."""
        times = psutil.Process(self.pid).cpu_times()
        return float(times.user + times.system)


def calls_of(sessions: int, seconds: float) -> int:
    """How many calls each session makes: enough in all, and not for too long."""
    if seconds:
        return 60 if sessions <= 16 else 16 if sessions <= 256 else 4
    return max(3, 2000 // sessions)


async def measure(port: int, keys: Sequence[str], seconds: float, count: int) -> dict[str, float]:
    """Calls per second, and what was added to `seconds` in milliseconds.

    Args:
        keys: Of the sessions.
        count: How many calls each makes.
    """
    rng = random.Random(0)

    async def ask(key: str) -> list[float]:
        await asyncio.sleep(rng.uniform(0, seconds))  # not all at one moment, again and again
        took: list[float] = await load(port, key, False, count)
        return took

    began = time.perf_counter()
    took = await asyncio.gather(*map(ask, keys))
    elapsed = time.perf_counter() - began
    added = [one - seconds for each in took for one in each]
    return {**percentiles(added), "rate": len(added) / elapsed}


@contextlib.contextmanager
def ours(seconds: float, core: int, folder: Path) -> Iterator[Running]:
    """Our server; each key is of a new session."""
    from tuner import Client

    port = free_port()
    command = [sys.executable, __file__, "--part", "server", "--port", str(port)]
    command += ["--seconds", str(seconds), "--folder", str(folder)]
    environment = {**os.environ, "TUNER_ADMIN_KEY": ADMIN_KEY}
    with (
        (folder / "log").open("wb") as log,
        process(command, core, env=environment, stderr=log) as child,
    ):
        wait_for(port, child, folder / "log")
        with Client(f"http://127.0.0.1:{port}", key=ADMIN_KEY) as client:
            yield Running(
                port, child.pid, lambda count: [client.open().key or "" for _ in range(count)]
            )


@contextlib.contextmanager
def theirs(executable: str, seconds: float, core: int, load_core: int) -> Iterator[Running]:
    """LiteLLM's proxy, which has one key."""
    with litellm_proxy(executable, core, load_core, seconds) as (port, pid):
        yield Running(port, pid, lambda count: [LITELLM_KEY] * count)


@contextlib.contextmanager
def bare(seconds: float, core: int, folder: Path) -> Iterator[Running]:
    """A server that waits and answers."""
    port, log = free_port(), folder / "bare"
    command = [sys.executable, __file__, "--part", "bare", "--port", str(port)]
    with (
        log.open("wb") as errors,
        process([*command, "--seconds", str(seconds)], core, stderr=errors) as child,
    ):
        wait_for(port, child, log)
        yield Running(port, child.pid, lambda count: ["key"] * count)


def only_wait(port: int, seconds: float) -> None:
    """The bare server."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(head.lower().split(b"content-length:")[1].split()[0]))
                await asyncio.sleep(seconds)
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        writer.close()

    async def listen() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", port, backlog=2048)
        await server.serve_forever()

    asyncio.run(listen())


def serve(port: int, seconds: float, folder: Path) -> None:
    """Our server as it is started, with the stub in the engine's place."""
    from tuner.config.load import checked, read_layers
    from tuner.runs.stack import build_stack
    from tuner.serving import hosting

    def stubbed(*arguments: Any, **options: Any) -> Any:
        stack = build_stack(*arguments, **options)
        engine, _ = make_parts(streamed=False, seconds=seconds)
        stack.gateway.service = replace(stack.gateway.service, engine=engine)
        return stack

    setattr(hosting, "build_stack", stubbed)  # noqa: B010  # of a module, as mypy sees it
    settings = [
        "name=tiny",  # which the request names
        f"checkpoint_root_dir={folder}",
        f"model.model_path={MODEL}",
        "model.max_model_len=4096",
        "tuner.device=cpu",
    ]
    hosting.serve(checked(read_layers(None, overrides=settings)), port=port)


Found = dict[tuple[str, int, str], list[float]]
"""What was found in each round: by who, how many sessions, and what."""


def measure_all(rounds: int, litellm: str) -> tuple[Found, float]:
    """Measure everything in turn; and the bytes that a call takes on disk."""
    load_core, core = sorted(os.sched_getaffinity(0))[:2]
    os.sched_setaffinity(0, {load_core})
    found: Found = {}
    stored: list[float] = []
    for _ in range(rounds):
        for seconds in (0.0, SECONDS):
            with tempfile.TemporaryDirectory() as folder:
                with ours(seconds, core, Path(folder)) as server:
                    count = measure_one("ours", server, seconds, found)
                size = sum(p.stat().st_size for p in Path(folder).rglob(f"{SERVED}*"))
                stored.append(size / count)
                if seconds:
                    with bare(seconds, core, Path(folder)) as server:
                        measure_one("bare", server, seconds, found)
            with theirs(litellm, seconds, core, load_core) as server:
                measure_one("LiteLLM", server, seconds, found)
    return found, statistics.median(stored)


def measure_one(who: str, server: Running, seconds: float, found: Found) -> int:
    """Measure one server with each number of sessions; how many calls it answered."""
    asyncio.run(measure(server.port, server.keys(8), seconds, 10))  # what is done when it is new
    count = 80
    for sessions in SESSIONS:
        keys, before = server.keys(sessions), server.cpu
        each = calls_of(sessions, seconds)
        got, calls = asyncio.run(measure(server.port, keys, seconds, each)), sessions * each
        got["cpu"] = 1000 * (server.cpu - before) / calls
        count += calls
        for metric in ("p50", "p99") if seconds else ("rate", "cpu"):
            print(f"{who}, {sessions:,} sessions, {metric}: {got[metric]:.2f}", flush=True)
            found.setdefault((who, sessions, metric), []).append(got[metric])
    return count


def compare(rounds: int, litellm: str) -> None:
    """Measure everything, and report."""
    if not Path(litellm).exists():
        raise SystemExit(
            f"{litellm} does not exist: install 'litellm[proxy]' in an environment of its own and "
            "name its executable with --litellm (`make bench` does)"
        )
    found, stored = measure_all(rounds, litellm)
    medians = {what: statistics.median(values) for what, values in found.items()}
    rows, peer = [], "LiteLLM proxy"
    for sessions in SESSIONS:
        case = f"{sessions:,} session{'s' * (sessions > 1)}"
        mine, other = (medians[who, sessions, "rate"] for who in ("ours", "LiteLLM"))
        rows.append(Row(case, "calls/s", mine, peer, other, target=GOAL_RATIO))
        floor = medians["bare", sessions, "p50"]
        for metric, name in MILLISECONDS.items():
            off = 0.0 if metric == "cpu" else floor
            mine, other = (medians[who, sessions, metric] - off for who in ("ours", "LiteLLM"))
            rows.append(Row(case, name, mine, peer, other, more_is_better=False))
        rows.append(Row(case, "a bare server's, p50, ms", floor))
    added = medians["ours", 16, "p50"] - medians["bare", 16, "p50"]
    goal = (MILLISECONDS["p50"], added, f"{GOAL_MS} ms", GOAL_MS)
    rows.append(Row("16 sessions", *goal, target=1, more_is_better=False))
    rows.append(Row("on disk", "bytes per call", stored))
    packages = ["agentscope-tuner", "uvicorn", "starlette", "fastapi"]
    report("serve", rows, packages, {"litellm": litellm_version(litellm)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--litellm", default=".venv-litellm/bin/litellm", help="its executable")
    parser.add_argument("--part", choices=["server", "bare"], help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part == "server":
        serve(options.port, options.seconds, options.folder)
    elif options.part == "bare":
        only_wait(options.port, options.seconds)
    else:
        compare(options.rounds, options.litellm)


if __name__ == "__main__":
    main()
