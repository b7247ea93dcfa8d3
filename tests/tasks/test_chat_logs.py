"""Logs without tokens: each form as a conversation or a pair, and nothing made up."""

from __future__ import annotations

import asyncio
import json

import pytest

from tuner.errors import DatasetError
from tuner.runs.history import logged

USER = {"role": "user", "content": "What is 6*7?"}
ANSWER = {"role": "assistant", "content": "42"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def only(line):
    (found,) = logged(line)
    return found


def test_a_conversation_is_taken_as_it_is():
    found = only({"messages": [USER, ANSWER], "tools": [TOOL], "parallel_tool_calls": False})
    assert found.row == {"messages": [USER, ANSWER], "tools": [TOOL]}


def test_a_pair_of_openais_preference_form_has_both_ends():
    line = {
        "input": {"messages": [USER], "tools": []},
        "preferred_output": [ANSWER],
        "non_preferred_output": [{"role": "assistant", "content": "41"}],
    }
    row = only(line).row
    assert row["messages"] == [USER]
    assert (row["chosen"], row["rejected"][0]["content"]) == ([ANSWER], "41")


@pytest.mark.parametrize("wrapped", [False, True])
def test_of_a_request_only_its_answer_is_trained(wrapped):
    request = {"model": "m", "messages": [USER, ANSWER, USER], "tools": [TOOL]}
    message = {**ANSWER, "refusal": None, "annotations": []}
    response = {"created": 1700000000, "choices": [{"index": 0, "message": message}]}
    both = [{"body": one} if wrapped else one for one in (request, response)]
    found = only(dict(zip(("request", "response"), both, strict=True)))
    assert found.row["messages"] == [USER, {**ANSWER, "weight": 0}, USER, ANSWER]
    assert found.row["tools"] == [TOOL]
    assert found.started == 1700000000


def parts(*found):
    return [{"type": "text", "content": one} if isinstance(one, str) else one for one in found]


def span(**attributes):
    plain = {"gen_ai.operation.name": "chat", **attributes}
    return {"attributes": plain, "start_time": "2026-11-24T10:00:00Z", "status": {}}


CALL = {"type": "tool_call", "id": "c1", "name": "add", "arguments": {"a": 1}}
RESULT = {"type": "tool_call_response", "id": "c1", "response": 2}
THOUGHT = {"type": "reasoning", "content": "6 sevens"}


def of_conventions(**changed):
    found = {
        "gen_ai.system_instructions": parts("Be brief."),
        "gen_ai.input.messages": [
            {"role": "user", "parts": parts("Add.")},
            {"role": "assistant", "parts": parts(CALL)},
            {"role": "tool", "parts": parts(RESULT)},
        ],
        "gen_ai.output.messages": [
            {"role": "assistant", "parts": parts(THOUGHT, "It is 2."), "finish_reason": "stop"}
        ],
        "gen_ai.tool.definitions": [{"type": "function", "name": "add", "parameters": {}}],
        **changed,
    }
    return {key: value for key, value in found.items() if value is not None}


@pytest.mark.parametrize("as_text", [False, True])
def test_a_span_of_the_conventions_becomes_openais_messages(as_text):
    attributes = of_conventions()
    if as_text:
        attributes = {key: json.dumps(value) for key, value in attributes.items()}
    found = only(span(**attributes))
    system, user, asked, result, answer = found.row["messages"]
    assert system == {"role": "system", "content": "Be brief."}
    assert user == {"role": "user", "content": "Add."}
    assert asked["weight"] == 0
    assert asked["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    ]
    assert result == {"role": "tool", "tool_call_id": "c1", "content": "2"}
    assert answer == {
        "role": "assistant",
        "content": "It is 2.",
        "reasoning_content": "6 sevens",
    }
    assert found.row["tools"] == [
        {"type": "function", "function": {"name": "add", "parameters": {}}}
    ]
    assert found.started == 1795514400


def otlp(value):
    if isinstance(value, str):
        return {"stringValue": value}
    if isinstance(value, list):
        return {"arrayValue": {"values": [otlp(one) for one in value]}}
    values = [{"key": key, "value": otlp(inner)} for key, inner in value.items()]
    return {"kvlistValue": {"values": values}}


def test_spans_as_otlp_sends_them_are_the_same():
    attributes = {
        "gen_ai.operation.name": "chat",
        "gen_ai.input.messages": [{"role": "user", "parts": parts("Add.")}],
        "gen_ai.output.messages": [{"role": "assistant", "parts": parts("2")}],
    }
    one = {
        "startTimeUnixNano": "1795514400000000000",
        "attributes": [{"key": key, "value": otlp(value)} for key, value in attributes.items()],
    }
    tool = {"attributes": [{"key": "gen_ai.operation.name", "value": otlp("execute_tool")}]}
    line = {"resourceSpans": [{"scopeSpans": [{"spans": [one, tool]}]}]}
    found, other = logged(line)
    assert found.row == only(span(**attributes)).row
    assert found.started == 1795514400
    assert (other.row, other.reason) == (None, "no_model_call")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (span(**{"gen_ai.operation.name": "invoke_agent"}), "no_model_call"),
        (span(**of_conventions(**{"gen_ai.output.messages": None})), "no_answer"),
        (span(**{"gen_ai.output.messages": [{"role": "assistant", "parts": []}]}), "no_prompt"),
        ({**span(**of_conventions()), "status": {"status_code": "ERROR"}}, "failed_call"),
        (
            span(
                **of_conventions(
                    **{"gen_ai.input.messages": [{"role": "user", "parts": [{"type": "blob"}]}]}
                )
            ),
            "not_text",
        ),
        ({"request": {"messages": [USER]}, "response": {"choices": []}}, "no_answer"),
    ],
)
def test_what_is_nothing_to_learn_from_has_a_reason(line, reason):
    assert (only(line).row, only(line).reason) == (None, reason)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ({"prompt": "x", "answer": "y"}, "it has the keys prompt, answer, but must be a recorded"),
        ([1], "is not an object"),
        ({"request": {"messages": [USER]}, "response": "oops"}, "the body of a chat completion"),
        (span(**{"gen_ai.output.messages": "{not json"}), "is not JSON"),
    ],
)
def test_other_forms_are_refused_by_name(line, text):
    with pytest.raises(DatasetError, match="(?s)" + text):
        list(logged(line))


def test_agentscopes_own_spans_are_read():
    """Its spans of model calls have the answer by the conventions, and the prompt elsewhere."""
    pytest.importorskip("opentelemetry.sdk")
    from agentscope import _config
    from agentscope.message import TextBlock, ThinkingBlock, ToolUseBlock
    from agentscope.model import ChatModelBase, ChatResponse
    from agentscope.tracing import _trace, trace_llm
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    class Model(ChatModelBase):
        @trace_llm
        async def __call__(self, messages, tools=None, tool_choice=None):
            blocks = [
                ThinkingBlock(type="thinking", thinking="6 sevens"),
                TextBlock(type="text", text="Let me add."),
                ToolUseBlock(type="tool_use", id="c1", name="add", input={"a": 1}),
            ]
            return ChatResponse(content=blocks)

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    given = [USER, {**ANSWER, "content": [{"type": "text", "text": "42"}]}, USER]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_config, "trace_enabled", True)
        patched.setattr(_trace, "_get_tracer", lambda: provider.get_tracer("agentscope"))
        asyncio.run(Model("m", False)(given, tools=[TOOL]))
    (written,) = exporter.get_finished_spans()
    found = only(json.loads(written.to_json()))
    *before, answer = found.row["messages"]
    assert before == [given[0], {**given[1], "weight": 0}, given[2]]
    assert answer["reasoning_content"] == "6 sevens"
    assert answer["content"] == "Let me add."
    assert answer["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert found.row["tools"][0]["function"]["name"] == "add"
    assert found.started is not None
