"""What the configuration asks of rollouts and of the trainer, as their own settings."""

from __future__ import annotations

from dataclasses import replace

from tuner.algorithms.spec import ADVANTAGES
from tuner.algorithms.table import ALGORITHMS
from tuner.config import RunConfig
from tuner.config.algorithm_conflicts import longest_answer
from tuner.gateway import SessionLimits
from tuner.rollout import RolloutSettings
from tuner.training import CriticSettings, Overlong, Selection, TrainerSettings


def rollout_settings(config: RunConfig) -> RolloutSettings:
    """Limits of a rollout, and whether it must end with a reward."""
    row = ALGORITHMS[config.algorithm.algorithm_type]
    return RolloutSettings(
        timeout=config.explorer.max_timeout,
        max_retries=config.explorer.max_retry_times,
        seed=config.tuner.seed,
        limits=SessionLimits(config.tuner.max_calls, config.tuner.max_tokens),
        tool_seconds=config.tuner.max_tool_seconds,
        seeds_functions=config.tuner.deterministic
        or (config.tuner.branching is not None and config.tuner.branching.seed_functions),
        feedback_attempts=config.tuner.feedback_attempts,
        pass_reward=config.tuner.pass_reward,
        # Without training rollouts, those of an evaluation are there for their rewards.
        needs_reward=row.recorded is not None
        or ADVANTAGES[config.algorithm.advantage_fn].needs_reward,
    )


def trainer_settings(
    config: RunConfig, total_steps: int, max_tokens_per_micro_batch: int
) -> TrainerSettings:
    """The numbers of the training step from Trinity-RFT's keys."""
    algorithm, optimizer = config.algorithm, config.algorithm.optimizer
    extras, critic = config.tuner.algorithm, config.tuner.critic
    cap = None if extras.importance_sampling == "none" else extras.importance_cap
    settings = TrainerSettings(
        total_steps=total_steps,
        lr=optimizer.lr,
        lr_scheduler=optimizer.lr_scheduler_type,
        warmup_steps=optimizer.warmup_steps(total_steps),
        min_lr_ratio=optimizer.min_lr_ratio,
        betas=optimizer.betas,
        weight_decay=optimizer.weight_decay,
        grad_clip=config.trainer.grad_clip,
        advantage=algorithm.advantage_fn,
        advantage_args=algorithm.advantage,
        policy_loss=algorithm.policy_loss_fn,
        policy_loss_args=algorithm.policy_loss,
        kl=algorithm.kl_loss_fn,
        kl_args=algorithm.kl_loss,
        kl_penalty=algorithm.kl_penalty_fn,
        kl_penalty_args=algorithm.kl_penalty,
        entropy=algorithm.entropy_loss,
        aggregation=algorithm.loss_agg_mode,
        max_completion=longest_answer(config),
        updates=extras.updates,
        proximal=extras.proximal,
        importance_cap=cap,
        rejection=(
            None
            if extras.rejection_low is None or extras.rejection_high is None
            else (extras.rejection_low, extras.rejection_high)
        ),
        max_tokens_per_micro_batch=max_tokens_per_micro_batch,
        layout=config.tuner.layout,
        optimizer_state=config.tuner.optimizer_state,
        optimizer_offload=config.trainer.optimizer_offload,
        activation_checkpointing=config.tuner.activation_checkpointing,
        compile=config.tuner.compile,
        turn_discount=extras.turn_discount,
        prompt_teacher=extras.prompt_teacher,
        critic=CriticSettings(
            lr=critic.lr,
            betas=critic.betas,
            weight_decay=critic.weight_decay,
            clip=critic.cliprange_value,
            warmup=config.trainer.critic_warmup,
        ),
    )
    return settings if config.mode != "explore" else without_training(settings)


def without_training(settings: TrainerSettings) -> TrainerSettings:
    """Numbers of a run that trains nothing: no reference and no critic is kept for it."""
    return replace(
        settings,
        advantage="reinforce",
        advantage_args=None,
        policy_loss="importance_sampling",
        policy_loss_args=None,
        kl="none",
        kl_penalty="none",
    )


def selection(config: RunConfig) -> Selection:
    """Which groups are trained on, and what their rewards become."""
    algorithm, extras = config.algorithm, config.tuner.algorithm
    varied = ALGORITHMS[algorithm.algorithm_type].dynamic_sampling
    advantage = ADVANTAGES[algorithm.advantage_fn]
    longest = longest_answer(config)
    overlong = None
    if extras.overlong_buffer is not None and longest is not None:
        overlong = Overlong(longest, extras.overlong_buffer, extras.overlong_penalty)
    return Selection(
        success_rate=(extras.success_rate_lb, extras.success_rate_ub),
        varied_only=varied if extras.dynamic_sampling is None else extras.dynamic_sampling,
        best_only=algorithm.advantage_fn == "best_of_group",
        lone_rewards=not advantage.needs_group or extras.turn_discount is not None,
        scale=extras.reward_scale,
        bias=extras.reward_bias,
        overlong=overlong,
        needs_group=advantage.needs_group,
        needs_reward=advantage.needs_reward,
    )


def adds_up(config: RunConfig) -> bool:
    """Whether calls are trained by what they lead to, so that rewards are gained where they end."""
    discounts = config.tuner.algorithm.turn_discount is not None
    return discounts or config.algorithm.advantage_fn == "ppo"
