"""Servers and engines needed for 10,000 sessions a second, from the results of `serve`.

    python benchmarks/serving_queue.py [--sessions 10000] [--calls 3] [--tokens 200]
        [--tokens-per-second 50] [--slots 256] [--seed 0]

Nothing is served here: what `benchmarks/serve.py` measured goes in. Sessions come at random moments
(Poisson), and a session's calls all go to the server that opened it, so each server is a queue of
its own: no idle one helps a busy one.

- A **server's process** works on one call at a time, on a core of its own, for as long as it was
  measured to compute for a call of 256 sessions, recording on disk: an M/G/1 queue. How far single
  calls are from that mean is not measured apart; they are drawn from a log-normal distribution with
  the ratio of p99 to p50 that was measured with one session at a time.
- An **engine's replica** samples `slots` completions at a time, each at `tokens-per-second`; their
  lengths are log-normal with a mean of `tokens` and a coefficient of variation of 1: M/G/k. These
  three are assumptions, to be replaced by what your engine does on your GPUs.

For several utilisations it says how many of each are needed and how long a call waits there. The
simulated mean of M/G/1 stands beside Pollaczek and Khinchine's, that of M/G/k beside the
approximation of Allen and Cunneen (Erlang's C, times (1 + CV^2)/2): two computations of one number.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from _report import RESULTS, Row, report

Z99 = 2.3263
"""The 99th percentile of the normal distribution."""
SERVERS_BUSY = (0.5, 0.7, 0.9)
REPLICAS_BUSY = (0.9, 0.97)  # of 256 places some are free nearly always
CALLS = 400_000
"""How many are simulated for each queue; the first tenth is not counted."""


@dataclass(frozen=True)
class Measured:
    """What a server of one process did, from `benchmarks/results/serve.json`.

    Attributes:
        seconds: What it computes for a call.
        spread: p99 over p50 of the latency of one session.
        stored: Bytes on disk for each call.
    """

    seconds: float
    spread: float
    stored: float

    @classmethod
    def read(cls, path: Path) -> Measured:
        """
        Raises:
            SystemExit: It is not there.
        """
        if not path.is_file():
            raise SystemExit(f"{path} is not there: run benchmarks/serve.py first")
        rows = json.loads(path.read_text())["rows"]
        ours = {(row["case"], row["metric"]): row["ours"] for row in rows}
        one = {name: ours["1 session", f"added latency, {name}, ms"] for name in ("p50", "p99")}
        return cls(
            seconds=ours["256 sessions", "computed by the server, ms per call"] / 1000,
            spread=one["p99"] / one["p50"],
            stored=ours["on disk", "bytes per call"],
        )


def lognormal(rng: np.random.Generator, mean: float, sigma: float, count: int) -> np.ndarray:
    """Draws with this mean; `sigma` is the standard deviation of their logarithm; shape [count]."""
    return rng.lognormal(math.log(mean) - sigma**2 / 2, sigma, count)


def squared_variation(sigma: float) -> float:
    """CV^2, variance over squared mean, of a log-normal distribution."""
    return math.expm1(sigma**2)


def single_waits(rng: np.random.Generator, rate: float, service: np.ndarray) -> np.ndarray:
    """Seconds that each call waits in an M/G/1 queue, by Lindley's recursion; shape [N].

    Args:
        rate: Arrivals per second.
        service: Seconds that each takes, shape [N].
    """
    between = rng.exponential(1 / rate, len(service))
    steps = np.concatenate([[0.0], np.cumsum(service[:-1] - between[1:])])
    waits: np.ndarray = steps - np.minimum.accumulate(steps)
    return waits[len(waits) // 10 :]


def pooled_waits(
    rng: np.random.Generator, rate: float, service: np.ndarray, slots: int
) -> np.ndarray:
    """Seconds that each call waits in an M/G/k queue, first come, first served; shape [N]."""
    arrivals = np.cumsum(rng.exponential(1 / rate, len(service)))
    free = [0.0] * slots
    waits = np.empty(len(service))
    for number, (arrival, seconds) in enumerate(zip(arrivals, service, strict=True)):
        begins = max(arrival, free[0])
        waits[number] = begins - arrival
        heapq.heapreplace(free, begins + seconds)
    return waits[len(waits) // 10 :]


def pollaczek_khinchine(load: float, mean: float, variation: float) -> float:
    """Mean seconds of waiting in M/G/1 (Pollaczek 1930, Khinchine 1932)."""
    return load * mean * (1 + variation) / (2 * (1 - load))


def allen_cunneen(load: float, mean: float, variation: float, slots: int) -> float:
    """Mean seconds of waiting in M/G/k, about (Allen 1990, eq. 5.76)."""
    offered = load * slots
    blocked = 1.0  # Erlang's B, one server after the other
    for number in range(1, slots + 1):
        blocked = offered * blocked / (number + offered * blocked)
    waiting = blocked / (1 - load * (1 - blocked))
    return waiting * mean / (slots * (1 - load)) * (1 + variation) / 2


def rows(options: argparse.Namespace, measured: Measured) -> list[Row]:
    rng = np.random.default_rng(options.seed)
    calls = options.sessions * options.calls
    found = [
        Row("asked for", "calls/s", calls),
        Row("asked for", "written, MB/s", calls * measured.stored / 1e6),
        Row("asked for", "written, TB/day", calls * measured.stored * 86400 / 1e12),
    ]
    sigma = math.log(max(measured.spread, 1.0)) / Z99
    seconds = options.tokens / options.tokens_per_second
    for load in SERVERS_BUSY:
        mean = measured.seconds
        waits = single_waits(rng, load / mean, lognormal(rng, mean, sigma, CALLS))
        theory = pollaczek_khinchine(load, mean, squared_variation(sigma))
        case = f"server processes, {load:.0%} busy"
        found += [
            Row(case, "how many", math.ceil(calls * mean / load)),
            Row(case, "mean wait, ms", 1e3 * waits.mean(), "Pollaczek-Khinchine", 1e3 * theory),
            Row(case, "wait, p99, ms", 1e3 * float(np.quantile(waits, 0.99))),
        ]
    sigma = math.sqrt(math.log(2))  # a coefficient of variation of 1
    for load in REPLICAS_BUSY:
        rate = load * options.slots / seconds
        waits = pooled_waits(rng, rate, lognormal(rng, seconds, sigma, CALLS), options.slots)
        theory = allen_cunneen(load, seconds, 1.0, options.slots)
        case = f"engine replicas, {load:.0%} busy"
        found += [
            Row(case, "how many", math.ceil(calls / rate)),
            Row(case, "mean wait, ms", 1e3 * waits.mean(), "Allen-Cunneen", 1e3 * theory),
            Row(case, "wait, p99, ms", 1e3 * float(np.quantile(waits, 0.99))),
        ]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--sessions", type=float, default=10_000, help="a second")
    parser.add_argument("--calls", type=float, default=3, help="of a session")
    parser.add_argument("--tokens", type=float, default=200, help="of a completion, mean")
    parser.add_argument("--tokens-per-second", type=float, default=50, help="of one completion")
    parser.add_argument("--slots", type=int, default=256, help="completions at a time, a replica")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    report("serving_queue", rows(options, Measured.read(RESULTS / "serve.json")), ["numpy"])


if __name__ == "__main__":
    main()
