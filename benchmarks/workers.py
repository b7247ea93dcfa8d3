"""Steps per second with functions in workers beside one process, and the cost of a call.

    python benchmarks/workers.py [--rounds 3] [--steps 6] [--calls 2000] [--at-once 64]

An agent makes two calls of the tiny model and computes for 20 ms of CPU after each (`heavy`), or
does not (`light`); so many rollouts run at a time, a step has as many, and `tune()` trains them.
Each run is a process of its own, of the same seed; numbers are medians of the rounds, the first
step left out. `engine waits` is the time of a step in which answers were wanted and the engine was
between two forward passes: its loop, or the interpreter, was somebody else's.

The ways are those by which a worker could reach the gateway: the client that it has, which speaks
HTTP on a Unix socket, and openai's with httpx, on such a socket and on loopback, with connections
that are kept alive. A stub answers with 32 tokens at once. A call costs CPU in the worker and in
the run's process, which is where there is least of it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

from _report import Row, report
from gateway import REQUEST, make_gateway

from tuner import WorkflowOutput

ROOT = Path(__file__).parents[1]
BURN = 0.02
SHORTER = 7
"""Steps of the light agent for one of the heavy one's: they take a seventh of the time."""
GOAL = 1.7
LIGHT_GOAL = 0.9
WORKERS = "2", "6"
WAYS = "client", "unix socket", "loopback"


def agent(burn: float) -> Any:
    """A workflow of two calls with so many seconds of CPU after each."""

    async def workflow(task: dict[str, Any], model: Any) -> WorkflowOutput:
        import time

        texts = []
        for question in (task["question"], "Are you sure?"):
            asked = [{"role": "user", "content": question}]
            completion = await model.client.chat.completions.create(
                model=model.model_name, messages=asked
            )
            texts.append(completion.choices[0].message.content or "")
            until = time.thread_time() + burn
            while time.thread_time() < until:
                pass
        return WorkflowOutput(reward=len(texts[0]) % 7 / 7)

    return workflow


def run_once(burn: float, workers: str, steps: int, at_once: int) -> dict[str, float]:
    """Seconds of a step, and in how many of them the engine waited."""
    from tuner import tune
    from tuner.engines.transformers.engine import TransformersEngine

    waited, ended = 0.0, None
    step = TransformersEngine._step

    def timed(engine: TransformersEngine) -> None:
        nonlocal waited, ended
        if ended is not None:
            waited += time.perf_counter() - ended
        step(engine)
        ended = time.perf_counter() if engine._in_flight else None

    group = 8
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(TransformersEngine, "_step", timed),
    ):
        result = tune(
            agent(burn),
            None,
            [{"question": f"What is {n} + 3?"} for n in range(64)],
            overrides=[
                f"checkpoint_root_dir={folder}",
                f"model.model_path={ROOT / 'models' / 'tiny_math'}",
                "model.max_response_tokens=16",
                f"algorithm.repeat_times={group}",
                "algorithm.optimizer.lr=1e-7",
                f"buffer.batch_size={at_once // group}",
                f"buffer.total_steps={steps}",
                f"explorer.runner_per_model={at_once}",
                "explorer.eval_on_startup=false",
                f"tuner.workers={workers}",
            ],
        )
    rows = result.history[1:]
    return {
        "seconds": statistics.median(row["time/step"] for row in rows),
        "waited": waited / len(result.history),
    }


def measured(burn: float, workers: str, options: argparse.Namespace) -> dict[str, float]:
    """`run_once`, in a process of its own."""
    steps = options.steps if burn else options.steps * SHORTER
    given = [str(burn), workers, str(steps), str(options.at_once)]
    command = [sys.executable, __file__, "--one", *given]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


async def caller(task: dict[str, Any], model: Any) -> WorkflowOutput:
    """Makes calls by one of the ways, and says what they took here."""
    import time

    import openai

    from tuner.gateway.clients import http_library

    if task["way"] == "client":
        client = model.client
    else:
        socket = task["socket"] if task["way"] == "unix socket" else None
        library = http_library(openai.DefaultAsyncHttpxClient)
        limits = library.Limits(max_keepalive_connections=64)
        http = library.AsyncClient(transport=library.AsyncHTTPTransport(uds=socket, limits=limits))
        client = openai.AsyncOpenAI(
            base_url=model.base_url, api_key=model.api_key, http_client=http, max_retries=0
        )

    async def calls(count: int) -> None:
        for _ in range(count):
            await client.chat.completions.create(**task["request"])

    await calls(20)
    began, busy = time.perf_counter(), time.process_time()
    await calls(task["calls"] // 4)
    latency = (time.perf_counter() - began) / (task["calls"] // 4)
    began, busy = time.perf_counter(), time.process_time()
    await asyncio.gather(*(calls(task["calls"] // 16) for _ in range(16)))
    count = task["calls"] // 16 * 16
    return WorkflowOutput(
        reward=0.0,
        metrics={
            "latency": latency,
            "rate": count / (time.perf_counter() - began),
            "cpu": (time.process_time() - busy) / count,
        },
    )


async def measure_ways(calls: int) -> dict[str, dict[str, float]]:
    """What a call costs by each way."""
    import uvicorn

    from tuner.gateway.http import _Endpoint, _Server
    from tuner.rollouts.runner import Caller
    from tuner.rollouts.worker_pool import Pool
    from tuner.traces import RolloutId

    gateway = make_gateway(streamed=False)
    pool = Pool(1, caller, None, "plain", 600.0)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "door")
        config = uvicorn.Config(
            _Endpoint(gateway), uds=path, ws="none", lifespan="off", log_config=None
        )
        server = _Server(config)
        serving = asyncio.ensure_future(server.serve())
        try:
            for way in WAYS:
                session = gateway.open_session(way)
                task = {"way": way, "socket": path, "calls": calls, "request": REQUEST}
                called = pool.calling(session, {}, RolloutId(1, 0, 0), seed=None)
                made: Caller
                async with called as made:
                    busy = time.process_time()
                    output = await made.workflow(task, None)
                    spent = time.process_time() - busy
                assert output.metrics is not None
                answered = len(session.seal())
                found[way] = {**output.metrics, "ours": spent / answered}
        finally:
            await pool.aclose()
            server.should_exit = True
            await serving
            await gateway.aclose()
    return found


def rows_of_ways(found: dict[str, dict[str, float]]) -> list[Row]:
    """What the worker's client saves beside httpx."""
    rows = []
    for way in WAYS[1:]:
        for metric, name, more in (
            ("CPU of the run's process, ms a call", "ours", False),
            ("CPU of the worker, ms a call", "cpu", False),
            ("latency, ms", "latency", False),
            ("calls/s, 16 at a time", "rate", True),
        ):
            scale = 1 if more else 1000
            ours, peer = found["client"][name] * scale, found[way][name] * scale
            rows.append(
                Row("way to the gateway", metric, ours, f"httpx, {way}", peer, more_is_better=more)
            )
    return rows


def main() -> None:
    """Measure, in turns, and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--at-once", type=int, default=64)
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        burn, workers, steps, at_once = options.one
        print(json.dumps(run_once(float(burn), workers, int(steps), int(at_once))))
        return
    cases = {"heavy": BURN, "light": 0.0}
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    for _ in range(options.rounds):
        for case, burn in cases.items():
            for workers in ("0", *WORKERS):
                found.setdefault((case, workers), []).append(measured(burn, workers, options))

    def median(case: str, workers: str, name: str) -> float:
        return statistics.median(one[name] for one in found[case, workers])

    rows = []
    for case, goal in (("heavy", GOAL), ("light", LIGHT_GOAL)):
        for workers in WORKERS:
            here, there = (1 / median(case, count, "seconds") for count in ("0", workers))
            named = f"steps/s, {workers} workers"
            rows.append(Row(case, named, there, "one process", here, target=goal))
            here, there = (median(case, count, "waited") for count in ("0", workers))
            named = f"engine waits, s a step, {workers} workers"
            rows.append(Row(case, named, there, "one process", here, more_is_better=False))
    rows += rows_of_ways(asyncio.run(measure_ways(options.calls)))
    report("workers", rows, ["torch", "transformers", "openai", "uvicorn"])


if __name__ == "__main__":
    main()
