"""One request: prompt, engine, choices; committed before the caller sees its end.

Every dialect uses this code. Dialects differ in how a request is read and how the answer is
written; see `tuner/gateway/dialects`.

    request ──▶ prompt ids ──▶ engine ──▶ tokens ──▶ choices ──▶ commit ──▶ Answer
                                            └──▶ deltas, for a stream

If a request ends early (the client disconnects, the session is sealed, the engine fails), the
tokens sampled until then are in the trace, in calls marked `undelivered`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from tuner.engines.base import Engine, Generation, SamplingError, SamplingParams
from tuner.engines.grammar_text import GrammarError
from tuner.errors import ContextLengthError
from tuner.gateway.conversations import Prompt
from tuner.gateway.families.parsing import (
    Delta,
    ParsedMessage,
    PlainText,
    Scanner,
    Tools,
    begun,
    joined,
)
from tuner.gateway.families.renderer import ChatRenderer, decode
from tuner.gateway.request_error import RequestError, has_diverged, has_ended, too_long
from tuner.gateway.requests import Answer, Choice, CompletionRequest, check_settings
from tuner.gateway.script import Script, ScriptedAnswer
from tuner.gateway.service import in_turn
from tuner.gateway.sessions import Session
from tuner.traces import Call, Dialect

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# One choice of a request, from its prompt to its last token.


class Pending:
    """A choice while it is sampled.

    Args:
        prompt: Its prompt.
        sampling: Its settings.
        wake: Called at each token, if somebody waits for it.

    Attributes:
        given: The part of it that the session's script provides, or None.
        tokens: Every token so far, with its log-prob and version.
    """

    def __init__(
        self, prompt: Prompt, sampling: SamplingParams, wake: Callable[[], None] | None
    ) -> None:
        self.prompt = prompt
        self.sampling = sampling
        self.given: ScriptedAnswer | None = None
        self.tokens: list[tuple[int, float, int]] = []
        self._closed = False
        self._lock = threading.Lock()  # the engine may push from another thread
        self._wake = wake

    @property
    def replayed(self) -> int:
        """Number of its tokens that the script provides."""
        return 0 if self.given is None else len(self.given.generation.completion_ids)

    def push(self, token_id: int, logprob: float, version: int) -> bool:
        """See `TokenSink.push`."""
        with self._lock:
            if self._closed:
                return False
            self.tokens.append((token_id, logprob, version))
        if self._wake is not None:
            self._wake()
        return True

    def close(self) -> None:
        """Accept no more tokens."""
        with self._lock:
            self._closed = True

    async def generation(
        self, engine: Engine, session: str, *, piecewise: bool, adapter: str | None = None
    ) -> Generation:
        """The tokens of the script, followed by those that the engine samples for the session.

        Args:
            piecewise: Whether a reader wants each token of the script separately.
            adapter: The engine's name of the adapter to sample with.
        """
        more: dict[str, Any] = {} if adapter is None else {"adapter": adapter}
        if self.given is None:
            return await engine.generate(self.prompt.ids, self.sampling, session, self, **more)
        so_far = self.given.generation
        for token in zip(so_far.completion_ids, so_far.logprobs, so_far.versions, strict=True):
            self.push(*token)
            if piecewise:
                await asyncio.sleep(0)
        if self.given.whole:
            return so_far
        return await engine.generate(self.prompt.ids, self.sampling, session, self, so_far, **more)


# From sampled token ids to pieces of the message they spell, as they arrive.
#
#     ids ──▶ text ──▶ up to a stop string ──▶ reasoning, content, tool calls
#
# Each stage passes on what is certain and keeps the rest: part of a character, of a stop string, of
# a tag, white space that may belong to the format, an incomplete tool call. So a piece is never
# taken back, and all pieces together are the message that is parsed from the whole completion.


class MessageStream:
    """The message of one completion, piece by piece.

    The work per token does not grow with the completion: nothing is parsed twice.

    Args:
        renderer: Chat renderer of the model.
        prompt_ids: The prompt, whose end tells whether reasoning was already opened.
        tools: Tools offered to the model; without any, no tool calls are parsed.
        stop: Strings that end the completion; nothing from the first one on is returned.
        plain: All text is content: a completion without a chat template.
    """

    def __init__(
        self,
        renderer: ChatRenderer,
        *,
        prompt_ids: Sequence[int],
        tools: Tools,
        stop: Sequence[str] = (),
        plain: bool = False,
    ) -> None:
        self._special = renderer.special_tokens.ids
        self._last: list[int] = []  # a special token, which is not shown if it is the last one
        self._text = TextStream(renderer.tokenizer)
        self._stop = _StopCut(stop)
        self._scanner: Scanner = PlainText()
        if not plain:
            opened = renderer.opened_reasoning(prompt_ids)
            self._scanner = renderer.scanner(tools=tools, opened=opened)
        self._said: list[Delta] = []

    def push(self, ids: Sequence[int]) -> list[Delta]:
        """Take the next sampled ids, shape [T]; returns what has become certain."""
        known = [*self._last, *ids]
        self._last = known[-1:] if known and known[-1] in self._special else []
        text = self._stop.push(self._text.push(known[: len(known) - len(self._last)]))
        deltas = self._scanner.feed(text) if text else []
        # An empty piece informs the parsers, but not the reader.
        new = [delta for delta in deltas if delta != Delta(reasoning="")]
        self._said += new
        return new

    def finish(self, message: ParsedMessage) -> list[Delta]:
        """The rest of the whole message.

        Args:
            message: Result of `ChatRenderer.parse` for all ids, with the same prompt, tools and
                stop strings; for a plain text, the text as content.

        Raises:
            RuntimeError: The message does not begin with what was streamed.
        """
        said = joined(self._said, 0)
        reasoning = _rest("reasoning", said.reasoning or "", message.reasoning)
        content = _rest("content", said.content or "", message.content)
        calls = len(said.tool_calls)
        if message.tool_calls[:calls] != said.tool_calls:
            raise RuntimeError("the completion's tool calls differ from those that were streamed")
        deltas = []
        if reasoning is not None:
            deltas.append(Delta(reasoning=reasoning))
        if content is not None:
            deltas.append(Delta(content=content))
        new_calls = enumerate(message.tool_calls[calls:], calls)
        return deltas + [Delta(tool_call=call) for call in new_calls]


def _rest(kind: str, before: str, whole: str | None) -> str | None:
    """The part of `whole` that was not streamed; None if nothing is missing."""
    if whole is None or not whole.startswith(before):
        if not before and whole is None:
            return None
        raise RuntimeError(f"the completion's {kind} does not begin with what was streamed")
    rest = whole[len(before) :]
    return rest if rest or not before else None


class _StopCut:
    """Cuts a text that arrives in pieces before the first stop string in it."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self._ended = False

    def push(self, text: str) -> str:
        if not self._stops:
            return text
        if self._ended:
            return ""
        self._held += text
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        # A longer stop string may begin before the one that is complete.
        safe = begun(self._held, self._stops)
        if found and min(found) <= safe:
            self._ended = True
            safe = min(found)
        said, self._held = self._held[:safe], self._held[safe:]
        return said


_REPLACEMENT = "\ufffd"
# A byte that is a token of its own (SentencePiece). Such a run decodes as a whole: one more byte
# can turn all of it into replacement characters.
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
# No UTF-8 character has more bytes, and each of these tokens is at least one.
_LONGEST_CHARACTER = 4
# Tokens without a complete character after which an earlier boundary is searched.
_LONG_WINDOW = 32


class TextStream:
    """Decodes one completion.

    Only the last few tokens are decoded: those since the last complete character, and the ones
    before it (a tokenizer may write a token differently at the start of a text).

        ids      ...  a  b | c  d        text of (a b c d) minus the part already returned
                      ^
                 _window

    The pieces join to the text that all ids decode to, except part of a character at the end.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._decode = partial(decode, tokenizer)
        self._window: list[int] = []
        self._read = 0  # number of the window's ids whose text is returned
        self._said = 0  # number of characters of the window's text that are returned
        self._bytes: list[int] = []

    def push(self, ids: Sequence[int]) -> str:
        """Take the next ids, shape [T]; returns the text that is certain."""
        ids = [*self._bytes, *ids]
        whole = len(ids)
        while whole and self._is_byte(ids[whole - 1]):
            whole -= 1
        self._bytes = ids[whole:]
        return self._decoded(ids[:whole]) if whole else ""

    def _decoded(self, ids: list[int]) -> str:
        self._window += ids
        text = self._decode(self._window)
        # The last replacement character may be part of an incomplete character.
        whole = len(text) - text.endswith(_REPLACEMENT)
        new = text[self._said : whole]
        if whole == len(text):
            self._window = self._window[self._read :]
            self._read = len(self._window)
            self._said = len(self._decode(self._window))
        else:
            self._said = max(self._said, whole)
            if len(self._window) - self._read > _LONG_WINDOW:
                self._shorten(text)
        return new

    def _shorten(self, text: str) -> None:
        """Drop the window's beginning where that cuts no character."""
        last = len(self._window) - _LONGEST_CHARACTER
        for end in range(last, last - _LONGEST_CHARACTER, -1):
            before = self._decode(self._window[:end])
            whole = before + self._decode(self._window[end:]) == text
            if whole and len(before) <= self._said:
                self._window = self._window[end:]
                self._read = 0
                self._said -= len(before)
                return

    def _is_byte(self, token_id: int) -> bool:
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        return isinstance(token, str) and _BYTE_TOKEN.fullmatch(token) is not None


class Completion:
    """One request of a session: call `begin`, then `answer` or `stream`.

    Args:
        session: Receives its calls.
        role: The role that its key names, or None.
        request: The parsed request.
        dialect: The request's dialect.
        prefix: Prefix of the dialect's response ids.

    Attributes:
        id: The id of the response, once it has begun.
        committed: Whether its calls are in the trace.
        started: Unix time, seconds.
        key: Its idempotency key, or None.

    Raises:
        RequestError: It names another model, or a role without an adapter.
    """

    id: str
    key: str | None = None

    def __init__(
        self,
        session: Session,
        role: str | None,
        request: CompletionRequest,
        *,
        dialect: Dialect,
        prefix: str,
    ) -> None:
        session.check_model(request.model)
        self.session = session
        self.service = session.service
        self.request = request
        self._role = self.service.roles.asked(request.model, role)
        self._dialect: Dialect = dialect
        self._prefix, self.committed = prefix, False
        self._arrived, self._loop = asyncio.Event(), asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self.started = time.time()
        self._clock = time.perf_counter()
        self._sampled: list[Pending] = []

    async def begin(self) -> None:
        """Render its prompts and count it, in the order in which the session's requests arrived.

        Raises:
            RequestError: The request cannot be served.
        """
        request = self.request
        prepared = await in_turn(
            self.session.turns,
            self._prepared,
            long=request.long,
            first=partial(self.service.renderer.fetch, request.messages),
        )
        prompts = [prompt.ids for prompt, _, _ in prepared]
        id_, budget, seeds = self.session.admit(prompts, request.n)
        self.id = self._prefix + id_
        wake = self._wake if request.stream else None
        for prompt, room, grammar in prepared:
            room = room if budget is None else min(room, budget)
            for choice in range(request.n):
                seed = seeds[len(self._sampled)]
                sampling = self._sampling(room, seed, choice, grammar)
                self._sampled.append(Pending(prompt, sampling, wake))
        if self.session.script is not None:
            self._follow(self.session.script)

    def _follow(self, script: Script) -> None:
        """Take the script's answer to this request.

        Raises:
            RequestError: The session's rollout has diverged and is meant to end there.
        """
        request, session = self.request, self.session
        limit = _given(request.max_tokens, session.defaults.max_tokens)
        free = {"seed"} if request.seed is None else set()
        if limit is None or session.limits.tokens is not None:
            free.add("max_tokens")  # the rest of a budget depends on what runs in parallel
        found = script.given(
            [sampled.prompt.ids for sampled in self._sampled],
            [sampled.sampling for sampled in self._sampled],
            free=free,
            messages=request.messages,
            tools=request.tools,
            can_go_on=self.service.engine.capabilities.can_go_on,
        )
        if found is None:
            if script.divergence is not None and script.ends:
                raise has_diverged(session.id, str(script.divergence))
            return
        self.id, given = found
        for index, one in given.items():
            self._sampled[index].given = one

    def _prepared(self) -> list[tuple[Prompt, int, str]]:
        """Each prompt, its maximum of new tokens, and its grammar; callable in any thread.

        Unsupported requests are rejected here, before anything is counted.
        """
        if self.session.sealed:
            raise has_ended(self.session.id)
        received = self.service.renderer.received(self.request.messages)
        self.request = replace(self.request, messages=received)
        prompts = self._prompts()
        rooms = [self._room(prompt.ids) for prompt in prompts]
        renderer, constraints = self.service.renderer, self.request.constraints
        grammars = [renderer.grammar(constraints, prompt.ids) for prompt in prompts]
        self._rare = self.request.rare(renderer.word_ids)
        rare = SamplingParams(max_tokens=1, **self._rare)
        check_settings(rare, self.service.engine.capabilities, len(renderer.tokenizer))
        return list(zip(prompts, rooms, grammars, strict=True))

    def _prompts(self) -> list[Prompt]:
        limit = self.service.engine.capabilities.max_model_len
        if self.request.prompts is None:
            return [chat_prompt(self.session, self.request, limit)]
        encode, special = self.service.renderer.encode, self.request.add_special_tokens
        return [
            self.session.conversations.raw(
                encode(prompt, limit, special=special) if isinstance(prompt, str) else prompt
            )
            for prompt in self.request.prompts
        ]

    def _room(self, prompt_ids: Sequence[int]) -> int:
        """Number of tokens that may follow the prompt."""
        limit = self.service.engine.capabilities.max_model_len
        if len(prompt_ids) >= limit:
            raise too_long(
                f"the prompt has {len(prompt_ids)} tokens, which leaves no room for an answer "
                f"within the context of {limit}"
            )
        return limit - len(prompt_ids)

    def _sampling(self, room: int, seed: int, choice: int, grammar: str) -> SamplingParams:
        """The sampling settings of one choice."""
        request, defaults = self.request, self.session.defaults
        limit = _given(request.max_tokens, defaults.max_tokens)
        if request.seed is not None:
            # Choices of one request get different seeds; a single one gets exactly the requested
            # seed.
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
            **self._rare,
        )

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompts, counted once for each choice."""
        return sum(len(sampled.prompt.ids) for sampled in self._sampled)

    def _wake(self) -> None:
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
        with self.session.recording.carrying(self.abandoned):
            generations = await self._generations()
            return self._commit([self._choice(*one) for one in enumerate(generations)])

    async def stream(self) -> AsyncGenerator[tuple[int, Delta] | Answer, None]:
        """Yield the choices' deltas when they are certain, and the answer once its calls are
        committed.

        Raises:
            As `answer`. Closing the iterator before the answer abandons the request.
        """
        streams = [
            MessageStream(
                self.service.renderer,
                prompt_ids=sampled.prompt.ids,
                tools=self.request.shown_tools,
                stop=self.request.stop,
                plain=self.request.prompts is not None,
            )
            for sampled in self._sampled
        ]
        seen = [0] * len(streams)
        with self.session.recording.carrying(self.abandoned):
            work = asyncio.ensure_future(self._generations())
            work.add_done_callback(lambda _: self._arrived.set())
            try:
                while not work.done():
                    await self._arrived.wait()
                    self._arrived.clear()
                    for index, sampled in enumerate(self._sampled):
                        new = [token_id for token_id, _, _ in sampled.tokens[seen[index] :]]
                        seen[index] += len(new)
                        for delta in streams[index].push(new) if new else ():
                            yield index, delta
                generations = await work
            finally:
                work.cancel()
            choices = [self._choice(*one) for one in enumerate(generations)]
            for choice, stream in zip(choices, streams, strict=True):
                for delta in stream.finish(choice.parsed):
                    yield choice.index, delta
            yield self._commit(choices)

    async def _generations(self) -> list[Generation]:
        try:
            return await self.session.run(self._generate)
        except ContextLengthError as error:
            raise too_long(str(error)) from error
        except GrammarError as error:
            raise RequestError(
                f"{error}: simplify the schemas", path=self.request.constraints.path
            ) from error
        except SamplingError as error:  # of the request, or of the session's defaults
            raise RequestError(f" {error.problem}", path=(error.setting,), begins=True) from error

    async def _generate(self) -> list[Generation]:
        """One generation for each choice; if one fails the others are cancelled."""
        engine, name = self.service.engine, self.session.id
        piecewise = self.request.stream
        how: Any = {"piecewise": piecewise, "adapter": self.service.roles.adapter(self._role)}
        work = [one.generation(engine, name, **how) for one in self._sampled]
        if len(work) == 1:
            return [await work[0]]
        tasks = [asyncio.ensure_future(one) for one in work]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    def _choice(self, index: int, generation: Generation) -> Choice:
        request, renderer = self.request, self.service.renderer
        prompt_ids = self._sampled[index].prompt.ids
        text, stop_string = renderer.completion_text(
            generation.completion_ids, request.stop, cut_off=generation.finish_reason == "length"
        )
        parsed = ParsedMessage(text)
        if request.prompts is None:
            opened = renderer.opened_reasoning(prompt_ids)
            parsed = renderer.parse_text(text, tools=request.shown_tools, opened=opened)
        places = range(len(parsed.tool_calls))
        called = places and generation.finish_reason == "stop"
        return Choice(
            index=index,
            prompt_ids=renderer.recorded(prompt_ids)[0],
            generation=generation,
            text=text,
            stop_string=stop_string,
            parsed=parsed,
            tool_call_ids=tuple(self.tool_call_id(index, place) for place in places),
            finish_reason="tool_calls" if called else generation.finish_reason,
        )

    def call_id(self, index: int) -> str:
        """The id of the call of choice `index`, the same in every dialect."""
        return f"{self.id}-{index}"

    def tool_call_id(self, index: int, place: int) -> str:
        if (given := self._sampled[index].given) is not None and given.tool_call_ids:
            return given.tool_call_ids[place]
        digest = self.session.digest("tool", self.call_id(index), place)
        return self.service.renderer.tool_call_id(digest)

    def _commit(self, choices: Sequence[Choice]) -> Answer:
        """Add the choices to the trace, all or none.

        Raises:
            RequestError: 409: the session was sealed meanwhile.
        """
        calls = [
            self._call(
                choice.index,
                choice.generation.completion_ids,
                choice.generation.logprobs,
                choice.generation.versions,
                finish_reason=choice.finish_reason,
                response=choice.message,
                cached_tokens=choice.generation.cached_tokens,
                malformed_tool_calls=choice.parsed.malformed_tool_calls,
                kept=choice.generation.kept,
                top_logprobs=choice.generation.top_logprobs,
            )
            for choice in choices
        ]
        self.session.commit(calls, self.key)
        self.committed = True
        if self.request.prompts is None:
            for call, sampled in zip(calls, self._sampled, strict=True):
                self.session.conversations.add(
                    sampled.prompt,
                    call.completion_ids,
                    tools=self.request.shown_tools,
                    cut_off=call.finish_reason == "length",
                )
        return Answer(tuple(choices))

    def abandoned(self) -> list[Call]:
        """The calls of a request that ended before its commit, with the tokens sampled so far."""
        calls = []
        for index, sampled in enumerate(() if self.committed else self._sampled):
            sampled.close()
            if sampled.tokens:
                ids, logprobs, versions = zip(*sampled.tokens, strict=True)
                said = {"role": "assistant", "content": self.service.renderer.decode(ids)}
                ended = {"finish_reason": "abandoned", "response": said, "undelivered": True}
                calls.append(self._call(index, ids, logprobs, versions, **ended))
        return calls

    def _call(
        self,
        index: int,
        ids: tuple[int, ...],
        logprobs: tuple[float, ...],
        versions: tuple[int, ...],
        **fields: Any,
    ) -> Call:
        request, sampled = self.request, self._sampled[index]
        prompt_ids, images = self.service.renderer.recorded(sampled.prompt.ids)
        return Call(
            id=self.call_id(index),
            prompt_ids=prompt_ids,
            images=images,
            completion_ids=ids,
            logprobs=logprobs,
            versions=versions,
            sampling=sampled.sampling,
            messages=request.messages,
            tools=request.tools,
            started=self.started,
            seconds=time.perf_counter() - self._clock,
            reused_ids=sampled.prompt.reused,
            rerendered=sampled.prompt.rerendered,
            reasoning_policy=self.service.reasoning,
            kept_reasoning_ids=sampled.prompt.kept_reasoning,
            recomputed_ids=sampled.prompt.recomputed,
            dialect=self._dialect,
            streamed=request.stream,
            role=self._role,
            replayed=min(sampled.replayed, len(ids)),
            **fields,
        )


def chat_prompt(session: Session, request: CompletionRequest, limit: int | None = None) -> Prompt:
    """The prompt of a request's messages, continued from what its session has sampled.

    Raises:
        RequestError: 400: the template or the tokenizer rejects the messages, or their length
            alone exceeds a context of `limit` tokens.
    """
    renderer = session.service.renderer
    messages = renderer.received(request.messages)
    text = renderer.render_text(
        messages, request.shown_tools, chat_template_kwargs=request.chat_template_kwargs
    )
    turns = sum(message["role"] == "assistant" for message in messages)
    return session.conversations.prompt(text, turns, messages, limit=limit)


def _given(value: Any, default: Any) -> Any:
    return default if value is None else value
