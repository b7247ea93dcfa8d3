"""Which groups and rollouts of a step are trained, by their rewards, and what these become."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tuner.errors import TrainingError
from tuner.traces import Trace


@dataclass(frozen=True)
class Overlong:
    """DAPO's soft punishment of long answers (arXiv 2503.14476, section 3.4).

    With T the tokens of an answer: 0 up to `longest - buffer`, from there in a straight line down
    to `-penalty` at `longest`. An answer that was cut off is punished in full.

    Attributes:
        longest: The most tokens that an answer may have.
        buffer: The last so many of them are punished.
        penalty: What an answer of `longest` tokens loses.
    """

    longest: int
    buffer: int
    penalty: float = 1.0

    def of(self, trace: Trace) -> float:
        """What a rollout's reward is changed by, at most 0: that of its worst answer."""
        worst = 0.0
        for call in trace.calls:
            excess = len(call.completion_ids) - (self.longest - self.buffer)
            share = 1.0 if call.finish_reason == "length" else min(1.0, excess / self.buffer)
            worst = min(worst, -self.penalty * share)
        return worst


@dataclass(frozen=True)
class Selection:
    """What is done with the rewards of a step between the judge and the advantages.

    Filters look at the rewards as they were given; what is left becomes
    `(reward + bias) * scale + overlong`. Rewards of single calls become `(reward + bias) * scale`.

    Attributes:
        success_rate: Groups whose share of rollouts with a reward above 0 is outside these
            bounds, both included, are left out (AReaL's `success_rate_lb` and `_ub`).
        varied_only: Groups whose rewards are all equal are left out (DAPO's dynamic sampling),
            unless calls in it have rewards of their own.
        best_only: Of each group only the rollouts with the highest reward are kept, of a group
            whose rewards are all equal none (RAFT, arXiv 2304.06767).
        lone_rewards: A call with a reward of its own is used where no other of its group has one.
        needs_group: A rollout that is alone in its group teaches nothing.
        needs_reward: A rollout without a reward teaches nothing. Where it is False rewards, those
            of single calls too, are not looked at.
    """

    success_rate: tuple[float, float] = (0.0, 1.0)
    varied_only: bool = False
    best_only: bool = False
    lone_rewards: bool = False
    scale: float = 1.0
    bias: float = 0.0
    overlong: Overlong | None = None
    needs_group: bool = True
    needs_reward: bool = True

    def reason(self, members: Sequence[tuple[Trace, float]]) -> str | None:
        """Why a whole group is left out, or None.

        Args:
            members: Its rollouts with their rewards, those that can be trained.

        Raises:
            TrainingError: Only the best rollouts are kept, and a call has a reward of its own.
        """
        if len(members) < 2 and self.needs_group:
            return "group_of_one"
        rewards = [reward for _, reward in members]
        rate = sum(reward > 0 for reward in rewards) / len(rewards)
        if rate < self.success_rate[0]:
            return "success_rate_too_low"
        if rate > self.success_rate[1]:
            return "success_rate_too_high"
        own = any(call.reward is not None for trace, _ in members for call in trace.calls)
        if own and self.best_only:
            raise TrainingError(
                "raft keeps the best rollouts of a group and has no use for rewards of single "
                "calls; give rewards to rollouts only, or set algorithm.algorithm_type to "
                "multi_step_grpo"
            )
        if (self.varied_only or self.best_only) and not own and len(set(rewards)) == 1:
            return "equal_rewards"
        return None

    def kept(self, members: Sequence[tuple[Trace, float]]) -> list[bool]:
        """Which rollouts of a group that is used are kept."""
        best = max(reward for _, reward in members)
        return [not self.best_only or reward == best for _, reward in members]

    def shaped(self, trace: Trace, reward: float) -> float:
        """The reward that a rollout is trained with."""
        shaped = self.of_call(reward)
        return shaped + self.overlong.of(trace) if self.overlong is not None else shaped

    def of_call(self, reward: float) -> float:
        """The reward that a call with one of its own is trained with."""
        return (reward + self.bias) * self.scale
