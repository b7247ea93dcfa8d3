"""Processes of their own that need not import PyTorch: that takes longer than what they do.

They are forked from a process that has imported it and has no threads. A killed one is as dead as
any other.
"""

import gc
import multiprocessing
import os
import runpy
import sys
from collections.abc import Callable, Mapping
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "tests.kit.before_fork",
        "agentscope.agent",
        "agentscope.model",
        "openai",
        "torch.utils.tensorboard",
        "transformers.models.qwen3.modeling_qwen3",
        "tuner.areal",
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
