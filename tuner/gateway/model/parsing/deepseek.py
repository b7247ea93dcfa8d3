r"""DeepSeek: tags around each call and around all of them.

V3, R1   <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME
         ```json\n{...}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>
V3.1     <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>
         <｜tool▁calls▁end｜>
"""

# The bars of the tags are full-width, as the model writes them.
# ruff: noqa: RUF001, RUF002

from __future__ import annotations

import re
from collections.abc import Callable

from tuner.gateway.model.parsing.blocks import Block, BlockForm
from tuner.gateway.model.parsing.json_text import is_object
from tuner.gateway.model.parsing.message import ParsedToolCall
from tuner.gateway.model.parsing.scanning import Tools

_BEGIN, _END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_ALL_BEGIN, _ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_BEFORE = rf"(?:{_ALL_BEGIN}\s*)?{_BEGIN}\s*"
_V3 = re.compile(
    rf"{_BEFORE}function<｜tool▁sep｜>([^\n]+)\n```json\s*\n(.*)\n\s*```\s*{_END}", re.DOTALL
)
_V31 = re.compile(rf"{_BEFORE}([^\n]+?)<｜tool▁sep｜>(.*){_END}", re.DOTALL)


def _reader(pattern: re.Pattern[str]) -> Callable[[str, Tools], Block]:
    def read(block: str, tools: Tools) -> Block:
        match = pattern.fullmatch(block)
        if match is None:
            return Block.of(None, block)
        name, arguments = match[1].strip(), match[2].strip()
        readable = name and is_object(arguments)
        return Block.of(ParsedToolCall(name, arguments) if readable else None, block)

    return read


def _form(pattern: re.Pattern[str]) -> BlockForm:
    return BlockForm(
        openers=(_BEGIN,),
        closers=(_END,),
        wrapper=_ALL_BEGIN,
        tail=_ALL_END,
        read=_reader(pattern),
    )


DEEPSEEK_V3 = _form(_V3)
DEEPSEEK_V31 = _form(_V31)
