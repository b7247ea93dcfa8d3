"""A Trinity-RFT run as steps with metrics: what its processes reported, and what its traces say."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tuner.backends.metrics import rollout_metrics
from tuner.backends.run_directory import RunDirectory
from tuner.backends.trinity.journal import report_file
from tuner.traces import TraceStore


class Progress:
    """The reports of one run, read again whenever they are asked for.

    Args:
        directory: The run's folder.
        explorer, trainer: What the configuration calls the two processes.
        evaluations: Names of the evaluation sets.
    """

    def __init__(
        self, directory: RunDirectory, *, explorer: str, trainer: str, evaluations: list[str]
    ) -> None:
        self._directory = directory
        self._names = {"explorer": explorer, "trainer": trainer}
        self._evaluations = evaluations

    def reports(self, role: str) -> dict[int, dict[str, float]]:
        """What "explorer" or "trainer" reported, by step; later reports of a step add to it."""
        rows: dict[int, dict[str, float]] = {}
        for row in _rows(report_file(self._directory.path, self._names[role])):
            rows.setdefault(int(row.pop("step")), {}).update(row)
        return rows

    def trained_steps(self) -> list[int]:
        """Updates of the weights that the trainer reported, rising."""
        return sorted(step for step, row in self.reports("trainer").items() if _is_update(row))

    def explored_steps(self) -> list[int]:
        """Steps of rollouts that were handed over, rising."""
        return sorted(step for step, row in self.reports("explorer").items() if _is_handover(row))

    def experiences(self) -> int:
        """Experiences handed over to the trainer, all steps together."""
        return sum(
            int(row["experience_pipeline/experience_count"])
            for row in self.reports("explorer").values()
            if _is_handover(row)
        )

    def history(self) -> list[dict[str, float]]:
        """The run's metrics, a row per step, named as those of a local run.

        Rewards, outcomes and evaluations come from the traces; what Trinity-RFT's processes
        reported is under `explorer/` and `trainer/`.
        """
        explorer, trainer = self.reports("explorer"), self.reports("trainer")
        store = TraceStore(self._directory.traces)
        rows = []
        for step in sorted({0, *explorer, *trainer}):
            row: dict[str, float] = {}
            if traces := store.read("train", step):
                row |= rollout_metrics(traces)
                sampled = sum(trace.sampled_tokens for trace in traces)
                row["tokens/sampled"] = sampled
            for name in self._evaluations:
                row |= self._evaluation(store, name, step)
            row |= {f"explorer/{name}": value for name, value in explorer.get(step, {}).items()}
            row |= {f"trainer/{name}": value for name, value in trainer.get(step, {}).items()}
            if row:
                rows.append({"step": step, **row})
        return rows

    def _evaluation(self, store: TraceStore, name: str, step: int) -> dict[str, float]:
        final = [trace for trace in store.read(name, step) if trace.final]
        if not final:
            return {}
        rewards = [trace.reward for trace in final if trace.reward is not None]
        row = {f"eval/{name}/failed": float(len(final) - len(rewards))}
        if rewards:
            row[f"eval/{name}/reward"] = sum(rewards) / len(rewards)
        return row


def _is_update(row: Mapping[str, float]) -> bool:
    """A step that changed nothing for want of data, or died half-way, reports no gradient."""
    return "actor/grad_norm" in row or "actor/pg_loss" in row or "actor/loss" in row


def _is_handover(row: Mapping[str, float]) -> bool:
    return "experience_pipeline/experience_count" in row


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield json.loads(line)
