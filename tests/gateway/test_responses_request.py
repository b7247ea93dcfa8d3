"""Every field of a Responses request is honoured, without effect, or refused by name."""

from __future__ import annotations

import json
import re
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import response_create_params

from tests.kit.examples import few
from tests.kit.toy import StubEngine, gateway_of, text_of
from tuner.gateway import Gateway, Session
from tuner.gateway.app import Reply
from tuner.gateway.dialects.responses import RESPONSES_FIELDS

ADD: dict[str, Any] = {"type": "function", "name": "add", "parameters": {"type": "object"}}
CALL = {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "3"}
HI = {"role": "user", "content": "hi"}
A, B = "a" * 24, "b" * 24  # what the ids of two responses end with


async def post(gateway: Gateway, session: Session, body: object) -> tuple[int, dict[str, Any]]:
    reply: Any = await gateway.handle(
        "POST",
        "/v1/responses",
        {"authorization": f"Bearer {session.key}"},
        json.dumps(body).encode(),
    )
    if hasattr(reply, "events"):
        events = [event async for event in reply.events]
        return 200, json.loads(events[-1].decode().split("data: ")[1])["response"]
    return reply.status, json.loads(reply.body)


async def send(body: object) -> tuple[int, dict[str, Any], Session]:
    async with gateway_of(StubEngine()) as gateway:
        session = gateway.open_session("r")
        status, answer = await post(gateway, session, body)
        assert session.errors == []
        return status, answer, session


async def messages_of(items: object) -> list[dict[str, Any]]:
    status, answer, session = await send({"model": "tiny", "input": items})
    assert status == 200, answer
    return session.calls[0].messages


def test_the_table_has_every_field_of_openais_api() -> None:
    base = response_create_params.ResponseCreateParamsBase
    assert {*base.__annotations__, "stream"} <= set(RESPONSES_FIELDS)


HARMLESS: list[dict[str, Any]] = [
    {"stream": False},
    {"store": False},
    {"user": "u", "metadata": {"a": "b"}, "safety_identifier": "s", "prompt_cache_key": "k"},
    {"service_tier": "auto", "prompt_cache_retention": "24h", "max_tool_calls": 3},
    {"prompt_cache_options": {"mode": "implicit", "prewarm": False}},
    {"include": ["reasoning.encrypted_content", "web_search_call.action.sources"]},
    {"truncation": "disabled", "background": False, "context_management": []},
    {"text": {"format": {"type": "text"}, "verbosity": None}},
    {"reasoning": {"effort": None, "summary": None, "context": "auto"}},
    {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True},
    {"tools": [{**ADD, "strict": False, "defer_loading": False}]},
    {"tools": [{"type": "function", "name": "add", "parameters": None}]},
    {"top_logprobs": 0},
    {"stream": True, "stream_options": {"include_obfuscation": False}},
]


@pytest.mark.parametrize("fields", HARMLESS, ids=lambda fields: next(iter(fields)))
async def test_value_that_asks_nothing_unusual_is_accepted(fields: dict[str, Any]) -> None:
    status, answer, _ = await send({"model": "tiny", "input": "hi", **fields})
    assert (status, answer["error"]) == (200, None)


async def test_null_means_left_out_for_every_optional_field() -> None:
    nulls = dict.fromkeys(RESPONSES_FIELDS)
    status, answer, _ = await send({**nulls, "model": "tiny", "input": "hi"})
    assert (status, answer["error"]) == (200, None)


SCHEMA = {"type": "json_schema", "name": "n", "schema": {"type": "object"}}
REFUSED: list[tuple[str, Any, str]] = [
    # field, value, what the sentence says
    ("model", None, "required"),
    ("input", None, "required"),
    ("input", 5, "string or an array of items"),
    ("input", [], "at least one"),
    ("input", [5], r"input\[0\] must be an object"),
    ("input", [{"type": "web_search_call"}], r"input\[0\].type is \"web_search_call\""),
    ("input", [{"type": ["message"]}], r"input\[0\].type"),
    ("input", [{"role": "tool", "content": "x"}], 'role is "tool"'),
    ("input", [{"role": "user"}], r"input\[0\].content must be"),
    ("input", [{**HI, "colour": 5}], "colour.*leave it out"),
    ("input", [{"role": "user", "content": [{"type": "refusal", "refusal": "x"}]}], "text only"),
    ("input", [{"role": "user", "content": [{"type": "input_image"}]}], "input_image.*text only"),
    ("input", [{"role": "user", "content": [{"type": "input_text"}]}], "text must be a string"),
    ("input", [{"role": "assistant", "content": [{"type": "refusal"}]}], "refusal"),
    ("input", [{**CALL, "arguments": {}}], "arguments must be a string"),
    ("input", [{**CALL, "call_id": None}], "call_id must be a string"),
    ("input", [{**CALL, "namespace": "n"}], "namespace"),
    ("input", [{**OUTPUT, "output": 5}], "output must be a string or an array"),
    ("input", [{**OUTPUT, "output": [{"type": "input_file"}]}], "text only"),
    ("input", [{**HI, "id": 5}], "id must be a string"),
    ("instructions", ["x"], "must be a string"),
    ("previous_response_id", "resp_0", "no stored response"),
    ("conversation", "conv_0", "previous_response_id"),
    ("tools", {}, "must be an array"),
    ("tools", [5], r"tools\[0\] must be an object"),
    ("tools", [{"type": "web_search"}], r'tools\[0\].type is "web_search".*give the model'),
    ("tools", [{"type": "mcp", "server_label": "s"}], "mcp"),
    ("tools", [{"type": "function"}], r"tools\[0\].name"),
    ("tools", [{**ADD, "parameters": 5}], r"parameters must be an object"),
    ("tools", [{**ADD, "strict": "yes"}], "strict must be true or false"),
    ("tools", [{**ADD, "colour": 5}], "colour"),
    ("tool_choice", {"type": "web_search"}, "only functions"),
    ("tool_choice", {"type": "function"}, "name must be a string"),
    ("tool_choice", {"type": "allowed_tools", "tools": 5}, "tools must be an array"),
    ("text", {"format": {"type": "xml"}}, "text.format"),
    ("text", {"colour": 5}, "text.colour"),
    ("text", {"verbosity": "low"}, "text.verbosity"),
    ("reasoning", {"summary": "auto"}, "reasoning.summary.*no summaries"),
    ("reasoning", {"effort": "low"}, "reasoning.effort.*does not read reasoning_effort"),
    ("reasoning", {"effort": 5}, "reasoning.effort must be a string"),
    ("reasoning", {"mode": "pro"}, "reasoning.mode"),
    ("include", ["everything"], r"include\[0\]"),
    ("include", "everything", "must be an array"),
    ("top_logprobs", 3, "include"),
    ("top_logprobs", 21, "0 to 20"),
    ("stream_options", {"include_obfuscation": False}, "without stream"),
    ("stream_options", {"include_obfuscation": True}, "not padded"),
    ("prompt_cache_options", {"prewarm": True}, "every request is answered"),
    ("background", True, "waits"),
    ("background_options", {"completion_window": "2h"}, "waits"),
    ("truncation", "auto", "not cut"),
    ("context_management", [{"type": "compaction"}], "not cut"),
    ("prompt", {"id": "p"}, "stored prompts"),
    ("moderation", {"model": "m"}, "moderation"),
    ("access_programs", {"cyber": "standard"}, "leave it out"),
    ("image", {"context_compression": "auto"}, "text only"),
    ("temperature", 2.5, "from 0 to 2"),
    ("top_p", 0, "above 0 to 1"),
    ("max_output_tokens", 0, "at least 1"),
    ("max_tokens", 5, "did you mean"),
    ("xyzzy", 5, "not a field of a Responses request"),
]


@pytest.mark.parametrize(("field", "value", "sentence"), REFUSED)
async def test_refusal_names_the_field_and_what_to_do(
    field: str, value: object, sentence: str
) -> None:
    status, answer, session = await send({"model": "tiny", "input": "hi", field: value})
    error = answer["error"]
    assert status == 400
    assert (error["param"] or "").startswith(field)
    assert re.search(sentence, error["message"])
    assert session.calls == ()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "add"}}, "tool_choice"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"tools": [{**ADD, "strict": True}]}, "tools[0].strict"),
        ({"text": {"format": SCHEMA}}, "text.format"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format"),
    ],
    ids=lambda fields: str(fields)[:60],
)
async def test_a_form_is_guaranteed_or_refused_by_name(fields: dict[str, Any], param: str) -> None:
    body = {"model": "tiny", "input": "hi", "tools": [ADD], **fields}
    status, answer, _ = await send(body)
    assert (status, answer["error"]["param"]) == (400, param)
    assert param in answer["error"]["message"]
    engine = StubEngine(["{}"], grammars=True)
    async with gateway_of(engine) as gateway:
        headers = {"authorization": f"Bearer {gateway.open_session('r').key}"}
        encoded = json.dumps(body).encode()
        reply = await gateway.handle("POST", "/v1/responses", headers, encoded)
        assert isinstance(reply, Reply)
        assert reply.status == 200, reply.body
        assert engine.requests[0][1].grammar


async def test_text_in_every_form_becomes_chat_messages() -> None:
    part = {"type": "input_text", "text": "a"}
    said = {"type": "output_text", "text": "b", "annotations": [], "logprobs": []}
    items = [
        {"role": "developer", "content": "d"},
        {"type": "message", "role": "user", "content": [part], "status": "completed"},
        {"type": "message", "id": "msg_foreign", "role": "assistant", "content": [said]},
        {"role": "user", "content": [part, {**part, "text": "c"}]},
        CALL,
        {**OUTPUT, "output": [part]},
    ]
    function = {"name": "add", "arguments": "{}"}
    assert await messages_of(items) == [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "c"}],
        },
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "a"},
    ]


def reasoning(text: str, **fields: Any) -> dict[str, Any]:
    part = {"type": "reasoning_text", "text": text}
    return {"type": "reasoning", "summary": [], "content": [part], **fields}


def message(text: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


@pytest.mark.parametrize(
    ("items", "turns"),
    [
        ([reasoning("r"), message("m"), CALL, CALL], ["rm2"]),
        ([CALL, message("m")], ["m1"]),
        ([message("m"), reasoning("r")], ["m", "r"]),
        ([message("m"), message("n")], ["m", "n"]),
        ([reasoning("r"), reasoning("s"), CALL], ["r", "s1"]),
        ([message("m", id=f"msg_{A}"), reasoning("r", id=f"rs_{A}")], ["rm"]),
        ([{**CALL, "id": f"fc_{A}_0"}, OUTPUT, {**CALL, "id": f"fc_{A}_1"}, OUTPUT], ["2"]),
        ([CALL, OUTPUT, CALL, OUTPUT], ["1", "1"]),
        ([{**CALL, "id": f"fc_{A}_0"}, {**CALL, "id": f"fc_{B}_0"}], ["1", "1"]),
        ([message("m", id=f"msg_{A}"), message("n", id=f"msg_{A}")], ["m", "n"]),
        ([reasoning("r", id="rs_" + "a" * 50), message("m", id="msg_" + "b" * 50)], ["rm"]),
        ([reasoning("r", summary=[{"type": "summary_text", "text": "s"}])], ["r"]),
        ([reasoning("", content=[], summary=[{"type": "summary_text", "text": "s"}])], ["s"]),
        ([{"type": "reasoning", "id": "rs_0", "summary": []}, message("m")], ["m"]),
        # As other clients send them back.
        ([{"type": "reasoning", "encrypted_content": "x"}, message("m")], ["m"]),
        ([reasoning("r", encrypted_content="x"), message("m")], ["rm"]),
        ([message("m", phase="commentary"), message("n", phase="final_answer")], ["m", "n"]),
        ([message([{"type": "refusal", "refusal": "m"}])], ["m"]),
        ([message([{"type": "output_text", "text": "m", "parsed": {"a": 1}}])], ["m"]),
        ([{**CALL, "parsed_arguments": {}, "provider_specific_fields": {"a": 1}}], ["1"]),
    ],
)
async def test_items_of_one_answer_become_one_message(items: list[Any], turns: list[str]) -> None:
    got = [
        (m.get("reasoning_content") or "")
        + (m["content"] or "")
        + str(len(m.get("tool_calls", ())) or "")
        for m in await messages_of([HI, *items])
        if m["role"] == "assistant"
    ]
    assert got == turns


async def test_instructions_are_not_carried_over_to_the_next_response() -> None:
    async with gateway_of(StubEngine(["one", "two"])) as gateway:
        session = gateway.open_session("r")
        client = session.async_client()
        first = await client.responses.create(model="tiny", input="a", instructions="Old.")
        await client.responses.create(
            model="tiny", input="b", instructions="New.", previous_response_id=first.id
        )
        contents = [message["content"] for message in session.calls[1].messages]
        assert contents == ["New.", "a", "one", "b"]


async def test_an_item_can_be_referred_to_by_its_id() -> None:
    async with gateway_of(StubEngine(["<think>\nwhy\n</think>\n\none", "two"])) as gateway:
        session = gateway.open_session("r")
        client = session.async_client()
        first: Any = await client.responses.create(model="tiny", input="a")
        thought, said = first.output
        references: Any = [
            HI,
            {"type": "reasoning", "id": thought.id, "summary": []},  # its text is known here
            {"type": "item_reference", "id": said.id},
            HI,
        ]
        await client.responses.create(model="tiny", input=references)
        assert "<think>\nwhy\n</think>\n\none<|im_end|>" in text_of(session.calls[1].prompt_ids)
        wrong: Any = [{**references[1], "id": said.id}, HI]
        await client.responses.create(model="tiny", input=wrong)
        assert session.calls[2].messages == [HI]
        with pytest.raises(openai.NotFoundError, match=r"input\[0\].id is \"msg_0\""):
            await client.responses.create(
                model="tiny", input=[{"type": "item_reference", "id": "msg_0"}]
            )


async def test_a_response_that_is_not_stored_or_of_another_rollout_cannot_be_continued() -> None:
    async with gateway_of(StubEngine()) as gateway:
        one, other = (gateway.open_session(name) for name in ("one", "other"))
        unstored = await one.async_client().responses.create(model="tiny", input="a", store=False)
        stored = await other.async_client().responses.create(model="tiny", input="a")
        for id_ in (unstored.id, stored.id):
            with pytest.raises(openai.BadRequestError, match="no stored response") as caught:
                await one.async_client().responses.create(
                    model="tiny", input="b", previous_response_id=id_
                )
            assert caught.value.code == "previous_response_not_found"
        other.seal()
        assert other.responses == {}


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["auto", "none", "text", "function", "user", "assistant", "message", "tiny"])
)
keys = ["type", "name", "text", "role", "content", "id", "format", "tools", "call_id", "output"]
anything = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(keys) | st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=12,
)
good = st.sampled_from(
    [
        HI,
        CALL,
        OUTPUT,
        message("m"),
        reasoning("r"),
        {**CALL, "id": f"fc_{A}_0"},
        message("", id="x"),
    ]
)
wrong = good.flatmap(
    lambda item: st.dictionaries(st.sampled_from([*item, "zzz"]), anything, max_size=1).map(
        lambda changed: {**item, **changed}
    )
)
fields = st.sampled_from([*HARMLESS, {"stream": True}, {"tools": [ADD]}])
fields |= st.dictionaries(
    st.sampled_from([*RESPONSES_FIELDS, "zzz"]), anything, min_size=1, max_size=1
)
bodies = st.builds(
    lambda items, extras: (
        {"model": "tiny", "input": items} | {k: v for e in extras for k, v in e.items()}
    ),
    st.text(max_size=20) | st.lists(good | wrong, min_size=1, max_size=4),
    st.lists(fields, max_size=3),
)


@settings(max_examples=few(120), deadline=10_000)
@given(bodies)
async def test_fuzzed_body_never_gets_a_5xx_and_leaves_nothing_behind(body: object) -> None:
    engine = StubEngine(["<think>a</think>b<tool_call>"])
    async with gateway_of(engine) as gateway:
        session = gateway.open_session("r")
        try:
            json.dumps(body).encode()
        except (ValueError, UnicodeError):
            return
        status, answer = await post(gateway, session, body)
        assert status in (200, 400, 404)
        assert (answer["error"] is None) == (status == 200)
        assert len(session.calls) == (status == 200)
        assert session.errors == []
        assert engine.sampling == engine.waiting == 0
        assert session.recording.carried == []
