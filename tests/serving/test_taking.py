"""What an update takes: judged sessions in groups, once each, and what of them is left out."""

from dataclasses import replace

import pytest

from tests.kit.builders import call
from tests.serving.learning_parts import Server, config, run
from tuner.runs.directory import read_metrics
from tuner.serving.learning.judged import Groups, JudgedSource, chosen, units
from tuner.serving.serving_store import ServingStore, StoredSession


def stored(number, *, group=None, task_number=None):
    return StoredSession(
        number=number,
        id=f"s-{number:04x}",
        application=None,
        group=group,
        seed=0,
        task_number=number if task_number is None else task_number,
        rollout=0,
        opened=float(number),
        last_call=None,
        ended=float(number),
        calls=1,
        sampled_tokens=3,
        redacted=0,
        lowest=0,
        highest=0,
        reward=1.0,
        feedback=None,
        judged=True,
        trained=None,
    )


def ids(groups):
    return [[one.number for one in group] for group in groups]


def taken(sessions, groups=None, *, batch=2, repeat=4, compared=True):
    ready = units(sessions, groups or Groups(), batch=batch, repeat=repeat, compared=compared)
    return ids(chosen(ready, batch=batch, compared=compared))


def test_sessions_without_a_group_are_compared_with_each_other():
    sessions = [stored(1), stored(2), stored(3)]
    assert taken(sessions, batch=3) == [[1, 2, 3]]
    assert taken(sessions, batch=4) == []


def test_a_group_stays_together_and_the_others_are_one_more():
    sessions = [
        stored(1, group="a", task_number=90),
        stored(2),
        stored(3, group="a", task_number=90),
        stored(4),
    ]
    assert taken(sessions, batch=3) == [[1, 3], [2, 4]]


def test_a_session_that_would_be_alone_waits_for_another():
    grouped = [stored(n, group="a", task_number=90) for n in (1, 2)]
    assert taken([*grouped, stored(3)], batch=2) == []
    assert taken([*grouped, stored(3), stored(4)], batch=2) == [[1, 2], [3, 4]]


def test_where_nothing_is_compared_each_session_is_taken_alone():
    assert taken([stored(1), stored(2)], compared=False) == [[1], [2]]


def test_a_group_waits_for_its_rewards_but_not_for_ever():
    group = [stored(n, group="a", task_number=90) for n in (1, 2)]
    others = [stored(n) for n in range(3, 6)]
    waiting = Groups(waiting={90})
    assert taken([*group, *others[:1]], waiting, batch=2) == []
    assert taken([*group, *others[:1]], waiting, batch=2, repeat=2) == []  # one is alone
    assert taken([*group, *others[:2]], waiting, batch=3, repeat=2) == [[1, 2], [3, 4]]
    assert taken([*group, *others], waiting, batch=3) == [[1, 2], [3, 4]]


def test_what_is_left_of_a_group_is_compared_with_those_without_one():
    late = stored(1, group="a", task_number=90)
    assert taken([late, stored(2)]) == []
    assert taken([late, stored(2)], Groups(spent={90})) == [[1, 2]]


def test_an_update_takes_each_session_once_and_its_tokens_are_accounted_for(
    random_model_path, tmp_path
):
    async def work():
        async with Server(config(random_model_path, tmp_path)) as server:
            for number in range(5):
                await server.talk(f"question {number}", reward=number % 2)
            unjudged = await server.talk("nobody says anything")
            assert await server.learner.turn()
            assert await server.learner.turn()
            assert not await server.learner.turn()
            marks = server.trained()
            assert sorted(str(mark) for mark in marks.values()) == [
                "1",
                "1",
                "2",
                "2",
                "None",
                "None",
            ]
            assert marks[unjudged] is None
            rows = read_metrics(server.directory.metrics, up_to=99)
            assert [row["step"] for row in rows] == [1, 2]
            for row in rows:
                dropped = sum(v for k, v in row.items() if k.startswith("tokens/dropped/"))
                assert row["tokens/sampled"] == row["tokens/trained"] + dropped > 0
            assert rows[-1]["sessions/unjudged"] == rows[-1]["sessions/waiting"] == 1

    run(work())


def test_tokens_of_weights_that_are_too_old_are_counted_and_not_trained(
    random_model_path, tmp_path
):
    async def work():
        settings = config(random_model_path, tmp_path, "tuner.serving.max_staleness=0")
        async with Server(settings) as server:
            late = [await server.talk(f"late {number}") for number in range(3)]
            for number in range(2):
                await server.talk(f"question {number}", reward=number % 2)
            await server.learner.turn()  # promotes version 1
            for id_ in late:
                server.judge_session(id_, 1.0)
            assert not await server.learner.turn()  # what is too old makes no update of its own
            for number in range(2):
                await server.talk(f"more {number}", reward=number % 2)
            await server.learner.turn()
            row = read_metrics(server.directory.metrics, up_to=99)[-1]
            old = sum(server.store.session(id_).sampled_tokens for id_ in late)
            assert row["tokens/dropped/stale"] == old
            assert row["tokens/sampled"] == row["tokens/trained"] + old
            assert row["rollouts/dropped/stale"] == 3
            assert row["sessions/taken"] == 5
            assert all(server.trained().values())

    run(work())


def test_where_only_calls_are_judged_the_others_of_the_session_are_not_trained(
    random_model_path, tmp_path
):
    async def work():
        async with Server(config(random_model_path, tmp_path)) as server:
            silent = 0
            for reward in (0.0, 1.0):
                session = server.open()
                for text in ("one", "two"):
                    await server.ask(session, f"{text} {reward}")
                first, second = session.calls
                server.end(session)
                server.judge_session(session.id, reward, call=first.id)
                silent += second.sampled_tokens
            await server.learner.turn()
            row = read_metrics(server.directory.metrics, up_to=99)[-1]
            assert row["tokens/dropped/unjudged_call"] == silent
            assert row["tokens/sampled"] == row["tokens/trained"] + silent

    run(work())


def test_where_a_session_is_judged_a_call_with_a_reward_of_its_own_silences_no_other(
    random_model_path, tmp_path
):
    async def work():
        async with Server(config(random_model_path, tmp_path)) as server:
            for reward in (0.0, 1.0):
                session = server.open()
                for text in ("one", "two"):
                    await server.ask(session, f"{text} {reward}")
                first = session.calls[0]
                server.end(session)
                server.judge_session(session.id, 0.5, call=first.id)
                server.judge_session(session.id, reward)
            await server.learner.turn()
            row = read_metrics(server.directory.metrics, up_to=99)[-1]
            assert row["tokens/sampled"] == row["tokens/trained"] > 0

    run(work())


def test_judged_calls_come_to_their_mean_and_one_that_was_not_delivered_is_not_trained(tmp_path):
    store = ServingStore(tmp_path / "serving.sqlite")
    for id_ in ("s-1", "s-2"):
        calls = [call(f"{id_}-{number}", [1, 2], [3], [-0.5]) for number in range(3)]
        store.open(id_, key=id_.encode(), seed=1)
        store.add_calls(id_, [*calls[:2], replace(calls[2], undelivered=True)])
        for number in (0, 1):
            store.reward(id_, float(number), call=calls[number].id)
        store.end(id_)
    store.reward("s-2", 0.25)
    source = JudgedSource(config("models/tiny_math", tmp_path), store, oldest=lambda: 0)
    found = source.taken(source.ready(), step=1, version=0)
    assert [trace.reward for trace in found.traces] == [0.5, 0.25]
    assert found.batch.dropped_tokens == {"undelivered_call": 2}
    store.close()


@pytest.mark.parametrize(
    ("table", "column", "wrong"),
    [
        *(("sessions", name, "[") for name in ("task", "metadata", "tags", "limits", "sampling")),
        ("sessions", "highest", "text"),
        ("sessions", "reward", "[1]"),
        ("calls", "data", b"\xff"),
        ("calls", "data", b'{"call": {}}'),
        ("calls", "reward", "text"),
    ],
)
def test_a_damaged_session_is_left_out_and_the_others_are_taken(
    tmp_path, caplog, table, column, wrong
):
    store = ServingStore(tmp_path / "serving.sqlite")
    for number in range(4):
        id_ = f"s-{number}"
        store.open(id_, key=id_.encode(), seed=1, tags=["a"])
        store.add_calls(id_, [call(f"{id_}-1", [1, 2], [3], [-0.5])])
        store.reward(id_, float(number))
        store.end(id_)
    row = "id = 's-1'" if table == "sessions" else "id = 's-1-1'"
    store.change(f'UPDATE {table} SET "{column}" = ? WHERE {row}', wrong)
    source = JudgedSource(config("models/tiny_math", tmp_path), store, oldest=lambda: 0)
    for _ in range(3):
        groups = source.ready()
    found = source.taken(groups, step=1, version=0)
    assert sorted({"s-0", "s-2", "s-3"} & {*found.sessions}) == sorted(found.sessions)
    assert len(found.traces) >= 2
    assert "s-0" in [one.id for one in store.sessions(tag="a")]
    store.call_rewards("s-1")
    said = [record.getMessage() for record in caplog.records]
    assert len([one for one in said if one.startswith("left out: ") and "s-1 " in one]) >= 1
    assert len(said) == len(set(said))  # each is said once
    store.close()
