"""A server that learns while it serves: with which settings, from its users, and who sees it."""

import asyncio
import random

import openai
import pytest

from tests.serving.learning_parts import (
    Server,
    about,
    asking,
    config,
    gsm8k,
    judging,
    problems,
    right,
    run,
)
from tests.serving.server import ADMIN_KEY
from tuner import AsyncClient
from tuner.errors import ConfigError
from tuner.runs.directory import RunDirectory, make_private, read_metrics
from tuner.serving.hosting import running
from tuner.serving.learning.beside import check_can_learn, learning, learning_config
from tuner.tools.viewer.served import ServedSessions


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
        ("tuner.tasks.selector={}", "draws tasks, but users start sessions"),
        ("tuner.serving.promotion.by=held_out", "eval_tasksets"),
    ],
)
def test_what_a_server_cannot_learn_with_is_refused_by_name(override, named, tmp_path):
    more = ["tuner.algorithm.prompt=Be good."] if "prompt" in override else []
    if "loglinear" in override:
        more = ["synchronizer.sync_offset=1"]
    with pytest.raises(ConfigError, match=named):
        check_can_learn(config("models/tiny_math", tmp_path, override, *more))


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


def test_the_page_shows_sessions_and_what_was_decided_about_weights(random_model_path, tmp_path):
    async def work():
        async with Server(config(random_model_path, tmp_path)) as server:
            await server.have_sessions_in_every_state()
            found = ServedSessions(server.store.path.parent).summary()
            assert found["sessions"] == {
                "open": 1,
                "waiting for a reward": 1,
                "judged": 0,
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
        self.wanted = asyncio.Event()
        self.wanted.set()

    async def ask(self):
        while not self.over:
            await self.wanted.wait()
            task = self.rng.choice(self.problems)
            session = await self.client.open(task=task)
            answer = await self.openai.with_options(api_key=session.key).chat.completions.create(
                model="tiny_math", messages=about(task)
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


@pytest.mark.long
def test_a_served_model_learns_from_late_and_noisy_feedback_without_a_restart(tmp_path):
    async def work():
        settings = gsm8k(tmp_path)
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
                        promoted = [one for one in models.history if one["decision"] == "promote"]
                        # Not a number of promotions: the first one may bring the whole gain.
                        if sum(one["estimate"] for one in promoted) >= 0.4:
                            return models
                        assert models.learning["failure"] is None
                        # However slowly it learns here, nobody asks long before it has learned.
                        ahead = (
                            models.learning["sessions/waiting"] >= 2 * settings.buffer.batch_size
                        )
                        (users.wanted.clear if ahead else users.wanted.set)()
                        await asyncio.sleep(0.2)
                    return None

                models = await enough()
                users.wanted.set()
                at = len(users.right)
                while models is not None and len(users.right) < at + 128:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
                users.over = True
                await asyncio.gather(*asking_)
                assert models is not None, "promotions proved a gain below 0.4 in 3000 sessions"
                back = await users.client.rollback()
                assert back.serving["version"] < models.serving["version"]
        first, last = users.right[:96], users.right[-96:]
        assert sum(last) / 96 >= sum(first) / 96 + 0.15
        for row in read_metrics(directory.metrics, up_to=10**6):
            dropped = sum(v for k, v in row.items() if k.startswith("tokens/dropped/"))
            assert row["tokens/sampled"] == row["tokens/trained"] + dropped

    run(work())


@pytest.mark.long
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
