"""What a session's calls and answers are written through, and how it is made again from them.

A session that the process does not know, because it was started again, is made when its key comes:
its conversations from the calls that are stored, rendered again in the order in which they were
committed. What the template makes of their messages must be the very ids that were recorded: then
the next turn goes on with the ids that were sampled. A call for which they are not, as one with
template arguments of its own, is left out: what would continue it is rendered afresh, as always
where an earlier turn is not found.

An application that names no session sends its conversations as agents do: all of it, each time. The
digest of what was said up to an assistant's turn is stored with the call that said it (`talk_of`),
so that a request finds the session it goes on from by its longest beginning that was recorded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tuner.errors import TunerError
from tuner.gateway import ChatRenderer
from tuner.gateway.conversations import Conversations
from tuner.gateway.request_error import RequestError
from tuner.gateway.service import Replay, Reply
from tuner.gateway.sessions import KeptResponse
from tuner.serving.serving_store import ServingStore
from tuner.serving.tables import StoredReply
from tuner.traces import Call, ReasoningPolicy

Message = dict[str, Any]
Redact = Callable[[list[Message]], list[Message]]


def restored_conversations(
    renderer: ChatRenderer, reasoning: ReasoningPolicy, calls: Iterable[Call]
) -> Conversations:
    """The conversations of a session with these calls, in order of commitment; in any thread."""
    conversations = Conversations(renderer, reasoning)
    for call in calls:
        if call.undelivered or call.dialect == "completions" or not call.prompt_ids:
            continue
        # With `tool_choice: "none"` the model was shown no tools.
        for tools in (call.tools, []) if call.tools else ([],):
            try:
                text = renderer.render_text(call.messages, tools)
                turns = sum(message["role"] == "assistant" for message in call.messages)
                prompt = conversations.prompt(text, turns, call.messages)
            except RequestError:  # it came with template arguments, without which it is refused
                continue
            if prompt.ids == call.prompt_ids:
                conversations.add(prompt, call.completion_ids, tools=tools)
                break
    return conversations


@dataclass(frozen=True)
class Noted:
    """What was committed, for who counts it.

    Attributes:
        session: Its id.
        calls: As they are stored.
        redacted: Whether they are without their tokens.
    """

    session: str
    calls: Sequence[Call]
    redacted: bool


class SessionSink:
    """Writes what one session does into the store, as `tuner.gateway.service.CallSink`.

    Args:
        store: Where.
        id_: The session's.
        application: Whose it is, for whose requests conversations are known again; or None.
        redact: What is stored of messages; None is all.
        opening: Opens the session in the store with its first call; None where it is there.
        noted: Is told of what was committed.

    Attributes:
        stored: Whether the session is in the store.
        application: Whose it is, or None.
        closed: Whether nothing is kept any more: the session was deleted.
    """

    def __init__(
        self,
        store: ServingStore,
        id_: str,
        *,
        application: str | None,
        redact: Redact | None,
        opening: Callable[[], None] | None,
        noted: Callable[[Noted], None],
    ) -> None:
        self._store = store
        self._id = id_
        self.application = application
        self._redact = redact
        self._opening = opening
        self._noted = noted
        self._unstored: dict[str, Replay] = {}
        self._private = False  # whether anything was redacted, so that answers stay in memory
        self.closed = False

    @property
    def stored(self) -> bool:
        return self._opening is None

    @property
    def private(self) -> bool:
        """Whether something of it was redacted: whole answers are not stored then."""
        return self._private

    def add(self, calls: Sequence[Call], request: str | None) -> None:
        """As `CallSink.add`."""
        if self.closed:
            return
        kept: Sequence[Call] = calls
        found = [redacted(call, self._redact) for call in calls]
        changed = any(one is not None for one in found)
        if changed:  # the calls of one request have their prompt in common
            kept = [one or without_tokens(call) for call, one in zip(calls, found, strict=True)]
        talks = [
            None if self.application is None or call.undelivered else talk_of(call) for call in kept
        ]
        with self._store.writing():
            if self._opening is not None:
                self._opening()
            self._store.add_calls(self._id, kept, request=request, redacted=changed, talks=talks)
        self._opening = None
        self._private = self._private or changed
        self._noted(Noted(self._id, kept, changed))

    def begin(self, request: str) -> Replay | None:
        """As `CallSink.begin`."""
        if request in self._unstored:
            return self._unstored[request]
        if not self.stored or self.closed:
            return None
        found = self._store.reply(self._id, request)
        if found is None:
            self._store.retried(self._id, request)
            return None
        replay = Replay(found.request, Reply(200, found.body, found.content_type))
        replay.done.set()
        return replay

    def replied(self, request: str, replay: Replay) -> None:
        """As `CallSink.replied`."""
        answer = replay.answer
        if answer is None or not self.stored or self.closed:
            return
        if self._private:
            self._unstored[request] = replay
            return
        reply = StoredReply(replay.request, answer.body, answer.content_type)
        self._store.keep_reply(self._id, request, reply)


class StoredResponses(MutableMapping[str, KeptResponse]):
    """The responses that a session can go on from, in the store.

    Args:
        sink: The session's; what is private is kept in memory alone.
    """

    def __init__(self, store: ServingStore, id_: str, sink: SessionSink) -> None:
        self._store, self._id, self._sink = store, id_, sink
        self._unstored: dict[str, KeptResponse] = {}

    def __getitem__(self, response: str) -> KeptResponse:
        if response in self._unstored:
            return self._unstored[response]
        found = self._store.response(self._id, response) if self._sink.stored else None
        if found is None:
            raise KeyError(response)
        return KeptResponse(**json.loads(found))

    def __setitem__(self, response: str, kept: KeptResponse) -> None:
        if self._sink.private or not self._sink.stored:
            self._unstored[response] = kept
        else:
            self._store.keep_response(self._id, response, json.dumps(asdict(kept)))

    def __delitem__(self, response: str) -> None:
        del self._unstored[response]

    def __iter__(self) -> Iterator[str]:
        return iter(self._unstored)

    def __len__(self) -> int:
        return len(self._unstored)


def redacted(call: Call, redact: Redact | None) -> Call | None:
    """The call as it is stored, where that is changed; None: as it is.

    Raises:
        TunerError: What the function returns is no list of messages, or it failed.
    """
    if redact is None:
        return None
    messages, response = redact_messages(redact, call.messages), call.response
    said = redact_messages(redact, [call.response])
    if messages == call.messages and said == [call.response]:
        return None
    response = said[0] if len(said) == 1 else {"role": "assistant", "content": None}
    return without_tokens(replace(call, messages=messages, response=response))


def redact_messages(redact: Redact, messages: list[Message]) -> list[Message]:
    """What is stored of messages; those given stay as they are.

    Raises:
        TunerError: What the function returns is no list of messages, or it failed.
    """
    try:
        found: Any = redact(json.loads(json.dumps(messages)))
    except Exception as error:  # whose words may hold what is not to be seen
        raise TunerError(f"tuner.serving.redact raised {type(error).__name__}") from None
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise TunerError("tuner.serving.redact must return a list of messages")
    return found


def without_tokens(call: Call) -> Call:
    """A call without what spells its words: ids, log-probs, forms, stop strings; its tokens are
    counted still."""
    return replace(
        call,
        prompt_ids=(),
        completion_ids=(),
        logprobs=(),
        kept=(),
        top_logprobs=(),
        masked=(),
        tools=[],
        sampling=replace(
            call.sampling, stop=(), grammar="", bad_words=(), logit_bias=(), stop_token_ids=()
        ),
        billed=call.usage,
        invalid="redacted: it is stored without its tokens",
    )


def talk_of(call: Call) -> bytes:
    """The digest of the conversation that a call ends."""
    *_, (_, found) = digests([*call.messages, call.response])
    return found


def beginnings(messages: list[dict[str, Any]]) -> list[bytes]:
    """The digests of all beginnings that end with an assistant's turn, the longest first."""
    return [found for role, found in digests(messages) if role == "assistant"][::-1]


def digests(messages: Iterable[dict[str, Any]]) -> Iterator[tuple[str, bytes]]:
    """For each message its role and the digest of all up to it: role, text and tool calls, without
    reasoning, ids and names."""
    so_far = b""
    for message in messages:
        said = json.dumps([message.get("role"), _text(message), _called(message)])
        so_far = hashlib.sha256(so_far + said.encode()).digest()
        yield str(message.get("role")), so_far


def _text(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "\n".join(str(part.get("text", "")) for part in content)  # as templates get it


def _called(message: dict[str, Any]) -> list[tuple[str, Any]]:
    functions = [call.get("function", {}) for call in message.get("tool_calls") or ()]
    return [(one.get("name", ""), _arguments(one.get("arguments"))) for one in functions]


def _arguments(given: Any) -> Any:
    """Arguments in one spelling; clients write the JSON that they got anew."""
    try:
        return json.dumps(json.loads(given), sort_keys=True)
    except (TypeError, ValueError):
        return given if isinstance(given, str) else json.dumps(given, sort_keys=True)
