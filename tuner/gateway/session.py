"""A rollout's identity at the gateway: its key, its committed calls, its end."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from tuner.gateway.continuation import Conversations
from tuner.gateway.credit import Credit, RecordedCall
from tuner.gateway.errors import RequestError
from tuner.traces import Call

if TYPE_CHECKING:
    import anthropic
    import openai

    from tuner.gateway.complete import Completion
    from tuner.gateway.gateway import Gateway, Reply
    from tuner.gateway.responses_items import KeptResponse

T = TypeVar("T")

ROLE = re.compile(r"[A-Za-z0-9_-]{1,64}")

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


@dataclass
class Replay:
    """What an idempotency key stands for: the request, and its answer once there is one."""

    request: bytes
    answer: Reply | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)


class Session:
    """One attempt at a rollout, as the gateway knows it. Made by `Gateway.open_session`.

    Attributes:
        id: The caller's name for it.
        key: The API key that stands for it; cannot be guessed.
        seed: Where the seeds of its calls come from.
        recorded: Whether its calls are kept; False for models that are not trained.
        defaults: What a request that does not say is sampled with.
        limits: What it may ask for.
        errors: What went wrong inside its calls that was not the caller's fault.
        other_names: What requests may give as `model` besides the gateway's name for it.
        credits: What the workflow said about calls, by call id.
        conversations: What it has prompted and sampled, for the prompts that go on from there.
        responses: Answers of the Responses API that can be continued by their id.
    """

    def __init__(
        self,
        gateway: Gateway,
        session_id: str,
        *,
        seed: int,
        recorded: bool,
        defaults: SamplingDefaults,
        limits: SessionLimits,
    ) -> None:
        self._gateway = gateway
        self.id = session_id
        self.key = f"sk-tuner-{secrets.token_urlsafe(24)}"
        self.seed = seed
        self.recorded = recorded
        self.defaults = defaults
        self.limits = limits
        self.errors: list[Exception] = []
        self.other_names: tuple[str, ...] = ()
        self.credits: dict[str, Credit] = {}
        self.replays: dict[str, Replay] = {}
        self.conversations = Conversations(gateway.renderer, gateway.reasoning)
        self.responses: dict[str, KeptResponse] = {}
        self._calls: list[Call] = []
        self._carried: list[Completion] = []
        self._admitted = 0
        self._sealed = False
        self._asked: Counter[bytes] = Counter()
        self._in_flight: set[asyncio.Task[Any]] = set()
        self._busy_since = 0.0
        self._busy_seconds = 0.0

    @property
    def calls(self) -> tuple[Call, ...]:
        """Its calls in order of commitment, undelivered ones among them, with what the workflow
        said about them; empty where calls are not recorded."""
        return tuple(
            replace(
                call,
                reward=credit.reward,
                gained=credit.gained,
                excluded=credit.excluded,
                masked=tuple(credit.masked),
            )
            if (credit := self.credits.get(call.id)) is not None
            else call
            for call in self._calls
        )

    def recorded_calls(self) -> list[RecordedCall]:
        """Its calls so far that were delivered, for the workflow to give credit to."""
        return [RecordedCall(self, call) for call in self._calls if not call.undelivered]

    @property
    def gateway(self) -> Gateway:
        """Where it was opened."""
        return self._gateway

    @property
    def sealed(self) -> bool:
        return self._sealed

    @property
    def generation_seconds(self) -> float:
        """Wall time during which at least one of its calls was being generated."""
        running = time.perf_counter() - self._busy_since if self._in_flight else 0.0
        return self._busy_seconds + running

    @property
    def model_name(self) -> str:
        """The name that requests give as `model`."""
        return self._gateway.model_name

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and completion together that the engine takes."""
        return self._gateway.engine.capabilities.max_model_len

    @property
    def base_url(self) -> str:
        """Where HTTP clients find the gateway; the first use opens the door."""
        return self._gateway.base_url

    def key_of(self, role: str | None) -> str:
        """The API key that names `role` as the agent that calls; None is the session's own.

        Raises:
            ValueError: `role` is not a name.
        """
        if role is None:
            return self.key
        if not ROLE.fullmatch(role):
            raise ValueError(f"role {role!r} must be 1 to 64 letters, digits, '_' or '-'")
        return f"{self.key}.{role}"

    def async_client(self, role: str | None = None) -> openai.AsyncOpenAI:
        """An OpenAI client of this session that reaches the gateway without a socket."""
        from tuner.gateway.in_process import in_process_client

        return in_process_client(self._gateway, self.key_of(role))

    def async_anthropic(self, role: str | None = None) -> anthropic.AsyncAnthropic:
        """Anthropic's client of this session, which reaches the gateway without a socket.

        Raises:
            MissingDependencyError: The anthropic package is not installed.
        """
        from tuner.gateway.in_process import in_process_anthropic

        return in_process_anthropic(self._gateway, self.key_of(role))

    def seal(self) -> tuple[Call, ...]:
        """End the session: cancel what is in flight, refuse what comes later.

        Returns:
            Its calls; none is added afterwards.
        """
        if not self._sealed:
            for completion in list(self._carried):
                self.let_go(completion)
            self._sealed = True
            self._gateway.forget(self)
            self.replays.clear()
            self.conversations = Conversations(self._gateway.renderer, self._gateway.reasoning)
            self.responses.clear()
            for task in list(self._in_flight):
                task.get_loop().call_soon_threadsafe(task.cancel)
        return self.calls

    def warn_once(self, setting: str, sentence: str) -> None:
        """Log that a setting of the user's agent is unsafe, once for all sessions of a gateway."""
        if setting not in self._gateway.warned:
            self._gateway.warned.add(setting)
            logger.warning("%s %s", setting, sentence)

    def occurrence(self, prompt: bytes) -> int:
        """How often this session has asked the prompt with this digest before; counts it."""
        before = self._asked[prompt]
        self._asked[prompt] += 1
        return before

    def digest(self, *parts: object) -> bytes:
        """32 bytes that depend on the session's seed and `parts` alone: equal runs, equal bytes."""
        return hashlib.blake2b(repr((self.seed, *parts)).encode(), digest_size=32).digest()

    def admit(self, choices: int) -> int | None:
        """Count the choices of a request that begins.

        Returns:
            How many tokens each choice may sample at most; None is no limit.

        Raises:
            RequestError: 401: the session was sealed; 403: it has used up its limits.
        """
        if self._sealed:
            raise self.sealed_error()
        limits = self.limits
        if limits.calls is not None and self._admitted + choices > limits.calls:
            raise _limit(
                f"this rollout ({self.id}) has asked for {self._admitted} completions and may ask "
                f"for {limits.calls} (tuner.max_calls)"
            )
        budget = None
        if limits.tokens is not None:
            left = limits.tokens - sum(len(call.completion_ids) for call in self._calls)
            budget = left // choices
            if budget < 1:
                raise _limit(
                    f"this rollout ({self.id}) has sampled {limits.tokens - left} tokens and may "
                    f"sample {limits.tokens} (tuner.max_tokens)"
                )
        self._admitted += choices
        return budget

    def carry(self, completion: Completion) -> None:
        """Know a request that is on its way."""
        self._carried.append(completion)

    def let_go(self, completion: Completion) -> None:
        """Forget a request that was on its way; if it was not committed, keep what it sampled."""
        if completion in self._carried:
            self._carried.remove(completion)
            if self.recorded:
                self._calls.extend(completion.abandoned())

    def commit(self, calls: list[Call]) -> None:
        """Add completed calls to the trace, all or none.

        Raises:
            RequestError: 401: the session was sealed meanwhile.
        """
        if self._sealed:
            raise self.sealed_error()
        if self.recorded:
            self._calls.extend(calls)

    async def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Await `work()`, which `seal` cancels.

        Raises:
            RequestError: 401: the session was sealed before or meanwhile.
        """
        if self._sealed:
            raise self.sealed_error()
        task = asyncio.get_running_loop().create_task(work())
        try:
            with self._busy(task):
                return await task
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if self._sealed and not (caller and caller.cancelling()):
                raise self.sealed_error() from None
            raise

    @contextmanager
    def _busy(self, task: asyncio.Task[Any]) -> Iterator[None]:
        if not self._in_flight:
            self._busy_since = time.perf_counter()
        self._in_flight.add(task)
        try:
            yield
        finally:
            self._in_flight.discard(task)
            if not self._in_flight:
                self._busy_seconds += time.perf_counter() - self._busy_since

    def sealed_error(self) -> RequestError:
        return RequestError(
            f"this key's rollout ({self.id}) has ended: its session takes no more calls",
            status=401,
            code="session_sealed",
        )


def _limit(found: str) -> RequestError:
    return RequestError(f"{found}: end the rollout here", status=403, code="rollout_limit")
