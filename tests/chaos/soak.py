"""A run that goes on for half an hour, and what its process holds meanwhile.

    OMP_NUM_THREADS=1 python -m tests.chaos.soak [--minutes 30] [--every 60] [--grown 64]

The whole loop: rollouts of which some fail, are retried or talk twice, updates, checkpoints,
evaluations. Resident memory, descriptors and threads are printed every minute. After its first
fifth it may not grow by more than `--grown` MiB. What must grow is the history of metrics, about
8 KiB a step, and the gateway's memory of keys that have ended, about 1 KiB a rollout up to 100,000.
It ends by Ctrl-C, and in time.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from tests.chaos.runs import begin, end, unsound, warm_up, with_models
from tests.golden import recipes
from tests.golden.recipes import run_rollouts
from tuner import WorkflowOutput
from tuner.runs.directory import RunDirectory


async def workflow(task: Any, model: Any) -> WorkflowOutput:
    if random.random() < 0.02:
        raise LookupError("no tool")
    return await recipes.workflow(task, model)


def forever(folder: Path) -> None:
    run_rollouts(
        folder,
        "tuner.deterministic=false",
        "algorithm.repeat_times=4",
        "buffer.batch_size=4",
        "buffer.total_steps=1000000",
        "explorer.max_retry_times=1",
        "explorer.eval_interval=50",
        "explorer.runner_per_model=8",
        "trainer.save_interval=50",
        "trainer.max_checkpoints_to_keep=2",
        "algorithm.optimizer.lr=0.00001",
        workflow=workflow,
        evaluate=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--every", type=float, default=60, help="seconds between two rows")
    parser.add_argument("--grown", type=float, default=64, help="MiB that it may grow by")
    arguments = parser.parse_args()
    rows: list[tuple[float, int, int]] = []
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        warm_up(root)
        folder = with_models(root / "soak", root / "models")
        metrics = RunDirectory(folder / "p" / "run").metrics
        begun = begin(forever, folder)
        process = psutil.Process(begun.process)
        print("minutes | steps | RSS, MiB | descriptors | threads\n--- | --- | --- | --- | ---")
        while (minutes := (time.perf_counter() - begun.at) / 60) < arguments.minutes:
            left = arguments.minutes * 60 - minutes * 60
            time.sleep(min(arguments.every, max(left, 0.01)))
            if process.status() == psutil.STATUS_ZOMBIE:
                break
            steps = len(metrics.read_bytes().splitlines()) if metrics.exists() else 0
            rss, descriptors = process.memory_info().rss / 2**20, process.num_fds()
            rows.append((rss, descriptors, steps))
            minutes = (time.perf_counter() - begun.at) / 60
            print(
                f"{minutes:.1f} | {steps} | {rss:.1f} | {descriptors} | {process.num_threads()}",
                flush=True,
            )
        ended = end(begun, after=0, by=signal.SIGINT)
        wrong = unsound(folder)
        if not ended.error.startswith("KeyboardInterrupt"):
            log = folder.with_suffix(".log").read_text()[-5000:]
            wrong.append(f"it ended with {ended.code} {ended.error}: {log}")
    first, last = rows[len(rows) // 5], rows[-1]
    if last[0] - first[0] > arguments.grown:
        wrong.append(f"memory grew from {first[0]:.0f} to {last[0]:.0f} MiB")
    if last[1] > first[1] + 4:
        wrong.append(f"descriptors grew from {first[1]} to {last[1]}")
    print(f"{last[0] - first[0]:+.1f} MiB in {last[2] - first[2]} steps; {wrong or 'all is well'}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
