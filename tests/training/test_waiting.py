"""Between the first micro-batch and the optimizer's step nothing asks the device for a number.

There is no GPU to wait for in the tests. What would make Python wait for one is an operation whose
result Python needs (`item`, `nonzero`, indexing with a mask, ...); these are looked for instead.
"""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.engines.models import make_model, prompt
from tests.kit.examples import grid
from tests.training import test_grammar as grammar
from tests.training.configured import training
from tests.training.exact import row
from tests.training.test_trainer import random_batch, tiny_model
from tuner.config.algorithms import EntropyLoss
from tuner.training.batch import build_batch
from tuner.training.forward.layouts import Forward
from tuner.training.forward.tree_pass import PassCost
from tuner.training.optimizer import make_optimizer
from tuner.training.trainer import PolicyTrainer

WAITING = {
    "_local_scalar_dense",
    "is_nonzero",
    "equal",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "repeat_interleave",
}


class Waits(TorchDispatchMode):
    """The operations that would wait for a GPU, in order."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        indices = args[1] if name in ("index", "index_put", "index_put_") else ()
        if name in WAITING or any(i is not None and i.dtype == torch.bool for i in indices):
            self.found.append(name)
        return function(*args, **(kwargs or {}))


def waits(trainer, scored):
    with Waits() as seen:
        trainer.ppo_update(scored)
    return seen.found


def stale(batch):
    return replace(
        batch,
        rows=tuple(replace(row, versions=(-1,) * len(row.completion_ids)) for row in batch.rows),
    )


SAMPLINGS = ({}, {"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.8, "top_k": 9})
# Of the metrics of one update: one transfer, which a CPU does without an operation; and the spread
# of the advantages, two numbers that are on the CPU in any case. Of each update: whether all
# weights are finite.
OF_A_STEP = ["_local_scalar_dense"] * 3


@grid(
    "settings",
    [
        {},
        {"policy_loss": "gspo"},
        {"proximal": "loglinear", "rejection": (0.5, 2.0)},
        {"proximal": "recompute", "updates": 2, "entropy": EntropyLoss(entropy_coef=0.01)},
        {"optimizer_offload": True, "activation_checkpointing": True},
    ],
    quick=2,
    ids=str,
)
def test_micro_batches_follow_each_other_without_waiting(settings):
    numbers = {"total_steps": 3, "max_tokens_per_micro_batch": 40} | settings
    trainer = PolicyTrainer(tiny_model(), training(**numbers))
    batch = stale(build_batch(random_batch(0, samplings=SAMPLINGS)))
    scored = trainer.compute_ref_logp(trainer.compute_advantages(batch))
    assert len(trainer._micro_batches(batch)) > 3
    updates = settings.get("updates", 1)
    assert waits(trainer, scored) == [*OF_A_STEP, *["_local_scalar_dense"] * (updates - 1)]


class Operators(TorchDispatchMode):
    """The number of operators, views included."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


def operators(layers, rows, layout):
    """Of the forward and backward pass over rows of a model with so many layers."""
    model = make_model("qwen3", num_hidden_layers=layers)
    forward = Forward("padded", in_parts=True)
    if layout == "tree":
        forward = Forward("tree", windows={"full_attention": None}, cost=PassCost(0.01))
    with Operators() as seen:
        forward.logprobs(model, rows, with_entropy=False).logp_T.sum().backward()
    return seen.count


@pytest.mark.parametrize(
    ("groups", "rollouts", "most"), [(1, 4, 1.3), (1, 12, 1.6), (3, 4, 1.8), (3, 12, 2.1)]
)
def test_a_layer_of_a_tree_has_few_more_operators_than_one_of_padded_rows(groups, rollouts, most):
    rows = [
        row(prompt(70, group), prompt(80, 10 * group + seed))
        for group in range(groups)
        for seed in range(1, rollouts + 1)
    ]
    tree, padded = (
        operators(2, rows, layout) - operators(1, rows, layout) for layout in ("tree", "padded")
    )
    assert tree <= most * padded


class Casts(TorchDispatchMode):
    """How often each tensor was cast to each dtype: by place, version, shape and strides."""

    def __init__(self):
        super().__init__()
        self.found = Counter()
        self._kept = []  # so that no other tensor gets the same place

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name, source = function.overloadpacket.__name__, None
        if name in ("_to_copy", "copy_"):
            source = args[0] if name == "_to_copy" else args[1]
        if source is not None and source.is_floating_point() and source.dtype != result.dtype:
            self._kept.append(source)
            seen = source.data_ptr(), source._version, source.shape, source.stride(), result.dtype
            self.found[seen] += source.numel() > 64  # RoPE casts its few frequencies twice
        return result


@pytest.mark.parametrize("layout", ["tree", "packed", "padded"])
def test_an_update_in_bfloat16_casts_no_tensor_twice(layout):
    trainer = PolicyTrainer(tiny_model().bfloat16(), training(total_steps=3, layout=layout))
    scored = trainer.compute_advantages(build_batch(random_batch(0)))
    scored = trainer.compute_ref_logp(scored)
    trainer.ppo_update(scored)  # makes the optimizer's state
    with Casts() as seen:
        trainer.ppo_update(scored)
    assert len(seen.found) > 20
    assert max(seen.found.values()) == 1


def test_the_norm_of_all_weights_is_a_few_operators():
    weights = list(tiny_model().parameters())
    optimizer = make_optimizer(weights, lr=1e-3)
    with Operators() as seen:
        assert optimizer.finite()
    assert seen.count < len(weights) + 10  # each is looked at without its gradient


async def test_grammars_are_replayed_without_waiting():
    engine = grammar.make_engine()
    traces = await grammar.rollouts(engine, [grammar.GRAMMAR, "", grammar.ONE_OF_THREE, ""])
    trainer = PolicyTrainer(engine._model, grammar.SETTINGS, grammars=engine.grammars)
    scored = trainer.compute_advantages(build_batch(traces))
    assert waits(trainer, scored) == OF_A_STEP
