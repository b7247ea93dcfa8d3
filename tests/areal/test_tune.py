"""Every way of writing an agent runs under `tune()`."""

import pytest

from tests.areal.loop import ROWS, Random, tuned
from tests.areal.queue_agents import Counting, Once
from tests.areal.test_agents import MyAgent
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
    result = tuned(workflow(), random_model_path, tmp_path, rows=rows)
    assert result.steps == 1
    assert result.outcomes == {"completed": 4}
    assert result.tokens.sampled == result.tokens.trained > 0
