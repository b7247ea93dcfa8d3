"""The one that counts: held-out answers get better through the loop in the open."""

import json
import re
from pathlib import Path

import pytest
import torch

from tuner.areal import (
    FinetuneSpec,
    GenerationHyperparameters,
    GRPOConfig,
    ModelRequest,
    PPOActor,
    RolloutEngine,
    StatefulDataLoader,
)

pytestmark = pytest.mark.long

DATA = Path(__file__).parents[2] / "examples" / "gsm8k" / "data"


def rows(split, count):
    lines = (DATA / f"{split}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines[:count]]


class MathWorkflow:
    """One answer to a word problem, right or wrong."""

    def __init__(self, gconfig, tokenizer):
        self.gconfig = gconfig
        self.tokenizer = tokenizer

    async def arun_episode(self, engine, data):
        text = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": data["question"]}],
            add_generation_prompt=True,
            tokenize=False,
        )
        prompt = self.tokenizer.encode(text, add_special_tokens=False)
        resp = await engine.agenerate(ModelRequest(input_ids=prompt, gconfig=self.gconfig))
        numbers = re.findall(r"\d+", self.tokenizer.decode(resp.output_tokens))
        right = bool(numbers) and numbers[-1] == data["answer"].rpartition("#### ")[2]
        length = resp.input_len + resp.output_len
        return {
            "input_ids": torch.tensor([resp.input_tokens + resp.output_tokens]),
            "logprobs": torch.tensor([[0.0] * resp.input_len + resp.output_logprobs]),
            "loss_mask": torch.tensor([[0] * resp.input_len + [1] * resp.output_len]),
            "versions": torch.tensor([[-1] * resp.input_len + resp.output_versions]),
            "rewards": torch.tensor([float(right)]),
            "attention_mask": torch.ones(1, length, dtype=torch.bool),
        }


def test_the_reward_rises_through_the_loop_in_the_open():
    config = GRPOConfig(seed=2)
    config.actor.optimizer.lr = 5e-4
    config.rollout.max_head_offpolicyness = 1
    config.rollout.max_concurrent_rollouts = 64
    actor, rollout = PPOActor(config.actor), RolloutEngine(config.rollout)
    actor.initialize(None, FinetuneSpec(1, 48, 8))
    rollout.initialize()
    gconfig = GenerationHyperparameters(max_new_tokens=40)
    workflow = MathWorkflow(gconfig, rollout.tokenizer)
    greedy = MathWorkflow(gconfig.new(greedy=True), rollout.tokenizer)
    held_out = rows("test", 40)

    def accuracy():
        return float(rollout.rollout_batch(held_out, greedy)["rewards"].mean())

    before = accuracy()
    dataloader = StatefulDataLoader(rows("train", 48), batch_size=8, shuffle=True)
    stale = []
    for _ in range(6):
        batch = rollout.prepare_batch(dataloader, workflow, group_size=8)
        batch["prox_logp"] = actor.compute_logp(batch)
        actor.compute_advantages(batch)
        metrics = actor.ppo_update(batch)
        actor.step_lr_scheduler()
        actor.update_weights()
        stale.append(metrics["stale_fraction"])
    rollout.destroy()
    after = accuracy()
    config.actor.run.close()
    assert after > before + 0.2
    assert max(stale) > 0  # batches were begun ahead of time
