"""Whole runs whose judge takes groups, or whose workflow hears of its judge. On a random model."""

import pytest

from tests.kit import runs
from tuner import tune as tune_function
from tuner.errors import FunctionError
from tuner.loop import run_local
from tuner.tasks.functions import JudgeOutput, WorkflowOutput
from tuner.traces import read_traces


async def longest_first(task, responses):
    """The group's places by length, which no response has by itself."""
    order = sorted(range(len(responses)), key=lambda i: (-len(responses[i] or ""), i))
    return [
        JudgeOutput(reward=1 - order.index(i) / len(order), feedback=f"place {order.index(i)}")
        for i in range(len(responses))
    ]


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_judge_of_groups_trains_and_every_group_has_each_place_once(
    random_model_path, tmp_path, ahead
):
    options = ("buffer.total_steps=3", "tuner.deterministic=false")
    result = run_local(
        runs.config(random_model_path, tmp_path, *options, f"synchronizer.sync_offset={ahead}"),
        workflow=runs.workflow,
        judge=longest_first,
        train_tasks=runs.TRAIN,
        eval_tasks={"held-out": runs.EVAL},
    )
    assert result.steps == 3
    groups = {}
    for file in sorted((result.traces).glob("step_*.jsonl")):
        for trace in read_traces(file):
            groups.setdefault((trace.id.step, trace.id.task), []).append(trace)
    assert len(groups) >= 6
    for group in groups.values():
        assert sorted(trace.reward for trace in group) == pytest.approx([1 / 3, 2 / 3, 1])
        assert all(trace.feedback.startswith("place") for trace in group)
    assert result.tokens.trained > 0
    # An evaluation's groups have one rollout, which is the best of them.
    assert result.eval_after == {"held-out": 1.0}


def test_a_rollout_that_heard_its_judge_is_trained_with_all_of_its_calls(
    random_model_path, tmp_path
):
    async def workflow(task, model, feedback):
        said = task["question"] if feedback is None else f"{task['question']} {feedback}"
        return WorkflowOutput(response=await runs.answer(model, said))

    async def judge(task, response):
        return JudgeOutput(reward=len(response or "") % 3 / 4, feedback="longer")

    options = ("buffer.total_steps=1", "tuner.deterministic=false", "tuner.feedback_attempts=2")
    result = run_local(
        runs.config(random_model_path, tmp_path, *options),
        workflow=workflow,
        judge=judge,
        train_tasks=runs.TRAIN,
        eval_tasks={},
    )
    traces = list(read_traces(result.traces / "step_000001.jsonl"))
    assert {len(trace.calls) for trace in traces} == {3}
    assert all("longer" in trace.calls[1].messages[-1]["content"] for trace in traces)
    assert result.tokens.sampled == result.tokens.trained + sum(result.tokens.dropped.values())
    row = result.history[0]
    assert row["workflow/feedback_attempts"] == 2


def test_feedback_that_nobody_gives_or_gets_is_refused():
    async def deaf(task, model):
        return WorkflowOutput()

    async def hearing(task, model, feedback=None):
        return WorkflowOutput()

    rows = [{"question": "1"}]
    cases = [
        (deaf, runs.judge, "takes no feedback"),
        (hearing, None, "there is no judge"),
        (hearing, longest_first, "takes whole groups"),
    ]
    for workflow, judge, message in cases:
        with pytest.raises(FunctionError, match=rf"feedback_attempts is 2.*{message}"):
            tune_function(
                workflow,
                judge,
                rows,
                overrides=["tuner.feedback_attempts=2", "buffer.batch_size=1"],
            )
