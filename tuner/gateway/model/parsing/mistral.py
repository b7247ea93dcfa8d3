r"""Mistral: a tag, then a JSON array of calls; since tokenizer version 11, a tag for each call.

    [TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]
    [TOOL_CALLS]NAME[CALL_ID]ID[ARGS]{...}[TOOL_CALLS]NAME[ARGS]{...}

Nothing closes a call but the next tag or the end of the text. The model's own call ids are part of
the form; the gateway gives ids of its own.
"""

from __future__ import annotations

import re

from tuner.gateway.model.parsing.blocks import Block, BlockForm
from tuner.gateway.model.parsing.json_text import is_object, json_call, skip_space, value_end
from tuner.gateway.model.parsing.message import ParsedToolCall
from tuner.gateway.model.parsing.scanning import Tools

_TAG = "[TOOL_CALLS]"
_NAMED = re.compile(r"\s*([^\s\[\]{}]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?\s*(?=\{)")


def _read(block: str, tools: Tools) -> Block:
    named = _NAMED.match(block, len(_TAG))
    if named:
        end = value_end(block, named.end())
        if end is None or not is_object(block[named.end() : end]):
            return Block.of(None, block)
        return Block((ParsedToolCall(named[1], block[named.end() : end]),), block[end:], 0)
    return _read_array(block)


def _read_array(block: str) -> Block:
    calls: list[ParsedToolCall] = []
    position = skip_space(block, len(_TAG))
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


MISTRAL = BlockForm(openers=(_TAG,), read=_read)
