"""Held-out reward of `examples/multi_turn_math` and `examples/search_agent` before and after.

The agent of `multi_turn_math` runs both ways, as a workflow function and as a queue agent; three
seeds.

The numbers of the examples' own `config.yaml`, with nothing but the seed changed; greedy. For
`multi_turn_math` the reward is being right at once, on 200 held-out problems; for `search_agent`
the mean F1 of 120 held-out questions.

    python benchmarks/examples.py
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
import tempfile
from pathlib import Path
from types import ModuleType

from _report import Row, report

EXAMPLES = Path(__file__).parents[1] / "examples"
SEEDS = (1, 2, 3)
WANTED_RISE = 0.2

Pair = tuple[float, float]  # held-out reward before and after


def load(name: str) -> ModuleType:
    """`main.py` of an example, as it is run from its folder."""
    folder = EXAMPLES / name
    sys.path.insert(0, str(folder))
    spec = importlib.util.spec_from_file_location(name, folder / "main.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def multi_turn_math(seed: int) -> dict[str, Pair]:
    """Both ways of writing the agent."""
    with tempfile.TemporaryDirectory() as folder:
        found = load("multi_turn_math").main(
            [f"tuner.seed={seed}", f"checkpoint_root_dir={folder}"]
        )
    before = found.pop("before").first
    return {f"multi_turn_math, {way}": (before, one.first) for way, one in found.items()}


def search_agent(seed: int) -> dict[str, Pair]:
    example = load("search_agent")
    with tempfile.TemporaryDirectory() as folder:
        result = example.train(*example.configured([f"seed={seed}", f"fileroot={folder}"]))
    return {"search_agent": (result.before, result.after)}


def main() -> None:
    rows: list[Row] = []
    rises: dict[str, list[float]] = {}
    for example in (multi_turn_math, search_agent):
        for seed in SEEDS:
            for name, (before, after) in example(seed).items():
                case = f"{name}, seed {seed}"
                rows.append(Row(case, "held-out reward", after, "before training", before))
                rises.setdefault(name, []).append(after - before)
    for name, found in rises.items():
        case, rise = f"{name}, mean of the seeds", statistics.mean(found)
        rows.append(Row(case, "rise", rise, "wanted", WANTED_RISE, target=1.0))
    report("examples", rows, ["torch", "transformers", "bm25s"])


if __name__ == "__main__":
    main()
