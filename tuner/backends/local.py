"""The loop on one machine: collect groups, judge, train, update the engine, evaluate, save.

A step that is interrupted at any point is taken up from what is on disk: the last checkpoint, and
the traces of the steps after it. Recorded traces are trained again without generating, so no
rollout that ended is lost and `save_interval` only decides how much training is repeated.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from tuner.backends.metrics import (
    RECOMPUTED,
    batch_metrics,
    diagnosis,
    has_signal,
    reasoning_notice,
    rollout_metrics,
    time_split,
)
from tuner.backends.resume import check_same_run
from tuner.backends.run_directory import (
    TRAINER_STATE,
    RunDirectory,
    free_name,
    read_metrics,
    write_atomically,
)
from tuner.backends.stack import Stack, build_stack, build_trainer, selection
from tuner.config import RunConfig
from tuner.config.buffer import EvalTasksetSection, TasksetSection
from tuner.config.schema import Penalize
from tuner.errors import TrainingError
from tuner.gateway import SamplingDefaults
from tuner.monitors import ConsoleMonitor, JsonlMonitor, Monitor, open_tracker
from tuner.result import TokenCounts, TuneResult
from tuner.rollout import StepPlan, collect
from tuner.rollout.seeds import derive_seed
from tuner.traces import Outcome, Trace, TraceStore
from tuner.training import PolicyTrainer, build_batch

logger = logging.getLogger("tuner")
Task = dict[str, Any]


def run_local(
    config: RunConfig,
    *,
    workflow: Callable[..., Any],
    judge: Callable[..., Any] | None,
    train_tasks: list[Task],
    eval_tasks: Mapping[str, list[Task]],
) -> TuneResult:
    """Train until `total_steps`, or go on with a run that was interrupted.

    `report.html` is left in the run directory however the run ends; where it stops before its end,
    a note of the error says so. Must be called where no event loop is running.

    Raises:
        TrainingError: Nothing could be learned, or training failed; the message is the diagnosis.
        FunctionError: A function returned something of the wrong type.
        ConfigError: The run directory holds a run with other settings or data.
    """
    directory = _open_directory(config, {"train": train_tasks, **eval_tasks})
    total_steps = planned_steps(config, len(train_tasks))
    finished = _finished_result(directory, total_steps)
    if finished is not None:
        logger.warning("%s is complete; returning its result", directory.path)
        return finished
    loop = _Loop(config, directory, total_steps, train_tasks, eval_tasks)
    try:
        with deterministic_torch(config.tuner.deterministic):
            result = asyncio.run(loop.run(workflow, judge))
    except (Exception, KeyboardInterrupt) as error:
        if directory.has_begun() and (report := _report(directory, stopped=_reason(error))):
            error.add_note(f"what the run did until then: {report}")
        raise
    _report(directory)
    return result


def planned_steps(config: RunConfig, tasks: int) -> int:
    """Steps of the run: `total_steps`, or as many full batches as all epochs together have."""
    if config.buffer.total_steps is not None:
        return config.buffer.total_steps
    return config.buffer.total_epochs * tasks // config.buffer.batch_size


class _Loop:
    """The state of one run between its steps."""

    def __init__(
        self,
        config: RunConfig,
        directory: RunDirectory,
        total_steps: int,
        train_tasks: list[Task],
        eval_tasks: Mapping[str, list[Task]],
    ) -> None:
        self._config = config
        self._directory = directory
        self._total_steps = total_steps
        self._train_tasks = train_tasks
        self._eval_tasks = dict(eval_tasks)
        self._store = TraceStore(directory.traces)
        steps = directory.checkpoint_steps()
        self._start = steps[-1] if steps else 0
        # Without a checkpoint even step 0, the evaluation before training, is done again.
        self._history = read_metrics(directory.metrics, up_to=self._start if steps else -1)
        self._console = ConsoleMonitor(total_steps)
        self._monitors: list[Monitor] = []

    async def run(
        self, workflow: Callable[..., Any], judge: Callable[..., Any] | None
    ) -> TuneResult:
        weights = self._directory.checkpoint(self._start) if self._start else None
        state = _trainer_version(weights)
        stack = build_stack(
            self._config, workflow=workflow, judge=judge, weights=weights, version=state
        )
        try:
            trainer = build_trainer(self._config, stack, total_steps=self._total_steps)
            if weights is not None:
                trainer.load(weights / TRAINER_STATE)
                self._console.say(f"going on after step {self._start} in {self._directory.path}")
            if stack.adapter is not None:
                self._console.say(str(stack.adapter))
            self._monitors = self._open_monitors()
            with self._console:
                await self._steps(stack, trainer)
            return self._finish(trainer)
        finally:
            for monitor in self._monitors:
                monitor.close()
            await stack.aclose()

    async def _steps(self, stack: Stack, trainer: PolicyTrainer) -> None:
        config = self._config
        if not self._history and config.explorer.eval_on_startup and self._eval_tasks:
            started = time.perf_counter()
            metrics = await self._evaluate(stack, step=0)
            self._log(0, {**metrics, "time/step": time.perf_counter() - started})
        for step in range(self._start + 1, self._total_steps + 1):
            started = time.perf_counter()
            traces, metrics = await self._train_step(step, stack, trainer)
            last = step == self._total_steps
            if self._eval_tasks and (last or is_due(step, config.explorer.eval_interval)):
                metrics |= await self._evaluate(stack, step)
            metrics["time/step"] = time.perf_counter() - started
            self._log(step, metrics)
            if last or is_due(step, config.trainer.save_interval):
                self._save(step, stack, trainer)
            self._stop_without_signal(traces)

    async def _train_step(
        self, step: int, stack: Stack, trainer: PolicyTrainer
    ) -> tuple[list[Trace], dict[str, float]]:
        config = self._config
        started = time.perf_counter()
        plan = StepPlan(
            split="train",
            step=step,
            tasks=[self._train_tasks[i] for i in self._batch_indices(step)],
            repeat=config.algorithm.repeat_times,
            defaults=self._sampling(config.buffer.explorer_input.taskset),
        )
        traces = await self._collect(plan, stack, f"step {step}")
        collecting = time.perf_counter() - started
        penalty = config.tuner.on_failure
        batch = build_batch(
            traces,
            penalty=penalty.penalize if isinstance(penalty, Penalize) else None,
            selection=selection(config),
        )
        metrics = {**rollout_metrics(traces), **batch_metrics(batch)}
        discount = config.tuner.algorithm.turn_discount
        metrics["signal"] = float(has_signal(batch, config.algorithm.advantage_fn, discount))
        self._say_what_branching_costs(step, metrics)
        if batch.rows:
            # The reference may be the same model without its adapter: nobody samples meanwhile.
            async with stack.engine.pause():
                scored = trainer.compute_ref_logp(trainer.compute_advantages(batch))
                update = trainer.ppo_update(scored)
                trainer.step_lr_scheduler()
                await trainer.update_weights(stack.engine)
            metrics |= {f"train/{name}": value for name, value in update.items()}
        training = time.perf_counter() - started - collecting
        metrics |= time_split(traces, collecting, training)
        metrics["tokens_per_second"] = batch.sampled_tokens / (collecting + training)
        return traces, metrics

    async def _evaluate(self, stack: Stack, step: int) -> dict[str, float]:
        """Mean reward on each evaluation set; a rollout that failed has none and is counted."""
        metrics: dict[str, float] = {}
        settings = {t.name: t for t in self._config.buffer.explorer_input.eval_tasksets}
        for name, tasks in self._eval_tasks.items():
            plan = StepPlan(
                split=name,
                step=step,
                tasks=tasks,
                repeat=1,
                defaults=self._sampling(settings[name]),
            )
            traces = await self._collect(plan, stack, f"evaluation {name}")
            final = [trace for trace in traces if trace.final]
            rewards = [trace.reward for trace in final if trace.reward is not None]
            if rewards:
                metrics[f"eval/{name}/reward"] = sum(rewards) / len(rewards)
            metrics[f"eval/{name}/failed"] = len(final) - len(rewards)
        return metrics

    async def _collect(self, plan: StepPlan, stack: Stack, what: str) -> list[Trace]:
        self._console.begin(what, len(plan.ids), step=plan.step)

        def count(trace: Trace) -> None:
            if trace.final:
                self._console.rollout_done()

        config, training = self._config, plan.split == "train"
        return await collect(
            plan,
            stack.runner,
            self._store,
            # One after the other, the global random states belong to one rollout at a time.
            max_running=1 if config.tuner.deterministic else config.explorer.runner_per_model,
            abort_on_failure=training and config.tuner.on_failure == "abort",
            on_trace=count,
        )

    def _batch_indices(self, step: int) -> list[int]:
        """Rows of the dataset that make up the batch of `step`; epochs follow without a gap."""
        size, rows = self._config.buffer.batch_size, len(self._train_tasks)
        selector = self._config.buffer.explorer_input.taskset.data_selector
        indices = []
        for position in range((step - 1) * size, step * size):
            epoch, offset = divmod(position, rows)
            if selector.selector_type == "shuffle":
                offset = _permutation(rows, derive_seed(selector.seed, "epoch", epoch))[offset]
            indices.append(offset)
        return indices

    def _sampling(self, taskset: TasksetSection | EvalTasksetSection) -> SamplingDefaults:
        return SamplingDefaults(**self._config.rollout_args(taskset).model_dump())

    def _stop_without_signal(self, traces: Sequence[Trace]) -> None:
        patience = self._config.tuner.signal_patience
        recent = [row["signal"] for row in self._history[-patience:] if "signal" in row]
        if len(recent) == patience and not any(recent):
            raise TrainingError(diagnosis(traces, patience))

    def _say_what_branching_costs(self, step: int, metrics: Mapping[str, float]) -> None:
        cost = int(metrics.get(RECOMPUTED, 0))
        if cost and not any(row.get(RECOMPUTED) for row in self._history):
            self._console.say(reasoning_notice(step, cost))

    def _save(self, step: int, stack: Stack, trainer: PolicyTrainer) -> None:
        def write(folder: Path) -> None:
            stack.save_weights(folder)
            trainer.save(folder / TRAINER_STATE)
            write_atomically(folder / "version.json", json.dumps({"version": trainer.step}))

        self._directory.save_checkpoint(
            step, write, keep=self._config.trainer.max_checkpoints_to_keep
        )

    def _open_monitors(self) -> list[Monitor]:
        config = self._config
        monitors: list[Monitor] = [JsonlMonitor(self._directory.metrics, self._history)]
        for kind in config.monitor.monitor_type:
            monitors.append(
                open_tracker(
                    kind,
                    project=config.project,
                    name=config.name,
                    folder=self._directory.path,
                    first_step=self._start + 1 if self._history else 0,
                    config=config.model_dump(mode="json"),
                    args=config.monitor.monitor_args,
                )
            )
        return [*monitors, self._console]

    def _log(self, step: int, metrics: dict[str, float]) -> None:
        self._history.append({"step": step, **metrics})
        for monitor in self._monitors:
            monitor.log(step, metrics)

    def _finish(self, trainer: PolicyTrainer) -> TuneResult:
        result = summarize(self._history, self._directory, self._total_steps)
        result.steps = trainer.step
        if "tensorboard" in self._config.monitor.monitor_type:
            result.tensorboard = self._directory.tensorboard
        write_atomically(self._directory.result, result.model_dump_json(indent=2))
        return result


def _report(directory: RunDirectory, *, stopped: str | None = None) -> Path | None:
    """Write `report.html`. The run has ended by now: whatever goes wrong here is only said."""
    from tuner.viewer import write_report

    try:
        return write_report(directory.path, stopped=stopped)
    except Exception as error:
        logger.warning(
            "report.html was not written: %s: %s; `tuner view %s --report` tries again",
            type(error).__name__,
            error,
            directory.path,
        )
        return None


def _reason(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return f"{type(error).__name__}: {error}"


def summarize(
    history: Sequence[Mapping[str, float]], directory: RunDirectory, step: int
) -> TuneResult:
    """The result of a run from the metrics of its steps."""
    outcomes: Counter[str] = Counter()
    dropped: Counter[str] = Counter()
    for row in history:
        for outcome in Outcome:
            outcomes[outcome.value] += int(row.get(f"rollouts/{outcome.value}", 0))
        for name, value in row.items():
            if name.startswith("tokens/dropped/"):
                dropped[name.removeprefix("tokens/dropped/")] += int(value)
    return TuneResult(
        steps=step,
        eval_before=_eval_rewards(history[0]) if history and history[0]["step"] == 0 else {},
        eval_after=_eval_rewards(history[-1]) if history else {},
        rewards=[row["reward/mean"] for row in history if "reward/mean" in row],
        history=[dict(row) for row in history],
        outcomes={name: count for name, count in outcomes.items() if count},
        tokens=TokenCounts(
            sampled=int(sum(row.get("tokens/sampled", 0) for row in history)),
            trained=int(sum(row.get("tokens/trained", 0) for row in history)),
            dropped=dict(dropped),
        ),
        seconds=sum(row["time/step"] for row in history),
        run_dir=directory.path,
        checkpoint=directory.checkpoint(step),
        traces=directory.traces,
    )


def _eval_rewards(row: Mapping[str, float]) -> dict[str, float]:
    return {
        name.removeprefix("eval/").removesuffix("/reward"): value
        for name, value in row.items()
        if name.startswith("eval/") and name.endswith("/reward")
    }


def _open_directory(config: RunConfig, data: Mapping[str, list[Task]]) -> RunDirectory:
    """The run's directory; refuses to go on with a run that had other settings or data."""
    path = config.run_dir if config.continue_from_checkpoint else free_name(config.run_dir)
    directory = RunDirectory(path)
    fingerprint = {name: _fingerprint(tasks) for name, tasks in data.items()}
    if directory.has_begun():
        check_same_run(directory, config, fingerprint)
    directory.create()
    write_atomically(path / "data.json", json.dumps(fingerprint, indent=2))
    write_atomically(directory.config, config.to_yaml())
    return directory


def _finished_result(directory: RunDirectory, total_steps: int) -> TuneResult | None:
    if not directory.result.exists() or not directory.checkpoint(total_steps).exists():
        return None
    return TuneResult.model_validate_json(directory.result.read_text(encoding="utf-8"))


def _trainer_version(checkpoint: Path | None) -> int:
    if checkpoint is None:
        return 0
    return int(json.loads((checkpoint / "version.json").read_text())["version"])


def _fingerprint(tasks: Sequence[Task]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for task in tasks:
        digest.update(json.dumps(task, sort_keys=True, default=repr).encode() + b"\n")
    return digest.hexdigest()


def is_due(step: int, interval: int) -> bool:
    """Whether something that happens every `interval` steps happens after `step`; 0 is never."""
    return interval > 0 and step % interval == 0


@lru_cache(maxsize=2)
def _permutation(rows: int, seed: int) -> tuple[int, ...]:
    order = list(range(rows))
    random.Random(seed).shuffle(order)
    return tuple(order)


class deterministic_torch:
    """While the block runs, torch refuses operations whose result may differ between runs."""

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._before = torch.are_deterministic_algorithms_enabled()

    def __enter__(self) -> None:
        if self._enabled:
            torch.use_deterministic_algorithms(True)

    def __exit__(self, *_: object) -> None:
        torch.use_deterministic_algorithms(self._before)
