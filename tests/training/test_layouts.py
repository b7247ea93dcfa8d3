"""Which layout a model is trained on: the one that was asked for where it is exact."""

from __future__ import annotations

import logging
from functools import partial
from unittest import mock

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version
from transformers import modeling_flash_attention_utils as flash

from tests.engines.models import CONFIGS, make_model, prompt
from tests.kit.builders import call, trace
from tests.models.shapes import tiny_model
from tests.training.configured import training
from tests.training.exact import assert_same_gradient, gradient, row, seeded, small_parts
from tuner.engines.transformers.model_shape import probe_length
from tuner.errors import ConfigError, TrainingError
from tuner.training.batch import build_batch
from tuner.training.forward import layouts as probing
from tuner.training.forward import tree_pass
from tuner.training.forward.layouts import exact_forward
from tuner.training.forward.rows import packed_logprobs, packs
from tuner.training.trainer import ModelFlops, PolicyTrainer

INSTALLED = Version(transformers.__version__)
packs_chunks = pytest.mark.skipif(
    Version("5.23") > INSTALLED,
    reason="older ones attend across packed rows in chunks, and are trained on padded rows",
)
DIFFERS = "log-probs would differ by"


def lines(caplog):
    """What the choice of a layout has logged since."""
    found = [r.getMessage() for r in caplog.records if r.name == "tuner.training.forward.layouts"]
    caplog.clear()
    return found


@pytest.mark.parametrize(
    ("kind", "not_tree", "not_packed"),
    [
        # Older versions of transformers compute packed rows, across their boundaries.
        (
            "qwen3_next",
            "keeps a state",
            "flash-linear-attention" if Version("5.20") <= INSTALLED else DIFFERS,
        ),
        ("mamba", "keeps a state", DIFFERS),
        ("mamba2", "keeps a state", DIFFERS),
        ("bloom", "differ by", DIFFERS),
    ],
)
def test_a_model_that_carries_more_than_keys_from_row_to_row_trains_on_padded_rows(
    kind, not_tree, not_packed, caplog
):
    batch = build_batch(
        [
            trace(0, i, [call(str(i), [1, 2, 3], [4, 5 + i], [-5.0, -5.0])], reward=float(i))
            for i in (0, 1)
        ]
    )
    weights = []
    for layout in ("padded", "packed", "tree"):
        model = make_model(kind)
        with caplog.at_level(logging.WARNING, logger="tuner.training.forward.layouts"):
            settings = training(total_steps=1, lr=1e-2, kl="none", layout=layout)
            trainer = PolicyTrainer(model, settings)
        said = lines(caplog)
        assert len(said) == (0 if layout == "padded" else 1)
        assert ("token tree" in " ".join(said)) == (layout == "tree")
        if layout == "tree":
            assert not_tree in said[0]
        if layout != "padded":
            assert "training computes padded rows" in said[0]
            assert not_packed in said[0]
        trainer.ppo_update(trainer.compute_advantages(batch))
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[0], weights[2])


def test_the_layout_that_costs_least_is_taken_for_each_batch(monkeypatch):
    model = make_model("qwen3")
    monkeypatch.setattr(probing, "pass_tokens", lambda model: 4096.0)
    forward = exact_forward(model, None, layout="auto")
    assert [one.layout for one in (forward, *forward.others)] == ["tree", "packed", "padded"]
    apart = [row(prompt(20 + seed, seed), prompt(30, seed)) for seed in range(1, 21)]
    talk = prompt(300)
    shared = [row(talk[:at], prompt(30, seed)) for at in range(50, 300, 25) for seed in (1, 2)]
    uneven = [row(prompt(2, seed), prompt(3, seed)) for seed in range(2, 12)]
    uneven.append(row(prompt(400), prompt(10)))
    found = {}
    for name, rows in {"apart": apart, "shared": shared, "uneven": uneven}.items():
        chosen, cuts = forward.planned(rows, 10_000)
        assert sorted(i for cut in cuts for i in cut) == list(range(len(rows)))
        assert cuts == chosen.micro_batches(rows, 10_000)
        found[name] = chosen.layout
        wanted = exact_forward(model, None).all_logprobs(model, rows, 10_000)
        same = torch.cat(forward.all_logprobs(model, rows, 10_000)) - torch.cat(wanted)
        assert same.abs().max() < 1e-5
    assert (found["apart"], found["shared"]) == ("padded", "tree")
    assert found["uneven"] != "padded"


@packs_chunks
def test_other_layouts_of_a_model_are_taken_only_if_they_are_exact():
    assert exact_forward(make_model("mamba"), None, layout="auto").others == ()
    packed = exact_forward(make_model("llama4"), None, layout="auto")
    assert [one.layout for one in (packed, *packed.others)] == ["packed", "padded"]


def test_costs_on_a_cpu_depend_on_the_model_alone_and_are_no_part_of_a_deterministic_run():
    small = make_model("qwen3")
    large = make_model("qwen3", hidden_size=256, intermediate_size=1024)
    assert [probing.pass_tokens(one) for one in (small, large)] == [512.0, 64.0]
    for layout, deterministic, wanted in (
        ("auto", False, "auto"),
        ("auto", True, "tree"),
        ("packed", True, "packed"),
    ):
        tuner = training(layout=layout, deterministic=deterministic).tuner
        assert tuner.exact_layout == wanted


def test_keys_of_a_tree_are_not_repeated_for_each_head_of_queries():
    model, seen = make_model("qwen3"), []
    attend = tree_pass.TreeAttention.attend

    def watched(self, query, key, value, scale):
        seen.append((query.shape[1], key.shape[1], value.shape[1]))
        return attend(self, query, key, value, scale)

    with mock.patch.object(tree_pass.TreeAttention, "attend", watched):
        exact_forward(model, None).all_logprobs(model, ROWS, 1000)
    config = model.config
    few = config.num_key_value_heads
    assert few < config.num_attention_heads
    assert set(seen) == {(config.num_attention_heads, few, few)}


ROWS = [row(prompt(n), prompt(m, seed=n)) for n, m in ((3, 9), (12, 2), (1, 1), (20, 4), (7, 7))]


@packs_chunks
def test_a_model_that_attends_in_chunks_trains_on_packed_rows(caplog):
    model = make_model("llama4")
    with caplog.at_level(logging.WARNING, logger="tuner.training.forward.layouts"):
        assert exact_forward(model, None).layout == "packed"
    (line,) = lines(caplog)
    assert "packed rows" in line
    assert "attends in chunks" in line
    with small_parts():
        cuts = [("packed", 1000), ("packed", 20), ("padded", 1000)]
        assert_same_gradient(model, ROWS, cuts=cuts, tolerance=1e-5)


@pytest.mark.parametrize("kind", ["phi3", "llama_dynamic", "doge"])
def test_what_depends_on_the_length_of_a_pass_is_exact_up_to_the_switch_and_longer_rows_refused(
    kind,
):
    model = make_model(kind) if kind in CONFIGS else tiny_model(kind)
    long = row(prompt(20), prompt(4, seed=9))
    rows = [*ROWS, long, row(long.prompt_ids, prompt(1))]
    cuts = [("tree", 1000), ("tree", 25), ("packed", 1000), ("padded", 1000)]
    assert_same_gradient(model, rows, cuts=cuts[2:] if kind == "doge" else cuts, tolerance=1e-5)
    longer = row(prompt(20), prompt(5))
    for layout in ("tree", "packed", "padded"):
        forward = exact_forward(model, None, layout=layout)
        for compute in (forward.states, partial(forward.logprobs, with_entropy=False)):
            with pytest.raises(TrainingError, match="has 25 tokens, but beyond 24 positions"):
                compute(model, [*ROWS, longer])


@pytest.mark.parametrize("layout", ["tree", "packed", "padded"])
@pytest.mark.parametrize("kind", ["bert", "xlnet"])
def test_a_model_that_sees_later_tokens_is_refused_in_every_layout(kind, layout):
    with pytest.raises(ConfigError, match=r"is not causal.*set is_decoder to true"):
        exact_forward(tiny_model(kind), None, layout=layout)


def test_an_encoder_that_is_a_decoder_trains():
    cuts = [("padded", 1000), ("padded", 20)]
    assert_same_gradient(tiny_model("bert", is_decoder=True), ROWS, cuts=cuts, tolerance=1e-5)


def test_a_model_that_not_even_padded_rows_are_exact_for_is_refused():
    model = make_model("qwen3")
    forward = model.forward

    def louder(*arguments, **options):
        output = forward(*arguments, **options)
        output.logits = torch.cat([output.logits[:1] * 2, output.logits[1:] * 3])
        return output

    model.forward = louder
    with pytest.raises(ConfigError, match=r"padded rows would not be exact either: .* differ by"):
        exact_forward(model, None)


def test_a_vocabulary_of_a_few_tokens_is_compared_within_it():
    assert exact_forward(tiny_model("llama", vocab_size=8), None).layout == "tree"


def test_latent_attention_whose_values_are_narrower_than_its_keys_trains_on_the_tree():
    model = tiny_model("deepseek_v3")
    config = model.config
    assert config.v_head_dim < config.qk_nope_head_dim + config.qk_rope_head_dim
    with small_parts():
        cuts = [("tree", 1000), ("tree", 20), ("packed", 1000)]
        assert_same_gradient(model, ROWS, cuts=cuts, tolerance=1e-5)


def test_a_pack_ends_at_the_last_position_that_the_model_has():
    model = tiny_model("gpt_neo")
    rows = [*ROWS * 8]
    assert sum(map(len, rows)) > model.config.max_position_embeddings
    assert_same_gradient(model, rows, cuts=[("packed", 10_000)], tolerance=1e-5)


def test_the_probe_goes_past_windows_and_chunks_and_not_past_what_is_exact():
    lengths = {kind: probe_length(make_model(kind).config) for kind in CONFIGS}
    wanted = {"mistral": 12, "gemma3": 12, "llama4": 12, "mamba2": 14, "phi3": 24}
    assert {kind: lengths[kind] for kind in wanted} == wanted
    assert lengths["qwen3"] == 6
    config = make_model("mistral").config
    config.sliding_window = 4096
    assert probe_length(config) == 6
    config.sliding_window, config.max_position_embeddings = 100, 64
    assert probe_length(config) == 64


def test_a_window_that_the_configuration_names_and_the_layout_does_not_know_is_noticed(caplog):
    """As a model with code of its own might have it: nothing differs on short rows."""
    model = make_model("mistral")
    with (
        mock.patch.object(probing, "layer_windows", return_value={"full_attention": None}),
        caplog.at_level(logging.WARNING, logger="tuner.training.forward.layouts"),
    ):
        assert exact_forward(model, None).layout == "packed"
    assert "log-probs would differ by" in lines(caplog)[0]


def test_layers_with_heads_of_different_sizes_train_on_the_tree():
    model = make_model("gemma4")
    cost = exact_forward(model, None).cost
    weights = sum(p.numel() for p in model.parameters()) - model.lm_head.weight.numel()
    assert cost.pair == 2 * (4 * 8 + 4 * 16) / weights
    assert ModelFlops.of(model) == "its layers differ (head_dim)"
    cuts = [("tree", 1000), ("tree", 20), ("packed", 1000), ("padded", 1000)]
    assert_same_gradient(model, ROWS, cuts=cuts, tolerance=1e-5)


def flash_stand_in(attended):
    """What transformers takes from a flash attention library, with torch's kernels instead."""

    def one(query, key, value, *, softmax_scale, sliding_window):
        """[T, heads, width] each"""
        attended.append(len(query))
        groups = query.shape[1] // key.shape[1]
        states = (query, key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1))
        place = torch.arange(len(query))
        behind = place[:, None] - place
        mask = (behind >= 0) & (behind < (sliding_window or len(query)))
        found = torch.nn.functional.scaled_dot_product_attention(
            *(s.transpose(0, 1) for s in states), attn_mask=mask, scale=softmax_scale
        )
        return found.transpose(0, 1)

    def padded(query, key, value, **options):
        rows = zip(query, key, value, strict=True)
        return torch.stack([one(*states, **options) for states in rows])

    def varlen(query, key, value, *, cu_seqlens_q, cu_seqlens_k, **options):
        assert torch.equal(cu_seqlens_q, cu_seqlens_k)
        sizes = cu_seqlens_q.diff().tolist()
        states = (s.split(sizes) for s in (query, key, value))
        return torch.cat([one(*parts, **options) for parts in zip(*states, strict=True)])

    def options(*, softmax_scale, sliding_window, **_):
        return {"softmax_scale": softmax_scale, "sliding_window": sliding_window}

    functions = (padded, varlen, None, None, None), (options, None)
    return mock.patch.object(flash, "lazy_import_flash_attention", return_value=functions)


@pytest.mark.parametrize("kind", ["qwen3", "mistral"])
def test_flash_attention_computes_packed_rows_one_by_one_and_without_a_bound(kind, caplog):
    """transformers' own way to the library, up to its kernel."""
    model, attended = make_model(kind), []
    model.config._attn_implementation = "flash_attention_2"
    with flash_stand_in(attended):
        with caplog.at_level(logging.WARNING, logger="tuner.training.forward.layouts"):
            forward = exact_forward(model, None)
        (line,) = lines(caplog)
        assert "attn_implementation is 'flash_attention_2', which takes no mask" in line
        assert forward.layout == "packed"
        assert len(forward.micro_batches([row([1] * 900, [2] * 100)] * 40, 50_000)) == 1
        attended.clear()
        with torch.no_grad():
            forward.logprobs(model, ROWS, with_entropy=False)
        assert attended == 2 * [len(one) for one in ROWS]  # two layers
        assert_same_gradient(
            model, ROWS, cuts=[("packed", 1000), ("packed", 20), ("padded", 9)], tolerance=1e-5
        )


def test_attention_with_a_mask_is_packed_where_a_token_costs_least():
    """For a model of this size: 64 + N + c N^2 is least per token at N = (64 / c) ** 0.5."""
    model = make_model("llama")
    forward = exact_forward(model, None, layout="packed")
    weights = (
        sum(p.numel() for p in model.model.parameters()) - model.model.embed_tokens.weight.numel()
    )
    best = round((64 * weights / (2 * 2 * 4 * 8)) ** 0.5)
    rows = [row([1] * 10, [2] * 5)] * 200
    sizes = [sum(len(rows[i]) for i in cut) for cut in forward.micro_batches(rows, 100_000)]
    assert best - 15 < max(sizes) <= best
    assert [len(cut) for cut in forward.micro_batches(rows[:9], 30)] == [2, 2, 2, 2, 1]


@settings(deadline=None)
@given(lengths=st.lists(st.integers(2, 30), max_size=20), max_tokens=st.integers(1, 60))
def test_every_row_is_in_one_pack_and_no_two_packs_would_fit_into_one(lengths, max_tokens):
    rows = [row([1], [1] * (length - 1)) for length in lengths]
    cuts = packs(rows, max_tokens)
    assert sorted(i for cut in cuts for i in cut) == list(range(len(rows)))
    sizes = [sum(lengths[i] for i in cut) for cut in cuts]
    assert all(size <= max_tokens or len(cut) == 1 for size, cut in zip(sizes, cuts, strict=True))
    assert all(a + b > max_tokens for i, a in enumerate(sizes) for b in sizes[:i])


def test_packed_rows_are_not_padded_and_only_trained_positions_meet_the_vocabulary():
    model = make_model("qwen3")
    tokens, logits = [], []
    model.model.layers[0].register_forward_pre_hook(
        lambda module, inputs: tokens.append(inputs[0].shape[:2])
    )
    model.get_output_embeddings().register_forward_hook(
        lambda module, inputs, output: logits.append(output.shape[:-1].numel())
    )
    with torch.no_grad():
        packed_logprobs(model, ROWS, with_entropy=False)
    assert tokens == [(1, sum(map(len, ROWS)))]
    assert logits == [sum(len(one.completion_ids) for one in ROWS)]


def test_a_head_that_would_be_computed_differently_is_found_in_every_layout(caplog):
    model = make_model("qwen3")
    forward = model.forward

    def louder(*arguments, **options):
        output = forward(*arguments, **options)
        output.logits = output.logits * 2
        return output

    model.forward = louder
    with caplog.at_level(logging.WARNING, logger="tuner.training.forward.layouts"):
        found = exact_forward(model, None)
    assert found.layout == "padded"
    assert "logits of all tokens of a micro-batch at once" in lines(caplog)[-1]
    twice = found.logprobs(model, ROWS, with_entropy=True)
    weights = torch.randn(len(twice.logp_T), generator=seeded(0))
    (twice.logp_T * weights).sum().backward()
    wanted = gradient(model)
    model.zero_grad()
    one_by_one = [louder(input_ids=torch.tensor([r.prompt_ids + r.completion_ids])) for r in ROWS]
    logp = [
        output.logits[0, len(r.prompt_ids) - 1 : -1]
        .log_softmax(-1)
        .gather(1, torch.tensor(r.completion_ids)[:, None])[:, 0]
        for r, output in zip(ROWS, one_by_one, strict=True)
    ]
    (torch.cat(logp) * weights).sum().backward()
    assert (gradient(model) - wanted).norm() < 1e-5 * wanted.norm()
