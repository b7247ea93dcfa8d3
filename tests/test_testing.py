"""`tuner.testing`: recorded rollouts are tests of an agent, in a pytest of their own."""

import asyncio
import json
import re
import sys
import textwrap
from importlib import import_module
from pathlib import Path

import openai
import pytest

from tests.kit.chat_server import Refusal, chat_server
from tests.pages import blocks
from tuner.errors import TunerError
from tuner.rollouts.chat_models import default_kind
from tuner.testing import Replayed, recorded_rollouts
from tuner.traces.store import read_rollouts

pytest_plugins = ["pytester"]

# A pytest inside of this one forgets what it has imported first, and some of it cannot come twice.
for _module in ("rollouts.chat_models", "config", "gateway.playback", "gateway.relay"):
    import_module(f"tuner.{_module}")
default_kind()

AGENTS = '''
import json
import openai
import tuner

CITY = "Rome"
RAN = []

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


@tuner.recorded
def weather(city):
    RAN.append(city)
    return {"sky": "blue"}


async def streams(task, model):
    """A plain async client: a tool call, then a stream."""
    messages = [{"role": "user", "content": f"{task['question']} in {CITY}?"}]
    create = model.client.chat.completions.create
    answer = await create(model=model.model_name, messages=messages, tools=TOOLS)
    said = answer.choices[0].message
    messages.append(said.model_dump(exclude_none=True))
    for call in said.tool_calls:
        content = json.dumps(weather(**json.loads(call.function.arguments)))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    stream = await create(model=model.model_name, messages=messages, stream=True)
    texts = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
    return "".join(texts)


def blocks(task, model):
    """A plain blocking client, over HTTP."""
    client = openai.OpenAI(base_url=model.base_url, api_key=model.api_key, max_retries=0)
    with client:
        messages = [{"role": "user", "content": task["question"]}]
        answer = client.chat.completions.create(model=model.model_name, messages=messages)
    return tuner.WorkflowOutput(response=answer.choices[0].message.content)


async def react(task, model):
    """AgentScope 1.x, with a tool."""
    from agentscope.agent import ReActAgent
    from agentscope.formatter import OpenAIChatFormatter
    from agentscope.message import Msg, TextBlock
    from agentscope.tool import Toolkit, ToolResponse

    def weather(city: str) -> ToolResponse:
        """The weather."""
        RAN.append(city)
        return ToolResponse(content=[TextBlock(type="text", text="blue")])

    toolkit = Toolkit()
    toolkit.register_tool_function(weather)
    agent = ReActAgent(
        name="a", sys_prompt=f"For {CITY}.", model=model, formatter=OpenAIChatFormatter(),
        toolkit=toolkit,
    )
    return await agent(Msg("user", task["question"], "user"))
'''
TESTS = """
import pytest
import agents

TASK = {"question": "Which weather"}


async def test_streams(replayed):
    assert await replayed(agents.streams, task=TASK) == "It is blue."


def test_blocks(replayed):
    import asyncio
    output = asyncio.run(replayed(agents.blocks, "named", task=TASK))
    assert output.response == "It is blue."


async def test_react(replayed):
    pytest.importorskip("agentscope")
    answer = await replayed(agents.react, task=TASK)
    assert answer.get_text_content() == "It is blue."
"""


def answered(body):
    """What the model elsewhere says: it asks for the weather where it can and has not."""
    if body.get("tools") and body["messages"][-1]["role"] != "tool":
        function = {"name": "weather", "arguments": '{"city": "Rome"}'}
        call = {"id": "call_1", "type": "function", "function": function}
        return {"content": None, "tool_calls": [call]}
    return "It is blue."


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """What is run here is not run by one worker of many, whoever runs this; and of a file that is
    changed within a second nothing is left of before."""
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)


@pytest.fixture
def tests(pytester):
    """A folder with agents and their tests; returns what runs them."""
    pytester.makeconftest('pytest_plugins = ["tuner.testing"]')
    pytester.makepyfile(agents=AGENTS, test_agents=TESTS)

    run = runs_in(pytester)
    run.folder = pytester.path
    return run


def runs_in(pytester):
    """What runs pytest in a folder."""

    def run(*arguments):
        scope = "asyncio_default_fixture_loop_scope=function"
        own = ("-p", "no:cacheprovider", "-o", "asyncio_mode=auto", "-o", scope)
        return pytester.runpytest_inprocess(*own, *arguments)

    return run


@pytest.fixture
def recorded(tests):
    """The same, with rollouts that were recorded with a model elsewhere."""
    with chat_server(answered) as server:
        found = tests("--record-rollouts", server.base_url, "--record-model", "m")
        found.assert_outcomes(passed=3)
        tests.recorded = found.outlines
        tests.requests = len(server.requests)
    return tests


def test_what_is_missing_is_recorded_once_and_then_given_back(recorded):
    assert recorded.requests == 5
    file = recorded.folder / "test_agents.rollouts.jsonl"
    assert f"recorded 'test_streams' in {file}: 2 calls" in recorded.recorded
    assert set(read_rollouts(file)) == {"test_streams", "named", "test_react"}
    written = file.read_bytes()
    result = recorded()  # the server is gone
    result.assert_outcomes(passed=3)
    # Nobody is asked for what is there.
    recorded("--record-rollouts", "http://127.0.0.1:9/v1", "--record-model", "m").assert_outcomes(
        passed=3
    )
    assert file.read_bytes() == written


def test_a_changed_prompt_fails_with_a_diff(recorded):
    agents = recorded.folder / "agents.py"
    agents.write_text(agents.read_text().replace('CITY = "Rome"', 'CITY = "Oslo"'))
    result = recorded()
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(
        [
            "the agent leaves the rollout 'test_streams' at call 1: messages?0?.content is *",
            "asked for in streams (*agents.py:*)",
            "--- call 1 as recorded",
            "+++ asked for now",
            "*user?",
            "-  Which weather in Rome?",
            "+  Which weather in Oslo?",
        ]
    )
    result.stdout.fnmatch_lines(["-  For Rome.", "+  For Oslo."])


def test_another_answer_fails_with_a_diff(recorded):
    agents = recorded.folder / "agents.py"
    agents.write_text(agents.read_text().replace('return "".join(texts)', 'return "Blue"'))
    result = recorded()
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(
        ["the agent makes the requests of 'test_streams', *", "-It is blue.", "+Blue"]
    )


def test_another_tool_result_is_seen_in_the_next_request_unless_it_is_recorded(recorded):
    """AgentScope's agent has a tool that runs again; the other one's is decorated."""
    agents = recorded.folder / "agents.py"
    agents.write_text(agents.read_text().replace("blue", "grey"))
    result = recorded()
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["the agent leaves the rollout 'test_react' at call 2: *"])


def test_an_agents_own_error_is_raised_as_it_is(recorded):
    agents = recorded.folder / "agents.py"
    agents.write_text(agents.read_text().replace("json.loads(call", "json.dumps(1 / 0, call"))
    result = recorded()
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["E*ZeroDivisionError*"])


def test_another_task_is_another_rollout(recorded):
    file = recorded.folder / "test_agents.py"
    file.write_text(file.read_text().replace("Which weather", "What weather"))
    result = recorded()
    result.assert_outcomes(failed=3)
    result.stdout.fnmatch_lines(["the rollout 'test_streams' was recorded with another task: *"])


def test_without_a_rollout_the_test_says_how_to_record_one(tests):
    result = tests()
    result.assert_outcomes(failed=3)
    result.stdout.fnmatch_lines(["*has no rollout 'test_streams': it is empty. Record it*"])


def test_a_failed_recording_leaves_nothing(tests):
    def refuse(body):
        raise Refusal(400, "no such model")

    with chat_server(refuse) as server:
        result = tests("--record-rollouts", server.base_url, "--record-model", "m")
    result.assert_outcomes(failed=3)
    result.stdout.fnmatch_lines(["*no such model*"])
    assert not (tests.folder / "test_agents.rollouts.jsonl").exists()


def test_an_agent_that_asks_nothing_is_not_recorded(tests):
    (tests.folder / "test_agents.py").write_text(
        "async def test_it(replayed):\n"
        "    await replayed(lambda task, model: 'done', task={'question': 'x'})\n"
    )
    with chat_server(answered) as server:
        result = tests("--record-rollouts", server.base_url, "--record-model", "m")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*has no calls: the agent sent no request to `model`"])


def test_one_option_without_the_other(tests):
    result = tests("--record-model", "m")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--record-rollouts URL needs --record-model NAME*"])


def test_rollouts_of_a_file_as_parameters_and_the_file_elsewhere(recorded):
    (recorded.folder / "test_agents.rollouts.jsonl").rename(recorded.folder / "kept.jsonl")
    (recorded.folder / "test_agents.py").write_text(
        "import pathlib, pytest, agents\n"
        "from tuner.testing import recorded_rollouts\n"
        "@pytest.fixture\n"
        "def rollouts_file():\n"
        "    return pathlib.Path(__file__).with_name('kept.jsonl')\n"
        "@pytest.mark.parametrize('rollout', recorded_rollouts('kept.jsonl', 'named'))\n"
        "async def test_each(replayed, rollout):\n"
        "    await replayed(agents.blocks, rollout)\n"
        "async def test_named(replayed):\n"
        "    await replayed(agents.streams, 'test_streams')\n"
    )
    result = recorded("-v")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["*::test_each?named? PASSED*"])


def test_files_that_are_not_as_they_should_be(recorded, tmp_path):
    file = recorded.folder / "test_agents.rollouts.jsonl"
    with pytest.raises(TunerError, match=r"has no rollout 'other': it has 'test_streams', 'named'"):
        recorded_rollouts(file, "other")
    with pytest.raises(TunerError, match="has no rollouts: it is empty"):
        recorded_rollouts(tmp_path / "nothing.jsonl")
    first = file.read_text().splitlines()[0]
    file.write_text(f"{first}\n{first}\n")
    with pytest.raises(TunerError, match=r"line 2: there is a rollout 'test_streams' above"):
        recorded_rollouts(file)
    file.write_text(json.dumps({"name": "x"}) + "\n")
    with pytest.raises(TunerError, match=r"line 1 is not a saved rollout"):
        recorded_rollouts(file)


def test_the_page_runs_as_it_stands(pytester):
    """Its agent, its tests, its recording; the diff on it is the one that is printed."""
    page = (Path(__file__).parents[1] / "docs/testing_agents.md").read_text()
    for block in blocks("testing_agents.md", "python"):
        name, _, code = block.partition("\n")
        Path(pytester.path, name.removeprefix("# ")).write_text(code)
    run = runs_in(pytester)

    def answer(body):
        asked = body["messages"][-1]
        if asked["role"] == "tool":
            return json.loads(asked["content"])[0]
        if "name" in asked["content"]:
            return "I have none."
        function = {"name": "search", "arguments": '{"query": "The Eiffel Tower"}'}
        call = {"id": "call_1", "type": "function", "function": function}
        return {"content": None, "tool_calls": [call]}

    with chat_server(answer) as server:
        run("--record-rollouts", server.base_url, "--record-model", "m").assert_outcomes(passed=2)
    run().assert_outcomes(passed=2)
    agent = pytester.path / "my_agent.py"
    agent.write_text(agent.read_text().replace("Answer from", "Answer shortly, from"))
    result = run()
    result.assert_outcomes(failed=2)
    (shown,) = re.findall(r"( {4}the agent leaves.*?\[tool search\]\n)", page, re.DOTALL)
    for line in textwrap.dedent(shown).splitlines():
        if not line.startswith("asked for in"):
            assert line in result.outlines


async def test_an_agent_that_does_not_end_fails(recorded):
    replayed = Replayed(recorded.folder / "test_agents.rollouts.jsonl", "named")
    with pytest.raises(pytest.fail.Exception, match=r"the agent did not end within 0\.01 s"):
        await replayed(lambda task, model: asyncio.sleep(9), seconds=0.01)


async def test_other_dialects_than_the_relays_are_refused_by_name(recorded):
    async def responds(task, model):
        return await model.client.responses.create(model=model.model_name, input="hi")

    replayed = Replayed(recorded.folder / "test_agents.rollouts.jsonl", "named")
    with pytest.raises(openai.NotFoundError, match="POST /v1/responses is not given back"):
        await replayed(responds)


def test_keys_are_not_in_the_file(tests, monkeypatch):
    monkeypatch.setenv("SOME_KEY", "sk-secret")
    with chat_server(answered) as server:
        keys = ("--record-key-env", "SOME_KEY")
        tests("--record-rollouts", server.base_url, "--record-model", "m", *keys).assert_outcomes(
            passed=3
        )
        assert server.requests[0]["headers"]["authorization"] == "Bearer sk-secret"
    assert "sk-secret" not in (tests.folder / "test_agents.rollouts.jsonl").read_text()
