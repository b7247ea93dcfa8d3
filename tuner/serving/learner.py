"""A server that learns while it serves, top to bottom: take, train, keep, prove, promote.

    whenever enough judged sessions are there:
        found = take()                                    each session once
        scored = compute_ref_logp(compute_advantages(batch))
        metrics = ppo_update(scored)                      in a thread; generation goes on
        checkpoint, mark the sessions                     the update is on disk, or it never was
        prove: held-out tasks, live sessions, or both
        promote                                           between two tokens, if it is proven

What serves and what is trained are two copies. A candidate that is not proven to be better yet is
trained on, for single updates are small; one that is proven to be worse is left, and training goes
on from what serves, with the optimizer's state of then.

A session counts as trained when the checkpoint of its update is complete: that names its sessions,
and they are marked in the store at once, or at the next start. So after a kill the trainer's state
and the store agree, and no session is trained twice.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from tuner.assembly.stack import Stack
from tuner.config import RunConfig
from tuner.errors import ConfigError, TrainingError
from tuner.gateway import Session
from tuner.loop import update_weights_of
from tuner.run.directory import RunDirectory, read_metrics
from tuner.run.monitors import JsonlMonitor
from tuner.serving.held_out import HeldOut, Pairs
from tuner.serving.judged import JudgedSource, Taken
from tuner.serving.ledger import Arm, Judgement, Ledger
from tuner.serving.proof import Comparison, Decision
from tuner.serving.store import ServingStore
from tuner.serving.versions import Learned, Versions
from tuner.training import PolicyTrainer

logger = logging.getLogger("tuner.serving")
T = TypeVar("T")
LOOK = 1.0
"""Seconds after which is looked for news in any case."""


class Learner:
    """Learns from the sessions of a store, and promotes what is proven.

    Args:
        config: The effective configuration; `tuner.serving.promotion` says what a proof is.
        stack: What serves; it has a copy of the weights.
        trainer: Over the stack's model.
        store: The server's; used in the event loop alone.
        directory: The run's.
        held_out: Tries the held-out tasks; None where there are none.
    """

    def __init__(
        self,
        config: RunConfig,
        stack: Stack,
        trainer: PolicyTrainer,
        store: ServingStore,
        directory: RunDirectory,
        held_out: HeldOut | None,
    ) -> None:
        self._config = config
        self._stack = stack
        self._trainer = trainer
        self._store = store
        self._directory = directory
        self._held_out = held_out
        self._rules = config.tuner.serving.promotion
        self.ledger = Ledger(store)
        self.versions = Versions(config, stack, trainer, directory)
        self.source = JudgedSource(
            config, store, oldest=self._oldest, teacher_prompt=stack.teacher_prompt
        )
        self.failure: str | None = None
        self._thread = ThreadPoolExecutor(1, "tuner-training")
        self._metrics: JsonlMonitor | None = None
        self._live: Comparison | None = None
        self._given: dict[str, Session] = {}  # to the candidate, by id
        self._rollbacks = 0

    def _oldest(self) -> int:
        """The version that a token must be of, or a later one, to be trained."""
        line, bound = self.ledger.line, self._config.tuner.serving.max_staleness
        return line[max(0, len(line) - 1 - bound)]

    # The beginning

    async def begin(self) -> None:
        """Take up what a server left, or begin with version 0; nothing may be served before.

        Raises:
            TunerError: The checkpoint of what serves is missing or damaged.
        """
        newest = self._directory.sound_checkpoint(logger.warning)
        ledger, step = self.ledger, newest or 0
        if newest is None:
            self.versions.save(Learned(), spared=())
        if not ledger.line:
            why = "the weights that the configuration names"
            ledger.add("start", step, serving=step, step=step, why=why)
        serving = ledger.line[-1]
        self.versions.check(serving)
        before = read_metrics(self._directory.metrics, up_to=step)
        self._metrics = JsonlMonitor(self._directory.metrics, before)
        self._agree_with_store(step, logged=before[-1]["step"] if before else 0)
        if newest is not None:
            base = serving if ledger.reset_at >= step else step
            self.versions.train_from(base, self.versions.tensors(base), step=step)
        await self.versions.serve(serving, self.versions.tensors(serving))
        candidate = ledger.trial
        if candidate is not None:
            self.versions.check(candidate)
            await self._try_out(candidate)

    def _agree_with_store(self, step: int, *, logged: int) -> None:
        """Sessions are marked as the newest checkpoint has them, and its metrics are logged."""
        self._store.change("UPDATE sessions SET trained = NULL WHERE trained > ?", step)
        learned = self.versions.learned(step)
        self._store.mark_trained(learned.sessions, step)
        if learned.metrics and logged < step:
            self._log(step, learned.metrics)

    # The loop

    async def run(self) -> None:
        """Learn until this is cancelled, or cannot go on: then `failure` says why, and what serves
        goes on serving."""
        try:
            while True:
                if not await self.turn():
                    await self.source.news(LOOK)
        except TrainingError as error:
            self.failure = str(error)
            logger.error("learning has stopped, and serving goes on: %s", error)
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"
            logger.exception("learning has stopped, and serving goes on")

    async def turn(self) -> bool:
        """Decide what can be decided, and train what can be trained.

        Returns:
            Whether anything was done.

        Raises:
            TrainingError: Training failed.
        """
        decided = await self._look_at_live()
        groups = self.source.ready()
        if not groups:
            return decided
        step = self._trainer.step + 1
        found = self.source.taken(groups, step=step, version=self._trainer.step)
        before = self._rollbacks
        started = time.perf_counter()
        self.versions.changing()
        metrics = await self._aside(partial(self._update, found, step))
        if self._rollbacks != before:  # what was trained went on from what no longer serves
            await self._train_from_serving(step - 1)
            return True
        metrics |= found.seconds(0.0, time.perf_counter() - started, 0.0) | self.source.waiting
        self.versions.save(Learned(found.sessions, metrics), spared=self._spared())
        self._store.mark_trained(found.sessions, step)
        if found.batch.rows:
            metrics |= await self._prove(step)
        self._log(step, metrics)
        return True

    def _update(self, found: Taken, step: int) -> dict[str, float]:
        """The metrics of an update, in the thread; without a row the weights stay as they are."""
        metrics = dict(found.metrics)
        if found.batch.rows:
            update = update_weights_of(self._trainer, found.batch)
            metrics |= {f"train/{name}": value for name, value in update.items()}
        self._trainer.step = step
        return metrics

    async def _aside(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        assert self._metrics is not None, "begin() opens it"
        self._metrics.log(step, metrics)
        logger.info("update %d: %s", step, {name: metrics[name] for name in sorted(metrics)})

    def _spared(self) -> set[int]:
        """The versions whose checkpoints are kept: of those that served as many as the settings
        say, but what serves and the one before in any case."""
        line, keep = self.ledger.line, self._config.trainer.max_checkpoints_to_keep
        kept = line[-max(keep, 2) :] if keep else line
        trial = self.ledger.trial
        return {*kept, *([] if trial is None else [trial])}

    # Proofs

    async def _prove(self, step: int) -> dict[str, float]:
        """What the newest weights come to, by the kind of proof that is wanted."""
        by, serving = self._rules.by, self.versions.serving
        if by == "always":
            await self._promote(step, "every update is promoted (promotion.by: always)", {})
        elif self.ledger.trial is not None:
            pass  # sessions are given to an earlier candidate, which is decided first
        elif by == "live":
            await self._begin_trial(step, "its share of new sessions is given to it", {})
        else:
            return await self._try_held_out(step, serving)
        return {}

    async def _try_held_out(self, step: int, serving: int) -> dict[str, float]:
        assert self._held_out is not None, "the settings were checked"
        before = self._rollbacks
        self._held_out.forget(step)
        engine = await self.versions.own()
        pairs = await self._held_out.compare(serving, step, engine)
        if self._rollbacks != before:  # it is not known which weights served in the middle
            self._held_out.forget(serving)
            return dict(pairs.metrics)
        decision = decision_of(self._rules, pairs)
        if decision.verdict == "promote" and self._rules.by == "both":
            await self._begin_trial(step, decision.text, numbers(decision))
        else:
            await self._act(step, decision)
        return dict(pairs.metrics)

    async def _act(self, version: int, decision: Decision) -> None:
        """Do what a proof says of a candidate."""
        if decision.verdict == "promote":
            await self._promote(version, decision.text, numbers(decision))
            return
        step, serving = self._trainer.step, self.versions.serving
        worse = decision.verdict == "keep" and decision.upper < 0
        kind = "keep" if decision.verdict == "keep" else "not yet"
        self.ledger.add(
            kind,
            version,
            serving=serving,
            step=step,
            why=decision.text,
            reset=worse,
            **numbers(decision),
        )
        logger.info("version %d: %s: %s", version, kind, decision.text)
        if worse:
            await self._train_from_serving(step)

    async def _promote(self, version: int, why: str, data: Mapping[str, Any]) -> None:
        tensors = await self._aside(partial(self.versions.tensors, version))
        serving, step = self.versions.serving, self._trainer.step
        self.ledger.add("promote", version, serving=serving, step=step, why=why, **data)
        logger.info("version %d is promoted: %s", version, why)
        await self.versions.serve(version, tensors)

    async def rollback(self) -> int:
        """Let the version that served before serve again; training goes on from there.

        Returns:
            The version that serves now.

        Raises:
            ConfigError: Nothing was promoted that could be taken back.
        """
        line = self.ledger.line
        if len(line) < 2:
            raise ConfigError(f"version {line[0]} serves, and nothing was promoted before it")
        version = line[-2]
        self._rollbacks += 1
        running = self.versions.training
        tensors = await asyncio.to_thread(self.versions.tensors, version)
        step = self._trainer.step
        why = f"version {line[-1]} was taken back"
        self.ledger.add("rollback", version, serving=line[-1], step=step, why=why, reset=True)
        logger.warning("version %d serves again: %s", version, why)
        await self.versions.serve(version, tensors)
        self._end_trial()
        if not running:
            await self._train_from_serving(step)
        return version

    async def _train_from_serving(self, step: int) -> None:
        version = self.versions.serving
        tensors = await self._aside(partial(self.versions.tensors, version))
        await self._aside(partial(self.versions.train_from, version, tensors, step=step))

    # Live sessions

    async def _begin_trial(self, version: int, why: str, data: Mapping[str, Any]) -> None:
        serving, step = self.versions.serving, self._trainer.step
        self.ledger.add("trial", version, serving=serving, step=step, why=why, **data)
        await self._try_out(version)

    async def _try_out(self, version: int) -> None:
        tensors: Mapping[str, Tensor] = await self._aside(partial(self.versions.tensors, version))
        await self.versions.try_out(version, tensors)
        self._live = comparison_of(self._rules)
        for one in self.ledger.counted(version):
            self._live.add(one.arm, one.reward)

    def opened(self, session: Session) -> None:
        """Give a new session its arm, where a candidate is being tried."""
        candidate = self.ledger.trial
        if candidate is None or self._live is None:
            return
        arm: Arm = "serving"
        if _share(session.id) < self._config.tuner.serving.canary:
            arm = "candidate"
        self.ledger.assign(session.id, candidate, arm)
        self._place(session, arm)

    def restored(self, session: Session) -> None:
        """Give a session of an earlier start the arm that it had, if its trial goes on."""
        found = self.ledger.arm(session.id)
        if found is not None and found[0] == self.ledger.trial:
            self._place(session, found[1])

    def _place(self, session: Session, arm: Arm) -> None:
        if arm == "candidate":
            assert self.versions.canary is not None, "a trial has an engine"
            session.service = replace(self._stack.gateway.service, engine=self.versions.canary)
            self._given[session.id] = session

    def sealed(self, session_id: str) -> None:
        """A session takes no more calls."""
        self._given.pop(session_id, None)
        self.source.told()

    async def _look_at_live(self) -> bool:
        """Count what was judged in the trial, and act on what that comes to."""
        candidate = self.ledger.trial
        if candidate is None or self._live is None:
            return False
        found = self._judged(candidate)
        if not found:
            return False
        self.ledger.count(found)
        for one in found:
            self._live.add(one.arm, one.reward)
        decision = self._live.decision()
        if decision.verdict == "not yet":
            return False
        await self._act(candidate, decision)
        self._end_trial()
        return True

    def _judged(self, candidate: int) -> list[Judgement]:
        found = []
        for id_, arm in self.ledger.uncounted(candidate).items():
            try:
                session = self._store.session(id_)
            except LookupError:  # it was deleted
                continue
            if session.ended is not None and session.reward is not None:
                found.append(Judgement(id_, arm, session.reward))
        return found

    def _end_trial(self) -> None:
        """Sessions of the candidate go on with what serves."""
        self._live = None
        for session in self._given.values():
            session.service = self._stack.gateway.service
        self._given.clear()

    # For people

    def models(self) -> dict[str, Any]:
        """What serves, what is tried, and what was decided: as `GET /tuner/v1/models` gives it."""
        decisions = self.ledger.decisions()
        serving, trial = self.versions.serving, self.ledger.trial
        since = next(d.at for d in reversed(decisions) if d.kind in _SERVES)
        candidate: dict[str, Any] | None = None
        if trial is not None and self._live is not None:
            candidate = {"version": trial, **numbers(self._live.decision())}
        return {
            "serving": {"version": serving, "since": since},
            "candidate": candidate,
            "history": [one.shown() for one in decisions],
            "learning": {
                "updates": self._trainer.step,
                "failure": self.failure,
                **self.source.waiting,
            },
        }

    async def aclose(self) -> None:
        await asyncio.to_thread(self._thread.shutdown)
        if self._metrics is not None:
            self._metrics.close()
        await self.versions.aclose()


_SERVES = ("start", "promote", "rollback")


def comparison_of(rules: Any) -> Comparison:
    """A comparison of what serves with a candidate, by the settings."""
    raise NotImplementedError


def decision_of(rules: Any, pairs: Pairs) -> Decision:
    """What the held-out tasks say of a candidate."""
    comparison = comparison_of(rules)
    for serving, candidate in pairs.rewards:
        comparison.add_pair(serving, candidate)
    decision = comparison.decision()
    why_not = pairs.why_not
    if decision.verdict == "promote" and why_not is not None:
        return replace(decision, verdict="not yet", text=f"not yet: {why_not}")
    return decision


def numbers(decision: Decision) -> dict[str, Any]:
    """What a decision was made by."""
    names = ("estimate", "lower", "upper", "sessions", "expected_more")
    return {name: getattr(decision, name) for name in names}


def _share(session_id: str) -> float:
    """A number in [0, 1) that a session's id stands for, spread evenly."""
    digest = hashlib.blake2b(session_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
