"""The engine over the model that ships with the project, through its own chat template."""

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.engines.models import error, generate_all
from tuner.engines import SamplingParams
from tuner.engines.transformers.engine import TransformersEngine

PATH = Path(__file__).parents[2] / "models" / "tiny_math"


@pytest.mark.parametrize("deterministic", [False, True])
async def test_a_group_on_the_shipped_model_ends_by_itself_with_exact_log_probs(deterministic):
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(PATH),
        AutoTokenizer.from_pretrained(PATH),
    )
    engine = TransformersEngine(model, tokenizer, max_model_len=1024, deterministic=deterministic)
    messages = [
        {"role": "user", "content": "Tom has 3 apples and buys 4 more. How many are there?"}
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.encode(text, add_special_tokens=False)
    requests = [(ids, SamplingParams(max_tokens=200, seed=seed)) for seed in range(4)]
    results = await generate_all(engine, requests)
    for (_, sampling), got in zip(requests, results, strict=True):
        assert error(model, ids, got, sampling) < 1e-5
    ended = [got for got in results if got.finish_reason == "stop"]
    assert ended
    assert all(got.completion_ids[-1] in engine._end_ids for got in ended)
