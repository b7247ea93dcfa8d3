"""Requests and answers independent of a dialect, and the field readers that dialects share."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tuner.engines.base import COLDEST, EngineCapabilities, Generation, SamplingParams
from tuner.engines.images import REFERENCE
from tuner.gateway.families.grammars import AUTO, AnswerSchema, Constraints, ToolChoice
from tuner.gateway.families.literals import is_object, refuse_constant
from tuner.gateway.families.parsing import ParsedMessage
from tuner.gateway.families.renderer import LONG, ChatRenderer, is_long
from tuner.gateway.families.template import Message, content_of, images_of, text_of
from tuner.gateway.request_error import FieldError, Path, dotted, kind, shown, wrong

# Readers of JSON fields: each raises a specific message for a wrong value.
#
# A reader takes the place of a field in the body and its value, and returns the parsed value.


T = TypeVar("T")

MAX_STOP_STRINGS = 4  # OpenAI's limit
# vLLM's model runner has room for no more, and dies of them.
MAX_NAMED = {"logit_bias": 1024, "bad_words": 128, "stop_token_ids": 64}

Reader = Callable[[Path, Any], Any]

NO_EFFECT = object()
"""Returned by a reader for a field that changes nothing."""


def number(low: float, high: float, *, above: bool = False) -> Reader:
    """A number in [low, high], or in (low, high] with `above`."""

    def read(at: Path, value: Any) -> float:
        wanted = f"a number {f'above {low:g}' if above else f'from {low:g}'} to {high:g}"
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise wrong(at, f"must be {wanted}, not {kind(value)}")
        if not low <= value <= high or (above and value == low):
            raise wrong(at, f"is {shown(value)}: it must be {wanted}")
        return float(value)

    return read


def integer(low: int, high: int | None = None) -> Reader:
    """An integer in [low, high]."""

    def read(at: Path, value: Any) -> int:
        wanted = f"an integer of at least {low}" if high is None else f"an integer {low} to {high}"
        if isinstance(value, bool) or not isinstance(value, int):
            found = shown(value) if isinstance(value, float) else kind(value)
            raise wrong(at, f"must be {wanted}, not {found}")
        if value < low or (high is not None and value > high):
            raise wrong(at, f"is {shown(value)}: it must be {wanted}")
        return value

    return read


def _typed(type_: type[T], what: str) -> Callable[[Path, Any], T]:
    """A value of this type; `what` is its name in messages."""

    def read(at: Path, value: Any) -> T:
        if not isinstance(value, type_):
            raise wrong(at, f"must be {what}, not {kind(value)}")
        return value

    return read


boolean = _typed(bool, "true or false")
string = _typed(str, "a string")
object_field: Callable[[Path, Any], dict[str, Any]] = _typed(dict, "an object")
array: Callable[[Path, Any], list[Any]] = _typed(list, "an array")


def name(at: Path, value: Any) -> str:
    """Text that is not empty."""
    if not isinstance(value, str) or not value:
        raise wrong(at, "must be a string that is not empty")
    return value


def without_effect(read: Reader) -> Reader:
    """A field of the right type whose value does not affect the completion."""

    def check(at: Path, value: Any) -> Any:
        read(at, value)
        return NO_EFFECT

    return check


def only(*allowed: Any, because: str) -> Reader:
    """A field that is accepted with neutral values and rejected with others."""

    def check(at: Path, value: Any) -> Any:
        for item in allowed:
            if value == item and isinstance(value, bool) == isinstance(item, bool):
                return NO_EFFECT
        instead = f" or send {json.dumps(allowed[0])}" if allowed else ""
        raise wrong(at, f"is {shown(value)}: {because}; leave it out{instead}")

    return check


def only_keys(
    fields: Mapping[str, Any],
    known: Iterable[str],
    at: Path,
    what: str,
    *,
    ignored: Iterable[str] = (),
) -> None:
    """Reject unknown fields of an object that are not empty.

    Clients echo a message with every field that their type has; empty ones are ignored, and so are
    those that mean nothing for the prompt.
    """
    for key, value in fields.items():
        if key not in known and key not in ignored and not _empty(value):
            raise wrong(
                (*at, key),
                f"is not a field of {what} that this gateway knows ({', '.join(known)}): leave it "
                "out",
            )


def _empty(value: Any) -> bool:
    return value is None or value == []


def arguments(at: Path, value: Any) -> str:
    """The arguments of an earlier tool call: one JSON object as text, as every answer has them."""
    text = string(at, value)
    if not is_object(text):
        raise wrong(at, f"is {shown(text)}: it must be one JSON object as text, such as {{}}")
    return text


def with_effort(
    kwargs: dict[str, Any], effort: str | None, at: Path, renderer: ChatRenderer
) -> dict[str, Any]:
    """Template keywords with the effort that a request asks for at `at`."""
    if effort is None:
        return kwargs
    if not renderer.reads("reasoning_effort"):
        raise wrong(
            at,
            f"is {shown(effort)}, but the model's chat template does not read "
            "reasoning_effort: leave it out",
        )
    given = kwargs.get("reasoning_effort", effort)
    if given != effort:
        raise wrong(
            ("chat_template_kwargs", "reasoning_effort"),
            f"is {shown(given)}, but {dotted(at)} is {shown(effort)}: send one of them",
        )
    return {**kwargs, "reasoning_effort": effort}


def stop_strings(at: Path, value: Any) -> tuple[str, ...]:
    """One string or a few, none of them empty."""
    strings = [value] if isinstance(value, str) else value
    return strings_that_end(at, strings, most=MAX_STOP_STRINGS, what="a string or an array")


def strings_that_end(
    at: Path, strings: Any, *, most: int, what: str = "an array"
) -> tuple[str, ...]:
    """A few strings, none of them empty."""
    if not isinstance(strings, list) or not all(isinstance(item, str) for item in strings):
        raise wrong(at, f"must be {what} of strings")
    if len(strings) > most:
        raise wrong(at, f"has {len(strings)} strings: send at most {most}")
    if "" in strings:
        raise wrong(at, "holds an empty string, which would end at once")
    return tuple(strings)


def top_k(at: Path, value: Any) -> int:
    """Number of most probable tokens to keep; -1 keeps all."""
    result: int = integer(-1, 2**31 - 1)(at, value)
    return result if result > 0 else -1  # vLLM writes "every token" as 0 or -1


def temperature(high: float) -> Reader:
    """0, or a number from 1e-6 to `high`; less than 1e-6 is 0, as clients write it."""
    read = number(0, high)

    def of(at: Path, value: Any) -> float:
        found: float = read(at, value)
        return found if found >= COLDEST else 0.0

    return of


def logit_bias(at: Path, value: Any) -> dict[int, float]:
    """Values added to the logits of single tokens, by token id."""
    read = number(-100, 100)
    bias = {}
    for key, one in object_field(at, value).items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise wrong((*at, key), "is not a token id: name tokens by their ids")
        bias[int(key)] = read((*at, key), one)
    return bias


def token_ids(at: Path, value: Any) -> tuple[int, ...]:
    """A list of token ids."""
    read = integer(0)
    return tuple(read((*at, index), one) for index, one in enumerate(array(at, value)))


def words(at: Path, value: Any) -> tuple[str, ...]:
    """A list of texts, none of them empty."""
    return tuple(name((*at, index), one) for index, one in enumerate(array(at, value)))


def check_settings(sampling: SamplingParams, capabilities: EngineCapabilities, ids: int) -> None:
    """Reject settings that the engine does not support, or that name unknown tokens."""
    if not sampling.rare:
        return
    if not capabilities.every_setting:
        raise wrong((sampling.rare[0],), "is not supported by this engine: leave it out")
    sizes = {
        "logit_bias": len(sampling.logit_bias),
        "bad_words": sum(map(len, sampling.bad_words)),
        "stop_token_ids": len(sampling.stop_token_ids),
    }
    for setting, size in sizes.items():
        if size > MAX_NAMED[setting]:
            raise wrong((setting,), f"names {size} tokens: send at most {MAX_NAMED[setting]}")
    named = {
        "logit_bias": [token for token, _ in sampling.logit_bias],
        "stop_token_ids": sampling.stop_token_ids,
    }
    for setting, tokens in named.items():
        for token in tokens:
            if token >= ids:
                raise wrong(
                    (setting,), f"names token {token}: the model has ids from 0 to {ids - 1}"
                )


def check_top_logprobs(at: Path, value: int, capabilities: EngineCapabilities) -> None:
    """Refuse more alternatives than the engine reports.

    Raises:
        RequestError: 400.
    """
    most = capabilities.max_top_logprobs
    if value > most:
        raise wrong(at, f"is {value}, but this engine reports at most {most}")


MAX_CHOICES = 128  # OpenAI's limit on n


@dataclass(frozen=True)
class CompletionRequest:
    """What a request asks for; None where it does not say.

    Attributes:
        messages: In the form of chat completions, well formed; as sent, where that is the dialect,
            but for what `check_messages` leaves out.
        prompts: Texts or token ids to complete as they are, instead of messages.
        add_special_tokens: Whether texts of `prompts` get the tokenizer's special tokens, such as
            the one that begins a text.
        tools: In the form of chat completions, and well formed.
        shown_tools: Those the model is shown: none with `tool_choice: "none"`.
        response_format: The JSON that an answer must be; None for any text.
        constraints: What all of this demands of a completion's form.
        long: Whether its prompts are made beside the event loop.
        body_bytes: Of the body, where all that it asks for was in it.
        stream: Whether the answer is a stream of server-sent events.
        include_usage: Whether a stream of chunks ends with the token counts.
    """

    model: str
    messages: list[Message]
    prompts: tuple[str | tuple[int, ...], ...] | None = None
    add_special_tokens: bool = True
    tools: list[dict[str, Any]] = field(default_factory=list)
    tool_choice: ToolChoice = AUTO
    parallel_tool_calls: bool = True
    response_format: AnswerSchema | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    n: int = 1
    seed: int | None = None
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    bad_words: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    return_token_ids: bool = False
    stream: bool = False
    include_usage: bool = False
    body_bytes: int | None = field(default=None, compare=False)

    @property
    def shown_tools(self) -> list[dict[str, Any]]:
        return [] if self.tool_choice.mode == "none" else self.tools

    @property
    def constraints(self) -> Constraints:
        return Constraints(
            self.shown_tools, self.tool_choice, self.parallel_tool_calls, self.response_format
        )

    @property
    def long(self) -> bool:
        if any(not url.startswith(("data:", REFERENCE)) for _, url in images_of(self.messages)):
            return True  # an image in a file, or on the web, may have any size
        if self.body_bytes is not None and self.body_bytes <= LONG:
            return False
        texts: list[Any] = self.messages
        if self.prompts is not None:  # token ids need no work
            texts = [prompt for prompt in self.prompts if isinstance(prompt, str)]
        schema = self.response_format and self.response_format.schema
        return is_long(texts, self.tools, schema, list(self.bad_words))

    def rare(
        self, word_ids: Callable[[Sequence[str]], tuple[tuple[int, ...], ...]]
    ) -> dict[str, Any]:
        """The settings that not every engine supports, as fields of `SamplingParams`.

        Args:
            word_ids: Tokenizes words.
        """
        return {
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "logit_bias": tuple(self.logit_bias.items()),
            "bad_words": word_ids(self.bad_words),
            "stop_token_ids": self.stop_token_ids,
        }


@dataclass(frozen=True)
class Choice:
    """One finished completion of an answer.

    Attributes:
        index: Its place in the answer.
        prompt_ids: Its prompt, shape [P].
        generation: As sampled.
        text: Its text without the final special token, cut before a stop string.
        stop_string: The stop string that ended it, if any.
        parsed: The message parsed from it.
        tool_call_ids: One for each of `parsed.tool_calls`.
        finish_reason: "stop", "length" or "tool_calls".
    """

    index: int
    prompt_ids: tuple[int, ...]
    generation: Generation
    text: str
    stop_string: str | None
    parsed: ParsedMessage
    tool_call_ids: tuple[str, ...]
    finish_reason: str

    @property
    def message(self) -> dict[str, Any]:
        """The assistant message of a chat completion."""
        parsed = self.parsed
        message: dict[str, Any] = {"role": "assistant", "content": parsed.content, "refusal": None}
        if parsed.reasoning is not None:
            message["reasoning_content"] = parsed.reasoning
        if parsed.tool_calls:
            message["tool_calls"] = [
                {
                    "id": id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for id, call in zip(self.tool_call_ids, parsed.tool_calls, strict=True)
            ]
        return message


@dataclass(frozen=True)
class Answer:
    """The result of a request whose calls are committed."""

    choices: tuple[Choice, ...]

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompts; a prompt shared by several choices counts once."""
        return sum(len(ids) for ids in {choice.prompt_ids for choice in self.choices})

    @property
    def completion_tokens(self) -> int:
        return sum(len(choice.generation.completion_ids) for choice in self.choices)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the engine did not have to compute; the maximum over the choices."""
        return max(choice.generation.cached_tokens for choice in self.choices)


def read_fields(
    body: bytes, table: Mapping[str, Reader], *, required: Iterable[str], what: str
) -> dict[str, Any]:
    """The fields of a JSON body, checked by `table`.

    For every optional field null means the same as leaving it out.

    Args:
        table: A reader for each known field.
        required: Required fields.
        what: Name of the body in messages: "a chat completion request".

    Raises:
        RequestError: 400 that names the field, its value and what to do.
    """
    fields = json_object(body)
    for key in required:
        if fields.get(key) is None:
            raise wrong((key,), "is missing: it is required")
    values: dict[str, Any] = {}
    for key, value in fields.items():
        read = table.get(key)
        if read is None:
            near = difflib.get_close_matches(key, table, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "leave it out"
            raise FieldError(f"{shown(key)} is not a field of {what}: {hint}", path=(key,))
        if value is None:
            continue
        result = read((key,), value)
        if result is not NO_EFFECT:
            values[key] = result
    return values


def with_usage(values: dict[str, Any]) -> bool:
    """Remove `stream_options` from a request's values; returns whether a stream ends with the
    counts."""
    include_usage = values.pop("stream_options", None)
    if include_usage is not None and not values.get("stream"):
        raise wrong(("stream_options",), "is set without stream: leave it out or send stream: true")
    return bool(include_usage)


def stream_options(at: Path, value: Any) -> bool:
    """Whether the stream ends with the token counts."""
    options = object_field(at, value)
    for key in options:
        if key not in ("include_usage", "include_obfuscation"):
            raise wrong((*at, key), "is not known: leave it out")
    if options.get("include_obfuscation"):
        raise wrong(
            (*at, "include_obfuscation"), "is true: streams are not padded here; send false"
        )
    return boolean((*at, "include_usage"), options.get("include_usage") or False)


# No schema or task needs more, and what is recorded can be read back.
MAX_DEPTH = 128
# Longer bodies are not searched for the field of a number that cannot be read.
LONG_NUMBERED = 2**20


def json_object(body: bytes) -> dict[str, Any]:
    """Parse the JSON object in `body`, which may be nested `MAX_DEPTH` levels deep."""
    try:
        # Decoded here: `json.loads` reads bytes that are not UTF-8, and other encodings.
        text = body.decode("utf-8-sig")
        fields = json.loads(text, parse_constant=refuse_constant, parse_float=_finite_number)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise _unreadable(body, error) from None
    if not isinstance(fields, dict):
        raise FieldError(f"the body must be a JSON object, not {kind(fields)}")
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH and _depth_is_over(fields, MAX_DEPTH):
        raise _too_deep()
    return fields


def _too_deep() -> FieldError:
    return FieldError(f"the body is nested more than {MAX_DEPTH} levels deep: flatten it")


def _depth_is_over(value: Any, most: int) -> bool:
    level = [value]
    for _ in range(most):
        inside = (one.values() if isinstance(one, dict) else one for one in level)
        level = [one for some in inside for one in some if isinstance(one, dict | list)]
    return bool(level)


def _finite_number(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{shown(text)} is too large for a number")
    return value


class _NoNumber(str):
    """The text of a number that is not finite, or has thousands of digits."""


def _unreadable(body: bytes, error: ValueError) -> FieldError:
    """The error of a body that cannot be parsed; names the field if only a number is wrong."""

    def number_or_text(read: Callable[[str], Any]) -> Callable[[str], Any]:
        def parse(text: str) -> Any:
            try:
                return read(text)
            except ValueError:
                return _NoNumber(text)

        return parse

    try:
        if len(body) > LONG_NUMBERED:
            raise error
        fields = json.loads(
            body.decode("utf-8-sig"),
            parse_constant=_NoNumber,
            parse_float=number_or_text(_finite_number),
            parse_int=number_or_text(int),
        )
    except (ValueError, RecursionError):
        return FieldError(f"the body is not valid JSON: {error}")
    if not isinstance(fields, dict):
        return FieldError(f"the body must be a JSON object, not {kind(fields)}")
    places: list[tuple[Path, Any]] = [((), fields)]
    for at, value in places:
        inside = value.items() if isinstance(value, dict) else enumerate(value)
        for key, one in inside:
            if isinstance(one, _NoNumber):
                return wrong((*at, key), f"is {shown(one)[1:-1]}: it must be a finite number")
            if isinstance(one, dict | list):
                places.append(((*at, key), one))
    return FieldError(f"the body is not valid JSON: {error}")


_ROLES = ("system", "developer", "user", "assistant", "tool")
_COMMON = ("role", "content", "name")
_BY_ROLE = {
    "assistant": ("tool_calls", "reasoning_content", "reasoning", "refusal"),
    "tool": ("tool_call_id",),
}
# Lists of pieces of an answer's reasoning, as OpenRouter and LiteLLM return them beside its text.
_PIECES = ("reasoning_details", "thinking_blocks")
# Fields that clients send back with an answer, and that say nothing more.
_ECHOED = (*_PIECES, "annotations", "parsed", "provider_specific_fields")
# The field with the text of a piece of reasoning, by its type; encrypted ones have none.
_REASONING = {
    "thinking": "thinking",
    "redacted_thinking": None,
    "reasoning.text": "text",
    "reasoning.summary": "summary",
    "reasoning.encrypted": None,
}


def check_messages(value: Any, at: Path = ("messages",), *, images: bool = False) -> list[Message]:
    """Check messages in the form of chat completions.

    Args:
        value: The messages.
        at: Their place in the body.
        images: Whether the model reads images.

    Returns:
        The messages without fields that mean nothing for a prompt. What other clients write
        elsewhere has its usual place: reasoning in `reasoning_content`, refusals in `content`.

    Raises:
        RequestError: 400 that names the message and the field.
    """
    if not array(at, value):
        raise wrong(at, "is empty: send at least one message")
    return [_message(message, (*at, index), images) for index, message in enumerate(value)]


def _message(message: Any, at: Path, images: bool) -> Message:
    role = object_field(at, message).get("role")
    if role not in _ROLES:
        raise wrong((*at, "role"), f"is {shown(role)}: use one of {', '.join(_ROLES)}")
    answer = role == "assistant"
    known, ignored = _COMMON + _BY_ROLE.get(role, ()), ("cache_control", *(_ECHOED * answer))
    if answer and message.get("function_call") is not None:
        raise wrong((*at, "function_call"), "was replaced by tool_calls: send the call there")
    only_keys(message, known, at, f"a message with role {role!r}", ignored=ignored)
    for key in ("name", "tool_call_id", "reasoning_content", "reasoning", "refusal"):
        if message.get(key) is not None:
            string((*at, key), message[key])
    content = message.get("content")
    if content is not None:
        shown_parts = ("text", "image_url") if images and role in ("user", "tool") else _PARTS
        _check_text(content, (*at, "content"), _ANSWER_PARTS if answer else shown_parts)
    elif not answer:
        raise wrong((*at, "content"), "is missing: only an assistant message may omit it")
    if role == "tool" and message.get("tool_call_id") is None:
        raise wrong((*at, "tool_call_id"), "is missing: name the call that this result belongs to")
    read = {key: item for key, item in message.items() if key not in ignored or _empty(item)}
    if message.get("tool_calls") is not None:
        calls = enumerate(array((*at, "tool_calls"), message["tool_calls"]))
        read["tool_calls"] = [_call(call, (*at, "tool_calls", index)) for index, call in calls]
    return _answer(message, read, at) if answer else read


def _answer(message: Message, read: Message, at: Path) -> Message:
    """An answer as it is `read`, with its refusals as content and its reasoning as text."""
    content = message.get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
    refusal = read.pop("refusal") if read.get("refusal") else None
    if refusal or any(part["type"] != "text" for part in parts):
        texts = [part[part["type"]] for part in parts if part["type"] in ("text", "refusal")]
        read["content"] = content_of([text for text in (*texts, refusal) if text]) or None
    if not (read.get("reasoning_content") or read.get("reasoning")):
        said = [_reasoning(parts, (*at, "content"), others=("text", "refusal"))]
        said += [_reasoning(message.get(key) or [], (*at, key)) for key in _PIECES]
        if reasoning := next(filter(None, said), None):
            read["reasoning_content"] = reasoning
    return read


def _reasoning(pieces: Any, at: Path, others: tuple[str, ...] = ()) -> str:
    """The text of pieces of reasoning among `others`; "" if all are encrypted."""
    texts = []
    for index, piece in enumerate(array(at, pieces)):
        here = (*at, index)
        type_ = object_field(here, piece).get("type")
        if type_ in others:
            continue
        if not isinstance(type_, str) or type_ not in _REASONING:
            raise wrong((*here, "type"), f"is {shown(type_)}: use {', '.join(_REASONING)}")
        key = _REASONING[type_]
        if key is not None and (text := piece.get(key)) is not None:
            _check_text(text, (*here, key), _PARTS)  # Mistral's is a list of text parts
            texts.append(text_of(text))
    return "".join(texts)


_PARTS = ("text",)
_ANSWER_PARTS = ("text", "refusal", "thinking", "redacted_thinking")


def _check_text(content: Any, at: Path, types: tuple[str, ...]) -> None:
    """Check text, or parts of these types."""
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        raise wrong(at, f"must be a string or an array of text parts, not {kind(content)}")
    for index, part in enumerate(content):
        here = (*at, index)
        type_ = object_field(here, part).get("type")
        if type_ not in types:
            seen = "text parts only"
            if "image_url" in types:
                seen = "text and image_url parts only"
            raise wrong((*here, "type"), f"is {shown(type_)}: this model reads {seen}")
        if type_ == "image_url":
            _check_image(part.get("image_url"), (*here, "image_url"))
        if type_ in ("text", "refusal"):
            string((*here, type_), part.get(type_))


def _check_image(image: Any, at: Path) -> None:
    """Check that a part names an image; it is read later."""
    name((*at, "url"), object_field(at, image).get("url"))
    only_keys(image, ("url", "detail"), at, "an image")
    check_detail((*at, "detail"), image.get("detail"))


def check_detail(at: Path, detail: Any) -> None:
    """Reject a size of an image that the model's processor would not choose."""
    if detail not in (None, "auto", "high"):
        raise wrong(at, f"is {shown(detail)}: the model's processor chooses the size; leave it out")


def image_part(at: Path, url: Any) -> dict[str, Any]:
    """The part of a chat message for an image with this URL."""
    return {"type": "image_url", "image_url": {"url": name(at, url)}}


def _call(call: Any, at: Path) -> dict[str, Any]:
    """A tool call without fields that mean nothing for a prompt, such as its place in a stream."""
    if not isinstance(call, dict) or call.get("type", "function") != "function":
        raise wrong(at, 'must be {"id", "type": "function", "function": {"name", "arguments"}}')
    at = (*at, "function")
    function = object_field(at, call.get("function"))
    for key, read in (("name", string), ("arguments", arguments)):
        read((*at, key), function.get(key))
    function = {key: item for key, item in function.items() if key in ("name", "arguments")}
    kept = {key: item for key, item in call.items() if key in ("id", "type", "function")}
    return {**kept, "function": function}


def check_tools(value: Any, at: Path = ("tools",)) -> list[dict[str, Any]]:
    """Check tools in the form of chat completions.

    Raises:
        RequestError: 400 that names the tool and the field.
    """
    for index, tool in enumerate(array(at, value)):
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise wrong(
                (*at, index),
                'must be {"type": "function", "function": {...}}: only functions can be called',
            )
        here = (*at, index, "function")
        function = object_field(here, tool.get("function"))
        name((*here, "name"), function.get("name"))
        for key, read in (
            ("description", string),
            ("parameters", object_field),
            ("strict", boolean),
        ):
            if function.get(key) is not None:
                read((*here, key), function[key])
    return list(value)
