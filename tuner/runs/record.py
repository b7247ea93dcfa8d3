"""State on disk of every run: directory, metrics, checkpoints, monitors and result."""

from __future__ import annotations

import hashlib
import json
import shlex
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tuner.config import RunConfig
from tuner.config.keys import located
from tuner.config.load import checked, read_layers
from tuner.encoding import model_json
from tuner.runs.console import ConsoleMonitor, JsonlMonitor
from tuner.runs.directory import (
    TRAINER_STATE,
    WEIGHTS,
    RunDirectory,
    check_same_run,
    free_name,
    held,
    may_change_here,
    read_metrics,
    write_atomically,
)
from tuner.runs.notices import SignalHistory, advice
from tuner.runs.result import EarlyEnd, TokenCounts, TuneResult
from tuner.runs.timeline import Timeline
from tuner.runs.trackers import Tracker, open_trackers
from tuner.tasks.datasets import LazyRows, row_text
from tuner.traces import Outcome, Trace
from tuner.traces.reading import Count, JsonReader
from tuner.traces.store import closed
from tuner.training.trainer import PolicyTrainer, RoleTrainers

Task = dict[str, Any]


class RunRecord:
    """The state of a run between its steps, on disk and for people.

    Attributes:
        total_steps: Number of steps of the run.
        start: Step after which the run resumes; 0 at its beginning.
        recent: Metrics of the latest steps that are still needed; `metrics.jsonl` has all.
        signal: How much the steps so far had to learn from.
        ended_early: Set if the run is complete before `total_steps`.
        console: Output for people.
        timeline: Times of events.
    """

    def __init__(self, config: RunConfig, directory: RunDirectory, total_steps: int) -> None:
        self.config = config
        self.directory = directory
        self.total_steps = total_steps
        self.console = ConsoleMonitor(total_steps)
        last = directory.sound_checkpoint(self.console.say)
        directory.prune(config.trainer.max_checkpoints_to_keep)  # it may have stopped in the middle
        self.start = last or 0
        # Without a checkpoint even step 0, the evaluation before training, is repeated.
        self._before = read_metrics(directory.metrics, up_to=-1 if last is None else last)
        self.recent: deque[Mapping[str, float]] = deque(self._before, maxlen=3)
        self._resumes = directory.has_begun()
        self.signal = _signal_of(self._before, directory)
        self.timeline = Timeline(directory.timeline)
        self._file: JsonlMonitor | None = None
        self._trackers: list[Tracker] = []
        self._completed = False
        self.ended_early: EarlyEnd | None = None

    @property
    def weights(self) -> Path | None:
        """The checkpoint to resume from."""
        return self.directory.checkpoint(self.start) if self.start else None

    @property
    def version(self) -> int:
        """Number of updates of these weights."""
        return 0 if self.weights is None else version_of(self.weights)

    @property
    def last_step(self) -> int:
        return self.total_steps if self.ended_early is None else self.ended_early.step

    def remaining(self) -> range:
        """The remaining steps."""
        return range(self.start + 1, self.last_step + 1)

    def open(self, decisions: Sequence[str]) -> None:
        """Start logging; entries after the last checkpoint are deleted.

        Args:
            decisions: Decisions about its parts, one sentence each.
        """
        for sentence in decisions:
            self.console.say(sentence)
        config = self.config
        self._file = JsonlMonitor(self.directory.metrics, self._before)
        self._before = []
        self._trackers = open_trackers(
            config.monitor.monitor_type,
            project=config.project,
            folder=self.directory.path,
            first_step=self.start + 1 if self.recent else 0,
            config=config.public(),
            args=config.monitor.monitor_args,
        )

    def beginning(self) -> str:
        """Where the run is written, and from where it resumes."""
        path = self.directory.path
        if not self._resumes:
            return f"run directory: {path}"
        where = f"after step {self.start}" if self.start else "from the beginning"
        last = self.directory.last_recorded_step()
        again = ""
        if last > self.start:
            many = f"step {last}" if last == self.start + 1 else f"steps {self.start + 1} to {last}"
            again = f"; the recorded rollouts of {many} are trained again"
        return f"resuming {where} in {path}{again}"

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Record and show the metrics of a step."""
        self.recent.append({"step": step, **metrics})
        self.signal = self.signal.after(metrics)
        assert self._file is not None, "begin() opens it"
        self._file.log(step, metrics)
        self.console.log(step, metrics)
        for tracker in self._trackers:
            tracker.log(metrics, step)

    def show(
        self, step: int, name: str, traces: Sequence[Trace], *, replayed: bool = False
    ) -> None:
        """Send the trackers a table of some traces of a step, or of the evaluation with this name.

        Some of the first step's are shown here, too, unless an earlier process has shown them.
        """
        if step == 1 and name == "train" and not replayed:
            self.console.samples(traces, step)
        for tracker in self._trackers:
            tracker.show(step, name, traces)

    def save(
        self,
        step: int,
        trainer: PolicyTrainer | RoleTrainers,
        save_weights: Callable[[Path], None],
    ) -> None:
        """Write the checkpoint of a step.

        Args:
            step: The step.
            trainer: The trainer whose state is saved.
            save_weights: Writes the trained weights to a folder.
        """

        def write(folder: Path) -> None:
            save_weights(folder)
            trainer.save(folder / TRAINER_STATE)
            write_atomically(folder / "version.json", json.dumps({"version": trainer.step}))

        self.directory.save_checkpoint(
            step, write, keep=self.config.trainer.max_checkpoints_to_keep
        )

    def end_early(self, step: int, reason: str) -> None:
        """End the run after this step and log the reason."""
        self.ended_early = EarlyEnd(
            step=step,
            planned_steps=self.total_steps,
            patience=self.config.tuner.signal_patience,
            reason=reason,
        )
        self.console.note(str(self.ended_early))

    def how_to_resume(self, step: int) -> str:
        """Location of the weights of a run that stops after this step, and how to resume it."""
        return (
            f". The weights are in {self.directory.checkpoint(step)}: fix the cause and "
            f"start the run again in the same way, and it resumes after step {step}"
        )

    def interrupted(self) -> str:
        """Message of an interrupted run: what is kept, and the command that continues it."""
        directory, done = self.directory, int(self.recent[-1]["step"]) if self.recent else 0
        saved, last = directory.checkpoint_steps()[-1:], directory.last_recorded_step()
        kept = [f"the checkpoint of step {saved[0]}"] if saved else []
        first = saved[0] + 1 if saved else 1
        if last >= first:
            many = f"step {first}" if last == first else f"steps {first} to {last}"
            kept.append(f"the rollouts of {many}, which are not sampled again")
        # Without these the same command would begin another run beside this one.
        fresh = not self.config.continue_from_checkpoint
        settings = ["continue_from_checkpoint=true"] if fresh else []
        if fresh or "name" not in self.config.model_fields_set:
            settings.append(f"name={directory.path.name}")
        return (
            f"interrupted after step {done} of {self.total_steps}\n"
            f"kept in {directory.path}: {' and '.join(kept) or 'nothing'}\n"
            f"to continue: {command(*settings)}"
        )

    def finish(self, updates: int, *, rows: Mapping[str, int]) -> TuneResult:
        """Write `result.json`.

        Args:
            updates: Number of weight updates.
            rows: Numbers of used and skipped rows of recorded data; empty for rollouts.
        """
        last = self.last_step
        result = summarize(
            read_metrics(self.directory.metrics, up_to=last),
            self.directory,
            steps=updates,
            checkpoint=None if self.config.mode == "explore" else self.directory.checkpoint(last),
        )
        result.ended_early = self.ended_early
        result.rows = dict(rows)
        if "tensorboard" in self.config.monitor.monitor_type:
            result.tensorboard = self.directory.tensorboard
        write_atomically(self.directory.result, model_json(result))
        self._completed = True
        if found := advice(result.history, self.config):
            self.console.note(found)
        return result

    def close(self) -> None:
        with ExitStack() as stack:  # each is closed, even if another fails
            stack.callback(self.console.close)
            for tracker in self._trackers:
                stack.callback(tracker.end, self._completed)
            if self._file is not None:
                stack.callback(self._file.close)
            stack.callback(self.timeline.close)


def command(*settings: str) -> str:
    """How a person starts this process again, with these settings in place of those it has."""
    program, *arguments = sys.orig_argv
    if arguments and Path(arguments[0]).name == "tuner":
        program, *arguments = "tuner", *arguments[1:]
    given = [one for one in arguments if "=" in one and not one.startswith("-")]
    if "ipykernel" in sys.modules or sys.argv[:1] == ["-c"]:
        again = "run the cell again" if "ipykernel" in sys.modules else "the same command"
        program, arguments, given = again, [], []
    replaced = tuple(f"{setting.partition('=')[0]}=" for setting in settings)
    kept = [one for one in arguments if not (replaced and one.startswith(replaced))]
    shown = shlex.join([program, *kept]) if arguments else program
    if not settings:
        return shown
    if given or "tuner" in (program, *arguments[1:2]):
        return f"{shown} {shlex.join(settings)}"
    return f"{shown}, after adding overrides={list(settings)!r} to tune()"


_RESULTS = JsonReader[TuneResult](TuneResult, "a result")
_VERSIONS = JsonReader[dict[str, int]](closed("Version", {"version": Count}), "a version")


def version_of(checkpoint: Path) -> int:
    """Number of updates of a checkpoint's weights; raises TunerError if it is missing."""
    path = checkpoint / "version.json"
    remedy = f"move {checkpoint} away, and the run resumes from the previous checkpoint"
    return _VERSIONS.document(path, remedy)["version"]


@contextmanager
def open_directory(config: RunConfig, data: Mapping[str, Sequence[Task]]) -> Iterator[RunDirectory]:
    """The run's directory, locked for this run inside the block.

    Raises:
        ConfigError: The directory belongs to a run with other settings or data, or one that is
            running.
    """
    path = config.run_dir if config.continue_from_checkpoint else free_name(config.run_dir)
    directory = RunDirectory(path)
    fingerprint, text, now = fingerprints(config, data), config.to_yaml(), config.public()
    with held(path):
        if directory.has_begun():
            stored = directory.config
            before = now
            # Reading all settings takes long beside a comparison of their text.
            if not stored.is_file() or stored.read_bytes() != text.encode():
                before = checked(read_layers(stored, backend="local", stored=True)).public()
            may_change = may_change_here(config)
            check_same_run(directory, before, now, fingerprint, may_change=may_change)
        directory.create()
        write_atomically(path / "data.json", json.dumps(fingerprint, indent=2))
        write_atomically(directory.config, text)
        yield directory


def fingerprints(config: RunConfig, data: Mapping[str, Sequence[Task]]) -> dict[str, str]:
    """Identify the rows of a run's datasets and its initial weights."""
    found = {name: fingerprint_of(tasks) for name, tasks in data.items()}
    model = config.model
    paths: dict[str, str | None] = {
        WEIGHTS[0]: model.model_path,
        WEIGHTS[1]: model.critic_model_path,
    }
    paths |= {f"{key}.path": lora.path for key, lora in model.loras.items()}
    for name, path in paths.items():
        if path and (place := located(path, name)) and (weights := fingerprint_of_weights(place)):
            found[name] = weights
    return found


def finished_result(
    directory: RunDirectory, config: RunConfig, total_steps: int
) -> TuneResult | None:
    """The result of a complete run, otherwise None.

    A run that ended early is complete unless its length or `tuner.signal_patience` was raised, and
    so is one that was to be longer than now. In `mode: explore`, which has no checkpoints, the
    metrics give the progress.
    """
    trains = config.mode != "explore"
    early, last = _early_end(directory), total_steps
    if early is not None and early.planned_steps == total_steps:
        if config.tuner.signal_patience > early.patience:
            return None
        last = early.step
    if not directory.result.exists():
        return None
    if trains and not directory.checkpoint(last).exists():
        longest, ended = max(directory.checkpoint_steps(), default=0), _stored_result(directory)
        if (
            longest < last
            or Path(ended.checkpoint or "").name != directory.checkpoint(longest).name
        ):
            return None
        last = longest
    result = read_result(directory, last)
    done = trains or any(row["step"] == last for row in result.history)
    return result if done else None


def finished_notice(directory: RunDirectory, result: TuneResult) -> str:
    """Says that a complete run was started again, and how to begin a new one."""
    path = directory.path
    return (
        f"{path} is complete, with {result.steps} steps: nothing was trained, and this is its "
        f"result\nto begin a new run ({free_name(path).name}): "
        f"{command('continue_from_checkpoint=false')}\n"
        f"to train this one further: raise buffer.total_steps or buffer.total_epochs"
    )


def _early_end(directory: RunDirectory) -> EarlyEnd | None:
    """The early end of the run, from its last completion."""
    return _stored_result(directory).ended_early if directory.result.exists() else None


def _signal_of(rows: Sequence[Mapping[str, float]], directory: RunDirectory) -> SignalHistory:
    """Learning signal of the earlier steps of a resumed run. If the run ended early and is to
    continue, the steps that ended it do not end it again."""
    signal, early = SignalHistory(), _early_end(directory)
    for row in rows:
        signal = signal.after(row)
        if early is not None and row["step"] == early.step:
            signal = replace(signal, solved=0)
    return signal


def read_result(directory: RunDirectory, total_steps: int) -> TuneResult:
    """Read `result.json`, with the metrics of the steps from their file; raises TunerError if
    one of them is damaged."""
    result = _stored_result(directory)
    result.history = read_metrics(directory.metrics, up_to=total_steps)
    return result


def _stored_result(directory: RunDirectory) -> TuneResult:
    return _RESULTS.document(
        directory.result,
        "delete it and start again: it is rewritten from metrics.jsonl, and nothing is trained",
    )


def fingerprint_of(tasks: Sequence[Task]) -> str:
    """Identify the rows of a dataset."""
    digest = hashlib.blake2b(digest_size=16)
    for task in tasks.sample() if isinstance(tasks, LazyRows) else tasks:
        digest.update(row_text(task).encode() + b"\n")
    return digest.hexdigest()


_WEIGHTS = ("*.safetensors", "*.bin")
_MIB = 1 << 20


def fingerprint_of_weights(place: Path) -> str | None:
    """Identify a model's weights: for each file of a folder, or for a GGUF file, name, size,
    and the first and last MiB, which training changes like the rest. None: no files."""
    inside = (path for kind in _WEIGHTS for path in place.glob(kind))
    files = [place] if place.is_file() else sorted(inside)
    if not files:
        return None
    digest = hashlib.blake2b(digest_size=16)
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(_MIB))
            file.seek(max(0, size - _MIB))
            digest.update(file.read(_MIB))
    return digest.hexdigest()


def summarize(
    history: Sequence[Mapping[str, float]],
    directory: RunDirectory,
    *,
    steps: int,
    checkpoint: Path | None,
) -> TuneResult:
    """The result of a run from the metrics of its steps.

    Args:
        history: A row for each step, as in `metrics.jsonl`.
        directory: The run's directory.
        steps: Number of weight updates.
        checkpoint: The last weights.
    """

    def total(name: str) -> int:
        return int(sum(row.get(name, 0) for row in history))

    evaluated = [row for row in history if any(name.startswith("eval/") for name in row)]
    outcomes = {outcome.value: total(f"rollouts/{outcome.value}") for outcome in Outcome}
    names = dict.fromkeys(name for row in history for name in row)
    dropped = [name for name in names if name.startswith("tokens/dropped/")]
    return TuneResult(
        steps=steps,
        eval_before=_eval_rewards(history[0]) if history and history[0]["step"] == 0 else {},
        eval_after=_eval_rewards(evaluated[-1]) if evaluated else {},
        rewards=[row["reward/mean"] for row in history if "reward/mean" in row],
        history=[dict(row) for row in history],
        outcomes={name: count for name, count in outcomes.items() if count},
        tokens=TokenCounts(
            sampled=total("tokens/sampled"),
            trained=total("tokens/trained"),
            dropped={name.removeprefix("tokens/dropped/"): total(name) for name in dropped},
        ),
        seconds=sum(row.get("time/step", row.get("time/evaluation", 0.0)) for row in history),
        run_dir=directory.path,
        checkpoint=checkpoint,
        traces=directory.traces,
    )


def _eval_rewards(row: Mapping[str, float]) -> dict[str, float]:
    return {
        name.removeprefix("eval/").removesuffix("/reward"): value
        for name, value in row.items()
        if name.startswith("eval/") and name.endswith("/reward")
    }
