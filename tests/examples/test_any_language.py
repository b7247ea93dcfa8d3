"""Agents in other languages are trained, over HTTP; a failure of theirs is their rollout's."""

import asyncio
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.gateway import again, drift
from tuner.rollouts.without_framework import PlainChatModel
from tuner.traces import TraceStore

pytestmark = pytest.mark.long

EXAMPLE = Path(__file__).parents[2] / "examples" / "any_language"


def stranger_at(base_url):
    return SimpleNamespace(base_url=base_url, api_key="x", model_name="tiny")


def needs(*programs):
    missing = [program for program in programs if shutil.which(program) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} is not installed")


AGENTS = [
    pytest.param("node", marks=needs("node")),
    pytest.param("curl", marks=needs("curl", "jq")),
]


@pytest.mark.parametrize("agent", AGENTS)
def test_it_is_trained(agent, main, tmp_path):
    small = ["buffer.total_steps=2", "buffer.batch_size=2", "algorithm.repeat_times=4"]
    no_evaluation = "buffer.explorer_input.eval_tasksets=[]"  # each answer is a process
    root = f"checkpoint_root_dir={tmp_path}"
    result = main.main(["--agent", agent, *small, no_evaluation, root])
    assert result.outcomes == {"completed": 2 * 2 * 4}
    assert result.tokens.trained > 0
    store = TraceStore(tmp_path / "any_language" / agent / "traces")
    for trace in store.read("train", 1):
        (call,) = trace.calls
        assert call.messages[1]["content"] == trace.task["question"]


@pytest.mark.parametrize("agent", AGENTS)
async def test_what_it_complains_of_is_why_the_rollout_failed(agent, main):
    gateway = drift.gateway_of(drift.letters("42"))
    session = gateway.open_session("r")
    run, task = main.AGENTS[agent], {"question": "1 + 1?"}
    try:
        assert (await run(task, PlainChatModel(session))).response == "42"
        with pytest.raises(RuntimeError, match=r"(?s) ended with \d+: .*API key"):
            await run(task, stranger_at(session.base_url))
        with pytest.raises(RuntimeError, match=r"(?s) ended with \d+: .*\w"):
            await run(task, stranger_at("http://127.0.0.1:9/v1"))
    finally:
        await gateway.aclose()


@needs("node")
@pytest.mark.parametrize("how", ["whole", "streamed"])
async def test_a_program_goes_back_into_a_recorded_rollout(how, main):
    program = ["node", str(Path(__file__).with_name("agent_with_tool.mjs")), how]

    async def agent(session):
        output = await main.answered(program, {"question": again.QUESTION}, PlainChatModel(session))
        return output.response

    await again.check_goes_back(agent, dialect="chat", streamed=how == "streamed")


async def test_a_program_ends_with_its_rollout(main, tmp_path):
    os.mkfifo(pipe := tmp_path / "pid")
    waits = ["sh", "-c", f"echo $$ > {pipe}; exec tail -f /dev/null"]
    rollout = asyncio.create_task(main.answered(waits, {"question": ""}, stranger_at("")))
    pid = int(await asyncio.to_thread(pipe.read_text))  # until it has begun
    os.kill(pid, 0)
    rollout.cancel()
    (ended,) = await asyncio.gather(rollout, return_exceptions=True)
    assert isinstance(ended, asyncio.CancelledError)  # which holds the frames: nothing is collected
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
