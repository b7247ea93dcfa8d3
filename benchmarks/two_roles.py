"""Held-out reward of a solver and a checker: an adapter for each role beside one for both.

Both ways train `examples/two_roles` with the same tasks, groups, rank, learning rate and seeds, and
are evaluated greedily after each step. A number is the mean of the held-out reward from the first
sampled token to the last of the budget (the area below the curve), over the seeds; the budget of a
seed is what the way with fewer tokens has sampled. The other rows are the final reward, and how
often both agents agree before the solver answers again, in the last step.

    python benchmarks/two_roles.py [--seeds 3] [--steps 12]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from statistics import fmean

import numpy as np
from _report import Row, report

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples" / "two_roles"))

import main as example  # noqa: E402  # a script, whose folder is not a package

WAYS = {"an adapter for each role": (), "one adapter for both": ("--shared",)}
Curve = list[tuple[float, float]]
"""Sampled tokens so far, and the held-out reward then."""


def trained(options: tuple[str, ...], seed: int, steps: int) -> tuple[Curve, float]:
    """The curve of one run, and the share of its last rollouts whose agents agree."""
    with tempfile.TemporaryDirectory() as folder:
        result = example.main(
            [
                *options,
                f"tuner.seed={seed}",
                f"buffer.total_steps={steps}",
                "explorer.eval_interval=1",
                f"checkpoint_root_dir={folder}",
                f"model.model_path={ROOT / 'models' / 'tiny_math'}",
            ]
        )
    curve, tokens = [], 0.0
    for row in result.history:
        tokens += row.get("tokens/sampled", 0)
        curve.append((tokens, row["eval/held-out/reward"]))
    return curve, result.history[-1]["workflow/agreed"]


def area(curve: Curve, budget: float) -> float:
    """The mean reward until so many tokens are sampled."""
    tokens, rewards = np.array(curve).T
    inside = tokens < budget
    tokens, rewards = (
        np.append(tokens[inside], budget),
        np.append(rewards[inside], np.interp(budget, tokens, rewards)),
    )
    return float(np.trapezoid(rewards, tokens) / budget)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    runs = {
        way: [trained(given, seed, options.steps) for seed in range(options.seeds)]
        for way, given in WAYS.items()
    }
    budgets = [min(runs[way][seed][0][-1][0] for way in WAYS) for seed in range(options.seeds)]
    own, shared = (
        {
            "mean held-out reward": fmean(
                area(curve, budget) for (curve, _), budget in zip(found, budgets, strict=True)
            ),
            "final held-out reward": fmean(curve[-1][1] for curve, _ in found),
            "agents that agree at the end": fmean(agreed for _, agreed in found),
            "sampled tokens": fmean(curve[-1][0] for curve, _ in found),
        }
        for found in runs.values()
    )
    each, both = WAYS
    rows = [Row(each, metric, value, both, shared[metric]) for metric, value in own.items()]
    report("two_roles", rows, ["torch", "transformers", "peft"])


if __name__ == "__main__":
    main()
