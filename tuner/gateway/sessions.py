"""Sessions: the identity of a rollout at the gateway (its key, limits and end), and its
recordings."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import inspect
import json
import logging
import math
import re
import secrets
import threading
import time
from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from tuner.engines.base import Generation
from tuner.engines.images import ALBUM
from tuner.errors import FunctionError, TunerError
from tuner.gateway.conversations import Conversations
from tuner.gateway.families.template import Message
from tuner.gateway.request_error import RequestError, has_ended, over_limit
from tuner.gateway.script import Script
from tuner.gateway.service import CallSink, Door, Host, Replay, Service, in_loop
from tuner.tasks.functions import shown, unwrapped, where
from tuner.traces import Call, FunctionResult

if TYPE_CHECKING:
    import anthropic
    import openai


# What a workflow may set on its own calls: a reward, or not to train them.


@dataclass
class Credit:
    """Credit that the workflow gave one call, by the names of the call's fields."""

    reward: float | None = None
    gained: float | None = None
    state: str | None = None
    excluded: bool = False
    masked: tuple[tuple[int, int], ...] = ()


class Credits:
    """Credit that the workflow gave the calls of one session, while it is open.

    Args:
        session_id: The session's id, for messages.

    Attributes:
        sealed: Whether nothing can be set any more.
    """

    def __init__(self, session_id: str) -> None:
        self.session_id = session_id
        self.sealed = False
        self._by_call: dict[str, Credit] = {}

    def of(self, call_id: str) -> Credit:
        return self._by_call.get(call_id, Credit())

    def say(self, call_id: str, what: str, value: Any) -> None:
        """Set a field of a call's credit."""
        setattr(self._by_call.setdefault(call_id, Credit()), what, value)

    def given_to(self, call: Call) -> Call:
        """The call with its credit."""
        credit = self._by_call.get(call.id)
        return call if credit is None else replace(call, **vars(credit))


class RecordedCall:
    """A call of a running rollout, for the workflow that made it.

        model.calls[-1].reward = 0.3      # instead of the rollout's reward
        model.calls[0].exclude()          # recorded, not trained
        model.calls[-1].state = "room 3"  # where the environment was when it was made

    Attributes:
        call: The recorded call.
    """

    def __init__(self, credits: Credits, call: Call) -> None:
        self._credits = credits
        self.call = call

    @property
    def id(self) -> str:
        """The call's id: the response's id, and the choice's index."""
        return self.call.id

    @property
    def role(self) -> str | None:
        """The agent that made the call, if it was named."""
        return self.call.role

    @property
    def response(self) -> dict[str, Any]:
        """The assistant message that the agent received."""
        return self.call.response

    @property
    def reward(self) -> float | None:
        """The call's own reward; None: the rollout's reward applies.

        Raises:
            ValueError: It is set to something that is not a finite number.
            TunerError: It is set after the rollout has ended.
        """
        return self._credit.reward

    @reward.setter
    def reward(self, value: float | None) -> None:
        self._credits.say(self.id, "reward", self._checked("reward", value))

    @property
    def gained(self) -> float | None:
        """The gain at the end of the call; None: it follows from its reward and the rollout's.

        Raises:
            As `reward`.
        """
        return self._credit.gained

    @gained.setter
    def gained(self, value: float | None) -> None:
        self._credits.say(self.id, "gained", self._checked("gain", value))

    @property
    def state(self) -> str | None:
        """The state of the environment in which the call was made; None: its prompt is its state.

        `gigpo` compares the calls of a group and a role that were made in equal states. Of a text
        of more than 64 characters its SHA-256 is kept.

        Raises:
            TypeError: It is set to something that is not a text.
            TunerError: It is set after the rollout has ended.
        """
        return self._credit.state

    @state.setter
    def state(self, value: str | None) -> None:
        if not isinstance(value, str | None):
            raise TypeError(
                f"the state of call {self.id} is {value!r:.60}: give a text that is equal for "
                "equal states, such as the observation"
            )
        if value is not None and len(value) > _LONGEST_STATE:
            value = hashlib.sha256(value.encode("utf-8", "surrogatepass")).hexdigest()
        self._open()
        self._credits.say(self.id, "state", value)

    def exclude(self) -> None:
        """Keep the call in the trace, but do not train it.

        Raises:
            TunerError: The rollout has ended.
        """
        self._open()
        self._credits.say(self.id, "excluded", True)

    def mask(self, start: int, stop: int) -> None:
        """Keep the completion's tokens [start, stop) in the trace, but do not train them.

        Raises:
            ValueError: There are no such tokens, they begin before the end of the previously masked
                ones, or the call has a grammar, whose tokens are trained together or not at all.
            TunerError: The rollout has ended.
        """
        length, masked = len(self.call.completion_ids), self._credit.masked
        first = masked[-1][1] if masked else 0
        if not first <= start < stop <= length:
            raise ValueError(
                f"tokens {start} to {stop} of call {self.id} cannot be masked: it has {length} "
                f"tokens, and stretches are given in order, here from {first} on"
            )
        if self.call.constrained:
            raise ValueError(
                f"call {self.id} was held to a form: its tokens are trained together, or exclude() "
                "leaves all of them out"
            )
        self._open()
        self._credits.say(self.id, "masked", (*masked, (start, stop)))

    @property
    def _credit(self) -> Credit:
        return self._credits.of(self.id)

    def _checked(self, what: str, value: float | None) -> float | None:
        if value is not None:
            value = float(value)
            if not math.isfinite(value):
                raise ValueError(f"the {what} of call {self.id} is {value}: give a finite number")
        self._open()
        return value

    def _open(self) -> None:
        if self._credits.sealed:
            raise TunerError(
                f"call {self.id} belongs to a rollout that has ended "
                f"({self._credits.session_id}): set rewards and exclusions inside the workflow"
            )


_LONGEST_STATE = 64  # characters: those of a SHA-256

# Work in progress of a session, in any task.


T = TypeVar("T")


class CutOff(Exception):
    """The work was cancelled, not the task that awaits it."""


class InFlight:
    """Work in progress of a session, its duration, and when it last began or ended.

    Attributes:
        tasks: The generating tasks, once for each thing that they generate.
        moved: When one last began or ended, by `time.perf_counter`.
    """

    def __init__(self) -> None:
        self.tasks: list[asyncio.Task[Any]] = []
        self.moved = time.perf_counter()
        self._seconds = 0.0
        self._cut: set[asyncio.Task[Any]] = set()

    @property
    def seconds(self) -> float:
        """Wall time during which at least one task was running."""
        return self._seconds + (time.perf_counter() - self.moved if self.tasks else 0.0)

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`.

        Raises:
            CutOff: `cancel` ended it, and nothing else cancelled the awaiting task.
        """
        task = asyncio.current_task()
        assert task is not None, "an answer is awaited"
        try:
            with self._generating(task):
                return await work
        except asyncio.CancelledError:
            if self._taken_back(task):
                raise CutOff from None
            raise
        finally:
            self._taken_back(task)

    def _taken_back(self, task: asyncio.Task[Any]) -> bool:
        """Undo the cancellation that `cancel` requested; returns whether nothing else wants the
        task to end.

        Whatever the task generates around this is cut off too, and ends in its own way.
        """
        if task in self.tasks or task not in self._cut:
            return False
        self._cut.discard(task)
        return task.uncancel() == 0

    @contextmanager
    def here(self) -> Iterator[None]:
        """While the block runs, its task counts as generating, and can be cancelled."""
        task = asyncio.current_task()
        assert task is not None, "an answer is awaited"
        try:
            with self._generating(task):
                yield
        finally:
            if task not in self.tasks:
                self._cut.discard(task)

    @contextmanager
    def _generating(self, task: asyncio.Task[Any]) -> Iterator[None]:
        self._move()
        self.tasks.append(task)
        try:
            yield
        finally:
            self._move()
            self.tasks.remove(task)

    def _move(self) -> None:
        self._seconds, self.moved = self.seconds, time.perf_counter()

    def cancel(self) -> None:
        """Cancel every task, from any thread."""
        for task in {*self.tasks}:
            task.get_loop().call_soon_threadsafe(self._cancel, task)

    def _cancel(self, task: asyncio.Task[Any]) -> None:
        if task in self.tasks:  # it may already be doing something else
            self._cut.add(task)
            task.cancel()


# `@tuner.recorded`: results of functions that belong to a rollout like its calls.
#
# A tool may cost money, change something, or answer differently tomorrow. With `recorded`, its
# results are in the trace of the rollout that calls it, and a rollout that repeats that one gets
# them back up to the point where the two diverge; the function itself does not run.


F = TypeVar("F", bound=Callable[..., Any])

_OPAQUE = "<not JSON>"


class Results:
    """The results of one rollout's recorded functions; thread-safe.

    Args:
        script: The script that the rollout repeats, or None.
        committed: Returns the number of committed calls of the rollout.
    """

    def __init__(self, script: Script | None, committed: Callable[[], int]) -> None:
        self._script = script
        self._committed = committed
        self._kept: list[FunctionResult] = []
        self._begun: Counter[str] = Counter()
        self._lock = threading.Lock()

    @property
    def kept(self) -> tuple[FunctionResult, ...]:
        """The results so far, in order."""
        return tuple(self._kept)

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """While the block runs, functions belong to this rollout, also in tasks and threads
        started in it."""
        token = _CURRENT.set(self)
        try:
            yield
        finally:
            _CURRENT.reset(token)

    def begin(self, function: str, arguments: dict[str, Any]) -> _FunctionCall:
        """A function is called."""
        key = json.dumps([function, arguments], sort_keys=True)
        with self._lock:
            occurrence = self._begun[key]
            self._begun[key] += 1
        return _FunctionCall(self, function, arguments, occurrence)

    def given(
        self, function: str, arguments: dict[str, Any], occurrence: int
    ) -> FunctionResult | None:
        """The script's result of a call that begins."""
        if self._script is None:
            return None
        return self._script.result(function, arguments, occurrence)

    def keep(self, function: str, arguments: dict[str, Any], occurrence: int, value: Any) -> None:
        """Keep a result."""
        self._kept.append(FunctionResult(function, arguments, occurrence, value, self._committed()))


class _FunctionCall:
    """One call of a recorded function.

    Args:
        results: The rollout's results.
        function, arguments: The function and its arguments.
        occurrence: Number of earlier equal calls.
    """

    def __init__(
        self, results: Results, function: str, arguments: dict[str, Any], occurrence: int
    ) -> None:
        self._results = results
        self.function, self.arguments, self.occurrence = function, arguments, occurrence

    def given(self) -> tuple[Any] | None:
        """The value that the script provides, alone in a tuple, or None: run the function."""
        found = self._results.given(self.function, self.arguments, self.occurrence)
        if found is None:
            return None
        return (self.kept(json.loads(json.dumps(found.value))),)

    def kept(self, value: Any) -> Any:
        """Record `value` as JSON, since the caller may change it later, and return it.

        Raises:
            FunctionError: JSON has no such value.
        """
        if (problem := _not_json(value)) is not None:
            raise FunctionError(
                f"{self.function} is decorated with @tuner.recorded and returned {problem}: what "
                "is recorded must be JSON, and come back from it as it was (None, bool, int, "
                "finite float, str, list, dict with str as keys)"
            )
        kept = json.loads(json.dumps(value))
        self._results.keep(self.function, self.arguments, self.occurrence, kept)
        return value


_CURRENT: ContextVar[Results | None] = ContextVar("tuner_results", default=None)


def recorded(function: F) -> F:
    """Record what a function returns in the trace of the rollout that calls it, and return it again
    when the rollout is repeated.

    Within the recorded part of a repeated rollout (`tuner rerun`, `tuner.testing`, branches) the
    function does not run: it returns the recorded value, as long as the agent does the same as
    before. Calls are matched by the function's file and qualified name, by their arguments, and
    among equal ones by their number. An argument that is not JSON (`self`, a client) is not
    compared. Exceptions are not recorded; such a call runs again. Outside of a rollout the function
    is unchanged.

        @tuner.recorded
        async def search(query: str) -> list[str]: ...

    Args:
        function: Async or plain. It must return a value that survives conversion to JSON and back.

    Raises:
        FunctionError: It is not a function, or yields; and when it is called in a rollout: it
            returned a value that JSON cannot hold.
    """
    inner = unwrapped(function)
    if not inspect.isroutine(inner) or isinstance(function, staticmethod | classmethod):
        raise FunctionError(
            f"@tuner.recorded is for functions, and got {shown(function)}: decorate the function "
            "itself, under @staticmethod or @classmethod"
        )
    if inspect.isgeneratorfunction(inner) or inspect.isasyncgenfunction(inner):
        raise FunctionError(f"@tuner.recorded: {where(function)} yields; it must return")
    name, signature = _name(inner), inspect.signature(function)

    def begin(args: Any, kwargs: Any) -> _FunctionCall | None:
        results = _collecting()
        if results is None:
            return None
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return results.begin(name, {key: _json(value) for key, value in bound.arguments.items()})

    if inspect.iscoroutinefunction(inner):

        @functools.wraps(function)
        async def awaited(*args: Any, **kwargs: Any) -> Any:
            if (begun := begin(args, kwargs)) is None:
                return await function(*args, **kwargs)
            if (given := begun.given()) is not None:
                return given[0]
            return begun.kept(await function(*args, **kwargs))

        return cast(F, awaited)

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        if (begun := begin(args, kwargs)) is None:
            return function(*args, **kwargs)
        if (given := begun.given()) is not None:
            return given[0]
        return begun.kept(function(*args, **kwargs))

    return cast(F, called)


def _collecting() -> Results | None:
    """The results of the current rollout. Functions made by `recorded` refer to this by name
    and not to the variable, so that a function of a script can be sent to another process."""
    return _CURRENT.get()


def _name(function: Any) -> str:
    """File and qualified name: the same whether the file is imported, or run as a script."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    file = function.__module__ if code is None else Path(code.co_filename).stem
    return f"{file}.{function.__qualname__}"


def _json(value: Any) -> Any:
    """An argument as JSON, since the caller may change it later."""
    if hasattr(value, "model_dump"):
        value = value.model_dump(mode="json")
    try:
        return json.loads(json.dumps(value, sort_keys=True))
    except (TypeError, ValueError):
        return _OPAQUE


def _not_json(value: Any, place: str = "") -> str | None:
    """The part of a value that JSON does not preserve, and its place; None if there is none."""
    kind = type(value)
    if value is None or kind in (bool, int, str) or (kind is float and math.isfinite(value)):
        return None
    if kind is list:
        inside = ((f"{place}[{index}]", item) for index, item in enumerate(value))
    elif kind is dict and all(type(key) is str for key in value):
        inside = ((f"{place}[{key!r}]", item) for key, item in value.items())
    else:
        return f"{shown(value)}{place and f' at {place}'}"
    return next((found for at, item in inside if (found := _not_json(item, at))), None)


# Access to a session, in the gateway's process or in another.


ROLE = re.compile(r"[A-Za-z0-9_-]{1,64}")


class Access(ABC):
    """A session, as the user's functions and chat models see it.

    Attributes:
        host: Handles its requests.
        id: The caller's name for it.
        key: Its API key.
        model_name: The `model` that requests must name.
        max_model_len: Maximum of prompt and answer tokens together.
        other_names: Further accepted values of `model`.
        errors: Internal failures of its calls.
        in_flight: Its work in progress.
        results: Results of its recorded functions.
    """

    host: Door
    id: str
    key: str
    other_names: Sequence[str]
    errors: list[Exception]
    in_flight: InFlight
    results: Results

    @property
    @abstractmethod
    def model_name(self) -> str: ...

    @property
    @abstractmethod
    def max_model_len(self) -> int: ...

    @property
    @abstractmethod
    def base_url(self) -> str:
        """The gateway's URL for HTTP clients; the first use starts the HTTP server."""

    @property
    @abstractmethod
    def keeps_calls(self) -> bool:
        """Whether calls are kept; False for models that are not trained."""

    @abstractmethod
    def calls_so_far(self) -> list[RecordedCall]:
        """The delivered calls, in order of commitment."""

    @abstractmethod
    def text_of(self, ids: Sequence[int]) -> str:
        """The text of tokens, without special ones."""

    @abstractmethod
    def encode(self, prompt: str | Sequence[Message]) -> list[int]:
        """Token ids of a text, or of messages in the chat template; shape [P]."""

    @property
    @abstractmethod
    def tokenizer(self) -> Any:
        """The model's tokenizer."""

    @property
    @abstractmethod
    def end_ids(self) -> frozenset[int]:
        """Token ids that end a completion."""

    @property
    @abstractmethod
    def version(self) -> int:
        """Number of updates of the weights that sample the next token."""

    @abstractmethod
    async def complete_tokens(
        self, prompt_ids: Sequence[int], **settings: Any
    ) -> tuple[Generation, ...]:
        """See `tuner.gateway.dialects.text.complete_tokens`."""

    @abstractmethod
    def warn_once(self, setting: str, sentence: str) -> None:
        """Warn of an unsafe setting of the user's agent, once for all sessions of a gateway."""

    @abstractmethod
    def seal(self) -> object:
        """End the session: later requests are rejected."""

    def key_of(self, role: str | None) -> str:
        """The API key that names `role` as the calling agent; None: the session's key.

        Raises:
            ValueError: `role` is not a valid name.
        """
        if role is None:
            return self.key
        if not ROLE.fullmatch(role):
            raise ValueError(f"role {role!r} must be 1 to 64 letters, digits, '_' or '-'")
        return f"{self.key}.{role}"

    def async_client(self, role: str | None = None) -> openai.AsyncOpenAI:
        """An OpenAI client of this session that needs no port."""
        from tuner.gateway.clients import in_process_client

        return in_process_client(self.host, self.key_of(role))

    def async_anthropic(self, role: str | None = None) -> anthropic.AsyncAnthropic:
        """Anthropic's client of this session, which needs no port.

        Raises:
            MissingDependencyError: The anthropic package is not installed.
        """
        from tuner.gateway.clients import in_process_anthropic

        return in_process_anthropic(self.host, self.key_of(role))

    def http_client(self, client_class: type) -> Any:
        """A client of the library that `client_class` is built on, which needs no port."""
        from tuner.gateway.clients import in_process_http_client

        return in_process_http_client(self.host, client_class)


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SamplingDefaults:
    """Sampling settings for requests that do not set them.

    Attributes:
        temperature: 0 is greedy.
        top_p: Nucleus mass in (0, 1].
        top_k: Keep the k most probable tokens; -1 keeps every token.
        max_tokens: Limit of a completion; None is the rest of the context.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int | None = None


@dataclass(frozen=True)
class SessionLimits:
    """Limits of one rollout; None is no limit.

    Attributes:
        calls: Maximum number of completions.
        tokens: Maximum number of sampled tokens, checked when a call begins: the call is cut off at
            the limit, and parallel calls may exceed it together.
    """

    calls: int | None = None
    tokens: int | None = None


@dataclass(frozen=True)
class KeptResponse:
    """A response of the Responses API that a session can continue.

    Attributes:
        messages: The conversation with the answer, without instructions, which do not carry over.
        items: The answer's items by id.
    """

    messages: list[Message]
    items: dict[str, dict[str, Any]]


class Recording:
    """The calls of a session, in order of commitment.

    Args:
        kept: Whether calls are kept; False for models that are not trained.
        sink: Also receives the calls, before any part of them is sent, whether kept or not.

    Attributes:
        tokens: Sampled tokens of all calls, including those of an earlier process.
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
        """All calls, including undelivered ones, with their credit; empty if calls are not kept."""
        return tuple(map(self._credits.given_to, self._calls))

    @property
    def committed(self) -> int:
        """Number of calls."""
        return len(self._calls)

    def for_workflow(self) -> list[RecordedCall]:
        """The delivered calls so far."""
        return [RecordedCall(self._credits, call) for call in self._calls if not call.undelivered]

    def credit(self, call_id: str, what: str, value: Any) -> None:
        """Set credit that a workflow in another process gave a call."""
        if not self._credits.sealed:
            self._credits.say(call_id, what, value)

    def add(self, calls: list[Call], request: str | None = None) -> None:
        """Add the calls of a request, all or none; `request` is its idempotency key."""
        if calls and self._sink is not None:
            self._sink.add(calls, request)
        self.tokens += sum(call.usage.output_tokens for call in calls)
        if self.kept:
            self._calls.extend(calls)

    @contextmanager
    def carrying(self, abandoned: Callable[[], list[Call]]) -> Iterator[None]:
        """Register a request in progress while the block runs.

        Args:
            abandoned: Returns what it has sampled, if it ends before its calls are added.
        """
        self.carried.append(abandoned)
        try:
            yield
        finally:
            self._let_go(abandoned)

    def seal(self) -> None:
        """Add no more calls, except those that this abandons."""
        for abandoned in list(self.carried):
            self._let_go(abandoned)
        self._credits.sealed = True

    def _let_go(self, abandoned: Callable[[], list[Call]]) -> None:
        if abandoned in self.carried:
            self.carried.remove(abandoned)
            self.add(abandoned())


class Session(Access):
    """One attempt at a rollout: its identity and limits. `Gateway.open_session` creates it.

    Attributes:
        service: Engine and settings that answer its requests.
        host: The gateway that it is open at.
        id: The caller's name for it.
        key: Its secret API key.
        seed: Source of the seeds of its calls.
        defaults: Sampling settings for requests that do not set them.
        limits: Its limits.
        script: Answers it before anything is sampled, or None.
        sink: Stores its calls and replies outside this process, or None.
        other_names: Accepted values of `model` besides the gateway's name for it.
        errors: Internal failures of its calls.
        sealed: Whether it has ended.
        recording: Its calls.
        results: Results of its recorded functions.
        in_flight: Its work in progress.
        conversations: Its prompts and completions, for prompts that continue them.
        turns: Lock that keeps its requests in order while they render their prompts.
        responses: Answers of the Responses API that can be continued by their id.
        replays: Requests with an idempotency key, by that key.
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
        return self.recording.calls

    @property
    def model_name(self) -> str:
        return self.service.model_name

    @property
    def base_url(self) -> str:
        return self.host.base_url

    @property
    def max_model_len(self) -> int:
        return self.service.engine.capabilities.max_model_len

    @property
    def keeps_calls(self) -> bool:
        return self.recording.kept

    def calls_so_far(self) -> list[RecordedCall]:
        return self.recording.for_workflow()

    def text_of(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def encode(self, prompt: str | Sequence[Message]) -> list[int]:
        renderer = self.service.renderer
        text = prompt if isinstance(prompt, str) else renderer.render_text(prompt, [])
        return list(renderer.encode(text))

    @property
    def tokenizer(self) -> Any:
        return self.service.renderer.tokenizer

    @property
    def end_ids(self) -> frozenset[int]:
        return self.service.engine.capabilities.end_ids

    @property
    def version(self) -> int:
        return self.service.engine.version

    async def complete_tokens(
        self, prompt_ids: Sequence[int], **settings: Any
    ) -> tuple[Generation, ...]:
        return await self.host.complete_tokens(self, prompt_ids, **settings)

    async def at_home(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, run in the event loop that the engine is called in."""
        return await in_loop(self.host.home(), work)

    def warn_once(self, setting: str, sentence: str) -> None:
        if setting not in self.host.warned:
            self.host.warned.add(setting)
            logger.warning("%s %s", setting, sentence)

    def seal(self) -> tuple[Call, ...]:
        """End the session: cancel work in progress, reject later requests.

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
        """Reject a request for another model than the session's."""
        if model not in (self.model_name, *self.other_names, *self.service.roles.adapters):
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
            24 hex digits, for the id of the response; the maximum number of tokens of each choice,
                None
            is no limit; and a seed for each choice of each prompt, in order.

        Raises:
            RequestError: 409: the session was sealed; 403: it has reached its limits.
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
        """Count the calls of an earlier process, so that no id and no seed repeats."""
        for call in calls:  # one request for each, which is enough
            self._admitted += 1
            self._asked[_digest(call.compared.prompt_ids)] += 1
            self.recording.tokens += call.usage.output_tokens

    def digest(self, *parts: object) -> bytes:
        """32 bytes that depend only on the session's seed and `parts`."""
        return hashlib.blake2b(repr((self.seed, *parts)).encode(), digest_size=32).digest()

    async def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Await `work()`, which `seal` cancels.

        Raises:
            RequestError: 409: the session was sealed before or meanwhile.
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
            RequestError: 409: the session was sealed meanwhile.
        """
        if self.sealed:
            raise has_ended(self.id)
        self.recording.add(calls, request)


def _digest(prompt: tuple[int, ...]) -> bytes:
    ids, images = ALBUM.recorded(prompt, -1)  # the same in every process
    content = array("q", ids).tobytes() + (repr(images).encode() if images else b"")
    return hashlib.blake2b(content, digest_size=16).digest()
