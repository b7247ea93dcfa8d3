"""`tuner eval`: evaluate models, checkpoints and runs on the same tasks, several times each.

Rollouts use the engine, gateway, limits and seeds of an evaluation during training, so candidates
get the same random numbers. Failed rollouts have no reward and do not count in means; they are
counted separately by outcome.
"""

from __future__ import annotations

import asyncio
import gc
import io
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from tuner.config import RemoteModel, RunConfig
from tuner.config.keys import require_model_libraries
from tuner.encoding import model_json
from tuner.errors import ConfigError, TrainingError, system_faults
from tuner.gateway import SamplingDefaults
from tuner.rollouts import StepPlan
from tuner.rollouts.chat_models import quiet_agents
from tuner.runs.console import ConsoleMonitor
from tuner.runs.directory import RunDirectory, make_private, outside_event_loop, write_atomically
from tuner.runs.estimates import Estimate, estimate, paired, passes, rewards_by_task
from tuner.runs.result import counted
from tuner.tasks.functions import OwnFrames
from tuner.tasks.loading import require_nothing_loads
from tuner.tasks.settings import TuneArguments, TunerModelConfig
from tuner.tools.candidates import (
    Candidate,
    CandidateTrials,
    find_candidate,
    of_configuration,
    served_here,
    with_weights,
)
from tuner.traces import Outcome, Trace, TraceStore
from tuner.tune import RunPlan, evaluation_of

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


# Results of an evaluation, as data and as tables.


class SetScores(BaseModel):
    """Scores of one candidate on one evaluation set.

    Attributes:
        reward: Mean over the tasks of each task's mean reward; None if all rollouts failed.
        pass_at: Probability that at least one of k rollouts of a task passes, by k.
        pass_hat: Probability that all k rollouts pass, by k.
        failed: Rollouts without a reward, by outcome.
        calls, tokens, seconds: Means over rollouts: calls, sampled tokens, and time in workflow and
            judge while other rollouts ran.
        wall_seconds: Time until all rollouts had ended.
        rewards: For each task, in the order of the rows, its rollouts' rewards; failures omitted.
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
    """One candidate: its name, its path, and its scores by evaluation set."""

    name: str
    path: str
    sets: dict[str, SetScores]


class EvaluationSet(BaseModel):
    """Rollouts of every candidate on one set: `repeat` of each task, at this temperature."""

    tasks: int
    repeat: int
    temperature: float


class Difference(BaseModel):
    """Mean difference in reward from the first candidate, by task; None without a common task.

    Pairing by task keeps the difficulty of tasks from widening the interval.
    """

    set: str
    candidate: str
    baseline: str
    reward: Estimate | None


class Evaluation(BaseModel):
    """Result of `tuner.evaluate()`, and the content of `evaluation.json`.

    Attributes:
        pass_reward: Minimum reward of a rollout that passes.
        sets: The evaluation sets, by name.
        candidates: In the order given.
        differences: For each set, every candidate compared with the first.
    """

    pass_reward: float
    sets: dict[str, EvaluationSet]
    candidates: list[CandidateScores]
    differences: list[Difference]

    def __str__(self) -> str:
        return table_text(*self._tables())

    def write(self, folder: Path) -> None:
        """Write `evaluation.json` and `evaluation.html`."""
        write_atomically(folder / "evaluation.json", model_json(self))
        write_atomically(
            folder / "evaluation.html",
            recorded_tables(*self._tables()).export_html(inline_styles=True),
        )

    def _tables(self) -> Iterator[Table]:
        from rich.table import Table

        for name, asked in self.sets.items():
            each = "one rollout" if asked.repeat == 1 else f"{asked.repeat} rollouts"
            tasks = counted(asked.tasks, "task")
            title = f"{name}: {tasks}, {each} each, temperature {asked.temperature:g}"
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


def recorded_tables(*tables: Table, width: int = 100) -> Console:
    """A console that has printed the tables, for export as text or as a page."""
    from rich.console import Console

    console = Console(file=io.StringIO(), record=True, width=width, highlight=False)
    console.print(*tables, sep="\n\n")
    return console


def table_text(*tables: Table, width: int = 100) -> str:
    text = recorded_tables(*tables, width=width).export_text()
    return "\n".join(line.rstrip() for line in text.splitlines())


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
    """Scores of the rollouts of one set."""
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
    new, old = (
        {task: fmean(rewards) for task, rewards in enumerate(one.sets[name].rewards) if rewards}
        for one in (other, first)
    )
    return Difference(set=name, candidate=other.name, baseline=first.name, reward=paired(new, old))


_FILE = re.compile(r"[^\w.-]+")


@OwnFrames()
@system_faults()
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
    """Evaluate one or several models on the same tasks; trains nothing.

    Takes the settings of `tune()`, from the same places. Also works inside a running event loop.

    Args:
        workflow_func, judge_func, environment: As for `tune()`.
        eval_dataset: One dataset or a dict of them by name; None: the file's evaluation sets.
        candidates: Runs (their newest checkpoint), checkpoints, models or adapters, as folders or
            names on the Hub; the others are compared with the first. Default: the configuration's
            model and the newest checkpoint of its run, if there is one.
        k: Rollouts of each task. None: the set's `repeat_times`.
        temperature: None: the set's; if that is 0 and k is above 1, `model.temperature`.
        limit: Use only this many tasks of each set, the first ones.
        output: A new folder for `evaluation.json`, `evaluation.html` and, for each candidate, a
            folder with all traces that `tuner view` can show.
        model, auxiliary_models, config_path, overrides: As for `tune()`.

    Raises:
        FunctionError, ConfigError, DatasetError, ModelLoadError: As for `tune()`.
        TunerError: A candidate cannot be loaded, or `output` is not empty.
        TrainingError: An engine failed.
    """
    require_nothing_loads("evaluate()")
    from tuner.runs.environment import parts_of

    given: TuneArguments = {
        "environment": environment,
        "eval_dataset": eval_dataset,
        "model": model,
        "auxiliary_models": auxiliary_models,
        "config_path": config_path,
        "overrides": overrides,
    }
    chosen = [candidates] if isinstance(candidates, str | Path) else candidates
    parts_given = parts_of(workflow_func, judge_func, None, given)
    with parts_given.closing() as parts, system_faults(output):
        return _evaluated(evaluation_of(parts), chosen, k, temperature, limit, output)


def _evaluated(
    run: RunPlan,
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
    # Names may differ only in characters that folder names cannot have.
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
    """The configuration with `k` and `temperature` in place of the sets' values."""
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
                "of them would be equal; set k=1, or a temperature above 0"
            )
        own = config.rollout_args(taskset).temperature if temperature is None else temperature
        if not own and repeat > 1:
            own = config.model.temperature
        arguments = taskset.rollout_args.model_copy(update={"temperature": own})
        sets.append(taskset.model_copy(update={"repeat_times": repeat, "rollout_args": arguments}))
    inputs = inputs.model_copy(update={"eval_tasksets": tuple(sets)})
    buffer = config.buffer.model_copy(update={"explorer_input": inputs})
    return config.model_copy(update={"buffer": buffer})


def _distinct(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates with unique names; rejects duplicates."""
    paths = Counter(one.path for one in candidates)
    if twice := [path for path, count in paths.items() if count > 1]:
        raise ConfigError(f"the candidate {twice[0]} is given twice: remove one")
    names = Counter(one.name for one in candidates)
    return [one if names[one.name] == 1 else replace(one, name=one.path) for one in candidates]


def _new_folder(path: Path) -> Path:
    """Create `path` as a private folder; rejects one that is not empty."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(f"output is {str(path)!r}, which is not empty: name a new folder")
    make_private(path)
    return path


def _scores(run: RunPlan, candidate: Candidate, folder: Path | None) -> CandidateScores:
    """Load a candidate, try it on every set, and unload it."""
    from tuner.loop import deterministic_torch

    config = with_weights(run.config, candidate)
    store = None
    if folder is not None:
        own = RunDirectory(folder)
        make_private(folder)
        write_atomically(own.config, config.to_yaml())
        store = TraceStore(own.traces)
    with deterministic_torch(config.tuner.deterministic), quiet_agents():
        sets = asyncio.run(_try(replace(run, config=config), candidate.name, store))
    gc.collect()  # reference cycles would keep the model in memory while the next one loads
    return CandidateScores(name=candidate.name, path=candidate.path, sets=sets)


async def _try(run: RunPlan, name: str, store: TraceStore | None) -> dict[str, SetScores]:
    """Scores of a model, by evaluation set."""
    from rich.console import Console

    config, found = run.config, dict[str, SetScores]()
    # Keep stdout free: the results may be read by a program.
    console = ConsoleMonitor(1, Console(stderr=True, highlight=False, soft_wrap=True))
    trials = CandidateTrials(run.eval_tasks, store, console, config.concurrent_rollouts)
    async with served_here(run, workers=True) as contender:
        console.say(f"{name}: {config.model.model_path}")
        with console:
            for taskset in config.buffer.explorer_input.eval_tasksets:
                plan = StepPlan(
                    taskset.name,
                    0,
                    run.eval_tasks[taskset.name],
                    taskset.repeat_times,
                    SamplingDefaults(**config.rollout_args(taskset).model_dump()),
                )
                console.begin(f"evaluation {taskset.name}", len(plan.ids), step=0)
                began = time.perf_counter()
                try:
                    traces = await trials.run(contender, plan.ids, plan.defaults)
                except TrainingError as error:
                    raise TrainingError(f"{name}, {taskset.name}: {error}") from error
                seconds = time.perf_counter() - began
                found[taskset.name] = scores_of(traces, seconds, config.tuner.pass_reward)
    return found
