"""The multi-turn math agent and its environment as the legacy documents have them, with the import
lines changed and the bodies that they leave out filled in as in the code they describe."""

import asyncio
import re

import torch

from tuner.areal import (
    Agent,
    BundledGenerationOutputs,
    EnvironmentService,
    GenerationHyperparameters,
    SequenceSample,
    register_agent,
    register_environment,
)
from tuner.runs.models import load_tokenizer


def math_verify_call(id2info, answers, qids):
    """1 for an answer that ends in the solution."""
    found = [re.findall(r"\d+", answer) for answer in answers]
    return [
        int(bool(numbers) and numbers[-1] == id2info[qid]["solution"])
        for numbers, qid in zip(found, qids, strict=True)
    ]


class MathCodeSingleStepEnv(EnvironmentService):
    def __init__(self, solutions: dict):
        self.id2info = {qid: {"task": "math", "solution": s} for qid, s in solutions.items()}

    async def reset(self, seed=None, options=None):
        return None, {}

    async def step(self, action: tuple[str, list[str]]):
        qid, answers = action
        group_size = len(answers)
        qid = qid.split("@")[0]
        cur_task = self.id2info[qid]["task"]
        assert cur_task == "math"

        format_rewards = await asyncio.to_thread(
            math_verify_call,
            self.id2info,
            answers,
            [qid for _ in range(group_size)],
        )

        return None, format_rewards, True, False, {}


class MathMultiTurnAgent(Agent):
    def __init__(
        self,
        gconfig: GenerationHyperparameters,
        tokenizer_path: str,
        turn_level_discount: float = 1.0,
        num_turns: int = 5,
        my_param: float = 1.0,
    ):
        self.gconfig = gconfig.new(n=1)
        self.tokenizer = load_tokenizer(tokenizer_path)
        self.turn_level_discount = turn_level_discount
        self.num_turns = num_turns
        self.my_param = my_param

    async def collect_trajectory(
        self,
        prompt: SequenceSample,
        env: EnvironmentService,
        obs_queue: asyncio.Queue,
        act_queue: asyncio.Queue,
    ) -> list[SequenceSample]:
        await env.reset()

        assert prompt.bs == 1
        prompt_token_ids = prompt.data["packed_prompts"].cpu().numpy().tolist()
        qid = prompt.ids[0]
        token_ids = prompt_token_ids
        all_rewards = []
        keys = ["packed_input_ids", "prompt_mask", "packed_logprobs", "rewards"]
        data = {key: [] for key in keys}
        seqlens = {key: [[]] for key in keys}

        for _turn in range(self.num_turns):
            await obs_queue.put((qid, token_ids, self.gconfig))
            act: BundledGenerationOutputs = await act_queue.get()

            answers = [self.tokenizer.decode(seq[act.prompt_len :]) for seq in act.seqs]
            _, success, *_ = await env.step((qid, answers))
            all_rewards.append(float(success[0]))

            data["packed_input_ids"].extend(list(act.seqs[0]))
            data["packed_logprobs"].extend(list(act.logprobs[0]))
            data["prompt_mask"].extend(
                [1] * act.prompt_len + [0] * (act.seqlens[0] - act.prompt_len)
            )
            seqlens["packed_input_ids"][0].append(act.seqlens[0])
            seqlens["packed_logprobs"][0].append(act.seqlens[0] - 1)
            seqlens["prompt_mask"][0].append(act.seqlens[0])
            seqlens["rewards"][0].append(1)

            token_ids = list(act.seqs[0])

            feedback = None
            if success[0]:
                feedback = "Congratulations! You are correct!"
            else:
                feedback = "Unfortunately your answer is wrong. Let's try again."

            feedback = "\n" + self.tokenizer.apply_chat_template(
                [dict(content=feedback, role="user")],  # noqa: C408  # as in the document
                add_generation_prompt=True,
                tokenize=False,
            )
            feedback = self.tokenizer(feedback)["input_ids"]
            token_ids.extend(feedback)

        for i in reversed(range(len(all_rewards) - 1)):
            all_rewards[i] = all_rewards[i] + all_rewards[i + 1] * self.turn_level_discount
        data["rewards"] = all_rewards

        dtypes = {
            "packed_input_ids": torch.long,
            "prompt_mask": torch.bool,
            "packed_logprobs": torch.float32,
            "rewards": torch.float32,
        }
        return [
            SequenceSample(
                keys=keys,
                ids=[qid],
                dtypes=dtypes,
                trailing_shapes=dict.fromkeys(keys, ()),
                seqlens=seqlens,
                data={key: torch.tensor(data[key], dtype=dtypes[key]) for key in keys},
            )
        ]


register_agent("math-multi-turn", MathMultiTurnAgent)
register_environment("math-code-single-step", MathCodeSingleStepEnv)
