"""One stage of Trinity-RFT: its explorer, its trainer, or both, from their start to their end.

The same calls to the same actors as Trinity-RFT's own launcher makes. That one waits for as long as
it takes and takes an explorer that gave up for one that is done; here somebody looks meanwhile, and
the end of one of the two is told from its failure.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tuner.errors import TrainingError

if TYPE_CHECKING:
    from trinity.common.config import Config

POLL_SECONDS = 0.5
# How long actors may take to close their monitors when the run has failed, and when it has not.
_FAREWELL_SECONDS, _CLOSING_SECONDS = 10.0, 120.0


class _TooLate(Exception):
    """A deadline of ours has passed; Ray's and the actors' own are `TimeoutError`s."""


class Stage:
    """The actors of one run, made when it is entered and sent home when it is left.

    Args:
        config: As Trinity-RFT's check left it.
        look: Called twice a second while there is something to wait for; what it raises ends the
            stage.
        explored: Whether the explorer has done every step that was asked for.
    """

    def __init__(
        self, config: Config, *, look: Callable[[], None], explored: Callable[[], bool]
    ) -> None:
        self._config = config
        self._look = look
        self._explored = explored

    def run(self) -> None:
        """Run the configuration's mode to its end.

        Raises:
            TrainingError: The explorer gave up, or the actors could not be started in time.
            Exception: What `look` or an actor raised.
        """
        from trinity.buffer.pipelines.task_pipeline import check_and_run_task_pipeline

        check_and_run_task_pipeline(self._config)
        if self._config.mode in ("both", "colocate"):
            self._both()
        elif self._config.mode == "train":
            self._one(self._trainer(), "train", synchronize=True)
        elif self._config.mode == "bench":
            self._config.explorer.name = "benchmark"
            self._one(self._explorer(), "benchmark", synchronize=False)
        else:  # explore, serve
            self._one(self._explorer(), self._config.mode, synchronize=True)

    def _explorer(self) -> Any:
        from trinity.explorer.explorer import Explorer

        return Explorer.get_actor(self._config)

    def _trainer(self) -> Any:
        from trinity.trainer.trainer import Trainer

        return Trainer.get_actor(self._config)

    def _one(self, actor: Any, method: str, *, synchronize: bool) -> None:
        with self._closing([actor]):
            self._start([actor])
            if synchronize:
                self._finish([actor.sync_weight.remote()])
            self._finish([getattr(actor, method).remote()])

    def _both(self) -> None:
        from trinity.common.constants import SyncMethod
        from trinity.manager.synchronizer import Synchronizer

        explorer, trainer = self._explorer(), self._trainer()
        with self._closing([explorer, trainer]):
            self._start([explorer, trainer])
            if self._config.synchronizer.sync_method == SyncMethod.NCCL:
                synchronizer = Synchronizer.get_actor(namespace=self._config.ray_namespace)
                self._finish([synchronizer.coordinate_weight_sync_setup.remote()])
                self._finish([explorer.sync_weight.remote(), trainer.sync_weight.remote()])
            else:
                # The explorer takes the weights that are there: those of a run that goes on must
                # be, before it asks.
                self._finish([trainer.sync_weight.remote()])
                self._finish([explorer.sync_weight.remote()])
            exploring, training = explorer.explore.remote(), trainer.train.remote()
            done = self._finish([exploring, training], all_of_them=False)
            if exploring in done and training not in done:
                if not self._explored():
                    raise TrainingError("the explorer gave up before its last step")
                self._finish([training])

    def _start(self, actors: Sequence[Any]) -> None:
        """Wait for the models. A cluster that is too small for them would let us wait for ever."""
        limit = float(self._config.synchronizer.sync_timeout)
        deadline = time.monotonic() + limit
        for call in ("__ray_ready__", "prepare"):
            waiting = [getattr(actor, call).remote() for actor in actors]
            try:
                self._finish(waiting, deadline=deadline)
            except _TooLate:
                raise TrainingError(
                    f"the models were not ready after {limit:g} s (synchronizer.sync_timeout); "
                    f"{_resources()}"
                ) from None

    def _finish(
        self, waiting: Sequence[Any], *, all_of_them: bool = True, deadline: float | None = None
    ) -> list[Any]:
        """Wait for calls of actors; gives those that are done. Raises what a call raised."""
        import ray

        while True:
            count = len(waiting) if all_of_them else 1
            done, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=POLL_SECONDS)
            self._look()
            ray.get(done)
            if len(done) >= count:
                return list(done)
            if deadline is not None and time.monotonic() > deadline:
                raise _TooLate

    @contextlib.contextmanager
    def _closing(self, actors: Sequence[Any]) -> Iterator[None]:
        """Let the actors close their monitors and engines, whatever happens in the block."""
        import ray

        seconds = _FAREWELL_SECONDS
        try:
            yield
            seconds = _CLOSING_SECONDS
        finally:
            with contextlib.suppress(Exception):  # they may be dead
                closing = [actor.shutdown.remote() for actor in actors]
                ray.wait(closing, num_returns=len(closing), timeout=seconds)


def _resources() -> str:
    import ray

    def shown(found: dict[str, float]) -> str:
        return ", ".join(f"{found.get(name, 0):g} {name}" for name in ("GPU", "CPU"))

    return (
        f"the cluster has {shown(ray.cluster_resources())}, and {shown(ray.available_resources())} "
        "of them are free: lower cluster.gpu_per_node and explorer.rollout_model.engine_num, or "
        "wait until others have left"
    )
