"""A rollout's identity at the gateway: its key, what it may ask for, its end; and what it keeps."""

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


# What a workflow may say about its own calls: a reward of their own, or not to train them.


@dataclass
class Credit:
    """What the workflow said about one call, by the names of the call's fields."""

    reward: float | None = None
    gained: float | None = None
    excluded: bool = False
    masked: tuple[tuple[int, int], ...] = ()


class Credits:
    """What the workflow said about the calls of one session, while that is open.

    Args:
        session_id: The session's, for messages.

    Attributes:
        sealed: Whether nothing can be said any more.
    """

    def __init__(self, session_id: str) -> None:
        self.session_id = session_id
        self.sealed = False
        self._by_call: dict[str, Credit] = {}

    def of(self, call_id: str) -> Credit:
        """What was said about a call."""
        return self._by_call.get(call_id, Credit())

    def say(self, call_id: str, what: str, value: Any) -> None:
        """Set a field of a call's credit."""
        setattr(self._by_call.setdefault(call_id, Credit()), what, value)

    def given_to(self, call: Call) -> Call:
        """The call with what was said about it."""
        credit = self._by_call.get(call.id)
        return call if credit is None else replace(call, **vars(credit))


class RecordedCall:
    """A call of a rollout that goes on, for the workflow that made it.

        model.calls[-1].reward = 0.3      # instead of the rollout's reward
        model.calls[0].exclude()          # recorded, not trained

    Attributes:
        call: The call as it was recorded.
    """

    def __init__(self, credits: Credits, call: Call) -> None:
        self._credits = credits
        self.call = call

    @property
    def id(self) -> str:
        """The call's id: that of the response, and the choice's index."""
        return self.call.id

    @property
    def role(self) -> str | None:
        """The agent that made the call, where it was named."""
        return self.call.role

    @property
    def response(self) -> dict[str, Any]:
        """The assistant message that the agent received."""
        return self.call.response

    @property
    def reward(self) -> float | None:
        """The call's own reward; None is the rollout's.

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
        """What was gained where the call ended; None: what its reward and the rollout's say.

        Raises:
            As `reward`.
        """
        return self._credit.gained

    @gained.setter
    def gained(self, value: float | None) -> None:
        self._credits.say(self.id, "gained", self._checked("gain", value))

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
            ValueError: There are no such tokens, they begin before the end of those that were
                masked before, or the call was held to a form, which is trained whole or not at all.
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


# What of a session is being generated, in whichever task.


T = TypeVar("T")


class CutOff(Exception):
    """What was being generated was cancelled, and not who awaits it."""


class InFlight:
    """What of a session is being generated, how long that took, and when it last began or ended.

    Attributes:
        tasks: Those that generate, once for each thing that they generate.
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
            CutOff: `cancel` ended it, and not who awaits it.
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
        """Take back what `cancel` has asked of a task; whether nobody else wants it to end.

        What the task generates around this is cut off, too, and ends as it would.
        """
        if task in self.tasks or task not in self._cut:
            return False
        self._cut.discard(task)
        return task.uncancel() == 0

    @contextmanager
    def here(self) -> Iterator[None]:
        """While the block runs, the task that runs it is generating, and can be cancelled."""
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
        if task in self.tasks:  # it may have gone on to something else
            self._cut.add(task)
            task.cancel()


# `@tuner.recorded`: results of functions that belong to a rollout as its calls do.
#
# A tool may cost money, change something, or answer differently tomorrow. Decorated with
# `recorded`, its results are in the trace of the rollout that calls it, and a rollout that repeats
# that one gets them back up to the point where the two part; the function itself does not run.


F = TypeVar("F", bound=Callable[..., Any])

_OPAQUE = "<not JSON>"


class Results:
    """The results of one rollout's recorded functions; in any thread.

    Args:
        script: What the rollout repeats, or None.
        committed: How many calls of the rollout are committed.
    """

    def __init__(self, script: Script | None, committed: Callable[[], int]) -> None:
        self._script = script
        self._committed = committed
        self._kept: list[FunctionResult] = []
        self._begun: Counter[str] = Counter()
        self._lock = threading.Lock()

    @property
    def kept(self) -> tuple[FunctionResult, ...]:
        """Those so far, in the order in which they were there."""
        return tuple(self._kept)

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """While the block runs, and in tasks and threads that it begins, functions are its."""
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
        """What the script has of a call that begins."""
        if self._script is None:
            return None
        return self._script.result(function, arguments, occurrence)

    def keep(self, function: str, arguments: dict[str, Any], occurrence: int, value: Any) -> None:
        """Take note of a result."""
        self._kept.append(FunctionResult(function, arguments, occurrence, value, self._committed()))


class _FunctionCall:
    """One call of a recorded function.

    Args:
        results: Where it belongs.
        function, arguments: Who is called with what.
        occurrence: How often it was before.
    """

    def __init__(
        self, results: Results, function: str, arguments: dict[str, Any], occurrence: int
    ) -> None:
        self._results = results
        self.function, self.arguments, self.occurrence = function, arguments, occurrence

    def given(self) -> tuple[Any] | None:
        """The value that the script gives, alone in a tuple, or None: run the function."""
        found = self._results.given(self.function, self.arguments, self.occurrence)
        if found is None:
            return None
        return (self.kept(json.loads(json.dumps(found.value))),)

    def kept(self, value: Any) -> Any:
        """`value`, which is kept as JSON has it now: whoever gets it may change it.

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
    """Keep what a function returns in the trace of the rollout that calls it, and give it back
    where the rollout is run again.

    Within the recorded part of a rollout that is run again (`tuner rerun`, `tuner.testing`,
    branches) the function does not run: it returns what it returned then, as long as the agent has
    done the same as then. Calls are matched by the function's file and qualified name, by their
    arguments, and of equal ones by how many were before. An argument that is no JSON (`self`, a
    client) is not compared. What raised an exception is not recorded, and runs again. Outside of a
    rollout the function is as it was.

        @tuner.recorded
        async def search(query: str) -> list[str]: ...

    Args:
        function: Async or plain. What it returns must be JSON, and equal to what JSON makes of it.

    Raises:
        FunctionError: It is no function, or yields; and when it is called in a rollout: it returned
            what JSON cannot hold.
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
    """Those of the rollout that runs. What `recorded` makes has hold of this, by its name, and not
    of the variable: so a function of a script can be sent to another process."""
    return _CURRENT.get()


def _name(function: Any) -> str:
    """File and qualified name: the same whether the file is imported, or run as a script."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    file = function.__module__ if code is None else Path(code.co_filename).stem
    return f"{file}.{function.__qualname__}"


def _json(value: Any) -> Any:
    """An argument as JSON has it now; the caller may change it later."""
    if hasattr(value, "model_dump"):
        value = value.model_dump(mode="json")
    try:
        return json.loads(json.dumps(value, sort_keys=True))
    except (TypeError, ValueError):
        return _OPAQUE


def _not_json(value: Any, place: str = "") -> str | None:
    """What of a value JSON does not give back as it was, and where; None where it does."""
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


# What code that has a session reaches the gateway with, in the gateway's process or in another.


ROLE = re.compile(r"[A-Za-z0-9_-]{1,64}")


class Access(ABC):
    """A session, as the user's functions and chat models know it.

    Attributes:
        host: What takes its requests.
        id: The caller's name for it.
        key: The API key that stands for it.
        model_name: The name that requests give as `model`.
        max_model_len: Tokens of prompt and answer together.
        other_names: What requests may give as `model` besides.
        errors: What went wrong inside its calls that was not the caller's fault.
        in_flight: What is being generated.
        results: What recorded functions returned in it.
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
        """Where HTTP clients find the gateway; the first use opens the door."""

    @property
    @abstractmethod
    def keeps_calls(self) -> bool:
        """Whether calls are kept; not those of models that are not trained."""

    @abstractmethod
    def calls_so_far(self) -> list[RecordedCall]:
        """The calls that were delivered, in order of commitment."""

    @abstractmethod
    def text_of(self, ids: Sequence[int]) -> str:
        """Tokens in the tokenizer's words, special ones left out."""

    @abstractmethod
    def encode(self, prompt: str | Sequence[Message]) -> list[int]:
        """Token ids of text as it is, or of messages in the chat template; shape [P]."""

    @property
    @abstractmethod
    def tokenizer(self) -> Any:
        """The model's."""

    @property
    @abstractmethod
    def end_ids(self) -> frozenset[int]:
        """Tokens that end a completion."""

    @property
    @abstractmethod
    def version(self) -> int:
        """Updates that the weights have seen which sample the next token."""

    @abstractmethod
    async def complete_tokens(
        self, prompt_ids: Sequence[int], **settings: Any
    ) -> tuple[Generation, ...]:
        """As `tuner.gateway.dialects.text.complete_tokens`."""

    @abstractmethod
    def warn_once(self, setting: str, sentence: str) -> None:
        """Log that a setting of the user's agent is unsafe, once for all sessions of a gateway."""

    @abstractmethod
    def seal(self) -> object:
        """End the session: what comes later is refused."""

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
            self._credits.say(call_id, what, value)

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
