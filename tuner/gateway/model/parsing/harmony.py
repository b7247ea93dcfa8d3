r"""GPT-OSS's harmony: a completion is several messages, each with a channel.

    <|channel|>analysis<|message|>…<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME
        <|constrain|>json<|message|>{…}<|call|>
    <|start|>assistant<|channel|>final<|message|>…<|return|>

The reasoning parser takes the messages apart: analysis is reasoning; final, and commentary to
nobody, are content. Messages to somebody go on as they are, to the tool-call parser, and so does
what is no message. A newline stands between two messages of one kind. The recipient may also stand
before the channel, where the template writes it.

The library openai-harmony serves for ids of its own vocabulary alone, which it downloads, not for a
completion's text.
"""

from __future__ import annotations

import re

from tuner.gateway.model.parsing.blocks import Block, BlockForm
from tuner.gateway.model.parsing.json_text import is_object
from tuner.gateway.model.parsing.message import Delta, ParsedToolCall, Tools, begun

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
ANALYSIS = f"{_CHANNEL}analysis{_MESSAGE}"

_HEADER = re.compile(
    r"\s*(?:<\|start\|>assistant)?\s*(?:to=(?P<before>[^\s<]+)\s*)?"
    r"<\|channel\|>(?P<channel>\w+)\s*(?:to=(?P<after>[^\s<]+)\s*)?"
    r"(?:<\|constrain\|>)?\s*\w*\s*<\|message\|>"
)
_CLOSING = re.compile("|".join(map(re.escape, (*_ENDS, _START))))
_IN_HEADER = re.compile("|".join(map(re.escape, (_MESSAGE, *_ENDS, _START))))
_BEGINNINGS = (_START, _CHANNEL, "to=")
_FUNCTION = "functions."


class HarmonyScanner:
    """Splits one text into messages; see the module.

    Args:
        opened: Whether the prompt ended with the header of an analysis message.
    """

    malformed = 0

    def __init__(self, opened: bool) -> None:
        self._text = ""
        self._state = "analysis" if opened else "header"
        self._kinds: set[str] = set()  # of the messages so far
        self._first = opened  # its state is not said yet
        self._searched = 0  # up to where a header holds no tag

    def feed(self, text: str) -> list[Delta]:
        self._text += text
        return self._scan(final=False)

    def close(self) -> list[Delta]:
        deltas = self._scan(final=True)
        if self._text:
            deltas.append(Delta(content=self._text))
        return deltas

    def _scan(self, *, final: bool) -> list[Delta]:
        deltas: list[Delta] = []
        if self._first:
            self._enter("analysis", deltas)
            self._first = False
        steps = {"header": self._header, "between": self._between}
        while steps.get(self._state, self._body)(deltas, final=final):
            pass
        return deltas

    def _enter(self, kind: str, deltas: list[Delta]) -> None:
        """Go on with the words of a message; an empty piece of reasoning says that there is any."""
        again = kind in self._kinds
        if kind == "analysis":
            deltas.append(Delta(reasoning="\n" if again else ""))
        elif kind == "plain" and again:
            deltas.append(Delta(content="\n"))
        self._kinds.add(kind)
        self._state = kind

    def _header(self, deltas: list[Delta], *, final: bool) -> bool:
        body = self._text.lstrip()
        if not body.startswith(_BEGINNINGS):
            if not final and any(tag.startswith(body) for tag in _BEGINNINGS):
                return False
            self._enter("raw", deltas)
            return True
        # A header may begin with the tag that would end it.
        first = len(self._text) - len(body) + 1
        tag = _IN_HEADER.search(self._text, max(first, self._searched))
        if tag is None:
            self._searched = len(self._text) - len(_MESSAGE) + 1
            return False
        self._searched = 0
        header = _HEADER.fullmatch(self._text, 0, tag.end())
        kind = "raw"
        if header and not header["before"] and not header["after"]:
            kinds = {"analysis": "analysis", "final": "plain", "commentary": "plain"}
            kind = kinds.get(header["channel"], "raw")
        self._enter(kind, deltas)
        end = tag.end() if tag[0] == _MESSAGE else tag.start()
        if kind == "raw":
            deltas.append(Delta(content=self._text[:end]))
        self._text = self._text[end:]
        return True

    def _body(self, deltas: list[Delta], *, final: bool) -> bool:
        end = _CLOSING.search(self._text)
        kept = len(self._text) if final else begun(self._text, (*_ENDS, _START))
        if end:
            raw_end = self._state == "raw" and end[0] != _START
            kept = end.end() if raw_end else end.start()
        if kept:
            text = self._text[:kept]
            reasoning = self._state == "analysis"
            deltas.append(Delta(reasoning=text) if reasoning else Delta(content=text))
        if end is None:
            self._text = self._text[kept:]
            return False
        self._text = self._text[end.start() if end[0] == _START else end.end() :]
        self._state = "between"
        return True

    def _between(self, deltas: list[Delta], *, final: bool) -> bool:
        if self._text.startswith(_START):
            self._state = "header"
        elif _START.startswith(self._text) and not (final and self._text):
            return False
        else:
            self._enter("raw", deltas)
        return True


def _read(block: str, tools: Tools) -> Block:
    header = _HEADER.match(block)
    if header is None:
        return Block.of(None, block)
    recipient = header["before"] or header["after"]
    if recipient is None:
        return Block((), block, 0)
    arguments = block[header.end() :]
    for end in _ENDS:
        arguments = arguments.removesuffix(end)
    arguments = arguments.strip()
    name = recipient.removeprefix(_FUNCTION)
    readable = recipient.startswith(_FUNCTION) and name and is_object(arguments)
    return Block.of(ParsedToolCall(name, arguments) if readable else None, block)


HARMONY = BlockForm(
    openers=(f"{_START}assistant", _CHANNEL),
    closers=_ENDS,
    cuts=(_START,),
    at_start="to=",
    read=_read,
)
