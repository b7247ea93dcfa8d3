r"""From what a request demands to a grammar, in the form of the model's family.

    start: reasoning? body

    body    required         calls
            auto             free text, or free text and calls
            with a schema    JSON by the schema, or calls where tools may be called

`CALL_FORMS` and `TAG_FORMS` have a family's form by its parser's name, so that what a grammar
allows is what that parser reads. A tag that the tokenizer has as a token of its own is that token;
another is text. Free text holds no such tag, so a call is never written past the schema, and does
not begin as reasoning does.

How JSON is spaced is said in `grammar_rules.py`. Reasoning and free text are not bounded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tuner.engines.base import EngineCapabilities
from tuner.gateway.model.grammar_rules import (
    CallableTool,
    Calls,
    Rules,
    TokenId,
    between_tags,
    json_schema,
    literal,
    qwen3_xml,
)
from tuner.gateway.model.parsing.json_text import CALL, CALL_END, CALLS, CALLS_END, SEPARATOR
from tuner.gateway.model.parsing.thinking import TAG_FORMS, TagForm
from tuner.gateway.request_error import Path, RequestError, shown

Tool = dict[str, Any]


@dataclass(frozen=True)
class ToolChoice:
    """Whether tools are called.

    Attributes:
        mode: "none" hides the tools, "auto" leaves it to the model, "required" wants a call.
        names: The tools that may be called; None for every one.
        once: Whether it is one call and no more.
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
        path: Where the request has it, for messages.
    """

    schema: dict[str, Any]
    path: Path


@dataclass(frozen=True)
class Constraints:
    """What a request demands of a completion's form.

    Attributes:
        tools: Those that the model is shown.
        tool_choice: Whether they are called.
        parallel_tool_calls: Whether there may be several calls.
        answer: What the content must be where no tool is called; None for any text.
    """

    tools: Sequence[Tool]
    tool_choice: ToolChoice = AUTO
    parallel_tool_calls: bool = True
    answer: AnswerSchema | None = None

    @property
    def path(self) -> Path | None:
        """The field of the request that demands a form; None where none does."""
        if self.answer is not None:
            return ("response_format",)
        if self.tools and (self.tool_choice.mode == "required" or self.tool_choice.names):
            return ("tool_choice",)
        for index, tool in enumerate(self.tools):
            if tool["function"].get("strict"):
                return ("tools", index, "function", "strict")
        return ("parallel_tool_calls",) if self.tools and not self.parallel_tool_calls else None

    def check(self, capabilities: EngineCapabilities) -> None:
        """Refuse what no completion can satisfy, or the engine cannot hold a completion to.

        Raises:
            RequestError: 400 that names the field and what to do.
        """
        choice = self.tool_choice
        if choice.mode == "required" and not self.tools:
            raise _unheld(
                ("tool_choice",),
                "wants a tool to be called, but there are no tools: send tools too",
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
                "asks for a completion of a certain form, to which this engine cannot hold the "
                "model: leave it out",
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
    """`{"name": NAME, "parameters": {...}}` and nothing before, `; ` between two."""
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
    """Reasoning that must be closed where the prompt has opened it, and else may be there."""
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
    """The grammar that holds a completion to what a request demands; empty where nothing is.

    Args:
        constraints: What is demanded.
        tool_call_parser, reasoning_parser: The family's form, by the names of the parsers.
        opened: Whether the prompt has already opened the reasoning.
        token_id: The id of a tag that is a token of its own, None for text.

    Raises:
        RequestError: 400: a schema cannot be made a grammar, or the family's form has none.
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
    return f"start: {before}({' | '.join(bodies)})\n{rules.text()}"


def _callable(constraints: Constraints) -> list[CallableTool]:
    """The tools that may be called, with the schemas that are enforced.

    Where the model is free to call, arguments of tools that are not strict are any JSON object.
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
        raise _unheld((*path, "type"), f"is {found}: arguments are an object")
    return {"type": "object", **schema}


def _no_form(path: Path, setting: str, name: str, table: Mapping[str, object]) -> RequestError:
    return _unheld(
        path,
        "asks for a completion of a certain form, but there is no grammar for the form of "
        f"{setting} {name!r} (there is for {', '.join(sorted(table))}): leave it out",
    )
