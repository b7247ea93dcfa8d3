"""Engines over SGLang servers, and processes that serve."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from tests.engines import sglang_server
from tests.engines.conformance import CONTEXT, make_rig_model
from tests.engines.models import VOCABULARY, make_tokenizer
from tests.kit import forked
from tuner.engines.remote import ServedEngine
from tuner.engines.sglang.client import SglangServer, SglangSettings, check_for_sglang

ROOT = Path(__file__).parents[2]
END = frozenset({make_tokenizer().eos_token_id})
SETTINGS = SglangSettings("float32", CONTEXT, END)


class Server(ABC):
    """A server at a port of its own, which somebody starts again when it is killed."""

    def __init__(self) -> None:
        with socket.socket() as door:
            door.bind(("127.0.0.1", 0))
            self._port = door.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        self.start()

    @abstractmethod
    def start(self) -> None:
        """Begin to listen at the port."""

    @abstractmethod
    def stop(self) -> None:
        """End at once, whatever is under way."""

    def kill(self) -> None:
        """As a machine dies; another process takes its place."""
        self.stop()
        self.start()


class ServerProcess(Server):
    """A server that a command starts.

    Args:
        command: Starts it, but for `--port`.
        environment: Variables besides ours.
        log: What it prints goes there.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self._command, self._log = command, log
        self._environment = {**os.environ, **environment}
        super().__init__()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*self._command, "--port", str(self._port)],
                cwd=ROOT,
                env=self._environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def stop(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class StandIn(Server):
    """The stand-in for an SGLang server, with the model in `folder` to start with."""

    def __init__(self, folder: Path, key: str) -> None:
        self._folder, self._key = folder, key
        super().__init__()

    def start(self) -> None:
        self._process = forked.begin(sglang_server.serve, self._folder, self._port, self._key)

    def stop(self) -> None:
        self._process.kill()
        self._process.join()


Parts = tuple[ServedEngine, PreTrainedModel, Server]


@contextmanager
def served_toy(start: Callable[[Path], Server], folder: Path) -> Iterator[Parts]:
    """The engine over one server with key `sesame` that `start` starts with the toy, its model, and
    the server."""
    model = make_rig_model()
    model.save_pretrained(folder / "toy")
    make_tokenizer().save_pretrained(folder / "toy")
    server = start(folder / "toy")
    made = engine([connected(server.url, "sesame")], model.save_pretrained, folder / "weights")
    yield made, model, server
    server.stop()


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
