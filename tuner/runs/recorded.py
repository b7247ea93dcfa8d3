"""Convert rows of a dataset to conversations and pairs, and to the token ids that are trained.

The assistant turns of a conversation become the ids that a model would have been given and written.

Each trained turn is a row of its own. Its prompt is what the gateway renders when an agent requests
that turn, and its completion is what the chat template writes there, up to the token that ends the
turn. Nothing else is trained, and each turn is trained only in the context in which the model would
write it:

    user: Q1   assistant: <think>R1</think> A1   user: Q2   assistant: <think>R2</think> A2

    row 1   Q1 [R1 A1 end]
    row 2   Q1  A1  Q2 [R2 A2 end]     a template that omits earlier reasoning

Rows with a common beginning share its tokens in the token tree: with a template that omits nothing,
the turns of a conversation are one path.
"""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tuner.config.algorithms import Recorded
from tuner.config.schema import FormatSection
from tuner.errors import DatasetError
from tuner.gateway import ChatRenderer
from tuner.gateway.families.template import Message, said
from tuner.gateway.request_error import RequestError
from tuner.gateway.requests import check_messages, check_tools

SETTING = "buffer.trainer_input.experience_buffer.format"


@dataclass(frozen=True)
class Conversation:
    """Validated messages and tools.

    Attributes:
        messages: In order.
        tools: Tools that the assistant could call.
        trained: Indices of the assistant messages to train, rising.
    """

    messages: list[Message]
    tools: list[dict[str, Any]]
    trained: tuple[int, ...]


def conversation(row: Mapping[str, Any], form: FormatSection) -> Conversation:
    """The conversation in a row of SFT data."""
    if _prompt_type(row, form) == "messages":
        messages = _messages(_column(row, form, "messages_key"), "assistant", text=False)
    else:
        messages = _prompt(row, form)
        messages += _messages(_column(row, form, "response_key"), "assistant", text=True)
    first = 0 if form.enable_concatenated_multi_turn else len(messages) - 1
    return _checked(messages, row, form, first)


def pair(row: Mapping[str, Any], form: FormatSection) -> tuple[Conversation, Conversation]:
    """The better and the worse conversation in a row of DPO data; they begin alike."""
    text = _prompt_type(row, form) == "plaintext"
    if text:
        prompt = _prompt(row, form)
    else:
        prompt = _messages(_column(row, form, "messages_key"), "user", text=False)
    ends = [
        _messages(_column(row, form, key), "assistant", text=text)
        for key in ("chosen_key", "rejected_key")
    ]
    if ends[0] == ends[1]:
        raise DatasetError(f"{form.chosen_key!r} and {form.rejected_key!r} are the same")
    chosen, rejected = (_checked([*prompt, *end], row, form, len(prompt)) for end in ends)
    return chosen, rejected


def _prompt_type(row: Mapping[str, Any], form: FormatSection) -> str:
    if form.prompt_type is not None:
        return form.prompt_type
    return "messages" if row.get(form.messages_key) is not None else "plaintext"


def _prompt(row: Mapping[str, Any], form: FormatSection) -> list[Message]:
    system = form.system_prompt
    if form.system_prompt_key is not None:
        system = _column(row, form, "system_prompt_key")
    said = _messages(_column(row, form, "prompt_key"), "user", text=True)
    return [*([{"role": "system", "content": system}] if system is not None else []), *said]


def _column(row: Mapping[str, Any], form: FormatSection, key: str) -> Any:
    name = getattr(form, key)
    if row.get(name) is None:
        there = ", ".join(column for column, value in row.items() if value is not None)
        raise DatasetError(f"there is no column {name!r} ({SETTING}.{key}); the row has: {there}")
    return row[name]


def _messages(value: Any, role: str, *, text: bool) -> list[Message]:
    """A list of messages, from a list, one message, or text.

    Args:
        value: The column's value.
        role: Role of the message if the value is text.
        text: Whether text is the message's content; else it is the list as JSON, as in Trinity-RFT.
    """
    if isinstance(value, str) and text:
        return [{"role": role, "content": value}]
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise DatasetError(
                f"{value!r:.80} is text, but neither a list of messages nor one as JSON; set "
                f"{SETTING}.prompt_type to plaintext if the columns are text"
            ) from None
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list):
        raise DatasetError(f"{value!r:.80} is neither text nor a list of messages")
    return [dict(one) if isinstance(one, Mapping) else one for one in value]


def _checked(
    messages: list[Message], row: Mapping[str, Any], form: FormatSection, first: int
) -> Conversation:
    """A conversation in which the assistant messages from `first` on are trained."""
    shaped, trained = [], []
    for index, message in enumerate(messages):
        if isinstance(message, dict):
            message, weight = _without_weight(message, index)
            if message.get("role") == "assistant":
                message = _as_assistant(message)
                if weight and index >= first:
                    trained.append(index)
        shaped.append(message)
    tools = row.get(form.tools_key)
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except ValueError as error:
            raise DatasetError(f"column {form.tools_key!r} is not JSON: {error}") from None
    try:
        return Conversation(check_messages(shaped), check_tools(tools or []), tuple(trained))
    except RequestError as error:
        raise DatasetError(str(error)) from None


def _without_weight(message: Message, index: int) -> tuple[Message, int]:
    """A message without OpenAI's `weight`, and that weight: 0 for an answer as context only."""
    weight = message.get("weight")
    if weight not in (None, 0, 1):
        raise DatasetError(f"messages[{index}].weight is {weight!r}; it must be 0 or 1")
    rest = {key: value for key, value in message.items() if key != "weight"}
    return rest, 1 if weight is None else int(weight)


def _as_assistant(message: Message) -> Message:
    """Use one name for reasoning, and arguments as text, like OpenAI."""
    shaped = dict(message)
    if shaped.get("reasoning_content") is None and shaped.get("reasoning") is not None:
        shaped["reasoning_content"] = shaped.pop("reasoning")
    calls = shaped.get("tool_calls")
    if isinstance(calls, list):
        shaped["tool_calls"] = [_with_text_arguments(call) for call in calls]
    return shaped


def _with_text_arguments(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), Mapping):
        return call
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


class UnusableConversation(Exception):
    """A conversation cannot be trained; `reason` is the name it is counted under."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class RecordedTurn:
    """One assistant turn; four bytes per id, since the whole dataset is in memory.

    Attributes:
        prompt_ids: Input of the model, shape [P].
        completion_ids: Target of the model with the end of the turn, shape [T].
    """

    prompt_ids: array[int]
    completion_ids: array[int]

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)


def trained_turns(
    renderer: ChatRenderer, conversation: Conversation, *, longest: int
) -> tuple[RecordedTurn, ...]:
    """The trained turns of a conversation, at least one; raises Unusable, with the reason to
    count, if it cannot be trained.

    Args:
        renderer: The chat form of the trained model.
        conversation: Messages and tools.
        longest: Maximum number of tokens of prompt and completion together; nothing is cut off.
    """
    turns = []
    for index in conversation.trained:
        turn = _turn(renderer, conversation, index)
        if len(turn) > longest:
            raise UnusableConversation("too_long")
        turns.append(turn)
    if not turns:
        raise UnusableConversation("no_assistant_turn")
    return tuple(turns)


def _turn(renderer: ChatRenderer, conversation: Conversation, index: int) -> RecordedTurn:
    messages, tools = conversation.messages, conversation.tools
    try:
        prompt = renderer.render_text(messages[:index], tools)
        whole = renderer.render_text(messages[: index + 1], tools, add_generation_prompt=False)
        if not whole.startswith(prompt):
            raise UnusableConversation("turn_does_not_follow_its_prompt")
        completion = whole[len(prompt) :]
        reasoning, text = said(messages[index])
        # A template may omit what it has no place for; that would be a different turn.
        if reasoning and reasoning.strip() not in completion:
            raise UnusableConversation("reasoning_left_out")
        if not reasoning and "<think>" not in text and text.strip() not in completion:
            raise UnusableConversation("content_left_out")
        prompt_ids, ids = renderer.encode(prompt), renderer.encode(completion)
    except RequestError as error:
        raise DatasetError(f"messages[{index}]: {error}") from None
    special = renderer.special_tokens.ids
    last = max((at for at, id_ in enumerate(ids) if id_ in special), default=-1)
    if last < 0 or renderer.decode(ids[last + 1 :]).strip():
        raise DatasetError(
            f"messages[{index}]: the chat template does not end an assistant turn with a special "
            "token, so a model trained on it would never stop; set "
            "model.custom_chat_template to one that does"
        )
    # A template that writes the next turn's line ends after the last token: no model writes these.
    return RecordedTurn(array("I", prompt_ids), array("I", ids[: last + 1]))


# One row of a dataset: the trained turns of each of its conversations. SFT data has one
# conversation per row, DPO data two, the better one first.
Example = tuple[tuple[RecordedTurn, ...], ...]


@dataclass(frozen=True)
class Examples:
    """A dataset to train on: `rows == len(used) + sum(left_out.values())`. For recorded rollouts an
    example may be a pair of them.

    Attributes:
        used: The examples, in the order of their rows.
        left_out: Number of unused rows or recorded rollouts, by reason.
        tokens_left_out: Number of sampled tokens of recorded rollouts that are in no example, by
            reason.
        held_out: Examples that are not trained and whose loss is logged.
        not_taken: Number of recorded rollouts or pairs in `used` that no step reaches.
    """

    used: tuple[Example, ...]
    left_out: dict[str, int]
    tokens_left_out: dict[str, int] = field(default_factory=dict)
    held_out: tuple[Example, ...] = ()
    not_taken: int = 0

    @property
    def rows(self) -> dict[str, int]:
        """Number of used rows or rollouts, and of dropped ones by reason."""
        late = {"not_taken": self.not_taken} if self.not_taken else {}
        return {"used": len(self.used) - self.not_taken, **self.left_out, **late}


def examples_of(
    rows: Sequence[Mapping[str, Any]],
    renderer: ChatRenderer,
    form: FormatSection,
    *,
    recorded: Recorded,
    longest: int,
) -> Examples:
    """All rows of a dataset as token ids.

    Args:
        rows: The dataset.
        renderer: The chat form of the trained model.
        form: Names and types of the columns.
        recorded: The content of a row.
        longest: Maximum number of tokens of a prompt and its completion; longer rows are dropped
            whole.
    """
    used: list[Example] = []
    left_out: Counter[str] = Counter()
    for number, row in enumerate(rows):
        try:
            both = (conversation(row, form),) if recorded == "conversations" else pair(row, form)
            used.append(tuple(trained_turns(renderer, one, longest=longest) for one in both))
        except UnusableConversation as error:
            left_out[error.reason] += 1
        except DatasetError as error:
            raise DatasetError(f"train_dataset: row {number}: {error}") from None
    if not used:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(left_out.items()))
        raise DatasetError(
            f"train_dataset: no row can be trained ({reasons}); see "
            "docs/recorded_data.md for the reasons"
        )
    return Examples(tuple(used), dict(sorted(left_out.items())))
