"""Bytes and seconds to store and read a long conversation, beside one whole line per call.

The peer is the first format of `traces/step_*.jsonl`, in which each call had its whole messages,
tools and prompt. Both lines are read back and compared with the trace. A conversation has a system
prompt of 2000 tokens and five tools, each turn samples 150 tokens and reads 350. The best of the
repeats counts, as other work on the machine only adds to a time.

    python benchmarks/trace_store.py [--repeats 15]
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

from _report import Row, report

from tuner.engines import SamplingParams
from tuner.traces import Call, Outcome, RolloutId, Trace, branches
from tuner.traces.store import TRACES, to_plain, trace_to_json

VOCABULARY = 151_936
SYSTEM, SAID, READ = 2000, 150, 350
WORDS = ("price", "search", "the", "of", "result", "marble", "seven", "answer", "tool", "where")
Message = dict[str, Any]


def conversation(turns: int, *, keeps_reasoning: bool) -> Trace:
    """A tool agent that goes on for some turns; without its reasoning each turn is a branch."""
    dice = random.Random(0)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(dice.choices(range(VOCABULARY), k=count))

    def text(words: int) -> str:
        return " ".join(dice.choices(WORDS, k=words))

    tools = [
        {"type": "function", "function": {"name": f"tool_{i}", "description": text(40)}}
        for i in range(5)
    ]
    prompt = ids(SYSTEM + READ)
    messages: list[Message] = [
        {"role": "system", "content": text(SYSTEM // 2)},
        {"role": "user", "content": text(READ)},
    ]
    calls = []
    for turn in range(turns):
        completion = ids(SAID)
        function = {"name": "tool_1", "arguments": json.dumps({"query": text(SAID // 2)})}
        answer: Message = {
            "role": "assistant",
            "content": f"<think>{text(SAID // 2)}</think>",
            "tool_calls": [{"id": f"c{turn}", "type": "function", "function": function}],
        }
        calls.append(
            Call(
                id=f"call-{turn}",
                prompt_ids=prompt,
                completion_ids=completion,
                logprobs=tuple(-dice.expovariate(2) for _ in range(SAID)),
                versions=(3,) * SAID,
                sampling=SamplingParams(max_tokens=512),
                finish_reason="tool_calls",
                messages=json.loads(json.dumps(messages)),  # as a request brings them
                tools=json.loads(json.dumps(tools)),
                response=answer,
                started=1_763_000_000.0 + turn,
                seconds=1.25,
            )
        )
        result = {"role": "tool", "tool_call_id": f"c{turn}", "content": text(READ)}
        if keeps_reasoning:
            messages = [*messages, answer, result]
            prompt = prompt + completion + ids(READ)
        else:
            messages = [*messages, {**answer, "content": ""}, result]
            prompt = prompt + completion[SAID // 2 :] + ids(READ)
    return Trace(RolloutId(1, 0, 0), {"question": "?"}, tuple(calls), Outcome.COMPLETED, 1.0)


def first_format(trace: Trace) -> str:
    return json.dumps(to_plain(trace), ensure_ascii=False)


def packed(trace: Trace) -> str:
    return json.dumps(trace_to_json(trace), ensure_ascii=False)


def milliseconds(works: Sequence[Callable[[], Any]], repeats: int) -> list[float]:
    """The best time of each, one after the other in every repeat."""
    best = [math.inf] * len(works)
    for _ in range(repeats):
        for i, work in enumerate(works):
            start = time.perf_counter()
            work()
            best[i] = min(best[i], 1000 * (time.perf_counter() - start))
    return best


def measure(case: str, trace: Trace, repeats: int) -> list[Row]:
    old, new = first_format(trace), packed(trace)
    for line in (old, new):
        if TRACES.parse(line.encode()) != trace:
            raise AssertionError("a line does not read back as the trace it was made of")
    numbers = {
        "kB": [len(line.encode()) / 1000 for line in (new, old)],
        "ms to write": milliseconds([lambda: packed(trace), lambda: first_format(trace)], repeats),
        "ms to read": milliseconds(
            [lambda: TRACES.parse(new.encode()), lambda: TRACES.parse(old.encode())],
            repeats,
        ),
    }
    stored = TRACES.parse(new.encode())
    (seconds,) = milliseconds([lambda: branches(stored.calls)], repeats)
    print(f"{case}: {len(branches(stored.calls))} branches found in {seconds:.1f} ms")
    return [
        Row(case, metric, ours, "all of each call", theirs, more_is_better=False)
        for metric, (ours, theirs) in numbers.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    repeats = parser.parse_args().repeats
    rows = []
    for case, turns, keeps_reasoning in (
        ("20 turns", 20, True),
        ("20 turns, each without the reasoning before it", 20, False),
        ("40 turns", 40, True),
    ):
        rows += measure(case, conversation(turns, keeps_reasoning=keeps_reasoning), repeats)
    report("trace_store", rows)


if __name__ == "__main__":
    main()
