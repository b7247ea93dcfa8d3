"""A batch with the advantage of every trained token, and the inputs of a micro-batch's loss.

Which call follows which is read from token ids (`tuner.traces.branches`) among the trained calls. A
leaf ends the episode and gets the rollout's reward; a call with its own reward also gets that, at
its end. So the last calls of a sub-agent and of the main agent both get the rollout's reward. If
the workflow set the gain of each call (`Row.gained`), only that counts. Rows of a call that a mask
cut are one call.

`gigpo` is for agents that may be shown nothing but the current observation, so that no prompt
continues another: there the calls of a rollout follow each other in the order of their commitment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tuner.config import RunConfig
from tuner.config.algorithms import (
    AdvantageArgs,
    DistillAdvantage,
    GiGPOAdvantage,
    PPOAdvantage,
    ReinforcePlusPlusAdvantage,
    TreeAdvantage,
)
from tuner.config.schema import AlgorithmSection
from tuner.engines.grammar import to_device
from tuner.errors import TrainingError
from tuner.traces import successors
from tuner.traces.tree import IntArray
from tuner.training.advantages import (
    compared,
    distilled,
    gae,
    group_in_group,
    quiet,
    turn_returns,
    whitened,
    whitened_returns,
)
from tuner.training.batch import Batch, Row
from tuner.training.forks import Piece, tree_advantages
from tuner.training.forward.head import TokenLogprobs
from tuner.training.losses import KL_ESTIMATORS, Tokens


@dataclass(frozen=True)
class ScoredBatch:
    """A batch with the inputs of the loss.

    Attributes:
        advantages: One tensor [T_row] for each of the N rows.
        ref_logp: N tensors of the reference's log-probs, one per row, of shape [T_row].
        proximal: Log-probs of the policy that the step begins with, likewise, if they are known
            and need not be computed.
        values, returns: The critic's values and their targets, likewise; for PPO.
    """

    batch: Batch
    advantages: tuple[Tensor, ...]
    ref_logp: tuple[Tensor, ...] | None = None
    proximal: tuple[Tensor, ...] | None = None
    values: tuple[Tensor, ...] = ()
    returns: tuple[Tensor, ...] = ()

    @property
    def advantages_N(self) -> Tensor:
        """The mean advantage of each row's tokens, shape [N]; most algorithms give all the same."""
        if not self.advantages:
            return self.batch.rewards_R.new_zeros(0)
        return torch.stack([advantage_T.mean() for advantage_T in self.advantages])


def tokens_of(
    scored: ScoredBatch,
    indices: Sequence[int],
    current: TokenLogprobs,
    *,
    weights_N: Tensor,
    proximal: Sequence[Tensor] | None,
    step: int,
) -> Tokens:
    """Inputs of the loss of one micro-batch.

    Args:
        indices: Its rows; all rows of a call if the loss looks at sequences.
        current: Log-probs of their completions under the current weights.
        weights_N: Weight of each token of each row. They belong to the whole step, so the sum over
            micro-batches does not depend on how it was cut.
        proximal: Log-probs of the policy that the step began with, [T_row] for each row of the
            batch; None if they are the recorded ones.
        step: Number of updates that policy had seen.
    """
    rows = [scored.batch.rows[i] for i in indices]
    logp_T, device = current.logp_T, current.logp_T.device
    lengths = [len(row.completion_ids) for row in rows]
    calls, call_N = np.unique(scored.batch.call_N.numpy()[list(indices)], return_inverse=True)

    def gathered(values: Sequence[Tensor] | None) -> Tensor | None:
        return None if values is None else torch.cat([values[i] for i in indices]).to(logp_T)

    def moved(values: Any) -> Tensor:
        return to_device(np.asarray(values, dtype=np.float64), device).to(logp_T.dtype)

    return Tokens(
        logp_T=logp_T,
        entropy_T=current.entropy_T,
        recorded_T=moved([p for row in rows for p in row.logprobs]),
        advantages_T=moved(torch.cat([scored.advantages[i] for i in indices])),
        weights_T=moved(np.repeat(weights_N.numpy()[list(indices)], lengths)),
        call_T=to_device(np.repeat(call_N, lengths), device),
        calls=len(calls),
        staleness_T=to_device(np.concatenate([_staleness(row, step) for row in rows]), device),
        proximal_T=gathered(proximal),
        ref_T=gathered(scored.ref_logp),
    )


def _staleness(row: Row, step: int) -> IntArray:
    """Steps between the policy that sampled each token and the one of `step`, shape [T]; at least 1
    for a foreign row, of which no more is known."""
    if not row.versions:
        return np.zeros(len(row.completion_ids), dtype=np.int64)
    staleness = step - np.array(row.versions, dtype=np.int64)
    return np.maximum(staleness, 1) if row.foreign else staleness


def call_returns(
    batch: Batch, discount: float, penalties: Sequence[Tensor] | None = None
) -> Tensor:
    """`G = own reward + [leaf] rollout's reward + discount * mean of G over the calls that follow`.

    Args:
        discount: From one call to the next (`tuner.algorithm.turn_discount`).
        penalties: Penalty of each token, [T_row] for each row; subtracted from its call's reward.

    Returns:
        One for each row, shape [N], float64.
    """
    return _returns(batch, _successors(batch), discount, penalties)[1]


def _returns(
    batch: Batch,
    after: Sequence[Sequence[int]],
    discount: float,
    penalties: Sequence[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Gain and return of each row if the rows `after` it follow it, [N] each, float64."""
    gained_N = _gained(batch, after)
    if penalties is not None:
        gained_N = gained_N - torch.stack([charge_T.sum() for charge_T in penalties])
    within_N = _continued(batch, after)
    discounts = [1.0 if within else discount for within in within_N]
    return gained_N, turn_returns(gained_N, after, discounts)


def critic_advantages(
    batch: Batch,
    config: RunConfig,
    values: Sequence[Tensor],
    penalties: Sequence[Tensor] | None = None,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """PPO's advantages, whitened over all tokens of the step, and the returns for the critic.

    Args:
        values: Value of the state in which each token was sampled, [T_row] for each row.
        penalties: Penalty of each token.

    Returns:
        N tensors [T_row] each, float64.
    """
    after = _successors(batch)
    rewards = []
    for row, gained in enumerate(_gained(batch, after).tolist()):
        length = len(batch.rows[row].completion_ids)
        rewards_T = torch.zeros(length, dtype=torch.float64)
        rewards_T[-1] = gained
        rewards.append(rewards_T if penalties is None else rewards_T - penalties[row])
    assert isinstance(config.algorithm.advantage, PPOAdvantage), "only ppo has a critic"
    advantages, returns = gae(rewards, values, after, config.algorithm.advantage)
    return whitened(advantages), returns


def _successors(batch: Batch) -> tuple[tuple[int, ...], ...]:
    return successors(batch.rows, [row.rollout for row in batch.rows])


def _gained(batch: Batch, after: Sequence[Sequence[int]]) -> Tensor:
    """Gain of each row at its end, shape [N], float64."""
    rewards_R = batch.rewards_R.tolist()
    gained: list[float] = []
    for row, follow, within in zip(batch.rows, after, _continued(batch, after), strict=True):
        own = row.reward or 0.0 if row.gained is None else row.gained
        ends = row.gained is None and not follow
        gained.append((0.0 if within else own) + (rewards_R[row.rollout] if ends else 0.0))
    return torch.tensor(gained, dtype=torch.float64)


def _continued(batch: Batch, after: Sequence[Sequence[int]]) -> list[bool]:
    """Whether a row is part of a masked call that continues after it."""
    call_N = batch.call_N.tolist()
    return [
        any(call_N[follower] == call for follower in follow)
        for call, follow in zip(call_N, after, strict=True)
    ]


def row_advantages(
    batch: Batch,
    config: RunConfig,
    ref_logp: tuple[Tensor, ...] | None = None,
    teacher_logp: tuple[Tensor, ...] | None = None,
) -> tuple[Tensor, ...]:
    """The advantage of every trained token, one tensor [T_row] for each of the N rows.

    A rollout's reward is compared inside its group and applies to all of its calls. A call with its
    own reward is compared with its peers instead (`Row.peers`). A KL penalty is subtracted from the
    reward that covers its token: a rollout's reward covers the calls without rewards of their own.
    `reinforceplusplus` subtracts it token by token.

    With `turn_discount`, the returns of calls (`call_returns`) are compared inside the group;
    `gigpo` compares them inside states as well.

    Args:
        ref_logp: The reference's log-probs, one tensor for each row; for the KL penalty.
        teacher_logp: The teacher's, in the same form; for distillation, which reads no rewards.

    Raises:
        TrainingError: Calls have rewards of their own, and the algorithm cannot use them, or there
            is no teacher.
    """
    if not batch.rows:
        return ()
    args = config.algorithm.advantage
    if isinstance(args, DistillAdvantage):
        if teacher_logp is None:
            raise TrainingError("on_policy_distill needs a teacher (PolicyTrainer(teacher=...))")
        told = all(row.teacher_prompt_ids for row in batch.rows)
        if config.algorithm.advantage_fn == "prompt_distill" and not told:
            raise TrainingError(
                "prompt_distill needs the teacher's prompt of each call "
                "(build_batch(teacher_prompt=...))"
            )
        return tuple(
            distilled(
                teacher_T.cpu().double(), torch.tensor(row.logprobs, dtype=torch.float64), args
            )
            for row, teacher_T in zip(batch.rows, teacher_logp, strict=True)
        )
    if isinstance(args, TreeAdvantage):
        return _of_tree(batch, args)
    penalties = kl_penalties(batch, config.algorithm, ref_logp)
    if isinstance(args, ReinforcePlusPlusAdvantage):
        return whitened_returns(row_rewards(batch), _lengths(batch), args, penalties=penalties)
    if isinstance(args, GiGPOAdvantage):
        advantages_N = state_advantages(batch, args, penalties)
    else:
        advantages_N = _compared(batch, config, penalties)
    return tuple(
        advantage.expand(length)
        for advantage, length in zip(advantages_N, _lengths(batch), strict=True)
    )


def _of_tree(batch: Batch, args: TreeAdvantage) -> tuple[Tensor, ...]:
    """Advantages times weights of tokens in trees of branching rollouts."""
    if any(row.peers is not None or row.gained is not None for row in batch.rows):
        raise TrainingError(
            "algorithm.advantage_fn tree compares the outcomes of rollouts and cannot use rewards "
            "of single calls; give rewards to rollouts only, or set algorithm.algorithm_type to "
            "multi_step_grpo"
        )
    ids = batch.ids
    found = tree_advantages(
        dict(zip(ids, batch.rewards_R.tolist(), strict=True)),
        dict(zip(ids, batch.group_R.tolist(), strict=True)),
        batch.origins,
        [
            Piece(ids[row.rollout], row.place, row.begun, len(row.completion_ids))
            for row in batch.rows
        ],
        normalize_forks=args.normalize in ("forks", "all"),
        normalize_trunks=args.normalize in ("trunks", "all"),
        epsilon=args.epsilon,
    )
    both = zip(found.advantages, found.weights, strict=True)
    return tuple(torch.from_numpy(advantages * weights) for advantages, weights in both)


def state_advantages(
    batch: Batch, args: GiGPOAdvantage, penalties: Sequence[Tensor] | None = None
) -> Tensor:
    """GiGPO's advantage of each row, shape [N], float64."""
    rollouts = [row.rollout for row in batch.rows]
    rollout_N = torch.tensor(rollouts, dtype=torch.long)
    last = [here != then for here, then in pairwise([*rollouts, None])]
    after = [() if end else (row + 1,) for row, end in enumerate(last)]
    gained_N, returns_N = _returns(batch, after, args.gamma, penalties)
    episodes_R = gained_N.new_zeros(len(batch.ids)).index_add(0, rollout_N, gained_N)
    # A rollout whose tokens are all too old still counts in the baseline of the others.
    is_silent_R = torch.ones(len(batch.ids), dtype=torch.bool).index_fill(0, rollout_N, False)
    episodes_R = torch.where(is_silent_R, batch.rewards_R, episodes_R)
    first_C, call_N = _calls(batch, torch.ones(len(batch.rows), dtype=torch.bool))
    advantages_C = group_in_group(
        returns_N[first_C], states(batch), rollout_N[first_C], episodes_R, batch.group_R, args
    )
    return advantages_C[call_N]


def states(batch: Batch) -> Tensor:
    """Index of each call's state, shape [C]: calls of a group share one if the workflow named the
    same and their roles are equal, or if it named none and their prompts are equal."""
    first: dict[int, Row] = {}
    for call, row in zip(batch.call_N.tolist(), batch.rows, strict=True):
        first.setdefault(call, row)
    groups, found = batch.group_R.tolist(), dict[Any, int]()
    keys = (
        (groups[row.rollout], row.state or row.prompt_ids[: len(row.prompt_ids) - row.begun])
        for row in first.values()
    )
    return torch.tensor([found.setdefault(key, len(found)) for key in keys], dtype=torch.long)


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
    batch: Batch, algorithm: AlgorithmSection, ref_logp: tuple[Tensor, ...] | None
) -> tuple[Tensor, ...] | None:
    """Penalty of each token for its distance to the reference, [T_row] for each row."""
    if not algorithm.penalizes_kl or ref_logp is None:
        return None
    estimate, coef = KL_ESTIMATORS[algorithm.kl_penalty_fn], algorithm.kl_penalty.kl_coef
    # One transfer for all rows.
    on_cpu = torch.cat(ref_logp).cpu().double().split(_lengths(batch))
    return tuple(
        coef * estimate(torch.tensor(row.logprobs, dtype=torch.float64), ref_T)
        for row, ref_T in zip(batch.rows, on_cpu, strict=True)
    )


def _compared(batch: Batch, config: RunConfig, penalties: tuple[Tensor, ...] | None) -> Tensor:
    """One advantage for each row, from rewards that are compared with others; shape [N]."""
    args = config.algorithm.advantage
    if config.tuner.algorithm.turn_discount is not None:
        return _of_turns(batch, args, config.tuner.algorithm.turn_discount, penalties)
    rewards_R = batch.rewards_R.clone()
    rollout_N = torch.tensor([row.rollout for row in batch.rows], dtype=torch.long)
    own_N = torch.tensor([row.peers is not None for row in batch.rows])
    row_rewards_N = row_rewards(batch)
    if penalties is not None:
        charge_N = torch.stack([charge_T.sum() for charge_T in penalties]).to(rewards_R)
        call_N = batch.call_N
        of_call_C = charge_N.new_zeros(len(batch.rows)).index_add(0, call_N, charge_N)
        row_rewards_N = row_rewards_N - of_call_C[call_N]
        # Calls with rewards of their own already include these.
        rewards_R = rewards_R.index_add(0, rollout_N, -charge_N.masked_fill(own_N, 0.0))
    advantages_R = compared(args, rewards_R, torch.arange(len(rewards_R)), batch.group_R)
    advantages_R = advantages_R.masked_fill(quiet(rewards_R, batch.group_R, args), 0.0)
    advantages_N = advantages_R[rollout_N]
    if own_N.any():
        own_C, place_N = _calls(batch, own_N)
        peers_C = torch.tensor([batch.rows[row].peers for row in own_C.tolist()])
        of_calls_C = compared(args, row_rewards_N[own_C], rollout_N[own_C], peers_C)
        advantages_N[own_N] = of_calls_C[place_N]
    return advantages_N


def _calls(batch: Batch, some_N: Tensor) -> tuple[Tensor, Tensor]:
    """The calls of some rows: the first row of each, shape [C], and the call of each row."""
    rows = some_N.nonzero()[:, 0]
    _, first, place = np.unique(batch.call_N[rows].numpy(), return_index=True, return_inverse=True)
    return rows[first], torch.from_numpy(place)


def _of_turns(
    batch: Batch, args: AdvantageArgs, discount: float, penalties: tuple[Tensor, ...] | None
) -> Tensor:
    """Advantages of calls by their returns, inside each group; shape [N]."""
    returns_N = call_returns(batch, discount, penalties)
    first_C, call_N = _calls(batch, torch.ones(len(batch.rows), dtype=torch.bool))
    rollout_N = torch.tensor([row.rollout for row in batch.rows], dtype=torch.long)
    # A rollout whose tokens are all too old still counts in the baseline of the others.
    is_silent_R = torch.ones(len(batch.rewards_R), dtype=torch.bool)
    is_silent_R[rollout_N] = False
    silent = is_silent_R.nonzero()[:, 0]
    rollout_C = torch.cat([rollout_N[first_C], silent])
    advantages_C = compared(
        args,
        torch.cat([returns_N[first_C], batch.rewards_R[silent]]),
        rollout_C,
        batch.group_R[rollout_C],
    )
    advantages_N = advantages_C[call_N]
    return advantages_N.masked_fill(quiet(batch.rewards_R, batch.group_R, args)[rollout_N], 0)
