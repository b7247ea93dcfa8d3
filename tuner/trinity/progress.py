"""Records of a run on Trinity-RFT, and their evaluation: steps, metrics, result."""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tuner.config.algorithms import ALGORITHMS
from tuner.config.source import without_secrets
from tuner.errors import FunctionError, TrainingError
from tuner.runs.directory import METRICS, RunDirectory, write_atomically
from tuner.runs.metrics import evaluation_metrics, rollout_metrics, time_split
from tuner.runs.result import TokenCounts
from tuner.traces import Trace, TraceStore, without_vote
from tuner.traces.reading import InvalidRecord, JsonReader, Text
from tuner.traces.store import closed
from tuner.training.batch import Selection, build_batch, reward_of, unreplayed

logger = logging.getLogger("tuner")
_REASONS = JsonReader[dict[str, str]](
    lambda: closed("Reason", {"error": Text, "message": Text}), "why a run stopped"
)
_REPLAYED = JsonReader[list[str]](list[Text], "a list of files")


class Journal:
    """The folder of one run, shared by its workers and its driver.

    Several workers append to the traces of one step, so each takes the folder's lock.
    """

    def __init__(self, run_dir: Path) -> None:
        self._directory = RunDirectory(run_dir)
        self.folder = run_dir / "tuner"

    def write(self, traces: Sequence[Trace]) -> None:
        """Append every attempt of a rollout."""
        with self._lock():
            store = TraceStore(self._directory.traces)
            for trace in traces:
                store.append(trace)

    def stop(self, error: BaseException) -> None:
        """Record that the run must stop; the driver ends it. The first reason is kept."""
        with self._lock():
            if self.reason() is None:
                reason = {"error": type(error).__name__, "message": without_secrets(str(error))}
                write_atomically(self.folder / "stop.json", json.dumps(reason))

    def reason(self) -> dict[str, str] | None:
        """Class and message of the error that stops the run, or None."""
        path = self.folder / "stop.json"
        return _REASONS.document(path, "delete it") if path.exists() else None

    def raise_reason(self) -> None:
        """Raise the recorded reason, if there is one."""
        if (reason := self.reason()) is not None:
            kind = FunctionError if reason["error"] == FunctionError.__name__ else TrainingError
            raise kind(reason["message"])

    def traces(self, step: int) -> Path:
        """The file with the traces of a training step."""
        return TraceStore(self._directory.traces).path("train", step)

    def replay(self, files: Sequence[Path]) -> None:
        """Record which files of traces a resumed run trains again."""
        self.folder.mkdir(parents=True, exist_ok=True)
        names = sorted(file.name for file in files)
        write_atomically(self.folder / "replay.json", json.dumps(names))

    def recorded(self, split: str, step: int) -> list[Trace]:
        """A resumed run's earlier rollouts of a step; empty for a new step."""
        path = self.folder / "replay.json"
        store = TraceStore(self._directory.traces)
        remedy = "delete it, and start the run again"
        if not path.exists() or store.path(split, step).name not in _REPLAYED.document(
            path, remedy
        ):
            return []
        return store.read(split, step)

    def forget_reason(self) -> None:
        """Delete the reason; for a restarted run."""
        (self.folder / "stop.json").unlink(missing_ok=True)

    @contextmanager
    def _lock(self) -> Iterator[None]:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def report_file(run_dir: Path, role: str) -> Path:
    """Metrics file of a Trinity-RFT process, a line per report."""
    return run_dir / "tuner" / f"{role}.jsonl"


_HANDED_OVER = "experience_pipeline/experience_count"
# Algorithms that learn from differences between the rewards of a group; `grpo_verl` is the
# trainer's copy of grpo.
COMPARE_GROUPS = frozenset(
    {"grpo_verl"}
    | {
        name
        for name, row in ALGORITHMS.items()
        if row.advantage_fn in ("step_wise_grpo", "grpo", "rloo")
    }
)


class TrinityProgress:
    """The reports of one run; new reports are read at each access.

    Args:
        directory: The run's folder.
        explorer, trainer: The configured names of the two processes.
        evaluations: Names of the evaluation sets.
        compared: Whether training uses differences of rewards inside groups.
        penalty: The reward of failed rollouts, or None if they are dropped.
        pass_reward: Minimum reward of a rollout that passes an evaluation.
    """

    def __init__(
        self,
        directory: RunDirectory,
        *,
        explorer: str,
        trainer: str,
        evaluations: list[str],
        compared: bool = True,
        penalty: float | None = None,
        pass_reward: float = 1.0,
    ) -> None:
        self._pass_reward = pass_reward
        self._directory = directory
        self._reports = {
            role: _StepReport(report_file(directory.path, name))
            for role, name in (("explorer", explorer), ("trainer", trainer))
        }
        self._evaluations = evaluations
        self.compared = compared
        self._penalty = penalty

    def reports(self, role: str) -> Mapping[int, Mapping[str, float]]:
        """Reports of "explorer" or "trainer", by step; later reports of a step are merged."""
        return self._reports[role].read()

    def forget_after(self, trained: int, explored: int) -> None:
        """Drop reports after these steps of the trainer and of the explorer."""
        self._reports["trainer"].forget_after(trained)
        self._reports["explorer"].forget_after(explored)

    def trained_steps(self) -> list[int]:
        """Weight updates reported by the trainer, rising."""
        # A step that lacked data, or died half-way, reports no gradient.
        changed = {"actor/grad_norm", "actor/pg_loss", "actor/loss"}
        return sorted(step for step, row in self.reports("trainer").items() if changed & {*row})

    def explored_steps(self) -> list[int]:
        """Steps whose rollouts were handed to the trainer, rising."""
        return self._reporting(_HANDED_OVER)

    def ended_steps(self) -> list[int]:
        """Steps whose rollouts have all ended, handed over or not, rising."""
        return self._reporting("rollout/finished_task_count")

    def _reporting(self, name: str) -> list[int]:
        return sorted(step for step, row in self.reports("explorer").items() if name in row)

    def experiences(self, up_to: int | None = None) -> int:
        """Number of experiences handed to the trainer, in all steps or up to one."""
        return sum(
            int(row.get(_HANDED_OVER, 0))
            for step, row in self.reports("explorer").items()
            if up_to is None or step <= up_to
        )

    def traces(self, step: int) -> list[Trace]:
        """Recorded traces of a training step."""
        return TraceStore(self._directory.traces).read("train", step)

    def signal(self, traces: Sequence[Trace]) -> bool:
        """Whether a step's rollouts give something to learn from."""
        rewards: dict[int, list[float]] = defaultdict(list)
        for trace in traces:
            if not trace.final or without_vote(trace, unreplayed) is not None:
                continue
            if any(c.reward is not None and unreplayed(c) is None for c in trace.calls):
                return True  # calls are compared with each other
            reward = reward_of(trace, self._penalty)
            if reward is not None:
                rewards[trace.id.task].append(reward)
        if self.compared and any(len(group) > 1 for group in rewards.values()):
            return any(len(set(group)) > 1 for group in rewards.values())
        return bool(rewards)

    def history(self) -> list[dict[str, float]]:
        """The run's metrics, a row per step, named like those of a local run.

        Rewards, outcomes and evaluations come from the traces; reports of Trinity-RFT's processes
        are under `explorer/` and `trainer/`.
        """
        steps = sorted({0, *self.reports("explorer"), *self.reports("trainer")})
        return [{"step": step, **row} for step in steps if (row := self.row(step))]

    def row(self, step: int) -> dict[str, float]:
        """The metrics of one step."""
        explorer = self.reports("explorer").get(step, {})
        trainer = self.reports("trainer").get(step, {})
        row: dict[str, float] = {}
        if traces := self.traces(step):
            row |= rollout_metrics(traces)
            row["tokens/sampled"] = sum(trace.sampled_tokens for trace in traces)
            row["signal"] = float(self.signal(traces))
            row |= _times(traces, explorer, trainer)
        for name in self._evaluations:
            traces = TraceStore(self._directory.traces).read(name, step)
            row |= evaluation_metrics(name, traces, pass_reward=self._pass_reward)
        row |= {f"explorer/{name}": value for name, value in explorer.items()}
        row |= {f"trainer/{name}": value for name, value in trainer.items()}
        return row

    def token_counts(self, *, needs_group: bool) -> TokenCounts:
        """Use of the sampled tokens; "trained" are those passed to Trinity-RFT.

        Args:
            needs_group: Whether a rollout that is alone in its group teaches nothing.
        """
        counts, dropped = TokenCounts(), Counter[str]()
        for step in sorted({*self.reports("explorer"), *self.reports("trainer")}):
            batch = build_batch(
                self.traces(step),
                penalty=self._penalty,
                selection=Selection(needs_group=needs_group),
                left_out=unreplayed,
            )
            counts.sampled += batch.sampled_tokens
            counts.trained += batch.trained_tokens
            dropped.update(batch.dropped_tokens)
        counts.dropped = dict(dropped)
        return counts


def _times(
    traces: Sequence[Trace], explorer: Mapping[str, float], trainer: Mapping[str, float]
) -> dict[str, float]:
    """Wall-clock seconds of the parts of a step, measured by Trinity-RFT."""
    waiting = explorer.get("explorer/time/wait_explore_step", 0.0)
    collecting = trainer.get("time/read_experience", waiting)
    training = trainer.get("time/train_step", 0.0) + trainer.get("time/save_checkpoint", 0.0)
    sync = trainer.get("time/sync_weight", 0.0)
    seconds = collecting + training + sync
    if not seconds:
        return {}
    sampled = sum(trace.sampled_tokens for trace in traces)
    return {
        **time_split(traces, collecting, training, sync),
        "time/step": seconds,
        "tokens_per_second": sampled / seconds,
    }


class _StepReport:
    """A file to which a process of Trinity-RFT appends a line per report."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: dict[int, dict[str, float]] = {}
        self._place = 0

    def read(self) -> Mapping[int, Mapping[str, float]]:
        """All reports so far, by step; an incomplete last line is read the next time."""
        for row in self._added():
            self._rows.setdefault(int(row.pop("step")), {}).update(row)
        return self._rows

    def forget_after(self, last: int) -> None:
        if not self._path.exists():
            return
        self._rows, self._place = {}, 0
        kept = [row for row in self._added() if int(row["step"]) <= last]
        write_atomically(self._path, "".join(json.dumps(row) + "\n" for row in kept))
        self._place = 0

    def _added(self) -> Iterator[dict[str, Any]]:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            if file.seek(0, os.SEEK_END) < self._place:  # it was rewritten
                self._rows, self._place = {}, 0
            file.seek(self._place)
            for line in file:
                if line.endswith(b"\n"):
                    self._place += len(line)
                    try:
                        yield METRICS.parse(line)
                    except InvalidRecord as error:
                        logger.warning("a line of %s was left out: %s", self._path, error)


def latest_checkpoint(run_dir: Path) -> Path | None:
    """The Hugging Face folder of the newest checkpoint that has one."""
    found = {file.parent for file in run_dir.glob("global_step_*/actor/huggingface/*.safetensors")}
    return max(found, key=lambda folder: step_of(folder.parents[1]), default=None)


def step_of(folder: Path) -> int:
    """Step number of a folder `global_step_<n>`."""
    return int(folder.name.removeprefix("global_step_"))
