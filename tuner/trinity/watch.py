"""What somebody who looks at a run on Trinity-RFT would do: show each step, and end what is stuck.

Trinity-RFT's processes wait for each other, each with a time limit of its own of half an hour and
more. Three of these waits cannot end well and are seen here at once: an actor has died, the
rollouts give nothing to learn from, and the explorer waits for weights which the trainer cannot
make because rollouts failed and its batch is not full. The last one is no failure: the explorer is
told to go on.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.errors import FunctionError, TrainingError
from tuner.run.console import ConsoleMonitor
from tuner.run.metrics import diagnosis
from tuner.trinity import modes
from tuner.trinity.actors import Death
from tuner.trinity.journal import Journal
from tuner.trinity.progress import Progress

if TYPE_CHECKING:
    from trinity.common.config import Config

logger = logging.getLogger("tuner")

_ASK_RAY_EVERY = 2.0


class NothingToLearn(TrainingError):
    """Step after step taught nothing: the message is the diagnosis, no log says more."""


class Watch:
    """Looks at one start of a run.

    Args:
        config: As Trinity-RFT's check left it.
        progress: The run's reports.
        journal: What the workers say.
        console: Where people look.
        metrics: `metrics.jsonl`; each step that is done is added to it.
        patience: Steps without anything to learn from before the run ends; `tuner.signal_patience`.
        deaths: Gives the actors that died.
        synchronizer: Lets the explorer go on; None where no weights are exchanged or nobody can be
            told to go on.
    """

    def __init__(
        self,
        config: Config,
        progress: Progress,
        journal: Journal,
        console: ConsoleMonitor,
        metrics: Path,
        *,
        patience: int,
        deaths: Callable[[], Sequence[Death]],
        synchronizer: Synchronizer | None,
    ) -> None:
        self._config = config
        self._progress = progress
        self._journal = journal
        self._console = console
        self._metrics = metrics
        self._patience = patience
        self._deaths = deaths
        self._synchronizer = synchronizer
        self._said = {role: set(progress.reports(role)) for role in ("explorer", "trainer")}
        self._trained_before = len(progress.trained_steps())
        self._handed_before = progress.experiences()
        self._ended = progress.ended_steps()
        self._signals: list[bool] = []
        self._asked = 0.0
        self._shown = 0
        self._rollouts = self._place = 0
        self._short_since: int | None = None

    def look(self) -> None:
        """Once around.

        Raises:
            FunctionError: A function returned something of the wrong type.
            TrainingError: An actor has died, or there is nothing to learn; says which and why.
        """
        if (reason := self._journal.reason()) is not None:
            kind = FunctionError if reason["error"] == FunctionError.__name__ else TrainingError
            raise kind(reason["message"])
        self.say()
        self._check_signal()
        if time.monotonic() - self._asked < _ASK_RAY_EVERY:
            return
        self._asked = time.monotonic()
        if dead := self._deaths():
            raise TrainingError("\n".join(str(death) for death in dead))
        if self._synchronizer is not None and self._signals:
            self._let_go_on(self._synchronizer)

    def say(self) -> None:
        """Show the steps that were done since the last time, and add them to `metrics.jsonl`."""
        if self._config.mode == "serve" and not self._said["explorer"]:
            url = modes.server_url(self._config)
            if url and modes.answers(url):
                self._said["explorer"].add(0)
                self._console.say(f"serving {url}/v1  Ctrl-C ends it")
        role = "trainer" if self._config.mode in ("both", "colocate", "train") else "explorer"
        done = self._progress.reports(role)
        fresh = sorted(set(done) - self._said[role])
        for step in fresh:
            self._said[role].add(step)
            explorer = self._progress.reports("explorer").get(step, {})
            trainer = self._progress.reports("trainer").get(step, {})
            row = self._progress.row(step, explorer, trainer)
            with self._metrics.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, **row}) + "\n")
            if "time/step" in row:
                self._console.log(step, row)
        self._show_rollouts(max(self._said[role], default=0) + 1)

    def _show_rollouts(self, step: int) -> None:
        """The bar of the step that is being collected, on a terminal."""
        config = self._config
        total = int(config.buffer.batch_size * config.algorithm.repeat_times)
        if step != self._shown:
            self._shown, self._rollouts, self._place = step, 0, 0
            self._console.begin(f"step {step}", total, step=step)
        path = self._journal.traces(step)
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(self._place)
            added = file.read()
        self._place += len(added)
        for _ in range(min(added.count(b"\n"), total - self._rollouts)):
            self._rollouts += 1
            self._console.rollout_done()

    def _check_signal(self) -> None:
        ended = self._progress.ended_steps()
        for step in ended:
            if step in self._ended:
                continue
            traces = self._progress.traces(step)
            self._signals.append(self._progress.signal(traces))
            if len(self._signals) >= self._patience and not any(self._signals[-self._patience :]):
                raise NothingToLearn(diagnosis(traces, self._patience))
        self._ended = ended

    def _let_go_on(self, synchronizer: Synchronizer) -> None:
        """Let the explorer go on where it waits for weights that the trainer has no batch for."""
        batch = int(self._config.buffer.train_batch_size)
        trained = len(self._progress.trained_steps()) - self._trained_before
        there = self._progress.experiences() - self._handed_before - trained * batch
        step = max(self._ended, default=0)
        if there >= batch or not synchronizer.explorer_waits():
            self._short_since = None
        elif self._short_since != step:
            self._short_since = step  # a report may be late; look once more before acting on it
        else:
            logger.warning(
                "step %d: rollouts that failed leave the trainer with %d of %d experiences; more "
                "are collected with the weights that are there",
                step,
                there,
                batch,
            )
            synchronizer.let_explorer_go_on()
            self._short_since = None


class Synchronizer:
    """The two things that are asked of Trinity-RFT's synchronizer."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace

    def explorer_waits(self) -> bool:
        """Whether an explorer waits for weights."""
        actor = self._actor()
        return actor is not None and bool(self._ask(actor.explorer_requires_sync))

    def let_explorer_go_on(self) -> None:
        """Tell it that there are none."""
        if (actor := self._actor()) is not None:
            self._ask(actor.notify_no_new_model_state_dict)

    def _actor(self) -> Any:
        import ray

        try:
            return ray.get_actor("synchronizer", namespace=self._namespace)
        except ValueError:  # not started yet
            return None

    def _ask(self, method: Any) -> Any:
        """The method's answer; None where it takes long, and is asked again the next time."""
        import ray

        done, _ = ray.wait([method.remote()], timeout=_ASK_RAY_EVERY)
        return ray.get(done[0]) if done else None


def synchronizer_of(config: Config) -> Synchronizer | None:
    """How the explorer is let go on; with NCCL, Trinity-RFT does it after its `sync_timeout`."""
    from trinity.common.constants import SyncMethod

    if config.mode not in ("both", "colocate"):
        return None
    if config.synchronizer.sync_method == SyncMethod.NCCL:
        return None
    return Synchronizer(config.ray_namespace)
