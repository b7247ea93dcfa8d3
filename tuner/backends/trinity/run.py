"""`tune()` on Trinity-RFT: check everything here, run there, and look whether it was done."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from tuner.backends.run_directory import RunDirectory, free_name, write_atomically
from tuner.backends.trinity import cluster, functions
from tuner.backends.trinity.config import TrinitySettings, checked, install, resolve
from tuner.backends.trinity.dataset import readable_there, tasks_of, write_tasks
from tuner.backends.trinity.journal import Journal
from tuner.backends.trinity.logs import last_errors
from tuner.backends.trinity.progress import Progress
from tuner.dataset import check_fills_a_batch
from tuner.errors import ConfigError, FunctionError, TrainingError
from tuner.result import TokenCounts, TuneResult
from tuner.traces import Trace, TraceStore
from tuner.training.batch import untrainable

if TYPE_CHECKING:
    from trinity.common.config import Config

logger = logging.getLogger("tuner")

# Modes that end by themselves and leave something to look at.
MODES = ("both", "colocate", "explore")
_POLL_SECONDS = 0.5


def run_trinity(
    config_path: str | Path | None,
    settings: Mapping[str, Any],
    overrides: Sequence[str],
    *,
    workflow: Callable[..., Any],
    judge: Callable[..., Any] | None,
    train_dataset: Any,
    eval_dataset: Any,
) -> TuneResult:
    """Run a configuration on Trinity-RFT until it has done what was asked for.

    Must be called where no event loop is running.

    Raises:
        ConfigError: A setting is unknown or refused, or there is no cluster.
        DatasetError: A dataset is missing, empty or smaller than one batch.
        FunctionError: A function cannot be sent to the workers, or returned the wrong type.
        TrainingError: Fewer steps were trained than were asked for; says why, with the logs.
        MissingDependencyError: Trinity-RFT is not installed.
    """
    resolved = _with_own_name(resolve(config_path, settings, overrides))
    _check_mode(resolved)
    sent = functions.ship(workflow, role="workflow")
    sent_judge = None if judge is None else functions.ship(judge, role="judge")
    rows = _put_data(resolved, train_dataset, eval_dataset)
    tree = cluster.with_sizes(
        install(resolved, workflow=sent, judge=sent_judge), device=resolved.tuner.device
    )
    own = cluster.is_own(tree)
    if own:
        tree["cluster"].pop("ray_address", None)
    config = checked(tree)
    run = _Run(resolved, config, rows)
    write_atomically(run.directory.config, _to_yaml(tree))
    address = cluster.LOCAL if own else config.cluster.ray_address
    try:
        run.execute(address)
        result = run.result()
    except (Exception, KeyboardInterrupt) as error:
        report = _leave_report(run.directory.path, stopped=f"{type(error).__name__}: {error}")
        if report is not None:
            error.add_note(f"what the run did until then: {report}")
        raise
    _leave_report(run.directory.path)
    return result


class _Run:
    """One start of a run: what was there before it, and what it did."""

    def __init__(self, settings: TrinitySettings, config: Config, rows: int) -> None:
        self._settings = settings
        self._config = config
        self._rows = rows
        self.directory = RunDirectory(Path(config.checkpoint_job_dir))
        self._journal = Journal(self.directory.path)
        self._evaluations = [t.name for t in config.buffer.explorer_input.eval_tasksets]
        self._progress = Progress(
            self.directory,
            explorer=config.explorer.name,
            trainer=config.trainer.name,
            evaluations=self._evaluations,
        )
        self._trained_before = len(self._progress.trained_steps())
        self._started = time.time()
        self._error: str | None = None

    def execute(self, address: str) -> None:
        """Start Trinity-RFT's stage and wait for its end, whatever that is."""
        from trinity.cli.launcher import run_stage

        self._journal.forget_reason()
        env = {name: value for name, value in self._config.get_envs().items() if value}
        log = self.directory.path / "tuner" / "driver.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with cluster.joined(
            address,
            gpus=self._config.cluster.gpu_per_node,
            namespace=self._config.ray_namespace,
            env=env,
        ) as joined_address:
            self._config.cluster.ray_address = joined_address
            console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
            with (
                self._watched(console),
                log.open("a", encoding="utf-8") as out,
                contextlib.redirect_stdout(out),
            ):
                try:
                    status = run_stage(self._config)
                except Exception as error:
                    # So it ends when one of its actors has died, of itself or by our hand.
                    self._error = f"{type(error).__name__}: {error}"
                    return
        if not status.success:
            failure = status.error
            self._error = (
                f"{failure.type_name}: {failure.message}" if failure else "it did not say why"
            )

    def result(self) -> TuneResult:
        """What was done.

        Raises:
            FunctionError: A function returned something of the wrong type.
            TrainingError: It is less than what was asked for.
        """
        history = self._progress.history()
        if history:
            write_atomically(self.directory.metrics, "".join(_line(row) for row in history))
        self._raise_reason()
        trained = self._progress.trained_steps()
        explored = self._progress.explored_steps()
        self._check_done(len(trained), len(explored))
        result = self._summary(history, len(trained))
        write_atomically(self.directory.result, result.model_dump_json(indent=2))
        return result

    def _raise_reason(self) -> None:
        reason = self._journal.reason()
        if reason is not None:
            kind = FunctionError if reason["error"] == FunctionError.__name__ else TrainingError
            raise kind(reason["message"])

    def _check_done(self, trained: int, explored: int) -> None:
        config = self._config
        planned = self._planned_steps()
        if config.mode == "explore":
            if self._error or explored < planned:
                raise self._failure(f"{explored} of {planned} steps of rollouts were done")
            return
        batch = config.buffer.train_batch_size
        experiences = self._progress.experiences()
        asked = config.trainer.total_steps or planned * self._group_batch() // batch
        if self._error or trained == 0 or trained < min(asked, experiences // batch):
            raise self._failure(f"{trained} of {asked} steps were trained")
        if trained < asked:
            logger.warning(
                "%d of %d steps were trained: rollouts gave %d experiences, and each step takes %d "
                "(buffer.train_batch_size); rollouts that failed give none",
                trained,
                asked,
                experiences,
                batch,
            )

    def _planned_steps(self) -> int:
        """Steps of rollouts: `total_steps`, or as many full batches as all epochs have."""
        buffer = self._config.buffer
        if buffer.total_steps is not None:
            return int(buffer.total_steps)
        return int(buffer.total_epochs * self._rows // buffer.batch_size)

    def _group_batch(self) -> int:
        return int(self._config.buffer.batch_size * self._config.algorithm.repeat_times)

    def _failure(self, what: str) -> TrainingError:
        parts = [f"Trinity-RFT ended before its time: {what}"]
        if self._error:
            parts.append(f"It said: {self._error}")
        logs = self.directory.path / "log"
        if said := last_errors(logs, newer_than=self._started):
            parts.append(f"Its logs say:\n{said}")
        else:
            parts.append(f"Its logs, in {logs}, name no error.")
        parts.append(f"The run is in {self.directory.path}.")
        return TrainingError("\n".join(parts))

    @contextlib.contextmanager
    def _watched(self, console: Console) -> Iterator[None]:
        """While the block runs: say each step that is done, and end what must not go on."""
        ended = threading.Event()

        def watch() -> None:
            said = set(self._progress.reports("trainer")) | set(self._progress.reports("explorer"))
            while not ended.wait(_POLL_SECONDS):
                if self._journal.reason() is not None:
                    _kill([self._config.explorer.name, self._config.trainer.name], self._config)
                    return
                self._say(console, said)
            self._say(console, said)

        thread = threading.Thread(target=watch, name="tuner-trinity", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _say(self, console: Console, said: set[int]) -> None:
        role = "explorer" if self._config.mode == "explore" else "trainer"
        for step in sorted(set(self._progress.reports(role)) - said):
            said.add(step)
            rewards = [
                trace.reward
                for trace in TraceStore(self.directory.traces).read("train", step)
                if trace.reward is not None and trace.final
            ]
            reward = f"  reward {sum(rewards) / len(rewards):.3f}" if rewards else ""
            console.print(f"step {step}{reward}", markup=False)

    def _summary(self, history: list[dict[str, float]], trained: int) -> TuneResult:
        steps = {int(row["step"]): row for row in history}
        evaluated = {
            step: rewards for step, row in steps.items() if (rewards := _eval_rewards(row))
        }
        traces = [
            t for step in steps for t in TraceStore(self.directory.traces).read("train", step)
        ]
        return TuneResult(
            steps=trained,
            eval_before=evaluated.get(0, {}),
            eval_after=evaluated[max(evaluated)] if evaluated else {},
            rewards=[row["reward/mean"] for row in history if "reward/mean" in row],
            history=history,
            outcomes=dict(Counter(str(trace.outcome) for trace in traces if trace.final)),
            tokens=_token_counts(traces),
            seconds=time.time() - self._started,
            run_dir=self.directory.path,
            checkpoint=_latest_checkpoint(self.directory.path),
            traces=self.directory.traces,
            tensorboard=(
                self.directory.path / "monitor" / "tensorboard"
                if "tensorboard" in self._settings.trackers
                else None
            ),
        )


def _leave_report(run_dir: Path, *, stopped: str | None = None) -> Path | None:
    """Write `report.html` where there is something to report. What goes wrong here is only said."""
    from tuner.viewer import write_report

    if not any(run_dir.glob("traces/*.jsonl")):
        return None
    try:
        return write_report(run_dir, stopped=stopped)
    except Exception as error:
        logger.warning("report.html was not written: %s: %s", type(error).__name__, error)
        return None


def _token_counts(traces: Sequence[Trace]) -> TokenCounts:
    """Where sampled tokens went; "trained" are those that Trinity-RFT was given."""
    sampled = trained = 0
    dropped: Counter[str] = Counter()
    groups = Counter((t.id.step, t.id.task) for t in traces if t.final and t.reward is not None)
    for trace in traces:
        sampled += trace.sampled_tokens
        reason = None
        if not trace.final:
            reason = "retried_attempt"
        elif trace.reward is None:
            reason = str(trace.outcome)
        elif groups[trace.id.step, trace.id.task] < 2:
            reason = "group_of_one"
        for call in trace.calls:
            why = reason or untrainable(call)
            if why is None:
                trained += len(call.completion_ids)
            else:
                dropped[why] += len(call.completion_ids)
    return TokenCounts(sampled=sampled, trained=trained, dropped=dict(dropped))


def _eval_rewards(row: Mapping[str, float]) -> dict[str, float]:
    return {
        name.removeprefix("eval/").removesuffix("/reward"): value
        for name, value in row.items()
        if name.startswith("eval/") and name.endswith("/reward")
    }


def _latest_checkpoint(run_dir: Path) -> Path | None:
    """The Hugging Face folder of the newest checkpoint that has one."""
    found = [
        folder
        for folder in run_dir.glob("global_step_*/actor/huggingface")
        if any(folder.glob("*.safetensors"))
    ]
    return max(found, key=lambda folder: _step_of(folder.parents[1]), default=None)


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("global_step_"))


def _with_own_name(settings: TrinitySettings) -> TrinitySettings:
    """A new run gets a free name beside one of the same name, as on the local backend."""
    if settings.get("continue_from_checkpoint", True):
        return settings
    settings.tree["name"] = free_name(settings.run_dir).name
    return settings


def _check_mode(settings: TrinitySettings) -> None:
    mode = settings.get("mode", "both")
    if mode not in MODES:
        raise ConfigError(
            f"mode is {mode}: tune() runs {', '.join(MODES)} on Trinity-RFT; `trinity run` does "
            "the others"
        )


def _put_data(settings: TrinitySettings, train_dataset: Any, eval_dataset: Any) -> int:
    """Put every dataset where Trinity-RFT reads it; gives the number of training rows."""
    inputs = settings.tree["buffer"]["explorer_input"]
    data = settings.run_dir / "tuner" / "data"
    many = inputs.get("tasksets") or [inputs["taskset"]]
    rows = 0
    for index, taskset in enumerate(many):
        tasks = tasks_of(taskset, train_dataset, role="train_dataset")
        rows += len(tasks)
        if not readable_there(taskset):
            folder = data / f"train_{index}"
            taskset.update(write_tasks(tasks, folder, role="train_dataset"))
    batch = int(settings.get("buffer.batch_size"))
    check_fills_a_batch([{}] * rows, batch, "the training data")
    for index, taskset in enumerate(inputs.get("eval_tasksets") or ()):
        name = taskset.setdefault("name", f"eval_{index}")
        given = eval_dataset.get(name) if isinstance(eval_dataset, dict) else eval_dataset
        role = f"eval_dataset {name!r}"
        tasks = tasks_of(taskset, given, role=role)
        if not readable_there(taskset):
            taskset.update(write_tasks(tasks, data / f"eval_{index}", role=role))
    return rows


def _kill(names: Sequence[str], config: Config) -> None:
    import ray

    for name in names:
        with contextlib.suppress(Exception):  # it has ended, or was not there in this mode
            ray.kill(ray.get_actor(name, namespace=config.ray_namespace))


def _to_yaml(tree: Mapping[str, Any]) -> str:
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(dict(tree)))


def _line(row: Mapping[str, float]) -> str:
    return json.dumps(row) + "\n"
