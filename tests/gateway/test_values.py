"""Values in call formats without types: what their grammar allows is what their schema says."""

from __future__ import annotations

import datetime as dt
import enum
import ipaddress
import json
import random
import uuid
from pathlib import Path
from typing import Annotated, Any, Literal

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import AnyUrl, BaseModel, ConfigDict, Field, TypeAdapter, create_model

from tests.engines.test_grammar import END, VOCABULARY
from tests.gateway.test_grammar import GRAMMARS, REQUIRED, may_follow, schemas
from tests.kit.examples import few, grid
from tests.kit.toy import ids_of, text_of, tokenizer
from tuner.engines.grammar_text import GrammarError
from tuner.gateway.families.grammars import Constraints, Rules, grammar_of
from tuner.gateway.families.parsing import TOOL_CALL_PARSERS
from tuner.gateway.families.values import parameters_of, read_value, types_of, value_grammar
from tuner.gateway.request_error import RequestError


class Colour(enum.Enum):
    RED = "red"
    GREEN = "green"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Mixed(enum.Enum):
    WORD = "word"
    ONE = 1
    NOTHING = None


class Guest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str
    age: Annotated[int, Field(ge=0, le=120)] = 30


class Node(BaseModel):
    model_config = ConfigDict(extra="forbid")

    value: int
    next: Node | None = None


class Point(BaseModel):
    model_config = ConfigDict(extra="forbid")

    x: float
    y: float


class Cat(BaseModel):
    model_config = ConfigDict(extra="forbid")

    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    model_config = ConfigDict(extra="forbid")

    kind: Literal["dog"]


Short = Annotated[str, Field(max_length=3)]
Code = Annotated[str, Field(pattern="^[A-Z]{2}-[0-9]+$")]
Month = Annotated[int, Field(ge=1, le=12)]
DAY, NO_DAY = "2024-02-29", "2023-02-29"
MOMENT = "2024-05-06T07:08:09Z"
ID = "123e4567-e89b-12d3-a456-426614174000"
MANY = "a\nb 'c' \"d\" <p>e</p> {f} é 🙂 \\n"

# the type of a parameter, valid values, invalid texts
SIGNATURES: list[tuple[Any, list[Any], list[str]]] = [
    (str, ["", "5", "null", "True", MANY, "\n", " a\n", "</parameter>"], ["</tool_call>"]),
    (int, [5, -3, 0], ["", "5.5", "x", "true", "05"]),
    (float, [5, 1.5, -2e-3], ["", "x", "null"]),
    (bool, [True, False], ["True", "yes", "", "1"]),
    (None, [None], ["None", ""]),
    (str | None, ["", "nul", "nulls", "5", MANY, None], [" null", "None", "null\n"]),
    (int | None, [5, None], ["x", "None", "5.5"]),
    (float | None, [0.5, None], ["x"]),
    (bool | None, [True, None], ["True", "0"]),
    (Literal["a", "b c", "é\nf"], ["a", "b c", "é\nf"], ["", "ab", "b"]),
    (Literal["a"], ["a"], ["b", "aa", ""]),
    (Literal[1, 2], [1, 2], ["3", "12"]),
    (Literal["a", 1, True, None], ["a", 1, True, None], ["b", "2", "false", "True"]),
    (Literal["a", "b"] | None, ["a", "b", None], ["c", "", "null ", "nul"]),
    (Literal["auto"] | int, ["auto", 3], ["x", "3.5", ""]),
    (Literal["auto"] | Month, ["auto", 3, 12], ["13", "0", "autox"]),
    (Colour, ["red", "green"], ["blue", "", "RED"]),
    (Colour | None, ["red", None], ["blue", "", "None"]),
    (Level, [1, 2], ["3", "low"]),
    (Mixed, ["word", 1, None], ["x", "2", "1 "]),
    (Mixed | None, ["word", 1, None], ["x", ""]),
    (Colour | Level, ["red", 2], ["3", "blue"]),
    (list[Colour], [[], ["red", "green"]], ['["blue"]', "red"]),
    (dt.date, [DAY, "0001-01-01"], [NO_DAY, "2024-13-01", "", "today"]),
    (dt.datetime, [MOMENT, "2024-05-06T07:08:09.25+02:00"], [DAY, "now", ""]),
    (dt.time, ["07:08:09Z", "07:08:09.5-01:30"], ["7:08", "25:00:00Z", ""]),
    (dt.timedelta, ["P3D", "PT1H30M", "P2W"], ["3 days", "P", ""]),
    (uuid.UUID, [ID], [ID[:-1], "x", ""]),
    (ipaddress.IPv4Address, ["127.0.0.1"], ["256.0.0.1", "1.2.3"]),
    (ipaddress.IPv6Address, ["::1", "1:2:3:4:5:6:7:8", "fe80::1:2"], ["1::2::3", ":1", "1:2"]),
    (AnyUrl, ["http://a.b/c?d=e#f", "ftp://user@[::1]:21/x"], ["a b", "//x", "x"]),
    (dt.date | None, [DAY, None], [NO_DAY, "None", ""]),
    (dt.datetime | None, [MOMENT, None], [DAY]),
    (uuid.UUID | None, [ID, None], ["x"]),
    (dt.date | dt.datetime, [DAY, MOMENT], ["x"]),
    (dt.date | int, [DAY, 2024], ["2024-", NO_DAY]),
    (Short, ["", "abc", "\n\n\n", "é🙂x"], ["abcd"]),
    (Short | None, ["", "abc", None], ["abcd", "nulls"]),
    (Annotated[str, Field(min_length=2, max_length=4)], ["ab", "abcd"], ["a", "", "abcde"]),
    (Annotated[str, Field(min_length=1)] | None, ["a", MANY, None], ["", "\n</parameter>"]),
    (Code, ["AB-1"], ["AB-", "xAB-1", "AB-1x", ""]),
    (Code | None, ["AB-1", None], ["AB-", "None"]),
    (Annotated[str, Field(pattern=r"\d/\w")], ["1/a", "x 1/b\ny"], ["1/", "", "/a"]),
    (Annotated[str, Field(pattern="^a")], ["a", "ab"], ["ba"]),
    (Annotated[str, Field(pattern="a$")], ["a", "ba"], ["ab"]),
    (Annotated[str, Field(pattern="^a$|(?:^b$)|[|^c]d")], ["a", "b", "x|dy", "^d"], ["ab", "d"]),
    (Annotated[str, Field(pattern="(?i)^no|yes$")], ["NO!", "oh YES"], ["yes no"]),
    (Annotated[str, Field(pattern="^[a-z ]*$", min_length=3)], ["abc", "a b"], ["ab", "ABC"]),
    (Month, [1, 12], ["0", "13", "1.5"]),
    (Annotated[float, Field(gt=0)], [0.5, 7], ["0", "-1"]),
    (Annotated[int, Field(multiple_of=5)], [5, 100], ["7"]),
    (int | str, [5, "", "x", "5 x", "1.5", "-", "null"], [" 5", "5\n", "5.0"]),
    (float | str, [5, 1.5, "", "x", "1.5.2", "-"], ["1.5 ", " 2e3"]),
    (bool | str, [True, "", "x", "truely"], ["True", " false"]),
    (int | str | None, [5, "x", None], ["None", " null"]),
    (Month | str, [5, "x", "", "x5"], ["13", "5x"]),
    (Short | int, [12345, "abc"], ["abcd", " 5"]),
    (list[str], [[], ["a", 'b"\n'], ["</parameter>"]], ["a", "[a]", ""]),
    (list[int] | None, [[1, 2], None], ['["a"]', "1"]),
    (Annotated[list[int], Field(min_length=1, max_length=2)], [[1], [1, 2]], ["[]", "[1, 2, 3]"]),
    (list[str] | str, [["a"], [], "a", "", "x[1]"], ["[a]", " []", '["a"']),
    (dict[str, int], [{}, {"a": 1}], ['{"a": "b"}', "a"]),
    (dict[str, int] | str, [{"a": 1}, "a", ""], ["{a}", "{}x"]),
    (Guest, [{"name": "A", "age": 3}, {"name": "B"}], ['{"name": 1}', '{"age": 3}', "A"]),
    (Guest | None, [{"name": "A"}, None], ['{"name": 1}', "A"]),
    (Guest | str, [{"name": "A"}, "A"], ['{"name": 1}']),
    (list[Guest], [[], [{"name": "A"}]], ['[{"name": 1}]']),
    (Node, [{"value": 1}, {"value": 1, "next": {"value": 2}}], ['{"value": 1, "next": 3}']),
    (Node | Literal["none"], [{"value": 1}, "none"], ["x", "{}"]),
    (Cat | Dog, [{"kind": "cat", "lives": 9}, {"kind": "dog"}], ['{"kind": "cow"}']),
    (Point, [{"x": 1, "y": 2.5}], ['{"x": 1}', '{"x": "1", "y": 2}']),
    (tuple[int, str], [[1, "a"]], ['["a", 1]', "[1]"]),
    (list[dict[str, list[bool | None]]], [[{"a": [True, None]}]], ['[{"a": true}]']),
    (
        int | float | bool | list[Any] | dict[str, Any] | str | None,
        [1, 0.5, True, [[]], {"a": [None]}, "a", None],
        ["[a", "{}x"],
    ),
]  # fmt: skip


def called(value: str) -> str:
    parameter = f"<parameter=x>\n{value}\n</parameter>\n"
    return f"<tool_call>\n<function=f>\n{parameter}</function>\n</tool_call>"


def written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def tool_of(annotation: Any) -> dict[str, Any]:
    schema = create_model("Arguments", x=(annotation, ...)).model_json_schema()
    return tool_by(schema)


def tool_by(schema: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "strict": True, "parameters": schema}}


def form_of(tool: dict[str, Any]) -> str:
    return grammar_of(
        Constraints([tool], REQUIRED, parallel_tool_calls=False),
        tool_call_parser="qwen3_coder",
        reasoning_parser="none",
        opened=False,
        token_id=lambda text: None,
    )


def is_allowed(form: str, text: str) -> bool:
    state = GRAMMARS.start(form)
    return all(may_follow(state, token_id) for token_id in [*letters(text), END])


def letters(text: str) -> list[int]:
    """Ids of a text, letter by letter."""
    return [token_id for letter in text for token_id in ids_of(letter)]


def read(text: str, tool: dict[str, Any]) -> dict[str, Any]:
    rest, (call,), malformed = TOOL_CALL_PARSERS["qwen3_coder"](text, [tool])
    assert (rest, call.name, malformed) == ("", "f", 0)
    return json.loads(call.arguments)


def assert_valid(arguments: Any, schema: Any) -> None:
    jsonschema.validate(
        arguments, schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )


names = [str(row[0])[:60] for row in SIGNATURES]


@grid("annotation, valid, wrong", SIGNATURES, quick=25, ids=names)
def test_values_are_allowed_if_and_only_if_their_schema_allows_them(
    annotation: Any, valid: list[Any], wrong: list[str]
) -> None:
    tool = tool_of(annotation)
    form = form_of(tool)
    for value in valid:
        assert_valid({"x": value}, tool["function"]["parameters"])
        text = called(written(value))
        assert is_allowed(form, text), value
        found = read(text, tool)["x"]
        assert (found, type(found)) == (value, type(value))
    assert [text for text in wrong if is_allowed(form, called(text))] == []


FAVOURITES = letters('nultre 0123-5.[]{}":,aABTZ/<>\n')


def sampled(form: str, dice: random.Random, value: str) -> str | None:
    """A completion that begins like one with a valid value and continues with a random model, which
    ends values often; None if it takes too long."""
    state, plan = GRAMMARS.start(form), []
    text = called(value)
    kept = max(dice.randrange(len(value) + 1) for _ in range(2))
    ids = letters(text[: text.index(value) + kept])
    for token_id in ids:
        state.advance(token_id)
    for _ in range(300):
        bits = state.mask(VOCABULARY)
        allowed = [i for i in range(VOCABULARY) if bits[i // 8] >> (i % 8) & 1]
        if END in allowed:
            return text_of(ids)
        if not plan and len(allowed) > 1 and dice.random() < 0.15:
            plan = letters("\n</parameter>\n")
        if plan and plan[0] not in allowed:
            plan = []
        liked = [token_id for token_id in FAVOURITES if token_id in allowed]
        choices = liked if liked and dice.random() < 0.8 else allowed
        ids.append(plan.pop(0) if plan else dice.choice(choices))
        state.advance(ids[-1])
    return None


@grid("annotation, valid", [row[:2] for row in SIGNATURES], quick=25, ids=names)
def test_whatever_is_sampled_is_valid(annotation: Any, valid: list[Any]) -> None:
    tool = tool_of(annotation)
    form, dice = form_of(tool), random.Random(str(annotation))
    begun = [written(dice.choice(valid)) for _ in range(few(8))]
    samples = [text for value in begun if (text := sampled(form, dice, value)) is not None]
    assert samples
    adapter = TypeAdapter(annotation)
    for text in samples:
        arguments = read(text, tool)
        assert_valid(arguments, tool["function"]["parameters"])
        if annotation is not AnyUrl:  # its format allows more
            adapter.validate_json(json.dumps(arguments["x"]))


SCHEMAS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    # the schema of all parameters; values of x that are allowed, and that are not
    ({"properties": {"x": {"$ref": "#/properties/y"}, "y": {"enum": ["a"]}}}, ["a"], ["b"]),
    (
        {
            "properties": {"x": {"$ref": "#/$defs/a~1b"}},
            "$defs": {"a/b": {"anyOf": [{"maxLength": 1, "type": "string"}, {"type": "null"}]}},
        },
        ["", "a", "null"],
        ["ab", "None"],
    ),
    (
        {
            "properties": {"x": {"$ref": "#/$defs/%61"}},
            "$defs": {
                "a": {
                    "anyOf": [
                        {"type": "string", "enum": ["a"]},
                        {"type": "array", "items": {"$ref": "#/$defs/a"}},
                    ]
                }
            },
        },
        ["a", "[]", '["a", ["a"]]'],
        ["b", '["b"]', "[["],
    ),
    (
        {"properties": {"x": {"$ref": "#"}}, "additionalProperties": False},
        ["{}", '{"x": {}}'],
        ["1"],
    ),
    (
        {
            "allOf": [
                {"properties": {"x": {"type": ["string", "null"]}}, "required": ["x"]},
                {"properties": {"x": {"maxLength": 1}}},
            ]
        },
        ["a", "null"],
        ["ab"],
    ),
    (
        {"$ref": "#/$defs/f", "$defs": {"f": {"properties": {"x": {"type": "integer"}}}}},
        ["1"],
        ["a"],
    ),
    ({"additionalProperties": {"type": "integer"}}, ["1"], ["a", "true"]),
    ({"required": ["x"], "additionalProperties": {"type": "integer"}}, ["1"], ["a"]),
    ({"properties": {"x": {"minLength": 2}}}, ["ab", "12", "null"], ["", "1"]),
    (
        {"properties": {"x": {"type": "string", "allOf": [{"minLength": 2}, {"maxLength": 2}]}}},
        ["ab"],
        ["a", "abc"],
    ),
    (
        {"properties": {"x": {"oneOf": [{"type": "string", "maxLength": 1}, {"type": "integer"}]}}},
        ["a", "12"],
        ["ab", " 1"],
    ),
    ({"properties": {"x": {"const": "a", "type": "string"}}}, ["a"], ["b", ""]),
    (
        {"properties": {"x": {"enum": ["a", [1], {"b": None}]}}},
        ["a", "[1]", '{"b": null}'],
        ["[2]", "b"],
    ),
    (
        {"properties": {"x": {"type": ["integer", "string"], "minimum": 3, "maxLength": 2}}},
        ["3", "40", "ab"],
        ["2", "abc"],
    ),
]


@pytest.mark.parametrize(("schema", "allowed", "wrong"), SCHEMAS)
def test_what_a_schema_refers_to_and_combines_is_enforced(
    schema: dict[str, Any], allowed: list[str], wrong: list[str]
) -> None:
    tool = tool_by({"type": "object", **schema})
    form = form_of(tool)
    assert [text for text in allowed if not is_allowed(form, called(text))] == []
    assert [text for text in wrong if is_allowed(form, called(text))] == []
    for text in allowed:
        assert_valid(read(called(text), tool), tool["function"]["parameters"])


def test_the_end_of_a_value_may_be_a_token() -> None:
    ids = tokenizer().get_added_vocab()
    rules = Rules(ids.get, None)
    schema = {"anyOf": [{"type": "string", "maxLength": 9}, {"type": "array"}, {"type": "integer"}]}
    value = value_grammar(rules, schema, schema, ("x",), end="</think>", without=["<think>"])
    form = f"start: {value}\n{rules.text()}"

    def allows(text: str) -> bool:
        state = GRAMMARS.start(form)
        return all(may_follow(state, i) for i in [*letters(text), ids["</think>"], END])

    assert [text for text in ("", "a</b>", "5", '["<think>"]', "5 a") if not allows(text)] == []
    assert [
        text for text in ("a123456789", "</think>", "<think>", " 5", "[a") if allows(text)
    ] == []


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"properties": {"x": {"type": "string", "pattern": "^(?!a)b"}}}, "parameters"),
    (create_model("A", x=(Path, ...)).model_json_schema(), "parameters"),
    (create_model("A", x=(set[str], ...)).model_json_schema(), "parameters"),
    ({"properties": {"x": {"type": "string", "not": {"enum": ["a"]}}}}, "parameters"),
    ({"properties": {"x": {"type": "string", "pattern": "^(a|b$)"}}}, "properties.x.pattern"),
    (
        {
            "properties": {
                "x": {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "(^a)b|c"}]}
            }
        },
        "properties.x.anyOf[1].pattern",
    ),
    (
        {"additionalProperties": {"type": "string"}, "minProperties": 1},
        "parameters.minProperties",
    ),
    (
        {"anyOf": [{"required": ["x"]}, {"required": ["y"]}], "properties": {"x": {}}},
        "parameters.anyOf",
    ),
    ({"properties": {"x": {"enum": []}}, "required": ["x"]}, "parameters"),
    ({"properties": {"x": False}, "required": ["x"]}, "parameters"),
]


@pytest.mark.parametrize(("schema", "field"), REFUSED)
def test_what_cannot_be_enforced_is_refused_by_name(schema: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as caught:
        form_of(tool_by({"type": "object", **schema}))
    assert caught.value.status == 400
    assert (caught.value.param or "").endswith(field)
    assert caught.value.message.startswith(caught.value.param or "?")


TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@settings(max_examples=few(60), deadline=None)
@given(values, st.sampled_from(["", " ", "\n"]))
def test_values_are_read_from_json_and_from_pythons_notation(value: Any, space: str) -> None:
    texts = [json.dumps(value), repr(value)] if not isinstance(value, str) else []
    for text in texts:
        assert json.loads(read_value(f"{space}{text}{space}", TYPES)) == value
        assert json.loads(read_value(text, None)) == text
        assert json.loads(read_value(text, frozenset({"string"}))) == text


def test_tuples_in_an_array_are_arrays() -> None:
    assert json.loads(read_value("[(1,), ('a', ())]", TYPES)) == [[1], ["a", []]]


@pytest.mark.parametrize(
    "text",
    ["(1,)", "{1: 2}", "{1}", "b'a'", "[b'a']", "NaN", "[NaN]", "[1e999j]", "[x]", "[]]",
     "Infinity", "{'a': 1", "[" * 500, "[" * 500 + "]" * 500 + ",]", "1_0", "01", "[\0]"],
)  # fmt: skip
def test_what_is_no_value_of_json_stays_text(text: str) -> None:
    assert json.loads(read_value(text, TYPES)) == text


@settings(max_examples=few(200), deadline=None)
@given(schemas, schemas, st.text())
def test_any_schema_is_read_enforced_or_refused(schema: Any, root: Any, text: str) -> None:
    read_value(text, types_of(schema, root))
    parameters_of(root, root)
    if isinstance(root, dict):
        try:
            form = form_of(tool_by({**root, "properties": {"x": schema}, "required": ["x"]}))
            GRAMMARS.start(form)
        except (RequestError, GrammarError):
            return
