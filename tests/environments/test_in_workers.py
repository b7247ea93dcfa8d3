"""An environment whose workflow runs in workers."""

import os
from pathlib import Path
from typing import Any

from tuner import WorkflowOutput, tune
from tuner.environments import Environment


class Marked(Environment):
    """Leaves a file where it was opened, and takes it away where it is closed."""

    def __init__(self, folder: Path) -> None:
        self.train_dataset = [{"question": f"{number} and 1"} for number in range(4)]
        self._folder = folder
        self._mark: Path | None = None

    async def workflow(self, task: dict[str, Any], model: Any) -> WorkflowOutput:
        self._mark = self._folder / str(os.getpid())
        self._mark.touch()
        (self._folder / f"was-{os.getpid()}").touch()
        reply = await model.client.chat.completions.create(
            model=model.model_name, messages=[{"role": "user", "content": task["question"]}]
        )
        return WorkflowOutput(reward=float(len(reply.choices[0].message.content or "") % 3))

    async def close(self) -> None:
        if self._mark is not None:
            self._mark.unlink()
            self._mark = None


def test_each_worker_closes_the_environment_that_it_played_in(tmp_path):
    folder = tmp_path / "open"
    folder.mkdir()
    result = tune(
        environment=Marked(folder),
        overrides=[
            "tuner.workers=2",
            "buffer.batch_size=4",
            "buffer.total_steps=1",
            "algorithm.repeat_times=2",
            "model.max_response_tokens=8",
            f"checkpoint_root_dir={tmp_path}",
        ],
    )
    assert result.steps == 1
    left = sorted(file.name for file in folder.iterdir())
    assert len(left) == 2
    assert all(name.startswith("was-") and name != f"was-{os.getpid()}" for name in left)
