r"""How model families write tool calls: a row for each family, and one reader for all rows.

A row spells a call as the family's models write it:

    opener     <tool_call>
    body       \n<function={name}>\n{parameters}</function>\n
    parameter  <parameter={key}>\n{value}\n</parameter>\n
    closer     </tool_call>

The parser, the grammar of demanded calls (`grammars`) and the check of a chat template at the start
(`template`) follow from the row. Where it has a line end, a model may write any white space.

    {name}, {id}    the tool; the model's own id of the call, which the gateway does not use
    {arguments}     a JSON object
    {object}        a JSON object that holds name and arguments under `keys`
    {objects}       several of them, on lines or with `;` between
    {list}          a JSON array of them
    {parameters}    any number of `parameter`
    {braces}        Gemma's object: names without quotes, strings between `quote`
    {elements}      MiniMax-M3's object: an element for each name, and for each item of an array
    {python}        a Python list of calls with keyword arguments

JSON is kept byte for byte. Nothing is invented: what a row cannot read is no call.
"""

# The bars of DeepSeek's tags are full-width, as the model writes them.
# ruff: noqa: RUF001

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from tuner.encoding import kept_json
from tuner.gateway.families.literals import (
    DECODER,
    Literals,
    expect,
    is_object,
    skip_space,
    value_end,
)
from tuner.gateway.families.values import Types, items_of, parameters_of, read_value, types_of

Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class ParsedToolCall:
    """A call as the model wrote it.

    If the format is JSON, `arguments` is the model's own text, byte for byte.
    """

    name: str
    arguments: str


@dataclass(frozen=True)
class ToolCallBlock:
    """The content of one block.

    Attributes:
        calls: Its well-formed calls, in order.
        rest: Text that stays content: the text after the calls, or the whole block without calls.
        malformed: Number of calls in it that could not be parsed.
    """

    calls: tuple[ParsedToolCall, ...]
    rest: str
    malformed: int


# Calls in JSON.


@dataclass(frozen=True)
class CallKeys:
    """The members of a JSON object that is a call.

    Attributes:
        name: Of the tool's name; "" if that name is the only key, and the arguments its value.
        arguments: Any of these, the one that the family writes first.
        id: Of the model's own number of the call, which comes first; "" if there is none.
    """

    name: str = "name"
    arguments: tuple[str, ...] = ("arguments",)
    id: str = ""


def json_call(text: str, keys: CallKeys) -> ParsedToolCall | None:
    """The call in `text`, one JSON object. Arguments may also be a string that contains JSON."""
    try:
        spans = _object_spans(text)
        if keys.name:
            name = json.loads(text[slice(*spans[keys.name])])
            (key,) = (key for key in keys.arguments if key in spans)
        else:
            ((name, _),) = spans.items()
            key = name
        arguments = text[slice(*spans[key])]
        if arguments.startswith('"'):
            arguments = json.loads(arguments)
    except (ValueError, KeyError, RecursionError):
        return None
    if not isinstance(name, str) or not name or not is_object(arguments):
        return None
    return ParsedToolCall(name, arguments)


def _object_spans(text: str) -> dict[str, tuple[int, int]]:
    """Start and end of each member's value of the JSON object `text`.

    Raises:
        ValueError: `text` is not one JSON object, or names a member twice.
    """
    spans: dict[str, tuple[int, int]] = {}
    position = expect(text, 0, "{")
    while text[position : position + 1] != "}":
        if spans:
            position = expect(text, position, ",")
        key, position = DECODER.raw_decode(text, position)
        if not isinstance(key, str) or key in spans:
            raise ValueError("a member's name must be a string that occurs once")
        start = expect(text, position, ":")
        _, position = DECODER.raw_decode(text, start)
        spans[key] = (start, position)
        position = skip_space(text, position)
    if skip_space(text, position + 1) != len(text):
        raise ValueError("text after the object")
    return spans


def _schema_of(name: str, tools: Tools) -> Any:
    """The schema of a tool's parameters; None if it is not known."""
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, Mapping) and function.get("name") == name:
            return function.get("parameters")
    return None


def _object_of(members: Mapping[str, str]) -> str:
    """A JSON object of members that are JSON already."""
    return f"{{{', '.join(f'{kept_json(key)}: {value}' for key, value in members.items())}}}"


# The reader of all rows.


@dataclass(frozen=True)
class CallForm:
    """How a family writes calls into its text.

    Attributes:
        opener, closer: A block begins with the opener and ends after the closer. Without a closer
            it ends before the next opener, or with the text.
        bodies: What stands between, and other ways to write it. A grammar writes the first whose
            tags are all tokens of the model.
        parameter: One of `{parameters}`.
        keys: Of the JSON objects.
        quote: Around strings that are not JSON's.
        by_schema: A value gets its type from the tool's schema; otherwise it says its type itself.
        mark: What stands in front of each tag of `{elements}`.
        other_openers: Older models' openers.
        section: Opens before the first call and closes after the last.
        between: What a model writes between two calls.
        lead: Number of line ends before a block that belong to the format.
        start: What a block without an opener begins with, at the beginning of the text alone, after
            any white space.
        attempt: Regular expression: how such a block begins if it was meant as a call.
        closer_ends_turn: Whether models stop at the closer, so that it is not in the text.
        outside: Tags that text without calls does not contain, beside the openers.
        short_ids: Whether the family's templates need call ids of nine letters and digits.
    """

    opener: str
    bodies: tuple[str, ...]
    closer: str = ""
    parameter: str = ""
    keys: CallKeys = CallKeys()
    quote: tuple[str, str] = ("", "")
    by_schema: bool = True
    mark: str = ""
    section: tuple[str, str] = ("", "")
    other_openers: tuple[str, ...] = ()
    between: str = ""
    lead: int = 0
    start: str = ""
    attempt: str = ""
    closer_ends_turn: bool = False
    outside: tuple[str, ...] = ()
    short_ids: bool = False

    @cached_property
    def _readers(self) -> list[_Body]:
        return [_Body(self, body) for body in self.bodies]

    @cached_property
    def markup(self) -> tuple[str, ...]:
        """Tags that a grammar does not allow inside values."""
        texts = [part for body in self.bodies for part in FIELD.split(body)]
        found = [FIELD.split(self.parameter)[0], *texts[:1], *texts[-1:], self.opener, self.closer]
        return tuple(
            dict.fromkeys(text.strip() for text in found if text.strip().startswith(("<", "]")))
        )

    @cached_property
    def unclosed(self) -> re.Pattern[str]:
        """A tag inside a value, which shows that the end of the value is missing. Where the
        family's models begin a line with each tag, only tags at the beginning of a line count."""
        tags = "|".join(map(re.escape, self.markup))
        if not self.parameter.endswith("\n"):
            return re.compile(tags)
        closing = re.escape(self.parameter.partition("{value}")[2].strip())
        return re.compile(rf"^(?:{tags})|{closing}\s*(?:{tags})", re.MULTILINE)

    @property
    def holds_json(self) -> bool:
        """Whether calls are JSON, whose strings may contain any tag."""
        return any(field in self.bodies[0] for field in ("{object", "{list}", "{arguments}"))

    def read(self, block: str, tools: Tools) -> ToolCallBlock:
        """Parse a block's text from its beginning on, given the tools."""
        at, end = 0, len(block)
        for opener in (self.section[0].strip(), self.opener, *self.other_openers):
            if opener and block.startswith(opener, begin := skip_space(block, at)):
                at = begin + len(opener)
        tagged = at > 0
        if self.closer and block.endswith(self.closer):
            end -= len(self.closer)
        elif self.closer and tagged and not self.closer_ends_turn:
            return ToolCallBlock((), block, 1)
        for body in self._readers:
            found = body.read(block, at, end, tools, closed=end < len(block))
            if found is not None:
                return found
        return ToolCallBlock((), block, int(tagged or self.meant(block)))

    def meant(self, text: str) -> bool:
        """Whether text without an opener was meant as a call."""
        if not self.attempt or not re.match(self.attempt, text):
            return False
        start = re.search(r"\S", text.replace(";", " "))
        stop = value_end(text, start.start()) if start else None
        # A complete object without arguments is not a call: people have names, too.
        keys = self.keys.arguments
        return stop is None or any(f'"{key}"' in text[:stop] for key in keys)


Found = tuple[tuple[ParsedToolCall, ...], int, bool]
"""Calls, the position of their end, and whether a malformed call follows there."""

FIELD = re.compile(r"(\{\w+\})")
"""A field of a row."""
_WORDS = {
    "{name}": r"\s*(?P<name>[^\s<>{}()\[\]\"'=]+?)\s*",
    "{id}": r"\s*[^\s<>{}()\[\]\"']+?\s*",
    "{key}": r"(?P<key>[^<>\n]+?)",
    "{string}": r"(?P<string>true|false)",
    "{type}": r"(?P<type>\w+)",
}
_SEPARATOR = re.compile(r"\s*;?\s*")
_CALLED = re.compile(r"\s*([^\W\d][\w.-]*)\(")
_KEYWORD = re.compile(r"\s*([^\W\d]\w*)\s*=")


def _spelled(text: str) -> str:
    """Regular expression of a part of a body; a line end stands for any white space, and so does
    white space at the beginning and the end."""
    parts = re.split(r"(\s*\n\s*|^\s+|\s+$)", text)
    return "".join(r"\s*" if part.isspace() else re.escape(part) for part in parts)


def _spelled_fields(text: str) -> str:
    return "".join(_WORDS.get(piece) or _spelled(piece) for piece in FIELD.split(text))


class _Body:
    """Reads one of a form's bodies: a pattern, the field that holds arguments, and a pattern."""

    def __init__(self, form: CallForm, body: str) -> None:
        self._form = form
        pieces = [piece for piece in FIELD.split(body) if piece]
        at = next(i for i, piece in enumerate(pieces) if FIELD.match(piece) and piece not in _WORDS)
        before, after = "".join(pieces[:at]), _spelled("".join(pieces[at + 1 :]))
        self._read = {
            "{arguments}": self._arguments,
            "{object}": self._object,
            "{objects}": self._objects,
            "{list}": self._list,
            "{parameters}": self._parameters,
            "{braces}": self._braces,
            "{elements}": self._elements,
            "{python}": self._python,
        }[pieces[at]]
        ahead = {"{arguments}": r"(?=\{)", "{braces}": r"(?=\{)"}.get(pieces[at], "")
        if form.parameter:
            opening, _, closing = form.parameter.partition("{value}")
            head = _spelled(FIELD.split(opening)[0])
            ahead = rf"(?={head}|{after}\s*\Z)"
            # One line end on both sides of a value belongs to the format, where it has any.
            gaps = ["\n?" if side else "" for side in (opening[-1] == "\n", closing[0] == "\n")]
            self._parameter = re.compile(
                rf"\s*{_spelled_fields(opening.rstrip())}{gaps[0]}(?P<value>.*?)"
                rf"{gaps[1]}{_spelled(closing.strip())}(?=\s*(?:{head}|{after}\s*\Z))",
                re.DOTALL,
            )
        self._before = re.compile(rf"{_spelled_fields(before)}\s*{ahead}", re.DOTALL)
        self._after = re.compile(rf"\s*{after}\s*")

    def read(
        self, block: str, at: int, end: int, tools: Tools, *, closed: bool
    ) -> ToolCallBlock | None:
        """The calls between two positions of a block, which the form's closer may follow; None if
        there is none."""
        text = block[:end]
        match = self._before.match(text, at)
        if match is None:
            return None
        name = match.groupdict().get("name") or ""
        try:
            calls, stop, broken = self._read(text, match.end(), name, tools)
        except (ValueError, RecursionError):
            return None
        if broken:
            return ToolCallBlock(calls, block[stop:], 1)
        closing = self._after.match(text, stop)
        if closing is None or (closed and closing.end() != end):
            return None
        rest = "" if closing.end() == end else text[closing.end() if closing[0].strip() else stop :]
        return ToolCallBlock(calls, rest, int(self._form.meant(rest)))

    # Each returns what it found at a position, and raises ValueError if there is no call.

    def _arguments(self, text: str, at: int, name: str, tools: Tools) -> Found:
        stop = value_end(text, at)
        if stop is None or not is_object(text[at:stop]):
            raise ValueError
        return (ParsedToolCall(name, text[at:stop]),), stop, False

    def _object(self, text: str, at: int, name: str, tools: Tools) -> Found:
        stop = value_end(text, at)
        call = json_call(text[at:stop], self._form.keys) if stop else None
        if stop is None or call is None:
            raise ValueError
        return (call,), stop, False

    def _objects(self, text: str, at: int, name: str, tools: Tools) -> Found:
        calls: list[ParsedToolCall] = []
        stop = at
        while True:
            try:
                (call,), stop, _ = self._object(text, skip_space(text, at), name, tools)
            except ValueError:
                if not calls:
                    raise
                if _SEPARATOR.fullmatch(text, stop):
                    stop = len(text)
                return tuple(calls), stop, bool(self._form.closer and text[stop:])
            calls.append(call)
            separator = _SEPARATOR.match(text, stop)
            at = separator.end() if separator else stop

    def _list(self, text: str, at: int, name: str, tools: Tools) -> Found:
        calls: list[ParsedToolCall] = []
        stop = at  # end of the parsed part
        if text[at : at + 1] != "[":
            raise ValueError
        while True:
            try:
                (call,), position, _ = self._object(text, skip_space(text, at + 1), name, tools)
            except ValueError:
                break
            at = skip_space(text, position)
            if text[at : at + 1] not in (",", "]"):
                break
            calls.append(call)
            stop = position
            if text[at] == "]":
                return tuple(calls), at + 1, False
        if not calls:
            raise ValueError
        return tuple(calls), stop, True

    def _parameters(self, text: str, at: int, name: str, tools: Tools) -> Found:
        schema = _schema_of(name, tools)
        parameters = parameters_of(schema, schema)
        values: dict[str, str] = {}
        while match := self._parameter.match(text, at):
            key, value = match["key"].strip(), match["value"]
            if key in values or self._form.unclosed.search(value):
                raise ValueError
            values[key] = self._value(match, parameters.types_of(key, schema))
            at = match.end()
        return (ParsedToolCall(name, _object_of(values)),), at, False

    def _value(self, match: re.Match[str], types: Types | None) -> str:
        text, says = match["value"], match.groupdict()
        opener, closer = self._form.quote
        if opener and text.startswith(opener) and text.endswith(closer):
            return kept_json(text[len(opener) : -len(closer)])
        if "string" not in says and "type" not in says:
            return read_value(text, types)
        if says.get("string") == "true" or says.get("type") == "string":
            return kept_json(text)
        DECODER.decode(text.strip())
        return text.strip()

    def _braces(self, text: str, at: int, name: str, tools: Tools) -> Found:
        members, stop = Literals(text, quote=self._form.quote).value(at)
        if not isinstance(members, dict):
            raise ValueError
        if not self._form.by_schema:
            return (ParsedToolCall(name, kept_json(members)),), stop, False
        schema = _schema_of(name, tools)
        parameters = parameters_of(schema, schema)
        written = {
            key: read_value(value, parameters.types_of(key, schema))
            if isinstance(value, str)
            else kept_json(value)
            for key, value in members.items()
        }
        return (ParsedToolCall(name, _object_of(written)),), stop, False

    def _elements(self, text: str, at: int, name: str, tools: Tools) -> Found:
        schema = _schema_of(name, tools)
        members, stop = _Elements(self._form.mark, text, schema).members(at, schema, 0)
        return (ParsedToolCall(name, members),), stop, False

    def _python(self, text: str, at: int, name: str, tools: Tools) -> Found:
        if text[at : at + 1] != "[":
            raise ValueError
        literals = Literals(text, python=True)
        calls = [self._one_call(literals, text, begin) for begin in literals.items(at + 1, "]")]
        if not calls:
            raise ValueError
        return tuple(calls), literals.at, False

    def _one_call(self, literals: Literals, text: str, at: int) -> ParsedToolCall:
        """A call with keyword arguments; the reader is left at its end."""
        match = _CALLED.match(text, at)
        if match is None:
            raise ValueError("expected a call")
        arguments: dict[str, Any] = {}
        for begin in literals.items(match.end(), ")"):
            key = _KEYWORD.match(text, begin)
            if key is None or key[1] in arguments:
                raise ValueError("expected a name that occurs once")
            arguments[key[1]], literals.at = literals.value(key.end(), 1)
        return ParsedToolCall(match[1], kept_json(arguments))


class _Elements:
    """Reads elements: one for each name, and for an array's items one named "item"."""

    def __init__(self, mark: str, text: str, root: Any) -> None:
        self._mark, self._text, self._root = mark, text, root
        self._open = re.compile(rf"\s*{re.escape(mark)}<([^<>/\n]+)>")

    def members(self, at: int, schema: Any, depth: int) -> tuple[str, int]:
        """The object whose members begin at a position, as JSON, and its end."""
        parameters = parameters_of(schema, self._root)
        values: dict[str, str] = {}
        while match := self._open.match(self._text, at):
            if (key := match[1]) in values:
                raise ValueError
            inner = parameters.named.get(key, parameters.other)
            values[key], at = self._one(match, inner, depth)
        return _object_of(values), at

    def _one(self, match: re.Match[str], schema: Any, depth: int) -> tuple[str, int]:
        if depth > 100:
            raise ValueError
        at, types = match.end(), types_of(schema, self._root)
        inner = self._open.match(self._text, at)
        if inner and inner[1] == "item" and "object" not in (types or ()):
            items: list[str] = []
            of = items_of(schema, self._root)
            while inner := self._open.match(self._text, at):
                if inner[1] != "item":
                    raise ValueError
                item, at = self._one(inner, of, depth + 1)
                items.append(item)
            value, at = f"[{', '.join(items)}]", skip_space(self._text, at)
        elif inner:
            value, at = self.members(at, schema, depth + 1)
            at = skip_space(self._text, at)
        else:
            stop = self._text.find(self._mark, at)
            value = read_value(self._text[at:stop], types)
            if value == '""' and types and "string" not in types:
                value = "[]" if "array" in types else "{}"
            at = stop
        closer = f"{self._mark}</{match[1]}>"
        if at < 0 or not self._text.startswith(closer, at):
            raise ValueError
        return value, at + len(closer)


# The rows, by vLLM's names of the parsers, or after the model where vLLM has none.

_XML = CallForm(
    opener="<tool_call>",
    bodies=("\n<function={name}>\n{parameters}</function>\n",),
    closer="</tool_call>",
    parameter="<parameter={key}>\n{value}\n</parameter>\n",
    between="\n",
    lead=2,
)
_HERMES = CallForm("<tool_call>", ("\n{object}\n",), "</tool_call>", between="\n", lead=1)
_LLAMA = CallForm(
    opener="<|python_tag|>",
    bodies=("{objects}",),
    keys=CallKeys("name", ("parameters", "arguments")),
    between="; ",
    start="{",
    attempt=r'[\s;]*\{\s*"(?:name|type|parameters|arguments)"\s*:',
)
_DEEPSEEK = CallForm(
    opener="<｜tool▁call▁begin｜>",
    bodies=("{name}<｜tool▁sep｜>{arguments}",),
    closer="<｜tool▁call▁end｜>",
    section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
)
ATEM = CallForm(
    opener="<atem:invoke",
    bodies=(' name="{name}">\n{parameters}',),
    closer="</atem:invoke>",
    parameter='<atem:parameter name="{key}">{value}</atem:parameter>\n',
    section=("<atem:function_calls>\n", "\n</atem:function_calls>"),
    between="\n",
)
"""Muse's calls, inside a message to the tool."""
_DSML = replace(
    ATEM,
    opener="<｜DSML｜invoke",
    closer="</｜DSML｜invoke>",
    parameter='<｜DSML｜parameter name="{key}" string="{string}">{value}</｜DSML｜parameter>\n',
    section=("<｜DSML｜function_calls>\n", "\n</｜DSML｜function_calls>"),
    lead=2,
)
_GLM = CallForm(
    opener="<tool_call>",
    bodies=("{name}\n{parameters}",),
    closer="</tool_call>",
    parameter="<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n",
    between="\n",
    lead=1,
)
_GLM_DENSE = replace(
    _GLM,
    bodies=("{name}{parameters}",),
    parameter="<arg_key>{key}</arg_key><arg_value>{value}</arg_value>",
    between="",
    lead=0,
)
_PYTHONIC = CallForm(
    opener="<|python_start|>",
    bodies=("{python}",),
    closer="<|python_end|>",
    start="[",
    attempt=r"\s*\[\s*[\w.]+\(",
)
_TOOL_CALLS = CallForm("<tool_calls>", ("{list}",), "</tool_calls>", lead=1)

FORMS: dict[str, CallForm] = {
    "hermes": _HERMES,
    "qwen3_coder": _XML,
    "qwen3_xml": _XML,
    "llama3_json": _LLAMA,
    "llama4_json": _LLAMA,
    "mistral": CallForm(
        opener="[TOOL_CALLS]",
        bodies=(
            "{name}[ARGS]{arguments}",
            "{name}[CALL_ID]{id}[ARGS]{arguments}",
            " {list}",
            "{name}[CALL_ID]{id}{arguments}",
            "{name}{arguments}",
        ),
        short_ids=True,
    ),
    "deepseek_v3": replace(
        _DEEPSEEK,
        bodies=("function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```",),
        between="\n",
    ),
    "deepseek_v31": _DEEPSEEK,
    "deepseek_v32": _DSML,
    "deepseek_v4": replace(_DSML, section=("<｜DSML｜tool_calls>\n", "\n</｜DSML｜tool_calls>")),
    "glm45": _GLM,
    "glm47": _GLM_DENSE,
    "ling3": replace(_GLM, parameter="<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>"),
    "poolside_v1": _GLM,
    "hy_v3": CallForm(
        opener="<tool_call:opensource>",
        bodies=("{name}<tool_sep:opensource>\n{parameters}",),
        closer="</tool_call:opensource>",
        parameter=(
            "<arg_key:opensource>{key}</arg_key:opensource>\n"
            "<arg_value:opensource>{value}</arg_value:opensource>\n"
        ),
        section=("<tool_calls:opensource>\n", "\n</tool_calls:opensource>"),
        between="\n",
    ),
    "seed_oss": replace(
        _XML,
        opener="<seed:tool_call>",
        closer="</seed:tool_call>",
        parameter="<parameter={key}>{value}</parameter>\n",
    ),
    "minimax_m2": replace(
        ATEM,
        opener="<invoke",
        closer="</invoke>",
        parameter='<parameter name="{key}">{value}</parameter>\n',
        section=("<minimax:tool_call>\n", "\n</minimax:tool_call>"),
        lead=1,
    ),
    "minimax_m3": CallForm(
        opener="]<]minimax[>[<invoke",
        bodies=(' name="{name}">{elements}',),
        closer="]<]minimax[>[</invoke>",
        mark="]<]minimax[>[",
        section=("]<]minimax[>[<tool_call>\n", "\n]<]minimax[>[</tool_call>"),
        between="\n",
    ),
    "minimax": CallForm("<tool_calls>", ("\n{objects}\n",), "</tool_calls>", between="\n", lead=1),
    "minicpm5": CallForm(
        opener="<function",
        bodies=(' name="{name}">{parameters}',),
        closer="</function>",
        parameter='<param name="{key}">{value}</param>',
        quote=("<![CDATA[", "]]>"),
        between="\n",
        lead=2,
    ),
    "kimi_k2": CallForm(
        opener="<|tool_call_begin|>",
        bodies=("functions.{name}:{id}<|tool_call_argument_begin|>{arguments}",),
        closer="<|tool_call_end|>",
        section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
    "kimi_k3": CallForm(
        opener="<|open|>call",
        bodies=(' tool="{name}" index="{id}"<|sep|>{parameters}',),
        closer="<|close|>call<|sep|>",
        parameter=(
            '<|open|>argument key="{key}" type="{type}"<|sep|>{value}<|close|>argument<|sep|>'
        ),
        section=("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
    ),
    "gemma4": CallForm(
        opener="<|tool_call>",
        bodies=("call:{name}{braces}",),
        closer="<tool_call|>",
        quote=('<|"|>', '<|"|>'),
        by_schema=False,
    ),
    "functiongemma": CallForm(
        opener="<start_function_call>",
        bodies=("call:{name}{braces}",),
        closer="<end_function_call>",
        quote=("<escape>", "<escape>"),
    ),
    "granite": CallForm("<|tool_call|>", ("{list}",)),
    "granite-20b-fc": CallForm("<function_call>", (" {object}",), between="\n", lead=1),
    "gigachat3": CallForm(
        opener="<|function_call|>",
        bodies=("{object}",),
        other_openers=(
            "<|message_sep|>\n\nfunction call<|role_sep|>",
            "function call<|role_sep|>",
        ),
    ),
    "internlm": CallForm(
        opener="<|action_start|><|plugin|>",
        bodies=("\n{object}",),
        closer="<|action_end|>",
        keys=CallKeys("name", ("arguments", "parameters")),
    ),
    "hunyuan_a13b": _TOOL_CALLS,
    "jamba": _TOOL_CALLS,
    "nemotron_json": CallForm("<TOOLCALL>", ("{list}",), "</TOOLCALL>", lead=1),
    "cohere_command3": CallForm(
        opener="<|START_ACTION|>",
        bodies=("{list}",),
        closer="<|END_ACTION|>",
        keys=CallKeys("tool_name", ("parameters",), "tool_call_id"),
    ),
    "apertus": CallForm(
        opener="<|tools_prefix|>",
        bodies=("{list}",),
        closer="<|tools_suffix|>",
        keys=CallKeys(""),
        closer_ends_turn=True,
    ),
    "functionary_v31": CallForm("<function=", ("{name}>{arguments}",), "</function>"),
    "solar": CallForm(
        opener="<|tool_call:begin|>",
        bodies=("{id}<|tool_call:name|>{name}<|tool_call:args|>{arguments}",),
        closer="<|tool_call:end|>",
        section=("<|tool_calls|>", "<|calls|>"),
        short_ids=True,
    ),
    "lfm2": CallForm("<|tool_call_start|>", ("{python}",), "<|tool_call_end|>"),
    "xlam": CallForm("<xlam>", ("{list}",), start="[", attempt=r'\s*\[\s*\{\s*"name"\s*:'),
    "pythonic": _PYTHONIC,
    "llama4_pythonic": _PYTHONIC,
}
"""If several names mean one form, messages suggest the first."""
