"""The costs that explain what runs took.

They are what fits the seconds best: least squares of relative errors, with no cost below 0. Only
runs that take turns, without workers, on an engine in their own process, and whose agents wait for
nothing are fitted: of others it cannot be told apart what takes how long.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from tuner.config.model_paths import located
from tuner.errors import TunerError
from tuner.planning.measured import MeasuredRun, MeasuredStep
from tuner.planning.step_model import REFERENCE, Costs, Place, StepTime, Work, predict

GATEWAY = 1 / 3630
"""Seconds of CPU of a call in the gateway, in process: benchmarks/results/gateway.json. What more a
call takes on its loop is the agent's."""
_ROUNDS, _CLOSE = 8, 0.03
"""Of the fit; below so large a relative error steps count alike."""


@dataclass(frozen=True)
class Fit:
    """Costs that explain runs.

    Attributes:
        costs: `agent` is the mean of all agents'.
        agents: Seconds of CPU for a call in the code of each.
        runs: All that were read; `used` are the names of those that were fitted.
        ranges: Of what was fitted, smallest and largest, by name.
    """

    costs: Costs
    agents: Mapping[str, float]
    runs: tuple[MeasuredRun, ...]
    used: tuple[str, ...]
    ranges: Mapping[str, tuple[float, float]]

    def of(self, agent: str) -> Costs:
        """The costs with an agent's own, if it is known."""
        return replace(self.costs, agent=self.agents.get(agent, self.costs.agent))

    def again(self, run: MeasuredRun) -> StepTime:
        """What the model says of a run that it knows."""
        return predict(run.work, self.of(run.agent), run.place)

    def errors(self) -> dict[str, tuple[float, float]]:
        """Of each run that was fitted, seconds of a step as the model tells and as measured."""
        used = [run for run in self.runs if run.name in self.used]
        return {run.name: (self.again(run).seconds, run.middle("seconds")) for run in used}


def extent(work: Work, place: Place) -> dict[str, float]:
    """What costs are only known of in the range that they were fitted in."""
    return {
        "rollouts at a time": place.at_once,
        "rollouts of a step": place.rollouts,
        "calls of a rollout": work.calls,
        "tokens of an answer": work.completion,
        "tokens of a prompt": work.prompt,
        "tokens of an update": work.unique(place.groups, place.repeat),
    }


def fit(runs: Sequence[MeasuredRun]) -> Fit:
    """The costs that explain what the runs took.

    Raises:
        TunerError: None of them can be fitted; says why for each.
    """
    usable = [run for run in runs if run.unfit is None]
    if not usable:
        why = "; ".join(f"{run.name}: {run.unfit}" for run in runs)
        raise TunerError(
            f"no run is left that costs can be fitted to ({why}): give one that takes turns, with "
            "tuner.workers 0 and an agent that does not wait"
        )
    models = {str(run.settings.get("model.model_path")) for run in usable}
    sizes = {_size(model) for model in models}
    if len(sizes) > 1:
        raise TunerError(
            f"the runs are of models of different sizes ({', '.join(sorted(models))}), which have "
            "different costs: give runs of one"
        )
    collection = _solved(
        [
            (dict(_collected(run, step)), max(0.0, step.idle - step.calls * GATEWAY))
            for run in usable
            for step in run.steps
        ]
    )
    training = _solved(
        [
            (dict(_trained(run, step)), step.training)
            for run in usable
            for step in run.steps
            if step.unique
        ]
    )
    names = {run.agent for run in usable}
    agents = {agent: collection.pop(f"call of {agent}") for agent in names}
    ranges: dict[str, list[float]] = defaultdict(list)
    for run in usable:
        for name, value in extent(run.work, run.place).items():
            ranges[name].append(value)
    return Fit(
        Costs(
            **collection,
            **training,
            gateway=GATEWAY,
            agent=fmean(agents.values()),
            publish=fmean(run.middle("weights") for run in usable),
            rest=fmean(run.middle("rest") for run in usable),
        ),
        agents,
        tuple(runs),
        tuple(run.name for run in usable),
        {name: (min(values), max(values)) for name, values in ranges.items()},
    )


def _size(model: str) -> tuple[int, ...] | str:
    """What tells models of other costs apart: the size of its files, or its name."""
    try:
        place = located(model)
    except TunerError:  # the run's machine was another one
        return model
    if place is None:
        return model
    files = [place] if place.is_file() else sorted(place.glob("*.safetensors"))
    # Copies differ by a few bytes of metadata.
    return tuple(file.stat().st_size // 10_000 for file in files) or model


def _collected(run: MeasuredRun, step: MeasuredStep) -> Iterator[tuple[str, float]]:
    """How many of each a step's collection had, on one loop."""
    together = max(1, min(run.place.slots, run.place.running, step.rollouts))
    yield "step", step.sampled / together + step.longest - step.sampled / step.rollouts
    yield "sampled", step.sampled
    yield "attended", step.attended
    yield "prefilled", step.new
    yield f"call of {run.agent}", step.calls
    yield "rollout", step.rollouts


def _trained(run: MeasuredRun, step: MeasuredStep) -> Iterator[tuple[str, float]]:
    asked = 1 + REFERENCE * run.place.reference
    yield "update", 1
    yield "trained", step.unique * asked
    yield "paired", step.unique * asked * step.depth


def _solved(found: Sequence[tuple[Mapping[str, float], float]]) -> dict[str, float]:
    """Costs of each, at least 0, with which the sums are closest in relative terms.

    The absolute errors are made small, by least squares with weights, so that a step in which the
    machine did something else counts for little.
    """
    names = list(dict.fromkeys(name for counts, _ in found for name in counts))
    seconds = np.array([value for _, value in found])
    rows = np.array([[counts.get(name, 0.0) for name in names] for counts, _ in found])
    rows = rows / np.maximum(seconds, 1e-9)[:, None]  # of each step the seconds are then 1
    scale = np.maximum(np.linalg.norm(rows, axis=0), 1e-12)
    rows = rows / scale
    costs, weights = np.zeros(len(names)), np.ones(len(found))
    for _ in range(_ROUNDS):
        heavier = np.sqrt(weights)
        costs = _not_negative(rows * heavier[:, None], heavier)
        weights = 1 / np.maximum(np.abs(rows @ costs - 1), _CLOSE)
    return dict(zip(names, (costs / scale).tolist(), strict=True))


def _not_negative(rows: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Least squares of `rows @ costs` to `wanted`, no cost below 0 (Lawson and Hanson 1974)."""
    count = rows.shape[1]
    costs, free = np.zeros(count), np.zeros(count, dtype=bool)
    for _ in range(3 * count):
        gain = np.where(free, -np.inf, rows.T @ (wanted - rows @ costs))
        if gain.max() <= 1e-10:
            break
        free[gain.argmax()] = True
        while True:
            best = np.zeros(count)
            best[free] = np.linalg.lstsq(rows[:, free], wanted, rcond=None)[0]
            low = free & (best <= 0)
            if not low.any():
                break
            part = (costs[low] / np.maximum(costs[low] - best[low], 1e-300)).min()
            costs = costs + part * (best - costs)
            free &= costs > 1e-14
            costs[~free] = 0.0
        costs = best
    return costs
