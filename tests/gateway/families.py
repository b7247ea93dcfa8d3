"""The supported model families: chat template, parsers, and texts as their models write them."""

# The bars of DeepSeek's tags are full-width.
# ruff: noqa: RUF001

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from tests.kit.toy import tokenizer
from tuner.gateway import ChatRenderer
from tuner.gateway.families.forms import FIELD, CallForm

TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class Family:
    """A family and what its template can say.

    Attributes:
        end: What its template ends an assistant turn with.
        several, content, reasoning: Whether a turn with tool calls can have more than one, and
            content and reasoning beside them.
        pieces: Parts of texts that its parsers look at.
        call: A well-formed call of `add`, with the arguments' text to be put in.
    """

    template: str
    tool_call_parser: str
    reasoning_parser: str
    end: str
    pieces: tuple[str, ...]
    call: str
    several: bool = True
    content: bool = True
    reasoning: bool = True

    @property
    def name(self) -> str:
        return self.template

    def says(self, reasoning: str, words: str, calls: int = 0, *, opened: bool = False) -> str:
        """A turn as the family's models write it, up to the token that ends it."""
        called = [self.call % f'{{"a": {number}}}' for number in range(calls)]
        if self.tool_call_parser == "qwen3_coder":
            called = [self.call % number for number in range(calls)]
        if self.reasoning_parser == "openai_gptoss":
            kind = "commentary" if calls else "final"
            parts = [f"<|channel|>analysis<|message|>{reasoning}<|end|>"] if reasoning else []
            parts += [f"<|channel|>{kind}<|message|>{words}<|end|>"] if words or not calls else []
            text = "<|start|>assistant".join(parts)
            return (text + "".join(called)).removesuffix(self.end if calls else "<|end|>")
        before, after = {"none": ("", ""), "mistral": ("[THINK]", "[/THINK]")}.get(
            self.reasoning_parser, ("<think>\n", "\n</think>\n\n")
        )
        thought = (before * (not opened) + reasoning + after) if reasoning and before else ""
        between = "\n" if self.tool_call_parser in ("hermes", "qwen3_coder") else ""
        return thought + between.join([words, *called] if words else called)

    def renderer(self, spoken: Callable[[], PreTrainedTokenizerFast] = tokenizer) -> ChatRenderer:
        return _renderer(self, spoken)


@cache
def _renderer(family: Family, spoken: Callable[[], PreTrainedTokenizerFast]) -> ChatRenderer:
    return ChatRenderer(
        spoken(),
        chat_template=(TEMPLATES / f"{family.template}.jinja").read_text(encoding="utf-8"),
        tool_call_parser=family.tool_call_parser,
        reasoning_parser=family.reasoning_parser,
    )


_THINK = ("<think>", "</think>")
_HERMES = '<tool_call>\n{"name": "add", "arguments": %s}\n</tool_call>'
_HERMES_PIECES = (*_THINK, "<tool_call>", "</tool_call>", '{"name": "add", "arguments": {}}')
_MISTRAL_PIECES = (
    "[THINK]", "[/THINK]", "[TOOL_CALLS]", "add", "[ARGS]", "[CALL_ID]", "{}", " [", "]", ",",
    '{"name": "add", "arguments": {}}',
)  # fmt: skip
_DEEPSEEK_PIECES = (
    *_THINK, "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "function", "<｜tool▁sep｜>", "add",
    "\n```json\n", "{}", "\n```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>",
)  # fmt: skip
_XML_PIECES = (
    *_THINK, "<tool_call>", "<function=add>", "<parameter=a>", "1", "</parameter>", "</function>",
    "</tool_call>",
)  # fmt: skip
_LLAMA_PIECES = (
    *_THINK, "<|python_tag|>", '{"name": "add", "parameters": {}}', ";", "{", "}",
)  # fmt: skip
_HARMONY_PIECES = (
    "<|start|>", "<|start|>assistant", "<|channel|>", "analysis", "final", "commentary",
    " to=functions.add", "<|constrain|>json", "<|message|>", "<|end|>", "<|call|>", "<|return|>",
    "{}", "<|channel|>analysis<|message|>", "<|start|>assistant<|channel|>final<|message|>",
)  # fmt: skip
DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"

FAMILIES = [
    Family("qwen2_5", "hermes", "none", "<|im_end|>", _HERMES_PIECES, _HERMES, reasoning=False),
    Family("qwen3", "hermes", "deepseek_r1", "<|im_end|>", _HERMES_PIECES, _HERMES),
    Family(
        "qwen3_5",
        "qwen3_coder",
        "qwen3",
        "<|im_end|>",
        _XML_PIECES,
        "<tool_call>\n<function=add>\n<parameter=a>\n%s\n</parameter>\n</function>\n</tool_call>",
    ),
    Family(
        "llama3",
        "llama3_json",
        "none",
        "<|eot_id|>",
        _LLAMA_PIECES,
        '<|python_tag|>{"name": "add", "parameters": %s}',
        content=False,
        reasoning=False,
    ),
    Family(
        "mistral_v3",
        "mistral",
        "none",
        "</s>",
        _MISTRAL_PIECES,
        '[TOOL_CALLS] [{"name": "add", "arguments": %s, "id": "123456789"}]',
        content=False,
        reasoning=False,
    ),
    Family(
        "mistral_v11",
        "mistral",
        "none",
        "</s>",
        _MISTRAL_PIECES,
        "[TOOL_CALLS]add[CALL_ID]123456789[ARGS]%s",
        reasoning=False,
    ),
    Family("mistral_v13", "mistral", "mistral", "</s>", _MISTRAL_PIECES, "[TOOL_CALLS]add[ARGS]%s"),
    Family(
        "deepseek_v3",
        "deepseek_v3",
        "deepseek_r1",
        "<｜end▁of▁sentence｜>",
        _DEEPSEEK_PIECES,
        DEEPSEEK.format("function<｜tool▁sep｜>add\n```json\n%s\n```"),
        reasoning=False,
    ),
    Family(
        "deepseek_v31",
        "deepseek_v31",
        "deepseek_r1",
        "<｜end▁of▁sentence｜>",
        _DEEPSEEK_PIECES,
        DEEPSEEK.format("add<｜tool▁sep｜>%s"),
        reasoning=False,
    ),
    Family(
        "gpt_oss",
        "openai",
        "openai_gptoss",
        "<|call|>",
        _HARMONY_PIECES,
        "<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
        "%s<|call|>",
        several=False,
        content=False,
    ),
]

_REAL = {"HuggingFaceTB-SmolLM3-3B": 1, "Qwen-QwQ-32B": 1, "Qwen-Qwen3-0.6B": 1,
         "mistralai-Mistral-Nemo-Instruct-2407": 4, "openai-gpt-oss-120b": 9}  # fmt: skip
REAL = [replace(FAMILIES[like], template=f"real/{name}") for name, like in _REAL.items()]
"""Families with the templates of real models that are here."""


def texts(family: Family) -> st.SearchStrategy[str]:
    """Texts that say something to the family's parsers, right and wrong."""
    piece = st.sampled_from(
        [*family.pieces, family.call % '{"a": 1}', family.call % "{", "\n", "\n\n", " ", "é", "x…"]
    )
    return st.lists(piece, max_size=10).map("".join)


def turn(family: Family, message: dict[str, Any], tools: list[dict[str, Any]]) -> tuple[str, bool]:
    """The assistant turn as the template writes it, without its end; whether it began opened."""
    renderer = family.renderer()
    user = {"role": "user", "content": "Please."}
    prompt = renderer.render_text([user], tools)
    result = {"role": "tool", "tool_call_id": "123456789", "content": "3"}
    count = len(message.get("tool_calls", ()))
    whole = renderer.render_text([user, message, *[result] * count], tools)
    opened = whole.startswith(prompt) and prompt.endswith(("<think>\n", "<think>"))
    if not whole.startswith(prompt):
        prompt = prompt.removesuffix("<think>\n")  # the template does not repeat it in history
    assert whole.startswith(prompt)
    return whole[len(prompt) : whole.index(family.end, len(prompt))], opened


# Calls of any row of the table of forms.


def spelled(form: CallForm, calls: list[dict[str, Any]], body: str = "") -> str:
    """Calls of `add` as the family's models write them."""
    body = body or form.bodies[0]
    (field,) = (f for f in FIELD.findall(body) if f not in ("{name}", "{id}"))
    if field in ("{objects}", "{list}", "{python}"):
        each = [_PIECES[field](form, one) for one in calls]
        inside = form.between.join(each) if field == "{objects}" else f"[{', '.join(each)}]"
        whole = body.replace(field, inside)
        return f"{'' if form.start else form.opener}{whole}{'' if form.start else form.closer}"
    parts = [
        form.opener
        + body.replace("{name}", "add")
        .replace("{id}", str(index))
        .replace(field, _PIECES[field](form, one))
        + form.closer
        for index, one in enumerate(calls)
    ]
    return form.section[0] + form.between.join(parts) + form.section[1]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _object(form: CallForm, given: dict[str, Any]) -> str:
    keys = form.keys
    if not keys.name:
        return _json({"add": given})
    before = {keys.id: "0"} if keys.id else {}
    return _json({**before, keys.name: "add", keys.arguments[0]: given})


def _parameters(form: CallForm, given: dict[str, Any]) -> str:
    types = {str: "string", bool: "boolean", list: "array", dict: "object", type(None): "null"}
    return "".join(
        form.parameter.replace("{key}", key)
        .replace("{string}", "true" if isinstance(value, str) else "false")
        .replace("{type}", types.get(type(value), "number"))
        .replace("{value}", value if isinstance(value, str) else _json(value))
        for key, value in given.items()
    )


def _python(form: CallForm, given: dict[str, Any]) -> str:
    return f"add({', '.join(f'{key}={value!r}' for key, value in given.items())})"


def _braces(form: CallForm, value: Any) -> str:
    opener, closer = form.quote
    if isinstance(value, dict) and form.by_schema:
        values = {k: v if isinstance(v, str) else _json(v) for k, v in value.items()}
        return f"{{{','.join(f'{k}:{opener}{v}{closer}' for k, v in values.items())}}}"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{_braces(form, one)}' for key, one in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(_braces(form, one) for one in value)}]"
    return f"{opener}{value}{closer}" if isinstance(value, str) else _json(value)


def _elements(form: CallForm, value: Any) -> str:
    mark = form.mark
    if isinstance(value, dict):
        return "".join(
            f"{mark}<{key}>{_elements(form, one)}{mark}</{key}>" for key, one in value.items()
        )
    if isinstance(value, list):
        return "".join(f"{mark}<item>{_elements(form, one)}{mark}</item>" for one in value)
    return value if isinstance(value, str) else _json(value)


_PIECES = {
    "{arguments}": lambda form, given: _json(given),
    "{object}": _object,
    "{objects}": _object,
    "{list}": _object,
    "{parameters}": _parameters,
    "{python}": _python,
    "{braces}": _braces,
    "{elements}": _elements,
}
