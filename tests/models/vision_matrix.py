"""Vision models, tiny, in each layout and on the engine: docs/reference/models_images.md.

As `tests.models.matrix`, which writes the page: each is compared with the model's own forward pass
over one row alone, images included, and with autograd through its log_softmax.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from tests.engines.test_vision import completions, own_logprobs, prompts
from tests.kit.models import VISION, vision_model
from tests.training.exact import gradient, row
from tuner.config.schema import Layout
from tuner.engines.transformers.engine import TransformersEngine
from tuner.engines.transformers.vision import REFUSED, train_vision
from tuner.training.batch import Row
from tuner.training.forward.layouts import exact_forward

PAGE = "models_images"
HEAD = """\
# Vision models

{generated} [Causal LMs](models.md) explains the cells.
How images are sent, recorded and trained: [images](../images.md).

Tiny random shapes, with prompts of none to three images that share prefixes, some with equal words
around different images. The vision tower is trained too.

"""
LAYOUTS: tuple[Layout, ...] = ("tree", "packed", "padded")


def cells(family: str) -> tuple[str, ...]:
    """For each layout and for the engine, the largest difference."""
    model, tokenizer = vision_model(family)
    train_vision(model)
    rows = [row(ids, (20 + number % 3, 21, 22)) for number, ids in enumerate(prompts(model.vision))]
    wanted = _computed(model, _alone(model, rows))
    found = [_layout(model, rows, layout, wanted) for layout in LAYOUTS]
    engine = TransformersEngine(model, tokenizer, max_model_len=512)
    how = "batched" if engine.batched else "alone"
    return *found, f"{how} {asyncio.run(_generated(model, engine)):.0e}"


def _alone(model: PreTrainedModel, rows: Sequence[Row]) -> Tensor:
    parts = []
    for one in rows:
        ids = [*one.prompt_ids, *one.completion_ids]
        logp = model.vision.own_logits(model, ids)[0].log_softmax(-1)
        places = range(len(one.prompt_ids), len(ids))
        parts += [logp[place - 1, ids[place]] for place in places]
    return torch.stack(parts)


def _computed(model: PreTrainedModel, logp: Tensor) -> tuple[Tensor, Tensor]:
    model.zero_grad(set_to_none=True)
    (logp * torch.linspace(-1, 1, len(logp))).sum().backward()
    return logp.detach(), gradient(model)


def _layout(
    model: PreTrainedModel, rows: Sequence[Row], layout: Layout, wanted: tuple[Tensor, Tensor]
) -> str:
    forward = exact_forward(model, None, layout=layout)
    if forward.layout != layout:
        return f"→ {forward.layout}"
    logp, found = _computed(model, forward.logprobs(model, rows, with_entropy=False).logp_T)
    errors = (logp - wanted[0]).abs().max(), (found - wanted[1]).norm() / wanted[1].norm()
    return f"{float(max(errors)):.0e}"


async def _generated(model: PreTrainedModel, engine: TransformersEngine) -> float:
    """The largest error of a recorded log-prob, of requests at once that share prefixes."""
    asked = prompts(model.vision)
    got = await completions(engine, asked)
    await engine.close()
    return max(
        abs(recorded - own)
        for ids, one in zip(asked, got, strict=True)
        for recorded, own in zip(
            one.logprobs, own_logprobs(model, ids, one.completion_ids), strict=True
        )
    )


def rest() -> str:
    """The model types of transformers that have no line in the table."""
    every = set(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES) - set(VISION) - set(REFUSED)
    text = every & set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    refused = [f"- `{name}` is refused with images: {why}." for name, why in REFUSED.items()]
    return "\n".join(
        [
            *refused,
            f"- Loaded as language models, without images: {_listed(text)}. With "
            "`tuner.images.load_vision` they are compared like those below.",
            "- Compared with their own forward pass when they are loaded, and refused if a result "
            f"differs: {_listed(every - text)}.",
            "",
        ]
    )


def _listed(names: set[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))
