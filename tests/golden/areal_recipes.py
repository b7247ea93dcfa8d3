"""Small deterministic runs in AReaL's ways, in the public names of `tuner.areal` alone."""

from __future__ import annotations

import asyncio
from itertools import cycle
from pathlib import Path
from typing import Any

import openai
import torch

from tests.golden.recipes import TRAIN, make_model, recipe, run_rollouts
from tuner.areal import (
    Agent,
    AgentWorkflow,
    EnvironmentService,
    FinetuneSpec,
    GenerationHyperparameters,
    GRPOConfig,
    ModelRequest,
    PPOActor,
    QueueWorkflow,
    RolloutEngine,
    StatefulDataLoader,
    TokenWorkflow,
    concat_padded_tensors,
)

GCONFIG = GenerationHyperparameters(max_new_tokens=5)


def trajectory(prompt: list[int], output: list[int], logprobs: list[float], reward: float) -> Any:
    length = len(prompt) + len(output)
    return {
        "input_ids": torch.tensor([prompt + output]),
        "logprobs": torch.tensor([[0.0] * len(prompt) + logprobs]),
        "loss_mask": torch.tensor([[0] * len(prompt) + [1] * len(output)]),
        "rewards": torch.tensor([reward]),
        "attention_mask": torch.ones(1, length, dtype=torch.bool),
    }


class Turns:
    """One, two or three answers, each a trajectory with a reward of its own."""

    def __init__(self) -> None:
        self.count = 0

    async def arun_episode(self, engine: Any, data: Any) -> Any:
        self.count += 1
        ids, found = list(data["input_ids"]), []
        for turn in range(1 + self.count % 3):
            response = await engine.agenerate(ModelRequest(ids, GCONFIG))
            output = response.output_tokens
            found.append(trajectory(ids, output, response.output_logprobs, output[0] % 5))
            ids = ids + output + [50] * turn
        return concat_padded_tensors(found)


class Group:
    """Its own group of answers at the same time."""

    async def arun_episode(self, engine: Any, data: Any) -> Any:
        ids = list(data["input_ids"])
        responses = await asyncio.gather(
            *[engine.agenerate(ModelRequest(ids, GCONFIG)) for _ in range(2)]
        )
        return concat_padded_tensors(
            [
                trajectory(ids, r.output_tokens, r.output_logprobs, r.output_tokens[0] % 5)
                for r in responses
            ]
        )


class Stepping(EnvironmentService):
    """Rewards an action with its first token."""

    async def reset(self, seed: Any = None, options: Any = None) -> Any:
        return None, {}

    async def step(self, action: Any) -> Any:
        return None, float(action % 5), True, False, {}


class Asking(Agent):
    """Asks once, for two answers."""

    async def collect_trajectory(
        self, prompt: Any, env: Any, obs_queue: Any, act_queue: Any
    ) -> Any:
        await env.reset()
        ids = prompt.data["packed_prompts"].tolist()
        await obs_queue.put((prompt.ids[0], ids, GCONFIG.new(n_samples=2)))
        act = await act_queue.get()
        found = []
        for output, logprobs in zip(act.output_ids, act.output_logprobs, strict=True):
            _, reward, *_ = await env.step(output[0])
            found.append(trajectory(list(act.prompt_ids), list(output), list(logprobs), reward))
        return found


class Calling:
    """An agent that sees a URL and a key, and rewards its calls by their ids."""

    async def run(self, data: Any, **extra: Any) -> Any:
        async with openai.AsyncOpenAI(
            base_url=extra["base_url"], api_key=extra["api_key"], http_client=extra["http_client"]
        ) as client:
            rewards = {}
            for text in (data["question"], "And?"):
                answer = await client.chat.completions.create(
                    model="default", messages=[{"role": "user", "content": text}], max_tokens=4
                )
                content = answer.choices[0].message.content or ""
                rewards[answer.id] = float(sum(map(ord, content)) % 5)
        return rewards


def loop(folder: Path, *, prox: bool = False, prepare: bool = False, **settings: Any) -> list[Any]:
    """Three steps of the loop in the open; what the batches held, and what the updates said."""
    tuner = settings.pop("tuner", {})
    config = GRPOConfig(
        fileroot=str(folder),
        tuner={**tuner, "tuner": {**tuner.get("tuner", {}), "deterministic": True}},
        **settings,
    )
    config.actor.path = str(make_model(folder / "model"))
    config.actor.optimizer.lr = 0.01
    actor, rollout = PPOActor(config.actor), RolloutEngine(config.rollout)
    actor.initialize(None, FinetuneSpec(1, len(TRAIN), 2))
    rollout.initialize()
    loader = StatefulDataLoader(TRAIN, 2, shuffle=True)
    rows, workflow, seen = cycle(loader), Turns(), []
    for step in range(3):
        if prepare:
            batch = rollout.prepare_batch(loader, workflow, group_size=3)
        else:
            batch = rollout.rollout_batch(
                next(rows), Group() if step == 1 else workflow, group_size=3
            )
        if prox:
            batch["prox_logp"] = actor.compute_logp(batch)
        actor.compute_advantages(batch)
        metrics = actor.ppo_update(batch)
        actor.step_lr_scheduler()
        actor.update_weights()
        seen.append({"batch": {key: batch[key] for key in sorted(batch)}, "metrics": metrics})
    actor.save(folder / "saved")
    rollout.destroy()
    config.actor.run.close()
    return seen


@recipe
def areal(folder: Path) -> Any:
    return loop(folder, prox=True)


@recipe
def areal_prepared(folder: Path) -> Any:
    return loop(folder, prepare=True, turn_discount=0.5)


@recipe
def areal_critic(folder: Path) -> Any:
    ppo = {"algorithm": {"algorithm_type": "ppo"}, "tuner": {"critic": {"lr": 0.01}}}
    return loop(folder, tuner=ppo)


@recipe
def areal_lora(folder: Path) -> Any:
    return loop(folder, tuner={"model": {"lora_configs": [{"lora_rank": 2}]}})


@recipe
def areal_tokens(folder: Path) -> None:
    run_rollouts(folder, workflow=TokenWorkflow(Turns()), judge=None)


@recipe
def areal_queues(folder: Path) -> None:
    rows = [{**row, "query_id": row["question"]} for row in TRAIN]
    run_rollouts(folder, workflow=QueueWorkflow(Asking(), Stepping), judge=None, rows=rows)


@recipe
def areal_agent(folder: Path) -> None:
    run_rollouts(folder, workflow=AgentWorkflow(Calling()), judge=None)
