"""Many agents at one server of `tuner serve`, which is killed meanwhile again and again.

    OMP_NUM_THREADS=1 python -m tests.chaos.serving
        [--sessions 1000] [--processes 10] [--kills 20] [--seed 0]

The agents are processes with the openai and anthropic libraries and `tuner.AsyncClient`, several
sessions at a time in each: conversations of one to three turns, half of them streamed, with rewards
for sessions and calls, at once and late, given once or again. Some ask without a key, with a wrong
one, or for another session. The server is killed by SIGKILL when about so many requests have been
answered, now and then again while it starts, and once more at the end. Then it is asked for all
that it has:

- every answer that an agent got is a call of its own session, once, in the same words;
- no call is there that nobody got, unless it is marked as undelivered;
- no session has a word of another's; each turn goes on with the token ids of the one before;
- each session and call has the reward that was given to it last;
- what was refused (401) left no session, call or reward.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import select
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.chaos.runs import PATIENCE, Begun, begin, end
from tests.serving.server import ADMIN_KEY, free_port, serve
from tuner import AsyncClient, Client, ServingError
from tuner.serving import AsyncServedSession, CallInfo, SessionInfo
from tuner.traces import Trace
from tuner.traces.store import trace_from_json

AT_ONCE = 4
"""Sessions at the same time in each process."""
MODEL = Path(__file__).parents[2] / "models" / "tiny_math"
QUESTION = "Tom starts with 43 pens. He buys 35 more pens. How many pens does Tom have now?"
TOKENS = 64
RETRIES = 100
"""Of the libraries."""
SECRET = re.compile(r"secret-\d+")


@dataclass
class Used:
    """What an agent knows of a session that it used.

    Attributes:
        secret: A word that is in all that it asks, and in no other session.
        answers: What it got, by the id of the call.
        reward, call_rewards: What it gave last.
        kind: Library and form.
    """

    id: str
    secret: str
    kind: str
    answers: list[tuple[str, str]] = field(default_factory=list)
    reward: float | None = None
    call_rewards: dict[str, float] = field(default_factory=dict)
    ended: bool = False
    broken: int = 0


# An agent.


class Agent:
    """Uses sessions one after the other.

    Args:
        answered: Called for each answer.
    """

    def __init__(self, client: AsyncClient, name: str, answered: Callable[[], None]) -> None:
        self.client = client
        self.rng = random.Random(name)
        self.answered = answered
        self.refused = Counter[str]()
        self.used: list[Used] = []

    async def use(self, number: int) -> None:
        """A session from its opening to its end; its rewards may come later."""
        secret = f"secret-{number}"
        group = f"group {number // 4}"
        session = await self.client.open(task={"about": secret}, group=group, tags=[secret])
        kind = self.rng.choice(sorted(KINDS))
        used = Used(session.id, secret, kind)
        self.used.append(used)
        library, ask = KINDS[kind]
        async with getattr(session, library)(max_retries=RETRIES, timeout=60) as client:
            await self._talk(session, used, partial(ask, client))
        if self.rng.random() < 0.5:
            await self.judge(session, used)
        if self.rng.random() < 0.5:
            used.ended = (await session.end()).state == "ended"

    async def _talk(self, session: AsyncServedSession, used: Used, ask: Callable[..., Any]) -> None:
        messages: list[dict[str, Any]] = []
        for turn in range(self.rng.choice((1, 2, 3))):
            question = (
                f"{used.secret}: Tom has {turn + 5} pens. He buys 3 more. How many has he now?"
            )
            messages.append({"role": "user", "content": question})
            call, text = await self._asked(used, partial(ask, messages), f"{used.secret}-{turn}")
            messages.append({"role": "assistant", "content": text})
            used.answers.append((call, text))
            self.answered()
            if self.rng.random() < 0.1:
                await self._intrude(session)

    async def _asked(self, used: Used, ask: Callable[..., Any], key: str) -> tuple[str, str]:
        """A call's id and its text; what breaks off is asked for again under the same key."""
        # The libraries try again by themselves where no answer has begun.
        headers = {"Idempotency-Key": key}
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            try:
                answer: tuple[str, str] = await ask(headers)
                return answer
            except Exception as error:
                if not _broke_off(error):
                    raise
                used.broken += 1
                await asyncio.sleep(self.rng.uniform(0.05, 0.2))
        raise TimeoutError(f"{used}: no answer in {PATIENCE} s")

    async def judge(self, session: AsyncServedSession, used: Used) -> None:
        """A reward for it, or for one of its calls, sometimes twice."""
        for _ in range(self.rng.choice((1, 1, 2))):
            value = round(self.rng.random(), 6)
            if self.rng.random() < 0.5:
                await session.reward(value, feedback=used.secret)
                used.reward = value
            else:
                call = self.rng.choice(used.answers)[0]
                await session.reward(value, call=call)
                used.call_rewards[call] = value

    async def judge_late(self) -> None:
        """Rewards for some of all sessions, by their ids alone."""
        for used in self.rng.sample(self.used, len(self.used) // 2):
            await self.judge(self.client.session(used.id), used)

    async def _intrude(self, session: AsyncServedSession) -> None:
        """Ask with no key, a wrong one, and for another session; each must get 401."""
        how = self.rng.choice(("no key", "wrong key", "wrong control key", "other session"))
        others = [used.id for used in self.used if used.id != session.id]
        key = session.key if how == "other session" else f"{ADMIN_KEY}s"
        if how == "wrong control key" or (how == "other session" and others):
            async with AsyncClient(self.client.base_url, key=key or "", patience=PATIENCE) as thief:
                asked = (
                    thief.open(task={})
                    if how == "wrong control key"
                    else (thief.session(self.rng.choice(others)).reward(0.0))
                )
                status = await _status(asked)
        else:
            key = "" if how == "no key" else f"{session.key}x"
            status = await _raw_status(session.base_url, key)
        if status != 401:
            raise AssertionError(f"{how}: {status}")
        self.refused[how] += 1


async def _status(request: Any) -> int | None:
    try:
        await request
    except ServingError as error:
        return error.status
    return 200


async def _raw_status(base_url: str, key: str) -> int:
    """The status of a request for a completion; tried again where the server is away."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    body = {"model": MODEL.name, "messages": [{"role": "user", "content": "let me in"}]}
    url, until = f"{base_url}/chat/completions", time.monotonic() + PATIENCE
    async with httpx.AsyncClient(timeout=60) as client:
        while time.monotonic() < until:
            try:
                return (await client.post(url, json=body, headers=headers)).status_code
            except httpx.TransportError:
                await asyncio.sleep(0.2)
    raise TimeoutError("the server does not come back")


def _broke_off(error: Exception) -> bool:
    """Whether a library says that the connection did."""
    import anthropic
    import httpx2
    import openai

    lost = (
        openai.APIConnectionError,
        anthropic.APIConnectionError,
        httpx.TransportError,
        httpx2.TransportError,
    )
    return isinstance(error, lost)


async def chat(client: Any, messages: Any, headers: Any) -> tuple[str, str]:
    reply = await client.chat.completions.create(
        model=MODEL.name, messages=messages, max_tokens=TOKENS, extra_headers=headers
    )
    return f"{reply.id}-0", reply.choices[0].message.content or ""


async def streamed_chat(client: Any, messages: Any, headers: Any) -> tuple[str, str]:
    stream = await client.chat.completions.create(
        model=MODEL.name, messages=messages, max_tokens=TOKENS, stream=True, extra_headers=headers
    )
    id_, text, ended = "", "", False
    async for chunk in stream:
        id_ = chunk.id
        for choice in chunk.choices:
            text += choice.delta.content or ""
            ended = ended or choice.finish_reason is not None
    if not ended:
        raise EARLY
    return f"{id_}-0", text


async def streamed_responses(client: Any, messages: Any, headers: Any) -> tuple[str, str]:
    stream = await client.responses.create(
        model=MODEL.name,
        input=messages,
        max_output_tokens=TOKENS,
        stream=True,
        extra_headers=headers,
    )
    answer = None
    async for event in stream:
        if event.type in ("response.completed", "response.incomplete"):
            answer = f"{event.response.id}-0", event.response.output_text
    if answer is None:
        raise EARLY
    return answer


async def message(client: Any, messages: Any, headers: Any) -> tuple[str, str]:
    reply = await client.messages.create(
        model=MODEL.name, messages=messages, max_tokens=TOKENS, extra_headers=headers
    )
    return f"{reply.id}-0", _text(reply)


async def streamed_message(client: Any, messages: Any, headers: Any) -> tuple[str, str]:
    async with client.messages.stream(
        model=MODEL.name, messages=messages, max_tokens=TOKENS, extra_headers=headers
    ) as stream:
        reply = await stream.get_final_message()
    if reply.stop_reason is None:
        raise EARLY
    return f"{reply.id}-0", _text(reply)


def _text(reply: Any) -> str:
    return "".join(block.text for block in reply.content if block.type == "text")


EARLY = httpx.ReadError("the stream ended early")
KINDS: dict[str, tuple[str, Callable[..., Any]]] = {
    "openai": ("openai", chat),
    "openai, streamed": ("openai", streamed_chat),
    "responses, streamed": ("openai", streamed_responses),
    "anthropic": ("anthropic", message),
    "anthropic, streamed": ("anthropic", streamed_message),
}


def agents(folder: Path, *, url: str, numbers: range, name: str, told: int) -> None:
    """A process of agents: what it knows in the end is in its folder; a byte for each answer."""

    async def work() -> None:
        async with AsyncClient(url, key=ADMIN_KEY, patience=PATIENCE) as client:
            agent = Agent(client, name, lambda: os.write(told, b"."))
            left = iter(numbers)

            async def some() -> None:
                for number in left:
                    await agent.use(number)

            async with asyncio.TaskGroup() as group:
                for _ in range(AT_ONCE):
                    group.create_task(some())
            await agent.judge_late()
        known = {"used": [asdict(used) for used in agent.used], "refused": agent.refused}
        folder.with_suffix(".json").write_text(json.dumps(known))

    asyncio.run(work())


# The server, and who kills it.


def configuration(folder: Path) -> Path:
    """The file that the server is started with."""
    path = folder / "config.yaml"
    settings = {
        "project": "p",
        "name": "run",
        "checkpoint_root_dir": str(folder),
        "model": {"model_path": str(MODEL), "max_model_len": 512},
        "tuner": {"reasoning": "keep", "serving": {"log": False}},
    }
    path.write_text(yaml.safe_dump(settings))
    return path


@dataclass
class Server:
    """The server's process, started again after each kill."""

    folder: Path
    port: int
    kills: int = 0
    starts: int = 0
    process: Begun | None = None

    def start(self) -> None:
        config = self.folder / "config.yaml"
        self.process = begin(lambda _: serve(config, self.port), self.folder / "server")
        self.starts += 1

    def kill(self) -> None:
        """Kill it.

        Raises:
            RuntimeError: It had ended by itself.
        """
        assert self.process is not None
        ended = end(self.process, after=0, by=signal.SIGKILL)
        if ended.code != -signal.SIGKILL:
            log = self.process.said.with_suffix(".log").read_text()[-5000:]
            raise RuntimeError(f"the server ended by itself: {ended}: {log}")
        self.kills += 1


def killed_at(answers: int, kills: int, rng: random.Random) -> Iterator[int]:
    """How many answers are waited for before each kill; 0 is while it starts."""
    left = kills
    while left:
        yield max(1, round(answers / (kills + 1) * rng.uniform(0.6, 1.2)))
        left -= 1
        if left > 1 and rng.random() < 0.2:
            yield 0
            left -= 1


def torment(server: Server, watched: int, workers: list[Begun], plan: Iterator[int]) -> None:
    """Kill the server as planned, and let the agents come to their end."""
    rng = random.Random(server.port)
    for answers in plan:
        while answers > 0 and (told := _next(watched, answers)):
            answers -= len(told)
        time.sleep(rng.uniform(0, 0.02 if answers == 0 else 0.3))
        server.kill()
        server.start()
    while _next(watched, 1 << 16):
        pass
    for worker in workers:
        ended = end(worker)
        if ended.code:
            log = worker.said.with_suffix(".log").read_text()[-5000:]
            raise RuntimeError(f"an agent failed: {ended.error}: {log}")


def _next(watched: int, most: int) -> bytes:
    """What agents have told since; nothing where all have ended."""
    if not select.select([watched], [], [], PATIENCE)[0]:
        raise TimeoutError(f"no agent got an answer for {PATIENCE} s")
    return os.read(watched, most)


# What is asked of the server then.


def wrong_with(used: Used, info: SessionInfo, calls: list[CallInfo], trace: Trace) -> list[str]:
    """What is not as the agent knows it."""
    found = []
    ids = Counter(call.id for call in calls)
    delivered = {call.id: call for call in calls if not call.undelivered}
    for call, text in used.answers:
        if ids[call] != 1 or call not in delivered:
            found.append(f"call {call} is there {ids[call]} times, delivered: {call in delivered}")
        elif (said := delivered[call].response.get("content") or "") != text:
            found.append(f"call {call} said {said!r}, and the agent got {text!r}")
    if more := delivered.keys() - {call for call, _ in used.answers}:
        found.append(f"nobody got {sorted(more)}")
    words = {word for call in calls for word in SECRET.findall(json.dumps(call.messages))}
    if words | {info.task["about"]} != {used.secret}:
        found.append(f"it has words of {words}")
    if (info.reward, info.call_rewards) != (used.reward, used.call_rewards):
        found.append(f"rewards {info.reward}, {info.call_rewards}")
    if (info.state == "ended") != used.ended:
        found.append(f"it is {info.state}")
    return [f"{used}: {each}" for each in found + broken_turns(trace)]


def broken_turns(trace: Trace) -> list[str]:
    """Turns of a conversation that do not go on with the token ids of the one before.

    A turn that was cut off, or has the end of its reasoning among its words, is another text for
    the template, also at a server that nobody kills.
    """
    calls = [call for call in trace.calls if not call.undelivered]
    return [
        f"{after.id} does not go on from {before.id}"
        for before, after in pairwise(calls)
        if (said := (*before.prompt_ids, *before.completion_ids))
        and after.prompt_ids[: len(said)] != said
        and before.finish_reason != "length"
        and "</think>" not in str(before.response.get("content"))
    ]


def check(url: str, known: list[Used]) -> tuple[list[str], Counter[str]]:
    """What is wrong with what the server has, and how much of what it has."""
    wrong, counts = [], Counter[str]()
    by_id = {used.id: used for used in known}
    with Client(url, key=ADMIN_KEY, patience=PATIENCE) as client:
        stored = list(client.sessions())
        if Counter(info.id for info in stored) != Counter(by_id.keys()) or len(by_id) != len(known):
            wrong.append(f"{len(stored)} sessions are stored, {len(known)} were opened")
        for info in stored:
            session = client.session(info.id)
            calls = session.calls()
            counts["sessions"] += 1
            counts["calls"] += len(calls)
            counts["undelivered"] += sum(call.undelivered for call in calls)
            counts["rewards"] += info.judged
            if info.id in by_id:
                wrong += wrong_with(by_id[info.id], info, calls, trace_from_json(session.export()))
    return wrong, counts


def import_once() -> None:
    """Import here what the processes use that are forked then."""
    import anthropic
    import openai
    import torch
    import transformers.models.qwen3.modeling_qwen3
    from tqdm import tqdm

    import tuner.serving.hosting

    del anthropic, openai, transformers, tuner
    tqdm.monitor_interval = 0  # it has a thread
    torch.set_num_threads(1)


def run(folder: Path, *, sessions: int, processes: int, kills: int, seed: int) -> list[str]:
    """Let them loose and print what came of it; what was wrong."""
    began = time.perf_counter()
    import_once()
    configuration(folder)
    server = Server(folder, free_port())
    url = f"http://127.0.0.1:{server.port}"
    server.start()
    watched, told = os.pipe()
    shares = [range(each, sessions, processes) for each in range(processes)]
    workers = [
        begin(partial(agents, url=url, numbers=numbers, name=f"{seed} {place}", told=told), path)
        for place, numbers in enumerate(shares)
        if (path := folder / f"agents {place}")
    ]
    os.close(told)
    plan = killed_at(2 * sessions, kills, random.Random(seed))
    try:
        torment(server, watched, workers, plan)
        server.kill()  # what is asked for now is on disk
        server.start()
        told_by = [json.loads(path.read_text()) for path in folder.glob("agents *.json")]
        known = [Used(**used) for each in told_by for used in each["used"]]
        wrong, counts = check(url, known)
    finally:
        server.kill()
        for worker in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.process, signal.SIGKILL)
    refused = sum((Counter(each["refused"]) for each in told_by), Counter[str]())
    answers = sum(len(used.answers) for used in known)
    print(
        "library and form | sessions | answers | asked again by the agent\n" + "--- | " * 3 + "---"
    )
    for kind in KINDS:
        of_kind = [used for used in known if used.kind == kind]
        count, broken = sum(len(u.answers) for u in of_kind), sum(u.broken for u in of_kind)
        print(f"{kind} | {len(of_kind)} | {count} | {broken}")
    print(
        f"{server.kills} kills, {len(known)} sessions of {processes} processes, {answers} answers, "
        f"{counts['calls']} calls of which {counts['undelivered']} undelivered, "
        f"{sum(refused.values())} refusals, {len(wrong)} wrong "
        f"(seed {seed}, {time.perf_counter() - began:.0f} s)"
    )
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=10)
    parser.add_argument("--kills", type=int, default=20, help="before the last one")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        wrong = run(Path(temporary), **vars(arguments))
    print(*wrong[:20], sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
