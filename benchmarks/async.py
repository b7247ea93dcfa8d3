"""Steps per second and idle time of the trainer when collection runs ahead of training.

`--demo` shows what the demo learns either way.

Rollouts ask the tiny model twice and sleep in a tool in between: real sleeps, log-normal, the same
for the same rollout in every run. What is compared is `synchronizer.sync_offset` 2 and 4 with 0,
for both values of `algorithm.sample_strategy`: `default` waits for groups before they are too old
and loses nothing, `staleness_control` goes on and leaves out tokens that are. The learning rate
is small, so that answers stay as long as they are.

    python benchmarks/async.py [--steps 24] [--median 0.5] [--sigma 1.0]
    python benchmarks/async.py --demo
    python benchmarks/async.py --simulated

`--simulated` is the waiting alone: the schedule of a run against a clock that jumps, with tools of
the same kind and updates of a given length.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import random
import statistics
import sys
import tempfile
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from _report import Row, report

from tuner import JudgeOutput, TuneResult, WorkflowOutput, tune

ROOT = Path(__file__).parents[1]
TASKS, GROUP = 8, 8
WARMUP = 4  # first steps, which load, allocate and fill the pipeline
SEEDS = (1, 2, 3)
LEAST_SPEEDUP = 2.0
LEAST_IDLE_RATIO = 10.0  # the trainer's idle time is below 10 % of that of the other loop
DEMO_OFFSET = 2
DEMO_MARGIN = 0.05


def agent(median: float, sigma: float) -> Any:
    """A workflow whose tool takes log-normal seconds, drawn from the rollout's own name."""

    async def workflow(task: dict[str, Any], model: Any) -> WorkflowOutput:
        draw = random.Random(model.session.id)
        asked = [{"role": "user", "content": task["question"]}]
        first = await ask(model, asked)
        await asyncio.sleep(draw.lognormvariate(math.log(median), sigma))
        asked += [
            {"role": "assistant", "content": first},
            {"role": "user", "content": "Are you sure?"},
        ]
        return WorkflowOutput(response=f"{first} {await ask(model, asked)}")

    return workflow


async def ask(model: Any, messages: list[dict[str, str]]) -> str:
    completion = await model.client.chat.completions.create(
        model=model.model_name, messages=messages, max_tokens=24
    )
    return completion.choices[0].message.content or ""


async def judge(task: dict[str, Any], response: str) -> JudgeOutput:
    """Some answers are better than others."""
    return JudgeOutput(reward=sum(map(ord, response)) % 17 / 17)


def tool_run(arguments: argparse.Namespace, *overrides: str) -> TuneResult:
    with tempfile.TemporaryDirectory() as folder:
        return tune(
            agent(arguments.median, arguments.sigma),
            judge,
            [{"question": f"What is {a} + {b}?"} for a in range(16) for b in range(16)],
            overrides=[
                f"checkpoint_root_dir={folder}",
                "explorer.runner_per_model=1024",
                f"buffer.batch_size={TASKS}",
                f"buffer.total_steps={arguments.steps}",
                f"algorithm.repeat_times={GROUP}",
                "algorithm.optimizer.lr=1e-7",
                *overrides,
            ],
        )


def tool_rows(arguments: argparse.Namespace) -> list[Row]:
    turns = tool_run(arguments)
    rows = []
    peer = "collect, then train"
    for offset in (2, 4):
        for strategy in ("default", "staleness_control"):
            overrides = [f"synchronizer.sync_offset={offset}"]
            if strategy != "default":
                overrides += [
                    f"algorithm.sample_strategy={strategy}",
                    f"algorithm.sample_strategy_args.max_staleness={offset}",
                ]
            ours = tool_run(arguments, *overrides)
            dropped = sum(ours.tokens.dropped.values()) / ours.tokens.sampled
            oldest = max(row.get("staleness/max", 0) for row in ours.history)
            case = f"{strategy}, {offset} ahead ({dropped:.0%} dropped, oldest {oldest:.0f})"
            rows += [
                Row(
                    case, "steps per second", 1 / mean(ours, "time/step"), peer,
                    1 / mean(turns, "time/step"), LEAST_SPEEDUP,
                ),
                Row(
                    case, "trained tokens per second", speed(ours), peer, speed(turns),
                ),
                Row(
                    case, "idle s of the trainer in a step", max(1e-3, mean(ours, "time/idle")),
                    peer, mean(turns, "time/idle"), LEAST_IDLE_RATIO if offset == 4 else None,
                    more_is_better=False,
                ),
                Row(
                    case, "training s in a step", mean(ours, "time/training"), peer,
                    mean(turns, "time/training"), more_is_better=False,
                ),
            ]  # fmt: skip
    return rows


def mean(result: TuneResult, name: str) -> float:
    return statistics.fmean(row[name] for row in result.history[WARMUP:])


def speed(result: TuneResult) -> float:
    rows = result.history[WARMUP:]
    return sum(row["tokens/trained"] for row in rows) / sum(row["time/step"] for row in rows)


def demo_rows() -> list[Row]:
    os.environ.setdefault("AGENTSCOPE_DISABLE_CONSOLE_OUTPUT", "true")
    sys.path.insert(0, str(ROOT / "examples" / "gsm8k"))
    import main as example

    rows, ours, turns = [], [], []
    for seed in SEEDS:
        accuracy = {}
        for offset in (0, DEMO_OFFSET):
            with tempfile.TemporaryDirectory() as folder:
                result = tune(
                    example.run_react_agent,
                    example.judge_function,
                    config_path=ROOT / "config.yaml",
                    overrides=[
                        f"tuner.seed={seed}",
                        f"checkpoint_root_dir={folder}",
                        f"synchronizer.sync_offset={offset}",
                    ],
                )
            accuracy[offset] = result.eval_after["test"]
        ours.append(accuracy[DEMO_OFFSET])
        turns.append(accuracy[0])
        rows.append(
            Row(f"demo, seed {seed}, {DEMO_OFFSET} ahead", "held-out accuracy", ours[-1],
                "collect, then train", turns[-1])
        )  # fmt: skip
    least = (statistics.fmean(turns) - DEMO_MARGIN) / statistics.fmean(turns)
    rows.append(
        Row("demo, mean of the seeds", "held-out accuracy", statistics.fmean(ours),
            "collect, then train", statistics.fmean(turns), round(least, 3))
    )  # fmt: skip
    return rows


def simulated_rows(arguments: argparse.Namespace) -> list[Row]:
    turns = simulated(arguments, 0, waits=True)
    rows = []
    for offset in (1, 2, 4):
        for waits in (True, False):
            found = simulated(arguments, offset, waits=waits)
            strategy = "default" if waits else "staleness_control"
            case = f"{strategy}, {offset} ahead ({found.stale:.0%} of the moments too old)"
            rows += [
                Row(case, "steps per second", found.rate, "turns", turns.rate),
                Row(case, "idle s in a step", max(1e-3, found.idle), "turns", turns.idle,
                    more_is_better=False),
            ]  # fmt: skip
    return rows


@dataclass(frozen=True)
class Simulated:
    """Steps per second, idle seconds in a step, and the share of the moments at which a rollout's
    two answers were sampled that are too old in its step."""

    rate: float
    idle: float
    stale: float


def simulated(arguments: argparse.Namespace, offset: int, *, waits: bool) -> Simulated:
    sys.path.insert(0, str(ROOT))
    simulate = import_module("tests.kit.clock").simulate
    from tuner.rollouts.groups import Schedule

    tasks, group, steps, skipped = 4, 8, 210, 10
    draw = random.Random(0)

    async def work() -> Simulated:
        version, ages, idle, since = 0, [0], 0.0, 0.0
        loop = asyncio.get_running_loop()

        async def rollout(number: int) -> tuple[int, int]:
            begun = version
            await asyncio.sleep(draw.lognormvariate(math.log(arguments.median), arguments.sigma))
            schedule.rollout_ended(number)
            return begun, version

        async def run(number: int) -> list[tuple[int, int]]:
            return await asyncio.gather(*(rollout(number) for _ in range(group)))

        schedule = Schedule(
            run, batch=tasks, total=tasks * steps, repeat=group, max_running=10**6,
            staleness=offset, waits=waits,
        )  # fmt: skip
        for step in range(1, steps + 1):
            if step == skipped + 1:
                since, idle, ages = loop.time(), 0.0, []
            started = loop.time()
            groups = await schedule.take()
            idle += loop.time() - started
            ages += [version - v for group in groups.values() for pair in group for v in pair]
            await asyncio.sleep(arguments.update)
            version = step
            schedule.advance(step)
        counted = steps - skipped
        return Simulated(
            counted / (loop.time() - since), idle / counted,
            sum(age > offset for age in ages) / len(ages),
        )  # fmt: skip

    found: Simulated = simulate(work())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Asynchronous collection")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--median", type=float, default=0.5, help="seconds in the tool")
    parser.add_argument("--sigma", type=float, default=1.0, help="of their logarithm")
    parser.add_argument("--demo", action="store_true", help="the demo, three seeds, either way")
    parser.add_argument("--simulated", action="store_true", help="the waiting alone")
    parser.add_argument("--update", type=float, default=1.5, help="seconds, simulated")
    arguments = parser.parse_args()
    if arguments.simulated:
        report("async_simulated", simulated_rows(arguments))
    elif arguments.demo:
        report("async_demo", demo_rows(), ["torch", "transformers", "agentscope"])
    else:
        report("async", tool_rows(arguments), ["torch", "transformers"])


if __name__ == "__main__":
    main()
