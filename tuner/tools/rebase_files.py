"""The directory of a run that is rebased, made of the old run's, which stays as it is.

    traces of training       all, with their new rewards; from the first changed step on marked as
                             another run's (`Trace.foreign_from`)
    ... of evaluations       those of weights that both runs have, with their new rewards; others go
                             to set_aside/ as they are
    metrics, checkpoints     those before the first changed step
    batches, branching       all: which groups a step takes does not change
    rebase.json              what was found (`tuner.runs.rebased`)

It has another name until it is complete, so a preparation that was killed is begun again.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tuner.config import RunConfig
from tuner.rollouts.chat_models import default_kind
from tuner.rollouts.groups import BatchLog, taken_until
from tuner.runs.auxiliary import AuxiliaryModels
from tuner.runs.directory import (
    RunDirectory,
    make_private,
    read_metrics,
    run_async,
    write_atomically,
)
from tuner.runs.metrics import evaluation_metrics, rollout_metrics
from tuner.runs.models import choose_device, choose_dtype
from tuner.runs.rebased import RebaseRecord, training_files, write_traces
from tuner.runs.stack import add_auxiliary_models
from tuner.tools.judging import JudgeAgain, asks_for_models, was_judged
from tuner.traces import Trace, read_traces


@dataclass(eq=False)
class Preparation:
    """Makes a run's directory from another's.

    Args:
        old, new: The directories.
        config: Of the new run.
        judge: The mended one.
        record: What is asked for; what is found is added.
        total_steps: Length of the new run.
    """

    old: RunDirectory
    new: RunDirectory
    config: RunConfig
    judge: Callable[..., Any]
    record: RebaseRecord
    total_steps: int

    def __post_init__(self) -> None:
        self._batch = self.config.buffer.batch_size
        self._metrics = read_metrics(self.old.metrics, up_to=sys.maxsize)
        self.record.trained = max((int(row["step"]) for row in self._metrics), default=0)
        taken = BatchLog(self.old.batches).read()
        self._trained = taken_until(taken, self.record.trained, batch=self._batch)
        noted = max(taken, default=0)
        self._step_of = {
            number: step
            for step in range(1, max(self.record.trained, noted) + 1)
            for number in taken.get(step, range((step - 1) * self._batch, step * self._batch))
        }
        self._last = max(self._step_of.values(), default=0)
        self._differ: set[tuple[str, int]] = set()  # files in which something is not as it was

    def make(self) -> None:
        """
        Raises:
            FunctionError: The judge returned something else than an output.
        """
        unfinished = self.new.path.with_name(f".{self.new.path.name}.rebase")
        shutil.rmtree(unfinished, ignore_errors=True)
        make_private(unfinished)
        to = RunDirectory(unfinished)
        to.traces.mkdir()
        run_async(self._judge(to))
        self._mark(to)
        for path in (self.old.path / "data.json", self.old.batches, self.old.branching):
            if path.exists():
                shutil.copyfile(path, to.path / path.name)
        to.checkpoints.mkdir()
        for step in self.old.checkpoint_steps():
            if self._is_kept(step):
                shutil.copytree(self.old.checkpoint(step), to.checkpoint(step))
        rows = [self._row(row, to) for row in self._metrics if self._is_kept(row["step"])]
        write_atomically(to.metrics, "".join(f"{json.dumps(row)}\n" for row in rows))
        write_atomically(to.config, self.config.to_yaml())
        write_atomically(to.rebase, self.record.model_dump_json(indent=2))
        os.replace(unfinished, self.new.path)

    def _is_kept(self, step: float) -> bool:
        """Whether what followed a step is that of both runs."""
        return self.record.first_changed is None or step < self.record.first_changed

    def _step(self, trace: Trace) -> int:
        """The step that took a rollout, or the first that may."""
        number = self._number(trace)
        return self._step_of.get(number, max(trace.id.step, self._last + 1))

    def _number(self, trace: Trace) -> int:
        return (trace.id.step - 1) * self._batch + trace.id.task

    async def _judge(self, to: RunDirectory) -> None:
        """Of training everything, and then evaluations of weights that both runs have."""
        async with self._auxiliary() as auxiliary:
            again = JudgeAgain(self.judge, self.config, auxiliary)
            for step, path in training_files(self.old.traces):
                before = list(read_traces(path))
                after = await again.of(before)
                for was, now in zip(before, after, strict=True):
                    self._tell(was, now)
                self._write(to.traces / path.name, ("train", step), before, after)
            changed = [one.step for one in self.record.steps if one.changed]
            self.record.first_changed = min(changed, default=None)
            for name, step, path in evaluation_files(self.old.traces):
                before = list(read_traces(path))
                if not self._is_kept(step):
                    to.set_aside.mkdir(exist_ok=True)
                    write_traces(to.set_aside / path.name, before)
                    self.record.evaluations_set_aside += sum(trace.final for trace in before)
                    continue
                after = await again.of(before)
                self.record.evaluations_judged += sum(map(was_judged, before))
                self.record.evaluations_changed += sum(
                    was.reward != now.reward for was, now in zip(before, after, strict=True)
                )
                self._write(to.traces / path.name, (name, step), before, after)

    def _write(
        self, path: Path, of: tuple[str, int], before: Sequence[Trace], after: Sequence[Trace]
    ) -> None:
        if before != after:
            self._differ.add(of)
        write_traces(path, after)

    def _tell(self, was: Trace, now: Trace) -> None:
        """Count a rollout of training."""
        noted = self.record.of_step(self._step(was))
        noted.judged += was_judged(was)
        noted.changed += was.reward != now.reward
        noted.rollouts += was.final
        noted.tokens += was.sampled_tokens

    @asynccontextmanager
    async def _auxiliary(self) -> AsyncIterator[AuxiliaryModels]:
        """The run's, loaded only for a judge that is given them."""
        auxiliary, config = AuxiliaryModels(default_kind()), self.config
        try:
            if asks_for_models(self.judge):
                device = choose_device(config.tuner.device)
                dtype = choose_dtype(config.tuner.dtype, device)
                add_auxiliary_models(auxiliary, config, device, dtype)
            yield auxiliary
        finally:
            await auxiliary.aclose()

    def _mark(self, to: RunDirectory) -> None:
        """Say of what the first changed step and later ones take that it is another run's.

        Where rollouts begin inside others, nobody knows whether a group that no step took is
        complete, and where more of it would begin hangs on rewards: it is set aside.
        """
        first = self.record.first_changed
        for one in self.record.steps:
            one.use = "kept" if first is None or one.step < first else ""
        if first is None:
            return
        # An update has metrics of its own; a step without anything to train has none.
        updates = sum(
            any(name.startswith("train/") for name in row)
            for row in self._metrics
            if row["step"] < first
        )
        self.record.foreign_from = updates + 1
        again = self.record.max_reused * (self.total_steps - first + 1)
        self.record.last_again = first - 1 + max(1, math.floor(again))
        for _, path in training_files(to.traces):
            kept: list[Trace] = []
            aside: list[Trace] = []
            for trace in read_traces(path):
                if self._step(trace) >= first:
                    trace = replace(trace, foreign_from=updates + 1)
                branches = self.config.tuner.branching is not None
                whole = self._number(trace) in self._trained
                (aside if branches and not whole else kept).append(trace)
            if aside:
                to.set_aside.mkdir(exist_ok=True)
                write_traces(to.set_aside / path.name, aside)
                for trace in aside:
                    self.record.of_step(self._step(trace)).use = "anew"
            write_traces(path, kept)

    def _row(self, row: dict[str, Any], to: RunDirectory) -> dict[str, Any]:
        """The metrics of a step that is kept, of which judge and evaluations may say otherwise."""
        step, pass_reward = int(row["step"]), self.config.tuner.pass_reward
        files = sorted({n // self._batch + 1 for n, at in self._step_of.items() if at == step})
        if any(("train", number) in self._differ for number in files):
            paths = [path for number, path in training_files(to.traces) if number in files]
            traces = [t for path in paths for t in read_traces(path) if self._step(t) == step]
            row = {k: v for k, v in row.items() if not k.startswith("workflow/")}
            row |= rollout_metrics(traces)
        for name, of, path in evaluation_files(to.traces):
            if of == step and (name, of) in self._differ:
                prefix = f"eval/{name}/"
                row = {k: v for k, v in row.items() if not k.startswith(prefix)}
                row |= evaluation_metrics(name, list(read_traces(path)), pass_reward=pass_reward)
        return row


def evaluation_files(folder: Path) -> Iterator[tuple[str, int, Path]]:
    """Evaluation set, step and file of each that is in a folder of traces."""
    for path in sorted(folder.iterdir()):
        if match := re.fullmatch(r"(.+)_step_(\d+)\.jsonl", path.name):
            yield match[1], int(match[2]), path
