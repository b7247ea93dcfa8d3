"""`tuner check` for recorded data: what of it is trained, without training."""

from __future__ import annotations

import time
from collections.abc import Iterator

from tuner.backends.order import planned_steps
from tuner.backends.recorded import batch_of, read_examples
from tuner.backends.stack import Stack, build_stack, build_trainer
from tuner.check import (
    FORWARDS_PER_UPDATE,
    Verdict,
    algorithm_line,
    completion_lines,
    duration,
    inputs,
    memory,
    prompt_lines,
)
from tuner.recorded import Examples
from tuner.tune import Run

# Beside the update itself: the log-probs of the policy and of the reference.
FORWARDS_OF_PAIRS = 2


async def check_recorded(run: Run) -> Verdict:
    """Read the data, load the model, show what is trained of the first row, and describe the run.

    Raises:
        DatasetError: A row is not of the form that the configuration says.
        ModelLoadError: The model cannot be loaded.
    """
    examples = read_examples(run.config, run.train_tasks)
    stack = build_stack(run.config, workflow=run.workflow, judge=run.judge)
    try:
        sections = [
            inputs(run, stack),
            _rows(examples),
            _first_row(stack, examples),
            _plan(run, stack, examples),
            iter([f"READY: {len(examples.used)} rows can be trained."]),
        ]
        return Verdict(True, "\n\n".join("\n".join(section) for section in sections))
    finally:
        await stack.aclose()


def _rows(examples: Examples) -> Iterator[str]:
    yield "ROWS"
    for name, count in examples.rows.items():
        yield f"  {count:>7}  {name}"
    turns = sum(len(turns) for example in examples.used for turns in example)
    yield f"  {turns:>7}  assistant turns are trained"


def _first_row(stack: Stack, examples: Examples) -> Iterator[str]:
    conversations = examples.used[0]
    turn = conversations[0][0]
    yield "PROMPT of the first row, as the model sees it"
    yield from (f"  | {line}" for line in stack.tokenizer.decode(turn.prompt_ids).split("\n"))
    for name, turns in zip(("chosen", "rejected"), conversations, strict=False):
        which = f" of the {name} answer" if len(conversations) > 1 else ""
        yield ""
        yield f"TOKENS AND MASK of its first turn{which} (1: trained; 0: prompt)"
        yield f"  {'mask':>4}  {'id':>7}  {'':>8}  text"
        yield from prompt_lines(stack, turns[0].prompt_ids)
        ids = turns[0].completion_ids
        yield from completion_lines(stack, ids, [""] * len(ids))


def _plan(run: Run, stack: Stack, examples: Examples) -> Iterator[str]:
    config = run.config
    size, steps = config.buffer.batch_size, planned_steps(config, len(examples.used))
    batch = batch_of(config, examples, step=1)
    trainer = build_trainer(config, stack, total_steps=1)
    started = time.perf_counter()
    trainer.compute_logp(batch)
    forward = time.perf_counter() - started
    pairs = FORWARDS_OF_PAIRS if trainer.reference is not None else 0
    seconds = forward * (FORWARDS_PER_UPDATE + pairs)
    yield "TRAINING"
    yield (
        f"  {steps} steps x {size} rows = {steps * size} rows, about "
        f"{batch.trained_tokens * steps} trained tokens"
    )
    yield f"  all weights, {algorithm_line(config)}"
    yield f"  memory  about {memory(config, stack) / 2**30:.2f} GiB, and that of one micro-batch"
    yield (
        f"  time    {seconds:.1f} s per step, {duration(seconds * steps)} in all, evaluations not "
        "counted"
    )
