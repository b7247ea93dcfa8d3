"""Page, replay and writing of a run with a million recorded calls; memory of a large dataset.

What is stored is made of ten conversations of ten calls each, told apart by task, answer and
reward. The page is asked as a browser asks it, over HTTP, before anything is indexed, and again
with the index. Memory is the peak of a process of its own, beside the same over a tenth of the
run, or of the rows: what it should not grow with. Seconds of writing are those within
`TraceStore.append` in a run of the tiny model, with 128 rollouts of one turn in a step.

    python benchmarks/stores.py [--calls 1000000] [--rows 5000000]
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
from _report import Row, report

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.browser.conftest import Served
from tuner.engines import SamplingParams
from tuner.tools.viewer.index import NAME, TraceIndex
from tuner.traces import Call, Outcome, RolloutId, Trace
from tuner.traces.store import trace_to_json

CALLS, STEPS, GROUP = 10, 100, 8
VOCABULARY = 151_936
WORDS = ("price", "search", "the", "of", "result", "marble", "seven", "answer", "tool", "where")
ALLOWED_SECONDS, ALLOWED_SHARE, ALLOWED_GROWTH = 2.0, 2.0, 0.8
JUDGE = """
from tuner import JudgeOutput

def judge(task, response):
    return JudgeOutput(reward=float("seven" in response))
"""
REPLAYED = """
import contextlib, io, resource, sys
sys.argv = ["tuner", "replay", "{run}", "--judge", "{judge}:judge"]
from tuner.cli import app
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    app()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""
TRAINED = """
import resource, sys, time
from tuner import WorkflowOutput, tune
from tuner.traces import TraceStore

async def workflow(task, model):
    answer = await model.client.chat.completions.create(
        model=model.model_name, messages=[{{"role": "user", "content": task["question"]}}]
    )
    return WorkflowOutput(reward=float(len(answer.choices[0].message.content or "") % 3))

spent, append = [0.0], TraceStore.append

def timed(self, trace):
    started = time.perf_counter()
    append(self, trace)
    spent[0] += time.perf_counter() - started

TraceStore.append = timed
result = tune(
    workflow,
    train_dataset="{data}",
    overrides=["checkpoint_root_dir={folder}", "buffer.total_steps={steps}",
               "buffer.batch_size=16", "algorithm.repeat_times=8",
               "explorer.runner_per_model=128", "tuner.max_slots=128"],
)
seconds = result.seconds
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(100 * spent[0] / seconds, peak)
"""


def conversation(dice: random.Random) -> Trace:
    """A tool agent of ten turns: 200 tokens at first, 40 sampled and 60 read in each."""

    def ids(count: int) -> tuple[int, ...]:
        return tuple(dice.choices(range(VOCABULARY), k=count))

    def said(role: str, words: int) -> dict[str, str]:
        return {"role": role, "content": " ".join(dice.choices(WORDS, k=words))}

    messages, prompt = [said("system", 60), said("user", 40)], ids(200)
    calls: list[Call] = []
    for turn in range(CALLS):
        completion, answer = ids(40), said("assistant", 30)
        calls.append(
            Call(
                id=f"c{turn}",
                prompt_ids=prompt,
                completion_ids=completion,
                logprobs=tuple(-dice.random() for _ in completion),
                versions=(turn,) * len(completion),
                finish_reason="stop",
                sampling=SamplingParams(max_tokens=64),
                messages=list(messages),
                tools=[],
                response=answer,
                started=float(turn),
                seconds=0.5,
            )
        )
        messages += [answer, said("user", 40)]
        prompt += completion + ids(60)
    return Trace(
        id=RolloutId(1, 0, 0),
        task={},
        outcome=Outcome.COMPLETED,
        reward=0.0,
        calls=tuple(calls),
    )


def write_run(run: Path, steps: int, calls: int) -> None:
    """A run of so many steps, in each of which so many calls are recorded."""
    dice = random.Random(0)
    stored = [trace_to_json(conversation(dice)) for _ in range(10)]
    folder = run / "traces"
    folder.mkdir(parents=True)
    for step in range(1, steps + 1):
        with (folder / f"step_{step:06d}.jsonl").open("w") as file:
            for number in range(calls // CALLS):
                task, rollout = divmod(number, GROUP)
                trace = stored[number % len(stored)] | {
                    "id": {"step": step, "task": task, "rollout": rollout, "split": "train"},
                    "task": {"question": f"{task}: {' '.join(dice.choices(WORDS, k=20))}?"},
                    "response": " ".join(dice.choices(WORDS, k=20)),
                    "reward": float(dice.random() < step / steps),
                }
                file.write(json.dumps(trace) + "\n")


def write_rows(path: Path, count: int) -> None:
    dice = random.Random(0)
    with path.open("w") as file:
        for number in range(count):
            row = {"question": f"What is {number} + {dice.randrange(100)}?", "n": number}
            file.write(json.dumps(row) + "\n")


def first_rows(run: Path) -> float:
    """Seconds until the page and its first rows are there."""
    served = Served(run)
    with httpx.Client(base_url=served.link, timeout=120) as client:
        started = time.perf_counter()
        for path in ("", "api/run", "api/list?count=50"):
            answer = client.get(path).raise_for_status()
        seconds = time.perf_counter() - started
    served.close()
    assert answer.json()["rows"]
    return seconds


def printed(script: str) -> list[float]:
    """The numbers in the last line that a process prints."""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return [float(number) for number in done.stdout.splitlines()[-1].split()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=1_000_000)
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument("--steps", type=int, default=4, help="of the runs that train")
    options = parser.parse_args()
    rows: list[Row] = []

    def limited(case: str, metric: str, found: float, allowed: float) -> None:
        rows.append(Row(case, metric, found, "allowed", allowed, 1.0, more_is_better=False))

    def beside_a_tenth(case: str, peaks: list[float]) -> None:
        metric = "MiB of memory at its peak"
        less = Row(case, metric, peaks[1], "a tenth", peaks[0], ALLOWED_GROWTH, False)
        rows.append(less)

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "judge.py").write_text(JUDGE)
        whole, tenth = folder / "whole", folder / "tenth"
        write_run(whole, STEPS, options.calls // STEPS)
        write_run(tenth, STEPS // 10, options.calls // STEPS)
        case = f"{options.calls:,} calls"
        limited(case, "s to the page's first rows, no index", first_rows(whole), ALLOWED_SECONDS)
        (whole / "traces" / NAME).unlink()
        started = time.perf_counter()
        index = TraceIndex(whole / "traces", keep=True)
        index.refresh()
        index.close()
        rows.append(Row(case, "s to index all", time.perf_counter() - started))
        limited(case, "s to the page's first rows, indexed", first_rows(whole), ALLOWED_SECONDS)
        started = time.perf_counter()
        peaks = [
            printed(REPLAYED.format(run=run, judge=folder / "judge.py"))[0]
            for run in (tenth, whole)
        ]
        rows.append(Row(case, "s to replay it, and a tenth", time.perf_counter() - started))
        beside_a_tenth(f"{case}, replayed", peaks)
        shares, peaks = [], []
        for part in (10, 1):
            data = folder / f"rows_{part}.jsonl"
            write_rows(data, options.rows // part)
            script = TRAINED.format(data=data, folder=folder / f"runs_{part}", steps=options.steps)
            share, peak = printed(script)
            shares.append(share)
            peaks.append(peak)
        limited("128 rollouts a step", "% of it to write traces", shares[-1], ALLOWED_SHARE)
        beside_a_tenth(f"{options.rows:,} rows, {data.stat().st_size >> 20} MiB, trained", peaks)
    report("stores", rows, ("torch", "transformers", "starlette", "uvicorn"))


if __name__ == "__main__":
    main()
