"""The user's functions reach another process, however they are written, or say why not."""

import base64
import functools
import os
import subprocess
import sys
import threading

import pytest

from tuner.errors import FunctionError
from tuner.tasks.loading import PICKLE, load, ship, worker_path

CALL = """
import asyncio, sys
from tuner.tasks.loading import load
result = load(sys.stdin.read())(task={"x": 2}, model=None)
print(asyncio.run(result) if asyncio.iscoroutine(result) else result)
"""


def elsewhere(shipped):
    """What the function returns in a worker: another process and folder, without the script."""
    done = subprocess.run(
        [sys.executable, "-c", CALL],
        input=shipped,
        text=True,
        cwd=os.sep,
        env={**os.environ, "PYTHONPATH": worker_path()},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


FACTOR = 10


def helper(x):
    return FACTOR * x


async def workflow(task, model):
    return helper(task["x"])


class Counted:
    def __init__(self, start):
        self.start = start

    async def __call__(self, task, model):
        return self.start + task["x"]

    async def method(self, task, model):
        return self.start * task["x"]


def made(factor):
    async def inner(task, model):
        return factor * helper(task["x"])

    return inner


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (workflow, "20"),
        (made(3), "60"),
        (lambda task, model: helper(task["x"]), "20"),
        (Counted(5), "7"),
        (Counted(5).method, "10"),
        (functools.partial(workflow), "20"),
    ],
    ids=["function", "closure", "lambda", "instance", "method", "partial"],
)
def test_a_function_of_a_module_that_is_not_installed_goes_by_value(function, expected):
    shipped = ship(function, role="workflow")
    assert shipped.startswith(PICKLE)
    assert elsewhere(shipped) == expected


def test_an_installed_function_goes_by_its_import_path():
    from shlex import join

    assert ship(join, role="workflow") == "shlex:join"
    assert load("shlex:join") is join


SCRIPT = """
import sys, threading
from beside import scale
import tuner.tasks.loading as f

OFFSET = 1

async def workflow(task, model):
    return scale(task["x"]) + OFFSET

if __name__ == "__main__":
    sys.stdout.write(f.ship(workflow, role="workflow"))
"""


def test_a_script_and_the_module_beside_it_go_together(tmp_path):
    (tmp_path / "beside.py").write_text("BY = 100\ndef scale(x):\n    return BY * x\n")
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, tmp_path / "script.py"],
        text=True,
        capture_output=True,
        check=True,
        env={**os.environ, "PYTHONPATH": worker_path()},
    )
    assert done.stdout.startswith(PICKLE)
    assert elsewhere(done.stdout) == "201"


class Holding:
    def __init__(self):
        self.guard = threading.Lock()

    async def __call__(self, task, model): ...


def test_what_cannot_be_sent_is_named_before_anything_starts():
    with pytest.raises(FunctionError) as caught:
        ship(Holding(), role="judge")
    message = str(caught.value)
    assert message.startswith("the judge Holding (")
    assert "its attribute 'guard' is a lock" in message
    assert "create it inside the function" in message

    lock = threading.Lock()

    async def closing(task, model):
        return lock

    with pytest.raises(FunctionError, match=r"its variable 'lock' is a lock"):
        ship(closing, role="workflow")


def test_a_function_with_much_data_is_refused_by_its_size():
    data = os.urandom(9 * 2**20)

    async def heavy(task, model):
        return data

    with pytest.raises(FunctionError, match=r"is 9 MiB .* load large objects inside"):
        ship(heavy, role="workflow")


class Gone:
    """Comes back as something that only this process has."""

    def __reduce__(self):
        return (__import__, ("nowhere_at_all",))


def test_what_cannot_be_read_back_elsewhere_is_found_here():
    gone = Gone()

    async def needy(task, model):
        return gone

    with pytest.raises(FunctionError, match=r"cannot be loaded in another .*nowhere_at_all"):
        ship(needy, role="workflow")


def test_the_text_is_plain_enough_for_a_yaml_file():
    shipped = ship(made(2), role="workflow")
    assert base64.b64decode(shipped.removeprefix(PICKLE), validate=True)
