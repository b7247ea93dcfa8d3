"""Recorded rollouts as data: filters, tasks, what is held out, rows and pairs, and every token."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.builders import call, trace
from tests.tools.viewer.stored import store_run
from tuner.config.schema import HistorySection
from tuner.errors import ConfigError, DatasetError
from tuner.runs.history import examples_of_history, is_held_out, read_history
from tuner.traces import Origin, Outcome, RolloutId, TraceStore


def rollout(task, number, reward=1.0, *, ids=(3, 4), step=1, **fields):
    calls = fields.pop("calls", None) or [call("c", [1, 2], ids, [-0.5] * len(ids))]
    return trace(task, number, calls, reward=reward, step=step, **fields)


def history(tmp_path, *traces, **settings):
    run = store_run(tmp_path / "run", traces)
    return read_history(HistorySection(sources=(str(run),), **settings))


def examples(found, recorded="conversations", longest=100, **settings):
    section = HistorySection(**settings)
    return examples_of_history(found, section, None, recorded=recorded, longest=longest)


def sampled(traces):
    return sum(one.sampled_tokens for one in traces)


# Which rollouts ----------------------------------------------------------------------------------


def test_rollouts_of_a_task_are_one_group_whatever_step_they_are_of(tmp_path):
    traces = [rollout(0, 0), rollout(1, 0), rollout(0, 1), rollout(0, 0, step=3)]
    found = history(tmp_path, *traces)
    first, second = found.groups
    assert [one.id for one in first] == [RolloutId(1, 0, n) for n in range(3)]
    assert [one.task for one in second] == [{"question": "task 1"}]
    assert found.left_out.rollouts == {}


KEPT = rollout(0, 0, 0.5, step=3, started=1000.0)


@pytest.mark.parametrize(
    ("settings", "other", "reason"),
    [
        ({"min_reward": 0.4}, {"reward": 0.3}, "other_reward"),
        ({"max_reward": 0.6}, {"reward": 0.7}, "other_reward"),
        ({"min_reward": 0.4}, {"reward": None, "outcome": Outcome.TIMEOUT}, "no_reward"),
        ({"after": "1970-01-01T00:10:00"}, {"started": 599.0}, "too_early"),
        ({"before": "1001"}, {"started": 1001.0}, "too_late"),
        ({"min_step": 3}, {"id": RolloutId(2, 0, 1)}, "other_step"),
        ({"max_step": 3}, {"id": RolloutId(4, 0, 1)}, "other_step"),
        ({}, {"id": RolloutId(3, 0, 1, "test")}, "other_split"),
        ({}, {"final": False}, "retried_attempt"),
        ({"outcomes": ("completed",)}, {"outcome": Outcome.TIMEOUT}, "other_outcome"),
        ({"metadata": {"question": "task 0"}}, {"task": {"question": "x"}}, "other_metadata"),
    ],
)
def test_a_filter_leaves_out_by_reason_and_counts_the_tokens(tmp_path, settings, other, reason):
    changed = replace(KEPT, **{"id": RolloutId(3, 0, 1), **other})
    found = history(tmp_path, KEPT, changed, **settings)
    assert sampled(found.groups[0]) == 2
    assert found.left_out.rollouts == {reason: 1}
    assert found.left_out.tokens == {reason: 2}


def test_versions_of_weights_are_a_filter(tmp_path):
    late = replace(call("c", [1], [2, 3], [-1.0, -1.0]), versions=(3, 4))
    found = history(tmp_path, KEPT, rollout(0, 1, calls=[late]), max_version=3)
    assert found.left_out.tokens == {"other_version": 2}
    found = history(tmp_path, KEPT, rollout(0, 1, calls=[late]), min_version=3)
    assert found.left_out.tokens == {"other_version": 2}


def test_one_that_begins_inside_another_goes_with_it(tmp_path):
    def inside(number, of):
        return rollout(0, number, origin=Origin(RolloutId(1, 0, of), 1, calls=0))

    traces = [rollout(0, 0, 0.1), inside(1, 0), inside(2, 1), rollout(0, 3), inside(4, 3)]
    found = history(tmp_path, *traces, min_reward=0.5)
    assert found.left_out.rollouts == {"other_reward": 1, "begins_in_one_left_out": 2}
    trunk, branch = found.groups[0]
    assert branch.origin.rollout == trunk.id


def test_what_is_given_twice_counts_once(tmp_path):
    run = store_run(tmp_path / "run", [rollout(0, 0)])
    sources = (str(run), str(run / "traces" / "step_000001.jsonl"), str(run / "traces"))
    found = read_history(HistorySection(sources=sources))
    assert sampled(found.groups[0]) == 2
    assert found.left_out.rollouts == {"given_twice": 2}


def test_runs_with_the_same_ids_are_kept_apart(tmp_path):
    runs = [store_run(tmp_path / name, [rollout(0, 0)]) for name in ("a", "b")]
    found = read_history(HistorySection(sources=tuple(map(str, runs))))
    assert [one.id.rollout for one in found.groups[0]] == [0, 1]
    found = read_history(HistorySection(), [rollout(0, 0), rollout(0, 0)])
    assert [one.id.rollout for one in found.groups[0]] == [0, 1]


def test_a_torn_last_line_is_no_rollout(tmp_path):
    run = store_run(tmp_path / "run", [rollout(0, 0)])
    (run / "traces" / "step_000002.jsonl").write_text('{"id": ')
    assert len(read_history(HistorySection(sources=(str(run),))).groups) == 1


def test_the_held_out_share_is_of_tasks_and_always_the_same(tmp_path):
    traces = [rollout(task, number) for task in range(200) for number in range(2)]
    found = history(tmp_path, *traces, held_out=0.1)
    assert 8 <= len(found.held_out) <= 35
    assert {len(group) for group in found.held_out} == {2}
    assert found.left_out.rollouts["held_out"] == 2 * len(found.held_out)
    names = {group[0].task["question"] for group in found.held_out}
    # Of other tasks beside them, and of a larger share.
    more = history(tmp_path / "more", *traces[40:], held_out=0.3)
    assert names - {f"task {n}" for n in range(20)} <= {
        group[0].task["question"] for group in more.held_out
    }


@given(st.text(), st.floats(0, 0.99))
def test_who_is_held_out_of_a_share_is_held_out_of_a_larger_one(task, share):
    assert not is_held_out(task, 0.0)
    assert not is_held_out(task, share) or is_held_out(task, min(1.0, share + 0.01))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"sources": ("nowhere",)}, "nowhere does not exist"),
        ({}, "nothing is recorded in train_dataset"),
    ],
)
def test_without_rollouts_there_is_nothing_to_learn_from(settings, text):
    with pytest.raises(DatasetError, match=text):
        read_history(HistorySection(**settings))


def test_reasons_are_named_where_nothing_is_left(tmp_path):
    with pytest.raises(DatasetError, match=r"nothing is left to learn from.*1 other_reward"):
        history(tmp_path, rollout(0, 0, 0.1), min_reward=1.0)
    with pytest.raises(ConfigError, match="'success', which is not an outcome: use completed"):
        history(tmp_path / "b", rollout(0, 0), outcomes=("success",))
    with pytest.raises(DatasetError, match="train_dataset is the list given as dataset, but"):
        read_history(HistorySection(), [{"question": "x"}])


# Rows and pairs ----------------------------------------------------------------------------------


def ids(example):
    return [[list(turn.completion_ids) for turn in turns] for turns in example]


def accounted(found, traces):
    """Every token that was sampled is in an example, or in a reason. No example has one twice."""
    trained = sum(len(t.completion_ids) for one in found.used for turns in one for t in turns)
    return trained + sum(found.tokens_left_out.values()) == sampled(traces)


def test_the_best_of_each_task_are_imitated_as_they_were_sampled(tmp_path):
    traces = [
        rollout(0, 0, 0.0, ids=(5,)),
        rollout(0, 1, 1.0, ids=(6, 7)),
        rollout(0, 2, 1.0, ids=(8,)),
        rollout(0, 3, None, outcome=Outcome.TIMEOUT),
        rollout(1, 0, 0.25, ids=(9,)),
    ]
    found = history(tmp_path, *traces)
    best = examples(found)
    assert list(map(ids, best.used)) == [[[[6, 7]]], [[[9]]]]
    assert list(best.used[0][0][0].prompt_ids) == [1, 2]
    assert best.left_out == {"not_best_of_task": 2, "timeout": 1}
    assert accounted(best, traces)
    two = examples(found, best=2)
    assert list(map(ids, two.used)) == [[[[6, 7]]], [[[8]]], [[[9]]]]
    assert accounted(two, traces)


def test_masked_excluded_undelivered_and_calls_of_other_roles_are_not_imitated(tmp_path):
    calls = [
        replace(call("a", [1], [2, 3, 4], [-1.0] * 3), masked=((1, 2),), role="writer"),
        replace(call("b", [1], [5], [-1.0]), excluded=True, role="writer"),
        replace(call("c", [1], [6], [-1.0]), undelivered=True, role="writer"),
        replace(call("d", [1], [7], [-1.0]), role="critic"),
        replace(call("e", [1], [8], [-1.0], temperature=0), role="writer"),
    ]
    traces = [rollout(0, 0, calls=calls)]
    found = examples(history(tmp_path, *traces), roles=("writer",))
    assert ids(found.used[0]) == [[[2], [4], [8]]]
    assert list(found.used[0][0][1].prompt_ids) == [1, 2, 3]
    assert found.tokens_left_out == {
        "excluded_call": 1,
        "masked": 1,
        "other_role": 1,
        "undelivered_call": 1,
    }
    assert accounted(found, traces)


def test_pairs_are_of_one_task_and_of_different_rewards(tmp_path):
    traces = [
        *(rollout(0, n, reward, ids=(10 + n,)) for n, reward in enumerate((0.5, 1.0, 0.0, 1.0))),
        rollout(1, 0, 1.0),
        rollout(1, 1, 1.0),
        rollout(2, 0, 1.0),
    ]
    found = history(tmp_path, *traces)
    best = examples(found, "pairs")
    assert list(map(ids, best.used)) == [[[[11]], [[12]]]]
    assert best.left_out == {"not_in_a_pair": 5}
    assert accounted(best, traces)
    every = examples(found, "pairs", pairs="all")
    assert [tuple(one[0][0] for one in ids(pair)) for pair in every.used] == [
        (11, 10), (11, 12), (13, 10), (13, 12), (10, 12),
    ]  # fmt: skip
    wide = examples(found, "pairs", pairs="all", min_gap=0.75)
    assert len(wide.used) == 2
    assert wide.left_out == {"not_in_a_pair": 4}
    assert len(examples(found, "pairs", pairs="all", min_gap=0.5).used) == 5


def test_a_pair_of_rollouts_has_the_turns_of_all_their_calls(tmp_path):
    two = [call("a", [1], [5], [-1.0]), call("b", [1, 5, 2], [6, 7], [-1.0] * 2)]
    traces = [rollout(0, 0, 1.0, calls=two), rollout(0, 1, 0.0, ids=(8,))]
    (pair,) = examples(history(tmp_path, *traces), "pairs").used
    assert ids(pair) == [[[5], [6, 7]], [[8]]]
    assert list(pair[0][1].prompt_ids) == [1, 5, 2]


def test_a_rollout_that_is_too_long_is_left_out_whole(tmp_path):
    traces = [rollout(0, 0, 1.0, ids=(3,) * 9), rollout(0, 1, 0.5)]
    found = examples(history(tmp_path, *traces), longest=10)
    assert ids(found.used[0]) == [[[3, 4]]]
    assert found.left_out == {"too_long": 1}
    assert accounted(found, traces)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 3),
            st.sampled_from([0.0, 0.5, 1.0, None]),
            st.integers(1, 4),
            st.booleans(),
            st.booleans(),
        ),
        min_size=1,
        max_size=12,
    ),
    st.sampled_from(["conversations", "pairs"]),
    st.integers(1, 3),
    st.sampled_from([0.0, 0.4]),
)
def test_every_sampled_token_is_trained_or_has_a_reason(made, recorded, best, held_out):
    traces = []
    for number, (task, reward, length, final, excluded) in enumerate(made):
        one = replace(
            call("c", [1], [2] * length, [-1.0] * length),
            excluded=excluded and number % 2 == 0,
        )
        outcome = Outcome.COMPLETED if reward is not None else Outcome.TIMEOUT
        traces.append(rollout(task, number, reward, calls=[one], final=final, outcome=outcome))
    section = HistorySection(held_out=held_out, best=best)
    try:
        found = read_history(section, traces)
        used = examples_of_history(found, section, None, recorded=recorded, longest=9)
    except DatasetError:  # nothing is left
        return
    assert accounted(used, traces)


# Logs --------------------------------------------------------------------------------------------

TALK = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


def log(path, *lines):
    path.write_text("\n".join(map(json.dumps, lines)))  # the last line without an end
    return str(path)


def test_logs_are_rows_beside_rollouts(tmp_path):
    run = store_run(tmp_path / "run", [rollout(0, 0)])
    file = log(tmp_path / "log.jsonl", TALK, {"attributes": {"gen_ai.operation.name": "x"}})
    found = read_history(HistorySection(sources=(str(run), file)))
    assert len(found.groups) == 1
    assert [one.where for one in found.rows] == [f"{file}, line 1"]
    assert found.left_out.rollouts == {"no_model_call": 1}


def test_a_filter_that_a_log_cannot_answer_is_refused(tmp_path):
    file = log(tmp_path / "log.jsonl", TALK)
    with pytest.raises(ConfigError, match=r"min_reward is 0.5, but .*line 1 is in a log without"):
        read_history(HistorySection(sources=(file,), min_reward=0.5))
    with pytest.raises(ConfigError, match="line 1 has no time"):
        read_history(HistorySection(sources=(file,), after="2026-01-01"))


def test_other_files_are_refused_with_their_line(tmp_path):
    file = log(tmp_path / "log.jsonl", TALK, {"x": 1})
    with pytest.raises(DatasetError, match=r"log.jsonl, line 2: it has the keys x"):
        read_history(HistorySection(sources=(file,)))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DatasetError, match="has neither a folder traces/"):
        read_history(HistorySection(sources=(str(tmp_path / "empty"),)))


def test_a_store_of_another_program_is_refused(tmp_path):
    import sqlite3

    path = tmp_path / "other.sqlite"
    with sqlite3.connect(path) as database:
        database.execute("create table x (y)")
    with pytest.raises(DatasetError, match="cannot be read as a server's sessions"):
        read_history(HistorySection(sources=(str(path),)))


def test_traces_of_a_store_are_equal_to_those_written(tmp_path):
    TraceStore(tmp_path / "traces").append(KEPT)
    (group,) = read_history(HistorySection(sources=(str(tmp_path),))).groups
    assert replace(group[0], id=KEPT.id) == KEPT


@pytest.mark.parametrize("text", ["yesterday", "2026-13-01"])
def test_a_time_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match="is no time: write"):
        HistorySection(after=text)


def test_sessions_of_a_server_are_rollouts_while_it_serves(tmp_path):
    from tuner.serving.serving_store import ServingStore

    store = ServingStore(tmp_path / "serving.sqlite")

    def served(id_, reward, **given):
        store.open(id_, key=id_.encode(), seed=1, **given)
        store.add_calls(id_, [call(id_, [1, 2], [3, 4], [-0.5] * 2)])
        if reward is not None:
            store.reward(id_, reward=reward)

    served("s-1", 1.0, group="g", tags=["new"], metadata={"user": "a"}, task={"n": 1})
    served("s-2", 0.0, group="g", tags=["new", "paid"], metadata={"user": "b"}, task={"n": 2})
    served("s-3", 1.0, task={"n": 3})
    served("s-4", None, task={"n": 3})
    source = str(tmp_path / "serving.sqlite")
    found = read_history(HistorySection(sources=(source,)))
    assert [len(group) for group in found.groups] == [2, 2]
    pairs = examples(found, "pairs")
    assert len(pairs.used) == 1
    assert pairs.left_out == {"no_reward": 1, "not_in_a_pair": 1}
    # The directory of the server is a source as well.
    paid = read_history(HistorySection(sources=(str(tmp_path),), tags=("paid",)))
    assert paid.left_out.rollouts == {"other_tags": 3}
    user = read_history(HistorySection(sources=(source,), metadata={"user": "a"}))
    assert user.left_out.rollouts == {"other_metadata": 3}
    assert user.groups[0][0].task == {"n": 1}
    store.close()
