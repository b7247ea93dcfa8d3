"""A device that has no room for a micro-batch gets smaller ones, and the same gradient."""

import logging
from dataclasses import replace

import pytest
import torch

from tests.engines.models import make_model, prompt
from tests.training.configured import training
from tests.training.exact import row
from tuner.errors import TrainingError
from tuner.training.batch import Batch
from tuner.training.forward.layouts import Forward
from tuner.training.trainer import PolicyTrainer

ROWS = [row(prompt(200, n // 2), prompt(60, 90 + n)) for n in range(8)]


def batch():
    rewards = torch.arange(8).double()
    return Batch(
        rows=tuple(replace(one, rollout=n) for n, one in enumerate(ROWS)),
        rewards_R=rewards,
        group_R=torch.arange(2).repeat_interleave(4),
        ids=(),
        sampled_tokens=480,
        dropped_tokens={},
        dropped_rollouts={},
    )


@pytest.fixture
def room(monkeypatch):
    """Sets the most tokens of rows that a pass has room for; says which were tried."""
    tried, compute = [], Forward.logprobs

    def most(tokens):
        def logprobs(self, model, rows, *, with_entropy):
            tried.append(sum(map(len, rows)))
            if tried[-1] > tokens:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate much.")
            return compute(self, model, rows, with_entropy=with_entropy)

        monkeypatch.setattr(Forward, "logprobs", logprobs)
        return tried

    return most


def settings(**changed):
    return training(
        total_steps=5, layout="padded", max_tokens_per_micro_batch=4096, kl="none", **changed
    )


def test_micro_batches_are_halved_until_they_fit_and_stay_so(room, caplog):
    model = make_model()
    wanted = PolicyTrainer(make_model(), settings(optimizer_offload=False))
    wanted.ppo_update(wanted.compute_advantages(batch()))
    tried = room(1100)
    trainer = PolicyTrainer(model, settings())
    tried.clear()
    with caplog.at_level(logging.WARNING, logger="tuner"):
        trainer.ppo_update(trainer.compute_advantages(batch()))
    assert tried == [2080, 1820, 780, 780, 520]
    assert caplog.text.count("there is no room for micro-batches of") == 2
    assert "from now on they have 1024" in caplog.text
    weights, expected = (
        torch.cat([p.detach().flatten() for p in one.model.parameters()])
        for one in (trainer, wanted)
    )
    assert (weights - expected).abs().max() < 1e-7
    tried.clear()
    trainer.compute_logp(batch())
    assert max(tried) <= 1100


def test_nothing_is_updated_where_there_is_no_room_at_all(room):
    model = make_model()
    trainer = PolicyTrainer(model, settings())
    before = [p.detach().clone() for p in model.parameters()]
    room(100)
    with pytest.raises(TrainingError, match=r"no room for 256 tokens \(CUDA out of memory\)"):
        trainer.ppo_update(trainer.compute_advantages(batch()))
    assert all(map(torch.equal, before, model.parameters()))


def test_recorded_rows_get_room_as_well(room):
    rows, weights = batch().rows, torch.full((8,), 1 / 8)
    results = []
    for most in (10_000, 1100):
        tried = room(most)
        trainer = PolicyTrainer(make_model(), settings())
        tried.clear()
        trainer.likelihood_update(rows, weights)
        results.append(torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))
        assert (len(tried) > 1) == (most == 1100)
    assert (results[0] - results[1]).abs().max() < 1e-7
