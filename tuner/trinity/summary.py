"""The result of a run on Trinity-RFT from its metrics and its traces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from tuner.result import TokenCounts, TuneResult
from tuner.run.directory import RunDirectory
from tuner.traces import Trace, TraceStore
from tuner.trinity.experience import left_out


def summarize(
    history: Sequence[Mapping[str, float]],
    directory: RunDirectory,
    *,
    trained: int,
    seconds: float,
    tensorboard: bool,
) -> TuneResult:
    """The result of a run.

    Args:
        history: A row per step, as in `metrics.jsonl`.
        directory: The run's folder.
        trained: Updates of the weights.
        seconds: Wall time of this start of the run.
        tensorboard: Whether it was logged there.
    """
    steps = {int(row["step"]): row for row in history}
    evaluated = {step: rewards for step, row in steps.items() if (rewards := _eval_rewards(row))}
    store = TraceStore(directory.traces)
    traces = [trace for step in steps for trace in store.read("train", step)]
    return TuneResult(
        steps=trained,
        eval_before=evaluated.get(0, {}),
        eval_after=evaluated[max(evaluated)] if evaluated else {},
        rewards=[row["reward/mean"] for row in history if "reward/mean" in row],
        history=[dict(row) for row in history],
        outcomes=dict(Counter(str(trace.outcome) for trace in traces if trace.final)),
        tokens=_token_counts(traces),
        seconds=seconds,
        run_dir=directory.path,
        checkpoint=latest_checkpoint(directory.path),
        traces=directory.traces,
        tensorboard=directory.path / "monitor" / "tensorboard" if tensorboard else None,
    )


def latest_checkpoint(run_dir: Path) -> Path | None:
    """The Hugging Face folder of the newest checkpoint that has one."""
    found = [
        folder
        for folder in run_dir.glob("global_step_*/actor/huggingface")
        if any(folder.glob("*.safetensors"))
    ]
    return max(found, key=lambda folder: step_of(folder.parents[1]), default=None)


def step_of(folder: Path) -> int:
    """The trainer's step that a folder `global_step_<n>` is of."""
    return int(folder.name.removeprefix("global_step_"))


def _token_counts(traces: Sequence[Trace]) -> TokenCounts:
    """Where sampled tokens went; "trained" are those that Trinity-RFT was given."""
    sampled = trained = 0
    dropped: Counter[str] = Counter()
    groups = Counter((t.id.step, t.id.task) for t in traces if t.final and t.reward is not None)
    for trace in traces:
        sampled += trace.sampled_tokens
        reason = None
        if not trace.final:
            reason = "retried_attempt"
        elif trace.reward is None:
            reason = str(trace.outcome)
        elif groups[trace.id.step, trace.id.task] < 2:
            reason = "group_of_one"
        for call in trace.calls:
            masked = sum(stop - start for start, stop in call.masked)
            why = reason or left_out(call)
            if why is None:
                trained += len(call.completion_ids) - masked
                dropped["masked"] += masked
            else:
                dropped[why] += len(call.completion_ids)
    return TokenCounts(sampled=sampled, trained=trained, dropped=dict(+dropped))


def _eval_rewards(row: Mapping[str, float]) -> dict[str, float]:
    return {
        name.removeprefix("eval/").removesuffix("/reward"): value
        for name, value in row.items()
        if name.startswith("eval/") and name.endswith("/reward")
    }
