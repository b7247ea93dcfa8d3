"""Small calls and traces for tests, and what is logged meanwhile."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import BufferingHandler

from tuner.engines import SamplingParams
from tuner.traces import Call, Outcome, RolloutId, Trace


def call(id, prompt, completion, logprobs, **sampling):
    return Call(
        id=id,
        prompt_ids=tuple(prompt),
        completion_ids=tuple(completion),
        logprobs=tuple(logprobs),
        versions=(0,) * len(completion),
        sampling=SamplingParams(max_tokens=32, **sampling),
        finish_reason="stop",
        messages=[{"role": "user", "content": "hi"}],
        tools=[],
        response={"role": "assistant", "content": "ho"},
        started=1.5,
        seconds=0.25,
    )


def trace(task, rollout, calls, *, outcome=Outcome.COMPLETED, reward=None, step=1, **fields):
    return Trace(
        id=RolloutId(step, task, rollout),
        task={"question": f"task {task}"},
        calls=tuple(calls),
        outcome=outcome,
        reward=reward,
        **fields,
    )


@contextmanager
def logged() -> Iterator[list[str]]:
    """What tuner logs inside, there at the end; where pytest's caplog is not."""
    lines: list[str] = []
    handler, log = BufferingHandler(capacity=10**6), logging.getLogger("tuner")
    log.addHandler(handler)
    try:
        yield lines
    finally:
        log.removeHandler(handler)
        lines += [record.getMessage() for record in handler.buffer]
