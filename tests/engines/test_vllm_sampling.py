"""vLLM's protocol: what is asked of it, what is understood, and what is never asked."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from tuner.engines import EngineError, SamplingParams
from tuner.engines.sampling import SamplingBatch
from tuner.engines.vllm.core import check_for_vllm, listed, sampled, vllm_sampling
from tuner.errors import ConfigError

LONGEST = 16


def output(ids, places, *, reason=None, cached=0):
    """What vLLM answers: of each token its log-prob, then those of the most probable."""
    sizes = [len(place) for place in places]
    ends = torch.tensor(sizes).cumsum(0).tolist()
    logprobs = SimpleNamespace(
        start_indices=[end - size for end, size in zip(ends, sizes, strict=True)],
        end_indices=ends,
        token_ids=[token for place in places for token, _ in place],
        logprobs=[value for place in places for _, value in place],
    )
    completion = SimpleNamespace(token_ids=ids, logprobs=logprobs, finish_reason=reason)
    return SimpleNamespace(outputs=[completion], num_cached_tokens=cached)


def answered(logits, token, sampling):
    """`token` as vLLM samples it from logits [V]: listed beside as many as are asked for."""
    found = SamplingBatch.of([sampling], torch.device("cpu")).logprobs(logits[None])[0]
    values, best = found.topk(min(listed(sampling, LONGEST), len(logits)))
    place = [(token, float(found[token])), *zip(best.tolist(), values.tolist(), strict=True)]
    return sampled(output([token], [place]), sampling, LONGEST), found


LOGITS = torch.randn(64, generator=torch.Generator().manual_seed(2)) * 3
TIED = LOGITS.round()
FLAT = torch.arange(64.0) / 1000


@pytest.mark.parametrize(
    ("logits", "cut", "known"),
    [
        (LOGITS, {"top_k": 5}, True),
        (LOGITS, {"top_k": 5, "top_p": 0.9, "temperature": 1.5}, True),
        (LOGITS, {"min_p": 0.1, "temperature": 1.5}, True),
        (LOGITS, {"top_p": 0.9, "temperature": 1.5, "top_logprobs": 3}, True),
        (TIED, {"top_k": 4}, True),
        (FLAT, {"top_p": 0.2}, True),
        (FLAT, {"top_p": 0.23}, True),
        (FLAT, {"top_p": 0.25}, False),  # it leaves as many as are listed, and perhaps more
        (FLAT, {"top_p": 0.9}, False),
        (FLAT, {"min_p": 0.5}, False),
        (FLAT, {"top_k": 20}, False),
        (FLAT * 0, {"top_k": 3}, False),  # all have the logit of the third
    ],
)
def test_what_a_cut_left_is_all_of_it_or_not_known(logits, cut, known):
    sampling = SamplingParams(max_tokens=1, **cut)
    left = SamplingBatch.of([sampling], torch.device("cpu")).logprobs(logits[None])[0] > -torch.inf
    for token in left.nonzero()[:, 0].tolist():  # however improbable the sampled one is
        got, found = answered(logits, token, sampling)
        assert got.kept == ((tuple(left.nonzero()[:, 0].tolist()),) if known else ((),))
        assert got.logprobs == (float(found[token]),)
        assert [len(pairs) for pairs in got.top_logprobs] == [3] * ("top_logprobs" in cut)


def test_tokens_of_one_output_have_a_set_each():
    places = [[(4, -1.0), (3, -0.5), (9, float("-inf"))], [(7, 0.0), (8, float("-inf"))]]
    got = sampled(output([4, 7], places), SamplingParams(max_tokens=2, top_k=2), LONGEST)
    assert (got.ids, got.logprobs, got.kept) == ((4, 7), (-1.0, 0.0), ((3, 4), (7,)))


@pytest.mark.parametrize("settings", [{}, {"temperature": 0, "top_k": 3, "top_p": 0.5}])
def test_what_was_not_cut_has_no_sets(settings):
    sampling = SamplingParams(max_tokens=1, top_logprobs=2, **settings)
    got = sampled(output([4], [[(4, -0.7), (4, -0.7), (6, -0.9)]]), sampling, LONGEST)
    greedy = not sampling.temperature
    assert (got.kept, got.logprobs) == ((), (0.0 if greedy else -0.7,))
    assert got.top_logprobs == ((((4, 0.0),) if greedy else ((4, -0.7), (6, -0.9))),)


@pytest.mark.parametrize(
    ("settings", "longest", "count"),
    [
        ({}, 128, 0),
        ({"top_logprobs": 5}, 128, 5),
        ({"temperature": 0, "top_k": 3, "top_logprobs": 5}, 128, 5),
        ({"top_k": 20}, 128, 28),
        ({"top_k": 3, "top_logprobs": 20}, 128, 20),
        ({"top_k": 120}, 128, 128),
        ({"top_k": 121}, 128, 128),
        ({"top_p": 0.9}, 128, 128),
        ({"min_p": 0.1, "top_logprobs": 5}, 500, 500),
    ],
)
def test_as_many_tokens_are_listed_as_a_cut_may_leave(settings, longest, count):
    assert listed(SamplingParams(max_tokens=1, **settings), longest) == count


def test_a_part_is_asked_for_in_vllms_words(monkeypatch):
    vllm, params = ModuleType("vllm"), ModuleType("vllm.sampling_params")
    vllm.SamplingParams = params.StructuredOutputsParams = SimpleNamespace
    params.RequestOutputKind = SimpleNamespace(DELTA="delta")
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", params)
    asked = SamplingParams(
        max_tokens=3,
        temperature=0.7,
        top_k=5,
        seed=9,
        stop=("x",),
        stop_token_ids=(8,),
        logit_bias=((7, 4.0),),
        bad_words=((3, 4),),
    )
    assert vars(vllm_sampling(asked, (0,), LONGEST)) == {
        "max_tokens": 3,
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": 5,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logit_bias": {7: 4.0},
        "seed": 9,
        "logprobs": 13,
        "flat_logprobs": True,
        "stop_token_ids": [0, 8],
        "ignore_eos": True,
        "detokenize": False,
        "skip_special_tokens": False,
        "output_kind": "delta",
        "structured_outputs": None,
        "_bad_words_token_ids": [[3, 4]],
    }
    plain = vllm_sampling(SamplingParams(max_tokens=1, grammar="start: /a/"), (0,), LONGEST)
    assert plain.structured_outputs.grammar.endswith("start: /a/")
    assert (plain.logit_bias, plain.logprobs) == (None, 0)
    assert not hasattr(plain, "_bad_words_token_ids")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 2.1}, r"temperature is 2\.1, and vLLM takes 2\.0 at most"),
        ({"temperature": 0.005}, r"temperature is 0\.005, which vLLM would treat as 0\.01"),
        ({"top_p": 1.5}, r"top_p is 1\.5"),
    ],
)
def test_settings_that_vllm_takes_otherwise_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        check_for_vllm(SamplingParams(max_tokens=1, **changes))


@pytest.mark.parametrize("changes", [{"min_p": 0.1}, {"logit_bias": ((5, 1.0),)}])
def test_settings_that_vllm_does_not_take_with_drafts_are_refused(changes):
    sampling = SamplingParams(max_tokens=1, **changes)
    check_for_vllm(sampling)
    with pytest.raises(ConfigError, match=f"{next(iter(changes))} is not supported.*speculative"):
        check_for_vllm(sampling, drafts=True)


@pytest.mark.parametrize(
    ("ids", "value", "reason", "message"),
    [
        ([4], float("nan"), None, "token 4 with log-prob nan: the model's logits are not finite"),
        ([4], float("-inf"), None, "token 4 with log-prob -inf"),
        ([4, 5], -0.5, None, "2 token ids and 1 log-probs"),
        ([4], -0.5, "abort", "ended a completion with abort"),
    ],
)
def test_an_answer_that_is_no_completion_fails(ids, value, reason, message):
    with pytest.raises(EngineError, match=message):
        sampled(output(ids, [[(4, value)]], reason=reason), SamplingParams(max_tokens=2), LONGEST)


def test_the_end_and_what_was_cached_are_told():
    sampling, place = SamplingParams(max_tokens=1), [(4, -0.5)]
    got = sampled(output([4], [place], reason="length", cached=7), sampling, LONGEST)
    assert (got.finish_reason, got.cached_tokens) == ("length", 7)
    last = sampled(output([], [], reason="stop", cached=None), sampling, LONGEST)
    assert (last.ids, last.finish_reason, last.cached_tokens) == ((), "stop", -1)
