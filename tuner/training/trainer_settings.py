"""`TrainerSettings`: every number of the training step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from tuner.config.algorithms import (
    ADVANTAGES,
    POLICY_LOSSES,
    AdvantageArgs,
    AdvantageName,
    Aggregation,
    EntropyLoss,
    KLLoss,
    KLName,
    KLPenalty,
    PolicyLossArgs,
    PolicyLossName,
    PromptTeacher,
    RatioTo,
)
from tuner.training.optimizer import OptimizerState, Scheduler

Proximal = Literal["auto", "recorded", "recompute", "loglinear"]
Layout = Literal["tree", "packed", "padded"]
Checkpointing = bool | Literal["auto"]


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

    Attributes:
        total_steps: Length of the learning-rate schedule in steps.
        max_tokens_per_micro_batch: Tokens that one forward pass holds, of a token tree, of packed
            or of padded rows; a matter of memory and speed, not of the result.
        layout: Compute each distinct token of a micro-batch once (`tree`), or one row per call,
            rows one after another (`packed`) or side by side (`padded`). A model that cannot be
            computed so takes the next one. The result is the same.
        activation_checkpointing: Keep only the inputs of the layers for the backward pass; `auto`
            does so in those passes of a GPU for which there would be no room otherwise.
        compile: Compile the layers, where that gives the same; None: on a GPU.
        optimizer_state: Precision of the optimizer's moments.
        optimizer_offload: The optimizer's state in main memory.
        advantage_args, policy_loss_args: Numbers of the advantage and of the policy loss
            (`tuner.config.algorithms`); None: their own.
        prompt_teacher: Who reads the prompt of `prompt_distill`.
        turn_discount: Discount from call to call; None: a rollout's reward goes to all its calls.
        kl_penalty: Estimate of KL(policy || reference) that is taken off the rewards.
        aggregation: What each token weighs (`tuner.training.losses.row_weights`).
        max_completion: The most tokens of an answer, for `seq-mean-token-sum-norm`.
        updates: Updates of the weights on each batch, one after the other.
        proximal: Where the log-probs of the policy that the step began with come from: those
            recorded, a forward pass, or the two interpolated; `auto` takes a forward pass where
            a token was sampled by older weights, or those of another run.
        importance_cap: Bound of the weight proximal / behaviour; None: no weights.
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
    advantage_args: AdvantageArgs | None = None
    prompt_teacher: PromptTeacher = "start"
    turn_discount: float | None = None
    policy_loss: PolicyLossName = "ppo"
    policy_loss_args: PolicyLossArgs | None = None
    kl: KLName = "k2"
    kl_args: KLLoss = field(default_factory=KLLoss)
    kl_penalty: KLName = "none"
    kl_penalty_args: KLPenalty = field(default_factory=KLPenalty)
    entropy: EntropyLoss = field(default_factory=EntropyLoss)
    aggregation: Aggregation = "token-mean"
    max_completion: int | None = None
    updates: int = 1
    proximal: Proximal = "auto"
    importance_cap: float | None = 2.0
    rejection: tuple[float, float] | None = None
    max_tokens_per_micro_batch: int = 16384
    layout: Layout = "tree"
    activation_checkpointing: Checkpointing = "auto"
    compile: bool | None = None
    optimizer_state: OptimizerState = "float32"
    optimizer_offload: bool = False
    critic: CriticSettings = CriticSettings()

    def __post_init__(self) -> None:
        for name, args, part in (
            (self.advantage, self.advantage_args, ADVANTAGES[self.advantage]),
            (self.policy_loss, self.policy_loss_args, POLICY_LOSSES[self.policy_loss]),
        ):
            if args is not None and type(args) is not part:
                raise ValueError(f"{name} takes {part.__name__}, not {args!r}")

    @property
    def advantage_spec(self) -> AdvantageArgs:
        """The advantage with its numbers."""
        return self.advantage_args or ADVANTAGES[self.advantage]()

    @property
    def policy_loss_spec(self) -> PolicyLossArgs:
        """The policy loss with its numbers."""
        return self.policy_loss_args or POLICY_LOSSES[self.policy_loss]()

    @property
    def uses_critic(self) -> bool:
        return self.advantage == "ppo"

    @property
    def uses_reference(self) -> bool:
        teaches = self.advantage == "prompt_distill" and self.prompt_teacher == "start"
        return self.kl_in_loss or self.penalizes_kl or self.policy_loss == "dpo" or teaches

    @property
    def kl_in_loss(self) -> bool:
        """Whether the distance to the reference is added to the loss."""
        return self.kl != "none" and self.kl_args.kl_coef != 0

    @property
    def penalizes_kl(self) -> bool:
        """Whether the distance to the reference is taken off the rewards."""
        return self.kl_penalty != "none" and self.kl_penalty_args.kl_coef != 0

    @property
    def ratio_to(self) -> RatioTo:
        """Which policy the loss's ratio is taken to."""
        return POLICY_LOSSES[self.policy_loss].ratio_to
