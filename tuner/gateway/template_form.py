"""What a chat template wants of a tool call, and whether the parser reads what it writes.

Tried once on a canonical conversation when a model's chat form is made: a parser that cannot read
the model's calls would leave every one of them in the text, and no rollout would use a tool.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from typing import Any, Protocol

from tuner.errors import ConfigError
from tuner.gateway.messages import Message, for_template
from tuner.gateway.parsing import TOOL_CALL_PARSERS, Tools

_NAME = "look_up_weather"
_ARGUMENTS = {"city": "Paris", "days": 3}
_TOOL = {
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
_USER: Message = {"role": "user", "content": "What will the weather be?"}
_CALL: Message = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "id": "abc123def",  # nine letters and digits: every template accepts them
            "type": "function",
            "function": {"name": _NAME, "arguments": json.dumps(_ARGUMENTS)},
        }
    ],
}


class Apply(Protocol):
    """Renders messages in the template's shape; raises whatever the template does."""

    def __call__(
        self, shaped: list[Message], tools: Tools, *, add_generation_prompt: bool
    ) -> str: ...


@dataclass(frozen=True)
class TemplateForm:
    """What the template wants of an assistant turn with tool calls; see `for_template`.

    Attributes:
        arguments_as_text: Arguments as JSON text, not as an object.
        content_always: Content also where there is none.
    """

    arguments_as_text: bool = False
    content_always: bool = False


def template_form(apply: Apply, tool_call_parser: str) -> TemplateForm:
    """How the template takes tool calls; it is checked that the parser reads them.

    A template that renders no tool calls, or not this conversation, is taken as it is.

    Raises:
        ConfigError: The template writes tool calls that the parser cannot read.
    """
    turns: dict[TemplateForm, str] = {}
    for content_always, arguments_as_text in itertools.product((False, True), repeat=2):
        form = TemplateForm(arguments_as_text, content_always)
        turn = _turn(apply, form)
        if turn is not None and _NAME in turn:
            turns[form] = turn
    # Where the template takes text and objects, it writes what is read back as it was.
    for form, turn in turns.items():
        if _reads(tool_call_parser, turn):
            return form
    if not turns or tool_call_parser == "none":
        return next(iter(turns), TemplateForm())
    for name in TOOL_CALL_PARSERS:
        if any(_reads(name, turn) for turn in turns.values()):
            raise ConfigError(
                "the model's chat template writes tool calls that tool_call_parser "
                f"{tool_call_parser!r} cannot read; set it to {name!r}"
            )
    known = ", ".join(name for name in TOOL_CALL_PARSERS if name != "none")
    raise ConfigError(
        f"the model's chat template writes tool calls that tool_call_parser {tool_call_parser!r} "
        f"cannot read, nor any other ({known}); set it to null to leave them in the text"
    )


def _turn(apply: Apply, form: TemplateForm) -> str | None:
    """The assistant turn as the template writes it; None where it refuses the conversation."""

    def render(*messages: Message, prompt: bool) -> str:
        shaped = for_template(
            list(messages),
            developer_role=False,
            arguments_as_text=form.arguments_as_text,
            content_always=form.content_always,
        )
        return apply(shaped, [_TOOL], add_generation_prompt=prompt)

    try:
        before = render(_USER, prompt=True)
        whole = render(_USER, _CALL, prompt=False)
    except Exception:
        # A template refuses by raising anything at all, and is asked again for each request.
        return None
    if not whole.startswith(before):
        # The prompt opens or closes the reasoning, which the turn does not repeat.
        pairs = enumerate(zip(before, whole, strict=False))
        before = before[: next((at for at, (a, b) in pairs if a != b), len(whole))]
        before = before[: max(before.rfind(end) for end in "\n>]") + 1]
    return whole.removeprefix(before)


def _reads(name: str, turn: str) -> bool:
    _, calls, _ = TOOL_CALL_PARSERS[name](turn, [_TOOL])
    try:
        found: list[Any] = [(call.name, json.loads(call.arguments)) for call in calls]
    except ValueError:
        return False
    return found == [(_NAME, _ARGUMENTS)]
