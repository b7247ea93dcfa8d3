"""Resume a killed run from its last checkpoint, with the rollouts recorded after it.

Trinity-RFT's explorer and trainer each store their own position, and after a kill these differ: the
trainer is at its last checkpoint, the explorer some steps further, and the experiences in between
are lost or half used in the buffer. Here both are reset to the checkpoint. The rollouts of later
steps are in the trace store; completed ones are trained again without sampling, like on the local
backend, and those that failed with the run are set aside and run again. So are the last steps
without any completed rollout: their engine may have been lost.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.config.source import concealed
from tuner.runs.directory import (
    MAY_CHANGE,
    OBJECTS,
    RunDirectory,
    check_same_run,
    write_atomically,
)
from tuner.traces import Outcome, Trace, TraceStore, read_traces
from tuner.traces.store import trace_to_json
from tuner.trinity.handover import named_now
from tuner.trinity.installed import TINKERS_CHECKPOINT
from tuner.trinity.progress import Journal, TrinityProgress, step_of

if TYPE_CHECKING:
    from trinity.common.config import Config

# Settings that may change when a run resumes. The rows of a set of tasks are compared separately,
# and functions may be fixed.
MAY_CHANGE_THERE = (
    *MAY_CHANGE,
    "*.path",
    "*.split",
    "*.subset_name",
    "*.workflow_args.tuner.judge",
    "*.workflow_args.tuner.max_retries",
    "*.workflow_args.tuner.timeout",
    "*.workflow_args.tuner.workflow",
    "buffer.trainer_input.experience_buffer.max_read_timeout",
    "cluster",
    "log",
    "model.tinker.base_url",
    "ray_namespace",
    "synchronizer.sync_timeout",
    "trainer.save_hf_checkpoint",
)
_STEP_FILE = re.compile(r"^(?:(?P<split>.+)_)?step_(?P<step>\d+)\.jsonl$")


@dataclass(frozen=True)
class Start:
    """Position at which a run begins or resumes.

    Attributes:
        trained: The trainer resumes after this update, 0 at the beginning.
        explored: The explorer resumes after this step of rollouts.
        recorded: Number of completed rollouts of later steps, which are not sampled again.
        had_begun: Whether this run existed before.
    """

    trained: int = 0
    explored: int = 0
    recorded: int = 0
    had_begun: bool = False

    def said(self, run_dir: Path) -> str | None:
        """Message for the user; None for a new run."""
        if not self.had_begun:
            return None
        again = f"; {self.recorded} recorded rollouts are trained again" if self.recorded else ""
        if not self.trained and not self.explored:
            return f"{run_dir} has no checkpoint yet: starting over{again}"
        return f"resuming after step {self.trained or self.explored} in {run_dir}{again}"


def require_same_run(
    directory: RunDirectory, tree: Mapping[str, Any], fingerprint: Mapping[str, str]
) -> None:
    """Compare the current configuration for Trinity-RFT with the one at the start of the run."""
    from omegaconf import OmegaConf

    if directory.config.exists():
        before = named_now(OmegaConf.to_container(OmegaConf.load(directory.config)))
        may_change = MAY_CHANGE_THERE
        check_same_run(
            directory,
            concealed(before, {}),
            concealed(tree, {}),
            fingerprint,
            may_change=may_change,
            lists=True,
        )


def rewind(config: Config, progress: TrinityProgress, sizes: Sequence[int]) -> Start:
    """Reset a run to its last checkpoint, before Ray is started.

    Args:
        config: After Trinity-RFT's check.
        progress: The run's reports; those after the checkpoint are dropped.
        sizes: Rows of each training set.
    """
    run_dir = Path(config.checkpoint_job_dir)
    if not RunDirectory(run_dir).has_begun() and not progress.ended_steps():
        return Start()
    trained = last_checkpoint(run_dir)
    if config.mode == "explore":
        handed_over = progress.explored_steps()
        # The last of the steps 1, 2, 3, ... without a gap.
        trained, explored = 0, next(step for step in count() if step + 1 not in handed_over)
    else:
        explored = _given(progress, trained * int(config.buffer.train_batch_size))
        _put_back_trainer(run_dir, config.trainer.name, trained)
        handed = config.buffer.trainer_input.experience_buffer
        if config.mode in ("both", "colocate") and handed.storage_type == "sql":
            _forget_leftovers(handed)
    while explored and _failed_whole(progress, explored):
        explored -= 1
    unfinished = [
        name
        for name in (taskset.name for taskset in config.buffer.explorer_input.eval_tasksets)
        if f"eval/{name}/finished_task_count" not in progress.reports("explorer").get(explored, {})
    ]
    progress.forget_after(trained, explored)
    _put_back_explorer(run_dir, config, explored, sizes)
    selectors = {t.data_selector.selector_type for t in config.buffer.explorer_input.tasksets}
    recorded = _keep_completed(run_dir, explored, unfinished, "difficulty_based" not in selectors)
    return Start(trained, explored, recorded, had_begun=True)


def last_checkpoint(run_dir: Path) -> int:
    """The update of the last complete checkpoint; 0 if there is none."""
    noted = run_dir / "latest_checkpointed_iteration.txt"
    if not noted.exists():
        return 0
    step = int(noted.read_text())
    return step if (run_dir / f"global_step_{step}").is_dir() else 0


def _given(progress: TrinityProgress, used: int) -> int:
    """The last step of rollouts whose experiences are all among the first `used`."""
    ended = [step for step in progress.ended_steps() if progress.experiences(step) <= used]
    return max(ended, default=0) if used else 0


def _failed_whole(progress: TrinityProgress, step: int) -> bool:
    """Whether no rollout of a step completed, and none was trained with a penalty."""
    handed_over = progress.experiences(step) - progress.experiences(step - 1)
    return not handed_over and not any(map(_completed, progress.traces(step)))


def _put_back_trainer(run_dir: Path, name: str, step: int) -> None:
    """Reset the trainer's position; delete weights saved for the explorer, without optimizer."""
    for folder in run_dir.glob("global_step_*"):
        if step_of(folder) > step and not (folder / ".full_checkpoint").exists():
            shutil.rmtree(folder)
    weights, meta = run_dir / "latest_state_dict_iteration.txt", run_dir / f"{name}_meta.json"
    if not step:
        weights.unlink(missing_ok=True)
        meta.unlink(missing_ok=True)
        return
    if (run_dir / f"global_step_{step}" / TINKERS_CHECKPOINT).exists():
        # Its trainer deletes old sampling weights as it runs; without this it saves them again.
        weights.unlink(missing_ok=True)
    else:
        write_atomically(weights, str(step))
    state = OBJECTS.document(meta, "put a copy of it back") if meta.exists() else {}
    write_atomically(meta, json.dumps({**state, "latest_iteration": step}))


def _put_back_explorer(run_dir: Path, config: Config, step: int, sizes: Sequence[int]) -> None:
    meta = run_dir / f"{config.explorer.name}_meta.json"
    if not step:
        meta.unlink(missing_ok=True)
        return
    places = positions(step * int(config.buffer.batch_size), sizes)
    states = [{"current_index": place} for place in places]
    write_atomically(meta, json.dumps({"latest_iteration": step, "taskset_states": states}))


def positions(tasks: int, sizes: Sequence[int]) -> list[int]:
    """Number of tasks of each set among the first `tasks` of a run.

    Trinity-RFT shuffles several sets together in each epoch, seeded by the epoch's number.
    """
    if len(sizes) == 1:
        return [tasks]
    import numpy

    counts = [0] * len(sizes)
    whole, rest = divmod(tasks, sum(sizes))
    for place, size in enumerate(sizes):
        counts[place] += whole * size
    order = [place for place, size in enumerate(sizes) for _ in range(size)]
    numpy.random.default_rng(whole).shuffle(order)
    for place in order[:rest]:
        counts[place] += 1
    return counts


def _forget_leftovers(buffer: Any) -> None:
    """Do not read unused experiences: their rollouts are trained again, or have been.

    They stay in the table, so recorded data is kept.
    """
    from sqlalchemy import create_engine, inspect, text

    engine = create_engine(buffer.path)
    try:
        if buffer.name not in inspect(engine).get_table_names():
            return
        table = engine.dialect.identifier_preparer.quote(buffer.name)
        with engine.begin() as connection:
            connection.execute(text(f"UPDATE {table} SET consumed = 1 WHERE consumed = 0"))
    finally:
        engine.dispose()


def _keep_completed(run_dir: Path, explored: int, unfinished: Sequence[str], again: bool) -> int:
    """Sort the traces of the repeated steps; returns the number of kept rollouts.

    Args:
        explored: The step to resume after.
        unfinished: Evaluation sets that were incomplete at that step; they are not repeated.
        again: Whether the tasks come in the same order again.
    """
    kept: dict[Path, int] = {}
    for path in sorted((run_dir / "traces").glob("*.jsonl")):
        found = _STEP_FILE.match(path.name)
        if found is None:
            continue
        step = int(found["step"])
        if step > explored or not explored:
            kept[path] = _set_failed_aside(path, run_dir, keep=again)
        elif step == explored and found["split"] in unfinished:
            _set_failed_aside(path, run_dir, keep=False)
    Journal(run_dir).replay([path for path, count in kept.items() if count])
    return sum(kept.values())


def _completed(trace: Trace) -> bool:
    return trace.final and trace.outcome is Outcome.COMPLETED


def _set_failed_aside(path: Path, run_dir: Path, *, keep: bool) -> int:
    """Move traces to `tuner/replaced`, except those of completed rollouts; returns their number."""
    traces = list(read_traces(path))
    done = {t.id for t in traces if keep and _completed(t)}
    aside = TraceStore(Journal(run_dir).folder / "replaced")
    kept = []
    for trace in traces:
        if trace.id in done:
            kept.append(json.dumps(trace_to_json(trace)) + "\n")
        else:
            aside.append(trace)
    write_atomically(path, "".join(kept))
    if not done:
        path.unlink()
    return len(done)
