"""`tune()` on Trinity-RFT: check everything in this process, run it there, and check its
success."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from tuner.config.load import Layers
from tuner.config.schema import Penalize
from tuner.config.source import lookup
from tuner.encoding import model_json
from tuner.errors import FunctionError, TrainingError
from tuner.runs.console import ConsoleMonitor
from tuner.runs.directory import (
    Report,
    RunDirectory,
    held,
    make_private,
    reported,
    write_atomically,
)
from tuner.runs.notices import CallSettings
from tuner.runs.record import finished_notice, read_result, summarize
from tuner.runs.result import TuneResult
from tuner.traces import TraceStore
from tuner.trinity import nodes, workers
from tuner.trinity.handover import resolve
from tuner.trinity.installed import environment
from tuner.trinity.preparation import PreparedRun, prepare, to_yaml, with_own_name
from tuner.trinity.progress import COMPARE_GROUPS, Journal, TrinityProgress, latest_checkpoint
from tuner.trinity.resume import last_checkpoint, require_same_run, rewind
from tuner.trinity.stage import (
    POLL_SECONDS,
    SERVE_KEY,
    GaveUp,
    Stage,
    checkpoints,
    forget_server,
    planned_steps,
    recorded_steps,
    require_free_port,
    serve_key,
    server_url,
    unjudged,
)
from tuner.trinity.watch import (
    NothingToLearn,
    Watch,
    advice,
    deaths,
    last_errors,
    printed_by,
    synchronizer_of,
)

logger = logging.getLogger("tuner")

_LOOKS_BACK = 6


def run_trinity(
    layers: Layers,
    *,
    workflow: Callable[..., Any] | None,
    judge: Callable[..., Any] | None,
    train_dataset: Any,
    eval_dataset: Any,
    report: Report,
) -> TuneResult:
    """Run a configuration on Trinity-RFT to its end.

    Must be called outside of an event loop.

    Args:
        layers: The input of `handover.resolve`.
        workflow, judge, train_dataset, eval_dataset: Those given to `tune()`.
        report: Writes a report of the run however it ends.
    """
    resolved = with_own_name(resolve(layers))
    make_private(resolved.run_dir)
    prepared = prepare(
        resolved,
        workflow=workflow,
        judge=judge,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
    )
    run = _Run(prepared)
    directory = run.directory
    with held(directory.path):
        if directory.has_begun():
            require_same_run(directory, prepared.tree, prepared.fingerprint)
        write_atomically(directory.config, to_yaml(prepared.tree, resolved.references))
        write_atomically(directory.path / "data.json", json.dumps(prepared.fingerprint, indent=2))
        if (finished := run.finished()) is not None:
            logger.warning("%s", finished_notice(directory, finished))
            report(directory, None)  # the process may have been killed before it was written
            return finished
        with reported(directory, report):
            run.execute(
                workers.LOCAL if prepared.own_cluster else prepared.tree["cluster"]["ray_address"]
            )
            return run.result()


class _Run:
    """One start of a run: its previous state, and its results."""

    def __init__(self, prepared: PreparedRun) -> None:
        settings, config = prepared.settings, prepared.config
        self._settings = settings
        self._config = config
        self._prepared = prepared
        folder = Path(config.checkpoint_job_dir) / settings.folder
        folder.mkdir(parents=True, exist_ok=True)
        self.directory = RunDirectory(folder)
        self._journal = Journal(self.directory.path)
        failure = settings.tuner.on_failure
        self._progress = TrinityProgress(
            self.directory,
            explorer="benchmark" if config.mode == "bench" else config.explorer.name,
            trainer=config.trainer.name,
            evaluations=[t.name for t in config.buffer.explorer_input.eval_tasksets],
            compared=config.algorithm.algorithm_type in COMPARE_GROUPS,
            penalty=failure.penalize if isinstance(failure, Penalize) else None,
            pass_reward=settings.tuner.pass_reward,
        )
        self._logs = folder / "log"
        self._kept = self._logs / "ray"  # gets copies of the output of Ray's workers
        self._started = time.time()
        self._error: str | None = None
        self._reason: FunctionError | TrainingError | None = None
        self._printed = ""

    def finished(self) -> TuneResult | None:
        """The result of a completed run, else None."""
        mode = self._config.mode
        if mode in ("bench", "serve") or not self.directory.result.exists():
            return None
        if mode == "explore":
            missing = self._planned_steps() - len(self._progress.explored_steps())
        else:
            missing = self._asked_steps() - last_checkpoint(self.directory.path)
        if missing > 0:
            return None
        return read_result(self.directory, sys.maxsize)

    def execute(self, address: str) -> None:
        """Start Trinity-RFT's stage and wait for its end."""
        self._journal.forget_reason()
        forget_server(self._config)
        if self._config.mode == "serve" and address == workers.LOCAL:
            require_free_port(self._config)
        total = self._planned_steps() if self._config.mode == "explore" else self._asked_steps()
        console = ConsoleMonitor(total, Console(file=sys.stdout, highlight=False, soft_wrap=True))
        if self._config.mode not in ("bench", "serve"):
            start = rewind(self._config, self._progress, self._prepared.sizes)
            if (said := start.said(self.directory.path)) is not None:
                console.say(said)
            self._write_metrics()
        env = {name: value for name, value in self._config.get_envs().items() if value}
        env |= environment(self._prepared.tree)
        if self._config.mode == "serve":
            env[SERVE_KEY] = serve_key()
        log = self.directory.path / "tuner" / "driver.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with workers.joined(
            address,
            gpus=self._config.cluster.gpu_per_node,
            namespace=self._config.ray_namespace,
            env=env,
        ) as joined:
            if address != workers.LOCAL:
                self._ask_machines()
            self._config.cluster.ray_address = joined.address
            watch = Watch(
                self._config,
                self._progress,
                self._journal,
                console,
                self.directory.metrics,
                patience=self._settings.tuner.signal_patience,
                deaths=lambda: deaths(joined.session, self._kept),
                synchronizer=synchronizer_of(self._config),
                call_settings=CallSettings(
                    self._config.model.max_model_len,
                    lookup(self._prepared.tree, "model.max_response_tokens"),
                    parser=lookup(self._prepared.tree, "explorer.rollout_model.tool_call_parser"),
                ),
            )
            stage = Stage(self._config, look=watch.look, explored=self._has_explored)
            with console, log.open("a", encoding="utf-8") as out, contextlib.redirect_stdout(out):
                self._run(stage, watch)
            said = f"{self._error or ''}\n{self._logged()}"
            self._printed = printed_by(said, joined.session, self._kept)

    def _ask_machines(self) -> None:
        """Check that the run can resume on every machine of a cluster started by somebody else;
        raises ConfigError or FunctionError if one of them lacks something."""
        machines = nodes.alive()
        nodes.require_alike(self._prepared.needed, machines)
        nodes.end_leftovers(self._config.ray_namespace)
        if (few := nodes.lacking(self._config, machines)) is not None:
            limit = self._config.synchronizer.sync_timeout
            logger.warning("%s: waiting for more (synchronizer.sync_timeout, %s s)", few, limit)

    def _run(self, stage: Stage, watch: Watch) -> None:
        try:
            stage.run()
        except GaveUp as error:
            self._reason = self._looked_back(watch) or error
        except (FunctionError, TrainingError) as error:
            self._reason = error
        except KeyboardInterrupt:
            if self._config.mode != "serve":
                raise
            # A server ends on request.
        except Exception as error:
            self._error = f"{type(error).__name__}: {error}"
            self._reason = self._looked_back(watch)
        with contextlib.suppress(FunctionError, TrainingError):
            watch.say()

    def _looked_back(self, watch: Watch) -> FunctionError | TrainingError | None:
        """The cause, if it is visible by now: an actor's call fails a moment before Ray's table
        shows it."""
        for _ in range(_LOOKS_BACK):
            try:
                watch.look()
            except (FunctionError, TrainingError) as reason:
                return reason
            time.sleep(POLL_SECONDS)
        return None

    def result(self) -> TuneResult:
        """The result of the run."""
        history = self._write_metrics()
        if isinstance(self._reason, (FunctionError, NothingToLearn)):
            raise self._reason
        self._journal.raise_reason()
        trained = self._progress.trained_steps()
        self._check_done(len(trained), len(self._progress.explored_steps()))
        result = summarize(
            history,
            self.directory,
            steps=len(trained),
            checkpoint=latest_checkpoint(self.directory.path),
        )
        result.tokens = self._progress.token_counts(
            needs_group=self._config.algorithm.repeat_times > 1
        )
        result.seconds = time.time() - self._started
        if "tensorboard" in self._settings.trackers:
            result.tensorboard = self.directory.path / "monitor" / "tensorboard"
        write_atomically(self.directory.result, model_json(result))
        return result

    def _write_metrics(self) -> list[dict[str, float]]:
        history = self._progress.history()
        if history:
            write_atomically(
                self.directory.metrics, "".join(json.dumps(row) + "\n" for row in history)
            )
        return history

    def _check_done(self, trained: int, explored: int) -> None:
        config = self._config
        planned = self._planned_steps()
        failed = self._error or self._reason
        if config.mode == "explore":
            if failed or explored < planned:
                raise self._failure(f"{explored} of {planned} steps of rollouts were done")
            return
        if config.mode in ("train", "bench", "serve"):
            missing = self._shortfall(trained)
            if failed or missing:
                raise self._failure(missing or f"mode {config.mode} failed at its end")
            return
        batch = config.buffer.train_batch_size
        experiences = self._progress.experiences()
        asked = self._asked_steps()
        if failed or trained == 0 or trained < min(asked, experiences // batch):
            raise self._failure(f"{trained} of {asked} steps were trained")
        if trained < asked:
            logger.warning(
                "%d of %d steps were trained: rollouts gave %d experiences, and each step needs %d "
                "(buffer.train_batch_size); failed rollouts give none",
                trained,
                asked,
                experiences,
                batch,
            )

    def _shortfall(self, trained: int) -> str | None:
        """Missing work of the modes that explore no tasks; None if nothing is missing."""
        config = self._config
        if config.mode == "train":
            asked = self._asked_steps()
            return None if trained >= asked else f"{trained} of {asked} steps were trained"
        if config.mode == "serve":
            return None if server_url(config) else "the server never listened"
        rollouts = self._prepared.evaluations
        missing = unjudged(TraceStore(self.directory.traces), checkpoints(config), rollouts)
        parts = [
            f"{count} of {rollouts[name]} rollouts of {name} with checkpoint {step}"
            for (step, name), count in missing.items()
        ]
        return f"not judged: {'; '.join(parts)}" if parts else None

    def _planned_steps(self) -> int:
        """Planned steps of rollouts."""
        return planned_steps(self._config, self._prepared.rows, self._config.buffer.batch_size)

    def _asked_steps(self) -> int:
        """Requested weight updates."""
        config = self._config
        if config.mode == "train":
            return recorded_steps(config, self._prepared.rows)
        experiences = (
            self._planned_steps() * config.buffer.batch_size * config.algorithm.repeat_times
        )
        return int(config.trainer.total_steps or experiences // config.buffer.train_batch_size)

    def _has_explored(self) -> bool:
        return max(self._progress.ended_steps(), default=0) >= self._planned_steps()

    def _logged(self) -> str:
        return last_errors(self._logs, newer_than=self._started)

    def _failure(self, what: str) -> TrainingError:
        parts = [f"Trinity-RFT ended early: {what}"]
        if self._reason is not None:
            parts.append(str(self._reason))
        elif self._error:
            parts.append(f"It said: {self._error}")
        if said := self._logged():
            parts.append(f"Its logs say:\n{said}")
        else:
            parts.append(f"Its logs, in {self._logs}, name no error.")
        if self._printed:
            parts.append(f"The last output of the processes named in it:\n{self._printed}")
        parts += advice("\n".join(parts), self._config)
        checkpoint = last_checkpoint(self.directory.path)
        resumed = f"resumes after step {checkpoint}" if checkpoint else "starts over"
        parts.append(
            f"The run is in {self.directory.path}; the same command {resumed}, and does not sample "
            "completed rollouts again."
        )
        return TrainingError("\n".join(parts))
