"""Messages to a prompt's text and ids, and completion ids back to a message."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Final

from tuner.errors import ConfigError
from tuner.gateway.model.grammars import Constraints, grammar_of
from tuner.gateway.model.parsing import (
    REASONING_PARSERS,
    TOOL_CALL_PARSERS,
    MessageScanner,
    ParsedMessage,
    ReasoningParser,
    ToolCallParser,
    Tools,
    joined,
)
from tuner.gateway.model.special_tokens import SpecialTokens
from tuner.gateway.model.template import Message, TemplateForm, for_template, template_form
from tuner.gateway.request_error import RequestError, shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Prompts whose ids are kept: the rollouts of a group begin with the same one.
_CACHED_PROMPTS = 512
# Enough of a prompt's end to see whether the template has opened the reasoning.
_TAIL = 32
_ANY_TURN: Final = [
    {"role": "user", "content": "What is 6*7?"},
    {"role": "assistant", "content": "It is 42."},
]


class ChatRenderer:
    """A model family's chat form: its tokenizer, chat template and parsers.

    Args:
        tokenizer: A transformers tokenizer.
        chat_template: Jinja source; None takes the tokenizer's own.
        enable_thinking: Given to the template of every prompt, unless a request's
            `chat_template_kwargs` says otherwise; None leaves it to the template.
        tool_call_parser: A name of `TOOL_CALL_PARSERS`; "none" or None leaves calls in the text.
        reasoning_parser: A name of `REASONING_PARSERS`; "none" or None leaves reasoning in the
            text.

    Raises:
        ConfigError: A parser is unknown, the tool-call parser cannot read what the template
            writes, there is no template, or it knows no thinking.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        chat_template: str | None = None,
        enable_thinking: bool | None = None,
        tool_call_parser: str | None = "hermes",
        reasoning_parser: str | None = "deepseek_r1",
    ) -> None:
        self.tokenizer = tokenizer
        self._tool_call_parser = tool_call_parser or "none"
        self._reasoning_parser = reasoning_parser or "none"
        self._tool_calls: ToolCallParser = _named(
            TOOL_CALL_PARSERS, "tool_call_parser", tool_call_parser
        )
        self._reasoning: ReasoningParser = _named(
            REASONING_PARSERS, "reasoning_parser", reasoning_parser
        )
        self._template = chat_template or _own_template(tokenizer)
        if enable_thinking and not self.reads("enable_thinking"):
            raise ConfigError(
                "enable_thinking is true, but the model's chat template does not read it: "
                "leave it out, or choose a model with a thinking mode"
            )
        self._template_kwargs = (
            {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        )
        self._reserved = set(inspect.signature(tokenizer.apply_chat_template).parameters)
        self._reserved |= {"messages", "self"}
        self._developer_role = self.reads("developer")
        self._form: TemplateForm = template_form(self._apply, tool_call_parser or "none")
        self.special_tokens = SpecialTokens(tokenizer, self._encode_text)
        self._added_tokens = {
            token.content: id_ for id_, token in tokenizer.added_tokens_decoder.items()
        }
        self._encode_prompt = lru_cache(_CACHED_PROMPTS)(self._encode_text)

    def render_text(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt of checked messages as text.

        Args:
            messages: In the form of chat completions, well formed.
            tools: Likewise.
            chat_template_kwargs: Further keywords of the template.
            add_generation_prompt: Whether the text ends where the assistant's next turn begins.

        Raises:
            RequestError: 400: the template refuses the messages, or does not read a keyword.
        """
        extra = chat_template_kwargs or {}
        self._check_template_kwargs(extra)
        shaped = for_template(
            list(messages),
            developer_role=self._developer_role,
            arguments_as_text=self._form.arguments_as_text,
            content_always=self._form.content_always,
        )
        try:
            return self._apply(shaped, tools, add_generation_prompt=add_generation_prompt, **extra)
        except Exception as error:
            # A template is a program of the model's author: it says what it cannot render by
            # raising, and what it forgot to check fails with any error at all.
            raise RequestError(
                f"the model's chat template cannot render these messages: {error}",
                path=("messages",),
            ) from error

    def _apply(
        self, shaped: list[Message], tools: Tools, *, add_generation_prompt: bool, **extra: Any
    ) -> str:
        text = self.tokenizer.apply_chat_template(
            shaped,
            tools=[dict(tool) for tool in tools] or None,
            chat_template=self._template,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
            **{**self._template_kwargs, **extra},
        )
        if not isinstance(text, str):
            raise TypeError(f"apply_chat_template returned a {type(text).__name__}, not text")
        return text

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of a prompt's text, shape [P].

        Raises:
            RequestError: 400: the text cannot be tokenized.
        """
        return self._encode_prompt(text)

    def parse(
        self,
        completion_ids: Sequence[int],
        *,
        tools: Tools,
        prompt_ids: Sequence[int] = (),
        stop: Sequence[str] = (),
    ) -> ParsedMessage:
        """The message that a completion spells.

        Args:
            completion_ids: Sampled ids, shape [T]; a final special token is not shown.
            tools: Tools the model was shown; without any, no tool calls are looked for.
            prompt_ids: The prompt, whose end tells whether reasoning was already opened.
            stop: Strings that ended the completion; the text is cut before the first one.
        """
        text, _ = self.completion_text(completion_ids, stop)
        return self.parse_text(text, tools=tools, opened=self.opened_reasoning(prompt_ids))

    def completion_text(
        self, completion_ids: Sequence[int], stop: Sequence[str] = ()
    ) -> tuple[str, str | None]:
        """A completion's text without its final special token, cut before the first stop string.

        Returns:
            The text, and the stop string it was cut at.
        """
        ids = list(completion_ids)
        if ids and ids[-1] in self.special_tokens.ids:
            del ids[-1]
        text = self.decode(ids)
        cuts = [(position, string) for string in stop if (position := text.find(string)) >= 0]
        if not cuts:
            return text, None
        position, string = min(cuts)
        return text[:position], string

    def parse_text(self, text: str, *, tools: Tools, opened: bool) -> ParsedMessage:
        """The message that a completion's text spells.

        Args:
            text: The completion without its final special token.
            tools: Tools the model was shown; without any, no tool calls are looked for.
            opened: Whether the prompt has already opened the reasoning.
        """
        scanner = self.scanner(tools=tools, opened=opened)
        deltas = [*scanner.feed(text), *scanner.close()]
        return joined(deltas, scanner.malformed)

    def scanner(self, *, tools: Tools, opened: bool) -> MessageScanner:
        """The same for a text that comes in pieces; see `parse_text`."""
        return MessageScanner(self._reasoning, self._tool_calls, tools=tools, opened=opened)

    def tool_call_id(self, digest: bytes) -> str:
        """A tool call's id in the form that the family's templates accept."""
        # Mistral's templates take nine letters and digits, and nothing else.
        return digest.hex()[:9] if self._tool_calls.short_ids else f"call_{digest.hex()[:24]}"

    def split_reasoning(self, text: str, *, opened: bool) -> tuple[str | None, str]:
        """The reasoning that `text` begins with, None without any, and the text after it.

        Args:
            text: A completion or a rendered turn, without its final special token.
            opened: Whether the text before it has already opened the reasoning.
        """
        return self._reasoning(text, opened)

    @cached_property
    def turn_end(self) -> int | None:
        """The special token that the template ends an assistant turn with, if it can be told."""
        try:
            text = self.render_text(_ANY_TURN, ())
        except RequestError:
            return None
        _, found, rest = text.rpartition(_ANY_TURN[-1]["content"])
        return self.special_tokens.at(rest, 0) if found else None

    @property
    def reads_reasoning(self) -> bool:
        """Whether reasoning can be told from the rest of a text."""
        return self._reasoning is not REASONING_PARSERS["none"]

    def grammar(self, constraints: Constraints, prompt_ids: Sequence[int]) -> str:
        """The grammar of completions that do what a request demands; empty where it is nothing.

        Raises:
            RequestError: 400: a schema cannot be made a grammar, or the family's form has none.
        """
        return grammar_of(
            constraints,
            tool_call_parser=self._tool_call_parser,
            reasoning_parser=self._reasoning_parser,
            opened=self.opened_reasoning(prompt_ids),
            token_id=self._added_tokens.get,
        )

    def token_text(self, token_id: int) -> str:
        """A single token as text; part of a character shows as U+FFFD."""
        return self.decode([token_id])

    def token_bytes(self, token_id: int) -> list[int] | None:
        """The bytes a single token stands for; None where they are not known."""
        text = self.token_text(token_id)
        if "\ufffd" not in text:
            return list(text.encode())
        token = self.tokenizer.convert_ids_to_tokens(token_id)
        if isinstance(token, str) and all(character in _BYTE_OF for character in token):
            return [_BYTE_OF[character] for character in token]
        return None

    def reads(self, name: str) -> bool:
        """Whether the chat template reads the keyword `name`."""
        return re.search(rf"\b{re.escape(name)}\b", self._template) is not None

    def _check_template_kwargs(self, extra: Mapping[str, Any]) -> None:
        for key, value in extra.items():
            path = ("chat_template_kwargs", key)
            if key in self._reserved:
                raise RequestError(" is set by the gateway: leave it out", path=path, begins=True)
            # enable_thinking=false asks nothing of a model that cannot think.
            if not self.reads(key) and not (key == "enable_thinking" and value is False):
                raise RequestError(
                    f" is {shown(value)}, but the model's chat template does not read {key!r}: "
                    "leave it out",
                    path=path,
                    begins=True,
                )

    def _encode_text(self, text: str) -> tuple[int, ...]:
        try:
            return tuple(self.tokenizer.encode(text, add_special_tokens=False))
        except (UnicodeError, TypeError) as error:
            raise RequestError(
                f"the messages hold text that cannot be tokenized: {error}", path=("messages",)
            ) from error

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens included; parts of a character show as U+FFFD."""
        text = self.tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text if isinstance(text, str) else "".join(text)

    def opened_reasoning(self, prompt_ids: Sequence[int]) -> bool:
        """Whether the prompt's end has opened the reasoning."""
        opener = self._reasoning.opener
        if opener is None or not prompt_ids:
            return False
        return self.decode(prompt_ids[-_TAIL:]).rstrip().endswith(opener)


def _named(table: Mapping[str, Any], setting: str, name: str | None) -> Any:
    if name is None:
        name = "none"
    if name in table:
        return table[name]
    near = difflib.get_close_matches(name, table, n=1)
    raise ConfigError(
        f"{setting} {name!r} is unknown: the parsers are {', '.join(sorted(table))}"
        + (f"; did you mean {near[0]!r}?" if near else "")
    )


def _own_template(tokenizer: PreTrainedTokenizerBase) -> str:
    try:
        template = tokenizer.get_chat_template()
    except ValueError as error:
        raise ConfigError(
            "the tokenizer has no chat template: set model.custom_chat_template"
        ) from error
    return str(template)


def _bytes_of_characters() -> dict[str, int]:
    """Byte-level BPE's table: the printable character that stands for each byte (GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + offset): byte for offset, byte in enumerate(others)})
    return table


_BYTE_OF = _bytes_of_characters()
