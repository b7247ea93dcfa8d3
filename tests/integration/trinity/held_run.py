"""A run that a test holds up and kills: `python -m tests.integration.trinity.held_run <folder>`.

Task `n` of the dataset waits in its workflow while there is a file `<folder>/hold_<n>`.
"""

import asyncio
import sys
from pathlib import Path

from tests.integration.trinity.on_ray import ON_A_CPU
from tuner import JudgeOutput, WorkflowOutput, tune

STEPS = 4


async def held(task, model):
    answer = await model.client.chat.completions.create(
        model=model.model_name, messages=[{"role": "user", "content": task["question"]}]
    )
    while Path(task["hold"]).exists():  # noqa: ASYNC110, ASYNC240 it is another process's file
        await asyncio.sleep(0.2)
    return WorkflowOutput(response=answer.choices[0].message.content or "")


async def by_length(task, response):
    return JudgeOutput(reward=float(len(response)))


def main(folder: Path, *overrides: str):
    rows = [
        {"question": f"What is {n} plus 4?", "hold": str(folder / f"hold_{n}")}
        for n in range(2 * STEPS)
    ]
    return tune(
        held,
        by_length,
        rows,
        backend="trinity",
        experiment_name="held",
        overrides=[
            *ON_A_CPU,
            f"checkpoint_root_dir={folder}",
            f"buffer.total_steps={STEPS}",
            "trainer.save_interval=1",
            # A group that is held up leaves a runner to the other one.
            "explorer.runner_per_model=2",
            *overrides,
        ],
    )


if __name__ == "__main__":
    print(main(Path(sys.argv[1]), *sys.argv[2:]))
