"""What a run and its workers say to each other, over one private pair of sockets for each worker.

    the run                                   a worker
    Setup, once          ------------------>  loads the functions
                         <------------------  Ready, or Refused
    Open                 ------------------>  the sessions of an attempt
    Run                  ------------------>  calls a function
                         <------------------  Request: of the gateway; Ask: of a session
    Reply, Event, Given  ------------------>
                         <------------------  Done, or Failed
    Close                ------------------>  the attempt has ended

Each is a pickle behind its length. Both ends are processes of one user and one version of this
package, and nobody else has the sockets.
"""

from __future__ import annotations

import contextlib
import pickle
import struct
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from tuner.chat_models import ChatModelKind
from tuner.config import RemoteModel
from tuner.traces import Outcome

_LENGTH = struct.Struct(">Q")


class Setup(NamedTuple):
    """What a worker is for.

    Attributes:
        workflow, judge: As `ship_together` names them.
        kind: The framework of the chat models.
        path: `sys.path` of the run; None on another machine, which has its own.
        levels: Of its loggers, by name.
        timeout: Seconds that code may keep the event loop.
    """

    workflow: str
    judge: str | None
    kind: ChatModelKind
    path: list[str] | None
    levels: dict[str, int]
    timeout: float


class Ready(NamedTuple):
    """The functions are loaded."""


class Refused(NamedTuple):
    """The functions cannot be loaded; says why."""

    why: str


class Opened(NamedTuple):
    """A session of the run's gateway.

    Attributes:
        number: Of the session, for what is asked of it.
        door: Of the gateway that it is open at.
        scripted: Whether recorded functions may be given their results.
        base_url: Where the worker asks that gateway, unless by the line.
    """

    number: int
    door: int
    id: str
    key: str
    model_name: str
    max_model_len: int
    keeps_calls: bool
    scripted: bool
    base_url: str | None = None


class Remote(NamedTuple):
    """An auxiliary model behind a URL."""

    model: RemoteModel
    key: str
    max_concurrent: int | None


class Open(NamedTuple):
    """An attempt at a rollout, or a group that is judged.

    Attributes:
        session: Its own.
        auxiliary: Its auxiliary models by name.
        seed: For the global random states, or None.
    """

    attempt: int
    session: Opened
    auxiliary: dict[str, Opened | Remote]
    seed: int | None


class Close(NamedTuple):
    """The attempt has ended."""

    attempt: int


class Run(NamedTuple):
    """Call a function.

    Attributes:
        call: Its number.
        role: "workflow", "judge" or "group_judge".
        feedback: For the workflow.
        responses: Numbers of the responses that are judged; None is a response that is None.
    """

    call: int
    attempt: int
    role: str
    task: dict[str, Any]
    feedback: str | None = None
    responses: tuple[int | None, ...] = ()


class Cancel(NamedTuple):
    """End a call."""

    call: int


class Forget(NamedTuple):
    """Nobody asks for this response any more."""

    response: int


class Stop(NamedTuple):
    """End."""


class Returned(NamedTuple):
    """What a workflow returned; its response stays where it is, under a number."""

    reward: float | None
    metrics: dict[str, float] | None
    response: int | None
    text: str


class Done(NamedTuple):
    """A function returned: `Returned`, or what `JudgeOutput`s are made of.

    Attributes:
        cpu: Seconds of CPU that the worker and its children have used since it was ready.
    """

    call: int
    value: Any
    cpu: float


class Failed(NamedTuple):
    """A function did not return.

    Attributes:
        mistake: A `FunctionError`, which ends the run; else None.
        cancelled: Whether it was cancelled, or cancelled itself.
        outcome, described, place: As `Elsewhere` has them.
    """

    call: int
    cpu: float
    mistake: Exception | None = None
    cancelled: bool = False
    outcome: Outcome = Outcome.WORKFLOW_ERROR
    described: str = ""
    place: str | None = None


class Request(NamedTuple):
    """A request of the gateway."""

    request: int
    door: int
    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


class Next(NamedTuple):
    """Ask for the next event of a stream."""

    request: int


class Abandon(NamedTuple):
    """Nobody waits for the answer, or for the rest of the stream."""

    request: int


class Answered(NamedTuple):
    """The gateway's answer; `streams` says that events can be asked for."""

    request: int
    status: int
    body: bytes
    content_type: str
    headers: tuple[tuple[str, str], ...]
    streams: bool = False


class Event(NamedTuple):
    """The next event of a stream; None is its end."""

    request: int
    data: bytes | None


class Ask(NamedTuple):
    """Ask a session for something, or tell it.

    Attributes:
        ask: Number of the question; None is no question.
        session: Whom.
    """

    ask: int | None
    session: int
    what: str
    arguments: tuple[Any, ...]


class Given(NamedTuple):
    """What a session says; `error` is what it raised instead."""

    ask: int
    value: Any
    error: Exception | None = None


class Log(NamedTuple):
    """A record of the worker's log."""

    fields: dict[str, Any]


def framed(message: Any) -> bytes:
    """A message as it is sent."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(data)) + data


class Frames:
    """What has arrived, as messages."""

    def __init__(self) -> None:
        self._data = bytearray()

    def added(self, data: bytes) -> Iterator[Any]:
        """The messages that are complete with this."""
        self._data += data
        start, held = 0, len(self._data)
        view = memoryview(self._data)
        found = []
        while held - start >= _LENGTH.size:
            end = start + _LENGTH.size + _LENGTH.unpack_from(view, start)[0]
            if end > held:
                break
            found.append(pickle.loads(view[start + _LENGTH.size : end]))
            start = end
        view.release()
        del self._data[:start]
        return iter(found)


def portable(error: Exception) -> Exception:
    """An error as another process can read it: its own class where that is Python's or ours."""
    kind, text = type(error), str(error)
    if kind.__module__.partition(".")[0] in ("builtins", "tuner"):
        with contextlib.suppress(Exception):  # with all that it knows
            if type(pickle.loads(pickle.dumps(error))) is kind:
                return error
        with contextlib.suppress(Exception):  # or with its words, unless its constructor wants more
            made = kind(text)
            pickle.dumps(made)
            return made
    return RuntimeError(f"{kind.__name__}: {text}")
