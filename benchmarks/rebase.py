"""Sampling saved and accuracy reached by rebasing a run whose judge was wrong.

Three seeds.

The repository's `config.yaml`. A third of its problems take three operations, and to these the
wrong judge gives the reward with the other sign. The run with that judge is rebased with the right
one (`tuner rebase`) and compared with the run that had the right one from its beginning: greedy
accuracy on the held-out problems, and tokens sampled for training.

    python benchmarks/rebase.py [SEED ...] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from _report import Row, report

ROOT = Path(__file__).parents[1]
SEEDS = (1, 2, 3)
WITHIN = 0.02
"""What the accuracy may be less than the clean run's."""
SAMPLING = 0.6
"""Of the clean run's."""

os.environ.setdefault("AGENTSCOPE_DISABLE_CONSOLE_OUTPUT", "true")
sys.path.insert(0, str(ROOT / "examples" / "gsm8k"))

import main as example  # noqa: E402

from tuner import JudgeOutput, TuneResult, rebase, tune  # noqa: E402
from tuner.tasks.functions import StoredResponse  # noqa: E402
from tuner.traces import read_traces  # noqa: E402


async def wrong(task: dict[str, Any], response: Any, auxiliary_models: Any) -> JudgeOutput:
    """As the right one, with the other sign where a problem takes three operations."""
    right = await example.judge_function(task, response, auxiliary_models)
    return JudgeOutput(reward=-right.reward if task["answer"].count("<<") == 3 else right.reward)


def accuracy(result: TuneResult) -> float:
    """Of the last evaluation, whatever its own judge said."""

    async def rewards() -> list[float]:
        traces = list(read_traces(sorted(result.traces.glob("test_step_*.jsonl"))[-1]))
        judged = [
            await example.judge_function(trace.task, StoredResponse(trace.response), {})
            for trace in traces
            if trace.final
        ]
        return [one.reward for one in judged]

    return fmean(asyncio.run(rewards()))


def of_seed(seed: int, folder: Path) -> list[Row]:
    """Three runs of one seed, and what they say."""

    def run(judge: Any, name: str) -> TuneResult:
        return tune(
            example.run_react_agent,
            judge,
            config_path=ROOT / "config.yaml",
            experiment_name=f"{name}-{seed}",
            overrides=[f"tuner.seed={seed}", f"checkpoint_root_dir={folder}"],
        )

    clean, mistaken = run(example.judge_function, "clean"), run(wrong, "wrong")
    found = rebase(
        mistaken.run_dir,
        example.judge_function,
        workflow=example.run_react_agent,
    )
    print(found)
    used = found.record.tokens("kept", "again")
    anew = found.result.tokens.sampled - used
    right, after = accuracy(clean), accuracy(found.result)
    steps = sum(one.use in ("kept", "again") for one in found.record.steps)
    case = f"seed {seed}: {steps} of {clean.steps} steps from what was recorded"
    return [
        Row(case, "accuracy with the wrong judge", accuracy(mistaken), "clean run", right),
        Row(case, "accuracy rebased", after, f"clean run less {WITHIN}", right - WITHIN, target=1),
        Row(
            case,
            "share of its sampling",
            anew / clean.tokens.sampled,
            "at most",
            SAMPLING,
            target=1,
            more_is_better=False,
        ),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("seeds", nargs="*", type=int, default=SEEDS)
    parser.add_argument("--folder", type=Path, help="where the runs stay")
    given = parser.parse_args(arguments)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in given.seeds:
            rows += of_seed(seed, given.folder or Path(folder))
    report("rebase", rows, ["torch", "transformers", "agentscope"])


if __name__ == "__main__":
    main()
