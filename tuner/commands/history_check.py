"""`tuner check` of recorded rollouts for algorithms that learn from rewards, or from a teacher."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import aclosing

from tuner.assembly.history_batches import Comparable, history_of, off_policy_batch
from tuner.assembly.stack import Stack, build_stack, build_trainer
from tuner.check import (
    FORWARDS_PER_UPDATE,
    algorithm_line,
    check_run,
    counts,
    duration,
    inputs,
    memory_line,
)
from tuner.config import RunConfig
from tuner.data.order import planned_steps
from tuner.recorded_sources import training_data
from tuner.result import Verdict
from tuner.run.interrupts import run_async
from tuner.training import Batch, Effective, effective_samples
from tuner.tune import Run


def check_history(run: Run) -> Verdict:
    """How many rollouts, where their tokens go, and what they are worth; of sft and dpo their rows.

    Must be called where no event loop is running.

    Raises:
        ModelLoadError, DatasetError, ConfigError: As `tuner.recorded_sources.training_data`.
    """
    data = training_data(run.config, run.train_tasks, run.history)
    return run_async(_check(run, data)) if isinstance(data, Comparable) else check_run(run)


async def _check(run: Run, data: Comparable) -> Verdict:
    async with aclosing(build_stack(run.config, workflow=run.workflow, judge=run.judge)) as stack:
        return _verdict(run, stack, data)


def _verdict(run: Run, stack: Stack, data: Comparable) -> Verdict:
    config = run.config
    trainer = build_trainer(config, stack, total_steps=1)
    batch = off_policy_batch(config, data.groups, stack.teacher_prompt, step=1)
    started = time.perf_counter()
    effective = effective_samples(trainer, batch)
    seconds = (time.perf_counter() - started) * (FORWARDS_PER_UPDATE + 1)
    least = history_of(config).min_effective_samples
    weighed = trainer.settings.ratio_to != "nothing"
    last = f"READY: {data.used} recorded rollouts can be trained."
    if not batch.rows:
        last = "NOT READY: no call of the first step can be trained."
    elif weighed and effective.tokens.share < least:
        last = (
            "NOT READY: too few of the tokens are left (tuner.history.min_effective_samples is "
            f"{least:g})."
        )
    sections = [
        inputs(run, stack),
        _recorded_rollouts(data),
        _worth(batch, effective),
        _history_plan(config, stack, data, batch, seconds),
        iter([last]),
    ]
    return Verdict.of(last.startswith("READY"), sections)


def _recorded_rollouts(data: Comparable) -> Iterator[str]:
    yield "RECORDED ROLLOUTS"
    yield f"  {data.used:>7}  used, of {len(data.groups)} tasks"
    for why, count in sorted(data.left_out.rollouts.items()):
        yield f"  {count:>7}  {why}"


def _worth(batch: Batch, effective: Effective) -> Iterator[str]:
    yield "WHAT THEY ARE WORTH in the first step, to the weights that the run begins with"
    dropped = counts(batch.dropped_tokens) or "0"
    yield f"  {batch.sampled_tokens} tokens sampled = {batch.trained_tokens} trained + {dropped}"
    for name in ("tokens", "calls", "rollouts"):
        one = getattr(effective, name)
        yield f"  {one.size:>9.1f} of {one.count} {name} ({one.share:.1%})"


def _history_plan(
    config: RunConfig, stack: Stack, data: Comparable, batch: Batch, seconds: float
) -> Iterator[str]:
    steps = planned_steps(config, len(data.groups))
    yield "TRAINING"
    yield f"  {steps} steps x {config.buffer.batch_size} tasks, {algorithm_line(config)}"
    yield memory_line(config, stack, batch.rows, 1)
    yield f"  time    {seconds:.1f} s per step, {duration(seconds * steps)} in all"
