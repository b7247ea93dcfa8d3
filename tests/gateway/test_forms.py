"""Each form of calls: its text is parsed, also in pieces, and its grammar accepts it."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engines.test_grammar import END, VOCABULARY
from tests.gateway.families import spelled
from tests.gateway.test_grammar import GRAMMARS, REQUIRED, may_follow
from tests.kit.examples import few
from tests.kit.toy import ids_of, text_of
from tuner.engines.grammar import unpacked
from tuner.errors import ConfigError
from tuner.gateway.families.forms import FIELD, FORMS, CallForm, ParsedToolCall
from tuner.gateway.families.grammars import Constraints, grammar_of
from tuner.gateway.families.parsing import (
    TAG_FORMS,
    TOOL_CALL_PARSERS,
    ParsedMessage,
    Scanner,
    joined,
    read,
)
from tuner.gateway.families.template import ANY_CALL, ANY_TOOL, template_form
from tuner.gateway.request_error import RequestError

PARAMETERS = {
    "type": "object",
    "properties": {
        "a": {"type": "integer"},
        "b": {"type": "number"},
        "flag": {"type": "boolean"},
        "inner": {
            "type": "object",
            "properties": {
                "names": {"type": "array", "items": {"type": "string"}},
                "x": {"type": "integer"},
            },
            "required": ["x"],
            "additionalProperties": False,
        },
        "items": {"type": "array", "items": {"type": "integer"}},
        "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "word": {"type": "string"},
    },
    "required": ["a"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "add", "strict": True, "parameters": PARAMETERS}}
form_of = pytest.mark.parametrize("name", FORMS)


def tags(form: CallForm) -> list[str]:
    """Tags that end a value wherever they stand in it."""
    found = {*form.markup, *form.section, *form.quote, form.closer, *form.other_openers, form.mark}
    found |= {part for part in FIELD.split(form.parameter) if not FIELD.match(part)}
    return sorted(tag.strip() for tag in found if tag.strip(' \n>"'))


def words(form: CallForm) -> st.SearchStrategy[str]:
    """Strings: with quotes, line ends and any script; and with tags if strings are JSON."""
    pieces = [*"ab é…\n{}[]()<>\"';:,=\\", "🙂", "汉", "None", "1"]
    text = st.lists(st.sampled_from(pieces + (tags(form) if form.holds_json else [])), max_size=8)
    # Some forms write a value on separate lines, where white space around it is lost.
    return text.map("".join).filter(
        lambda found: (
            found == found.strip()
            and (form.holds_json or not any(tag in found for tag in tags(form)))
        )
    )


def arguments(form: CallForm) -> st.SearchStrategy[dict[str, Any]]:
    # In MiniMax-M3's form an empty list of strings looks like an empty text.
    least = 1 if form.mark else 0
    return st.fixed_dictionaries(
        {"a": st.integers(-(2**40), 2**40)},
        optional={
            "b": st.floats(allow_nan=False, allow_infinity=False),
            "flag": st.booleans(),
            "inner": st.fixed_dictionaries(
                {"x": st.integers()},
                optional={"names": st.lists(words(form), min_size=least, max_size=2)},
            ),
            "items": st.lists(st.integers(), max_size=3),
            "maybe": st.none() | st.integers(),
            "word": words(form),
        },
    )


@form_of
@settings(deadline=None, max_examples=few(60))
@given(data=st.data())
def test_calls_of_every_form_are_read_back(name: str, data: Any) -> None:
    form = FORMS[name]
    calls = data.draw(st.lists(arguments(form), min_size=1, max_size=3))
    before = "" if form.start else data.draw(st.sampled_from(["", "Let me see."]))
    for body in form.bodies:
        if "{list}" in body or not any(field in body for field in ("{name}{arguments}",)):
            text = before + "\n" * (form.lead if before else 0) + spelled(form, calls, body)
            rest, found, malformed = TOOL_CALL_PARSERS[name](text, [TOOL])
            assert [json.loads(call.arguments) for call in found] == calls, text
            assert ({call.name for call in found}, rest, malformed) == ({"add"}, before, 0)


@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if form.holds_json])
@pytest.mark.parametrize("given", ['{"a":1,  "b": 2}', '{"a": 1.50, "é": "\\u00e9"}'])
def test_json_stays_as_the_model_wrote_it(name: str, given: str) -> None:
    form = FORMS[name]
    text = spelled(form, [{}]).replace("{}", given)
    assert TOOL_CALL_PARSERS[name](text, [TOOL]) == ("", (ParsedToolCall("add", given),), 0)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("pythonic", r"[add(word='\ud83d')]"),
        ("seed_oss", spelled(FORMS["seed_oss"], [{}]).replace(
            "</function>", "<parameter=names>['\\ud83d']</parameter>\n</function>"
        )),
    ],
)  # fmt: skip
def test_half_of_a_pair_in_pythons_notation_is_kept_as_an_escape(name: str, text: str) -> None:
    names = {"type": "array", "items": {"type": "string"}}
    function = {"name": "add", "parameters": {"properties": {"names": names}}}
    _, (call,), _ = TOOL_CALL_PARSERS[name](text, [{"type": "function", "function": function}])
    call.arguments.encode()
    assert json.loads(call.arguments) in ({"word": "\ud83d"}, {"names": ["\ud83d"]})


def test_elements_of_an_unknown_type_are_an_object_unless_they_are_items() -> None:
    form = FORMS["minimax_m3"]
    given = {"free": {"x": "y"}, "many": ["y", "z"]}
    (call,) = TOOL_CALL_PARSERS["minimax_m3"](spelled(form, [given]), [])[1]
    assert json.loads(call.arguments) == given


def pieces(form: CallForm) -> list[str]:
    parts = [part for body in form.bodies for part in FIELD.split(body)]
    parts += [part for part in FIELD.split(form.parameter) if not FIELD.match(part)]
    whole = spelled(form, [{"a": 1, "word": 'x "y"'}])
    parts += [form.opener, form.closer, *form.section, form.mark, *form.other_openers]
    parts += [whole, whole[: len(whole) // 2], whole[len(whole) // 2 :], "add", "{}", '"', "[", "é"]
    return [part for part in parts if part] + ["\n", " ", "'", "\\"]


def fed(scanner: Scanner, text: str, cuts: list[int]) -> ParsedMessage:
    ends = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    deltas = [delta for a, b in itertools.pairwise(ends) for delta in scanner.feed(text[a:b])]
    deltas += scanner.close()
    return joined(deltas, scanner.malformed)


@form_of
@settings(deadline=None, max_examples=few(100))
@given(data=st.data())
def test_a_streamed_text_is_the_whole_text_and_nothing_is_lost(name: str, data: Any) -> None:
    form = FORMS[name]
    text = "".join(data.draw(st.lists(st.sampled_from(pieces(form)), max_size=10)))
    cuts = data.draw(st.lists(st.integers(0, max(len(text), 1)), max_size=6))
    parser = TOOL_CALL_PARSERS[name]
    whole = read(parser.scanner([TOOL]), text)
    assert fed(parser.scanner([TOOL]), text, cuts) == whole
    assert fed(parser.scanner([TOOL]), text, list(range(len(text)))) == whole
    rest = iter(text)
    assert all(letter in rest for letter in whole.content or "")
    if not whole.tool_calls:
        assert (whole.content or "") == text
    for call in whole.tool_calls:
        assert isinstance(json.loads(call.arguments), dict)


@form_of
def test_a_call_that_is_cut_off_stays_in_the_text(name: str) -> None:
    form = FORMS[name]
    whole = "x" * (not form.start) + spelled(form, [{"a": 1, "word": "yes"}])
    for end in range(len(whole)):
        rest, calls, malformed = TOOL_CALL_PARSERS[name](whole[:end], [TOOL])
        assert malformed <= 1
        assert calls or rest == whole[:end]
    half = whole[: whole.index("yes") + 1]
    assert TOOL_CALL_PARSERS[name](half, [TOOL]) == (half, (), 1)


@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if form.parameter])
def test_a_value_does_not_swallow_the_tags_after_it(name: str) -> None:
    form = FORMS[name]
    one, two = spelled(form, [{"a": 1, "word": "yes"}]), spelled(form, [{"a": 2}])
    closing = form.parameter.partition("{value}")[2]
    line = "\n" if form.parameter.endswith("\n") else ""
    open_ended = one.replace(f"1{closing}", f"1{line}", 1)
    assert open_ended != one
    rest, calls, malformed = TOOL_CALL_PARSERS[name](open_ended + two, [TOOL])
    assert [json.loads(call.arguments) for call in calls] in ([{"a": 2}], [])
    assert malformed >= 1
    assert open_ended.strip() in rest


def grammar(name: str, tool: dict[str, Any] = TOOL, **more: Any) -> str:
    return grammar_of(
        Constraints([tool], REQUIRED, **more),
        tool_call_parser=name,
        reasoning_parser="none",
        opened=False,
        token_id=lambda text: None,
    )


def letters(text: str) -> list[int]:
    return [token_id for letter in text for token_id in ids_of(letter)] + [END]


@form_of
def test_a_demanded_call_is_written_as_the_models_write_it(name: str) -> None:
    form = FORMS[name]
    # No tag is a token here, and Mistral's first form needs one.
    body = " {list}" if name == "mistral" else form.bodies[0]
    given = {"a": 3, "flag": True, "inner": {"x": 1}, "items": [1, 2], "maybe": None, "word": "é y"}
    two = spelled(form, [given, {"a": 4}], body)
    if "{python}" in body:
        two = two.replace("True", "true").replace("None", "null").replace("'", '"')

    def follows(text: str, **more: Any) -> bool:
        state = GRAMMARS.start(grammar(name, **more))
        return all(may_follow(state, token_id) for token_id in letters(text))

    assert follows(two)
    assert not follows(two, parallel_tool_calls=False)
    assert not follows(two.replace("add", "sub"))
    assert not follows(two.replace("3", "x", 1).replace('"0"', '"x"'))
    assert not follows(f"hello {two}")


def _continuing(form: CallForm, text: str) -> list[int]:
    """Letters that continue one of the form's tags, begin one, or close JSON."""
    closing = form.parameter.partition("{value}")[2]
    tags = [tag for tag in (closing, *form.quote, form.mark, form.closer, *form.section) if tag]
    known = {tag: max(n for n in range(len(tag)) if text.endswith(tag[:n])) for tag in tags}
    longest = max(known.values(), default=0)
    found = [tag[size] for tag, size in known.items() if size == longest]
    return [i for letter in found + [*'"]})'] * (not longest) for i in ids_of(letter)]


@form_of
@pytest.mark.parametrize("seed", range(3))
def test_whatever_a_grammar_allows_is_a_valid_call(name: str, seed: int) -> None:
    form = FORMS[name]
    state = GRAMMARS.start(grammar(name, parallel_tool_calls=False))
    draw = random.Random(seed)
    ids: list[int] = []
    while True:
        mask = unpacked(state.mask(VOCABULARY)[None], VOCABULARY, torch.device("cpu"))[0]
        may = mask.nonzero().flatten().tolist()
        # Closing letters are likely, so that texts stay short.
        likely = [END] if END in may else _continuing(form, text_of(ids))
        likely = [token_id for token_id in likely if token_id in may] or may
        token_id = draw.choice(likely if draw.random() < 0.95 else may)
        state.advance(token_id)
        if token_id == END:
            break
        ids.append(token_id)
        assert len(ids) < 20_000, text_of(ids[-300:])
    text = text_of(ids)
    rest, (call,), malformed = TOOL_CALL_PARSERS[name](text, [TOOL])
    assert (rest, malformed) == ("", 0), text
    jsonschema.validate(json.loads(call.arguments), PARAMETERS)


@form_of
def test_the_parser_that_is_named_leaves_nothing_beside_the_call(name: str) -> None:
    def apply(shaped: list[dict[str, Any]], tools: Any, *, add_generation_prompt: bool) -> str:
        return "".join(text_of_message(message) for message in shaped)

    def text_of_message(message: dict[str, Any]) -> str:
        if "tool_calls" not in message:
            return f"<|{message['role']}|>{message['content']}"
        function = message["tool_calls"][0]["function"]
        given = function["arguments"]
        given = json.loads(given) if isinstance(given, str) else given
        return spelled(FORMS[name], [given]).replace("add", function["name"])

    with pytest.raises(ConfigError, match="set it to") as refusal:
        template_form(apply, "openai")
    known = str(refusal.value).split("'")[-2]
    call = apply(ANY_CALL[1:2], [], add_generation_prompt=False)
    assert TOOL_CALL_PARSERS[known](call, [ANY_TOOL])[0] == ""


def test_what_a_form_cannot_hold_is_refused_by_name() -> None:
    named = {"type": "function", "function": {"name": "a<b", "parameters": PARAMETERS}}
    with pytest.raises(RequestError, match='the name "a<b" cannot be written'):
        grammar("glm45", named)
    limited = {"type": "object", "properties": {"items": {"type": "array", "minItems": 2}}}
    tool = {"type": "function", "function": {"name": "add", "parameters": limited}}
    grammar("glm45", tool)  # lists are JSON there
    with pytest.raises(RequestError, match=r"items\.minItems"):
        grammar("gemma4", tool)


REASONING = [name for name, form in TAG_FORMS.items() if form.answer != ("", "")]


@pytest.mark.parametrize("name", TAG_FORMS)
@settings(deadline=None, max_examples=few(60))
@given(data=st.data())
def test_reasoning_of_every_family_is_the_same_in_pieces(name: str, data: Any) -> None:
    from tuner.gateway.families.parsing import REASONING_PARSERS

    form = TAG_FORMS[name]
    opener, closer = form.answer
    text = f"{form.opener}Think.{form.closer}{opener}It is so.{closer}{form.end}"
    parser = REASONING_PARSERS[name]
    assert parser(text, False) == ("Think.", "It is so.")
    assert parser(text.removeprefix(form.opener), True) == ("Think.", "It is so.")
    tags = [form.opener, form.closer, opener, closer, form.end, "é", "\n", "<", text]
    mixed = "".join(data.draw(st.lists(st.sampled_from(tags), max_size=8)))
    opened = data.draw(st.booleans())
    whole = read(parser.scanner(opened), mixed)
    assert fed(parser.scanner(opened), mixed, list(range(len(mixed)))) == whole
    kept = (whole.reasoning or "") + (whole.content or "")
    assert kept.count("é") == mixed.count("é")
