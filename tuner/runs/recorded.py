"""From rows of a dataset to conversations and pairs, and to the token ids that are trained.

The assistant turns of a conversation as the ids that a model would have been given and written.

Each turn that is trained is a row of its own. Its prompt is what the gateway renders when an agent
asks for that turn, and its completion is what the chat template writes there, up to the token that
ends the turn. Nothing else is trained, and nothing is trained in another context than the one in
which the model would write it:

    user: Q1   assistant: <think>R1</think> A1   user: Q2   assistant: <think>R2</think> A2

    row 1   Q1 [R1 A1 end]
    row 2   Q1  A1  Q2 [R2 A2 end]     a template that leaves out earlier reasoning

Rows that begin alike share these tokens in the token tree: with a template that leaves nothing out,
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
    """Messages and tools, known to be well formed.

    Attributes:
        messages: In order.
        tools: What the assistant could call.
        trained: Indices of the assistant messages to train, rising.
    """

    messages: list[Message]
    tools: list[dict[str, Any]]
    trained: tuple[int, ...]


def conversation(row: Mapping[str, Any], form: FormatSection) -> Conversation:
    """The conversation that a row of SFT data holds.

    Raises:
        DatasetError: A column is missing, or what it holds is no conversation.
    """
    if _prompt_type(row, form) == "messages":
        messages = _messages(_column(row, form, "messages_key"), "assistant", text=False)
    else:
        messages = _prompt(row, form)
        messages += _messages(_column(row, form, "response_key"), "assistant", text=True)
    first = 0 if form.enable_concatenated_multi_turn else len(messages) - 1
    return _checked(messages, row, form, first)


def pair(row: Mapping[str, Any], form: FormatSection) -> tuple[Conversation, Conversation]:
    """The better and the worse conversation that a row of DPO data holds; they begin alike.

    Raises:
        DatasetError: A column is missing, what it holds is no conversation, or both are the same.
    """
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
        raise DatasetError(f"there is no column {name!r} ({SETTING}.{key}); it has: {there}")
    return row[name]


def _messages(value: Any, role: str, *, text: bool) -> list[Message]:
    """A list of messages, given as one, as one message, or as text.

    Args:
        value: What the column holds.
        role: Whose text it is, where it is text.
        text: Whether text is what is said; else it is the list as JSON text, as Trinity-RFT has it.
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
    """A conversation whose assistant messages from `first` on are trained."""
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
    """A message without OpenAI's `weight`, and it: 0 for an answer that is only context."""
    weight = message.get("weight")
    if weight not in (None, 0, 1):
        raise DatasetError(f"messages[{index}].weight is {weight!r}; it must be 0 or 1")
    rest = {key: value for key, value in message.items() if key != "weight"}
    return rest, 1 if weight is None else int(weight)


def _as_assistant(message: Message) -> Message:
    """One name for reasoning, and arguments as text, as OpenAI has them."""
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


class Unusable(Exception):
    """A conversation that cannot be trained; `reason` is what it is counted by."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Turn:
    """One assistant turn; four bytes for each id, since a whole dataset is held.

    Attributes:
        prompt_ids: What the model is given, shape [P].
        completion_ids: What it is to write, the end of the turn included, shape [T].
    """

    prompt_ids: array[int]
    completion_ids: array[int]

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)


def trained_turns(
    renderer: ChatRenderer, conversation: Conversation, *, longest: int
) -> tuple[Turn, ...]:
    """The turns of a conversation that are trained, at least one.

    Args:
        renderer: The chat form of the model that is trained.
        conversation: Messages and tools.
        longest: The most tokens of prompt and completion together; nothing is ever cut off.

    Raises:
        Unusable: There is no turn to train, one is too long, or the template does not write it as
            the model would have to.
        DatasetError: The chat template refuses the conversation, or ends no turn.
    """
    turns = []
    for index in conversation.trained:
        turn = _turn(renderer, conversation, index)
        if len(turn) > longest:
            raise Unusable("too_long")
        turns.append(turn)
    if not turns:
        raise Unusable("no_assistant_turn")
    return tuple(turns)


def _turn(renderer: ChatRenderer, conversation: Conversation, index: int) -> Turn:
    messages, tools = conversation.messages, conversation.tools
    try:
        prompt = renderer.render_text(messages[:index], tools)
        whole = renderer.render_text(messages[: index + 1], tools, add_generation_prompt=False)
        if not whole.startswith(prompt):
            raise Unusable("turn_does_not_follow_its_prompt")
        completion = whole[len(prompt) :]
        reasoning, text = said(messages[index])
        # A template may leave out what it has no place for; the turn would be another one.
        if reasoning and reasoning.strip() not in completion:
            raise Unusable("reasoning_left_out")
        if not reasoning and "<think>" not in text and text.strip() not in completion:
            raise Unusable("content_left_out")
        prompt_ids, ids = renderer.encode(prompt), renderer.encode(completion)
    except RequestError as error:
        raise DatasetError(f"messages[{index}]: {error}") from None
    special = renderer.special_tokens.ids
    last = max((at for at, id_ in enumerate(ids) if id_ in special), default=-1)
    if last < 0 or renderer.decode(ids[last + 1 :]).strip():
        raise DatasetError(
            f"messages[{index}]: the chat template does not end an assistant turn with a special "
            "token, so a model that is trained on it would never stop; set "
            "model.custom_chat_template to one that does"
        )
    # A template that writes the next turn's line ends behind the last token: no model writes these.
    return Turn(array("I", prompt_ids), array("I", ids[: last + 1]))


# One row of a dataset: the trained turns of each of its conversations. SFT data has one
# conversation in a row, DPO data two, the better one first.
Example = tuple[tuple[Turn, ...], ...]


@dataclass(frozen=True)
class Examples:
    """A dataset to train on: `rows == len(used) + sum(left_out.values())`; of recorded rollouts an
    example may be a pair of them.

    Attributes:
        used: The examples, in the order of their rows.
        left_out: How many rows, or recorded rollouts, are not used, by reason.
        tokens_left_out: Sampled tokens of recorded rollouts that no example has, by reason.
        held_out: Examples that are not trained and whose loss is logged.
        not_taken: How many of the recorded rollouts or pairs in `used` no step comes to.
    """

    used: tuple[Example, ...]
    left_out: dict[str, int]
    tokens_left_out: dict[str, int] = field(default_factory=dict)
    held_out: tuple[Example, ...] = ()
    not_taken: int = 0

    @property
    def rows(self) -> dict[str, int]:
        """How many are used, and how many rows or rollouts are left out by which reason."""
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
        renderer: The chat form of the model that is trained.
        form: Which columns say what.
        recorded: What a row holds.
        longest: The most tokens of a prompt and its completion; longer rows are left out whole.

    Raises:
        DatasetError: A row is not of that form; names the row. Or no row can be used.
    """
    used: list[Example] = []
    left_out: Counter[str] = Counter()
    for number, row in enumerate(rows):
        try:
            both = (conversation(row, form),) if recorded == "conversations" else pair(row, form)
            used.append(tuple(trained_turns(renderer, one, longest=longest) for one in both))
        except Unusable as error:
            left_out[error.reason] += 1
        except DatasetError as error:
            raise DatasetError(f"train_dataset: row {number}: {error}") from None
    if not used:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(left_out.items()))
        raise DatasetError(
            f"train_dataset: no row can be trained ({reasons}); docs/recorded_data.md says what "
            "these mean"
        )
    return Examples(tuple(used), dict(sorted(left_out.items())))
