"""Sampled tokens until an agent has learned: rollouts that begin inside others, and flat ones.

The agent of `examples/branching` takes notes first, and its end decides. Each side trains it in
groups of one size at three learning rates, five seeds each; what counts is its best rate. A run is
evaluated after each step, and its tokens (and seconds) until the held-out reward are interpolated
between steps; a run that does not get there counts as all that it sampled, and is told.

    python benchmarks/branching.py [--seeds 5] [--steps 8]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from _report import Row, report

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "branching"))

import agent

from tuner import tune

RULE = f"{agent.__file__}:before_the_answers"
RATES = (2e-4, 5e-4, 1e-3)
EVALUATED = 100
# Problems that a task asks, all of which must be right, and the held-out reward that is wanted.
CASES = {"long beginning": (1, 0.85), "rare first success": (4, 0.5)}
SIDES: dict[str, Sequence[str]] = {
    "flat, rloo": ("algorithm.algorithm_type=rloo",),
    "tree, before the answers": (
        "algorithm.algorithm_type=tree",
        "tuner.branching.ends=8",
        f"tuner.branching.where={RULE}",
    ),
    "tree, best": ("algorithm.algorithm_type=tree", "tuner.branching.where=best"),
}
SETTINGS = (
    "buffer.batch_size=4",
    "algorithm.repeat_times=16",
    "explorer.runner_per_model=64",
    "explorer.eval_interval=1",
    "model.max_response_tokens=64",
)


@dataclass(frozen=True)
class Reached:
    """What a run had taken when it got to the wanted reward.

    Attributes:
        tokens, seconds: Until then; all of the run where it did not.
        there: Whether it did.
    """

    tokens: float
    seconds: float
    there: bool


def reached(history: Sequence[dict[str, Any]], wanted: float) -> Reached:
    """Where a run's held-out reward passes the wanted one."""
    tokens = seconds = 0.0
    before = history[0]["eval/held-out/reward"]
    for row in history[1:]:
        now, sampled, took = row["eval/held-out/reward"], row["tokens/sampled"], row["time/step"]
        if now >= wanted:
            part = (wanted - before) / (now - before) if now > before else 1.0
            return Reached(tokens + part * sampled, seconds + part * took, True)
        before, tokens, seconds = now, tokens + sampled, seconds + took
    return Reached(tokens, seconds, False)


def run(case: str, side: str, rate: float, seed: int, steps: int) -> Reached:
    """One run of a side."""
    asked, wanted = CASES[case]
    with tempfile.TemporaryDirectory() as folder:
        result = tune(
            agent.answer,
            train_dataset=agent.tasks("train", asked=asked),
            # The answers do not read the notes.
            eval_dataset={"held-out": agent.tasks("test", notes=0, asked=asked)[:EVALUATED]},
            overrides=[
                *SETTINGS,
                *SIDES[side],
                f"algorithm.optimizer.lr={rate}",
                f"tuner.seed={seed}",
                f"buffer.total_steps={steps}",
                f"checkpoint_root_dir={folder}",
            ],
        )
    return reached(result.history, wanted)


def best_of(case: str, side: str, seeds: int, steps: int) -> tuple[float, list[Reached]]:
    """A side's best rate, and its runs with that."""
    runs = {rate: [run(case, side, rate, seed, steps) for seed in range(seeds)] for rate in RATES}
    rate = min(runs, key=lambda one: fmean(found.tokens for found in runs[one]))
    return rate, runs[rate]


def compared(case: str, seeds: int, steps: int) -> Iterator[Row]:
    """The rows of one case."""
    found = {side: best_of(case, side, seeds, steps) for side in SIDES}
    flat = found["flat, rloo"][1]
    for side, (rate, runs) in found.items():
        name = f"{case}: {side}, lr {rate:g}, {sum(r.there for r in runs)} of {len(runs)}"
        target = None if runs is flat else 2.0
        tokens = fmean(one.tokens for one in runs), fmean(one.tokens for one in flat)
        seconds = fmean(one.seconds for one in runs), fmean(one.seconds for one in flat)
        metric = f"sampled tokens to {CASES[case][1]}"
        yield Row(name, metric, tokens[0], "flat", tokens[1], target, more_is_better=False)
        yield Row(name, "seconds", seconds[0], "flat", seconds[1], more_is_better=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    rows = [row for case in CASES for row in compared(case, options.seeds, options.steps)]
    report("branching", rows, ("torch", "transformers"))


if __name__ == "__main__":
    main()
