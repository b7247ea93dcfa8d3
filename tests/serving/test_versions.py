"""Which weights serve: promotions, rollbacks, checkpoints, and what a kill leaves of them."""

import contextlib
import signal
import sqlite3

import pytest

from tests.kit import forked
from tests.kit.examples import grid
from tests.serving import learning_killed
from tests.serving.learning_parts import Server, config, run, same
from tests.tools.test_damaged_files import told
from tuner.errors import ConfigError
from tuner.runs.directory import read_metrics
from tuner.serving.hosting import weights_to_serve
from tuner.serving.learning.ledger import Ledger, promoted_versions
from tuner.serving.serving_store import ServingStore


def test_what_serves_is_what_the_decisions_come_to(tmp_path):
    store = ServingStore(tmp_path / "serving.sqlite")
    ledger = Ledger(store)

    def add(kind, version, **more):
        ledger.add(kind, version, serving=0, step=version, why="", **more)

    for version in (0, 12, 25):
        add("promote" if version else "start", version)
    assert ledger.line == [0, 12, 25]
    add("rollback", 12, reset=True)
    add("trial", 40)
    assert (ledger.line, ledger.trial, ledger.reset_at) == ([0, 12], 40, 12)
    add("promote", 40)
    assert (ledger.line, ledger.trial) == ([0, 12, 40], None)
    store.close()


def test_what_serves_changes_by_promotion_alone_and_goes_back_by_rollback(
    random_model_path, tmp_path
):
    async def work():
        async with Server(config(random_model_path, tmp_path)) as server:
            learner = server.learner
            begin = server.weights()
            with pytest.raises(ConfigError, match="no promotion to roll back"):
                await learner.rollback()
            for number in range(4):
                await server.talk(f"question {number}", reward=number % 2)
            await learner.turn()
            first = server.weights()
            assert not same(begin, first)
            assert same(first, server.weights("trained"))
            assert server.stack.engine.version == 1
            await learner.turn()
            assert server.stack.engine.version == 2
            assert not same(first, server.weights())
            assert await learner.rollback() == 1
            assert same(first, server.weights())
            assert same(first, server.weights("trained"))
            assert await learner.rollback() == 0
            assert same(begin, server.weights())
            assert server.stack.engine.version == 0
        async with Server(config(random_model_path, tmp_path)) as server:
            learner = server.learner
            assert same(begin, server.weights())
            assert same(begin, server.weights("trained"))
            for number in range(2):
                await server.talk(f"more {number}", reward=number % 2)
            await learner.turn()
            assert learner.models()["serving"]["version"] == 3  # no number is used twice
            kinds = [one["decision"] for one in learner.models()["history"]]
            assert kinds == ["start", "promote", "promote", "rollback", "rollback", "promote"]
        async with Server(config(random_model_path, tmp_path)) as again:
            assert again.stack.engine.version == 3
            assert not same(begin, again.weights())
            assert await again.learner.rollback() == 0
            assert same(begin, again.weights())

    run(work())


@grid(
    "override",
    [
        "model.lora_configs=[{name: own, lora_rank: 4, lora_alpha: 8}]",
        "algorithm.algorithm_type=ppo",
    ],
    quick=1,
)
def test_an_adapter_and_a_critic_go_back_and_on_with_the_weights(
    override, random_model_path, tmp_path
):
    async def work():
        repeat = ["algorithm.repeat_times=1"] if "ppo" in override else []
        settings = config(random_model_path, tmp_path, override, *repeat)
        async with Server(settings) as server:
            begin = server.weights()
            for number in range(4):
                await server.talk(f"question {number}", reward=number % 2)
            await server.learner.turn()
            first = server.weights()
            await server.learner.turn()
            assert await server.learner.rollback() == 1
            assert same(first, server.weights())
            assert same(first, server.weights("trained"))
            assert not same(begin, first)
        async with Server(settings) as server:
            assert same(first, server.weights())
            assert same(first, server.weights("trained"))
            assert await server.learner.rollback() == 0
            assert same(begin, server.weights())

    run(work())


def test_a_rollback_while_an_update_runs_leaves_that_update(random_model_path, tmp_path):
    async def work():
        async with Server(config(random_model_path, tmp_path)) as server:
            learner = server.learner
            begin = server.weights()
            for number in range(4):
                await server.talk(f"question {number}", reward=number % 2)
            await learner.turn()
            aside = learner._aside

            async def with_rollback(work):
                result = await aside(work)
                if getattr(work, "func", None) == learner._update:
                    learner._aside = aside
                    await learner.rollback()
                return result

            learner._aside = with_rollback
            await learner.turn()
            assert same(begin, server.weights())
            assert same(begin, server.weights("trained"))
            assert list(server.trained().values()) == [1, 1, None, None]
            await learner.turn()
            assert list(server.trained().values()) == [1, 1, 2, 2]
            assert server.stack.engine.version == 2

    run(work())


def test_where_the_newest_checkpoint_is_damaged_its_sessions_are_trained_again(
    random_model_path, tmp_path
):
    async def work():
        settings = config(random_model_path, tmp_path, by="live")
        async with Server(settings) as server:
            for number in range(4):
                await server.talk(f"question {number}", reward=number % 2)
            await server.learner.turn()
            await server.learner.turn()
            assert list(server.trained().values()) == [1, 1, 2, 2]
            folder = server.directory.checkpoint(2)
        (folder / "version.json").write_text("{}")
        async with Server(settings) as server:
            assert list(server.trained().values()) == [1, 1, None, None]
            await server.learner.turn()
            assert list(server.trained().values()) == [1, 1, 2, 2]

    run(work())


def test_a_version_whose_checkpoint_is_gone_is_not_gone_back_to(random_model_path, tmp_path):
    async def work():
        settings = config(
            random_model_path,
            tmp_path,
            "trainer.max_checkpoints_to_keep=2",
            "tuner.serving.max_staleness=9",
        )
        async with Server(settings) as server:
            for number in range(6):
                await server.talk(f"question {number}", reward=number % 2)
            for _ in range(3):
                await server.learner.turn()
            assert server.directory.checkpoint_steps() == [1, 2, 3]
            assert await server.learner.rollback() == 2
            assert await server.learner.rollback() == 1
            with pytest.raises(ConfigError, match="max_checkpoints_to_keep"):
                await server.learner.rollback()
            assert server.stack.engine.version == 1

    run(work())


@pytest.mark.long
@pytest.mark.parametrize("moment", ["update", "rename", "mark", "decide"])
def test_a_kill_at_any_moment_trains_no_session_twice(moment, random_model_path, tmp_path):
    """Killed in the second update: before its checkpoint, before its sessions are marked, or
    before it is promoted."""
    process = forked.begin(learning_killed.main, random_model_path, tmp_path, moment)
    process.join()
    assert process.exitcode == -signal.SIGKILL

    async def work():
        async with Server(config(random_model_path, tmp_path)) as server:
            kept = moment in ("mark", "decide")
            marks = list(server.trained().values())
            assert marks == [1, 1, 2, 2] if kept else [1, 1, None, None]
            assert server.stack.engine.version == 1  # the second was not promoted
            trained = server.weights("trained")
            assert same(server.weights(), trained) is not kept
            rows = read_metrics(server.directory.metrics, up_to=99)
            assert [row["step"] for row in rows] == ([1, 2] if kept else [1])
            assert await server.learner.turn() is not kept
            assert list(server.trained().values()) == [1, 1, 2, 2]
            for number in range(2):
                await server.talk(f"more {number}", reward=number % 2)
            await server.learner.turn()
            assert server.stack.engine.version == 3
            rows = read_metrics(server.directory.metrics, up_to=99)
            assert [row["step"] for row in rows] == [1, 2, 3]

    run(work())


def test_without_training_what_was_promoted_last_is_served(random_model_path, tmp_path):
    async def work():
        async with Server(config(random_model_path, tmp_path)) as server:
            for number in range(4):
                await server.talk(f"question {number}", reward=number % 2)
            await server.learner.turn()
            await server.learner.turn()
            await server.learner.rollback()
            folder = weights_to_serve(server.directory, server.store)
            assert folder == server.directory.checkpoint(1)
            assert server.directory.checkpoint_steps() == [0, 1, 2]

    run(work())


WRONG = ["{", "text", "[1]", None, -1, 10**18, b"\xff", '{"a": [1]}', "[" * 5000]


def test_a_damaged_decision_is_named_by_who_reads_what_serves(tmp_path):
    store = ServingStore(tmp_path / "serving.sqlite")
    ledger = Ledger(store)
    for kind, version in (("start", 0), ("promote", 12)):
        ledger.add(kind, version, serving=0, step=version, why="better")
    refused = 0
    for column in ("at", "kind", "version", "serving", "step", "reset", "why", "data"):
        ((whole,),) = store.ask(f"SELECT {column} FROM decisions WHERE number = 2")
        for wrong in WRONG:
            with contextlib.suppress(sqlite3.IntegrityError):
                store.change(f"UPDATE decisions SET {column} = ? WHERE number = 2", wrong)
            for read in (ledger.decisions, lambda: promoted_versions(store)):
                said = told(read)
                refused += said is not None
                assert said is None or "decision 2 about the weights is damaged" in said
        store.change(f"UPDATE decisions SET {column} = ? WHERE number = 2", whole)
    assert refused > 50
    assert ledger.line == [0, 12]
    store.close()
