"""Sampled tokens that an agent needs to learn: branched rollouts beside flat ones.

The agent of `examples/branching` takes notes first, and its end decides; those of `_plain_agents`
are not built for branches, and `best` may do no harm there. Each side trains an agent in groups of
one size at three learning rates, with two seeds each; what counts is the best of them, which gets
the other seeds. A run is evaluated after each step, and its tokens (and seconds) until the held-out
reward are interpolated between steps, behind which it ends, as it does when it has sampled more
than any run with a better rate needed; a run that does not get there counts as all that it sampled,
and is told.

    python benchmarks/branching.py [--seeds 5] [--tried 2] [--steps 8] [--only NAME]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from statistics import fmean
from typing import Any

from _plain_agents import Agent, agents
from _report import Row, report

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "branching"))

import agent

from tuner import tune

RULE = f"{agent.__file__}:before_the_answers"
RATES = (1e-3, 5e-4, 2e-4)  # with 2e-3 one of five flat runs forgets all that it knew
EVALUATED = 100
# Held-out reward that the agents are to come to which are not built for branches.
WANTED = {
    "multi_turn_math": 0.9,
    "search_agent": 0.8,
    "hidden number, 3 turns": 0.5,
    "hidden number, 6 turns": 0.5,
}
BEST = ("algorithm.algorithm_type=tree", "tuner.branching.where=best")


@dataclass(frozen=True)
class Case:
    """An agent, and who trains it.

    Attributes:
        agent: Its workflow and tasks, made when they are needed.
        wanted: Held-out reward that a run is to come to.
        sides: Settings of each by its name; the first is what the others are compared with.
        target: The ratio of tokens that is wanted of them.
        settings: Of all sides.
    """

    agent: Callable[[], Agent]
    wanted: float
    sides: Mapping[str, Sequence[str]]
    target: float
    settings: Sequence[str]


def of_the_example(asked: int) -> Agent:
    """The example's agent, which is asked so many problems, all of which must be right."""
    # The answers do not read the notes.
    held_out = agent.tasks("test", notes=0, asked=asked)[:EVALUATED]
    return Agent(agent.answer, agent.tasks("train", asked=asked), held_out, ())


def cases(folder: Path) -> dict[str, Case]:
    """All of them by name.

    Args:
        folder: Where a model is written that one of the agents needs.
    """
    built_for_it = {
        "flat, rloo": ("algorithm.algorithm_type=rloo",),
        "tree, best": BEST,
        "tree, before the answers": (
            "algorithm.algorithm_type=tree",
            "tuner.branching.ends=8",
            f"tuner.branching.where={RULE}",
        ),
    }
    many = ("buffer.batch_size=4", "algorithm.repeat_times=16", "model.max_response_tokens=64")
    found = {
        name: Case(partial(of_the_example, asked), wanted, built_for_it, 2.0, many)
        for name, asked, wanted in (("long beginning", 1, 0.85), ("rare first success", 4, 0.5))
    }
    plain = {"multi_step_grpo": ("algorithm.algorithm_type=multi_step_grpo",), "tree, best": BEST}
    few = ("buffer.batch_size=8", "algorithm.repeat_times=8")
    for name, make in agents(folder).items():
        found[name] = Case(make, WANTED[name], plain, 1 / 1.1, few)
    return found


SETTINGS = (
    "explorer.runner_per_model=64",
    "explorer.eval_interval=1",
)


@dataclass(frozen=True)
class Reached:
    """What a run had taken when it got to the wanted reward.

    Attributes:
        tokens, seconds: Until then; all of the run where it did not.
        there: Whether it did.
    """

    tokens: float
    seconds: float
    there: bool


def reached(history: Sequence[dict[str, Any]], wanted: float) -> Reached:
    """Where a run's held-out reward passes the wanted one."""
    tokens = seconds = 0.0
    before = history[0]["eval/held-out/reward"]
    for row in history[1:]:
        now, sampled, took = row["eval/held-out/reward"], row["tokens/sampled"], row["time/step"]
        if now >= wanted:
            part = (wanted - before) / (now - before) if now > before else 1.0
            return Reached(tokens + part * sampled, seconds + part * took, True)
        before, tokens, seconds = now, tokens + sampled, seconds + took
    return Reached(tokens, seconds, False)


def run(case: Case, side: str, rate: float, seed: int, steps: int, most: float) -> Reached:
    """One run of a side, taken up again until it is there, or has sampled more than `most`."""
    given = case.agent()
    with tempfile.TemporaryDirectory() as folder:
        for until in range(1, steps + 1):
            result = tune(
                given.workflow,
                train_dataset=given.train,
                eval_dataset={"held-out": given.held_out},
                overrides=[
                    *SETTINGS,
                    *given.settings,
                    *case.settings,
                    *case.sides[side],
                    f"algorithm.optimizer.lr={rate}",
                    f"tuner.seed={seed}",
                    f"buffer.total_steps={until}",
                    f"checkpoint_root_dir={folder}",
                    "name=run",
                    "continue_from_checkpoint=true",
                ],
            )
            found = reached(result.history, case.wanted)
            if found.there or found.tokens > most:
                break
    rewards = [round(row["eval/held-out/reward"], 3) for row in result.history]
    print(f"{side}, lr {rate:g}, seed {seed}: {found} {rewards}", flush=True)
    return found


def best_of(case: Case, side: str, given: argparse.Namespace) -> tuple[float, list[Reached]]:
    """A side's best rate, with which most runs get there, and its runs with that."""

    def runs(rate: float, seeds: range, most: float = inf) -> list[Reached]:
        return [run(case, side, rate, seed, given.steps, most) for seed in seeds]

    best, found = RATES[0], runs(RATES[0], range(given.tried))
    for rate in RATES[1:]:
        most = max(one.tokens for one in found) if all(one.there for one in found) else inf
        others = runs(rate, range(given.tried), most)
        if _worth(others) < _worth(found):
            best, found = rate, others
    return best, [*found, *runs(best, range(given.tried, given.seeds))]


def _worth(runs: Sequence[Reached]) -> tuple[int, float]:
    """What is least of the best rate's."""
    return sum(not one.there for one in runs), fmean(one.tokens for one in runs)


def compared(name: str, case: Case, given: argparse.Namespace) -> Iterator[Row]:
    """The rows of one case."""
    print(name, flush=True)
    found = {side: best_of(case, side, given) for side in case.sides}
    peer, (_, flat) = next(iter(found.items()))
    for side, (rate, runs) in found.items():
        row = f"{name}: {side}, lr {rate:g}, {sum(r.there for r in runs)} of {len(runs)}"
        target = None if runs is flat else case.target
        tokens = fmean(one.tokens for one in runs), fmean(one.tokens for one in flat)
        seconds = fmean(one.seconds for one in runs), fmean(one.seconds for one in flat)
        metric = f"sampled tokens to {case.wanted}"
        yield Row(row, metric, tokens[0], peer, tokens[1], target, more_is_better=False)
        yield Row(row, "seconds", seconds[0], peer, seconds[1], more_is_better=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tried", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--only", help="cases whose name has this in it")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            row
            for name, case in cases(Path(folder)).items()
            if (options.only or "") in name
            for row in compared(name, case, options)
        ]
    report("branching", rows, ("torch", "transformers"))


if __name__ == "__main__":
    main()
