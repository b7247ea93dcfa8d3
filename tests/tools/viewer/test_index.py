"""The store answers: what is wanted, in its order, and sums; kept beside the traces, made anew."""

import dataclasses
import os
import shutil
import sqlite3

import pytest

from tests.kit.builders import call, trace
from tests.tools.viewer.stored import small, store_run
from tuner.errors import TunerError
from tuner.tools.viewer import index as index_module
from tuner.tools.viewer.index import NAME, TraceIndex, identity
from tuner.tools.viewer.queries import TraceQuery, changes, count, find, same_task, summary
from tuner.traces import Outcome, RolloutId


def indexed(run, **options):
    index = TraceIndex(run / "traces", **options)
    index.refresh()
    return index


def found(index, **wanted):
    numbers = find(index, TraceQuery(**wanted))
    assert count(index, TraceQuery(**wanted)) == len(numbers)
    return [(row.step, row.task, row.rollout) for row in index.rows(numbers)]


@pytest.fixture
def index(tmp_path):
    """Task 0 rises from 0 to 1, task 1 stays, task 2 falls from 0.5 to 0.25 and is seen thrice."""
    traces = [
        small(0, 0, 0.0, response="Seven"),
        small(1, 0, 1.0),
        small(2, 0, 0.5),
        small(2, 1, 0.5, final=False),
        small(0, 0, 1.0, step=5, response="eight marbles"),
        small(1, 0, 1.0, step=5),
        small(2, 0, None, step=4, outcome=Outcome.TIMEOUT, error="60 s were over"),
        small(2, 0, 0.25, step=5),
        dataclasses.replace(small(0, 0, 0.75), id=RolloutId(0, 0, 0, "test")),
    ]
    return indexed(store_run(tmp_path, traces))


def test_traces_are_found_by_what_they_are(index):
    assert found(index, split="test") == [(0, 0, 0)]
    assert found(index, step=4) == found(index, outcome="timeout") == [(4, 2, 0)]
    assert found(index, outcome="not completed") == [(4, 2, 0)]
    assert found(index, outcome="replaced by a retry") == [(1, 2, 1)]
    assert found(index, low=0.3, high=0.8) == [(0, 0, 0), (1, 2, 0), (1, 2, 1)]
    assert found(index, split="train", step=5, low=1) == [(5, 0, 0), (5, 1, 0)]


def test_a_search_looks_into_tasks_and_answers(index):
    assert found(index, text="EIGHT  marb") == [(5, 0, 0)]
    assert found(index, text="task 2", step=1) == [(1, 2, 0), (1, 2, 1)]
    assert found(index, text="ho", step=1, low=1.0) == [(1, 1, 0)]  # the last answer of the model
    assert found(index, text="%") == found(index, text="nobody said this") == []


def test_the_worst_come_first_and_failures_are_worse_than_any_reward(index):
    assert found(index, order="worst", split="train")[:3] == [(4, 2, 0), (1, 0, 0), (5, 2, 0)]
    assert found(index, order="best", split="train")[-1] == (4, 2, 0)
    assert found(index, order="new")[0] == (5, 2, 0)


def test_tasks_that_changed_most_come_first_and_those_seen_once_last(index):
    in_order = found(index, order="changed")
    assert in_order[:2] == [(1, 0, 0), (5, 0, 0)]
    assert {task for _, task, _ in in_order[2:6]} == {2}
    assert [task for _, task, _ in in_order[6:]] == [1, 1, 0]
    by = {name: change for (name, _), change in changes(index).items()}
    assert sorted(changes(index).values()) == [-0.25, 0.0, 1.0]
    assert by.keys() == {"train"}


def test_a_wrong_order_is_named(index):
    with pytest.raises(TunerError, match="order is 'upside down'"):
        find(index, TraceQuery(order="upside down"))


@pytest.mark.parametrize("order", ["", "new", "worst", "best", "long", "changed"])
def test_an_answer_comes_in_parts_that_make_it_up(index, order):
    wanted = TraceQuery(split="train", order=order)
    whole = find(index, wanted)
    assert sorted(whole) == [2, 3, 4, 5, 6, 7, 8, 9]  # the first is of another split
    assert [find(index, wanted, first, 3) for first in (0, 3, 6, 9)] == [
        whole[:3],
        whole[3:6],
        whole[6:],
        [],
    ]


def test_rollouts_of_one_task_are_found_again_in_its_split_and_in_another_run(index, tmp_path):
    task = identity('{"question": "task 0"}')
    assert [row.step for row in same_task(index, "train", task)] == [1, 5]
    assert [row.reward for row in same_task(index, "test", task)] == [0.75]
    other = indexed(store_run(tmp_path / "other", [small(1, 0, 0.5), small(0, 0, 0.5, step=9)]))
    assert [row.step for row in same_task(other, "train", task)] == [9]
    assert same_task(other, "train", identity("another")) == []


def test_of_many_rollouts_of_one_task_those_of_the_first_steps_and_the_last_are_shown(tmp_path):
    index = indexed(store_run(tmp_path, [small(0, i, 1.0, step=1 + i) for i in range(300)]))
    steps = [row.step for row in same_task(index, "train", identity('{"question": "task 0"}'))]
    assert steps == [*range(1, 101), *range(201, 301)]


def test_tables_add_up_final_attempts_and_curves_follow_training_steps(tmp_path):
    def calls(reward):
        made = call("a", [1], [2, 3], [-0.5, -0.5])
        return [
            dataclasses.replace(made, role="writer", reward=reward),
            dataclasses.replace(made, id="b", role="critic"),
        ]

    traces = [
        trace(0, 0, calls(0.5), reward=1.0),
        trace(0, 1, calls(None), reward=0.0),
        trace(0, 2, calls(1.0), reward=1.0, final=False),
        trace(0, 0, calls(None), reward=1.0, step=2),
    ]
    about = summary(indexed(store_run(tmp_path, traces)))
    rows = {(row["kind"], row["name"]): row for row in about["tables"]}
    assert rows.keys() == {("outcome", "completed"), ("role", "writer"), ("role", "critic")}
    writer = rows["role", "writer"]
    assert (writer["n"], writer["tokens"], writer["reward"], writer["rewarded"]) == (3, 6, 1.5, 3)
    assert rows["outcome", "completed"]["n"] == 3
    assert about["curves"] == [
        {
            "step": 1,
            "tokens/critic": 2,
            "role/critic": 0.5,
            "tokens/writer": 2,
            "role/writer": 0.25,
        },
        {"step": 2, "tokens/critic": 2, "role/critic": 1.0, "tokens/writer": 2, "role/writer": 1.0},
    ]
    assert (about["steps"], about["splits"], about["outcomes"]) == (
        [1, 2],
        ["train"],
        ["completed"],
    )


@pytest.fixture
def kept(tmp_path):
    """A run whose index was kept."""
    run = store_run(tmp_path / "run", [small(0, i, 1.0) for i in range(4)])
    indexed(run, keep=True).close()
    assert (run / "traces" / NAME).stat().st_size > 0
    return run


def lines_read(monkeypatch):
    read = []
    whole = index_module.row
    monkeypatch.setattr(index_module, "row", lambda *line: read.append(line[:2]) or whole(*line))
    return read


def test_a_kept_index_reads_only_what_is_new(kept, monkeypatch):
    read = lines_read(monkeypatch)
    store_run(kept, [small(0, 4, 0.0)])
    index = indexed(kept, keep=True)
    assert len(read) == 1
    assert [row.rollout for row in index.rows()] == [0, 1, 2, 3, 4]


def test_a_kept_index_fits_a_copy_of_the_run_too(kept, tmp_path, monkeypatch):
    read = lines_read(monkeypatch)
    copy = tmp_path / "copy"
    shutil.copytree(kept, copy)
    os.utime(copy / "traces/step_000001.jsonl", (1, 1))
    assert len(indexed(copy, keep=True).rows()) == 4
    assert read == []


def test_a_kept_index_that_does_not_fit_is_made_anew(kept, tmp_path):
    other = store_run(tmp_path / "other", [small(5, i, 0.0, response="else") for i in range(5)])
    shutil.copy(other / "traces/step_000001.jsonl", kept / "traces")
    assert [row.task for row in indexed(kept, keep=True).rows()] == [5] * 5
    assert summary(indexed(kept, keep=True))["tables"][0]["n"] == 5


@pytest.mark.parametrize("damage", [b"this is not a database " * 100, b""])
def test_a_damaged_index_is_made_anew(kept, damage):
    (kept / "traces" / NAME).write_bytes(damage)
    assert len(indexed(kept, keep=True).rows()) == 4
    assert (kept / "traces" / NAME).read_bytes().startswith(b"SQLite format 3")


def test_an_index_of_another_version_is_made_anew(kept):
    with sqlite3.connect(kept / "traces" / NAME) as database:
        database.execute("PRAGMA user_version = 999")
        database.execute("DROP TABLE tallies")
    assert len(indexed(kept, keep=True).rows()) == 4


def test_two_who_look_at_one_run_share_the_index(kept):
    first, second = indexed(kept, keep=True), indexed(kept, keep=True)
    store_run(kept, [small(0, 4, 0.0)])
    assert first.refresh()
    assert second.refresh()
    assert [row.rollout for row in first.rows()] == [row.rollout for row in second.rows()]
    assert second.total == 5


def test_where_nothing_can_be_kept_the_index_is_a_temporary_one(tmp_path):
    run = store_run(tmp_path, [small(0, 0, 1.0)])
    (run / "traces" / NAME).mkdir()  # also a folder that cannot be written to fails to open
    assert len(indexed(run, keep=True).rows()) == 1


def test_an_index_that_can_no_longer_be_written_goes_on_as_a_temporary_one(kept):
    index = indexed(kept, keep=True)
    index._connection.execute("PRAGMA query_only = ON")
    store_run(kept, [small(0, 4, 0.0)])
    while not index.refresh():
        pass
    assert index.refresh()
    assert [row.rollout for row in index.rows()] == [0, 1, 2, 3, 4]


def test_texts_that_a_database_cannot_hold_are_listed_all_the_same(tmp_path):
    run = store_run(tmp_path, [small(0, 0, 1.0, response="half \ud83d of it", error="\ud83d")])
    (row,) = indexed(run).rows()
    assert (row.answered, row.error) == ("half ? of it", "?")


def test_a_temporary_index_that_cannot_be_written_is_an_error_that_says_so(tmp_path):
    run = store_run(tmp_path, [small(0, 0, 1.0)])
    index = TraceIndex(run / "traces")
    index._connection.execute("PRAGMA query_only = ON")
    with pytest.raises(TunerError, match=r"cannot write the index .*traces \(.*\); free space"):
        index.refresh()


def test_a_search_finds_what_was_written_since_it_was_last_asked(tmp_path):
    run = store_run(tmp_path, [small(0, 0, 0.0, response="seven")])
    index = indexed(run)
    assert found(index, text="seven") == [(1, 0, 0)]
    store_run(tmp_path, [small(0, 1, 1.0, response="seven or eight"), small(0, 0, 1.0, step=2)])
    index.refresh()
    assert found(index, text="seven") == [(1, 0, 0), (1, 0, 1)]
    assert found(index, order="changed", step=2) == [(2, 0, 0)]


def test_tasks_that_begin_alike_are_listed_by_what_differs(tmp_path):
    begins = "State the final answer to the following arithmetic problem, and nothing but it: " * 3
    tasks = [f"{begins}{n} + 30" for n in range(3)] + ["What is the capital of France?"]
    traces = [
        dataclasses.replace(small(n, 0, 1.0), task={"question": task})
        for n, task in enumerate(tasks)
    ]
    index = indexed(store_run(tmp_path, traces))
    assert [row.asked for row in index.rows()] == [
        *(f"State the final … {n} + 30" for n in range(3)),
        "What is the capital of France?",
    ]
    assert found(index, text="arithmetic problem, and nothing but it: 2 +") == [(1, 2, 0)]  # whole
