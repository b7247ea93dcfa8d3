"""The result of a run from the metrics of its steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from tuner.backends.run_directory import RunDirectory
from tuner.result import TokenCounts, TuneResult
from tuner.traces import Outcome


def summarize(
    history: Sequence[Mapping[str, float]], directory: RunDirectory, step: int
) -> TuneResult:
    """The result of a run from the metrics of its steps."""
    outcomes: Counter[str] = Counter()
    dropped: Counter[str] = Counter()
    for row in history:
        for outcome in Outcome:
            outcomes[outcome.value] += int(row.get(f"rollouts/{outcome.value}", 0))
        for name, value in row.items():
            if name.startswith("tokens/dropped/"):
                dropped[name.removeprefix("tokens/dropped/")] += int(value)
    return TuneResult(
        steps=step,
        eval_before=_eval_rewards(history[0]) if history and history[0]["step"] == 0 else {},
        eval_after=_eval_rewards(history[-1]) if history else {},
        rewards=[row["reward/mean"] for row in history if "reward/mean" in row],
        history=[dict(row) for row in history],
        outcomes={name: count for name, count in outcomes.items() if count},
        tokens=TokenCounts(
            sampled=int(sum(row.get("tokens/sampled", 0) for row in history)),
            trained=int(sum(row.get("tokens/trained", 0) for row in history)),
            dropped=dict(dropped),
        ),
        seconds=sum(row["time/step"] for row in history),
        run_dir=directory.path,
        checkpoint=directory.checkpoint(step),
        traces=directory.traces,
    )


def _eval_rewards(row: Mapping[str, float]) -> dict[str, float]:
    return {
        name.removeprefix("eval/").removesuffix("/reward"): value
        for name, value in row.items()
        if name.startswith("eval/") and name.endswith("/reward")
    }
