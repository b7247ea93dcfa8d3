"""The sampled distribution, against definitions written out one row at a time."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kit.examples import few
from tuner.engines import SamplingParams
from tuner.engines.sampling import (
    SamplingBatch,
    check_sampling,
    choose,
    most_probable,
    sampled_logprobs,
)
from tuner.errors import ConfigError


def by_definition(logits, temperature, top_k, top_p):
    """Probabilities of one row in float64, straight from the definitions."""
    logits = np.asarray(logits, dtype=np.float64)
    if temperature == 0:
        return np.eye(len(logits))[logits.argmax()]
    probs = np.exp((logits - logits.max()) / temperature)
    probs /= probs.sum()
    order = np.argsort(-probs, kind="stable")
    if top_k > 0:
        probs[order[top_k:]] = 0
        probs /= probs.sum()
    if top_p < 1:
        kept, mass = [], 0.0
        for token in order:
            kept.append(token)
            mass += probs[token]
            if mass >= top_p:
                break
        nucleus = np.zeros_like(probs)
        nucleus[kept] = probs[kept]
        probs = nucleus / nucleus.sum()
    return probs


rows = st.tuples(
    st.integers(0, 2**31),
    st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.7]),
    st.sampled_from([-1, 1, 5, 40, 1000]),
    st.sampled_from([0.05, 0.5, 0.9, 1.0]),
)


@settings(max_examples=few(60), deadline=None)
@given(st.lists(rows, min_size=1, max_size=6))
def test_a_batch_of_different_settings_follows_the_definitions(batch):
    logits = np.stack([np.random.default_rng(seed).normal(0, 3, 50) for seed, *_ in batch])
    wanted = np.stack([by_definition(row, *s[1:]) for row, s in zip(logits, batch, strict=True)])
    params = [SamplingParams(max_tokens=1, temperature=t, top_k=k, top_p=p) for _, t, k, p in batch]
    made = SamplingBatch.of(params, torch.device("cpu"))
    got = made.logprobs(torch.tensor(logits, dtype=torch.float32)).exp()
    np.testing.assert_allclose(got.numpy(), wanted, atol=2e-6)


def test_one_number_for_all_rows_equals_one_per_row():
    logits = torch.randn(3, 4, 50, generator=torch.Generator().manual_seed(0)) * 3
    one = sampled_logprobs(logits, 0.7, 20, 0.9)
    each = sampled_logprobs(
        logits, torch.full((3, 4), 0.7), torch.full((3, 4), 20), torch.full((3, 4), 0.9)
    )
    torch.testing.assert_close(one, each)


def test_greedy_is_a_point_mass_with_log_prob_zero():
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    logprobs = sampled_logprobs(logits, temperature=0.0)
    assert logprobs.tolist() == [[-math.inf, 0.0, -math.inf]]
    assert choose(logprobs, [0.999]) == ([1], [0.0])
    assert most_probable(logprobs, 3) == [[(1, 0.0)]]


def test_sampled_frequencies_match_the_probabilities():
    logprobs = torch.log(torch.tensor([0.0, 0.2, 0.0, 0.5, 0.3, 0.0]))
    uniforms = ((np.arange(20_000) + 0.5) / 20_000).tolist()
    ids, _ = choose(logprobs.expand(20_000, -1), uniforms)
    frequency = np.bincount(ids, minlength=6) / 20_000
    np.testing.assert_allclose(frequency, [0, 0.2, 0, 0.5, 0.3, 0], atol=1e-4)


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_a_token_of_probability_zero_is_never_sampled(uniform):
    logprobs = torch.log(torch.tensor([[0.0, 0.7, 0.3, 0.0, 0.0]]))
    ids, chosen = choose(logprobs, [uniform])
    assert ids[0] in (1, 2)
    assert math.isfinite(chosen[0])


def test_log_probs_can_be_differentiated():
    logits = torch.randn(2, 9, dtype=torch.float64, requires_grad=True)
    kept = sampled_logprobs(logits, 0.7, 5, 0.8)
    kept[kept > -math.inf].sum().backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", 1e-40),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", 0),
        ("top_k", 10**30),
        ("repetition_penalty", 1e-320),
        ("max_tokens", 0),
        ("top_logprobs", 21),
        ("stop", ("",)),
    ],
)
def test_settings_out_of_range_are_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=name):
        check_sampling(SamplingParams(**{"max_tokens": 5, name: value}))
