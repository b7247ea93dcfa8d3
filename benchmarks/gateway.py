"""Recorded calls per second and added latency of the gateway, beside LiteLLM's proxy.

    python benchmarks/gateway.py [--rounds 3] [--calls 600] [--litellm .venv-litellm/bin/litellm]

The same stub answers behind both: 32 tokens at once, without a model. Behind the gateway it is an
engine; behind LiteLLM, which forwards requests, it is a server that speaks OpenAI, and runs on the
load's core. What is measured runs in a process of its own on one core, the load on another. A
prompt is a system message, a question and an earlier tool call with its result (about 150 tokens),
with one tool; the tokenizer, chat template and parsers are those of `models/tiny_math`. Each of the
gateway's sessions makes 20 calls, all recorded.

The rows of the openai client's own way are what its short way gains in process.

`latency` is of one request after the other, less that of the bare call of the engine; `calls/s` is
with 16 at a time. Streams send every token as an event of its own. Over HTTP the load is sent
through plain sockets, so that no client library is measured; in process the client is `openai`'s,
which is part of what a call costs there. All take turns in every round; numbers are medians.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from _report import Row, report

from tuner.engines.base import EngineCapabilities, Generation, SamplingParams, TokenSink
from tuner.gateway import ChatRenderer, Gateway, Session

MODEL = Path(__file__).parent.parent / "models" / "tiny_math"
TOKENS = 32
CALLS_PER_SESSION = 20
IN_PROCESS = "in-process", "in-process-own-way"
GOAL_MS = {False: 0.3, True: 2.0}
"""In process, of an answer and of a stream of 33 events."""
GOAL_RATE = 1500
LITELLM_KEY = "sk-benchmark"
_LAST_LINES = 30
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two integers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        },
    },
}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "You are a helpful assistant who is good at sums."},
    {"role": "user", "content": "What is 12 plus 30, and what is that plus 8?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "add", "arguments": '{"a": 12, "b": 30}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "42"},
]
REQUEST: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "tools": [TOOL]}


class StubEngine:
    """Samples the same 32 tokens, at once or, for streams, one in each turn of the loop.

    Args:
        seconds: How long it takes for the first.
    """

    version = 0
    capabilities = EngineCapabilities(max_model_len=4096)

    def __init__(self, ids: Sequence[int], *, one_by_one: bool, seconds: float = 0.0) -> None:
        self._ids = tuple(ids)
        self._one_by_one = one_by_one
        self._seconds = seconds

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        session: str,
        sink: TokenSink | None = None,
        so_far: Generation | None = None,
        adapter: str | None = None,
    ) -> Generation:
        if self._seconds:
            await asyncio.sleep(self._seconds)
        for id_ in self._ids:
            if sink is not None:
                sink.push(id_, -0.5, 0)
            if self._one_by_one:
                await asyncio.sleep(0)
        return Generation(self._ids, (-0.5,) * TOKENS, (0,) * TOKENS, "stop")

    def pause(self) -> AbstractAsyncContextManager[None]:
        return contextlib.nullcontext()

    async def update_weights(self, version: int) -> None: ...

    async def close(self) -> None: ...


def make_parts(*, streamed: bool, seconds: float = 0.0) -> tuple[StubEngine, ChatRenderer]:
    """The stub and what renders its prompts."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(MODEL)
    text = "The sum of the two numbers is 50, as I worked it out. " * 4
    ids = tokenizer.encode(text, add_special_tokens=False)[: TOKENS - 1]
    ids.append(tokenizer.eos_token_id)
    engine = StubEngine(ids, one_by_one=streamed, seconds=seconds)
    return engine, ChatRenderer(tokenizer)


def make_gateway(*, streamed: bool) -> Gateway:
    return Gateway(*make_parts(streamed=streamed), model_name="tiny")


# What is measured, each in a process of its own on one core.


async def measure_in_process(streamed: bool, calls: int, own_way: bool) -> dict[str, float]:
    """Latencies and calls per second of the `openai` client in process.

    Args:
        own_way: The client builds HTTP messages, as it does for any server.
    """
    gateway = make_gateway(streamed=streamed)
    names = (f"r{number}" for number in range(10**9))

    async def rollout() -> AsyncIterator[None]:
        session = gateway.open_session(next(names))
        client = session.async_client()
        create: Any = (client.with_options() if own_way else client).chat.completions.create
        for _ in range(CALLS_PER_SESSION):
            if streamed:
                async for _chunk in await create(**REQUEST, stream=True):
                    pass
            else:
                await create(**REQUEST)
            yield
        assert len(session.seal()) == CALLS_PER_SESSION

    async def bare() -> AsyncIterator[None]:
        for _ in range(CALLS_PER_SESSION):
            await gateway.engine.generate([1] * 150, SamplingParams(max_tokens=TOKENS), "s")
            yield

    async def spent(make: Callable[[], AsyncIterator[None]], count: int) -> list[float]:
        seconds: list[float] = []
        while len(seconds) < count:
            started = time.perf_counter()
            async for _ in make():
                now = time.perf_counter()
                seconds.append(now - started)
                started = now
        return seconds

    await spent(rollout, 40)
    alone = statistics.median(await spent(bare, calls))
    latencies = [seconds - alone for seconds in await spent(rollout, calls)]
    started = time.perf_counter()
    together = await asyncio.gather(*(spent(rollout, calls // 16) for _ in range(16)))
    rate = sum(map(len, together)) / (time.perf_counter() - started)
    return {**percentiles(latencies), "rate": rate}


async def serve_gateway(streamed: bool) -> None:
    """The gateway's HTTP door; prints where it is, and a key for each line that it reads."""
    gateway = make_gateway(streamed=streamed)
    print(gateway.base_url, flush=True)
    loop = asyncio.get_running_loop()
    session: Session | None = None
    number = 0
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        del line
        if session is not None:
            calls = len(session.seal())
            assert calls, "nothing was recorded"
        number += 1
        session = gateway.open_session(f"r{number}")
        print(session.key, flush=True)


def serve_stub(port: int, seconds: float) -> None:
    """The stub as a server that speaks OpenAI, for LiteLLM to forward to.

    Args:
        seconds: How long it takes for an answer, or until a stream begins.
    """
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response, StreamingResponse
    from starlette.routing import Route

    words = [f" word{number}" for number in range(TOKENS)]
    usage = {"prompt_tokens": 150, "completion_tokens": TOKENS, "total_tokens": 150 + TOKENS}
    frame = {"id": "chatcmpl-1", "created": 1, "model": "tiny"}
    message = {"role": "assistant", "content": "".join(words)}
    whole = json.dumps(
        {
            **frame,
            "object": "chat.completion",
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": usage,
        }
    )
    deltas: list[tuple[dict[str, str], str | None]] = [
        *(({"content": word}, None) for word in words),
        ({}, "stop"),
    ]
    chunks = [
        "data: "
        + json.dumps(
            {
                **frame,
                "object": "chat.completion.chunk",
                "choices": [{"index": 0, "delta": delta, "finish_reason": reason}],
            }
        )
        + "\n\n"
        for delta, reason in deltas
    ]

    async def events() -> AsyncIterator[str]:
        for chunk in chunks:
            yield chunk
        yield "data: [DONE]\n\n"

    async def answer(request: Request) -> Response:
        body = await request.json()
        if seconds:
            await asyncio.sleep(seconds)
        if body.get("stream"):
            return StreamingResponse(events(), media_type="text/event-stream")
        return Response(whole, media_type="application/json")

    app = Starlette(routes=[Route("/v1/chat/completions", answer, methods=["POST"])])
    uvicorn.run(app, port=port, log_level="error")


# The load.


async def load(port: int, key: str, streamed: bool, count: int) -> list[float]:
    """Seconds of `count` requests, one after the other over one connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps({**REQUEST, "stream": True} if streamed else REQUEST).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json"
        f"\r\nauthorization: Bearer {key}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    seconds = []
    for _ in range(count):
        started = time.perf_counter()
        writer.write(head.encode() + body)
        await read_response(reader)
        seconds.append(time.perf_counter() - started)
    writer.close()
    await writer.wait_closed()
    return seconds


async def read_response(reader: asyncio.StreamReader) -> None:
    """Read one response to its end.

    Raises:
        RuntimeError: It is not a success.
    """
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = next(
        (
            int(line.split(b":")[1])
            for line in head.split(b"\r\n")
            if line[:14] == b"content-length"
        ),
        None,
    )
    if length is not None:
        body = await reader.readexactly(length)
        if b" 200 " not in head.split(b"\r\n")[0]:
            raise RuntimeError(body.decode())
        return
    while size := int(await reader.readline(), 16):
        await reader.readexactly(size + 2)
    await reader.readline()


async def measure_server(
    port: int, key: Callable[[], Awaitable[str]], streamed: bool, calls: int
) -> dict[str, float]:
    """Latencies and calls per second of a server; `key` gives the API key of the next session."""
    latencies: list[float] = []
    await load(port, await key(), streamed, CALLS_PER_SESSION)
    while len(latencies) < calls:
        latencies += await load(port, await key(), streamed, CALLS_PER_SESSION)
    count, seconds = 0, 0.0
    while count < calls:
        session = await key()
        started = time.perf_counter()
        await asyncio.gather(*(load(port, session, streamed, CALLS_PER_SESSION) for _ in range(16)))
        seconds += time.perf_counter() - started
        count += 16 * CALLS_PER_SESSION
    return {**percentiles(latencies), "rate": count / seconds}


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Median and 99th percentile in milliseconds."""
    cuts = statistics.quantiles(seconds, n=100)
    return {"p50": 1000 * cuts[49], "p99": 1000 * cuts[98]}


# The parts as processes.


@contextlib.contextmanager
def process(command: Sequence[str], core: int, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A process on one core, stopped at the end."""
    child = subprocess.Popen(
        command,
        text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
        **options,
    )
    try:
        yield child
    finally:
        child.terminate()
        child.wait()


def this_script(*arguments: str) -> list[str]:
    return [sys.executable, __file__, *arguments]


def run_in_process(streamed: bool, calls: int, core: int, part: str) -> dict[str, float]:
    arguments = this_script("--part", part, "--calls", str(calls))
    with process(arguments + ["--streamed"] * streamed, core, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        result: dict[str, float] = json.loads(child.stdout.readline())
        return result


def run_gateway(streamed: bool, calls: int, core: int) -> dict[str, float]:
    arguments = this_script("--part", "gateway") + ["--streamed"] * streamed
    with process(arguments, core, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        stdin, stdout = child.stdin, child.stdout
        assert stdin is not None
        assert stdout is not None
        port = int(stdout.readline().split(":")[2].split("/")[0])

        async def key() -> str:
            stdin.write("next\n")
            stdin.flush()
            return stdout.readline().strip()

        return asyncio.run(measure_server(port, key, streamed, calls))


def run_litellm(
    executable: str, streamed: bool, calls: int, core: int, load_core: int
) -> dict[str, float]:
    async def key() -> str:
        return LITELLM_KEY

    with litellm_proxy(executable, core, load_core) as (port, _):
        return asyncio.run(measure_server(port, key, streamed, calls))


@contextlib.contextmanager
def litellm_proxy(
    executable: str, core: int, stub_core: int, seconds: float = 0.0
) -> Iterator[tuple[int, int]]:
    """LiteLLM's proxy before a stub that takes so many seconds for an answer: port and process."""
    stub_port, port = free_port(), free_port()
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        config.write_text(
            "model_list:\n"
            "  - model_name: tiny\n"
            "    litellm_params:\n"
            "      model: openai/tiny\n"
            f"      api_base: http://127.0.0.1:{stub_port}/v1\n"
            "      api_key: none\n"
            "general_settings:\n"
            f"  master_key: {LITELLM_KEY}\n"
        )
        environment = {
            **os.environ,
            "LITELLM_LOG": "ERROR",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "LITELLM_TELEMETRY": "False",
        }
        stub = this_script("--part", "stub", "--port", str(stub_port), "--seconds", str(seconds))
        command = [executable, "--config", str(config), "--port", str(port)]
        log = Path(folder) / "log"
        with log.open("wb") as errors:
            quiet = {"stdout": subprocess.DEVNULL, "stderr": errors}
            with (
                process(stub, stub_core, **quiet) as behind,
                process([*command, "--host", "127.0.0.1"], core, env=environment, **quiet) as child,
            ):
                wait_for(stub_port, behind, log)
                wait_for(port, child, log)
                yield port, child.pid


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(port: int, child: subprocess.Popen[str], log: Path) -> None:
    """Wait until a process listens; LiteLLM takes half a minute to start.

    Args:
        log: What it writes its errors to.

    Raises:
        RuntimeError: It has ended, or does not listen within two minutes; with the end of its log.
    """
    what = f"nothing listens on port {port} after two minutes"
    for _ in range(1200):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        if child.poll() is not None:
            what = f"what was to listen on port {port} has ended with status {child.returncode}"
            break
        time.sleep(0.1)
    said = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:]
    raise RuntimeError("\n".join([f"{what}; the end of its log:", *said]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--calls", type=int, default=600)
    parser.add_argument("--litellm", default=".venv-litellm/bin/litellm", help="its executable")
    parser.add_argument("--part", choices=[*IN_PROCESS, "gateway", "stub"], help=argparse.SUPPRESS)
    parser.add_argument("--streamed", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=0.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part in IN_PROCESS:
        own_way = options.part == IN_PROCESS[1]
        print(json.dumps(asyncio.run(measure_in_process(options.streamed, options.calls, own_way))))
    elif options.part == "gateway":
        asyncio.run(serve_gateway(options.streamed))
    elif options.part == "stub":
        serve_stub(options.port, options.seconds)
    else:
        compare(options.rounds, options.calls, options.litellm)


def compare(rounds: int, calls: int, litellm: str) -> None:
    """Measure everything in turn, and report."""
    if not Path(litellm).exists():
        raise SystemExit(
            f"{litellm} does not exist: install 'litellm[proxy]' in an environment of its own and "
            "name its executable with --litellm (`make bench` does)"
        )
    load_core, core = sorted(os.sched_getaffinity(0))[:2]
    os.sched_setaffinity(0, {load_core})
    found: dict[tuple[str, bool], list[dict[str, float]]] = {}
    for _ in range(rounds):
        for streamed in (False, True):
            measured = {
                "in process": run_in_process(streamed, calls, core, IN_PROCESS[0]),
                "own way": run_in_process(streamed, calls, core, IN_PROCESS[1]),
                "over HTTP": run_gateway(streamed, calls, core),
                "LiteLLM": run_litellm(litellm, streamed, calls, core, load_core),
            }
            for name, got in measured.items():
                found.setdefault((name, streamed), []).append(got)
    rows = []
    for streamed in (False, True):
        suffix = ", streamed" if streamed else ""

        def median(name: str, metric: str, streamed: bool = streamed) -> float:
            return statistics.median(round[metric] for round in found[name, streamed])

        for name in ("in process", "over HTTP"):
            case = name + suffix
            rows.append(
                Row(
                    case,
                    "calls/s",
                    median(name, "rate"),
                    "LiteLLM proxy",
                    median("LiteLLM", "rate"),
                    target=3,
                )
            )
            for metric in ("p50", "p99"):
                rows.append(
                    Row(
                        case,
                        f"added latency, {metric}, ms",
                        median(name, metric),
                        "LiteLLM proxy",
                        median("LiteLLM", metric),
                        more_is_better=False,
                    )
                )
        rows.append(
            Row(
                "in process" + suffix,
                "calls/s",
                median("in process", "rate"),
                "openai client's own way",
                median("own way", "rate"),
                target=2,
            )
        )
        goal = GOAL_MS[streamed]
        rows.append(
            Row(
                "in process" + suffix,
                "added latency, p50, ms",
                median("in process", "p50"),
                f"{goal} ms",
                goal,
                target=1,
                more_is_better=False,
            )
        )
    rate = statistics.median(round["rate"] for round in found["over HTTP", False])
    rows.append(Row("over HTTP", "calls/s", rate, f"{GOAL_RATE:,}", GOAL_RATE, target=1))
    packages = ["agentscope-tuner", "openai", "uvicorn", "starlette"]
    report("gateway", rows, packages, {"litellm": litellm_version(litellm)})


def litellm_version(executable: str) -> str:
    """The version of LiteLLM in the environment of its executable."""
    script = "from importlib.metadata import version; print(version('litellm'))"
    python = Path(executable).parent / "python"
    return subprocess.check_output([python, "-c", script], text=True).strip()


if __name__ == "__main__":
    main()
