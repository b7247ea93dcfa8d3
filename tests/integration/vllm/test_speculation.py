"""Speculative decoding by prompt lookup, in vLLM's model runner for GPUs: tokens and log-probs are
those of the model.

The kernels for CPUs do otherwise and are refused; Triton's interpreter runs those for GPUs here.
"""

import asyncio
import os
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.engines.conformance import (  # noqa: F401  # pytest collects them
    TOLERANCE,
    Rig,
    as_new,
    distributions,
    make_rig_model,
    test_a_completion_keeps_to_its_form_and_its_log_probs_are_exact,
    test_a_seed_gives_its_completion_again_and_others_differ,
    test_log_probs_are_those_of_the_sampled_distribution,
    test_new_weights_serve_their_own_log_probs_and_no_old_prefix,
)
from tests.engines.models import prompt
from tests.integration.vllm.rigs import BLOCK, engine, saver, settings
from tuner.engines import EngineError, SamplingParams
from tuner.engines.vllm.client import VllmProcess
from tuner.engines.vllm.core import check_for_vllm

HERE = Path(__file__).parent
INTERPRETED = {
    "PYTHONPATH": os.pathsep.join([str(HERE / "interpreted"), str(HERE.parents[2])]),
    "TRITON_INTERPRET": "1",
}
SPECULATION = {
    "speculative_config": {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 1,
    }
}
WORKER = {"worker_extension_cls": "tests.integration.vllm.interpreted_worker.InterpretedExtension"}


@pytest.fixture(scope="module")
def parts(toy_folder, tmp_path_factory):
    folder, model = tmp_path_factory.mktemp("vllm"), make_rig_model()
    served = settings(toy_folder, extra={**SPECULATION, **WORKER})
    process = VllmProcess(served, log=folder / "log.txt", environment=INTERPRETED)
    check = partial(check_for_vllm, drafts=True)
    made = engine([process], saver(model), folder / "weights", check=check)
    yield made, model, folder / "log.txt"
    process.stop()


@pytest.fixture
async def rig(parts):
    made, model, _ = parts
    await as_new(made, model)
    return Rig(made, model, lambda: None, "", spare=BLOCK, refused=("min_p", "logit_bias"))


async def test_drafts_change_neither_how_often_they_are_sampled_nor_what_is_instead(rig, parts):
    """Of 480 tokens: how often each is the draft, which follows where the token before it was
    last, and a chi-square test of the places of the others in the rest of the distribution."""
    sampling = [SamplingParams(max_tokens=30, top_k=4, seed=seed) for seed in range(16)]
    asked = [prompt(12, seed % 4) * 2 for seed in range(16)]
    found = await asyncio.gather(
        *(rig.engine.generate(*one, "session") for one in zip(asked, sampling, strict=True))
    )
    rng = np.random.default_rng(0)
    hits, chances, others = 0, [], []
    for ids, how, got in zip(asked, sampling, found, strict=True):
        rows = distributions(rig, ids, got, how).exp().double().numpy()
        tokens = np.array([*ids, *got.completion_ids])
        for place, (logprob, row) in enumerate(zip(got.logprobs, rows, strict=True), len(ids)):
            token = tokens[place]
            assert abs(np.log(row[token]) - logprob) < TOLERANCE
            before = np.flatnonzero(tokens[: place - 1] == tokens[place - 1])
            draft = tokens[before[-1] + 1] if len(before) else -1
            if draft < 0 or not 0 < row[draft] < 1:
                continue
            hits += token == draft
            chances.append(row[draft])
            if token != draft:
                rest = np.where(np.arange(len(row)) == draft, 0, row) / (1 - row[draft])
                others.append(rest[:token].sum() + rng.random() * rest[token])
    chances = np.array(chances)
    assert chances.sum() > 30
    assert abs(hits - chances.sum()) < 4 * (chances * (1 - chances)).sum() ** 0.5
    counts, _ = np.histogram(others, bins=10, range=(0, 1))
    assert ((counts - counts.mean()) ** 2 / counts.mean()).sum() < 30
    accepted = re.findall(r"^accepted (\d+)$", parts[2].read_text(), re.MULTILINE)
    assert sum(map(int, accepted)) > 30


async def test_without_triton_it_is_refused(toy_folder, tmp_path):
    process = VllmProcess(settings(toy_folder, extra=SPECULATION), log=tmp_path / "log.txt")
    made = engine([process], saver(make_rig_model()), tmp_path / "weights")
    with pytest.raises(EngineError, match=r"speculative_config is set, but vLLM without Triton"):
        await made.start()
    await made.close()
