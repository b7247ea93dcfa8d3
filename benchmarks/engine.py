"""Tokens per second of the engine beside `model.generate` and transformers' continuous batching.

    python benchmarks/engine.py [--rounds 3] [--threads N] [--no-continuous-batching]

vLLM is a peer where it is installed, as in the environment of `make test-vllm`: through the engine
`vllm`, in process, with as many threads, and on a CPU without compilation.

Every case samples 128 tokens per request at temperature 1 from a random Qwen3-shaped model of
0.83M parameters in float32. In `distinct`, prompts have 100 tokens and nothing in common; in
`shared`, 64 requests are 8 groups of 8, each group with one prompt of 400 tokens. All peers take
turns in every round, so that a machine that others use slows all of them alike; the numbers are
medians over rounds, and so are the ratios' parts.

`model.generate` gets the whole batch at once, padded to nothing (all prompts have one length) and
never waits for a request, which is its best case. Continuous batching, which is slow on a CPU, runs
in the first measured round only. `agents` measures the engine against itself:
steps in a worker thread beside an event loop where agents are busy all the time, and steps on that
loop between the agents' turns.
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
CONTEXT = 1024
VLLM = "vLLM"

Prompts = list[list[int]]


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


def shared(count: int, tokens: int = 400, group: int = 8) -> Prompts:
    groups = torch.randint(1, VOCABULARY, (count // group, tokens)).tolist()
    return [prompt for prompt in groups for _ in range(group)]


def new_engine(model: PreTrainedModel) -> TransformersEngine:
    tokenizer = make_tokenizer(model.config.vocab_size)
    return TransformersEngine(model, tokenizer, max_model_len=CONTEXT)


async def crowd(engine: Engine, prompts: Prompts) -> None:
    settings = [SamplingParams(max_tokens=NEW_TOKENS, seed=n) for n in range(len(prompts))]
    await asyncio.gather(
        *(engine.generate(p, s, "bench") for p, s in zip(prompts, settings, strict=True))
    )


def with_engine(model: PreTrainedModel) -> Callable[[Prompts], None]:
    engine = new_engine(model)

    def run(prompts: Prompts) -> None:
        asyncio.run(crowd(engine, prompts))

    return run


def with_vllm(model: PreTrainedModel, folder: Path) -> Callable[[Prompts], None]:
    """vLLM with a copy of the weights, through the engine `vllm`."""
    from tuner.engines.served import ServedEngine
    from tuner.engines.vllm.core import VllmSettings
    from tuner.engines.vllm.in_process import InProcessVllm

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
        [InProcessVllm(settings)],
        save=save,
        folder=folder,
        tokenizer=tokenizer,
        end_ids=frozenset(),
        vocabulary=model.config.vocab_size,
        max_model_len=CONTEXT,
    )
    asyncio.run(engine.start())
    return lambda prompts: asyncio.run(crowd(engine, prompts))


def with_generate(model: PreTrainedModel) -> Callable[[Prompts], None]:
    generate: Any = model.generate  # typed as a tensor by transformers

    @torch.no_grad()
    def run(prompts: Prompts) -> None:
        ids = torch.tensor(prompts, device=model.device)
        output = generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=True,
            top_k=0,
            pad_token_id=0,
        )
        assert output.shape[1] == ids.shape[1] + NEW_TOKENS

    return run


def with_continuous_batching(model: PreTrainedModel) -> Callable[[Prompts], None]:
    """transformers' own, with sizes that do not take 11 GB on a CPU."""
    settings = copy.deepcopy(model.generation_config)
    settings.update(max_new_tokens=NEW_TOKENS, do_sample=True, top_k=0, pad_token_id=0)
    from transformers import ContinuousBatchingConfig  # newer than the oldest version we support

    sizes = ContinuousBatchingConfig(
        page_size=32, num_blocks=1200, max_batch_tokens=512, return_logprobs=True
    )

    generate_batch: Any = model.generate_batch

    def run(prompts: Prompts) -> None:
        results = generate_batch(
            prompts,
            generation_config=settings,
            continuous_batching_config=sizes,
            progress_bar=False,
        )
        assert all(len(r.generated_tokens) == NEW_TOKENS for r in results.values())

    return run


def beside_agents(model: PreTrainedModel, on_loop: bool) -> Callable[[Prompts], None]:
    """The engine while agents compute on the event loop in turns of half a millisecond."""
    engine = new_engine(model)
    seconds = 0.0 if on_loop else 1.0
    engine._measure = lambda computed, seconds: None  # type: ignore[method-assign]
    engine._prompt_token_seconds = engine._decode_seconds = seconds

    async def main(prompts: Prompts) -> None:
        async def agent() -> None:
            while True:
                end = time.perf_counter() + 0.0005
                while time.perf_counter() < end:
                    pass
                await asyncio.sleep(0)

        task = asyncio.ensure_future(agent())
        await crowd(engine, prompts)
        task.cancel()

    return lambda prompts: asyncio.run(main(prompts))


def seconds(run: Callable[[Prompts], None], prompts: Prompts) -> float:
    started = time.perf_counter()
    run(prompts)
    return time.perf_counter() - started


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
    cases: list[tuple[str, Callable[[int], Prompts], int, float | None]] = [
        ("distinct prompts, 1 request", distinct, 1, None),
        ("distinct prompts, 16 requests", distinct, 16, None),
        ("distinct prompts, 64 requests", distinct, 64, 0.9),
        ("8 groups share 400 tokens, 64 requests", shared, 64, 1.0),
    ]
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
    for case, make, count, target in cases:
        runs = {"ours": with_engine(model), **peers}
        speeds = measure(runs, lambda make=make, count=count: make(count), options.rounds)  # type: ignore[misc]
        for peer in peers:
            wanted = target if peer == "model.generate" else None
            if peer == VLLM and count == 64 and options.device == "cpu":
                wanted = 1.0
            rows.append(Row(case, "tokens/s", speeds["ours"], peer, speeds[peer], wanted))
    runs = {
        "loop": beside_agents(model, on_loop=True),
        "thread": beside_agents(model, on_loop=False),
    }
    speeds = measure(runs, lambda: distinct(16), max(1, options.rounds // 2))
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


def measure(
    runs: dict[str, Callable[[Prompts], None]], make: Callable[[], Prompts], rounds: int
) -> dict[str, float]:
    """Median tokens per second of each, all in turn in every round, on prompts never seen."""
    speeds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            if name == CONTINUOUS and number != 1:
                continue
            prompts = make()
            taken = seconds(run, prompts)
            if number:  # the first round warms up
                speeds[name].append(len(prompts) * NEW_TOKENS / taken)
    return {name: statistics.median(values) for name, values in speeds.items()}


if __name__ == "__main__":
    main()
