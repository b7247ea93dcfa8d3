"""A small run on recorded data, which may kill itself in the fourth step."""

from tests.kit.runs import killing_itself
from tuner import AlgorithmConfig, JudgeOutput, TunerModelConfig, tune
from tuner.training.trainer import PolicyTrainer

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


def killed(model, root, algorithm):
    """For a process of its own. No checkpoint has its last step."""
    PolicyTrainer.step_lr_scheduler = killing_itself(PolicyTrainer.step_lr_scheduler, 4)
    start(model, root, algorithm)
