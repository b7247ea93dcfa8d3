"""A server that learns while it serves, top to bottom: take, train, save, prove, promote.

    whenever there are enough judged sessions:
        found = taken(ready)                              each session once
        scored = compute_ref_logp(compute_advantages(batch))
        metrics = ppo_update(scored)                      in a thread; generation continues
        checkpoint, mark the sessions                     the update is on disk, or never happened
        prove: held-out tasks, live sessions, or both
        promote                                           between two tokens, if it is proven

The serving and the trained weights are two copies. A candidate that is not proven to be better yet
is trained further, because single updates are small; one that is proven to be worse is abandoned,
and training continues from the serving weights, with the optimizer's state at that time.

A session counts as trained when the checkpoint of its update is complete: that names its sessions,
and they are marked in the store at once, or at the next start. So after a kill the trainer's state
and the store agree, and no session is trained twice.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from tuner.config import RunConfig
from tuner.config.source import without_secrets
from tuner.errors import ConfigError, TunerError
from tuner.gateway import Session
from tuner.loop import update
from tuner.runs.console import JsonlMonitor
from tuner.runs.directory import RunDirectory, read_metrics
from tuner.runs.stack import Stack
from tuner.runs.statistics import Decision
from tuner.serving.learning.judged import LOOK, JudgedSource, SessionsData
from tuner.serving.learning.ledger import Kind, Ledger, numbers
from tuner.serving.learning.proving import Canary, HeldOut
from tuner.serving.learning.versions import UpdateRecord, Versions
from tuner.serving.serving_store import ServingStore
from tuner.training.trainer import PolicyTrainer

logger = logging.getLogger("tuner.serving")
T = TypeVar("T")


class Learner:
    """Learns from the sessions of a store, and promotes proven versions.

    Args:
        config: The effective configuration; `tuner.serving.promotion` defines a proof.
        stack: The serving stack, with a copy of the weights.
        trainer: Trains the stack's model.
        store: The server's store; used only in the event loop.
        directory: The run directory.
        held_out: Evaluates held-out tasks; None if the settings want no such proof.

    Attributes:
        failure: Why learning has stopped, or None.
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
        self._canary = Canary(
            self.ledger,
            store,
            self.versions,
            stack.gateway.service,
            self._rules,
            share=config.tuner.serving.canary,
        )
        self.failure: str | None = None
        self._thread = ThreadPoolExecutor(1, "tuner-training")
        self._metrics: JsonlMonitor | None = None
        self._kept = 0  # the update of the newest checkpoint
        self._busy = False  # somebody uses the trainer's weights
        self._rollbacks = 0
        self._deciding = asyncio.Lock()

    def _oldest(self) -> int:
        """Minimum version of a trained token."""
        line, bound = self.ledger.line, self._config.tuner.serving.max_staleness
        return line[max(0, len(line) - 1 - bound)]

    # Start

    async def begin(self) -> None:
        """Restore what a server left, or start with version 0; nothing may be served before.

        Raises:
            TunerError: The checkpoint of the serving weights is missing or damaged.
        """
        ledger, newest = self.ledger, self._directory.sound_checkpoint(logger.warning)
        self._kept = newest or 0
        if newest is None:
            self.versions.save(UpdateRecord(), spared=())
        if not ledger.line:
            ledger.add("start", self._kept, serving=self._kept, step=self._kept, why=_START)
        serving, candidate = ledger.line[-1], ledger.trial
        self.versions.check(serving)
        self._agree_with_store()
        if newest is not None:
            base = serving if ledger.reset_at >= newest else newest
            self.versions.train_from(base, self.versions.tensors(base), step=newest)
        await self.versions.serve(serving, self.versions.tensors(serving))
        if candidate is not None:
            self.versions.check(candidate)
            await self._canary.begin(candidate, self.versions.tensors(candidate))

    def _agree_with_store(self) -> None:
        """Mark sessions as the newest checkpoint has them, and log its metrics."""
        step, learned = self._kept, self.versions.learned(self._kept)
        self._store.change("UPDATE sessions SET trained = NULL WHERE trained > ?", step)
        self._store.mark_trained(learned.sessions, step)
        before = read_metrics(self._directory.metrics, up_to=step)
        self._metrics = JsonlMonitor(self._directory.metrics, before)
        if learned.metrics and (not before or before[-1]["step"] < step):
            self._log(step, learned.metrics)

    # The loop

    async def run(self) -> None:
        """Learn until cancelled or failed: then `failure` says why, and serving continues."""
        try:
            while True:
                if not await self.turn():
                    await asyncio.sleep(LOOK)
        except TunerError as error:
            self.failure = without_secrets(str(error))
            logger.error("learning has stopped, serving continues: %s", error)
        except Exception as error:
            self.failure = without_secrets(f"{type(error).__name__}: {error}")
            logger.exception("learning has stopped, serving continues")

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
        async with self._deciding:  # no rollback is in progress
            self._busy, before = True, self._rollbacks
        try:
            found = self.source.taken(groups, step=self._kept + 1, version=self._kept)
            await self._step(found, as_of=before)
            while self._rollbacks != before:
                before = self._rollbacks
                await self._train_from_serving()
        finally:
            self._busy = False
        return True

    async def _step(self, found: SessionsData, *, as_of: int) -> None:
        """One update, from its sessions to the decision about it."""
        step, started = self._kept + 1, time.perf_counter()
        self.versions.changing()
        metrics = await self._aside(partial(self._update, found, step))
        metrics |= found.seconds(0.0, time.perf_counter() - started, 0.0)
        async with self._deciding:
            if self._rollbacks != as_of:  # it was trained from weights that no longer serve
                return
            await self._keep(step, UpdateRecord(found.sessions, metrics))
        if found.batch.rows:
            metrics |= await self._prove(step, as_of=as_of)
        self._log(step, metrics | self.source.waiting)

    async def _keep(self, step: int, learned: UpdateRecord) -> None:
        """Make an update permanent: from now on a kill does not undo it."""
        gone = await self._aside(partial(self.versions.save, learned, spared=self._spared()))
        self._store.mark_trained(learned.sessions, step)
        self._kept = step
        if self._held_out is not None:
            self._held_out.forget({*gone, step})  # including a previous process's

    def _update(self, found: SessionsData, step: int) -> dict[str, float]:
        """The metrics of an update, in the thread; without rows the weights stay the same."""
        metrics = dict(found.metrics)
        if found.batch.rows:
            changed = update(self._trainer, found.batch)
            metrics |= {f"train/{name}": value for name, value in changed.items()}
        self._trainer.step = step
        return metrics

    async def _aside(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        assert self._metrics is not None, "begin() opens it"
        self._metrics.log(step, metrics)
        shown = {name: metrics[name] for name in _SHOWN if name in metrics}
        logger.info("update %d", step, extra={"said": shown})

    def _spared(self) -> set[int]:
        """Versions whose checkpoints are kept: as many of those that served as the settings
        say, and always the serving one and the one before."""
        line, keep = self.ledger.line, self._config.trainer.max_checkpoints_to_keep
        trial = self.ledger.trial
        return {*(line[-max(keep, 2) :] if keep else line), *([] if trial is None else [trial])}

    async def _train_from_serving(self) -> None:
        version = self.versions.serving
        tensors = await self._aside(partial(self.versions.tensors, version))
        await self._aside(partial(self.versions.train_from, version, tensors, step=self._kept))

    # Proofs

    async def _prove(self, step: int, *, as_of: int) -> dict[str, float]:
        """Decide about the newest weights by the required proof, if possible now; returns the
        metrics of their evaluation."""
        if self._rules.by == "always":
            await self._promote(step, _ALWAYS, as_of=as_of)
        elif self._canary.candidate is not None:
            pass  # an earlier candidate is in a trial, which is decided first
        elif self._rules.by == "live":
            await self._begin_trial(step, _SHARE, as_of=as_of)
        else:
            return await self._try_held_out(step, as_of=as_of)
        return {}

    async def _try_held_out(self, step: int, *, as_of: int) -> dict[str, float]:
        assert self._held_out is not None, "the settings were checked"
        serving = self.versions.serving
        pairs = await self._held_out.compare(serving, step, await self.versions.own())
        if self._rollbacks != as_of:  # unclear which weights served meanwhile
            self._held_out.forget({serving})
            return dict(pairs.metrics)
        decision = pairs.decision(self._rules)
        if decision.verdict == "promote" and self._rules.by == "both":
            await self._begin_trial(step, decision.text, decision, as_of=as_of)
        else:
            await self._act(step, decision, as_of=as_of)
        return dict(pairs.metrics)

    async def _look_at_live(self) -> bool:
        """Act on the live results of a candidate; returns whether it was decided."""
        candidate, decision = self._canary.candidate, self._canary.look()
        if candidate is None or decision is None or decision.verdict == "not yet":
            return False
        await self._act(candidate, decision, as_of=self._rollbacks)
        return True

    async def _act(self, version: int, decision: Decision, *, as_of: int) -> None:
        """Act on a proof about a candidate, unless there was a rollback in between."""
        if decision.verdict == "promote":
            await self._promote(version, decision.text, decision, as_of=as_of)
            return
        async with self._deciding:
            if self._rollbacks != as_of:
                return
            kept = decision.verdict == "keep"
            worse = kept and decision.upper <= 0
            kind: Kind = "keep" if kept else "not yet"
            self._decide(kind, version, decision.text, decision, reset=worse)
            if kept:
                self._canary.end()
            if worse:
                await self._train_from_serving()

    async def _promote(
        self, version: int, why: str, proof: Decision | None = None, *, as_of: int
    ) -> None:
        async with self._deciding:
            if self._rollbacks != as_of:
                return
            tensors = await self._aside(partial(self.versions.tensors, version))
            self._decide("promote", version, why, proof)
            await self.versions.serve(version, tensors)
            self._canary.end()

    async def _begin_trial(
        self, version: int, why: str, proof: Decision | None = None, *, as_of: int
    ) -> None:
        async with self._deciding:
            if self._rollbacks != as_of:
                return
            tensors: Mapping[str, Tensor]
            tensors = await self._aside(partial(self.versions.tensors, version))
            self._decide("trial", version, why, proof)
            await self._canary.begin(version, tensors)

    async def rollback(self) -> int:
        """Serve the previously serving version again; training continues from there.

        Returns:
            The version that serves now.

        Raises:
            ConfigError: There is no promotion to roll back.
        """
        async with self._deciding:
            line = self.ledger.line
            if len(line) < 2:
                raise ConfigError(
                    f"version {line[0]} serves, and there is no promotion to roll back"
                )
            if not self._directory.checkpoint(line[-2]).is_dir():
                raise ConfigError(
                    f"version {line[-2]} served before, and its checkpoint was deleted: raise "
                    "trainer.max_checkpoints_to_keep, or leave it out to keep all"
                )
            tensors = await asyncio.to_thread(self.versions.tensors, line[-2])
            self._rollbacks += 1
            self._decide("rollback", line[-2], f"version {line[-1]} was taken back", reset=True)
            await self.versions.serve(line[-2], tensors)
            self._canary.end()
            if not self._busy:
                await self._train_from_serving()
            return line[-2]

    def _decide(
        self,
        kind: Kind,
        version: int,
        why: str,
        proof: Decision | None = None,
        *,
        reset: bool = False,
    ) -> None:
        serving, step = self.versions.serving, self._kept
        self.ledger.add(
            kind, version, serving=serving, step=step, why=why, reset=reset, proof=proof
        )
        logger.info("%s, version %d beside %d: %s", kind, version, serving, why)

    # Interface to the server

    def placed(self, session: Session, *, new: bool) -> None:
        """See `Canary.placed`."""
        self._canary.placed(session, new=new)

    def noted(self, session_id: str) -> None:
        self._canary.noted(session_id)

    @property
    def updates(self) -> int:
        """Number of updates, including abandoned ones."""
        return self._kept

    def models(self) -> dict[str, Any]:
        """The serving version, the candidate, and the decisions: the body of `GET
        /tuner/v1/models`."""
        decisions = self.ledger.decisions()
        since = next(one.at for one in reversed(decisions) if one.kind in _SERVES)
        candidate: dict[str, Any] | None = None
        live = self._canary.decision
        if live is not None:
            candidate = {"version": self._canary.candidate, "why": live.text, **numbers(live)}
        elif decisions[-1].kind == "not yet":
            candidate = decisions[-1].shown()
        return {
            "serving": {"version": self.versions.serving, "since": since},
            "candidate": candidate,
            "history": [one.shown() for one in decisions],
            "learning": {"updates": self._kept, "failure": self.failure, **self.source.waiting},
        }

    async def aclose(self) -> None:
        """Let a running update finish, without saving it."""
        await asyncio.to_thread(self._thread.shutdown)
        if self._metrics is not None:
            self._metrics.close()
        await self.versions.aclose()


_START = "the weights that the configuration names"
_ALWAYS = "every update is promoted (tuner.serving.promotion.by is always)"
_SHARE = "new sessions are given to it, as many as tuner.serving.canary says"
_SERVES = ("start", "promote", "rollback")
_SHOWN = ("reward/mean", "sessions/taken", "tokens/trained", "sessions/unjudged", "time/training")
