"""A plugin of pytest: xdist's workers are forked from one process that has imported the tests.

Otherwise each imports PyTorch and all test files, compiles them in a new environment, and starts a
server for `tests.kit.forked`. No assertion is rewritten here: PYTEST_DONT_REWRITE.
"""

import contextlib
import gc
import os
import signal
import sys
from multiprocessing import forkserver
from multiprocessing.connection import Connection, Pipe
from multiprocessing.context import ForkServerProcess
from types import ModuleType

import pytest
from execnet import gateway_io

from tests.kit import forked


def pytest_xdist_setupnodes(config, specs):
    """Fork each worker; one that takes the place of a crashed worker is started as usual."""
    ours, theirs = [], []
    for _ in specs:
        (stdin, to), (out, stdout) = Pipe(duplex=False), Pipe(duplex=False)
        ours.append((to, out))
        theirs.append((stdin, stdout))
    receiver, sender = Pipe(duplex=False)
    errors = Connection(os.dup(2), readable=False)
    with _silent():  # as in a worker: nobody reads what forked processes print
        forkserver.ensure_running()
    process = forked.begin(_template, config.invocation_params.args, theirs, errors, sender)
    for connection in (errors, sender, *sum(theirs, ())):
        connection.close()
    waiting = [Node(*pipes, pid, process) for pipes, pid in zip(ours, receiver.recv(), strict=True)]
    start = gateway_io.create_io
    gateway_io.create_io = lambda spec, execmodel: (
        waiting.pop(0).with_model(execmodel) if waiting else start(spec, execmodel)
    )


class Node(gateway_io.Popen2IO):
    """The controller's end of the pipes of a forked worker."""

    def __init__(self, to: Connection, out: Connection, pid: int, template: ForkServerProcess):
        files = os.fdopen(os.dup(to.fileno()), "wb"), os.fdopen(os.dup(out.fileno()), "rb")
        super().__init__(*files, execmodel=None)
        to.close()
        out.close()
        self.pid, self.template = pid, template

    def with_model(self, execmodel):
        self.execmodel = execmodel
        return self

    def wait(self):
        self.template.join()

    def kill(self):
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


@contextlib.contextmanager
def _silent():
    before = [os.dup(1), os.dup(2)]
    with open(os.devnull, "wb") as nothing:
        for descriptor in (1, 2):
            os.dup2(nothing.fileno(), descriptor)
    yield
    for descriptor, one in enumerate(before, 1):
        os.dup2(one, descriptor)
        os.close(one)


def _template(arguments, pipes, errors, sender):
    # What cannot be collected is reported by the workers, which try it again.
    pytest.main([*arguments, "--collect-only", "-qq"])
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(errors.fileno(), 2)
    errors.close()
    gc.collect()
    gc.freeze()
    pids = []
    for number in range(len(pipes)):
        pid = os.fork()
        if pid == 0:
            sender.close()
            _work(pipes[number], [one for pair in pipes[number + 1 :] for one in pair])
        pids.append(pid)
        for one in pipes[number]:
            one.close()
    sender.send(pids)
    sender.close()
    for pid in pids:
        os.waitpid(pid, 0)


def _work(pipes, others):
    code = 1
    try:
        for one in others:
            one.close()
        for descriptor, one in enumerate(pipes):
            os.dup2(one.fileno(), descriptor)
            one.close()
        sys.stdin = os.fdopen(0, closefd=False)
        gc.disable()  # as in a new process, until the tests are collected
        forked.mend_thread_pool()
        sys.modules["__main__"] = ModuleType("__main__")
        # There is one for all, which is no child of this process.
        forkserver._forkserver.ensure_running = lambda: None
        exec(eval(sys.stdin.readline()), {})  # as execnet starts a new one
        code = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
