"""Advantages from rewards, inside a group of rollouts and along the calls of a rollout.

`R` is the number of rollouts in a batch, `C` that of rewards. Rewards belong to rollouts, not to
calls: however many calls a rollout made, it counts once in its group's baseline. Membership is
given by indices and never by position, so the order does not matter.

The functions of `(rewards_C, rollout_C, set_C)` serve both kinds of reward: one per rollout,
compared inside its group (`rollout_C` counts 0 .. R-1), and one per call that has its own reward,
compared with its peers. In the second case a rollout enters its set's baseline once, with the mean
of its calls' rewards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from statistics import fmean

import torch
from torch import Tensor

from tuner.config.algorithms import (
    ADVANTAGES,
    AdvantageArgs,
    AsymREAdvantage,
    BestOfGroupAdvantage,
    DistillAdvantage,
    GiGPOAdvantage,
    GRPOAdvantage,
    OPMDAdvantage,
    PPOAdvantage,
    ReinforceAdvantage,
    ReinforcePlusPlusAdvantage,
    RLOOAdvantage,
)
from tuner.errors import TrainingError


def compared(args: AdvantageArgs, rewards_C: Tensor, rollout_C: Tensor, set_C: Tensor) -> Tensor:
    """Advantages of rewards inside sets, by the method of `args`; a rollout counts once in each
    set.

    Args:
        rewards_C: One reward for each call.
        rollout_C: Index of each call's rollout.
        set_C: Index (0 ..) of the set of calls that each is compared with.

    Returns:
        Shape [C], in the dtype of `rewards_C`.

    Raises:
        TrainingError: This advantage does not compare sets of rewards.
        ValueError: A set has rewards of fewer than two rollouts and needs a baseline.
    """
    match args:
        case GRPOAdvantage():
            return call_normalized(rewards_C, rollout_C, set_C, args)
        case RLOOAdvantage():
            return leave_one_out(rewards_C, rollout_C, set_C)
        case OPMDAdvantage():
            return mirror_descent(rewards_C, rollout_C, set_C, args)
        case AsymREAdvantage():
            return shifted_mean(rewards_C, rollout_C, set_C, args)
        case ReinforceAdvantage():
            return rewards_C
        case BestOfGroupAdvantage():
            # The other rollouts were dropped when the batch was built.
            return torch.ones_like(rewards_C)
        case _:
            name = next(name for name, part in ADVANTAGES.items() if type(args) is part)
            raise TrainingError(f"{name} does not compare sets of rewards")


def call_normalized(
    rewards_C: Tensor,
    rollout_C: Tensor,
    set_C: Tensor,
    args: GRPOAdvantage = GRPOAdvantage(),
) -> Tensor:
    """`A_c = (r_c - mean(set)) / (std(set) + epsilon)`, GRPO's outcome advantage.

    A rollout counts once in mean and variance, with the mean of its calls' rewards and of their
    squared distances, so if rewards differ inside rollouts but not between them nothing is divided
    by 0.

    Source: DeepSeekMath (arXiv 2402.03300) section 4.1.2; unbiased standard deviation, as
    Trinity-RFT's `step_wise_grpo` computes it.

    Args:
        rewards_C: One reward for each call.
        rollout_C: Index of each call's rollout.
        set_C: Index (0 ..) of the set of calls that each is compared with.
        args: `epsilon`, and the standard deviation to divide by: the set's, that of all sets
            (LitePPO, arXiv 2508.08221), or none (Dr.GRPO, arXiv 2503.20783).

    Returns:
        Advantages, shape [C], in the dtype of `rewards_C`.

    Raises:
        ValueError: A set has rewards of fewer than two rollouts, so it has no baseline.
    """
    sets = _sets(rewards_C, rollout_C, set_C)
    centered_C = rewards_C - sets.mean_S[set_C]
    if args.std_cal_level == "none":
        return centered_C
    if args.std_cal_level == "batch":
        squares_P = sets.means((rewards_C - sets.mean_P.mean()) ** 2)
        return centered_C / ((squares_P.sum() / (len(squares_P) - 1)).sqrt() + args.epsilon)
    squares_P = sets.means(centered_C**2)
    variance_S = rewards_C.new_zeros(len(sets.mean_S)).index_add(0, sets.set_P, squares_P)
    std_S = (variance_S / (sets.rollouts_S - 1).clamp(min=1)).sqrt()
    return centered_C / (std_S[set_C] + args.epsilon)


def leave_one_out(rewards_C: Tensor, rollout_C: Tensor, set_C: Tensor) -> Tensor:
    """`A_c = r_c - mean of the other rollouts of the set`, RLOO's advantage, shape [C].

    Source: RLOO (Ahmadian et al., arXiv 2402.14740).

    Raises:
        ValueError: A set has rewards of fewer than two rollouts, so it has no baseline.
    """
    sets = _sets(rewards_C, rollout_C, set_C)
    count_S = sets.rollouts_S
    others_P = sets.mean_S[sets.set_P] * count_S[sets.set_P] - sets.mean_P
    others_P = others_P / (count_S[sets.set_P] - 1).clamp(min=1)
    return rewards_C - others_P[sets.cell_C]


def mirror_descent(
    rewards_C: Tensor,
    rollout_C: Tensor,
    set_C: Tensor,
    args: OPMDAdvantage = OPMDAdvantage(),
) -> Tensor:
    """`A_c = r_c - b(set)`, OPMD's advantage, shape [C].

    `b` is the mean, or `tau * log(mean(exp(r / tau)))` over the rollouts of the set.

    Source: Kimi k1.5 (arXiv 2501.12599) section 2.3.2, as Trinity-RFT's `opmd` computes it.

    Raises:
        ValueError: A set has rewards of fewer than two rollouts, so it has no baseline.
    """
    sets = _sets(rewards_C, rollout_C, set_C)
    baseline_S = sets.mean_S
    if args.opmd_baseline == "logavgexp":
        # The largest reward is subtracted before exp, so that nothing overflows.
        top = sets.mean_P.max()
        power_P = ((sets.mean_P - top) / args.tau).exp()
        mean_S = rewards_C.new_zeros(len(baseline_S)).index_add(0, sets.set_P, power_P)
        baseline_S = args.tau * (mean_S / sets.rollouts_S.clamp(min=1)).log() + top
    return rewards_C - baseline_S[set_C]


def shifted_mean(
    rewards_C: Tensor,
    rollout_C: Tensor,
    set_C: Tensor,
    args: AsymREAdvantage = AsymREAdvantage(),
) -> Tensor:
    """`A_c = r_c - (mean(set) + baseline_shift)`, AsymRE's advantage, shape [C].

    A shift below 0 weighs good rollouts more than bad ones.

    Source: AsymRE (arXiv 2506.20520).

    Raises:
        ValueError: A set has rewards of fewer than two rollouts, so it has no baseline.
    """
    sets = _sets(rewards_C, rollout_C, set_C)
    return rewards_C - (sets.mean_S[set_C] + args.baseline_shift)


def group_in_group(
    returns_C: Tensor,
    state_C: Tensor,
    rollout_C: Tensor,
    episodes_R: Tensor,
    group_R: Tensor,
    args: GiGPOAdvantage = GiGPOAdvantage(),
) -> Tensor:
    """`A_c = norm(R of its rollout, in its group) + omega * norm(G_c, in its state)`, shape [C].

    `norm(x) = (x - mean) / (std + epsilon)` with `fnorm: std`, `(x - mean) / (1 + epsilon)` with
    `none`. In a state every call counts once, also several of one rollout; a call that is alone in
    its state gets 0 there.

    Source: GiGPO (arXiv 2505.10978) eq. 3, 6 to 8; unbiased standard deviation and epsilon as
    Trinity-RFT's `gigpo` computes it.

    Args:
        returns_C: Discounted sum of what each call and those after it gained, G.
        state_C: Index (0 ..) of the state of each call, of one group only.
        rollout_C: Index of each call's rollout.
        episodes_R: What each rollout gained in all, R.
        group_R: Index of each rollout's group.
    """
    episode_R = _standardized(episodes_R, group_R, args)
    return episode_R[rollout_C] + args.omega * _standardized(returns_C, state_C, args)


def _standardized(values_V: Tensor, set_V: Tensor, args: GiGPOAdvantage) -> Tensor:
    """Each value minus the mean of its set, divided by the set's spread; shape [V]."""
    zeros_S = values_V.new_zeros(int(set_V.max()) + 1)
    count_S = zeros_S.index_add(0, set_V, torch.ones_like(values_V)).clamp(min=1)
    centered_V = values_V - (zeros_S.index_add(0, set_V, values_V) / count_S)[set_V]
    spread_S = torch.ones_like(zeros_S)
    if args.fnorm == "std":
        squares_S = zeros_S.index_add(0, set_V, centered_V**2)
        spread_S = (squares_S / (count_S - 1).clamp(min=1)).sqrt()
    return centered_V / (spread_S[set_V] + args.epsilon)


def whitened_returns(
    rewards_N: Tensor,
    lengths: Sequence[int],
    args: ReinforcePlusPlusAdvantage = ReinforcePlusPlusAdvantage(),
    *,
    penalties: Sequence[Tensor] | None = None,
) -> tuple[Tensor, ...]:
    """REINFORCE++'s advantages of single tokens, normalised over all tokens of the batch.

    The reward of a row belongs to its last token, and a penalty is subtracted at each token:

        R_t = gamma^(T - 1 - t) * reward - sum_{k >= t} gamma^(k - t) * penalty_k
        A_t = (R_t - mean(R)) / sqrt(var(R) + 1e-8)

    Source: REINFORCE++ (arXiv 2501.03262); `whitened` as in verl and Trinity-RFT.

    Args:
        rewards_N: Reward of each row.
        lengths: Trained tokens of each row, all above 0.
        args: `gamma`, the discount from one token to the next.
        penalties: Penalty of each token, one tensor [T_row] for each row.

    Returns:
        N tensors of shape [T_row], in the dtype of `rewards_N`.
    """
    returns: list[Tensor] = []
    for row, (reward, length) in enumerate(zip(rewards_N.tolist(), lengths, strict=True)):
        gained = [0.0] * length if penalties is None else [-p for p in penalties[row].tolist()]
        gained[-1] += reward
        for t in range(length - 2, -1, -1):
            gained[t] += args.gamma * gained[t + 1]
        returns.append(torch.tensor(gained, dtype=rewards_N.dtype))
    return whitened(returns)


def whitened(values: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """`(x - mean(x)) / sqrt(var(x) + 1e-8)` over all tokens of all rows, N tensors [T_row].

    Source: verl's and Trinity-RFT's `masked_whiten`, with its unbiased variance; 0 for a single
    token.
    """
    all_T = torch.cat(list(values))
    variance = all_T.var() if len(all_T) > 1 else all_T.new_zeros(())
    return tuple((one - all_T.mean()) * torch.rsqrt(variance + 1e-8) for one in values)


def distilled(
    teacher_logp_T: Tensor, student_logp_T: Tensor, args: DistillAdvantage = DistillAdvantage()
) -> Tensor:
    """`A_t = kl_coef * (teacher_logp - student_logp)` of each sampled token, shape [T].

    Averaged over the student's samples this is `-kl_coef * KL(student || teacher)`: the teacher's
    log-probs replace rewards of tokens.

    Source: on-policy distillation (Thinking Machines, 2025; Agarwal et al., arXiv 2306.13649),
    as Trinity-RFT's `on_policy_distill` computes it.

    Args:
        teacher_logp_T: The teacher's log-probs of the student's tokens.
        student_logp_T: Log-probs that the tokens were sampled with.
        args: `kl_coef`.
    """
    return args.kl_coef * (teacher_logp_T - student_logp_T)


@dataclass(frozen=True)
class _Sets:
    """Rewards grouped by the set that they are compared in; P counts existing pairs of set and
    rollout.

    Attributes:
        mean_P: Mean reward of a rollout's calls in a set.
        set_P: The set of each pair.
        cell_C: The pair of each reward.
        rollouts_S: Number of rollouts in each set.
        mean_S: Mean of a set, each rollout counting once.
        calls_P: Number of rewards of each pair.
    """

    mean_P: Tensor
    set_P: Tensor
    cell_C: Tensor
    rollouts_S: Tensor
    mean_S: Tensor
    calls_P: Tensor

    def means(self, values_C: Tensor) -> Tensor:
        """The mean over a rollout's calls in a set, shape [P]."""
        zeros_P = torch.zeros_like(self.calls_P)
        return zeros_P.index_add(0, self.cell_C, values_C) / self.calls_P


def _sets(rewards_C: Tensor, rollout_C: Tensor, set_C: Tensor) -> _Sets:
    pairs, cell_C = torch.stack([set_C, rollout_C]).unique(dim=1, return_inverse=True)
    zeros_P = rewards_C.new_zeros(pairs.shape[1])
    count_P = zeros_P.index_add(0, cell_C, torch.ones_like(rewards_C))
    mean_P = zeros_P.index_add(0, cell_C, rewards_C) / count_P
    zeros_S = rewards_C.new_zeros(int(set_C.max()) + 1)
    rollouts_S = zeros_S.index_add(0, pairs[0], torch.ones_like(mean_P))
    if bool((rollouts_S == 1).any()):
        raise ValueError("a group of one rollout has no baseline; drop it first")
    mean_S = zeros_S.index_add(0, pairs[0], mean_P) / rollouts_S.clamp(min=1)
    return _Sets(mean_P, pairs[0], cell_C, rollouts_S, mean_S, count_P)


def group_std(rewards_R: Tensor, group_R: Tensor) -> Tensor:
    """Unbiased standard deviation of each group's rewards, shape [G]."""
    return torch.stack([rewards_R[group_R == g].std() for g in range(int(group_R.max()) + 1)])


def quiet(rewards_R: Tensor, group_R: Tensor, args: AdvantageArgs) -> Tensor:
    """Rollouts whose group's rewards are too close to each other to teach anything; shape [R]."""
    if not isinstance(args, GRPOAdvantage) or args.std_threshold is None:
        return torch.zeros(len(rewards_R), dtype=torch.bool)
    return (group_std(rewards_R, group_R) <= args.std_threshold)[group_R]


def turn_returns(
    rewards_C: Tensor, successors: Sequence[Sequence[int]], discounts: Sequence[float]
) -> Tensor:
    """`G_c = r_c + discount_c * mean of G over the calls that follow c`.

    Args:
        rewards_C: The gain of each call; that of a leaf includes its rollout's reward.
        successors: For each call the calls that follow it.
        discounts: Discount from each call to those that follow it.

    Returns:
        Shape [C], in the dtype of `rewards_C`.
    """
    returns = rewards_C.tolist()
    for call in _backwards(successors):
        if successors[call]:
            returns[call] += discounts[call] * fmean(returns[after] for after in successors[call])
    return torch.tensor(returns, dtype=rewards_C.dtype)


def gae(
    rewards: Sequence[Tensor],
    values: Sequence[Tensor],
    successors: Sequence[Sequence[int]],
    args: PPOAdvantage = PPOAdvantage(),
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Generalised advantage estimates of single tokens, continued through the calls of a rollout.

        delta_t = r_t + gamma V_{t+1} - V_t,   A_t = delta_t + gamma lam A_{t+1},   R_t = A_t + V_t

    After the last token of a call come the first tokens of the calls that follow it: V and A there
    are the means over these calls, and 0 after a leaf.

    Source: GAE (arXiv 1506.02438) eq. 11, 12 and 16.

    Args:
        rewards: Reward of each token, one tensor [T_c] for each of the C calls, T_c > 0.
        values: Value of the state in which each token was sampled, likewise.
        successors: For each call the calls that follow it.
        args: `gamma`, the discount from one token to the next; `lam`: with 1 the estimate uses the
            rewards alone, with 0 the next value.

    Returns:
        Advantages, and the returns that values are trained towards: C tensors [T_c] each, float64.
    """
    first: dict[int, tuple[float, float]] = {}  # value and advantage of a call's first token
    advantages: dict[int, Tensor] = {}
    for call in _backwards(successors):
        value = advantage = 0.0
        if successors[call]:
            value = fmean(first[after][0] for after in successors[call])
            advantage = fmean(first[after][1] for after in successors[call])
        found: list[float] = []
        steps = list(zip(rewards[call].tolist(), values[call].tolist(), strict=True))
        for r, v in reversed(steps):
            advantage = r + args.gamma * value - v + args.gamma * args.lam * advantage
            value = v
            found.append(advantage)
        first[call] = (value, advantage)
        advantages[call] = torch.tensor(found[::-1], dtype=torch.float64)
    in_order = tuple(advantages[call] for call in range(len(values)))
    returns = tuple(a + v.cpu().double() for a, v in zip(in_order, values, strict=True))
    return in_order, returns


def _backwards(successors: Sequence[Sequence[int]]) -> Iterator[int]:
    """Calls in an order in which each comes after those that follow it."""
    return iter(TopologicalSorter(dict(enumerate(successors))).static_order())
