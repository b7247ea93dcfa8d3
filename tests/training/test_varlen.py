"""Attention over a tree in two calls of flash attention, rehearsed with kernels for a CPU."""

import logging
from dataclasses import replace

import pytest
import torch

from tests.engines.models import make_model, prompt
from tests.kit.examples import grid
from tests.models.matrix import alone, rows_of
from tests.models.shapes import tiny_model
from tests.training import flash
from tests.training.exact import computed, row, seeded
from tests.training.test_tree_forward import bush
from tuner.traces import TokenTree
from tuner.training.forward import layouts, varlen
from tuner.training.forward.layouts import exact_forward
from tuner.training.forward.tree_pass import TreeAttention

flash.register()
CPU = torch.device("cpu")


def answers(length, number=8, to=300):
    return [row(prompt(to), prompt(length, seed)) for seed in range(1, number + 1)]


def turns(number, length=20):
    """A conversation in which each turn is followed by one answer that the next does not keep."""
    said = prompt(number * length)
    return [row(said[: at * length], prompt(length, 100 + at)) for at in range(1, number + 1)] + [
        row(said[:length], said[length:])
    ]


TREES = {
    "runs of all lengths": bush(),
    "answers to one question": answers(40),
    "several questions": [*answers(9), row(prompt(30, 9), prompt(8, 8))],
    "turns": turns(6),
    "one run": [row(prompt(20), prompt(8, 3))],
}


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("heads", [(4, 2, 2), (3, 3, 3)], ids=["grouped", "single"])
def test_output_and_gradient_are_those_of_the_attention_in_blocks(tree, heads):
    tree = TokenTree.build(TREES[tree])
    found = []
    for runs in ("never", "always"):
        attention = TreeAttention(tree, None, CPU, runs)
        assert (attention.run_mask is None) == (runs == "never")
        states = [
            torch.randn(1, each, tree.unique_tokens, 16, generator=seeded(i)).requires_grad_()
            for i, each in enumerate(heads)
        ]
        output = attention.attend(*states, 0.25)
        weights = torch.randn(output.shape, generator=seeded(9))
        found.append((output, *torch.autograd.grad((output * weights).sum(), states)))
    for of_blocks, of_runs in zip(*found, strict=True):
        assert torch.allclose(of_runs, of_blocks, atol=1e-5)


@grid("dtype", [torch.float32, torch.bfloat16], quick=1)
@pytest.mark.parametrize("layout", ["nodes first", "heads first"])
@pytest.mark.parametrize("tree", ["turns", "one run"])
def test_shapes_types_and_strides_are_those_that_the_compiler_expects(tree, layout, dtype):
    tree = TokenTree.build(TREES[tree])
    mask = TreeAttention(tree, None, CPU, "always").run_mask
    states = [
        torch.randn(tree.unique_tokens, heads, 16, generator=seeded(heads)) for heads in (4, 2, 2)
    ]
    if layout == "heads first":
        states = [each.transpose(0, 1).contiguous().transpose(0, 1) for each in states]
    states = [each.to(dtype).requires_grad_() for each in states]
    bounds = (mask.run_R, mask.query_S, mask.key_S, mask.path_P, mask.root_N, mask.longest)
    torch.library.opcheck(varlen._attention, (*states, *bounds, 0.25))


def test_a_path_is_copied_once_for_all_that_follow_it_beside_each_other():
    branches = [row([*prompt(20), *prompt(8, i // 2)], prompt(5, 10 + i)) for i in range(2, 6)]
    for rows, copied in ((answers(40), 300), (branches, 20 + 28 + 20 + 28)):
        mask = TreeAttention(TokenTree.build(rows), None, CPU, "always").run_mask
        assert len(mask.path_P) == mask.key_S[-1] == copied


@pytest.mark.parametrize(
    ("rows", "window", "chosen"),
    [
        (answers(600), None, True),
        (answers(60, number=40), None, False),  # several share one of FlexAttention's tiles
        (answers(600, number=1), None, True),
        (turns(60), None, False),  # copies half of the conversation for each of its turns
        (answers(600), 2000, True),
        (answers(600), 800, False),
    ],
)
def test_the_cheaper_of_both_is_taken_where_a_window_cuts_off_no_path(rows, window, chosen):
    tree = TokenTree.build(rows)
    assert (TreeAttention(tree, window, CPU, "cheaper").run_mask is not None) == chosen
    assert TreeAttention(tree, window, CPU, "never").run_mask is None


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(layouts, "DEVICES", ("cpu",))
    monkeypatch.setattr(layouts, "DTYPES", (torch.float32,))


@pytest.mark.parametrize("kind", ["qwen3", "gemma3", "deepseek_v3"])
@pytest.mark.usefixtures("as_on_a_gpu")
def test_log_probs_and_gradient_of_a_model_are_those_of_one_row_per_call(kind):
    """With one kind of layer, with windows, and with keys that are wider than values."""
    model, rows = tiny_model(kind), rows_of(60)
    wanted_logp, wanted = alone(model, rows)
    forward = exact_forward(model, None)
    assert (forward.layout, forward.runs) == ("tree", "cheaper")
    for runs in ("cheaper", "always"):
        logp, gradient = computed(model, rows, replace(forward, runs=runs), 90)
        assert (logp - wanted_logp).abs().max() < 1e-4
        assert (gradient - wanted).norm() < 1e-5 * wanted.norm()


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_model_that_the_kernel_does_not_support_uses_flex_attention_and_the_log_says_so(caplog):
    with caplog.at_level(logging.WARNING, logger="tuner"):
        forward = exact_forward(make_model(head_dim=12), None)
    assert (forward.layout, forward.runs) == ("tree", "never")
    assert "head_size should be a multiple of 8" in caplog.text


def test_it_is_not_used_on_a_cpu():
    assert exact_forward(make_model(), None).runs == "never"
