"""`tuner compare` on run directories made by hand."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.tools.viewer.stored import small, store_run
from tuner.errors import ProofError, TunerError
from tuner.runs.statistics import Plan
from tuner.tools.compare import compare, prove, sparkline
from tuner.traces import Outcome, RolloutId


def evaluated(step, rewards, name="held"):
    """Rollouts of an evaluation: for each task its rewards, None for one that failed."""
    return [
        replace(
            small(task, n, reward),
            id=RolloutId(step, task, n, name),
            outcome=Outcome.COMPLETED if reward is not None else Outcome.TIMEOUT,
        )
        for task, of_task in enumerate(rewards)
        for n, reward in enumerate(of_task)
    ]


def curve(metric, values):
    return [{"step": step, metric: value} for step, value in enumerate(values)]


@pytest.fixture
def runs(tmp_path):
    """Two runs whose last evaluations differ in tasks 0 and 2; `b` has a task more."""
    a = store_run(
        tmp_path / "a",
        [*evaluated(0, [[1.0]] * 3), *evaluated(4, [[0.0, 1.0], [0.5], [1.0]]), small(0, 0, 1.0)],
        metrics=curve("reward/mean", [0.0, 0.5, 1.0]),
    )
    b = store_run(
        tmp_path / "b",
        [*evaluated(2, [[1.0], [0.5], [0.25], [0.0]]), small(0, 0, 0.0)],
        metrics=curve("reward/mean", [1.0, 0.0, 0.0, 0.0]),
    )
    for run, lr in ((a, 0.1), (b, 0.2)):
        (run / "config.yaml").write_text(
            f"name: {run.name}\nalgorithm: {{optimizer: {{lr: {lr}}}, repeat_times: 4}}\n"
            "buffer: {explorer_input: {eval_tasksets: [{name: held}]}}\n"
        )
    (a / "data.json").write_text('{"train": "0123456789", "held": "abc"}')
    (b / "data.json").write_text('{"train": "9876543210", "held": "abc"}')
    return a, b


def test_settings_that_differ_and_rows_that_do(runs):
    assert compare(runs).settings == {
        "algorithm.optimizer.lr": [0.1, 0.2],
        "rows of train": ["01234567", "98765432"],
    }


def test_the_same_tasks_after_each_runs_last_evaluation(runs):
    found = compare(runs)
    assert list(found.tasks) == ["held"]
    held = found.tasks["held"]
    assert held.steps == [4, 2]
    assert [(row.task["question"], row.rewards) for row in held.common] == [
        ("task 2", [1.0, 0.25]),
        ("task 0", [0.5, 1.0]),
        ("task 1", [0.5, 0.5]),
    ]
    assert held.others == [0, 1]
    assert held.differences[1].mean == pytest.approx((0.5 + 0.0 - 0.75) / 3)
    assert held.differences[1].tasks == 3


def test_a_task_that_only_failed_has_no_reward_and_is_in_no_difference(tmp_path):
    one = store_run(tmp_path / "one", evaluated(0, [[None, None], [1.0]]))
    other = store_run(tmp_path / "other", evaluated(0, [[1.0], [0.5]]))
    held = compare([one, other]).tasks["held"]
    assert [row.rewards for row in held.common] == [[1.0, 0.5], [None, 1.0]]
    assert (held.differences[1].mean, held.differences[1].tasks) == (-0.5, 1)
    assert "no reward" in compare([one, other]).text(10)


def test_training_tasks_are_those_of_the_last_step_that_had_them(tmp_path):
    early = [small(0, 0, 0.0), small(1, 0, 0.25)]
    late = [replace(trace, id=replace(trace.id, step=2)) for trace in (small(0, 0, 1.0),)]
    one = store_run(tmp_path / "one", [*early, *late])
    other = store_run(tmp_path / "other", early)
    found = compare([one, other]).tasks["train"]
    assert sorted(row.rewards for row in found.common) == [[0.25, 0.25], [1.0, 0.0]]


def test_curves_are_on_one_scale_and_one_axis():
    assert sparkline([(0, 0.0), (1, 0.5), (2, 1.0)], (0, 3), (0.0, 1.0)) == "▁▅█ "
    assert sparkline([(0, 2.0), (3, 2.0)], (0, 3), (2.0, 2.0)) == "▁  ▁"
    long = [(step, float(step)) for step in range(400)]
    assert len(sparkline(long, (0, 399), (0.0, 399.0))) == 40


def test_the_command_prints_tables_or_json(runs, said):
    status, output, _ = said("compare", *runs, "--tasks", "1")
    assert not status
    for text in (
        "algorithm.optimizer.lr",
        "▁▅█",
        "held: 3 tasks in every run, after step 4, 2",
        "... 2 more that differ less",
        "b against a: 1 better, 1 worse, 1 the same; reward -0.083",
        "b: 1 more that are not in every run",
    ):
        assert text in output, output
    assert "task 0" not in output
    _, output, _ = said("compare", *runs, "--json")
    assert json.loads(output)["curves"]["reward/mean"][0] == [[0, 0.0], [1, 0.5], [2, 1.0]]


@pytest.mark.parametrize(
    ("given", "split", "message"),
    [
        (lambda a, b: [a], None, "name two or more runs, each once"),
        (lambda a, b: [a, a], None, "name two or more runs, each once"),
        (lambda a, b: [a, b, a], None, "name two or more runs, each once"),
        (lambda a, b: [a, Path("no/such")], None, "no/such is not a run"),
        (lambda a, b: [a, b], "other", r"has no traces of split 'other' \(splits: train, held\)"),
    ],
)
def test_what_cannot_be_compared_is_said(runs, given, split, message):
    with pytest.raises(TunerError, match=message):
        compare(given(*runs), split=split)


@pytest.fixture
def evaluations(tmp_path):
    """Two evaluations of 120 tasks: a quarter became better, and one failed."""
    old = [[float(task % 2)] for task in range(120)]
    new = [[1.0] if task % 4 == 0 else reward for task, reward in enumerate(old)]
    return (
        store_run(tmp_path / "old", evaluated(1, old)),
        store_run(tmp_path / "new", evaluated(2, [*new[:-1], [None]])),
    )


def test_a_proof_is_of_pairs_and_leaves_out_what_has_no_reward(evaluations):
    found = prove(evaluations, Plan(effect=0.2))
    assert (found.runs, found.split, found.steps) == (("old", "new"), "held", (1, 2))
    assert (found.without_reward, found.decision.sessions) == (1, 119)
    assert found.decision.verdict == "promote"
    assert found.decision.estimate == pytest.approx(30 / 119)
    assert prove(evaluations[::-1], Plan(effect=0.2)).decision.verdict == "keep"


def test_the_order_of_pairs_has_nothing_to_do_with_rewards(evaluations, tmp_path):
    """`compare` has the tasks first that differ most; bets on such an order would win anything."""
    old = [[0.5]] * 60
    mixed = [[0.5 + (0.4 if task < 30 else -0.4)] for task in range(60)]
    pair = [
        store_run(tmp_path / "a", evaluated(1, old)),
        store_run(tmp_path / "b", evaluated(1, mixed)),
    ]
    decision = prove(pair, Plan(effect=0.2)).decision
    assert decision.estimate == pytest.approx(0)
    assert decision.verdict != "promote"


def test_the_command_proves_or_says_why_not(evaluations, runs, said):
    status, output, _ = said("compare", *evaluations, "--proof", "--effect", "0.2")
    assert not status
    assert output.startswith("new (step 2) against old (step 1) on held\n1 tasks skipped")
    assert "promote: the candidate is better by more than 0." in output
    _, output, _ = said("compare", *evaluations, "--proof", "--effect", "0.2", "--json")
    assert json.loads(output)["decision"]["verdict"] == "promote"
    status, _, error = said("compare", evaluations[0], "--proof", "--effect", "0.2")
    assert status == 2
    assert "1 runs given: a proof needs two" in error
    status, _, error = said(
        "compare", *evaluations, "--proof", "--effect", "0.2", "--rewards", "0.5", "1"
    )
    assert "reward 0.0 of the" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--proof",), "--proof needs --effect"),
        (("--effect", "0.1"), "--effect needs --proof"),
        (("--proof", "--effect", "2"), "effect 2.0 and margin 0.0"),
    ],
)
def test_what_cannot_be_proven_is_said(evaluations, said, arguments, message):
    status, _, error = said("compare", *evaluations, *arguments)
    assert status == 2
    assert message in error, error


def test_a_decision_is_of_one_evaluation_set(tmp_path):
    both = [
        store_run(
            tmp_path / name, [*evaluated(1, [[1.0]], "held"), *evaluated(1, [[1.0]], "other")]
        )
        for name in "ab"
    ]
    with pytest.raises(ProofError, match=r"have (held, other|other, held) in common"):
        prove(both, Plan(effect=0.2))
    assert prove(both, Plan(effect=0.2), split="other").decision.sessions == 1


def test_tasks_that_begin_alike_are_named_by_what_differs(tmp_path):
    begins = "State the final answer to the following arithmetic problem, and nothing else:"
    made = [
        store_run(
            tmp_path / name,
            [
                replace(one, task={"question": f"{begins} {10 + one.id.task} + 30 = ?"})
                for one in evaluated(1, [[reward], [1.0]])
            ],
        )
        for name, reward in (("a", 0.0), ("b", 1.0))
    ]
    text = compare(made).text(9)
    assert "State the final … 10 + 30 = ? │ 0.000 │ 1.000" in text
    assert "State the final … 11 + 30 = ? │ 1.000 │ 1.000" in text


def test_the_seconds_of_a_step_are_not_those_of_the_evaluation_before_it(tmp_path):
    rows = [{"step": 0, "time/evaluation": 90.0}, *curve("time/step", [0.0, 2.0, 4.0])[1:]]
    made = [store_run(tmp_path / name, [], metrics=rows) for name in "ab"]
    assert compare(made).curves["time/step"] == [[(1, 2.0), (2, 4.0)]] * 2
