"""Vision models: prompts with images give what the model's own forward pass gives."""

import asyncio
from itertools import pairwise
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from transformers.models.auto import processing_auto

from tests.kit.examples import grid
from tests.kit.models import STATEFUL, VISION, png, vision_model
from tuner.engines import SamplingParams
from tuner.engines.images import ALBUM, ImageLimits
from tuner.engines.transformers.engine import TransformersEngine
from tuner.engines.transformers.vision import load_processor
from tuner.errors import ConfigError

SIZES = [(24, 16), (16, 40), (9, 9), (64, 8)]


def images() -> list[str]:
    return [ALBUM.add(png(*size, seed=seed), ImageLimits()) for seed, size in enumerate(SIZES)]


def prompts(vision) -> list[list[int]]:
    """Several images, equal text around different ones, and images inside a shared prefix."""
    a, b, c, d = (list(vision.ids(one)) for one in images())
    start = [5, 6, 7]
    shared = [*start, *a, 8, *b, 9]
    return [
        [1, 2, 3],
        shared,
        [*shared, 10, 11, *c],
        [*shared, 10, 12],
        [*start, *c, 8, *b, 9],
        [*start, *d],
        [*a, 3, *a, 4],
        [*a, 3, *b, 4],
    ]


def own_logprobs(model, ids, completion) -> list[float]:
    """By the model's own code, without anything of ours between pixels and logits."""
    whole = [*ids, *completion]
    with torch.no_grad():
        logp = model.vision.own_logits(model, whole)[0].log_softmax(-1)
    return [float(logp[place - 1, whole[place]]) for place in range(len(ids), len(whole))]


async def completions(engine, asked, *, at_once=True):
    settings = SamplingParams(max_tokens=6, seed=3, stop_token_ids=())
    work = [engine.generate(ids, settings, "s") for ids in asked]
    return list(await asyncio.gather(*work)) if at_once else [await one for one in work]


@grid("family", VISION, quick=2)
@pytest.mark.parametrize("deterministic", [False, True])
def test_recorded_logprobs_are_those_of_the_models_own_pass(family, deterministic):
    """One after the other with prefix reuse, at once, and after the weights changed."""
    model, tokenizer = vision_model(family)
    engine = TransformersEngine(model, tokenizer, max_model_len=512, deterministic=deterministic)
    assert engine.batched is not (deterministic or family in STATEFUL)
    asked = prompts(model.vision)

    async def run():
        for version in range(2):
            for at_once in (True, False):
                found = await completions(engine, asked, at_once=at_once)
                for ids, one in zip(asked, found, strict=True):
                    wanted = own_logprobs(model, ids, one.completion_ids)
                    assert one.logprobs == pytest.approx(wanted, abs=1e-5)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.1)
            await engine.update_weights(version + 1)
        await engine.close()

    asyncio.run(run())
    if engine.batched:
        assert engine.stats.prompt_tokens_reused


def test_images_under_equal_placeholders_do_not_share():
    model, _ = vision_model()
    recorded = [ALBUM.recorded(ids, model.vision.image_token_id) for ids in prompts(model.vision)]
    for (ids, spans), asked in zip(recorded, prompts(model.vision), strict=True):
        assert max(ids) < len(vision_model()[1])
        assert list(ALBUM.compared(ids, spans)) == asked
    assert all(one != other for one, other in pairwise(recorded))


def test_a_model_that_computes_something_else_is_refused():
    model, _ = vision_model()
    model.lm_head.register_forward_hook(lambda module, _, logits: logits * torch.rand(1))
    with pytest.raises(ConfigError, match="does not attend to images as to text"):
        model.vision.check(model)


@pytest.mark.parametrize(
    ("kind", "why"),
    [("llava_onevision", "once another follows it"), ("gemma3", "in both directions")],
)
def test_a_family_that_reads_images_in_another_way_is_refused(kind, why):
    with pytest.raises(ConfigError, match=why):
        load_processor("", SimpleNamespace(model_type=kind), None)


def test_a_processor_that_needs_another_package_is_refused_with_its_name():
    """Pixtral's, where torchvision is missing."""
    missing = ImportError("No module named 'torchvision'")
    with (
        mock.patch.object(processing_auto, "processor_class_from_name", side_effect=missing),
        pytest.raises(ConfigError, match=r"type 'mistral3' cannot be loaded: .*'torchvision'"),
    ):
        load_processor("", SimpleNamespace(model_type="mistral3"), None)
