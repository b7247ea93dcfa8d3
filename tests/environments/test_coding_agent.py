"""A coding agent that knows nothing of us leaves one exact trace, whatever it does."""

import json
import shutil
from pathlib import Path

import pytest

from tests.kit.toy import StubEngine, gateway_of, ids_of, tokenizer
from tuner.environments.program import Program
from tuner.rollouts.without_framework import PlainChatModel
from tuner.traces import Outcome, RolloutId, TokenTree, Trace
from tuner.training.batch import build_batch

AGENT = Path(__file__).with_name("coding_agent.mjs")
TASK = {"question": "Write the answer of notes.txt to answer.txt."}

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")


def called(name, **arguments):
    body = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


def programmer(prompt, sampling):
    """What the model says, by what is in its prompt."""
    helper = "You are a helper." in prompt
    results = prompt.count("<tool_response>")
    if "Summarise what was done." in prompt:
        return "both helpers have written their part."
    if helper:
        part = "one" if "part one" in prompt else "two"
        if results:
            return f"Part {part} is written."
        return called("write_file", path=f"{part}.txt", content=part)
    if "So far: " in prompt:
        if not results:
            return "Now the answer.\n" + called("write_file", path="answer.txt", content="42")
        if results == 1:
            return called("run", command="cat one.txt two.txt answer.txt")
        return "It is done."
    delegated = [called("delegate", task=f"Write part {part}.") for part in ("one", "two")]
    return "\n".join([called("read_file", path="notes.txt"), *delegated])


@pytest.fixture
def template(tmp_path):
    folder = tmp_path / "template"
    folder.mkdir()
    shutil.copy(AGENT, folder / "agent.mjs")
    (folder / "notes.txt").write_text("The answer is 42. " * 50)
    return folder


@pytest.mark.long
@pytest.mark.parametrize("how", ["whole", "stream"])
@pytest.mark.parametrize("dialect", ["openai", "anthropic"])
async def test_helpers_parallel_calls_and_compaction_are_one_exact_trace(dialect, how, template):
    program = Program(
        ["node", "agent.mjs", dialect, how],
        prompt="file:PROMPT.md",
        template=template,
        limits={"seconds": 120},
    )
    engine = StubEngine(max_model_len=100_000, answer=programmer)
    traces, files = [], []
    async with gateway_of(engine) as gateway:
        for number in range(2):
            session = gateway.open_session(f"rollout {number}")
            output = await program.workflow(TASK, PlainChatModel(session))
            files.append(output.response.files())
            traces.append(
                Trace(
                    RolloutId(1, 0, number),
                    TASK,
                    session.seal(),
                    Outcome.COMPLETED,
                    float(number),
                    response=str(output.response),
                )
            )
    await program.close()
    for trace in traces:
        check_calls(trace, dialect, how)
    asked = sorted(prompt for prompt, _, _ in engine.requests)
    recorded = sorted(call.prompt_ids for trace in traces for call in trace.calls)
    assert recorded == asked  # each request of the engine's is a call, and nothing else is
    assert [trace.response for trace in traces] == ["It is done."] * 2
    assert files[0] == [
        *("PROMPT.md", "agent.mjs", "answer.txt", "notes.txt", "one.txt", "two.txt"),
    ]
    check_batch(traces)


def check_calls(trace, dialect, how):
    # The main agent's four turns and its summary, and two of each helper.
    assert len(trace.calls) == 9
    assert {call.dialect for call in trace.calls} == {"chat" if dialect == "openai" else "messages"}
    assert {call.streamed for call in trace.calls} == {how == "stream"}
    assert not any(call.undelivered for call in trace.calls)
    first = trace.calls[0]
    assert [made["function"]["name"] for made in first.response["tool_calls"]] == [
        *("read_file", "delegate", "delegate"),
    ]
    for call in trace.calls:
        prompt = tokenizer().decode(call.prompt_ids)
        said = programmer(prompt, None)
        assert call.completion_ids == (*ids_of(said), tokenizer().eos_token_id)
        assert len(call.logprobs) == len(call.completion_ids) == len(call.versions)
    # What goes on a conversation begins with it, token by token; nothing else shares as much.
    paths = [(*call.prompt_ids, *call.completion_ids) for call in trace.calls]
    continued = sum(
        any(later.prompt_ids[: len(path)] == path for later in trace.calls) for path in paths
    )
    assert continued == 1 + 2 + 2  # the first turn, the helpers' first, two after the summary


def check_batch(traces):
    calls = [call for trace in traces for call in trace.calls]
    paths = [(*call.prompt_ids, *call.completion_ids) for call in calls]
    prefixes = {path[:end] for path in paths for end in range(1, len(path) + 1)}
    assert len(TokenTree.build(calls).token) == len(prefixes) < sum(map(len, paths)) / 2
    batch = build_batch(traces)
    sampled = sum(len(call.completion_ids) for call in calls)
    assert batch.sampled_tokens == sampled
    assert batch.sampled_tokens == batch.trained_tokens + sum(batch.dropped_tokens.values())
    assert batch.dropped_tokens == {}
