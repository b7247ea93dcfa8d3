"""Seconds per step before and after the changes that a run advises at its end.

64 rollouts of the tiny model in each step, with agents or judges that sleep (a tool, a judge behind
a URL) or neither, with `explorer.runner_per_model` 8, the default, and 64. What
`synchronizer.sync_offset` gains is measured by `async`.

    python benchmarks/advice.py [--steps 6] [--wait 0.3]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from typing import Any

from _report import Row, report

from tuner import JudgeOutput, WorkflowOutput, tune

BEFORE, AFTER = 8, 64
LEAST_GAIN = 1.2


def seconds(arguments: argparse.Namespace, waits: str, at_once: int) -> float:
    """Mean seconds of a step after the first."""

    async def workflow(task: dict[str, Any], model: Any) -> WorkflowOutput:
        made = await model.client.chat.completions.create(
            model=model.model_name, messages=[{"role": "user", "content": task["question"]}]
        )
        if waits == "agent":
            await asyncio.sleep(arguments.wait)
        return WorkflowOutput(response=made.choices[0].message.content or "")

    async def judge(task: dict[str, Any], response: str) -> JudgeOutput:
        if waits == "judge":
            await asyncio.sleep(arguments.wait)
        return JudgeOutput(reward=sum(map(ord, response)) % 17 / 17)

    with tempfile.TemporaryDirectory() as folder:
        result = tune(
            workflow,
            judge,
            [{"question": f"What is {a} + {b}?"} for a in range(8) for b in range(8)],
            overrides=[
                f"checkpoint_root_dir={folder}",
                f"explorer.runner_per_model={at_once}",
                "buffer.batch_size=8",
                f"buffer.total_steps={arguments.steps}",
                "algorithm.repeat_times=8",
                "algorithm.optimizer.lr=1e-7",
                "model.max_response_tokens=48",
            ],
        )
    return statistics.fmean(row["time/step"] for row in result.history[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--wait", type=float, default=0.3)
    arguments = parser.parse_args()
    rows = []
    for case in ("agent", "judge", "generation"):
        before = seconds(arguments, case, BEFORE)
        rows.append(
            Row(
                f"most of the time is {case}, {AFTER} rollouts at a time",
                "s/step",
                seconds(arguments, case, AFTER),
                f"{BEFORE} at a time",
                before,
                LEAST_GAIN,
                more_is_better=False,
            )
        )
    report("advice", rows, packages=("torch", "transformers"))


if __name__ == "__main__":
    main()
