"""The numbers of one step."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean

import torch

from tuner.config.algorithms import ADVANTAGES, AdvantageName, GiGPOAdvantage
from tuner.runs.estimates import estimate, passes, rewards_by_task
from tuner.traces import Outcome, TokenTree, Trace
from tuner.training.batch import Batch, RoleBatches, Row
from tuner.training.scoring import call_returns, row_rewards, state_advantages, states

RECOMPUTED = "tokens/recomputed"
# Metrics of a batch that are added up over the roles with adapters.
_SUMS = frozenset(
    {"tokens/trained", "tokens/row", "tokens/unique", "tokens/replayed", "tokens/cut_again"}
    | {"groups/used"}
)


def rollout_metrics(traces: Sequence[Trace]) -> dict[str, float]:
    """Reward, outcomes, lengths and the user's own metrics of one step's traces.

    The user's metrics appear as `workflow/<name>`, averaged over the rollouts that reported them.
    What the reasoning policy costs is summed over the calls: `tokens/kept_reasoning` under `keep`,
    `tokens/recomputed` under `template`. A call that a branch was given back counts for the rollout
    that sampled it, and elsewhere only in `calls/per_rollout`.
    """
    final = [trace for trace in traces if trace.final]
    rewards = [trace.reward for trace in final if trace.reward is not None]
    calls = [call for trace in final for call in trace.calls if not call.given_back]
    metrics: dict[str, float] = {"rollouts/retried": len(traces) - len(final)}
    for outcome, count in Counter(trace.outcome for trace in final).items():
        metrics[f"rollouts/{outcome.value}"] = count
    if begun := [trace.origin for trace in final if trace.origin is not None]:
        metrics["branches/rollouts"] = len(begun)
        metrics["branches/diverged"] = sum(origin.diverged is not None for origin in begun)
    if rewards:
        metrics["reward/mean"] = _mean(rewards)
        metrics["reward/min"], metrics["reward/max"] = min(rewards), max(rewards)
        metrics["reward/std"] = float(torch.tensor(rewards, dtype=torch.float64).std(correction=0))
    if calls:
        metrics["calls/per_rollout"] = sum(len(trace.calls) for trace in final) / len(final)
        metrics["calls/completion_tokens"] = _mean([len(call.completion_ids) for call in calls])
        metrics["calls/prompt_tokens"] = _mean([len(call.prompt_ids) for call in calls])
        metrics["calls/cached_tokens"] = _mean([call.cached_tokens for call in calls])
        metrics["calls/truncated"] = _mean([call.finish_reason == "length" for call in calls])
        metrics["calls/malformed_tool_calls"] = sum(call.malformed_tool_calls for call in calls)
        metrics["calls/undelivered"] = sum(call.undelivered for call in calls)
        metrics["calls/invalid"] = sum(call.invalid is not None for call in calls)
        if any(call.reasoning_policy == "keep" for call in calls):
            metrics["tokens/kept_reasoning"] = sum(call.kept_reasoning_ids for call in calls)
        else:
            metrics[RECOMPUTED] = sum(call.recomputed_ids for call in calls)
    names = sorted({name for trace in final for name in trace.metrics})
    for name in names:
        values = [trace.metrics[name] for trace in final if name in trace.metrics]
        metrics[f"workflow/{name}"] = _mean(values)
    return metrics


def metrics_by_field(traces: Sequence[Trace], field: str) -> dict[str, float]:
    """Of the tasks with each value of a field: `rollout/<value>/reward`, the mean of those that
    have one, and how many `failed`."""
    groups: dict[str, list[Trace]] = defaultdict(list)
    for trace in traces:
        if trace.final:
            groups[str(trace.task.get(field))].append(trace)
    metrics: dict[str, float] = {}
    for value, final in sorted(groups.items()):
        rewards = [trace.reward for trace in final if trace.reward is not None]
        if rewards:
            metrics[f"rollout/{value}/reward"] = _mean(rewards)
        failed = sum(trace.outcome is not Outcome.COMPLETED for trace in final)
        metrics[f"rollout/{value}/failed"] = failed
    return metrics


def evaluation_metrics(
    name: str, traces: Sequence[Trace], *, pass_reward: float = 1.0
) -> dict[str, float]:
    """Mean reward on an evaluation set, and how many rollouts failed, which have none.

    The mean is over the tasks, of the mean of each; `reward_low` and `reward_high` are the ends of
    its 95% interval (`tuner.runs.estimates.estimate`). Where tasks are repeated, n times, there are
    `pass_at_<n>` and `pass_hat_<n>` too, over the tasks of which no rollout failed.

    Args:
        name: The set's.
        traces: Of its rollouts; none where it was not evaluated.
        pass_reward: A rollout has passed that has at least so much.
    """
    final = [trace for trace in traces if trace.final]
    rewards = [of_task for of_task in rewards_by_task(final).values() if of_task]
    metrics: dict[str, float] = {}
    if rewards:
        means = [_mean(of_task) for of_task in rewards]
        metrics[f"eval/{name}/reward"] = _mean(means)
        found = estimate(means)
        if found is not None and found.low is not None and found.high is not None:
            metrics[f"eval/{name}/reward_low"] = found.low
            metrics[f"eval/{name}/reward_high"] = found.high
    repeat = max(Counter(trace.id.task for trace in final).values(), default=0)
    if repeat > 1:
        of_tries = passes(rewards, repeat, pass_reward)
        for what, values in zip(("pass_at", "pass_hat"), of_tries, strict=True):
            if values:
                metrics[f"eval/{name}/{what}_{repeat}"] = _mean(values)
    if final:
        failed = sum(trace.outcome is not Outcome.COMPLETED for trace in final)
        metrics[f"eval/{name}/failed"] = failed
    return metrics


def batch_metrics(
    batch: Batch | RoleBatches, advantage: AdvantageName = "step_wise_grpo"
) -> dict[str, float]:
    """Where the step's tokens went, and how many groups and states have something to tell."""
    if isinstance(batch, RoleBatches):
        return _metrics_of_roles(batch, advantage)
    metrics: dict[str, float] = {"tokens/sampled": batch.sampled_tokens, **tree_metrics(batch.rows)}
    if batch.replayed_tokens:
        metrics["tokens/replayed"] = batch.replayed_tokens
    for reason, count in batch.dropped_tokens.items():
        metrics[f"tokens/dropped/{reason}"] = count
    for reason, count in batch.dropped_rollouts.items():
        metrics[f"rollouts/dropped/{reason}"] = count
    if batch.ids:
        groups: dict[int, list[float]] = defaultdict(list)
        for group, reward in zip(batch.group_R.tolist(), batch.rewards_R.tolist(), strict=True):
            groups[group].append(reward)
        # Where only the best rollouts are kept, a group may be one rollout, chosen among several.
        quiet = [len(rewards) > 1 and len(set(rewards)) == 1 for rewards in groups.values()]
        metrics["groups/used"] = len(quiet)
        if ADVANTAGES[advantage].needs_group:
            metrics["groups/zero_variance"] = _mean(quiet)
    return metrics | (state_metrics(batch) if advantage == "gigpo" else {})


def _metrics_of_roles(batches: RoleBatches, advantage: AdvantageName) -> dict[str, float]:
    """The metrics of each role's batch as `role/<name>/...`, with the mean reward of its calls; and
    sums and means of all roles under the usual names."""
    metrics: dict[str, float] = {}
    totals: Counter[str] = Counter()
    for role, batch in batches.of_roles.items():
        of_role = batch_metrics(batch, advantage)
        totals.update({key: value for key, value in of_role.items() if key in _SUMS})
        if batch.rows:
            of_role["reward"] = float(row_rewards(batch).mean())
        metrics |= {f"role/{role}/{key}": value for key, value in of_role.items()}
    totals["tokens/sampled"] = batches.sampled_tokens
    metrics |= totals
    metrics["tokens/merge_ratio"] = totals["tokens/row"] / (totals["tokens/unique"] or 1)
    metrics |= {f"tokens/dropped/{why}": count for why, count in batches.dropped_tokens.items()}
    metrics |= {f"rollouts/dropped/{why}": n for why, n in batches.dropped_rollouts.items()}
    quiet = "groups/zero_variance"
    shares = [one for key, one in metrics.items() if key.endswith(f"/{quiet}")]
    return metrics | ({quiet: _mean(shares)} if shares else {})


def tree_metrics(rows: Sequence[Row]) -> dict[str, float]:
    """How many tokens are trained, and how many go through the model.

    `tokens/merge_ratio` is how many times more tokens the batch has as rows than as a token tree.
    `tokens/cut_again` are trained tokens of which it is not known what a cut left, so that it is
    made again under the weights that are trained.
    """
    tree = TokenTree.build(rows)
    cut = [row for row in rows if row.sampling.cuts]
    unknown = sum(not kept for row in cut for kept in row.kept or [""] * len(row.completion_ids))
    return {
        "tokens/trained": sum(len(row.completion_ids) for row in rows),
        "tokens/row": sum(len(row) for row in rows),
        "tokens/unique": tree.unique_tokens,
        "tokens/merge_ratio": tree.merge_ratio,
        **({"tokens/cut_again": unknown} if unknown else {}),
    }


def staleness_metrics(batch: Batch | RoleBatches, version: int) -> dict[str, float]:
    """Updates between the weights that sampled a trained token and those that it trains; nobody can
    count them where another run's weights did.

    Args:
        batch: What is trained.
        version: Updates that the weights have seen which it trains.
    """
    own = [row for row in batch.rows if not row.foreign]
    ages = [version - sampled for row in own for sampled in row.versions]
    if not ages:
        return {}
    return {"staleness/mean": _mean(ages), "staleness/max": max(ages)}


def state_metrics(batch: Batch) -> dict[str, float]:
    """How many states the calls of a step were made in, as `gigpo` tells them apart.

    `states/calls` is the mean number of calls of a state, `states/shared` the share of calls whose
    state another call was made in too, and `states/shared_later` that of the calls after the first
    of their rollout, if there are any: first calls often share the prompt, and whole rollouts are
    compared anyway.
    """
    if not batch.rows:
        return {}
    state_C = states(batch)
    count_S = state_C.bincount()
    shared_C = (count_S > 1)[state_C]
    rollout_of = {
        call: row.rollout for call, row in zip(batch.call_N.tolist(), batch.rows, strict=True)
    }
    rollouts = [rollout_of[call] for call in range(len(state_C))]
    later = [before == here for before, here in pairwise([None, *rollouts])]
    shared_later = shared_C[torch.tensor(later)].tolist()
    return {
        "states/count": len(count_S),
        "states/calls": len(state_C) / len(count_S),
        "states/shared": _mean(shared_C.tolist()),
        **({"states/shared_later": _mean(shared_later)} if shared_later else {}),
    }


def has_signal(
    batch: Batch | RoleBatches,
    advantage: AdvantageName = "step_wise_grpo",
    turn_discount: float | None = None,
) -> bool:
    """Whether some calls are trained whose rewards differ from those they are compared with.

    A teacher has something to say of every token. `reinforce` and `reinforceplusplus` compare all
    rewards of a step, `ppo` with a critic too that remembers those of other steps, so a single
    rollout teaches; of `best_of_group` the batch has only what is worth imitating. With a discount
    from call to call (`RunConfig.call_discount`), what calls lead to counts. One of several roles
    is enough.
    """
    if isinstance(batch, RoleBatches):
        return any(has_signal(one, advantage, turn_discount) for one in batch.of_roles.values())
    if advantage == "gigpo":
        if not batch.rows:
            return False
        args = GiGPOAdvantage(gamma=1.0 if turn_discount is None else turn_discount)
        return bool((state_advantages(batch, args).abs() > 1e-9).any())
    if advantage in ("best_of_group", "on_policy_distill", "prompt_distill"):
        return bool(batch.rows)
    if advantage == "ppo" and len(batch.rewards_R) == 1:
        return bool(batch.rows)
    compared = ADVANTAGES[advantage].needs_group
    if not compared and turn_discount is None:
        return len({float(reward) for reward in row_rewards(batch)}) > 1
    if turn_discount is not None:
        return _turns_differ(batch, turn_discount, compared)
    rewards: dict[tuple[str, int], set[float]] = defaultdict(set)
    for row in batch.rows:
        if row.peers is not None and row.reward is not None:
            rewards["call", row.peers].add(row.reward)
    for rollout in {row.rollout for row in batch.rows if row.peers is None}:
        group = int(batch.group_R[rollout])
        rewards["group", group].update(batch.rewards_R[batch.group_R == group].tolist())
    return any(len(values) > 1 for values in rewards.values())


def _turns_differ(batch: Batch, discount: float, in_groups: bool) -> bool:
    """Whether calls of different rollouts lead to different rewards, in the mean of a rollout."""
    values: dict[int, list[float]] = defaultdict(list)
    for row, value in zip(batch.rows, call_returns(batch, discount).tolist(), strict=True):
        values[row.rollout].append(value)
    means: dict[int, set[float]] = defaultdict(set)
    for rollout, group in enumerate(batch.group_R.tolist()):
        mean = fmean(values.get(rollout) or [float(batch.rewards_R[rollout])])
        means[group if in_groups else 0].add(mean)
    return bool(batch.rows) and any(len(found) > 1 for found in means.values())


def time_split(
    traces: Sequence[Trace], idle: float, training: float, sync: float
) -> dict[str, float]:
    """Seconds of a step by part, and of its rollouts.

    `time/` is wall time: `training`, `sync` (giving the engine the weights) and `idle` (the trainer
    waits for rollouts). Rollouts run side by side, so the idle time is divided, as `generation`,
    `agent` and `judge`, in proportion to the seconds that the step's rollouts spent waiting for the
    model, in the agent's own code with its tools, and in the judge.

    `rollout_seconds/` is the mean over the step's rollouts, of the same parts and of `queue`: until
    there was room for it.
    """
    parts: defaultdict[str, float] = defaultdict(float)
    for trace in traces:
        generation = trace.seconds.get("generation", 0.0)
        parts["generation"] += generation
        parts["agent"] += max(0.0, trace.seconds.get("workflow", 0.0) - generation)
        parts["judge"] += trace.seconds.get("judge", 0.0)
    scale = idle / (sum(parts.values()) or 1.0)
    rollouts = sum(trace.final for trace in traces) or 1
    queue = sum(trace.seconds.get("queue", 0.0) for trace in traces)
    return {
        **{f"time/{name}": seconds * scale for name, seconds in parts.items()},
        "time/idle": idle,
        "time/training": training,
        "time/sync": sync,
        **{f"rollout_seconds/{name}": seconds / rollouts for name, seconds in parts.items()},
        "rollout_seconds/queue": queue / rollouts,
    }


def reasoning_notice(step: int, recomputed: int) -> str:
    """What the policy `template` costs, said when that is first seen."""
    return (
        f"step {step}: prompts leave out the reasoning of earlier turns, so conversations branch "
        f"there, and {recomputed:,} tokens of history were computed again; tuner.reasoning: keep "
        "puts the reasoning back, off the chat template's habit (docs/traces.md has both costs)"
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
