"""What a request demands of a completion's form: which tools may or must be called, which JSON.

Read from a request's fields and checked here; `tuner/gateway/grammar.py` makes a grammar of it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from tuner.engines.base import EngineCapabilities
from tuner.gateway.errors import RequestError, kind, shown

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
        field: Where the request has it, for messages.
    """

    schema: dict[str, Any]
    field: str


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
    def field(self) -> str | None:
        """The field of the request that demands a form; None where none does."""
        if self.answer is not None:
            return "response_format"
        if self.tools and (self.tool_choice.mode == "required" or self.tool_choice.names):
            return "tool_choice"
        for index, tool in enumerate(self.tools):
            if tool["function"].get("strict"):
                return f"tools[{index}].function.strict"
        return "parallel_tool_calls" if self.tools and not self.parallel_tool_calls else None

    def check(self, capabilities: EngineCapabilities) -> None:
        """Refuse what no completion can satisfy, or the engine cannot hold a completion to.

        Raises:
            RequestError: 400 that names the field and what to do.
        """
        choice = self.tool_choice
        if choice.mode == "required" and not self.tools:
            raise RequestError(
                "tool_choice wants a tool to be called, but there are no tools: send tools too",
                param="tool_choice",
            )
        known = [tool["function"]["name"] for tool in self.tools]
        for name in choice.names or ():
            if name not in known:
                raise RequestError(
                    f"tool_choice names {shown(name)}, but the tools are "
                    f"{', '.join(map(repr, known)) or 'none'}: name one of them",
                    param="tool_choice",
                )
        if self.field is not None and not capabilities.grammars:
            raise RequestError(
                f"{self.field} asks for a completion of a certain form, to which this engine "
                "cannot hold the model: leave it out",
                param=self.field,
            )


def read_tool_choice(name: str, value: Any) -> ToolChoice:
    """The request's `tool_choice`.

    Raises:
        RequestError: 400 that says which values there are.
    """
    if value in ("none", "auto", "required"):
        return ToolChoice(value)
    if isinstance(value, dict) and value.get("type") == "function":
        _only_keys(value, ("type", "function"), name)
        return ToolChoice("required", (_function_name(value, name),), once=True)
    if isinstance(value, dict) and value.get("type") == "allowed_tools":
        _only_keys(value, ("type", "allowed_tools"), name)
        return _allowed_tools(value.get("allowed_tools"), f"{name}.allowed_tools")
    raise RequestError(
        f"{name} is {shown(value)}: send 'auto', 'required', 'none', "
        '{"type": "function", "function": {"name": ...}} or {"type": "allowed_tools", ...}',
        param=name,
    )


def _allowed_tools(value: Any, at: str) -> ToolChoice:
    if not isinstance(value, dict):
        raise RequestError(f"{at} must be an object, not {kind(value)}", param=at)
    _only_keys(value, ("mode", "tools"), at)
    mode, tools = value.get("mode"), value.get("tools")
    if mode not in ("auto", "required"):
        raise RequestError(
            f"{at}.mode is {shown(mode)}: send 'auto' or 'required'", param=f"{at}.mode"
        )
    if not isinstance(tools, list) or not tools:
        raise RequestError(f"{at}.tools must be an array of at least one tool", param=f"{at}.tools")
    names = []
    for index, tool in enumerate(tools):
        here = f"{at}.tools[{index}]"
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise RequestError(
                f'{here} must be {{"type": "function", "function": {{"name": ...}}}}', param=here
            )
        names.append(_function_name(tool, here))
    return ToolChoice(mode, tuple(dict.fromkeys(names)))


def _function_name(value: dict[str, Any], at: str) -> str:
    function = value.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(
            f'{at}.function must be {{"name": ...}}, not {shown(function)}', param=f"{at}.function"
        )
    _only_keys(function, ("name",), f"{at}.function")
    name: str = function["name"]
    return name


def read_response_format(name: str, value: Any) -> AnswerSchema | None:
    """The request's `response_format`; None for any text.

    Raises:
        RequestError: 400 that names what is wrong.
    """
    if not isinstance(value, dict):
        raise RequestError(f"{name} must be an object, not {kind(value)}", param=name)
    type_ = value.get("type")
    if type_ not in ("text", "json_object", "json_schema"):
        raise RequestError(
            f"{name}.type is {shown(type_)}: send 'text', 'json_object' or 'json_schema'",
            param=f"{name}.type",
        )
    _only_keys(value, ("type", "json_schema") if type_ == "json_schema" else ("type",), name)
    if type_ == "text":
        return None
    if type_ == "json_object":
        return AnswerSchema({"type": "object"}, name)
    at = f"{name}.json_schema"
    form = value.get("json_schema")
    if not isinstance(form, dict):
        raise RequestError(f"{at} must be an object, not {kind(form)}", param=at)
    _only_keys(form, ("name", "schema", "strict", "description"), at)
    if not isinstance(form.get("name"), str) or not form["name"]:
        raise RequestError(f"{at}.name must be a string that is not empty", param=f"{at}.name")
    if not isinstance(form.get("schema"), dict):
        raise RequestError(
            f"{at}.schema must be an object, not {kind(form.get('schema'))}", param=f"{at}.schema"
        )
    for key, wanted, words in (
        ("strict", bool, "true or false"),
        ("description", str, "a string"),
    ):
        if not isinstance(form.get(key), wanted | None):
            raise RequestError(
                f"{at}.{key} must be {words}, not {kind(form[key])}", param=f"{at}.{key}"
            )
    return AnswerSchema(form["schema"], f"{at}.schema")


def _only_keys(value: dict[str, Any], known: Sequence[str], at: str) -> None:
    for key, item in value.items():
        if key not in known and item is not None:
            raise RequestError(
                f"{at}.{key} is not a field of it ({', '.join(known)}): leave it out",
                param=f"{at}.{key}",
            )


# JSON on one line, with or without a space behind commas and colons. More white space is never
# needed, and a small model could go on with it for ever.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}


def json_schema(schema: dict[str, Any], field: str) -> str:
    """A JSON schema as it stands in a grammar behind `%json`, known to be one that compiles.

    Raises:
        RequestError: 400 that names `field`, with the library's message.
    """
    text = json.dumps({**schema, "x-guidance": _SPACING})
    problem = _schema_problem(text)
    if problem is not None:
        raise RequestError(
            f"{field} cannot be made a grammar: {problem}; simplify the schema", param=field
        )
    return text


@lru_cache(maxsize=1024)
def _schema_problem(schema: str) -> str | None:
    """Why a JSON schema cannot be made a grammar; None where it can."""
    from llguidance import LLMatcher  # here: a process that only reads requests needs none

    failed, messages = LLMatcher.validate_grammar_with_warnings(f"start: %json {schema}")
    return messages[0].split("\n<")[0].strip()[:300] if failed else None
