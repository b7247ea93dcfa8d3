"""`algorithm.*`: how rewards become a gradient, and the optimizer."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tuner.config.section import Section


class OptimizerSection(Section):
    """`algorithm.optimizer.*`"""

    optimizer_type: Literal["adam"] = Field(
        default="adam", description="Adam with decoupled weight decay."
    )
    lr: float = Field(default=1e-6, gt=0, description="Learning rate after the warmup.")
    betas: tuple[float, float] = Field(
        default=(0.9, 0.999), description="Decay of Adam's two moving averages."
    )
    weight_decay: float = Field(default=0.01, ge=0, description="Decoupled weight decay.")
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="How the learning rate goes on after the warmup."
    )
    lr_warmup_steps: int = Field(
        default=-1,
        ge=-1,
        description="Steps of linear warmup; -1 takes `lr_warmup_steps_ratio` instead.",
    )
    lr_warmup_steps_ratio: float = Field(
        default=0.0, ge=0, le=1, description="Steps of linear warmup as a share of all steps."
    )
    min_lr_ratio: float = Field(
        default=0.01, ge=0, le=1, description="Where `linear` and `cosine` end, as a share of `lr`."
    )

    def warmup_steps(self, total_steps: int) -> int:
        """Steps of linear warmup in a run of `total_steps`."""
        if self.lr_warmup_steps >= 0:
            return self.lr_warmup_steps
        return int(self.lr_warmup_steps_ratio * total_steps)


class AdvantageArgs(Section):
    """`algorithm.advantage_fn_args.*`"""

    epsilon: float = Field(default=1e-6, ge=0, description="Added to the standard deviation.")
    std_threshold: float | None = Field(
        default=None,
        ge=0,
        description="Groups whose rewards have a standard deviation of at most this are not "
        "trained; not set: every group is.",
    )
    std_cal_level: Literal["group", "batch"] = Field(
        default="group", description="Whose standard deviation divides: the group's or the batch's."
    )


class PolicyLossArgs(Section):
    """`algorithm.policy_loss_fn_args.*`"""

    clip_range: float = Field(
        default=0.2, gt=0, description="How far the ratio may leave 1 either way."
    )
    clip_range_low: float | None = Field(
        default=None, gt=0, lt=1, description="How far it may fall below 1; not set: `clip_range`."
    )
    clip_range_high: float | None = Field(
        default=None, gt=0, description="How far it may rise above 1; not set: `clip_range`."
    )
    clip_ratio_c: float = Field(
        default=3.0,
        gt=1,
        description="Dual clip: bound on the ratio where the advantage is negative.",
    )

    @property
    def low(self) -> float:
        """How far the ratio may fall below 1."""
        return self.clip_range if self.clip_range_low is None else self.clip_range_low

    @property
    def high(self) -> float:
        """How far the ratio may rise above 1."""
        return self.clip_range if self.clip_range_high is None else self.clip_range_high


class KLLossArgs(Section):
    """`algorithm.kl_loss_fn_args.*`"""

    kl_coef: float = Field(
        default=0.001, ge=0, description="Weight of the KL term; 0 also saves the reference model."
    )


class EntropyLossArgs(Section):
    """`algorithm.entropy_loss_fn_args.*`"""

    entropy_coef: float = Field(default=0.0, ge=0, description="Weight of the entropy bonus.")


class AlgorithmSection(Section):
    """`algorithm.*`"""

    algorithm_type: Literal["multi_step_grpo"] = Field(
        default="multi_step_grpo",
        description="A rollout's reward, normalised in its group, goes to every call it made.",
    )
    repeat_times: int = Field(
        default=8,
        ge=2,
        description="Group size: rollouts of one task in one step. Trinity-RFT's is 1.",
    )
    optimizer: OptimizerSection = OptimizerSection()
    advantage_fn: Literal["step_wise_grpo"] = Field(
        default="step_wise_grpo", description="(reward - mean) / (std + epsilon) inside a group."
    )
    advantage_fn_args: AdvantageArgs = AdvantageArgs()
    policy_loss_fn: Literal["ppo"] = Field(
        default="ppo", description="PPO's clipped loss with dual clip."
    )
    policy_loss_fn_args: PolicyLossArgs = PolicyLossArgs()
    kl_loss_fn: Literal["none", "k1", "k2", "k3", "abs"] = Field(
        default="k2", description="Estimate of KL(policy || reference) added to the loss."
    )
    kl_loss_fn_args: KLLossArgs = KLLossArgs()
    entropy_loss_fn: Literal["none", "default"] = Field(
        default="default", description="Entropy bonus; it costs nothing while its coefficient is 0."
    )
    entropy_loss_fn_args: EntropyLossArgs = EntropyLossArgs()
    loss_agg_mode: Literal["token-mean"] = Field(
        default="token-mean", description="Every trained token of a step weighs the same."
    )
