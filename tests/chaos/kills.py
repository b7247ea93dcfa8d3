"""Kill small runs at random moments, let them go on, and compare what they leave.

    OMP_NUM_THREADS=1 python -m tests.chaos.kills [--count 200] [--seed 0] [NAME ...]

A run is killed up to four times and then goes on to its end: mostly by SIGKILL, sometimes by
SIGTERM or Ctrl-C. What it leaves is what a run leaves that nobody killed, bit for bit: weights,
the trainer's state, traces, metrics and result without their times. Asynchronous runs depend on
time: their accounts must hold, and training once more on what they recorded must end with their
weights.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from functools import cache
from pathlib import Path

from tests.chaos.runs import (
    RUNS,
    accounts,
    begin,
    differences,
    end,
    left,
    retrained,
    unsound,
    warm_up,
    with_models,
)
from tests.golden.runs import import_once

SIGNALS = [signal.SIGKILL] * 4 + [signal.SIGTERM, signal.SIGINT]


class Killing:
    """Kills runs below a folder.

    Attributes:
        kills: How many processes of each run were killed by which signal.
        wrong: What was not as it should be.
    """

    def __init__(self, root: Path, seed: int) -> None:
        self.root = root
        self.rng = random.Random(seed)
        self.kills: dict[str, Counter[str]] = {}
        self.runs = Counter[str]()
        self.wrong: list[str] = []
        self.straight = cache(self._straight)

    def _straight(self, name: str) -> tuple[float, dict[str, str]]:
        """How long a run takes that nobody kills, and what it leaves."""
        folder = with_models(self.root / "straight" / name, self.root / "models")
        ended = end(begin(RUNS[name], folder))
        if ended.code:
            raise RuntimeError(f"{name}: {folder.with_suffix('.log').read_text()[-5000:]}")
        return ended.seconds, {} if name.startswith("ahead") else left(folder)

    def kill(self, name: str, number: int, most: int) -> None:
        """Kill a run a few times, `most` at most, and let it go on to its end."""
        seconds, straight = self.straight(name)
        rng, killed = self.rng, self.kills.setdefault(name, Counter())
        folder = with_models(self.root / f"{name} {number}", self.root / "models")
        story = []
        for _ in range(min(most, rng.choice((1, 1, 2, 3, 4)))):
            by, after = rng.choice(SIGNALS), rng.uniform(0, seconds)
            ended = end(begin(RUNS[name], folder), after=after, by=by)
            story.append(f"{by.name} after {after:.3f} s: {ended.code} {ended.error}")
            if found := unsound(folder):
                self.wrong.append(f"{folder}: {story}: {found}")
            if ended.code == 0:
                break
            if ended.code not in (-by, 1) or not ended.wanted:
                self.wrong.append(f"{folder}: {story}")
            killed[by.name] += 1
        ended = end(begin(RUNS[name], folder))
        if ended.code:
            wrong = [f"it does not go on: {ended.error}"]
        elif name.startswith("ahead"):
            wrong = accounts(folder, steps=4, batch=2, repeat=3, staleness=2)
            wrong += retrained(RUNS[name], folder)
        else:
            wrong = unsound(folder) or differences(left(folder), straight)
        self.runs[name] += 1
        print(f"{self.total()} kills: {name}", flush=True)
        if wrong:
            self.wrong.append(f"{folder}: {story}: {wrong}")
        else:
            shutil.rmtree(folder)

    def total(self) -> int:
        return sum(counts.total() for counts in self.kills.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(RUNS)}; none is all")
    parser.add_argument("--count", type=int, default=200, help="kills, all runs together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="an empty folder in which what is wrong is kept")
    arguments = parser.parse_intermixed_args()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        killing = Killing(arguments.keep or Path(temporary), arguments.seed)
        import_once(Path(temporary))
        warm_up(Path(temporary))
        names, number, told = arguments.names or list(RUNS), 0, 0
        while (total := killing.total()) < arguments.count:
            killing.kill(names[number % len(names)], number, arguments.count - total)
            number += 1
            for text in killing.wrong[told:]:
                print(text, flush=True)
            told = len(killing.wrong)
    print("run | runs | SIGKILL | SIGTERM | SIGINT\n--- | --- | --- | --- | ---")
    for name, counts in killing.kills.items():
        each = " | ".join(str(counts[by.name]) for by in dict.fromkeys(SIGNALS))
        print(f"{name} | {killing.runs[name]} | {each}")
    print(
        f"{killing.total()} kills of {killing.runs.total()} runs, {len(killing.wrong)} wrong "
        f"(seed {arguments.seed}, {time.perf_counter() - began:.0f} s)"
    )
    return int(bool(killing.wrong))


if __name__ == "__main__":
    sys.exit(main())
