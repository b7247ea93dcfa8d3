"""A rollout's identity at the gateway: its key, what it may ask for, its end; and what it keeps."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
from array import array
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from tuner.engines.base import Generation
from tuner.gateway.access import Access
from tuner.gateway.conversations import Conversations
from tuner.gateway.credit import Credits, RecordedCall
from tuner.gateway.in_flight import CutOff, InFlight
from tuner.gateway.model.template import Message
from tuner.gateway.request_error import RequestError, has_ended, over_limit
from tuner.gateway.results import Results
from tuner.gateway.script import Script
from tuner.gateway.service import CallSink, Host, Replay, Service, in_loop
from tuner.traces import Call

T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SamplingDefaults:
    """What a request that does not say is sampled with.

    Attributes:
        temperature: 0 is greedy.
        top_p: Nucleus mass in (0, 1].
        top_k: Keep the k most probable tokens; -1 keeps every token.
        max_tokens: Limit of a completion; None is the room left in the context.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int | None = None


@dataclass(frozen=True)
class SessionLimits:
    """What one rollout may ask for; None is no limit.

    Attributes:
        calls: Completions.
        tokens: Sampled tokens, looked at when a call begins: the call is cut off where they end,
            and calls in parallel may together go beyond.
    """

    calls: int | None = None
    tokens: int | None = None


@dataclass(frozen=True)
class KeptResponse:
    """A response of the Responses API that a session can go on from.

    Attributes:
        messages: The conversation with the answer, without instructions, which are not carried on.
        items: The answer's items by id.
    """

    messages: list[Message]
    items: dict[str, dict[str, Any]]


class Recording:
    """The calls of a session, in order of commitment.

    Args:
        kept: Whether calls are kept; False for models that are not trained.
        sink: Gets the calls too, before anything of them is sent; kept or not.

    Attributes:
        tokens: Sampled tokens of all calls, of an earlier process too.
    """

    def __init__(self, session_id: str, *, kept: bool, sink: CallSink | None = None) -> None:
        self._credits = Credits(session_id)
        self.kept = kept
        self.tokens = 0
        self._sink = sink
        self._calls: list[Call] = []
        self.carried: list[Callable[[], list[Call]]] = []

    @property
    def calls(self) -> tuple[Call, ...]:
        """Undelivered ones too, with what the workflow said; empty where calls are not kept."""
        return tuple(map(self._credits.given_to, self._calls))

    @property
    def committed(self) -> int:
        """How many calls there are."""
        return len(self._calls)

    def for_workflow(self) -> list[RecordedCall]:
        """The calls so far that were delivered."""
        return [RecordedCall(self._credits, call) for call in self._calls if not call.undelivered]

    def credit(self, call_id: str, what: str, value: Any) -> None:
        """Take note of what a workflow in another process said about a call."""
        if not self._credits.sealed:
            setattr(self._credits.of(call_id), what, value)

    def add(self, calls: list[Call], request: str | None = None) -> None:
        """Keep calls, all or none, of a request that may have an idempotency key."""
        if calls and self._sink is not None:
            self._sink.add(calls, request)
        self.tokens += sum(call.usage.output_tokens for call in calls)
        if self.kept:
            self._calls.extend(calls)

    @contextmanager
    def carrying(self, abandoned: Callable[[], list[Call]]) -> Iterator[None]:
        """While the block runs a request is on its way.

        Args:
            abandoned: What it has sampled, if it ends before its calls are added.
        """
        self.carried.append(abandoned)
        try:
            yield
        finally:
            self._let_go(abandoned)

    def seal(self) -> None:
        """Add no more calls but those that are abandoned by this."""
        for abandoned in list(self.carried):
            self._let_go(abandoned)
        self._credits.sealed = True

    def _let_go(self, abandoned: Callable[[], list[Call]]) -> None:
        if abandoned in self.carried:
            self.carried.remove(abandoned)
            self.add(abandoned())


class Session(Access):
    """One attempt at a rollout: who it is and what it may ask for. `Gateway.open_session` makes it.

    Attributes:
        service: Whom its requests are answered with.
        host: The gateway that it is open at.
        id: The caller's name for it.
        key: The API key that stands for it; cannot be guessed.
        seed: Where the seeds of its calls come from.
        defaults: What a request that does not say is sampled with.
        limits: What it may ask for.
        script: What it is answered from before anything is sampled, or None.
        sink: What keeps its calls and replies beyond this process, or None.
        other_names: What requests may give as `model` besides the gateway's name for it.
        errors: What went wrong inside its calls that was not the caller's fault.
        sealed: Whether it has ended.
        recording: Its calls.
        results: What recorded functions returned in it.
        in_flight: What is being generated.
        conversations: What it has prompted and sampled, for the prompts that go on from there.
        turns: In which its requests, as they come, make their prompts.
        responses: Answers of the Responses API that can be continued by their id.
        replays: Requests with an idempotency key, by that.
    """

    def __init__(
        self,
        service: Service,
        host: Host,
        session_id: str,
        *,
        seed: int,
        recorded: bool,
        defaults: SamplingDefaults,
        limits: SessionLimits,
        script: Script | None = None,
        key: str | None = None,
        sink: CallSink | None = None,
    ) -> None:
        self.service = service
        self.host: Host = host
        self.id = session_id
        self.key = key or f"sk-tuner-{secrets.token_urlsafe(24)}"
        self.seed = seed
        self.defaults = defaults
        self.limits = limits
        self.script = script
        self.sink = sink
        self.other_names: Sequence[str] = ()
        self.errors: list[Exception] = []
        self.recording = Recording(session_id, kept=recorded, sink=sink)
        self.results = Results(script, lambda: self.recording.committed)
        self.in_flight = InFlight()
        self.conversations = Conversations(service.renderer, service.reasoning)
        self.turns = asyncio.Lock()
        self.responses: MutableMapping[str, KeptResponse] = {}
        self.replays: dict[str, Replay] = {}
        self._admitted = 0
        self._asked: Counter[bytes] = Counter()
        self.sealed = False

    @property
    def calls(self) -> tuple[Call, ...]:
        """As `recording` has them."""
        return self.recording.calls

    @property
    def model_name(self) -> str:
        """The name that requests give as `model`."""
        return self.service.model_name

    @property
    def base_url(self) -> str:
        """Where HTTP clients find the gateway; the first use opens the door."""
        return self.host.base_url

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and answer together."""
        return self.service.engine.capabilities.max_model_len

    @property
    def keeps_calls(self) -> bool:
        """As `Recording.kept`."""
        return self.recording.kept

    def calls_so_far(self) -> list[RecordedCall]:
        """As `Recording.for_workflow`."""
        return self.recording.for_workflow()

    def text_of(self, ids: Sequence[int]) -> str:
        """Tokens in the tokenizer's words, special ones left out."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def encode(self, prompt: str | Sequence[Message]) -> list[int]:
        """Token ids of text as it is, or of messages in the chat template; shape [P]."""
        renderer = self.service.renderer
        text = prompt if isinstance(prompt, str) else renderer.render_text(prompt, [])
        return list(renderer.encode(text))

    @property
    def tokenizer(self) -> Any:
        """The model's."""
        return self.service.renderer.tokenizer

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end a completion."""
        return self.service.engine.capabilities.end_ids

    @property
    def version(self) -> int:
        """Updates that the weights have seen which sample the next token."""
        return self.service.engine.version

    async def complete_tokens(
        self, prompt_ids: Sequence[int], **settings: Any
    ) -> tuple[Generation, ...]:
        """As `tuner.gateway.dialects.text.complete_tokens`."""
        return await self.host.complete_tokens(self, prompt_ids, **settings)

    async def at_home(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, done in the event loop that the engine is called in."""
        return await in_loop(self.host.home(), work)

    def warn_once(self, setting: str, sentence: str) -> None:
        """Log that a setting of the user's agent is unsafe, once for all sessions of a gateway."""
        if setting not in self.host.warned:
            self.host.warned.add(setting)
            logger.warning("%s %s", setting, sentence)

    def seal(self) -> tuple[Call, ...]:
        """End the session: cancel what is in flight, refuse what comes later.

        Returns:
            Its calls; none is added afterwards.
        """
        if not self.sealed:
            self.recording.seal()
            self.sealed = True
            self.host.forget(self.key, self.id)
            self.conversations = Conversations(self.service.renderer, self.service.reasoning)
            self.responses = {}
            self.replays.clear()
            self.in_flight.cancel()
        return self.calls

    def check_model(self, model: str) -> None:
        """Refuse a request for another model than the session's.

        Raises:
            RequestError: 404.
        """
        if model not in (self.model_name, *self.other_names):
            raise RequestError(
                f"model is {model!r}, but this key's model is {self.model_name!r}",
                status=404,
                path=("model",),
                code="model_not_found",
            )

    def admit(
        self, prompts: Sequence[tuple[int, ...]], n: int
    ) -> tuple[str, int | None, list[int]]:
        """Count the choices of a request that begins.

        Equal seeds, names and requests in an equal order get equal ids and seeds.

        Args:
            prompts: Token ids, shape [P] each.
            n: Choices of each.

        Returns:
            24 hex digits, for the id of the response; how many tokens each choice may sample at
            most, None is no limit; and a seed for each choice of each prompt, in order.

        Raises:
            RequestError: 401: the session was sealed; 403: it has used up its limits.
        """
        if self.sealed:
            raise has_ended(self.id)
        choices = len(prompts) * n
        limits, budget = self.limits, None
        if limits.calls is not None and self._admitted + choices > limits.calls:
            raise over_limit(
                f"this rollout ({self.id}) has asked for {self._admitted} completions and may ask "
                f"for {limits.calls} (tuner.max_calls)"
            )
        if limits.tokens is not None:
            sampled = self.recording.tokens
            budget = (limits.tokens - sampled) // choices
            if budget < 1:
                raise over_limit(
                    f"this rollout ({self.id}) has sampled {sampled} tokens and may sample "
                    f"{limits.tokens} (tuner.max_tokens)"
                )
        self._admitted += choices
        asked, seeds = [], []
        for prompt in prompts:
            digest = _digest(prompt)
            before = self._asked[digest]  # equal prompts are separate samples
            self._asked[digest] += 1
            asked.append((digest, before))
            drawn = (self.digest("seed", digest, before, choice) for choice in range(n))
            seeds += [int.from_bytes(seed[:8], "big") for seed in drawn]
        return self.digest("id", self.id, *asked).hex()[:24], budget, seeds

    def resume(self, calls: Iterable[Call]) -> None:
        """Count the calls of an earlier process, so that no id and no seed comes again."""
        for call in calls:  # one request for each, which is enough
            self._admitted += 1
            self._asked[_digest(call.prompt_ids)] += 1
            self.recording.tokens += call.usage.output_tokens

    def digest(self, *parts: object) -> bytes:
        """32 bytes that depend on the session's seed and `parts` alone: equal runs, equal bytes."""
        return hashlib.blake2b(repr((self.seed, *parts)).encode(), digest_size=32).digest()

    async def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Await `work()`, which `seal` cancels.

        Raises:
            RequestError: 401: the session was sealed before or meanwhile.
        """
        if self.sealed:
            raise has_ended(self.id)
        try:
            return await self.in_flight.run(work())
        except CutOff:
            raise has_ended(self.id) from None

    def commit(self, calls: list[Call], request: str | None = None) -> None:
        """Add completed calls to the trace, all or none; `request` is their idempotency key.

        Raises:
            RequestError: 401: the session was sealed meanwhile.
        """
        if self.sealed:
            raise has_ended(self.id)
        self.recording.add(calls, request)


def _digest(prompt: tuple[int, ...]) -> bytes:
    return hashlib.blake2b(array("q", prompt).tobytes(), digest_size=16).digest()
