"""A small run on recorded data in a process of its own, which may kill itself at a named moment.

python -m tests.backends.recorded_runs MODEL ROOT ALGORITHM MOMENT:COUNT
"""

import sys

from tests.backends.runs import killing_itself
from tuner import AlgorithmConfig, JudgeOutput, TunerModelConfig, tune
from tuner.training import PolicyTrainer

ROWS = [
    {"prompt": f"What is {i}?", "response": f"It is {i}.", "chosen": f"{i}.", "rejected": "no"}
    for i in range(7)
]


async def judge(task, response):
    return JudgeOutput(reward=1.0)


def start(model, root, algorithm, *, rows=ROWS):
    return tune(
        train_dataset=rows,
        model=TunerModelConfig(model_path=str(model), max_model_len=200),
        algorithm=AlgorithmConfig(algorithm_type=algorithm, batch_size=2, learning_rate=0.01),
        experiment_name="run",
        overrides=[
            f"checkpoint_root_dir={root}",
            "buffer.total_steps=6",
            "buffer.trainer_input.experience_buffer.data_selector.selector_type=shuffle",
            "trainer.save_interval=2",
            "tuner.deterministic=true",
            "monitor.monitor_type=[]",
        ],
    )


if __name__ == "__main__":
    # In the fourth step, which no checkpoint has.
    PolicyTrainer.step_lr_scheduler = killing_itself(PolicyTrainer.step_lr_scheduler, 4)
    start(*sys.argv[1:])
