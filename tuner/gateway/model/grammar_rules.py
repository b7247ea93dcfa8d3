"""What the families' grammars are made of: rules under names, tags, free text, JSON by a schema;
and the one form that is not JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tuner.engines.grammar_text import compile_limits
from tuner.gateway.model.parsing.qwen3_xml import types_of
from tuner.gateway.request_error import Path, RequestError, shown

TokenId = Callable[[str], int | None]


class Rules:
    """Collects the rules of a grammar.

    Args:
        token_id: The id of a tag that is a token of its own; None for one that is spelled.
        opener: What opens reasoning, with which free text cannot begin; None for nothing.
    """

    def __init__(self, token_id: TokenId, opener: str | None) -> None:
        self._token_id = token_id
        self._opener = opener
        self._rules: dict[str, str] = {}

    def add(self, name: str, body: str) -> str:
        """Define the rule `name`, or the terminal if it is upper case; returns the name."""
        self._rules[name] = body
        return name

    def fresh(self, prefix: str, body: str) -> str:
        """Define a rule under a name of its own, or find the equal one."""
        for name, known in self._rules.items():
            if known == body and name.startswith(prefix):
                return name
        return self.add(f"{prefix}{len(self._rules)}", body)

    def json(self, schema: str) -> str:
        """JSON by a schema from `json_schema`."""
        return self.fresh("json", f"%json {schema}")

    def tag(self, text: str) -> str:
        """The tag itself."""
        token_id = self._token_id(text)
        return literal(text) if token_id is None else f"<[{token_id}]>"

    def free(self, *tags: str, begins: str | None = None) -> str:
        """Text that is not reasoning, does not begin with `begins`, and spells no tag."""
        begins_with = [text for text in (self._opener, begins) if text is not None]
        parts = [_ANY_TEXT, *map(_not_first, begins_with), *map(_without, tags)]
        return self.fresh("FREE", " & ".join(parts))

    def free_until(self, tag: str, *others: str) -> str:
        """Text that is not reasoning and spells none of the tags; and then the first of them."""
        if self._token_id(tag) is not None:
            return f"{self.free(tag, *others)} {self.tag(tag)}"
        return self._lazy(self.free(*others), tag)

    def until(self, tag: str) -> str:
        """Any text up to the first such tag, and the tag."""
        if self._token_id(tag) is not None:
            return f"{self.fresh('TEXT', f'{_ANY_TEXT} & {_without(tag)}')} {self.tag(tag)}"
        return self._lazy(_ANY_TEXT, tag)

    def value_until(self, tag: str, other: str) -> str:
        """Any text in which `other` is not spelled, up to the first `tag`, and this tag."""
        return self._lazy(self.fresh("VALUE", f"{_ANY_TEXT} & {_without(other)}"), tag)

    def has(self, text: str) -> bool:
        """Whether the tag is a token of its own."""
        return self._token_id(text) is not None

    def _lazy(self, text: str, tag: str) -> str:
        name = f"until{len(self._rules)}"
        self._rules[f"{name}[lazy]"] = f"{text} {literal(tag)}"
        return name

    def text(self) -> str:
        return "".join(f"{name}: {body}\n" for name, body in self._rules.items())


_ANY_TEXT = "/(?s:.*)/"


def _without(tag: str) -> str:
    """Regex: any text in which the tag is not spelled."""
    return f"~({_ANY_TEXT} {literal(tag)} {_ANY_TEXT})"


def _not_first(text: str) -> str:
    """Regex: any text that does not begin so, white space aside."""
    return f"~(/\\s*/ {literal(text)} {_ANY_TEXT})"


def literal(text: str) -> str:
    """A text as it stands in a grammar."""
    return json.dumps(text, ensure_ascii=False)


@dataclass(frozen=True)
class CallableTool:
    """A tool that may be called.

    Attributes:
        name: Its name.
        schema: The schema of its arguments, as `json_schema` gives it.
        path: Where the request has the schema, for messages.
    """

    name: str
    schema: str
    path: Path


@dataclass(frozen=True)
class Calls:
    """Expressions for calls, as rules know them.

    Attributes:
        calls: One call or several, and nothing before or behind.
        free: Text without a call.
        after_text: Text, and then calls.
    """

    calls: str
    free: str
    after_text: str


# JSON on one line, with or without a space behind commas and colons. More white space is never
# needed, and a small model could go on with it for ever.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}


def json_schema(schema: dict[str, Any], path: Path) -> str:
    """A JSON schema as it stands in a grammar behind `%json`, known to be one that compiles.

    Raises:
        RequestError: 400 that names `path`, with the library's message.
    """
    try:
        text = json.dumps({**schema, "x-guidance": _SPACING})
        problem = _schema_problem(text)
    except RecursionError:
        problem = "it is nested too deeply"
    if problem is not None:
        raise RequestError(
            f" cannot be made a grammar: {problem}; simplify the schema", path=path, begins=True
        )
    return text


@lru_cache(maxsize=1024)
def _schema_problem(schema: str) -> str | None:
    """Why a JSON schema cannot be made a grammar; None where it can."""
    from llguidance import LLMatcher  # here: a process that only reads requests needs none

    failed, messages = LLMatcher.validate_grammar_with_warnings(
        f"start: %json {schema}", limits=compile_limits()
    )
    return messages[0].split("\n<")[0].strip()[:300] if failed else None


_END = "\n</parameter>\n"
# What a string's schema may say without constraining its text.
_HARMLESS = {"type", "title", "description", "default", "examples", "anyOf", "oneOf"}
_SHARED = ("$defs", "definitions")


def between_tags(rules: Rules, call: str, several: bool) -> Calls:
    r"""`<tool_call>\nCALL\n</tool_call>`, a newline between two."""
    begin, end, line = rules.tag("<tool_call>"), rules.tag("</tool_call>"), literal("\n")
    calls = f"{line} {call} {line} {end}"
    if several:
        calls += f" ({line} {begin} {calls})*"
    rules.add("calls", calls)
    return Calls(
        f"{begin} calls", rules.free("<tool_call>"), f"{rules.free_until('<tool_call>')} calls"
    )


def qwen3_xml(rules: Rules, tools: Sequence[CallableTool], several: bool) -> Calls:
    r"""The form of Qwen3-Coder and Qwen3.5, whose parameters have a tag each.

        <tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n</tool_call>

    One block for each call, a newline between two. The parser types a value by the schema, so a
    value is written as its type wants it: text as it is, a word of an enumeration, and JSON for
    everything else. Parameters come in the order of the schema.
    """
    call = rules.add("call", " | ".join(_function(rules, tool) for tool in tools))
    return between_tags(rules, call, several)


def _function(rules: Rules, tool: CallableTool) -> str:
    schema: Mapping[str, Any] = json.loads(tool.schema)
    properties = schema.get("properties")
    if properties is None:
        key = rules.fresh("KEY", r"/[^>\n]+/")
        text = rules.value_until(_END, "</tool_call>")
        closed = literal(">\n")
        parameters = f'("<parameter=" {key} {closed} {text})*'
    else:
        required = schema.get("required", ())
        pieces = [
            f"{_parameter(rules, tool, schema, name)}{'' if name in required else '?'}"
            for name in properties
        ]
        parameters = " ".join(pieces)
    head = literal(f"<function={_name(tool.name, tool.path)}>\n")
    return rules.fresh("function", f'{head} {parameters} "</function>"')


def _parameter(rules: Rules, tool: CallableTool, schema: Mapping[str, Any], name: str) -> str:
    path = (*tool.path, "properties", name)
    declared = schema["properties"][name]
    head = literal(f"<parameter={_name(name, path)}>\n")
    return rules.fresh("parameter", f"{head} {_value(rules, schema, declared, path)}")


def _value(rules: Rules, schema: Mapping[str, Any], declared: Any, path: Path) -> str:
    """The value and the end of its tag."""
    if not isinstance(declared, dict):
        declared = {}
    types = types_of(declared, schema)
    words = declared.get("enum", [declared["const"]] if "const" in declared else None)
    if words is not None:
        written = [word if isinstance(word, str) else json.dumps(word) for word in words]
        return f"({' | '.join(map(literal, written))}) {literal(_END)}"
    if types and "string" not in types:
        shared = {key: schema[key] for key in _SHARED if key in schema}
        return f"{rules.json(json_schema({**shared, **declared}, path))} {literal(_END)}"
    limits = [key for key in declared if key not in _HARMLESS]
    if limits and types:
        raise RequestError(
            f" is {shown(declared[limits[0]])}: text is written as it is in this model's form of "
            "calls, and cannot be held to that; leave it out",
            path=(*path, limits[0]),
            begins=True,
        )
    return rules.value_until(_END, "</tool_call>")


def _name(name: str, path: Path) -> str:
    if ">" in name or "\n" in name:
        raise RequestError(
            f": the name {shown(name)} cannot be written in this model's form of calls, where "
            "names end at '>'",
            path=path,
            begins=True,
        )
    return name
