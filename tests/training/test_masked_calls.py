"""A call of which a part is masked is one sequence of the tokens that are left."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import torch

from tests.kit.examples import grid
from tests.training.configured import changed, training
from tests.training.exact import all_float64
from tests.training.test_trainer import gradient_of, random_batch, tiny_model
from tuner.config import RunConfig
from tuner.config.algorithms import GSPOLoss
from tuner.traces import Trace
from tuner.training.batch import build_batch
from tuner.training.forward.layouts import whole_calls
from tuner.training.trainer import PolicyTrainer

LONGEST = 16
SETTINGS = training(total_steps=1, kl="none", grad_clip=1e9, max_completion=LONGEST)
MASKS = ((1, 3), (4, 5))


def masked(traces: list[Trace]) -> list[Trace]:
    """Calls of six tokens and more in three stretches, of which the others stay whole."""
    return [
        replace(
            item,
            calls=tuple(
                replace(one, masked=MASKS if len(one.completion_ids) > 5 else ())
                for one in item.calls
            ),
        )
        for item in traces
    ]


def expected(traces: list[Trace], settings: RunConfig) -> torch.Tensor:
    """The gradient by one forward pass over each call as it was sampled, its tokens masked out."""
    model = all_float64(tiny_model())
    whole = build_batch(traces)
    trainer = PolicyTrainer(model, settings)
    advantages = trainer.compute_advantages(whole).advantages_N.tolist()
    losses = []
    for row, advantage in zip(whole.rows, advantages, strict=True):
        masks = MASKS if len(row.completion_ids) > 5 else ()
        kept = [
            i
            for i in range(len(row.completion_ids))
            if not any(start <= i < stop for start, stop in masks)
        ]
        logp_VT = (
            model(torch.tensor([row.prompt_ids + row.completion_ids])).logits[0].log_softmax(-1)
        )
        at = [len(row.prompt_ids) - 1 + i for i in kept]
        logp_T = logp_VT[at, [row.completion_ids[i] for i in kept]]
        log_ratio_T = logp_T - torch.tensor([row.logprobs[i] for i in kept], dtype=torch.float64)
        if settings.algorithm.policy_loss_fn == "gspo":
            ratio_T = log_ratio_T.mean().exp().expand(len(kept))
        else:
            ratio_T = log_ratio_T.exp()
        loss_T = torch.max(-advantage * ratio_T, -advantage * ratio_T.clamp(0.8, 1.2))
        if settings.algorithm.policy_loss_fn == "ppo" and advantage < 0:
            loss_T = loss_T.clamp(max=-advantage * settings.algorithm.policy_loss.clip_ratio_c)
        match settings.algorithm.loss_agg_mode:
            case "seq-mean-token-mean":
                losses.append(loss_T.mean())
            case "seq-mean-token-sum":
                losses.append(loss_T.sum())
            case "seq-mean-token-sum-norm":
                losses.append(loss_T.sum() / LONGEST)
    torch.stack(losses).mean().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@grid(
    "policy_loss, aggregation",
    [
        ("ppo", "seq-mean-token-mean"),
        ("ppo", "seq-mean-token-sum"),
        ("ppo", "seq-mean-token-sum-norm"),
        ("gspo", "seq-mean-token-mean"),
    ],
    quick=2,
)
def test_gradient_is_that_of_the_whole_call_with_tokens_masked_out(policy_loss, aggregation):
    traces = random_batch(7)
    args = GSPOLoss(clip_range=0.2) if policy_loss == "gspo" else None
    settings = changed(
        SETTINGS, policy_loss=policy_loss, policy_loss_args=args, aggregation=aggregation
    )
    wanted = expected(traces, settings)
    cut = masked(traces)
    assert len(build_batch(cut).rows) > len(build_batch(traces).rows) + 6
    for layout, tokens in (
        ("tree", 10_000),
        ("tree", 40),
        ("tree", 1),
        ("packed", 30),
        ("padded", 30),
    ):
        given = changed(settings, layout=layout, max_tokens_per_micro_batch=tokens)
        trainer = PolicyTrainer(all_float64(tiny_model()), given)
        _, found = gradient_of(trainer.model, trainer, cut)
        assert (found - wanted).norm() < 1e-10 * wanted.norm(), (layout, tokens)


def test_no_micro_batch_has_a_part_of_a_call():
    calls = [0, 0, 1, 2, 2, 3]
    assert whole_calls([[5, 0, 3], [1, 2, 4]], calls) == [[5], [2], [0, 1], [3, 4]]
    assert whole_calls([[0, 1], [2, 3, 4, 5]], calls) == [[0, 1], [2, 3, 4, 5]]


def test_micro_batches_of_a_loss_that_looks_at_sequences_hold_whole_calls():
    batch = build_batch(masked(random_batch(7)))
    settings = changed(SETTINGS, max_tokens_per_micro_batch=1)
    for policy_loss, whole in (("ppo", False), ("gspo", True)):
        trainer = PolicyTrainer(tiny_model(), changed(settings, policy_loss=policy_loss))
        cuts = trainer._micro_batches(batch)
        assert sorted(i for cut in cuts for i in cut) == list(range(len(batch.rows)))
        places = Counter(call for cut in cuts for call in {int(batch.call_N[i]) for i in cut})
        assert (max(places.values()) == 1) is whole
