"""A server that learns, without its doors: store, engine, trainer; and users who ask and judge."""

import asyncio
import json
from pathlib import Path

import torch

from tests.kit.agents import answer
from tuner.config.load import load_config
from tuner.gateway import SamplingDefaults
from tuner.rewards import final_answer, math_equal
from tuner.runs.directory import RunDirectory, make_private
from tuner.runs.stack import build_stack
from tuner.serving.learning.beside import build_learner, check_can_learn, learning_config
from tuner.serving.serving_store import ServingStore
from tuner.tasks.functions import JudgeOutput, WorkflowOutput

ROOT = Path(__file__).resolve().parents[2]
TINY, GSM8K = ROOT / "models/tiny_math", ROOT / "examples/gsm8k/data"
SYSTEM = "You are a helpful math problem solving agent."


def config(model, root, *overrides, by="always"):
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

    def open(self, *, task=None):
        ((number,),) = self.store.ask("SELECT COUNT(*) + 1 FROM sessions")
        id_ = f"s-{number:08x}"
        with self.store.writing():
            self.store.open(id_, key=id_.encode(), seed=number, task=task or {})
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
        text = [{"role": "user", "content": asked}]
        messages = about(asked) if isinstance(asked, dict) else text
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

    async def have_sessions_in_every_state(self):
        """And the first new weights."""
        for number in range(2):
            await self.talk(f"question {number}", reward=number % 2)
        await self.talk("not judged")
        self.open()
        await self.learner.turn()

    def judge_session(self, session_id, reward, call=None):
        self.store.reward(session_id, reward, call=call)

    async def talk(self, text, reward=None):
        """A session with one call, ended, and judged if there is a reward; its id."""
        session = self.open()
        await self.ask(session, text)
        self.end(session)
        if reward is not None:
            self.judge_session(session.id, reward)
        return session.id

    def trained(self):
        """The update that took each session; None where none has."""
        return {one.id: one.trained for one in self.store.sessions()}

    def weights(self, which="serving"):
        """A copy of the weights that serve, or of those that are trained."""
        model = {"serving": self.stack.served.model, "trained": self.stack.model}[which]
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def run(work):
    """The result of a coroutine."""
    return asyncio.run(work)


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


def about(task):
    """What the model is asked about a task."""
    return [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": task["question"]},
    ]


async def asking(task, model):
    return WorkflowOutput(response=await answer(model, about(task)))


async def judging(task, response):
    return JudgeOutput(reward=right(task, response))


def right(task, text):
    return math_equal(final_answer(text), final_answer(task["answer"]))


def problems(split, count):
    lines = (GSM8K / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines[:count]]


def gsm8k(root):
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
        by="held_out",
    )
