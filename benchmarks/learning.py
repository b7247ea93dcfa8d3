"""Held-out accuracy of `examples/gsm8k`, the demo, before and after training.

Three seeds.

The numbers of the repository's `config.yaml`, with nothing but the seed changed; greedy, on the 200
held-out problems, through the real AgentScope agent.

    python benchmarks/learning.py
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from _report import Row, report

ROOT = Path(__file__).parents[1]
SEEDS = (1, 2, 3)
WANTED_RISE = 0.30


def main() -> None:
    os.environ.setdefault("AGENTSCOPE_DISABLE_CONSOLE_OUTPUT", "true")
    sys.path.insert(0, str(ROOT / "examples" / "gsm8k"))
    import main as example

    from tuner import tune

    rows = []
    rises = []
    for seed in SEEDS:
        with tempfile.TemporaryDirectory() as folder:
            result = tune(
                example.run_react_agent,
                example.judge_function,
                config_path=ROOT / "config.yaml",
                overrides=[f"tuner.seed={seed}", f"checkpoint_root_dir={folder}"],
            )
        before, after = result.eval_before["test"], result.eval_after["test"]
        rises.append(after - before)
        case = f"seed {seed}, {result.steps} steps, {result.seconds:.0f} s"
        rows.append(Row(case, "held-out accuracy", after, "before training", before))
    mean_rise = sum(rises) / len(rises)
    rows.append(Row("mean of the seeds", "rise", mean_rise, "wanted", WANTED_RISE, target=1.0))
    report("learning", rows, ["torch", "transformers", "agentscope"])


if __name__ == "__main__":
    main()
