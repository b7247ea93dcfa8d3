"""`multi_step_grpo` on Trinity-RFT with rewards of single calls, as the local backend has them.

A rollout's reward is compared inside its group by Trinity-RFT's own function. A call with a reward
of its own is compared instead with the calls of its group that have one and the same role
(`tuner.algorithms.call_normalized`); where fewer than two rollouts have such calls there is nothing
to compare with, and its tokens leave the mask.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from trinity.algorithm.advantage_fn.multi_step_grpo_advantage import StepWiseGRPOAdvantageFn

from tuner.algorithms import call_normalized
from tuner.algorithms.spec import GRPOAdvantage

if TYPE_CHECKING:
    from trinity.common.experience import Experience


@dataclass(frozen=True)
class _Rewarded:
    """A call with a reward of its own, where it is in an experience."""

    experience: Experience
    reward: float
    start: int
    stop: int

    def mask(self) -> Any:
        """The call's trained tokens, shape [response]."""
        inside = torch.zeros_like(self.experience.action_mask, dtype=torch.bool)
        inside[self.start : self.stop] = True
        return inside & self.experience.action_mask.bool()


class CallRewards(StepWiseGRPOAdvantageFn):  # type: ignore[misc]  # untyped
    """Trinity-RFT's `step_wise_grpo`, with rewards of single calls; named in `advantage_fn`."""

    def process(self, exps: list[Experience]) -> tuple[list[Experience], dict[str, Any]]:
        """As Trinity-RFT's; experiences without rewards of calls come back as from there."""
        rewarded = _by_peers(exps)
        found, metrics = super().process(exps)
        kept = {id(experience) for experience in found}
        # A group that is left out for its rollouts' rewards still has those of its calls.
        left = [
            one for calls in rewarded.values() for one in calls if id(one.experience) not in kept
        ]
        for experience in {id(one.experience): one.experience for one in left}.values():
            own = [one.mask() for one in left if one.experience is experience]
            experience.action_mask = torch.stack(own).any(0)
            experience.advantages = torch.zeros_like(experience.logprobs)
            found.append(experience)
        return found, metrics | self._compare(rewarded)

    def _compare(self, rewarded: dict[tuple[str, str | None], list[_Rewarded]]) -> dict[str, float]:
        shared = [calls for calls in rewarded.values() if _rollouts(calls) > 1]
        for calls in rewarded.values():
            if _rollouts(calls) < 2:
                for call in calls:
                    call.experience.action_mask &= ~call.mask()
        if shared:
            calls = [call for peers in shared for call in peers]
            rollouts = {run: i for i, run in enumerate({c.experience.eid.rid: 0 for c in calls})}
            advantages = call_normalized(
                torch.tensor([call.reward for call in calls], dtype=torch.float64),
                torch.tensor([rollouts[call.experience.eid.rid] for call in calls]),
                torch.tensor([index for index, peers in enumerate(shared) for _ in peers]),
                GRPOAdvantage(epsilon=self.epsilon, std_cal_level=self.std_cal_level),
            )
            for call, advantage in zip(calls, advantages.tolist(), strict=True):
                own = call.mask()
                call.experience.advantages[own] = advantage
                call.experience.returns = call.experience.advantages.clone()
        lonely = sum(len(c) for c in rewarded.values()) - sum(map(len, shared))
        return {"calls_with_rewards": float(sum(map(len, shared))), "calls_without_peer": lonely}


def _rollouts(calls: Sequence[_Rewarded]) -> int:
    return len({call.experience.eid.rid for call in calls})


def _by_peers(
    exps: Sequence[Experience],
) -> dict[tuple[str, str | None], list[_Rewarded]]:
    """Calls with rewards of their own, by group and role."""
    peers: dict[tuple[str, str | None], list[_Rewarded]] = defaultdict(list)
    for experience in exps:
        for role, call in _rewarded(experience):
            peers[experience.eid.tid, role].append(call)
    return dict(peers)


def _rewarded(experience: Experience) -> Iterator[tuple[str | None, _Rewarded]]:
    for start, stop, reward, role in experience.info.get("call_rewards", ()):
        yield role, _Rewarded(experience, reward, start, stop)
