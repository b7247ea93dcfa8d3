"""Estimates from a few rollouts: means with intervals, and how often k tries solve a task."""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import comb
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from pydantic import BaseModel

from tuner.errors import TunerError
from tuner.runs.directory import DIGESTS, RunDirectory, leaves, read_metrics
from tuner.traces import Trace
from tuner.traces.store import SERVED

CONFIDENCE = 0.95
RESAMPLES = 10_000
_SEED = 0
_AT_ONCE = 1 << 22
"""Number of bootstrap draws that are in memory together."""


class Estimate(BaseModel):
    """A mean over tasks, with an interval that contains the true one in 95 of 100 evaluations.

    Attributes:
        mean: Over the tasks.
        low, high: Ends of the interval; None for a single task, which says nothing about others.
        tasks: Number of tasks.
    """

    mean: float
    low: float | None
    high: float | None
    tasks: int

    def text(self, form: str = ".3f") -> str:
        """`0.512 [0.430, 0.590]`"""
        if self.low is None or self.high is None:
            return f"{self.mean:{form}}"
        return f"{self.mean:{form}} [{self.low:{form}}, {self.high:{form}}]"


def estimate(values: Sequence[float]) -> Estimate | None:
    """Mean of one value per task with its bootstrap interval; None if there are no values.

    Tasks are drawn again, with replacement, and not rollouts: rollouts of one task resemble each
    other, and the mean is meant for other tasks. The interval is that of the percentile bootstrap
    (Efron 1979), with a fixed seed: it assumes no shape of the rewards and never leaves their
    range. It is too narrow by about sqrt((n - 1) / n) for n tasks, so below 20 tasks it is only a
    hint; if all values are equal it has no width, whatever the truth is for other tasks.

    Args:
        values: A number per task; for two candidates the difference of each task.
    """
    if not values:
        return None
    mean, count = fmean(values), len(values)
    if count == 1:
        return Estimate(mean=mean, low=None, high=None, tasks=1)
    random, array = np.random.default_rng(_SEED), np.asarray(values, dtype=np.float64)
    means: list[float] = []
    while len(means) < RESAMPLES:
        drawn = min(RESAMPLES - len(means), max(1, _AT_ONCE // count))
        means.extend(array[random.integers(count, size=(drawn, count))].mean(axis=1))
    low, high = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Estimate(mean=mean, low=float(low), high=float(high), tasks=count)


def paired(new: Mapping[int, float], old: Mapping[int, float]) -> Estimate | None:
    """The mean difference over the tasks that both have a number of; None without one."""
    return estimate([value - old[task] for task, value in new.items() if task in old])


def pass_at_k(tries: int, passed: int, k: int) -> float:
    """Probability that one of k tries passes: 1 - C(n - c, k) / C(n, k), unbiased for n >= k.

    Chen et al. 2021 (arXiv 2107.03374), equation 1.
    """
    return 1 - comb(tries - passed, k) / comb(tries, k)


def pass_hat_k(tries: int, passed: int, k: int) -> float:
    """Probability that all of k tries pass: C(c, k) / C(n, k), unbiased for n >= k.

    Yao et al. 2024 (tau-bench, arXiv 2406.12045), section 4.
    """
    return comb(passed, k) / comb(tries, k)


def passes(
    rewards: Iterable[Sequence[float]], k: int, pass_reward: float
) -> tuple[list[float], list[float]]:
    """pass@k and pass^k of each task with at least k rewards; others are skipped.

    Args:
        rewards: For each task the rewards of its rollouts that have one.
        pass_reward: Minimum reward of a rollout that passes.
    """
    counts = [
        (len(of_task), sum(reward >= pass_reward for reward in of_task))
        for of_task in rewards
        if len(of_task) >= k
    ]
    return [pass_at_k(n, c, k) for n, c in counts], [pass_hat_k(n, c, k) for n, c in counts]


def spearman(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Correlation of two sequences' ranks, ties with their mean rank; None if one of them is
    constant."""
    if len(set(first)) < 2 or len(set(second)) < 2:
        return None
    return float(np.corrcoef(_ranks(first), _ranks(second))[0, 1])


def _ranks(values: Sequence[float]) -> np.ndarray:
    _, place, counts = np.unique(np.asarray(values), return_inverse=True, return_counts=True)
    ranks: np.ndarray = (counts.cumsum() - (counts - 1) / 2)[place]
    return ranks


def rewards_by_task(traces: Iterable[Trace]) -> Mapping[int, list[float]]:
    """Rewards of each task's rollouts, by the task's number; empty if all failed."""
    found: defaultdict[int, list[float]] = defaultdict(list)
    for trace in traces:
        if trace.final:
            found[trace.id.task] += [] if trace.reward is None else [trace.reward]
    return found


# Differences between runs: their settings and their curves.


# They name a run, so their differences mean nothing.
NAMES = ("name", "project", "checkpoint_root_dir", "continue_from_checkpoint")


@dataclass(frozen=True)
class RunSummary:
    """The data of a run for comparisons.

    Attributes:
        name: The name of its folder.
        settings: Its effective configuration, without secrets, by dotted key; with the fingerprints
            of its datasets' rows.
        metrics: A row for each step, as in `metrics.jsonl`.
    """

    name: str
    settings: dict[str, Any]
    metrics: list[dict[str, Any]]


def is_run(path: Path) -> bool:
    """Whether a folder is a run directory."""
    directory = RunDirectory(path)
    served = path / SERVED
    return directory.metrics.is_file() or directory.traces.is_dir() or served.is_file()


def check_is_run(path: Path) -> None:
    """Raises TunerError unless `path` is a run directory."""
    if not is_run(path):
        raise TunerError(
            f"{path} is not a run: it contains neither metrics.jsonl nor traces/, nor a server's "
            f"{SERVED}. Use the folder <checkpoint_root_dir>/<project>/<name>"
        )


def find_runs(folder: Path, *, depth: int = 2) -> Iterator[Path]:
    """The runs in a folder, which may be that of a project or of all projects, by name.

    Args:
        folder: Where to search; unreadable folders are skipped.
        depth: Maximum depth. Folders inside a run are not searched.
    """
    try:
        inside = sorted(path for path in folder.iterdir() if path.is_dir())
    except OSError:
        return
    for path in inside:
        if is_run(path):
            yield path
        elif depth > 1 and not path.name.startswith("."):
            yield from find_runs(path, depth=depth - 1)


def read_run(path: Path) -> RunSummary:
    """Read the data of a run for comparisons; it may be in progress."""
    check_is_run(path)
    directory = RunDirectory(path)
    config, data = directory.stored_config(), path / "data.json"
    there = os.path.lexists(data)
    rows = DIGESTS.document(data, "delete it: it only identifies rows") if there else {}
    settings = dict(leaves(config, lists=True)) if config else {}
    return RunSummary(
        name=path.resolve().name,
        settings=settings | {f"rows of {name}": digest[:8] for name, digest in rows.items()},
        metrics=read_metrics(directory.metrics, up_to=sys.maxsize, skip=True),
    )


def differing_settings(runs: Sequence[RunSummary]) -> dict[str, list[Any]]:
    """Settings that differ between runs, by dotted key: a value for each run.

    None if a run does not have the setting. Settings that only name a run are omitted.
    """
    keys = dict.fromkeys(key for run in runs for key in run.settings if key not in NAMES)
    found = {key: [run.settings.get(key) for run in runs] for key in keys}
    return {key: values for key, values in found.items() if any(one != values[0] for one in values)}
