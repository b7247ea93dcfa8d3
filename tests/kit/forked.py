"""Processes of their own that need not import PyTorch: that takes longer than what they do.

They are forked from a process that has imported it and has no threads. A killed one is as dead as
any other.
"""

import gc
import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, Pipe
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "tests.kit.before_fork",
        "agentscope.agent",
        "agentscope.model",
        "llguidance.hf",
        "numpy.ma",
        "openai",
        "rich._emoji_codes",
        "torch.utils.tensorboard",
        "transformers.models.qwen3.modeling_qwen3",
        "tuner.areal",
        "tuner.gateway.clients",
        "tuner.rollouts.worker_child",
        "tests.kit.async_runs",
        "tests.kit.recorded_runs",
        "tests.engines.sglang_server",
    ]
)


def begin(function: Callable[..., object], *arguments: Any) -> ForkServerProcess:
    """Call a function of a module in a process of its own."""
    process = _CONTEXT.Process(target=_forked, args=(function, *arguments))
    process.start()
    return process


def _forked(function: Callable[..., object], *arguments: Any) -> None:
    gc.freeze()  # what was imported is not looked at again
    gc.enable()
    mend_thread_pool()
    function(*arguments)


def mend_thread_pool() -> None:
    """Let PyTorch make its pool anew while a forked process has one thread.

    It does so when a thread computes for the first time, and two at once, as where transformers
    loads a model, may find none ("Invalid thread pool!").
    """
    import torch

    torch.set_num_threads(torch.get_num_threads())


def run(function: Callable[..., object], *arguments: Any) -> int:
    """The exit code of a process that calls this; that of a killed one is the signal, negative."""
    process = begin(function, *arguments)
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def script(path: Path, *arguments: str, environment: Mapping[str, str] | None = None) -> str:
    """What `python <path> <arguments>`, run in its folder, prints."""
    output = path.with_suffix(".out")
    code = run(_run_script, path, arguments, output, environment or {})
    printed = output.read_text(encoding="utf-8")
    assert code == 0, printed
    return printed


def _run_script(
    path: Path, arguments: tuple[str, ...], output: Path, environment: Mapping[str, str]
) -> None:
    os.environ.update(environment)
    with output.open("wb") as printed:
        os.dup2(printed.fileno(), 1)
        os.dup2(printed.fileno(), 2)
    os.chdir(path.parent)
    sys.argv, sys.path[0] = [path.name, *arguments], str(path.parent)
    runpy.run_path(path.name, run_name="__main__")


class ForkedWorker:
    """A worker as `subprocess.Popen` starts it, but forked."""

    def __init__(self, command: list[str], *, env: Mapping[str, str], **_: Any) -> None:
        with socket.socket(fileno=os.dup(int(command[-1]))) as line:
            (out, its_out), (err, its_err) = Pipe(duplex=False), Pipe(duplex=False)
            with its_out, its_err:
                self._process = begin(_work, line, its_out, its_err, dict(env))
        self.stdout, self.stderr = (os.fdopen(os.dup(one.fileno()), "rb") for one in (out, err))
        self.pid = self._process.pid
        self.returncode: int | None = None

    def wait(self) -> None:
        self._process.join()
        self.returncode = self._process.exitcode


def _work(
    line: socket.socket, out: Connection, err: Connection, environment: dict[str, str]
) -> None:
    from tuner.rollouts import worker_child

    os.setsid()
    os.dup2(out.fileno(), 1)
    os.dup2(err.fileno(), 2)
    os.environ.update(environment)
    worker_child.main(line.detach())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


SUBPROCESS = SimpleNamespace(**vars(subprocess) | {"Popen": ForkedWorker})
"""For `any_worker.subprocess`: importing PyTorch takes longer than what most workers do."""
