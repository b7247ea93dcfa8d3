"""The candidates of a search as they are accepted: who came of whom, and what each is worth."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tuner.prompts.trials import Trials
from tuner.run.console import ConsoleMonitor
from tuner.run.directory import RunDirectory, write_atomically


@dataclass(eq=False)
class CandidateTree:
    """The accepted candidates, as `tree.json` keeps them and people hear of them. GEPA calls it.

    Args:
        directory: The run's.
        trials: Made the rollouts.
        monitor: Where people look.
        compare_on: The rows that candidates are compared on.
        budget: Rollouts of the search, where they are limited.
    """

    directory: RunDirectory
    trials: Trials
    monitor: ConsoleMonitor
    compare_on: Sequence[int]
    budget: int | None
    _accepted: list[dict[str, Any]] = field(default_factory=list, init=False)
    _rejected: int = field(default=0, init=False)
    _began: float = field(default_factory=time.perf_counter, init=False)

    def on_valset_evaluated(self, event: Mapping[str, Any]) -> None:
        """A candidate was compared with the others."""
        number = self.trials.log.number(event["candidate"])
        parents = [
            self._accepted[index]["number"] for index in event["parent_ids"] if index is not None
        ]
        self._accepted.append(
            {
                "number": number,
                "parents": parents,
                "prompts": dict(event["candidate"]),
                "scores": {str(row): score for row, score in event["scores_by_val_id"].items()},
                "mean": event["average_score"],
            }
        )
        best = max(self._accepted, key=lambda one: one["mean"])
        before = "" if not parents else f", from {self._mean(parents[0]):.3f}"
        self.monitor.say(
            f"candidate {number}: {event['average_score']:.3f}{before}; best {best['mean']:.3f}; "
            f"{self._progress()}"
        )
        self._write()

    def on_candidate_rejected(self, event: Mapping[str, Any]) -> None:
        """A proposal was no better on the tasks that it was made for."""
        self._rejected += 1
        self._write()

    def _mean(self, number: int) -> float:
        return next(float(one["mean"]) for one in self._accepted if one["number"] == number)

    def _progress(self) -> str:
        done = self.trials.spent.rollouts
        if self.budget is None or not done:
            return f"{done} rollouts"
        left = (time.perf_counter() - self._began) / done * max(0, self.budget - done)
        return f"{done} of {self.budget} rollouts, about {left:.0f} s left"

    def _write(self) -> None:
        spent = self.trials.spent
        tree = {
            "compare_on": list(self.compare_on),
            "candidates": self._accepted,
            "rejected": self._rejected,
            "rollouts": spent.rollouts,
            "failed": dict(spent.failed),
            "cost": spent.cost,
        }
        write_atomically(self.directory.path / "tree.json", json.dumps(tree, indent=2))
