"""One stage of Trinity-RFT: the needs of each mode, its execution, and its success criterion.

| mode | rollouts | training | success |
|---|---|---|---|
| both, colocate | yes | yes | the requested steps were trained |
| explore | yes | no | every step of rollouts was handed to the trainer |
| train | no | yes | every step of the given buffer was trained |
| bench | evaluations | no | every row was judged with every checkpoint |
| serve | remote | no | the server ran until it was asked to stop |

The explorer, the trainer, or both run with the same calls to the same actors as in Trinity-RFT's
own launcher. That one waits without a limit and treats an explorer that gave up like one that is
done; here the run is monitored, and the end of an actor is told from its failure.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from tuner.config.keys import Problem
from tuner.config.load import RECORDED
from tuner.config.source import lookup
from tuner.errors import ConfigError, DatasetError, TrainingError
from tuner.traces import TraceStore
from tuner.trinity.installed import set_default

if TYPE_CHECKING:
    from trinity.common.config import Config

MODES = ("both", "colocate", "explore", "train", "bench", "serve")
_ANY_ADDRESS = ("0.0.0.0", "::")
SERVE_KEY = "TUNER_SERVE_KEY"
"""Variable with the key that the server of mode `serve` requires."""
# Modes that run the workflow.
ROLLS_OUT = ("both", "colocate", "explore", "bench")
# Modes that read the training tasks.
READS_TASKS = ("both", "colocate", "explore")
BUFFER = "buffer.trainer_input.experience_buffer"


def fill_mode(tree: dict[str, Any], mode: str, group_size: int) -> None:
    """Set unset keys of a mode that Trinity-RFT would require."""
    tree["mode"] = mode
    if mode == "bench":
        # Trinity-RFT reads no training tasks here, and requires their path if some are named.
        for key in ("taskset", "tasksets"):
            lookup(tree, "buffer.explorer_input", {}).pop(key, None)
        # Its other value creates a new run, which has no checkpoints.
        tree["continue_from_checkpoint"] = True
    if mode == "serve":
        # Trinity-RFT's own default is every address of the machine.
        set_default(tree, "explorer.listen_address", "127.0.0.1")
    if mode != "train":
        return
    path = str(lookup(tree, f"{BUFFER}.path", ""))
    set_default(tree, f"{BUFFER}.storage_type", "sql" if "://" in path else "file")
    recorded = lookup(tree, "algorithm.algorithm_type") in RECORDED
    if recorded and not lookup(tree, "trainer.save_interval"):
        # Trinity-RFT uses it in place of sync_interval, which may not be 0: only at the end.
        tree.setdefault("trainer", {})["save_interval"] = 10**9
    groups = 1 if recorded else group_size
    set_default(tree, "buffer.train_batch_size", lookup(tree, "buffer.batch_size") * groups)


def mode_problems(tree: Mapping[str, Any], mode: str) -> Iterator[Problem]:
    """Problems of a mode: missing or unsupported settings."""
    if mode not in MODES:
        yield Problem("mode", f"mode is {mode}: Trinity-RFT has {', '.join(MODES)}")
    if mode == "train" and lookup(tree, f"{BUFFER}.storage_type") == "queue":
        yield Problem(
            f"{BUFFER}.storage_type",
            f"{BUFFER}.storage_type is queue, but mode is train: a queue ends with the run that "
            "filled it; set it to sql, and path to the filled database",
        )
    if mode != "bench":
        return
    if not lookup(tree, "buffer.explorer_input.eval_tasksets"):
        yield Problem(
            "buffer.explorer_input.eval_tasksets",
            "mode is bench, but there is nothing to evaluate on: set "
            "buffer.explorer_input.eval_tasksets, or pass eval_dataset",
        )
    if lookup(tree, "explorer.bench_on_latest_checkpoint"):
        yield Problem(
            "explorer.bench_on_latest_checkpoint",
            "explorer.bench_on_latest_checkpoint is true: Trinity-RFT 0.6 cannot find the latest "
            "checkpoint in this mode and looks for global_step_0; remove it, and every checkpoint "
            "of the run is evaluated",
        )


def planned_steps(config: Config, rows: int, batch: int) -> int:
    """`buffer.total_steps`, or the number of full batches of this many rows in all epochs."""
    buffer = config.buffer
    if buffer.total_steps is not None:
        return int(buffer.total_steps)
    return int(buffer.total_epochs * rows // batch)


def recorded_steps(config: Config, rows: int) -> int:
    """Steps of mode `train` for a buffer with this many rows or experiences."""
    buffer, batch = config.buffer, config.buffer.train_batch_size
    if config.trainer.total_steps:
        return int(config.trainer.total_steps)
    if buffer.trainer_input.experience_buffer.storage_type == "sql":
        return int(rows // batch)
    return planned_steps(config, rows, batch)


def count_experiences(url: str, name: str) -> int | None:
    """Number of experiences in a database; None if only its server knows."""
    if not url.startswith("sqlite:///"):
        return None
    file = Path(url.removeprefix("sqlite:///"))
    if not file.is_file():
        raise DatasetError(
            f"{BUFFER}.path is {url}, but there is no such file: set it to the database that a run "
            "with mode explore filled (its buffer/<name>.db)"
        )
    with sqlite3.connect(f"file:{file}?mode=ro", uri=True) as database:
        tables = [row[0] for row in database.execute("SELECT name FROM sqlite_master")]
        if name not in tables:
            known = ", ".join(sorted(table for table in tables if not table.startswith("sqlite")))
            raise DatasetError(
                f"{BUFFER}.name is {name}, but {file} has no such table (it has {known}): set it "
                "to the name under which the buffer was filled"
            )
        return int(database.execute(f'SELECT COUNT(*) FROM "{name}"').fetchone()[0])


def checkpoints(config: Config) -> list[int]:
    """The steps whose weights a benchmark evaluates; 0 is the model before training."""
    folder = Path(config.checkpoint_job_dir)
    saved = [path.name.removeprefix("global_step_") for path in folder.glob("global_step_*/")]
    first = [0] if config.explorer.eval_on_startup else []
    return first + sorted(int(step) for step in saved if step.isdecimal() and int(step) > 0)


def unjudged(
    store: TraceStore, steps: list[int], rows: Mapping[str, int]
) -> dict[tuple[int, str], int]:
    """Rollouts without an outcome, by checkpoint and evaluation set; empty when all have one.

    Args:
        store: The benchmark's traces.
        steps: The checkpoints.
        rows: Rollouts of each set: its rows times its repetitions.
    """
    missing = {}
    for step in steps:
        for name, count in rows.items():
            judged = {trace.id for trace in store.read(name, step) if trace.final}
            if len(judged) < count:
                missing[step, name] = count - len(judged)
    return missing


def server_url(config: Config) -> str | None:
    """URL of the server of mode `serve`, with its key, once it listens. Trinity-RFT writes its
    machine's address, whatever address the server listens on."""
    file = Path(config.checkpoint_job_dir) / f"{config.explorer.name}_server_url.txt"
    if not file.is_file():
        return None
    url = f"http://{config.explorer.listen_address}:{config.explorer.proxy_port}"
    if config.explorer.listen_address in _ANY_ADDRESS:
        url = file.read_text(encoding="utf-8").strip()
    key = os.environ.get(SERVE_KEY)
    return f"{url}/{key}" if key else url


def serve_key() -> str:
    """The key of mode `serve`: that in `SERVE_KEY`, else a new one, which is stored there."""
    if not os.environ.get(SERVE_KEY):
        os.environ[SERVE_KEY] = secrets.token_urlsafe(24)
    return os.environ[SERVE_KEY]


class KeyGuard:
    """Requires a key for every request to an ASGI application, else answers 401.

    The key is in `Authorization: Bearer KEY` or before the path, `/KEY/v1/models`: Trinity-RFT's
    own client sends no header, but appends paths to the given address.
    """

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            first, _, rest = scope["path"].removeprefix("/").partition("/")
            sent = Headers(scope=scope).get("authorization", "").removeprefix("Bearer ")
            if secrets.compare_digest(first.encode(), self._key):
                scope["path"] = f"/{rest}"  # in place: so the server's log has no key
            elif not secrets.compare_digest(sent.encode(), self._key):
                said = "this server requires a key: Authorization: Bearer KEY, or /KEY/v1/..."
                await JSONResponse({"error": {"message": said}}, 401)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def require_free_port(config: Config) -> None:
    """Check that the port of mode `serve` is free: another server there would be mistaken for
    ours."""
    address = (config.explorer.listen_address, config.explorer.proxy_port)
    try:
        socket.create_server(address).close()
    except OSError as error:
        raise ConfigError(
            f"explorer.proxy_port: cannot listen on {address[0]}:{address[1]} "
            f"({error.strerror}); stop what uses it, or set another port"
        ) from None


def answers(url: str) -> bool:
    """Whether that server has a model for a request; it has none at first."""
    try:
        return httpx.get(f"{url}/v1/models", timeout=2, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def forget_server(config: Config) -> None:
    """Delete the address of this run's earlier server."""
    (Path(config.checkpoint_job_dir) / f"{config.explorer.name}_server_url.txt").unlink(
        missing_ok=True
    )


POLL_SECONDS = 0.5
# Seconds for actors to close their monitors after a failed run, and after a successful one.
_FAREWELL_SECONDS, _CLOSING_SECONDS = 10.0, 120.0


class GaveUp(TrainingError):
    """The explorer ended without a reason, which may be in Ray's table a moment later."""


class _TooLate(Exception):
    """A deadline of ours has passed; Ray's and the actors' own are `TimeoutError`s."""


@dataclass(frozen=True)
class Stage:
    """The actors of one run, created on entry and closed on exit.

    Attributes:
        config: After Trinity-RFT's check.
        look: Called twice a second during waits; an exception from it ends the stage.
        explored: Whether the explorer has done every requested step.
    """

    config: Config
    look: Callable[[], None]
    explored: Callable[[], bool]

    def run(self) -> None:
        """Run the configuration's mode to its end; raises GaveUp if the explorer gave up,
        TrainingError if the actors could not be started in time, and any exception of `look` or of
        an actor."""
        from trinity.buffer.pipelines.task_pipeline import check_and_run_task_pipeline

        check_and_run_task_pipeline(self.config)
        if self.config.mode in ("both", "colocate"):
            self._both()
        elif self.config.mode == "train":
            self._one(self._trainer(), "train", synchronize=True)
        elif self.config.mode == "bench":
            self.config.explorer.name = "benchmark"
            self._one(self._explorer(), "benchmark", synchronize=False)
        else:  # explore, serve
            self._one(self._explorer(), self.config.mode, synchronize=True)

    def _explorer(self) -> Any:
        from trinity.explorer.explorer import Explorer

        return Explorer.get_actor(self.config)

    def _trainer(self) -> Any:
        from trinity.trainer.trainer import Trainer

        return Trainer.get_actor(self.config)

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
            if self.config.synchronizer.sync_method == SyncMethod.NCCL:
                synchronizer = Synchronizer.get_actor(namespace=self.config.ray_namespace)
                self._finish([synchronizer.coordinate_weight_sync_setup.remote()])
                self._finish([explorer.sync_weight.remote(), trainer.sync_weight.remote()])
            else:
                # The explorer loads the weights that exist: those of a resumed run must be saved
                # before.
                self._finish([trainer.sync_weight.remote()])
                self._finish([explorer.sync_weight.remote()])
            exploring, training = explorer.explore.remote(), trainer.train.remote()
            done = self._finish([exploring, training], all_of_them=False)
            if exploring in done and training not in done:
                if not self.explored():
                    raise GaveUp("the explorer gave up before its last step")
                self._finish([training])

    def _start(self, actors: Sequence[Any]) -> None:
        """Wait for the models, with a limit: a cluster that is too small for them would block for
        ever."""
        limit = float(self.config.synchronizer.sync_timeout)
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
        """Wait for calls of actors; returns the finished ones. Raises like a call."""
        import ray

        while True:
            count = len(waiting) if all_of_them else 1
            done, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=POLL_SECONDS)
            self.look()
            ray.get(done)
            if len(done) >= count:
                return list(done)
            if deadline is not None and time.monotonic() > deadline:
                raise _TooLate

    @contextlib.contextmanager
    def _closing(self, actors: Sequence[Any]) -> Iterator[None]:
        """Close the actors' monitors and engines when the block ends."""
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
        f"the cluster has {shown(ray.cluster_resources())}, of which "
        f"{shown(ray.available_resources())} are free: lower cluster.gpu_per_node and "
        "explorer.rollout_model.engine_num, or wait until others have finished"
    )
