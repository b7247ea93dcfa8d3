"""`tuner rebase`: score a run's recorded rollouts with a fixed judge, and train a new run from the
first step in which a reward changed.

The new run's directory is made from the old run's, which is not changed:

    training traces          all, with their new rewards; from the first changed step on marked as
                             another run's (`Trace.foreign_from`)
    evaluation traces        those of weights that both runs have, with their new rewards; others
                             move to set_aside/ unchanged
    metrics, checkpoints     those before the first changed step
    batches, branching       all: the groups of a step do not change
    rebase.json              the result (`tuner.runs.rebased`, from which the loop resumes)

It has a temporary name until it is complete, so a killed preparation starts over.
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
from tuner.config.algorithms import ADVANTAGES
from tuner.config.load import checked, read_layers
from tuner.encoding import model_json
from tuner.errors import ConfigError, TunerError, system_faults
from tuner.rollouts.chat_models import default_kind
from tuner.rollouts.groups import BatchLog, taken_until
from tuner.runs.auxiliary import AuxiliaryModels
from tuner.runs.directory import (
    MAY_CHANGE_HERE,
    RunDirectory,
    check_same_run,
    held,
    make_private,
    outside_event_loop,
    read_metrics,
    run_async,
    write_atomically,
)
from tuner.runs.environment import Parts, named_in
from tuner.runs.rebased import RebaseRecord, read_rebase, training_files, write_traces
from tuner.runs.result import TuneResult
from tuner.tasks.functions import check_judge_function
from tuner.tasks.loading import load_function, require_nothing_loads, without_collection
from tuner.tasks.selection import planned_steps
from tuner.tools.judging import JudgeCalls, asks_for_models, was_judged
from tuner.traces import Trace, read_traces
from tuner.tune import RunPlan, leave_report, prepare

LEAST = 0.9
"""Default of `min_effective_samples`."""
MOST = 0.5
"""Default of `max_reused`."""
Function = Callable[..., Any]


@dataclass(frozen=True)
class Rebase:
    """A rebased run.

    Attributes:
        result: Result of the new run.
        record: Use of each step of the old run, and why no more was used; also in `rebase.json`.
    """

    result: TuneResult
    record: RebaseRecord

    def __str__(self) -> str:
        return f"{self.record}\n{self.result}"


@system_faults()
def rebase(
    run: str | Path,
    judge: Function | str,
    *,
    workflow: Function | str | None = None,
    train_dataset: Any = None,
    eval_dataset: Any = None,
    name: str | None = None,
    min_effective_samples: float = LEAST,
    max_reused: float = MOST,
    overrides: Sequence[str] = (),
) -> Rebase:
    """Score a run's recorded rollouts with another judge, and train from the first changed step.

    The run itself is not changed. A second call resumes a rebase that was interrupted.

    Args:
        run: The run directory.
        judge: The fixed judge, or `package.module:function` or `path/file.py:function`.
        workflow: The unchanged workflow, in the same form; None for the one in the run's
            configuration.
        train_dataset, eval_dataset: As given to `tune()`; None for those in the configuration.
        name: Name of the new run, in the same project; None for `<run>-rebased`.
        min_effective_samples: Minimum effective sample size of a step's recorded tokens under the
            weights that it trains, as a share of the tokens: (sum w)^2 / (n sum w^2), with the
            weights that the loss gives them. From the first step below it, rollouts are sampled.
        max_reused: Share of the steps from the first changed one on that may be trained from
            recorded rollouts; the others sample, so that the run explores beyond the old policy.
        overrides: `key=value` strings for settings that may change in a resumed run, and secrets.

    Raises:
        ConfigError: The run cannot be rebased, or another run has the new name.
        FunctionError: A function cannot be called, or the judge returned the wrong type.
        DatasetError: A dataset is missing.
        TunerError: The run is missing, or one of its files is damaged.
        TrainingError: Training failed; the message is the diagnosis.
    """
    require_nothing_loads("rebase()")
    for option, share in (
        ("min_effective_samples", min_effective_samples),
        ("max_reused", max_reused),
    ):
        if not 0 <= share <= 1:
            raise ConfigError(f"{option} is {share:g}: give a share from 0 to 1")
    old = _directory(Path(run))
    before = _configuration(old)
    if before.model.adapters:
        raise ConfigError(
            f"{run} trains an adapter for each role (model.adapters), and such a run cannot be "
            "rebased: train again with the fixed judge"
        )
    called = load_function(judge, setting="--judge") if isinstance(judge, str) else judge
    check_judge_function(called)
    environment = None if workflow is not None else named_in(before.tuner)
    # with another judge it is a different environment, which no file names
    if environment is not None:
        workflow, overrides = environment.workflow, [*overrides, "tuner.environment=null"]
        train_dataset = environment.train_dataset if train_dataset is None else train_dataset
        eval_dataset = environment.eval_dataset if eval_dataset is None else eval_dataset
    agent = _workflow(old, before, workflow)
    with Parts(environment, agent, called, train_dataset, {}).closing():
        prepared = prepare(
            agent,
            called,
            train_dataset,
            eval_dataset=eval_dataset,
            config_path=old.config,
            backend="local",
            overrides=overrides,
        )
        return _begun(old, before, prepared, name, least=min_effective_samples, most=max_reused)


def _begun(
    old: RunDirectory,
    before: RunConfig,
    prepared: RunPlan,
    name: str | None,
    *,
    least: float,
    most: float,
) -> Rebase:
    path = old.path.absolute()
    where = {
        "checkpoint_root_dir": path.parent.parent,
        "project": path.parent.name,
        "name": name or f"{path.name}-rebased",
        "continue_from_checkpoint": True,
    }
    ready = replace(prepared, config=prepared.config.model_copy(update=where))
    return outside_event_loop(lambda: _rebased(old, before, ready, least=least, most=most))


def _rebased(
    old: RunDirectory, before: RunConfig, run: RunPlan, *, least: float, most: float
) -> Rebase:
    with without_collection():
        from tuner.loop import run_local

    new = RunDirectory(run.config.run_dir)
    asked = RebaseRecord(
        run=old.path.absolute(),
        judge=run.config.tuner.judge,
        min_effective_samples=least,
        max_reused=most,
    )
    if new.path.exists():
        _check_resumes(new, asked)
    else:
        _check_same(old, before, run)
        assert run.judge is not None, "a judge was given"
        with held(old.path):
            steps = planned_steps(run.config, len(run.train_tasks))
            Preparation(old, new, run.config, run.judge, asked, steps).make()
    result = run_local(**vars(run), report=leave_report)
    record = read_rebase(new)
    assert record is not None, "it was written above"
    return Rebase(result, record)


def _directory(path: Path) -> RunDirectory:
    """Reject a folder that is not a run trained on rollouts by the local backend."""
    found = RunDirectory(path)
    if not found.traces.is_dir() or not found.config.is_file():
        raise TunerError(
            f"{path} is not a run: give the folder <checkpoint_root_dir>/<project>/<name> that has "
            "config.yaml and traces/"
        )
    if (path / "search.json").is_file():
        raise TunerError(f"{path} is a prompt search, which trains nothing: search again")
    return found


def _configuration(old: RunDirectory) -> RunConfig:
    """The run's configuration, with masked secrets; rejects a run that cannot be rebased."""
    layers = read_layers(old.config, stored=True)
    if layers.backend == "trinity":
        raise ConfigError(
            f"{old.path} is a run on Trinity-RFT, whose steps cannot be trained again here"
        )
    config = checked(layers)
    algorithm = config.algorithm
    if config.mode == "train":
        raise ConfigError(
            f"{old.path} trained on recorded data (algorithm.algorithm_type "
            f"{algorithm.algorithm_type}), which does not use a judge"
        )
    if not ADVANTAGES[algorithm.advantage_fn].needs_reward:
        raise ConfigError(
            f"{old.path}: algorithm.advantage_fn {algorithm.advantage_fn} uses no rewards, so "
            "another judge changes nothing; `tuner replay` shows its rewards"
        )
    if config.tuner.feedback_attempts:
        raise ConfigError(
            f"{old.path}: tuner.feedback_attempts is {config.tuner.feedback_attempts}, so its "
            "rollouts depend on the old judge's feedback; start a new run"
        )
    if config.tuner.tasks.selector is not None:
        raise ConfigError(
            f"{old.path}: tuner.tasks.selector chose tasks by the old judge's rewards, so another "
            "judge would have led to other tasks; start a new run"
        )
    first = min(old.traces.glob("step_*.jsonl"), default=None)
    judged = first is not None and any(t.seconds.get("judge") for t in read_traces(first))
    if not judged and config.tuner.judge is None:
        raise ConfigError(
            f"{old.path} has no judge: its workflow gave the rewards, so they cannot be computed "
            "again without running it"
        )
    return config


def _workflow(old: RunDirectory, config: RunConfig, given: Function | str | None) -> Function:
    if callable(given):
        return given
    if given is not None:
        return load_function(given, setting="--workflow")
    if config.tuner.agent is not None:
        from tuner.areal import configured_agent

        return configured_agent(config.tuner)
    if config.tuner.workflow is None:
        raise ConfigError(
            f"{old.config} names no workflow: add --workflow package.module:function or "
            "path/file.py:function"
        )
    return load_function(config.tuner.workflow, setting=f"{old.config}: tuner.workflow")


def _check_resumes(new: RunDirectory, asked: RebaseRecord) -> None:
    found = read_rebase(new)
    if found is None:
        raise ConfigError(f"{new.path} is a different run: choose another name (--name)")
    for field_, option in (
        ("run", "RUN"),
        ("judge", "--judge"),
        ("min_effective_samples", "--min-effective-samples"),
        ("max_reused", "--max-reused"),
    ):
        was, now = getattr(found, field_), getattr(asked, field_)
        if was != now:
            raise ConfigError(
                f"{new.path} is a rebase whose {option} was {was}, and is now {now}: choose "
                "another name (--name)"
            )


def _check_same(old: RunDirectory, before: RunConfig, run: RunPlan) -> None:
    """Reject changed data, and changes of settings other than the judge."""
    from tuner.runs.record import fingerprints

    # A function defined where no file can name it has no entry there.
    named = None not in (before.tuner.workflow, run.config.tuner.workflow)
    may_change = (*MAY_CHANGE_HERE, "tuner.judge", *(() if named else ("tuner.workflow",)))
    if run.config.tuner.environment is None:
        may_change = (*may_change, "tuner.environment")
    data = {"train": run.train_tasks, **run.eval_tasks}
    check_same_run(
        old,
        before.public(),
        run.config.public(),
        fingerprints(run.config, data),
        may_change=may_change,
    )


@dataclass(eq=False)
class Preparation:
    """Makes the new run's directory from the old one, and adds what it finds to the record."""

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
        self._differ: set[tuple[str, int]] = set()  # files that have changes

    def make(self) -> None:
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
        write_atomically(to.rebase, model_json(self.record))
        os.replace(unfinished, self.new.path)

    def _is_kept(self, step: float) -> bool:
        """True if both runs share what followed a step."""
        return self.record.first_changed is None or step < self.record.first_changed

    def _step(self, trace: Trace) -> int:
        """The step that used a rollout, or the first that may."""
        number = self._number(trace)
        return self._step_of.get(number, max(trace.id.step, self._last + 1))

    def _number(self, trace: Trace) -> int:
        return (trace.id.step - 1) * self._batch + trace.id.task

    async def _judge(self, to: RunDirectory) -> None:
        """Judge all training rollouts, then evaluations of weights that both runs have."""
        async with self._auxiliary() as auxiliary:
            limits = self.config.explorer
            calls = JudgeCalls(
                self.judge,
                auxiliary.opened,
                seed=self.config.tuner.seed,
                timeout=limits.max_timeout,
                retries=limits.max_retry_times,
            )
            for step, path in training_files(self.old.traces):
                before = list(read_traces(path))
                after = await _judged_again(calls, before)
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
                after = await _judged_again(calls, before)
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
        """Count a training rollout."""
        noted = self.record.of_step(self._step(was))
        noted.judged += was_judged(was)
        noted.changed += was.reward != now.reward
        noted.rollouts += was.final
        noted.tokens += was.sampled_tokens

    @asynccontextmanager
    async def _auxiliary(self) -> AsyncIterator[AuxiliaryModels]:
        """The run's auxiliary models, loaded only for a judge that takes them."""
        from tuner.runs.models import choose_device, choose_dtype
        from tuner.runs.stack import add_auxiliary_models

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
        """Mark the traces used by the first changed step and later ones as another run's.

        With branching, a group that no step used may be incomplete, and its remaining rollouts
        would depend on rewards, so it is set aside.
        """
        first = self.record.first_changed
        for one in self.record.steps:
            one.use = "kept" if first is None or one.step < first else ""
        if first is None:
            return
        # A step that trains nothing has no metrics of an update.
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
        """The metrics of a kept step, updated if rewards changed."""
        from tuner.runs.metrics import evaluation_metrics, rollout_metrics

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


async def _judged_again(calls: JudgeCalls, traces: Sequence[Trace]) -> list[Trace]:
    """The traces as the run would have written them with these judgements."""
    found = await calls.judge_traces(traces, was_judged)
    pairs = zip(traces, found, strict=True)
    return [trace if judgement is None else judgement.on(trace) for trace, judgement in pairs]


def evaluation_files(folder: Path) -> Iterator[tuple[str, int, Path]]:
    """Evaluation set, step and path of each evaluation file in a folder of traces."""
    for path in sorted(folder.iterdir()):
        if match := re.fullmatch(r"(.+)_step_(\d+)\.jsonl", path.name):
            yield match[1], int(match[2]), path
