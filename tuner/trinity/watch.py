"""Monitor a run on Trinity-RFT: show each step, end a run that is stuck, and say why.

Trinity-RFT's processes wait for each other, each with a time limit of half an hour or more. Three
of these waits cannot end well and are detected here at once: an actor has died; the rollouts give
nothing to learn from; and the explorer waits for weights which the trainer cannot make, because
failed rollouts left its batch incomplete. The last one is no failure: the explorer is told to
continue. The last output of dead actors is in Ray's and in Trinity-RFT's logs.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.errors import TrainingError
from tuner.runs.console import ConsoleMonitor
from tuner.runs.metrics import rollout_metrics
from tuner.runs.notices import CallSettings, Notices, SignalHistory, diagnosis, quiet_warning
from tuner.traces import Trace
from tuner.trinity.progress import Journal, TrinityProgress, latest_checkpoint
from tuner.trinity.stage import answers, server_url

if TYPE_CHECKING:
    from trinity.common.config import Config

logger = logging.getLogger("tuner")

_ASK_RAY_EVERY = 2.0


class NothingToLearn(TrainingError):
    """Step after step taught nothing: the message is the diagnosis, no log says more."""


@dataclass(eq=False)
class Watch:
    """Monitors one start of a run.

    Attributes:
        config: After Trinity-RFT's check.
        progress: The run's reports.
        journal: The workers' records.
        console: The output.
        metrics: `metrics.jsonl`; each finished step is appended.
        patience: Steps without anything to learn from before the run ends, or before a warning if
            an earlier step had something; `tuner.signal_patience`.
        deaths: Returns the dead actors.
        synchronizer: Lets the explorer continue; None if no weights are exchanged or that is not
            possible.
        call_settings: Settings that cut calls off and parse their tool calls.
    """

    config: Config
    progress: TrinityProgress
    journal: Journal
    console: ConsoleMonitor
    metrics: Path
    patience: int
    deaths: Callable[[], Sequence[Death]]
    synchronizer: Synchronizer | None
    call_settings: CallSettings = field(default_factory=CallSettings)

    def __post_init__(self) -> None:
        self._said = {role: set(self.progress.reports(role)) for role in ("explorer", "trainer")}
        self._trained_before = len(self.progress.trained_steps())
        self._handed_before = self.progress.experiences()
        self._ended = self.progress.ended_steps()
        self._notices = Notices(self.call_settings, compared=self.progress.compared)
        self._signal = SignalHistory()
        for step in self._ended:
            self._signal = self._after(self.progress.traces(step))
        self._ended_before = len(self._ended)
        self._asked = 0.0
        self._shown = 0
        self._rollouts = self._place = 0
        self._short_since: int | None = None

    def look(self) -> None:
        """Check once; raises FunctionError or TrainingError if the run must end."""
        self.journal.raise_reason()
        self.say()
        self._check_signal()
        if time.monotonic() - self._asked < _ASK_RAY_EVERY:
            return
        self._asked = time.monotonic()
        if dead := self.deaths():
            raise TrainingError("\n".join(str(death) for death in dead))
        if self.synchronizer is not None and len(self._ended) > self._ended_before:
            self._let_go_on(self.synchronizer)

    def say(self) -> None:
        """Show newly finished steps, and append them to `metrics.jsonl`."""
        if self.config.mode == "serve" and not self._said["explorer"]:
            url = server_url(self.config)
            if url and answers(url):
                self._said["explorer"].add(0)
                self.console.say(f"serving {url}/v1  Ctrl-C ends it")
        role = "trainer" if self.config.mode in ("both", "colocate", "train") else "explorer"
        for step in sorted(set(self.progress.reports(role)) - self._said[role]):
            self._said[role].add(step)
            row = self.progress.row(step)
            with self.metrics.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, **row}) + "\n")
            if "time/step" in row:
                self.console.log(step, row)
        self._show_rollouts(max(self._said[role], default=0) + 1)

    def _show_rollouts(self, step: int) -> None:
        """Show the bar of the step in progress, on a terminal."""
        config = self.config
        total = int(config.buffer.batch_size * config.algorithm.repeat_times)
        if step != self._shown:
            self._shown, self._rollouts, self._place = step, 0, 0
            self.console.begin(f"step {step}", total, step=step)
        path = self.journal.traces(step)
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(self._place)
            added = file.read()
        self._place += len(added)
        for _ in range(min(added.count(b"\n"), total - self._rollouts)):
            self._rollouts += 1
            self.console.rollout_done()

    def _check_signal(self) -> None:
        ended = self.progress.ended_steps()
        for step in ended:
            if step in self._ended:
                continue
            traces = self.progress.traces(step)
            signal = self._signal = self._after(traces)
            for notice in self._notices.of(step, traces, signal):
                self.console.note(notice)
            if signal.quiet < self.patience:
                continue
            settings = self.call_settings
            if not signal.learned or signal.broken >= self.patience:
                reason = diagnosis(traces, self.patience, settings=settings)
                raise NothingToLearn(f"{reason}{self._kept() if signal.learned else ''}")
            if signal.quiet == self.patience:
                self.console.note(quiet_warning(traces, step, self.patience, settings))
        self._ended = ended

    def _after(self, traces: Sequence[Trace]) -> SignalHistory:
        """The signal history with one more step of these traces."""
        signal = float(self.progress.signal(traces))
        return self._signal.after({**rollout_metrics(traces), "signal": signal})

    def _kept(self) -> str:
        """Location of Trinity-RFT's latest saved weights, and how the run resumes."""
        checkpoint = latest_checkpoint(self.metrics.parent)
        if checkpoint is None:
            return ". Trinity-RFT had saved no checkpoint (trainer.save_interval)"
        return (
            f". The last checkpoint is {checkpoint}: fix the cause and start the run again in the "
            "same way, and it resumes there"
        )

    def _let_go_on(self, synchronizer: Synchronizer) -> None:
        """Let the explorer continue if it waits for weights that the trainer has no batch for."""
        batch = int(self.config.buffer.train_batch_size)
        trained = len(self.progress.trained_steps()) - self._trained_before
        there = self.progress.experiences() - self._handed_before - trained * batch
        step = max(self._ended, default=0)
        if there >= batch or not synchronizer.explorer_waits():
            self._short_since = None
        elif self._short_since != step:
            self._short_since = step  # a report may be late; check once more before acting on it
        else:
            logger.warning(
                "step %d: failed rollouts leave the trainer with %d of %d experiences; more "
                "are collected with the current weights",
                step,
                there,
                batch,
            )
            synchronizer.let_explorer_go_on()
            self._short_since = None


class Synchronizer:
    """The two calls to Trinity-RFT's synchronizer."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace

    def explorer_waits(self) -> bool:
        """Whether an explorer waits for weights."""
        return bool(self._ask("explorer_requires_sync"))

    def let_explorer_go_on(self) -> None:
        """Tell it that there are no new weights."""
        self._ask("notify_no_new_model_state_dict")

    def _ask(self, method: str) -> Any:
        """The method's answer; None if it takes long, and the next call asks again."""
        import ray

        try:
            actor = ray.get_actor("synchronizer", namespace=self._namespace)
        except ValueError:  # not started yet
            return None
        done, _ = ray.wait([getattr(actor, method).remote()], timeout=_ASK_RAY_EVERY)
        return ray.get(done[0]) if done else None


def synchronizer_of(config: Config) -> Synchronizer | None:
    """Access to the synchronizer; None with NCCL, where Trinity-RFT continues after its
    `sync_timeout`."""
    from trinity.common.constants import SyncMethod

    by_nccl = config.synchronizer.sync_method == SyncMethod.NCCL
    exchanged = config.mode in ("both", "colocate")
    return Synchronizer(config.ray_namespace) if exchanged and not by_nccl else None


_LINES = 20
_PID = re.compile(r"\(pid=(\d+)[,)]")
# Ends of actors that nobody needs or that we ended: no failure.
_ON_PURPOSE = ("RAY_KILL", "OUT_OF_SCOPE", "REF_DELETED", "OWNER_DIED")


@dataclass(frozen=True)
class Death:
    """An actor that ended unintentionally.

    Attributes:
        name: Its name, or its class if it has none.
        pid: Its process.
        node: Address of its machine.
        cause: Ray's message, on one line.
        quote: The last lines of its output, if they can be read.
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
    """Actors of this process's job that died by themselves, in order of death.

    Args:
        session: Ray's session folder, if it is on this machine; has the output of the dead actors.
        keep: Folder for copies of it, a file per actor; the session's folder ends with the cluster.
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
    """The last output of processes named in errors of Ray, such as `(pid=123, ip=...`: an actor
    whose call failed may live on, and the cause may be in the output of its child. The
    output of a dead actor is kept and quoted with its death.

    Args:
        said: The errors.
        session, keep: Like for `deaths`.
    """
    named = dict.fromkeys(int(pid) for pid in _PID.findall(said))
    pids = [pid for pid in named if not any(keep.glob(f"*_{pid}.*"))]
    return "\n".join(line for pid in pids for line in _kept("process", pid, session, keep))


def _kept(name: str, pid: int, session: Path | None, keep: Path) -> list[str]:
    """Copy a process's output; returns its last lines."""
    quotes: list[str] = []
    if session is None or not pid:
        return quotes
    for suffix in (".err", ".out"):
        copy = keep / f"{name.replace('/', '_')}_{pid}{suffix}"
        # Ray names the files `worker-<id>-<job>-<pid>.out` and `.err`.
        for path in session.glob(f"logs/worker-*-{pid}{suffix}"):
            keep.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
            quotes += _end(copy)
    return quotes


def _end(path: Path) -> list[str]:
    """The last lines of a file with its name above them; empty if the file is."""
    text = path.read_text(encoding="utf-8", errors="replace")
    # Ray begins each file with lines like ":job_id:01000000" for itself.
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith(":")]
    return [f"  {path}:", *(f"    {line}" for line in lines[-_LINES:])] if lines else []


def _cause(cause: Any) -> str | None:
    """Cause of an actor's death; None if it was intended."""
    kind = cause.WhichOneof("context")
    if kind is None:
        return None
    context = getattr(cause, kind)
    if kind == "actor_died_error_context":
        reasons = context.DESCRIPTOR.fields_by_name["reason"].enum_type.values_by_number
        said = context.error_message
        # `exit_actor()` is how Trinity-RFT's synchronizer ends when nobody needs it any more.
        left_by_itself = "INTENDED" in said or "exit_actor" in said
        if left_by_itself or reasons[context.reason].name in _ON_PURPOSE:
            return None
        return _one_line(said)
    if kind == "creation_task_failure_context":
        return _one_line(context.formatted_exception_string) or "it could not be made"
    message = getattr(context, "error_message", "") or str(context)
    return _one_line(message) or kind


def _one_line(text: str) -> str:
    """Ray's message without its guesses at causes."""
    return " ".join(text.partition("Some common causes")[0].split())


_ERROR = re.compile(r"^(?:ERROR|CRITICAL) \d\d-\d\d [\d:]+ \[[^\]]+\] ?(.*)$")
_LONGEST = 30


def last_errors(folder: Path, *, newer_than: float = 0.0) -> str:
    """The end of the last error in each log, most recent log first; empty if there is none.

    Args:
        folder: `<run directory>/log`.
        newer_than: Unix time; logs last written before belong to another run.
    """
    parts = []
    logs = [path for path in folder.rglob("*.log") if path.stat().st_mtime >= newer_than]
    for path in sorted(logs, key=lambda path: -path.stat().st_mtime):
        if block := _last_error(path):
            parts.append(f"{path}:\n" + "\n".join(f"    {line}" for line in block))
    return "\n".join(parts)


def _last_error(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8", errors="replace")
    found = (_ERROR.match(line.strip("\r")) for line in text.splitlines())
    block: list[str] = []
    for is_error, lines in groupby(found, key=bool):
        if is_error:
            block = [line[1] for line in lines if line]
    return block[-_LONGEST:]


def advice(said: str, config: Config) -> Iterator[str]:
    """Advice for an error message."""
    if "OutOfMemory" in said or "out of memory" in said or "unexpectedly exits" in said:
        yield (
            "If memory ran out (the kernel's log names killed processes): lower "
            "trainer.max_token_len_per_gpu, explorer.rollout_model.gpu_memory_utilization, or "
            "model.max_model_len."
        )
    if "wait_new_model_state_dict" in said or "TimeoutError" in said:
        yield (
            "If one of the two waited too long for the other: raise "
            f"synchronizer.sync_timeout ({config.synchronizer.sync_timeout} s), "
            "explorer.max_timeout or buffer.trainer_input.experience_buffer.max_read_timeout "
            f"({config.buffer.trainer_input.experience_buffer.max_read_timeout} s)."
        )
