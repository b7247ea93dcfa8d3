"""Trinity-RFT's modes: what each of them needs, and what it has to have done to be a success.

| mode | rollouts | training | success |
|---|---|---|---|
| both, colocate | yes | yes | the steps asked for were trained |
| explore | yes | no | every step of rollouts was handed over |
| train | no | yes | every step that the buffer given has was trained |
| bench | evaluations | no | every row was judged with every checkpoint |
| serve | elsewhere | no | the server was up until it was asked to stop |
"""

from __future__ import annotations

import socket
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from tuner.config.load import RECORDED
from tuner.config.problems import Problem
from tuner.errors import ConfigError, DatasetError
from tuner.run.directory import free_name
from tuner.traces import TraceStore
from tuner.trinity.tree import lookup, set_default

if TYPE_CHECKING:
    from trinity.common.config import Config

MODES = ("both", "colocate", "explore", "train", "bench", "serve")
_ANY_ADDRESS = ("0.0.0.0", "::")
# Modes that run the workflow.
ROLLS_OUT = ("both", "colocate", "explore", "bench")
# Modes that read the tasks that are trained on.
READS_TASKS = ("both", "colocate", "explore")
BUFFER = "buffer.trainer_input.experience_buffer"


def fill(tree: dict[str, Any], mode: str, group_size: int) -> None:
    """Put into a mode's own settings what is not set and Trinity-RFT would ask for."""
    tree["mode"] = mode
    if mode == "bench":
        # Trinity-RFT reads no tasks of training here, and asks where they are if some are named.
        for key in ("taskset", "tasksets"):
            lookup(tree, "buffer.explorer_input", {}).pop(key, None)
        # Its other value makes a new run, which has no checkpoints.
        tree["continue_from_checkpoint"] = True
    if mode != "train":
        return
    path = str(lookup(tree, f"{BUFFER}.path", ""))
    set_default(tree, f"{BUFFER}.storage_type", "sql" if "://" in path else "file")
    recorded = lookup(tree, "algorithm.algorithm_type") in RECORDED
    if recorded and not lookup(tree, "trainer.save_interval"):
        # Trinity-RFT puts it in the place of sync_interval, which may not be 0: only at the end.
        tree.setdefault("trainer", {})["save_interval"] = 10**9
    groups = 1 if recorded else group_size
    set_default(tree, "buffer.train_batch_size", lookup(tree, "buffer.batch_size") * groups)


def problems(tree: Mapping[str, Any], mode: str) -> Iterator[Problem]:
    """What a mode lacks, or cannot do."""
    if mode not in MODES:
        yield Problem("mode", f"mode is {mode}: Trinity-RFT has {', '.join(MODES)}")
    if mode == "train" and lookup(tree, f"{BUFFER}.storage_type") == "queue":
        yield Problem(
            f"{BUFFER}.storage_type",
            f"{BUFFER}.storage_type is queue, and mode is train: a queue ends with the run that "
            "filled it; set it to sql, and path to the database that was filled",
        )
    if mode != "bench":
        return
    if not lookup(tree, "buffer.explorer_input.eval_tasksets"):
        yield Problem(
            "buffer.explorer_input.eval_tasksets",
            "mode is bench and there is nothing to evaluate on: set "
            "buffer.explorer_input.eval_tasksets, or pass eval_dataset",
        )
    if lookup(tree, "explorer.bench_on_latest_checkpoint"):
        yield Problem(
            "explorer.bench_on_latest_checkpoint",
            "explorer.bench_on_latest_checkpoint is true: Trinity-RFT 0.6 does not know the latest "
            "checkpoint in this mode and asks for global_step_0; remove it, and every checkpoint "
            "of the run is evaluated",
        )


def bench_folder(run_dir: Path) -> str:
    """Where a benchmark's traces and results go, below the run whose checkpoints it evaluates."""
    return free_name(run_dir / "bench").name


def recorded_steps(config: Config, rows: int) -> int:
    """Steps of mode `train` that a buffer with so many rows or experiences has."""
    buffer = config.buffer
    if config.trainer.total_steps:
        return int(config.trainer.total_steps)
    batch = buffer.train_batch_size
    if buffer.trainer_input.experience_buffer.storage_type == "sql":
        return int(rows // batch)
    if buffer.total_steps is not None:
        return int(buffer.total_steps)
    return int(buffer.total_epochs * rows // batch)


def count_experiences(url: str, name: str) -> int | None:
    """How many experiences a database holds; None where only its server can say.

    Raises:
        DatasetError: It is a file that is not there, or holds no such buffer.
    """
    if not url.startswith("sqlite:///"):
        return None
    file = Path(url.removeprefix("sqlite:///"))
    if not file.is_file():
        raise DatasetError(
            f"{BUFFER}.path is {url}, and there is no such file: set it to the database that a run "
            "with mode explore filled (its buffer/<name>.db)"
        )
    with sqlite3.connect(f"file:{file}?mode=ro", uri=True) as database:
        tables = [row[0] for row in database.execute("SELECT name FROM sqlite_master")]
        if name not in tables:
            known = ", ".join(sorted(table for table in tables if not table.startswith("sqlite")))
            raise DatasetError(
                f"{BUFFER}.name is {name}, and {file} has no such table (it has {known}): set it "
                "to the name that the buffer was filled under"
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
        rows: Rollouts that each set has: its rows, each as often as it is repeated.
    """
    missing = {}
    for step in steps:
        for name, count in rows.items():
            judged = {trace.id for trace in store.read(name, step) if trace.final}
            if len(judged) < count:
                missing[step, name] = count - len(judged)
    return missing


def server_url(config: Config) -> str | None:
    """Where the server of mode `serve` listens, once it does. Trinity-RFT writes its machine's
    address, whatever the server listens on."""
    file = Path(config.checkpoint_job_dir) / f"{config.explorer.name}_server_url.txt"
    if not file.is_file():
        return None
    if config.explorer.listen_address in _ANY_ADDRESS:
        return file.read_text(encoding="utf-8").strip()
    return f"http://{config.explorer.listen_address}:{config.explorer.proxy_port}"


def require_free_port(config: Config) -> None:
    """Whoever listens there already would be taken for the server of mode `serve`.

    Raises:
        ConfigError: Somebody does.
    """
    address = (config.explorer.listen_address, config.explorer.proxy_port)
    try:
        socket.create_server(address).close()
    except OSError as error:
        raise ConfigError(
            f"explorer.proxy_port: cannot listen on {address[0]}:{address[1]} "
            f"({error.strerror}); end what does, or set another port"
        ) from None


def answers(url: str) -> bool:
    """Whether that server has a model for a request, which it lacks in its first moments."""
    try:
        return httpx.get(f"{url}/v1/models", timeout=2, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def forget_server(config: Config) -> None:
    """Remove what an earlier server of this run said."""
    (Path(config.checkpoint_job_dir) / f"{config.explorer.name}_server_url.txt").unlink(
        missing_ok=True
    )
