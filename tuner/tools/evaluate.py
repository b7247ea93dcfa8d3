"""`tuner eval`: models, checkpoints and runs on the same tasks, several times each.

Rollouts are those of an evaluation during training: the same engine, gateway, limits and seeds, so
that candidates are given the same random numbers. A rollout that failed has no reward and is in no
mean; how many did, and how, is said beside it.
"""

from __future__ import annotations

import asyncio
import gc
import io
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from tuner.config import RemoteModel, RunConfig
from tuner.config.keys import check_path, located, require_model_libraries
from tuner.config.schema import LoraSection, SynchronizerSection
from tuner.config.source import PACKAGE, lookup
from tuner.errors import ConfigError, TrainingError, TunerError
from tuner.runs.directory import (
    ADAPTER_CONFIG,
    MANIFEST,
    OBJECTS,
    RunDirectory,
    damage,
    make_private,
    outside_event_loop,
    write_atomically,
)
from tuner.runs.estimates import Estimate, estimate, is_run, passes, rewards_by_task
from tuner.tasks.loading import require_nothing_loads
from tuner.tasks.settings import Given, TunerModelConfig
from tuner.traces import Outcome, Trace, TraceStore
from tuner.tune import Run, evaluation_of

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


# A model, a checkpoint or a run, as the weights that are meant by it.


_DAMAGED = "delete it, and what it says is found without it"


@dataclass(frozen=True)
class Candidate:
    """Weights that are compared with others, or exported.

    Attributes:
        name: What people call it.
        path: Folder of a model or an adapter, or a model as `model.model_path` names it.
        base: Of an adapter, the model that it belongs to, as `model.model_path`; else None.
        run: Where it comes from, if that is here.
        step: The step of that run.
    """

    name: str
    path: str
    base: str | None = None
    run: RunDirectory | None = None
    step: int | None = None

    @property
    def recorded_base(self) -> str | None:
        """What an adapter itself calls the model that it belongs to; None where it is elsewhere."""
        if not (Path(self.path) / ADAPTER_CONFIG).is_file():
            return None
        config = OBJECTS.document(Path(self.path) / ADAPTER_CONFIG, "export or train it again")
        return config.get("base_model_name_or_path") or None


def find_candidate(given: str | Path) -> Candidate:
    """What a person names: a run (its newest checkpoint), a checkpoint, a model, an adapter.

    Args:
        given: A folder, or a model as `model.model_path` names it.

    Raises:
        MissingDependencyError: It names a package that is not installed.
        TunerError: It is a folder with none of these, a run without a checkpoint, or a checkpoint
            that is not as it was written.
        ModelLoadError: It can only be a folder, and there is none.
    """
    folder = Path(given).expanduser()
    place = located(str(given), "the candidate")
    if place is not None and place.is_file() and not str(given).startswith(PACKAGE):
        return Candidate(place.name, str(place.resolve()))
    if not folder.is_dir():
        if place is None:
            check_path(str(given), "the candidate", what="model, a checkpoint or a run")
        return Candidate(str(given), str(given))
    folder = folder.resolve()
    run = RunDirectory(folder)
    # A folder of projects is often called checkpoints, too.
    if is_run(folder) or run.checkpoint_steps():
        return _newest(run)
    if not any((folder / name).is_file() for name in ("config.json", ADAPTER_CONFIG)):
        raise TunerError(
            f"{given} is neither a run, nor a checkpoint, nor a model: it holds no checkpoints/, "
            f"{ADAPTER_CONFIG} or config.json; give <checkpoint_root_dir>/<project>/<name> or a "
            "folder in its checkpoints/"
        )
    owner = RunDirectory(folder.parent.parent)
    of_run = folder.parent == owner.checkpoints and owner.config.is_file()
    return _of_folder(folder, owner if of_run else None)


def _newest(run: RunDirectory) -> Candidate:
    steps = run.checkpoint_steps()
    if steps:
        return _of_folder(run.checkpoint(steps[-1]), run)
    written = OBJECTS.document(run.result, _DAMAGED) if run.result.is_file() else {}
    folder = written.get("checkpoint") if isinstance(written, dict) else None
    if folder is None or not Path(folder).is_dir():  # Trinity-RFT's are elsewhere in the run
        raise TunerError(f"{run.path} has no checkpoint yet: wait for trainer.save_interval")
    return _of_folder(Path(folder), run)


def _of_folder(folder: Path, run: RunDirectory | None) -> Candidate:
    if (folder / MANIFEST).is_file() and (found := damage(folder)):
        raise TunerError(f"{folder} is damaged ({found}): take another checkpoint")
    number = folder.name.rpartition("_")[2]
    step = int(number) if run is not None and number.isdecimal() else None
    name = folder.name if run is None else run.path.name
    name = name if step is None else f"{name} step {step}"
    candidate = Candidate(name, str(folder), None, run, step)
    if not (folder / ADAPTER_CONFIG).is_file():
        return candidate
    base = (
        lookup(run.stored_config(), "model.model_path") if run is not None else None
    ) or candidate.recorded_base
    if not base:
        raise TunerError(
            f"{folder} is an adapter and does not say of which model: write its name as "
            f"base_model_name_or_path into {ADAPTER_CONFIG}"
        )
    return Candidate(name, str(folder), str(base), run, step)


# What an evaluation found: numbers for programs, tables for people.


class SetScores(BaseModel):
    """What one candidate did on one evaluation set.

    Attributes:
        reward: Mean over the tasks, of the mean of each task's rollouts; None where all failed.
        pass_at: By k, the chance that one of k rollouts of a task passes.
        pass_hat: By k, the chance that all of k do.
        failed: How many rollouts have no reward, by outcome.
        calls, tokens, seconds: Of a rollout, on average: calls, sampled tokens, time in workflow
            and judge while others ran.
        wall_seconds: Time until all had ended.
        rewards: Of each task, in the order of the rows, those of its rollouts that have one.
    """

    reward: Estimate | None
    pass_at: dict[int, Estimate]
    pass_hat: dict[int, Estimate]
    failed: dict[str, int]
    calls: float
    tokens: float
    seconds: float
    wall_seconds: float
    rewards: list[list[float]]


class CandidateScores(BaseModel):
    """One candidate: what it is called, where it is, and its scores by evaluation set."""

    name: str
    path: str
    sets: dict[str, SetScores]


class EvaluationSet(BaseModel):
    """What every candidate was asked: `repeat` rollouts of each task, sampled so."""

    tasks: int
    repeat: int
    temperature: float


class Difference(BaseModel):
    """Mean reward of a candidate less that of the first, task by task; None without a common one.

    Each task is its own comparison, so what makes some tasks harder than others is not in the
    interval.
    """

    set: str
    candidate: str
    baseline: str
    reward: Estimate | None


class Evaluation(BaseModel):
    """What `tuner.evaluate()` returns, and `evaluation.json` holds.

    Attributes:
        pass_reward: A rollout has passed that has at least so much.
        sets: By name.
        candidates: In the order they were given.
        differences: Of each set, every candidate against the first.
    """

    pass_reward: float
    sets: dict[str, EvaluationSet]
    candidates: list[CandidateScores]
    differences: list[Difference]

    def __str__(self) -> str:
        console = table_console()
        console.print(*self._tables(), sep="\n\n")
        return "\n".join(line.rstrip() for line in console.export_text().splitlines())

    def write(self, folder: Path) -> None:
        """Leave `evaluation.json` and `evaluation.html`."""
        console = table_console()
        console.print(*self._tables(), sep="\n\n")
        write_atomically(folder / "evaluation.json", self.model_dump_json(indent=2))
        write_atomically(folder / "evaluation.html", console.export_html(inline_styles=True))

    def _tables(self) -> Iterator[Table]:
        from rich.table import Table

        for name, asked in self.sets.items():
            title = (
                f"{name}: {asked.tasks} tasks x {asked.repeat} rollouts, temperature "
                f"{asked.temperature:g}"
            )
            table = Table(title=title, title_justify="left")
            table.add_column()
            for candidate in self.candidates:
                table.add_column(candidate.name, overflow="fold")
            for row in _rows([candidate.sets[name] for candidate in self.candidates]):
                table.add_row(*row)
            against = {d.candidate: d.reward for d in self.differences if d.set == name}
            if against:
                table.add_section()
                shown = [_shown(against.get(c.name), "+.3f") for c in self.candidates[1:]]
                table.add_row("against the first", "", *shown)
            yield table


def table_console(width: int = 100) -> Console:
    """Keeps tables, as text or as a page."""
    from rich.console import Console

    return Console(file=io.StringIO(), record=True, width=width, highlight=False)


def _rows(scores: Sequence[SetScores]) -> Iterator[list[str]]:
    yield ["reward", *(_shown(one.reward) for one in scores)]
    for what, label in (("pass_at", "pass@"), ("pass_hat", "pass^")):
        for k in sorted({k for one in scores for k in getattr(one, what)}):
            yield [f"{label}{k}", *(_shown(getattr(one, what).get(k)) for one in scores)]
    yield [
        "without a reward",
        *(", ".join(f"{n} {kind}" for kind, n in one.failed.items()) or "0" for one in scores),
    ]
    for what in ("calls", "tokens", "seconds"):
        yield [f"{what} per rollout", *(f"{getattr(one, what):.1f}" for one in scores)]
    yield ["seconds in all", *(f"{one.wall_seconds:.1f}" for one in scores)]


def _shown(value: Estimate | None, form: str = ".3f") -> str:
    return "-" if value is None else value.text(form)


def scores_of(traces: Sequence[Trace], wall_seconds: float, pass_reward: float) -> SetScores:
    """What the rollouts of one set come to."""
    final = [trace for trace in traces if trace.final]
    rewards = list(rewards_by_task(final).values())
    repeat = max(Counter(trace.id.task for trace in final).values())
    tries = sorted({*(1 << n for n in range(repeat.bit_length())), repeat})
    at_hat = {k: passes(rewards, k, pass_reward) for k in tries}
    failed = Counter(t.outcome.value for t in final if t.outcome is not Outcome.COMPLETED)
    return SetScores(
        reward=estimate([fmean(of_task) for of_task in rewards if of_task]),
        pass_at={k: found for k, (at, _) in at_hat.items() if (found := estimate(at))},
        pass_hat={k: found for k, (_, hat) in at_hat.items() if k > 1 and (found := estimate(hat))},
        failed=dict(failed),
        calls=fmean(len(trace.calls) for trace in final),
        tokens=fmean(trace.sampled_tokens for trace in final),
        seconds=fmean(
            trace.seconds.get("workflow", 0.0) + trace.seconds.get("judge", 0.0) for trace in final
        ),
        wall_seconds=wall_seconds,
        rewards=rewards,
    )


def difference(name: str, first: CandidateScores, other: CandidateScores) -> Difference:
    pairs = zip(other.sets[name].rewards, first.sets[name].rewards, strict=True)
    return Difference(
        set=name,
        candidate=other.name,
        baseline=first.name,
        reward=estimate([fmean(new) - fmean(old) for new, old in pairs if new and old]),
    )


_FILE = re.compile(r"[^\w.-]+")


def evaluate(
    workflow_func: Callable[..., Any] | None = None,
    judge_func: Callable[..., Any] | None = None,
    eval_dataset: Any = None,
    *,
    environment: Any = None,
    candidates: Sequence[str | Path] | str | Path = (),
    k: int | None = None,
    temperature: float | None = None,
    limit: int | None = None,
    output: str | Path | None = None,
    model: TunerModelConfig | None = None,
    auxiliary_models: Mapping[str, TunerModelConfig | RemoteModel | Mapping[str, Any]]
    | None = None,
    config_path: str | Path | None = None,
    overrides: Sequence[str] = (),
) -> Evaluation:
    """Try one or several models on the same tasks; nothing is trained.

    Settings are those of `tune()`, from the same places. Also works inside a running event loop.

    Args:
        workflow_func, judge_func, environment: As for `tune()`.
        eval_dataset: One dataset or a dict of them by name; None: the file's evaluation sets.
        candidates: Runs (their newest checkpoint), checkpoints, models or adapters, as folders or
            names on the Hub; the others are compared with the first. None given: the model of the
            configuration, and the newest checkpoint of its run where there is one.
        k: Rollouts of each task. None: as each set says (`repeat_times`).
        temperature: None: as each set says, and with k above 1 where that is 0,
            `model.temperature`.
        limit: Take only so many tasks of each set, the first.
        output: A new folder for `evaluation.json`, `evaluation.html` and for each candidate a
            folder that `tuner view` shows, with all traces.
        model, auxiliary_models, config_path, overrides: As for `tune()`.

    Raises:
        FunctionError, ConfigError, DatasetError, ModelLoadError: As `tune()`.
        TunerError: A candidate is nothing that can be loaded, or `output` has something in it.
        TrainingError: An engine failed.
    """
    require_nothing_loads("evaluate()")
    from tuner.environments.seam import parts_of

    given: Given = {
        "environment": environment,
        "eval_dataset": eval_dataset,
        "model": model,
        "auxiliary_models": auxiliary_models,
        "config_path": config_path,
        "overrides": overrides,
    }
    chosen = [candidates] if isinstance(candidates, str | Path) else candidates
    with parts_of(workflow_func, judge_func, None, given).closing() as parts:
        return _evaluated(evaluation_of(parts), chosen, k, temperature, limit, output)


def _evaluated(
    run: Run,
    given: Sequence[str | Path],
    k: int | None,
    temperature: float | None,
    limit: int | None,
    output: str | Path | None,
) -> Evaluation:
    if limit is not None and limit < 1:
        raise ConfigError(f"limit is {limit}: give at least one task")
    config = _asked(run.config, k, temperature)
    tasks = {name: rows[:limit] for name, rows in run.eval_tasks.items()}
    run = replace(run, config=config, eval_tasks=tasks)
    chosen = _distinct([find_candidate(one) for one in given] or of_configuration(config))
    for one in chosen:
        require_model_libraries(with_weights(config, one))
    folder = None if output is None else _new_folder(Path(output))
    # Names may differ in what no folder can be called.
    folders = [folder and folder / f"{n}-{_FILE.sub('-', c.name)}" for n, c in enumerate(chosen, 1)]
    tried = zip(chosen, folders, strict=True)
    scores = outside_event_loop(lambda: [_scores(run, one, own) for one, own in tried])
    result = Evaluation(
        pass_reward=config.tuner.pass_reward,
        sets={
            taskset.name: EvaluationSet(
                tasks=len(run.eval_tasks[taskset.name]),
                repeat=taskset.repeat_times,
                temperature=config.rollout_args(taskset).temperature or 0.0,
            )
            for taskset in config.buffer.explorer_input.eval_tasksets
        },
        candidates=scores,
        differences=[
            difference(name, scores[0], other) for other in scores[1:] for name in run.eval_tasks
        ],
    )
    if folder is not None:
        result.write(folder)
    return result


def _asked(config: RunConfig, k: int | None, temperature: float | None) -> RunConfig:
    """The configuration with what was asked for in place of what its sets say.

    Raises:
        ConfigError: Every rollout of a task would be the same.
    """
    if k is not None and k < 1:
        raise ConfigError(f"k is {k}: give at least one rollout of each task")
    if temperature is not None and temperature < 0:
        raise ConfigError(f"temperature is {temperature:g}: give 0 (greedy) or more")
    inputs = config.buffer.explorer_input
    sets = []
    for taskset in inputs.eval_tasksets:
        repeat = k or taskset.repeat_times
        if temperature == 0 and repeat > 1:
            raise ConfigError(
                f"temperature is 0, with {repeat} rollouts of each task of {taskset.name!r}: all "
                "of them would be the same; give k=1, or a temperature above 0"
            )
        own = config.rollout_args(taskset).temperature if temperature is None else temperature
        if not own and repeat > 1:
            own = config.model.temperature
        arguments = taskset.rollout_args.model_copy(update={"temperature": own})
        sets.append(taskset.model_copy(update={"repeat_times": repeat, "rollout_args": arguments}))
    inputs = inputs.model_copy(update={"eval_tasksets": tuple(sets)})
    buffer = config.buffer.model_copy(update={"explorer_input": inputs})
    return config.model_copy(update={"buffer": buffer})


def of_configuration(config: RunConfig) -> list[Candidate]:
    """The weights that its run begins with, and its newest checkpoint if there is one."""
    model, lora = config.model.model_path, config.model.lora
    found = [find_candidate(model)]
    if lora is not None and lora.path is not None:
        found = [replace(find_candidate(lora.path), base=model)]
    if RunDirectory(config.run_dir).checkpoint_steps():
        found.append(find_candidate(config.run_dir))
    return found


def _distinct(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The same, each with a name of its own.

    Raises:
        ConfigError: One is there twice.
    """
    paths = Counter(one.path for one in candidates)
    if twice := [path for path, count in paths.items() if count > 1]:
        raise ConfigError(f"the candidate {twice[0]} is given twice: leave one out")
    names = Counter(one.name for one in candidates)
    return [one if names[one.name] == 1 else replace(one, name=one.path) for one in candidates]


def _new_folder(path: Path) -> Path:
    """`path`, which is made and private.

    Raises:
        ConfigError: There is something in it, or it cannot be made.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(f"output is {str(path)!r}, and something is there: name a new folder")
    make_private(path)
    return path


def _scores(run: Run, candidate: Candidate, folder: Path | None) -> CandidateScores:
    """Load a candidate, try it on every set, and let go of it."""
    from tuner.loop import deterministic_torch

    config = with_weights(run.config, candidate)
    store = None
    if folder is not None:
        own = RunDirectory(folder)
        make_private(folder)
        write_atomically(own.config, config.to_yaml())
        store = TraceStore(own.traces)
    with deterministic_torch(config.tuner.deterministic):
        sets = asyncio.run(_try(replace(run, config=config), candidate.name, store))
    gc.collect()  # a model that is in a circle would be in the way of the next one
    return CandidateScores(name=candidate.name, path=candidate.path, sets=sets)


def with_weights(config: RunConfig, candidate: Candidate) -> RunConfig:
    """The configuration with a candidate's weights. Nothing is trained beside generation."""
    adapters: tuple[LoraSection, ...] = ()
    if candidate.base is not None:
        recorded = candidate.recorded_base
        adapters = (LoraSection(path=candidate.path, base_model_name=recorded),)
    weights = {"model_path": candidate.base or candidate.path, "lora_configs": adapters}
    return config.model_copy(
        update={
            "model": config.model.model_copy(update=weights),
            "synchronizer": SynchronizerSection(),
        }
    )


async def _try(run: Run, name: str, store: TraceStore | None) -> dict[str, SetScores]:
    """The scores of a model by evaluation set.

    Raises:
        TrainingError: The engine failed.
    """
    from rich.console import Console

    from tuner.loop import evaluate_set
    from tuner.rollouts import Rollouts
    from tuner.runs.console import ConsoleMonitor
    from tuner.runs.stack import build_stack

    config, found = run.config, dict[str, SetScores]()
    # The results may be read by a program.
    console = ConsoleMonitor(1, Console(stderr=True, highlight=False, soft_wrap=True))
    stack = build_stack(config, workflow=run.workflow, judge=run.judge, apart=True)
    async with aclosing(stack):
        assert stack.runner is not None, "prepare_evaluation() wants a workflow"
        alone = config.tuner.deterministic
        running = 1 if alone else config.explorer.runner_per_model
        rollouts = Rollouts(stack.runner, store, max_running=running)
        console.say(f"{name}: {config.model.model_path}")
        with console:
            for of_set, tasks in run.eval_tasks.items():
                began = time.perf_counter()
                traces = await evaluate_set(config, of_set, tasks, rollouts, console, step=0)
                if stack.engine.failure is not None:
                    raise TrainingError(f"{name}, {of_set}: {stack.engine.failure}")
                seconds = time.perf_counter() - began
                found[of_set] = scores_of(traces, seconds, config.tuner.pass_reward)
    return found
