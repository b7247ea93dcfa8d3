"""The run directory: its files, atomic writes, and checkpoints.

<checkpoint_root_dir>/<project>/<name>/
    config.yaml  metrics.jsonl  result.json  timeline.json  batches.jsonl (of asynchronous runs)
    branching.jsonl (of runs whose rollouts branch from others)
    tasks.jsonl (of runs that draw tasks by their results: `tuner.tasks.selection`)
    rebase.json  set_aside/ (of runs that continue from another's samples: `tuner.runs.rebased`)
    tensorboard/  traces/step_000001.jsonl  checkpoints/step_000020/manifest.json
"""

from __future__ import annotations

import asyncio
import contextvars
import errno
import hashlib
import json
import os
import shutil
import socket
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, TypeVar

from filelock import FileLock, Timeout
from pydantic import AfterValidator

from tuner.config import RunConfig
from tuner.config.source import LOADER, check_levels, without_secrets
from tuner.encoding import DISPLAY_ERRORS
from tuner.errors import DISK_REMEDIES, ConfigError, TunerError
from tuner.traces.reading import AnyNumber, Integer, InvalidRecord, JsonReader, Text

TRAINER_STATE = "trainer_state.pt"
ADAPTER_CONFIG = "adapter_config.json"  # peft's
MANIFEST = "manifest.json"  # of a checkpoint: the sha256 of each of its other files
# Writes a report of a run, given the reason why it stopped, or None if it completed; returns where
# the report is, if it could be written.
Report = Callable[["RunDirectory", str | None], Path | None]


class RunDirectory:
    """The files of one run, and its checkpoints."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.timeline = path / "timeline.json"
        self.batches = path / "batches.jsonl"
        self.branching = path / "branching.jsonl"
        self.tasks = path / "tasks.jsonl"
        self.rebase = path / "rebase.json"
        self.set_aside = path / "set_aside"
        self.result = path / "result.json"
        self.traces = path / "traces"
        self.tensorboard = path / "tensorboard"
        self.checkpoints = path / "checkpoints"

    def has_begun(self) -> bool:
        """Whether anything was recorded here; a start that failed before that leaves nothing."""
        return self.metrics.exists() or any(self.traces.glob("*.jsonl"))

    def last_recorded_step(self) -> int:
        """The last step with recorded training rollouts; 0 if there is none."""
        names = [path.stem.removeprefix("step_") for path in self.traces.glob("step_*.jsonl")]
        return max((int(name) for name in names if name.isdecimal()), default=0)

    def stored_config(self) -> dict[str, Any]:
        """The stored effective configuration, unchecked; empty if there is none.

        Raises:
            ConfigError: The file is damaged.
        """
        import yaml

        if not os.path.lexists(self.config):
            return {}
        try:
            text = self.config.read_bytes()
            check_levels(text)
            return OBJECTS.check(yaml.load(text, Loader=LOADER))
        except (OSError, yaml.YAMLError, ValueError) as error:
            said = " ".join(str(error).split())
            raise ConfigError(f"{self.config} is not a configuration: {said:.300}") from error

    def create(self) -> None:
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        for leftover in self.checkpoints.glob(".step_*/"):
            shutil.rmtree(leftover)

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step_{step:06d}"

    def checkpoint_steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending."""
        names = [path.name.removeprefix("step_") for path in self.checkpoints.glob("step_*/")]
        steps = {int(name) for name in names if name.isdecimal()}
        return sorted(step for step in steps if self.checkpoint(step).is_dir())

    def sound_checkpoint(self, say: Callable[[str], None]) -> int | None:
        """The step of the newest undamaged checkpoint, if there is one.

        Newer damaged ones are renamed, so that they are written again.

        Args:
            say: Called with a message for each one that is skipped.
        """
        for step in reversed(self.checkpoint_steps()):
            folder = self.checkpoint(step)
            if not (found := damage(folder)):
                return step
            aside = free_name(folder.with_name(f"{folder.name}.damaged"))
            os.replace(folder, aside)
            say(
                f"{folder} is damaged ({found}): it is now {aside.name}, and the run goes on from "
                "the checkpoint before, or its beginning; what follows is trained again from traces"
            )
        return None

    def save_checkpoint(self, step: int, write: Callable[[Path], None], *, keep: int) -> Path:
        """Let `write` fill a folder that gets its name only when it is complete.

        Args:
            step: The update that it follows.
            write: Writes the model and the trainer's state into the given folder.
            keep: Number of newest checkpoints to keep; 0 keeps all.

        Raises:
            TunerError: It cannot be written, for example on a full disk; nothing of it is left.
        """
        final = self.checkpoint(step)
        if final.exists():
            return final
        temporary = self.checkpoints / f".{final.name}"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        try:
            write(temporary)
            write_atomically(temporary / MANIFEST, json.dumps(_checksums(temporary), indent=2))
            os.replace(temporary, final)
        except Exception as error:  # libraries have their own errors for a full disk
            shutil.rmtree(temporary, ignore_errors=True)
            if isinstance(error, TunerError):
                raise
            raise TunerError(
                f"{final} cannot be written: {type(error).__name__}: {error}; "
                f"{_advice(error)}, then start the run again: it goes on from the checkpoint before"
            ) from error
        self.prune(keep)
        return final

    def prune(self, keep: int) -> None:
        """Delete all checkpoints except the newest `keep`; 0 keeps all."""
        self.remove(self.checkpoint_steps()[:-keep] if keep else ())

    def remove(self, steps: Iterable[int]) -> None:
        """Delete the checkpoints of these steps; an incomplete one has another name."""
        for old in sorted(steps):
            leaving = self.checkpoints / f".{self.checkpoint(old).name}"
            os.replace(self.checkpoint(old), leaving)
            shutil.rmtree(leaving)


def _checksums(folder: Path) -> dict[str, str]:
    """sha256 of each file below a folder except the manifest, by relative path."""

    def checksum(path: Path) -> tuple[str, str]:
        with path.open("rb") as file:
            return path.relative_to(folder).as_posix(), hashlib.file_digest(
                file, "sha256"
            ).hexdigest()

    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    with ThreadPoolExecutor() as threads:
        return dict(threads.map(checksum, files))


def damage(folder: Path) -> str:
    """The differences of a checkpoint from its manifest; empty if there are none. Additional
    files are ignored."""
    try:
        wanted = _MANIFESTS.parse((folder / MANIFEST).read_bytes())
        found = _checksums(folder)
    except InvalidRecord as error:
        return f"{MANIFEST}: {error}"
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except OSError as error:
        if error.errno not in (errno.EIO, errno.EISDIR, errno.ELOOP):
            raise  # nothing is known about the files
        return f"{type(error).__name__}: {error}"
    return ", ".join(
        f"{name} {'has changed' if name in found else 'is missing'}"
        for name, checksum in wanted.items()
        if found.get(name) != checksum
    )


OBJECTS = JsonReader[dict[str, Any]](dict[Text, Any], "a JSON object")
_MANIFESTS = JsonReader[dict[str, str]](dict[str, str], "a manifest")
DIGESTS = JsonReader[dict[str, str]](dict[Text, str], "digests of data by their names")


def write_atomically(path: Path, text: str) -> None:
    """Write under a temporary name, then rename: a reader sees either the old text or the new."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8", errors=DISPLAY_ERRORS)
    os.replace(temporary, path)


def read_metrics(path: Path, *, up_to: int, skip: bool = False) -> list[dict[str, Any]]:
    """Metrics of the steps up to `up_to`; a torn last line and later steps are skipped.

    Args:
        skip: Skip damaged lines and log how many and which, instead of raising.

    Raises:
        TunerError: A line is damaged, or the file cannot be read.
    """
    remedy = "delete the line, and the run goes on without them in its history"
    return [row for _, _, row in METRICS.lines(path, remedy, skip=skip) if row["step"] <= up_to]


def _with_step(row: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(row.get("step"), int) or row["step"] < 0:
        raise ValueError(f"step is {row.get('step')!r:.60}: the number of a step is wanted")
    return row


METRICS = JsonReader[dict[str, Any]](
    Annotated[dict[Text, Integer | AnyNumber], AfterValidator(_with_step)], "a step's metrics"
)


def free_name(path: Path) -> Path:
    """`path`, or the first of `path-2`, `path-3`, ... that does not exist."""
    number, candidate = 2, path
    while candidate.exists():
        candidate = path.with_name(f"{path.name}-{number}")
        number += 1
    return candidate


def _advice(error: Exception) -> str:
    number = error.errno if isinstance(error, OSError) else None
    return DISK_REMEDIES.get(number or 0, "see that the disk has room and can be written to")


@contextmanager
def disk_faults(path: Path) -> Iterator[None]:
    """Turn errors of the operating system about a run's files into TunerErrors."""
    try:
        yield
    except OSError as error:
        named = error.filename if isinstance(error.filename, str | os.PathLike) else None
        inside = named is not None and Path(named).is_relative_to(path)
        if isinstance(error, TunerError) or not (inside or error.errno in DISK_REMEDIES):
            raise
        raise TunerError(
            f"{named or f'a file, most likely in {path}'}: {error.strerror or error}; "
            f"{_advice(error)}, then start the run again: it goes on from what is in {path}"
        ) from error


def make_private(path: Path) -> None:
    """Create a run directory for its owner only; an existing one keeps its mode.

    Raises:
        ConfigError: It cannot be created there.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        if error.errno in DISK_REMEDIES:  # not a matter of the name
            raise
        raise ConfigError(
            f"checkpoint_root_dir: {path} cannot be made: {error.strerror} ({error.filename}); "
            "give a folder that can be"
        ) from error


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Lock a run directory while the block runs, on this machine and others.

    The lock is the operating system's, so a killed process releases it.

    Raises:
        ConfigError: Another run has it; names its process and machine.
    """
    with disk_faults(path):
        make_private(path)
        owner = path / ".owner"
        try:
            lock = FileLock(path / ".lock", timeout=0).acquire()
        except Timeout:
            who = owner.read_text(encoding="utf-8") if owner.exists() else "another process"
            raise ConfigError(
                f"{path} is in use by {who}: wait for its end, or give this run another `name`"
            ) from None
        with lock:
            owner.write_text(f"process {os.getpid()} on {socket.gethostname()}", encoding="utf-8")
            try:
                yield
            finally:
                owner.unlink(missing_ok=True)


@contextmanager
def reported(directory: RunDirectory, report: Report) -> Iterator[None]:
    """Write a report of a run however the block ends, if anything was recorded.

    If the run fails, a note of the error names the report.
    """
    stopped = None
    try:
        with disk_faults(directory.path):
            yield
    except BaseException as error:
        interrupted = isinstance(error, KeyboardInterrupt)
        said = f"{type(error).__name__}: {error}"
        stopped = "interrupted" if interrupted else without_secrets(said)
        if directory.has_begun() and (left := report(directory, stopped)):
            error.add_note(f"what the run did until then: {left}")
        raise
    if directory.has_begun():
        report(directory, None)


# Whether an interrupted run can be resumed: with the same settings, rows and weights.


# Settings that name weights which a run starts from, or is compared with. `*` is a role.
WEIGHTS = (
    "model.model_path",
    "model.critic_model_path",
    "model.lora_configs.0.path",
    "model.adapters.*.path",
)

# Settings that may change when a run is resumed, on every backend: its location, its reports and
# its distribution over machines, nothing that changes what is learned. `*` is any part of a key.
MAY_CHANGE = (
    "checkpoint_root_dir",
    "continue_from_checkpoint",
    "explorer.eval_interval",
    "explorer.eval_on_startup",
    "explorer.max_timeout",
    "explorer.rollout_model.engine_num",
    "explorer.rollout_model.gpu_memory_utilization",
    "explorer.rollout_model.tensor_parallel_size",
    "explorer.runner_per_model",
    "monitor",
    "name",
    "project",
    "trainer.max_checkpoints_to_keep",
    "trainer.max_token_len_per_gpu",
    "trainer.save_interval",
)
MAY_CHANGE_HERE = (  # on the local backend
    *MAY_CHANGE,
    "cluster.ray_address",
    "explorer.max_retry_times",
    "explorer.over_rollout",
    "explorer.rollout_model.enforce_eager",
    "explorer.rollout_model.engine_type",
    "explorer.rollout_model.extra_engine_args",
    "trainer.optimizer_offload",
    "tuner.activation_checkpointing",
    "tuner.auxiliary_models.*.input_price",
    "tuner.auxiliary_models.*.max_concurrent",
    "tuner.auxiliary_models.*.output_price",
    "tuner.backend",
    "tuner.compile",
    "tuner.device",
    "tuner.engine",
    "tuner.history.min_effective_samples",
    "tuner.history.sources",
    "tuner.layout",
    "tuner.max_slots",
    "tuner.max_tool_seconds",
    "tuner.pass_reward",
    "tuner.placement",
    "tuner.serving",
    "tuner.signal_patience",
    "tuner.trinity",
    "tuner.ray",
    "tuner.workers",
)
# What ends a rollout or draws tasks decides what is learned; else it only says how good it is.
_PASSED = "tuner.pass_reward"
# How long a run is. A schedule that ends at the last step would bend for the steps already taken.
_LENGTH = ("buffer.total_epochs", "buffer.total_steps", "trainer.total_steps")
_SCHEDULE = "algorithm.optimizer.lr_scheduler_type"


def may_change_here(config: RunConfig) -> list[str]:
    """What may change between the parts of a run of such a configuration, on the local backend."""
    decides = config.tuner.feedback_attempts or config.tuner.tasks.selector is not None
    return [key for key in MAY_CHANGE_HERE if not (decides and key == _PASSED)]


def check_same_run(
    directory: RunDirectory,
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    fingerprint: Mapping[str, str],
    *,
    may_change: Sequence[str],
    lists: bool = False,
) -> None:
    """Compare with what the directory's run was started with.

    Args:
        directory: A run that has begun; the rows it was started with are in its `data.json`.
        before, now: The settings that it was started with, and those it is to go on with.
        fingerprint: What tells the rows of each dataset from others, by its name, and the weights
            that the run begins with, by their setting, one of `WEIGHTS`.
        may_change: Keys that may differ, with all below them.
        lists: Whether the items of lists are settings of their own.

    Raises:
        ConfigError: A setting or dataset that decides what is learned has changed; names them.
    """
    old, new = dict(leaves(before, lists)), dict(leaves(now, lists))
    if (new.get(_SCHEDULE) or "constant") == "constant":
        may_change = (*may_change, *_LENGTH)
    changes = [
        f"{key} was {old.get(key)!r} and is {new.get(key)!r}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
        and not any(fnmatchcase(key, one) or fnmatchcase(key, f"{one}.*") for one in may_change)
    ]
    data_file = directory.path / "data.json"
    if os.path.lexists(data_file):
        remedy = "delete it if the datasets are as they were: it is written again"
        data = DIGESTS.document(data_file, remedy)
        for name in sorted(data.keys() | fingerprint.keys()):
            weights = any(fnmatchcase(name, one) for one in WEIGHTS)
            if weights and not (name in data and name in fingerprint):
                continue  # of an earlier version, or on the Hub
            if data.get(name) != fingerprint.get(name):
                what = f"the weights at {name}" if weights else f"the rows of dataset {name!r}"
                changes.append(f"{what} have changed")
    if changes:
        raise ConfigError(
            f"{directory.path} holds a run that was started differently: {'; '.join(changes)}. "
            "Give this run another `name`, or set continue_from_checkpoint=false to start a new "
            "one beside it"
        )


def leaves(tree: Any, lists: bool, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested settings by dotted key; the items of lists are settings of their own with `lists`."""
    if isinstance(tree, Mapping) and tree:
        items: Iterable[tuple[Any, Any]] = tree.items()
    elif lists and isinstance(tree, list) and tree:
        items = enumerate(tree)
    else:
        yield prefix.removesuffix("."), tree
        return
    for name, value in items:
        yield from leaves(value, lists, f"{prefix}{name}.")


# A run inside a running event loop, as in a notebook: in a thread, and an interrupt ends it.


T = TypeVar("T")


class _Waited:
    """A call in a thread, for which another thread waits.

    Attributes:
        interrupted: Whether it is to end.
        task: What it awaits, in the event loop of its own.
    """

    def __init__(self) -> None:
        self.interrupted = False
        self.task: asyncio.Task[Any] | None = None

    def interrupt(self) -> None:
        """End it as Ctrl-C ends a script: what it awaits is cancelled, and closes what is open."""
        self.interrupted = True
        if self.task is not None:
            self.task.get_loop().call_soon_threadsafe(self.task.cancel)


_WAITED: contextvars.ContextVar[_Waited | None] = contextvars.ContextVar("waited", default=None)


def outside_event_loop(call: Callable[[], T]) -> T:
    """`call()`, in a thread of its own if an event loop is running here, as in a notebook.

    Raises:
        KeyboardInterrupt: It was interrupted here, and what it awaited by `run_async` has ended; a
            second interrupt does not wait for that.
    """
    if not _in_event_loop():  # what `call` raises has nothing to do with that
        return call()
    future: Future[T] = Future()
    waited, context = _Waited(), contextvars.copy_context()
    context.run(_WAITED.set, waited)

    def run() -> None:
        try:
            future.set_result(context.run(call))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="tuner", daemon=True).start()
    try:
        return future.result()
    except KeyboardInterrupt:
        waited.interrupt()
        return future.result()


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run(work)`, which an interrupt of `outside_event_loop` ends, too.

    Raises:
        KeyboardInterrupt: It was.
    """
    waited = _WAITED.get()
    if waited is None:
        return asyncio.run(work)

    async def known() -> T:
        waited.task = asyncio.current_task()
        if waited.interrupted:
            work.close()
            raise asyncio.CancelledError
        return await work

    try:
        return asyncio.run(known())
    except asyncio.CancelledError:
        if waited.interrupted:
            raise KeyboardInterrupt from None
        raise
