"""The actors of a run as Ray sees them: which of them died of itself, and what it said last."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_LINES = 20
_PID = re.compile(r"\(pid=(\d+)[,)]")
# What ends an actor that nobody needs or that we ended: no failure.
_ON_PURPOSE = ("RAY_KILL", "OUT_OF_SCOPE", "REF_DELETED", "OWNER_DIED")


@dataclass(frozen=True)
class Death:
    """An actor that ended and was not meant to.

    Attributes:
        name: Its name, or its class where it has none.
        pid: Its process.
        node: Address of its machine.
        cause: Ray's words, on one line.
        quote: The last lines of what its process printed, where they can be read.
    """

    name: str
    pid: int
    node: str
    cause: str
    quote: str = ""

    def __str__(self) -> str:
        text = f"the actor {self.name} (process {self.pid} on {self.node}) died: {self.cause}"
        return f"{text}\nIt printed last:\n{self.quote}" if self.quote else text


def deaths(session: Path | None, keep: Path) -> list[Death]:
    """The actors of this process's job that died of themselves, the first of them first.

    Args:
        session: Ray's session folder, where it is on this machine; what the dead printed is there.
        keep: Where that is copied to, a file per actor; the session's folder ends with the cluster.
    """
    import ray
    from ray._private.state import actors

    ours = ray.get_runtime_context().get_job_id()
    dead = actors(actor_state_name="DEAD").values()
    found = [i for i in dead if i["JobID"] == ours and _cause(i["DeathCause"]) is not None]
    found.sort(key=lambda info: info["EndTime"])
    return [_death(info, session, keep) for info in found]


def _death(info: Mapping[str, Any], session: Path | None, keep: Path) -> Death:
    name = info["Name"] or info["ActorClassName"]
    pid = int(info["Pid"])
    quotes = _kept(name, pid, session, keep)
    for path in [] if quotes else keep.parent.rglob(f"{name}.log"):
        quotes += _end(path)  # its machine is another one, and it had printed nothing
    return Death(
        name=name,
        pid=pid,
        node=str(info["Address"]["IPAddress"]),
        cause=_cause(info["DeathCause"]) or "",
        quote="\n".join(quotes),
    )


def printed_by(said: str, session: Path | None, keep: Path) -> str:
    """The last lines of what processes printed that errors of Ray's name, as in `(pid=123, ip=...`:
    an actor whose call failed may live on, and the cause be in the output of a child of it. What a
    dead actor printed is kept and quoted with its death.

    Args:
        said: The errors.
        session, keep: As for `deaths`.
    """
    named = dict.fromkeys(int(pid) for pid in _PID.findall(said))
    pids = [pid for pid in named if not any(keep.glob(f"*_{pid}.*"))]
    return "\n".join(line for pid in pids for line in _kept("process", pid, session, keep))


def _kept(name: str, pid: int, session: Path | None, keep: Path) -> list[str]:
    """Copy what a process printed; its last lines."""
    quotes = []
    for path in _printed(session, pid) if session is not None and pid else ():
        keep.mkdir(parents=True, exist_ok=True)
        copy = keep / f"{name.replace('/', '_')}_{pid}{path.suffix}"
        shutil.copyfile(path, copy)
        quotes += _end(copy)
    return quotes


def _end(path: Path) -> list[str]:
    """The last lines of a file with its name above them; empty where it says nothing."""
    text = path.read_text(encoding="utf-8", errors="replace")
    # Ray begins each file with lines like ":job_id:01000000" for itself.
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith(":")]
    return [f"  {path}:", *(f"    {line}" for line in lines[-_LINES:])] if lines else []


def _printed(session: Path, pid: int) -> Iterator[Path]:
    """What a worker printed: Ray names the files `worker-<id>-<job>-<pid>.out` and `.err`."""
    for suffix in ("err", "out"):
        yield from (session / "logs").glob(f"worker-*-{pid}.{suffix}")


def _cause(cause: Any) -> str | None:
    """Why an actor died; None where that was meant."""
    kind = cause.WhichOneof("context")
    if kind is None:
        return None
    context = getattr(cause, kind)
    if kind == "actor_died_error_context":
        reasons = context.DESCRIPTOR.fields_by_name["reason"].enum_type.values_by_number
        if reasons[context.reason].name in _ON_PURPOSE or _left_by_itself(context.error_message):
            return None
        return _one_line(context.error_message)
    if kind == "creation_task_failure_context":
        return _one_line(context.formatted_exception_string) or "it could not be made"
    message = getattr(context, "error_message", "") or str(context)
    return _one_line(message) or kind


def _left_by_itself(message: str) -> bool:
    """`exit_actor()`, as Trinity-RFT's synchronizer ends when nobody needs it any more."""
    return "INTENDED" in message or "exit_actor" in message


def _one_line(text: str) -> str:
    """Ray's words without what it guesses of the causes."""
    return " ".join(text.partition("Some common causes")[0].split())
