"""How well `tuner plan` tells the seconds of a step that it has not seen.

Runs of tiny models are recorded with several agents, batch sizes, group sizes, turns and lengths.
The constants of this machine are fitted to some; the others are predicted, part by part:

- *its own work*: the agent was fitted with another batch or group; nothing of the run is known;
- *work given*: what its rollouts come to (calls, tokens) is read from it, its seconds are not;
- *a new agent*: as before, and what its code costs is not known (the mean of the others).

The goal is an error of at most 15 % of a step's seconds. Where others use the machine, `--cpu`
measures seconds of CPU of the process in the place of seconds on the clock: these agents wait for
nothing, and everything is computed with one thread, so that on a machine of its own both are alike.

    python benchmarks/plan.py [--cpu] [--keep FOLDER] [--steps 3]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _report import Row, report

if TYPE_CHECKING:
    from tuner.planning.fitting import Fit
    from tuner.planning.measured import MeasuredRun
    from tuner.planning.step_model import StepTime

ROOT = Path(__file__).parents[1]
PROJECT = "plan"
WARMUP = 1  # first steps of a run, which load and allocate
GOAL = 0.15


@dataclass(frozen=True)
class Case:
    """A run.

    Attributes:
        agent: One of `_agent`.
        groups, repeat: Tasks in a step, and rollouts of each.
        tokens: Limit of an answer.
        running: Rollouts at the same time; None: all.
        kind: How it is predicted; None: it is fitted.
    """

    agent: str
    groups: int
    repeat: int
    tokens: int = 96
    kind: str | None = None
    running: int | None = None

    @property
    def name(self) -> str:
        running = "" if self.running is None else f"-{self.running}"
        return f"{self.agent}-{self.groups}x{self.repeat}-{self.tokens}{running}"


OWN, GIVEN, NEW = "its own work", "work given", "a new agent"
CASES = (
    Case("gsm8k", 8, 8),
    Case("gsm8k", 32, 8),
    Case("gsm8k", 8, 16),
    Case("gsm8k", 16, 8, kind=OWN),
    Case("gsm8k", 16, 8, 12, kind=GIVEN),
    Case("multi_turn_math", 8, 8, 64),
    Case("multi_turn_math", 16, 4, 64),
    Case("multi_turn_math", 24, 8, 64, kind=OWN),
    Case("hidden_number_1", 8, 8),
    Case("hidden_number_3", 4, 8),
    Case("hidden_number_3", 8, 16),
    Case("hidden_number_1", 16, 8, running=16),
    Case("hidden_number_3", 8, 8, kind=OWN),
    Case("hidden_number_3", 8, 8, kind=OWN, running=32),
    Case("hidden_number_6", 4, 8, kind=GIVEN),
    Case("hidden_number_5", 8, 8, kind=GIVEN),
    Case("one_answer", 16, 8, kind=NEW),
)


# Measuring


def _measure(folder: Path, steps: int, *, cpu: bool) -> None:
    """Record the runs that are not there yet."""
    if cpu:  # before anything of tuner's is imported
        time.perf_counter = time.process_time
    import torch

    torch.set_num_threads(1)  # seconds of CPU are then those of the clock
    _teach(folder)
    for case in CASES:
        if not (folder / PROJECT / case.name / "result.json").exists():
            print(f"run {case.name}", flush=True)
            _record(case, folder, steps)


def _record(case: Case, folder: Path, steps: int) -> None:
    from tuner import tune

    workflow, judge, tasks, settings = _agent(case.agent, folder, case.groups * (steps + WARMUP))
    tune(
        workflow,
        judge,
        tasks,
        overrides=[
            f"checkpoint_root_dir={folder}",
            f"project={PROJECT}",
            f"name={case.name}",
            f"model.max_response_tokens={case.tokens}",
            f"buffer.batch_size={case.groups}",
            f"buffer.total_steps={steps + WARMUP}",
            f"algorithm.repeat_times={case.repeat}",
            "algorithm.optimizer.lr=1e-6",  # what rollouts come to stays the same
            "algorithm.kl_loss_fn=none",
            "explorer.eval_interval=0",
            f"tuner.workflow={Path(__file__).name}:{case.agent.rstrip('_0123456789')}",  # its name
            f"explorer.runner_per_model={case.running or case.groups * case.repeat}",
            f"tuner.max_slots={case.running or case.groups * case.repeat}",
            f"tuner.signal_patience={steps + WARMUP}",
            *settings,
        ],
    )


def _agent(name: str, folder: Path, count: int) -> tuple[Any, Any, list[Any], list[str]]:
    """Workflow, judge, so many tasks, and the settings of their model."""
    import _plain_agents as plain
    import agent_step

    data = (plain._rows(ROOT / "examples" / "gsm8k" / "data" / "train.jsonl") * 2)[:count]
    tiny = f"model.model_path={ROOT / 'models' / 'tiny_math'}"
    if name == "gsm8k":
        example = plain._example("gsm8k", "main")
        return example.run_react_agent, example.judge_function, data, [tiny]
    if name == "multi_turn_math":
        solve = plain._example("multi_turn_math", "math_agents").solve
        model = f"model.model_path={ROOT / 'models' / 'tiny_retry'}"
        return solve, None, data, [model, "model.max_model_len=512", "tuner.reasoning=keep"]
    if name == "one_answer":
        return agent_step.solve, _right, data, [tiny]
    tries = int(name.rpartition("_")[2])
    game = agent_step.agent
    model = f"model.model_path={folder / 'player'}"
    return agent_step.play, _near, game.tasks(count, tries), [model]


async def _right(task: dict[str, Any], response: str) -> Any:
    import agent_step

    from tuner import JudgeOutput

    return JudgeOutput(reward=agent_step.is_right(response, task))


async def _near(task: dict[str, Any], response: str) -> Any:
    import agent_step

    from tuner import JudgeOutput

    return JudgeOutput(reward=agent_step.agent.score(response, task["number"]))


def _teach(folder: Path) -> None:
    """The model that plays, once."""
    import _guess_agent

    if not (folder / "player").exists():
        template = ROOT / "tests" / "gateway" / "templates" / "qwen3.jinja"
        _guess_agent.teach(folder / "player", template.read_text(encoding="utf-8"))


# Predicting


def _told(case: Case, run: MeasuredRun, known: Fit, fitted: dict[Case, MeasuredRun]) -> StepTime:
    """A held-out run, from what its kind lets one know of it."""
    from tuner.planning.step_model import predict

    work = run.work
    if case.kind == OWN:
        same = [one for one in fitted if (one.agent, one.tokens) == (case.agent, case.tokens)]
        work = fitted[same[-1]].work
    return predict(work, known.of("" if case.kind == NEW else run.agent), run.place)


def _rows(folder: Path, clock: str) -> Iterator[Row]:
    from tuner.planning.fitting import fit
    from tuner.planning.measured import read_measured

    runs = {case: read_measured(folder / PROJECT / case.name) for case in CASES}
    fitted = {case: run for case, run in runs.items() if case.kind is None}
    known = fit(list(fitted.values()))
    for name, value in asdict(known.costs).items():
        yield Row(f"fitted to {len(fitted)} runs", f"{name}, {clock}", value)
    for case, run in sorted(runs.items(), key=lambda one: one[0].kind or ""):
        told = known.again(run) if case.kind is None else _told(case, run, known, fitted)
        title = f"{case.name}: {case.kind or 'fitted'}"
        for what, ours, name in (
            ("collection", told.collection, "idle"),
            ("training", told.parts["training"], "training"),
            ("a step", told.seconds, "seconds"),
        ):
            yield Row(title, f"{clock} of {what}", ours, "measured", run.middle(name))
        error = abs(told.seconds / run.middle("seconds") - 1)
        target = None if case.kind is None else 1.0
        yield Row(
            title, "error of a step", error, "allowed", GOAL, target=target, more_is_better=False
        )


@contextlib.contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep.resolve()
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu", action="store_true", help="seconds of CPU, not of the clock")
    parser.add_argument("--keep", type=Path, help="where the runs are kept, and found again")
    parser.add_argument("--steps", type=int, default=3, help="counted steps of a run")
    given = parser.parse_args()
    with _folder(given.keep) as folder:
        _measure(folder, given.steps, cpu=given.cpu)
        rows = list(_rows(folder, "s of CPU" if given.cpu else "s"))
    report("plan", rows, ["torch", "transformers", "openai", "agentscope"])


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
