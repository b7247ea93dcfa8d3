"""Processes of their own that need not import PyTorch: that takes longer than what they do.

They are forked from a process that has imported it and has no threads. A killed one is as dead as
any other.
"""

import multiprocessing
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "agentscope.model",
        "openai",
        "torch.utils.tensorboard",
        "transformers.models.qwen3.modeling_qwen3",
        "tests.backends.async_runs",
        "tests.backends.recorded_runs",
        "tests.engines.sglang_server",
    ]
)


def begin(function: Callable[..., object], *arguments: Any) -> ForkServerProcess:
    """Call a function of a module in a process of its own."""
    process = _CONTEXT.Process(target=function, args=arguments)
    process.start()
    return process


def run(function: Callable[..., object], *arguments: Any) -> int:
    """The exit code of a process that calls this; that of a killed one is the signal, negative."""
    process = begin(function, *arguments)
    process.join()
    assert process.exitcode is not None
    return process.exitcode
