"""The rollout engine of an explicit training loop: batches of rows in, batches of trajectories
out."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from typing import Any

import torch

from tuner.areal.agents import as_workflow
from tuner.areal.experiment import InferenceEngineConfig
from tuner.areal.group_rows import AcceptFunction, Group, group_of
from tuner.areal.shared_run import RUNNING, Run
from tuner.areal.token_workflow import Episode, ModelRequest, ModelResponse, SessionEngine
from tuner.areal.trajectories import concat_padded_tensors
from tuner.areal.trajectory_batch import Account, TrajectoryBatch
from tuner.errors import ConfigError, DatasetError, TrainingError
from tuner.rollouts.groups import WorkAhead, admissible
from tuner.runs.stack import adds_up, selection
from tuner.tasks.functions import check_settings
from tuner.tasks.selection import derive_seed
from tuner.traces import RolloutId


class RolloutEngine:
    """Generates with the weights that the run's actor trains.

    Its methods are plain functions, except `agenerate`; they may be called inside a running event
    loop, as in a notebook, and then block it until they return.

    Args:
        config: The section of a `GRPOConfig`; or the run that it shares with an actor.
        max_head_offpolicyness: Maximum number of updates by which a sample of `prepare_batch` may
            be older than the weights it trains; None: the section's, or 0.
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
        self._ahead: WorkAhead[list[Group]] = WorkAhead()
        self._rows: dict[int, dict[str, Any]] = {}
        self._batches: tuple[Any, Iterator[Any]] | None = None
        self._waiting: list[dict[str, Any]] = []
        self._session: SessionEngine | None = None

    def initialize(self, addr: str | None = None) -> None:
        """Load the model, unless the actor did.

        Raises:
            ConfigError: An address is given: generation runs here, not on a server.
        """
        if addr is not None:
            raise ConfigError(f"addr is {addr!r}, but generation runs in this process: remove it")
        _ = self._run.stack

    def destroy(self) -> None:
        """Cancel rollouts that were started in advance."""
        if len(self._ahead):
            self._run.call(self._ahead.cancel)
        self._rows.clear()
        self._batches, self._waiting = None, []

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self._run.stack.tokenizer

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """Sample one answer outside of any rollout: it is not recorded, and never trained.

        Raises:
            TrainingError: Generation is held or paused.
            ConfigError, RequestError, EngineError: Like `SessionEngine.agenerate`.
        """
        self._run.check_can_generate()
        gateway = self._run.stack.gateway
        if self._session is None:
            self._session = SessionEngine(gateway.open_session("direct", recorded=False))
        work = self._session.agenerate(req)
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
            workflow: Any workflow that `as_workflow` takes.
            group_size: Rollouts of each row; their rewards are compared. 1: the workflow collects a
                group itself, and each of its trajectories counts.
            should_accept_fn: Decides from the tensors of one row's rollouts whether they are
                trained.

        Returns:
            The trajectories of all accepted groups, in the order of the rows.

        Raises:
            TrainingError: There is nothing to train; or generation is paused.
            FunctionError: The workflow's result cannot be trained as declared.
            ConfigError: The workflow and the configuration contradict each other.
        """
        groups = self._groups_of(workflow, group_size, should_accept_fn)
        return _joined(self._run.call(lambda: groups(self._numbered(data))))

    def prepare_batch(
        self,
        dataloader: Any,
        workflow: Any,
        *,
        group_size: int = 1,
        should_accept_fn: AcceptFunction | None = None,
    ) -> TrajectoryBatch:
        """The next batch; starts groups in advance as far as staleness allows.

        Started groups continue while the caller trains. A dropped group is replaced by another, and
        counted. The arguments apply to groups that are started from now on.

        Args:
            dataloader: Gives batches of rows; its `batch_size` is the number of groups in a step.
                Iterated over repeatedly.
            workflow: Like in `rollout_batch`; also `group_size` and `should_accept_fn`.

        Returns:
            As many groups as a batch of the dataloader has rows, the oldest first.

        Raises:
            TrainingError: No group of `tuner.signal_patience` batches could be trained; or
                generation is paused.
            FunctionError: The workflow's result cannot be trained as declared.
            ConfigError: The workflow and the configuration contradict each other.
        """
        groups = self._groups_of(workflow, group_size, should_accept_fn)
        batch, patience = int(dataloader.batch_size), self._run.config.tuner.signal_patience
        done: list[tuple[int, Group]] = []
        left_out: list[Group] = []

        def begin(done: int) -> None:
            """Start as many groups as staleness allows."""
            most = self._run.config.concurrent_rollouts
            allowed = admissible(
                max_running=max(1, most // group_size),
                running=len(self._ahead),
                accepted=self._counted(batch) + done,
                batch=batch,
                version=self.get_version(),
                staleness=self._staleness,
            )
            rows = self._numbered([self._next_row(dataloader) for _ in range(allowed)])
            self._rows |= rows
            for number, row in rows.items():
                self._ahead.begin(number, groups({number: row}))

        async def collect() -> None:
            while len(done) < batch:
                begin(len(done))
                if not len(self._ahead):
                    raise TrainingError(
                        f"no group may be started: the weights have had {self.get_version()} "
                        f"updates, and the samples of {self._accepted // batch} more batches are "
                        f"out; call actor.update_weights() after each batch, or raise "
                        f"max_head_offpolicyness ({self._staleness})"
                    )
                await self._ahead.until(lambda: bool(self._ahead.ended))
                # Oldest first, and no more than needed: the others stay for the next batch.
                numbers = self._ahead.ended[: batch - len(done)]
                for number, (group,) in zip(numbers, self._ahead.take(numbers), strict=True):
                    del self._rows[number]
                    if group.tensors is None:
                        left_out.append(group)
                        if not done and len(left_out) >= patience * batch:
                            raise _nothing_left(left_out)
                    else:
                        done.append((number, group))
            self._accepted = self._counted(batch) + batch
            begin(0)

        self._run.call(collect)
        taken = [group for _, group in sorted(done, key=lambda entry: entry[0])]
        return _joined([*taken, *left_out])

    def _next_row(self, dataloader: Any) -> dict[str, Any]:
        """The next row of the data loader's batches, iterated over repeatedly."""
        if self._batches is None or self._batches[0] is not dataloader:
            if self._batches is not None:
                self._waiting = []
            self._batches = dataloader, _endless(dataloader)
        if not self._waiting:
            self._waiting = list(next(self._batches[1]))
        return self._waiting.pop(0)

    def _counted(self, batch: int) -> int:
        """Number of groups that were returned; after a resume those of the earlier updates."""
        return max(self._accepted, self.get_version() * batch)

    def _numbered(self, rows: Sequence[dict[str, Any]]) -> dict[int, dict[str, Any]]:
        """Rows by group number."""
        first = self._begun + 1
        self._begun += len(rows)
        return dict(enumerate(rows, first))

    def _groups_of(
        self, workflow: Any, group_size: int, accept: AcceptFunction | None
    ) -> Callable[[Mapping[int, dict[str, Any]]], Coroutine[Any, Any, list[Group]]]:
        """A function that runs a group of rollouts for each row, by number; checks the workflow and
        its settings first."""
        self._run.check_can_generate()
        workflow, config = as_workflow(workflow), self._run.config
        check_settings(workflow, config)
        if group_size < 1:
            raise ConfigError(f"group_size is {group_size}, but must be at least 1")

        async def run(rows: Mapping[int, dict[str, Any]]) -> list[Group]:
            episodes: dict[str, Episode] = {}
            wanted = {
                RolloutId(number, 0, rollout, "rollout"): row
                for number, row in rows.items()
                for rollout in range(group_size)
            }
            RUNNING.set((workflow, episodes))
            traces = await self._run.rollouts.run(wanted, self._run.defaults)
            rollouts = [list(attempts) for _, attempts in groupby(traces, lambda trace: trace.id)]
            return [
                group_of(list(group), episodes, selection(config), accept, adds_up=adds_up(config))
                for _, group in groupby(rollouts, lambda attempts: attempts[0].id.step)
            ]

        return run

    def pause(self) -> None:
        """Hold generation between two tokens until `resume`."""
        self._run.hold("paused", self._run.stack.engine.pause)

    def resume(self) -> None:
        """Continue generation."""
        self._run.release("paused")

    def get_version(self) -> int:
        """Version (number of updates) of the weights that sample the next token."""
        return self._run.stack.engine.version

    def set_version(self, version: int) -> None:
        """Check the caller's version; it counts updates and cannot be set.

        Raises:
            TrainingError: It differs.
        """
        if version != self.get_version():
            raise TrainingError(
                f"set_version({version}), but the engine serves weights after {self.get_version()} "
                "updates: versions count updates, and staleness is measured in them; number steps "
                "from actor.get_version(), and call actor.update_weights() after each ppo_update"
            )

    def state_dict(self) -> dict[str, Any]:
        """State for `load_state_dict`, in addition to the data loader's own: the number of started
        groups, and the data loader's rows that were not yet in a batch."""
        rows = [self._rows[number] for number in sorted(self._rows)] + self._waiting
        return {"begun": self._begun - len(self._ahead), "rows": rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state; groups in progress at that time are run again."""
        self._begun, self._waiting = state["begun"], list(state["rows"])


def _joined(groups: Sequence[Group]) -> TrajectoryBatch:
    """Groups as one batch, renumbered."""
    parts = []
    rollouts = accumulate((group.rollouts for group in groups), initial=0)
    for number, (group, first) in enumerate(zip(groups, rollouts, strict=False)):
        if group.tensors is not None:
            tensors = dict(group.tensors)
            tensors["rollout_ids"] = tensors["rollout_ids"] + first
            tensors["group_ids"] = torch.full_like(tensors["rollout_ids"], number)
            parts.append(tensors)
    joined = concat_padded_tensors(parts) if parts else None
    if joined is None:
        raise _nothing_left(groups)
    traces = [trace for group in groups for trace in group.traces]
    return TrajectoryBatch(joined, _account(groups), traces)


def _account(groups: Sequence[Group]) -> Account:
    return sum((group.account for group in groups), Account())


def _nothing_left(groups: Sequence[Group]) -> TrainingError:
    account = _account(groups)
    outcomes = ", ".join(f"{count} {name}" for name, count in account.outcomes.items()) or "none"
    last = f"; the last error: {account.errors[-1]}" if account.errors else ""
    return TrainingError(f"no trajectory is left to train; rollouts: {outcomes}{last}")


class StatefulDataLoader:
    """Iterates over a dataset in batches; each `iter` continues to the end of the epoch.

    The order of an epoch depends only on the seed and the epoch, so two numbers are its state.

    Args:
        dataset: Anything with a length and rows by index.
        batch_size: Rows in a batch.
        shuffle: Draw a new order for each epoch.
        seed: Seed of the orders.
        drop_last: Drop the last batch of an epoch if it is incomplete.
        collate_fn: Makes a batch from a list of rows.

    Raises:
        DatasetError: The dataset has no rows, or fewer than a batch and `drop_last` is set.
    """

    def __init__(
        self,
        dataset: Sequence[Any],
        batch_size: int = 1,
        *,
        shuffle: bool = False,
        seed: int = 42,
        drop_last: bool = True,
        collate_fn: Callable[[list[Any]], Any] = lambda rows: rows,
    ) -> None:
        if not len(dataset) or (drop_last and len(dataset) < batch_size):
            raise DatasetError(
                f"the dataset has {len(dataset)} rows and batch_size is {batch_size}: there is no "
                "full batch; lower batch_size or add rows"
            )
        self.dataset = dataset
        self.batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed
        self._drop_last = drop_last
        self._collate = collate_fn
        self._epoch = 0
        self._batch = 0

    def __len__(self) -> int:
        """Number of batches in an epoch."""
        rows = len(self.dataset)
        return rows // self.batch_size if self._drop_last else -(-rows // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        while self._batch < len(self):
            start = self._batch * self.batch_size
            rows = self._order()[start : start + self.batch_size]
            # Counted before the batch is used: the caller may save the state in the meantime.
            self._batch += 1
            yield self._collate([self.dataset[row] for row in rows])
        self._epoch, self._batch = self._epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        """State for `load_state_dict`."""
        return {"epoch": self._epoch, "batch": self._batch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Resume from a state."""
        self._epoch, self._batch = state["epoch"], state["batch"]

    def _order(self) -> list[int]:
        rows = list(range(len(self.dataset)))
        if self._shuffle:
            random.Random(derive_seed(self._seed, "epoch", self._epoch)).shuffle(rows)
        return rows


def _endless(dataloader: Any) -> Iterator[Any]:
    """Batches of consecutive epochs, each read again: `itertools.cycle` would repeat the batches of
    the first, in their order."""
    while True:
        yield from dataloader
