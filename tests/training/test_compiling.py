"""Compiled layers; with a backend that makes no kernels, which take minutes to make for a CPU."""

import functools
import logging
from dataclasses import replace

import pytest
import torch
from torch.nn.attention import flex_attention

from tests.engines.models import make_model
from tests.models.matrix import alone, rows_of
from tests.training import flash
from tests.training.configured import training
from tests.training.exact import computed
from tuner.training.forward import kernels, layouts, tree_pass
from tuner.training.forward.layouts import exact_forward
from tuner.training.trainer import PolicyTrainer


@pytest.fixture(autouse=True)
def without_kernels(monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    kernels.kernel_of.cache_clear()
    yield
    kernels.kernel_of.cache_clear()
    torch.compiler.reset()


@pytest.mark.long  # seconds of compiling
@pytest.mark.parametrize(
    ("kind", "layout", "checkpointing"),
    [
        ("gemma3", "tree", True),
        ("qwen3", "padded", False),
    ],
)
def test_log_probs_and_gradient_are_those_of_layers_that_are_not_compiled(
    kind, layout, checkpointing
):
    model = make_model(kind)
    rows = rows_of(60)
    wanted_logp, wanted = alone(model, rows)
    forward = exact_forward(model, None, layout=layout, checkpointing=checkpointing, compiled=True)
    assert (forward.layout, forward.compiled) == (layout, True)
    logp, gradient = computed(model, rows, forward, 90)
    assert (logp - wanted_logp).abs().max() < 1e-4
    assert (gradient - wanted).norm() < 1e-5 * wanted.norm()
    assert not any("forward" in vars(layer) for layer in kernels.layers_of(model))


@pytest.mark.long
def test_it_is_asked_for_in_the_settings_and_trees_of_other_sizes_need_no_other_kernel():
    model = make_model()
    assert not PolicyTrainer(model, training(total_steps=1))._forward.compiled
    trainer = PolicyTrainer(model, training(total_steps=1, compile=True))
    computed(model, rows_of(60), trainer._forward, 10_000)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert before
    for longest in (30, 80, 150):
        computed(model, rows_of(longest), trainer._forward, 10_000)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before


@pytest.mark.long
@pytest.mark.parametrize("runs", ["never", "always"])
@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])  # one and two kinds of layers
def test_a_layer_is_one_graph_for_trees_of_all_sizes(kind, runs, monkeypatch):
    """As on CUDA, with FlexAttention and with two calls of flash attention. FlexAttention refuses a
    gradient on a CPU for the kernel's sake, not for the formula's, which is what this backend
    computes."""
    if runs == "always":
        flash.register()
        monkeypatch.setattr(layouts, "DEVICES", ("cpu",))
        monkeypatch.setattr(layouts, "DTYPES", (torch.float32,))
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *states: None)
    monkeypatch.setattr(tree_pass, "FLEX_DEVICES", ("cpu",))
    model = make_model(kind)
    rows = rows_of(60)
    wanted_logp, wanted = alone(model, rows)
    torch._dynamo.utils.counters.clear()
    forward = exact_forward(model, None, compiled=True)
    assert (forward.layout, forward.compiled) == ("tree", True)
    assert forward.runs == ("cheaper" if runs == "always" else "never")
    forward = replace(forward, runs=runs)
    logp, gradient = computed(model, rows, forward, 90)
    assert (logp - wanted_logp).abs().max() < 1e-4
    assert (gradient - wanted).norm() < 1e-5 * wanted.norm()
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for longest in (30, 150):
        computed(model, rows_of(longest), forward, 10_000)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before
    assert not torch._dynamo.utils.counters["graph_break"]


def test_layers_are_compiled_with_flex_attention_where_flash_attention_fails(monkeypatch, caplog):
    probed = layouts._probed

    def failing(forward, model):
        if forward.compiled and forward.runs == "always":
            raise RuntimeError("no kernel here")
        return probed(forward, model)

    flash.register()
    monkeypatch.setattr(layouts, "DEVICES", ("cpu",))
    monkeypatch.setattr(layouts, "DTYPES", (torch.float32,))
    monkeypatch.setattr(layouts, "_probed", failing)
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    with caplog.at_level(logging.WARNING, logger="tuner"):
        forward = exact_forward(make_model(), None, compiled=True)
    assert (forward.compiled, forward.runs) == (True, "never")
    assert "compiled layers do not use flash attention: no kernel here" in caplog.text


@pytest.mark.parametrize("fails", ["forward", "gradient"])
def test_layers_that_cannot_be_compiled_or_give_something_else_stay_as_they_are(
    fails, monkeypatch, caplog
):
    def compiler(function, dynamic):
        def compiled(self, states, *args, **kwargs):
            if fails == "forward":
                raise RuntimeError("no compiler here")
            found = function(self, states, *args, **kwargs)
            return found + (states - states.detach())  # the same numbers, another gradient

        return compiled if "self" in function.__code__.co_varnames else function

    monkeypatch.setattr(torch, "compile", compiler)
    with caplog.at_level(logging.WARNING, logger="tuner"):
        forward = exact_forward(make_model(), None, compiled=True)
    assert not forward.compiled
    reason = "RuntimeError: no compiler here" if fails == "forward" else "results would differ by"
    assert (
        f"the layers cannot be compiled ({'ArithmeticError: ' * (fails != 'forward')}{reason}"
        in (caplog.text)
    )
