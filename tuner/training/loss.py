"""The loss of one micro-batch, assembled from the algorithm's parts, and its metrics.

Up to three policies are involved: the one that sampled a token, the one that the step began with,
and the one being trained. PPO's clip holds the current policy near the one that a step began with,
the *proximal* policy. If the token was sampled by another policy (older weights, another engine),
the *behaviour* policy, the loss is weighted by `w = proximal / behaviour` (decoupled PPO, arXiv
2110.00641; AReaL, arXiv 2505.24298); the weights have no gradient.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tuner.training.losses import KL_ESTIMATORS, MAX_LOG_RATIO, policy_loss
from tuner.training.trainer_settings import TrainerSettings


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
    settings: TrainerSettings, tokens: Tokens
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """The part of the step's loss that these tokens contribute.

    Returns:
        The loss, a scalar with its graph; its parts, to be added over micro-batches; and sums over
        tokens, to be divided by the step's tokens.
    """
    logp_T, weights_T = tokens.logp_T, tokens.weights_T
    proximal_T = _proximal(settings, tokens)
    old_T = tokens.recorded_T if settings.ratio_to == "behaviour" else proximal_T
    policy = policy_loss(
        settings.policy_loss_spec, logp_T, old_T, tokens.advantages_T, tokens.call_T, tokens.calls
    )
    loss_T = policy.loss_T
    rejected_T = torch.zeros_like(policy.clipped_T)
    if settings.ratio_to == "proximal" and proximal_T is not tokens.recorded_T:
        weight_T = _importance(proximal_T, tokens.recorded_T)
        if settings.rejection is not None:
            low, high = settings.rejection
            kept_T = (weight_T >= low) & (weight_T <= high)
            loss_T = loss_T * kept_T
            rejected_T = ~kept_T
        if settings.importance_cap is not None:
            # Truncated importance sampling, slightly biased and bounded: Ionides (2008); for the
            # mismatch of engine and trainer Yao et al. (2025).
            loss_T = loss_T * weight_T.clamp(max=settings.importance_cap)
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
        if settings.kl != "none" and settings.kl_args.kl_coef:
            kl_T = KL_ESTIMATORS[settings.kl](logp_T, tokens.ref_T)
            loss_T = loss_T + settings.kl_args.kl_coef * kl_T
            parts["kl_loss"] = (kl_T.detach() * weights_T).sum()
    if settings.entropy.entropy_coef:
        loss_T = loss_T - settings.entropy.entropy_coef * tokens.entropy_T
    loss = (loss_T * weights_T).sum()
    parts["loss"] = loss.detach()
    return loss, parts, sums


def _proximal(settings: TrainerSettings, tokens: Tokens) -> Tensor:
    """Log-probs of the policy that the step began with; `recorded_T` itself if that policy sampled.

    `loglinear` approximates them without a forward pass. With s the steps between the behaviour
    and the proximal policy, and the current policy one step after that, `alpha = s / (s + 1)`:

        proximal = behaviour + alpha * (current - behaviour)

    For s = 0 it is the recorded log-prob. Source: AReaL's `prox_logp_method: loglinear`.
    """
    if settings.proximal == "loglinear" and tokens.proximal_T is None:
        behaviour_T = tokens.recorded_T
        alpha_T = tokens.staleness_T.clamp(min=0).to(behaviour_T)
        alpha_T = alpha_T / (alpha_T + 1)
        return torch.lerp(behaviour_T, tokens.logp_T.detach().to(behaviour_T), alpha_T)
    return tokens.recorded_T if tokens.proximal_T is None else tokens.proximal_T


def _importance(proximal_T: Tensor, behaviour_T: Tensor) -> Tensor:
    """`w = exp(proximal - behaviour)`, without bounds."""
    return (proximal_T - behaviour_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


logger = logging.getLogger("tuner")

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
