"""One agent, written twice: try, be told that it was wrong, try again.

`solve` is a workflow function that talks through the OpenAI client. `MathMultiTurnAgent` with
`MathEnvironment` is AReaL's queue agent, which handles token ids itself. Both stop when the answer
is right, and both value an early success: a turn is worth what the next one is, discounted.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

import torch

from tuner import TrinityChatModel, WorkflowOutput
from tuner.areal import (
    Agent,
    BundledGenerationOutputs,
    EnvironmentService,
    GenerationHyperparameters,
    SequenceSample,
    register_agent,
    register_environment,
)
from tuner.rewards import final_answer, math_equal
from tuner.runs.models import load_tokenizer

SYSTEM_PROMPT = "You are a helpful math problem solving agent."
WRONG = "Unfortunately your answer is wrong. Let's try again."
TURNS = 3


def messages_of(question: str) -> list[dict[str, str]]:
    """The conversation that the agent begins with."""
    return [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": question},
    ]


def right(answer: str, solution: str) -> bool:
    """Whether an answer, without its reasoning, ends in the solution's number."""
    said = final_answer(answer.rpartition("</think>")[2])
    return math_equal(said, final_answer(solution)) == 1.0


# The workflow function


async def solve(task: dict[str, Any], model: TrinityChatModel) -> WorkflowOutput:
    """Up to three tries; the reward is 1 if one is right. `tuner.algorithm.turn_discount` takes it
    back to the tries before."""
    return await _solve(task, model, {})


async def solve_greedily(task: dict[str, Any], model: TrinityChatModel) -> WorkflowOutput:
    """The same without chance, to measure."""
    return await _solve(task, model, {"temperature": 0})


async def _solve(
    task: dict[str, Any], model: TrinityChatModel, sampling: dict[str, Any]
) -> WorkflowOutput:
    messages = messages_of(task["question"])
    for turn in range(1, TURNS + 1):
        completion = await model.client.chat.completions.create(
            model=model.model_name, messages=messages, **sampling
        )
        message = completion.choices[0].message
        if right(message.content or "", task["answer"]):
            return WorkflowOutput(response=message.content, reward=1.0, metrics={"tries": turn})
        answer = message.model_dump(exclude_none=True)
        messages += [answer, {"role": "user", "content": WRONG}]
    return WorkflowOutput(response=message.content, reward=0.0, metrics={"tries": TURNS + 1})


# The queue agent and its environment


class MathEnvironment(EnvironmentService):
    """Says which answers to a question are right. Without state, so that all episodes share it.

    Args:
        solutions: By the question's id.
    """

    def __init__(self, solutions: Mapping[str, str]) -> None:
        self.solutions = solutions

    async def reset(
        self, seed: int | None = None, options: Any = None
    ) -> tuple[Any, dict[str, Any]]:
        return None, {}

    async def step(
        self, action: tuple[str, list[str]]
    ) -> tuple[Any, list[bool], bool, bool, dict[str, Any]]:
        qid, answers = action
        return None, [right(answer, self.solutions[qid]) for answer in answers], True, False, {}


class MathMultiTurnAgent(Agent):
    """AReaL's multi-turn agent; its trajectory has one sequence for each turn, with its return."""

    def __init__(
        self,
        gconfig: GenerationHyperparameters,
        tokenizer_path: str,
        turn_level_discount: float = 0.5,
        num_turns: int = TURNS,
    ) -> None:
        self.gconfig = gconfig.new(n=1)
        self.tokenizer = load_tokenizer(tokenizer_path)
        self.turn_level_discount = turn_level_discount
        self.num_turns = num_turns
        feedback = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": WRONG}], add_generation_prompt=True, tokenize=False
        )
        self.feedback_ids: list[int] = self.tokenizer.encode(
            f"\n{feedback}", add_special_tokens=False
        )

    async def collect_trajectory(
        self,
        prompt: SequenceSample,
        env: EnvironmentService,
        obs_queue: asyncio.Queue[Any],
        act_queue: asyncio.Queue[BundledGenerationOutputs],
    ) -> list[SequenceSample]:
        await env.reset()
        qid = prompt.ids[0]
        token_ids = prompt.data["packed_prompts"].tolist()
        turns: list[BundledGenerationOutputs] = []
        rewards: list[float] = []
        for _ in range(self.num_turns):
            await obs_queue.put((qid, token_ids, self.gconfig))
            act = await act_queue.get()
            _, success, *_ = await env.step(
                (
                    qid,
                    [
                        self.tokenizer.decode(ids, skip_special_tokens=True)
                        for ids in act.output_ids
                    ],
                )
            )
            turns.append(act)
            rewards.append(float(success[0]))
            if success[0]:
                break
            # A try that was cut off at its limit has not ended its turn.
            end = [self.tokenizer.eos_token_id] if act.no_eos[0] else []
            token_ids = act.seqs[0] + end + self.feedback_ids
        for turn in reversed(range(len(rewards) - 1)):
            rewards[turn] += self.turn_level_discount * rewards[turn + 1]
        return [_sample(qid, turns, rewards)]


def _sample(
    qid: str, turns: list[BundledGenerationOutputs], rewards: list[float]
) -> SequenceSample:
    """The turns as one sample with a sequence for each."""
    lengths = [len(act.seqs[0]) for act in turns]
    prompts = [act.prompt_len for act in turns]
    return SequenceSample(
        ids=[qid],
        data={
            "packed_input_ids": torch.tensor([token for act in turns for token in act.seqs[0]]),
            "packed_logprobs": torch.tensor([p for act in turns for p in act.logprobs[0]]),
            "prompt_mask": torch.cat(
                [torch.arange(n) < prompt for n, prompt in zip(lengths, prompts, strict=True)]
            ),
            "rewards": torch.tensor(rewards),
        },
        seqlens={
            "packed_input_ids": [lengths],
            "packed_logprobs": [[n - 1 for n in lengths]],
            "prompt_mask": [lengths],
            "rewards": [[1] * len(turns)],
        },
    )


register_agent("retry", MathMultiTurnAgent)
register_environment("retry", MathEnvironment)
