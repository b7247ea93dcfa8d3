"""Whether a candidate serves: what live sessions and held-out tasks say of it."""

import asyncio
from collections import Counter

import pytest

from tests.serving.learning_parts import (
    Server,
    asking,
    config,
    gsm8k,
    judging,
    problems,
    right,
    run,
    same,
)
from tuner.errors import TrainingError
from tuner.runs.directory import read_metrics
from tuner.serving.learning.proving import Pairs
from tuner.tasks.functions import JudgeOutput


def rewards_for(server, *, better):
    """What the users of a trial would say if the candidate were better, or worse."""
    for one in server.store.sessions(judged=False):
        if (found := server.learner.ledger.arm(one.id)) is not None:
            server.judge_session(one.id, float((found[1] == "candidate") == better))


@pytest.mark.long
@pytest.mark.parametrize("better", [True, False])
def test_live_sessions_promote_a_better_candidate_and_leave_a_worse_one(
    better, random_model_path, tmp_path
):
    async def work():
        settings = config(
            random_model_path,
            tmp_path,
            "tuner.serving.canary=0.5",
            "buffer.batch_size=64",
            by="live",
        )
        async with Server(settings) as server:
            learner, begin = server.learner, server.weights()
            for number in range(64):
                await server.talk(f"question {number}", reward=number % 2)
            await learner.turn()
            trained = server.weights("trained")
            assert learner.ledger.trial == 1
            assert same(begin, server.weights())
            during = [await server.talk(f"live {number}") for number in range(40)]
            arms = {learner.ledger.arm(id_)[1] for id_ in during}
            assert arms == {"serving", "candidate"}
            for id_ in during:  # each arm samples with its own weights
                candidate, arm = learner.ledger.arm(id_)
                assert server.store.session(id_).highest == (1 if arm == "candidate" else 0)
                assert candidate == 1
            held = [server.open() for _ in range(8)]
            assert len({id(session.service) for session in held}) == 2
            rewards_for(server, better=better)
            await learner.turn()
            assert learner.ledger.trial is None
            if better:
                assert server.stack.engine.version == 1
                assert same(trained, server.weights())
            else:
                assert server.stack.engine.version == 0
                assert same(begin, server.weights())
                assert same(begin, server.weights("trained"))
                assert learner.models()["history"][-1]["decision"] == "keep"
            service = server.stack.gateway.service
            assert all(session.service is service for session in held)

    run(work())


@pytest.mark.long
def test_a_trial_goes_on_after_a_restart_with_its_arms_and_what_was_counted(
    random_model_path, tmp_path
):
    settings = config(
        random_model_path, tmp_path, "tuner.serving.canary=0.5", "buffer.batch_size=64", by="live"
    )

    async def before():
        async with Server(settings) as server:
            for number in range(64):
                await server.talk(f"question {number}", reward=number % 2)
            await server.learner.turn()
            for number in range(6):
                await server.talk(f"live {number}", reward=1.0)
            await server.learner.turn()
            ids = [await server.talk(f"not judged yet {number}") for number in range(4)]
            return server.learner._canary.decision, *ids

    async def after(decision, ids):
        async with Server(settings) as server:
            assert server.learner._canary.decision == decision
            assert decision.sessions == 6
            for id_ in ids:
                session = server.stack.gateway.open_session(id_)
                server.learner.placed(session, new=False)
                candidate = server.learner.ledger.arm(id_)[1] == "candidate"
                version = session.service.engine.version
                assert version == (1 if candidate else 0)

    decision, *ids = run(before())
    run(after(decision, ids))


def pairs(rewards, failed=(0, 0)):
    return Pairs(rewards=rewards, failed=failed, metrics={})


def test_held_out_tasks_that_fail_with_a_candidate_keep_it_from_serving(tmp_path):
    rules = config("models/tiny_math", tmp_path).tuner.serving.promotion
    better = [(0.0, 1.0)] * 60
    assert pairs(better).decision(rules).verdict == "promote"
    assert pairs(better, failed=(1, 1)).decision(rules).verdict == "promote"
    found = pairs(better, failed=(0, 1)).decision(rules)
    assert found.verdict == "not yet"
    assert "1 held-out tasks failed with the candidate" in found.text
    worse = [(1.0, 0.0)] * 60
    assert pairs(worse, failed=(0, 1)).decision(rules).verdict == "keep"


def test_a_task_of_which_a_rollout_failed_is_no_pair_and_counts_for_who_failed(
    random_model_path, tmp_path
):
    fails = {
        "lost": [1, 2],
        "lost, too": [2, 3],
        "mended": [3, 4],
        "broken": range(1, 9),
        "said again": [1],
    }
    asked = Counter()  # the candidate is asked first; each twice, and again where that fails

    async def workflow(task, model):
        name = task["question"]
        asked[name] += 1
        if asked[name] in fails.get(name, ()):
            raise ValueError(name)
        return await asking(task, model)

    async def judge(task, response):
        return JudgeOutput(reward=asked[task["question"]] / 8)

    async def work():
        settings = config(
            random_model_path,
            tmp_path,
            "buffer.explorer_input.eval_tasksets=[{name: test, repeat_times: 2, "
            "rollout_args: {temperature: 1.0}}]",
            "explorer.max_retry_times=1",
            "explorer.runner_per_model=1",
            by="held_out",
        )
        tasks = [{"question": name} for name in ("sound", *fails)]
        async with Server(settings, (workflow, judge), {"test": tasks}) as server:
            own = await server.learner.versions.own()
            found = await server.learner._held_out.compare(0, 1, own)
            assert found.rewards == [(3.5 / 8, 1.5 / 8), (4.5 / 8, 2.5 / 8)]
            assert found.failed == (2, 3)

    run(work())


def test_nothing_is_proven_with_an_engine_that_has_failed(random_model_path, tmp_path, monkeypatch):
    async def work():
        settings = config(
            random_model_path,
            tmp_path,
            "buffer.explorer_input.eval_tasksets=[{name: test}]",
            by="held_out",
        )
        async with Server(settings, (asking, judging), {"test": []}) as server:
            own = await server.learner.versions.own()
            monkeypatch.setattr(type(own), "failure", "out of memory")
            with pytest.raises(TrainingError, match="out of memory"):
                await server.learner._held_out.compare(0, 1, own)
            monkeypatch.undo()

    run(work())


@pytest.mark.long
def test_a_candidate_that_users_misled_is_not_promoted_and_is_left(tmp_path):
    """Every thumb says the contrary of what is right; the held-out tasks know better."""

    async def work():
        settings = gsm8k(tmp_path)
        tasks = problems("train", 64)
        async with Server(settings, (asking, judging), {"test": problems("test", 50)}) as server:
            begin = server.weights()
            decided = []
            for _ in range(3):
                sessions = [server.open(task=task) for task in tasks]
                answers = await asyncio.gather(
                    *(server.ask(*one) for one in zip(sessions, tasks, strict=True))
                )
                for session, task, text in zip(sessions, tasks, answers, strict=True):
                    server.end(session)
                    server.judge_session(session.id, 1.0 - right(task, text))
                await server.learner.turn()
                decided = server.learner.models()["history"]
                if decided[-1]["decision"] == "keep" and decided[-1]["upper"] <= 0:
                    break
            assert "promote" not in [one["decision"] for one in decided]
            assert decided[-1]["decision"] == "keep"
            assert same(begin, server.weights())
            assert same(begin, server.weights("trained"))
            row = read_metrics(server.directory.metrics, up_to=99)[-1]
            assert row["eval/test/reward"] < 0.4

    run(work())


def test_with_both_proofs_live_sessions_begin_where_the_held_out_tasks_say_so(
    random_model_path, tmp_path
):
    async def work():
        settings = config(
            random_model_path,
            tmp_path,
            "buffer.explorer_input.eval_tasksets=[{name: test}]",
            by="both",
        )
        async with Server(settings, (asking, judging), {"test": []}) as server:
            learner = server.learner
            found = [pairs([(1.0, 1.0)] * 10), pairs([(0.0, 1.0)] * 60)]

            async def compare(*_):
                return found.pop(0)

            learner._held_out.compare = compare
            for number in range(4):
                await server.talk(f"question {number}", reward=number % 2)
            await learner.turn()
            assert learner.ledger.trial is None
            assert learner.models()["candidate"]["decision"] == "not yet"
            await learner.turn()
            assert learner.ledger.trial == 2
            assert server.stack.engine.version == 0

    run(work())
