"""One request on its way: prompt, engine, choices; committed before the caller sees its end.

Every dialect comes through here. What differs between them is how a request is read and how the
answer is written; see `tuner/gateway/dialect.py`.

    request ──▶ prompt ids ──▶ engine ──▶ tokens ──▶ choices ──▶ commit ──▶ Answer
                                            └──▶ deltas, for a stream

Whatever ends a request early (a client that goes away, a session that is sealed, an engine that
fails), the tokens sampled until then are in the trace, in calls marked `undelivered`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import threading
import time
from array import array
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tuner.engines.base import Generation, SamplingParams
from tuner.engines.grammar_text import GrammarError
from tuner.errors import ContextLengthError
from tuner.gateway.answer import Answer, Choice, assistant_message
from tuner.gateway.continuation import Conversations, Prompt
from tuner.gateway.errors import RequestError
from tuner.gateway.message_stream import Delta, MessageStream
from tuner.gateway.parsing import ParsedMessage
from tuner.gateway.renderer import ChatRenderer
from tuner.gateway.request import CompletionRequest
from tuner.traces import Call, Dialect

if TYPE_CHECKING:
    from tuner.gateway.gateway import Gateway
    from tuner.gateway.session import Session


class _Recording:
    """A choice while it is sampled: its settings, and every token so far."""

    def __init__(self, prompt: Prompt, sampling: SamplingParams, wake: Callable[[], None]) -> None:
        self.prompt = prompt
        self.sampling = sampling
        self.tokens: list[tuple[int, float, int]] = []
        self._closed = False
        self._lock = threading.Lock()  # the engine may push from another thread
        self._wake = wake

    def push(self, token_id: int, logprob: float, version: int) -> bool:
        with self._lock:
            if self._closed:
                return False
            self.tokens.append((token_id, logprob, version))
        self._wake()
        return True

    def close(self) -> None:
        """Take no more tokens."""
        with self._lock:
            self._closed = True


class Completion:
    """One request of a session.

    Args:
        gateway: Engine, renderer and model name.
        session: Where its calls are committed.
        role: The role that its key names, or None.
        request: What is asked for.
        dialect: Whose form it came in.
        prefix: What that dialect's response ids begin with.

    Attributes:
        id: The id of the response.
        committed: Whether its calls are in the trace.
        started: Unix time, seconds.

    Raises:
        RequestError: The request cannot be honoured.
    """

    def __init__(
        self,
        gateway: Gateway,
        session: Session,
        role: str | None,
        request: CompletionRequest,
        *,
        dialect: Dialect,
        prefix: str,
    ) -> None:
        check_model(session, request)
        self._engine = gateway.engine
        self._renderer = gateway.renderer
        self._session = session
        self._role = role
        self._request = request
        self._dialect: Dialect = dialect
        self.committed = False
        self._arrived = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self.started = time.time()
        self._clock = time.perf_counter()
        prompts = self._prompts()
        # First of all: what cannot be honoured is refused before anything is counted.
        rooms = [self._room(prompt.ids) for prompt in prompts]
        grammars = [self._renderer.grammar(request.constraints, prompt.ids) for prompt in prompts]
        budget = session.admit(len(prompts) * request.n)
        self._recordings: list[_Recording] = []
        ids = []
        for prompt, room, grammar in zip(prompts, rooms, grammars, strict=True):
            if budget is not None:
                room = min(room, budget)
            digest = hashlib.blake2b(array("q", prompt.ids).tobytes(), digest_size=16).digest()
            occurrence = session.occurrence(digest)
            ids.append((digest, occurrence))
            for choice in range(request.n):
                seed = session.digest("seed", digest, occurrence, choice)
                sampling = self._sampling(room, seed, choice, grammar)
                self._recordings.append(_Recording(prompt, sampling, self._wake))
        self.id = prefix + session.digest("id", session.id, *ids).hex()[:24]

    def _prompts(self) -> list[Prompt]:
        request = self._request
        conversations = self._session.conversations
        if request.prompts is not None:
            return [
                conversations.prompt(prompt, 0)
                if isinstance(prompt, str)
                else conversations.raw(prompt)
                for prompt in request.prompts
            ]
        return [chat_prompt(self._renderer, conversations, request)]

    def _room(self, prompt_ids: Sequence[int]) -> int:
        """How many tokens may follow the prompt."""
        limit = self._engine.capabilities.max_model_len
        if len(prompt_ids) >= limit:
            raise _too_long(
                f"the prompt has {len(prompt_ids)} tokens, which leaves no room for an answer "
                f"within the context of {limit}"
            )
        return limit - len(prompt_ids)

    def _sampling(self, room: int, digest: bytes, choice: int, grammar: str) -> SamplingParams:
        """The settings in force for one choice."""
        request, defaults = self._request, self._session.defaults
        limit = defaults.max_tokens if request.max_tokens is None else request.max_tokens
        seed = int.from_bytes(digest[:8], "big")
        if request.seed is not None:
            # Choices of one request differ; a single one has the very seed that was asked for.
            mixed = hashlib.blake2b(repr((request.seed, choice)).encode(), digest_size=8).digest()
            seed = request.seed if choice == 0 else int.from_bytes(mixed, "big")
        return SamplingParams(
            max_tokens=room if limit is None else min(limit, room),
            temperature=_given(request.temperature, defaults.temperature),
            top_p=_given(request.top_p, defaults.top_p),
            top_k=_given(request.top_k, defaults.top_k),
            stop=request.stop,
            seed=seed & (2**63 - 1),
            top_logprobs=request.top_logprobs,
            grammar=grammar,
        )

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompts, counted once for each choice."""
        return sum(len(recording.prompt.ids) for recording in self._recordings)

    def _wake(self) -> None:
        if not self._request.stream:
            return
        if threading.get_ident() == self._thread:
            self._arrived.set()
        else:
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody reads
                self._loop.call_soon_threadsafe(self._arrived.set)

    async def answer(self) -> Answer:
        """Sample every choice and commit them.

        Raises:
            RequestError: The session was sealed meanwhile, or the prompt is too long.
            EngineError: The engine failed.
        """
        with self._carried():
            return self._commit(await self._generations())

    async def stream(self) -> AsyncGenerator[tuple[int, Delta] | Answer, None]:
        """The choices' deltas as they are certain, and the answer once its calls are committed.

        Raises:
            As `answer`. Closing the iterator before the answer abandons the request.
        """
        streams = [
            MessageStream(
                self._renderer,
                prompt_ids=recording.prompt.ids,
                tools=self._request.shown_tools,
                stop=self._request.stop,
                plain=self._request.prompts is not None,
            )
            for recording in self._recordings
        ]
        seen = [0] * len(streams)
        with self._carried():
            work = asyncio.ensure_future(self._generations())
            work.add_done_callback(lambda _: self._arrived.set())
            try:
                while not work.done():
                    await self._arrived.wait()
                    self._arrived.clear()
                    for index, recording in enumerate(self._recordings):
                        new = [token_id for token_id, _, _ in recording.tokens[seen[index] :]]
                        seen[index] += len(new)
                        for delta in streams[index].push(new) if new else ():
                            yield index, delta
                generations = await work
            finally:
                work.cancel()
            choices = self._choices(generations)
            for choice, stream in zip(choices, streams, strict=True):
                for delta in stream.finish(choice.parsed):
                    yield choice.index, delta
            yield self._commit(generations, choices)

    @contextlib.contextmanager
    def _carried(self) -> Iterator[None]:
        """While the request is on its way the session knows it, and can abandon it."""
        self._session.carry(self)
        try:
            yield
        finally:
            self._session.let_go(self)

    async def _generations(self) -> list[Generation]:
        try:
            return await self._session.run(self._generate)
        except ContextLengthError as error:
            raise _too_long(str(error)) from error
        except GrammarError as error:
            raise RequestError(
                f"{error}: simplify the schemas", param=self._request.constraints.field
            ) from error

    async def _generate(self) -> list[Generation]:
        """One generation for each choice; if one fails the others are cancelled."""
        session = self._session.id
        if len(self._recordings) == 1:
            recording = self._recordings[0]
            return [
                await self._engine.generate(
                    recording.prompt.ids, recording.sampling, session, recording
                )
            ]
        tasks = [
            asyncio.ensure_future(
                self._engine.generate(recording.prompt.ids, recording.sampling, session, recording)
            )
            for recording in self._recordings
        ]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    def _choices(self, generations: Sequence[Generation]) -> list[Choice]:
        return [
            self._choice(index, recording.prompt.ids, generation)
            for index, (recording, generation) in enumerate(
                zip(self._recordings, generations, strict=True)
            )
        ]

    def _choice(self, index: int, prompt_ids: tuple[int, ...], generation: Generation) -> Choice:
        request, renderer = self._request, self._renderer
        text, stop_string = renderer.completion_text(generation.completion_ids, request.stop)
        if request.prompts is not None:
            parsed = ParsedMessage(text)
        else:
            parsed = renderer.parse_text(
                text,
                tools=request.shown_tools,
                opened=renderer.opened_reasoning(prompt_ids),
            )
        finish_reason: str = generation.finish_reason
        if parsed.tool_calls and finish_reason == "stop":
            finish_reason = "tool_calls"
        return Choice(
            index=index,
            prompt_ids=prompt_ids,
            generation=generation,
            text=text,
            stop_string=stop_string,
            parsed=parsed,
            tool_call_ids=tuple(
                self.tool_call_id(index, place) for place in range(len(parsed.tool_calls))
            ),
            finish_reason=finish_reason,
        )

    def call_id(self, index: int) -> str:
        """The id of the call that makes choice `index`, the same in every dialect."""
        return f"{self.id}-{index}"

    def tool_call_id(self, index: int, place: int) -> str:
        """The id of the tool call at `place` in choice `index`."""
        return self._renderer.tool_call_id(self._session.digest("tool", self.call_id(index), place))

    def _commit(
        self, generations: Sequence[Generation], choices: Sequence[Choice] | None = None
    ) -> Answer:
        """Add the choices to the trace, all or none.

        Raises:
            RequestError: 401: the session was sealed meanwhile.
        """
        choices = self._choices(generations) if choices is None else choices
        calls = []
        for choice, recording in zip(choices, self._recordings, strict=True):
            generation = choice.generation
            calls.append(
                self._call(
                    choice.index,
                    recording,
                    completion_ids=generation.completion_ids,
                    logprobs=generation.logprobs,
                    versions=generation.versions,
                    finish_reason=choice.finish_reason,
                    response=assistant_message(choice),
                    cached_tokens=generation.cached_tokens,
                    malformed_tool_calls=choice.parsed.malformed_tool_calls,
                )
            )
        self._session.commit(calls)
        self.committed = True
        if self._request.prompts is None:
            for call, recording in zip(calls, self._recordings, strict=True):
                self._session.conversations.add(
                    recording.prompt, call.completion_ids, tools=self._request.shown_tools
                )
        return Answer(tuple(choices))

    def abandoned(self) -> list[Call]:
        """The calls of a request that ended before its commit: what was sampled until now."""
        if self.committed:
            return []
        calls = []
        for index, recording in enumerate(self._recordings):
            recording.close()
            if not recording.tokens:
                continue
            ids, logprobs, versions = zip(*recording.tokens, strict=True)
            calls.append(
                self._call(
                    index,
                    recording,
                    completion_ids=ids,
                    logprobs=logprobs,
                    versions=versions,
                    finish_reason="abandoned",
                    response={"role": "assistant", "content": self._renderer.decode(ids)},
                    undelivered=True,
                )
            )
        return calls

    def _call(self, index: int, recording: _Recording, **fields: Any) -> Call:
        request, prompt = self._request, recording.prompt
        return Call(
            id=self.call_id(index),
            prompt_ids=prompt.ids,
            sampling=recording.sampling,
            messages=request.messages,
            tools=request.tools,
            started=self.started,
            seconds=time.perf_counter() - self._clock,
            reused_ids=prompt.reused,
            rerendered=prompt.rerendered,
            reasoning_policy=self._session.conversations.reasoning,
            kept_reasoning_ids=prompt.kept_reasoning,
            recomputed_ids=prompt.recomputed,
            dialect=self._dialect,
            streamed=request.stream,
            role=self._role,
            **fields,
        )


def check_model(session: Session, request: CompletionRequest) -> None:
    """Refuse a request for another model than the session's.

    Raises:
        RequestError: 404.
    """
    if request.model not in (session.model_name, *session.other_names):
        raise RequestError(
            f"model is {request.model!r}, but this key's model is {session.model_name!r}",
            status=404,
            param="model",
            code="model_not_found",
        )


def chat_prompt(
    renderer: ChatRenderer, conversations: Conversations, request: CompletionRequest
) -> Prompt:
    """The prompt of a request's messages, continued from what its session has sampled.

    Raises:
        RequestError: 400: the template or the tokenizer refuses the messages.
    """
    text = renderer.render_text(
        request.messages,
        request.shown_tools,
        chat_template_kwargs=request.chat_template_kwargs,
    )
    turns = sum(message["role"] == "assistant" for message in request.messages)
    return conversations.prompt(text, turns, request.messages)


def _too_long(found: str) -> RequestError:
    return RequestError(
        f"{found}: raise model.max_model_len or shorten the messages",
        param="messages",
        code="context_length_exceeded",
    )


def _given(value: Any, default: Any) -> Any:
    return default if value is None else value
