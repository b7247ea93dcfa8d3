"""Activation checkpointing: the same gradient, from a model that is in eval mode and is served."""

import pytest
import torch
from torch import nn

from tests.engines.models import make_model
from tests.kit.examples import grid
from tests.training.exact import model_of, row
from tuner.errors import ConfigError
from tuner.training.forward import kernels, layouts
from tuner.training.forward.layouts import exact_forward, memory_return
from tuner.training.memory import Activations

ROWS = [row((3, 10, 17), (24, 31)), row((3, 10, 17), (24, 38, 45)), row((3, 10), (52, 3))]


def gradient_of(model, forward):
    """Gradient and log-probs; how often a layer has computed; and the states it keeps."""
    passes, kept = [], []
    hook = model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: passes.append(1))
    model.zero_grad(set_to_none=True)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t.numel()) or t, lambda t: t
    ):
        found = forward.logprobs(model, ROWS, with_entropy=True)
    (found.logp_T.sum() + found.entropy_T.sum()).backward()
    hook.remove()
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    return gradient, found.logp_T.detach(), len(passes), sum(kept)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["tree", "packed", "padded"])
@grid("kind", ["qwen3", "mistral", "gemma2", "gemma3"], quick=2)
def test_gradients_are_the_same_and_less_is_kept(kind, layout, dtype):
    model = model_of(kind).to(dtype)
    plain, checkpointed = (
        gradient_of(model, exact_forward(model, None, layout=layout, checkpointing=enabled))
        for enabled in (False, True)
    )
    assert torch.equal(plain[0], checkpointed[0])
    assert torch.equal(plain[1], checkpointed[1])
    assert (plain[2], checkpointed[2]) == (1, 2)
    assert checkpointed[3] < plain[3] / 2


def test_layers_are_as_they_were_after_the_forward_pass():
    model = make_model("qwen3")
    before = {name: module.forward for name, module in model.named_modules()}
    forward = exact_forward(model, None, checkpointing=True)
    forward.logprobs(model, ROWS, with_entropy=False)
    assert {name: module.forward for name, module in model.named_modules()} == before
    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize("layout", ["tree", "packed", "padded"])
def test_auto_checkpoints_what_a_gpu_has_no_room_for(layout, monkeypatch, caplog):
    model = model_of("qwen3")
    plain = gradient_of(model, exact_forward(model, None, layout=layout))
    forward = exact_forward(model, None, layout=layout, checkpointing="auto")
    assert forward.layout == layout
    tokens = {"tree": 9, "packed": 15, "padded": 18}[layout]
    kept = Activations.of(model, layout=layout)
    needed = kept.peak(tokens, checkpointing=False, gradients=0, alone=True)
    passes = {}
    for free in (needed / 0.89, needed / 0.91):
        monkeypatch.setattr(layouts, "free_bytes", lambda device, free=free: free)
        found = gradient_of(model, forward)
        assert torch.equal(found[0], plain[0])
        passes[free] = found[2]
    assert list(passes.values()) == [1, 2]
    gradient_of(model, forward)
    said = [r.getMessage() for r in caplog.records if "recomputed" in r.getMessage()]
    assert len(said) == 1
    assert f"a pass over {tokens} tokens would keep" in said[0]


def test_auto_never_checkpoints_on_a_cpu():
    model = model_of("qwen3")
    assert gradient_of(model, exact_forward(model, None, checkpointing="auto"))[2] == 1


def test_a_model_without_such_layers_is_refused():
    with pytest.raises(ConfigError, match=r"tuner\.activation_checkpointing is true, but Linear"):
        exact_forward(nn.Linear(2, 2), None, checkpointing=True)


@pytest.mark.parametrize("stretch", [1, 2])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("layout", ["tree", "packed", "padded"])
def test_a_large_model_returns_freed_memory_during_its_passes(
    layout, checkpointing, stretch, monkeypatch
):
    model = model_of("qwen3")
    forward = exact_forward(model, None, layout=layout, checkpointing=checkpointing)
    plain, seen, layers = gradient_of(model, forward), [], model.model.layers
    assert memory_return(model) is None
    monkeypatch.setattr(layouts, "_LARGE", 0)
    assert memory_return(model)() is None
    monkeypatch.setattr(layouts, "memory_return", lambda _: lambda: seen.append("return"))
    monkeypatch.setattr(kernels, "STRETCH", stretch)
    before = [module.forward for module in model.modules()]
    for layer in layers:
        layer.register_forward_hook(lambda *_: seen.append("layer"))
    found = gradient_of(model, forward)
    assert all(torch.equal(a, b) for a, b in zip(found[:2], plain[:2], strict=True))
    forward_pass = [
        name
        for number in range(1, len(layers) + 1)
        for name in ("layer", *["return"] * (number % stretch == 0))
    ]
    assert seen == ["return", *forward_pass, "return"]
    assert [module.forward for module in model.modules()] == before
    count = len(seen)
    with torch.no_grad():
        forward.logprobs(model, ROWS, with_entropy=False)
    assert seen[count:] == ["layer"] * len(layers)
