"""`tuner eval` and `tuner.evaluate()`: real rollouts of a random model and of checkpoints of it."""

import json
from itertools import chain
from statistics import fmean

import pytest

import tuner
from tests.kit import runs
from tests.kit.builders import trace
from tuner.errors import ConfigError, DatasetError, TunerError
from tuner.tools.evaluate import CandidateScores, Evaluation, EvaluationSet, scores_of
from tuner.traces import Outcome, read_traces

TASKS = [{"question": f"question {i}"} for i in range(3)]


async def one_question(task, model):
    return tuner.WorkflowOutput(response=await runs.answer(model, task["question"]))


async def breaks_on_one(task, model):
    if task["question"] == "question 1":
        raise LookupError("no such tool")
    return await runs.workflow(task, model)


def evaluate(model, *overrides, workflow=runs.workflow, judge=runs.judge, tasks=TASKS, **given):
    return tuner.evaluate(
        workflow,
        judge,
        None if tasks is None else {"held-out": tasks},
        overrides=[
            f"model.model_path={model}",
            "model.max_response_tokens=4",
            "explorer.max_retry_times=0",
            *overrides,
        ],
        **given,
    )


def test_candidates_are_tried_on_the_same_tasks_and_compared_task_by_task(
    random_model_path, trained, tmp_path
):
    found = evaluate(
        random_model_path,
        "tuner.deterministic=true",
        workflow=one_question,
        k=3,
        candidates=[random_model_path, trained / "whole", trained / "adapter"],
        output=tmp_path / "out",
    )
    assert [one.name for one in found.candidates] == [
        random_model_path.name,
        "whole step 2",
        "adapter step 2",
    ]
    assert found.sets["held-out"].model_dump() == {"tasks": 3, "repeat": 3, "temperature": 1.0}
    scores = [one.sets["held-out"] for one in found.candidates]
    assert len({json.dumps(one.rewards) for one in scores}) == 3  # three different models
    for one in scores:
        assert [len(rewards) for rewards in one.rewards] == [3, 3, 3]
        assert one.reward.mean == pytest.approx(fmean(map(fmean, one.rewards)))
        assert list(one.pass_at) == [1, 2, 3]
        assert list(one.pass_hat) == [2, 3]
        assert one.failed == {}
        assert min(one.calls, one.tokens, one.seconds, one.wall_seconds) > 0
    for difference, other in zip(found.differences, scores[1:], strict=True):
        by_task = [
            fmean(new) - fmean(old)
            for new, old in zip(other.rewards, scores[0].rewards, strict=True)
        ]
        assert difference.reward.mean == pytest.approx(fmean(by_task))
        low, high = difference.reward.low, difference.reward.high
        assert min(by_task) - 1e-9 <= low <= high <= max(by_task) + 1e-9
    # What is kept: the same numbers, a page of them, and traces that can be viewed.
    assert (
        tuner.Evaluation.model_validate_json((tmp_path / "out/evaluation.json").read_text())
        == found
    )
    assert "adapter step 2" in (tmp_path / "out/evaluation.html").read_text()
    stored = tmp_path / "out/2-whole-step-2/traces/held-out_step_000000.jsonl"
    assert sorted(t.reward for t in read_traces(stored)) == sorted(chain(*scores[1].rewards))


def test_the_same_candidate_scores_the_same(random_model_path):
    once, again = (
        evaluate(random_model_path, "tuner.deterministic=true", k=2).candidates[0].sets["held-out"]
        for _ in range(2)
    )
    assert once.rewards == again.rewards


def test_a_failure_is_counted_and_is_no_reward(random_model_path):
    (found,) = evaluate(
        random_model_path, "tuner.pass_reward=0", k=2, workflow=breaks_on_one
    ).candidates
    scores = found.sets["held-out"]
    assert scores.failed == {"workflow_error": 2}
    assert [len(rewards) for rewards in scores.rewards] == [2, 0, 2]
    assert scores.reward.tasks == 2
    assert scores.pass_at[2].tasks == 2
    assert scores.pass_at[2].mean == 1.0  # every reward is at least 0


def test_a_task_without_enough_rewards_is_in_the_mean_and_not_in_pass_at_k():
    traces = [
        trace(0, 0, [], reward=1.0),
        trace(0, 1, [], outcome=Outcome.TIMEOUT, final=False),
        trace(0, 1, [], outcome=Outcome.TIMEOUT, attempt=2),
        trace(1, 0, [], reward=0.0),
        trace(1, 1, [], reward=1.0),
    ]
    found = scores_of(traces, 1.0, 1.0)
    assert found.rewards == [[1.0], [0.0, 1.0]]
    assert found.reward.mean == 0.75
    assert (found.pass_at[1].mean, found.pass_at[1].tasks) == (0.75, 2)
    assert (found.pass_at[2].mean, found.pass_at[2].tasks) == (1.0, 1)
    assert found.pass_hat[2].mean == 0.0
    assert found.failed == {"timeout": 1}


def test_without_candidates_it_is_the_model_and_its_runs_newest_checkpoint(
    random_model_path, trained
):
    found = evaluate(
        random_model_path,
        f"checkpoint_root_dir={trained.parent}",
        "project=p",
        "name=whole",
        limit=1,
    )
    assert [one.name for one in found.candidates] == [random_model_path.name, "whole step 2"]
    assert found.sets["held-out"].tasks == 1
    assert found.sets["held-out"].temperature == 0


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"candidates": "no/such/folder"}, TunerError, "no/such/folder.*folder does not exist"),
        ({"candidates": ["."]}, TunerError, r"\. is not a run, a checkpoint or a model"),
        ({"k": 0}, ConfigError, "k is 0"),
        ({"limit": 0}, ConfigError, "limit is 0"),
        ({"k": 2, "temperature": 0}, ConfigError, "all of them would be equal"),
        ({"output": "."}, ConfigError, "which is not empty: name a new folder"),
        ({"tasks": None}, DatasetError, "nothing to evaluate on: pass eval_dataset, or set buffer"),
    ],
)
def test_what_cannot_be_evaluated_is_said(
    given, error, message, random_model_path, tmp_path, monkeypatch
):
    (tmp_path / "checkpoints" / "project").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message):
        evaluate(random_model_path, **given)


def test_a_candidate_given_twice_or_damaged_is_refused(random_model_path, trained):
    with pytest.raises(ConfigError, match="given twice"):
        evaluate(random_model_path, candidates=[random_model_path, f"{random_model_path}/"])
    checkpoint = trained / "whole/checkpoints/step_000002"
    changed = checkpoint / "generation_config.json"
    before = changed.read_text()
    changed.write_text(before + " ")
    with pytest.raises(TunerError, match=r"is damaged \(generation_config.json has changed\)"):
        evaluate(random_model_path, candidates=checkpoint)
    changed.write_text(before)


FUNCTIONS = """
from tuner import JudgeOutput, WorkflowOutput

async def workflow(task, model):
    messages = [{"role": "user", "content": task["question"]}]
    answer = await model.client.chat.completions.create(
        model=model.model_name, messages=messages
    )
    if task["question"] == "fail":
        raise LookupError("no such tool")
    return WorkflowOutput(response=answer.choices[0].message.content or "")

def judge(task, response):
    return JudgeOutput(reward=float(len(response) > 2))
"""


@pytest.fixture
def project(random_model_path, tmp_path):
    (tmp_path / "main.py").write_text(FUNCTIONS)
    (tmp_path / "held.jsonl").write_text('{"question": "one"}\n{"question": "two"}\n')
    (tmp_path / "fails.jsonl").write_text('{"question": "fail"}\n')
    (tmp_path / "config.yaml").write_text(
        f"model: {{model_path: {random_model_path}, max_response_tokens: 4}}\n"
        "buffer: {explorer_input: {eval_tasksets: [{name: held, path: held.jsonl}]}}\n"
        "explorer: {max_retry_times: 0}\n"
        "tuner: {workflow: main.py:workflow, judge: main.py:judge}\n"
    )
    return tmp_path


def test_the_command_takes_the_file_of_a_run(project, said):
    status, output, errors = said("eval", project / "config.yaml", "-k", "2")
    assert not status, errors
    assert "held: 2 tasks, 2 rollouts each, temperature 1" in output
    for row in ("reward", "pass@1", "pass@2", "pass^2", "without a reward", "tokens per rollout"):
        assert row in output


def test_json_is_all_of_the_output_and_failures_alone_are_status_1(project, said):
    status, output, errors = said(
        "eval",
        project / "config.yaml",
        "--json",
        f"buffer.explorer_input.eval_tasksets.0.path={project / 'fails.jsonl'}",
    )
    assert status == 1
    (scores,) = json.loads(output)["candidates"]
    assert scores["sets"]["held"]["failed"] == {"workflow_error": 1}
    assert scores["sets"]["held"]["reward"] is None
    assert "LookupError: no such tool" in errors


def test_a_script_that_evaluates_when_it_is_imported_is_told_to_guard(project, said):
    with (project / "main.py").open("a") as file:
        file.write("\nimport tuner\ntuner.evaluate(workflow, judge, [{'question': 'one'}])\n")
    status, _, errors = said("eval", project / "config.yaml")
    assert status == 2
    assert "calls evaluate() when it is imported for its functions: put the call under" in errors


@pytest.mark.parametrize(
    ("tasks", "repeat", "title"),
    [(40, 1, "test: 40 tasks, one rollout each, "), (1, 4, "test: 1 task, 4 rollouts each, ")],
)
def test_the_title_says_how_many_rollouts_of_each_task(tasks, repeat, title):
    asked = EvaluationSet(tasks=tasks, repeat=repeat, temperature=0.0)
    scores = CandidateScores(
        name="m",
        path="m",
        sets={"test": scores_of([trace(0, 0, (), reward=0.5)], 1.0, 1.0)},
    )
    found = Evaluation(pass_reward=1, sets={"test": asked}, candidates=[scores], differences=[])
    assert " ".join(str(found).split()).startswith(title)
