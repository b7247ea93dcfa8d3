"""Learning while serving: what is taken, what it becomes, what serves, and what a kill leaves."""

import asyncio
import json
import random
import signal
from pathlib import Path

import openai
import pytest
import torch

from tests import forked
from tests.serving import learning_killed
from tests.serving.learning_parts import Server, config, run
from tests.serving.server import ADMIN_KEY
from tuner import AsyncClient
from tuner.errors import ConfigError
from tuner.functions.outputs import JudgeOutput, WorkflowOutput
from tuner.rewards import final_answer, math_equal
from tuner.run.directory import RunDirectory, make_private, read_metrics
from tuner.serving.held_out import Pairs
from tuner.serving.hosting import running, weights_to_serve
from tuner.serving.judged import Groups, chosen, units
from tuner.serving.learning import check_can_learn, learning, learning_config
from tuner.serving.ledger import Ledger
from tuner.serving.serving_store import ServingStore
from tuner.serving.stored import StoredSession
from tuner.viewer.reader import served

ROOT = Path(__file__).resolve().parents[2]
TINY, GSM8K = ROOT / "models/tiny_math", ROOT / "examples/gsm8k/data"


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


def taken(sessions, groups=Groups(), *, batch=2, repeat=4, compared=True):  # noqa: B008
    ready = units(sessions, groups, batch=batch, repeat=repeat, compared=compared)
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


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("algorithm.algorithm_type=sft", "recorded data"),
        ("algorithm.algorithm_type=prompt_distill", "rewards"),
        ("algorithm.optimizer.lr_scheduler_type=cosine", "lr_scheduler_type"),
        ("algorithm.optimizer.lr_warmup_steps_ratio=0.1", "lr_warmup_steps_ratio"),
        ("buffer.batch_size=1", "batch_size"),
        ("tuner.algorithm.proximal=loglinear", "loglinear"),
        ("tuner.deterministic=true", "deterministic"),
        ("tuner.tasks.selector={}", "draws tasks, and sessions are begun by users"),
        ("tuner.serving.promotion.by=held_out", "eval_tasksets"),
    ],
)
def test_what_a_server_cannot_learn_with_is_refused_by_name(override, named, tmp_path):
    more = ["tuner.algorithm.prompt=Be good."] if "prompt" in override else []
    if "loglinear" in override:
        more = ["synchronizer.sync_offset=1"]
    with pytest.raises(ConfigError, match=named):
        check_can_learn(config("models/tiny_math", tmp_path, override, *more))


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


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


def test_what_serves_changes_by_promotion_alone_and_goes_back_by_rollback(
    random_model_path, tmp_path
):
    async def work():
        async with Server(config(random_model_path, tmp_path)) as server:
            learner = server.learner
            begin = server.weights()
            with pytest.raises(ConfigError, match="nothing was promoted"):
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


@pytest.mark.parametrize(
    "override",
    [
        "model.lora_configs=[{name: own, lora_rank: 4, lora_alpha: 8}]",
        "algorithm.algorithm_type=ppo",
    ],
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


def rewards_for(server, *, better):
    """What the users of a trial would say if the candidate were better, or worse."""
    for one in server.store.sessions(judged=False):
        if (found := server.learner.ledger.arm(one.id)) is not None:
            server.judge_session(one.id, float((found[1] == "candidate") == better))


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


async def asking(task, model):
    answer = await model.client.chat.completions.create(
        model=model.model_name,
        messages=[
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": task["question"]},
        ],
    )
    return WorkflowOutput(response=answer.choices[0].message.content or "")


async def judging(task, response):
    return JudgeOutput(reward=right(task, response))


SYSTEM = "You are a helpful math problem solving agent."


def right(task, text):
    return math_equal(final_answer(text), final_answer(task["answer"]))


def problems(split, count):
    lines = (GSM8K / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines[:count]]


def gsm8k(root, *overrides, by):
    return config(
        TINY,
        root,
        "model.max_model_len=512",
        "model.max_response_tokens=96",
        "trainer.max_token_len_per_gpu=2048",
        "buffer.batch_size=64",
        "explorer.runner_per_model=64",
        "algorithm.optimizer.lr=1e-3",
        f"buffer.explorer_input.eval_tasksets=[{{name: test, path: {GSM8K}, split: test}}]",
        "tuner.serving.promotion.effect=0.1",
        *overrides,
        by=by,
    )


def test_a_candidate_that_users_misled_is_not_promoted_and_is_left(tmp_path):
    """Every thumb says the contrary of what is right; the held-out tasks know better."""

    async def work():
        settings = gsm8k(tmp_path, by="held_out")
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


def test_where_training_fails_serving_goes_on_and_says_why(random_model_path, tmp_path):
    async def work():
        async with Server(config(random_model_path, tmp_path)) as server:
            for number in range(2):
                await server.talk(f"question {number}", reward=number % 2)
            server.learner._trainer.optimizer.step_if_finite = None  # as a library that changed
            await server.learner.run()
            assert "TypeError" in server.learner.models()["learning"]["failure"]
            await server.talk("still there?")
            assert list(server.trained().values()) == [None, None, None]

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


def test_the_page_shows_sessions_and_what_was_decided_about_weights(random_model_path, tmp_path):
    async def work():
        async with Server(config(random_model_path, tmp_path)) as server:
            for number in range(2):
                await server.talk(f"question {number}", reward=number % 2)
            await server.talk("not judged")
            server.open()
            await server.learner.turn()
            found = served(server.store.path)
            assert found["sessions"] == {
                "open": 1,
                "ended": 3,
                "not judged": 2,
                "judged, not trained": 0,
                "trained": 2,
            }
            latest, first = found["decisions"]
            assert (latest["decision"], latest["version"], latest["beside"]) == ("promote", 1, 0)
            assert first["decision"] == "start"

    run(work())


class Users:
    """Everybody who asks a server: their thumbs come late, some of them lie, some never come.

    Args:
        url: Where it listens.
    """

    def __init__(self, url):
        self.client = AsyncClient(url, key=ADMIN_KEY)
        self.openai = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
        self.rng = random.Random(7)
        self.problems = problems("train", 500)
        self.right, self.late, self.over = [], [], False

    async def ask(self):
        while not self.over:
            task = self.rng.choice(self.problems)
            session = await self.client.open(task=task)
            answer = await self.openai.with_options(api_key=session.key).chat.completions.create(
                model="tiny_math",
                messages=[
                    {"role": "system", "content": SYSTEM},
                    {"role": "user", "content": task["question"]},
                ],
            )
            await session.end()
            self.right.append(right(task, answer.choices[0].message.content or ""))
            if self.rng.random() < 0.9:
                thumb = abs(self.right[-1] - (self.rng.random() < 0.05))
                due = len(self.right) + self.rng.randrange(32)
                self.late.append((due, session, thumb))
            given = [one for one in self.late if one[0] <= len(self.right)]
            self.late = [one for one in self.late if one[0] > len(self.right)]
            for _, session, thumb in given:
                await session.reward(thumb)


def test_a_served_model_learns_from_late_and_noisy_feedback_without_a_restart(tmp_path):
    async def work():
        settings = gsm8k(tmp_path, by="held_out")
        check_can_learn(settings)
        directory = RunDirectory(settings.run_dir)
        make_private(directory.path)
        directory.create()
        server = running(
            learning_config(settings),
            directory,
            ADMIN_KEY,
            workflow=asking,
            judge=judging,
            beside=learning({"test": problems("test", 60)}),
        )
        async with server as served:
            users = Users(served.door.base_url.removesuffix("/v1"))
            async with users.client, users.openai:
                asking_ = [asyncio.ensure_future(users.ask()) for _ in range(24)]

                async def enough():
                    while len(users.right) < 3000:
                        models = await users.client.models()
                        if [one["decision"] for one in models.history].count("promote") >= 2:
                            return models
                        assert models.learning["failure"] is None
                        await asyncio.sleep(0.2)
                    return None

                models = await enough()
                at = len(users.right)
                while models is not None and len(users.right) < at + 128:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
                users.over = True
                await asyncio.gather(*asking_)
                back = await users.client.rollback()
                assert back.serving["version"] < models.serving["version"]
        assert models is not None, "nothing was promoted in 3000 sessions"
        first, last = users.right[:96], users.right[-96:]
        assert sum(last) / 96 >= sum(first) / 96 + 0.15
        for row in read_metrics(directory.metrics, up_to=10**6):
            dropped = sum(v for k, v in row.items() if k.startswith("tokens/dropped/"))
            assert row["tokens/sampled"] == row["tokens/trained"] + dropped

    run(work())


def test_a_servers_sessions_keep_their_arms_over_its_doors_and_after_a_restart(
    random_model_path, tmp_path
):
    settings = config(
        random_model_path,
        tmp_path,
        "tuner.serving.canary=0.5",
        "buffer.batch_size=4",
        by="live",
    )

    def started():
        directory = RunDirectory(settings.run_dir)
        make_private(directory.path)
        directory.create()
        return running(learning_config(settings), directory, ADMIN_KEY, beside=learning({}))

    async def ask(url, session):
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=session.key) as client:
            await client.chat.completions.create(
                model="served", messages=[{"role": "user", "content": session.id}]
            )

    async def versions(server):
        """The versions that sampled each session, and its arm."""
        ledger = server.live.onlooker.ledger
        return {
            one.id: (one.lowest, one.highest, ledger.arm(one.id)) for one in server.store.sessions()
        }

    async def before():
        async with started() as server:
            url = server.door.base_url.removesuffix("/v1")
            async with AsyncClient(url, key=ADMIN_KEY) as client:
                for number in range(4):
                    session = await client.open()
                    await ask(url, session)
                    await session.reward(number % 2)
                    await session.end()
                while (models := await client.models()).candidate is None:
                    assert models.learning["failure"] is None
                    await asyncio.sleep(0.05)
                sessions = [await client.open() for _ in range(16)]
                for session in sessions:
                    await ask(url, session)
            return sessions, await versions(server)

    async def after(sessions):
        async with started() as server:
            url = server.door.base_url.removesuffix("/v1")
            for session in sessions:
                await ask(url, session)
            return await versions(server)

    sessions, first = run(before())
    second = run(after(sessions))
    arms = set()
    for session in sessions:
        low, high, (candidate, arm) = first[session.id]
        arms.add(arm)
        assert candidate == 1
        assert low == high == (1 if arm == "candidate" else 0)
        assert second[session.id] == first[session.id]
    assert arms == {"serving", "candidate"}
