"""Stored traces are scored by another judge, with no model and no PyTorch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.builders import call, trace
from tests.tools.viewer.stored import store_run
from tuner.errors import FunctionError, TunerError
from tuner.tasks.functions import JudgeOutput, StoredResponse
from tuner.tools.judging import parse_steps, replay
from tuner.traces import Outcome


def answered(task, rollout, response, reward, **fields):
    calls = [call("c", [1], [2], [-1.0])]
    return trace(task, rollout, calls, response=response, reward=reward, **fields)


@pytest.fixture
def run(tmp_path):
    return store_run(
        tmp_path,
        [
            answered(0, 0, "yes", 1.0),
            answered(0, 1, "no", 1.0),
            answered(0, 2, "yes", None, outcome=Outcome.JUDGE_ERROR, error="KeyError: 'x'"),
            answered(0, 3, "", None, outcome=Outcome.TIMEOUT),
            answered(0, 4, "no", 1.0, final=False),
            answered(1, 0, "fail", 0.0, step=2),
            answered(1, 1, "nan", 0.0, step=2),
            answered(1, 2, "no", 0.0, step=2),
        ],
    )


async def strict(task, response, auxiliary_models):
    """Judges `yes`; written for messages."""
    assert auxiliary_models == {}
    text = response.get_text_content()
    if text == "fail":
        raise LookupError("no  such\nanswer")
    if text == "nan":
        return JudgeOutput(reward=float("nan"))
    return JudgeOutput(reward=float(text == "yes"), metrics={"letters": len(text)})


def scores(result):
    return [json.loads(line) for line in result.path.read_text().splitlines()]


def test_each_response_is_scored_and_each_failure_kept_apart(run):
    result = replay(run, strict, name="my judge/strict")
    assert [scores.changed for scores in result.steps.values()] == [1, 0]
    assert result.steps[1].unscored == {"timeout": 1}
    assert result.path == run / "replay_my.judge.strict.jsonl"
    lines = scores(result)
    assert [line["reward"] for line in lines] == [1.0, 0.0, 1.0, None, None, 0.0]
    assert lines[1] == {
        "id": {"step": 1, "task": 0, "rollout": 1, "split": "train"},
        "attempt": 1,
        "old_reward": 1.0,
        "reward": 0.0,
        "metrics": {"letters": 2},
        "error": None,
    }
    assert lines[3]["error"] == "LookupError: no such answer"
    assert "finite" in lines[4]["error"]


def test_the_table_has_means_changes_and_errors_by_type(run):
    text = str(replay(run, strict, name="strict"))
    rows = [line.split() for line in text.splitlines()]
    assert rows[1] == ["1", "3", "1.0000", "0.6667", "1", "0"]
    assert rows[2] == ["2", "3", "0.0000", "0.0000", "0", "2"]
    assert rows[3] == ["all", "6", "0.4000", "0.5000", "1", "2"]
    assert "1 x LookupError, for instance: LookupError: no such answer" in text
    assert "1 x invalid reward" in text
    assert "not scored, because there is no response to judge: 1 timeout" in text


def test_a_judge_for_text_works_too(run):
    def contains(task, response):
        return JudgeOutput(reward=float("es" in response) if isinstance(response, str) else -1)

    found = scores(replay(run, contains, name="contains"))
    assert [score["reward"] for score in found] == [1, 0, 1, 0, 0, 0]


def test_a_judge_of_groups_gets_the_responses_of_a_task(run):
    seen = []

    def longest(task, responses):
        seen.append([str(response) for response in responses])
        return [JudgeOutput(reward=float(len(response) == 3)) for response in responses]

    found = scores(replay(run, longest, name="longest"))
    assert seen == [["yes", "no", "yes"], ["fail", "nan", "no"]]
    assert [score["reward"] for score in found] == [1, 0, 1, 0, 1, 0]


def test_steps_and_split_choose(run):
    assert list(replay(run, strict, name="j", steps=(2, 9)).steps) == [2]
    with pytest.raises(TunerError, match=r"no traces of split 'test'.*splits: train"):
        replay(run, strict, name="j", split="test")
    with pytest.raises(TunerError, match="steps of train: 1-2"):
        replay(run, strict, name="j", steps=(3, 4))


def test_a_judge_that_needs_a_model_is_told_that_none_runs(run):
    async def judge(task, response, auxiliary_models):
        return await auxiliary_models["grader"](response)

    with pytest.raises(FunctionError, match=r"'grader', but tuner replay loads no model"):
        replay(run, judge, name="j")
    assert not [path for path in run.iterdir() if "replay" in path.name]


def test_a_judge_that_returns_something_else_is_refused(run):
    with pytest.raises(FunctionError, match=r"returned 'yes' .* a judge returns JudgeOutput"):
        replay(run, lambda task, response: "yes", name="j")


def test_what_a_stored_response_has_not_is_named():
    assert StoredResponse("a").content == "a"
    with pytest.raises(AttributeError, match=r"reads response\.metadata, but a trace stores"):
        _ = StoredResponse("a").metadata


def test_steps_are_written_as_a_range():
    assert parse_steps(None) is None
    assert parse_steps("4") == (4, 4)
    assert parse_steps("3-7") == (3, 7)
    for wrong in ("7-3", "a", "3-", "-3"):
        with pytest.raises(TunerError, match="first-last"):
            parse_steps(wrong)


def test_the_command_scores_without_importing_pytorch(run, tmp_path):
    (tmp_path / "judges.py").write_text(
        "from tuner import JudgeOutput\n"
        "def longest(task, response):\n"
        "    return JudgeOutput(reward=len(response))\n"
    )
    script = (
        "import sys; from tuner import cli; cli.app(sys.argv[1:], standalone_mode=False);"
        "heavy = {'torch', 'transformers', 'vllm'} & set(sys.modules); assert not heavy, heavy"
    )
    arguments = ["replay", str(run), "--judge", f"{tmp_path}/judges.py:longest", "--steps", "1"]
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    assert "2.6667" in done.stdout
    assert (run / "replay_judges.longest.jsonl").exists()
