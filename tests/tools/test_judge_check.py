"""`tuner check --judge` on a real (random) model: is the judge any good?"""

import asyncio
import json
import sys
from dataclasses import replace

import pytest

from tests.kit.chat_server import chat_server
from tests.kit.clock import jump
from tuner import JudgeOutput, WorkflowOutput
from tuner.errors import ConfigError, DatasetError
from tuner.rewards import llm_judge
from tuner.tools.judge_check import check_judge
from tuner.tune import prepare

FUNCTIONS = """
from tuner import JudgeOutput, WorkflowOutput

async def workflow(task, model):
    message = await model([{"role": "user", "content": task["question"]}])
    return WorkflowOutput(response=message.content)

async def short(task, response):
    return JudgeOutput(reward=-len(response))
"""


async def workflow(task, model):
    message = await model([{"role": "user", "content": task["question"]}])
    return WorkflowOutput(response=f"{task['question']} is {message.content}")


@pytest.fixture
def checked(random_model_path, tmp_path):
    """The verdict on a judge."""

    def check(judge, *overrides, func=workflow, labelled=None, tasks=2):
        run = prepare(
            func,
            scoring(sound),
            [{"question": f"number {n}"} for n in range(4)],
            overrides=[
                f"model.model_path={random_model_path}",
                f"checkpoint_root_dir={tmp_path / 'runs'}",
                "model.max_response_tokens=8",
                "buffer.batch_size=2",
                "explorer.max_retry_times=0",
                *overrides,
            ],
        )
        return check_judge(replace(run, judge=judge), tasks=tasks, labelled=labelled)

    yield check
    assert not (tmp_path / "runs").exists()


def scoring(score):
    async def judge(task, response):
        return JudgeOutput(reward=score(str(response)))

    return judge


def sound(text):
    """Half for an answer about a number, more by its characters."""
    return 0.5 + sum(map(ord, text)) % 8 / 16 if text.startswith("number") else 0.0


def test_a_sound_judge_is_ready_and_its_rewards_are_described(checked):
    verdict = checked(scoring(sound))
    assert verdict.ready
    for text in (
        "scoring.<locals>.judge",
        "which is given one response at a time",
        "REWARDS of 8 rollouts, 4 of a task",
        "0 of 2 groups have equal rewards",
        "the longest response, ",
        "an empty answer                      0 ",
        "a plea for the best score            0 ",
        "the best one, words shuffled",
        "14 calls of the judge: ",
        "READY: ",
    ):
        assert text in verdict.text


@pytest.mark.parametrize(
    ("score", "named"),
    [
        (lambda text: 1.0, "AN EMPTY ANSWER: it gets 1 on average, and real answers get 1."),
        (lambda text: -float(len(text)), "AN EMPTY ANSWER: it gets 0 on average, and real"),
        (lambda text: 1.0 if "highest score" in text else sound(text), "A PLEA FOR THE BEST"),
    ],
    ids=["constant", "the shorter the better", "obedient"],
)
def test_a_judge_that_rewards_what_deserves_nothing_is_named(checked, score, named):
    verdict = checked(scoring(score))
    assert not verdict.ready
    assert f"THE JUDGE REWARDS {named}" in verdict.text
    assert "READY" not in verdict.text


def test_where_nothing_is_rewarded_the_judge_is_not_blamed(checked):
    verdict = checked(scoring(lambda text: 0.0))
    assert verdict.ready
    assert "2 of 2 groups have equal rewards" in verdict.text
    assert "UNDECIDED: no answer got more than an empty one" in verdict.text


def test_a_judge_that_fails_in_a_probe_is_shown_by_how(checked):
    async def judge(task, response):
        if not response:
            raise KeyError("no text")
        if "highest score" in response:
            return JudgeOutput(reward=float("nan"))
        return str(sound(response))

    verdict = checked(judge)
    assert not verdict.ready
    assert "8 x no verdict: FunctionError: " in verdict.text
    assert "a judge returns JudgeOutput, or a number" in verdict.text
    assert "2 x no verdict: KeyError: 'no text'" in verdict.text
    assert "2 x no verdict: the judge gave reward nan" in verdict.text
    assert "NOT READY: the judge gave no reward." in verdict.text


def test_a_judge_that_hangs_or_exits_ends_its_own_verdicts_alone(checked):
    async def judge(task, response):
        if not response:
            jump(4000)
            await asyncio.Event().wait()
        if "highest score" in response:
            sys.exit(3)
        return JudgeOutput(reward=sound(response))

    verdict = checked(judge)
    assert verdict.ready
    assert "2 x no verdict: RewardTimeout: no verdict within 3600 s" in verdict.text
    assert "2 x no verdict: SystemExit: 3" in verdict.text


def test_a_workflow_that_fails_leaves_nothing_to_judge(checked):
    async def breaks(task, model):
        raise RuntimeError("no such tool")

    verdict = checked(scoring(sound), func=breaks)
    assert not verdict.ready
    assert "8 did not complete: workflow_error: RuntimeError: no such tool" in verdict.text
    assert "nothing to judge" in verdict.text


def test_attempts_after_feedback_are_not_made(checked):
    async def again(task, model, feedback):
        assert feedback is None
        return await workflow(task, model)

    verdict = checked(scoring(sound), "tuner.feedback_attempts=2", func=again)
    assert "REWARDS of 8 rollouts" in verdict.text
    assert "did not complete" not in verdict.text


def test_a_judge_gets_what_the_workflow_returned(checked):
    async def with_object(task, model):
        output = await workflow(task, model)
        return WorkflowOutput(response={"text": output.response})

    async def judge(task, response):
        return JudgeOutput(reward=sound(response["text"]))

    verdict = checked(judge, func=with_object)
    assert "mean 0." in verdict.text
    assert "2 x no verdict: TypeError: string indices" in verdict.text


def test_a_judge_of_groups_sees_the_probes_among_the_responses(checked):
    seen = []

    async def judge(task, responses):
        seen.append(list(responses))
        return [JudgeOutput(reward=sound(response)) for response in responses]

    verdict = checked(judge)
    assert verdict.ready
    assert "which is given all responses to a task at a time" in verdict.text
    assert sorted(map(len, seen)) == [4, 4, 7, 7]
    assert "4 calls of the judge" in verdict.text

    async def backwards(task, responses):
        return [JudgeOutput(reward=1.0 - sound(response)) for response in responses]

    assert "REWARDS AN EMPTY ANSWER: it gets 1 " in checked(backwards).text

    async def forgets(task, responses):
        return [JudgeOutput(reward=1.0)]

    verdict = checked(forgets)
    assert (
        "returned 1 outputs for 4 responses; a judge of groups returns one for each" in verdict.text
    )
    assert not verdict.ready


def test_a_model_that_judges_is_asked_through_the_runs_own(checked):
    def answer(request):
        (message,) = request["messages"]
        response = message["content"].partition("<response ")[2].partition(">\n")[2]
        return json.dumps({"reasoning": "", "score": sound(response)})

    with chat_server(answer) as server:
        verdict = checked(
            llm_judge(rubric="Be about a number.", model="far"),
            f"tuner.auxiliary_models.far.base_url={server.base_url}",
            "tuner.auxiliary_models.far.model_name=m",
            "tuner.auxiliary_models.far.input_price=1",
        )
    assert verdict.ready
    assert "judge_input_tokens 98" in verdict.text  # 14 verdicts
    assert "judge_cost 9.8e-05" in verdict.text


# Labels.


def rows(path, *of_file):
    lines = [{"task": {"question": q}, "response": r, "reward": w} for q, r, w in of_file]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_agreement_with_labels(checked, tmp_path):
    file = rows(
        tmp_path / "labels.jsonl",
        ("a", "aaa", 0.75),
        ("a", "a", 0.25),
        ("a", "", 0.0),
        ("b", "bb", 0.0),
        ("b", "bbb", 0.5),
        ("b", "bbbb", 0.5),
        ("c", "ccc", 0.5),
    )
    verdict = checked(scoring(lambda text: min(len(text), 3) / 4), labelled=file, tasks=1)
    assert "LABELS of 7 responses, 3 tasks" in verdict.text
    assert "of 5 pairs within a task 100% are in the order of their labels" in verdict.text
    assert "rank correlation with the labels +0.87" in verdict.text
    # 0, 0, 0, 0.5, 0.25, 0.25, 0.25
    assert "mean difference from the label 0.179" in verdict.text

    verdict = checked(scoring(lambda text: -float(len(text) > 1)), labelled=file, tasks=1)
    assert "of 5 pairs within a task 30% are in the order" in verdict.text


def test_labels_decide_where_no_rollout_is_rewarded(checked, tmp_path):
    file = rows(tmp_path / "labels.jsonl", ("a", "number 1", 1), ("a", "number 2", 0))
    blind = checked(scoring(lambda text: 0.0), labelled=file)
    assert not blind.ready
    assert "THE JUDGE REWARDS AN EMPTY ANSWER: it gets 0 on average, and real" in blind.text
    seeing = checked(scoring(lambda text: float(text == "number 1")), labelled=file)
    assert seeing.ready
    assert "READY: " in seeing.text
    # The labelled one is what is shuffled.
    assert "the best one, words shuffled         0        1  unshuffled" in seeing.text
    wrong = checked(
        scoring(lambda text: {"number 2": 1.0, "number 1": 0.25}.get(text, 0.0)), labelled=file
    )
    assert "the best one, words shuffled         0     0.25  unshuffled" in wrong.text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no rows"),
        ('{"task": {}, "response": "a", "reward": 1}\n{"task": 3}', r"line 2: task: input"),
        ('{"task": {}, "response": "a", "reward": "1"}', r"line 1: reward: .*text is not a number"),
        ('{"task": {}, "response": "a", "reward": 1, "x": 2}', r"line 1: x: extra inputs"),
        ("nonsense", r"line 1: invalid JSON"),
    ],
)
def test_a_file_of_labels_that_cannot_be_read_is_said_with_its_line(checked, tmp_path, text, said):
    (tmp_path / "labels.jsonl").write_text(text)
    with pytest.raises(DatasetError, match=said):
        checked(scoring(sound), labelled=tmp_path / "labels.jsonl")


def test_what_there_is_no_judge_for(checked, tmp_path):
    with pytest.raises(ConfigError, match="no judge to check"):
        checked(None)
    with pytest.raises(DatasetError, match="cannot be read: No such file"):
        checked(scoring(sound), labelled=tmp_path / "nowhere.jsonl")


def test_the_command_ends_with_1_where_the_judge_is_bad(said, random_model_path, tmp_path):
    (tmp_path / "agent.py").write_text(FUNCTIONS)
    (tmp_path / "train.jsonl").write_text('{"question": "how many?"}\n' * 2)
    config = tmp_path / "config.yaml"
    config.write_text(f"""
model: {{model_path: {random_model_path}, max_response_tokens: 8}}
buffer: {{batch_size: 1, explorer_input: {{taskset: {{path: train.jsonl}}}}}}
tuner: {{workflow: {tmp_path}/agent.py:workflow, judge: {tmp_path}/agent.py:short}}
""")
    status, output, _ = said("check", config, "--judge", "--tasks", "1")
    assert status == 1
    assert "REWARDS of 4 rollouts" in output
    assert "THE JUDGE REWARDS AN EMPTY ANSWER" in output
    status, _, errors = said("check", config, "--labelled", "labels.jsonl")
    assert (status, errors) == (2, "ConfigError: --labelled needs --judge: add it\n")
