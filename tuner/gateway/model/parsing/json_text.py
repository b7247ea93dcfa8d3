r"""Tool calls written as JSON, read without losing the text that the model wrote.

Hermes, Qwen2.5 and Qwen3: between tags, any number of calls. The newline before a call and white
space after one belong to the form.

    <tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>

Llama 3.x: JSON alone, at the beginning of the text or after a tag; several with `;` between. Any
other object at the beginning is an answer, and content. After the tag everything is an attempt to
call: code for the built-in tools cannot be read and counts as malformed.

    {"name": ..., "parameters": {...}}; {"name": ..., "parameters": {...}}
    <|python_tag|>{"name": ..., "parameters": {...}}

Mistral: a tag, then a JSON array of calls; since tokenizer version 11, a tag for each call. Nothing
closes a call but the next tag or the end of the text. The model's own call ids are part of the
form; the gateway gives ids of its own.

    [TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]
    [TOOL_CALLS]NAME[CALL_ID]ID[ARGS]{...}[TOOL_CALLS]NAME[ARGS]{...}

DeepSeek V3 and R1, and V3.1: tags around each call and around all of them.

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME
    ```json\n{...}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>
    <｜tool▁calls▁end｜>
"""

# The bars of DeepSeek's tags are full-width, as the model writes them.
# ruff: noqa: RUF001, RUF002

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

from tuner.gateway.model.parsing.blocks import Block, BlockForm
from tuner.gateway.model.parsing.message import ParsedToolCall, Tools


def json_call(text: str, keys: Sequence[str] = ("arguments",)) -> ParsedToolCall | None:
    """The call that `text`, one JSON object, spells: its "name", and its arguments under a key.

    Arguments may also be written as a string that holds JSON.
    """
    try:
        spans = _object_spans(text)
        name = json.loads(text[slice(*spans["name"])])
        (key,) = (key for key in keys if key in spans)
        arguments = text[slice(*spans[key])]
        if arguments.startswith('"'):
            arguments = json.loads(arguments)
    except (ValueError, KeyError, RecursionError):
        return None
    if not isinstance(name, str) or not name or not is_object(arguments):
        return None
    return ParsedToolCall(name, arguments)


def is_object(text: str) -> bool:
    """Whether `text` is one JSON object."""
    try:
        return isinstance(DECODER.decode(text), dict)
    except (ValueError, RecursionError):
        return False


def value_end(text: str, start: int) -> int | None:
    """Where the JSON value that begins at `start` ends; None where there is none."""
    try:
        return DECODER.raw_decode(text, start)[1]
    except (ValueError, RecursionError):
        return None


def skip_space(text: str, position: int) -> int:
    """The first position from `position` on that is not JSON's white space."""
    match = _SPACE.match(text, position)
    return match.end() if match else position


def refuse_constant(name: str) -> Any:
    """NaN, Infinity or -Infinity, which Python's decoder would read."""
    raise ValueError(f"{name} is not a JSON number")


DECODER = json.JSONDecoder(parse_constant=refuse_constant)
_SPACE = re.compile(r"[ \t\n\r]*")


def _object_spans(text: str) -> dict[str, tuple[int, int]]:
    """Where each member's value of the JSON object `text` begins and ends.

    Raises:
        ValueError: `text` is not one JSON object, or names a member twice.
    """
    spans: dict[str, tuple[int, int]] = {}
    position = _expect(text, 0, "{")
    while text[position : position + 1] != "}":
        if spans:
            position = _expect(text, position, ",")
        key, position = DECODER.raw_decode(text, position)
        if not isinstance(key, str) or key in spans:
            raise ValueError("a member's name must be a string that occurs once")
        start = _expect(text, position, ":")
        _, position = DECODER.raw_decode(text, start)
        spans[key] = (start, position)
        position = skip_space(text, position)
    if skip_space(text, position + 1) != len(text):
        raise ValueError("text after the object")
    return spans


def _expect(text: str, position: int, character: str) -> int:
    position = skip_space(text, position)
    if text[position : position + 1] != character:
        raise ValueError(f"expected {character!r}")
    return skip_space(text, position + 1)


_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


def _read_hermes(block: str, tools: Tools) -> Block:
    if not block.endswith(_CLOSE):
        return Block.of(None, block)
    return Block.of(json_call(block[len(_OPEN) : -len(_CLOSE)].strip()), block)


HERMES = BlockForm(openers=(_OPEN,), closers=(_CLOSE,), line_ends=1, read=_read_hermes)


_PYTHON_TAG = "<|python_tag|>"
_KEYS = ("parameters", "arguments")
_SEPARATOR = re.compile(r"\s*;?\s*")
# An object that cannot be read was meant as a call if it begins as one.
_ATTEMPT = re.compile(r'[\s;]*\{\s*"(?:name|type|parameters|arguments)"\s*:')


def _read_llama3(block: str, tools: Tools) -> Block:
    tagged = block.startswith(_PYTHON_TAG)
    calls: list[ParsedToolCall] = []
    position = end = len(_PYTHON_TAG) if tagged else 0
    while (stop := value_end(block, start := skip_space(block, position))) is not None:
        call = json_call(block[start:stop], _KEYS)
        if call is None:
            break
        calls.append(call)
        end = stop
        separator = _SEPARATOR.match(block, stop)
        position = separator.end() if separator else stop
    if not calls:
        return Block((), block, int(tagged or _is_attempt(block)))
    rest = block[end:]
    if _SEPARATOR.fullmatch(rest):
        return Block(tuple(calls), "", 0)
    return Block(tuple(calls), rest, int(_is_attempt(rest)))


def _is_attempt(text: str) -> bool:
    match = _ATTEMPT.match(text)
    if match is None:
        return False
    start = text.index("{")
    stop = value_end(text, start)
    # A whole object without parameters is no call: people have names, too.
    return stop is None or any(f'"{key}"' in text[start:stop] for key in _KEYS)


LLAMA3_JSON = BlockForm(openers=(_PYTHON_TAG,), at_start="{", read=_read_llama3)


_TOOL_CALLS = "[TOOL_CALLS]"
_NAMED = re.compile(r"\s*([^\s\[\]{}]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?\s*(?=\{)")


def _read_mistral(block: str, tools: Tools) -> Block:
    named = _NAMED.match(block, len(_TOOL_CALLS))
    if named:
        end = value_end(block, named.end())
        if end is None or not is_object(block[named.end() : end]):
            return Block.of(None, block)
        return Block((ParsedToolCall(named[1], block[named.end() : end]),), block[end:], 0)
    return _read_array(block)


def _read_array(block: str) -> Block:
    calls: list[ParsedToolCall] = []
    position = skip_space(block, len(_TOOL_CALLS))
    read = position  # up to where all was read
    if block[position : position + 1] != "[":
        return Block.of(None, block)
    while True:
        start = skip_space(block, position + 1)
        end = value_end(block, start)
        call = json_call(block[start:end]) if end is not None else None
        if call is None or end is None:
            break
        position = skip_space(block, end)
        following = block[position : position + 1]
        if following not in (",", "]"):
            break
        calls.append(call)
        read = end
        if following == "]":
            return Block(tuple(calls), block[position + 1 :], 0)
    return Block(tuple(calls), block[read:], 1) if calls else Block.of(None, block)


MISTRAL = BlockForm(openers=(_TOOL_CALLS,), read=_read_mistral)


CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
_BEFORE = rf"(?:{CALLS}\s*)?{CALL}\s*"
_V3 = re.compile(
    rf"{_BEFORE}function{SEPARATOR}([^\n]+)\n```json\s*\n(.*)\n\s*```\s*{CALL_END}", re.DOTALL
)
_V31 = re.compile(rf"{_BEFORE}([^\n]+?){SEPARATOR}(.*){CALL_END}", re.DOTALL)


def _read_deepseek(pattern: re.Pattern[str], block: str, tools: Tools) -> Block:
    match = pattern.fullmatch(block)
    if match is None:
        return Block.of(None, block)
    name, arguments = match[1].strip(), match[2].strip()
    readable = name and is_object(arguments)
    return Block.of(ParsedToolCall(name, arguments) if readable else None, block)


def _deepseek(pattern: re.Pattern[str]) -> BlockForm:
    return BlockForm(
        openers=(CALL,),
        closers=(CALL_END,),
        wrapper=CALLS,
        tail=CALLS_END,
        read=partial(_read_deepseek, pattern),
    )


DEEPSEEK_V3 = _deepseek(_V3)
DEEPSEEK_V31 = _deepseek(_V31)
