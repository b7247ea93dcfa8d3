r"""Hermes, Qwen2.5 and Qwen3: JSON between tags, any number of calls.

    <tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>

The newline before a call and white space after one belong to the form.
"""

from __future__ import annotations

from tuner.gateway.model.parsing.blocks import Block, BlockForm
from tuner.gateway.model.parsing.json_text import json_call
from tuner.gateway.model.parsing.scanning import Tools

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


def _read(block: str, tools: Tools) -> Block:
    if not block.endswith(_CLOSE):
        return Block.of(None, block)
    return Block.of(json_call(block[len(_OPEN) : -len(_CLOSE)].strip()), block)


HERMES = BlockForm(openers=(_OPEN,), closers=(_CLOSE,), line_ends=1, read=_read)
