"""Word problems as an OpenEnv environment: answer, be told that it was wrong, answer again.

    python examples/openenv/server.py PORT

Nothing here knows of training: any OpenEnv client can play it.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app

DATA = Path(__file__).resolve().parents[1] / "gsm8k" / "data"
WRONG = "Unfortunately your answer is wrong. Let's try again."
TRIES = 3
SPLITS = {
    name: [json.loads(line) for line in (DATA / f"{name}.jsonl").open(encoding="utf-8")]
    for name in ("train", "test")
}


class Answer(Action):
    """What the agent says."""

    text: str


class Said(Observation):
    """What the agent is told."""

    text: str


class WordProblems(Environment[Answer, Said, State]):
    """Three tries at a problem; being right is worth 1, 0.5 or 0.25."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._solution = ""
        self._state = State()

    def reset(
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        split: str = "train",
        **kwargs: Any,
    ) -> Said:
        problems = SPLITS[split]
        problem = problems[(seed or 0) % len(problems)]
        self._solution = problem["answer"].rpartition("#### ")[2]
        self._state = State(episode_id=episode_id)
        return Said(text=problem["question"])

    def step(self, action: Answer, timeout_s: float | None = None, **kwargs: Any) -> Said:
        self._state.step_count += 1
        numbers = re.findall(r"-?\d+", action.text)
        if numbers and numbers[-1] == self._solution:
            reward = 0.5 ** (self._state.step_count - 1)
            return Said(text="That is right.", reward=reward, done=True)
        return Said(text=WRONG, reward=0.0, done=self._state.step_count == TRIES)

    @property
    def state(self) -> State:
        return self._state


app = create_app(WordProblems, Answer, Said, max_concurrent_envs=64)

if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
