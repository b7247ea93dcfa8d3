"""From messages to a prompt's text and ids, and from completion ids back to a message."""

from __future__ import annotations

import difflib
import inspect
import json
import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache, cached_property, lru_cache
from typing import TYPE_CHECKING, Any, TypeVar, cast

from tuner.encoding import displayable
from tuner.engines.images import (
    ALBUM,
    IMAGE_IDS,
    REFERENCE,
    ImageError,
    ImageLimits,
    ImageSpan,
    on_the_web,
)
from tuner.errors import ConfigError
from tuner.gateway.families.forms import Tools
from tuner.gateway.families.grammars import Constraints, grammar_of
from tuner.gateway.families.parsing import (
    REASONING_PARSERS,
    TOOL_CALL_PARSERS,
    MessageScanner,
    ParsedMessage,
    read,
)
from tuner.gateway.families.template import (
    ANY_CALL,
    ANY_TOOL,
    ANY_TURN,
    ApplyTemplate,
    Message,
    TemplateForm,
    images_of,
    last_turns,
    remembered,
    render,
    said,
    template_form,
    tools_obstacle,
    turn_form,
    wants_whole_tools,
    whole,
)
from tuner.gateway.request_error import Path, RequestError, shown, too_long, wrong
from tuner.traces import Call

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from tuner.engines.transformers.vision import Vision


# Positions where a text can be cut so that its parts get the same ids as the whole.


# Letters, spaces, line ends and multi-byte characters on both sides of a token.
_PROBES = (("a", "b"), ("a ", " b"), ("\n", "\n\nb"), ("a\n\n", "\n b"), ("é", "é"), (".", "1 2"))


class SpecialTokens:
    """A tokenizer's special tokens as borders: text is split at them before anything else.

    That holds for every fast tokenizer, but is tested for each token before it is relied on.

    Args:
        tokenizer: A transformers tokenizer.
        encode: Text to ids, without tokens that are not in the text.
        others: Tokens that count as special though the tokenizer does not mark them.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        encode: Callable[[str], Sequence[int]],
        others: Collection[int] = (),
    ) -> None:
        self._encode = encode
        added = tokenizer.added_tokens_decoder
        texts = {id_: token.content for id_, token in added.items() if token.special}
        texts |= {id_: decode(tokenizer, [id_]) for id_ in others if id_ not in texts}
        self._texts = {id_: text for id_, text in texts.items() if text}
        self.ids = frozenset(self._texts)
        # Texts of other tokens occur in words, too.
        self._by_text = {text: id_ for id_, text in self._texts.items() if id_ in added}
        # The longest first: one token's text may begin another's.
        alternatives = sorted(map(re.escape, self._by_text), key=len, reverse=True)
        self._pattern = re.compile("|".join(alternatives) or r"(?!)")
        self._borders: dict[int, bool] = {}

    def text(self, token_id: int) -> str:
        """The text of the special token `token_id`."""
        return self._texts[token_id]

    def at(self, text: str, position: int) -> int | None:
        """The special token that begins at `position` of `text`."""
        match = self._pattern.match(text, position)
        return self._by_text[match[0]] if match else None

    def last(self, text: str) -> int | None:
        """The special token that `text` ends with, ignoring white space."""
        ends = [match for match in self._pattern.finditer(text) if not text[match.end() :].strip()]
        return self._by_text[ends[0][0]] if ends else None

    def is_border(self, token_id: int) -> bool:
        """Whether the encoding of what follows the token never depends on what precedes it."""
        known = self._borders.get(token_id)
        if known is None:
            known = self._borders[token_id] = all(
                self._splits(token_id, before, after) for before, after in _PROBES
            )
        return known

    def borders(self, text: str) -> Iterator[tuple[int, int]]:
        """Start and end of each special token of `text` that is a border."""
        for match in self._pattern.finditer(text):
            if self.is_border(self._by_text[match[0]]):
                yield match.span()

    def _splits(self, token_id: int, before: str, after: str) -> bool:
        token = self._texts[token_id]
        alone = tuple(self._encode(token + after))
        whole = tuple(self._encode(before + token + after))
        left = tuple(self._encode(before + token))
        return alone[:1] == (token_id,) and left[-1:] == (token_id,) and whole == left + alone[1:]

    def encode_after(self, token_id: int, text: str) -> tuple[int, ...] | None:
        """Ids of `text` after the token; None if they are not certain."""
        if not self.is_border(token_id):
            return None
        ids = tuple(self._encode(self._texts[token_id] + text))
        return ids[1:] if ids[:1] == (token_id,) else None

    def encode_from(self, text: str) -> tuple[int, ...] | None:
        """Ids of `text`, which begins with a special token, in any context."""
        token_id = self.at(text, 0)
        if token_id is None or not self.is_border(token_id):
            return None
        ids = tuple(self._encode(text))
        return ids if ids[:1] == (token_id,) else None


def turn_end_ids(
    tokenizer: PreTrainedTokenizerBase, apply: ApplyTemplate, form: TemplateForm
) -> frozenset[int]:
    """The tokens with which a chat template ends the last turn, one of text and one of calls."""
    added = tokenizer.added_tokens_decoder
    special = SpecialTokens(tokenizer, tokenizer.encode, added.keys())
    texts = last_turns(apply, form)
    ends = {kind: special.last(text) for kind, text in texts.items()}
    # Text may end with a token that is not marked special, as base models have them; calls may end
    # with another such token, as "</tool_call>".
    if (end := ends.get("calls")) is not None and not added[end].special:
        del ends["calls"]
    return frozenset(end for end in ends.values() if end is not None)


# Estimating the length of a request's texts before they are tokenized.


LONG = 16_384
"""Characters; tokenizing as many takes milliseconds, another thread a tenth of one."""

# Pre-tokenizers that lose no character, unless a split is configured to remove its matches.
_SPLITTING = {"ByteLevel", "Metaspace", "Digits", "Split"}


def is_long(*values: Any) -> bool:
    """Whether JSON values are so large that they should be processed outside the event loop."""
    size, waiting = 0, list(values)
    for value in waiting:  # grows by what is found in it
        size += len(value) if isinstance(value, str) else 1
        if size > LONG:
            return True
        if isinstance(value, dict):
            waiting += [*value, *value.values()]
        elif isinstance(value, list):
            waiting += value
    return False


class LengthBound:
    """Lower bound of a text's number of tokens, from its bytes and the tokenizer's longest token.

    There is a bound if no character is ever lost: every byte is a token, added tokens strip no
    white space, and normalizers shorten nothing. NFC shortens text, but not ASCII letters: each of
    them begins a character of its own, whatever marks follow it.

    Args:
        tokenizer: A transformers tokenizer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)

    def check(self, text: str, limit: int | None) -> None:
        """Reject a long text whose length alone proves that it leaves no room for an answer.

        Args:
            text: A prompt, or a part of it.
            limit: Tokens of the context; None accepts any text.

        Raises:
            RequestError: 400: the text fills the context.
        """
        if limit is None or len(text) <= LONG:
            return
        fewest = self.fewest_tokens(text)
        if fewest >= limit:
            raise too_long(
                f"the prompt has at least {fewest} tokens, which leaves no room for an answer "
                f"within the context of {limit}"
            )

    def fewest_tokens(self, text: str) -> int:
        """Minimum number of tokens of the text; 0 if unknown."""
        longest, encoding = self._longest
        return -(-len(text.encode(encoding, "ignore")) // longest) if longest else 0

    @cached_property
    def _longest(self) -> tuple[int, str]:
        """Bytes of the longest token, 0 for no bound, and the encoding whose bytes count."""
        from tokenizers import models, pre_tokenizers

        backend = self._backend
        if backend is None or not isinstance(backend.model, models.BPE):
            return 0, ""
        model = backend.model
        vocabulary = backend.get_vocab(with_added_tokens=False)
        alphabet = set(pre_tokenizers.ByteLevel.alphabet())
        normalizers, splits = _parts(backend.normalizer), _parts(backend.pre_tokenizer)
        byte_level = any(part["type"] == "ByteLevel" for part in splits)
        if byte_level:
            whole, longest = alphabet <= vocabulary.keys(), max(map(len, vocabulary), default=0)
        else:
            whole = model.byte_fallback and {f"<0x{i:02X}>" for i in range(256)} <= {*vocabulary}
            longest = max((len(token.encode()) for token in vocabulary), default=0)
        composes = bool(normalizers) and all(part["type"] == "NFC" for part in normalizers)
        added = backend.get_added_tokens_decoder().values()
        if (
            not whole
            or model.continuing_subword_prefix
            or model.end_of_word_suffix
            or any(token.lstrip or token.rstrip for token in added)
            or any(part["type"] not in _SPLITTING for part in splits)
            or any(part.get("behavior") == "Removed" for part in splits)
            or not (composes or all(map(_grows, normalizers)))
        ):
            return 0, ""
        for token in added:
            forms = [token.content]
            if backend.normalizer is not None:
                forms.append(backend.normalizer.normalize_str(token.content))
            longest = max(longest, *(len(form.encode()) for form in forms))
        return longest, "ascii" if composes else "utf-8"


def _parts(component: Any) -> list[dict[str, Any]]:
    """A normalizer's or pre-tokenizer's steps."""
    if component is None:
        return []
    try:
        steps = [json.loads(component.__getstate__())]
    except Exception:
        # One written in Python has no state, and raises any kind of error.
        return [{"type": "unknown"}]
    for step in steps:  # which grows
        steps += step.get("normalizers", []) + step.get("pretokenizers", [])
    return [step for step in steps if step["type"] != "Sequence"]


def _grows(step: Any) -> bool:
    """Whether a normalizer's step removes nothing."""
    if step["type"] == "Replace":
        old, new = str(step["pattern"].get("String", "")), str(step["content"])
        return 0 < len(old.encode()) <= len(new.encode())
    return bool(step["type"] == "Prepend")


T = TypeVar("T")
_log = logging.getLogger(__name__)

# Number of cached prompts: the rollouts of a group begin with the same one.
_CACHED_PROMPTS = 512
# Enough of a prompt's end to see whether the template has opened the reasoning.
_TAIL = 32


class ChatRenderer:
    """The chat format of a model family: its tokenizer, chat template and parsers.

    Args:
        tokenizer: A transformers tokenizer.
        chat_template: Jinja source; None uses the tokenizer's own.
        enable_thinking: Passed to the template for every prompt, unless a request's
            `chat_template_kwargs` sets it; None leaves it to the template.
        tool_call_parser: A name of `TOOL_CALL_PARSERS`; "none" or None leaves calls in the text.
        reasoning_parser: A name of `REASONING_PARSERS`; "none" or None leaves reasoning in the
            text.
        end_ids: Tokens that end a completion by the model's configuration.
        vision: How the model reads images; None if it reads text only.
        image_limits: Which images are accepted; None: the defaults.

    Attributes:
        tokenizer, special_tokens: Encoding, and its borders.
        end_ids: Tokens that end a completion by the template: the last one of a turn of text, and
            of one of tool calls.
        length_bound: Lower bound of a text's number of tokens.
        form: What the template needs of a turn with tool calls.
        reasoning: Splits a text into its reasoning and the rest.
        no_tools: Why requests with tools are rejected, because the template cannot render their
            history, and what to do; None if they are not.

    Raises:
        ConfigError: A parser is unknown, the tool-call parser cannot read what the template
            writes, there is no template, or it has no thinking mode.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        chat_template: str | None = None,
        enable_thinking: bool | None = None,
        tool_call_parser: str | None = "hermes",
        reasoning_parser: str | None = "deepseek_r1",
        end_ids: Collection[int] = (),
        vision: Vision | None = None,
        image_limits: ImageLimits | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.vision = vision
        self._image_limits = image_limits or ImageLimits()
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
        self.form: TemplateForm = template_form(self._apply, self._tool_call_parser)
        self.no_tools: str | None = None
        self._unseen_tools: str | None = None
        if obstacle := tools_obstacle(self._apply, self.form):
            problem = (
                f"the model's chat template {obstacle.found}: set model.chat_template_path to one "
                "that shows tools, calls and results, or use no tools"
            )
            if obstacle.refused:
                self.no_tools = problem
                _log.warning("%s; requests with tools get a 400", problem)
            else:
                self._unseen_tools = problem
        else:
            self.form = turn_form(
                self._apply,
                self.form,
                lambda text: self.parse_text(text, tools=[ANY_TOOL], opened=False),
                self.reasoning.around_words,
            )
        self.special_tokens = SpecialTokens(tokenizer, self._encode_text, end_ids)
        self.length_bound = LengthBound(tokenizer)
        self._added_tokens = {
            token.content: id_ for id_, token in tokenizer.added_tokens_decoder.items()
        }
        self._encode_prompt = lru_cache(_CACHED_PROMPTS)(self._encode_text)
        # Text with today's date is rendered each time.
        dated = self.reads("strftime_now")
        self._text = self._apply if dated else remembered(self._apply, _CACHED_PROMPTS)
        self.end_ids = turn_end_ids(tokenizer, self._apply, self.form)
        if not self.end_ids <= self.special_tokens.ids:
            ends = self.end_ids.union(end_ids)
            self.special_tokens = SpecialTokens(tokenizer, self._encode_text, ends)

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
            chat_template_kwargs: Additional keywords of the template.
            add_generation_prompt: Whether the text ends where the assistant's next turn begins.

        Raises:
            RequestError: 400: the template rejects the messages, does not support conversations
                with tools, would drop a call, or does not read a keyword.
        """
        used = any(m["role"] == "tool" or m.get("tool_calls") for m in messages)
        if self.no_tools and (tools or used):
            raise RequestError(self.no_tools, path=("tools",) if tools else ("messages",))
        if self._unseen_tools and (tools or used) and add_generation_prompt:
            _log.warning("%s", self._unseen_tools)
            self._unseen_tools = None  # logged once
        if self.form.words == "refused" and any(
            m.get("tool_calls") and said(m)[1] for m in messages
        ):
            raise RequestError(
                "the model's chat template drops calls with words beside them from the "
                "conversation: set model.chat_template_path to one that shows them",
                path=("messages",),
            )
        extra = chat_template_kwargs or {}
        self._check_template_kwargs(extra)
        try:
            text = render(
                self._text,
                messages,
                tools,
                self.form,
                developer_role=self._developer_role,
                add_generation_prompt=add_generation_prompt,
                **extra,
            )
        except Exception as error:
            # A template is a program: it reports what it cannot render by raising, and fails with
            # any error on what it forgot to check.
            raise RequestError(
                f"the model's chat template cannot render these messages: {error}",
                path=("messages",),
            ) from error
        return self._with_images(text, [url for _, url in images_of(messages)])

    def _with_images(self, text: str, urls: Sequence[str]) -> str:
        """A prompt's text with each image's own mark in place of the placeholder.

        Raises:
            RequestError: 400: a message contains a placeholder, or the template left one out.
        """
        if self.vision is None or not urls:
            return text
        parts = text.split(self.vision.image_token)
        if len(parts) != len(urls) + 1:
            raise RequestError(
                f"the chat template wrote {len(parts) - 1} times {self.vision.image_token!r} for "
                f"{len(urls)} images: remove it from the messages' texts, or set "
                "model.chat_template_path to a template that shows every image",
                path=("messages",),
            )
        marks = [_mark(self.vision.ids(url.removeprefix(REFERENCE))[0]) for url in urls]
        return "".join(part + mark for part, mark in zip(parts, [*marks, ""], strict=True))

    def _images(self, messages: list[Message]) -> list[tuple[Path, str]]:
        """Place and URL of each image that is shown to the model."""
        found = [] if self.vision is None else list(images_of(messages))
        if len(found) > self._image_limits.count:
            raise RequestError(
                f"{len(found)} images are in the messages: send at most "
                f"{self._image_limits.count} (tuner.images.max_count)",
                path=("messages",),
            )
        return found

    async def fetch(self, messages: list[Message]) -> None:
        """Fetch the images of checked messages that are on the web.

        Raises:
            RequestError: 400: an image cannot be fetched or used, or there are too many.
        """
        for place, url in self._images(messages):
            if on_the_web(url):
                with _naming(place):
                    await ALBUM.fetch(url, self._image_limits)

    def received(self, messages: list[Message]) -> list[Message]:
        """Checked messages with references in place of images, which are read and remembered.

        Raises:
            RequestError: 400: an image cannot be used, or there are too many.
        """
        found = self._images(messages)
        if self.vision is None or not found:
            return messages
        references = []
        for place, url in found:
            with _naming(place):
                sha256 = ALBUM.received(url, self._image_limits)
                self.vision.ids(sha256)
            references.append({"type": "image_url", "image_url": {"url": REFERENCE + sha256}})
        left = iter(references)
        return [
            {
                **message,
                "content": [
                    next(left) if part["type"] == "image_url" else part
                    for part in message["content"]
                ],
            }
            if isinstance(message.get("content"), list)
            else message
            for message in messages
        ]

    def recorded(self, ids: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[ImageSpan, ...]]:
        """A prompt as the model's own processor writes it, and where its images are."""
        return (ids, ()) if self.vision is None else ALBUM.recorded(ids, self.vision.image_token_id)

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
        return displayable(text)

    def encode(
        self, text: str, limit: int | None = None, *, special: bool = False
    ) -> tuple[int, ...]:
        """Ids of a prompt's text, shape [P].

        Args:
            text: The whole prompt.
            limit: Tokens of the context; None for a text of any length.
            special: Whether the tokenizer adds its special tokens; a chat template writes them.

        Raises:
            RequestError: 400: its length alone is too long.
        """
        self.length_bound.check(text, limit)
        return self._encode_prompt(text, special)

    def word_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The ids of each word as it is written, at the beginning of a text and after a space.

        vLLM leaves out the last form where it has another number of tokens than the one before:
        " answer", one token, could be sampled where "answer" has two.

        Raises:
            RequestError: 400: a word has no tokens.
        """
        found = []
        for index, word in enumerate(words):
            bare = word.lstrip()
            forms = dict.fromkeys(
                self._encode_text(text) for text in (bare, f" {bare}" if bare else "", word)
            )
            ids = [form for form in forms if form]
            if not ids:
                raise wrong(("bad_words", index), "is spelled by no token: leave it out")
            # A form that ends with another form is forbidden by that one.
            found += [a for a in ids if not any(a != b and a[-len(b) :] == b for b in ids)]
        return tuple(found)

    def parse(
        self,
        completion_ids: Sequence[int],
        *,
        tools: Tools,
        prompt_ids: Sequence[int] = (),
        stop: Sequence[str] = (),
    ) -> ParsedMessage:
        """The message of a completion.

        Args:
            completion_ids: Sampled ids, shape [T], that were not cut off; a final special token is
                removed.
            tools: Tools offered to the model; without any, no tool calls are parsed.
            prompt_ids: The prompt, whose end tells whether reasoning was already opened.
            stop: Strings that ended the completion; the text is cut before the first one.
        """
        text, _ = self.completion_text(completion_ids, stop)
        return self.parse_text(text, tools=tools, opened=self.opened_reasoning(prompt_ids))

    def completion_text(
        self, completion_ids: Sequence[int], stop: Sequence[str] = (), *, cut_off: bool = False
    ) -> tuple[str, str | None]:
        """A completion's text without its final special token, cut before the first stop string.

        Args:
            completion_ids: Sampled ids, shape [T].
            stop: Strings that end a completion.
            cut_off: Whether it reached its maximum length, so that no token ended it.

        Returns:
            The text, and the stop string it was cut at.
        """
        ids = list(completion_ids)
        if ids and ids[-1] in self.special_tokens.ids and not cut_off:
            del ids[-1]
        text = self.decode(ids)
        cuts = [(position, string) for string in stop if (position := text.find(string)) >= 0]
        if not cuts:
            return text, None
        position, string = min(cuts)
        return text[:position], string

    def parse_text(self, text: str, *, tools: Tools, opened: bool) -> ParsedMessage:
        """The message of a completion's text.

        Args:
            text: The completion without its final special token.
            tools: Tools offered to the model; without any, no tool calls are parsed.
            opened: Whether the prompt has already opened the reasoning.
        """
        return read(self.scanner(tools=tools, opened=opened), text)

    def scanner(self, *, tools: Tools, opened: bool) -> MessageScanner:
        """A scanner for a text that arrives in pieces; see `parse_text`."""
        return MessageScanner(self.reasoning, self._tool_calls, tools=tools, opened=opened)

    def tool_call_id(self, digest: bytes) -> str:
        """A tool call's id in the form that the family's templates accept."""
        # Mistral's templates accept only nine letters and digits.
        return digest.hex()[:9] if self._tool_calls.short_ids else f"call_{digest.hex()[:24]}"

    @cached_property
    def turn_ends(self) -> tuple[int, ...]:
        """The special tokens that end an assistant turn in a conversation, as far as known.

        That of a turn of text, and that of one of tool calls if it differs.
        """
        ends: list[int | None] = []
        with suppress(RequestError):
            text = self.render_text(ANY_TURN, ())
            _, found, rest = text.rpartition(ANY_TURN[-1]["content"])
            rest = rest.removeprefix(self.reasoning.after_content)
            ends.append(self.special_tokens.at(rest, 0) if found else None)
        with suppress(RequestError):
            text = self.render_text(ANY_CALL[:2], [ANY_TOOL], add_generation_prompt=False)
            ends.append(self.special_tokens.last(text))
        return tuple(dict.fromkeys(end for end in ends if end is not None))

    @property
    def reads_reasoning(self) -> bool:
        """Whether reasoning can be separated from the rest of a text."""
        return self._reasoning_parser != "none"

    def grammar(self, constraints: Constraints, prompt_ids: Sequence[int]) -> str:
        """The grammar of completions that satisfy a request; empty without requirements.

        Raises:
            RequestError: 400: a schema cannot be turned into a grammar, or the family has no
                grammar.
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
        """The bytes of a single token; None if unknown."""
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

    def _encode_text(self, text: str, special: bool = False) -> tuple[int, ...]:
        if self.vision is None or not (marks := list(_MARK.finditer(text))):
            return tuple(self.tokenizer.encode(displayable(text), add_special_tokens=special))
        images = [ALBUM.image_at(_marked(mark[1])) for mark in marks]
        written = (self.vision.read(image.sha256).text for image in images)
        text = displayable(_MARK.sub(lambda _: next(written), text))
        ids = list(self.tokenizer.encode(text, add_special_tokens=special))
        own = (id_ for p in images for id_ in range(p.first, p.first + p.tokens))
        places = [place for place, id_ in enumerate(ids) if id_ == self.vision.image_token_id]
        for place, id_ in zip(places, own, strict=True):
            ids[place] = id_
        return tuple(ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens included; parts of a character show as U+FFFD."""
        return decode(self.tokenizer, [id_ for id_ in ids if id_ < IMAGE_IDS])

    def opened_reasoning(self, prompt_ids: Sequence[int]) -> bool:
        """Whether the prompt's end has opened the reasoning."""
        opener = self.reasoning.opener
        if opener is None or not prompt_ids:
            return False
        return self.decode(prompt_ids[-_TAIL:]).rstrip().endswith(opener)


# An image in a prompt's text: halves of UTF-16 pairs, which a text from outside never has here
# (`displayable`), so nobody can write another's mark.
_MARK = re.compile("\udfff([\udc00-\udffe]{4})")
_BASE = 0x3FF


@contextmanager
def _naming(place: Path) -> Iterator[None]:
    """An image that cannot be used is a RequestError, which begins with its place."""
    try:
        yield
    except ImageError as error:
        raise RequestError(f" {error}", path=place, begins=True) from error


def _mark(id_: int) -> str:
    """The mark of the image whose first token has this id."""
    digits = [id_ // _BASE**power % _BASE for power in range(4)]
    return "\udfff" + "".join(chr(0xDC00 + digit) for digit in digits)


def _marked(digits: str) -> int:
    """Inverse of `_mark`."""
    return sum((ord(digit) - 0xDC00) * _BASE**power for power, digit in enumerate(digits))


def decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    """The text of `ids`, special tokens included."""
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
    """Byte-level BPE's table: the byte of each of its characters (GPT-2)."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {character: byte for byte, character in bytes_to_unicode().items()}


# Prompts of recorded calls with another system prompt, as a teacher reads them.
#
# Only the head of a prompt is replaced. What follows is taken over as ids, so a sampled turn is
# never
# tokenized again:
#
#     recorded   <|im_start|>user\nWhat is 6*7?<|im_end|>\n<|im_start|>assistant\n ...
#     replaced   <|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 6*7? ...
#
# The head ends with a special token, after which ids do not depend on what precedes them. It is
# searched in the messages before the first assistant turn, so nothing in it was sampled.


NO_PLACE = "prompt_has_no_place"
TOO_LONG = "prompt_too_long"
_CONVERSATION: list[Message] = [{"role": "user", "content": "What is 6*7?"}]


def with_system_prompt(messages: Sequence[Message], text: str) -> list[Message]:
    """A conversation that begins with `text` instead of its own system message."""
    own = messages[:1] if messages and messages[0]["role"] in ("system", "developer") else ()
    role = own[0]["role"] if own else "system"
    return [{"role": role, "content": text}, *messages[len(own) :]]


class SystemPrompt:
    """Replaces the system prompt of recorded calls.

    Args:
        renderer: Renderer of the model.
        text: The system prompt.
        limit: Tokens of prompt and completion together.

    Raises:
        ConfigError: The chat template has no place for it, or it leaves no room within `limit`.
    """

    def __init__(self, renderer: ChatRenderer, text: str, *, limit: int) -> None:
        self._renderer = renderer
        self._text = text
        self._limit = limit
        heads = self._heads(_CONVERSATION, [])
        if heads is None or heads[0] == heads[1]:
            raise ConfigError(
                "tuner.algorithm.prompt would change nothing in this model's prompts, or more "
                "than the part before the conversation: its chat template has no system message, "
                "or places it elsewhere; set model.chat_template_path to one that begins with it"
            )
        if len(heads[1]) >= limit:
            raise ConfigError(
                f"tuner.algorithm.prompt has {len(heads[1])} tokens, which leaves no room in a "
                f"context of {limit}: shorten it, or raise model.max_model_len"
            )

    def __call__(self, call: Call) -> tuple[int, ...] | str:
        """The call's prompt with this system prompt in place of its own.

        Returns:
            The ids, shape [P'], or why there are none: more than the head of the prompt would
                change
            (`prompt_has_no_place`), or the call would exceed the context (`prompt_too_long`).
        """
        call = call.compared
        for tools in (call.tools, []):  # with tool_choice none they were not shown
            heads = self._heads(call.messages, tools)
            if heads is not None and call.prompt_ids[: len(heads[0])] == heads[0]:
                prompt_ids = heads[1] + call.prompt_ids[len(heads[0]) :]
                fits = len(prompt_ids) + len(call.completion_ids) <= self._limit
                return prompt_ids if fits else TOO_LONG
        return NO_PLACE

    def _heads(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]
    ) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """The ids of a prompt's head and of its replacement; None if they cannot be separated from
        what follows."""
        turns = [index for index, one in enumerate(messages) if one["role"] == "assistant"]
        try:
            own, other = self._texts(messages[: turns[0]] if turns else messages, tools)
            borders = self._renderer.special_tokens.borders(own)
            ends = (end for start, end in borders if other.endswith(own[start:]))
            if (end := next(ends, None)) is None:
                return None
            heads = own[:end], other[: len(other) - len(own) + end]
            if turns:
                own, other = self._texts(messages, tools)
                if other != heads[1] + own.removeprefix(heads[0]):
                    return None
            return self._renderer.encode(heads[0]), self._renderer.encode(heads[1])
        except RequestError:  # e.g. a template that needs a user's message first
            return None

    def _texts(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]
    ) -> tuple[str, str]:
        """The prompt with its own and with this system prompt."""
        render = self._renderer.render_text
        exchanged = with_system_prompt(messages, self._text)
        return render(messages, tools), render(exchanged, tools)
