"""Held-out reward before and after a few steps of each algorithm that learns from rewards.

The tiny model, 16 problems x 8 rollouts a step, an OpenAI client as agent. An algorithm's own
settings are its defaults, and all have the same learning rate. The two numbers are the mean reward
of greedy answers to the 200 held-out problems, so chance is in the training alone.

    python benchmarks/algorithms.py [algorithm ...] [--steps 8]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from _report import Row, report
from agent_step import is_right, solve

from tuner import Dataset, JudgeOutput, TuneResult, tune
from tuner.config.algorithms import ADVANTAGES, ALGORITHMS

ROOT = Path(__file__).parents[1]
WANTED_RATIO = 1.1
LEARNING_RATE = 5e-4


async def judge(task: dict[str, Any], response: str) -> JudgeOutput:
    return JudgeOutput(reward=is_right(response, task))


def run(algorithm: str, steps: int) -> TuneResult:
    data = str(ROOT / "examples" / "gsm8k" / "data")
    with tempfile.TemporaryDirectory() as folder:
        return tune(
            solve,
            judge,
            Dataset(path=data, split="train"),
            eval_dataset=Dataset(path=data, split="test"),
            overrides=[
                f"algorithm.algorithm_type={algorithm}",
                f"algorithm.optimizer.lr={LEARNING_RATE}",
                "algorithm.repeat_times=8",
                "buffer.batch_size=16",
                f"buffer.total_steps={steps}",
                f"model.model_path={ROOT / 'models' / 'tiny_math'}",
                "model.max_model_len=512",
                "model.max_response_tokens=96",
                "explorer.runner_per_model=64",
                f"explorer.eval_interval={steps}",
                f"checkpoint_root_dir={folder}",
            ],
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("algorithm", nargs="*", default=[])
    parser.add_argument("--steps", type=int, default=8)
    given = parser.parse_args()
    names = given.algorithm or [
        # The others learn from recorded data or a teacher, which these problems have none of.
        name
        for name, row in ALGORITHMS.items()
        if row.recorded is None and ADVANTAGES[row.advantage_fn].needs_reward
    ]
    rows = []
    for name in names:
        result = run(name, given.steps)
        before, after = result.eval_before["eval"], result.eval_after["eval"]
        case = f"{name}, {given.steps} steps, {result.seconds:.0f} s"
        rows.append(
            Row(case, "held-out reward", after, "before training", before, target=WANTED_RATIO)
        )
    report("algorithms", rows, ["torch", "transformers", "openai"])


if __name__ == "__main__":
    main()
