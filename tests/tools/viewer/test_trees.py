"""Rollouts that begin inside others: what their points were worth, and what a page gets of them."""

import dataclasses
import json

import pytest

from tests.kit.builders import call, trace
from tests.tools.viewer.stored import read_data, store_run
from tuner.errors import TunerError
from tuner.tasks.functions import JudgeOutput
from tuner.tools.judging import replay
from tuner.tools.viewer import RunReader, write_report
from tuner.tools.viewer.index import Tally, row, tallies, tool_uses
from tuner.tools.viewer.queries import TraceQuery, count, find, summary, tree
from tuner.traces import Origin, Outcome, RolloutId
from tuner.traces.store import trace_to_json
from tuner.training.forks import Point, Value, point_values


def answers(rollout, *, given=(), calls=3):
    """Calls of one conversation with three tokens each, of which some were given back."""
    made, prompt = [], (1,)
    for number in range(calls):
        back = given[number] if number < len(given) else 0
        own = [100 * rollout + 10 * number + k for k in range(back, 3)]
        made.append(call(f"{rollout}-{number}", prompt, [*range(2, 2 + back), *own], [-0.5] * 3))
        made[-1] = dataclasses.replace(made[-1], replayed=back)
        prompt = (*prompt, *made[-1].completion_ids, 1)
    return made


def end(number, reward, within=None, at=0, token=0, *, task=0, outcome=Outcome.COMPLETED, **left):
    """A rollout, that begins inside another one or at the beginning."""
    if within is None:
        return trace(task, number, answers(number), reward=reward, outcome=outcome)
    origin = Origin(RolloutId(1, task, within), 1, at, token, **left)
    given = [3] * at + [token]
    calls = answers(number, given=given)
    return trace(
        task, number, calls, reward=reward, origin=origin, outcome=outcome, response="said"
    )


# 0 ---x----y-- 1      x is before call 2, y inside it
#      |    3 - 0      4 begins in 3 before that begins itself: inside 0
#      1 -z--- 0
#      4  2 -- 1       z is in 1; 5 failed, 6 is another tree
TREE = [
    end(0, 1.0),
    end(1, 0.0, 0, 1),
    end(2, 1.0, 1, 2),
    end(3, 0.0, 0, 1, 2),
    end(4, 0.2, 3, 1),
    end(5, None, 0, 1, outcome=Outcome.TIMEOUT),
    end(6, 0.25),
]


@pytest.fixture
def reader(tmp_path):
    reader = RunReader(store_run(tmp_path, [*TREE, end(0, 1.0, task=1)]))
    reader.traces.refresh()
    return reader


def test_a_point_is_worth_the_mean_of_its_children_which_are_means_themselves():
    rewards = {"a": 1.0, "b": 0.0, "c": 0.0, "d": 0.0}
    origins = {"b": Point("a", 1), "c": Point("a", 2, 5)}
    values = {Point("a", 1): Value(0.25, 3), Point("a", 2, 5): Value(0.5, 2)}
    assert point_values(rewards, origins) == values
    assert point_values({"d": 1.0}, origins) == {}


def test_a_tree_has_its_ends_and_what_its_points_were_worth(reader):
    found = tree(reader.traces, RolloutId(1, 0, 2))
    assert found["trunk"] == 0
    begun = {e["rollout"]: (e["within"], e["at_call"], e["at_token"]) for e in found["ends"]}
    assert begun == {
        **{0: (None, 0, 0), 1: (0, 1, 0), 2: (1, 2, 0), 3: (0, 1, 2)},
        **{4: (0, 1, 0), 5: (0, 1, 0)},
    }
    # Of x: what goes on to y (1/2) and to z (1/2), and 4 (0.2).
    assert found["forks"] == [
        {"rollout": 0, "call": 1, "token": 0, "mean": pytest.approx(0.4), "ends": 5},
        {"rollout": 0, "call": 1, "token": 2, "mean": 0.5, "ends": 2},
        {"rollout": 1, "call": 2, "token": 0, "mean": 0.5, "ends": 2},
    ]
    assert tree(reader.traces, RolloutId(1, 0, 0)) == found


def test_rollouts_that_share_no_beginning_and_retried_attempts_have_no_tree(tmp_path, reader):
    assert tree(reader.traces, RolloutId(1, 0, 6)) is None
    assert tree(reader.traces, RolloutId(1, 1, 0)) is None
    replaced = dataclasses.replace(end(1, None, 0, 1), final=False)
    again = dataclasses.replace(end(1, 0.0, 0, 1), attempt=2)
    reader = RunReader(store_run(tmp_path / "retried", [end(0, 1.0), replaced, again]))
    reader.traces.refresh()
    first, second, third = (reader.trace(r.file, r.offset)["tree"] for r in reader.traces.rows())
    assert second is None
    assert first == third
    assert [one["attempt"] for one in first["ends"]] == [1, 2]


def test_a_fork_of_which_no_end_has_a_reward_has_no_value(tmp_path):
    failed = [end(n, None, *at, outcome=Outcome.TIMEOUT) for n, at in ((0, ()), (1, (0, 1)))]
    reader = RunReader(store_run(tmp_path, failed))
    reader.traces.refresh()
    (fork,) = tree(reader.traces, RolloutId(1, 0, 0))["forks"]
    assert (fork["mean"], fork["ends"]) == (None, 0)


def test_another_judge_gives_points_another_value(tmp_path):
    run = store_run(
        tmp_path, [dataclasses.replace(one, response="x" * one.id.rollout) for one in TREE]
    )

    def judge(task, response):
        return JudgeOutput(reward=float(len(response.content)))

    judged = [json.loads(line) for line in replay(run, judge, name="j").path.open()]
    rewards = {line["id"]["rollout"]: line["reward"] for line in judged}
    origins = {
        one.id.rollout: Point(one.origin.rollout.rollout, *one.origin.position)
        for one in TREE
        if one.origin is not None
    }
    assert point_values(rewards, origins)[Point(0, 1)] == Value(
        pytest.approx((1.5 + 1.5 + 4) / 3), 5
    )


def test_what_left_its_script_begins_where_it_left(tmp_path):
    left = end(1, 1.0, 0, 2, diverged="at call 1: another message", left_at=1)
    found = row("step_000001.jsonl", 0, 1, json.loads(json.dumps(trace_to_json(left))))
    assert (found.within, found.at_call, found.at_token) == (0, 1, 0)
    assert found.diverged == "at call 1: another message"
    assert row("s", 0, 1, trace_to_json(end(0, 1.0))).within is None


def test_rollouts_are_found_by_where_they_begin(tmp_path, reader):
    chosen = {name: find(reader.traces, TraceQuery(begins=name)) for name in ("start", "inside")}
    assert chosen == {"start": [1, 7, 8], "inside": [2, 3, 4, 5, 6]}
    assert count(reader.traces, TraceQuery(begins="diverged")) == 0
    assert summary(reader.traces)["trees"] is True
    with pytest.raises(TunerError, match="must be one of start, inside, diverged"):
        find(reader.traces, TraceQuery(begins="nowhere"))
    flat = RunReader(store_run(tmp_path / "flat", [end(0, 1.0)]))
    flat.traces.refresh()
    assert summary(flat.traces)["trees"] is False


def test_what_was_given_back_counts_once_where_it_was_sampled():
    def uses(id_):
        function = {"id": id_, "type": "function", "function": {"name": "add", "arguments": "{}"}}
        return {"role": "assistant", "content": "", "tool_calls": [function]}

    branch = end(1, 1.0, 0, 1, 2)
    calls = [dataclasses.replace(c, response=uses(c.id), role="solver") for c in branch.calls]
    stored = trace_to_json(dataclasses.replace(branch, calls=tuple(calls)))
    assert row("s", 0, 1, stored).tokens == branch.sampled_tokens == 1 + 3
    assert len(list(tool_uses(stored))) == 2
    found = tallies(stored)
    assert found["role", "solver"] == Tally(2, 0, 4, 0.5, 2, 2.0, 2)
    assert found["outcome", "completed"].tokens == 4


def test_branches_of_a_conversation_that_were_given_back_count_where_they_were_sampled(tmp_path):
    def forgetful(one):
        fresh = [dataclasses.replace(c, prompt_ids=(50 + n,)) for n, c in enumerate(one.calls)]
        return dataclasses.replace(one, calls=tuple(fresh))

    reader = RunReader(store_run(tmp_path, [forgetful(end(0, 1.0)), forgetful(end(1, 1.0, 0, 2))]))
    reader.traces.refresh()
    reader.traces.count_branches()
    assert sum(summary(reader.traces)["branches"]["counts"].values()) == 2 + 1


def test_a_report_holds_each_tree_once(tmp_path):
    run = store_run(tmp_path, TREE)
    data = read_data(write_report(run).read_text(encoding="utf-8"))
    named = {key: body["tree"] for key, body in data["bodies"].items()}
    assert sorted(map(str, named.values())) == ["None", *["train-1-0-0"] * 6]
    assert len(data["trees"]["train-1-0-0"]["ends"]) == 6
