"""Training on prompts with images: log-probs and gradients equal the model's own forward pass."""

import copy
import hashlib

import numpy as np
import pytest
import torch

from tests.engines.test_vision import prompts
from tests.kit.examples import grid
from tests.kit.models import STATEFUL, VISION, png, vision_model
from tuner.engines import SamplingParams
from tuner.engines.images import ALBUM, ImageLimits
from tuner.engines.transformers.vision import vision_parameters
from tuner.traces import TokenTree
from tuner.training.batch import Row
from tuner.training.forward.layouts import exact_forward

LAYOUTS = ("tree", "packed", "padded")


def rows(vision) -> list[Row]:
    found = []
    for number, ids in enumerate(prompts(vision)):
        completion = (20 + number % 3, 21, 22)
        sampling = SamplingParams(max_tokens=4)
        found.append(Row(str(number), 0, tuple(ids), completion, (0.0,) * 3, sampling))
    return found


def own(model, row: Row) -> torch.Tensor:
    whole = [*row.prompt_ids, *row.completion_ids]
    logp = model.vision.own_logits(model, whole)[0].log_softmax(-1)
    places = range(len(row.prompt_ids), len(whole))
    return torch.stack([logp[place - 1, whole[place]] for place in places])


@grid(
    "family, layout",
    [
        (family, layout)
        for family in VISION
        for layout in (LAYOUTS[-1:] if family in STATEFUL else LAYOUTS)
    ],
    quick=6,
)
@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
def test_gradients_are_those_of_rows_one_by_one(family, layout, trained):
    model, _ = vision_model(family)
    model.vision.trained = trained
    for parameter in vision_parameters(model):
        parameter.requires_grad_(trained)
    other = copy.deepcopy(model)
    forward = exact_forward(model, None, layout=layout, compiled=False)
    assert forward.layout == layout
    batch = rows(model.vision)
    got = forward.logprobs(model, batch, with_entropy=False).logp_T
    weights = torch.linspace(-1, 1, len(got))
    (got * weights).sum().backward()
    wanted = torch.cat([own(other, row) for row in batch])
    assert torch.allclose(got, wanted, atol=1e-5)
    (wanted * weights).sum().backward()
    for (name, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
        assert (one.grad is None) is (two.grad is None), name
        if one.grad is not None:
            assert torch.allclose(one.grad, two.grad, atol=1e-5), name
    seen = {id(p) for p in vision_parameters(model)}
    moved = [p.grad is not None for p in model.parameters() if id(p) in seen]
    assert any(moved) is trained


def test_images_are_ordered_by_their_content_and_not_by_their_arrival():
    """Else a process that reads recorded rollouts would add up in another order than the one that
    has sampled them."""
    model, _ = vision_model("qwen3_vl")
    content = sorted((png(seed=seed) for seed in range(100, 104)), key=sha256, reverse=True)
    names = [ALBUM.add(one, ImageLimits()) for one in content]
    arrived = [tuple(model.vision.ids(name)) for name in names]
    assert arrived == sorted(arrived)
    sampling = SamplingParams(max_tokens=1)
    rows = [
        Row(str(i), 0, (1, *ids, 2), (3 + i,), (0.0,), sampling) for i, ids in enumerate(arrived)
    ]
    tree = TokenTree.build(rows)
    assert [tree.path(row) for row in range(4)] == [
        (1, *ids, 2, 3 + i) for i, ids in enumerate(arrived)
    ]
    assert tree.token[tree.depth == 1].tolist() == [ids[0] for ids in arrived[::-1]]
    ids = np.array([[*one] for one in arrived])
    assert [p.sha256 for p in model.vision._images(ids, ids > 0)] == names[::-1]


def sha256(content):
    return hashlib.sha256(content).hexdigest()
