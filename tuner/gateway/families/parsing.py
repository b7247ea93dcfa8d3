"""Parsing reasoning and tool calls from a completion's text, in the format of the model's family.

Nothing is invented and nothing lost: what is not a well-formed call stays in the content and is
counted. No library does this. Transformers' response templates (`tokenizer.parse_response`) return
decoded arguments, which differ from the model's text, raise on a malformed call and drop a
truncated one. `renderers` (PyPI) decodes arguments, strips the content, drops text after a call,
and reads whole completions only. vLLM's parsers come with vLLM only, and do not count what they
cannot read.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

# The parts of a completion: reasoning, content and tool calls; and the scanners that find them.
#
# All scanners take text as it arrives and return what is certain. A whole message is parsed by a
# scanner that gets all of its text at once, so a streamed message equals the final one.


Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class ParsedToolCall:
    """A call as the model wrote it.

    If the format is JSON, `arguments` is the model's own text, byte for byte.
    """

    name: str
    arguments: str


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
    """

    opener: str
    closer: str
    line_ends: bool

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
            if self._text:
                deltas.append(Delta(content=self._text))
            self._text = ""
        return deltas

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
}
"""By the names of the reasoning parsers."""


# Tool calls between tags, found in text as it arrives.


@dataclass(frozen=True)
class ToolCallBlock:
    """The content of one block.

    Attributes:
        calls: Its well-formed calls, in order.
        rest: Text that stays content: the text after the calls, or the whole block without calls.
        malformed: Number of calls in it that could not be parsed.
    """

    calls: tuple[ParsedToolCall, ...]
    rest: str
    malformed: int

    @classmethod
    def of(cls, call: ParsedToolCall | None, block: str) -> ToolCallBlock:
        """A block that is one call, or a malformed one."""
        return cls((call,), "", 0) if call else cls((), block, 1)


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
    """

    openers: tuple[str, ...]
    read: Callable[[str, Tools], ToolCallBlock]
    closers: tuple[str, ...] = ()
    cuts: tuple[str, ...] = ()
    line_ends: int = 0
    wrapper: str = ""
    tail: str = ""
    at_start: str = ""

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
        self._boundary = re.compile(f"{closing}(?={_any_of(cuts).pattern})")
        self._longest = max(map(len, (*form.closers, *cuts)))
        self._text = ""  # text not returned yet
        self._open: int | None = None  # start of a block in it
        self._searched = 0  # position before which the block does not end
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


# Tool calls written as JSON, parsed without losing the model's own text.
#
# Hermes, Qwen2.5 and Qwen3: between tags, any number of calls. The newline before a call and white
# space after one belong to the format.
#
#     <tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>
#
# Llama 3.x: JSON alone, at the beginning of the text or after a tag; several with `;` between. Any
# other object at the beginning is an answer, and content. After the tag everything is an attempt to
# call: code for the built-in tools cannot be parsed and counts as malformed.
#
#     {"name": ..., "parameters": {...}}; {"name": ..., "parameters": {...}}
#     <|python_tag|>{"name": ..., "parameters": {...}}
#
# Mistral: a tag, then a JSON array of calls; since tokenizer version 11, a tag for each call. A
# call ends at the next tag or the end of the text. The model's own call ids are part of the format;
# the gateway assigns its own ids.
#
#     [TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]
#     [TOOL_CALLS]NAME[CALL_ID]ID[ARGS]{...}[TOOL_CALLS]NAME[ARGS]{...}
#
# DeepSeek V3 and R1, and V3.1: tags around each call and around all of them.
#
#     <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME
#     ```json\n{...}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>
#
#     <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>
#     <｜tool▁calls▁end｜>


# The bars of DeepSeek's tags are full-width, as the model writes them.
# ruff: noqa: RUF001


def json_call(text: str, keys: Sequence[str] = ("arguments",)) -> ParsedToolCall | None:
    """The call in `text`, one JSON object with a "name" and arguments under one of `keys`.

    Arguments may also be a string that contains JSON.
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


def json_value(text: str) -> Any:
    """The value of a JSON text that the model wrote.

    Numbers beyond the range of floats, which a model can write, become the largest float: as
    infinity they would be written back as text that is not JSON.
    """
    return json.loads(text, parse_float=_finite, parse_constant=refuse_constant)


def _finite(number: str) -> float:
    return max(-sys.float_info.max, min(sys.float_info.max, float(number)))


def value_end(text: str, start: int) -> int | None:
    """End of the JSON value that begins at `start`; None if there is none."""
    try:
        return DECODER.raw_decode(text, start)[1]
    except (ValueError, RecursionError):
        return None


def skip_space(text: str, position: int) -> int:
    """The first position from `position` on that is not JSON white space."""
    match = _SPACE.match(text, position)
    return match.end() if match else position


def refuse_constant(name: str) -> Any:
    """Reject NaN, Infinity and -Infinity, which Python's decoder accepts."""
    raise ValueError(f"{name} is not a JSON number")


DECODER = json.JSONDecoder(parse_constant=refuse_constant)
_SPACE = re.compile(r"[ \t\n\r]*")


def _object_spans(text: str) -> dict[str, tuple[int, int]]:
    """Start and end of each member's value of the JSON object `text`.

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


def _read_hermes(block: str, tools: Tools) -> ToolCallBlock:
    if not block.endswith(_CLOSE):
        return ToolCallBlock.of(None, block)
    return ToolCallBlock.of(json_call(block[len(_OPEN) : -len(_CLOSE)].strip()), block)


HERMES = ToolCallForm(openers=(_OPEN,), closers=(_CLOSE,), line_ends=1, read=_read_hermes)


_PYTHON_TAG = "<|python_tag|>"
_KEYS = ("parameters", "arguments")
_SEPARATOR = re.compile(r"\s*;?\s*")
# An unparsable object was meant as a call if it begins like one.
_ATTEMPT = re.compile(r'[\s;]*\{\s*"(?:name|type|parameters|arguments)"\s*:')


def _read_llama3(block: str, tools: Tools) -> ToolCallBlock:
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
        return ToolCallBlock((), block, int(tagged or _is_attempt(block)))
    rest = block[end:]
    if _SEPARATOR.fullmatch(rest):
        return ToolCallBlock(tuple(calls), "", 0)
    return ToolCallBlock(tuple(calls), rest, int(_is_attempt(rest)))


def _is_attempt(text: str) -> bool:
    match = _ATTEMPT.match(text)
    if match is None:
        return False
    start = text.index("{")
    stop = value_end(text, start)
    # A complete object without parameters is not a call: people have names, too.
    return stop is None or any(f'"{key}"' in text[start:stop] for key in _KEYS)


LLAMA3_JSON = ToolCallForm(openers=(_PYTHON_TAG,), at_start="{", read=_read_llama3)


_TOOL_CALLS = "[TOOL_CALLS]"
_NAMED = re.compile(r"\s*([^\s\[\]{}]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?\s*(?=\{)")


def _read_mistral(block: str, tools: Tools) -> ToolCallBlock:
    named = _NAMED.match(block, len(_TOOL_CALLS))
    if named:
        end = value_end(block, named.end())
        if end is None or not is_object(block[named.end() : end]):
            return ToolCallBlock.of(None, block)
        return ToolCallBlock((ParsedToolCall(named[1], block[named.end() : end]),), block[end:], 0)
    return _read_array(block)


def _read_array(block: str) -> ToolCallBlock:
    calls: list[ParsedToolCall] = []
    position = skip_space(block, len(_TOOL_CALLS))
    read = position  # end of the parsed part
    if block[position : position + 1] != "[":
        return ToolCallBlock.of(None, block)
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
            return ToolCallBlock(tuple(calls), block[position + 1 :], 0)
    return ToolCallBlock(tuple(calls), block[read:], 1) if calls else ToolCallBlock.of(None, block)


MISTRAL = ToolCallForm(openers=(_TOOL_CALLS,), read=_read_mistral)


CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
_BEFORE = rf"(?:{CALLS}\s*)?{CALL}\s*"
_V3 = re.compile(
    rf"{_BEFORE}function{SEPARATOR}([^\n]+)\n```json\s*\n(.*)\n\s*```\s*{CALL_END}", re.DOTALL
)
_V31 = re.compile(rf"{_BEFORE}([^\n]+?){SEPARATOR}(.*){CALL_END}", re.DOTALL)


def _read_deepseek(pattern: re.Pattern[str], block: str, tools: Tools) -> ToolCallBlock:
    match = pattern.fullmatch(block)
    if match is None:
        return ToolCallBlock.of(None, block)
    name, arguments = match[1].strip(), match[2].strip()
    readable = name and is_object(arguments)
    return ToolCallBlock.of(ParsedToolCall(name, arguments) if readable else None, block)


def _deepseek(pattern: re.Pattern[str]) -> ToolCallForm:
    return ToolCallForm(
        openers=(CALL,),
        closers=(CALL_END,),
        wrapper=CALLS,
        tail=CALLS_END,
        read=partial(_read_deepseek, pattern),
    )


DEEPSEEK_V3 = _deepseek(_V3)
DEEPSEEK_V31 = _deepseek(_V31)


# Qwen3-Coder and Qwen3.5: one tag for each parameter.
#
#     <tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n</tool_call>
#
# The format has no types, so a value is parsed by the type in the tool's JSON schema, and as text
# if the schema does not know it or the value has none of its types. Templates write Python's True,
# False and None. Up to two newlines before a call belong to the format.


_CALL = re.compile(r"<tool_call>\s*<function=([^>\n]+)>(.*)</function>\s*</tool_call>", re.DOTALL)
# A value may itself contain a closing tag: the right one is followed by a parameter or the end.
_PARAMETER = re.compile(
    r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=|\Z))", re.DOTALL
)
_PYTHON = {"True": "true", "False": "false", "None": "null"}


def _read(block: str, tools: Tools) -> ToolCallBlock:
    match = _CALL.fullmatch(block)
    return ToolCallBlock.of(_call(match[1].strip(), match[2], tools) if match else None, block)


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
    """The JSON types that a schema allows; empty if it does not say."""
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
    """The value as JSON text: the model's own if it has an allowed type, otherwise a string."""
    written = text.strip()
    written = _PYTHON.get(written, written)
    try:
        found = _type_of(DECODER.decode(written))
    except (ValueError, RecursionError):
        found = "string"
    if found != "string" and (found in types or (found == "integer" and "number" in types)):
        return written
    return json.dumps(text, ensure_ascii=False)


QWEN3_XML = ToolCallForm(
    openers=("<tool_call>",), closers=("</tool_call>",), line_ends=2, read=_read
)


# GPT-OSS's harmony: a completion is several messages, each with a channel.
#
#     <|channel|>analysis<|message|>…<|end|>
#     <|start|>assistant<|channel|>commentary to=functions.NAME
#         <|constrain|>json<|message|>{…}<|call|>
#     <|start|>assistant<|channel|>final<|message|>…<|return|>
#
# The reasoning parser splits the messages: analysis is reasoning; final, and commentary without a
# recipient, are content. Messages with a recipient are passed to the tool-call parser unchanged,
# and so is text outside messages. A newline separates two messages of one kind. The recipient may
# also precede the channel, where the template writes it.
#
# The library openai-harmony supports only ids of its own vocabulary, which it downloads, not a
# completion's text.


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
    """Splits one text into messages (see above).

    Args:
        opened: Whether the prompt ended with the header of an analysis message.
    """

    malformed = 0

    def __init__(self, opened: bool) -> None:
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


def _read_channels(block: str, tools: Tools) -> ToolCallBlock:
    header = _HEADER.match(block)
    if header is None:
        return ToolCallBlock.of(None, block)
    recipient = header["before"] or header["after"]
    if recipient is None:
        return ToolCallBlock((), block, 0)
    arguments = block[header.end() :]
    for end in _ENDS:
        arguments = arguments.removesuffix(end)
    arguments = arguments.strip()
    name = recipient.removeprefix(_FUNCTION)
    readable = recipient.startswith(_FUNCTION) and name and is_object(arguments)
    return ToolCallBlock.of(ParsedToolCall(name, arguments) if readable else None, block)


HARMONY = ToolCallForm(
    openers=(f"{_START}assistant", _CHANNEL),
    closers=_ENDS,
    cuts=(_START,),
    at_start="to=",
    read=_read_channels,
)


# The parsers by name: vLLM's names, which Trinity-RFT's YAML uses.


@dataclass(frozen=True)
class ReasoningParser:
    """Splits a completion's text into reasoning and the rest.

    Attributes:
        opener: End of a prompt that has already opened the reasoning; None if none can.
        scanner: Makes a scanner for one text, given whether the prompt has opened the reasoning.
        around_words: Text around the words before a call.
    """

    opener: str | None
    scanner: Callable[[bool], Scanner]
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
    **{name: ReasoningParser(form.opener, form.scanner) for name, form in TAG_FORMS.items()},
    "openai_gptoss": ReasoningParser(
        ANALYSIS,
        HarmonyScanner,
        (f"{_CHANNEL}commentary{_MESSAGE}", f"{_ENDS[0]}{_START}assistant"),
    ),
    "none": ReasoningParser(None, lambda opened: PlainText()),
}
# If several names mean one parser, messages suggest the first.
TOOL_CALL_PARSERS: dict[str, ToolCallParser] = {
    "hermes": ToolCallParser(HERMES.scanner),
    "qwen3_coder": ToolCallParser(QWEN3_XML.scanner),
    "qwen3_xml": ToolCallParser(QWEN3_XML.scanner),
    "llama3_json": ToolCallParser(LLAMA3_JSON.scanner),
    "llama4_json": ToolCallParser(LLAMA3_JSON.scanner),
    "mistral": ToolCallParser(MISTRAL.scanner, short_ids=True),
    "deepseek_v3": ToolCallParser(DEEPSEEK_V3.scanner),
    "deepseek_v31": ToolCallParser(DEEPSEEK_V31.scanner),
    "openai": ToolCallParser(HARMONY.scanner),
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
