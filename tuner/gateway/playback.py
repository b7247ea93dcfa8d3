"""A gateway without a model: requests are answered from a recorded rollout by their content.

There are no token ids, so no tokenizer, template or weights are needed. A request matches a
recorded one if its messages, tools and settings do; its answer is the recorded message, in any
dialect, streamed or not. What only a tokenizer knows is not compared: the grammar of a form
(`tool_choice`, `response_format`), `bad_words`, `chat_template_kwargs`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from tuner.engines.base import FINISH_REASONS, EngineCapabilities, Generation, SamplingParams
from tuner.gateway.app import EXCHANGES, IDEMPOTENCY_HEADER, Gateway, complete, once
from tuner.gateway.completion import Completion
from tuner.gateway.dialects import Exchange
from tuner.gateway.dialects.chat import ChatExchange
from tuner.gateway.families.parsing import Delta, ParsedMessage, ParsedToolCall
from tuner.gateway.relay import CHAT, read_body, sampling_said
from tuner.gateway.request_error import RequestError, has_diverged
from tuner.gateway.requests import Answer, Choice, CompletionRequest
from tuner.gateway.script import RecordedRequest, Script, others
from tuner.gateway.service import Reply, StreamReply
from tuner.gateway.sessions import Credit, Session
from tuner.traces import Call, Trace, Usage

_MANY = 2**31 - 1


class MessageScript(Script):
    """A script whose requests are found by messages, tools and settings.

    Args:
        trace, calls, beyond: As for a `Script`.
        context: Maximum of prompt and answer tokens together; None if unknown, and then the limit
            of an answer is not compared.

    Attributes:
        relayed: Whether a remote model answered: requests are compared as they were sent.

    Raises:
        TunerError: As `Script`.
    """

    def __init__(
        self,
        trace: Trace,
        calls: int | None = None,
        *,
        context: int | None = None,
        beyond: Callable[[int], None] = lambda number: None,
    ) -> None:
        self.context = context
        self.relayed = any(call.billed is not None for call in trace.calls)
        super().__init__(trace, calls, ends=True, beyond=beyond)

    def _unfit(self, call: Call) -> str | None:
        return None

    def _whole(self, call: Call) -> int:
        return 1

    def told(
        self,
        request: CompletionRequest,
        settings: Callable[[Call, int], SamplingParams],
        free: Collection[str],
    ) -> tuple[str, Mapping[int, Call]] | None:
        """The id of a request's response and the calls that answer its choices; None if none match.

        Args:
            request: The request.
            settings: Settings of a choice, if the recorded call is its answer.
            free: Settings that may differ from the recorded ones.
        """
        count = request.n * len(request.prompts or (None,))

        def differing(one: RecordedRequest) -> str:
            if len(one.calls) != count:
                return f"the request has {count} choices and had {len(one.calls)}"
            return others(one, [settings(one.calls[i], i) for i in range(count)], free)

        alike = [one for one in self._left if _says(request, one)]
        found = self._taken(alike, differing, request.messages, request.tools)
        if found is None:
            return None
        if not all(found.given.values()):
            self._goes_on(self.calls)
            return None
        return found.id, found.calls


def _says(request: CompletionRequest, one: RecordedRequest) -> bool:
    """Whether messages, prompts and tools equal a recorded request's."""
    call = one.calls[min(one.calls)]
    if request.prompts is not None:
        return all(
            prompt == call.prompt_ids if isinstance(prompt, tuple) else prompt == _prompt(call, at)
            for at, prompt in enumerate(request.prompts)
            for index, call in one.calls.items()
            if index // request.n == at
        )
    return request.tools == call.tools and _plain(request.messages) == _plain(call.messages)


def _prompt(call: Call, at: int) -> Any:
    return call.messages[at]["content"] if at < len(call.messages) else None


def _plain(value: Any) -> Any:
    """Without empty fields, which clients send or omit as they like."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items() if item is not None and item != []}
    return [_plain(item) for item in value] if isinstance(value, list) else value


class Playback(Gateway):
    """Answers sessions that have a `MessageScript`, and no others.

    Args:
        model_name: The `model` that requests must name.
    """

    def __init__(self, model_name: str) -> None:
        super().__init__(cast(Any, _Silence()), cast(Any, _AnyForm()), model_name=model_name)

    async def _reply(
        self,
        session: Session,
        role: str | None,
        asked: str,
        kind: type[Exchange],
        headers: Mapping[str, str],
        body: bytes,
    ) -> Reply | StreamReply:
        script = cast(MessageScript, session.script)
        method, _, path = asked.partition(" ")
        if script.relayed and asked != CHAT:
            raise RequestError(
                f"{asked} is not given back: this rollout's model is one behind a URL, which was "
                "reached by POST /v1/chat/completions",
                status=404,
            )
        if method != "POST" or path not in EXCHANGES:
            raise RequestError(
                f"{asked} is not given back: recorded rollouts answer GET /v1/models and POST "
                f"{', '.join(EXCHANGES)}",
                status=404,
            )
        reads: Any = _relayed if script.relayed else lambda *request: _own(kind, *request)
        if key := headers.get(IDEMPOTENCY_HEADER):
            return await once(reads, session, role, body, key)
        return await complete(reads(session, role, body))


def _own(kind: type[Exchange], session: Session, role: str | None, body: bytes) -> Exchange:
    """A request that our gateway recorded."""
    exchange = kind(session, role, body)
    request, defaults = exchange.completion.request, session.defaults
    context = cast(MessageScript, session.script).context
    free = {"grammar", "bad_words"}
    if context is None or (request.max_tokens is None and defaults.max_tokens is None):
        free.add("max_tokens")
    exchange.completion = _PlaybackRequest(
        exchange.completion,
        lambda told, call, index: told.sampling(call, index, context or _MANY),
        free,
    )
    return exchange


def _relayed(session: Session, role: str | None, body: bytes) -> Exchange:
    """A request that was forwarded to a remote model."""
    exchange = _RelayedExchange(session, role, body)
    said = sampling_said(exchange.body)
    exchange.completion = _PlaybackRequest(exchange.completion, lambda *_: said, ())
    return exchange


class _RelayedExchange(ChatExchange):
    """A chat completion that is mostly forwarded unread, as the relay does.

    Attributes:
        body: The request's body.
    """

    def __init__(self, session: Session, role: str | None, body: bytes) -> None:
        self.body = read_body(body)
        request = CompletionRequest(
            model=self.body["model"],
            messages=self.body["messages"],
            tools=self.body.get("tools") or [],
            n=int(self.body.get("n") or 1),
            stream=bool(self.body.get("stream")),
            include_usage=bool((self.body.get("stream_options") or {}).get("include_usage")),
        )
        self.completion = Completion(session, role, request, dialect="chat", prefix="chatcmpl-")


class _PlaybackRequest(Completion):
    """A request that is answered by recorded calls.

    Args:
        of: The request, not yet begun.
        settings: Settings of a choice, if a recorded call is its answer.
        free: Settings that are not compared.
    """

    def __init__(
        self,
        of: Completion,
        settings: Callable[[_PlaybackRequest, Call, int], SamplingParams],
        free: Collection[str],
    ) -> None:
        super().__init__(of.session, of._role, of.request, dialect=of._dialect, prefix=of._prefix)
        self._settings = settings
        self._free = free
        self._rare = of.request.rare(lambda words: ())
        self._calls: Mapping[int, Call] = {}

    def sampling(self, call: Call, index: int, context: int) -> SamplingParams:
        """The requested settings, if `call` is the recorded answer of choice `index`."""
        room = context - len(call.prompt_ids)
        return self._sampling(room, call.sampling.seed, index % self.request.n, grammar="")

    async def begin(self) -> None:
        request, session = self.request, self.session
        if request.logprobs or request.top_logprobs:
            raise RequestError(
                "log-probs name tokens, and a recorded rollout is given back without a tokenizer: "
                "leave them out",
                path=("logprobs",),
            )
        session.admit([()] * len(request.prompts or (None,)), request.n)
        script = cast(MessageScript, session.script)
        found = script.told(
            request, lambda call, index: self._settings(self, call, index), self._free
        )
        if found is None:
            if script.divergence is not None:
                raise has_diverged(session.id, str(script.divergence))
            await self._nothing()
        self.id, self._calls = cast(Any, found)
        self.started = min(call.started for call in self._calls.values())

    async def _nothing(self) -> None:
        """An unknown request is never answered; the session's end ends it."""
        await self.session.run(asyncio.Event().wait)

    @property
    def prompt_tokens(self) -> int:
        return _usage(self._calls).input_tokens

    async def answer(self) -> Answer:
        if any(call.undelivered for call in self._calls.values()):
            await self._nothing()
        return self._told()

    async def stream(self) -> AsyncGenerator[tuple[int, Delta] | Answer, None]:
        for index, call in self._calls.items():
            for delta in _deltas(_parsed(call)):
                yield index, delta
        if any(call.undelivered for call in self._calls.values()):
            await self._nothing()
        yield self._told()

    def tool_call_id(self, index: int, place: int) -> str:
        return _tool_call_ids(self._calls[index])[place]

    def _told(self) -> Answer:
        """The recorded answer, committed."""
        again = [
            replace(
                call,
                role=self._role,
                started=time.time(),
                seconds=0.0,
                replayed=len(call.completion_ids),
                **vars(Credit()),  # the workflow gives it again
            )
            for call in self._calls.values()
        ]
        self.session.commit(again)
        self.committed = True
        text = self.request.prompts is not None
        choices = [_choice(index, call, text=text) for index, call in self._calls.items()]
        return _ToldAnswer(tuple(choices), _usage(self._calls))


@dataclass(frozen=True)
class _ToldAnswer(Answer):
    """An answer with the cost of its recording."""

    usage: Usage

    @property
    def prompt_tokens(self) -> int:
        return self.usage.input_tokens

    @property
    def completion_tokens(self) -> int:
        return self.usage.output_tokens


@dataclass(frozen=True)
class _ToldChoice(Choice):
    """A choice whose message is replayed."""

    said: Mapping[str, Any]

    @property
    def message(self) -> dict[str, Any]:
        return dict(self.said)


def _choice(index: int, call: Call, *, text: bool) -> Choice:
    """A recorded call as a choice; with its text only if there is nothing else."""
    reason = FINISH_REASONS.get(call.finish_reason, "stop")
    parsed = _parsed(call)
    return _ToldChoice(
        index=index,
        prompt_ids=call.prompt_ids,
        generation=Generation(
            call.completion_ids,
            call.logprobs,
            call.versions,
            reason,
            cached_tokens=call.cached_tokens,
        ),
        text=(parsed.content or "") if text else "",
        stop_string=None,
        parsed=parsed,
        tool_call_ids=_tool_call_ids(call),
        finish_reason=call.finish_reason,
        said=call.response,
    )


def _parsed(call: Call) -> ParsedMessage:
    said = call.response
    functions = [one["function"] for one in said.get("tool_calls") or ()]
    return ParsedMessage(
        content=said.get("content"),
        reasoning=said.get("reasoning_content"),
        tool_calls=tuple(ParsedToolCall(f["name"], f["arguments"]) for f in functions),
    )


def _deltas(message: ParsedMessage) -> Iterator[Delta]:
    if message.reasoning is not None:
        yield Delta(reasoning=message.reasoning)
    if message.content is not None:
        yield Delta(content=message.content)
    for call in enumerate(message.tool_calls):
        yield Delta(tool_call=call)


def _tool_call_ids(call: Call) -> tuple[str, ...]:
    return tuple(one["id"] for one in call.response.get("tool_calls") or ())


def _usage(calls: Mapping[int, Call]) -> Usage:
    """Tokens of a request: a prompt shared by several choices counts once."""
    wrote = sum((call.usage for call in calls.values()), Usage()).output_tokens
    if any(call.billed is not None for call in calls.values()):
        return Usage(sum(call.usage.input_tokens for call in calls.values()), wrote)
    return Usage(sum(map(len, {call.prompt_ids for call in calls.values()})), wrote)


class _Silence:
    """In place of an engine: supports every setting, and samples nothing."""

    capabilities = EngineCapabilities(max_model_len=_MANY, grammars=True, every_setting=True)


class _AnyForm:
    """In place of a chat renderer: accepts every setting, and knows no tokens."""

    no_tools = None
    vision = None
    tokenizer = range(_MANY)
    reads_reasoning = True

    def reads(self, name: str) -> bool:
        return True

    def received(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return messages

    def recorded(self, ids: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[()]]:
        return ids, ()

    def decode(self, ids: Any) -> str:
        return ""
