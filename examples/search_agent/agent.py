"""The search agent: think, search, read, and search again or answer.

As in AReaL's notebook it writes plain text, `<search> query </search>` and
`<answer> ... </answer>`, and what the search found comes back between `<information>` and
`</information>`.
"""

import asyncio
import uuid
from typing import Any

import httpx
import torch
from retrieval import Retrieval
from texts import PROMPT_TEMPLATE, STOP, information, parse_answer, parse_search_query

from tuner.areal import (
    GenerationHyperparameters,
    InferenceEngine,
    ModelRequest,
    concat_padded_tensors,
)
from tuner.rewards import f1


class SearchAgentWorkflow:
    """One trajectory for a question; the reward is the answer's F1, and 0 where there is none.

    Args:
        gconfig: How to sample; its stop strings are set here.
        tokenizer: The model's.
        retrieval: Where to search.
        max_turns: Calls of the model.
        max_tokens: Tokens of a whole trajectory; no call begins beyond it.
        topk: Results of a search.
    """

    def __init__(
        self,
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        retrieval: Retrieval,
        *,
        max_turns: int,
        max_tokens: int,
        topk: int = 3,
    ) -> None:
        self.gconfig = gconfig.new(n_samples=1, stop=STOP)
        self.tokenizer = tokenizer
        # One for all episodes: making a client takes longer than a search.
        self.client = httpx.AsyncClient(
            base_url=retrieval.url,
            headers={"Authorization": f"Bearer {retrieval.key}"},
            timeout=30,
        )
        self.max_turns = max_turns
        self.max_tokens = max_tokens
        self.topk = topk

    async def arun_episode(
        self, engine: InferenceEngine, data: dict[str, Any]
    ) -> dict[str, torch.Tensor]:
        prompt = PROMPT_TEMPLATE.format(question=data["question"])
        input_ids = self.tokenizer.encode(prompt, add_special_tokens=False)
        logprobs = [0.0] * len(input_ids)
        loss_mask = [0] * len(input_ids)
        versions = [-1] * len(input_ids)
        rid, reward = uuid.uuid4().hex, 0.0
        for _ in range(self.max_turns):
            if len(input_ids) >= self.max_tokens:
                break
            request = ModelRequest(rid=rid, input_ids=input_ids, gconfig=self.gconfig)
            response = await engine.agenerate(request)
            input_ids = input_ids + response.output_tokens
            logprobs += response.output_logprobs
            loss_mask += [1] * response.output_len
            versions += response.output_versions

            text = self.tokenizer.decode(response.output_tokens)
            if (answer := parse_answer(text)) is not None:
                reward = max(f1(answer, truth) for truth in data["answer"])
                break
            if (query := parse_search_query(text)) is None:
                break
            found = information(await self.search(query))
            found_ids = self.tokenizer.encode(found, add_special_tokens=False)
            input_ids = input_ids + found_ids
            logprobs += [0.0] * len(found_ids)
            loss_mask += [0] * len(found_ids)
            versions += [-1] * len(found_ids)
        return {
            "input_ids": torch.tensor([input_ids]),
            "logprobs": torch.tensor([logprobs]),
            "loss_mask": torch.tensor([loss_mask]),
            "versions": torch.tensor([versions]),
            "rewards": torch.tensor([reward]),
            "attention_mask": torch.ones(1, len(input_ids), dtype=torch.bool),
        }

    async def search(self, query: str) -> list[dict[str, str]]:
        """Ask the retrieval server; its failure is the rollout's, never a reward of 0.

        Raises:
            httpx.HTTPError: It cannot be reached, or refuses the request.
        """
        response = await self.client.post(
            "/retrieve",
            json={"queries": [query], "topk": self.topk, "return_scores": False},
        )
        response.raise_for_status()
        results: list[dict[str, str]] = response.json()["result"][0]
        return results


class GroupedSearchAgentWorkflow:
    """Several trajectories for one question, sampled at once: a group for GRPO."""

    def __init__(self, workflow: SearchAgentWorkflow, group_size: int) -> None:
        self.workflow = workflow
        self.group_size = group_size

    async def arun_episode(
        self, engine: InferenceEngine, data: dict[str, Any]
    ) -> dict[str, torch.Tensor]:
        episodes = [self.workflow.arun_episode(engine, data) for _ in range(self.group_size)]
        group = concat_padded_tensors(await asyncio.gather(*episodes))
        assert group is not None, "no episode was rejected"
        return group
