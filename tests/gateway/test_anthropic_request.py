"""Every field of a Messages request is honoured, without effect, or refused with a 400."""

from __future__ import annotations

import json
import re
import typing
from typing import Any

import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_create_params as beta_params
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kit.examples import few
from tests.kit.toy import StubEngine, gateway_of
from tuner.gateway import Gateway
from tuner.gateway.app import StreamReply
from tuner.gateway.dialects.anthropic import COUNT_FIELDS, MESSAGES_FIELDS

USER = [{"role": "user", "content": "hi"}]
ADD: dict[str, Any] = {"name": "add", "input_schema": {"type": "object"}}
BODY: dict[str, Any] = {"model": "tiny", "max_tokens": 60, "messages": USER}
FORMAT = {"type": "json_schema", "schema": {"type": "object"}}


async def send(
    gateway: Gateway, body: Any, *, raw: bytes | None = None, path: str = "/v1/messages"
) -> tuple[int, Any]:
    """Status and body; a session that leaks anything fails."""
    session = gateway.open_session("r")
    headers = {"authorization": f"Bearer {session.key}"}
    payload = json.dumps(body).encode() if raw is None else raw
    reply = await gateway.handle("POST", path, headers, payload)
    if isinstance(reply, StreamReply):
        status, answer = 200, b"".join([event async for event in reply.events])
    else:
        status, answer = reply.status, reply.body
    assert session.errors == []
    assert session.recording.carried == []
    assert not session.in_flight.tasks
    assert not any(call.undelivered for call in session.calls)
    session.seal()
    if isinstance(reply, StreamReply):
        assert answer.endswith(b'event: message_stop\ndata: {"type": "message_stop"}\n\n')
        return status, {}
    return status, json.loads(answer)


def test_the_table_has_every_field_of_anthropics_api() -> None:
    for params in (message_create_params, beta_params):
        fields = set(typing.get_type_hints(params.MessageCreateParamsBase)) | {"stream"}
        assert fields <= set(MESSAGES_FIELDS)
    counted = typing.get_type_hints(message_count_tokens_params.MessageCountTokensParams)
    assert set(counted) <= set(COUNT_FIELDS)


HARMLESS: list[dict[str, Any]] = [
    {"stream": False},
    {"stream": True},
    {"system": ""},
    {"system": []},
    {"temperature": 1},
    {"top_k": 0},
    {"stop_sequences": []},
    {"tools": []},
    {"tools": [{**ADD, "type": "custom", "strict": False, "eager_input_streaming": True}]},
    {"tools": [{**ADD, "allowed_callers": ["direct"], "defer_loading": False}]},
    {"tools": [ADD], "tool_choice": {"type": "auto"}},
    {"tools": [ADD], "tool_choice": {"type": "auto", "disable_parallel_tool_use": False}},
    {"tools": [ADD], "tool_choice": {"type": "none"}},
    {"thinking": {"type": "disabled"}},
    {"thinking": {"type": "adaptive", "display": "summarized"}},
    {"output_config": {}},
    {"output_config": {"effort": None, "format": None}},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"thinking": {"type": "disabled"}, "chat_template_kwargs": {"enable_thinking": False}},
    {"seed": 1},
    {"metadata": {"user_id": "u"}},
    {"service_tier": "auto"},
    {"cache_control": {"type": "ephemeral"}},
    {"inference_geo": "eu"},
    {"user_profile_id": "u"},
    {"workspace_id": "w"},
    {"speed": "standard"},
    {"diagnostics": {"previous_message_id": None}},
    {"mcp_servers": []},
    {"context_management": {"edits": []}},
    {"messages": [{"role": "user", "content": []}]},
    {"messages": [*USER, {"role": "assistant", "content": []}, *USER]},
    {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "x", "citations": []}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "text", "text": "x", "citations": None, "parsed_output": None},
                    {
                        "type": "tool_use",
                        "id": "i",
                        "name": "add",
                        "input": {},
                        "caller": {"type": "direct"},
                        "toolset_name": None,
                    },
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "i"}]},
        ]
    },
]


@pytest.mark.parametrize("fields", HARMLESS, ids=lambda fields: next(iter(fields)))
async def test_value_that_asks_nothing_unusual_is_accepted(fields: dict[str, Any]) -> None:
    async with gateway_of(StubEngine()) as gateway:
        status, answer = await send(gateway, BODY | fields)
        assert (status, answer.get("error")) == (200, None)


async def test_null_means_left_out_for_every_optional_field() -> None:
    async with gateway_of(StubEngine()) as gateway:
        status, answer = await send(gateway, dict.fromkeys(MESSAGES_FIELDS) | BODY)
        assert (status, answer.get("error")) == (200, None)
        nulls = dict.fromkeys(COUNT_FIELDS) | {"model": "tiny", "messages": USER}
        status, answer = await send(gateway, nulls, path="/v1/messages/count_tokens")
        assert (status, answer.get("error")) == (200, None)
        assert answer["input_tokens"] > 0


def block(role: str, **fields: Any) -> list[dict[str, Any]]:
    return [*USER, {"role": role, "content": [fields]}, *USER]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens is missing"),
    ({"max_tokens": 0}, "max_tokens is 0.*at least 1"),
    ({"model": None}, "model is missing"),
    ({"messages": None}, "messages is missing"),
    ({"messages": []}, "messages is empty"),
    ({"messages": "hi"}, "messages must be an array"),
    ({"messages": ["hi"]}, r"messages\[0\] must be an object"),
    ({"messages": [{"role": "tool", "content": "x"}]}, r"messages\[0\].role"),
    ({"messages": [{"role": {}, "content": "x"}]}, r"messages\[0\].role"),
    ({"messages": [{"role": "user"}]}, r"messages\[0\].content must be"),
    ({"messages": [{"role": "user", "content": "x", "name": "n"}]}, r"messages\[0\].name"),
    (
        {"messages": [*USER, {"role": "assistant", "content": "It is"}]},
        "cannot continue a given answer",
    ),
    ({"messages": block("user", type="image", source={})}, r"\[1\].content\[0\].type.*image"),
    ({"messages": block("user", type="document", source={})}, "document"),
    ({"messages": block("user", type="search_result")}, "search_result"),
    ({"messages": block("user", type="thinking", thinking="x")}, "thinking"),
    ({"messages": block("user", type={})}, r"content\[0\].type"),
    ({"messages": block("assistant", type="tool_result", tool_use_id="x")}, "tool_result"),
    ({"messages": block("assistant", type="server_tool_use", id="x")}, "server_tool_use"),
    ({"messages": block("assistant", type="text")}, r"content\[0\].text must be a string"),
    ({"messages": block("assistant", type="text", text="x", citations=[{}])}, "citations"),
    ({"messages": block("assistant", type="thinking", signature="x")}, "thinking must be"),
    ({"messages": block("assistant", type="tool_use", id="x", name="n", input="{}")}, "input must"),
    ({"messages": block("assistant", type="tool_use", id="x", input={})}, "name must"),
    ({"messages": block("assistant", type="tool_use", name="x", input={})}, "id must"),
    (
        {
            "messages": block(
                "assistant", type="tool_use", id="x", name="x", input={}, caller={"type": "code"}
            )
        },
        "caller",
    ),
    ({"messages": block("user", type="tool_result")}, "tool_use_id must"),
    (
        {"messages": block("user", type="tool_result", tool_use_id="x", is_error="no")},
        "is_error must be true or false",
    ),
    (
        {
            "messages": block(
                "user", type="tool_result", tool_use_id="x", content=[{"type": "image"}]
            )
        },
        r"content\[0\].content\[0\].type",
    ),
    ({"system": 3}, "system must be"),
    ({"system": [{"type": "image"}]}, r"system\[0\].type"),
    ({"temperature": 1.5}, "from 0 to 1"),
    ({"top_p": 0}, "above 0 to 1"),
    ({"top_k": -2}, "top_k"),
    ({"stop_sequences": "x"}, "array of strings"),
    ({"stop_sequences": [""]}, "empty string"),
    ({"stop_sequences": ["x"] * 65}, "at most 64"),
    ({"stream": "yes"}, "true or false"),
    ({"tools": {}}, "tools must be an array"),
    ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, r"tools\[0\].type.*custom"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, r"tools\[0\].type.*custom"),
    ({"tools": [{"name": "add"}]}, "input_schema is missing"),
    ({"tools": [{"name": "", "input_schema": {}}]}, "name is missing or empty"),
    ({"tools": [{**ADD, "input_examples": [{}]}]}, "input_examples"),
    ({"tools": [{**ADD, "allowed_callers": ["code_execution_20250825"]}]}, "only caller"),
    ({"tools": [{**ADD, "defer_loading": True}]}, "defer_loading"),
    ({"tools": [{**ADD, "zzz": 1}]}, "zzz"),
    ({"tool_choice": "auto"}, "tool_choice must be an object"),
    ({"tool_choice": {"type": []}}, "tool_choice.type"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tool_choice": {"type": "none", "name": "x"}}, "tool_choice.name"),
    ({"thinking": {"type": "between_tools"}}, "thinking.type"),
    ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "budget_tokens"),
    ({"thinking": {"type": "adaptive", "budget_tokens": 5}}, "budget_tokens"),
    ({"thinking": {"type": "enabled", "display": "omitted"}}, "always returned"),
    (
        {"thinking": {"type": "disabled"}, "chat_template_kwargs": {"enable_thinking": True}},
        "send one of them",
    ),
    ({"output_config": {"effort": "low"}}, "output_config.effort"),
    ({"output_config": {"zzz": 1}}, "output_config.zzz"),
    ({"output_config": {"format": {"type": "json"}}}, "output_config.format must be"),
    ({"output_config": {"format": FORMAT}, "output_format": FORMAT}, "send the latter"),
    ({"chat_template_kwargs": {"zzz": 1}}, "zzz"),
    ({"speed": "fast"}, "speed"),
    ({"diagnostics": {"previous_message_id": "m"}}, "diagnostics"),
    ({"mcp_servers": [{"name": "x"}]}, "mcp_servers"),
    ({"context_management": {"edits": [{"type": "x"}]}}, "context_management"),
    ({"container": "c"}, "container"),
    ({"compaction": {}}, "compaction"),
    ({"thread": {}}, "thread"),
    ({"betas": ["x"]}, "anthropic-beta header"),
    ({"billing_policy": {}}, "billing_policy"),
    ({"fallbacks": []}, "fallbacks"),
    ({"fallback_credit_token": "x"}, "fallback_credit_token"),
    ({"max_token": 1}, "did you mean 'max_tokens'"),
    ({"messages": [{"role": "user", "content": "forbidden"}]}, "no such word here"),
]


@pytest.mark.parametrize(("fields", "sentence"), REFUSED)
async def test_refusals_name_the_field(fields: dict[str, Any], sentence: str) -> None:
    async with gateway_of(StubEngine()) as gateway:
        status, answer = await send(gateway, BODY | fields)
        assert status == 400
        assert answer["type"] == "error"
        assert answer["error"]["type"] == "invalid_request_error"
        assert re.search(sentence, answer["error"]["message"])


# Whether these are honoured is decided by what chat completions does with the same.
AS_IN_CHAT: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"tool_choice": {"type": "any"}}, {"tool_choice": "required"}, "tool_choice"),
    (
        {"tool_choice": {"type": "tool", "name": "add"}},
        {"tool_choice": {"type": "function", "function": {"name": "add"}}},
        "tool_choice",
    ),
    (
        {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        {"parallel_tool_calls": False},
        "tool_choice.disable_parallel_tool_use",
    ),
    (
        {"output_config": {"format": FORMAT}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": {"type": "object"}, "strict": True},
            }
        },
        "output_config.format",
    ),
]


@pytest.mark.parametrize(("fields", "same", "name"), AS_IN_CHAT)
async def test_what_is_forced_is_decided_as_in_chat_completions(
    fields: dict[str, Any], same: dict[str, Any], name: str
) -> None:
    function = {"name": "add", "parameters": ADD["input_schema"]}
    tools = [{"type": "function", "function": function}]
    async with gateway_of(StubEngine(["{}"])) as gateway:
        body = {"model": "tiny", "messages": USER, "tools": tools, **same}
        chat, expected = await send(gateway, body, path="/v1/chat/completions")
        status, answer = await send(gateway, BODY | {"tools": [ADD], **fields})
        assert status == chat
        if status == 400:
            assert answer["error"]["message"].startswith(name)
            assert answer["error"]["message"].endswith(expected["error"]["message"])


async def test_thinking_needs_a_template_that_reads_it() -> None:
    template = "{%- for m in messages %}{{ m.content }}{%- endfor %}"
    async with gateway_of(StubEngine(), chat_template=template) as gateway:
        for type_, expected in (("enabled", 400), ("adaptive", 200), ("disabled", 200)):
            status, answer = await send(gateway, BODY | {"thinking": {"type": type_}})
            assert status == expected
            if status == 400:
                assert "thinking.type" in answer["error"]["message"]


async def test_effort_needs_a_template_that_reads_it() -> None:
    template = "{{ reasoning_effort }}{%- for m in messages %}{{ m.content }}{%- endfor %}"
    engine = StubEngine()
    async with gateway_of(engine, chat_template=template) as gateway:
        status, _ = await send(gateway, BODY | {"output_config": {"effort": "high"}})
        assert status == 200
        assert gateway.renderer.decode(engine.requests[0][0]) == "highhi"


@pytest.mark.parametrize("depth", [900, 5_000, 100_000])
@pytest.mark.parametrize("place", ["input", "input_schema"])
async def test_deep_json_gets_an_answer(depth: int, place: str) -> None:
    deep = '{"a":' * depth + "1" + "}" * depth
    tool = f'{{"name": "add", "input_schema": {deep}}}' if place == "input_schema" else "null"
    value = deep if place == "input" else "{}"
    use = f'{{"type": "tool_use", "id": "i", "name": "n", "input": {value}}}'
    raw = (
        f'{{"model": "tiny", "max_tokens": 5, "tools": [{tool}], "messages": '
        f'[{{"role": "assistant", "content": [{use}]}}, {{"role": "user", "content": "x"}}]}}'
    )
    async with gateway_of(StubEngine(max_model_len=100_000)) as gateway:
        assert (await send(gateway, None, raw=raw.encode()))[0] in (200, 400)


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["auto", "any", "custom", "text", "thinking", "tool_use", "user", "enabled"])
)
keys = st.sampled_from(["type", "name", "text", "role", "content", "input", "id", "effort"])
anything = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(keys | st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=12,
)
texts = st.text(max_size=20) | st.sampled_from(["<think>", "<|im_end|>", "<tool_call>"])


def made(type_: str, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries({"type": st.just(type_), **fields})


text_blocks = made("text", text=texts)
uses = made("tool_use", id=texts, name=texts, input=st.dictionaries(texts, anything, max_size=2))
results = made(
    "tool_result", tool_use_id=texts, content=texts | st.lists(text_blocks), is_error=st.booleans()
)
thoughts = made("thinking", thinking=texts, signature=texts)
odd = (text_blocks | uses | results | thoughts).flatmap(
    lambda block: st.dictionaries(st.sampled_from([*block, "zzz"]), anything, max_size=1).map(
        lambda wrong: {**block, **wrong}
    )
)


def said(role: str, blocks: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    content = texts | st.lists(blocks, max_size=3)
    return st.fixed_dictionaries({"role": st.just(role), "content": content})


messages = (
    said("user", text_blocks | results)
    | said("assistant", text_blocks | uses | thoughts)
    | said("system", text_blocks)
    | said("user", odd)
    | said("assistant", odd)
)
fields = st.sampled_from([*HARMLESS, *(fields for fields, _, _ in AS_IN_CHAT), {"tools": [ADD]}])
wrong = st.dictionaries(
    st.sampled_from([*MESSAGES_FIELDS, "zzz"]), anything, min_size=1, max_size=1
)
bodies = st.builds(
    lambda chat, extras: BODY | {"messages": chat} | {k: v for e in extras for k, v in e.items()},
    st.just(USER) | st.lists(messages, min_size=1, max_size=3).map(lambda chat: chat + USER),
    st.lists(fields | wrong, max_size=3),
)


@settings(max_examples=few(120), deadline=10_000)
@given(bodies, st.sampled_from(["/v1/messages", "/v1/messages/count_tokens"]))
async def test_fuzzed_body_never_gets_a_5xx(body: Any, path: str) -> None:
    text = '<think>a</think>b<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call><tool_call>'
    async with gateway_of(StubEngine([text])) as gateway:
        if path.endswith("count_tokens"):
            body = {name: value for name, value in body.items() if name in {*COUNT_FIELDS, "zzz"}}
        try:
            payload = json.dumps(body).encode()
        except (ValueError, UnicodeError):
            return
        status, answer = await send(gateway, None, raw=payload, path=path)
        assert status in (200, 400, 404)
        assert (answer.get("type") == "error") == (status != 200)


@settings(max_examples=few(100), deadline=10_000)
@given(anything)
async def test_fuzzed_json_never_gets_a_5xx(body: Any) -> None:
    async with gateway_of(StubEngine()) as gateway:
        try:
            payload = json.dumps(body).encode()
        except (ValueError, UnicodeError):
            return
        assert (await send(gateway, None, raw=payload))[0] == 400
