"""Many sessions of one gateway over HTTP, and what the process holds meanwhile.

    OMP_NUM_THREADS=1 python -m tests.chaos.sessions [--count 10000] [--seed 0] [--grown 20]

Each is opened, asked once or twice in one of the dialects, whole or as a stream, sometimes left in
the middle of an answer, and sealed. No session is kept, and at the end there are no more tasks and
descriptors than after the first fifth; resident memory may not grow by more than `--grown` MiB.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from dataclasses import astuple, dataclass

import httpx
import psutil

from tests.engines.models import until
from tests.gateway.fuzzing import BODIES
from tests.gateway.test_fuzz import Watched
from tests.kit.toy import gateway_of
from tuner.gateway import Gateway

AT_ONCE = 8
ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")


@dataclass(frozen=True)
class Held:
    """What the process holds.

    Attributes:
        memory: Resident, MiB.
        sessions: That the gateway knows.
    """

    memory: float
    descriptors: int
    tasks: int
    sessions: int

    @classmethod
    def now(cls, gateway: Gateway) -> Held:
        process = psutil.Process()
        return cls(
            process.memory_info().rss / 2**20,
            process.num_fds(),
            len(asyncio.all_tasks()),
            len(gateway._sessions),
        )


async def use(gateway: Gateway, client: httpx.AsyncClient, name: str) -> int:
    """One session, from its opening to its end; how many of its calls were recorded."""
    rng = random.Random(name)
    session = gateway.open_session(name, seed=rng.randrange(2**32))
    headers = {"authorization": f"Bearer {session.key}"}
    for _ in range(rng.choice((1, 2))):
        path = rng.choice(ROUTES)
        body = {"model": "tiny", **BODIES[path][0], "stream": rng.random() < 0.5}
        async with client.stream("POST", path, json=body, headers=headers) as response:
            assert response.status_code == 200, (path, await response.aread())
            if body["stream"] and rng.random() < 0.1:
                await anext(response.aiter_bytes())  # the client goes away
            else:
                await response.aread()
    return len(session.seal())


async def open_many(count: int, seed: int) -> tuple[int, list[Held]]:
    """Recorded calls of `count` sessions, and what is held after each fifth of them."""
    calls, held = 0, []
    engine = Watched(max_model_len=100_000, grammars=True)
    async with gateway_of(engine) as gateway:
        url = gateway.base_url.removesuffix("/v1")
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            for fifth in range(5):
                numbers = iter(range(fifth * count // 5, (fifth + 1) * count // 5))

                async def some(numbers=numbers) -> int:
                    return sum([await use(gateway, client, f"{seed}-{n}") for n in numbers])

                calls += sum(await asyncio.gather(*(some() for _ in range(AT_ONCE))))
                engine.sampled.clear()  # it keeps all for its own tests
                engine.requests.clear()
                await until(lambda: not engine.sampling)
                held.append(Held.now(gateway))
    return calls, held


def grown(held: list[Held], memory: float) -> list[str]:
    """What grew from the first fifth to the last; a few connections more or less are none."""
    first, last = held[0], held[-1]
    slack = Held(memory, AT_ONCE, AT_ONCE, 0)
    return [
        f"{name} grew from {before} to {after}"
        for name, before, after, more in zip(
            vars(first), astuple(first), astuple(last), astuple(slack), strict=True
        )
        if after > before + more
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--grown", type=float, default=20, help="MiB that it may grow by")
    arguments = parser.parse_args()
    began = time.perf_counter()
    calls, held = asyncio.run(open_many(arguments.count, arguments.seed))
    print("sessions | RSS, MiB | descriptors | tasks | sessions kept\n" + "--- | " * 4 + "---")
    for fifth, now in enumerate(held, 1):
        print(
            f"{fifth * arguments.count // 5} | {now.memory:.1f} | {now.descriptors} | {now.tasks} "
            f"| {now.sessions}"
        )
    wrong = grown(held, arguments.grown)
    print(
        f"{arguments.count} sessions with {calls} calls, {wrong or 'nothing grew'} "
        f"(seed {arguments.seed}, {time.perf_counter() - began:.0f} s)"
    )
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
