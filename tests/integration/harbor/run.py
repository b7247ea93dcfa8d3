"""A run on a task, which says each rollout that ended; for tests that end it.

python -m tests.integration.harbor.run TASK [FOLDER [key=value ...]]

Without a folder nothing is trained: rollouts follow each other without end.
"""

import asyncio
import random
import signal
import sys
from pathlib import Path

from tuner import TunerModelConfig, tune
from tuner.environments import Harbor

ROOT = Path(__file__).resolve().parents[3]


async def agent(task, terminal, model):
    """Asks the model once, if there is one, and solves the task or not."""
    if model is not None:
        messages = [{"role": "user", "content": "How much is 1 + 1?"}]
        await model.client.chat.completions.create(model=model.model_name, messages=messages)
    word = random.choice(["hello", "good-bye"])
    await terminal.run(f"(sleep 1000 &); sleep 0.1; echo {word} >greeting.txt")
    print("done", flush=True)


async def rollouts(environment):
    async def endless():
        while True:
            row = environment.train_dataset[0]
            output = await environment.workflow(row, None)
            await environment.judge(row, output.response)

    await asyncio.gather(*(endless() for _ in range(4)))


def main(task, folder=None, *overrides):
    if folder is None:
        asyncio.run(rollouts(Harbor(task, agent=agent)))
    tune(
        environment=Harbor(task, agent=agent),
        model=TunerModelConfig(model_path=str(ROOT / "models/tiny_math"), max_model_len=250),
        experiment_name="run",
        overrides=[
            "algorithm.repeat_times=4",
            "buffer.batch_size=1",
            "buffer.total_steps=1000",
            "explorer.eval_interval=0",
            "explorer.eval_on_startup=false",
            "explorer.runner_per_model=4",
            "model.max_response_tokens=4",
            "tuner.signal_patience=1000",
            f"checkpoint_root_dir={folder}",
            *overrides,
        ],
    )


if __name__ == "__main__":
    # A process that is started in the background of a shell ignores it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main(*sys.argv[1:])
