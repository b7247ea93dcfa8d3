"""Every field of a request is honoured, without effect, or refused with a 400 that names it."""

from __future__ import annotations

import json
import re
import sys
import typing
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import completion_create_params

from tests.kit.examples import few
from tests.kit.toy import ADD_TOOL, StubEngine, gateway_of, tokenizer
from tuner.gateway.app import Gateway
from tuner.gateway.dialects.chat import CHAT_FIELDS
from tuner.gateway.requests import MAX_DEPTH

USER = [{"role": "user", "content": "hi"}]
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}


async def send(gateway: Gateway, body: object, *, raw: bytes | None = None) -> tuple[int, dict]:
    session = gateway.open_session("r")
    headers = {"authorization": f"Bearer {session.key}"}
    payload = json.dumps(body).encode() if raw is None else raw
    reply = await gateway.handle("POST", "/v1/chat/completions", headers, payload)
    assert session.errors == []
    return reply.status, json.loads(reply.body)


def json_schema(**fields: object) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, **fields}}


def allowed_tools(**fields: object) -> dict:
    named = {"type": "function", "function": {"name": "add"}}
    return {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "auto", "tools": [named], **fields},
    }


def test_the_table_has_every_field_of_openais_api() -> None:
    base = completion_create_params.CompletionCreateParamsBase
    fields = set(typing.get_type_hints(base)) | {"stream"}
    assert fields <= set(CHAT_FIELDS)


HARMLESS = [
    {"stream": False},
    {"stream_options": None},
    {"n": 1},
    {"user": "u"},
    {"metadata": {"a": "b"}},
    {"safety_identifier": "s"},
    {"prompt_cache_key": "k"},
    {"service_tier": "auto"},
    {"store": False},
    {"parallel_tool_calls": True},
    {"response_format": {"type": "text"}},
    {"logit_bias": {}},
    {"presence_penalty": 0},
    {"frequency_penalty": 0.0},
    {"repetition_penalty": 1.0},
    {"modalities": ["text"]},
    {"tools": []},
    {"tool_choice": "auto"},
    {"tools": [ADD_TOOL], "tool_choice": "auto"},
    {"temperature": 0},
    {"top_k": 0},
    {"top_logprobs": 0},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"max_tokens": 5, "max_completion_tokens": 5},
    {"max_tokens": 10**400},
]


@pytest.mark.parametrize("fields", HARMLESS, ids=lambda fields: next(iter(fields)))
async def test_value_that_asks_nothing_unusual_is_accepted(fields: dict) -> None:
    async with gateway_of(StubEngine()) as gateway:
        status, answer = await send(gateway, {"model": "tiny", "messages": USER, **fields})
        assert (status, answer.get("error")) == (200, None)


async def test_null_means_left_out_for_every_optional_field() -> None:
    async with gateway_of(StubEngine()) as gateway:
        nulls = dict.fromkeys(CHAT_FIELDS)
        status, answer = await send(gateway, {**nulls, "model": "tiny", "messages": USER})
        assert (status, answer.get("error")) == (200, None)


REFUSED = [
    # field, value, what the sentence says
    ("stream", "yes", "true or false"),
    ("stream_options", {"include_usage": True}, "without stream"),
    ("store", True, "trace"),
    ("parallel_tool_calls", 0, "true or false"),
    ("response_format", "json", "must be an object"),
    ("response_format", {"type": "xml"}, "'json_schema'"),
    ("response_format", {"type": "json_object", "schema": {}}, "schema is not a field"),
    ("response_format", {"type": "json_object"}, "this engine does not support"),
    ("response_format", {"type": "json_schema"}, "json_schema must be an object, not null"),
    ("response_format", {"type": "json_schema", "json_schema": {}}, "name must be a string"),
    ("response_format", json_schema(schema=None), "schema must be an object, not null"),
    ("response_format", json_schema(strict="yes"), "strict must be true or false"),
    ("response_format", json_schema(description=5), "description must be a string"),
    ("response_format", json_schema(colour="red"), "colour is not a field"),
    ("tool_choice", "any", "'auto', 'required', 'none'"),
    ("tool_choice", {"type": "custom", "custom": {"name": "add"}}, "send 'auto'"),
    ("tool_choice", {"type": "function"}, r'function must be \{"name"'),
    ("tool_choice", {"type": "function", "function": {"name": 5}}, "function must be"),
    ("tool_choice", {"type": "function", "function": {"name": "f"}, "x": 1}, "x is not a field"),
    ("tool_choice", "required", "no tools: send tools"),
    ("tool_choice", {"type": "function", "function": {"name": "add"}}, "no tools: send tools"),
    ("tool_choice", {"type": "allowed_tools"}, "allowed_tools must be an object"),
    ("tool_choice", allowed_tools(mode="none"), 'mode is "none"'),
    ("tool_choice", allowed_tools(tools=[]), "at least one tool"),
    ("tool_choice", allowed_tools(tools=["add"]), r"tools\[0\] must be"),
    ("tool_choice", allowed_tools(), 'names "add", but the tools are none'),
    ("logit_bias", {"5": 1}, "is not supported by this engine"),
    ("logit_bias", {"five": 1}, "is not a token id"),
    ("logit_bias", {"5": 101}, "it must be a number from -100 to 100"),
    ("presence_penalty", 0.5, "is not supported by this engine"),
    ("presence_penalty", False, "must be a number from -2 to 2, not a boolean"),
    ("frequency_penalty", -1, "is not supported by this engine"),
    ("frequency_penalty", 2.5, "it must be a number from -2 to 2"),
    ("repetition_penalty", 1.1, "is not supported by this engine"),
    ("repetition_penalty", 0, "it must be a number from 0.01 to 10"),
    ("min_p", 0.1, "is not supported by this engine"),
    ("min_p", 1.1, "it must be a number from 0 to 1"),
    ("bad_words", ["word"], "is not supported by this engine"),
    ("bad_words", [""], r"bad_words\[0\] must be a string that is not empty"),
    ("stop_token_ids", [5], "is not supported by this engine"),
    ("stop_token_ids", ["5"], r"stop_token_ids\[0\] must be an integer"),
    ("min_tokens", 4, "end of a turn"),
    ("ignore_eos", True, "end of a turn"),
    ("modalities", ["text", "audio"], "text only"),
    ("audio", {"voice": "x"}, "text only"),
    ("prediction", {"type": "content", "content": "x"}, "leave it out"),
    ("moderation", {"model": "x"}, "moderation"),
    ("web_search_options", {}, "tool"),
    ("functions", [{"name": "f"}], "use tools"),
    ("function_call", "auto", "use tools"),
    ("reasoning_effort", "low", "does not read reasoning_effort"),
    ("enable_thinking", True, "chat_template_kwargs"),
    ("verbosity", "low", "chat_template_kwargs"),
    ("temperature", 2.5, "from 0 to 2"),
    ("temperature", -0.1, "from 0 to 2"),
    ("temperature", "hot", "not a string"),
    ("temperature", True, "not a boolean"),
    ("top_p", 0, "above 0 to 1"),
    ("top_p", 1.5, "above 0 to 1"),
    ("top_k", -2, "-1"),
    ("top_k", 1.5, "integer"),
    ("n", 0, "1 to 128"),
    ("n", 129, "1 to 128"),
    ("n", 1.0, "integer"),
    ("seed", 2**63, "integer"),
    ("seed", "x", "integer"),
    ("stop", ["a", "b", "c", "d", "e"], "at most 4"),
    ("stop", [""], "empty"),
    ("stop", [1], "strings"),
    ("max_tokens", 0, "at least 1"),
    ("max_completion_tokens", -3, "at least 1"),
    ("max_tokens", "10", "not a string"),
    ("logprobs", 1, "true or false"),
    ("top_logprobs", 3, "logprobs: true"),
    ("top_logprobs", 21, "0 to 20"),
    ("user", 5, "must be a string"),
    ("metadata", [], "must be an object"),
    ("chat_template_kwargs", "x", "must be an object"),
    ("return_token_ids", "x", "true or false"),
    ("temprature", 1, "did you mean 'temperature'"),
    ("max_new_tokens", 5, "did you mean"),
    ("xyzzy", 5, "leave it out"),
    ("model", 5, "must be a string"),
    ("model", None, "required"),
    ("messages", None, "required"),
    ("messages", [], "at least one"),
    ("messages", "hi", "must be an array"),
    ("messages", [5], r"messages\[0\] must be an object"),
    ("messages", [{"content": "x"}], r"messages\[0\].role is null"),
    ("messages", [{"role": "function", "content": "x"}], 'role is "function"'),
    ("messages", [{"role": "user"}], r"messages\[0\].content is missing"),
    ("messages", [{"role": "user", "content": 5}], "text parts"),
    ("messages", [{"role": "user", "content": ["x"]}], r"content\[0\] must be an object"),
    ("messages", [{"role": "user", "content": [{"type": "image_url"}]}], "image_url.*text parts"),
    ("messages", [{"role": "user", "content": [{"type": "text"}]}], "text must be a string"),
    ("messages", [{"role": "user", "content": "x", "name": 5}], "name must be a string"),
    ("messages", [{"role": "user", "content": "x", "colour": 5}], "colour.*leave it out"),
    ("messages", [{"role": "user", "content": "x", "tool_calls": [CALL]}], "role 'user'"),
    ("messages", [{"role": "tool", "content": "x"}], "tool_call_id is missing"),
    ("messages", [{"role": "assistant", "refusal": 5}], "refusal must be a string"),
    ("messages", [{"role": "assistant", "function_call": {"name": "f"}}], "tool_calls"),
    ("messages", [{"role": "assistant", "audio": {"id": "a"}}], "audio is not a field"),
    ("messages", [{"role": "user", "content": [{"type": "thinking"}]}], "text parts only"),
    ("messages", [{"role": "assistant", "content": [{"type": "refusal"}]}], "refusal must be"),
    ("messages", [{"role": "assistant", "thinking_blocks": {"a": 1}}], "must be an array"),
    (
        "messages",
        [{"role": "assistant", "reasoning_details": [{"type": ["reasoning.text"]}]}],
        r"reasoning_details\[0\].type is .* use thinking",
    ),
    (
        "messages",
        [{"role": "assistant", "content": ["x", {"type": "thinking", "thinking": 5}]}],
        r"content\[0\] must be an object",
    ),
    (
        "messages",
        [{"role": "assistant", "content": [{"type": "thinking", "thinking": 5}]}],
        r"content\[0\].thinking must be a string",
    ),
    ("messages", [{"role": "assistant", "tool_calls": {}}], "must be an array"),
    ("messages", [{"role": "assistant", "tool_calls": [5]}], r"tool_calls\[0\] must be"),
    (
        "messages",
        [{"role": "assistant", "tool_calls": [{"id": "c"}]}],
        "function must be an object",
    ),
    (
        "messages",
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}],
        "arguments must be a string, not an object",
    ),
    ("messages", [{"role": "user", "content": "forbidden"}], "no such word here"),
    ("tools", {}, "must be an array"),
    ("tools", [5], r"tools\[0\] must be"),
    ("tools", [{"type": "web_search"}], "only functions"),
    ("tools", [{"type": "function"}], "function must be an object"),
    ("tools", [{"type": "function", "function": {}}], "name must be"),
    ("tools", [{"type": "function", "function": {"name": "f", "parameters": 5}}], "an object"),
    ("tools", [{"type": "function", "function": {"name": "f", "strict": 1}}], "true or false"),
    ("tools", [{"type": "function", "function": {"name": "f", "strict": True}}], "this engine"),
    ("chat_template_kwargs", {"colour": 1}, "does not read 'colour'"),
    ("chat_template_kwargs", {"tokenize": True}, "set by the gateway"),
    ("chat_template_kwargs", {"messages": []}, "set by the gateway"),
    ("chat_template_kwargs", {"add_generation_prompt": False}, "set by the gateway"),
]


@pytest.mark.parametrize(("field", "value", "sentence"), REFUSED)
async def test_refusal_names_the_field_and_what_to_do(field, value, sentence) -> None:
    engine = StubEngine()
    async with gateway_of(engine) as gateway:
        status, answer = await send(gateway, {"model": "tiny", "messages": USER, field: value})
        error = answer["error"]
        assert status == 400
        assert error["type"] == "invalid_request_error"
        assert field in error["message"] or field in (error["param"] or "")
        assert (error["param"] or "").startswith(field)
        assert re.search(sentence, error["message"])
        assert engine.requests == []


RARE = {
    "min_p": 0.1,
    "repetition_penalty": 1.05,
    "presence_penalty": 1.5,
    "frequency_penalty": -0.5,
    "logit_bias": {"5": 2, "7": -100},
    "bad_words": ["no"],
    "stop_token_ids": [5],
}


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses"])
async def test_rare_settings_reach_the_engine_and_the_trace(path) -> None:
    engine = StubEngine(every_setting=True)
    begin = {"completions": {"prompt": "hi"}, "responses": {"input": "hi"}}
    body = {"model": "tiny", **begin.get(path, {"messages": USER}), **RARE}
    async with gateway_of(engine) as gateway:
        session = gateway.open_session("s")
        headers = {"authorization": f"Bearer {session.key}"}
        reply = await gateway.handle("POST", f"/v1/{path}", headers, json.dumps(body).encode())
        assert reply.status == 200
        (call,) = session.calls
    sampling = engine.requests[0][1]
    assert call.sampling == sampling
    assert sampling.rare == tuple(RARE)
    assert sampling.logit_bias == ((5, 2.0), (7, -100.0))
    assert sampling.bad_words == (tuple(tokenizer().encode("no", add_special_tokens=False)),)


@pytest.mark.parametrize("field", ["logit_bias", "stop_token_ids"])
async def test_a_token_that_the_model_does_not_have_is_refused(field) -> None:
    engine = StubEngine(every_setting=True)
    value: Any = {"999999": 1} if field == "logit_bias" else [999999]
    async with gateway_of(engine) as gateway:
        status, answer = await send(gateway, {"model": "tiny", "messages": USER, field: value})
        assert (status, answer["error"]["param"]) == (400, field)
        assert "names token 999999: the model has ids from 0 to" in answer["error"]["message"]
        assert engine.requests == []


@pytest.mark.parametrize(
    ("field", "named", "most"),
    [
        ("logit_bias", lambda size: {str(i): 1 for i in range(size)}, 1024),
        ("bad_words", lambda size: ["a"] * size, 128),
        ("stop_token_ids", lambda size: [5] * size, 64),
    ],
)
async def test_more_tokens_than_engines_have_room_for_are_refused(field, named, most) -> None:
    async with gateway_of(StubEngine(every_setting=True)) as gateway:
        body = {"model": "tiny", "messages": USER}
        status, answer = await send(gateway, {**body, field: named(most + 1)})
        assert (status, answer["error"]["param"]) == (400, field)
        assert f"names {most + 1} tokens: send at most {most}" in answer["error"]["message"]
        assert "send at most" not in str(await send(gateway, {**body, field: named(most)}))


async def test_another_models_name_is_404_and_names_the_served_one() -> None:
    async with gateway_of(StubEngine()) as gateway:
        status, answer = await send(gateway, {"model": "gpt-4", "messages": USER})
        assert (status, answer["error"]["code"]) == (404, "model_not_found")
        assert "'tiny'" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"max_tokens": 4, "max_completion_tokens": 5}, "send one"),
        ({"logprobs": True, "top_logprobs": 6}, "at most 5"),
    ],
)
async def test_fields_that_disagree_are_refused(fields: dict, sentence: str) -> None:
    async with gateway_of(StubEngine()) as gateway:
        status, answer = await send(gateway, {"model": "tiny", "messages": USER, **fields})
        assert status == 400
        assert sentence in answer["error"]["message"]


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"5",
        b"null",
        b"\xff\xfe\x00",
        b"[" * 200_000,
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        b'{"model": "tiny", "messages": [{"role": "user", "content": "\xed\xa0\x80"}]}',
        '{"model": "tiny"}'.encode("utf-16"),
    ],
    ids=range(10),
)
async def test_body_that_is_no_json_object_is_refused(raw: bytes) -> None:
    async with gateway_of(StubEngine()) as gateway:
        status, answer = await send(gateway, None, raw=raw)
        assert status == 400
        assert "body" in answer["error"]["message"]


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999", "1" + "0" * 5000])
@pytest.mark.parametrize("at", ["temperature", "metadata.a", "messages[0].content[1]"])
async def test_a_number_that_is_not_finite_is_refused_by_its_field(number: str, at: str) -> None:
    body = {
        "model": "tiny",
        "temperature": {"temperature": "N"}.get(at, 1),
        "metadata": {"a": {"metadata.a": "N"}.get(at, 1)},
        "messages": [{"role": "user", "content": ["a", "N" if at.startswith("m") else 1]}],
    }
    if at == "metadata.a":
        del body["messages"]
    async with gateway_of(StubEngine()) as gateway:
        raw = json.dumps(body).replace('"N"', number).encode()
        status, answer = await send(gateway, None, raw=raw)
    assert (status, answer["error"]["param"]) == (400, at)
    assert answer["error"]["message"].startswith(f"{at} is {number[:20]}")


@pytest.mark.parametrize(("opening", "closing"), ["[]", ('{"a":', "}")])
async def test_bodies_are_read_to_a_depth(opening: str, closing: str) -> None:
    async with gateway_of(StubEngine()) as gateway:
        for levels in (1, 50, MAX_DEPTH - 1, MAX_DEPTH, 240, 500, 900, 990, 100_000):
            inside = opening * (levels - 1) + "1" + closing * (levels - 1)
            deep = f'{{"model": "tiny", "messages": {json.dumps(USER)}, "zzz": {inside}}}'
            status, answer = await send(gateway, None, raw=deep.encode())
            assert status == 400
            found = f"{MAX_DEPTH} levels" in answer["error"]["message"]
            assert found == (levels > MAX_DEPTH), levels


async def test_message_echoed_with_every_field_of_the_clients_type_is_accepted() -> None:
    echoed = {
        "role": "assistant",
        "content": "x",
        "refusal": None,
        "annotations": [],
        "audio": None,
    }
    async with gateway_of(StubEngine()) as gateway:
        messages = [*USER, {**echoed, "function_call": None, "tool_calls": None}, *USER]
        assert (await send(gateway, {"model": "tiny", "messages": messages}))[0] == 200


PLAIN = {"role": "assistant", "content": "yes", "reasoning_content": "why"}
THOUGHT = {"type": "thinking", "thinking": "why", "signature": "s"}
ENCRYPTED = {"type": "redacted_thinking", "data": "x"}
YES = {"type": "text", "text": "yes"}
ECHOED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    # What means nothing for the prompt.
    ({**PLAIN, "annotations": [{"type": "url_citation"}]}, PLAIN),
    ({**PLAIN, "parsed": {"a": 1}}, PLAIN),
    ({**PLAIN, "provider_specific_fields": {"a": 1}}, PLAIN),
    ({**PLAIN, "cache_control": {"type": "ephemeral"}}, PLAIN),
    ({**PLAIN, "reasoning_details": [{"type": "reasoning.text", "text": "why"}]}, PLAIN),
    ({**PLAIN, "thinking_blocks": [THOUGHT, ENCRYPTED]}, PLAIN),
    (
        {
            **PLAIN,
            "tool_calls": [
                {
                    **CALL,
                    "index": 0,
                    "extra_content": {"a": 1},
                    # CALL is a dict of texts and dicts, to mypy.
                    "function": {**CALL["function"], "parsed_arguments": {"a": 1}},  # type: ignore[dict-item]
                }
            ],
        },
        {**PLAIN, "tool_calls": [CALL]},
    ),
    # What is said in another place.
    ({**PLAIN, "content": [THOUGHT, ENCRYPTED, YES], "reasoning_content": None}, PLAIN),
    (
        {"role": "assistant", "content": [{**THOUGHT, "thinking": [{**YES, "text": "why"}]}, YES]},
        PLAIN,
    ),
    ({"role": "assistant", "content": "yes", "thinking_blocks": [THOUGHT]}, PLAIN),
    (
        {
            "role": "assistant",
            "content": "yes",
            "reasoning": None,
            "reasoning_details": [
                {"type": "reasoning.summary", "summary": "wh"},
                {"type": "reasoning.encrypted", "data": "x"},
                {"type": "reasoning.text", "text": "y", "signature": None},
            ],
        },
        PLAIN,
    ),
    ({**PLAIN, "content": None, "refusal": "yes"}, PLAIN),
    ({**PLAIN, "content": [{"type": "refusal", "refusal": "yes"}]}, PLAIN),
    ({**PLAIN, "content": "yes", "refusal": "no"}, {**PLAIN, "content": "yes\nno"}),
    ({**PLAIN, "content": [ENCRYPTED]}, {**PLAIN, "content": None}),
]


@pytest.mark.parametrize(("echoed", "plain"), ECHOED)
async def test_an_answer_echoed_by_another_client_gives_the_prompt_of_the_plain_one(
    echoed: dict[str, Any], plain: dict[str, Any]
) -> None:
    engine = StubEngine()
    # It shows every field.
    template = "[{% for m in messages %}{{ m | tojson }}{{ ',' * (not loop.last) }}{% endfor %}]"
    async with gateway_of(engine, chat_template=template, tool_call_parser="none") as gateway:
        for answer in (echoed, plain):
            body = {"model": "tiny", "messages": [*USER, answer, *USER]}
            status, reply = await send(gateway, body)
            assert status == 200, reply
        said, same = (json.loads(gateway.renderer.decode(ids)) for ids, _, _ in engine.requests)
        assert said == same


async def test_the_effort_of_reasoning_reaches_a_template_that_reads_it() -> None:
    template = "{{ reasoning_effort }}{%- for m in messages %}{{ m.content }}{%- endfor %}"
    engine = StubEngine()
    bodies = {
        "chat/completions": {"messages": USER, "reasoning_effort": "low"},
        "responses": {"input": "hi", "reasoning": {"effort": "low"}},
        "messages": {"messages": USER, "max_tokens": 9, "output_config": {"effort": "low"}},
    }
    async with gateway_of(engine, chat_template=template) as gateway:
        headers = {"authorization": f"Bearer {gateway.open_session('r').key}"}
        for path, body in bodies.items():
            for kwargs, status in (({}, 200), ({"reasoning_effort": "high"}, 400)):
                asked = {"model": "tiny", "chat_template_kwargs": kwargs, **body}
                reply = await gateway.handle(
                    "POST", f"/v1/{path}", headers, json.dumps(asked).encode()
                )
                assert reply.status == status
        assert [gateway.renderer.decode(ids) for ids, _, _ in engine.requests] == ["lowhi"] * 3


NO_OBJECT = ["", "[1]", "null", '{"a":', '{"a": NaN}', '{"a": -Infinity}', "5", "{} {}", "x"]
NO_OBJECT += ['{"a": ' + "[" * 5000 + "]" * 5000 + "}", '{"a": ' + "9" * 5000 + "}"]


@settings(max_examples=few(60), deadline=10_000)
@given(st.sampled_from(NO_OBJECT) | st.text(max_size=9) | st.text('{}[]":, 1eNa', max_size=12))
async def test_arguments_of_a_past_call_are_an_object_in_every_dialect(arguments: str) -> None:
    try:
        value = json.loads(arguments, parse_constant=lambda name: None)
        fine = isinstance(value, dict) and "NaN" not in arguments and "Infinity" not in arguments
    except (ValueError, RecursionError):
        fine = False
    function = {"name": "add", "arguments": arguments}
    calls = [{"id": "c", "type": "function", "function": function}]
    item = {"type": "function_call", "call_id": "c", **function}
    places = {
        "chat/completions": (
            {"messages": [*USER, {"role": "assistant", "tool_calls": calls}, *USER]},
            "messages[1].tool_calls[0].function.arguments",
        ),
        "responses": ({"input": [*USER, item, *USER]}, "input[1].arguments"),
    }
    async with gateway_of(StubEngine()) as gateway:
        headers = {"authorization": f"Bearer {gateway.open_session('r').key}"}
        for path, (body, place) in places.items():
            asked = json.dumps({"model": "tiny", **body}).encode()
            reply = await gateway.handle("POST", f"/v1/{path}", headers, asked)
            assert reply.status == (200 if fine else 400)
            if not fine:
                error = json.loads(reply.body)["error"]
                assert error["param"] == place
                assert error["message"].startswith(place)


async def test_numbers_beyond_floats_in_a_past_call_are_shown_as_json() -> None:
    engine = StubEngine()
    called = {**CALL, "function": {"name": "add", "arguments": '{"a": 1e999, "b": [-1e999]}'}}
    messages = [*USER, {"role": "assistant", "tool_calls": [called]}, *USER]
    async with gateway_of(engine) as gateway:
        assert (await send(gateway, {"model": "tiny", "messages": messages}))[0] == 200
        text = gateway.renderer.decode(engine.requests[0][0])
        shown = text.partition("<tool_call>")[2].partition("</tool_call>")[0]
        largest = sys.float_info.max
        assert json.loads(shown, parse_constant=pytest.fail)["arguments"] == {
            "a": largest,
            "b": [-largest],
        }


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["auto", "none", "text", "function", "user", "assistant", "tool", "tiny"])
)
anything = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["type", "function", "name", "text", "role", "content"])
            | st.text(max_size=4),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
texts = st.text(max_size=20) | st.sampled_from(["<think>", "<|im_end|>", "<tool_call>"])
parts = st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": texts}))
content = texts | parts


def role(role_name: str, needed: dict, **optional: st.SearchStrategy) -> st.SearchStrategy:
    return st.fixed_dictionaries({"role": st.just(role_name), **needed}, optional=optional)


messages = (
    role("system", {"content": content}, name=texts)
    | role("developer", {"content": content})
    | role("user", {"content": content}, name=texts)
    | role("tool", {"content": content, "tool_call_id": texts}, name=texts)
    | role("assistant", {}, content=content, reasoning_content=texts, tool_calls=st.just([CALL]))
    | st.sampled_from([echoed for echoed, _ in ECHOED])
)
mixed = messages.flatmap(
    lambda message: st.dictionaries(st.sampled_from([*message, "zzz"]), anything, max_size=1).map(
        lambda wrong: {**message, **wrong}
    )
)
fields = st.sampled_from([*HARMLESS, {"n": 2}, {"stop": "b"}, {"tools": [ADD_TOOL]}])
fields |= st.dictionaries(st.sampled_from([*CHAT_FIELDS, "zzz"]), anything, min_size=1, max_size=1)
bodies = st.builds(
    lambda chat, extras: (
        {"model": "tiny", "messages": chat} | {k: v for e in extras for k, v in e.items()}
    ),
    st.just(USER) | st.lists(messages | mixed, min_size=1, max_size=3),
    st.lists(fields, max_size=3),
)


@settings(max_examples=few(120), deadline=10_000)
@given(bodies)
async def test_fuzzed_body_never_gets_a_5xx(body: object) -> None:
    async with gateway_of(StubEngine(["<think>a</think>b<tool_call>"])) as gateway:
        try:
            payload = json.dumps(body).encode()
        except (ValueError, UnicodeError):
            return
        status, answer = await send(gateway, None, raw=payload)
        assert status in (200, 400, 404)
        assert ("error" in answer) == (status != 200)


@settings(max_examples=few(100), deadline=10_000)
@given(anything)
async def test_fuzzed_json_never_gets_a_5xx(body: object) -> None:
    async with gateway_of(StubEngine()) as gateway:
        try:
            payload = json.dumps(body).encode()
        except (ValueError, UnicodeError):
            return
        assert (await send(gateway, None, raw=payload))[0] == 400


@settings(max_examples=few(100), deadline=10_000)
@given(st.binary(max_size=200))
async def test_fuzzed_bytes_never_get_a_5xx(raw: bytes) -> None:
    async with gateway_of(StubEngine()) as gateway:
        assert (await send(gateway, None, raw=raw))[0] == 400
