"""Programs run in real containers: what they get, their limits, and that nothing is left."""

import asyncio
import os
import subprocess
import sys

import pytest

from tests.integration.harbor.conftest import IMAGE, PROGRAM, ROOT, Model, podman
from tests.kit.toy import StubEngine, gateway_of
from tuner.environments import Program
from tuner.errors import MissingDependencyError, ProgramError
from tuner.rollouts.without_framework import PlainChatModel

FOREVER = "echo begun >begun; sleep 1000"


@pytest.fixture
async def start():
    """Makes programs of bash in the image, which are closed when the test has ended."""
    made = []

    def start(code, *arguments, **options):
        command = ["bash", "-c", code, "bash", *arguments]
        made.append(Program(command, image=IMAGE, **options))
        return made[-1]

    yield start
    for one in made:
        await one.close()


async def ran(program, model=None):
    task = {"question": "1 + 1?\n"}
    return (await program.workflow(task, model or Model())).response


async def test_it_works_in_its_folder_and_changes_nothing_else(start, tmp_path):
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent/kept").write_text("here\n")
    code = """
    cat >prompt; cat kept; pwd; echo $OPENAI_MODEL $HOME $EXTRA
    touch /tmp/x && ! touch /x 2>/dev/null && echo written >new
    """
    program = start(code, template=tmp_path / "agent", environment={"EXTRA": "{prompt}"})
    outputs = await asyncio.gather(*(ran(program) for _ in range(3)))
    for output in outputs:
        assert output.stdout == f"here\n{output.folder}\ntiny /tmp 1 + 1?\n"
        assert (output.isolation, output.status) == ("podman", 0)
        assert output.files() == ["kept", "new", "prompt"]
        assert output.text("prompt") == "1 + 1?\n"
        assert (output.folder / "new").stat().st_uid == os.getuid()


@pytest.mark.parametrize("network", ["none", "host"])
async def test_it_reaches_the_model_and_the_network_that_it_is_given(network, start):
    program = start(PROGRAM.replace("{prompt}", "greet"), network=network)
    async with gateway_of(StubEngine(["hello"])) as gateway:
        session = gateway.open_session("rollout")
        output = await ran(program, PlainChatModel(session))
        assert len(session.seal()) == 1
    assert output.text("greeting.txt") == "hello\n"
    devices = (ROOT / "/proc/net/dev").read_text().count(":")
    assert int(output.stdout) == (1 if network == "none" else devices)


@pytest.mark.parametrize(
    ("code", "limits", "message"),
    [
        ("sleep 100 & sleep 100", {"seconds": 1}, "ran for longer than 1 s"),
        ("yes", {"output_bytes": 5000}, "wrote more than 5000 bytes"),
        ("for i in $(seq 9); do head -c 1M /dev/zero >$i; done; sleep 9", {"disk_mb": 4}, "4 MiB"),
        ("head -c 9M /dev/zero >/tmp/x", {"disk_mb": 4}, "too large|File size limit"),
        ("for i in $(seq 64); do sleep 9 & done", {"processes": 16}, "fork"),
        ("python3 -c 'x = bytearray(400 * 2**20)'", {"memory_mb": 128}, "memory than 128 MiB"),
        ("kill -9 $$", {}, "ended with 137"),
        ("cat; exit 3", {}, r"ended with 3: 1 \+ 1"),
    ],
)
async def test_its_limits_hold(code, limits, message, start):
    with pytest.raises(ProgramError, match=message):
        await ran(start(code, limits=limits))


async def begun(program):
    """A rollout whose program has begun."""
    rollout = asyncio.create_task(ran(program))
    async with asyncio.timeout(20):
        while not list(program._workspaces._made().glob("*/begun")):  # noqa: ASYNC110  # no event
            await asyncio.sleep(0.05)
    return rollout


async def test_it_ends_with_its_rollout(start):
    rollout = await begun(start(FOREVER))
    rollout.cancel()
    with pytest.raises(asyncio.CancelledError):
        await rollout
    assert not podman("ps", "-aq")


def test_it_ends_with_this_process():
    code = """
import asyncio, os, signal
from tests.integration.harbor.test_program import FOREVER, IMAGE, Program, begun
async def main():
    await begun(Program(["bash", "-c", FOREVER], image=IMAGE))
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False)  # the fixture looks for it


def test_an_image_that_is_missing_is_refused_at_once(monkeypatch):
    with pytest.raises(MissingDependencyError, match=r"podman has no image 'localhost/no:1'"):
        Program(["a"], image="localhost/no:1")
