"""The advantages of a batch's rows: rewards of rollouts, rewards of calls, KL in the reward."""

from __future__ import annotations

import torch
from torch import Tensor

from tuner.algorithms import (
    KL_ESTIMATORS,
    call_normalized,
    distilled,
    group_normalized,
    group_std,
    leave_one_out,
    mirror_descent,
    shifted_mean,
    whitened_returns,
)
from tuner.errors import TrainingError
from tuner.training.batch import Batch
from tuner.training.episodes import call_returns
from tuner.training.settings import TrainerSettings

NORMALIZED = ("grpo", "step_wise_grpo")


def row_advantages(
    batch: Batch,
    settings: TrainerSettings,
    ref_logp: tuple[Tensor, ...] | None = None,
    teacher_logp: tuple[Tensor, ...] | None = None,
) -> tuple[Tensor, ...]:
    """The advantage of every trained token, one tensor [T_row] for each of the N rows.

    A rollout's reward is compared inside its group and goes to all of its calls. A call with a
    reward of its own is compared with its peers instead (`Row.peers`). With a KL penalty, a reward
    is charged the estimates of the tokens that it is for: a rollout's those of its calls without
    rewards of their own, a call's its own. `reinforceplusplus` charges every token by itself.

    With `turn_discount`, what each call leads to (`call_returns`) is compared inside the group.

    Args:
        ref_logp: The reference's log-probs, one tensor for each row; for the KL penalty.
        teacher_logp: The teacher's, in the same form; for distillation, which reads no rewards.

    Raises:
        TrainingError: Calls have rewards of their own, and the algorithm has no use for them, or
            there is no teacher.
    """
    if not batch.rows:
        return ()
    if settings.advantage == "on_policy_distill":
        if teacher_logp is None:
            raise TrainingError("on_policy_distill needs a teacher (PolicyTrainer(teacher=...))")
        return tuple(
            distilled(
                teacher_T.cpu().double(),
                torch.tensor(row.logprobs, dtype=torch.float64),
                coef=settings.distill_coef,
            )
            for row, teacher_T in zip(batch.rows, teacher_logp, strict=True)
        )
    penalties = kl_penalties(batch, settings, ref_logp)
    if settings.advantage == "reinforceplusplus":
        return whitened_returns(
            row_rewards(batch), _lengths(batch), gamma=settings.gamma, penalties=penalties
        )
    advantages_N = _compared(batch, settings, penalties)
    return tuple(
        advantage.expand(length)
        for advantage, length in zip(advantages_N, _lengths(batch), strict=True)
    )


def _lengths(batch: Batch) -> list[int]:
    return [len(row.completion_ids) for row in batch.rows]


def row_rewards(batch: Batch) -> Tensor:
    """The reward of each row: its own, or its rollout's; shape [N]."""
    rewards_R = batch.rewards_R.tolist()
    return torch.tensor(
        [rewards_R[row.rollout] if row.peers is None else row.reward for row in batch.rows],
        dtype=batch.rewards_R.dtype,
    )


def kl_penalties(
    batch: Batch, settings: TrainerSettings, ref_logp: tuple[Tensor, ...] | None
) -> tuple[Tensor, ...] | None:
    """What each token is charged for its distance to the reference, [T_row] for each row."""
    if not settings.penalizes_kl or ref_logp is None:
        return None
    estimate, coef = KL_ESTIMATORS[settings.kl_penalty], settings.kl_penalty_coef
    # One transfer for all rows.
    on_cpu = torch.cat(ref_logp).cpu().double().split(_lengths(batch))
    return tuple(
        coef * estimate(torch.tensor(row.logprobs, dtype=torch.float64), ref_T)
        for row, ref_T in zip(batch.rows, on_cpu, strict=True)
    )


def _compared(
    batch: Batch, settings: TrainerSettings, penalties: tuple[Tensor, ...] | None
) -> Tensor:
    """One advantage for each row, from rewards that are compared with others; shape [N]."""
    if settings.turn_discount is not None:
        return _of_turns(batch, settings, settings.turn_discount, penalties)
    rewards_R = batch.rewards_R.clone()
    rollout_N = torch.tensor([row.rollout for row in batch.rows], dtype=torch.long)
    own_N = torch.tensor([row.peers is not None for row in batch.rows])
    row_rewards_N = row_rewards(batch)
    if penalties is not None:
        charge_N = torch.stack([charge_T.sum() for charge_T in penalties]).to(rewards_R)
        call_N = batch.call_N
        of_call_C = charge_N.new_zeros(len(batch.rows)).index_add(0, call_N, charge_N)
        row_rewards_N = row_rewards_N - of_call_C[call_N]
        # Calls with rewards of their own have paid with these.
        rewards_R = rewards_R.index_add(0, rollout_N, -charge_N.masked_fill(own_N, 0.0))
    advantages_N = _of_rollouts(rewards_R, batch.group_R, settings)[rollout_N]
    if own_N.any():
        own_C, place_N = _calls(batch, own_N)
        peers_C = torch.tensor([batch.rows[row].peers for row in own_C.tolist()])
        of_calls_C = _of_calls(row_rewards_N[own_C], rollout_N[own_C], peers_C, settings)
        advantages_N[own_N] = of_calls_C[place_N]
    return advantages_N


def _calls(batch: Batch, some_N: Tensor) -> tuple[Tensor, Tensor]:
    """The calls of some rows: the first row of each, shape [C], and the call of each row."""
    rows = some_N.nonzero()[:, 0]
    calls, place = batch.call_N[rows].unique(return_inverse=True)
    # Written from the last to the first, so that the first stays.
    first_C = rows.new_zeros(len(calls))
    for row, call in zip(rows.flip(0).tolist(), place.flip(0).tolist(), strict=True):
        first_C[call] = row
    return first_C, place


def _of_turns(
    batch: Batch,
    settings: TrainerSettings,
    discount: float,
    penalties: tuple[Tensor, ...] | None,
) -> Tensor:
    """Advantages of what each call leads to, inside its group; shape [N]."""
    returns_N = call_returns(batch, discount, penalties)
    first_C, call_N = _calls(batch, torch.ones(len(batch.rows), dtype=torch.bool))
    rollout_N = torch.tensor([row.rollout for row in batch.rows], dtype=torch.long)
    # A rollout without a call that is trained still counts in what the others are compared with.
    is_silent_R = torch.ones(len(batch.rewards_R), dtype=torch.bool)
    is_silent_R[rollout_N] = False
    silent = is_silent_R.nonzero()[:, 0]
    rollout_C = torch.cat([rollout_N[first_C], silent])
    advantages_C = _of_calls(
        torch.cat([returns_N[first_C], batch.rewards_R[silent]]),
        rollout_C,
        batch.group_R[rollout_C],
        settings,
    )
    advantages_N = advantages_C[call_N]
    return advantages_N.masked_fill(_quiet(batch.rewards_R, batch.group_R, settings)[rollout_N], 0)


def _of_rollouts(rewards_R: Tensor, group_R: Tensor, settings: TrainerSettings) -> Tensor:
    if settings.advantage not in NORMALIZED:
        return _of_calls(rewards_R, torch.arange(len(rewards_R)), group_R, settings)
    advantages_R = group_normalized(
        rewards_R, group_R, epsilon=settings.epsilon, std=settings.std_level
    )
    return advantages_R.masked_fill(_quiet(rewards_R, group_R, settings), 0.0)


def _quiet(rewards_R: Tensor, group_R: Tensor, settings: TrainerSettings) -> Tensor:
    """Whose group has rewards so near each other that they teach nothing; shape [R]."""
    if settings.std_threshold is None or settings.advantage not in NORMALIZED:
        return torch.zeros(len(rewards_R), dtype=torch.bool)
    return (group_std(rewards_R, group_R) <= settings.std_threshold)[group_R]


def _of_calls(
    rewards_C: Tensor, rollout_C: Tensor, set_C: Tensor, settings: TrainerSettings
) -> Tensor:
    """Advantages inside sets, a rollout counting once in each."""
    match settings.advantage:
        case "grpo" | "step_wise_grpo":
            return call_normalized(
                rewards_C, rollout_C, set_C, epsilon=settings.epsilon, std=settings.std_level
            )
        case "rloo":
            return leave_one_out(rewards_C, rollout_C, set_C)
        case "opmd":
            return mirror_descent(
                rewards_C,
                rollout_C,
                set_C,
                baseline=settings.opmd_baseline,
                tau=settings.opmd_baseline_tau,
            )
        case "asymre":
            return shifted_mean(rewards_C, rollout_C, set_C, shift=settings.baseline_shift)
        case "reinforce":
            return rewards_C
        case "best_of_group":
            # The others were left out when the batch was built.
            return torch.ones_like(rewards_C)
        case "reinforceplusplus" | "ppo" | "on_policy_distill" | "none":
            raise TrainingError(f"{settings.advantage} does not compare sets of rewards")
