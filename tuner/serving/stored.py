"""What the store of a server gives: sessions, calls and replies as they are on disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tuner.traces import Call, Outcome, RolloutId, Trace

SPLIT = "serve"


@dataclass(frozen=True)
class StoredSession:
    """A session as it is on disk.

    Attributes:
        number: Its row; the order in which sessions were opened.
        id: "s-" and hexadecimal digits, which sort by time.
        application: Whose it is; None: opened with the admin key.
        group: Sessions of one application with an equal one are compared with each other.
        seed: Where the seeds of its calls come from.
        task_number, rollout: Number of its group, and its own within that; of a session without
            a group, too. Never used again.
        opened, last_call, ended: Unix times, seconds; None: not yet.
        calls, sampled_tokens, redacted: How many; undelivered and redacted ones are counted.
        lowest, highest: Versions of the weights that sampled its tokens; None without any.
        reward, feedback: The latest, for the whole session; None: there was none.
        judged: Whether it, or one of its calls, has a reward.
        trained: The update that trained it, or None.
    """

    number: int
    id: str
    application: str | None
    group: str | None
    seed: int
    task_number: int
    rollout: int
    opened: float
    last_call: float | None
    ended: float | None
    calls: int
    sampled_tokens: int
    redacted: int
    lowest: int | None
    highest: int | None
    reward: float | None
    feedback: str | None
    judged: bool
    trained: int | None
    task: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    limits: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)

    @property
    def rollout_id(self) -> RolloutId:
        """Its place among traces: the update that trained it as the step, 0 before that."""
        return RolloutId(self.trained or 0, self.task_number, self.rollout, SPLIT)


@dataclass(frozen=True)
class StoredCall:
    """A call with what was said of it since; `call.reward` is the latest.

    Attributes:
        redacted: Whether its messages were changed before they were stored.
    """

    call: Call
    redacted: bool


@dataclass(frozen=True)
class StoredReply:
    """What a request with an idempotency key was answered.

    Attributes:
        request: SHA-256 of the request's body.
    """

    request: bytes
    body: bytes
    content_type: str


def trace_of(session: StoredSession, stored: Sequence[StoredCall]) -> Trace:
    """A session as a trace; its calls in order of commitment."""
    calls = tuple(one.call for one in stored)
    delivered = [call for call in calls if not call.undelivered]
    said = delivered[-1].response.get("content") if delivered else None
    return Trace(
        id=session.rollout_id,
        task=session.task,
        calls=calls,
        outcome=Outcome.COMPLETED if calls else Outcome.NO_CALLS,
        reward=session.reward,
        response=said if isinstance(said, str) else "",
        feedback=session.feedback,
        seconds={"generation": sum(call.seconds for call in calls)},
        started=session.opened,
    )
