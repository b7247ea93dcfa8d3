"""The workers of pytest-xdist, forked from a process that has imported what all of them import.

`pytest -p tests.kit.forked_xdist --numprocesses 3`. Otherwise each imports it, and in a fresh
environment compiles it as well, all at the same time; and each has a process of its own from which
tests fork.
"""

import atexit
import gc
import importlib
import inspect
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import xdist.plugin
from execnet import gateway_io
from execnet.gateway_base import Popen2IO
from execnet.gateway_io import Popen2IOMaster

from tests.kit import forked


class ForkedInterpreter:
    """`python -u -c "..."` as `subprocess.Popen` starts it, but forked: it runs what it reads."""

    def __init__(self, others: Sequence["ForkedInterpreter"]) -> None:
        (its_input, written), (read, its_output) = os.pipe(), os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            # They read to the end of the file, which nobody else may have open.
            os.closerange(written, written + 1)
            os.closerange(read, read + 1)
            for other in others:
                other.stdin.close()
                other.stdout.close()
            _interpret(its_input, its_output)
        os.close(its_input)
        os.close(its_output)
        self.stdin, self.stdout = os.fdopen(written, "wb"), os.fdopen(read, "rb")

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def kill(self) -> None:
        os.kill(self.pid, 9)


def _interpret(its_input: int, its_output: int) -> None:
    status = 1
    try:
        os.dup2(its_input, 0)
        os.dup2(its_output, 1)
        os.close(its_input)
        os.close(its_output)
        sys.stdin = os.fdopen(0, closefd=False)
        sys.stdout = os.fdopen(1, "w", closefd=False)
        forked.mend_thread_pool()
        # What forked us lies below on the stack.
        sys.setrecursionlimit(sys.getrecursionlimit() + len(inspect.stack(0)))
        # The process to fork from is our parent's child, whom only that may wait for.
        forkserver._forkserver.ensure_running = lambda: None
        exec(eval(sys.stdin.readline()), {"__name__": "__main__"})
        atexit._run_exitfuncs()
        status = 0
    finally:
        os._exit(status)  # what called us is the session of the process that we are no more


# Their imports begin threads, of tokenizers or pyarrow, which a forked process would miss.
THREADED = (
    "tests.engines.test_elsewhere",
    "tests.engines.test_sglang",
    "tests.gateway.test_length_bound",
    "tests.loop.test_sglang_run",
    "tests.tasks.test_dataset",
    "tests.tasks.test_lazy_rows",
)


def _tests(config: pytest.Config) -> Iterator[str]:
    """Modules with tests that are asked for."""
    for argument in config.args:
        for file in sorted(Path(argument).resolve().rglob("test_*.py")):
            name = ".".join(file.relative_to(config.rootpath).with_suffix("").parts)
            if not name.startswith(("tests.integration.", "tests.browser.", *THREADED)):
                yield name


def _start_forkserver() -> None:
    """What forked processes print is no part of what pytest prints."""
    shown = os.dup(1), os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
        forkserver.ensure_running()
    for number, before in enumerate(shown, start=1):
        os.dup2(before, number)
        os.close(before)


def pytest_xdist_setupnodes(config: pytest.Config, specs: Sequence[Any]) -> None:
    """All of them are forked while there is one thread."""
    gc.disable()
    for module in (*forked.PRELOADED, *_tests(config)):
        with suppress(Exception, pytest.skip.Exception):  # a worker says so, if it is to import it
            importlib.import_module(module)
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        config.get_terminal_writer().line(
            f"{threads} threads after the imports: pytest's workers are not forked"
        )
        return
    xdist.plugin._sys_path[:] = sys.path  # which workers are given, with what tests have added
    _start_forkserver()
    ready: list[ForkedInterpreter] = []
    for _ in specs:
        ready.append(ForkedInterpreter(ready))

    class Forked(Popen2IOMaster):
        def __init__(self, args: list[str], execmodel: Any) -> None:
            if ready:
                self.popen = ready.pop(0)
                Popen2IO.__init__(self, self.popen.stdin, self.popen.stdout, execmodel)
            else:  # in place of one that died
                super().__init__(args, execmodel)

    gateway_io.Popen2IOMaster = Forked
