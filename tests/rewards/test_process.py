import asyncio
import importlib
import os
import pickle
import subprocess
import sys

import cloudpickle
import psutil
import pytest

from tests.rewards import functions
from tuner.errors import FunctionError, RewardError, RewardTimeout
from tuner.rewards import in_process
from tuner.tasks.loading import load_function


async def test_the_function_runs_in_another_process():
    score = in_process(functions.length)
    assert await score("abc", scale=0.5) == 1.5
    assert await in_process(functions.process_id)() != os.getpid()


async def test_a_function_that_came_by_value_is_sent_on(tmp_path, monkeypatch):
    """As in a worker, to which functions beside the script are sent so."""
    (tmp_path / "beside_the_script.py").write_text(
        "FACTOR = 2\ndef score(text):\n    return FACTOR * len(text)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("beside_the_script")
    cloudpickle.register_pickle_by_value(module)
    try:
        data = cloudpickle.dumps(in_process(module.score))
    finally:
        cloudpickle.unregister_pickle_by_value(module)
    assert await cloudpickle.loads(data)("abc") == 6


SCRIPT = """
import asyncio, json, threading
from collections import namedtuple
from tuner.errors import FunctionError, RewardError
from tuner.rewards import in_process, math_judge

print("run as", __name__, flush=True)
Found = namedtuple("Found", "score")
FACTOR, LOCK = 2, threading.Lock()

class Odd(Exception): ...

def score(text):
    if not text:
        raise Odd("nothing")
    return Found(FACTOR * len(text))

def locked(text):
    with LOCK:
        return len(text)

async def main():
    scored = in_process(score, workers=1)
    found = await scored("abc")
    assert type(found) is Found and found.score == 6
    for function, text in ((scored, ""), (in_process(locked), "abc")):
        try:
            await function(text)
        except (FunctionError, RewardError) as error:
            print(type(error).__name__, error)
    print(await math_judge()({"answer": "2"}, "2"))

asyncio.run(main())
"""


@pytest.mark.long
def test_a_script_needs_no_guard_for_the_processes_of_its_functions(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    ran = subprocess.run(
        [sys.executable, tmp_path / "script.py"], capture_output=True, text=True, timeout=60
    )
    started, raised, refused, judged = ran.stdout.splitlines()
    assert started == "run as __main__"
    assert raised == "RewardError score raised Odd: nothing"
    assert refused.startswith("FunctionError in_process(locked): another process cannot get it")
    assert "the global 'LOCK' is a lock" in refused
    assert judged.startswith("reward=1.0")


async def test_a_function_of_a_file_that_a_configuration_names_is_sent_too(tmp_path):
    (tmp_path / "judges.py").write_text(
        "from tuner.rewards import in_process\nFACTOR = 2\n"
        "def length(text):\n    return FACTOR * len(text)\n"
        "score = in_process(length, workers=1)\n"
    )
    score = load_function(f"{tmp_path}/judges.py:score", setting="tuner.judge")
    assert await score("abc") == 6


async def test_what_would_end_its_process_is_an_error_of_the_function():
    raising = in_process(functions.raise_named, workers=1)
    for error in ("KeyboardInterrupt", "SystemExit", "GeneratorExit"):
        with pytest.raises(RewardError, match=f"raise_named raised {error}: odd"):
            await raising(error)


async def test_what_takes_too_long_is_a_timeout_and_the_next_call_works():
    hang = in_process(functions.hang, timeout=0.2, workers=1)
    with pytest.raises(RewardTimeout, match=r"judge timed out: hang took more than 0\.2 s"):
        await hang("a")
    with pytest.raises(RewardTimeout):  # its process was replaced
        await hang("b")


async def test_a_process_that_dies_takes_no_other_call_along():
    die, length = in_process(functions.die, workers=1), in_process(functions.length)
    outcomes = await asyncio.gather(die("a"), length("abcd"), die("b"), return_exceptions=True)
    assert isinstance(outcomes[0], RewardError)
    assert "the process of die died with exit code -9" in str(outcomes[0])
    assert outcomes[1] == 4
    assert isinstance(outcomes[2], RewardError)


async def test_an_error_says_which_function_and_why():
    with pytest.raises(RewardError, match=r"fail raised ValueError: no reward for 'x'"):
        await in_process(functions.fail)("x")


async def test_a_cancelled_call_ends_its_process(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    hang = in_process(functions.hang_after, timeout=600, workers=1)
    call = asyncio.ensure_future(hang(str(tmp_path / "pipe")))
    process = psutil.Process(int(await asyncio.to_thread((tmp_path / "pipe").read_text)))
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert psutil.wait_procs([process], timeout=30)[0]


async def test_what_cannot_be_sent_is_an_error_too():
    with pytest.raises(RewardError, match="length raised"):
        await in_process(functions.length)(lambda: None)


async def test_processes_end_with_the_function():
    score = in_process(functions.process_id, workers=1)
    process = psutil.Process(await score())
    del score
    assert psutil.wait_procs([process], timeout=30)[0]


@pytest.mark.parametrize("function", [lambda answer: 1.0, asyncio.sleep])
def test_what_another_process_cannot_run_is_refused_when_it_is_made(function):
    with pytest.raises(FunctionError, match=r"top of a module|call it directly"):
        in_process(function)


def test_limits_must_be_above_zero():
    with pytest.raises(ValueError, match="must be above 0"):
        in_process(functions.length, timeout=0)


@pytest.mark.long
async def test_it_travels_without_its_processes():
    score = in_process(functions.length)
    await score("a")
    assert await pickle.loads(pickle.dumps(score))("abc") == 3
