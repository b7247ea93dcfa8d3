"""`tuner rebase`: the judge was wrong. Its mended version judges what was recorded, and the run
goes on, in a directory of its own, from the first step in which a reward changed.

What of the old directory is in the new one is in `tuner.tools.rebase_files`, and what the loop
does with it in `tuner.runs.rebased`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.config import RunConfig
from tuner.config.algorithms import ADVANTAGES
from tuner.config.load import checked, read_layers
from tuner.environments.seam import Parts, named_in
from tuner.errors import ConfigError, TunerError
from tuner.runs.directory import outside_event_loop
from tuner.runs.result import TuneResult
from tuner.tasks.functions import check_judge_function
from tuner.tasks.loading import load_function, require_nothing_loads, without_collection
from tuner.traces import read_traces
from tuner.tune import Run, leave_report, prepare

if TYPE_CHECKING:
    from tuner.runs.directory import RunDirectory
    from tuner.runs.rebased import RebaseRecord


LEAST = 0.9
"""Of the tokens what they must be worth, where nobody says it."""
MOST = 0.5
"""Of the steps how many are trained again, likewise."""
Function = Callable[..., Any]


@dataclass(frozen=True)
class Rebase:
    """A run that was rebased.

    Attributes:
        result: Of the new run.
        record: What of the old one was used, step by step, and why no more; as in `rebase.json`.
    """

    result: TuneResult
    record: RebaseRecord

    def __str__(self) -> str:
        return f"{self.record}\n{self.result}"


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
    """Judge a run's recorded rollouts again, and train from the first step that this changes.

    The run itself stays as it is. Calling this again goes on with a rebase that was interrupted.

    Args:
        run: The run directory.
        judge: The mended judge, or `package.module:function` or `path/file.py:function`.
        workflow: Likewise, as it was; None: the one that the run's configuration names.
        train_dataset, eval_dataset: As `tune()` was given them; None: the configuration's.
        name: Name of the new run, beside the old one; `<run>-rebased`.
        min_effective_samples: What the tokens recorded for a step must be worth to the weights that
            it trains, as a share of them: (sum w)^2 / (n sum w^2), with the weights that the loss
            gives them. From the first step on where they are worth less, rollouts are made anew.
        max_reused: Of the steps from the first changed one on at most so many are trained from what
            was recorded, as a share; the others are for what the old policy never tried.
        overrides: `key=value` strings, of what may change in a run that goes on, and secrets.

    Raises:
        ConfigError: The run cannot be rebased, or another run has the new name; says why.
        FunctionError: A function cannot be called, or the judge returned something else.
        DatasetError: A dataset is not there.
        TunerError: There is no such run, or something of it is damaged.
        TrainingError: Training failed; the message is the diagnosis.
    """
    require_nothing_loads("rebase()")
    for option, share in (
        ("min_effective_samples", min_effective_samples),
        ("max_reused", max_reused),
    ):
        if not 0 <= share <= 1:
            raise ConfigError(f"{option} is {share:g}: it is a share, from 0 to 1")
    old = _directory(Path(run))
    before = _configuration(old)
    called = load_function(judge, setting="--judge") if isinstance(judge, str) else judge
    check_judge_function(called)
    environment = None if workflow is not None else named_in(before.tuner)
    if environment is not None:  # with another judge it is another one, which no file names
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
    prepared: Run,
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
    old: RunDirectory, before: RunConfig, run: Run, *, least: float, most: float
) -> Rebase:
    with without_collection():
        from tuner.loop import run_local
        from tuner.runs.directory import RunDirectory, held
        from tuner.runs.rebased import RebaseRecord, read_rebase
        from tuner.tasks.selection import planned_steps
        from tuner.tools.rebase_files import Preparation

    new = RunDirectory(run.config.run_dir)
    asked = RebaseRecord(
        run=old.path.absolute(),
        judge=run.config.tuner.judge,
        min_effective_samples=least,
        max_reused=most,
    )
    if new.path.exists():
        _check_goes_on(new, asked)
    else:
        _check_same(old, before, run)
        assert run.judge is not None, "there is the mended one"
        with held(old.path):
            steps = planned_steps(run.config, len(run.train_tasks))
            Preparation(old, new, run.config, run.judge, asked, steps).make()
    result = run_local(**vars(run), report=leave_report)
    record = read_rebase(new)
    assert record is not None, "it was written above"
    return Rebase(result, record)


def _directory(path: Path) -> RunDirectory:
    """
    Raises:
        TunerError: It is no run that trained on rollouts here.
    """
    from tuner.runs.directory import RunDirectory

    found = RunDirectory(path)
    if not found.traces.is_dir() or not found.config.is_file():
        raise TunerError(
            f"{path} is not a run: give the folder <checkpoint_root_dir>/<project>/<name>, with "
            "config.yaml and traces/ in it"
        )
    if (path / "search.json").is_file():
        raise TunerError(f"{path} is a search for prompts, which trains nothing: search again")
    return found


def _configuration(old: RunDirectory) -> RunConfig:
    """What the run was started with; secrets are masked.

    Raises:
        ConfigError: Such a run cannot be rebased.
    """
    layers = read_layers(old.config, stored=True)
    if layers.backend == "trinity":
        raise ConfigError(
            f"{old.path} is a run on Trinity-RFT, whose steps are not trained again here"
        )
    config = checked(layers)
    algorithm = config.algorithm
    if config.mode == "train":
        raise ConfigError(
            f"{old.path} trained on recorded data (algorithm.algorithm_type "
            f"{algorithm.algorithm_type}): no judge had a part in it"
        )
    if not ADVANTAGES[algorithm.advantage_fn].needs_reward:
        raise ConfigError(
            f"{old.path}: algorithm.advantage_fn {algorithm.advantage_fn} learns from no rewards, "
            "so that another judge changes nothing; `tuner replay` shows what it says"
        )
    if config.tuner.feedback_attempts:
        raise ConfigError(
            f"{old.path}: tuner.feedback_attempts is {config.tuner.feedback_attempts}, so the "
            "rollouts went on by what the old judge said, and are not those of another; start anew"
        )
    if config.tuner.tasks.selector is not None:
        raise ConfigError(
            f"{old.path}: tuner.tasks.selector draws tasks by the rewards of earlier ones, so that "
            "another judge would have drawn others; start anew"
        )
    first = min(old.traces.glob("step_*.jsonl"), default=None)
    judged = first is not None and any(t.seconds.get("judge") for t in read_traces(first))
    if not judged and config.tuner.judge is None:
        raise ConfigError(
            f"{old.path} has no judge: the workflow gave its rewards, which nobody can give again "
            "without it"
        )
    return config


def _workflow(old: RunDirectory, config: RunConfig, given: Function | str | None) -> Function:
    """
    Raises:
        ConfigError: It cannot be loaded, or nothing names one.
    """
    if callable(given):
        return given
    if given is not None:
        return load_function(given, setting="--workflow")
    if config.tuner.agent is not None:
        from tuner.areal import configured_agent

        return configured_agent(config.tuner)
    if config.tuner.workflow is None:
        raise ConfigError(
            f"{old.config} does not say which workflow it was run with: give --workflow "
            "package.module:function or path/file.py:function"
        )
    return load_function(config.tuner.workflow, setting=f"{old.config}: tuner.workflow")


def _check_goes_on(new: RunDirectory, asked: RebaseRecord) -> None:
    """
    Raises:
        ConfigError: What has the new name is not this rebase.
    """
    from tuner.runs.rebased import read_rebase

    found = read_rebase(new)
    if found is None:
        raise ConfigError(f"{new.path} is another run: give this one another name (--name)")
    for field_, option in (
        ("run", "RUN"),
        ("judge", "--judge"),
        ("min_effective_samples", "--min-effective-samples"),
        ("max_reused", "--max-reused"),
    ):
        was, now = getattr(found, field_), getattr(asked, field_)
        if was != now:
            raise ConfigError(
                f"{new.path} is a rebase whose {option} was {was}, and is now {now}: give this one "
                "another name (--name)"
            )


def _check_same(old: RunDirectory, before: RunConfig, run: Run) -> None:
    """
    Raises:
        ConfigError: Another setting than the judge has changed, or the data.
    """
    from tuner.runs.directory import MAY_CHANGE_HERE, check_same_run
    from tuner.runs.record import fingerprints

    # One that no file can name has none there.
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
