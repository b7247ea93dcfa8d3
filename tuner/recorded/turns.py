"""The assistant turns of a conversation as the ids that a model would have been given and written.

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

from array import array
from dataclasses import dataclass

from tuner.errors import DatasetError
from tuner.gateway import ChatRenderer
from tuner.gateway.errors import RequestError
from tuner.gateway.messages import said
from tuner.recorded.columns import Conversation


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
