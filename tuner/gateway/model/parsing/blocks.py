"""Tool calls between tags, found in text as it comes."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from tuner.gateway.model.parsing.message import Delta, ParsedToolCall, Tools, begun


@dataclass(frozen=True)
class Block:
    """What one block spells.

    Attributes:
        calls: Its well-formed calls, in order.
        rest: What stays content: the text after the calls, or the whole block if it has none.
        malformed: Calls in it that could not be read.
    """

    calls: tuple[ParsedToolCall, ...]
    rest: str
    malformed: int

    @classmethod
    def of(cls, call: ParsedToolCall | None, block: str) -> Block:
        """A block that is one call, or a malformed one."""
        return cls((call,), "", 0) if call else cls((), block, 1)


@dataclass(frozen=True)
class BlockForm:
    r"""How a family writes calls into its text.

        Let me see.\n<tool_call>\n{"name": ...}\n</tool_call>\n
                   ^^----------- block -----------^^^^^^^^^^^^

    Attributes:
        openers: A block begins with one of these.
        read: The block's text from its opener on, and the tools, to what it spells.
        closers: A block ends after one of these, or before one of `cuts`, or with the text.
        cuts: By default, the openers.
        line_ends: How many line ends before a block belong to the form.
        wrapper: An opener that may stand before the first one, around several blocks.
        tail: The wrapper's end.
        at_start: An opener at the very beginning of the text alone, after any white space.
    """

    openers: tuple[str, ...]
    read: Callable[[str, Tools], Block]
    closers: tuple[str, ...] = ()
    cuts: tuple[str, ...] = ()
    line_ends: int = 0
    wrapper: str = ""
    tail: str = ""
    at_start: str = ""

    def scanner(self, tools: Tools) -> BlockScanner:
        return BlockScanner(self, tools)


class BlockScanner:
    """Finds the blocks of one text.

    White space after a call belongs to the form unless words follow it.
    """

    def __init__(self, form: BlockForm, tools: Tools) -> None:
        self.malformed = 0
        self._form = form
        self._tools = tools
        self._openers = (*form.openers, *((form.wrapper,) if form.wrapper else ()))
        self._opener = _any_of(self._openers)
        cuts = form.cuts or self._openers
        closing = f"(?:{_any_of(form.closers).pattern})|" if form.closers else ""
        self._boundary = re.compile(f"{closing}(?={_any_of(cuts).pattern})")
        self._longest = max(map(len, (*form.closers, *cuts)))
        self._text = ""  # what nothing was said of yet
        self._open: int | None = None  # where in it a block begins
        self._searched = 0  # up to where in it the block does not end
        self._started = not form.at_start
        self._calls = 0
        self._after_call: str | None = None  # white space since the last call
        self._tail = ""  # what of the tail may still follow

    def feed(self, text: str) -> list[Delta]:
        self._text += text
        return self._scan(final=False)

    def close(self) -> list[Delta]:
        deltas = self._scan(final=True)
        if self._after_call is not None and self._after_call.strip():
            deltas.append(Delta(content=self._after_call))
        return deltas

    def _scan(self, *, final: bool) -> list[Delta]:
        deltas: list[Delta] = []
        while self._find_block(deltas, final=final):
            assert self._open is not None
            end = self._block_end(self._open, final=final)
            if end is None:
                break
            block = self._form.read(self._text[self._open : end], self._tools)
            self.malformed += block.malformed
            if block.calls:
                self._say_calls(block.calls, deltas)
                self._say(block.rest, deltas)
            else:
                self._say(self._text[:end], deltas)
            self._text = self._text[end:]
            self._open = None
        return deltas

    def _find_block(self, deltas: list[Delta], *, final: bool) -> bool:
        """Whether a block begins in the text; what comes before it is said."""
        if self._open is not None:
            return True
        if not self._started and not self._find_start(final=final):
            return False
        if self._open is None:
            match = self._opener.search(self._text)
            end = match.start() if match else len(self._text)
            if match is None and not final:
                end = begun(self._text, self._openers)
            lead = end
            if match or not final:
                while lead and end - lead < self._form.line_ends and self._text[lead - 1] == "\n":
                    lead -= 1
            self._say(self._text[:lead], deltas)
            self._text = self._text[lead:]
            if match is None:
                return False
            self._open = end - lead
        self._searched = 0
        return True

    def _find_start(self, *, final: bool) -> bool:
        """Whether it is known what the text begins with."""
        body = self._text.lstrip()
        if body.startswith(self._form.at_start):
            self._open = 0
        elif self._form.at_start.startswith(body) and not final:
            return False
        self._started = True
        return True

    def _block_end(self, start: int, *, final: bool) -> int | None:
        begin = start
        opener = self._opener.match(self._text, start)
        if opener:
            begin = opener.end()
            if opener[0] == self._form.wrapper:
                inner = _after_space(self._text, begin)
                found = [tag for tag in self._form.openers if self._text.startswith(tag, inner)]
                if found:
                    begin = inner + len(found[0])
        match = self._boundary.search(self._text, max(begin, self._searched))
        if match:
            return match.end()
        if final:
            return len(self._text)
        self._searched = len(self._text) - self._longest + 1
        return None

    def _say_calls(self, calls: tuple[ParsedToolCall, ...], deltas: list[Delta]) -> None:
        if self._after_call is not None and self._after_call.strip():
            deltas.append(Delta(content=self._after_call))
        for call in calls:
            deltas.append(Delta(tool_call=(self._calls, call)))
            self._calls += 1
        self._after_call = ""
        self._tail = self._form.tail

    def _say(self, text: str, deltas: list[Delta]) -> None:
        if self._after_call is not None:
            self._after_call = text = self._after_call + text
            body = text.lstrip()
            if self._tail and body.startswith(self._tail):
                self._after_call = body.removeprefix(self._tail)
                self._tail = ""
                self._say("", deltas)
                return
            if not body or self._tail.startswith(body):
                return
            self._after_call = None
        if text:
            deltas.append(Delta(content=text))


def _any_of(tags: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, tags)))


def _after_space(text: str, position: int) -> int:
    return len(text) - len(text[position:].lstrip())
