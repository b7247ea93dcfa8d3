"""Engines over SGLang servers, and processes that serve."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from tests.engines.conformance import CONTEXT, make_rig_model
from tests.engines.models import VOCABULARY, make_tokenizer
from tuner.engines.served import ServedEngine
from tuner.engines.sglang.client import SglangServer, SglangSettings
from tuner.engines.sglang.sampling import check_for_sglang

ROOT = Path(__file__).parents[2]
END = frozenset({make_tokenizer().eos_token_id})
SETTINGS = SglangSettings("float32", CONTEXT, END)


class ServerProcess:
    """A server in a process, which somebody starts again when it is killed.

    Args:
        command: Starts it, but for `--port`.
        environment: Variables besides ours.
        log: What it prints goes there; None leaves it where ours goes.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], log: Path | None = None
    ) -> None:
        with socket.socket() as door:
            door.bind(("127.0.0.1", 0))
            port = door.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._command = [*command, "--port", str(port)]
        self._environment, self._log = {**os.environ, **environment}, log
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") if self._log else nullcontext() as log:
            return subprocess.Popen(
                self._command,
                cwd=ROOT,
                env=self._environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def kill(self) -> None:
        """As a machine dies; another process takes its place."""
        self.stop()
        self._process = self._start()

    def stop(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


Parts = tuple[ServedEngine, PreTrainedModel, ServerProcess]


@contextmanager
def served_toy(start: Callable[[Path], ServerProcess], folder: Path) -> Iterator[Parts]:
    """The engine over one server with key `sesame` that `start` starts with the toy, its model, and
    the server."""
    model = make_rig_model()
    model.save_pretrained(folder / "toy")
    make_tokenizer().save_pretrained(folder / "toy")
    server = start(folder / "toy")
    made = engine([connected(server.url, "sesame")], model.save_pretrained, folder / "weights")
    yield made, model, server
    server.stop()


def stand_in(folder: Path, key: str) -> ServerProcess:
    """The stand-in for an SGLang server, with the model in `folder` to start with."""
    module = [sys.executable, "-m", "tests.engines.sglang_server"]
    options = ["--model-path", str(folder), "--api-key", key]
    return ServerProcess([*module, *options], {"PYTHONPATH": str(ROOT)})


def engine(
    servers: Sequence[Any], save: Callable[[Path], None], folder: Path, **options: Any
) -> ServedEngine:
    """The engine over these servers."""
    given: dict[str, Any] = {
        "tokenizer": make_tokenizer(),
        "end_ids": END,
        "vocabulary": VOCABULARY,
        "max_model_len": CONTEXT,
        "grammars": True,
        "check": check_for_sglang,
        "max_restarts": 10,
    }
    return ServedEngine(servers, save=save, folder=folder, **{**given, **options})


def connected(url: str, key: str, **changes: Any) -> SglangServer:
    """A client with the settings of the toy."""
    return SglangServer(url, key, SglangSettings(**{**vars(SETTINGS), **changes}))
