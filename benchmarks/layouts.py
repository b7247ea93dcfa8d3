"""The layout that `tuner.layout: auto` chooses, beside the fastest of tree, packed and padded rows.

A grid of 60 batches: 2 to 64 rollouts, 1 to 20 turns, 100 to 4,000 tokens in the longest row, with
a prompt that all rollouts of a task share or that none share. `--scale` divides tokens, so that the
grid takes about ten minutes on two cores; batches of which a layout would compute more than
`--most` tokens are not measured in that layout, which then cannot be the fastest.

One update of each layout is timed in turn, after one that is not counted, and the smallest of the
repeats counts. The regret of a batch is how much longer the chosen layout takes than the fastest.

    python benchmarks/layouts.py [--scale 8] [--most 60000] [--repeats 2] [--batches 60]
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product

import torch
from _report import Row as Result
from _report import report
from train_step import MAX_TOKENS, SHAPES, Case, make_batch, ours

from tuner.training.batch import Batch
from tuner.training.forward.layouts import exact_forward
from tuner.training.forward.rows import padded_cuts

SHAPE = SHAPES["cpu"][0]
LAYOUTS = ("tree", "packed", "padded")
ROLLOUTS, TURNS, TOKENS = (2, 4, 8, 16, 32, 64), (1, 2, 5, 10, 20), (100, 400, 1000, 4000)
REGRET = 0.05
NOISE = 1.02
"""Two times of the same update on an idle machine."""


def grid(count: int, scale: int) -> list[tuple[str, Case]]:
    """Batches spread evenly over the grid, the same ones every time."""
    every = list(product(ROLLOUTS, TURNS, TOKENS, (True, False)))
    chosen = random.Random(0).sample(every, count)
    found = []
    for rollouts, turns, tokens, shared in sorted(chosen):
        length = max(tokens // scale, 8 * turns)
        prompt = length // 2 if shared else 0
        turn = max(4, (length - prompt) // turns)
        group = min(8, rollouts) if shared else 1
        said = max(2, turn // 2)
        case = Case("", rollouts // group, group, turns, prompt, turn - said, said)
        name = f"{rollouts} rollouts x {turns} turns, {tokens} tokens"
        found.append((f"{name}, {'a shared prompt' if shared else 'nothing shared'}", case))
    return found


def seconds(works: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """The smallest of the repeats, of all in turn."""
    taken: dict[str, list[float]] = {name: [] for name in works}
    for repeat in range(repeats + 1):
        for name, work in works.items():
            start = time.perf_counter()
            work()
            if repeat:
                taken[name].append(time.perf_counter() - start)
    return {name: min(times) for name, times in taken.items()}


def padded_tokens(batch: Batch) -> int:
    cuts = padded_cuts(batch.rows, MAX_TOKENS)
    return sum(max(len(batch.rows[i]) for i in cut) * len(cut) for cut in cuts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=int, default=8)
    parser.add_argument("--most", type=int, default=60_000)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--batches", type=int, default=60)
    arguments = parser.parse_args()
    started = time.perf_counter()
    chooser = exact_forward(SHAPE.model("cpu"), None, layout="auto")
    fitted = time.perf_counter() - started
    started = time.perf_counter()
    exact_forward(SHAPE.model("cpu"), None, layout="tree")
    fitted -= time.perf_counter() - started
    results, regrets, behind = [], [], []
    for name, case in grid(arguments.batches, arguments.scale):
        batch = make_batch(case, SHAPE.vocabulary)
        if case.group == 1:  # rollouts that share no tokens are compared too
            batch = replace(batch, group_R=torch.arange(case.groups) // 8)
        layouts = LAYOUTS if padded_tokens(batch) <= arguments.most else LAYOUTS[:1]
        choice = chooser.planned(batch.rows, MAX_TOKENS)[0].layout
        found = seconds(
            {each: ours(batch, each, SHAPE, "cpu") for each in layouts}, arguments.repeats
        )
        best = min(found, key=found.__getitem__)
        mine = found.get(choice, float("inf"))
        regrets.append(mine / found[best] - 1)
        if "padded" in found:
            behind.append(mine / found["padded"] - 1)
        row = partial(Result, f"{name}: {choice}", "s/update", more_is_better=False)
        results.append(row(ours=mine, peer=best, peer_value=found[best]))
    times, losses = [1 + each for each in regrets], [1 + each for each in behind]
    less = partial(Result, more_is_better=False)
    summary = [
        less("fitting the costs", "s", fitted, "allowed", 1.0, 1.0),
        less("largest regret", "times the fastest", max(times), "allowed", 1 + REGRET, 1.0),
        less("mean regret", "times the fastest", statistics.mean(times)),
        less("beside padded rows", "times padded rows", max(losses), "allowed", NOISE, 1.0),
    ]
    report("layouts", [*summary, *results], ["torch", "transformers"])


if __name__ == "__main__":
    main()
