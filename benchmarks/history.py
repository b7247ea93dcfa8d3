"""Held-out accuracy of `examples/gsm8k` learned from a finished run, without a new rollout.

Of each seed a run of ten steps with a learning rate that is too small, and then, from its traces
and the model that it began with, what each algorithm learns; greedy, on the 200 held-out problems,
through the real AgentScope agent. Beside each its peer: that model. The issue's line is a rise of
0.2.

    python benchmarks/history.py
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

from _report import Row, report

ROOT = Path(__file__).parents[1]
SEEDS = (1, 2, 3)
WANTED_RISE = 0.2
STEPS = 10
# Without the parts of the file's GRPO.
_PLAIN = ["algorithm.policy_loss_fn_args=null", "algorithm.kl_loss_fn=null"]
_PLAIN += ["algorithm.kl_loss_fn_args=null"]
CASES: dict[str, list[str]] = {
    "sft, the best of each task": [
        "algorithm.algorithm_type=sft",
        "algorithm.optimizer.lr=1e-3",
        "tuner.history.best=2",
        "tuner.history.min_reward=1",
        *_PLAIN,
    ],
    "dpo, best against worst": [
        "algorithm.algorithm_type=dpo",
        "algorithm.optimizer.lr=3e-4",
        *_PLAIN,
    ],
    "raft": ["algorithm.algorithm_type=raft", "algorithm.optimizer.lr=1e-3", *_PLAIN],
    "multi_step_grpo, off-policy": ["algorithm.optimizer.lr=5e-4"],
    "topr, off-policy": [
        "algorithm.algorithm_type=topr",
        "algorithm.optimizer.lr=5e-4",
        "algorithm.policy_loss_fn_args=null",
    ],
}


def main() -> None:
    os.environ.setdefault("AGENTSCOPE_DISABLE_CONSOLE_OUTPUT", "true")
    sys.path.insert(0, str(ROOT / "examples" / "gsm8k"))
    import main as example

    from tuner import tune

    def run(folder: str, seed: int, name: str, *overrides: str) -> Any:
        return tune(
            example.run_react_agent,
            example.judge_function,
            config_path=ROOT / "config.yaml",
            overrides=[
                f"tuner.seed={seed}",
                f"checkpoint_root_dir={folder}",
                f"name={name}",
                f"buffer.total_steps={STEPS}",
                "explorer.eval_interval=0",
                "monitor.monitor_type=[]",
                *overrides,
            ],
        )

    rows, found = [], {name: list[float]() for name in CASES}
    for seed in SEEDS:
        with tempfile.TemporaryDirectory() as folder:
            first = run(folder, seed, "first", "algorithm.optimizer.lr=1e-4")
            before = first.eval_before["test"]
            case = f"seed {seed}: the run itself, {first.tokens.sampled} tokens"
            rows.append(Row(case, "held-out accuracy", first.eval_after["test"], "before", before))
            for number, (name, overrides) in enumerate(CASES.items()):
                result = run(
                    folder,
                    seed,
                    f"again-{number}",
                    f"tuner.history.sources=[{first.run_dir}]",
                    *overrides,
                )
                after = result.eval_after["test"]
                found[name].append(after - before)
                shares = [row.get("train/effective_tokens", 1.0) for row in result.history[1:]]
                case = f"seed {seed}: {name}, {result.tokens.trained} tokens"
                rows.append(Row(case, "held-out accuracy", after, "before", before))
                if min(shares) < 1:
                    rows.append(Row(case, "least effective share of tokens", min(shares)))
    for name, rises in found.items():
        rows.append(Row(name, "mean rise", fmean(rises), "wanted", WANTED_RISE, target=1.0))
        rows.append(Row(name, "least rise", min(rises), "wanted", WANTED_RISE, target=1.0))
    report("history", rows, ["torch", "transformers", "agentscope"])


if __name__ == "__main__":
    main()
