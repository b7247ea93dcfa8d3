"""The token tree against one row per call: the same log-probs, the same gradient."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engines.models import VOCABULARY, prompt
from tests.kit.examples import grid
from tests.kit.toy import ids_of
from tests.traces.agents import batches
from tests.training import exact
from tests.training import test_grammar as grammar
from tests.training.exact import (
    KINDS,
    SAMPLINGS,
    all_float64,
    assert_same_gradient,
    model_of,
    row,
    seeded,
)
from tuner.engines import SamplingParams
from tuner.traces import TokenTree
from tuner.training.forward import tree_pass as flex_mask
from tuner.training.forward import tree_pass as tree_attention
from tuner.training.forward import tree_pass as tree_blocks
from tuner.training.forward import tree_pass as tree_forward
from tuner.training.forward.layouts import exact_forward

IDS = VOCABULARY


@pytest.fixture
def small_parts():
    with exact.small_parts():
        yield


@pytest.mark.usefixtures("small_parts")
@grid(
    "kind, dtype, tolerance",
    [(kind, torch.float64, 1e-10) for kind in KINDS if kind != "gemma2"]
    # Eager attention, which gemma2 needs for its soft capping, is in float32 in any case.
    + [(kind, torch.float32, 1e-5) for kind in KINDS],
    quick=2,
)
def test_gradient_is_that_of_one_row_per_call_on_random_agents(kind, dtype, tolerance):
    model = model_of(kind, dtype)

    @settings(max_examples=8, deadline=None, derandomize=True)
    @given(calls=batches, dice=st.randoms(use_true_random=False))
    def check(calls, dice):
        rows = [
            row([i % IDS for i in c.prompt_ids], [i % IDS for i in c.completion_ids], setting)
            for c in calls
            if c.prompt_ids and c.completion_ids
            for setting in [dice.choice(SAMPLINGS)]
        ][:12]
        if rows:
            some = dice.randrange(1, 40)
            cuts = [("tree", 10_000), ("tree", some), ("packed", 10_000), ("packed", some)]
            assert_same_gradient(model, rows, cuts=[*cuts, ("padded", some)], tolerance=tolerance)

    check()


@pytest.mark.usefixtures("small_parts")
def test_calls_within_grammars_share_a_tree_with_others():
    """The same ids within two grammars, without one, and from another start of the completion."""
    start = list(ids_of("hello"))
    held = SamplingParams(max_tokens=9, grammar=grammar.ONE_OF_THREE)
    other = SamplingParams(max_tokens=9, grammar='start: "bc" | "abc"', temperature=0.8)
    rows = [
        row(start, ids_of("abc"), held),
        row(start, ids_of("ad"), held),
        row(start, ids_of("abc")),
        row(start, ids_of("abc"), other),
        row([*start, *ids_of("a")], ids_of("bc"), other),
        row(start, ids_of("abc"), held),
    ]
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-10)):
        model = grammar.make_model()
        model = all_float64(model) if dtype == torch.float64 else model
        assert_same_gradient(
            model,
            rows,
            cuts=[("tree", 1000), ("tree", 9), ("packed", 1000)],
            tolerance=tolerance,
            grammars=grammar.grammars(),
        )


def test_each_of_several_equal_calls_counts():
    model = model_of("qwen3")
    one, other = row([1, 2, 3], [4, 5]), row([1, 2, 3], [4, 6, 7])

    def gradient(*rows):
        model.zero_grad(set_to_none=True)
        forward = exact_forward(model, None)
        forward.logprobs(model, rows, with_entropy=False).logp_T.sum().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    wanted = 3 * gradient(one) + gradient(other)
    assert (gradient(one, other, one, one) - wanted).norm() < 1e-5 * wanted.norm()


def logits_made(model, rows):
    counts = []
    hook = model.get_output_embeddings().register_forward_hook(
        lambda module, inputs, output: counts.append(output.shape[:-1].numel())
    )
    with torch.no_grad():
        tree_forward.tree_logprobs(
            model, rows, windows={"full_attention": None}, with_entropy=False
        )
    hook.remove()
    return sum(counts)


def test_only_positions_before_trained_tokens_meet_the_vocabulary():
    model = model_of("qwen3")
    rows = [row(prompt(20), prompt(6, seed)) for seed in (1, 2)]
    longer = [row(prompt(100), prompt(6, seed)) for seed in (1, 2)]
    assert logits_made(model, rows) == logits_made(model, longer) == 12
    assert logits_made(model, rows * 5) == 12


def test_each_distinct_token_goes_through_the_layers_once():
    model = model_of("qwen3")
    rows = [row(prompt(50), prompt(10, seed)) for seed in range(1, 9)]
    seen = []
    model.model.layers[0].register_forward_pre_hook(
        lambda module, inputs: seen.append(inputs[0].shape[1])
    )
    with torch.no_grad():
        tree_forward.tree_logprobs(
            model, rows, windows={"full_attention": None}, with_entropy=False
        )
    assert seen == [TokenTree.build(rows).unique_tokens] == [130]


def blocks_of(rows):
    tree = TokenTree.build(rows)
    return tree, list(tree_blocks.blocks_of(tree, None, torch.device("cpu")))


def test_attention_of_many_rollouts_grows_with_their_paths_and_not_with_the_square_of_the_tree():
    def scores(rollouts):  # of an agent whose turns branch every few tokens
        rows = []
        for seed in range(1, rollouts + 1):
            said = prompt(600, seed)
            rows += [row([*prompt(300), *said[:at]], prompt(9, at)) for at in range(0, 600, 20)]
        _, blocks = blocks_of(rows)
        return sum((b.last - b.first) * len(keys.node_K) for b in blocks for keys in b.keys)

    assert scores(16) < 17 * scores(1)


def test_long_runs_without_branches_need_no_mask_and_compute_the_pairs_of_their_paths_alone():
    rows = [row(prompt(300), prompt(600, seed)) for seed in range(1, 9)]
    rows.append(row([*rows[0].prompt_ids, *rows[0].completion_ids[:280]], prompt(290, 9)))
    tree, blocks = blocks_of(rows)
    pairs = 0
    for block in blocks:
        size = block.last - block.first
        for keys in block.keys:
            if keys.attended == "wholly":
                pairs += size * len(keys.node_K)
            for start, stop, number in keys.siblings:
                length = (stop - start) // number
                pairs += number * length * (length + 1) // 2
        assert all(keys.attended != "in part" for keys in block.keys)
    assert pairs == (tree.depth + 1).sum()


def test_answers_to_one_question_attend_to_it_together_and_each_to_itself():
    lengths = (70, 70, 80, 70, 90, 90)
    rows = [row(prompt(100), prompt(length, seed)) for seed, length in enumerate(lengths, 1)]
    rows.append(row(prompt(90, 9), prompt(70, 8)))
    _, blocks = blocks_of(rows)
    wholly = [keys for block in blocks for keys in block.keys if keys.attended == "wholly"]
    assert [len(keys.node_K) for keys in wholly] == [100]
    # Of one length, and beside each other in the order of the tree.
    counts = [s.number for block in blocks for keys in block.keys for s in keys.siblings]
    assert sum(counts) == len(lengths) + 2
    assert len(counts) < len(lengths) + 2
    assert_same_gradient(model_of("qwen3"), rows, cuts=[("tree", 10_000)], tolerance=1e-5)


def bush():
    """Long runs, short ones beside each other, and some that branch again."""
    rows = [row(prompt(30), prompt(40, seed)) for seed in (1, 2, 3)]
    rows += [row([*rows[0].prompt_ids, *rows[0].completion_ids[:9]], prompt(20, 9))]
    rows += [row([*rows[1].prompt_ids, *prompt(4, 10)], prompt(3, seed)) for seed in range(11, 21)]
    return [*rows, *(row(prompt(20), prompt(5, seed)) for seed in range(21, 26))]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [None, 7, 20])
def test_flex_attention_follows_the_same_rule(window):
    tree = TokenTree.build(bush())
    attention = tree_attention.TreeAttention(tree, window, torch.device("cpu"))
    states = [torch.randn(1, 2, tree.unique_tokens, 16, generator=seeded(i)) for i in range(3)]
    with mock.patch.object(tree_blocks, "BLOCKS", (16, 16)):
        kinds = {keys.attended for block in attention.blocks for keys in block.keys}
        found = attention.attend(*states, 0.25)
    assert kinds == {"wholly", "in part"} | ({"causally"} if window != 7 else set())
    assert torch.allclose(attention.flex(*states, 0.25, compiled=False), found, atol=1e-5)


@pytest.mark.parametrize("window", [None, 7, 30])
def test_tiles_of_flex_attention_are_those_of_every_pair(window):
    rows = [row(prompt(30), prompt(40, seed)) for seed in (1, 2, 3)]
    rows += [row([*rows[0].prompt_ids, *rows[0].completion_ids[:9]], prompt(60, 9))]
    tree = TokenTree.build(rows)
    attention = tree_attention.TreeAttention(tree, window, torch.device("cpu"))
    nodes, size = tree.unique_tokens, 8
    tiles = -(-nodes // size)
    pairs = torch.zeros(tiles * size, tiles * size, dtype=torch.bool)
    pairs[:nodes, :nodes] = attention.allowed(0, nodes, torch.arange(nodes))
    by_tile = pairs.reshape(tiles, size, tiles, size).transpose(1, 2).flatten(2)
    with mock.patch.object(flex_mask, "TILE", size):
        found = attention.block_mask

    def tiles_of(counts, indices):
        chosen = torch.zeros(tiles, tiles, dtype=torch.bool)
        for query, count in enumerate(counts[0, 0].tolist()):
            chosen[query, indices[0, 0, query, :count].long()] = True
        return chosen

    partial = tiles_of(found.kv_num_blocks, found.kv_indices)
    full = tiles_of(found.full_kv_num_blocks, found.full_kv_indices)
    assert not (partial & full).any()
    assert ((partial | full) >= by_tile.any(-1)).all()
    assert (full <= by_tile.all(-1)).all()
    assert full.any() == (window != 7)  # which is less than a tile
    if window is None:
        assert torch.equal(full, by_tile.all(-1))
        assert torch.equal(partial, by_tile.any(-1) & ~by_tile.all(-1))
    else:  # a tile may be asked in vain where the nodes of one differ in depth
        assert (partial | full).sum() < 1.5 * by_tile.any(-1).sum()


def test_a_tree_of_one_tile_has_the_form_of_larger_ones_and_needs_no_kernel_of_its_own():
    rows = [row(prompt(9), prompt(4, seed)) for seed in (1, 2)]
    tree = TokenTree.build(rows)
    mask = tree_attention.TreeAttention(tree, None, torch.device("cpu")).block_mask
    for indices in (mask.kv_indices, mask.full_kv_indices, mask.q_indices, mask.full_q_indices):
        assert indices.shape == (1, 1, 2, 2)
    assert mask.kv_num_blocks.tolist() == mask.q_num_blocks.tolist() == [[[1, 0]]]
    assert not mask.full_kv_num_blocks.any()


def test_masks_that_are_not_kept_between_layers_are_made_again():
    tree = TokenTree.build(bush())
    states = [torch.randn(1, 2, tree.unique_tokens, 16, generator=seeded(i)) for i in range(3)]
    outputs, kept = [], []
    for room in (0, 2000, 1 << 20):  # none, some and all of them
        with (
            mock.patch.object(tree_blocks, "BLOCKS", (16, 16)),
            mock.patch.object(tree_attention, "KEPT_MASKS", room),
            mock.patch.object(
                tree_attention, "_additive", side_effect=tree_attention._additive
            ) as made,
        ):
            attention = tree_attention.TreeAttention(tree, None, torch.device("cpu"))
            outputs.append(attention.attend(*states, 0.25))
            first = made.call_count
            outputs.append(attention.attend(*states, 0.25))
            kept.append(2 * first - made.call_count)
    assert all(torch.equal(output, outputs[0]) for output in outputs)
    assert 0 == kept[0] < kept[1] < kept[2] == first


def test_masks_are_kept_for_one_dtype_and_made_for_another():
    attention = tree_attention.TreeAttention(TokenTree.build(bush()), None, torch.device("cpu"))
    count = TokenTree.build(bush()).unique_tokens
    states = [torch.randn(1, 2, count, 16, generator=seeded(i)) for i in range(3)]
    single = attention.attend(*states, 0.25)
    double = attention.attend(*(state.double() for state in states), 0.25)
    assert torch.allclose(single.double(), double, atol=1e-6)


def test_gradients_of_a_shared_prefix_add_up_in_float32():
    """Those of 150 branches, whose parts are rounded to bfloat16."""
    rows = [row(prompt(20), prompt(80, seed)) for seed in range(1, 151)]
    tree = TokenTree.build(rows)
    attention = tree_attention.TreeAttention(tree, None, torch.device("cpu"))
    count = tree.unique_tokens
    states = [torch.randn(1, 1, count, 16, generator=seeded(i)).bfloat16() for i in range(3)]

    def gradient_of_prefix(dtype):
        query, key, value = (state.to(dtype, copy=True).requires_grad_() for state in states)
        attention.attend(query, key, value, 0.25).sum().backward()
        return value.grad[:, :, :20].float()

    exact = gradient_of_prefix(torch.float32)
    error = (gradient_of_prefix(torch.bfloat16) - exact).norm() / exact.norm()
    assert error < 0.005
