"""What a workflow may say about its own calls: a reward of their own, or not to train them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from tuner.errors import TunerError
from tuner.traces import Call


@dataclass
class Credit:
    """What the workflow said about one call, by the names of the call's fields."""

    reward: float | None = None
    gained: float | None = None
    excluded: bool = False
    masked: tuple[tuple[int, int], ...] = ()


class Credits:
    """What the workflow said about the calls of one session, while that is open.

    Args:
        session_id: The session's, for messages.

    Attributes:
        sealed: Whether nothing can be said any more.
    """

    def __init__(self, session_id: str) -> None:
        self.session_id = session_id
        self.sealed = False
        self._by_call: dict[str, Credit] = {}

    def of(self, call_id: str) -> Credit:
        """What was said about a call; can be said more."""
        return self._by_call.setdefault(call_id, Credit())

    def given_to(self, call: Call) -> Call:
        """The call with what was said about it."""
        credit = self._by_call.get(call.id)
        return call if credit is None else replace(call, **vars(credit))


class RecordedCall:
    """A call of a rollout that goes on, for the workflow that made it.

        model.calls[-1].reward = 0.3      # instead of the rollout's reward
        model.calls[0].exclude()          # recorded, not trained

    Attributes:
        call: The call as it was recorded.
    """

    def __init__(self, credits: Credits, call: Call) -> None:
        self._credits = credits
        self.call = call

    @property
    def id(self) -> str:
        """The call's id: that of the response, and the choice's index."""
        return self.call.id

    @property
    def role(self) -> str | None:
        """The agent that made the call, where it was named."""
        return self.call.role

    @property
    def response(self) -> dict[str, Any]:
        """The assistant message that the agent received."""
        return self.call.response

    @property
    def reward(self) -> float | None:
        """The call's own reward; None is the rollout's.

        Raises:
            ValueError: It is set to something that is not a finite number.
            TunerError: It is set after the rollout has ended.
        """
        return self._credit.reward

    @reward.setter
    def reward(self, value: float | None) -> None:
        self._credit.reward = self._checked("reward", value)

    @property
    def gained(self) -> float | None:
        """What was gained where the call ended; None: what its reward and the rollout's say.

        Raises:
            As `reward`.
        """
        return self._credit.gained

    @gained.setter
    def gained(self, value: float | None) -> None:
        self._credit.gained = self._checked("gain", value)

    def exclude(self) -> None:
        """Keep the call in the trace, but do not train it.

        Raises:
            TunerError: The rollout has ended.
        """
        self._open()
        self._credit.excluded = True

    def mask(self, start: int, stop: int) -> None:
        """Keep the completion's tokens [start, stop) in the trace, but do not train them.

        Raises:
            ValueError: There are no such tokens, they begin before the end of those that were
                masked before, or the call was held to a form, which is trained whole or not at all.
            TunerError: The rollout has ended.
        """
        length, masked = len(self.call.completion_ids), self._credit.masked
        first = masked[-1][1] if masked else 0
        if not first <= start < stop <= length:
            raise ValueError(
                f"tokens {start} to {stop} of call {self.id} cannot be masked: it has {length} "
                f"tokens, and stretches are given in order, here from {first} on"
            )
        if self.call.constrained:
            raise ValueError(
                f"call {self.id} was held to a form: its tokens are trained together, or exclude() "
                "leaves all of them out"
            )
        self._open()
        self._credit.masked = (*masked, (start, stop))

    @property
    def _credit(self) -> Credit:
        return self._credits.of(self.id)

    def _checked(self, what: str, value: float | None) -> float | None:
        if value is not None:
            value = float(value)
            if not math.isfinite(value):
                raise ValueError(f"the {what} of call {self.id} is {value}: give a finite number")
        self._open()
        return value

    def _open(self) -> None:
        if self._credits.sealed:
            raise TunerError(
                f"call {self.id} belongs to a rollout that has ended "
                f"({self._credits.session_id}): set rewards and exclusions inside the workflow"
            )
