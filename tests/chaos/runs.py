"""Runs that are killed or meet a failing disk: begun in processes of their own, and compared."""

from __future__ import annotations

import gc
import json
import os
import select
import shutil
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.golden import recipes
from tests.golden.recipes import CONVERSATIONS, DPO, LORA, PAIRS, PPO, SAVED, SFT, run, run_rollouts
from tests.golden.runs import hashed, parts, timeless
from tests.kit import async_runs
from tests.kit.forked import mend_thread_pool
from tests.kit.runs import judge
from tuner.errors import TunerError
from tuner.runs.directory import RunDirectory, damage
from tuner.traces import read_traces
from tuner.traces.reading import complete_lines

PATIENCE = 300.0
"""Seconds after which a run that was told to end counts as one that does not."""


def ahead(folder: Path, *overrides: str) -> None:
    run_rollouts(
        folder,
        *SAVED,
        "tuner.deterministic=false",
        "synchronizer.sync_offset=2",
        "explorer.runner_per_model=6",
        *overrides,
        workflow=async_runs.workflow,
        judge=judge,
    )


OFTEN = ("buffer.total_steps=4", "trainer.save_interval=1", "trainer.max_checkpoints_to_keep=2")

# By loop and mode. Those that do not say otherwise save after steps 2 and 4.
RUNS: dict[str, Callable[[Path], Any]] = {
    "grpo": lambda folder: run_rollouts(folder, *SAVED, evaluate=True),
    "grpo, TensorBoard": recipes.RECIPES["grpo"],
    "grpo, saved at each step": lambda folder: run_rollouts(folder, *OFTEN, evaluate=True),
    "grpo, bfloat16": lambda folder: run_rollouts(folder, *OFTEN, "tuner.dtype=bfloat16"),
    "ppo, critic": lambda folder: run_rollouts(folder, *PPO, *SAVED),
    "lora": lambda folder: run_rollouts(folder, *LORA, *SAVED),
    "lora, ppo": lambda folder: run_rollouts(folder, *LORA, *PPO, *OFTEN),
    "sft": lambda folder: run(
        folder, *SFT, *SAVED, "explorer.eval_interval=3", rows=CONVERSATIONS, evaluate=True
    ),
    "dpo": lambda folder: run(folder, *DPO, *OFTEN, workflow=None, judge=None, rows=PAIRS),
    "ahead": ahead,
    "ahead, staleness_control": lambda folder: ahead(
        folder,
        "algorithm.sample_strategy=staleness_control",
        "algorithm.sample_strategy_args.max_staleness=1",
    ),
    # Two steps, saved at the end.
    **{
        name: recipes.RECIPES[name]
        for name in (
            *("failures", "roles", "turn_discount", "on_policy_distill", "dialects", "settings"),
            *("branching", "areal_queues", "areal_agent"),
        )
    },
}


def tiny(folder: Path) -> None:
    """The smallest run with checkpoints, an evaluation, traces and a report."""
    run_rollouts(
        folder,
        "algorithm.repeat_times=2",
        "buffer.batch_size=1",
        "trainer.save_interval=1",
        "trainer.max_checkpoints_to_keep=1",
        "model.max_response_tokens=2",
        "explorer.eval_on_startup=false",
        rows=recipes.TRAIN[:3],
        evaluate=True,
    )


def warm_up(folder: Path) -> None:
    """Run once here what is begun in other processes then: what is done when something is used
    first takes longer than such a run."""
    from tqdm import tqdm

    tqdm.monitor_interval = 0  # it has a thread
    torch.set_num_threads(1)
    tiny(with_models(folder / "once", folder / "models"))


@dataclass(frozen=True)
class Ended:
    """How a run's process ended.

    Attributes:
        code: Its exit code; the signal that killed it, negative.
        error: What it raised, if anything.
        wanted: Whether that is an error for people, or an interrupt.
        seconds: How long it took.
    """

    code: int
    error: str
    wanted: bool
    seconds: float


@dataclass
class Begun:
    """A process that runs."""

    process: int
    said: Path
    at: float


def with_models(folder: Path, models: Path) -> Path:
    """A new folder for a run, with what it begins with in it, which is not what is tried."""
    folder.mkdir(parents=True)
    for seed, name in enumerate(("model", "teacher", "helper")):
        (folder / name).symlink_to(recipes.make_model(models / name, seed=seed))
    return folder


def begin(start: Callable[[Path], Any], folder: Path) -> Begun:
    """Call `start(folder)` in a process forked from this one, which must have no other thread."""
    if len(threading.enumerate()) > 1:
        raise RuntimeError(f"threads are running, so a fork is not safe: {threading.enumerate()}")
    said, log = folder.with_suffix(".said"), folder.with_suffix(".log")
    said.unlink(missing_ok=True)
    sys.stdout.flush()
    at = time.perf_counter()
    # An interrupt before the child handles it would run the caller's cleanup in the child.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    process = os.fork()
    if process == 0:
        code, told = 1, None
        try:
            # A shell ignores it for what it starts in the background, and so would the run.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
            with log.open("a") as file:
                for stream in (1, 2):
                    os.dup2(file.fileno(), stream)
            gc.freeze()  # what was imported is not looked at again
            mend_thread_pool()
            start(folder)
            code, told = 0, {}
        except BaseException as error:
            traceback.print_exc()
            wanted = isinstance(error, TunerError | KeyboardInterrupt)
            told = {"error": f"{type(error).__name__}: {error}", "wanted": wanted}
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            said.write_text(json.dumps(told))
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    return Begun(process, said, at)


def end(begun: Begun, *, after: float | None = None, by: signal.Signals = signal.SIGKILL) -> Ended:
    """Wait for a run; where it lasts longer than `after` seconds since its start, send it a signal.

    Raises:
        TimeoutError: It goes on for minutes.
    """
    watched = os.pidfd_open(begun.process)
    try:
        if after is not None:
            left = max(0.0, begun.at + after - time.perf_counter())
            if not select.select([watched], [], [], left)[0]:
                os.kill(begun.process, by)
        if not select.select([watched], [], [], PATIENCE)[0]:
            os.kill(begun.process, signal.SIGKILL)
            raise TimeoutError(f"{begun.said.with_suffix('.log')}: it did not end")
    finally:
        os.close(watched)
    seconds = time.perf_counter() - begun.at
    code = os.waitstatus_to_exitcode(os.waitpid(begun.process, 0)[1])
    told = json.loads(begun.said.read_text()) if begun.said.exists() else {}
    return Ended(code, told.get("error", ""), told.get("wanted", True), seconds)


def left(folder: Path) -> dict[str, str]:
    """Hashes of all that a run leaves and that does not depend on time or on how often it was
    begun: weights, the trainer's state, metrics, result, configuration, traces."""
    found = dict(parts(folder))
    for name in list(found):
        if "/traces/" in name:  # lines in the order in which rollouts ended, which depends on time
            traces = [timeless(json.loads(line)) for line in _lines(folder / name)]
            found[name] = hashed({_attempt(trace): trace for trace in traces})  # the last counts
        elif not _compared(name):
            del found[name]
    names = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    found["files"] = hashed([name for name in names if _compared(name)])
    return found


def _compared(name: str) -> bool:
    """TensorBoard has a file of each start, and a checkpoint that cannot be read is kept aside."""
    return "/tensorboard/" not in name and ".damaged/" not in name


def _lines(path: Path) -> list[bytes]:
    return [line for _, line in complete_lines(path)]


def _attempt(trace: dict[str, Any]) -> str:
    return json.dumps([trace["id"], trace["attempt"]])


def differences(one: dict[str, str], other: dict[str, str]) -> list[str]:
    """The parts that are not the same."""
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def unsound(folder: Path) -> list[str]:
    """What is half-written under a final name in a run directory; a torn last line is allowed."""
    found = []
    directory = RunDirectory(folder / "p" / "run")
    for step in directory.checkpoint_steps():
        if broken := damage(directory.checkpoint(step)):
            found.append(f"checkpoint {step}: {broken}")
    for path in (directory.result, directory.path / "data.json"):
        if path.exists():
            try:
                json.loads(path.read_text())
            except ValueError as error:
                found.append(f"{path.name}: {error}")
    for path in (directory.metrics, directory.batches, *directory.traces.glob("*.jsonl")):
        for number, line in complete_lines(path):
            try:
                json.loads(line)
            except ValueError as error:
                found.append(f"{path.name}, line {number}: {error}")
    return found


def retrained(start: Callable[[Path], Any], folder: Path) -> list[str]:
    """Train an asynchronous run once more from what it recorded, and say how it differs.

    How its rollouts fell out depends on time, so there is no run to compare it with but this: one
    that has its rollouts and the batches that it took of them, and no checkpoint.
    """
    before, directory = _weights(folder), RunDirectory(folder / "p" / "run")
    shutil.rmtree(directory.checkpoints)
    for path in (directory.result, directory.metrics):
        path.unlink()
    ended = end(begin(start, folder))
    if ended.code:
        return [f"training it once more failed: {ended.error}"]
    return [f"trained once more, {name}" for name in differences(before, _weights(folder))]


def _weights(folder: Path) -> dict[str, str]:
    return {name: part for name, part in parts(folder) if name.endswith((".safetensors", ".pt"))}


def accounts(folder: Path, *, steps: int, batch: int, repeat: int, staleness: int) -> list[str]:
    """What is wrong with the accounts of an asynchronous run that has ended."""
    directory, wrong = RunDirectory(folder / "p" / "run"), []
    rows = [row for row in map(json.loads, _lines(directory.metrics)) if row["step"]]
    if [row["step"] for row in rows] != list(range(1, steps + 1)):
        wrong.append(f"steps {[row['step'] for row in rows]}")
    for row in rows:
        dropped = sum(n for name, n in row.items() if name.startswith("tokens/dropped/"))
        if row["tokens/sampled"] != row["tokens/trained"] + dropped:
            wrong.append(f"step {row['step']}: tokens are lost")
        if row.get("staleness/max", 0) > staleness:
            wrong.append(f"step {row['step']}: too old")
    batches = {row["step"]: row["groups"] for row in map(json.loads, _lines(directory.batches))}
    groups = Counter(group for taken in batches.values() for group in taken)
    if groups != Counter(range(steps * batch)):
        wrong.append(f"groups {groups}")
    for path in directory.traces.glob("step_*.jsonl"):
        ids = Counter(trace.id for trace in read_traces(path) if trace.final)
        if set(ids.values()) != {1} or len(ids) != batch * repeat:
            wrong.append(f"{path.name}: {ids}")
    return wrong
