"""The candidates of a search as they are compared: who came of whom, and what each is worth."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from tuner.prompts.prompted import Prompts
from tuner.prompts.trials import Trials
from tuner.run.console import ConsoleMonitor
from tuner.run.directory import RunDirectory, write_atomically


@dataclass(eq=False)
class CandidateTree:
    """The candidates that were compared, as `tree.json` keeps them and people hear of them.

    GEPA calls its `on_` methods.

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
    _rejected: list[dict[str, Any]] = field(default_factory=list, init=False)
    _proposed: dict[str, str] = field(default_factory=dict, init=False)
    _parent: int = field(default=0, init=False)
    _began: float = field(default_factory=time.perf_counter, init=False)

    def add(self, prompts: Prompts, parents: Sequence[int], scores: Mapping[int, float]) -> None:
        """A candidate was compared with the others.

        Args:
            prompts: Its texts.
            parents: Places of those that it came of, in the order in which they were compared.
            scores: Of each row.
        """
        number, mean = self.trials.log.number(prompts), fmean(scores.values())
        before = [self._accepted[place] for place in parents]
        self._accepted.append(
            {
                "number": number,
                "parents": [one["number"] for one in before],
                "prompts": dict(prompts),
                "scores": {str(row): score for row, score in scores.items()},
                "mean": mean,
                "rollouts": self.trials.spent.rollouts,
            }
        )
        came = "" if not before else f", from {before[0]['mean']:.3f}"
        self.monitor.say(
            f"candidate {number}: {mean:.3f}{came}; best {self.best['mean']:.3f}; "
            f"{self._progress()}"
        )
        self._write()

    @property
    def first(self) -> dict[str, Any]:
        """What the search began with."""
        return self._accepted[0]

    @property
    def best(self) -> dict[str, Any]:
        """The first of those with the highest mean."""
        return max(self._accepted, key=lambda one: float(one["mean"]))

    def on_valset_evaluated(self, event: Mapping[str, Any]) -> None:
        """A candidate was compared with the others."""
        parents = [index for index in event["parent_ids"] if index is not None]
        scores = {self.compare_on[place]: one for place, one in event["scores_by_val_id"].items()}
        self.add(event["candidate"], parents, scores)

    def on_candidate_selected(self, event: Mapping[str, Any]) -> None:
        """A proposal is going to be made for a candidate."""
        self._parent, self._proposed = event["candidate_idx"], dict(event["candidate"])

    def on_proposal_end(self, event: Mapping[str, Any]) -> None:
        """The reflecting model has proposed new texts."""
        self._proposed |= event["new_instructions"]

    def on_candidate_rejected(self, event: Mapping[str, Any]) -> None:
        """A proposal was no better on the tasks that it was made for; the scores are sums."""
        self._rejected.append(
            {
                "number": self.trials.log.number(self._proposed),
                "parents": [self._accepted[self._parent]["number"]],
                "score_before": event["old_score"],
                "score": event["new_score"],
            }
        )
        self._write()

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
            "reflections": spent.reflections,
            "input_tokens": spent.usage.input_tokens,
            "output_tokens": spent.usage.output_tokens,
            "cost": spent.cost,
        }
        write_atomically(self.directory.path / "tree.json", json.dumps(tree, indent=2))
