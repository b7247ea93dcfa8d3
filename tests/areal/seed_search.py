"""The notebook's search agent with its import lines changed and its double append removed."""

import asyncio
import re
import uuid

import torch

from tuner.areal import InferenceEngine, ModelRequest, concat_padded_tensors

PROMPT_TEMPLATE = "User:\n{question}\n\nAssistant:\n<think>"


async def call_search_tool(queries, topk, return_scores):
    return [[{"wikipedia_title": "t", "contents": query} for query in queries][:topk]]


def parse_search_query(text):
    pattern = r"<search>(.*?)</search>"
    matches = re.findall(pattern, text, re.DOTALL)
    if matches:
        return matches[-1].strip()
    return None


def parse_answer(text):
    pattern = r"<answer>(.*?)</answer>"
    matches = re.findall(pattern, text, re.DOTALL)
    if matches:
        return matches[-1].strip()
    return None


def f1_score(pred_ans, gt):
    pred_tokens = set(pred_ans.strip().lower().split())
    gt_tokens = set(gt.strip().lower().split())
    if not gt_tokens or not pred_tokens:
        return 0
    common_tokens = pred_tokens & gt_tokens
    precision = len(common_tokens) / len(pred_tokens)
    recall = len(common_tokens) / len(gt_tokens)
    return 2 * precision * recall / (precision + recall) if precision + recall > 0 else 0


class SearchAgentWorkflow:
    def __init__(self, gconfig, tokenizer, max_tokens, max_turns, verbose):
        self.gconfig = gconfig
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens
        self.max_turns = max_turns
        self.verbose = verbose

    async def arun_episode(self, engine: InferenceEngine, data):
        prompt = PROMPT_TEMPLATE.format(question=data["question"])

        # an unique trajectory rid to ensure all requests goes to the same sglang server
        rid = uuid.uuid4().hex

        # trajectory (input ids/logprobs/loss mask)
        input_ids = self.tokenizer.encode(prompt, add_special_tokens=False)
        logprobs = [0.0] * len(input_ids)
        loss_mask = [0] * len(input_ids)

        answer, reward = None, 0

        num_turns = 0
        while num_turns < self.max_turns and len(input_ids) < self.max_tokens:
            num_turns += 1

            # LLM Request
            req = ModelRequest(
                rid=rid,
                input_ids=input_ids,
                gconfig=self.gconfig.new(n_samples=1),
            )
            resp = await engine.agenerate(req)
            completion_str = self.tokenizer.decode(resp.output_tokens)

            input_ids += resp.output_tokens
            logprobs += resp.output_logprobs
            loss_mask += [1] * resp.output_len

            # parse search query & trigger tool call
            search_query = parse_search_query(completion_str)
            if search_query:
                search_results = (
                    await call_search_tool(queries=[search_query], topk=3, return_scores=False)
                )[0]
                search_results_str = (
                    "\n\n<information>\n"
                    + "\n\n".join(
                        [
                            '<p title="{}">\n{}\n</p>'.format(r["wikipedia_title"], r["contents"])
                            for r in search_results
                        ]
                    )
                    + "\n</information>"
                )

                search_token_ids = self.tokenizer.encode(
                    search_results_str, add_special_tokens=False
                )
                input_ids += search_token_ids
                logprobs += [0.0] * len(search_token_ids)
                loss_mask += [0] * len(search_token_ids)

            # parse answer
            answer = parse_answer(completion_str)
            if answer:
                reward = max([f1_score(answer, gt) for gt in data["answer"]])
                break

            if input_ids[-1] in [
                self.tokenizer.pad_token_id,
                self.tokenizer.eos_token_id,
            ]:
                break

        if self.verbose:
            print(f"[LOGGING] turns={num_turns} length={len(input_ids)}")

        res = dict(  # noqa: C408  # as in the notebook
            input_ids=torch.tensor(input_ids),
            logprobs=torch.tensor(logprobs),
            loss_mask=torch.tensor(loss_mask),
            rewards=torch.tensor(float(reward)),
            attention_mask=torch.ones(len(input_ids), dtype=torch.bool),
        )
        res = {k: v.unsqueeze(0) for k, v in res.items()}
        return res


class GroupedSearchAgentWorkflow:
    def __init__(self, gconfig, tokenizer, max_tokens, max_turns, group_size, verbose):
        self.gconfig = gconfig
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens
        self.max_turns = max_turns
        self.group_size = group_size
        self.verbose = verbose

    async def arun_episode(self, engine, data):
        workflows = [
            SearchAgentWorkflow(
                self.gconfig.new(n_samples=1),
                self.tokenizer,
                self.max_tokens,
                self.max_turns,
                self.verbose,
            )
            for _ in range(self.group_size)
        ]
        tasks = [workflow.arun_episode(engine, data) for workflow in workflows]
        results = await asyncio.gather(*tasks)
        return concat_padded_tensors(results)
