"""`TrainerSettings`: every number of the training step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tuner.algorithms.table import (
    POLICY_LOSSES,
    AdvantageName,
    Aggregation,
    KLName,
    OPMDBaseline,
    PolicyLossName,
    RatioTo,
    StdLevel,
)
from tuner.training.optimizer import OptimizerState, Scheduler

Proximal = Literal["auto", "recorded", "recompute", "loglinear"]
Layout = Literal["tree", "packed", "padded"]


@dataclass(frozen=True)
class CriticSettings:
    """Numbers of the critic's update, with Trinity-RFT's defaults; its learning rate is constant.

    Attributes:
        clip: How far a value may leave the one that the step began with.
        warmup: For the first so many steps only the critic is trained.
    """

    lr: float = 1e-5
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.01
    clip: float = 0.5
    warmup: int = 0


@dataclass(frozen=True)
class TrainerSettings:
    """Every number of the training step, with `multi_step_grpo`'s defaults in Trinity-RFT.

    What the chosen advantage and policy loss do not read has no effect.

    Attributes:
        total_steps: Length of the learning-rate schedule in steps.
        max_tokens_per_micro_batch: Tokens that one forward pass holds, of a token tree, of packed
            or of padded rows; a matter of memory and speed, not of the result.
        layout: Compute each distinct token of a micro-batch once (`tree`), or one row per call,
            rows one after another (`packed`) or side by side (`padded`). A model that cannot be
            computed so takes the next one. The result is the same.
        activation_checkpointing: Keep only the inputs of the layers for the backward pass.
        optimizer_state: Precision of the optimizer's moments.
        optimizer_offload: The optimizer's state in main memory.
        std_threshold: Groups whose rewards' standard deviation is at or below it get advantage 0.
        gamma, lam: Discount from token to token, and GAE's lambda.
        turn_discount: Discount from call to call; None: a rollout's reward goes to all its calls.
        kl_penalty: Estimate of KL(policy || reference) that is taken off the rewards.
        aggregation: What each token weighs (`tuner.algorithms.aggregation`).
        max_completion: The most tokens of an answer, for `seq-mean-token-sum-norm`.
        updates: Updates of the weights on each batch, one after the other.
        proximal: Where the log-probs of the policy that the step began with come from: those
            recorded, a forward pass, or the two interpolated; `auto` takes a forward pass where
            a token was sampled by older weights.
        importance_cap: Bound of the weight proximal / behaviour; None: no weights.
        beta: How strongly DPO takes a preference against the distance from the reference.
        label_smoothing: How often DPO takes a preference to be the wrong way round.
        distill_coef: What the difference between teacher and student is multiplied with.
        rejection: Tokens whose weight is outside these bounds do not count; None: all do.
    """

    total_steps: int
    lr: float = 1e-6
    lr_scheduler: Scheduler = "constant"
    warmup_steps: int = 0
    min_lr_ratio: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.01
    grad_clip: float = 1.0
    advantage: AdvantageName = "step_wise_grpo"
    epsilon: float = 1e-6
    std_threshold: float | None = None
    std_level: StdLevel = "group"
    opmd_baseline: OPMDBaseline = "mean"
    opmd_baseline_tau: float = 1.0
    baseline_shift: float = -0.1
    gamma: float = 1.0
    lam: float = 1.0
    turn_discount: float | None = None
    policy_loss: PolicyLossName = "ppo"
    clip_low: float = 0.2
    clip_high: float = 0.2
    clip_ratio_c: float = 3.0
    tau_pos: float = 1.0
    tau_neg: float = 1.05
    opmd_tau: float = 1.0
    advantage_threshold: float = 0.0
    beta: float = 0.1
    label_smoothing: float = 0.0
    distill_coef: float = 1.0
    kl: KLName = "k2"
    kl_coef: float = 0.001
    kl_penalty: KLName = "none"
    kl_penalty_coef: float = 0.001
    entropy_coef: float = 0.0
    aggregation: Aggregation = "token-mean"
    max_completion: int | None = None
    updates: int = 1
    proximal: Proximal = "auto"
    importance_cap: float | None = 2.0
    rejection: tuple[float, float] | None = None
    max_tokens_per_micro_batch: int = 16384
    layout: Layout = "tree"
    activation_checkpointing: bool = False
    optimizer_state: OptimizerState = "float32"
    optimizer_offload: bool = False
    critic: CriticSettings = CriticSettings()

    @property
    def uses_critic(self) -> bool:
        return self.advantage == "ppo"

    @property
    def uses_reference(self) -> bool:
        in_loss = self.kl != "none" and self.kl_coef != 0
        return in_loss or self.penalizes_kl or self.policy_loss == "dpo"

    @property
    def penalizes_kl(self) -> bool:
        """Whether the distance to the reference is taken off the rewards."""
        return self.kl_penalty != "none" and self.kl_penalty_coef != 0

    @property
    def ratio_to(self) -> RatioTo:
        """Which policy the loss's ratio is taken to."""
        return POLICY_LOSSES[self.policy_loss].ratio_to
