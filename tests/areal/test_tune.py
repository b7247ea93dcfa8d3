"""Every way of writing an agent runs under `tune()`."""

import pytest

from tests.areal.loop import ROWS, Random
from tests.areal.queue_agents import Counting, Once
from tests.areal.test_agents import MyAgent
from tuner import tune
from tuner.areal import AgentWorkflow, QueueWorkflow, TokenWorkflow


@pytest.mark.parametrize(
    "workflow",
    [
        lambda: TokenWorkflow(Random()),
        lambda: QueueWorkflow(Once(), Counting),
        lambda: AgentWorkflow(MyAgent()),
    ],
)
def test_tune_trains_it(workflow, random_model_path, tmp_path):
    rows = [{**row, "input_ids": [40, 41]} for row in ROWS]
    result = tune(
        workflow(),
        train_dataset=rows,
        overrides=[
            f"checkpoint_root_dir={tmp_path}",
            f"model.model_path={random_model_path}",
            "algorithm.repeat_times=2",
            "buffer.batch_size=2",
            "buffer.total_steps=1",
        ],
    )
    assert result.steps == 1
    assert result.outcomes == {"completed": 4}
    assert result.tokens.sampled == result.tokens.trained > 0
