"""The grammar of Qwen3-Coder's and Qwen3.5's form, whose parameters have a tag each.

    <tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n</tool_call>

The parser types a value by the schema, so a value is written as its type wants it: text as it is, a
word of an enumeration, and JSON for everything else. Parameters come in the order of the schema.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tuner.gateway.constraints import json_schema
from tuner.gateway.errors import RequestError, shown
from tuner.gateway.grammar_rules import CallableTool, Calls, Rules, literal
from tuner.gateway.parsing.qwen3_xml import types_of

_END = "\n</parameter>\n"
# What a string's schema may say without constraining its text.
_HARMLESS = {"type", "title", "description", "default", "examples", "anyOf", "oneOf"}
_SHARED = ("$defs", "definitions")


def qwen3_xml(rules: Rules, tools: Sequence[CallableTool], several: bool) -> Calls:
    """One block for each call, a newline between two."""
    begin, end, line = rules.tag("<tool_call>"), rules.tag("</tool_call>"), literal("\n")
    bodies = [_function(rules, tool) for tool in tools]
    call = rules.add("call", " | ".join(bodies))
    rest = f"{line} {call} {line} {end}"
    if several:
        rest += f" ({line} {begin} {rest})*"
    rules.add("calls", rest)
    return Calls(
        f"{begin} calls", rules.free("<tool_call>"), f"{rules.free_until('<tool_call>')} calls"
    )


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
    head = literal(f"<function={_name(tool.name, tool.field)}>\n")
    return rules.fresh("function", f'{head} {parameters} "</function>"')


def _parameter(rules: Rules, tool: CallableTool, schema: Mapping[str, Any], name: str) -> str:
    field = f"{tool.field}.properties.{name}"
    declared = schema["properties"][name]
    head = literal(f"<parameter={_name(name, field)}>\n")
    return rules.fresh("parameter", f"{head} {_value(rules, schema, declared, field)}")


def _value(rules: Rules, schema: Mapping[str, Any], declared: Any, field: str) -> str:
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
        return f"{rules.json(json_schema({**shared, **declared}, field))} {literal(_END)}"
    limits = [key for key in declared if key not in _HARMLESS]
    if limits and types:
        raise RequestError(
            f"{field}.{limits[0]} is {shown(declared[limits[0]])}: text is written as it is in "
            "this model's form of calls, and cannot be held to that; leave it out",
            param=f"{field}.{limits[0]}",
        )
    return rules.value_until(_END, "</tool_call>")


def _name(name: str, field: str) -> str:
    if ">" in name or "\n" in name:
        raise RequestError(
            f"{field}: the name {shown(name)} cannot be written in this model's form of calls, "
            "where names end at '>'",
            param=field,
        )
    return name
