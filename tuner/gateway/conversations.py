r"""Conversations continue with the sampled ids, not with the ids of their re-encoded text.

A sampled text may be encoded differently when it comes back as history: the model wrote "an" and
"swer", the tokenizer writes "answer". Then the engine would compute the whole history again, and
the model would read tokens that it did not write. So a session remembers each prompt and what was
sampled after it, as alternating pieces of text, and finds them again in the next prompt's text:

    text   <|im_start|>user\n2+40?<|im_end|>\n<|im_start|>assistant\n   the earlier prompt_ids
           It is 42.<|im_end|>                                         its completion_ids
           \n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n  encoded now

A piece is found if the rendered text equals the sampled text. It also counts as found if the
rendered turn differs only in the formatting of its tool calls, as when the model wrote `{"a":1}`
and the template writes `{"a": 1}`. The parsers read the same message from both texts, so the
framework returned what it was given, and the model reads its own tokens. If the template or the
agent changed the reasoning or words of a turn, everything from that turn on is encoded anew.

Under the policy `keep` a third case counts: the rendered turn is the same, but its reasoning is
missing. Whether the template or the agent left it out, the model reads what it wrote. The prompt
before the turn may have opened the reasoning, which a history does not show: a piece that ends with
the reasoning's tags is also found without them.

A turn that the token limit cut off is found if the agent returned its message: the template may
close what the model left open, or write a call that was cut off before the whole ones.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial

from tuner.encoding import json_text
from tuner.gateway.families.forms import Tools
from tuner.gateway.families.literals import json_value
from tuner.gateway.families.parsing import ParsedMessage
from tuner.gateway.families.renderer import ChatRenderer
from tuner.gateway.families.template import Message, said
from tuner.traces import ReasoningPolicy, Rerendered

# When two different texts are the same assistant turn.


# The end of a prompt is the context in which a completion's first tokens are decoded.
CONTEXT = 8
LONGEST_OPENER = 64  # characters; "<think>\n\n</think>\n\n" has 19


@dataclass(frozen=True)
class Turn:
    """A turn's text, split after its reasoning.

    Attributes:
        reasoning: Without the white space at its tags; "" if it is empty, None without tags.
        answer: Content and tool calls, as in the text.
    """

    reasoning: str | None
    answer: str


def turn(renderer: ChatRenderer, text: str, *, opened: bool = False) -> Turn:
    """Split the text of a turn; `opened` if the prompt before it has opened the reasoning."""
    reasoning, answer = renderer.reasoning(text, opened)
    return Turn(None if reasoning is None else reasoning.strip(), answer)


def sent_reasoning(renderer: ChatRenderer, messages: Sequence[Message]) -> list[str]:
    """The reasoning of each assistant turn as the agent sent it back, "" for none."""
    sent = []
    for reasoning, content in (said(m) for m in messages if m["role"] == "assistant"):
        sent.append((reasoning or turn(renderer, content).reasoning or "").strip())
    return sent


def reasoning_ids(
    renderer: ChatRenderer,
    prompt_ids: Sequence[int],
    ids: Sequence[int],
    before: int,
    tags: str,
) -> int:
    """Number of ids of a completion, and of its prompt's end, before its answer.

    Args:
        renderer: Decodes ids.
        prompt_ids: Shape [P].
        ids: The sampled ids after it, shape [T].
        before: Characters of the completion before its answer.
        tags: The part of the reasoning at the prompt's end; see `opener`.
    """
    context = list(prompt_ids[-CONTEXT:])
    base = len(renderer.decode(context))

    def length(count: int) -> int:
        return len(renderer.decode([*context, *ids[:count]])) - base

    def tail(count: int) -> int:
        return len(renderer.decode(prompt_ids[len(prompt_ids) - count :]))

    # The length of decoded text only grows with the ids, so the border is found by bisection.
    spoken = bisect_left(range(len(ids)), before, key=length)
    return spoken + bisect_left(range(len(prompt_ids)), len(tags), key=tail)


def opener(renderer: ChatRenderer, tail: str) -> str:
    r"""The part of the reasoning at the end of a prompt: "<think>\n", an empty block, or "".

    Args:
        renderer: Recognises reasoning.
        tail: The last `LONGEST_OPENER` characters of the prompt.
    """
    ends = (tail[start:] for start in range(len(tail)) if not tail[start].isspace())
    return next((end for end in ends if turn(renderer, end) == Turn("", "")), "")


def same_but_for_reasoning(
    renderer: ChatRenderer, sampled: Turn, rendered: Turn, *, opened: bool, tools: Tools
) -> bool:
    """Whether `rendered` is `sampled`, with or without its reasoning.

    The rest must agree word for word, except for the formatting of tool calls. Line ends between
    the reasoning's tags and the answer belong to the tags: if one of the texts has tags there, the
    two may differ in them.

    Args:
        renderer: Parses tool calls.
        sampled, rendered: The two turns.
        opened: Whether the prompt before `sampled` ends with the reasoning's tags.
        tools: Tools offered to the model; without any, no tool calls are parsed.
    """
    if rendered.reasoning and rendered.reasoning != sampled.reasoning:
        return False
    one, other = sampled.answer, rendered.answer
    if opened or sampled.reasoning is not None or rendered.reasoning is not None:
        one, other = one.lstrip("\n"), other.lstrip("\n")
    if one == other:
        return True
    if not tools:
        return False
    ours, theirs = (
        comparable(renderer.parse_text(text, tools=tools, opened=False), text)
        for text in (one, other)
    )
    return ours is not None and ours == theirs


def comparable(message: ParsedMessage, text: str) -> tuple[object, ...] | None:
    """A key of the message: equal for texts that differ only in the formatting of tool calls.

    Everything up to the end of reasoning and content counts word for word: a template that changes
    or moves its tags changes the turn. Arguments are compared as JSON, where 1, 1.0 and true
    differ. None for a message without tool calls, which equals no other text.
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
    calls = _calls((call.name, call.arguments) for call in message.tool_calls)
    return None if calls is None else (text[:spoken], message.content, message.reasoning, calls)


def _calls(calls: Iterable[tuple[str, str]]) -> list[tuple[str, str]] | None:
    """Names and arguments in one form; None if arguments are not JSON."""
    try:
        return [
            (name, json_text(json_value(arguments), sort_keys=True)) for name, arguments in calls
        ]
    except (ValueError, RecursionError):
        return None


_REPLACEMENT = "\ufffd"  # decoding of bytes that are no character


@dataclass(frozen=True)
class Prompt:
    """A prompt as text and ids.

    Attributes:
        ids: Ids for the engine, shape [P].
        reused: Number of leading `ids` that were taken over from an earlier call.
        rerendered: Why its latest assistant turn was not taken over; see `Call.rerendered`.
        turns: Number of its assistant turns.
        after: The completion that it continues.
        text: The text that the template rendered after that completion.
        kept_reasoning: Number of `ids` of reasoning that the template's text does not contain.
        recomputed: Number of `ids` of turns that "keep" would have taken over.
    """

    ids: tuple[int, ...]
    reused: int
    rerendered: Rerendered | None
    turns: int
    after: _Completion
    text: str
    kept_reasoning: int = 0
    recomputed: int = 0


@dataclass(eq=False)
class _Completion:
    """A committed completion, and the prompts that continue it.

    Attributes:
        prompt_ids, ids: Prompt and completion, as sampled.
        text: Text of the completion; None if it contains parts of characters, "" at the root.
        end: The special token at its end, if any.
        cut_off: Whether it reached its maximum length.
        opened: Whether the prompt has opened the reasoning.
        tools: Tools offered to the model, for parsing its calls.
        turns: Assistant turns in the conversation up to here.
        asked: The completions of each prompt that continues it, by the text it added.
        parsed, message: Its message, computed on demand; see `comparable`.
        turn: The same, split after its reasoning.
    """

    prompt_ids: tuple[int, ...] = ()
    ids: tuple[int, ...] = ()
    text: str | None = ""
    end: int | None = None
    cut_off: bool = False
    opened: bool = False
    tools: Tools = ()
    turns: int = 0
    asked: dict[str, list[_Completion]] = field(default_factory=dict)
    parsed: bool = False
    message: tuple[object, ...] | None = None
    turn: Turn | None = None


@dataclass(frozen=True)
class _Match:
    """A completion found in a text, which continues at `position`.

    Attributes:
        end: The completion's end token if it is in the text; the text after it is encoded in its
            context.
        unseen: Number of ids up to here that are reasoning missing from the text.
        lacks_from: Position of the first turn that lacks its reasoning.
    """

    completion: _Completion
    position: int
    end: int | None
    unseen: int = 0
    lacks_from: int | None = None

    @property
    def ids(self) -> tuple[int, ...]:
        """Prompt and completion as far as they are in the text: all, or all but the end token."""
        whole = (*self.completion.prompt_ids, *self.completion.ids)
        return whole if self.end == self.completion.end else whole[:-1]


class Conversations:
    """All prompts and completions of one session, for finding them in the text of a later prompt.

    The first prompts of a session cost nothing: completions are decoded when a prompt with an
    assistant turn arrives. Each lookup walks the one matching branch and compares its text once.

    Args:
        renderer: Chat renderer of the session's model.
        reasoning: Treatment of reasoning that is missing from a rendered turn.
    """

    def __init__(self, renderer: ChatRenderer, reasoning: ReasoningPolicy = "template") -> None:
        self.reasoning = reasoning
        self._renderer = renderer
        self._opener = cache(partial(opener, renderer))
        self._root = _Completion()
        self._unread: deque[tuple[Prompt, tuple[int, ...], Tools, bool]] = deque()

    def prompt(
        self, text: str, turns: int, messages: Sequence[Message] = (), *, limit: int | None = None
    ) -> Prompt:
        """The prompt with this text, starting with the ids of an earlier call where that is exact.

        Args:
            text: As rendered by the template.
            turns: Number of its assistant turns.
            messages: The messages that it was rendered from. They show whether a cut-off turn was
                returned; under `keep`, returned reasoning distinguishes completions that are
                otherwise equal.
            limit: Tokens of the context; None for a prompt of any length.

        Raises:
            RequestError: 400: its length alone is too long.
        """
        if not turns:
            return Prompt(self._renderer.encode(text, limit), 0, None, 0, self._root, text)
        while self._unread:
            self._read(*self._unread.popleft())
        keep = self.reasoning == "keep"
        match, obstacle = self._find(text, messages, keep=keep)
        found = match.completion
        rest = text[match.position :]
        if found is not self._root:
            special = self._renderer.special_tokens
            self._renderer.length_bound.check(rest, limit)
            if match.end is None:
                ids = special.encode_from(rest)
            else:
                ids = special.encode_after(match.end, rest)
            if ids is not None:
                why = None if found.turns == turns else obstacle
                if why is None and match.end != found.end:
                    why = "end"
                again = self._recomputed(text, messages) if why == "text" else 0
                reused = match.ids
                return Prompt(
                    (*reused, *ids), len(reused), why, turns, found, rest, match.unseen, again
                )
            obstacle = "tokenizer"
        again = self._recomputed(text, messages) if obstacle == "text" else 0
        ids = self._renderer.encode(text, limit)
        return Prompt(ids, 0, obstacle, turns, self._root, text, recomputed=again)

    def raw(self, ids: tuple[int, ...]) -> Prompt:
        """The prompt with exactly these ids, shape [P]."""
        return Prompt(ids, 0, None, 0, self._root, "")

    def add(
        self,
        prompt: Prompt,
        completion_ids: tuple[int, ...],
        *,
        tools: Tools,
        cut_off: bool = False,
    ) -> None:
        """Remember a committed call; safe while a prompt is made in another thread.

        Args:
            prompt: As returned by `prompt`.
            completion_ids: The ids sampled after it, shape [T].
            tools: Tools offered to the model; without any, no tool calls are parsed.
            cut_off: Whether it reached its maximum length.
        """
        self._unread.append((prompt, completion_ids, tools, cut_off))

    def _read(self, prompt: Prompt, ids: tuple[int, ...], tools: Tools, cut_off: bool) -> None:
        siblings = prompt.after.asked.setdefault(prompt.text, [])
        if any(known.ids == ids and known.prompt_ids == prompt.ids for known in siblings):
            return
        special = self._renderer.special_tokens
        siblings.append(
            _Completion(
                prompt_ids=prompt.ids,
                ids=ids,
                text=self._text_of(prompt.ids, ids, cut_off=cut_off),
                end=ids[-1] if ids and ids[-1] in special.ids and not cut_off else None,
                cut_off=cut_off,
                opened=self._renderer.opened_reasoning(prompt.ids),
                tools=tools,
                turns=prompt.turns + 1,
            )
        )

    def _text_of(
        self, prompt_ids: Sequence[int], ids: Sequence[int], *, cut_off: bool
    ) -> str | None:
        """The completion's text in its context, or None if its bytes are not text.

        The character in which the limit cut it off is the replacement that its reader saw.
        """
        context = list(prompt_ids[-CONTEXT:])
        before = self._renderer.decode(context)
        whole = self._renderer.decode([*context, *ids])
        # The context's own first token may be part of a character; the completion's must not be.
        text = whole[len(before) :]
        certain = text.rstrip(_REPLACEMENT) if cut_off else text
        return text if whole.startswith(before) and _REPLACEMENT not in certain else None

    def _recomputed(self, text: str, messages: Sequence[Message]) -> int:
        """Ids of the turns in `text` that lack only their reasoning: the cost of `template`."""
        if self.reasoning == "keep" or not self._renderer.reads_reasoning:
            return 0
        match, _ = self._find(text, messages, keep=True)
        if match.lacks_from is None:
            return 0
        return len(self._renderer.encode(text[match.lacks_from : match.position]))

    def _find(
        self, text: str, messages: Sequence[Message], *, keep: bool
    ) -> tuple[_Match, Rerendered]:
        """The completion that reaches furthest into `text`; among equal ones the earliest
        committed.

        Returns:
            The match (the root at 0 if there is none), and why the search ended there.
        """
        answers = [message for message in messages if message["role"] == "assistant"]
        sent = sent_reasoning(self._renderer, answers) if keep else []
        best = _Match(self._root, 0, None)
        obstacle: Rerendered = "text"
        frontier = [best]
        for match in frontier:  # grows by what is found: the path down the matching branch
            for asked, completions in match.completion.asked.items():
                if keep:
                    found = self._said_again(match, asked, completions, text, sent)
                else:
                    found = self._rendered_again(match, asked, completions, text)
                if found is None:
                    continue
                after = match.position + len(asked)
                if not found and text.startswith(asked, match.position):
                    found = [m for c in completions if (m := self._closed(c, text, after, answers))]
                if not found and any(c.text is None for c in completions):
                    obstacle = "characters"
                frontier += found
                for candidate in found:
                    if candidate.position > best.position:
                        best = candidate
        return best, obstacle

    def _rendered_again(
        self, match: _Match, asked: str, completions: Sequence[_Completion], text: str
    ) -> list[_Match] | None:
        """Those of `completions` whose turn was rendered; None if `asked` does not precede it."""
        start = match.position + len(asked)
        if not text.startswith(asked, match.position):
            return None
        exact = [m for c in completions if (m := self._exact(c, text, start)) is not None]
        return exact or [
            m for c in completions if (m := self._same_message(c, text, start)) is not None
        ]

    def _said_again(
        self,
        match: _Match,
        asked: str,
        completions: Sequence[_Completion],
        text: str,
        sent: Sequence[str],
    ) -> list[_Match] | None:
        """Those of `completions` whose turn was rendered, with or without its reasoning.

        If the agent returned reasoning, those with that reasoning; otherwise those whose exact text
        was rendered come first. None if `asked` does not precede the turn.
        """
        tags = self._opener(asked[-LONGEST_OPENER:])
        bare = asked.removesuffix(tags)
        if not text.startswith(bare, match.position):
            return None
        start = match.position + len(bare)
        index = completions[0].turns - 1
        known = sent[index] if index < len(sent) else ""
        exact: list[_Match] = []
        if text.startswith(tags, start):
            after = start + len(tags)
            exact = [m for c in completions if (m := self._exact(c, text, after)) is not None]
        kept = [m for c in completions if (m := self._reasoned(c, text, start, tags, known))]
        if not (known and kept):
            as_it_was = {m.completion for m in exact}
            kept = exact + [m for m in kept if m.completion not in as_it_was]
        return [
            replace(
                m,
                unseen=match.unseen + m.unseen,
                lacks_from=start if match.lacks_from is None and m.unseen else match.lacks_from,
            )
            for m in kept
        ]

    def _reasoned(
        self, completion: _Completion, text: str, start: int, tags: str, known: str
    ) -> _Match | None:
        """The completion in place of the turn at `start`, if that lacks only its reasoning.

        Args:
            completion: A completion whose prompt ended with `tags`.
            text, start: The rendered turn, with or without those tags.
            tags: See `opener`.
            known: The reasoning that the agent returned with the turn, "" for none.
        """
        if completion.text is None:
            return None
        special = self._renderer.special_tokens
        sampled = completion.text
        if completion.end is not None:
            sampled = sampled.removesuffix(special.text(completion.end))
        if completion.turn is None:
            completion.turn = turn(self._renderer, sampled, opened=completion.opened)
        ours = completion.turn
        if known and known != ours.reasoning:
            return None
        for stop, end in self._ends(completion, text, start):
            rendered = turn(self._renderer, text[start:stop])
            if not same_but_for_reasoning(
                self._renderer, ours, rendered, opened=bool(tags), tools=completion.tools
            ):
                continue
            unseen = 0
            if not rendered.reasoning:
                before = len(sampled) - len(ours.answer)
                unseen = reasoning_ids(
                    self._renderer, completion.prompt_ids, completion.ids, before, tags
                )
            past = stop if end is None else stop + len(special.text(end))
            return _Match(completion, past, end, unseen)
        return None

    def _ends(
        self, completion: _Completion, text: str, start: int
    ) -> Iterator[tuple[int, int | None]]:
        """Possible ends of the turn that begins at `start`, with the end token if it was sampled.

        A turn that was cut off, or that ended with another token, ends at the template's token. A
        token may also end the messages that a turn consists of.
        """
        for token in dict.fromkeys((completion.end, *self._renderer.turn_ends)):
            if token is not None:
                end = self._renderer.special_tokens.text(token)
                stop = start - len(end)
                for _ in range(1 + completion.ids.count(token)):
                    stop = text.find(end, stop + len(end))
                    if stop < 0:
                        break
                    yield stop, token if token == completion.end else None

    def _exact(self, completion: _Completion, text: str, start: int) -> _Match | None:
        """The completion in `text` at `start`, word for word, if its turn ends there."""
        sampled = completion.text
        if sampled is None:
            return None
        special = self._renderer.special_tokens
        if completion.end is not None:
            if text.startswith(sampled, start):
                return _Match(completion, start + len(sampled), completion.end)
            sampled = sampled.removesuffix(special.text(completion.end))
        # Cut off, or ended by another token than the template writes: the template's own token ends
        # the turn and was not sampled.
        position = start + len(sampled)
        if text.startswith(sampled, start) and special.at(text, position) is not None:
            return _Match(completion, position, None)
        return None

    def _same_message(self, completion: _Completion, text: str, start: int) -> _Match | None:
        """The completion in place of the turn at `start`, if both texts spell one message."""
        if completion.text is None:
            return None
        special = self._renderer.special_tokens
        if not completion.parsed:
            completion.parsed = True
            end = "" if completion.end is None else special.text(completion.end)
            completion.message = self._message(completion, completion.text.removesuffix(end))
        if completion.message is None:
            return None
        for stop, token in self._ends(completion, text, start):
            if completion.message == self._message(completion, text[start:stop]):
                past = stop if token is None else stop + len(special.text(token))
                return _Match(completion, past, token)
        return None

    def _closed(
        self, completion: _Completion, text: str, start: int, answers: Sequence[Message]
    ) -> _Match | None:
        """The cut-off completion in place of the turn at `start`, if its message was sent back."""
        index = completion.turns - 1
        if completion.text is None or not completion.cut_off or index >= len(answers):
            return None
        ours = self._renderer.parse_text(
            completion.text, tools=completion.tools, opened=completion.opened
        )
        reasoning, words = said(answers[index])
        sent = [call["function"] for call in answers[index].get("tool_calls") or ()]
        calls = _calls((call["name"], call["arguments"]) for call in sent)
        if (
            words != (ours.content or "")
            or (reasoning or ours.reasoning) != ours.reasoning
            or calls != _calls((call.name, call.arguments) for call in ours.tool_calls)
        ):
            return None
        for stop, token in self._ends(completion, text, start):
            rendered = text[start:stop]
            shown = self._renderer.parse_text(
                rendered, tools=completion.tools, opened=completion.opened
            )
            if (
                (shown.reasoning or "").strip() == (ours.reasoning or "").strip()
                and calls == _calls((call.name, call.arguments) for call in shown.tool_calls)
                and (calls or words.strip() in rendered)
            ):
                return _Match(completion, stop, token)
        return None

    def _message(self, completion: _Completion, text: str) -> tuple[object, ...] | None:
        parsed = self._renderer.parse_text(text, tools=completion.tools, opened=completion.opened)
        return comparable(parsed, text)
