"""Many wrong requests to the gateway, over every route, in process and over HTTP.

    OMP_NUM_THREADS=1 python -m tests.chaos.bodies [--count 100000] [--seed 0] [--grown 200]

The bodies and what is looked at after each are those of `tests/gateway/test_fuzz.py`: no 5xx, no
answer that takes half a minute, no token lost, no task left. Resident memory may not grow by more
than `--grown` MiB after the first fifth.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import Counter

import psutil

from tests.gateway.test_fuzz import AT_ONCE, EACH, ROUTES, let_loose

HTTP = 10
"""Of so many sessions one is over HTTP."""


def send(count: int, seed: str) -> tuple[Counter[int], list[float]]:
    """How often each status came, and the resident memory, MiB, after each twentieth."""
    statuses, memory, sent = Counter[int](), list[float](), 0
    process = psutil.Process()
    for number in range(-(-count // (AT_ONCE * EACH))):
        route = ROUTES[number % len(ROUTES)]
        over_http = number // len(ROUTES) % HTTP == 0
        statuses += asyncio.run(let_loose(route, f"{seed}-{number}", over_http=over_http))
        sent += AT_ONCE * EACH
        if sent * 20 // count > len(memory):
            memory.append(process.memory_info().rss / 2**20)
    return statuses, memory


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", default="0")
    parser.add_argument("--grown", type=float, default=200, help="MiB that it may grow by")
    arguments = parser.parse_args()
    began = time.perf_counter()
    statuses, memory = send(arguments.count, arguments.seed)
    grown = memory[-1] - memory[len(memory) // 5]
    print(f"RSS, MiB, after each twentieth: {' '.join(f'{each:.0f}' for each in memory)}")
    print(
        f"{arguments.count} bodies, {statuses.total()} answers that were waited for: "
        f"{', '.join(f'{status}: {n}' for status, n in sorted(statuses.items()))}; "
        f"{grown:+.0f} MiB (seed {arguments.seed}, {time.perf_counter() - began:.0f} s)"
    )
    return int(grown > arguments.grown)


if __name__ == "__main__":
    sys.exit(main())
