"""A Trinity-RFT run as steps with metrics: what its processes reported, and what its traces say."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tuner.run.directory import RunDirectory, write_atomically
from tuner.run.metrics import rollout_metrics, time_split
from tuner.traces import Trace, TraceStore
from tuner.training.batch import PENALIZABLE
from tuner.trinity.journal import report_file

# What a turn of the trainer's loop is made of: waiting for rollouts, and the rest.
_WAITING = "time/read_experience"
_WORKING = ("time/train_step", "time/save_checkpoint")
_HANDING_OVER = "time/sync_weight"
# Algorithms that learn from the differences between the rewards of a group.
COMPARE_GROUPS = frozenset(
    {"multi_step_grpo", "grpo", "grpo_verl", "dapo", "gspo", "cispo", "sapo", "rloo"}
)


class Progress:
    """The reports of one run; what was added to them is read whenever they are asked for.

    Args:
        directory: The run's folder.
        explorer, trainer: What the configuration calls the two processes.
        evaluations: Names of the evaluation sets.
        compared: Whether rewards teach by their differences inside groups.
        penalty: The reward of failed rollouts, or None where they are left out.
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
    ) -> None:
        self._directory = directory
        self._reports = {
            role: _Report(report_file(directory.path, name))
            for role, name in (("explorer", explorer), ("trainer", trainer))
        }
        self._evaluations = evaluations
        self._compared = compared
        self._penalty = penalty

    def reports(self, role: str) -> Mapping[int, Mapping[str, float]]:
        """What "explorer" or "trainer" reported, by step; later reports of a step add to it."""
        return self._reports[role].read()

    def forget_after(self, trained: int, explored: int) -> None:
        """Leave out what was reported after these steps of the trainer and of the explorer."""
        self._reports["trainer"].forget_after(trained)
        self._reports["explorer"].forget_after(explored)

    def trained_steps(self) -> list[int]:
        """Updates of the weights that the trainer reported, rising."""
        return sorted(step for step, row in self.reports("trainer").items() if _is_update(row))

    def explored_steps(self) -> list[int]:
        """Steps of rollouts that were handed over, rising."""
        return sorted(step for step, row in self.reports("explorer").items() if _is_handover(row))

    def ended_steps(self) -> list[int]:
        """Steps whose rollouts have all ended, handed over or not, rising."""
        rows = self.reports("explorer").items()
        return sorted(step for step, row in rows if "rollout/finished_task_count" in row)

    def experiences(self, up_to: int | None = None) -> int:
        """Experiences handed over to the trainer, of all steps or of those up to one."""
        return sum(
            int(row["experience_pipeline/experience_count"])
            for step, row in self.reports("explorer").items()
            if _is_handover(row) and (up_to is None or step <= up_to)
        )

    def traces(self, step: int) -> list[Trace]:
        """What was recorded of a training step."""
        return TraceStore(self._directory.traces).read("train", step)

    def signal(self, traces: Sequence[Trace]) -> bool:
        """Whether a step's rollouts have something to teach."""
        rewards: dict[int, list[float]] = defaultdict(list)
        for trace in traces:
            if trace.final and any(call.reward is not None for call in trace.calls):
                return True  # calls are compared among each other
            reward = trace.reward
            if reward is None and trace.outcome in PENALIZABLE and trace.calls:
                reward = self._penalty
            if trace.final and reward is not None:
                rewards[trace.id.task].append(reward)
        if self._compared and any(len(group) > 1 for group in rewards.values()):
            return any(len(set(group)) > 1 for group in rewards.values())
        return bool(rewards)

    def history(self) -> list[dict[str, float]]:
        """The run's metrics, a row per step, named as those of a local run.

        Rewards, outcomes and evaluations come from the traces; what Trinity-RFT's processes
        reported is under `explorer/` and `trainer/`.
        """
        explorer, trainer = self.reports("explorer"), self.reports("trainer")
        rows = []
        for step in sorted({0, *explorer, *trainer}):
            row = self.row(step, explorer.get(step, {}), trainer.get(step, {}))
            if row:
                rows.append({"step": step, **row})
        return rows

    def row(
        self, step: int, explorer: Mapping[str, float], trainer: Mapping[str, float]
    ) -> dict[str, float]:
        """The metrics of one step from what the two processes reported of it."""
        row: dict[str, float] = {}
        if traces := self.traces(step):
            row |= rollout_metrics(traces)
            row["tokens/sampled"] = sum(trace.sampled_tokens for trace in traces)
            row["signal"] = float(self.signal(traces))
            row |= _times(traces, explorer, trainer)
        for name in self._evaluations:
            row |= self._evaluation(name, step)
        row |= {f"explorer/{name}": value for name, value in explorer.items()}
        row |= {f"trainer/{name}": value for name, value in trainer.items()}
        return row

    def _evaluation(self, name: str, step: int) -> dict[str, float]:
        store = TraceStore(self._directory.traces)
        final = [trace for trace in store.read(name, step) if trace.final]
        if not final:
            return {}
        rewards = [trace.reward for trace in final if trace.reward is not None]
        row = {f"eval/{name}/failed": float(len(final) - len(rewards))}
        if rewards:
            row[f"eval/{name}/reward"] = sum(rewards) / len(rewards)
        return row


def _times(
    traces: Sequence[Trace], explorer: Mapping[str, float], trainer: Mapping[str, float]
) -> dict[str, float]:
    """Wall seconds of a step by part, as Trinity-RFT measured them."""
    collecting = trainer.get(_WAITING, explorer.get("explorer/time/wait_explore_step", 0.0))
    training = sum(trainer.get(name, 0.0) for name in _WORKING)
    sync = trainer.get(_HANDING_OVER, 0.0)
    seconds = collecting + training + sync
    if not seconds:
        return {}
    sampled = sum(trace.sampled_tokens for trace in traces)
    return {
        **time_split(traces, collecting, training, sync),
        "time/step": seconds,
        "tokens_per_second": sampled / seconds,
    }


def _is_update(row: Mapping[str, float]) -> bool:
    """A step that changed nothing for want of data, or died half-way, reports no gradient."""
    return "actor/grad_norm" in row or "actor/pg_loss" in row or "actor/loss" in row


def _is_handover(row: Mapping[str, float]) -> bool:
    return "experience_pipeline/experience_count" in row


class _Report:
    """A file that a process of Trinity-RFT adds a line to for each of its reports."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: dict[int, dict[str, float]] = {}
        self._place = 0

    def read(self) -> Mapping[int, Mapping[str, float]]:
        """Everything reported so far, by step; a torn last line is left for the next time."""
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
            if file.seek(0, os.SEEK_END) < self._place:  # it was written anew
                self._rows, self._place = {}, 0
            file.seek(self._place)
            for line in file:
                if line.endswith(b"\n"):
                    self._place += len(line)
                    yield json.loads(line)
