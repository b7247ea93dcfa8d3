"""AgentScope 2's agent in docs/agents.md runs as printed, and has nothing that spoils training."""

from tests.integration.agentscope2.test_unsafe_settings import run, runner_of
from tests.kit.toy import StubEngine, gateway_of
from tests.pages import blocks
from tuner.traces import Outcome


async def test_the_pages_agent_answers_and_nothing_is_warned_of(caplog):
    (code,) = blocks("agents.md", "python", "tests/integration/agentscope2/test_docs.py")
    names = {}
    exec(code, names)

    async def workflow(task, model):
        output = await names["workflow"]({"question": "2 + 40?"}, model)
        return output.model_copy(update={"reward": 1.0})

    async with gateway_of(StubEngine()) as gateway:
        trace = await run(runner_of(gateway, workflow))
    assert trace.outcome is Outcome.COMPLETED, trace.error
    assert [tool["function"]["name"] for tool in trace.calls[0].tools] == ["search"]
    assert not [record for record in caplog.records if record.name.startswith("tuner")]
