"""The agent of docs/agentscope2.md runs as it is printed, and has nothing that spoils training."""

import re
from pathlib import Path

from tests.gateway.toy import StubEngine, gateway_of
from tests.integration.agentscope2.test_unsafe_settings import run, runner_of
from tuner.traces import Outcome

PAGE = Path(__file__).parents[3] / "docs" / "agentscope2.md"


async def test_the_pages_agent_answers_and_nothing_is_warned_of(caplog):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
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
