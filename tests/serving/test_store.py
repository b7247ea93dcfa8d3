"""What is on disk: calls as they were, rewards at their place, ids that are not used again."""

import json
import os
import sqlite3
import stat
import subprocess
import sys
from dataclasses import replace

import pytest

from tests.kit.builders import call
from tuner.errors import TunerError
from tuner.serving.serving_store import DamagedSession, ServingStore, StoredReply
from tuner.traces import Outcome, RolloutId
from tuner.traces.store import trace_from_json, trace_to_json


@pytest.fixture
def path(tmp_path):
    return tmp_path / "serving.sqlite"


@pytest.fixture
def store(path):
    with_tables = ServingStore(path)
    yield with_tables
    with_tables.close()


def opened(store, id_, **given):
    return store.open(id_, key=id_.encode(), seed=7, **given)


def conversation(*, name="c", versions=(0, 1)):
    """Two calls, of which the second continues the first."""
    first = call(f"{name}-1", [1, 2, 3], [4, 5], [-0.5, -0.25])
    second = call(f"{name}-2", [1, 2, 3, 4, 5, 6], [7, 8], [-1.5, -2.0])
    again = {"role": "user", "content": "sure?"}
    return [
        replace(first, versions=(versions[0],) * 2),
        replace(
            second,
            versions=(versions[1],) * 2,
            messages=[*first.messages, first.response, again],
        ),
    ]


def test_calls_come_back_as_they_were_also_when_the_file_is_opened_again(store, path):
    calls = conversation()
    opened(store, "s-1")
    store.add_calls("s-1", calls[:1])
    store.close()
    again = ServingStore(path)
    again.add_calls("s-1", calls[1:])
    found = [stored.call for stored in again.calls("s-1")]
    again.close()
    assert found == calls


def test_a_call_grows_the_file_by_what_is_new_in_it(store):
    first, second = conversation()
    opened(store, "s-1")
    store.add_calls("s-1", [first])
    store.add_calls("s-1", [second])
    rows = [row[0] for row in store.ask("SELECT data FROM calls ORDER BY number")]
    assert b'"prompt_ids": [0, 5, [6]]' in rows[1]
    assert b"hi" not in rows[1]


def test_calls_of_a_request_are_added_together_or_not_at_all(store):
    calls = conversation()
    opened(store, "s-1")
    store.add_calls("s-1", calls[:1])
    with pytest.raises(sqlite3.IntegrityError):
        store.add_calls("s-1", [calls[1], calls[1]])
    assert [stored.call for stored in store.calls("s-1")] == calls[:1]
    store.add_calls("s-1", calls[1:])  # refers to nothing that was rolled back
    assert [stored.call for stored in store.calls("s-1")] == calls
    assert store.session("s-1").calls == 2


def test_a_session_counts_its_calls_tokens_and_versions(store):
    opened(store, "s-1", task={"q": 1}, tags=["a", "b"], limits={"calls": 3})
    assert store.session("s-1").lowest is None
    store.add_calls("s-1", conversation(versions=(4, 2)))
    found = store.session("s-1")
    assert (found.calls, found.sampled_tokens, found.redacted) == (2, 4, 0)
    assert (found.lowest, found.highest) == (2, 4)
    assert (found.task, found.tags, found.limits) == ({"q": 1}, ("a", "b"), {"calls": 3})
    assert found.last_call is not None


def test_the_latest_reward_counts_and_all_are_kept(store):
    opened(store, "s-1")
    store.add_calls("s-1", conversation())
    store.reward("s-1", feedback="hm")
    assert not store.session("s-1").judged
    store.reward("s-1", 1.0)
    store.reward("s-1", 0.25, "better")
    store.reward("s-1", -1.0, call="c-2")
    found = store.session("s-1")
    assert (found.reward, found.feedback, found.judged) == (0.25, "better", True)
    assert store.call_rewards("s-1") == {"c-2": -1.0}
    assert [stored.call.reward for stored in store.calls("s-1")] == [None, -1.0]
    assert store.ask("SELECT COUNT(*) FROM rewards") == [(4,)]


def test_a_reward_for_what_is_not_there_leaves_nothing(store):
    opened(store, "s-1")
    for asked in ({"id_": "s-1", "call": "c-9"}, {"id_": "s-2"}):
        with pytest.raises(LookupError):
            store.reward(reward=1.0, **asked)
    assert store.ask("SELECT COUNT(*) FROM rewards") == [(0,)]
    assert not store.session("s-1").judged


def test_a_session_is_a_trace_that_is_stored_as_traces_are(store):
    opened(store, "s-1", task={"q": 2}, opened=12.5)
    store.add_calls("s-1", conversation())
    store.reward("s-1", 0.5, "well")
    trace = store.trace("s-1")
    assert trace.outcome is Outcome.COMPLETED
    assert (trace.reward, trace.feedback, trace.response) == (0.5, "well", "ho")
    assert (trace.task, trace.started) == ({"q": 2}, 12.5)
    assert trace_from_json(json.loads(json.dumps(trace_to_json(trace)))) == trace


def test_ids_of_traces_are_places_in_groups_and_are_not_used_again(store):
    opened(store, "s-1", group="q", application="a")
    opened(store, "s-2")
    opened(store, "s-3", group="q", application="a")
    opened(store, "s-4", group="q", application="b")
    places = [store.session(f"s-{n}").rollout_id for n in (1, 2, 3, 4)]
    assert places == [RolloutId(0, *at, "serve") for at in [(1, 0), (2, 0), (1, 1), (3, 0)]]
    assert store.delete("s-3")
    assert store.delete("s-4")
    assert not store.delete("s-4")
    again = opened(store, "s-5", group="q", application="a")
    assert again.rollout_id == RolloutId(0, 1, 2, "serve")


def test_what_is_trained_is_judged_ended_and_trained_once(store):
    for number in range(6):
        opened(store, f"s-{number}")
    for number in range(5):
        store.add_calls(f"s-{number}", conversation())
    for number in (0, 1, 2, 5):
        store.reward(f"s-{number}", 1.0)
    for number in (0, 1, 3, 5):
        store.end(f"s-{number}")
    assert [one.id for one in store.untrained()] == ["s-0", "s-1"]
    assert [one.id for one in store.untrained(also_open=True)] == ["s-0", "s-1", "s-2"]
    store.mark_trained(["s-0"], 3)
    assert [one.id for one in store.untrained()] == ["s-1"]
    assert store.trace("s-0").id.step == 3


def test_what_cannot_be_trained_is_not_offered(store):
    redacted = replace(
        conversation()[0], prompt_ids=(), completion_ids=(), logprobs=(), versions=()
    )
    for number in (1, 2):
        opened(store, f"s-{number}")
    store.add_calls("s-1", [redacted], redacted=True)
    store.add_calls("s-2", conversation()[:1], request="k")
    store.retried("s-2", "k")
    for number in (1, 2):
        store.reward(f"s-{number}", 1.0)
        store.end(f"s-{number}")
    assert store.untrained() == []
    assert store.session("s-1").redacted == 1
    assert [stored.call.undelivered for stored in store.calls("s-2")] == [True]


def test_sessions_are_found_by_what_they_are(store):
    opened(store, "s-1", application="a", group="g", tags=["x"])
    opened(store, "s-2", application="a", tags=["x", "y"])
    opened(store, "s-3", application="b", group="g")
    store.end("s-1", 5.0)
    store.end("s-1", 9.0)
    store.reward("s-2", 0.0)

    def ids(**asked):
        return [one.id for one in store.sessions(**asked)]

    assert store.session("s-1").ended == 5.0
    assert ids() == ["s-1", "s-2", "s-3"]
    assert ids(ended=True) == ["s-1"]
    assert ids(judged=False) == ["s-1", "s-3"]
    assert ids(group="g", application="b") == ["s-3"]
    assert ids(tag="y") == ["s-2"]
    assert ids(after="s-1", limit=1) == ["s-2"]
    assert store.expired(6.0) == ["s-1"]


def test_a_session_without_a_call_for_long_is_idle(store):
    opened(store, "s-1", opened=1.0)
    opened(store, "s-2", opened=1.0)
    store.add_calls("s-2", conversation())
    assert store.idle(2.0) == ["s-1"]


def test_with_a_session_all_of_it_goes(store):
    opened(store, "s-1", application="a")
    store.add_calls("s-1", conversation(), talks=[b"t", b"u"])
    store.reward("s-1", 1.0)
    store.keep_reply("s-1", "k", StoredReply(b"r", b"b", "application/json"))
    store.keep_response("s-1", "resp_1", "{}")
    assert store.session_of_response("a", "resp_1") == "s-1"
    assert store.session_of_response("b", "resp_1") is None
    store.delete("s-1")
    for table in ("sessions", "calls", "rewards", "replies", "responses"):
        assert store.ask(f"SELECT COUNT(*) FROM {table}") == [(0,)]


def test_equal_conversations_go_on_each_in_its_own_session(store):
    for id_ in ("s-1", "s-2"):
        opened(store, id_, application="a")
        store.add_calls(id_, conversation()[:1], talks=[b"talk"])
    assert [store.go_on("a", b"talk") for _ in range(2)] == ["s-1", "s-2"]
    assert store.go_on("b", b"talk") is None
    store.end("s-1")
    assert store.go_on("a", b"talk") == "s-2"


def test_a_reply_is_the_sessions_own(store):
    opened(store, "s-1")
    opened(store, "s-2")
    reply = StoredReply(b"digest", b"{}", "application/json")
    store.keep_reply("s-1", "k", reply)
    assert store.reply("s-1", "k") == reply
    assert store.reply("s-2", "k") is None
    store.forget_replies(2**40)
    assert store.reply("s-1", "k") is None


def test_applications_have_keys_that_end(store):
    assert store.add_application("shop", b"key")
    assert not store.add_application("shop", b"other")
    assert store.application_of_key(b"key") == "shop"
    assert [name for name, _ in store.applications()] == ["shop"]
    assert store.delete_application("shop")
    assert store.application_of_key(b"key") is None


def test_a_reader_sees_what_is_committed_and_changes_nothing(store):
    opened(store, "s-1")
    with store.reader() as beside:
        assert [one.id for one in beside.sessions()] == ["s-1"]
        with pytest.raises(sqlite3.OperationalError):
            beside.end("s-1")


def test_the_file_is_its_owners_alone(store, path):
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    opened(store, "s-1")
    for beside in path.parent.glob("serving.sqlite-*"):
        assert stat.S_IMODE(os.stat(beside).st_mode) == 0o600


def test_a_file_of_something_else_is_refused(path):
    path.write_bytes(b"not a database, and long enough to be one" * 40)
    with pytest.raises(TunerError, match=r"serving\.sqlite cannot be opened"):
        ServingStore(path)
    path.unlink()
    other = sqlite3.connect(path)
    other.execute("PRAGMA user_version = 99")
    other.close()
    with pytest.raises(TunerError, match="is of version 99"):
        ServingStore(path)


def test_a_file_with_the_earlier_index_of_open_sessions_gets_the_new_one(store, path):
    opened(store, "s-1")
    store.change("DROP INDEX not_ended")
    store.change("CREATE INDEX open_sessions ON sessions (last_call) WHERE ended IS NULL")
    store.close()
    again = ServingStore(path)
    indexes = {name for (name,) in again.ask("SELECT name FROM sqlite_master WHERE type='index'")}
    assert "not_ended" in indexes
    assert "open_sessions" not in indexes
    assert again.session("s-1").id == "s-1"
    again.close()


def test_what_was_committed_outlives_a_process_that_is_killed(path):
    script = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from tests.serving.test_store import conversation\n"
        "from tuner.serving.serving_store import ServingStore\n"
        "store = ServingStore(Path(sys.argv[1]))\n"
        "store.open('s-1', key=b'k', seed=1)\n"
        "store.add_calls('s-1', conversation())\n"
        "with store.writing():\n"
        "    store.reward('s-1', 1.0)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script, str(path)], check=False)
    assert ended.returncode == -9
    store = ServingStore(path)
    assert [stored.call for stored in store.calls("s-1")] == conversation()
    assert not store.session("s-1").judged
    store.close()


WRONG = ["{", "text", "[1]", "null", None, -1, 10**18, b"\xff", '{"a":' * 300 + "1" + "}" * 300]


def test_a_damaged_row_is_named_and_the_other_sessions_are_read(store, path):
    """Each column that a session is read from, by each wrong value."""
    for id_ in ("s-1", "s-2"):
        opened(store, id_, task={"q": "?"}, tags=["a"])
        store.add_calls(id_, conversation(name=id_))
    with sqlite3.connect(path) as file:
        columns = {name: kind for _, name, kind, *_ in file.execute("PRAGMA table_info(sessions)")}
    refused, said = 0, set()
    for table, column, key in (
        *(("sessions", name, "id = 's-1'") for name in columns.keys() - {"id", "key", "number"}),
        *(("calls", name, "id = 's-1-1'") for name in ("data", "reward")),
    ):
        ((whole,), *_) = store.ask(f'SELECT "{column}" FROM {table} WHERE {key}')
        for wrong in WRONG:
            try:
                store.change(f'UPDATE {table} SET "{column}" = ? WHERE {key}', wrong)
            except sqlite3.IntegrityError:
                continue
            try:
                store.trace("s-1")
            except DamagedSession as error:
                refused += 1
                said.add((str(error).partition(" in ")[0], error.status))
            assert "s-2" in [session.id for session in store.sessions()]
            assert "s-2" in [session.id for session in store.every()]
            store.change(f'UPDATE {table} SET "{column}" = ? WHERE {key}', whole)
    assert refused > 50
    assert said == {("session s-1 is damaged", 410)}
