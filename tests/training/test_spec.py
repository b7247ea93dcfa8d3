"""Every argument of a part is a key of the file, is documented, and is read by its function."""

from __future__ import annotations

import pytest
import torch

from docs.tables import REFERENCE
from tests.training.configured import changed, training
from tests.training.test_trainer import random_batch, tiny_model
from tuner.config.algorithms import ADVANTAGES, POLICY_LOSSES, EntropyLoss, KLLoss, KLPenalty
from tuner.config.keys import schema_paths
from tuner.config.schema import AlgorithmSection
from tuner.training.batch import build_batch
from tuner.training.losses import dpo
from tuner.training.trainer import PolicyTrainer

PARTS = {
    **{("advantage_fn", name): part for name, part in ADVANTAGES.items()},
    **{("policy_loss_fn", name): part for name, part in POLICY_LOSSES.items()},
    ("kl_penalty_fn", "k1"): KLPenalty,
    ("kl_loss_fn", "k2"): KLLoss,
    ("entropy_loss_fn", "default"): EntropyLoss,
}


def watched(part, read):
    """An object of `part` that notes in `read` which of its fields are looked at."""

    class Watched(part):
        def __getattribute__(self, name):
            if name in part.model_fields:
                read.add(name)
            return super().__getattribute__(name)

    Watched.__name__ = part.__name__
    changes = {"opmd_baseline": "logavgexp", "std_threshold": 0.0, "kl_coef": 0.5}
    given = {name: value for name, value in changes.items() if name in part.model_fields}
    return Watched(**given | ({"entropy_coef": 0.1} if part is EntropyLoss else {}))


def update(monkeypatch, settings, part, args):
    """One update with the arguments of one part in place of the configuration's."""
    monkeypatch.setattr(AlgorithmSection, part, property(lambda _: args))
    trainer = PolicyTrainer(tiny_model(), settings, teacher=tiny_model(seed=1))
    batch = build_batch(random_batch(0), teacher_prompt=lambda call: (1, *call.prompt_ids))
    trainer.ppo_update(trainer.compute_ref_logp(trainer.compute_advantages(batch)))


@pytest.mark.parametrize(("key", "name"), PARTS)
def test_every_argument_is_a_documented_key_and_is_read_by_its_function(key, name, monkeypatch):
    part, read = PARTS[key, name], set()
    page = (REFERENCE / "configuration/algorithm.md").read_text(encoding="utf-8")
    for field, info in part.model_fields.items():
        path = f"algorithm.{key}_args.{field}"
        assert path in schema_paths()
        (text,) = (part for part in page.split("\n### ") if part.startswith(f"`{path}`\n"))
        assert info.description
        assert info.description in text
    if not part.model_fields:
        return
    args = watched(part, read)
    settings = training(total_steps=1, kl="k2", kl_penalty="k1")
    if name == "dpo":
        dpo(torch.tensor([1.0]), torch.tensor([0.5]), args)
    else:
        if key in ("advantage_fn", "policy_loss_fn"):
            settings = changed(settings, **{key.removesuffix("_fn"): name})
        update(monkeypatch, settings, key.removesuffix("_fn"), args)
    assert read == set(part.model_fields)


def test_an_argument_of_another_part_is_refused():
    with pytest.raises(ValueError, match="clip_range"):
        POLICY_LOSSES["sapo"](clip_range=0.1)
