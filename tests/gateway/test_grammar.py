"""Forms that a request demands: what their grammars allow, refuse, and what the parser reads."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import openai
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field

from tests.engines.test_grammar import END, VOCABULARY, allowed, make_engine
from tests.gateway.test_request import USER, anything, send
from tests.kit.examples import few
from tests.kit.toy import StubEngine, gateway_of, ids_of, tokenizer
from tuner.engines import Generation
from tuner.engines.grammar import Grammars, GrammarState, unpacked
from tuner.engines.grammar_text import GrammarError
from tuner.gateway import ChatRenderer
from tuner.gateway.families.grammars import AnswerSchema, Constraints, ToolChoice, grammar_of
from tuner.gateway.families.parsing import TOOL_CALL_PARSERS

RENDERER = ChatRenderer(tokenizer())
GRAMMARS = Grammars(tokenizer(), [END])
CPU = torch.device("cpu")


def tool(name: str, strict: bool | None = None, **properties: Any) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    function = {"name": name, "parameters": parameters}
    return {"type": "function", "function": function | ({"strict": strict} if strict else {})}


ADD = tool("add", a={"type": "integer"}, b={"type": "integer"})
PING = tool("ping")
SAY = tool("say", strict=True, word={"enum": ["yes", "né"]})
REQUIRED = ToolChoice("required")
CALL_ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": -2}}\n</tool_call>'
CALL_PING = '<tool_call>\n{"name":"ping","arguments":{}}\n</tool_call>'
CALL_SAY = '<tool_call>\n{"name": "say", "arguments": {"word": "né"}}\n</tool_call>'
BAD_SAY = '<tool_call>\n{"name": "say", "arguments": {"word": "no"}}\n</tool_call>'
THOUGHT = "<think>\nhm <tool_call> hm\n</think>\n\n".replace("<tool_call>", "tool call")
ANSWER = AnswerSchema(
    {
        "type": "object",
        "properties": {"x": {"type": "boolean"}},
        "required": ["x"],
        "additionalProperties": False,
    },
    ("response_format",),
)


def grammar(constraints: Constraints, *, opened: bool = False, spelled: bool = False) -> str:
    """With tags that are tokens, or with none of them."""
    added = tokenizer().get_added_vocab()
    return grammar_of(
        constraints,
        tool_call_parser="hermes",
        reasoning_parser="deepseek_r1",
        opened=opened,
        token_id=(lambda text: None) if spelled else added.get,
    )


def ids(text: str, spelled: bool) -> list[int]:
    """Ids of a text and the end; with tags letter by letter, or as the tokenizer has them."""
    if not spelled:
        return [*ids_of(text), END]
    return [token_id for letter in text for token_id in ids_of(letter)] + [END]


def allows(constraints: Constraints, text: str, *, opened: bool = False) -> bool:
    """Whether the completion `text` is allowed, in both spellings of the tags."""
    results = []
    for spelled in (False, True):
        form = grammar(constraints, opened=opened, spelled=spelled)
        state = GRAMMARS.start(form)
        results.append(all(may_follow(state, token_id) for token_id in ids(text, spelled)))
    assert results[0] == results[1]
    return results[0]


def may_follow(state: GrammarState, token_id: int) -> bool:
    """Whether the token may follow; takes it."""
    allowed = bool(unpacked(state.mask(VOCABULARY)[None], VOCABULARY, CPU)[0, token_id])
    if allowed:
        state.advance(token_id)
    return allowed


CASES: list[tuple[str, Constraints, list[str], list[str]]] = [
    (
        "required: at least one call, of any tool, after reasoning",
        Constraints([ADD, PING], REQUIRED),
        [
            CALL_ADD,
            CALL_PING,
            f"{CALL_ADD}\n{CALL_PING}",
            THOUGHT + CALL_ADD,
            CALL_ADD.replace(": ", ":").replace(", ", ","),
        ],
        [
            "",
            "hello",
            f"hello\n{CALL_ADD}",
            THOUGHT,
            f"{CALL_ADD}\nhello",
            CALL_ADD.replace("add", "sub"),
            CALL_ADD.replace('"b"', '"c"'),
            CALL_ADD.replace("-2", '"2"'),
            CALL_ADD.replace(', "b": -2', ""),
            CALL_ADD.replace(": ", ":  "),
            CALL_ADD + CALL_PING,
            "<think>hm" + CALL_ADD,
        ],
    ),
    (
        "required, not parallel: one call",
        Constraints([ADD, PING], REQUIRED, parallel_tool_calls=False),
        [CALL_ADD, THOUGHT + CALL_PING],
        ["", "hello", f"{CALL_ADD}\n{CALL_PING}"],
    ),
    (
        "named: one call of this tool",
        Constraints([ADD, PING], ToolChoice("required", ("ping",), once=True)),
        [CALL_PING, THOUGHT + CALL_PING],
        ["", "hello", CALL_ADD, f"{CALL_PING}\n{CALL_PING}"],
    ),
    (
        "allowed tools, auto: text, and calls of these",
        Constraints([ADD, PING], ToolChoice("auto", ("ping",))),
        ["", "hello", f"hello\n{CALL_PING}", f"{CALL_PING}\n{CALL_PING}", THOUGHT + "hello"],
        [CALL_ADD, f"{CALL_PING}\n{CALL_ADD}"],
    ),
    (
        "auto with a strict tool: its arguments obey, those of others are objects",
        Constraints([ADD, SAY]),
        ["", "hello", f"a < b <tool>\n{CALL_SAY}", CALL_ADD, CALL_ADD.replace('"b"', '"c"')],
        [BAD_SAY, f"x {BAD_SAY}", CALL_ADD.replace('{"a": 1, "b": -2}', "[1]"), "<think>hm"],
    ),
    (
        "auto, not parallel: one call at most",
        Constraints([ADD, PING], parallel_tool_calls=False),
        ["", "hello", CALL_ADD, f"hello {CALL_PING}"],
        [f"{CALL_PING}\n{CALL_PING}"],
    ),
    (
        "a schema: JSON alone, after reasoning",
        Constraints([], answer=ANSWER),
        ['{"x": true}', '{"x":false}', THOUGHT + '{"x": true}'],
        ["", "true", '{"x": 1}', '{"x": true} ', 'Sure: {"x": true}', '{ "x": true}', "{}"],
    ),
    (
        "a schema and tools: JSON or calls",
        Constraints([ADD], answer=ANSWER),
        ['{"x": true}', CALL_ADD, THOUGHT + CALL_ADD, f"{CALL_ADD}\n{CALL_ADD}"],
        ["", "hello", f'{{"x": true}}\n{CALL_ADD}'],
    ),
    (
        "a schema and a required call: calls",
        Constraints([ADD], REQUIRED, answer=ANSWER),
        [CALL_ADD],
        ['{"x": true}', ""],
    ),
    (
        "json_object: any object",
        Constraints([], answer=AnswerSchema({"type": "object"}, ("response_format",))),
        ["{}", '{"a": [1, {"b": null}], "é": "\\n"}'],
        ["[]", "1", '{"a": NaN}', "{a: 1}"],
    ),
]


@pytest.mark.parametrize(
    ("constraints", "allowed", "refused"), [case[1:] for case in CASES], ids=[c[0] for c in CASES]
)
def test_a_form_allows_what_it_says_and_nothing_else(constraints, allowed, refused) -> None:
    assert {text: allows(constraints, text) for text in allowed} == dict.fromkeys(allowed, True)
    assert {text: allows(constraints, text) for text in refused} == dict.fromkeys(refused, False)


def test_reasoning_that_the_prompt_opened_must_be_closed_before_the_form() -> None:
    constraints = Constraints([], answer=ANSWER)
    assert allows(constraints, 'so\n</think>\n\n{"x": true}', opened=True)
    assert allows(constraints, '</think>{"x": true}', opened=True)
    assert not allows(constraints, '{"x": true}', opened=True)
    assert not allows(constraints, '<think>so</think>{"x": 1}')


@pytest.mark.parametrize("case", CASES, ids=[c[0] for c in CASES])
def test_what_a_form_allows_is_what_the_parser_reads(case) -> None:
    _, constraints, allowed, _ = case
    for text in allowed:
        message = RENDERER.parse(ids(text, False), tools=constraints.tools)
        assert message.malformed_tool_calls == 0
        assert len(message.tool_calls) == text.count("<tool_call>")
        if constraints.answer is not None and not message.tool_calls:
            assert isinstance(json.loads(message.content or ""), dict)


def test_nothing_demanded_is_no_grammar() -> None:
    for constraints in (
        Constraints([]),
        Constraints([ADD]),
        Constraints([], ToolChoice("none"), parallel_tool_calls=False),
    ):
        assert grammar(constraints) == ""


names = st.text(min_size=1, max_size=6).filter(lambda name: name.isprintable())


@settings(max_examples=few(40), deadline=None, derandomize=True)
@given(names, names)
def test_any_tool_name_can_be_called(name: str, other: str) -> None:
    constraints = Constraints([tool(name), tool(other)], ToolChoice("required", (name,)))
    body = json.dumps({"name": name, "arguments": {}}, ensure_ascii=False)
    text = f"<tool_call>\n{body}\n</tool_call>"
    assert allows(constraints, text)
    (call,) = RENDERER.parse(ids(text, False), tools=constraints.tools).tool_calls
    assert call.name == name


UNUSABLE = [
    ({"type": "object", "properties": {"x": {"type": "strin"}}}, "strin"),
    ({"type": "object", "properties": {"x": {"$ref": "#/$defs/y"}}}, "y"),
    ({"type": "object", "properties": {"x": {"pattern": "(?=a)b"}}}, "look"),
    ({"properties": {"x": {"format": "no-such-format"}}}, "no-such-format"),
    ({"properties": {"x": {"not": {"type": "null"}}}}, "not"),
    ({"properties": 5}, "properties"),
    ({"type": "array"}, "array"),
]


@pytest.mark.parametrize(("schema", "word"), UNUSABLE)
async def test_a_schema_without_a_grammar_is_refused_by_field_and_not_counted(
    schema: dict, word: str
) -> None:
    async with gateway_of(StubEngine(grammars=True)) as gateway:
        broken = {"type": "function", "function": {"name": "f", "parameters": schema}}
        body = {"model": "tiny", "messages": USER, "tools": [ADD, broken]}
        status, answer = await send(gateway, {**body, "tool_choice": "required"})
        assert status == 400
        assert answer["error"]["param"].startswith("tools[1].function.parameters")
        assert word in answer["error"]["message"]
        assert (await send(gateway, body))[0] == 200
        strict = {**broken["function"], "strict": True}
        body["tools"][1] = {"type": "function", "function": strict}
        assert (await send(gateway, body))[0] == 400
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        body = {"model": "tiny", "messages": USER, "response_format": form}
        status, answer = await send(gateway, body)
        if schema.get("type") != "array":
            assert status == 400
            assert answer["error"]["param"] == "response_format.json_schema.schema"
            assert word in answer["error"]["message"]
        else:
            assert status == 200


async def test_a_family_without_a_grammar_says_so() -> None:
    body = {"model": "tiny", "messages": USER, "tools": [ADD], "tool_choice": "required"}
    async with gateway_of(StubEngine(grammars=True), tool_call_parser="none") as gateway:
        status, answer = await send(gateway, body)
        assert status == 400
        assert "no grammar for tool_call_parser 'none'" in answer["error"]["message"]
        assert "hermes" in answer["error"]["message"]
        assert answer["error"]["param"] == "tool_choice"
        form = {"type": "json_object"}
        body = {"model": "tiny", "messages": USER, "response_format": form}
        assert (await send(gateway, body))[0] == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [SAY]}, "tools[0].function.strict"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
async def test_an_engine_without_grammars_refuses_by_field(fields: dict, param: str) -> None:
    async with gateway_of(StubEngine()) as gateway:
        body = {"model": "tiny", "messages": USER, "tools": [ADD], **fields}
        status, answer = await send(gateway, body)
        assert (status, answer["error"]["param"]) == (400, param)
        assert "this engine" in answer["error"]["message"]


async def test_a_tool_that_is_not_there_cannot_be_named() -> None:
    async with gateway_of(StubEngine(grammars=True)) as gateway:
        choice = {"type": "function", "function": {"name": "sub"}}
        body = {"model": "tiny", "messages": USER, "tools": [ADD, PING], "tool_choice": choice}
        status, answer = await send(gateway, body)
        assert (status, answer["error"]["param"]) == (400, "tool_choice")
        assert """names "sub", but the tools are 'add', 'ping'""" in answer["error"]["message"]


class Compiles(StubEngine):
    """A scripted engine that refuses the grammars that the real one would refuse."""

    async def generate(self, prompt_ids, sampling, session, sink=None) -> Generation:
        if sampling.grammar:
            GRAMMARS.start(sampling.grammar)
        return await super().generate(prompt_ids, sampling, session, sink)


KEYWORDS = """
    type properties required items enum const anyOf oneOf allOf not $ref $defs minLength maxLength
    pattern format minimum maximum multipleOf minItems maxItems prefixItems additionalProperties
    patternProperties minProperties default title x-guidance
"""
keywords = st.sampled_from(KEYWORDS.split())
schemas = st.recursive(
    anything | st.sampled_from(["object", "string", "integer", "array", "#", "#/$defs/a", 10**9]),
    lambda inner: (
        st.dictionaries(keywords, inner, max_size=4)
        | st.dictionaries(st.text(max_size=3), inner, max_size=2)
        | st.lists(inner, max_size=3)
    ),
    max_leaves=10,
)
formats = anything | st.builds(
    lambda type_, form: {"type": type_, "json_schema": form},
    st.sampled_from(["text", "json_object", "json_schema"]),
    anything
    | st.fixed_dictionaries(
        {"name": st.text(max_size=4), "schema": schemas}, optional={"strict": anything}
    ),
)
choices = anything | st.builds(
    lambda type_, value: {"type": type_, type_: value},
    st.sampled_from(["function", "allowed_tools", "custom"]),
    anything
    | st.fixed_dictionaries({"name": st.sampled_from(["f", "g"])})
    | st.fixed_dictionaries({"mode": anything, "tools": anything}),
)
tools = st.lists(
    st.builds(
        lambda name, schema, strict: {
            "type": "function",
            "function": {"name": name, "parameters": schema, "strict": strict},
        },
        st.sampled_from(["f", "g"]),
        schemas,
        st.none() | st.booleans(),
    ),
    max_size=2,
)


@settings(max_examples=few(120), deadline=10_000)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "response_format": formats,
            "tool_choice": choices | st.sampled_from(["auto", "required", "none"]),
            "tools": tools,
            "parallel_tool_calls": st.booleans() | anything,
        },
    )
)
async def test_fuzzed_forms_never_get_a_5xx(fields: dict) -> None:
    async with gateway_of(Compiles(grammars=True)) as gateway:
        try:
            payload = json.dumps({"model": "tiny", "messages": USER, **fields}).encode()
        except (ValueError, UnicodeError):
            return
        status, answer = await send(gateway, None, raw=payload)
        assert status in (200, 400)
        assert ("error" in answer) == (status != 200)


# With the real engine over a random model


class Verdict(BaseModel):
    model_config = ConfigDict(extra="forbid")

    colour: Literal["red", "grün"]
    sure: bool
    count: int = Field(ge=0, le=20)


CHOICE = tool("choose", a={"enum": [1, 2]}, b={"type": "boolean"})


async def test_openais_parse_gives_the_pydantic_model_and_the_call_says_its_form() -> None:
    async with gateway_of(make_engine(), reasoning_parser="none") as gateway:
        session = gateway.open_session("r")
        client = session.async_client()
        answer = await client.chat.completions.parse(
            model="tiny", messages=USER, response_format=Verdict, max_tokens=100, n=3
        )
        for choice in answer.choices:
            assert choice.finish_reason == "stop"
            assert isinstance(choice.message.parsed, Verdict)
        assert all(call.constrained and call.invalid is None for call in session.calls)
        assert {len(call.logprobs) > 5 for call in session.calls} == {True}


@pytest.mark.parametrize(
    ("fields", "calls"),
    [
        ({"tool_choice": "required"}, range(1, 9)),
        ({"tool_choice": "required", "parallel_tool_calls": False}, range(1, 2)),
        ({"tool_choice": {"type": "function", "function": {"name": "choose"}}}, range(1, 2)),
        ({"response_format": {"type": "json_object"}, "tool_choice": "required"}, range(1, 9)),
    ],
)
async def test_a_random_model_makes_the_calls_that_are_wanted(fields: dict, calls: range) -> None:
    async with gateway_of(make_engine(), reasoning_parser="none") as gateway:
        session = gateway.open_session("r")
        client = session.async_client()
        answer = await client.chat.completions.create(
            model="tiny", messages=USER, tools=[CHOICE, PING], max_tokens=300, n=4, **fields
        )
        ended = [choice for choice in answer.choices if choice.finish_reason != "length"]
        assert len(ended) >= 2  # the others were still calling when they met the limit
        for choice in ended:
            assert choice.finish_reason == "tool_calls"
            assert choice.message.content is None
            assert len(choice.message.tool_calls) in calls
            for call in choice.message.tool_calls:
                arguments = json.loads(call.function.arguments)
                if call.function.name == "choose":
                    assert set(arguments) == {"a", "b"}
                    assert arguments["a"] in (1, 2)
                else:
                    assert (call.function.name, arguments) == ("ping", {})
        assert sum(call.malformed_tool_calls for call in session.calls) <= 4 - len(ended)


async def test_a_streamed_answer_has_the_form_too() -> None:
    async with gateway_of(make_engine(), reasoning_parser="none") as gateway:
        client = gateway.open_session("r").async_client()
        async with client.chat.completions.stream(
            model="tiny", messages=USER, response_format=Verdict, max_tokens=100
        ) as stream:
            async for _ in stream:
                pass
            final = await stream.get_final_completion()
        assert isinstance(final.choices[0].message.parsed, Verdict)


async def test_a_grammar_too_large_for_the_engine_is_the_requests_fault() -> None:
    class Small(StubEngine):
        async def generate(self, prompt_ids, sampling, session, sink=None) -> Generation:
            raise GrammarError("the grammar cannot be compiled: too large")

    async with gateway_of(Small(grammars=True)) as gateway:
        session = gateway.open_session("r")
        with pytest.raises(openai.BadRequestError, match=r"too large.*simplify") as caught:
            await session.async_client().chat.completions.create(
                model="tiny", messages=USER, tools=[ADD], tool_choice="required"
            )
        assert caught.value.param == "tool_choice"
        assert session.errors == []


def _of(count: int, value: dict) -> dict:
    return {f"p{i}": value for i in range(count)}


TOO_MUCH = [
    ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, ""),
    ({"anyOf": [{"required": [p], "properties": {p: {}}} for p in _of(3000, {})]}, "grammar size"),
    ({"anyOf": [{"type": "string", "maxLength": i} for i in range(3000)]}, "expressions"),
    ({"type": "object", "properties": _of(5000, {"type": "integer"})}, "too big"),
    ({"type": "object", "properties": _of(900, {"type": "integer"})}, "items"),
    ({"pattern": f"^({'|'.join(f'(w{i}|[a-z]*{i})+' for i in range(2000))})$"}, "expressions"),
]


@pytest.mark.parametrize(("schema", "word"), TOO_MUCH)
async def test_a_schema_that_is_too_much_is_refused_with_the_reason_and_the_field(
    schema: dict, word: str
) -> None:
    async with gateway_of(make_engine(), reasoning_parser="none") as gateway:
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        body = {"model": "tiny", "messages": USER, "response_format": form, "max_tokens": 20}
        if "pattern" in schema:
            schema["type"] = "string"
        status, answer = await send(gateway, body)
        assert status == 400
        assert answer["error"]["param"].startswith("response_format")
        assert word in answer["error"]["message"]
        assert "simplify the schema" in answer["error"]["message"]


# The other families' forms, with tags that are text

BARS = {"C": "calls▁begin", "c": "call▁begin", "e": "call▁end", "E": "calls▁end", "s": "sep"}
DEEPSEEK = {key: f"<｜tool▁{name}｜>" for key, name in BARS.items()}  # noqa: RUF001
V3 = "{C}{c}function{s}ping\n```json\n{{}}\n```{e}{E}".format(**DEEPSEEK)
V31 = "{C}{c}ping{s}{{}}{e}{c}ping{s}{{}}{e}{E}".format(**DEEPSEEK)
XML_PING = "<tool_call>\n<function=ping>\n</function>\n</tool_call>"
XML_SAY = (
    "<tool_call>\n<function=say>\n<parameter=word>\nyes\n</parameter>\n</function>\n</tool_call>"
)
FORMS = [
    # parser, whole answers that call, answers that cannot be
    (
        "llama3_json",
        [
            '{"name": "ping", "parameters": {}}',
            '{"name":"say","parameters":{"word":"yes"}}; {"name": "ping", "parameters": {}}',
        ],
        [
            '{"name": "say", "parameters": {"word": "no"}}',
            '{"name": "ping", "arguments": {}}',
            ' {"x": 1}',
            'x <|python_tag|>{"name": "ping", "parameters": {}}',
        ],
    ),
    (
        "mistral",
        [
            '[TOOL_CALLS] [{"name": "ping", "arguments": {}}]',
            'Well.[TOOL_CALLS][{"name": "ping", "arguments": {}}, '
            '{"name": "say", "arguments": {"word": "yes"}}]',
        ],
        [
            '[TOOL_CALLS] [{"name": "say", "arguments": {"word": "no"}}]',
            "[TOOL_CALLS]ping[ARGS]{}",
            "[TOOL_CALLS] []",
        ],
    ),
    (
        "qwen3_coder",
        [
            XML_PING,
            f"Well.\n{XML_PING}\n{XML_SAY}",
        ],
        [
            XML_SAY.replace("yes", "no"),
            XML_PING.replace("ping", "pong"),
            XML_SAY.replace("<parameter=word>\nyes\n</parameter>\n", ""),
            XML_PING + "x",
        ],
    ),
    ("deepseek_v3", [V3, f"Well.{V3}"], [V31, V3.replace("ping", "pong"), V3 + "x"]),
    ("deepseek_v31", [V31, f"Well.{V31}"], [V3, V31.replace("{}", "{1}"), V31 + "x"]),
]


@pytest.mark.parametrize(("parser", "allowed", "refused"), FORMS, ids=[f[0] for f in FORMS])
def test_every_family_has_its_form(parser: str, allowed: list, refused: list) -> None:
    def follows(constraints: Constraints, text: str) -> bool:
        form = grammar_of(
            constraints,
            tool_call_parser=parser,
            reasoning_parser="none",
            opened=False,
            token_id=lambda text: None,
        )
        state = GRAMMARS.start(form)
        return all(may_follow(state, token_id) for token_id in ids(text, True))

    auto = Constraints([PING, SAY])
    assert [follows(auto, text) for text in ["", "hello", *allowed]] == [True] * (2 + len(allowed))
    assert [follows(auto, text) for text in refused] == [False] * len(refused)
    required = Constraints([PING, SAY], REQUIRED)
    assert follows(required, allowed[0])
    assert not any(follows(required, text) for text in ["", "hello", *refused])


def test_mistral_names_each_call_where_the_tokenizer_has_a_token_for_it() -> None:
    tokens = {"[TOOL_CALLS]": 256, "[ARGS]": 257}
    form = grammar_of(
        Constraints([PING], REQUIRED),
        tool_call_parser="mistral",
        reasoning_parser="none",
        opened=False,
        token_id=tokens.get,
    )
    one = [256, *ids_of("ping"), 257, *ids_of("{}")]
    assert allowed(GRAMMARS, form, [*one, *one, END], VOCABULARY)[-1, END]


HARMONY = "<|channel|>commentary to=functions.ping <|constrain|>json<|message|>{}"
ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
ATEM = (
    ' to=ping<|message|><atem:function_calls>\n<atem:invoke name="ping">\n</atem:invoke>\n'
    "</atem:function_calls>"
)
SELF = " to=self<|message|>Hm.<|eom|><|start|>assistant"
K3 = (
    '<|open|>tools<|sep|><|open|>call tool="ping" index="1"<|sep|><|close|>call<|sep|>'
    "<|close|>tools<|sep|>"
)
K3_SAID = "<|open|>response<|sep|>{}<|close|>response<|sep|>"
FRAMES = [
    # parsers, completions with calls, completions of JSON, completions that are refused
    (
        ("openai", "openai_gptoss"),
        [
            HARMONY,
            ANALYSIS + HARMONY,
            f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{HARMONY}",
        ],
        [FINAL + '{"x": true}', f'{ANALYSIS}{FINAL}{{"x": true}}'],
        ["hello", HARMONY.replace("ping", "pong"), '{"x": true}', f"{FINAL}{{}}"],
    ),
    (
        ("muse", "muse"),
        [ATEM, SELF + ATEM, f" to=commentary<|message|>I look.<|eom|><|start|>assistant{ATEM}"],
        [' to=user<|message|>{"x": true}', f'{SELF} to=user<|message|>{{"x": true}}'],
        ["hello", ATEM.replace("ping", "pong")],
    ),
    (
        ("kimi_k3", "kimi_k3"),
        [K3, f"<|open|>think<|sep|>Hm.<|close|>think<|sep|>{K3_SAID.format('I look.')}{K3}"],
        ['{"x": true}', K3_SAID.format('{"x": true}') + "<|close|>message<|sep|>"],
        [K3.replace("ping", "pong"), K3_SAID.format("{}")],
    ),
]


@pytest.mark.parametrize(("parsers", "calls", "answers", "refused"), FRAMES)
def test_calls_and_answers_stand_in_what_a_family_writes_around_them(
    parsers: tuple[str, str], calls: list[str], answers: list[str], refused: list[str]
) -> None:
    renderer = ChatRenderer(tokenizer(), tool_call_parser="none", reasoning_parser=parsers[1])
    read = TOOL_CALL_PARSERS[parsers[0]]
    free = [token_id for token_id in range(256, VOCABULARY) if token_id != END]
    tags = re.compile(r"(<\|\w+\|>)")
    tokens = dict(zip(sorted({*tags.findall("".join([*calls, *answers]))}), free, strict=False))

    def follows(constraints: Constraints, text: str) -> bool:
        form = grammar_of(
            constraints,
            tool_call_parser=parsers[0],
            reasoning_parser=parsers[1],
            opened=False,
            token_id=tokens.get,
        )
        state = GRAMMARS.start(form)
        pieces = ([tokens[t]] if t in tokens else ids_of(t) for t in tags.split(text) if t)
        return all(may_follow(state, token_id) for piece in [*pieces, [END]] for token_id in piece)

    auto = Constraints([PING, SAY])
    for text in calls:
        assert follows(auto, text)
        rest = renderer.parse_text(text, tools=[], opened=False).content or ""
        words, (call,), malformed = read(rest, [PING])
        assert (call.name, malformed, words.strip() in ("", "I look.")) == ("ping", 0, True)
    assert follows(Constraints([PING], REQUIRED), calls[0])
    said = Constraints([], answer=ANSWER)
    for text in answers:
        assert follows(said, text)
        assert renderer.parse_text(text, tools=[], opened=False).content == '{"x": true}'
    assert not any(follows(Constraints([PING], REQUIRED), text) for text in (*answers, *refused))
    assert not any(follows(said, text) for text in (*calls, *refused))


XML_TOOL = {
    "type": "function",
    "function": {
        "name": "book",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Where."},
                "nights": {"type": "integer", "minimum": 1, "maximum": 9},
                "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "guests": {"type": "array", "items": {"$ref": "#/$defs/guest"}, "maxItems": 1},
                "size": {"enum": ["big", 2, None]},
            },
            "required": ["city", "nights"],
            "$defs": {"guest": {"type": "object", "properties": {"age": {"type": "integer"}},
                                "required": ["age"], "additionalProperties": False}},
        },
    },
}  # fmt: skip


def xml_book(**values: str) -> str:
    parameters = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
    return f"<tool_call>\n<function=book>\n{parameters}</function>\n</tool_call>"


XML_BOOKS: list[tuple[dict[str, str], dict[str, Any] | None]] = [
    ({"city": "Rome", "nights": "2"}, {"city": "Rome", "nights": 2}),
    ({"city": '5 <b>\n"x"', "nights": "9"}, {"city": '5 <b>\n"x"', "nights": 9}),
    ({"city": "7", "nights": "1", "note": "null"}, {"city": "7", "nights": 1, "note": None}),
    (
        {"city": "A", "nights": "1", "guests": '[{"age": 3}]', "size": "2"},
        {"city": "A", "nights": 1, "guests": [{"age": 3}], "size": 2},
    ),
    ({"city": "A", "nights": "1", "size": "big"}, {"city": "A", "nights": 1, "size": "big"}),
    ({"city": "A", "nights": "10"}, None),
    ({"city": "A", "nights": "two"}, None),
    ({"city": "A"}, None),
    ({"nights": "1", "city": "A"}, None),
    ({"city": "A", "nights": "1", "guests": '[{"age": "x"}]'}, None),
    ({"city": "A", "nights": "1", "size": "small"}, None),
    ({"city": "A</tool_call>", "nights": "1"}, None),
    ({"city": "A", "nights": "1", "other": "1"}, None),
]


@pytest.mark.parametrize(("values", "arguments"), XML_BOOKS)
def test_parameters_in_tags_are_what_the_parser_reads(
    values: dict[str, str], arguments: dict[str, Any] | None
) -> None:
    form = grammar_of(
        Constraints([XML_TOOL], REQUIRED),
        tool_call_parser="qwen3_coder",
        reasoning_parser="none",
        opened=False,
        token_id=lambda text: None,
    )
    state = GRAMMARS.start(form)
    text = xml_book(**values)
    follows = all(may_follow(state, token_id) for token_id in ids(text, True))
    assert follows == (arguments is not None)
    if arguments is not None:
        _, (call,), malformed = TOOL_CALL_PARSERS["qwen3_coder"](text, [XML_TOOL])
        assert (call.name, json.loads(call.arguments), malformed) == ("book", arguments, 0)
