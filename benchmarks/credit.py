"""Held-out reward by ways of credit: the whole rollout's reward, its calls' own, a discount from
call to call, branches, and `gigpo`, on four agents that differ in where the credit lies.

The tiny model answers each call with one of four digits, a token each, so calls are tokens:

- one answer: which of four doors is right in a room; a single call.
- grid: to a square of 4 x 4 within 12 moves; 1 for arriving. Squares are visited again, and named
  as the states of calls.
- own rewards: four doors one after the other, each right one gives a quarter; what is right in a
  room does not depend on the others. What a call gained is told to the ways that can use it.
- early call: the door of the first call decides, four more calls change nothing.

All ways have the same tasks, groups, learning rate and seeds, and keep the conversation, so that
calls continue each other. After each step the tasks are answered greedily. A number is the mean of
that reward from the first token to the last of the budget (the area below the curve), over the
seeds; the peer is `multi_step_grpo`, and its ± the standard error of the difference of both.
Branched rollouts sample less in a step, and get more steps.

    python benchmarks/credit.py [--seeds 3] [--only NAME]
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from _report import Row, report

from tuner import WorkflowOutput, tune

ROOT = Path(__file__).parents[1]
Task = dict[str, Any]
MOVES = ((1, 0), (-1, 0), (0, 1), (0, -1))
SIZE, LONGEST = 4, 12
PLAIN = "multi_step_grpo"
CALL_REWARDS = "multi_step_grpo, rewards of calls"
WAYS: Mapping[str, Sequence[str]] = {
    PLAIN: (),
    "turn_discount 0.9": ("tuner.algorithm.turn_discount=0.9",),
    "tree, best": ("algorithm.algorithm_type=tree", "tuner.branching.where=best"),
    "gigpo": ("algorithm.algorithm_type=gigpo",),
    "gigpo, gamma 0.9": (
        "algorithm.algorithm_type=gigpo",
        "algorithm.advantage_fn_args.gamma=0.9",
    ),
    CALL_REWARDS: (),
}
SETTINGS = (
    f"model.model_path={ROOT / 'models' / 'tiny_math'}",
    "algorithm.optimizer.lr=5e-4",
    "algorithm.repeat_times=8",
    "buffer.batch_size=8",
    "model.temperature=4",  # the model's own digits are almost certain: nothing would be tried
    "explorer.runner_per_model=64",
    "explorer.eval_interval=1",
    "tuner.signal_patience=1000",
)


class Player:
    """The conversation of a rollout: a text that ends where the next digit is due."""

    def __init__(self, model: Any, text: str) -> None:
        self._model, self._text = model, text
        self._bias = {str(model.session.encode(digit)[-1]): 100 for digit in "1234"}

    async def choose(self, shown: str) -> int:
        """Show the model where it is; its choice, 0 to 3."""
        self._text += shown
        completion = await self._model.client.completions.create(
            model=self._model.model_name, prompt=self._text, max_tokens=1, logit_bias=self._bias
        )
        digit = completion.choices[0].text.strip()
        self._text += f"{digit}\n"
        return int(digit) - 1

    def say(self, what: str, value: Any) -> None:
        """Credit for the last call."""
        setattr(self._model.calls[-1], what, value)


def right(room: int) -> int:
    return (room * 7 + room // 4) % 4


async def one_answer(task: Task, player: Player, way: str) -> float:
    return float(await player.choose(f"room {task['rooms'][0]}: ") == right(task["rooms"][0]))


async def early_call(task: Task, player: Player, way: str) -> float:
    reward = await one_answer(task, player, way)
    for room in task["rooms"][1:]:
        await player.choose(f"then {room}: ")
    return reward


async def own_rewards(task: Task, player: Player, way: str) -> float:
    gained = []
    for room in task["rooms"]:
        gained.append((await player.choose(f"room {room}: ") == right(room)) / len(task["rooms"]))
        if way == CALL_REWARDS:
            player.say("reward", gained[-1])
        elif way not in (PLAIN, "tree, best"):
            player.say("gained", gained[-1])
        player.say("state", str(room))
    return sum(gained)


async def grid(task: Task, player: Player, way: str) -> float:
    here, goal = (0, 0), tuple(task["goal"])
    for _ in range(LONGEST):
        move = MOVES[await player.choose(f"at {here[0]} {here[1]}: ")]
        player.say("state", f"{here}")
        there = here[0] + move[0], here[1] + move[1]
        here = there if all(0 <= place < SIZE for place in there) else here
        if here == goal:
            return 1.0
    return 0.0


@dataclass(frozen=True)
class Case:
    """An agent.

    Attributes:
        play: Plays a rollout; returns its reward.
        tasks: Trained and evaluated.
        budget: Sampled tokens that are compared.
        ways: Names of the ways that differ for it.
    """

    play: Callable[[Task, Player, str], Any]
    tasks: Sequence[Task]
    budget: int
    ways: Sequence[str]


def _rooms(count: int) -> list[Task]:
    return [{"rooms": [(3 * n + 5 * place) % 16 for place in range(count)]} for n in range(16)]


_COMPARED = (PLAIN, "turn_discount 0.9", "tree, best", "gigpo")
_GOALS = [{"goal": goal} for goal in ((2, 2), (3, 1), (1, 3), (3, 3))] * 2
CASES = {
    "one answer": Case(one_answer, _rooms(1), 1024, _COMPARED),
    "grid": Case(grid, _GOALS, 5000, [*_COMPARED, "gigpo, gamma 0.9"]),
    "own rewards": Case(own_rewards, _rooms(4), 2000, [*_COMPARED, CALL_REWARDS]),
    "early call": Case(early_call, _rooms(5), 2500, _COMPARED),
}


def run(case: Case, way: str, seed: int) -> float:
    """The mean of the held-out reward over the budget of one run."""

    async def workflow(task: Task, model: Any) -> WorkflowOutput:
        asked = f"to {task['goal'][0]} {task['goal'][1]}\n" if "goal" in task else ""
        player = Player(model, asked)
        return WorkflowOutput(reward=await case.play(task, player, way))

    history: Sequence[dict[str, Any]] = []
    steps = 4
    with tempfile.TemporaryDirectory() as folder:
        while True:
            history = tune(
                workflow,
                train_dataset=list(case.tasks),
                eval_dataset={"tasks": list(case.tasks)},
                overrides=[
                    *SETTINGS,
                    *WAYS[way],
                    f"tuner.seed={seed}",
                    f"buffer.total_steps={steps}",
                    f"checkpoint_root_dir={folder}",
                    "name=run",
                    "continue_from_checkpoint=true",
                ],
            ).history
            sampled = [row["tokens/sampled"] for row in history[1:]]
            if sum(sampled) >= case.budget:
                break
            steps += max(1, round((case.budget - sum(sampled)) / sampled[-1] + 0.5))
    rewards = [row["eval/tasks/reward"] for row in history]
    area, left = 0.0, float(case.budget)
    for tokens, before, after in zip(sampled, rewards, rewards[1:], strict=False):
        part = min(tokens, left)
        area += part * (before + (after - before) * part / tokens / 2)
        left -= part
    found = area / case.budget
    print(f"{way}, seed {seed}: {found:.3f}, {[round(r, 2) for r in rewards]}", flush=True)
    return found


def compared(name: str, case: Case, seeds: int) -> Iterator[Row]:
    """The rows of one case."""
    print(name, flush=True)
    found = {way: [run(case, way, seed) for seed in range(seeds)] for way in case.ways}
    for way, values in found.items():
        gains = [ours - plain for ours, plain in zip(values, found[PLAIN], strict=True)]
        error = stdev(gains) / sqrt(seeds) if seeds > 1 else 0.0
        row = f"{name}: {way}" + (f" (± {error:.3f})" if way != PLAIN else "")
        metric = f"mean held-out reward, {case.budget:,} tokens, {seeds} seeds"
        yield Row(row, metric, fmean(values), PLAIN, fmean(found[PLAIN]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", help="cases whose name has this in it")
    options = parser.parse_args()
    rows = [
        row
        for name, case in CASES.items()
        if (options.only or "") in name
        for row in compared(name, case, options.seeds)
    ]
    report("credit", rows, ("torch", "transformers"))


if __name__ == "__main__":
    main()
