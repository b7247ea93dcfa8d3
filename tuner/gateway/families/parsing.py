"""Parsing reasoning and tool calls from a completion's text, in the format of the model's family.

Nothing is invented and nothing lost: what is not a well-formed call stays in the content and is
counted. No library does this. Transformers' response templates (`tokenizer.parse_response`) return
decoded arguments, which differ from the model's text, raise on a malformed call and drop a
truncated one. `renderers` (PyPI) decodes arguments, strips the content, drops text after a call,
and reads whole completions only. vLLM's parsers come with vLLM only, and do not count what they
cannot read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from tuner.gateway.families.forms import (
    ATEM,
    FORMS,
    CallForm,
    ParsedToolCall,
    ToolCallBlock,
    Tools,
)
from tuner.gateway.families.literals import is_object

# The parts of a completion: reasoning, content and tool calls; and the scanners that find them.
#
# All scanners take text as it arrives and return what is certain. A whole message is parsed by a
# scanner that gets all of its text at once, so a streamed message equals the final one.


@dataclass(frozen=True)
class ParsedMessage:
    """The parts of a completion.

    Attributes:
        content: Text outside reasoning and well-formed tool calls; None if there is none besides
            them.
        reasoning: Text of the reasoning, or None if the model did not reason.
        tool_calls: Well-formed calls in the order written.
        malformed_tool_calls: Number of calls that could not be parsed; their text is in `content`.
    """

    content: str | None
    reasoning: str | None = None
    tool_calls: tuple[ParsedToolCall, ...] = ()
    malformed_tool_calls: int = 0


@dataclass(frozen=True)
class Delta:
    """The next piece of a message; exactly one field is set.

    Attributes:
        reasoning, content: Text that continues the last piece of its kind.
        tool_call: Index of a call in the message, and the whole call.
    """

    reasoning: str | None = None
    content: str | None = None
    tool_call: tuple[int, ParsedToolCall] | None = None


def joined(deltas: Iterable[Delta], malformed: int) -> ParsedMessage:
    """The message of all its pieces; an empty piece of reasoning says that there was some."""
    reasoning: list[str] = []
    content: list[str] = []
    calls: list[ParsedToolCall] = []
    for delta in deltas:
        if delta.reasoning is not None:
            reasoning.append(delta.reasoning)
        if delta.content is not None:
            content.append(delta.content)
        if delta.tool_call is not None:
            calls.append(delta.tool_call[1])
    text = "".join(content)
    return ParsedMessage(
        content=text if text or not (calls or reasoning) else None,
        reasoning="".join(reasoning) if reasoning else None,
        tool_calls=tuple(calls),
        malformed_tool_calls=malformed,
    )


class Scanner(Protocol):
    """Parses one text; the result does not depend on where the text was cut into pieces.

    Attributes:
        malformed: Calls that could not be parsed so far.
    """

    @property
    def malformed(self) -> int: ...

    def feed(self, text: str) -> list[Delta]:
        """Take the next piece of text; returns what has become certain."""
        ...

    def close(self) -> list[Delta]:
        """The rest, after the text has ended."""
        ...


def read(scanner: Scanner, text: str) -> ParsedMessage:
    """Parse a whole text."""
    deltas = [*scanner.feed(text), *scanner.close()]
    return joined(deltas, scanner.malformed)


def begun(text: str, tags: Sequence[str]) -> int:
    """Start of the first of the tags that may be cut off at the end of `text`; otherwise its
    length."""
    longest = max(map(len, tags), default=0)
    for position in range(max(0, len(text) - longest + 1), len(text)):
        if any(tag.startswith(text[position:]) for tag in tags):
            return position
    return len(text)


class PlainText:
    """All text is content."""

    malformed = 0

    def feed(self, text: str) -> list[Delta]:
        return [Delta(content=text)] if text else []

    def close(self) -> list[Delta]:
        return []


# Reasoning between two tags at the beginning of the text.
#
#     <think>\nreasoning\n</think>\n\ncontent
#
# Text that ends inside the tags is all reasoning. If the prompt has opened it, the text begins
# inside and may still repeat the opening tag. A tag anywhere else is content.


@dataclass(frozen=True)
class TagForm:
    """The tags of a family.

    Attributes:
        line_ends: Whether newlines around the tags belong to the format.
        answer: Tags around the content; without the first one the content begins at once.
        end: What stands at the very end of the text.
    """

    opener: str
    closer: str
    line_ends: bool = True
    answer: tuple[str, str] = ("", "")
    end: str = ""

    def scanner(self, opened: bool) -> TagScanner:
        return TagScanner(self, opened)


class TagScanner:
    """Splits one text into reasoning and content."""

    malformed = 0

    def __init__(self, form: TagForm, opened: bool) -> None:
        self._form = form
        self._opened = opened
        self._state = "start"
        self._text = ""
        self._trimming = False  # newlines at this place belong to the format
        self._before_answer, self._in_answer = map(bool, form.answer)

    def feed(self, text: str) -> list[Delta]:
        self._text += text
        return self._scan(final=False)

    def close(self) -> list[Delta]:
        return self._scan(final=True)

    def _scan(self, *, final: bool) -> list[Delta]:
        deltas: list[Delta] = []
        if self._state == "start" and self._begin(final=final) and self._state == "reasoning":
            deltas.append(Delta(reasoning=""))
        if self._state == "reasoning":
            self._reason(deltas, final=final)
        if self._state == "content":
            self._trim()
            self._answer(deltas, final=final)
        return deltas

    def _answer(self, deltas: list[Delta], *, final: bool) -> None:
        """Content without the tags around it."""
        opener, closer = self._form.answer
        if self._before_answer:
            body = self._text.lstrip()
            if opener.startswith(body) and body != opener and not final:
                return
            if body.startswith(opener):
                self._text = body.removeprefix(opener)
            self._before_answer = False
        if self._in_answer:
            text, closed, rest = self._text.partition(closer)
            kept = len(text) if closed or final else begun(text, (closer,))
            if text[:kept]:
                deltas.append(Delta(content=text[:kept]))
            self._text = rest if closed else text[kept:]
            self._in_answer = not closed
        if not self._in_answer:
            end = self._form.end
            kept = len(self._text) if final or not end else begun(self._text, (end,))
            if end and self._text.endswith(end):
                kept = len(self._text) - len(end)
            if self._text[:kept]:
                deltas.append(Delta(content=self._text[:kept]))
            self._text = self._text[kept:]

    def _begin(self, *, final: bool) -> bool:
        body = self._text.lstrip()
        if body.startswith(self._form.opener):
            self._state = "reasoning"
            self._text = body.removeprefix(self._form.opener)
        elif self._form.opener.startswith(body) and not final:
            return False
        else:
            self._state = "reasoning" if self._opened else "content"
        self._trimming = self._form.line_ends and self._state == "reasoning"
        return True

    def _reason(self, deltas: list[Delta], *, final: bool) -> None:
        self._trim()
        text, closed, rest = self._text.partition(self._form.closer)
        kept = len(text) if closed or final else begun(text, (self._form.closer,))
        if self._form.line_ends:
            kept = len(text[:kept].rstrip("\n"))
        if kept:
            deltas.append(Delta(reasoning=text[:kept]))
        if closed:
            self._state = "content"
            self._text = rest
            self._trimming = self._form.line_ends
        else:
            self._text = "" if final else text[kept:]

    def _trim(self) -> None:
        if self._trimming:
            self._text = self._text.lstrip("\n")
            self._trimming = not self._text


_THINK = TagForm("<think>", "</think>", line_ends=True)
TAG_FORMS = {
    "deepseek_r1": _THINK,
    "deepseek_v3": _THINK,
    "qwen3": _THINK,
    "mistral": TagForm("[THINK]", "[/THINK]", line_ends=False),
    "seed_oss": TagForm("<seed:think>", "</seed:think>"),
    "minimax_m3": TagForm("<mm:think>", "</mm:think>"),
    "hy_v3": TagForm("<think:opensource>", "</think:opensource>"),
    "hunyuan_a13b": TagForm("<think>", "</think>", answer=("<answer>\n", "\n</answer>")),
    "gemma4": TagForm("<|channel>thought\n", "<channel|>"),
    "cohere_command3": TagForm(
        "<|START_THINKING|>", "<|END_THINKING|>", answer=("<|START_RESPONSE|>", "<|END_RESPONSE|>")
    ),
    "kimi_k3": TagForm(
        "<|open|>think<|sep|>",
        "<|close|>think<|sep|>",
        line_ends=False,
        answer=("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
        end="<|close|>message<|sep|>",
    ),
    "solar": TagForm(
        "<|think|>", "<|end|><|begin|>assistant", line_ends=False, answer=("<|content|>", "")
    ),
    "apertus": TagForm("<|inner_prefix|>", "<|inner_suffix|>", line_ends=False),
    "granite": TagForm("Here is my thought process:", "Here is my response:"),
}
"""By the names of the reasoning parsers."""


# Tool calls between tags, found in text as it arrives.


@dataclass(frozen=True)
class ToolCallForm:
    r"""How a family writes calls into its text.

        Let me see.\n<tool_call>\n{"name": ...}\n</tool_call>\n
                   ^^----------- block -----------^^^^^^^^^^^^

    Attributes:
        openers: A block begins with one of these.
        read: Parses the block's text from its opener on, given the tools.
        closers: A block ends after one of these, or before one of `cuts`, or with the text.
        cuts: By default, the openers.
        line_ends: Number of line ends before a block that belong to the format.
        wrapper: An opener that may precede the first block, around several blocks.
        tail: The wrapper's end.
        at_start: An opener that counts only at the beginning of the text, after any white space.
        strings: Tags inside JSON's strings end no block.
    """

    openers: tuple[str, ...]
    read: Callable[[str, Tools], ToolCallBlock]
    closers: tuple[str, ...] = ()
    cuts: tuple[str, ...] = ()
    line_ends: int = 0
    wrapper: str = ""
    tail: str = ""
    at_start: str = ""
    strings: bool = False

    @classmethod
    def of(cls, form: CallForm) -> ToolCallForm:
        """The blocks of a row of the table."""
        return cls(
            openers=(form.opener, *form.other_openers),
            read=form.read,
            closers=(form.closer,) if form.closer else (),
            line_ends=form.lead,
            wrapper=form.section[0].strip(),
            tail=form.section[1].strip(),
            at_start=form.start,
            strings=form.holds_json,
        )

    def scanner(self, tools: Tools) -> ToolCallScanner:
        return ToolCallScanner(self, tools)


class ToolCallScanner:
    """Finds the blocks of one text.

    White space after a call belongs to the format unless words follow it.
    """

    def __init__(self, form: ToolCallForm, tools: Tools) -> None:
        self.malformed = 0
        self._form = form
        self._tools = tools
        self._openers = (*form.openers, *((form.wrapper,) if form.wrapper else ()))
        self._opener = _any_of(self._openers)
        cuts = form.cuts or self._openers
        closing = f"(?:{_any_of(form.closers).pattern})|" if form.closers else ""
        string = r'"(?:[^"\\\n]|\\.)*"|' if form.strings else ""
        self._boundary = re.compile(f"{string}{closing}(?={_any_of(cuts).pattern})")
        self._longest = max(map(len, (*form.closers, *cuts)))
        self._text = ""  # text not returned yet
        self._open: int | None = None  # start of a block in it
        self._searched = 0  # position before which the block does not end
        self._quote: int | None = None  # position of a quote that may begin a string
        self._started = not form.at_start
        self._calls = 0
        self._after_call: str | None = None  # white space since the last call
        self._tail = ""  # part of the tail that may still follow

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
        """Whether a block begins in the text; returns the text before it as content."""
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
        """Whether the beginning of the text is decided."""
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
        begin = max(begin, self._searched)
        if self._quote is not None:
            rest = _IN_STRING.match(self._text, self._searched)
            assert rest is not None  # it may be empty
            end = rest.end()
            if not final and not self._text[end:].strip("\\"):
                self._searched = end
                return None
            begin = end + 1 if self._text[end : end + 1] == '"' else self._quote + 1
            self._quote = None
        while (match := self._boundary.search(self._text, begin)) and match[0].startswith('"'):
            begin = match.end()
        if final:
            return match.end() if match else len(self._text)
        if self._form.strings:
            # A quote in the last line may begin a string that holds the tag.
            line = max(begin, self._text.rfind("\n") + 1)
            quote = self._text.find('"', line, match.start() if match else None)
            if quote >= 0:
                self._quote, self._searched = quote, quote + 1
                return None
        if match:
            return match.end()
        self._searched = max(begin, len(self._text) - self._longest + 1)
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


# A string on one line, after its opening quote.
_IN_STRING = re.compile(r'(?:[^"\\\n]|\\.)*')


def _any_of(tags: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, tags)))


def _after_space(text: str, position: int) -> int:
    return len(text) - len(text[position:].lstrip())


# Completions of several messages, each with a channel or a recipient. GPT-OSS's harmony:
#
#     <|channel|>analysis<|message|>…<|end|>
#     <|start|>assistant<|channel|>commentary to=functions.NAME
#         <|constrain|>json<|message|>{…}<|call|>
#     <|start|>assistant<|channel|>final<|message|>…<|return|>
#
# Muse's, where the recipient alone says what a message is:
#
#     to=self<|message|>…<|eom|>
#     <|start|>assistant to=NAME<|message|><atem:function_calls>…</atem:function_calls><|eom|>
#     <|start|>assistant to=user<|message|>…<|eot|>
#
# The reasoning parser splits the messages into reasoning and content. Messages to a tool are passed
# to the tool-call parser unchanged, and so is text outside messages. A newline separates two
# messages of one kind. Harmony's recipient may also precede the channel, where its template writes
# it.
#
# The library openai-harmony does not parse text: it reads ids of GPT-OSS's vocabulary, which it
# downloads.


START, _MESSAGE = "<|start|>", "<|message|>"


@dataclass(frozen=True)
class ChannelForm:
    """The messages of a family.

    Attributes:
        opener: The header of reasoning, with which a prompt may end.
        header: A whole header; the first of its groups that matched says what the message is.
        begins: How a header may begin.
        ends: What ends a message.
        reasoning, content: What headers say of messages of these kinds.
        bare: What a header without any group says.
        read: The call in a message to a tool: its recipient and its text.
        call: A message to a tool as the family's models write it.
        speech: The header of an answer, and of words before a call.
    """

    opener: str
    header: re.Pattern[str]
    begins: tuple[str, ...]
    ends: tuple[str, ...]
    reasoning: tuple[str, ...]
    content: tuple[str, ...]
    read: Callable[[str, str, Tools], ParsedToolCall | None]
    call: CallForm
    speech: tuple[str, str]
    bare: str = ""

    def says(self, header: re.Match[str]) -> str:
        return next(filter(None, header.groups()), self.bare)

    def kind(self, header: re.Match[str] | None) -> str:
        """Reasoning ("analysis"), content ("plain") or another message ("raw")."""
        says = self.says(header) if header else None
        if says in self.reasoning:
            return "analysis"
        return "plain" if says in self.content else "raw"

    def scanner(self, opened: bool) -> ChannelScanner:
        return ChannelScanner(self, opened)

    @property
    def tool_calls(self) -> ToolCallForm:
        return ToolCallForm(
            openers=(f"{START}assistant", *(tag for tag in self.begins if tag[0] == "<")),
            closers=self.ends,
            cuts=(START,),
            at_start="to=",
            read=self._read,
        )

    def _read(self, block: str, tools: Tools) -> ToolCallBlock:
        header = self.header.match(block)
        if header is None:
            return ToolCallBlock((), block, 1)
        recipient = self.says(header)
        if recipient in (*self.reasoning, *self.content) or "to=" not in header[0]:
            return ToolCallBlock((), block, 0)
        text = block[header.end() :]
        for end in self.ends:
            text = text.removesuffix(end)
        call = self.read(recipient, text.strip(), tools)
        return ToolCallBlock((call,), "", 0) if call else ToolCallBlock((), block, 1)


def _functions_call(recipient: str, text: str, tools: Tools) -> ParsedToolCall | None:
    name = recipient.removeprefix("functions.")
    readable = name and name != recipient and is_object(text)
    return ParsedToolCall(name, text) if readable else None


def _atem_call(recipient: str, text: str, tools: Tools) -> ParsedToolCall | None:
    message = read(ToolCallForm.of(ATEM).scanner(tools), text)
    alone = len(message.tool_calls) == 1 and not message.content
    return message.tool_calls[0] if alone else None


HARMONY = ChannelForm(
    opener=f"<|channel|>analysis{_MESSAGE}",
    header=re.compile(
        r"\s*(?:<\|start\|>assistant)?\s*(?:to=([^\s<]+)\s*)?"
        r"<\|channel\|>(?:\w+\s*to=([^\s<]+)|(\w+))\s*"
        r"(?:<\|constrain\|>)?\s*\w*\s*<\|message\|>"
    ),
    begins=(START, "<|channel|>", "to="),
    ends=("<|end|>", "<|call|>", "<|return|>"),
    reasoning=("analysis",),
    content=("final", "commentary"),
    read=_functions_call,
    call=CallForm(
        opener="<|channel|>commentary to=functions.",
        bodies=(f"{{name}} <|constrain|>json{_MESSAGE}{{arguments}}",),
        between=f"<|call|>{START}assistant",
        outside=(START, "<|end|>", "<|call|>", "<|return|>"),
    ),
    speech=(f"<|channel|>final{_MESSAGE}", f"<|channel|>commentary{_MESSAGE}"),
)
MUSE = ChannelForm(
    opener=f" to=self{_MESSAGE}",
    header=re.compile(r"\s*(?:<\|start\|>assistant)?\s*(?:to=([^\s<]+))?\s*<\|message\|>"),
    begins=(START, _MESSAGE, "to="),
    ends=("<|eom|>", "<|eot|>"),
    reasoning=("self",),
    content=("user", "commentary"),
    bare="self",
    read=_atem_call,
    call=replace(
        ATEM,
        opener=" to=",
        bodies=(
            f'{{name}}{_MESSAGE}{ATEM.section[0]}{ATEM.opener} name="{{name}}">\n'
            f"{{parameters}}{ATEM.closer}{ATEM.section[1]}",
        ),
        closer="",
        section=("", ""),
        between=f"<|eom|>{START}assistant",
        outside=(START, "<|eom|>", "<|eot|>"),
    ),
    speech=(f" to=user{_MESSAGE}", f" to=commentary{_MESSAGE}"),
)
CHANNEL_FORMS = {"openai_gptoss": HARMONY, "muse": MUSE}
"""By the names of the reasoning parsers."""


class ChannelScanner:
    """Splits one text into messages.

    Args:
        form: The family's.
        opened: Whether the prompt ended with the header of an analysis message.
    """

    malformed = 0

    def __init__(self, form: ChannelForm, opened: bool) -> None:
        self._form = form
        self._closing = _any_of((*form.ends, START))
        self._in_header = _any_of((_MESSAGE, *form.ends, START))
        self._text = ""
        self._state = "analysis" if opened else "header"
        self._kinds: set[str] = set()  # of the messages so far
        self._first = opened  # its state is not returned yet
        self._searched = 0  # position before which a header contains no tag

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
        """Continue with the words of a message; an empty piece of reasoning says that there is
        any."""
        again = kind in self._kinds
        if kind == "analysis":
            deltas.append(Delta(reasoning="\n" if again else ""))
        elif kind == "plain" and again:
            deltas.append(Delta(content="\n"))
        self._kinds.add(kind)
        self._state = kind

    def _header(self, deltas: list[Delta], *, final: bool) -> bool:
        body = self._text.lstrip()
        if not body.startswith(self._form.begins):
            if not final and any(tag.startswith(body) for tag in self._form.begins):
                return False
            self._enter("raw", deltas)
            return True
        # A header may begin with the tag that would end it.
        first = len(self._text) - len(body) + 1
        tag = self._in_header.search(self._text, max(first, self._searched))
        if tag is None:
            self._searched = len(self._text) - len(_MESSAGE) + 1
            return False
        self._searched = 0
        header = self._form.header.fullmatch(self._text, 0, tag.end())
        kind = self._form.kind(header)
        self._enter(kind, deltas)
        end = tag.end() if tag[0] == _MESSAGE else tag.start()
        if kind == "raw":
            deltas.append(Delta(content=self._text[:end]))
        self._text = self._text[end:]
        return True

    def _body(self, deltas: list[Delta], *, final: bool) -> bool:
        end = self._closing.search(self._text)
        kept = len(self._text) if final else begun(self._text, (*self._form.ends, START))
        if end:
            raw_end = self._state == "raw" and end[0] != START
            kept = end.end() if raw_end else end.start()
        if kept:
            text = self._text[:kept]
            reasoning = self._state == "analysis"
            deltas.append(Delta(reasoning=text) if reasoning else Delta(content=text))
        if end is None:
            self._text = self._text[kept:]
            return False
        self._text = self._text[end.start() if end[0] == START else end.end() :]
        self._state = "between"
        return True

    def _between(self, deltas: list[Delta], *, final: bool) -> bool:
        if self._text.startswith(START):
            self._state = "header"
        elif START.startswith(self._text) and not (final and self._text):
            return False
        else:
            self._enter("raw", deltas)
        return True


# The parsers by name: vLLM's names, which Trinity-RFT's YAML uses.


@dataclass(frozen=True)
class ReasoningParser:
    """Splits a completion's text into reasoning and the rest.

    Attributes:
        opener: End of a prompt that has already opened the reasoning; None if none can.
        scanner: Makes a scanner for one text, given whether the prompt has opened the reasoning.
        after_content: What stands between content and the token that ends the turn.
        around_words: Text around the words before a call.
    """

    opener: str | None
    scanner: Callable[[bool], Scanner]
    after_content: str = ""
    around_words: tuple[str, str] = ("", "")

    def __call__(self, text: str, opened: bool) -> tuple[str | None, str]:
        """The reasoning, or None, and the rest of the whole `text`."""
        message = read(self.scanner(opened), text)
        return message.reasoning, message.content or ""


@dataclass(frozen=True)
class ToolCallParser:
    """Finds the tool calls in a completion's content.

    Attributes:
        scanner: Makes a scanner for one text, given the tools offered to the model.
        short_ids: Whether the family's templates need call ids of nine letters and digits.
    """

    scanner: Callable[[Tools], Scanner]
    short_ids: bool = False

    def __call__(self, text: str, tools: Tools) -> tuple[str, tuple[ParsedToolCall, ...], int]:
        """The rest of the whole `text`, its calls, and the number of malformed ones."""
        message = read(self.scanner(tools), text)
        return message.content or "", message.tool_calls, message.malformed_tool_calls


REASONING_PARSERS: dict[str, ReasoningParser] = {
    **{
        name: ReasoningParser(form.opener, form.scanner, form.answer[1] + form.end)
        for name, form in TAG_FORMS.items()
    },
    "openai_gptoss": ReasoningParser(
        HARMONY.opener,
        HARMONY.scanner,
        around_words=(HARMONY.speech[1], f"{HARMONY.ends[0]}{START}assistant"),
    ),
    "muse": ReasoningParser(
        MUSE.opener,
        MUSE.scanner,
        around_words=(MUSE.speech[1], f"{MUSE.ends[0]}{START}assistant"),
    ),
    "none": ReasoningParser(None, lambda opened: PlainText()),
}
TOOL_CALL_PARSERS: dict[str, ToolCallParser] = {
    **{
        name: ToolCallParser(ToolCallForm.of(form).scanner, short_ids=form.short_ids)
        for name, form in FORMS.items()
    },
    "openai": ToolCallParser(HARMONY.tool_calls.scanner),
    "muse": ToolCallParser(MUSE.tool_calls.scanner),
    "none": ToolCallParser(lambda tools: PlainText()),
}


class MessageScanner:
    """Parses one completion's text: reasoning first, then tool calls in the rest.

    Args:
        reasoning: The family's reasoning parser.
        tool_calls: Its tool-call parser.
        tools: Tools offered to the model; without any, no calls are parsed.
        opened: Whether the prompt has already opened the reasoning.
    """

    def __init__(
        self, reasoning: ReasoningParser, tool_calls: ToolCallParser, *, tools: Tools, opened: bool
    ) -> None:
        self._reasoning = reasoning.scanner(opened)
        self._calls: Scanner = tool_calls.scanner(tools) if tools else PlainText()

    @property
    def malformed(self) -> int:
        return self._calls.malformed

    def feed(self, text: str) -> list[Delta]:
        """Take the next piece of text; returns what has become certain."""
        return self._pass_on(self._reasoning.feed(text))

    def close(self) -> list[Delta]:
        """The rest, after the text has ended."""
        return self._pass_on(self._reasoning.close()) + self._calls.close()

    def _pass_on(self, deltas: list[Delta]) -> list[Delta]:
        passed: list[Delta] = []
        for delta in deltas:
            passed += [delta] if delta.content is None else self._calls.feed(delta.content)
        return passed


__all__ = [
    "REASONING_PARSERS",
    "TOOL_CALL_PARSERS",
    "Delta",
    "MessageScanner",
    "ParsedMessage",
    "ParsedToolCall",
    "Tools",
    "joined",
]
