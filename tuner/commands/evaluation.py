"""`tuner eval`: models, checkpoints and runs on the same tasks, several times each.

Rollouts are those of an evaluation during training: the same engine, gateway, limits and seeds, so
that candidates are given the same random numbers. A rollout that failed has no reward and is in no
mean; how many did, and how, is said beside it.
"""

from __future__ import annotations

import asyncio
import gc
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

from tuner.commands.candidates import Candidate, find_candidate
from tuner.commands.scores import (
    CandidateScores,
    Evaluation,
    EvaluationSet,
    SetScores,
    difference,
    scores_of,
)
from tuner.config import RemoteModel, RunConfig
from tuner.config.explorer import LoraSection, SynchronizerSection
from tuner.config.model_paths import require_model_libraries
from tuner.errors import ConfigError, TrainingError
from tuner.functions.loading import require_nothing_loads
from tuner.run.directory import RunDirectory, make_private, write_atomically
from tuner.run.interrupts import outside_event_loop
from tuner.settings import Given, TunerModelConfig
from tuner.traces import TraceStore
from tuner.tune import Run, evaluation_of

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

    from tuner.assembly.stack import build_stack
    from tuner.loop import evaluate_set
    from tuner.rollout import Rollouts
    from tuner.run.console import ConsoleMonitor

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
