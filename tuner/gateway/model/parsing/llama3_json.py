r"""Llama 3.x: JSON alone, at the beginning of the text or after a tag; several with `;` between.

    {"name": ..., "parameters": {...}}; {"name": ..., "parameters": {...}}
    <|python_tag|>{"name": ..., "parameters": {...}}

Any other object at the beginning is an answer, and content. After the tag everything is an attempt
to call: code for the built-in tools cannot be read and counts as malformed.
"""

from __future__ import annotations

import re

from tuner.gateway.model.parsing.blocks import Block, BlockForm
from tuner.gateway.model.parsing.json_text import json_call, skip_space, value_end
from tuner.gateway.model.parsing.message import ParsedToolCall
from tuner.gateway.model.parsing.scanning import Tools

_TAG = "<|python_tag|>"
_KEYS = ("parameters", "arguments")
_SEPARATOR = re.compile(r"\s*;?\s*")
# An object that cannot be read was meant as a call if it begins as one.
_ATTEMPT = re.compile(r'[\s;]*\{\s*"(?:name|type|parameters|arguments)"\s*:')


def _read(block: str, tools: Tools) -> Block:
    tagged = block.startswith(_TAG)
    calls: list[ParsedToolCall] = []
    position = end = len(_TAG) if tagged else 0
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


LLAMA3_JSON = BlockForm(openers=(_TAG,), at_start="{", read=_read)
