"""What a chat template needs of messages, and whether the parser reads the calls that it writes.

The latter is tested once with a standard conversation when a model's renderer is made: a parser
that cannot read the model's calls would leave every one of them in the text, and no rollout would
use a tool. It is also tested whether the template supports conversations with tools at all.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final, Literal, Protocol

from tuner.errors import ConfigError
from tuner.gateway.families.forms import Tools
from tuner.gateway.families.literals import json_value
from tuner.gateway.families.parsing import TOOL_CALL_PARSERS, ParsedMessage

Message = dict[str, Any]
"""A message in the form of chat completions."""


def text_of(content: str | list[dict[str, Any]]) -> str:
    """A message's text; parts are joined with a newline, as vLLM joins them for such templates."""
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if part["type"] != "image_url")


def content_of(parts: Sequence[str | dict[str, Any]]) -> str | list[dict[str, Any]]:
    """The content of a message: one text as a string, several texts and images as parts."""
    if len(parts) == 1 and isinstance(parts[0], str):
        return parts[0]
    return [{"type": "text", "text": one} if isinstance(one, str) else one for one in parts]


def said(message: Message) -> tuple[str | None, str]:
    """The reasoning that a message has in a separate field, and its text."""
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    return reasoning, text_of(message.get("content") or "")


@dataclass(frozen=True)
class TemplateForm:
    """How the template needs an assistant turn with tool calls.

    Attributes:
        arguments_as_text: Arguments as JSON text, because it writes them unchanged.
        content_always: Content is required, "" if there is none.
        calls: Several calls of a turn: "together", as they are; "in turn", each as a turn of its
            own before its result; "joined", likewise, and the results moved behind the last call.
        words: Words beside calls: "kept", if the template is to treat them; "apart", written by
            `render`; "refused".
        around: Text around words that are written apart.
        before, after: Text of a turn up to the name of its first call, and after its last call.
        prompt: Text with which the template begins the next turn.
    """

    arguments_as_text: bool = False
    content_always: bool = False
    calls: Literal["together", "in turn", "joined"] = "together"
    words: Literal["kept", "apart", "refused"] = "kept"
    around: tuple[str, str] = ("", "")
    before: str = ""
    after: str = ""
    prompt: str = ""


def for_template(
    messages: list[Message], form: TemplateForm, *, developer_role: bool
) -> list[Message]:
    """Convert checked messages to the form that chat templates expect.

    Text parts become one string and empty fields are removed, but for the content of a turn without
    tool calls, which many templates read. Arguments of earlier tool calls
    become the object they spell, because templates write them with `tojson`; text that is not a
    JSON object stays. "developer" becomes "system" unless the template knows it. Reasoning has both
    names that templates read, which transformers 5.16 does not do itself.

    Args:
        messages: Well formed.
        form: Requirements of the template.
        developer_role: The template knows the role "developer".
    """
    shaped = []
    for message in messages:
        copy = {key: value for key, value in message.items() if value is not None and value != []}
        if "content" in copy:
            copy["content"] = _parts(copy["content"])
        elif message.get("content") == [] or form.content_always or "tool_calls" not in copy:
            copy["content"] = ""
        if reasoning := said(message)[0]:
            copy |= {"reasoning_content": reasoning, "thinking": reasoning}
        if copy["role"] == "developer" and not developer_role:
            copy["role"] = "system"
        if "tool_calls" in copy and not form.arguments_as_text:
            copy["tool_calls"] = [_call_for_template(call) for call in copy["tool_calls"]]
        shaped.append(copy)
    return shaped


def _parts(content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Text as a string; with images among it, the parts that templates read."""
    if isinstance(content, str) or all(part["type"] != "image_url" for part in content):
        return text_of(content)
    return [{"type": "image"} if part["type"] == "image_url" else part for part in content]


def images_of(messages: Iterable[Message]) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Place and URL of each image in checked messages, in order."""
    for number, message in enumerate(messages):
        content = message.get("content")
        for index, part in enumerate(content if isinstance(content, list) else ()):
            if part["type"] == "image_url":
                place = ("messages", number, "content", index, "image_url", "url")
                yield place, part["image_url"]["url"]


def _call_for_template(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    try:
        arguments = json_value(function["arguments"])
    except (ValueError, RecursionError):
        return call
    if not isinstance(arguments, dict):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


_NAME = "look_up_weather"
_ARGUMENTS = {"city": "Paris", "days": 3}
ANY_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "The weather of the next days.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Name of the city."},
                "days": {"type": "integer", "description": "How many days."},
            },
            "required": ["city", "days"],
        },
    },
}


def _called(id_: str, arguments: dict[str, Any]) -> Message:
    function = {"name": _NAME, "arguments": json.dumps(arguments)}
    call = {"id": id_, "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


_CITIES: Final = ("Paris", "Lisbon")
_RESULTS: Final = ("Sunny, 21 degrees.", "Rain, 14 degrees.")
# Ids of nine letters and digits: every template accepts them.
ANY_CALL: Final[list[Message]] = [
    {"role": "user", "content": "What will the weather be?"},
    _called("abc123def", _ARGUMENTS),
    {"role": "tool", "tool_call_id": "abc123def", "content": _RESULTS[0]},
    _called("abc123deg", {"city": _CITIES[1], "days": 2}),
    {"role": "tool", "tool_call_id": "abc123deg", "content": _RESULTS[1]},
]


ANY_TURN: Final[list[Message]] = [
    {"role": "user", "content": "What is 6*7?"},
    {"role": "assistant", "content": "It is 42."},
]


class ApplyTemplate(Protocol):
    """Renders messages with the template; raises whatever the template raises."""

    def __call__(
        self, shaped: list[Message], tools: Tools, *, add_generation_prompt: bool
    ) -> str: ...


def remembered(apply: ApplyTemplate, count: int) -> Callable[..., str]:
    """Cache the last `count` results of `apply`."""

    @lru_cache(count)
    def known(asked: str) -> str:
        shaped, tools, options = json.loads(asked)
        return apply(shaped, tools, **options)

    def text(shaped: list[Message], tools: Tools, **options: Any) -> str:
        try:
            asked = json.dumps((shaped, tools, options))
        except TypeError:  # a caller's own object, which the template may know
            return apply(shaped, tools, **options)
        return known(asked)

    return text


def template_form(apply: ApplyTemplate, tool_call_parser: str) -> TemplateForm:
    """How the template needs tool calls; checks that the parser reads them.

    A template that renders no tool calls, or not this conversation, is accepted. If it supports
    several forms, the one that keeps the whole conversation is used: some drop the content of a
    turn with calls only when a result has followed.

    Raises:
        ConfigError: The template writes tool calls that the parser cannot read.
    """
    forms = [
        TemplateForm(arguments_as_text, content_always)
        for content_always, arguments_as_text in itertools.product((False, True), repeat=2)
    ]
    turns = {form: turn for form in forms if _NAME in (turn := _turn(apply, form) or "")}
    # If the template supports text and objects, it writes back what it was given.
    read = [form for form, turn in turns.items() if _left(tool_call_parser, turn) is not None]
    if read or not turns or tool_call_parser == "none":
        obstacles = {form: tools_obstacle(apply, form) for form in read or turns or forms}
        return min(obstacles, key=lambda form: _gravity(obstacles[form], form))
    left = {
        name: count
        for turn in turns.values()
        for name in TOOL_CALL_PARSERS
        if (count := _left(name, turn)) is not None
    }
    if left:
        # Some read a call whose section is another's (DeepSeek V3.2 and V4), and leave its tags.
        raise ConfigError(
            "the model's chat template writes tool calls that tool_call_parser "
            f"{tool_call_parser!r} cannot read; set it to {min(left, key=left.__getitem__)!r}"
        )
    known = ", ".join(name for name in TOOL_CALL_PARSERS if name != "none")
    raise ConfigError(
        f"the model's chat template writes tool calls that tool_call_parser {tool_call_parser!r} "
        f"cannot read, nor any other ({known}); set it to null to leave them in the text"
    )


def last_turns(apply: ApplyTemplate, form: TemplateForm) -> dict[Literal["text", "calls"], str]:
    """Conversations that end with a turn of text and with one of tool calls; without those that
    the template rejects."""
    found: dict[Literal["text", "calls"], str] = {}
    with suppress(Exception):  # as in `_turn`
        shaped = for_template(ANY_TURN, form, developer_role=False)
        found["text"] = apply(shaped, [], add_generation_prompt=False)
    with suppress(Exception):
        shaped = for_template(ANY_CALL[:2], form, developer_role=False)
        found["calls"] = apply(shaped, [ANY_TOOL], add_generation_prompt=False)
    return found


@dataclass(frozen=True)
class Obstacle:
    """A problem of a template with conversations with tools.

    Attributes:
        found: Continues the sentence "the model's chat template".
        refused: Whether requests with tools make no sense: if a template does not even show the
            tools, the model calls none.
        fails: Whether nothing is rendered.
    """

    found: str
    refused: bool = True
    fails: bool = False


def _gravity(obstacle: Obstacle | None, form: TemplateForm) -> int:
    if obstacle is None or not obstacle.fails:
        return 0 if obstacle is None else 1
    return 2 if form.content_always else 3  # missing content may hide why it fails


def tools_obstacle(apply: ApplyTemplate, form: TemplateForm) -> Obstacle | None:
    """The template's problem with a conversation with two tool calls and their results.

    One call a turn: the templates of some families reject more.

    Returns:
        None if calls and results are in the text.
    """
    shaped = for_template(ANY_CALL, form, developer_role=False)
    try:
        text = apply(shaped, [ANY_TOOL], add_generation_prompt=True)
    except Exception as error:
        # As in `_turn`.
        return Obstacle(f"fails on a conversation with tool calls ({error})", fails=True)
    if not all(city in text for city in _CITIES):
        if _NAME not in text:
            return Obstacle("shows neither tools nor earlier tool calls", refused=False)
        return Obstacle("leaves earlier tool calls out of the conversation")
    if not all(result in text for result in _RESULTS):
        return Obstacle("leaves the results of tools out of the conversation")
    return None


def render(
    apply: ApplyTemplate,
    messages: Sequence[Message],
    tools: Tools,
    form: TemplateForm,
    *,
    developer_role: bool = False,
    **options: Any,
) -> str:
    """Messages as the template writes them, and turns that it does not take as the model does.

    Args:
        apply: The template.
        messages: Well formed.
        tools: Tools offered to the model.
        form: Requirements of the template.
        developer_role: The template knows the role "developer".
        options: Keywords of the template.
    """
    marks = _Marks(form, messages, tools)
    turns = list(marks.taken_apart(messages))
    shaped = for_template(turns, form, developer_role=developer_role)
    try:
        text = apply(shaped, tools, **options)
    except Exception:
        # Some templates refuse an empty turn, or tags in a text: these are shown a word instead.
        for empty in (True, False):
            hidden = [marks.hidden(message, only_empty=empty) for message in shaped]
            if hidden != shaped:
                with suppress(Exception):
                    text = apply(hidden, tools, **options)
                    if all(said(m)[1] in text for m in hidden if m not in shaped):
                        return marks.put_back(text)
        raise
    return marks.put_back(text)


class _Marks:
    """Texts that a template is not shown, and their places in what it writes.

    A mark is a word that is nowhere else in the conversation. It stands for a text, or precedes the
    name of a call, to show where the template wrote it.
    """

    def __init__(self, form: TemplateForm, messages: Sequence[Message], tools: Tools) -> None:
        self._form = form
        self._conversation = (messages, tools)
        self._texts: dict[str, str] = {}  # by their marks
        self._words: dict[str, str] = {}  # by the mark of the call that follows them
        self._joined: list[list[str]] = []  # the marks of the calls of a turn

    def taken_apart(self, messages: Sequence[Message]) -> Iterator[Message]:
        """The messages, with several calls in a turn, and words beside calls, as the form says."""
        form, place = self._form, 0
        while place < len(messages):
            message = messages[place]
            place += 1
            calls = message.get("tool_calls") or []
            words = said(message)[1] if calls and form.words == "apart" else ""
            several = len(calls) > 1 and form.calls != "together"
            joined = several and form.calls == "joined"
            if any(form.after in call["function"]["arguments"] for call in calls):
                joined = False  # the end of the call would not be found
            if words or joined:
                marks = [self._mark("") for _ in calls]
                calls = [_named(call, mark) for call, mark in zip(calls, marks, strict=True)]
                self._joined += [marks] if joined else []
            if words:
                self._words[marks[0]] = words
                message = {**message, "content": None}
            if not several:
                yield {**message, "tool_calls": calls} if calls else message
                continue
            results: list[Message] = []
            while place < len(messages) and messages[place]["role"] == "tool":
                results.append(messages[place])
                place += 1
            for index, call in enumerate(calls):
                yield {**(message if index == 0 else _TURN), "tool_calls": [call]}
                own = [one for one in results if one["tool_call_id"] == call.get("id")]
                results = [one for one in results if one not in own]
                yield from own
            yield from results

    def hidden(self, message: Message, *, only_empty: bool) -> Message:
        """The message with marks for its texts, or for no text at all."""
        if message["role"] != "assistant":
            return message
        texts = {key: message[key] for key in _TEXTS if isinstance(message.get(key), str)}
        if message.get("tool_calls"):
            texts.pop("content", None)
        if only_empty:
            texts = {key: text for key, text in texts.items() if key == "content" and not text}
        return {**message, **{key: self._mark(text) for key, text in texts.items()}}

    def put_back(self, text: str) -> str:
        """The template's text with each text in its place; turns that it left out stay out."""
        form = self._form
        for marks in self._joined:
            shown = [mark for mark in marks if mark in text]
            end = self._end(text, shown[0]) if shown else 0
            for mark in shown[1:]:
                begin, stop = self._begin(text, mark, form.prompt), self._end(text, mark)
                text = text[:end] + text[begin:stop] + text[end:begin] + text[stop:]
                end += stop - begin
        for mark, words in self._words.items():
            if mark in text:
                place = self._begin(text, mark)
                text = text[:place] + words.join(form.around) + text[place:]
        for mark, hidden in reversed(self._texts.items()):
            text = text.replace(mark, hidden)
        return text

    def _begin(self, text: str, mark: str, prompt: str = "") -> int:
        """The start of the call whose name has the mark, or of the prompt before it."""
        head, place = prompt + self._form.before, text.index(mark)
        if not text[:place].endswith(head):
            raise ValueError("it begins a tool call in several ways")
        return place - len(head)

    def _end(self, text: str, mark: str) -> int:
        """The end of the call whose name has the mark."""
        return text.index(self._form.after, text.index(mark)) + len(self._form.after)

    def _mark(self, text: str) -> str:
        if not self._texts:
            known = repr(self._conversation)
            self._word = next(w for n in itertools.count() if (w := f"mark{n}q") not in known)
        mark = f"{self._word}{len(self._texts)}x"
        self._texts[mark] = text
        return mark


_TEXTS: Final = ("content", "reasoning_content", "reasoning", "thinking")
_TURN: Final[Message] = {"role": "assistant", "content": None}


def _named(call: dict[str, Any], mark: str) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "name": mark + function["name"]}}


_WORDS: Final = "I look."
_REASONED: Final = {"reasoning_content": "Hm."}


def turn_form(
    apply: ApplyTemplate,
    form: TemplateForm,
    parse: Callable[[str], ParsedMessage],
    around: tuple[str, str],
) -> TemplateForm:
    """`form`, with a way for turns that the template refuses, cuts or makes something else of.

    Args:
        apply: A template that supports conversations with tool calls.
        form: As `template_form` found it.
        parse: Parses a turn with a tool call.
        around: Text around words before a call, as the model writes them.
    """
    user, one, result, other, another = ANY_CALL
    both = {**one, "tool_calls": one["tool_calls"] + other["tool_calls"]}
    spoken = {**one, "content": _WORDS}

    def shown(form: TemplateForm, turn: Message, *results: Message) -> str | None:
        """The text from the turn on; None if the template refuses it or leaves calls out."""
        with suppress(Exception):
            prompt = render(apply, [user], [ANY_TOOL], form, add_generation_prompt=True)
            text = render(
                apply, [user, turn, *results], [ANY_TOOL], form, add_generation_prompt=True
            )
            named = [*_CITIES[: len(results)], *_RESULTS[: len(results)]]
            if all(name in text for name in named):
                same = itertools.takewhile(
                    lambda pair: pair[0] == pair[1], zip(prompt, text, strict=False)
                )
                return text[sum(1 for _ in same) :].partition(_RESULTS[0])[0]
        return None

    written = _turn(apply, form) or ""
    if _NAME not in written or "}" not in written:
        return form
    prompted = ""
    with suppress(Exception):  # as in `_turn`
        asked = apply([user], [ANY_TOOL], add_generation_prompt=False)
        prompted = apply([user], [ANY_TOOL], add_generation_prompt=True).removeprefix(asked)
    parts = replace(
        form,
        before=written[: written.index(_NAME)],
        after=written[written.rindex("}") + 1 :],
        prompt=prompted,
        around=around,
    )
    text = shown(form, spoken, result)
    if text is None or _WORDS in (parse(text).reasoning or ""):
        apart = replace(parts, words="apart")
        texts = [shown(apart, {**spoken, **more}, result) for more in ({}, _REASONED)]
        kept = all(text is not None and _WORDS in (parse(text).content or "") for text in texts)
        form = apart if kept else replace(form, words="refused")
    if shown(form, both, result, another) is None:
        joined = replace(parts, words=form.words, calls="joined")
        text = shown(joined, both, result, another) if joined.after else None
        read = parse(text[: text.rindex(joined.after)]) if text else ParsedMessage(None)
        several = len(read.tool_calls) == 2 and read.content is None
        form = joined if several else replace(form, calls="in turn")
    return form


_OPTIONAL: Final = {"description": "", "parameters": {"type": "object", "properties": {}}}


def whole(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The tool with its optional parts."""
    function = tool["function"]
    missing = {key: value for key, value in _OPTIONAL.items() if function.get(key) is None}
    return {**tool, "function": {**function, **missing}}


def wants_whole_tools(apply: ApplyTemplate) -> bool:
    """Whether the template fails on a tool that has only a name."""
    try:
        apply(
            ANY_CALL[:1],
            [{"type": "function", "function": {"name": _NAME}}],
            add_generation_prompt=True,
        )
    except Exception:
        return True
    return False


def _turn(apply: ApplyTemplate, form: TemplateForm) -> str | None:
    """The assistant turn as the template writes it; None if it rejects the conversation."""

    def render(*messages: Message, prompt: bool) -> str:
        shaped = for_template(list(messages), form, developer_role=False)
        return apply(shaped, [ANY_TOOL], add_generation_prompt=prompt)

    try:
        before = render(*ANY_CALL[:1], prompt=True)
        whole = render(*ANY_CALL[:2], prompt=False)
    except Exception:
        # A template rejects by raising anything at all, and is called again for each request.
        return None
    if not whole.startswith(before):
        # The prompt opens or closes the reasoning, which the turn does not repeat.
        pairs = enumerate(zip(before, whole, strict=False))
        before = before[: next((at for at, (a, b) in pairs if a != b), len(whole))]
        before = before[: max(before.rfind(end) for end in "\n>]") + 1]
    return whole.removeprefix(before)


def _left(name: str, turn: str) -> int | None:
    """Length of the text beside the call of a turn; None if the parser does not read the call."""
    rest, calls, _ = TOOL_CALL_PARSERS[name](turn, [ANY_TOOL])
    try:
        found: list[Any] = [(call.name, json.loads(call.arguments)) for call in calls]
    except ValueError:
        return None
    return len(rest) if found == [(_NAME, _ARGUMENTS)] else None
