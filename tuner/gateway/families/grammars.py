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

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tuner.encoding import displayable
from tuner.engines.base import EngineCapabilities
from tuner.gateway.families.parsing import (
    CALL,
    CALL_END,
    CALLS,
    CALLS_END,
    SEPARATOR,
    TAG_FORMS,
    TagForm,
)
from tuner.gateway.families.values import (
    callable_parameters,
    json_schema,
    literal,
    value_grammar,
)
from tuner.gateway.request_error import Path, RequestError, shown

# Parts of the families' grammars: named rules, tags, free text, JSON by a schema; and the one
# format that is not JSON.


TokenId = Callable[[str], int | None]


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
        parts = [_ANY_TEXT, *map(_not_first, begins_with), *map(_without, tags)]
        return self.fresh("FREE", " & ".join(parts))

    def free_until(self, tag: str, *others: str) -> str:
        """Text that is not reasoning and contains none of the tags, up to the first of them."""
        if self._token_id(tag) is not None:
            return f"{self.free(tag, *others)} {self.tag(tag)}"
        return self._lazy(self.free(*others), tag)

    def until(self, tag: str) -> str:
        """Any text up to and including the first such tag."""
        if self._token_id(tag) is not None:
            return f"{self.fresh('TEXT', f'{_ANY_TEXT} & {_without(tag)}')} {self.tag(tag)}"
        return self._lazy(_ANY_TEXT, tag)

    def ended(self, text: str, tag: str, *, without: Sequence[str], unlike: str, words: str) -> str:
        """Text or certain words, and then a tag.

        Args:
            text: Terminal of the text.
            tag: What follows. Text does not contain it.
            without: Other tags that text does not contain.
            unlike: Terminal of text that is not meant; empty for none.
            words: Terminal of the words; empty for none.
        """
        # Text that ends like a part of the tag can make up a tag with its beginning.
        begun = [tag[:-n] for n in range(1, len(tag)) if tag[:n] == tag[-n:]]
        tags = " | ".join(map(literal, (tag, *without)))
        refused = [f"{_ANY_TEXT} ({tags}) {_ANY_TEXT}", *([unlike] if unlike else ())]
        refused += [f"{_ANY_TEXT} {literal(part)}" for part in begun]
        # In one complement: several take llguidance far more states.
        meant = f"({text}) & ~({' | '.join(refused)})"
        value = self.fresh("VALUE", f"{meant} | {words}" if words else meant)
        return f"{value} {self.tag(tag)}" if self.has(tag) else self._lazy(value, tag)

    def has(self, text: str) -> bool:
        """Whether the tag is a single token."""
        return self._token_id(text) is not None

    def _lazy(self, text: str, tag: str) -> str:
        return self.fresh("until", f"{text} {literal(tag)}", "[lazy]")

    def text(self) -> str:
        return "".join(f"{name}: {body}\n" for name, body in self._rules.items())


_ANY_TEXT = "/(?s:.*)/"


def _without(tag: str) -> str:
    """Regex: any text without the tag."""
    return f"~({_ANY_TEXT} {literal(tag)} {_ANY_TEXT})"


def _not_first(text: str) -> str:
    """Regex: any text that does not begin with `text`, ignoring white space."""
    return f"~(/\\s*/ {literal(text)} {_ANY_TEXT})"


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


@dataclass(frozen=True)
class Calls:
    """Expressions for calls, using the rules.

    Attributes:
        calls: One call or several, with nothing before or after.
        free: Text without a call.
        after_text: Text, and then calls.
    """

    calls: str
    free: str
    after_text: str


_END = "\n</parameter>\n"
# Tags that no text of a value contains.
_MARKUP = ("</tool_call>", "<parameter=", "<function=", "</function>")


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
    r"""The format of Qwen3-Coder and Qwen3.5, with a tag for each parameter.

        <tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n</tool_call>

    One block for each call, a newline between two. The parser types a value by the schema, so a
    value is written by its type: plain text, a word of an enumeration, and JSON for everything
    else. Parameters are in the order of the schema.
    """
    call = rules.add("call", " | ".join(_function(rules, tool) for tool in tools))
    return between_tags(rules, call, several)


def _function(rules: Rules, tool: CallableTool) -> str:
    schema: Mapping[str, Any] = json.loads(tool.schema)
    parameters = callable_parameters(schema, tool.path)
    pieces = []
    for name, declared in parameters.named.items():
        path = (*tool.path, "properties", name)
        head = literal(f"<parameter={_name(name, path)}>\n")
        value = value_grammar(rules, declared, schema, path, end=_END, without=_MARKUP)
        parameter = rules.fresh("parameter", f"{head} {value}")
        pieces.append(parameter if name in parameters.required else f"{parameter}?")
    if not parameters.named and parameters.other is not False:
        path = (*tool.path, "additionalProperties")
        value = value_grammar(rules, parameters.other, schema, path, end=_END, without=_MARKUP)
        key, closed = rules.fresh("KEY", r"/[^>\n]+/"), literal(">\n")
        pieces.append(f'("<parameter=" {key} {closed} {value})*')
    head = literal(f"<function={_name(tool.name, tool.path)}>\n")
    return rules.fresh("function", f'{head} {" ".join(pieces)} "</function>"')


def _name(name: str, path: Path) -> str:
    if ">" in name or "\n" in name:
        raise RequestError(
            f": the name {shown(name)} cannot be written in this model's call format, where names "
            "end at '>'",
            path=path,
            begins=True,
        )
    return name


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


# the rules, the tools, whether there may be several calls -> expressions
CallForm = Callable[[Rules, Sequence[CallableTool], bool], Calls]


def hermes(rules: Rules, tools: Sequence[CallableTool], several: bool) -> Calls:
    r"""`<tool_call>\n{"name": NAME, "arguments": {...}}\n</tool_call>`, a newline between two."""
    return between_tags(rules, _json_calls(rules, tools, "arguments"), several)


def llama3_json(rules: Rules, tools: Sequence[CallableTool], several: bool) -> Calls:
    """`{"name": NAME, "parameters": {...}}` with nothing before, `; ` between two."""
    call = _json_calls(rules, tools, "parameters")
    calls = rules.add("calls", f'{call} (";" " "? {call})*' if several else call)
    return Calls(calls, rules.free("<|python_tag|>", begins="{"), calls)


def mistral(rules: Rules, tools: Sequence[CallableTool], several: bool) -> Calls:
    """`[TOOL_CALLS]NAME[ARGS]{...}` for each call if the tokenizer has `[ARGS]`, else an array."""
    begin = rules.tag("[TOOL_CALLS]")
    if rules.has("[ARGS]"):
        named = " | ".join(
            f"{literal(tool.name)} {rules.tag('[ARGS]')} {rules.json(tool.schema)}"
            for tool in tools
        )
        call = rules.add("call", named)
        rest = f"{call} ({begin} {call})*" if several else call
    else:
        call = _json_calls(rules, tools, "arguments")
        rest = f'" "? "[" {call}' + (f' ("," " "? {call})*' if several else "") + ' "]"'
    rules.add("calls", rest)
    after = rules.free_until("[TOOL_CALLS]")
    return Calls(f"{begin} calls", rules.free("[TOOL_CALLS]"), f"{after} calls")


def deepseek_v3(rules: Rules, tools: Sequence[CallableTool], several: bool) -> Calls:
    """Tags around each call and around all; `function`, the name, and JSON in a fence."""
    parts = (f'"function" {rules.tag(SEPARATOR)}', literal("\n```json\n"), literal("\n```"))
    return _deepseek(rules, tools, several, parts, between=literal("\n"))


def deepseek_v31(rules: Rules, tools: Sequence[CallableTool], several: bool) -> Calls:
    """Tags around each call and around all; the name and JSON."""
    return _deepseek(rules, tools, several, ("", rules.tag(SEPARATOR), ""), between="")


def _deepseek(
    rules: Rules,
    tools: Sequence[CallableTool],
    several: bool,
    parts: tuple[str, str, str],
    *,
    between: str,
) -> Calls:
    head, middle, tail = parts
    bodies = " | ".join(
        f"{head} {literal(tool.name)} {middle} {rules.json(tool.schema)} {tail}" for tool in tools
    )
    call = rules.add("call", f"{rules.tag(CALL)} ({bodies}) {rules.tag(CALL_END)}")
    more = f"({between} {call})*" if several else ""
    rules.add("calls", f"{call} {more} {rules.tag(CALLS_END)}")
    after = rules.free_until(CALLS, CALL)
    return Calls(f"{rules.tag(CALLS)} calls", rules.free(CALLS, CALL), f"{after} calls")


def _json_calls(rules: Rules, tools: Sequence[CallableTool], key: str) -> str:
    """The object of a call of any of the tools: `{"name": NAME, key: ARGUMENTS}`."""
    space = '" "?'
    objects = []
    for tool in tools:
        name = json.dumps(tool.name, ensure_ascii=False)
        pieces = ('{"name":', f"{name},", f'"{key}":')
        head = rules.fresh("HEAD", " ".join(f"{literal(piece)} {space}" for piece in pieces))
        objects.append(f'{head} {rules.json(tool.schema)} "}}"')
    return rules.add("call", " | ".join(objects))


CALL_FORMS: Mapping[str, CallForm] = {
    "hermes": hermes,
    "qwen3_coder": qwen3_xml,
    "qwen3_xml": qwen3_xml,
    "llama3_json": llama3_json,
    "llama4_json": llama3_json,
    "mistral": mistral,
    "deepseek_v3": deepseek_v3,
    "deepseek_v31": deepseek_v31,
}


def _reasoning(tags: TagForm, rules: Rules, opened: bool) -> str:
    """Reasoning, required to end if the prompt has opened it, otherwise optional."""
    body = rules.until(tags.closer)
    if tags.line_ends:
        body += f" {rules.fresh('GAP', literal(chr(10)) + '{1,2}')}?"
    return body if opened else f"({rules.tag(tags.opener)} {body})?"


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
    tags = TAG_FORMS.get(reasoning_parser)
    if tags is None and reasoning_parser != "none":
        raise _no_form(path, "reasoning_parser", reasoning_parser, TAG_FORMS)
    rules = Rules(token_id, tags.opener if tags else None)
    before = _reasoning(tags, rules, opened) + " " if tags else ""
    bodies = []
    if constraints.tools:
        if tool_call_parser not in CALL_FORMS:
            raise _no_form(path, "tool_call_parser", tool_call_parser, CALL_FORMS)
        several = constraints.parallel_tool_calls and not constraints.tool_choice.once
        calls = CALL_FORMS[tool_call_parser](rules, _callable(constraints), several)
        if constraints.answer is None and constraints.tool_choice.mode == "auto":
            bodies += [calls.free, calls.after_text]
        else:
            bodies.append(calls.calls)
    answer = constraints.answer
    if answer is not None and not (constraints.tools and constraints.tool_choice.mode != "auto"):
        bodies.append(rules.json(json_schema(answer.schema, answer.path)))
    return displayable(f"start: {before}({' | '.join(bodies)})\n{rules.text()}")


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
