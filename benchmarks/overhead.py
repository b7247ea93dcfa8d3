"""Operators and milliseconds of an update in which arithmetic costs nothing, in each layout.

The model has the 28 layers of Qwen3-0.6B with hidden size 16, so that an update is bound by Python
and by the number of operators, as one of a few thousand tokens is on a GPU. Forward pass, backward
pass, loss and optimizer step of tree, packed and padded rows are counted beside a plain pass of the
same model over padded rows in the same micro-batches: its own forward pass with `labels`, backward
pass, clipping and fused AdamW. TRL's loss and optimizer run on one padded batch of the same rows;
that is possible with one turn only, where all prompts have one length.

Operators are those that reach PyTorch's dispatcher, views included; their number does not depend on
what else runs on the machine. The smallest of the repeats counts for milliseconds. Larger batches
need several passes, so what is compared there is the operators of one pass. Times of padded and
packed rows of the largest batch are left out, because each takes minutes.

    python benchmarks/overhead.py [--thousands 2 16 64] [--repeats 3] [--no-trl] [--no-times]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from _report import Row as Result
from _report import report
from torch.utils._python_dispatch import TorchDispatchMode
from train_step import MAX_TOKENS, Case, Shape, make_batch, ours, trl

from tests.training.configured import training
from tuner.training.batch import Batch, Row
from tuner.training.forward.layouts import Forward, exact_forward
from tuner.training.forward.rows import padded_cuts
from tuner.training.losses import micro_batch_loss, row_weights
from tuner.training.optimizer import make_optimizer
from tuner.training.scoring import ScoredBatch, row_advantages, tokens_of

SHAPE = Shape("28 layers of width 16", 512, 16, 48, 28, 2, 1, 8)
LAYOUTS = ("tree", "packed", "padded")
FEW = 2
"""Padded rows whose operators are counted: more rows take no more operators."""
GOAL = round(1 / 1.2, 3)
"""No layout has more than 1.2 times the operators of the plain pass."""
LARGEST = 16
"""Thousands of tokens up to which all layouts are timed."""
CASES = {
    2: Case("2k tokens, 8 rollouts x 6 turns", 1, 8, 6, 64, 20, 21),
    16: Case("16k tokens, 32 rollouts x 8 turns", 4, 8, 8, 512, 31, 31),
    64: Case("64k tokens, 32 rollouts x 10 turns", 4, 8, 10, 2048, 99, 100),
}
ONE_TURN = Case("2k tokens, 16 rollouts x 1 turn", 4, 4, 1, 20, 40, 110)


class Operators(TorchDispatchMode):
    """Counts the operators of a block."""

    count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


Parts = dict[str, Callable[[], None]]
"""The parts of an update of one micro-batch, to be called in this order."""


@dataclass
class Ours:
    """An update in one layout, part by part: the code that `PolicyTrainer` runs for its first
    micro-batch."""

    batch: Batch
    layout: Any

    def parts(self) -> Parts:
        model = SHAPE.model("cpu")
        config = training(total_steps=1000, kl="none", layout=self.layout)
        forward: Forward = exact_forward(model, None, layout=self.layout)
        optimizer = make_optimizer(model.parameters(), lr=1e-6)
        scored = ScoredBatch(self.batch, row_advantages(self.batch, config))
        indices = forward.micro_batches(self.batch.rows, MAX_TOKENS)[0]
        if self.layout == "padded":
            indices = indices[:FEW]
        rows = [self.batch.rows[i] for i in indices]
        weights_N = row_weights(
            config.algorithm.loss_agg_mode,
            torch.tensor([len(row.completion_ids) for row in self.batch.rows]),
            torch.tensor([row.rollout for row in self.batch.rows]),
            self.batch.call_N,
        )
        found: dict[str, Any] = {}

        def pass_forward() -> None:
            found["current"] = forward.logprobs(model, rows, with_entropy=False)

        def loss() -> None:
            tokens = tokens_of(
                scored, indices, found["current"], weights_N=weights_N, proximal=None, step=0
            )
            found["loss"] = micro_batch_loss(config.algorithm, config.tuner.algorithm, tokens)[0]

        def step() -> None:
            optimizer.clip_grad_norm(1.0)
            optimizer.step_if_finite("loss", 0.0, 0.0, setting="lr")

        return {
            "forward": pass_forward,
            "loss": loss,
            "backward": lambda: found["loss"].backward(),
            "optimizer": step,
        }


def plain(rows: Sequence[Row]) -> Parts:
    """A pass of the model over padded rows, as somebody would write it."""
    model = SHAPE.model("cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    width = max(map(len, rows))
    ids = torch.tensor(
        [[*row.prompt_ids, *row.completion_ids, *[0] * (width - len(row))] for row in rows]
    )
    starts = torch.tensor([[len(row.prompt_ids)] for row in rows])
    ends = torch.tensor([[len(row)] for row in rows])
    place = torch.arange(width)
    labels = ids.masked_fill((place < starts) | (place >= ends), -100)
    found: dict[str, Any] = {}

    def pass_forward() -> None:
        found["loss"] = model(input_ids=ids, labels=labels, use_cache=False).loss

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return {
        "forward": pass_forward,
        "loss": lambda: None,  # in the forward pass
        "backward": lambda: found["loss"].backward(),
        "optimizer": step,
    }


def counted(parts: Parts) -> dict[str, int]:
    """Operators of each part, of the second update."""
    for part in parts.values():  # the first makes the optimizer's state
        part()
    found = {}
    for name, part in parts.items():
        with Operators() as seen:  # type: ignore[no-untyped-call]  # of torch
            part()
        found[name] = seen.count
    return found


def milliseconds(update: Callable[[], Any], repeats: int) -> float:
    update()
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        update()
        taken.append(time.perf_counter() - start)
    return min(taken) * 1e3


def plain_update(batch: Batch) -> Callable[[], None]:
    cuts = padded_cuts(batch.rows, MAX_TOKENS)
    passes = [plain([batch.rows[i] for i in cut]) for cut in cuts]

    def update() -> None:
        for parts in passes:
            for name in ("forward", "backward"):
                parts[name]()
        passes[0]["optimizer"]()

    return update


def operators(case: Case) -> list[Result]:
    """Of the first micro-batch of each layout, part by part."""
    batch = make_batch(case, SHAPE.vocabulary)
    usual = counted(plain(batch.rows[:FEW]))
    results = []
    for layout in LAYOUTS:
        found = counted(Ours(batch, layout).parts())
        for name, goal in (("all", GOAL), *((part, None) for part in found)):
            value, peer = (
                sum(parts.values()) if name == "all" else parts[name] for parts in (found, usual)
            )
            row = partial(Result, f"{case.name}: {layout}", f"operators: {name}", value)
            peers = ("plain padded pass", peer) if peer else ()
            results.append(row(*peers, target=goal, more_is_better=False))
    return results


def times(case: Case, repeats: int, layouts: Sequence[str], *, with_trl: bool) -> list[Result]:
    """Of whole updates."""
    batch = make_batch(case, SHAPE.vocabulary)
    peers = {}
    if len(layouts) > 1:
        peers["plain padded pass"] = GOAL, milliseconds(plain_update(batch), repeats)
    if with_trl and case.turns == 1:
        peers["TRL GRPOTrainer"] = 1.0, milliseconds(trl(batch, case, SHAPE, "cpu"), repeats)
    results = []
    for layout in layouts:
        taken = milliseconds(ours(batch, layout, SHAPE, "cpu"), repeats)
        row = partial(Result, f"{case.name}: {layout}", "ms/update", taken, more_is_better=False)
        results += [row(peer, theirs, target=goal) for peer, (goal, theirs) in peers.items()]
        if not peers:
            results.append(row())
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--thousands", type=int, nargs="+", choices=list(CASES), default=[*CASES])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-trl", action="store_true", help="leave TRL out")
    parser.add_argument("--no-times", action="store_true", help="count operators only")
    arguments = parser.parse_args()
    results = []
    for thousands, case in ((1, ONE_TURN), *((n, CASES[n]) for n in arguments.thousands)):
        results += operators(case)
        if not arguments.no_times:
            layouts = LAYOUTS if thousands <= LARGEST else LAYOUTS[:1]
            results += times(case, arguments.repeats, layouts, with_trl=not arguments.no_trl)
    report("overhead", results, ["torch", "transformers", "trl"])


if __name__ == "__main__":
    main()
