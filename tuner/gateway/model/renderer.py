"""Messages to a prompt's text and ids, and completion ids back to a message."""

from __future__ import annotations

import difflib
import inspect
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from tuner.errors import ConfigError
from tuner.gateway.model.grammars import Constraints, grammar_of
from tuner.gateway.model.lengths import LengthBound
from tuner.gateway.model.parsing import (
    REASONING_PARSERS,
    TOOL_CALL_PARSERS,
    MessageScanner,
    ParsedMessage,
    Tools,
)
from tuner.gateway.model.parsing.message import read
from tuner.gateway.model.special_tokens import SpecialTokens
from tuner.gateway.model.template import (
    ANY_CALL,
    ANY_TOOL,
    Message,
    TemplateForm,
    for_template,
    lost_calls,
    remembered,
    risks,
    template_form,
    tools_obstacle,
    wants_whole_tools,
    whole,
)
from tuner.gateway.request_error import RequestError, shown, wrong

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
_log = logging.getLogger(__name__)

# Prompts whose text and ids are kept: the rollouts of a group begin with the same one.
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

    Attributes:
        tokenizer, special_tokens: What encodes and decodes, and its borders.
        length_bound: The fewest tokens that a text can have.
        reasoning: Splits a text into its reasoning and the rest.
        no_tools: Why requests with tools are refused, as the template cannot hold their history,
            and what to do; None where they are not.

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
        self._tool_call_parser = "none" if tool_call_parser is None else tool_call_parser
        self._reasoning_parser = "none" if reasoning_parser is None else reasoning_parser
        self._tool_calls = _named(TOOL_CALL_PARSERS, "tool_call_parser", self._tool_call_parser)
        self.reasoning = _named(REASONING_PARSERS, "reasoning_parser", self._reasoning_parser)
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
        self._shown: Callable[[Mapping[str, Any]], dict[str, Any]] = dict
        if wants_whole_tools(self._apply):
            self._shown = whole
        self._form: TemplateForm = template_form(self._apply, self._tool_call_parser)
        self.no_tools: str | None = None
        self._unseen_tools: str | None = None
        if obstacle := tools_obstacle(self._apply, self._form):
            problem = (
                f"the model's chat template {obstacle.found}: set model.chat_template_path to one "
                "that shows tools, calls and results, or use no tools"
            )
            if obstacle.refused:
                self.no_tools = problem
                _log.warning("%s; requests with tools get a 400", problem)
            else:
                self._unseen_tools = problem
        self._lost_calls = set() if obstacle else lost_calls(self._apply, self._form)
        self.special_tokens = SpecialTokens(tokenizer, self._encode_text)
        self.length_bound = LengthBound(tokenizer)
        self._added_tokens = {
            token.content: id_ for id_, token in tokenizer.added_tokens_decoder.items()
        }
        self._encode_prompt = lru_cache(_CACHED_PROMPTS)(self._encode_text)
        # A text with today's date is made each time.
        dated = self.reads("strftime_now")
        self._text = self._apply if dated else remembered(self._apply, _CACHED_PROMPTS)

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
            RequestError: 400: the template refuses the messages, can hold no conversation with
                tools, would leave a call out, or does not read a keyword.
        """
        used = any(m["role"] == "tool" or m.get("tool_calls") for m in messages)
        if self.no_tools and (tools or used):
            raise RequestError(self.no_tools, path=("tools",) if tools else ("messages",))
        if self._unseen_tools and (tools or used) and add_generation_prompt:
            _log.warning("%s", self._unseen_tools)
            self._unseen_tools = None  # said once
        if lost := [risk for m in messages for risk in risks(m) & self._lost_calls]:
            raise RequestError(
                f"the model's chat template leaves {lost[0]} out of the conversation: set "
                "model.chat_template_path to one that shows them",
                path=("messages",),
            )
        extra = chat_template_kwargs or {}
        self._check_template_kwargs(extra)
        shaped = for_template(list(messages), self._form, developer_role=self._developer_role)
        try:
            return self._text(shaped, tools, add_generation_prompt=add_generation_prompt, **extra)
        except Exception as error:
            # A template is a program: it says what it cannot render by raising, and what it forgot
            # to check fails with any error at all.
            raise RequestError(
                f"the model's chat template cannot render these messages: {error}",
                path=("messages",),
            ) from error

    def _apply(
        self, shaped: list[Message], tools: Tools, *, add_generation_prompt: bool, **extra: Any
    ) -> str:
        text = self.tokenizer.apply_chat_template(
            shaped,
            tools=[self._shown(tool) for tool in tools] or None,
            chat_template=self._template,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
            **{**self._template_kwargs, **extra},
        )
        if not isinstance(text, str):
            raise TypeError(f"apply_chat_template returned a {type(text).__name__}, not text")
        return text

    def encode(self, text: str, limit: int | None = None) -> tuple[int, ...]:
        """Ids of a prompt's text, shape [P].

        Args:
            text: The whole prompt.
            limit: The context's tokens; None for a text of any length.

        Raises:
            RequestError: 400: the text cannot be tokenized, or is too long by its length alone.
        """
        self.length_bound.check(text, limit)
        return self._encode_prompt(text)

    def word_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The ids that spell each word at the beginning of a text and, where these are others but
        as many, behind a space: as vLLM looks for `bad_words`.

        Raises:
            RequestError: 400: a word cannot be tokenized, or has no tokens.
        """
        found = []
        for index, word in enumerate(words):
            plain, spaced = (self._encode_text(space + word.lstrip()) for space in ("", " "))
            if not plain:
                raise wrong(("bad_words", index), "is spelled by no token: leave it out")
            found.append(plain)
            if len(spaced) == len(plain) and spaced[0] != plain[0]:
                found.append(spaced)
        return tuple(found)

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
        return read(self.scanner(tools=tools, opened=opened), text)

    def scanner(self, *, tools: Tools, opened: bool) -> MessageScanner:
        """The same for a text that comes in pieces; see `parse_text`."""
        return MessageScanner(self.reasoning, self._tool_calls, tools=tools, opened=opened)

    def tool_call_id(self, digest: bytes) -> str:
        """A tool call's id in the form that the family's templates accept."""
        # Mistral's templates take nine letters and digits, and nothing else.
        return digest.hex()[:9] if self._tool_calls.short_ids else f"call_{digest.hex()[:24]}"

    @cached_property
    def turn_ends(self) -> tuple[int, ...]:
        """The special tokens that the template ends an assistant turn with, as far as can be told.

        That of a turn of words, and that of one of tool calls where it is another.
        """
        ends: list[int | None] = []
        with suppress(RequestError):
            text = self.render_text(_ANY_TURN, ())
            _, found, rest = text.rpartition(_ANY_TURN[-1]["content"])
            ends.append(self.special_tokens.at(rest, 0) if found else None)
        with suppress(RequestError):
            text = self.render_text(ANY_CALL[:2], [ANY_TOOL], add_generation_prompt=False)
            ends.append(self.special_tokens.last(text))
        return tuple(dict.fromkeys(end for end in ends if end is not None))

    @property
    def reads_reasoning(self) -> bool:
        """Whether reasoning can be told from the rest of a text."""
        return self._reasoning_parser != "none"

    def grammar(self, constraints: Constraints, prompt_ids: Sequence[int]) -> str:
        """The grammar of completions that do what a request demands; empty where it is nothing.

        Raises:
            RequestError: 400: a schema cannot be made a grammar, or the family's form has none.
        """
        return grammar_of(
            constraints,
            tool_call_parser=self._tool_call_parser,
            reasoning_parser=self._reasoning_parser,
            opened=constraints.path is not None and self.opened_reasoning(prompt_ids),
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
        if isinstance(token, str) and all(character in _byte_of() for character in token):
            return [_byte_of()[character] for character in token]
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
        return decode(self.tokenizer, list(ids))

    def opened_reasoning(self, prompt_ids: Sequence[int]) -> bool:
        """Whether the prompt's end has opened the reasoning."""
        opener = self.reasoning.opener
        if opener is None or not prompt_ids:
            return False
        return self.decode(prompt_ids[-_TAIL:]).rstrip().endswith(opener)


def decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    """The text of `ids` as they are, special tokens included."""
    text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return cast(str, text)


def _named(table: Mapping[str, T], setting: str, name: str) -> T:
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


@cache
def _byte_of() -> dict[str, int]:
    """Byte-level BPE's table: the byte that each of its characters stands for (GPT-2)."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {character: byte for byte, character in bytes_to_unicode().items()}
