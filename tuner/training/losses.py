"""Losses of the policy and the critic, KL estimates, and the weight of each token in a step's loss.

Everywhere `logp_T` are the log-probs of the T sampled tokens under the current policy, `old_logp_T`
those in the denominator of the ratio (no gradient), `r = exp(logp - old_logp)`, and `advantages_T`
the tokens' advantages A. `sg` stops the gradient. A sequence is one call: its completion tokens.

Estimates of KL(policy || reference) are per token, from its two log-probs, with names and
formulas after Schulman, "Approximating KL Divergence" (2020), as Trinity-RFT uses them.

`micro_batch_loss` puts the parts together. Up to three policies are involved: the one that sampled
a token, the one that the step began with, and the one being trained. PPO's clip holds the current
policy near the one that a step began with, the *proximal* policy. If the token was sampled by
another policy (older weights, another engine), the *behaviour* policy, the loss is weighted by `w =
proximal / behaviour` (decoupled PPO, arXiv 2110.00641; AReaL, arXiv 2505.24298); the weights have
no gradient.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from tuner.config.algorithms import (
    Aggregation,
    CISPOLoss,
    DPOLoss,
    GSPOLoss,
    ImportanceSamplingLoss,
    OPMDLoss,
    PolicyLossArgs,
    PPOLoss,
    SAPOLoss,
    SFTLoss,
    TOPRLoss,
)
from tuner.config.schema import AlgorithmExtras, AlgorithmSection
from tuner.errors import TrainingError

logger = logging.getLogger("tuner")

# exp(20) is 5e8: beyond it the ratio is clipped anyway and only its overflow would matter.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class PolicyLoss:
    """Per-token loss, ratio (no gradient) and whether a bound changed the gradient; [T] each."""

    loss_T: Tensor
    ratio_T: Tensor
    clipped_T: Tensor


def policy_loss(
    args: PolicyLossArgs,
    logp_T: Tensor,
    old_logp_T: Tensor,
    advantages_T: Tensor,
    sequence_T: Tensor,
    sequences: int,
) -> PolicyLoss:
    """The loss given by the type of `args`, one value for each of T tokens.

    Raises:
        TrainingError: It is not a loss of tokens.
    """
    match args:
        case PPOLoss():
            return ppo_clip(logp_T, old_logp_T, advantages_T, args)
        case GSPOLoss():
            return sequence_clip(
                logp_T, old_logp_T, advantages_T, sequence_T, args, sequences=sequences
            )
        case CISPOLoss():
            return cispo(logp_T, old_logp_T, advantages_T, args)
        case SAPOLoss():
            return sapo(logp_T, old_logp_T, advantages_T, args)
        case OPMDLoss():
            return opmd(logp_T, old_logp_T, advantages_T, args)
        case TOPRLoss():
            return topr(logp_T, old_logp_T, advantages_T, args)
        case ImportanceSamplingLoss():
            return importance_sampling(logp_T, old_logp_T, advantages_T)
        case SFTLoss():
            return likelihood(logp_T, old_logp_T)
        case _:
            raise TrainingError("dpo compares recorded answers, not tokens (dpo_update)")


def ppo_clip(
    logp_T: Tensor, old_logp_T: Tensor, advantages_T: Tensor, args: PPOLoss = PPOLoss()
) -> PolicyLoss:
    """PPO's clipped surrogate with dual clip.

    With `r = exp(logp - old_logp)`:

        L = max(-r A, -clip(r, 1 - low, 1 + high) A)
        L = min(L, -clip_ratio_c A)   where A < 0

    Source: PPO (arXiv 1707.06347) eq. 7; dual clip (arXiv 1912.09729) eq. 5.

    Args:
        logp_T: Log-probs of the sampled tokens under the current policy.
        old_logp_T: Log-probs under the policy that sampled them; no gradient.
        advantages_T: Advantage of each token's rollout.
        args: `low` and `high`, how far the ratio may leave 1, and `clip_ratio_c`, its bound for
            negative advantages.

    Returns:
        Loss, ratio, and whether the clip cut the token's gradient.
    """
    ratio_T = _ratio(logp_T, old_logp_T)
    plain_T = -advantages_T * ratio_T
    clipped_T = -advantages_T * ratio_T.clamp(1 - args.low, 1 + args.high)
    surrogate_T = torch.maximum(plain_T, clipped_T)
    bound_T = -advantages_T * args.clip_ratio_c
    dual = (advantages_T < 0) & (surrogate_T > bound_T)
    loss_T = torch.where(dual, bound_T, surrogate_T)
    return PolicyLoss(loss_T, ratio_T.detach(), (clipped_T > plain_T) | dual)


def sequence_clip(
    logp_T: Tensor,
    old_logp_T: Tensor,
    advantages_T: Tensor,
    sequence_T: Tensor,
    args: GSPOLoss = GSPOLoss(),
    *,
    sequences: int | None = None,
) -> PolicyLoss:
    """GSPO: the ratio of a sequence is the geometric mean of its tokens' ratios.

        s = exp(mean_t(logp - old_logp)),  s_t = sg(s) * exp(logp_t - sg(logp_t))
        L = max(-s_t A, -clip(s_t, 1 - low, 1 + high) A)

    Source: GSPO (arXiv 2507.18071) eq. 5 to 7, in the token form of eq. 13 and 14, which has the
    same value and, with one advantage per sequence, the same gradient.

    Args:
        sequence_T: Index of each token's sequence; all tokens of a sequence must be present.
        sequences: Their number, if the caller knows it; otherwise `sequence_T` is read, for which
            Python waits for the device.
    """
    if sequences is None:
        sequences = int(sequence_T.max()) + 1
    zeros_N = logp_T.new_zeros(sequences)
    count_N = zeros_N.index_add(0, sequence_T, torch.ones_like(logp_T)).clamp(min=1)
    difference_T = (logp_T - old_logp_T).detach()
    mean_N = zeros_N.index_add(0, sequence_T, difference_T) / count_N
    log_ratio_T = mean_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)[sequence_T]
    ratio_T = (logp_T - logp_T.detach() + log_ratio_T).exp()
    plain_T = -advantages_T * ratio_T
    clipped_T = -advantages_T * ratio_T.clamp(1 - args.low, 1 + args.high)
    return PolicyLoss(torch.maximum(plain_T, clipped_T), ratio_T.detach(), clipped_T > plain_T)


def cispo(
    logp_T: Tensor,
    old_logp_T: Tensor,
    advantages_T: Tensor,
    args: CISPOLoss = CISPOLoss(),
) -> PolicyLoss:
    """CISPO: `L = -sg(clip(r, 1 - low, 1 + high)) * A * logp`.

    The weight is clipped, never the gradient: every token contributes.

    Source: MiniMax-M1 (arXiv 2506.13585) eq. 4 and 5.
    """
    ratio_T = _ratio(logp_T, old_logp_T).detach()
    weight_T = ratio_T.clamp(1 - args.low, 1 + args.high)
    return PolicyLoss(-weight_T * advantages_T * logp_T, ratio_T, weight_T != ratio_T)


def sapo(
    logp_T: Tensor,
    old_logp_T: Tensor,
    advantages_T: Tensor,
    args: SAPOLoss = SAPOLoss(),
) -> PolicyLoss:
    """SAPO: `L = -4 / tau * sigmoid(tau (r - 1)) * A`, a soft gate instead of a clip.

    `tau` is `tau_pos` where A > 0, else `tau_neg`. The gradient goes through the ratio, as in the
    paper, so that at r = 1 it is the policy gradient.

    Source: SAPO (arXiv 2511.20347) eq. 5 and 6. Trinity-RFT multiplies the detached gate by `logp`
    instead.
    """
    ratio_T = _ratio(logp_T, old_logp_T)
    tau_T = torch.full_like(logp_T, args.tau_neg).masked_fill(advantages_T > 0, args.tau_pos)
    gate_T = torch.sigmoid(tau_T * (ratio_T - 1)) * 4 / tau_T
    return PolicyLoss(-gate_T * advantages_T, ratio_T.detach(), _nothing(logp_T))


def importance_sampling(logp_T: Tensor, old_logp_T: Tensor, advantages_T: Tensor) -> PolicyLoss:
    """`L = -r A`: the policy gradient (REINFORCE) with importance weights and no bound.

    Source: Williams (1992); Trinity-RFT's `importance_sampling`.
    """
    ratio_T = _ratio(logp_T, old_logp_T)
    return PolicyLoss(-ratio_T * advantages_T, ratio_T.detach(), _nothing(logp_T))


def opmd(
    logp_T: Tensor, old_logp_T: Tensor, advantages_T: Tensor, args: OPMDLoss = OPMDLoss()
) -> PolicyLoss:
    """`L = -A logp / (1 + tau)`, whichever policy sampled; `old_logp` only for the ratio's metric.

    Source: Kimi k1.5 (arXiv 2501.12599) section 2.3.2, as Trinity-RFT simplifies it.
    """
    ratio_T = _ratio(logp_T, old_logp_T).detach()
    return PolicyLoss(-advantages_T * logp_T / (1 + args.tau), ratio_T, _nothing(logp_T))


def topr(
    logp_T: Tensor, old_logp_T: Tensor, advantages_T: Tensor, args: TOPRLoss = TOPRLoss()
) -> PolicyLoss:
    """TOPR: `L = -sg(a) A logp` with `a = min(r, 1)` where A <= advantage_threshold, else 1.

    `old_logp` belongs to the policy that sampled. The ratio is per token, as in Trinity-RFT.

    Source: TOPR (arXiv 2503.14286), where the ratio is the whole answer's.
    """
    ratio_T = _ratio(logp_T, old_logp_T).detach()
    tapered_T = advantages_T <= args.advantage_threshold
    weight_T = torch.where(tapered_T, ratio_T.clamp(max=1), torch.ones_like(ratio_T))
    return PolicyLoss(-weight_T * advantages_T * logp_T, ratio_T, tapered_T & (ratio_T > 1))


def likelihood(logp_T: Tensor, old_logp_T: Tensor) -> PolicyLoss:
    """`L = -logp`: imitation of the sampled tokens; `old_logp` only for the ratio's metric."""
    return PolicyLoss(-logp_T, _ratio(logp_T, old_logp_T).detach(), _nothing(logp_T))


def clipped_value_loss(
    values_T: Tensor, old_values_T: Tensor, returns_T: Tensor, *, clip: float
) -> tuple[Tensor, Tensor]:
    """`L = max((V - R)^2, (V' - R)^2) / 2` with `V' = clip(V, V_old - clip, V_old + clip)`.

    Source: PPO2 (openai/baselines, `ppo2/model.py`); verl's `cliprange_value`.

    Args:
        values_T: Values under the current critic.
        old_values_T: The values that returns and advantages were computed with; no gradient.
        returns_T: Targets of the values.
        clip: How far a value may leave its old one.

    Returns:
        Loss, and whether the clip cut the token's gradient; [T] each.
    """
    near_T = torch.clamp(values_T, old_values_T - clip, old_values_T + clip)
    plain_T, clipped_T = (values_T - returns_T) ** 2, (near_T - returns_T) ** 2
    return torch.maximum(plain_T, clipped_T) / 2, clipped_T > plain_T


@dataclass(frozen=True)
class Preference:
    """P pairs; shape [P] each, without a gradient.

    Attributes:
        loss_P: Loss of each pair.
        slope_P: Derivative of its loss by `chosen - rejected`, at most 0 without label smoothing.
        chosen_reward_P, rejected_reward_P: `beta * (logp - ref)` of the two answers.
    """

    loss_P: Tensor
    slope_P: Tensor
    chosen_reward_P: Tensor
    rejected_reward_P: Tensor


def dpo(chosen_P: Tensor, rejected_P: Tensor, args: DPOLoss = DPOLoss()) -> Preference:
    """DPO's loss of whole answers, and its derivative.

    With `d = logp - ref`, summed over an answer, and `m = beta * (d_chosen - d_rejected)`:

        L = -(1 - e) log sigmoid(m) - e log sigmoid(-m)

    The update needs only the derivative: the gradient of a step's loss is that of
    `sum_pairs slope * (logp_chosen - logp_rejected)` with constant slopes. So the answers of a pair
    need not be in one micro-batch.

    Source: DPO (arXiv 2305.18290) eq. 7; label smoothing is conservative DPO (Mitchell, 2023), as
    in Trinity-RFT and TRL.

    Args:
        chosen_P, rejected_P: d of the better and of the worse answer.
        args: `beta`, the strength of the preference against the distance from the reference, and
            `label_smoothing`, e, the assumed probability that a preference is the wrong way round.
    """
    margin_P = args.beta * (chosen_P - rejected_P)
    right, wrong = 1 - args.label_smoothing, args.label_smoothing
    return Preference(
        loss_P=-right * logsigmoid(margin_P) - wrong * logsigmoid(-margin_P),
        slope_P=args.beta * (wrong * torch.sigmoid(margin_P) - right * torch.sigmoid(-margin_P)),
        chosen_reward_P=args.beta * chosen_P,
        rejected_reward_P=args.beta * rejected_P,
    )


KLEstimator = Callable[[Tensor, Tensor], Tensor]


def k1(logp_T: Tensor, ref_logp_T: Tensor) -> Tensor:
    """`logp - ref`, shape [T]: unbiased, may be negative."""
    return logp_T - ref_logp_T


def k2(logp_T: Tensor, ref_logp_T: Tensor) -> Tensor:
    """`(logp - ref)^2 / 2`, shape [T]: its gradient is the KL's (on-policy)."""
    return (logp_T - ref_logp_T) ** 2 / 2


def k3(logp_T: Tensor, ref_logp_T: Tensor) -> Tensor:
    """`exp(ref - logp) - (ref - logp) - 1`, shape [T]: unbiased and never negative."""
    difference_T = (ref_logp_T - logp_T).clamp(-20, 20)
    return difference_T.exp() - difference_T - 1


def absolute(logp_T: Tensor, ref_logp_T: Tensor) -> Tensor:
    """`|logp - ref|`, shape [T]."""
    return (logp_T - ref_logp_T).abs()


KL_ESTIMATORS: dict[str, KLEstimator] = {"k1": k1, "k2": k2, "k3": k3, "abs": absolute}


def row_weights(
    mode: Aggregation,
    tokens_N: Tensor,
    rollout_N: Tensor,
    call_N: Tensor | None = None,
    *,
    longest: int | None = None,
) -> Tensor:
    """The weight of every token of each row; the loss of a step is `sum_t weight_t * loss_t`.

    A sequence is one call, as in verl and Trinity-RFT, where an experience is one row of training
    data; a rollout with more calls has more sequences. `rollout-mean` counts rollouts instead. A
    call that a mask cuts into several rows is one sequence, made of the remaining tokens.

    With C calls and R rollouts that have any tokens, T of them:

        token-mean               1 / sum(T)
        seq-mean-token-mean      1 / (C T_call(n))
        seq-mean-token-sum       1 / C
        seq-mean-token-sum-norm  1 / (C longest)           Dr.GRPO (arXiv 2503.20783)
        rollout-mean             1 / (R T_rollout(n))

    The weights belong to the whole step, so a loss does not depend on the cut into micro-batches.

    Args:
        mode: Trinity-RFT's names, and `rollout-mean`.
        tokens_N: Trained tokens of each row, all above 0.
        rollout_N: Index of each row's rollout.
        call_N: Index of each row's call; None if each row is one.
        longest: Maximum number of tokens of an answer; required by `seq-mean-token-sum-norm`.

    Returns:
        Shape [N], float64.

    Raises:
        ValueError: `longest` is missing.
    """
    tokens_N = tokens_N.double()
    ones_N = tokens_N.new_ones(len(tokens_N))
    if call_N is None:
        call_N = torch.arange(len(tokens_N))
    match mode:
        case "token-mean":
            return ones_N / tokens_N.sum()
        case "seq-mean-token-mean":
            return _mean_of_means(tokens_N, call_N)
        case "seq-mean-token-sum":
            return ones_N / len(call_N.unique())
        case "seq-mean-token-sum-norm":
            if longest is None:
                raise ValueError(f"{mode} needs the maximum number of tokens of an answer")
            return ones_N / (len(call_N.unique()) * longest)
        case "rollout-mean":
            return _mean_of_means(tokens_N, rollout_N)


def _mean_of_means(tokens_N: Tensor, owner_N: Tensor) -> Tensor:
    """`1 / (M T_m)`: each token's weight in the mean over M owners of the mean of their tokens."""
    _, index_N = owner_N.unique(return_inverse=True)
    owners = int(index_N.max()) + 1
    tokens_M = tokens_N.new_zeros(owners).index_add(0, index_N, tokens_N)
    return 1 / (owners * tokens_M[index_N])


def _ratio(logp_T: Tensor, old_logp_T: Tensor) -> Tensor:
    return (logp_T - old_logp_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _nothing(logp_T: Tensor) -> Tensor:
    return torch.zeros_like(logp_T, dtype=torch.bool)


@dataclass(frozen=True)
class Tokens:
    """The T trained tokens of some rows, in row order; all of shape [T].

    Attributes:
        logp_T: Log-probs under the current policy, with their graph.
        entropy_T: Entropy of the current policy where the token was sampled.
        recorded_T: Log-probs under the policy that sampled.
        advantages_T: Advantages.
        weights_T: Weight of each token in the step's loss (`row_weights`).
        call_T: Index of each token's call, 0 .. `calls` - 1, which is one sequence.
        staleness_T: Steps between the policy that sampled and the one that the step began with; at
            least 1 if another run sampled it.
        proximal_T: Log-probs under the policy that the step began with, if a forward pass was made
            for them.
        ref_T: Log-probs under the reference, if there is one.
    """

    logp_T: Tensor
    entropy_T: Tensor
    recorded_T: Tensor
    advantages_T: Tensor
    weights_T: Tensor
    call_T: Tensor
    calls: int
    staleness_T: Tensor
    proximal_T: Tensor | None = None
    ref_T: Tensor | None = None


def micro_batch_loss(
    algorithm: AlgorithmSection, extras: AlgorithmExtras, tokens: Tokens
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """The part of the step's loss that these tokens contribute.

    Returns:
        The loss, a scalar with its graph; its parts, to be added over micro-batches; and sums over
        tokens, to be divided by the step's tokens.
    """
    logp_T, weights_T = tokens.logp_T, tokens.weights_T
    loss_args = algorithm.policy_loss
    proximal_T = _proximal(extras, tokens)
    old_T = tokens.recorded_T if loss_args.ratio_to == "behaviour" else proximal_T
    policy = policy_loss(loss_args, logp_T, old_T, tokens.advantages_T, tokens.call_T, tokens.calls)
    loss_T = policy.loss_T
    rejected_T = torch.zeros_like(policy.clipped_T)
    if loss_args.ratio_to == "proximal" and proximal_T is not tokens.recorded_T:
        weight_T = _importance(proximal_T, tokens.recorded_T)
        if extras.rejection is not None:
            low, high = extras.rejection
            kept_T = (weight_T >= low) & (weight_T <= high)
            loss_T = loss_T * kept_T
            rejected_T = ~kept_T
        if extras.cap is not None:
            # Truncated importance sampling, slightly biased and bounded: Ionides (2008); for the
            # mismatch of engine and trainer Yao et al. (2025).
            loss_T = loss_T * weight_T.clamp(max=extras.cap)
    parts = {"policy_loss": (loss_T.detach() * weights_T).sum()}
    # Unbiased, since the tokens are samples of that policy, and never negative.
    kl_behaviour_T = KL_ESTIMATORS["k3"](tokens.recorded_T, logp_T.detach())
    importance_T = _importance(logp_T.detach(), tokens.recorded_T)
    sums = {
        "clip_fraction": policy.clipped_T.sum(),
        "rejected_fraction": rejected_T.sum(),
        "entropy": tokens.entropy_T.detach().sum(),
        "ratio_mean": policy.ratio_T.sum(),
        "logprob_mismatch_mean": (logp_T.detach() - tokens.recorded_T).abs().sum(),
        "kl_behaviour": kl_behaviour_T.sum(),
        "importance": importance_T.sum(),
        "importance_squared": (importance_T**2).sum(),
        "stale_fraction": (tokens.staleness_T > 0).sum(),
    }
    if tokens.ref_T is not None:
        sums["kl_reference"] = KL_ESTIMATORS["k3"](logp_T.detach(), tokens.ref_T).sum()
        if algorithm.kl_in_loss:
            kl_T = KL_ESTIMATORS[algorithm.kl_loss_fn](logp_T, tokens.ref_T)
            loss_T = loss_T + algorithm.kl_loss.kl_coef * kl_T
            parts["kl_loss"] = (kl_T.detach() * weights_T).sum()
    if algorithm.entropy_loss.entropy_coef:
        loss_T = loss_T - algorithm.entropy_loss.entropy_coef * tokens.entropy_T
    loss = (loss_T * weights_T).sum()
    parts["loss"] = loss.detach()
    return loss, parts, sums


def _proximal(extras: AlgorithmExtras, tokens: Tokens) -> Tensor:
    """Log-probs of the policy that the step began with; `recorded_T` itself if that policy sampled.

    `loglinear` approximates them without a forward pass. With s the steps between the behaviour
    and the proximal policy, and the current policy one step after that, `alpha = s / (s + 1)`:

        proximal = behaviour + alpha * (current - behaviour)

    For s = 0 it is the recorded log-prob. Source: AReaL's `prox_logp_method: loglinear`.
    """
    if extras.proximal == "loglinear" and tokens.proximal_T is None:
        behaviour_T = tokens.recorded_T
        alpha_T = tokens.staleness_T.clamp(min=0).to(behaviour_T)
        alpha_T = alpha_T / (alpha_T + 1)
        return torch.lerp(behaviour_T, tokens.logp_T.detach().to(behaviour_T), alpha_T)
    return tokens.recorded_T if tokens.proximal_T is None else tokens.proximal_T


def _importance(proximal_T: Tensor, behaviour_T: Tensor) -> Tensor:
    """`w = exp(proximal - behaviour)`, without bounds."""
    return (proximal_T - behaviour_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


# Engine and trainer differ by 1e-6 nat in float32 and by up to 1e-2 in bfloat16; a mean beyond this
# means another distribution than the recorded one.
MISMATCH_ALARM = 0.05


def raises_alarm(metrics: Mapping[str, float], step: int) -> bool:
    """Log a warning if a step trained with log-probs of another distribution, and return whether it
    did. Not checked for stale tokens."""
    mismatch = metrics["logprob_mismatch_mean"]
    if metrics["stale_fraction"] or mismatch <= MISMATCH_ALARM:
        return False
    logger.warning(
        "step %d: recorded and recomputed log-probs of the same weights differ by %.3g nat in "
        "the mean (more than %g), so updates do not follow the policy that sampled; do the "
        "engine's precision, chat template or sampling settings differ? tuner.algorithm.proximal: "
        "recompute corrects for it",
        step,
        mismatch,
        MISMATCH_ALARM,
    )
    return True
