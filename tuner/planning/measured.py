"""What runs recorded of what a step comes to, and of its seconds.

A run directory has of each step the seconds of its parts (`metrics.jsonl`) and every call with its
tokens (`traces/`). Steps are counted from the second on, since the first one loads and allocates,
and without their evaluations.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from tuner.errors import TunerError
from tuner.planning.step_model import Place, Work
from tuner.run.continuation import leaves
from tuner.run.directory import RunDirectory, read_metrics
from tuner.run.summary import check_is_run, find_runs, is_run
from tuner.traces import Call, TokenTree, Trace, read_traces

STEPS = 8
"""The last steps of a run that are read."""
WAITING = 0.5
"""From this share of a rollout on, what is spent outside the model's calls is taken for waiting:
code that takes CPU holds up the engine as well, and so never comes to much of it."""
_SPREAD = 512


@dataclass(frozen=True)
class MeasuredStep:
    """A step: its seconds, and what was done in them.

    Attributes:
        idle, training, weights, rest: Seconds.
        rollouts, calls, sampled, new, attended: Numbers of them; `new` are prompt tokens that the
            engine computed, `attended` pairs of a sampled token and one before it.
        longest: Sampled tokens of the rollout with most.
        unique, depth: Tokens of the trained tree, and those that one attends to.
    """

    idle: float
    training: float
    weights: float
    rest: float
    rollouts: int
    calls: int
    sampled: int
    new: int
    attended: float
    longest: int
    unique: float
    depth: float

    @property
    def seconds(self) -> float:
        return self.idle + self.training + self.weights + self.rest


@dataclass(frozen=True)
class MeasuredRun:
    """A run, as far as it tells what things take.

    Attributes:
        name: Its folder's.
        settings: Effective, by dotted key.
        place: What ran where.
        work: What its rollouts came to.
        steps: Those that were read.
        waits: Share of a rollout that is spent outside the model's calls.
    """

    name: str
    settings: Mapping[str, Any]
    place: Place
    work: Work
    steps: tuple[MeasuredStep, ...]
    waits: float

    @property
    def agent(self) -> str:
        """The workflow that the settings name."""
        return agent_of(self.settings)

    @property
    def unfit(self) -> str | None:
        """Why costs are not fitted to it; None where they are."""
        if self.place.ahead:
            return "collection ran ahead of training (synchronizer.sync_offset)"
        if self.place.workers:
            return "its agents ran in workers (tuner.workers)"
        if not self.place.in_process:
            return "its engine is not in the trainer's process"
        if self.waits > WAITING:
            return f"{self.waits:.0%} of a rollout is outside the model's calls, taken for waiting"
        return None

    def middle(self, name: str) -> float:
        """The median: seconds of a step that nothing else on the machine has held up."""
        return float(median(getattr(step, name) for step in self.steps))


def agent_of(settings: Mapping[str, Any]) -> str:
    """The workflow that settings name, with the last folder of its file; or "unnamed"."""
    named = str(settings.get("tuner.workflow") or "unnamed")
    return "/".join(Path(named).parts[-2:])


def place_of(settings: Mapping[str, Any], *, cores: int | None = None) -> Place:
    """What a file's settings put where, on one machine without GPUs.

    Args:
        settings: By dotted key; what is missing is as the local backend has it.
        cores: Of the machine; None: this one's.
    """
    if cores is None:
        has_affinity = hasattr(os, "sched_getaffinity")
        cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    kind = settings.get("explorer.rollout_model.engine_type") or "auto"
    running = int(settings.get("explorer.runner_per_model") or 8)
    # On a cluster as in the file, or at most as many; its cores are among `cores` then.
    many: dict[Any, Any] = {
        "auto": cores,
        "ray": settings.get("tuner.ray.workers") or min(running, cores),
    }
    workers = settings.get("tuner.workers") or 0
    beside = kind in ("vllm", "sglang") or settings.get("tuner.placement") == "separate"
    repeat = int(settings.get("algorithm.repeat_times") or 1)
    kl = settings.get("algorithm.kl_loss_fn")
    coefficient = settings.get("algorithm.kl_loss_fn_args.kl_coef")
    return Place(
        groups=int(settings.get("buffer.batch_size") or 1),
        repeat=repeat,
        running=running,
        slots=int(settings.get("tuner.max_slots") or 64),
        ahead=int(settings.get("synchronizer.sync_offset") or 0),
        reference=kl not in (None, "none") and coefficient != 0,
        engines=int(settings.get("explorer.rollout_model.engine_num") or 1),
        in_process=not beside,
        workers=int(many.get(workers, workers)),
        cores=cores,
    )


def runs_in(given: Sequence[Path]) -> list[Path]:
    """Run directories, and those in folders of runs: each once, where it was named last."""
    found: dict[Path, None] = {}
    for path in given:
        inside = [] if is_run(path) else list(find_runs(path))
        for run in inside or [path]:
            found.pop(run.resolve(), None)
            found[run.resolve()] = None
    return list(found)


def read_measured(path: Path) -> MeasuredRun:
    """A run's times and counts.

    Raises:
        TunerError: `path` is not a run of rollouts with traces, or its files are damaged.
    """
    check_is_run(path)
    directory = RunDirectory(path)
    settings = dict(leaves(directory.stored_config(), lists=True))
    place = place_of(settings)
    rows = [row for row in read_metrics(directory.metrics, up_to=sys.maxsize) if row["step"] > 0]
    counted = rows[1:] if len(rows) > 1 else rows
    found = [(row, _traces(directory, row)) for row in counted[-STEPS:]]
    whole = [(row, traces) for row, traces in found if traces and "time/idle" in row]
    if not whole:
        raise TunerError(
            f"{path} tells nothing of what a step takes: it has no step with time/idle in "
            "metrics.jsonl and rollouts in traces/; give a run of two steps or more"
        )
    traces = [trace for _, of_step in whole for trace in of_step]
    steps = tuple(_step(row, of_step) for row, of_step in whole)
    waits = _outside(traces)
    return MeasuredRun(
        path.resolve().name, settings, place, _work(traces, steps, place, waits), steps, waits
    )


def _traces(directory: RunDirectory, row: Mapping[str, Any]) -> list[Trace]:
    """Every attempt at the rollouts of a step that called the model."""
    path = directory.traces / f"step_{row['step']:06d}.jsonl"
    return [trace for trace in read_traces(path) if trace.calls]


def _calls(traces: Sequence[Trace]) -> Iterator[Call]:
    return (call for trace in traces for call in trace.calls if not call.given_back)


def _step(row: Mapping[str, Any], traces: Sequence[Trace]) -> MeasuredStep:
    calls = list(_calls(traces))
    named = [float(row[f"time/{name}"]) for name in ("idle", "training", "sync")]
    evaluated = any(key.startswith("eval/") for key in row)
    valid = [call for call in calls if call.invalid is None]
    tree = TokenTree.build(valid)
    idle, training, weights = named
    return MeasuredStep(
        idle=idle,
        training=training,
        weights=weights,
        rest=0.0 if evaluated else max(0.0, float(row["time/step"]) - sum(named)),
        rollouts=len(traces),
        calls=len(calls),
        sampled=sum(call.sampled_tokens for call in calls),
        new=sum(len(call.prompt_ids) - call.cached_tokens for call in calls),
        attended=sum(
            call.sampled_tokens * (len(call.prompt_ids) + call.sampled_tokens / 2) for call in calls
        ),
        longest=max(trace.sampled_tokens for trace in traces),
        unique=float(row.get("tokens/unique", 0.0)),
        depth=float(tree.depth.mean()) + 1,
    )


def _outside(traces: Sequence[Trace]) -> float:
    """Share of the rollouts' seconds that is spent outside the model's calls."""
    whole = sum(trace.seconds.get(part, 0.0) for trace in traces for part in ("workflow", "judge"))
    inside = sum(trace.seconds.get("generation", 0.0) for trace in traces)
    return max(0.0, 1 - inside / whole) if whole else 0.0


def _work(
    traces: Sequence[Trace], steps: Sequence[MeasuredStep], place: Place, waits: float
) -> Work:
    calls = list(_calls(traces))
    sampled = sorted(trace.sampled_tokens for trace in traces)
    mean = fmean(sampled) or 1.0
    places = np.linspace(0, len(sampled) - 1, min(_SPREAD, len(sampled))).round().astype(int)
    common, first = _beginnings(traces)
    unique = fmean(step.unique for step in steps)
    own = (unique - common - place.groups * first) / place.rollouts
    agent, judge = 0.0, 0.0
    if waits > WAITING:
        inside = sum(trace.seconds.get("generation", 0.0) for trace in traces)
        workflow = sum(trace.seconds.get("workflow", 0.0) for trace in traces)
        agent = max(0.0, workflow - inside) / len(calls)
        judge = sum(trace.seconds.get("judge", 0.0) for trace in traces) / len(traces)
    return Work(
        calls=len(calls) / len(traces),
        completion=sum(call.sampled_tokens for call in calls) / len(calls),
        prompt=fmean(len(call.prompt_ids) for call in calls),
        reused=fmean(call.cached_tokens for call in calls),
        common=common,
        first=first,
        own=max(0.0, own),
        depth=fmean(step.depth for step in steps),
        waits=agent,
        judged=judge,
        spread=tuple(sampled[place] / mean for place in places),
    )


def _beginnings(traces: Sequence[Trace]) -> tuple[float, float]:
    """Tokens that all first prompts begin with, and further ones of a task's."""
    prompts = {(trace.id.step, trace.id.task): trace.calls[0].prompt_ids for trace in traces}
    low, high = min(prompts.values()), max(prompts.values())  # all others begin as both do
    differing = (
        place for place, pair in enumerate(zip(low, high, strict=False)) if len({*pair}) > 1
    )
    shared = next(differing, min(len(low), len(high))) if len(prompts) > 1 else 0
    return shared, fmean(map(len, prompts.values())) - shared
