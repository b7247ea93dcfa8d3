"""From a request's requirements to a grammar in the format of the model's family.

    start: reasoning? body

    body    required         calls
            auto             free text, or free text and calls
            with a schema    JSON by the schema, or calls where tools may be called

`CALL_FORMS` and `TAG_FORMS` hold a family's format by its parser's name, so that a grammar allows
what that parser reads. A tag that is a single token of the tokenizer is matched as that token,
otherwise as text. Free text contains no such tag, so a call cannot bypass the schema, and it does
not begin like reasoning.

`json_schema` defines the spacing of JSON. Reasoning and free text are not bounded.
"""

# The bars of DeepSeek's tags are full-width.
# ruff: noqa: RUF001

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tuner.encoding import displayable
from tuner.engines.base import EngineCapabilities
from tuner.gateway.families.forms import FIELD, FORMS, CallForm
from tuner.gateway.families.parsing import (
    CHANNEL_FORMS,
    START,
    TAG_FORMS,
    ChannelForm,
    TagForm,
)
from tuner.gateway.families.values import (
    ANY_TEXT,
    JSON_TYPES,
    callable_parameters,
    json_schema,
    literal,
    resolved,
    standalone,
    types_of,
    unenforced,
    value_grammar,
)
from tuner.gateway.request_error import Path, RequestError, shown

# Parts of the families' grammars: named rules, tags, free text, JSON by a schema; and the one
# format that is not JSON.


TokenId = Callable[[str], int | None]
# Parts of a row that may be single tokens.
_TAG = re.compile(r"(<[^<>\s]+>|｜[^｜\s]+｜|\]<\]minimax\[>\[|\[[A-Z_]+\])")
_NAMED = re.compile(r"[^\s<>{}()\[\]\"'=]+")
_SPACE = '" "?'


class Rules:
    """Collects the rules of a grammar.

    Args:
        token_id: The id of a tag that is a single token; None for one that is spelled.
        opener: Start of reasoning, with which free text cannot begin; None for nothing.
    """

    def __init__(self, token_id: TokenId, opener: str | None) -> None:
        self._token_id = token_id
        self._opener = opener
        self._rules: dict[str, str] = {}

    def add(self, name: str, body: str) -> str:
        """Define the rule `name`, or the terminal if it is upper case; returns the name."""
        self._rules[name] = body
        return name

    def fresh(self, prefix: str, body: str, options: str = "") -> str:
        """Define a rule under a new name, or find an equal one."""
        for name, known in self._rules.items():
            if known == body and name.startswith(prefix) and name.endswith(options):
                return name.removesuffix(options)
        name = f"{prefix}{len(self._rules)}"
        self._rules[f"{name}{options}"] = body
        return name

    def json(self, schema: str) -> str:
        """JSON by a schema from `json_schema`."""
        return self.fresh("json", f"%json {schema}")

    def tag(self, text: str) -> str:
        token_id = self._token_id(text)
        return literal(text) if token_id is None else f"<[{token_id}]>"

    def free(self, *tags: str, begins: str | None = None) -> str:
        """Text that is not reasoning, does not begin with `begins`, and contains no tag."""
        begins_with = [text for text in (self._opener, begins) if text is not None]
        parts = [ANY_TEXT, *map(_not_first, begins_with), *map(_without, tags)]
        return self.fresh("FREE", " & ".join(parts))

    def free_until(self, tag: str, *others: str) -> str:
        """Text that is not reasoning and contains none of the tags, up to the first of them."""
        if self._token_id(tag) is not None:
            return f"{self.free(tag, *others)} {self.tag(tag)}"
        return self._lazy(self.free(*others), tag)

    def until(self, tag: str) -> str:
        """Any text up to and including the first such tag."""
        if self._token_id(tag) is not None:
            return f"{self.fresh('TEXT', f'{ANY_TEXT} & {_without(tag)}')} {self.tag(tag)}"
        return self._lazy(ANY_TEXT, tag)

    def ended(self, text: str, tag: str, *, without: Sequence[str], unlike: str, words: str) -> str:
        """Text or certain words, and then a tag.

        Args:
            text: Terminal of the text.
            tag: What follows. Text does not contain it.
            without: Other tags that text does not contain.
            unlike: Terminal of text that is not meant; empty for none.
            words: Terminal of the words; empty for none.
        """
        # Text that ends with the first part of a tag would complete the tag too early.
        begun = [tag[:-n] for n in range(1, len(tag)) if tag[:n] == tag[-n:]]
        tags = " | ".join(map(literal, (tag, *without)))
        refused = [f"{ANY_TEXT} ({tags}) {ANY_TEXT}", *([unlike] if unlike else ())]
        refused += [f"{ANY_TEXT} {literal(part)}" for part in begun]
        # In one complement: several take llguidance far more states.
        meant = f"({text}) & ~({' | '.join(refused)})"
        value = self.fresh("VALUE", f"{meant} | {words}" if words else meant)
        return f"{value} {self.tag(tag)}" if self.has(tag) else self._lazy(value, tag)

    def spelled(self, text: str) -> str:
        """A part of a family's format; tags that are tokens as these."""
        if text == " ":
            return _SPACE
        parts: list[str] = []
        plain = ""
        for piece in filter(None, _TAG.split(text)):
            if self.has(piece):
                parts += [literal(plain)] * bool(plain) + [self.tag(piece)]
                plain = ""
            else:
                plain += piece
        return " ".join(parts + [literal(plain)] * bool(plain))

    def has(self, text: str) -> bool:
        """Whether the tag is a single token."""
        return self._token_id(text) is not None

    def _lazy(self, text: str, tag: str) -> str:
        return self.fresh("until", f"{text} {literal(tag)}", "[lazy]")

    def text(self) -> str:
        return "".join(f"{name}: {body}\n" for name, body in self._rules.items())


def _without(tag: str) -> str:
    """Regex: any text without the tag."""
    return f"~({ANY_TEXT} {literal(tag)} {ANY_TEXT})"


def _not_first(text: str) -> str:
    """Regex: any text that does not begin with `text`, ignoring white space."""
    return f"~(/\\s*/ {literal(text)} {ANY_TEXT})"


@dataclass(frozen=True)
class CallableTool:
    """A tool that may be called.

    Attributes:
        name: Its name.
        schema: The schema of its arguments, from `json_schema`.
        path: The schema's place in the request, for messages.
    """

    name: str
    schema: str
    path: Path


Tool = dict[str, Any]


@dataclass(frozen=True)
class ToolChoice:
    """Whether tools are called.

    Attributes:
        mode: "none" hides the tools, "auto" leaves it to the model, "required" demands a call.
        names: The tools that may be called; None for all.
        once: Whether exactly one call is allowed.
    """

    mode: Literal["none", "auto", "required"] = "auto"
    names: tuple[str, ...] | None = None
    once: bool = False


AUTO = ToolChoice()


@dataclass(frozen=True)
class AnswerSchema:
    """The JSON that an answer must be.

    Attributes:
        schema: A JSON schema.
        path: Its place in the request, for messages.
    """

    schema: dict[str, Any]
    path: Path


@dataclass(frozen=True)
class Constraints:
    """A request's requirements on the form of a completion.

    Attributes:
        tools: Tools offered to the model.
        tool_choice: Whether they are called.
        parallel_tool_calls: Whether there may be several calls.
        answer: Required content if no tool is called; None for any text.
    """

    tools: Sequence[Tool]
    tool_choice: ToolChoice = AUTO
    parallel_tool_calls: bool = True
    answer: AnswerSchema | None = None

    @property
    def path(self) -> Path | None:
        """The field of the request that requires a form; None if there is none."""
        if self.answer is not None:
            return ("response_format",)
        if self.tools and (self.tool_choice.mode == "required" or self.tool_choice.names):
            return ("tool_choice",)
        for index, tool in enumerate(self.tools):
            if tool["function"].get("strict"):
                return ("tools", index, "function", "strict")
        return ("parallel_tool_calls",) if self.tools and not self.parallel_tool_calls else None

    def check(self, capabilities: EngineCapabilities) -> None:
        """Reject requirements that no completion can satisfy, or that the engine does not support.

        Raises:
            RequestError: 400 that names the field and what to do.
        """
        choice = self.tool_choice
        if choice.mode == "required" and not self.tools:
            raise _unheld(
                ("tool_choice",),
                "requires a tool call, but there are no tools: send tools too",
            )
        known = [tool["function"]["name"] for tool in self.tools]
        for name in choice.names or ():
            if name not in known:
                raise _unheld(
                    ("tool_choice",),
                    f"names {shown(name)}, but the tools are "
                    f"{', '.join(map(repr, known)) or 'none'}: name one of them",
                )
        if self.path is not None and not capabilities.grammars:
            raise _unheld(
                self.path,
                "requires a certain form of the completion, which this engine does not support: "
                "leave it out",
            )


def _unheld(path: Path, problem: str) -> RequestError:
    return RequestError(f" {problem}", path=path, begins=True)


_ANY_OBJECT: dict[str, Any] = {"type": "object"}
_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


# A family's calls, by its row of the table.


class CallGrammar:
    """The grammar of a family's calls.

    Args:
        form: The family's row.
        rules: Receives the rules.
        tools: Those that may be called.
        several: Whether there may be several calls.
    """

    def __init__(
        self, form: CallForm, rules: Rules, tools: Sequence[CallableTool], *, several: bool
    ) -> None:
        self._form, self._rules = form, rules
        known = [body for body in form.bodies if all(map(rules.has, _TAG.findall(body)))]
        pieces = [piece for piece in FIELD.split((known or form.bodies)[0]) if piece]
        field = next(piece for piece in pieces if piece in _TOGETHER or piece in _MEMBERS)
        if field in _TOGETHER:
            call = rules.add("call", " | ".join(self._alone(tool, field) for tool in tools))
            opening, separator, closing = _TOGETHER[field]
            separator = separator or self._separator()
            more = f" ({separator} {call})*" if several else ""
            inside = f"{opening} {call}{more} {closing}"
            rest = " ".join(
                inside if piece == field else self._rules.spelled(piece) for piece in pieces
            )
            several = False
        else:
            bodies = (" ".join(self._piece(tool, piece) for piece in pieces) for tool in tools)
            rest = rules.add("call", " | ".join(bodies))
        if not form.start:
            rest += f" {self._rules.spelled(form.closer)}"
        if several:
            rest += f" ({self._rules.spelled(form.between + form.opener)} {rest})*"
        self._calls = rules.add("calls", f"{rest} {self._rules.spelled(form.section[1])}")

    def calls(self) -> str:
        """One call or several, with nothing before or after."""
        if self._form.start:
            return self._calls
        return f"{self._rules.spelled(self._form.section[0] + self._form.opener)} {self._calls}"

    def free(self) -> str:
        """Text without a call."""
        form = self._form
        if form.outside:
            return self._rules.free(*form.outside)
        tags = [tag for tag in (form.section[0].strip(), form.opener, *form.other_openers) if tag]
        return self._rules.free(*tags, begins=form.start or None)

    def after_text(self) -> str:
        """Text that calls follow."""
        form = self._form
        if form.start:
            return self._calls
        opening = form.section[0] + form.opener
        first = _TAG.match(opening)
        tag = first[0] if first else form.section[0].strip() or form.opener
        others = [one for one in (form.opener, *form.other_openers) if not one.startswith(tag)]
        before = self._rules.free_until(tag, *others)
        return f"{before} {self._rules.spelled(opening[len(tag) :])} {self._calls}"

    def _separator(self) -> str:
        between = self._form.between
        return f"{literal(between.strip())} {_SPACE}" if between.strip() else literal(between)

    def _alone(self, tool: CallableTool, field: str) -> str:
        """One of the calls of a body that holds all of them."""
        return self._python(tool) if field == "{python}" else self._object(tool)

    def _object(self, tool: CallableTool) -> str:
        """The object of a call: `{"name": NAME, "arguments": ARGUMENTS}`."""
        rules, keys = self._rules, self._form.keys
        name = json.dumps(tool.name, ensure_ascii=False)
        pieces = [f"{{{name}:"]
        if keys.name:
            pieces = [f"{{{json.dumps(keys.name)}:", f"{name},", f'"{keys.arguments[0]}":']
        if keys.id:
            pieces[:1] = [f"{{{json.dumps(keys.id)}:", '"', pieces[0][1:]]
        parts = [f"{literal(piece)} {_SPACE}" for piece in pieces]
        if keys.id:
            parts[1] = f'/"[0-9]{{1,4}}"/ "," {_SPACE}'
        head = rules.fresh("HEAD", " ".join(parts))
        return f'{head} {rules.json(tool.schema)} "}}"'

    def _piece(self, tool: CallableTool, piece: str) -> str:
        if piece in _MEMBERS:
            return _MEMBERS[piece](self, tool)
        if piece == "{name}":
            return literal(self._name(tool.name, tool.path))
        return (
            self._rules.fresh("ID", "/[0-9]{1,4}/")
            if piece == "{id}"
            else self._rules.spelled(piece)
        )

    def _name(self, name: str, path: Path) -> str:
        if not _NAMED.fullmatch(name):
            raise RequestError(
                f": the name {shown(name)} cannot be written in this model's call format: use "
                "letters, digits, '_', '-' and '.'",
                path=path,
                begins=True,
            )
        return name

    def _arguments(self, tool: CallableTool) -> str:
        return self._rules.json(tool.schema)

    def _parameters(self, tool: CallableTool) -> str:
        """A tag for each parameter, in the order of the schema."""
        schema = json.loads(tool.schema)
        parameters = callable_parameters(schema, tool.path, schema)
        pieces = []
        for name, declared in parameters.named.items():
            path = (*tool.path, "properties", name)
            one = self._parameter(literal(self._key(name, path)), declared, schema, path)
            parameter = self._rules.fresh("parameter", one)
            pieces.append(parameter if name in parameters.required else f"{parameter}?")
        if not parameters.named and parameters.other is not False:
            path = (*tool.path, "additionalProperties")
            key = self._rules.fresh("KEY", r'/[^<>\n"]+/')
            pieces.append(f"({self._parameter(key, parameters.other, schema, path)})*")
        return " ".join(pieces)

    def _key(self, name: str, path: Path) -> str:
        if not re.fullmatch(r'[^<>\n"]+', name):
            raise RequestError(
                f": the name {shown(name)} cannot be written in this model's call format: leave "
                "out '<', '>', quotes and line ends",
                path=path,
                begins=True,
            )
        return name

    def _parameter(self, key: str, declared: Any, root: Any, path: Path) -> str:
        opening, _, closing = self._form.parameter.partition("{value}")
        markup = self._form.markup
        ways: list[tuple[str, Any]] = [("", declared)]
        types = types_of(declared, root)
        if "{string}" in opening:
            ways = [
                (says, _narrowed(declared, names))
                for says, names in (("true", {"string"}), ("false", JSON_TYPES - {"string"}))
                if types is None or types & names
            ]
        elif "{type}" in opening:
            names = JSON_TYPES - {"integer"} if types is None else types
            ways = [
                ("number" if name == "integer" else name, _narrowed(declared, {name}))
                for name in sorted(names)
            ]
        found = []
        first = _TAG.match(closing)
        end = first[0] if first and self._rules.has(first[0]) else closing
        for says, schema in ways:
            fields = {"{key}": key, "{string}": literal(says), "{type}": literal(says)}
            head = " ".join(
                fields.get(piece) or self._rules.spelled(piece)
                for piece in FIELD.split(opening)
                if piece
            )
            value = value_grammar(self._rules, schema, root, path, end=end, without=markup)
            found.append(f"{head} {value} {self._rules.spelled(closing[len(end) :])}")
        return found[0] if len(found) == 1 else f"({' | '.join(found)})"

    def _python(self, tool: CallableTool) -> str:
        """`NAME(KEY=VALUE, ...)`, with JSON as values."""

        def value(declared: Any, root: Any, path: Path) -> str:
            return self._rules.json(json_schema(standalone(declared, root), path))

        schema = json.loads(tool.schema)
        members = self._members(schema, schema, tool.path, "{}=", value, '"," " "?')
        return f'{literal(self._name(tool.name, tool.path) + "(")} {members} ")"'

    def _braces(self, tool: CallableTool) -> str:
        """`{KEY:VALUE,...}`, with strings between quotes."""
        return self._brace_object(json.loads(tool.schema), json.loads(tool.schema), tool.path)

    def _brace_object(self, declared: Any, root: Any, path: Path) -> str:
        members = self._members(declared, root, path, "{}:", self._brace_value, '","')
        return f'"{{" {members} "}}"'

    def _brace_value(self, declared: Any, root: Any, path: Path) -> str:
        rules, (opener, end) = self._rules, self._form.quote
        before = self._rules.spelled(opener)
        if self._form.by_schema:
            return f"{before} {value_grammar(rules, declared, root, path, end=end)}"
        types = types_of(declared, root) or JSON_TYPES
        ways = []
        for schema, place in _alternatives(declared, root, path):
            names = types_of(schema, root) or JSON_TYPES
            if "array" in names & types:
                item = self._brace_value(schema.get("items"), root, (*place, "items"))
                ways.append(f'"[" ({item} ("," {item})*)? "]"')
            if "object" in names & types:
                ways.append(self._brace_object(schema, root, place))
        if scalars := types - {"string", "array", "object"}:
            only = standalone(_narrowed(declared, scalars), root)
            ways.append(rules.json(json_schema(only, path)))
        if "string" in types:
            only = _narrowed(declared, {"string"})
            ways.append(f"{before} {value_grammar(rules, only, root, path, end=end)}")
        return rules.fresh("value", " | ".join(ways))

    def _elements(self, tool: CallableTool) -> str:
        """An element for each parameter."""
        schema = json.loads(tool.schema)
        return self._members(schema, schema, tool.path, "", self._element_value, "")

    def _element_value(self, declared: Any, root: Any, path: Path, name: str = "") -> str:
        """The value and the tag that ends it."""
        rules, mark = self._rules, self._form.mark
        tag = f"</{name or path[-1]}>"
        types = types_of(declared, root) or {"string"}
        ways = []
        for schema, place in _alternatives(declared, root, path):
            names = types_of(schema, root) or {"string"}
            if "array" in names & types:
                items = (*place, "items")
                item = self._element_value(schema.get("items"), root, items, "item")
                one = f"{self._rules.spelled(f'{mark}<item>')} {item}"
                ways.append(f"({one})* {self._rules.spelled(mark + tag)}")
            if "object" in names & types:
                members = self._members(schema, root, place, "", self._element_value, "")
                ways.append(f"{members} {self._rules.spelled(mark + tag)}")
        if scalars := types - {"array", "object"}:
            only = _narrowed(declared, scalars) if scalars != types else declared
            value = value_grammar(rules, only, root, path, end=mark)
            ways.append(f"{value} {literal(tag)}")
        return rules.fresh("value", " | ".join(ways))

    def _members(
        self,
        declared: Any,
        root: Any,
        path: Path,
        before: str,
        value: Callable[[Any, Any, Path], str],
        comma: str,
    ) -> str:
        """The members of an object, in their order: required ones, and any of the others.

        Args:
            before: What stands before a value, with "{}" for its name; "" for elements.
            value: A value's grammar.
            comma: Between two members.
        """
        parameters = callable_parameters(declared, path, root)
        found = []
        for name, schema in parameters.named.items():
            place = (*path, "properties", name)
            key = self._key(name, place)
            if before:
                one = f"{literal(before.format(key))} {value(schema, root, place)}"
            else:
                opening = self._rules.spelled(f"{self._form.mark}<{key}>")
                one = f"{opening} {value(schema, root, place)}"
            found.append((self._rules.fresh("member", one), name in parameters.required))
        # The rest of the members if none has been written yet, and after another one.
        first = after = ""
        for one, required in reversed(found):
            whole = self._rules.fresh("members", f"{one} {after}")
            more = f"{comma} {whole}"
            first = whole if required else f"({whole} | {first or literal('')})"
            after = more if required else f"({more} | {after or literal('')})"
            first, after = self._rules.fresh("members", first), self._rules.fresh("members", after)
        return first


CALL_FORMS: Mapping[str, CallForm] = {
    **FORMS,
    "openai": CHANNEL_FORMS["openai_gptoss"].call,
    "muse": CHANNEL_FORMS["muse"].call,
}
"""By the names of the tool-call parsers."""
_TOGETHER = {
    "{objects}": ("", "", ""),
    "{list}": ('"["', '"," " "?', '"]"'),
    "{python}": ('"["', '"," " "?', '"]"'),
}
"""Fields that hold all calls: what is before, between and after them."""
_MEMBERS: dict[str, Callable[[CallGrammar, CallableTool], str]] = {
    "{object}": CallGrammar._object,
    "{arguments}": CallGrammar._arguments,
    "{parameters}": CallGrammar._parameters,
    "{braces}": CallGrammar._braces,
    "{elements}": CallGrammar._elements,
}
"""Fields that hold one call or its arguments."""
_LIMITS = frozenset(
    {
        "minItems", "maxItems", "uniqueItems", "prefixItems", "contains", "minProperties",
        "maxProperties", "patternProperties", "propertyNames", "dependentRequired", "if", "not",
    }
)  # fmt: skip


def _narrowed(schema: Any, types: Collection[str]) -> dict[str, Any]:
    """The schema for values of some types alone."""
    only = {"type": sorted(types)}
    return {"allOf": [schema, only]} if isinstance(schema, Mapping) else only


def _alternatives(declared: Any, root: Any, path: Path) -> Iterator[tuple[Mapping[str, Any], Path]]:
    """The schemas without references and unions of which one holds for a list or an object.

    Raises:
        RequestError: 400 that names a keyword that this format cannot hold.
    """
    if len(path) > 40:
        raise unenforced("nested schemas", path, "name fewer levels")
    schema = declared if isinstance(declared, Mapping) else {}
    for keyword in sorted(_LIMITS & schema.keys()):
        raise unenforced(schema[keyword], (*path, keyword), "leave it out")
    if isinstance(reference := schema.get("$ref"), str):
        yield from _alternatives(resolved(reference, root), root, path)
        return
    unions = [key for key in ("anyOf", "oneOf", "allOf") if isinstance(schema.get(key), list)]
    for key in unions:
        for index, branch in enumerate(schema[key]):
            yield from _alternatives(branch, root, (*path, key, index))
    if not unions:
        yield schema, path


@dataclass(frozen=True)
class _Frame:
    """Text that a family writes around the parts of a completion.

    Attributes:
        before: Reasoning, required to end if the prompt has opened it, otherwise optional.
        answer: Around an answer.
        words: Around words before a call; None if a call simply follows them.
    """

    before: str = ""
    answer: tuple[str, str] = ("", "")
    words: tuple[str, str] | None = None


def _tag_frame(tags: TagForm, rules: Rules, opened: bool) -> _Frame:
    first = _TAG.match(tags.closer)
    tag = first[0] if first and rules.has(first[0]) else tags.closer
    body = f"{rules.until(tag)} {rules.spelled(tags.closer[len(tag) :])}".strip()
    if tags.line_ends:
        body += f" {rules.fresh('GAP', literal(chr(10)) + '{1,2}')}?"
    before = f"{body} " if opened else f"({rules.spelled(tags.opener)} {body})? "
    if tags.answer == ("", ""):
        return _Frame(before)
    opener, closer, end = (
        f"({rules.spelled(text)})?" if text else "" for text in (*tags.answer, tags.end)
    )
    return _Frame(before, (opener, f"{closer} {end}"), (opener, closer))


def _channel_frame(channels: ChannelForm, rules: Rules, opened: bool) -> _Frame:
    following = rules.spelled(f"{START}assistant")
    thought = f"{rules.until(channels.ends[0])} {following} "
    before = thought if opened else f"({rules.spelled(channels.opener)} {thought})? "
    answer, words = map(rules.spelled, channels.speech)
    return _Frame(before, (answer, ""), (words, f"{rules.tag(channels.ends[0])} {following}"))


def grammar_of(
    constraints: Constraints,
    *,
    tool_call_parser: str,
    reasoning_parser: str,
    opened: bool,
    token_id: TokenId,
) -> str:
    """The grammar of a request's requirements; empty if there are none.

    Args:
        constraints: The requirements.
        tool_call_parser, reasoning_parser: The family's format, by the names of the parsers.
        opened: Whether the prompt has already opened the reasoning.
        token_id: The id of a tag that is a single token, None for text.

    Raises:
        RequestError: 400: a schema cannot be turned into a grammar, or the family has no grammar.
    """
    path = constraints.path
    if path is None:
        return ""
    rules, frame = _framed(path, reasoning_parser, opened, token_id)
    answer = constraints.answer
    bodies = []
    if constraints.tools:
        if tool_call_parser not in CALL_FORMS:
            raise _no_form(path, "tool_call_parser", tool_call_parser, CALL_FORMS)
        form = CALL_FORMS[tool_call_parser]
        several = constraints.parallel_tool_calls and not constraints.tool_choice.once
        calls = CallGrammar(form, rules, _callable(constraints), several=several)
        if answer is None and constraints.tool_choice.mode == "auto":
            after = calls.after_text()
            if frame.words is not None:
                after = f"({frame.words[0]} {calls.free()} {frame.words[1]})? {calls.calls()}"
            bodies += [" ".join((frame.answer[0], calls.free(), frame.answer[1])).strip(), after]
        else:
            bodies.append(calls.calls())
    if answer is not None and not (constraints.tools and constraints.tool_choice.mode != "auto"):
        found = rules.json(json_schema(answer.schema, answer.path))
        bodies.append(" ".join((frame.answer[0], found, frame.answer[1])).strip())
    return displayable(f"start: {frame.before}({' | '.join(bodies)})\n{rules.text()}")


def _framed(
    path: Path, reasoning_parser: str, opened: bool, token_id: TokenId
) -> tuple[Rules, _Frame]:
    if (tags := TAG_FORMS.get(reasoning_parser)) is not None:
        rules = Rules(token_id, tags.opener)
        return rules, _tag_frame(tags, rules, opened)
    rules = Rules(token_id, None)
    if (channels := CHANNEL_FORMS.get(reasoning_parser)) is not None:
        return rules, _channel_frame(channels, rules, opened)
    if reasoning_parser != "none":
        raise _no_form(path, "reasoning_parser", reasoning_parser, {**TAG_FORMS, **CHANNEL_FORMS})
    return rules, _Frame()


def _callable(constraints: Constraints) -> list[CallableTool]:
    """The tools that may be called, with the schemas that are enforced.

    If calls are optional, arguments of tools that are not strict are any JSON object.
    """
    choice = constraints.tool_choice
    tools = []
    for index, tool in enumerate(constraints.tools):
        name = tool["function"]["name"]
        if choice.names is None or name in choice.names:
            enforced = choice.mode == "required" or tool["function"].get("strict")
            path = ("tools", index, "function", "parameters")
            schema = _arguments_schema(tool, path) if enforced else _ANY_OBJECT
            tools.append(CallableTool(name, json_schema(schema, path), path))
    return tools


def _arguments_schema(tool: Tool, path: Path) -> dict[str, Any]:
    schema = tool["function"].get("parameters")
    if schema is None:
        return _NO_ARGUMENTS
    if schema.get("type", "object") != "object":
        found = json.dumps(schema["type"])
        raise _unheld((*path, "type"), f"is {found}: arguments must be an object")
    return {"type": "object", **schema}


def _no_form(path: Path, setting: str, name: str, table: Mapping[str, object]) -> RequestError:
    return _unheld(
        path,
        "requires a certain form of the completion, but there is no grammar for "
        f"{setting} {name!r} (there is one for {', '.join(sorted(table))}): leave it out",
    )
