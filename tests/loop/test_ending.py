"""When a run ends before its last step: complete, broken, or not at all. A real engine."""

import json

import pytest

from tests.kit import runs
from tuner.errors import TrainingError
from tuner.loop import run_local
from tuner.runs.result import TuneResult
from tuner.tasks.functions import JudgeOutput, WorkflowOutput
from tuner.tune import leave_report

MIXED, LOW, HIGH = (0.0, 1.0), (0.0,), (1.0,)
ROLLOUTS = 6


class Scripted:
    """A judge that gives the rollouts of each step the rewards of that step, in turn; the last
    step's from there on. A step of None has rollouts that fail."""

    def __init__(self, *steps):
        self.steps = steps
        self.begun = self.judged = 0

    def of(self, count):
        return self.steps[min(count // ROLLOUTS, len(self.steps) - 1)]

    async def workflow(self, task, model):
        text = await runs.answer(model, task["question"])
        if task["question"].startswith("train"):
            self.begun += 1
            if self.of(self.begun - 1) is None:
                self.judged += 1
                raise LookupError("no tool")
        return WorkflowOutput(response=text)

    async def judge(self, task, response):
        if not task["question"].startswith("train"):
            return JudgeOutput(reward=0.5)
        rewards = self.of(self.judged)
        self.judged += 1
        return JudgeOutput(reward=rewards[self.judged % len(rewards)])


def tune(model, root, script, *overrides):
    base = (
        "tuner.deterministic=false",
        "tuner.signal_patience=2",
        "buffer.total_steps=9",
        "explorer.max_retry_times=0",
        "explorer.eval_interval=100",
        "trainer.save_interval=100",
    )
    return run_local(
        runs.config(model, root, *base, *overrides),
        workflow=script.workflow,
        judge=script.judge,
        train_tasks=runs.TRAIN,
        eval_tasks={"held-out": runs.EVAL},
        report=leave_report,
    )


def steps_of(result):
    return [row["step"] for row in result.history]


@pytest.fixture
def early(random_model_path, tmp_path):
    """A run that had nothing left to learn after step 3 of 9."""
    return tune(random_model_path, tmp_path, Scripted(MIXED, HIGH))


def test_a_run_with_nothing_left_to_learn_ends_early_as_completed(early):
    assert steps_of(early) == [0, 1, 2, 3]
    assert (early.ended_early.step, early.ended_early.planned_steps, early.steps) == (3, 9, 3)
    assert early.checkpoint.name == "step_000003"
    assert early.checkpoint.is_dir()
    assert early.eval_after == {"held-out": 0.5}
    assert (early.run_dir / "report.html").exists()
    stored = TuneResult.model_validate_json((early.run_dir / "result.json").read_text())
    assert stored.ended_early == early.ended_early
    table = " ".join(str(early).replace("│", " ").split())
    assert "ended early step 3: every rollout of 2 steps in a row had the highest reward" in table


def test_the_early_end_is_said_in_one_sentence(random_model_path, tmp_path, capsys):
    tune(random_model_path, tmp_path, Scripted(MIXED, HIGH))
    out = " ".join(capsys.readouterr().out.split())
    assert out.count("ends early") == 1
    assert "step 3: every rollout of 2 steps in a row had the highest reward, 1: nothing is" in out
    assert "warning" not in out


def test_a_run_that_ended_early_is_not_run_again(early, random_model_path, tmp_path):
    again = Scripted(MIXED)
    assert tune(random_model_path, tmp_path, again) == early
    assert again.begun == 0


@pytest.mark.long
@pytest.mark.parametrize(
    ("more", "last"),
    [
        ("buffer.total_steps=30", 5),  # the steps that ended it do not end it again
        ("buffer.total_steps=4", 4),
        ("tuner.signal_patience=3", 6),
    ],
)
def test_a_run_that_ended_early_resumes_where_more_is_asked_of_it(
    early, random_model_path, tmp_path, more, last
):
    result = tune(random_model_path, tmp_path, Scripted(HIGH), more)
    assert steps_of(result) == [*range(last + 1)]
    assert (result.ended_early is None) == (last == 4)
    assert result.checkpoint.name == f"step_{last:06d}"


def test_a_run_that_was_killed_before_its_result_ends_after_the_same_step(
    early, random_model_path, tmp_path
):
    (early.run_dir / "result.json").unlink()
    again = Scripted(MIXED)
    result = tune(random_model_path, tmp_path, again)
    assert (result.ended_early, steps_of(result)) == (early.ended_early, steps_of(early))
    assert again.begun == 0


@pytest.mark.long
def test_collection_ahead_of_training_ends_early_too(random_model_path, tmp_path):
    ahead = ("synchronizer.sync_offset=1", "explorer.runner_per_model=1")
    result = tune(random_model_path, tmp_path, Scripted(MIXED, MIXED, HIGH), *ahead)
    last = result.ended_early.step
    rows = [row for row in result.history if row["step"]]
    assert [row["reward/min"] for row in rows[-2:]] == [1.0, 1.0]
    assert last == rows[-1]["step"] < 9


def test_what_is_only_recorded_does_not_end_early(random_model_path, tmp_path):
    result = tune(
        random_model_path, tmp_path, Scripted(MIXED, HIGH), "mode=explore", "buffer.total_steps=5"
    )
    assert steps_of(result)[-1] == 5
    assert result.ended_early is None


def test_a_run_that_has_learned_is_warned_once_per_streak_and_continues(
    random_model_path, tmp_path, capsys
):
    script = Scripted(MIXED, LOW, LOW, LOW, MIXED, LOW, LOW)
    result = tune(random_model_path, tmp_path, script, "buffer.total_steps=7")
    assert steps_of(result)[-1] == 7
    warned = " ".join(capsys.readouterr().out.split()).split("warning: step ")[1:]
    assert [one.split()[0] for one in warned] == ["3:", "7:"]
    assert "in 2 of 2 groups of the last one all rollouts have the same reward" in warned[0]
    assert "algorithm.repeat_times or model.temperature" in warned[0]


@pytest.mark.long
def test_a_run_that_has_learned_before_it_was_resumed_continues(
    random_model_path, tmp_path, capsys
):
    """Longer ago than `tuner.signal_patience` steps: metrics.jsonl has it."""
    tune(random_model_path, tmp_path, Scripted(MIXED, LOW), "buffer.total_steps=4")
    assert capsys.readouterr().out.count("warning: step 3") == 1
    result = tune(random_model_path, tmp_path, Scripted(LOW), "buffer.total_steps=6")
    assert steps_of(result)[-1] == 6
    assert "warning" not in capsys.readouterr().out


def test_a_run_that_never_learned_stops_and_keeps_nothing(random_model_path, tmp_path):
    with pytest.raises(TrainingError, match="the same reward, 1: ") as caught:
        tune(random_model_path, tmp_path, Scripted(HIGH))
    assert "checkpoints" not in str(caught.value)
    assert list((tmp_path / "p/run/checkpoints").iterdir()) == []


def test_a_run_that_breaks_keeps_what_it_learned_and_resumes_from_there(
    random_model_path, tmp_path
):
    with pytest.raises(TrainingError, match=r"6 of 6 rollouts.*LookupError: no tool") as caught:
        tune(random_model_path, tmp_path, Scripted(MIXED, None))
    checkpoint = tmp_path / "p/run/checkpoints/step_000003"
    assert f"The weights are in {checkpoint}" in str(caught.value)
    assert "it resumes after step 3" in str(caught.value)
    assert checkpoint.is_dir()
    fixed = Scripted(MIXED)
    result = tune(random_model_path, tmp_path, fixed, "buffer.total_steps=5")
    assert steps_of(result) == [*range(6)]
    assert fixed.begun == 2 * ROLLOUTS


def test_calls_that_can_no_longer_be_trained_break_a_run(random_model_path, tmp_path):
    class Greedy(Scripted):
        async def workflow(self, task, model):
            self.begun += 1
            answer = await model.client.chat.completions.create(
                model=model.model_name,
                messages=[{"role": "user", "content": task["question"]}],
                temperature=0 if self.begun > ROLLOUTS + len(runs.EVAL) else 1,
            )
            return WorkflowOutput(response=answer.choices[0].message.content or "")

    with pytest.raises(TrainingError, match=r"No call .*greedy_call\).*resumes after step 3"):
        tune(random_model_path, tmp_path, Greedy(MIXED))


def test_what_costs_signal_is_said_once_after_the_first_step(random_model_path, tmp_path, capsys):
    result = tune(random_model_path, tmp_path, Scripted(LOW), "tuner.signal_patience=10")
    rows = [json.loads(row) for row in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert all(row["calls/truncated"] > 0.5 for row in rows[1:])
    out = capsys.readouterr().out
    lines = [line for line in out.splitlines() if line.startswith("step ")]
    [cut] = [line for line in lines if "were cut off" in line]
    assert "of 6 calls were cut off at the token limit (model.max_response_tokens, 6; raise" in cut
    [equal] = [line for line in lines if "have the same reward" in line]
    assert equal.startswith(
        "step 1: in 2 of 2 groups all rollouts have the same reward, most often 0"
    )
