"""A run with as many traces as a long training leaves behind."""

import dataclasses
import json
import random

from tests.browser.example_run import example_trace, metrics, write_example
from tuner.traces.store import trace_to_json

ROLLOUTS = 8
WORDS = ("price", "search", "the", "of", "result", "marble", "seven", "answer", "tool", "where")


def write_many(path, count, *, steps=100):
    """`count` traces in `steps` steps: groups of 8 on tasks that come again every tenth step.

    Each has a task and an answer of about 200 characters of its own. Most have one call; every
    tenth has two, the second of which is a branch.
    """
    run = write_example(path, steps=1)
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics(steps)))
    dice = random.Random(0)
    branched = example_trace(1, 0, 0, "whitespace")
    short = dataclasses.replace(branched, calls=branched.calls[:1])
    stored = [trace_to_json(one) for one in (branched, *[short] * 9)]
    tasks = count // steps // ROLLOUTS
    questions = [f"{i}: {' '.join(dice.choices(WORDS, k=40))}?" for i in range(10 * tasks)]
    for step in range(1, steps + 1):
        lines = []
        for i in range(tasks * ROLLOUTS):
            task, rollout = divmod(i, ROLLOUTS)
            stored[i % 10] |= {
                "id": {"step": step, "task": task, "rollout": rollout, "split": "train"},
                "task": {"question": questions[step % 10 * tasks + task]},
                "response": f"In step {step}: {' '.join(dice.choices(WORDS, k=30))} {i}.",
                "reward": float(dice.random() < step / steps),
            }
            lines.append(json.dumps(stored[i % 10]))
        (run / f"traces/step_{step:06d}.jsonl").write_text("\n".join(lines) + "\n")
    return run
