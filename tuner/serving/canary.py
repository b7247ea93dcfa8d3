"""Live sessions for a candidate: each new session gets an arm, and keeps it while the trial lasts.

    candidate   as many as `tuner.serving.canary` says, on an engine with the candidate's weights
    serving     the others

Only sessions that were opened during the trial are compared, by the reward that they have when they
are first found ended and judged. The trial over, the candidate's sessions go on with what serves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from weakref import WeakValueDictionary

from torch import Tensor

from tuner.config.serving import PromotionSection
from tuner.gateway import Session
from tuner.gateway.service import Service
from tuner.run.proof import Arm, Comparison, Decision, Plan
from tuner.serving.ledger import Judgement, Ledger
from tuner.serving.serving_store import ServingStore
from tuner.serving.versions import Versions


class Canary:
    """The trial that goes on, if one does.

    Args:
        ledger, store: Of the server.
        versions: Puts the candidate's weights where they are used.
        service: What serves.
        rules: What a proof is.
        share: Of new sessions, that the candidate gets.
    """

    def __init__(
        self,
        ledger: Ledger,
        store: ServingStore,
        versions: Versions,
        service: Service,
        rules: PromotionSection,
        *,
        share: float,
    ) -> None:
        self._ledger = ledger
        self._store = store
        self._versions = versions
        self._service = service
        self._share = share
        self._rules = rules
        self._live: Comparison | None = None
        self._tried: Service | None = None
        self._given: WeakValueDictionary[str, Session] = WeakValueDictionary()  # the candidate's
        self._unsaid: dict[str, tuple[int, Arm]] = {}  # arms of sessions without a call
        self.candidate: int | None = None

    async def begin(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Let a version have its share; what was counted of its trial before counts."""
        engine = await self._versions.try_out(version, tensors)
        self._tried = self._tried or replace(self._service, engine=engine)
        self._live = comparison_of(self._rules, share=self._share)
        for one in self._ledger.counted(version):
            self._live.add(one.arm, one.reward)
        self.candidate = version

    def end(self) -> None:
        """Let the candidate's sessions go on with what serves."""
        self._live = self.candidate = None
        for session in self._given.values():
            session.service = self._service
        self._given.clear()
        self._unsaid.clear()

    def placed(self, session: Session, *, new: bool) -> None:
        """Give a session its arm, before its first call or when it is made again.

        Args:
            new: Whether it has no call yet; one that began before the trial is in no arm.
        """
        found = self._ledger.arm(session.id)
        if found is None and new and self.candidate is not None:
            arm: Arm = "candidate" if _place(session.id) < self._share else "serving"
            found = self._unsaid[session.id] = self.candidate, arm
        if found == (self.candidate, "candidate"):
            assert self._tried is not None, "begin() makes it"
            session.service = self._tried
            self._given[session.id] = session

    def noted(self, session_id: str) -> None:
        """A call of a session is in the store; with its first one its arm is, too."""
        found = self._unsaid.pop(session_id, None)
        if found is not None and found[0] == self.candidate:
            self._ledger.assign(session_id, *found)

    def look(self) -> Decision | None:
        """Count what was judged since, once each; what it comes to, if anything was."""
        if self._live is None or self.candidate is None:
            return None
        found = self._judged(self.candidate)
        if not found:
            return None
        self._ledger.count(found)
        for one in found:
            self._live.add(one.arm, one.reward)
        return self._live.decision()

    @property
    def decision(self) -> Decision | None:
        """What was counted comes to, if there is a trial."""
        return None if self._live is None else self._live.decision()

    def _judged(self, candidate: int) -> list[Judgement]:
        found = []
        for id_, arm in self._ledger.uncounted(candidate).items():
            try:
                session = self._store.session(id_)
            except LookupError:  # it was deleted
                continue
            if session.ended is not None and session.reward is not None:
                found.append(Judgement(id_, arm, session.reward))
        return found


def comparison_of(rules: PromotionSection, *, share: float = 0.5) -> Comparison:
    """A comparison of a candidate with what serves, without rewards yet.

    Args:
        rules: What a proof is.
        share: Of the sessions, that are the candidate's.
    """
    low, high = rules.reward_range
    return Comparison(
        Plan(
            effect=rules.effect,
            low=low,
            high=high,
            alpha=rules.level,
            margin=rules.margin,
            share=share,
        )
    )


def _place(session_id: str) -> float:
    """A number in [0, 1) that a session's id stands for, spread evenly."""
    digest = hashlib.blake2b(session_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
