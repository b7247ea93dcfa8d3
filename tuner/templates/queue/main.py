"""An agent and its environment with queues, as AReaL's users know them.

    python main.py [key=value ...]

Overrides take the keys of config.yaml, as in `buffer.total_steps=30`.
"""

import asyncio
import sys
from pathlib import Path
from typing import Any

import torch

from tuner import TunerError, tune
from tuner.areal import (
    Agent,
    BundledGenerationOutputs,
    EnvironmentService,
    GenerationHyperparameters,
    SequenceSample,
    configured_agent,
)
from tuner.config import load_config
from tuner.rewards import final_answer, math_equal
from tuner.runs.models import load_tokenizer
from tuner.tune import TINY_MODEL

CONFIG = Path(__file__).with_name("config.yaml")


class MathEnvironment(EnvironmentService):
    """Says what an answer is worth; one episode at a time has it to itself."""

    async def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        assert options is not None
        self.truth = options["answer"]
        return None, {}

    async def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        reward = math_equal(final_answer(action), self.truth)
        return "That is wrong. Try again.", reward, reward == 1.0, False, {}


class MathAgent(Agent):
    """Answers, and tries again where it is told to. It handles token ids itself."""

    def __init__(
        self,
        gconfig: GenerationHyperparameters,
        tokenizer_path: str,
        turn_level_discount: float,
        num_turns: int,
    ) -> None:
        self.gconfig = gconfig.new(n=1)
        self.tokenizer = load_tokenizer(tokenizer_path or str(TINY_MODEL))
        self.turn_level_discount = turn_level_discount
        self.num_turns = num_turns

    def encode(self, *messages: tuple[str, str]) -> list[int]:
        text = self.tokenizer.apply_chat_template(
            [{"role": role, "content": content} for role, content in messages],
            add_generation_prompt=True,
            tokenize=False,
        )
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    async def collect_trajectory(
        self,
        prompt: SequenceSample,
        env: EnvironmentService,
        obs_queue: asyncio.Queue[Any],
        act_queue: asyncio.Queue[BundledGenerationOutputs],
    ) -> list[SequenceSample]:
        task = prompt.metadata["task"]
        await env.reset(options=task)
        token_ids = self.encode(
            ("system", "You are a helpful math problem solving agent."),
            ("user", task["question"]),
        )
        turns: list[BundledGenerationOutputs] = []
        rewards: list[float] = []
        for _ in range(self.num_turns):
            await obs_queue.put((prompt.ids[0], token_ids, self.gconfig))
            act = await act_queue.get()
            answer = self.tokenizer.decode(act.output_ids[0], skip_special_tokens=True)
            feedback, reward, ended, _, _ = await env.step(answer)
            turns.append(act)
            rewards.append(reward)
            if ended:
                break
            token_ids = act.seqs[0] + self.encode(("user", feedback))
        for turn in reversed(range(len(rewards) - 1)):
            rewards[turn] += self.turn_level_discount * rewards[turn + 1]
        pairs = zip(turns, rewards, strict=True)
        return [sample(prompt.ids[0], turn, reward) for turn, reward in pairs]


def sample(qid: str, turn: BundledGenerationOutputs, reward: float) -> SequenceSample:
    """A turn with its return."""
    length = len(turn.seqs[0])
    return SequenceSample(
        ids=[qid],
        data={
            "packed_input_ids": torch.tensor(turn.seqs[0]),
            "packed_logprobs": torch.tensor(turn.logprobs[0]),
            "prompt_mask": torch.arange(length) < turn.prompt_len,
            "rewards": torch.tensor([reward]),
        },
        seqlens={
            "packed_input_ids": [[length]],
            "packed_logprobs": [[length - 1]],
            "prompt_mask": [[length]],
            "rewards": [[1]],
        },
    )


if __name__ == "__main__":
    try:
        workflow = configured_agent(load_config(CONFIG, overrides=sys.argv[1:]).tuner)
        print(tune(workflow, config_path=CONFIG, overrides=sys.argv[1:]))
    except TunerError as error:
        sys.exit(f"{type(error).__name__}: {error}")
