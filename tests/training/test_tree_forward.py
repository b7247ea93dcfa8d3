"""The token tree against one row per call: the same log-probs, the same gradient."""

from __future__ import annotations

import dataclasses
import logging
import random
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Gemma2Config
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from tests.builders import call, trace
from tests.engines.models import make_engine, make_model, prompt
from tests.gateway.toy import ids_of
from tests.traces.agents import batches
from tests.training import test_grammar as grammar
from tests.training.exact import all_float64
from tuner.engines import SamplingParams
from tuner.traces import TokenTree
from tuner.training import (
    PolicyTrainer,
    Row,
    TrainerSettings,
    build_batch,
    tree_attention,
    tree_forward,
)
from tuner.training.forward import Forward

TREE_KINDS = ["qwen3", "llama", "mistral", "gemma2", "gemma3"]
IDS = 300
SAMPLINGS = [
    SamplingParams(max_tokens=9),
    SamplingParams(max_tokens=9),
    SamplingParams(max_tokens=9, temperature=0.7),
    SamplingParams(max_tokens=9, top_k=20),
    SamplingParams(max_tokens=9, top_p=0.9, temperature=1.3),
]


def model_of(kind, dtype=torch.float32):
    if kind == "gemma2":  # both kinds of layers, and both kinds of soft capping
        torch.manual_seed(0)
        config = Gemma2Config(
            vocab_size=IDS,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            sliding_window=6,
            query_pre_attn_scalar=8,
            initializer_range=0.2,
            final_logit_softcapping=3.0,
            attn_logit_softcapping=2.0,
        )
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    else:
        model = make_model(kind)
    return all_float64(model) if dtype == torch.float64 else model


def row(prompt_ids, completion_ids, sampling=SAMPLINGS[0], rollout=0):
    completion_ids = tuple(completion_ids)
    return Row(
        "c", rollout, tuple(prompt_ids), completion_ids, (0.0,) * len(completion_ids), sampling
    )


def gradient_of(model, rows, *, token_tree, max_tokens, grammars=None):
    """Gradient of a sum with weights of its own for each token of each row; and the log-probs."""
    forward = Forward.of(model, grammars, token_tree=token_tree)
    assert (forward.windows is not None) == token_tree
    model.zero_grad(set_to_none=True)
    logp = {}
    for indices in forward.micro_batches(rows, max_tokens):
        found = forward.logprobs(model, [rows[i] for i in indices], with_entropy=True)
        weights = torch.cat(
            [torch.randn(len(rows[i].completion_ids), generator=seeded(i)) for i in indices]
        )
        (found.logp_T * weights + 0.3 * found.entropy_T * weights**2).sum().backward()
        pieces = found.logp_T.detach().split([len(rows[i].completion_ids) for i in indices])
        logp.update(zip(indices, pieces, strict=True))
    gradient = torch.cat([p.grad.flatten().double() for p in model.parameters()])
    return torch.cat([logp[i] for i in range(len(rows))]), gradient


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def assert_same_gradient(model, rows, *, budgets, tolerance, grammars=None):
    wanted_logp, wanted = gradient_of(
        model, rows, token_tree=False, max_tokens=1, grammars=grammars
    )
    for max_tokens in budgets:
        logp, gradient = gradient_of(
            model, rows, token_tree=True, max_tokens=max_tokens, grammars=grammars
        )
        assert (logp - wanted_logp).abs().max() < tolerance * 10
        assert (gradient - wanted).norm() < tolerance * wanted.norm()


@pytest.fixture
def small_parts():
    """Trees of a few nodes have several blocks, and their logits are made in several parts."""
    with (
        mock.patch.multiple(tree_attention, BLOCKS=(5, 5), RUNS=2),
        mock.patch.dict(tree_forward.LOGITS, cpu=3 * IDS),
    ):
        yield


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize(
    ("kind", "dtype", "tolerance"),
    [(kind, torch.float32, 1e-5) for kind in TREE_KINDS]
    # Eager attention, which gemma2 needs for its soft capping, is in float32 in any case.
    + [(kind, torch.float64, 1e-10) for kind in TREE_KINDS if kind != "gemma2"],
)
def test_tree_gradient_is_that_of_one_row_per_call_on_random_agents(kind, dtype, tolerance):
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
            budgets = (10_000, dice.randrange(1, 40))
            assert_same_gradient(model, rows, budgets=budgets, tolerance=tolerance)

    check()


async def recorded(kind, *, rollouts=3, turns=3):
    """Traces of agents that ask, read something and ask again; some ask twice at once."""
    engine = make_engine(make_model(kind))
    dice = random.Random(0)
    traces = []
    for rollout in range(rollouts):
        context, calls = prompt(20), []
        for turn in range(turns):
            context = context + prompt(4, seed=dice.randrange(100))
            for copy in range(1 + turn % 2):
                sampling = dataclasses.replace(
                    SAMPLINGS[(rollout + turn) % len(SAMPLINGS)], seed=dice.randrange(10**6)
                )
                got = await engine.generate(context, sampling, "session")
                made = call(f"{rollout}-{turn}-{copy}", context, got.completion_ids, got.logprobs)
                calls.append(dataclasses.replace(made, sampling=sampling))
            context = context + list(got.completion_ids)
        traces.append(trace(0, rollout, calls, reward=float(rollout)))
    return traces


@pytest.mark.parametrize("kind", ["qwen3", "llama", "mistral", "gemma3"])
async def test_update_on_recorded_traces_is_that_of_one_row_per_call(kind):
    batch = build_batch(await recorded(kind))
    gradients, metrics = [], []
    for token_tree, max_tokens in ((False, 1), (True, 10_000), (True, 60)):
        model = make_model(kind)
        trainer = PolicyTrainer(
            model,
            TrainerSettings(
                total_steps=1,
                kl_coef=0.1,
                entropy_coef=0.01,
                grad_clip=1e9,
                max_tokens_per_micro_batch=max_tokens,
                token_tree=token_tree,
            ),
        )
        trainer.optimizer.step = lambda model=model: gradients.append(
            torch.cat([p.grad.flatten().double() for p in model.parameters()])
        )
        scored = trainer.compute_ref_logp(trainer.compute_advantages(batch))
        found = trainer.ppo_update(scored)
        metrics.append({k: v for k, v in found.items() if "per_second" not in k})
    for gradient, found in zip(gradients[1:], metrics[1:], strict=True):
        assert (gradient - gradients[0]).norm() < 1e-5 * gradients[0].norm()
        assert found["logprob_mismatch_max"] < 1e-4
        assert found == pytest.approx(metrics[0], rel=1e-4, abs=1e-5)


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
            model, rows, budgets=(1000, 9), tolerance=tolerance, grammars=grammar.grammars()
        )


def test_each_of_several_equal_calls_counts():
    model = model_of("qwen3")
    one, other = row([1, 2, 3], [4, 5]), row([1, 2, 3], [4, 6, 7])

    def gradient(*rows):
        model.zero_grad(set_to_none=True)
        forward = Forward.of(model, None)
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


def test_attention_of_many_rollouts_grows_with_their_paths_and_not_with_the_square_of_the_tree():
    def scores(rollouts):
        rows = [row(prompt(300), prompt(600, seed)) for seed in range(1, rollouts + 1)]
        tree = TokenTree.build(rows)
        blocks = tree_attention.TreeAttention(tree, None, torch.device("cpu")).blocks
        return sum((block.last - block.first) * block.count for block in blocks)

    assert scores(16) < 17 * scores(1)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [None, 7])
def test_flex_attention_follows_the_same_rule(window):
    rows = [row(prompt(30), prompt(40, seed)) for seed in (1, 2, 3)]
    rows += [row([*rows[0].prompt_ids, *rows[0].completion_ids[:9]], prompt(20, 9))]
    attention = tree_attention.TreeAttention(TokenTree.build(rows), window, torch.device("cpu"))
    count = TokenTree.build(rows).unique_tokens
    states = [torch.randn(1, 2, count, 16, generator=seeded(i)) for i in range(3)]
    with mock.patch.object(tree_attention, "BLOCKS", (16, 16)):
        found = attention.attend(*states, 0.25)
    assert torch.allclose(attention.flex(*states, 0.25, compiled=False), found, atol=1e-5)


def test_masks_that_are_not_kept_between_layers_are_made_again():
    tree = TokenTree.build([row(prompt(30), prompt(40, seed)) for seed in (1, 2)])
    states = [torch.randn(1, 2, tree.unique_tokens, 16, generator=seeded(i)) for i in range(3)]
    outputs = []
    for room in (0, 2000, 1 << 20):  # none, some and all of them
        with mock.patch.multiple(tree_attention, BLOCKS=(16, 16), KEPT_MASKS=room):
            attention = tree_attention.TreeAttention(tree, None, torch.device("cpu"))
            outputs += [attention.attend(*states, 0.25), attention.attend(*states, 0.25)]
    assert all(torch.equal(output, outputs[0]) for output in outputs)


@pytest.mark.parametrize(
    ("kind", "reason"), [("qwen3_next", "keeps a state"), ("mamba", "state"), ("bloom", "model")]
)
def test_a_model_that_cannot_take_a_tree_trains_on_rows_and_the_log_says_so_once(
    kind, reason, caplog
):
    batch = build_batch(
        [
            trace(0, i, [call(str(i), [1, 2, 3], [4, 5 + i], [-5.0, -5.0])], reward=float(i))
            for i in (0, 1)
        ]
    )
    weights = []
    for token_tree in (False, True):
        model = make_model(kind)
        with caplog.at_level(logging.WARNING, logger="tuner"):
            trainer = PolicyTrainer(
                model, TrainerSettings(total_steps=2, lr=1e-2, token_tree=token_tree)
            )
            for _ in range(2):
                trainer.ppo_update(trainer.compute_ref_logp(trainer.compute_advantages(batch)))
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*weights)
    lines = [record.getMessage() for record in caplog.records if "token tree" in record.message]
    assert len(lines) == 1
    assert reason in lines[0]


def test_a_head_that_the_tree_would_compute_differently_is_found():
    model = make_model("qwen3")
    forward = model.forward

    def louder(*arguments, **options):
        output = forward(*arguments, **options)
        output.logits = output.logits * 2
        return output

    model.forward = louder
    assert Forward.of(model, None).windows is None
