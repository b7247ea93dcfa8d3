"""Rollouts that an agent needs to learn: tasks drawn by success beside a shuffled order.

The tiny model, the shipped problems, an OpenAI client as agent. What is trained on is some of the
problems among others that teach nothing, whose reward is always 1 or always 0; beside that the
problems alone, where there is little to gain and nothing should be lost. A run is evaluated after
every second step, and its rollouts until the held-out reward are interpolated between; one that
does not get there counts as all that it made, and is told.

    python benchmarks/curriculum.py [--seeds 3] [--steps 64]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from _report import Row, report
from agent_step import is_right, solve

from tuner import JudgeOutput, tune

ROOT = Path(__file__).parents[1]
DATA = ROOT / "examples" / "gsm8k" / "data"
BATCH, GROUP = 8, 8
EVALUATED, EACH = 60, 2
WANTED = 0.8
SIDES = {
    "shuffle": ("buffer.explorer_input.taskset.data_selector.selector_type=shuffle",),
    "success": ("tuner.tasks.selector.kind=success",),
}


def rows(split: str) -> list[dict[str, Any]]:
    lines = (DATA / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@dataclass(frozen=True)
class Case:
    """What is trained on.

    Attributes:
        problems: Problems with their own answers.
        always, never: Others, whose reward is always 1, and always 0.
        target: The ratio that is wanted.
    """

    problems: int
    always: int
    never: int
    target: float

    def tasks(self) -> list[dict[str, Any]]:
        fixed = [None] * self.problems + [1.0] * self.always + [0.0] * self.never
        return [{**row, "fixed": one} for row, one in zip(rows("train"), fixed, strict=False)]


CASES = {
    "a tenth teaches, the others always pass or never": Case(10, 45, 45, 1.5),
    "problems alone": Case(100, 0, 0, 1 / 1.25),
}


async def judge(task: dict[str, Any], response: str) -> JudgeOutput:
    fixed = task.get("fixed")
    return JudgeOutput(reward=is_right(response, task) if fixed is None else fixed)


def rollouts(history: list[dict[str, Any]]) -> tuple[float, bool]:
    """How many until the held-out reward is there, and whether it is."""
    seen = [(row["step"], row["eval/eval/reward"]) for row in history if "eval/eval/reward" in row]
    for (first, before), (last, now) in pairwise(seen):
        if now >= WANTED:
            part = (WANTED - before) / (now - before) if now > before else 1.0
            return (first + part * (last - first)) * BATCH * GROUP, True
    return seen[-1][0] * BATCH * GROUP, False


def run(case: Case, side: str, seed: int, steps: int) -> tuple[float, bool]:
    """One run, which is taken up again until it is there."""
    with tempfile.TemporaryDirectory() as folder:
        for until in range(4, steps + 1, 4):
            result = tune(
                solve,
                judge,
                case.tasks(),
                eval_dataset=rows("test")[:EVALUATED],
                overrides=[
                    "algorithm.optimizer.lr=2e-4",
                    f"algorithm.repeat_times={GROUP}",
                    f"buffer.batch_size={BATCH}",
                    f"buffer.total_steps={until}",
                    f"model.model_path={ROOT / 'models' / 'tiny_math'}",
                    "model.max_model_len=512",
                    "model.max_response_tokens=96",
                    "explorer.runner_per_model=64",
                    f"explorer.eval_interval={EACH}",
                    "tuner.signal_patience=20",
                    f"tuner.seed={seed}",
                    f"checkpoint_root_dir={folder}",
                    "name=run",
                    *SIDES[side],
                ],
            )
            found = rollouts(result.history)
            if found[1]:
                break
    rewards = [round(row.get("eval/eval/reward", -1), 3) for row in result.history[::EACH]]
    print(f"{side}, seed {seed}: {found} {rewards}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=64)
    given = parser.parse_args()
    found_rows = []
    for name, case in CASES.items():
        print(name, flush=True)
        found = {
            side: [run(case, side, seed, given.steps) for seed in range(given.seeds)]
            for side in SIDES
        }
        there = ", ".join(f"{side} {sum(ok for _, ok in one)}" for side, one in found.items())
        means = {side: fmean(count for count, _ in one) for side, one in found.items()}
        found_rows.append(
            Row(
                f"{name}; of {given.seeds} there: {there}",
                f"rollouts to {WANTED}",
                means["success"],
                "shuffle",
                means["shuffle"],
                case.target,
                more_is_better=False,
            )
        )
    report("curriculum", found_rows, ["torch", "transformers", "openai", "numpy"])


if __name__ == "__main__":
    main()
