"""The rollout engine of the loop in the open: batches of trajectories, at once or ahead of time."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from typing import Any

import torch

from tuner.areal.batch import Account, TrajectoryBatch
from tuner.areal.config import InferenceEngineConfig
from tuner.areal.dataloader import endless
from tuner.areal.engine import SessionEngine
from tuner.areal.requests import ModelRequest, ModelResponse
from tuner.areal.rows import AcceptFunction, Group, Rollout, group_of
from tuner.areal.run import Run
from tuner.areal.tensors import concat_padded_tensors
from tuner.areal.workflows import Runnable
from tuner.assembly.parameters import adds_up, selection
from tuner.errors import ConfigError, TrainingError
from tuner.gateway import SamplingDefaults
from tuner.rollout.schedule import Ahead, admissible
from tuner.traces import RolloutId


class RolloutEngine:
    """Generates with the weights that the run's actor trains.

    Its verbs are plain functions, except `agenerate`; they may be called where an event loop is
    running, as in a notebook, and then hold it up until they are done.

    Args:
        config: The section of a `GRPOConfig`; or the run that it shares with an actor.
        max_head_offpolicyness: Updates by which a sample of `prepare_batch` may be older than the
            weights that it trains; None: the section's, or 0.
    """

    def __init__(
        self, config: InferenceEngineConfig | Run, *, max_head_offpolicyness: int | None = None
    ) -> None:
        self._run = config if isinstance(config, Run) else config.run
        if max_head_offpolicyness is None:
            max_head_offpolicyness = getattr(config, "max_head_offpolicyness", 0)
        self._staleness = max_head_offpolicyness
        self._begun = 0
        self._accepted = 0
        self._ahead: Ahead[Group] = Ahead()
        self._rows: dict[int, dict[str, Any]] = {}
        self._batches: tuple[Any, Iterator[Any]] | None = None
        self._waiting: list[dict[str, Any]] = []
        self._session: SessionEngine | None = None
        self._slots: asyncio.Semaphore | None = None

    def initialize(self, addr: str | None = None) -> None:
        """Load the model, unless the actor did.

        Raises:
            ConfigError: An address is given: generation runs here, not on a server.
        """
        if addr is not None:
            raise ConfigError(
                f"addr is {addr!r}, but generation runs in this process: leave it out"
            )
        _ = self._run.stack

    def destroy(self) -> None:
        """Cancel what was begun ahead of time."""
        if len(self._ahead):
            self._run.call(self._ahead.cancel)
        self._rows.clear()
        self._batches, self._waiting = None, []

    @property
    def tokenizer(self) -> Any:
        """The model's."""
        return self._run.stack.tokenizer

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """One answer outside of any rollout: it is not recorded, and never trained.

        Raises:
            As `SessionEngine.agenerate`; `TrainingError` while nothing can be generated.
        """
        self._run.check_can_generate()
        gateway = self._run.stack.gateway
        if self._session is None:
            self._session = SessionEngine(gateway.open_session("direct", recorded=False))
        return await self._elsewhere(self._session.agenerate(req))

    async def _elsewhere(self, work: Coroutine[Any, Any, ModelResponse]) -> ModelResponse:
        if asyncio.get_running_loop() is self._run.loop:
            return await work
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._run.loop))

    def rollout_batch(
        self,
        data: Sequence[dict[str, Any]],
        workflow: Any,
        *,
        group_size: int = 1,
        should_accept_fn: AcceptFunction | None = None,
    ) -> TrajectoryBatch:
        """Run a workflow on every row and wait for all of them.

        Args:
            data: Rows of the dataset.
            workflow: As `Runnable` takes.
            group_size: Rollouts of each row; their rewards are compared. 1: the workflow gathers a
                group itself, and each of its trajectories counts.
            should_accept_fn: Sees the tensors of one row's rollouts, and says whether to train
                them.

        Returns:
            The trajectories of all groups that are left, in the order of the rows.

        Raises:
            TrainingError: Nothing is left to train; or generation is paused.
            FunctionError: The workflow returned what cannot be trained as it says.
            ConfigError: The workflow and the configuration do not go together.
        """
        self._run.check_can_generate()
        runnable = Runnable(workflow)
        runnable.check_settings(self._run.config)

        async def all_groups() -> list[Group]:
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [
                        group.create_task(self._group(task, runnable, group_size, should_accept_fn))
                        for task in data
                    ]
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from None
            return [task.result() for task in tasks]

        return _joined(self._run.call(all_groups))

    def prepare_batch(
        self,
        dataloader: Any,
        workflow: Any,
        *,
        group_size: int = 1,
        should_accept_fn: AcceptFunction | None = None,
    ) -> TrajectoryBatch:
        """The next batch, with groups begun ahead of time as far as staleness allows.

        What is begun goes on while the caller trains. A group that is left out is replaced by
        another, and counted. The arguments apply to groups that are begun from now on.

        Args:
            dataloader: Gives batches of rows; its `batch_size` is the number of groups in a step.
                Gone through again and again.
            workflow, group_size, should_accept_fn: As in `rollout_batch`.

        Returns:
            As many groups as a batch of the dataloader has rows, the oldest first.

        Raises:
            TrainingError: No group of `tuner.signal_patience` batches was left to train; or
                generation is paused.
            FunctionError: The workflow returned what cannot be trained as it says.
            ConfigError: The workflow and the configuration do not go together.
        """
        self._run.check_can_generate()
        runnable = Runnable(workflow)
        runnable.check_settings(self._run.config)
        batch = int(dataloader.batch_size)
        done: list[tuple[int, Group]] = []
        left_out: list[Group] = []

        async def collect() -> None:
            while len(done) < batch:
                self._begin(dataloader, runnable, batch, len(done), group_size, should_accept_fn)
                if not len(self._ahead):
                    raise TrainingError(
                        f"no group may be begun: the weights have seen {self.get_version()} "
                        f"updates, and the samples of {self._accepted // batch} more batches are "
                        f"out; call actor.update_weights() after each batch, or raise "
                        f"max_head_offpolicyness ({self._staleness})"
                    )
                await self._ahead.until(lambda: bool(self._ahead.ended))
                # Oldest first, and no more than are needed: the others stay for the next batch.
                numbers = self._ahead.ended[: batch - len(done)]
                for number, group in zip(numbers, self._ahead.take(numbers), strict=True):
                    del self._rows[number]
                    if group.tensors is None:
                        left_out.append(group)
                        self._check_patience(len(done), left_out, batch)
                    else:
                        done.append((number, group))
            self._accepted = self._counted(batch) + batch
            self._begin(dataloader, runnable, batch, 0, group_size, should_accept_fn)

        self._run.call(collect)
        groups = [group for _, group in sorted(done, key=lambda entry: entry[0])]
        return _joined([*groups, *left_out])

    def _begin(
        self,
        dataloader: Any,
        runnable: Runnable,
        batch: int,
        done: int,
        group_size: int,
        accept: AcceptFunction | None,
    ) -> None:
        """Begin as many groups as staleness allows."""
        if self._batches is None:
            self._batches = dataloader, endless(dataloader)
        elif self._batches[0] is not dataloader:
            self._batches, self._waiting = (dataloader, endless(dataloader)), []
        allowed = admissible(
            max_running=max(1, self._run.config.explorer.runner_per_model // group_size),
            running=len(self._ahead),
            accepted=self._counted(batch) + done,
            batch=batch,
            version=self.get_version(),
            staleness=self._staleness,
        )
        for _ in range(allowed):
            if not self._waiting:
                self._waiting = list(next(self._batches[1]))
            row = self._waiting.pop(0)
            work = self._group(row, runnable, group_size, accept)
            self._rows[self._begun] = row
            self._ahead.begin(self._begun, work)

    def _counted(self, batch: int) -> int:
        """Groups that were handed out; after a resume those of the updates before."""
        return max(self._accepted, self.get_version() * batch)

    def _check_patience(self, done: int, left_out: Sequence[Group], batch: int) -> None:
        patience = self._run.config.tuner.signal_patience
        if not done and len(left_out) >= patience * batch:
            raise _nothing_left(sum((group.account for group in left_out), Account()))

    def _group(
        self,
        task: dict[str, Any],
        runnable: Runnable,
        group_size: int,
        accept: AcceptFunction | None,
    ) -> Coroutine[Any, Any, Group]:
        """One row's rollouts; counted now, run when it is awaited."""
        if group_size < 1:
            raise ConfigError(f"group_size is {group_size}, but must be at least 1")
        self._begun += 1
        return self._run_group(self._begun, task, runnable, group_size, accept)

    async def _run_group(
        self,
        number: int,
        task: dict[str, Any],
        runnable: Runnable,
        group_size: int,
        accept: AcceptFunction | None,
    ) -> Group:
        ids = [RolloutId(number, 0, rollout, "rollout") for rollout in range(group_size)]
        try:
            async with asyncio.TaskGroup() as group:
                rollouts = [group.create_task(self._rollout(task, id, runnable)) for id in ids]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        config = self._run.config
        return group_of(
            [r.result() for r in rollouts], selection(config), accept, adds_up=adds_up(config)
        )

    async def _rollout(self, task: dict[str, Any], id: RolloutId, runnable: Runnable) -> Rollout:
        config, runner = self._run.config, self._run.stack.runner
        assert runner is not None, "the loop in the open always has a workflow"
        if self._slots is None:
            self._slots = asyncio.Semaphore(
                1 if config.tuner.deterministic else config.explorer.runner_per_model
            )
        args = config.rollout_args(config.buffer.explorer_input.taskset)
        async with self._slots:
            self._run.workflows[str(id)] = runnable
            try:
                attempts = await runner.run(task, id, SamplingDefaults(**args.model_dump()))
            finally:
                del self._run.workflows[str(id)]
        episodes = [runnable.episodes.pop(f"{id}-{trace.attempt}", None) for trace in attempts]
        return Rollout(tuple(attempts), episodes[-1])

    def pause(self) -> None:
        """Hold generation between two tokens until `resume`."""
        self._run.pause()

    def resume(self) -> None:
        """Let generation go on."""
        self._run.resume()

    def get_version(self) -> int:
        """Updates that the weights have seen which sample the next token."""
        return self._run.stack.engine.version

    def set_version(self, version: int) -> None:
        """Agree with the caller on the version; it counts updates, and is not set by hand.

        Raises:
            TrainingError: They do not agree.
        """
        if version != self.get_version():
            raise TrainingError(
                f"set_version({version}), but the engine serves weights after {self.get_version()} "
                "updates: versions count updates, and staleness is measured in them; number steps "
                "from actor.get_version(), and call actor.update_weights() after each ppo_update"
            )

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` goes on from, beside the data loader's own state: how many groups
        were begun, and the rows that the data loader gave and no batch has had yet."""
        rows = [self._rows[number] for number in sorted(self._rows)] + self._waiting
        return {"begun": self._begun - len(self._ahead), "rows": rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the state was taken; groups that were under way are run again."""
        self._begun, self._waiting = state["begun"], list(state["rows"])


def _joined(groups: Sequence[Group]) -> TrajectoryBatch:
    """Groups as one batch, numbered anew."""
    account = sum((group.account for group in groups), Account())
    parts = []
    rollouts = itertools.accumulate((group.rollouts for group in groups), initial=0)
    for number, (group, first) in enumerate(zip(groups, rollouts, strict=False)):
        if group.tensors is not None:
            tensors = dict(group.tensors)
            tensors["rollout_ids"] = tensors["rollout_ids"] + first
            tensors["group_ids"] = torch.full_like(tensors["rollout_ids"], number)
            parts.append(tensors)
    joined = concat_padded_tensors(parts) if parts else None
    if joined is None:
        raise _nothing_left(account)
    return TrajectoryBatch(joined, account, [t for group in groups for t in group.traces])


def _nothing_left(account: Account) -> TrainingError:
    outcomes = ", ".join(f"{count} {name}" for name, count in account.outcomes.items()) or "none"
    last = f"; the last error: {account.errors[-1]}" if account.errors else ""
    return TrainingError(f"no trajectory is left to train; rollouts: {outcomes}{last}")
