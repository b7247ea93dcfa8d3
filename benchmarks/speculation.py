"""Tokens per second of few requests with drafts (prompt lookup), beside none and transformers'.

    python benchmarks/speculation.py [--rounds 5]

- tool agent: the calls of `_guess_agent` in games of six tries, recorded before and each generated
  again, one, four or eight at a time. Thereby an agent repeats its earlier calls but for their
  numbers.
- word problems: the tiny model solves problems of examples/gsm8k, which repeats little.
- random: a random model continues 100 random tokens, and nothing repeats.

All sample at temperature 1 with one thread, at most 96 tokens, and take turns call by call.
Seconds are those of this process's CPU time, as other work keeps the machine busy; prompts but for
their last token are computed before. `model.generate` gets one prompt with its keys and values,
with and without `prompt_lookup_num_tokens`. Ours without drafts is the same engine.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import _guess_agent as agent
import torch
from _report import Row, report
from engine import VOCABULARY
from engine import make_model as make_random_model
from engine import make_tokenizer as make_numbers
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel

from tuner.engines import SamplingParams
from tuner.engines.transformers import speculation
from tuner.engines.transformers.engine import TransformersEngine
from tuner.engines.transformers.passes import cache_argument

ROOT = Path(__file__).parents[1]
TOKENS = 96
GAMES, TRIES = 4, 6
GOAL, NEVER_SLOWER = 1.5, 0.97

Prompts = list[list[int]]
Run = Callable[[Sequence[list[int]], int], tuple[int, float]]
"""Prompts that are generated together, and a seed -> sampled tokens and CPU seconds."""


def make_run(model: PreTrainedModel, tokenizer: Any, requests: int) -> Run:
    """Our engine, with drafts for at most so many requests."""
    engine = TransformersEngine(model, tokenizer, max_model_len=2048)

    async def together(prompts: Sequence[list[int]], seed: int) -> tuple[int, float]:
        first = SamplingParams(max_tokens=1)
        await asyncio.gather(*(engine.generate(ids, first, "bench") for ids in prompts))
        started = time.process_time()
        settings = [SamplingParams(max_tokens=TOKENS, seed=seed + n) for n in range(len(prompts))]
        found = await asyncio.gather(
            *(engine.generate(ids, s, "bench") for ids, s in zip(prompts, settings, strict=True))
        )
        return sum(len(one.completion_ids) for one in found), time.process_time() - started

    def run(prompts: Sequence[list[int]], seed: int) -> tuple[int, float]:
        speculation.FEW_REQUESTS = requests
        return asyncio.run(together(prompts, seed))

    return run


def make_peer(model: PreTrainedModel, **options: Any) -> Run:
    """`model.generate` for one prompt."""
    generate: Any = model.generate  # typed as a tensor by transformers

    @torch.no_grad()
    def run(prompts: Sequence[list[int]], seed: int) -> tuple[int, float]:
        torch.manual_seed(seed)
        (prompt,) = prompts
        ids, cache = torch.tensor([prompt]), DynamicCache(config=model.config)
        kept = {cache_argument(model): cache}
        model(input_ids=ids[:, :-1], **kept)
        settings = copy.deepcopy(model.generation_config)
        settings.update(max_new_tokens=TOKENS, do_sample=True, top_k=0, pad_token_id=0, **options)
        started = time.process_time()
        found = generate(ids, attention_mask=ids * 0 + 1, generation_config=settings, **kept)
        return found.shape[1] - ids.shape[1], time.process_time() - started

    return run


async def recorded(model: PreTrainedModel, tokenizer: Any) -> Prompts:
    """The prompts of all calls of some games."""
    engine, prompts = TransformersEngine(model, tokenizer, max_model_len=2048), []
    for number, task in enumerate(agent.tasks(GAMES, TRIES)):
        game, messages = agent.HiddenNumber(), list(agent.prompt(task))
        game.reset(**task)
        for turn in range(TRIES + 1):
            ids = tokenizer.apply_chat_template(
                messages, tools=[agent.TOOL], add_generation_prompt=True, return_dict=False
            )
            prompts.append(ids)
            sampling = SamplingParams(max_tokens=TOKENS, seed=10 * number + turn)
            got = await engine.generate(ids, sampling, "bench")
            text = tokenizer.decode(got.completion_ids, skip_special_tokens=True)
            try:
                call = json.loads(text.split("<tool_call>")[1].split("</tool_call>")[0])
                heard = game.try_number(**call["arguments"])
            except (IndexError, KeyError, TypeError, ValueError):
                break
            messages.append({"role": "assistant", "content": text})
            messages.append({"role": "tool", "content": heard})
    return prompts


def problems(tokenizer: Any, count: int) -> Prompts:
    from datasets import load_dataset

    rows = load_dataset(str(ROOT / "examples" / "gsm8k" / "data"), split="train")
    return [
        tokenizer.apply_chat_template(
            [
                {"role": "system", "content": agent.SYSTEM},
                {"role": "user", "content": row["question"]},
            ],
            add_generation_prompt=True,
            return_dict=False,
        )
        for row in rows.select(range(count))
    ]


def measure(runs: dict[str, Run], prompts: Prompts, size: int, rounds: int) -> dict[str, float]:
    """Tokens per CPU second of each."""
    sums = {name: [0, 0.0] for name in runs}
    order = list(runs.items())
    for number in range(rounds + 1):
        for first in range(0, len(prompts) - size + 1, size):
            order.reverse()
            for name, run in order:
                found = run(prompts[first : first + size], 100 * number + first)
                if number:  # the first round allocates
                    sums[name] = [a + b for a, b in zip(sums[name], found, strict=True)]
    return {name: tokens / seconds for name, (tokens, seconds) in sums.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    few = speculation.FEW_REQUESTS
    template = AutoTokenizer.from_pretrained(agent.START).chat_template
    with tempfile.TemporaryDirectory() as folder:
        agent.teach(Path(folder), template)
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
    calls = asyncio.run(recorded(model, tokenizer))
    solver: PreTrainedModel = AutoModelForCausalLM.from_pretrained(agent.START)
    reader = AutoTokenizer.from_pretrained(agent.START)
    numbers = torch.randint(1, VOCABULARY, (16, 100)).tolist()
    cases = (
        ("tool agent", model, tokenizer, calls, GOAL),
        ("word problems", solver, reader, problems(reader, 16), NEVER_SLOWER),
        ("random", make_random_model("cpu"), make_numbers(VOCABULARY), numbers, NEVER_SLOWER),
    )
    rows = []
    for name, served, words, prompts, goal in cases:
        for size in (1, 4, few):
            runs = {
                "ours": make_run(served, words, few),
                "without drafts": make_run(served, words, 0),
            }
            if size == 1:
                runs["model.generate"] = make_peer(served)
                runs["generate with prompt lookup"] = make_peer(served, prompt_lookup_num_tokens=10)
            speeds = measure(runs, prompts, size, options.rounds)
            case = f"{name}, {size} request{'s' if size > 1 else ''}"
            for peer in list(runs)[1:]:
                wanted = goal if peer == "without drafts" else None
                rows.append(Row(case, "tokens/CPU s", speeds["ours"], peer, speeds[peer], wanted))
    report("speculation", rows, ["torch", "transformers"])


if __name__ == "__main__":
    main()
