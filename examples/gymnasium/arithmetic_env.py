"""An environment of gymnasium's in text: a word problem, and tries at it.

`reset(seed=...)` draws the problem; an action is what the model wrote. The right number is a reward
of 1 and ends the episode, as the last wrong one does.
"""

import json
from pathlib import Path
from typing import Any

import gymnasium
from gymnasium.spaces import Text

from tuner.rewards import final_answer, math_equal

DATA = Path(__file__).resolve().parent.parent / "gsm8k" / "data"
HELD_OUT = 1_000_000  # seeds from here on draw held-out problems


class Arithmetic(gymnasium.Env[str, str]):
    """See the module.

    Args:
        tries: Answers that one episode takes.
    """

    observation_space = Text(max_length=1000)
    action_space = Text(max_length=1000, min_length=0)

    def __init__(self, tries: int = 1) -> None:
        self._tries, self._left, self._truth = tries, tries, ""
        self._rows = {
            split: (DATA / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
            for split in ("train", "test")
        }

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """A problem."""
        super().reset(seed=seed)
        rows = self._rows["test" if seed is not None and seed >= HELD_OUT else "train"]
        row = json.loads(rows[self.np_random.integers(len(rows))])
        self._left, self._truth = self._tries, final_answer(row["answer"]) or ""
        return row["question"], {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Whether an answer is right."""
        right = math_equal(final_answer(action), self._truth) == 1
        self._left -= 1
        used = self._tries - self._left
        return "Try again.", float(right), right or not self._left, False, {"tries": used}


gymnasium.register("Arithmetic-v0", Arithmetic)
