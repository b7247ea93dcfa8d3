"""Training an adapter: what has gradients, what the reference is, the token tree."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engines.models import VOCABULARY, make_model
from tests.kit.examples import grid
from tests.traces.agents import batches
from tests.training.configured import training
from tests.training.exact import (
    KINDS,
    SAMPLINGS,
    all_float64,
    assert_same_gradient,
    model_of,
    row,
    small_parts,
)
from tests.training.lora import wrapped
from tests.training.test_trainer import random_batch, tiny_model
from tuner.config.algorithms import KLLoss
from tuner.training.batch import build_batch
from tuner.training.forward.layouts import exact_forward
from tuner.training.references import AdapterReference
from tuner.training.trainer import PolicyTrainer

CUTS = [("tree", 10_000), ("tree", 17), ("packed", 10_000), ("padded", 40)]


def random_rows(calls, dice):
    return [
        row(
            [i % VOCABULARY for i in c.prompt_ids],
            [i % VOCABULARY for i in c.completion_ids],
            dice.choice(SAMPLINGS),
        )
        for c in calls
        if c.prompt_ids and c.completion_ids
    ][:12]


@grid(
    "kind, dtype, tolerance",
    [(kind, torch.float32, 1e-5) for kind in KINDS]
    # Eager attention, which gemma2 needs for its soft capping, is in float32 in any case.
    + [(kind, torch.float64, 1e-10) for kind in KINDS if kind != "gemma2"],
    quick=2,
)
def test_gradient_of_an_adapter_is_that_of_one_row_per_call_in_every_layout(kind, dtype, tolerance):
    model = wrapped(model_of(kind))
    if dtype == torch.float64:
        all_float64(model)
    assert exact_forward(model, None).cost is not None
    # exact_forward takes another layout where the asked one is not exact for a model.
    layouts = {name: exact_forward(model, None, layout=name).layout for name, _ in CUTS}
    assert layouts["tree"] == "tree"
    cuts = [(layouts[name], size) for name, size in CUTS]

    @settings(max_examples=3, deadline=None, derandomize=True)
    @given(calls=batches, dice=st.randoms(use_true_random=False))
    def check(calls, dice):
        rows = random_rows(calls, dice)
        if rows:
            assert_same_gradient(model, rows, cuts=cuts, tolerance=tolerance)

    with small_parts():
        check()


def test_an_adapter_on_the_output_layer_has_its_part_in_the_gradient():
    model = wrapped(make_model("llama"), target_modules=("lm_head", "q_proj"))
    rows = [row([1, 2, 3], [4, 5]), row([1, 2, 3], [4, 6, 7])]
    with small_parts():
        assert_same_gradient(model, rows, cuts=[("tree", 1000), ("tree", 3)], tolerance=1e-5)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert gradients["base_model.model.lm_head.lora_A.default.weight"].any()


def trainer_of(model, **options):
    return PolicyTrainer(
        model, training(total_steps=9, lr=1e-2, kl_args=KLLoss(kl_coef=0.1)), **options
    )


def step(trainer, seed=0):
    """One update; the reference's log-probs that it was made with."""
    batch = build_batch(random_batch(seed))
    scored = trainer.compute_ref_logp(trainer.compute_advantages(batch))
    trainer.ppo_update(scored)
    return scored.ref_logp


def base_weights(model):
    return {
        name: parameter.detach().clone()
        for name, parameter in model.named_parameters()
        if "lora_" not in name
    }


def test_only_the_adapter_is_trained_and_the_model_stays_bit_for_bit():
    model = wrapped(tiny_model(), new=True)
    before = base_weights(model)
    adapter = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    trainer = trainer_of(model)
    held = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for n, p in model.named_parameters() if "lora_" in n}
    for seed in range(2):
        step(trainer, seed)
    assert all(torch.equal(before[name], value) for name, value in base_weights(model).items())
    after = dict(model.named_parameters())
    assert all(not torch.equal(value, after[name]) for name, value in adapter.items())


@grid("new", [True, False], quick=1)
def test_reference_is_the_frozen_start_without_a_copy_of_the_model(new):
    """With a new adapter the model without it; else the model with the adapter as it was."""
    model = wrapped(tiny_model(), new=new)
    frozen = copy.deepcopy(model)
    size = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    trainer = trainer_of(model)
    assert isinstance(trainer.reference, AdapterReference)
    assert sum(p.numel() for p in model.parameters()) == size + (0 if new else trained)
    other = trainer_of(frozen)
    for seed in range(3):
        wanted = other.compute_logp(build_batch(random_batch(seed)), model=frozen)
        found = step(trainer, seed)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    now = trainer.compute_logp(build_batch(random_batch(0)))
    then = other.compute_logp(build_batch(random_batch(0)), model=frozen)
    assert not torch.allclose(now[0], then[0])
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == trained


def test_update_with_the_reference_in_the_model_is_that_with_a_copy():
    """Also that the model is the policy again, and trained, after the reference has acted."""
    weights = []
    for copied in (False, True):
        model = wrapped(tiny_model(), new=True)
        trainer = trainer_of(model, reference=tiny_model() if copied else None)
        for seed in range(3):
            step(trainer, seed)
        weights.append(torch.cat([p.flatten() for p in model.parameters() if p.requires_grad]))
    assert torch.equal(*weights)


def test_the_policy_is_back_where_the_reference_failed():
    model = wrapped(tiny_model())
    trainer = trainer_of(model)
    batch = build_batch(random_batch(0))
    before = trainer.compute_logp(batch)
    with pytest.raises(RuntimeError, match="stop"), trainer.reference.active():
        raise RuntimeError("stop")
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.compute_logp(batch), strict=True))
    assert all(p.requires_grad == ("default" in n) for n, p in model.named_parameters())


def test_making_adapters_leaves_the_random_state_alone():
    torch.manual_seed(3)
    wanted = torch.rand(3)
    model = tiny_model()
    torch.manual_seed(3)
    trainer_of(wrapped(model))
    assert torch.equal(torch.rand(3), wanted)
