"""Tokens are trained on the distribution that they were sampled from, also after an update."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.engines.models import (
    VOCABULARY,
    change_weights,
    edited_by_definition,
    generate_all,
    make_engine,
    make_model,
    prompt,
)
from tests.engines.test_grammar import grammars
from tests.engines.test_grammar import make_model as make_letters
from tests.kit.builders import call, trace
from tests.kit.examples import grid
from tests.kit.toy import ids_of
from tests.training.configured import training
from tuner.engines import SamplingParams
from tuner.engines.sampling import kept_ids, packed_kept
from tuner.errors import TrainingError
from tuner.traces import Call
from tuner.traces.store import trace_from_json, trace_to_json
from tuner.training.batch import build_batch
from tuner.training.trainer import PolicyTrainer

SETTINGS = {
    "top-k": {"top_k": 9},
    "top-p": {"top_p": 0.7, "temperature": 1.4},
    "min-p": {"min_p": 0.15},
    "repetition": {"repetition_penalty": 1.6},
    "counted": {"presence_penalty": 1.2, "frequency_penalty": 0.6, "temperature": 0.8},
    "bias": {"logit_bias": ((7, 4.0), (9, -100.0))},
    "bad-words": {"bad_words": ((3,), (7, 9), (9, 7))},
    "qwen": {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "presence_penalty": 1.5},
}
ROUNDING = 2e-5


async def sampled(model, options, **masks):
    """Rollouts of one group, of which two have each prompt, back from their stored form."""
    asked = [
        (prompt(12 + place % 2, place % 2), SamplingParams(max_tokens=14, seed=place, **options))
        for place in range(4)
    ]
    got = await generate_all(make_engine(model), asked)
    traces = []
    for place, ((ids, sampling), one) in enumerate(zip(asked, got, strict=True)):
        made = call(str(place), ids, one.completion_ids, one.logprobs)
        made = replace(made, sampling=sampling, kept=one.kept, **masks)
        traces.append(trace(0, place, [made], reward=float(place % 2)))
    return [trace_from_json(json.loads(json.dumps(trace_to_json(one)))) for one in traces]


@torch.no_grad()
def by_definition(model, one: Call) -> list[float]:
    """The log-prob of each completion token under the weights as they are, place by place.

    Where a kept set is not known, top-k is applied to them, and the token counted in.
    """
    ids = [*one.prompt_ids, *one.completion_ids]
    logits = model(torch.tensor([ids])).logits[0, len(one.prompt_ids) - 1 : -1]
    found = []
    for place, token in enumerate(one.completion_ids):
        done = one.completion_ids[:place]
        row = edited_by_definition(logits[place], one.sampling, one.prompt_ids, done)
        row /= one.sampling.temperature
        if one.kept and one.kept[place]:
            left = kept_ids(one.kept[place])
        elif one.sampling.top_k > 0:
            left = {*row.topk(one.sampling.top_k).indices.tolist(), token}
        else:
            left = range(VOCABULARY)
        found.append(float(row[token] - row[list(left)].logsumexp(-1)))
    return found


@pytest.mark.parametrize("layout", ["tree", "packed", "padded"])
@grid("options", SETTINGS.values(), quick=3, ids=SETTINGS)
async def test_log_probs_after_an_update_are_those_of_the_same_cut_and_penalties(options, layout):
    model = make_model("qwen3")
    traces = await sampled(model, options, masked=((2, 4), (9, 10)))
    trainer = PolicyTrainer(model, training(total_steps=1, kl="none", layout=layout))
    batch = build_batch(traces)
    for row, logp in zip(batch.rows, trainer.compute_logp(batch), strict=True):
        assert logp.tolist() == pytest.approx(row.logprobs, abs=ROUNDING)
    change_weights(model)
    wanted = {one.id: by_definition(model, one) for t in traces for one in t.calls}
    for row, logp in zip(batch.rows, trainer.compute_logp(batch), strict=True):
        stretch = wanted[row.call_id][row.begun : row.begun + len(row.completion_ids)]
        assert logp.tolist() == pytest.approx(stretch, abs=ROUNDING)
    assert {row.begun for row in batch.rows} == {0, 4, 10}


async def test_without_what_was_left_a_cut_is_another_after_an_update():
    """So the ratio would compare two distributions: this is what is recorded for."""
    model = make_model("qwen3")
    traces = await sampled(model, SETTINGS["top-p"])
    change_weights(model, 0.05)
    unknown = [replace(t, calls=tuple(replace(one, kept=()) for one in t.calls)) for t in traces]
    trainer = PolicyTrainer(model, training(total_steps=1, kl="none"))
    replayed, again = (
        torch.cat(trainer.compute_logp(build_batch(found))) for found in (traces, unknown)
    )
    assert (replayed - again).abs().max() > 0.05


async def test_only_tokens_whose_set_is_not_known_are_cut_again():
    model = make_model("qwen3")
    first, second, *others = await sampled(model, SETTINGS["top-k"])
    (none,), (some,) = first.calls, second.calls
    some = replace(some, kept=tuple(k if i % 2 else "" for i, k in enumerate(some.kept)))
    traces = [
        replace(first, calls=(replace(none, kept=()),)),
        replace(second, calls=(some,)),
        *others,
    ]
    change_weights(model, 0.05)
    batch = build_batch(traces)
    trainer = PolicyTrainer(model, training(total_steps=1, kl="none"))
    for one, logp in zip(traces, trainer.compute_logp(batch), strict=True):
        assert logp.tolist() == pytest.approx(by_definition(model, one.calls[0]), abs=ROUNDING)


def test_the_same_token_with_another_kept_set_or_temperature_has_its_own_log_prob():
    model = make_model("qwen3")
    trainer = PolicyTrainer(model, training(total_steps=1, kl="none"))
    ways = [([5, 6], 1.0), ([5, 7, 8], 1.0), ([5, 6], 1.0), ([5, 6], 2.0)]
    calls = [
        replace(
            call(str(i), [1, 2], [5], [-1.0], top_k=3, temperature=temperature),
            kept=(packed_kept(np.array(ids), VOCABULARY),),
        )
        for i, (ids, temperature) in enumerate(ways)
    ]
    batch = build_batch([trace(0, i, [one], reward=float(i)) for i, one in enumerate(calls)])
    found = [float(logp) for logp in trainer.compute_logp(batch)]
    assert found == pytest.approx([by_definition(model, one)[0] for one in calls], abs=ROUNDING)
    assert found[0] == found[2]
    assert len(set(found)) == 3


def test_what_a_masked_call_had_sampled_is_not_the_prompt_of_another():
    model = make_model("qwen3")
    trainer = PolicyTrainer(model, training(total_steps=1, kl="none"))
    begun = call("a", [1, 2], [5, 6, 7], [-1.0] * 3, presence_penalty=2.0)
    asked = call("b", [1, 2, 5, 6], [7], [-1.0], presence_penalty=2.0)
    calls = [replace(begun, masked=((0, 2),)), asked]
    batch = build_batch([trace(0, i, [one], reward=float(i)) for i, one in enumerate(calls)])
    found = [float(logp) for logp in trainer.compute_logp(batch)]
    assert found == pytest.approx([by_definition(model, c)[-1] for c in calls], abs=ROUNDING)
    assert abs(found[0] - found[1]) > 1e-3


@pytest.mark.parametrize(
    ("kept", "sentence"),
    [
        (packed_kept(np.array([4, 6]), VOCABULARY), "token 5 was sampled but is not in the set"),
        (packed_kept(np.array([5, 999]), 1000), "cannot be read"),
        ("x", "cannot be read"),
        ("i5", "cannot be read"),
    ],
)
def test_a_damaged_kept_set_is_refused(kept, sentence):
    trainer = PolicyTrainer(make_model("qwen3"), training(total_steps=1, kl="none"))
    calls = [replace(call(str(i), [1, 2], [5], [-1.0], top_k=3), kept=(kept,)) for i in (0, 1)]
    batch = build_batch([trace(0, i, [one], reward=float(i)) for i, one in enumerate(calls)])
    with pytest.raises(TrainingError, match=sentence):
        trainer.compute_logp(batch)


def test_a_token_that_completes_a_bad_word_is_refused():
    trainer = PolicyTrainer(make_model("qwen3"), training(total_steps=1, kl="none"))
    calls = [call(str(i), [1], [4, 5], [-1.0, -1.0], bad_words=((4, 5),)) for i in (0, 1)]
    batch = build_batch([trace(0, i, [one], reward=float(i)) for i, one in enumerate(calls)])
    with pytest.raises(TrainingError, match="call '0': token 1 is 5, which completes one of its"):
        trainer.compute_logp(batch)


def test_a_call_with_fewer_kept_sets_than_tokens_is_invalid():
    one = replace(call("a", [1, 2], [5, 6], [-1.0, -1.0], top_k=3), kept=("",))
    assert one.invalid == "2 completion ids and 1 kept sets"


def test_a_masked_call_within_a_grammar_is_replayed_from_its_beginning():
    model, text = make_letters(), ids_of("abc")
    trainer = PolicyTrainer(model, training(total_steps=1, kl="none"), grammars=grammars())
    whole = call("a", ids_of("hi"), text, [0.0] * 3, grammar='start: "abc" | "ad" | "xe"')
    all_three, rest = (
        trainer.compute_logp(
            build_batch([trace(0, i, [replace(whole, masked=mask)], reward=i) for i in (0, 1)])
        )[0]
        for mask in ((), ((0, 1),))
    )
    assert rest.tolist() == pytest.approx(all_three[1:].tolist(), abs=ROUNDING)


@given(st.sets(st.integers(0, 299), min_size=1), st.sampled_from([300, 2**17]))
def test_kept_sets_are_packed_and_read_again(ids, vocabulary):
    packed = packed_kept(np.array(list(ids)), vocabulary)
    assert kept_ids(packed).tolist() == sorted(ids)
    assert packed[0] == ("i" if 32 * len(ids) <= vocabulary else "b")
