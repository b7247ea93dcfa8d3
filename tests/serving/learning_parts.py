"""A server that learns, without its doors: store, engine, trainer; and users who ask and judge."""

import asyncio

from tuner.assembly.stack import build_stack
from tuner.config.load import load_config
from tuner.gateway import SamplingDefaults
from tuner.run.directory import RunDirectory, make_private
from tuner.serving.learning.beside import build_learner, check_can_learn, learning_config
from tuner.serving.serving_store import ServingStore


def config(model, root, *overrides, by="always", **sections):
    return load_config(
        None,
        settings={
            "project": "p",
            "name": "served",
            "checkpoint_root_dir": str(root),
            "model": {"model_path": str(model), "max_response_tokens": 6},
            "algorithm": {"repeat_times": 2, "optimizer": {"lr": 0.01}},
            "buffer": {"batch_size": 2},
            "tuner": {"serving": {"promotion": {"by": by}}},
            **sections,
        },
        overrides=overrides,
    )


class Server:
    """Everything of a server but its doors; one `Server` after another is a server started again.

    Args:
        config: The effective configuration.
        functions: Workflow and judge, for evaluation sets.
        eval_tasks: Rows of each evaluation set.
    """

    def __init__(self, config, functions=(None, None), eval_tasks=None):
        self.workflow, self.judge = functions
        self.eval_tasks = eval_tasks or {}
        check_can_learn(config)
        self.config = learning_config(config)

    async def __aenter__(self):
        directory = RunDirectory(self.config.run_dir)
        make_private(directory.path)
        self.directory = directory
        self.store = ServingStore(directory.path / "serving.sqlite")
        self.stack = build_stack(self.config, workflow=self.workflow, judge=self.judge)
        self.learner = build_learner(
            self.config, self.stack, self.store, directory, self.eval_tasks
        )
        await self.learner.begin()
        return self

    async def __aexit__(self, *_):
        await self.learner.aclose()
        await self.stack.aclose()
        self.store.close()

    def open(self, *, group=None, task=None):
        ((number,),) = self.store.ask("SELECT COUNT(*) + 1 FROM sessions")
        id_ = f"s-{number:08x}"
        with self.store.writing():
            self.store.open(id_, key=id_.encode(), seed=number, group=group, task=task or {})
            model = self.config.model
            session = self.stack.gateway.open_session(
                id_,
                seed=number,
                defaults=SamplingDefaults(
                    temperature=model.temperature, max_tokens=model.max_response_tokens
                ),
            )
        self.learner.placed(session, new=True)
        return session

    async def ask(self, session, asked):
        """The answer to a text, or to the question of a task."""
        messages = [{"role": "user", "content": asked}]
        if isinstance(asked, dict):
            system = "You are a helpful math problem solving agent."
            messages = [
                {"role": "system", "content": system},
                {"role": "user", "content": asked["question"]},
            ]
        async with session.async_client() as client:
            answer = await client.chat.completions.create(
                model=session.model_name, messages=messages
            )
        return answer.choices[0].message.content or ""

    def end(self, session):
        """Seal a session, and keep what it did."""
        self.store.add_calls(session.id, session.seal())
        self.learner.noted(session.id)
        self.store.end(session.id)

    def judge_session(self, session_id, reward, call=None):
        self.store.reward(session_id, reward, call=call)

    async def talk(self, text, reward=None, *, group=None):
        """A session with one call, ended, and judged if there is a reward; its id."""
        session = self.open(group=group)
        answer = await self.ask(session, text)
        self.end(session)
        if callable(reward):
            reward = reward(text, answer)
        if reward is not None:
            self.judge_session(session.id, reward)
        return session.id

    def trained(self):
        """The update that took each session; None where none has."""
        return {one.id: one.trained for one in self.store.sessions()}

    def weights(self, which="serving"):
        """A copy of the weights that serve, are trained, or are tried."""
        model = {
            "serving": self.stack.served.model if self.stack.served else None,
            "trained": self.stack.model,
        }[which]
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def run(work):
    """The result of a coroutine."""
    return asyncio.run(work)
