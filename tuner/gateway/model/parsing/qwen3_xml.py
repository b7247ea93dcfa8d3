r"""Qwen3-Coder and Qwen3.5: one tag for each parameter.

    <tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n</tool_call>

The form has no types, so a value is read as the tool's JSON schema types it, and as text where the
schema does not know it or the value is none of its types. Templates write Python's True, False and
None. Up to two newlines before a call belong to the form.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from tuner.gateway.model.parsing.blocks import Block, BlockForm
from tuner.gateway.model.parsing.json_text import DECODER
from tuner.gateway.model.parsing.message import ParsedToolCall, Tools

_CALL = re.compile(r"<tool_call>\s*<function=([^>\n]+)>(.*)</function>\s*</tool_call>", re.DOTALL)
# A value may itself hold a closing tag: the right one is followed by a parameter or the end.
_PARAMETER = re.compile(
    r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=|\Z))", re.DOTALL
)
_PYTHON = {"True": "true", "False": "false", "None": "null"}


def _read(block: str, tools: Tools) -> Block:
    match = _CALL.fullmatch(block)
    return Block.of(_call(match[1].strip(), match[2], tools) if match else None, block)


def _call(name: str, body: str, tools: Tools) -> ParsedToolCall | None:
    schema = _parameters(name, tools)
    values: dict[str, str] = {}
    position = 0
    while match := _PARAMETER.match(body, position):
        key = match[1].strip()
        if key in values:
            return None
        values[key] = _json_value(match[2], types_of(_property(schema, key), schema))
        position = match.end()
    if not name or body[position:].strip():
        return None
    members = (f"{json.dumps(key, ensure_ascii=False)}: {text}" for key, text in values.items())
    return ParsedToolCall(name, "{" + ", ".join(members) + "}")


def _parameters(name: str, tools: Tools) -> Mapping[str, Any]:
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, Mapping) and function.get("name") == name:
            return _mapping(function.get("parameters"))
    return {}


def _property(schema: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    return _mapping(_mapping(schema.get("properties")).get(key))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def types_of(schema: Mapping[str, Any], root: Mapping[str, Any], depth: int = 0) -> set[str]:
    """The JSON types that a schema allows; none where it does not say."""
    found: set[str] = set()
    declared = schema.get("type")
    if isinstance(declared, str):
        found.add(declared)
    elif isinstance(declared, list):
        found.update(item for item in declared if isinstance(item, str))
    elif isinstance(schema.get("enum"), list):
        found.update(_type_of(item) for item in schema["enum"])
    elif "const" in schema:
        found.add(_type_of(schema["const"]))
    if depth > 8:  # a schema may refer to itself
        return found
    for several in ("anyOf", "oneOf", "allOf"):
        for inner in schema.get(several) or ():
            found |= types_of(_mapping(inner), root, depth + 1)
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target: Any = root
        for part in reference[2:].split("/"):
            target = _mapping(target).get(part)
        found |= types_of(_mapping(target), root, depth + 1)
    return found


def _type_of(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return "integer"
    names = {float: "number", str: "string", list: "array", dict: "object"}
    return names[type(value)]


def _json_value(text: str, types: set[str]) -> str:
    """The value as JSON text: the model's own where it is of an allowed type, else a string."""
    written = text.strip()
    written = _PYTHON.get(written, written)
    try:
        found = _type_of(DECODER.decode(written))
    except (ValueError, RecursionError):
        found = "string"
    if found != "string" and (found in types or (found == "integer" and "number" in types)):
        return written
    return json.dumps(text, ensure_ascii=False)


QWEN3_XML = BlockForm(openers=("<tool_call>",), closers=("</tool_call>",), line_ends=2, read=_read)
