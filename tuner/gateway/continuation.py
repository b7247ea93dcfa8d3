r"""Conversations go on with the ids that were sampled, not with the ids that their text would get.

A sampled text may be encoded differently when it comes back as history: the model wrote "an" and
"swer", the tokenizer writes "answer". Then the engine computes the whole history again, and the
model reads tokens that it did not write. So a session remembers each prompt and what was sampled
after it, as alternating pieces of text, and finds them again in the next prompt's text:

    text   <|im_start|>user\n2+40?<|im_end|>\n<|im_start|>assistant\n   the earlier prompt_ids
           It is 42.<|im_end|>                                         its completion_ids
           \n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n  encoded now

A piece is found where the text the template rendered is the very text that was sampled. One more
case counts as found: the rendered turn differs in the formatting of its tool calls alone, as when
the model wrote `{"a":1}` and the template writes `{"a": 1}`. The parsers read the same message out
of both texts, so the framework sent back what it was given, and the model reads its own tokens. A
turn whose reasoning or words the template or the agent changed is another one: everything from
there on is rendered afresh.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tuner.gateway.parsing import ParsedMessage, Tools
from tuner.gateway.renderer import ChatRenderer
from tuner.traces import Rerendered

# The end of a prompt gives a completion's first tokens their context when they are decoded.
_CONTEXT = 8
_REPLACEMENT = "\ufffd"  # what bytes that are no character decode to


@dataclass(frozen=True)
class Prompt:
    """A prompt as text and ids.

    Attributes:
        ids: What the engine gets, shape [P].
        reused: How many of `ids`, from the first on, were taken over from an earlier call.
        rerendered: Why its latest assistant turn was not taken over; see `Call.rerendered`.
        turns: Assistant turns in it.
        after: The completion that it goes on from.
        text: What the template rendered after that completion.
    """

    ids: tuple[int, ...]
    reused: int
    rerendered: Rerendered | None
    turns: int
    after: _Completion
    text: str


@dataclass(eq=False)
class _Completion:
    """A committed completion, and the prompts that went on from it.

    Attributes:
        prompt_ids, ids: Prompt and completion, as sampled.
        text: Of the completion; None if it holds parts of characters, "" at the root.
        end: The special token that it ends with, if it does.
        opened: Whether the prompt has opened the reasoning.
        tools: Tools the model was shown, in whose terms its calls are read.
        turns: Assistant turns in the conversation up to here.
        asked: The completions of each prompt that went on from here, by the text it added.
        parsed, message: What it says, once that was asked; see `_comparable`.
    """

    prompt_ids: tuple[int, ...] = ()
    ids: tuple[int, ...] = ()
    text: str | None = ""
    end: int | None = None
    opened: bool = False
    tools: Tools = ()
    turns: int = 0
    asked: dict[str, list[_Completion]] = field(default_factory=dict)
    parsed: bool = False
    message: tuple[object, ...] | None = None


@dataclass(frozen=True)
class _Match:
    """A completion found in a text, which goes on at `position`.

    Attributes:
        kept: How many of its ids are in the text: all, or all but the end token.
        end: The end token if it is in the text; the text after it is encoded in its context.
    """

    completion: _Completion
    position: int
    kept: int
    end: int | None


class Conversations:
    """What one session has prompted and sampled, found again in the text of a later prompt.

    The first prompts of a session cost nothing: completions are decoded when a prompt with an
    assistant turn comes. Each lookup walks the one matching branch and compares its text once.

    Args:
        renderer: The chat form of the session's model.
    """

    def __init__(self, renderer: ChatRenderer) -> None:
        self._renderer = renderer
        self._root = _Completion()
        self._unread: list[tuple[Prompt, tuple[int, ...], Tools]] = []

    def prompt(self, text: str, turns: int) -> Prompt:
        """The prompt with this text, begun with the ids of an earlier call where that is exact.

        Args:
            text: As the template rendered it.
            turns: Assistant turns in it.

        Raises:
            RequestError: 400: the text cannot be tokenized.
        """
        if not turns:
            return Prompt(self._renderer.encode(text), 0, None, 0, self._root, text)
        for call in self._unread:
            self._read(*call)
        self._unread.clear()
        match, obstacle = self._find(text)
        found = match.completion
        rest = text[match.position :]
        if found is not self._root:
            ids = self._encode_rest(match, rest)
            if ids is not None:
                reused = (*found.prompt_ids, *found.ids[: match.kept])
                why = None if found.turns == turns else obstacle
                return Prompt((*reused, *ids), len(reused), why, turns, found, rest)
            obstacle = "tokenizer"
        return Prompt(self._renderer.encode(text), 0, obstacle, turns, self._root, text)

    def raw(self, ids: tuple[int, ...]) -> Prompt:
        """The prompt with these very ids, shape [P]."""
        return Prompt(ids, 0, None, 0, self._root, "")

    def add(self, prompt: Prompt, completion_ids: tuple[int, ...], *, tools: Tools) -> None:
        """Remember a committed call.

        Args:
            prompt: As `prompt` gave it.
            completion_ids: What was sampled after it, shape [T].
            tools: Tools the model was shown; without any, no tool calls are looked for.
        """
        self._unread.append((prompt, completion_ids, tools))

    def _read(self, prompt: Prompt, ids: tuple[int, ...], tools: Tools) -> None:
        siblings = prompt.after.asked.setdefault(prompt.text, [])
        if any(known.ids == ids and known.prompt_ids == prompt.ids for known in siblings):
            return
        special = self._renderer.special_tokens
        siblings.append(
            _Completion(
                prompt_ids=prompt.ids,
                ids=ids,
                text=self._text_of(prompt.ids, ids),
                end=ids[-1] if ids and ids[-1] in special.ids else None,
                opened=self._renderer.opened_reasoning(prompt.ids),
                tools=tools,
                turns=prompt.turns + 1,
            )
        )

    def _text_of(self, prompt_ids: Sequence[int], ids: Sequence[int]) -> str | None:
        """The completion's text where it stands, or None where its bytes are no text."""
        context = list(prompt_ids[-_CONTEXT:])
        before = self._renderer.decode(context)
        whole = self._renderer.decode([*context, *ids])
        # The context's own first token may be part of a character; the completion's must not be.
        text = whole[len(before) :]
        return text if whole.startswith(before) and _REPLACEMENT not in text else None

    def _find(self, text: str) -> tuple[_Match, Rerendered]:
        """The completion that reaches furthest into `text`; of equal ones the earliest committed.

        Returns:
            The match (the root at 0 where there is none), and why the search ended there.
        """
        best = _Match(self._root, 0, 0, None)
        obstacle: Rerendered = "text"
        frontier = [best]
        for match in frontier:
            for asked, completions in match.completion.asked.items():
                if not text.startswith(asked, match.position):
                    continue
                start = match.position + len(asked)
                exact = [m for c in completions if (m := self._exact(c, text, start)) is not None]
                found = exact or [
                    m for c in completions if (m := self._same_message(c, text, start)) is not None
                ]
                if not found and any(c.text is None for c in completions):
                    obstacle = "characters"
                frontier += found
                for candidate in found:
                    if candidate.position > best.position:
                        best = candidate
        return best, obstacle

    def _exact(self, completion: _Completion, text: str, start: int) -> _Match | None:
        """The completion in `text` at `start`, word for word, if its turn ends there."""
        sampled = completion.text
        if sampled is None:
            return None
        special = self._renderer.special_tokens
        kept = len(completion.ids)
        if completion.end is not None:
            if text.startswith(sampled, start):
                return _Match(completion, start + len(sampled), kept, completion.end)
            sampled = sampled.removesuffix(special.text(completion.end))
            kept -= 1
        # Cut off, or ended by another token than the template writes: the template's own token
        # ends the turn, and was not sampled.
        position = start + len(sampled)
        if text.startswith(sampled, start) and special.at(text, position) is not None:
            return _Match(completion, position, kept, None)
        return None

    def _same_message(self, completion: _Completion, text: str, start: int) -> _Match | None:
        """The completion in place of the turn at `start`, if both texts spell one message."""
        if completion.text is None or completion.end is None:
            return None
        end = self._renderer.special_tokens.text(completion.end)
        stop = text.find(end, start)
        if stop < 0:
            return None
        if not completion.parsed:
            completion.parsed = True
            completion.message = self._message(completion, completion.text.removesuffix(end))
        message = completion.message
        if message is None or message != self._message(completion, text[start:stop]):
            return None
        return _Match(completion, stop + len(end), len(completion.ids), completion.end)

    def _message(self, completion: _Completion, text: str) -> tuple[object, ...] | None:
        parsed = self._renderer.parse_text(text, tools=completion.tools, opened=completion.opened)
        return _comparable(parsed, text)

    def _encode_rest(self, match: _Match, rest: str) -> tuple[int, ...] | None:
        special = self._renderer.special_tokens
        if match.end is not None:
            return special.encode_after(match.end, rest)
        return special.encode_from(rest)


def _comparable(message: ParsedMessage, text: str) -> tuple[object, ...] | None:
    """What a message says: equal for texts that differ in the formatting of tool calls alone.

    Everything up to the end of reasoning and content counts word for word: a template that writes
    their tags anew, or moves them, rewrites the turn. Arguments are compared as JSON, where 1, 1.0
    and true differ. A message without tool calls is its text alone, and equals no other.
    """
    if not message.tool_calls:
        return None
    spoken = 0
    for part in (message.reasoning, message.content):
        if part is not None:
            start = text.find(part, spoken)
            if start < 0:
                return None
            spoken = start + len(part)
    try:
        calls: list[Any] = [
            (call.name, json.dumps(json.loads(call.arguments), sort_keys=True))
            for call in message.tool_calls
        ]
    except (ValueError, RecursionError):
        return None
    return (text[:spoken], message.content, message.reasoning, calls)
