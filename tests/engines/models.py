"""Small random models and a tokenizer for tests of the engines, and plain forward passes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from torch import Tensor
from transformers import (
    BloomConfig,
    Gemma3TextConfig,
    Gemma4TextConfig,
    Llama4TextConfig,
    LlamaConfig,
    Mamba2Config,
    MambaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3NextConfig,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from tuner.engines import Generation, SamplingParams
from tuner.engines.sampling import sampled_logprobs
from tuner.engines.transformers import speculation
from tuner.engines.transformers.engine import TransformersEngine

VOCABULARY = 300

_SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}

CONFIGS = {
    "qwen3": lambda: Qwen3Config(**_SMALL, head_dim=8, tie_word_embeddings=True),
    "llama": lambda: LlamaConfig(**_SMALL),
    "mistral": lambda: MistralConfig(**_SMALL, head_dim=8, sliding_window=6),
    "gemma3": lambda: Gemma3TextConfig(
        **_SMALL,
        head_dim=8,
        sliding_window=6,
        query_pre_attn_scalar=8,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "gemma4": lambda: Gemma4TextConfig(
        **_SMALL,
        head_dim=8,
        global_head_dim=16,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"],
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=8,
    ),
    "qwen3_next": lambda: Qwen3NextConfig(
        **_SMALL,
        head_dim=8,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=0,
        mlp_only_layers=[0, 1],
    ),
    "mamba": lambda: MambaConfig(
        vocab_size=VOCABULARY, hidden_size=32, state_size=4, num_hidden_layers=2
    ),
    "mamba2": lambda: Mamba2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        state_size=4,
        num_hidden_layers=2,
        num_heads=4,
        head_dim=16,
        n_groups=1,
        chunk_size=8,
    ),
    "llama4": lambda: Llama4TextConfig(
        **_SMALL,
        head_dim=8,
        attention_chunk_size=6,
        intermediate_size_mlp=64,
        num_local_experts=2,
        interleave_moe_layer_step=2,
        no_rope_layers=[1, 0],
    ),
    # Frequencies of RoPE change beyond 24 positions.
    "phi3": lambda: Phi3Config(
        **{**_SMALL, "pad_token_id": 0},
        original_max_position_embeddings=24,
        rope_scaling={
            "rope_type": "longrope",
            "short_factor": [1.0, 1.5, 2.0, 2.5],
            "long_factor": [4.0, 6.0, 8.0, 10.0],
        },
    ),
    "llama_dynamic": lambda: LlamaConfig(
        **{**_SMALL, "max_position_embeddings": 24},
        rope_scaling={"rope_type": "dynamic", "factor": 4.0},
    ),
    "bloom": lambda: BloomConfig(
        vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.2
    ),
}


def make_model(
    kind: str = "qwen3", dtype: torch.dtype = torch.float32, **changed: object
) -> PreTrainedModel:
    """A random model of this shape, its configuration `changed`; the same one every time."""
    torch.manual_seed(0)
    config = CONFIGS[kind]()
    config.update(changed)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.generation_config.eos_token_id = None
    return model.eval()


@cache
def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with 300 tokens: 256 bytes, some longer ones, an end-of-sequence token."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = ["the answer is 12, the stop word is halt and the rest is noise"] * 9
    tokenizer.train_from_iterator(text, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def make_engine(model: PreTrainedModel, **options: object) -> TransformersEngine:
    """An engine with room for 256 tokens that never meets an end-of-sequence token by chance."""
    engine = TransformersEngine(
        model,
        make_tokenizer(),
        **{"max_model_len": 256, **options},  # type: ignore[arg-type]
    )
    engine._end_ids = frozenset()
    return engine


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (length,), generator=generator).tolist()


SETTINGS = [
    SamplingParams(max_tokens=12, temperature=1.0),
    SamplingParams(max_tokens=12, temperature=0.7),
    SamplingParams(max_tokens=12, temperature=1.0, top_p=0.8),
    SamplingParams(max_tokens=12, temperature=0.7, top_k=20),
    SamplingParams(max_tokens=12, temperature=0.7, top_k=30, top_p=0.9),
    SamplingParams(max_tokens=12, temperature=0.0),
]


def crowd() -> Iterator[tuple[list[int], SamplingParams]]:
    """Requests of all SETTINGS, on prompts that share prefixes and on some that do not."""
    shared = prompt(40)
    for seed, sampling in enumerate(SETTINGS * 2):
        ids = shared[:25] + prompt(3 + seed, seed) if seed % 3 else shared[: 20 + seed]
        yield ids, replace(sampling, seed=seed)


async def generate_all(
    engine: TransformersEngine, requests: Iterable[tuple[Sequence[int], SamplingParams]]
) -> list[Generation]:
    """Generate for all requests at once."""
    return await asyncio.gather(*(engine.generate(p, s, "session") for p, s in requests))


def edited_by_definition(
    logits: Tensor, sampling: SamplingParams, prompt_ids: Sequence[int], done: tuple[int, ...]
) -> Tensor:
    """The logits of one position with bias, penalties and bad words, token by token: [V] -> [V]."""
    values = logits.tolist()
    for token, bias in sampling.logit_bias:
        values[token] += bias
    for token in {*prompt_ids, *done}:
        factor = sampling.repetition_penalty
        values[token] = values[token] / factor if values[token] > 0 else values[token] * factor
    for token in done:
        values[token] -= sampling.frequency_penalty
    for token in set(done):
        values[token] -= sampling.presence_penalty
    for word in sampling.bad_words:
        if len(done) >= len(word) - 1 and done[len(done) - len(word) + 1 :] == word[:-1]:
            values[word[-1]] = -torch.inf
    return torch.tensor(values)


@torch.no_grad()
def fresh_logprobs(
    model: PreTrainedModel, prompt_ids: Sequence[int], got: Generation, sampling: SamplingParams
) -> Tensor:
    """Log-probs of the sampled ids by one plain forward pass of prompt and completion: [T]."""
    ids = torch.tensor([*prompt_ids, *got.completion_ids], device=model.device)[None]
    completion = ids[0, len(prompt_ids) :]
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt_ids) - 1 : -1]
    logprobs = sampled_logprobs(logits, sampling.temperature, sampling.top_k, sampling.top_p)
    return logprobs.gather(-1, completion[:, None])[:, 0]


def error(
    model: PreTrainedModel, prompt_ids: Sequence[int], got: Generation, sampling: SamplingParams
) -> float:
    """Largest difference between recorded log-probs and those of a plain forward pass."""
    wanted = fresh_logprobs(model, prompt_ids, got, sampling)
    return float((wanted.cpu() - torch.tensor(got.logprobs)).abs().max())


@torch.no_grad()
def change_weights(model: PreTrainedModel, scale: float = 0.3) -> None:
    """What an optimizer does: change every parameter in place."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator).to(parameter)
        parameter.add_(noise * parameter.std(correction=0).clamp(min=0.1) * scale)


def always_drafting(
    patch: pytest.MonkeyPatch,
    answers: Sequence[Sequence[int]] = (),
    wrong: Callable[[int], bool] = lambda place: False,
) -> None:
    """Every request has a draft in every pass: what follows in `answers`, prompt and completion
    each, with another token at `wrong` places; behind other tokens its own first ones."""

    def found(tokens: speculation.Ints, _: int) -> tuple[speculation.Ints, int]:
        so_far = tokens.tolist()
        known = [ids for ids in answers if list(ids[: len(so_far)]) == so_far]
        if not known:
            return tokens, 1 + len(tokens) % 5
        rest = [
            token ^ 1 if wrong(place) else token
            for place, token in enumerate(known[0][len(so_far) :], len(so_far))
        ]
        return np.array(rest, dtype=np.int64), len(rest)

    patch.setattr(speculation, "looked_up", found)
    patch.setattr(speculation._History, "repeats", lambda self, tokens: True)
    patch.setattr(speculation, "_START", 2.0)
    patch.setattr(speculation, "_REGAIN", 2.0)
    patch.setattr(speculation, "FEW_REQUESTS", 999)


async def until(condition: Callable[[], bool]) -> None:
    """Let the event loop run until the condition holds, a minute at most."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  # an engine has no event for this
            await asyncio.sleep(0.001)
