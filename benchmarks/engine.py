"""Generated tokens per second beside `model.generate`, transformers' continuous batching and vLLM.

    python benchmarks/engine.py [--rounds 3] [--threads N] [--no-continuous-batching]

vLLM is a peer where it is installed, as in the environment of `make test-vllm`: through the engine
`vllm`, in a server that is started, with as many threads, and on a CPU without compilation.

Every case samples at temperature 1 from a random Qwen3-shaped model of 0.83M parameters in float32,
128 tokens per request. In `distinct`, prompts have 100 tokens and nothing in common, or one of them
has 800; in the two of shared prompts 64 requests are 8 groups of 8, each group with one prompt of
400 tokens, or all have one of 800. The last are 16 conversations that begin with the same 200
tokens: ten times 32 tokens are sampled, and 20 of its own come behind what each has said. All peers
take turns in every round, so that a machine that others use slows all of them alike; the numbers
are medians over rounds, and so are the ratios' parts.

`model.generate` gets the whole batch at once, padded to its longest prompt (where one has 800
tokens; otherwise to nothing), and never waits for a request, which is its best case. Continuous
batching, which is slow on a CPU, runs in the first measured round only. `agents` measures the
engine against itself: steps in a worker thread beside an event loop where agents are busy all the
time, and steps on that loop between the agents' turns.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import importlib.util
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _report import Row, report
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tuner.engines import Engine, SamplingParams
from tuner.engines.transformers.engine import TransformersEngine

VOCABULARY = 397
NEW_TOKENS = 128
CONTINUOUS = "continuous batching"
REPLY = 20
PATIENCE = 20
"""Seconds after which it is enough to know how slow a worker thread is beside busy agents."""
CONTEXT = 1024
VLLM = "vLLM"

Prompts = list[list[int]]
Run = Callable[[Prompts, int], Prompts]
"""Prompts and how many tokens follow each -> those tokens."""


def make_model(device: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    model: PreTrainedModel = Qwen3ForCausalLM(config)
    torch.nn.Module.to(model, device)
    return model


def make_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    words = {str(number): number for number in range(vocabulary)}
    make: Any = PreTrainedTokenizerFast  # not typed
    tokenizer: PreTrainedTokenizerFast = make(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="0"))
    )
    return tokenizer


def distinct(count: int) -> Prompts:
    return torch.randint(1, VOCABULARY, (count, 100)).tolist()


def uneven(count: int) -> Prompts:
    return [*distinct(count - 1), torch.randint(1, VOCABULARY, (800,)).tolist()]


def shared(count: int, tokens: int = 400, group: int = 8) -> Prompts:
    groups = torch.randint(1, VOCABULARY, (count // group, tokens)).tolist()
    return [prompt for prompt in groups for _ in range(group)]


def new_engine(model: PreTrainedModel) -> TransformersEngine:
    tokenizer = make_tokenizer(model.config.vocab_size)
    return TransformersEngine(model, tokenizer, max_model_len=CONTEXT)


async def crowd(engine: Engine, prompts: Prompts, tokens: int) -> Prompts:
    settings = [SamplingParams(max_tokens=tokens, seed=n) for n in range(len(prompts))]
    answers = await asyncio.gather(
        *(engine.generate(p, s, "bench") for p, s in zip(prompts, settings, strict=True))
    )
    return [list(answer.completion_ids) for answer in answers]


def with_engine(model: PreTrainedModel) -> Run:
    engine = new_engine(model)
    return lambda prompts, tokens: asyncio.run(crowd(engine, prompts, tokens))


def with_vllm(model: PreTrainedModel, folder: Path) -> Run:
    """vLLM with a copy of the weights, through the engine `vllm`."""
    from tuner.engines.remote import ServedEngine
    from tuner.engines.vllm.client import VllmProcess
    from tuner.engines.vllm.core import VllmSettings

    tokenizer = make_tokenizer(model.config.vocab_size)

    def save(into: Path) -> None:
        model.save_pretrained(into)
        tokenizer.save_pretrained(into)

    settings = VllmSettings(
        dtype=str(model.dtype).removeprefix("torch."),
        max_model_len=CONTEXT,
        max_slots=64,
        end_ids=(),
        enforce_eager=model.device.type == "cpu",
        gpu_memory_utilization=0.4 if model.device.type == "cuda" else None,
    )
    engine = ServedEngine(
        [VllmProcess(settings, log=folder / "vllm.log")],
        save=save,
        folder=folder / "weights",
        tokenizer=tokenizer,
        end_ids=frozenset(),
        vocabulary=model.config.vocab_size,
        max_model_len=CONTEXT,
    )
    asyncio.run(engine.start())
    return lambda prompts, tokens: asyncio.run(crowd(engine, prompts, tokens))


def with_generate(model: PreTrainedModel) -> Run:
    generate: Any = model.generate  # typed as a tensor by transformers

    @torch.no_grad()
    def run(prompts: Prompts, tokens: int) -> Prompts:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=model.device)
        output = generate(
            ids,
            attention_mask=(ids != 0).long(),
            max_new_tokens=tokens,
            do_sample=True,
            top_k=0,
            pad_token_id=0,
        )
        assert output.shape[1] == ids.shape[1] + tokens
        sampled: Prompts = output[:, ids.shape[1] :].tolist()
        return sampled

    return run


def with_continuous_batching(model: PreTrainedModel) -> Run:
    """transformers' own, with sizes that do not take 11 GB on a CPU."""
    settings = copy.deepcopy(model.generation_config)
    settings.update(do_sample=True, top_k=0, pad_token_id=0)
    from transformers import ContinuousBatchingConfig  # newer than the oldest version we support

    sizes = ContinuousBatchingConfig(
        page_size=32, num_blocks=1200, max_batch_tokens=512, return_logprobs=True
    )

    generate_batch: Any = model.generate_batch

    def run(prompts: Prompts, tokens: int) -> Prompts:
        settings.update(max_new_tokens=tokens)
        results = generate_batch(
            prompts,
            generation_config=settings,
            continuous_batching_config=sizes,
            progress_bar=False,
        )
        sampled = [list(result.generated_tokens) for result in results.values()]
        assert all(len(ids) == tokens for ids in sampled)
        return sampled

    return run


def beside_agents(model: PreTrainedModel, on_loop: bool) -> Run:
    """The engine while agents compute on the event loop in turns of half a millisecond. A thread
    that waits for the interpreter meanwhile may hardly ever get it."""
    engine = new_engine(model)
    seconds = 0.0 if on_loop else 1.0
    engine._measure = lambda computed, seconds: None  # type: ignore[method-assign]
    engine._prompt_token_seconds = engine._decode_seconds = seconds

    async def main(prompts: Prompts, tokens: int) -> Prompts:
        async def agent() -> None:
            while True:
                end = time.perf_counter() + 0.0005
                while time.perf_counter() < end:
                    pass
                await asyncio.sleep(0)

        task = asyncio.ensure_future(agent())
        before = engine.stats.sampled_tokens
        try:
            async with asyncio.timeout(PATIENCE):
                return await crowd(engine, prompts, tokens)
        except TimeoutError:
            return [[0] * (engine.stats.sampled_tokens - before)]
        finally:
            task.cancel()

    return lambda prompts, tokens: asyncio.run(main(prompts, tokens))


@dataclass(frozen=True)
class Case:
    """Attributes:
    make: Prompts, other ones each time.
    wanted: The least ratio beside `model.generate`.
    turns: How often tokens are sampled; what was said is part of the next prompts.
    """

    name: str
    make: Callable[[], Prompts]
    wanted: float | None = None
    tokens: int = NEW_TOKENS
    turns: int = 1

    def speed(self, run: Run) -> float:
        """Sampled tokens per second, on prompts never seen."""
        prompts, sampled = self.make(), 0
        started = time.perf_counter()
        for left in reversed(range(self.turns)):
            answers = run(prompts, self.tokens)
            sampled += sum(map(len, answers))
            if not left:
                break
            said = torch.randint(1, VOCABULARY, (len(prompts), REPLY)).tolist()
            prompts = [
                [*ids, *answer, *more]
                for ids, answer, more in zip(prompts, answers, said, strict=True)
            ]
        return sampled / (time.perf_counter() - started)


CASES = (
    Case("distinct prompts, 1 request", lambda: distinct(1), 1.1),
    Case("distinct prompts, 16 requests", lambda: distinct(16), 1.1),
    Case("distinct prompts, 64 requests", lambda: distinct(64), 1.1),
    Case("distinct, one of 64 has 800 tokens", lambda: uneven(64), 1.1),
    Case("8 groups share 400 tokens, 64 requests", lambda: shared(64), 2.0),
    Case("64 requests share 800 tokens", lambda: shared(64, 800, 64), 2.0),
    Case("ten turns, 16 conversations", lambda: shared(16, 200, 16), tokens=32, turns=10),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0, help="torch threads; 0 leaves them")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-continuous-batching", action="store_true")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    model = make_model(options.device)
    peers = {"model.generate": with_generate(model)}
    if not options.no_continuous_batching:
        peers[CONTINUOUS] = with_continuous_batching(model)
    versions = ["torch", "transformers"]
    if importlib.util.find_spec("vllm") is not None:
        # Before vLLM starts its processes: they get as many threads as we have.
        os.environ["OMP_NUM_THREADS"] = str(torch.get_num_threads())
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        peers[VLLM] = with_vllm(model, Path(tempfile.mkdtemp()))
        versions.append("vllm-cpu" if options.device == "cpu" else "vllm")
    rows = []
    for case in CASES:
        speeds = measure({"ours": with_engine(model), **peers}, case, options.rounds)
        for peer in peers:
            wanted = case.wanted if peer == "model.generate" else None
            if peer == VLLM and options.device == "cpu":
                wanted = 1.0
            rows.append(Row(case.name, "tokens/s", speeds["ours"], peer, speeds[peer], wanted))
    runs = {
        "loop": beside_agents(model, on_loop=True),
        "thread": beside_agents(model, on_loop=False),
    }
    speeds = measure(runs, CASES[1], max(1, options.rounds // 2))
    rows.append(
        Row(
            "16 requests beside busy agents, steps on the loop",
            "tokens/s",
            speeds["loop"],
            "steps in a worker thread",
            speeds["thread"],
        )
    )
    report("engine", rows, versions)


def measure(runs: dict[str, Run], case: Case, rounds: int) -> dict[str, float]:
    """Median tokens per second of each, all in turn in every round."""
    speeds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            if name == CONTINUOUS and number != 1:
                continue
            speed = case.speed(run)
            if number:  # the first round warms up
                speeds[name].append(speed)
    return {name: statistics.median(values) for name, values in speeds.items()}


if __name__ == "__main__":
    main()
