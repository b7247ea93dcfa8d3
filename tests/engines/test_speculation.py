"""Drafts: the tokens and their distribution are those without them, wherever a draft is wrong."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.engines.conformance import Sink
from tests.engines.models import (
    SETTINGS,
    always_drafting,
    change_weights,
    error,
    generate_all,
    make_engine,
    make_model,
    make_tokenizer,
    prompt,
    until,
)
from tests.kit.examples import grid
from tuner.engines import SamplingParams
from tuner.engines.grammar import unpacked
from tuner.engines.sampling import sampled_logprobs
from tuner.engines.transformers import speculation

PLAIN = SamplingParams(max_tokens=30)
EVERY = [
    *SETTINGS,
    SamplingParams(max_tokens=12, temperature=0.0, repetition_penalty=1.3),
    SamplingParams(max_tokens=12, presence_penalty=1.5, frequency_penalty=-0.7),
    SamplingParams(max_tokens=12, min_p=0.05, logit_bias=((5, 3.0), (9, -100.0))),
    SamplingParams(max_tokens=12, bad_words=((3,), (7, 8)), top_k=4, top_logprobs=3),
    SamplingParams(max_tokens=12, grammar="start: /[0-9a-f]{20,30}x/"),
    SamplingParams(max_tokens=12, temperature=0.5, stop=("a", "1")),
]


def crowd():
    return [
        (prompt(20 + 7 * n % 40, n // 3), replace(how, seed=n)) for n, how in enumerate(EVERY * 2)
    ]


async def undrafted(model, requests, **options):
    """What is generated without drafts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speculation, "FEW_REQUESTS", 0)
        engine = make_engine(model, **options)
        found = await generate_all(engine, requests)
    assert not engine.stats.drafted_tokens
    return found


def whole(requests, found):
    return [[*ids, *got.completion_ids] for (ids, _), got in zip(requests, found, strict=True)]


def close(one, other):
    torch.testing.assert_close(torch.tensor(one), torch.tensor(other), atol=1e-5, rtol=0)


@grid(
    "kind, attention",
    [("qwen3", "sdpa"), ("mistral", "sdpa"), ("gemma3", "sdpa"), ("gemma3", "eager")],
    quick=2,
)
@pytest.mark.parametrize("errors", [0, 2, 5])
async def test_the_same_seed_gives_the_same_tokens_with_drafts(
    kind, attention, errors, monkeypatch
):
    """Of drafts in which every token is right, every second one, or four of five."""
    model, requests = make_model(kind), crowd()
    model.set_attn_implementation(attention)
    wanted = await undrafted(model, requests)
    always_drafting(
        monkeypatch, whole(requests, wanted), lambda place: bool(errors) and place % errors == 0
    )
    engine = make_engine(model)
    found = await generate_all(engine, requests)
    for one, other in zip(wanted, found, strict=True):
        close(one.logprobs, other.logprobs)
        for ours, others in zip(one.top_logprobs, other.top_logprobs, strict=True):
            close(ours, others)
        assert (other.completion_ids, other.kept) == (one.completion_ids, one.kept)
        assert (other.finish_reason, other.versions) == (one.finish_reason, one.versions)
    stats = engine.stats
    assert stats.sampled_tokens == sum(len(one.completion_ids) for one in wanted)
    assert 0 < stats.accepted_tokens <= stats.drafted_tokens
    assert not errors or stats.accepted_tokens < stats.drafted_tokens
    # What was computed is right for the next turn, and nothing else counts as computed.
    following = [
        ([*ids, 5, 6], SamplingParams(max_tokens=8, seed=n))
        for n, ids in enumerate(whole(requests, found))
    ]
    for (ids, how), got in zip(following, await generate_all(engine, following), strict=True):
        assert got.cached_tokens == len(ids) - 3
        assert error(model, ids, got, how) < 1e-5


async def test_greedy_completions_that_repeat_take_fewer_passes():
    model = make_model()
    said = prompt(12)
    requests = [(said * 3, SamplingParams(max_tokens=100, temperature=0.0))]
    (wanted,) = await undrafted(model, requests)
    engine = make_engine(model)
    (found,) = await generate_all(engine, requests)
    assert found.completion_ids == wanted.completion_ids
    stats = engine.stats
    assert stats.steps < 60
    assert 99 <= stats.steps + stats.accepted_tokens - 1 <= 100


@grid("how", ["limit", "token", "string", "end"], quick=2)
async def test_a_completion_ends_in_the_middle_of_a_draft(how, monkeypatch):
    model, ids = make_model(), prompt(20)
    decode = make_tokenizer().decode
    wanted = await undrafted(model, [(ids, PLAIN)])
    always_drafting(monkeypatch, whole([(ids, PLAIN)], wanted))
    tokens = list(wanted[0].completion_ids)
    for last in range(4, 26):
        engine, sampling, token = make_engine(model), PLAIN, tokens[last]
        end = tokens.index(token) + 1
        if how == "limit":
            sampling, end = replace(PLAIN, max_tokens=last + 1), last + 1
        elif how == "token":
            sampling = replace(PLAIN, stop_token_ids=(token,))
        elif how == "end":
            engine._end_ids = frozenset([token])
        elif not (text := decode([token])).isascii() or not text:
            continue
        else:
            sampling = replace(PLAIN, stop=(text,))
            end = next(n for n in range(1, 31) if text in decode(tokens[:n]))
        got = await engine.generate(ids, sampling, "session")
        assert list(got.completion_ids) == tokens[:end]
        assert got.finish_reason == ("length" if how == "limit" else "stop")
        assert how != "limit" or engine.stats.drafted_tokens == end - 2 - (end > 18)
        assert len(got.logprobs) == len(got.versions) == engine.stats.sampled_tokens == end
        engine._end_ids = frozenset()
        again = [*ids, *tokens[:end], 7]
        following = await engine.generate(again, SamplingParams(max_tokens=9), "session")
        assert following.cached_tokens == len(again) - 2
        assert error(model, again, following, SamplingParams(max_tokens=9)) < 1e-5


async def test_a_sink_gets_each_token_in_order_and_ends_a_request_within_a_draft(monkeypatch):
    model, ids = make_model(), prompt(20)
    (wanted,) = await undrafted(model, [(ids, PLAIN)])
    always_drafting(monkeypatch, whole([(ids, PLAIN)], [wanted]))
    engine, sink = make_engine(model), Sink()
    await engine.generate(ids, PLAIN, "session", sink)
    assert tuple(token for token, _, _ in sink.tokens) == wanted.completion_ids
    assert engine.stats.drafted_tokens == engine.stats.accepted_tokens == 27
    for room in (1, 2, 7):
        engine, sink = make_engine(model), Sink(room)
        task = asyncio.ensure_future(engine.generate(ids, PLAIN, "session", sink))
        await until(lambda engine=engine: engine.stats.steps and not engine.stats.running)
        task.cancel()
        assert [token for token, _, _ in sink.tokens] == list(wanted.completion_ids[:room])
        assert engine.stats.sampled_tokens == room + 1  # and the one that it did not take
        again = [*ids, *wanted.completion_ids[:room], 7]
        got = await engine.generate(again, PLAIN, "session")
        assert got.cached_tokens == len(again) - 1
        assert error(model, again, got, PLAIN) < 1e-5


async def test_an_update_in_flight_drops_what_a_draft_has_left(monkeypatch):
    before, model = make_model(), make_model()
    requests = [(prompt(30, n), replace(PLAIN, max_tokens=60, seed=n)) for n in range(3)]
    answers = whole(requests, await undrafted(model, requests))
    always_drafting(monkeypatch, answers, lambda place: place % 4 == 0)
    engine = make_engine(model)
    running = asyncio.ensure_future(generate_all(engine, requests))
    await until(lambda: engine.stats.sampled_tokens >= 40)
    async with engine.pause():
        change_weights(model)
        await engine.update_weights(7)
    for (ids, sampling), got in zip(requests, await running, strict=True):
        change = got.versions.index(7)
        assert 0 < change < 60
        assert error(before, ids, got, sampling) > 1e-3
        for network, part in ((before, slice(0, change)), (model, slice(change, 60))):
            logits = network(input_ids=torch.tensor([[*ids, *got.completion_ids]])).logits
            logprobs = logits[0, len(ids) - 1 : -1].log_softmax(-1)
            chosen = logprobs.gather(-1, torch.tensor(got.completion_ids)[:, None])[part, 0]
            close(got.logprobs[part], chosen.tolist())


async def test_a_pass_over_drafts_during_which_weights_change_is_thrown_away(monkeypatch):
    model, ids = make_model("gemma3"), prompt(20)
    always_drafting(monkeypatch, whole([(ids, PLAIN)], await undrafted(model, [(ids, PLAIN)])))
    engine, passes = make_engine(model), []

    def change_once(_, __, output):
        passes.append(None)
        if len(passes) == 2:
            change_weights(model)

    model.register_forward_hook(change_once)
    got = await engine.generate(ids, PLAIN, "session")
    assert engine.stats.unannounced_updates == 1
    assert error(model, ids, got, PLAIN) > 1e-3  # of the first token
    so_far = [*ids, got.completion_ids[0]]
    rest = replace(got, completion_ids=got.completion_ids[1:], logprobs=got.logprobs[1:])
    assert error(model, so_far, rest, PLAIN) < 1e-5


# The distribution


def markov(vocabulary):
    """A model whose next token depends on the last one only."""
    model = make_model("llama", vocab_size=vocabulary, max_position_embeddings=2048)
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
    return model


@pytest.mark.long
@pytest.mark.parametrize(
    ("vocabulary", "sampling"),
    [
        (8, SamplingParams(max_tokens=400)),
        (300, SamplingParams(max_tokens=400, grammar="start: /[a-e]{2000}/")),
    ],
    ids=["plain", "grammar"],
)
async def test_pairs_of_tokens_have_exactly_the_models_distribution(
    vocabulary, sampling, monkeypatch
):
    """A chi-square test of 100,000 tokens, the pairs of them behind each token."""
    monkeypatch.setattr(speculation, "FEW_REQUESTS", 256)
    monkeypatch.setattr(speculation, "_START", 2.0)
    monkeypatch.setattr(speculation, "_REGAIN", 2.0)
    monkeypatch.setattr(speculation, "_LONGEST", 4)
    monkeypatch.setattr(speculation._History, "repeats", lambda self, tokens: True)
    monkeypatch.setattr(speculation, "_FEW", 2)
    model = markov(vocabulary)
    engine = make_engine(model, max_model_len=512, max_slots=256)
    logits = model(input_ids=torch.arange(vocabulary)[:, None]).logits[:, 0]
    if sampling.grammar:
        mask = engine.grammars.start(sampling.grammar).mask(vocabulary)[None]
        logits = logits.masked_fill(~unpacked(mask, vocabulary, logits.device), -torch.inf)
    logprobs = sampled_logprobs(logits, sampling.temperature, sampling.top_k, sampling.top_p)
    allowed = logprobs.exp().double().detach().numpy()
    requests = [([seed % vocabulary], replace(sampling, seed=seed)) for seed in range(256)]
    found = await generate_all(engine, requests)
    assert engine.stats.accepted_tokens > 20_000
    counts = np.zeros((vocabulary,) * 3)
    for got in found:
        ids = np.array(got.completion_ids)
        np.add.at(counts, (ids[:-2:2], ids[1:-1:2], ids[2::2]), 1)
        close(got.logprobs[1:], logprobs[ids[:-1], ids[1:]].tolist())
    expected = allowed[:, :, None] * allowed[None] * counts.sum((1, 2))[:, None, None]
    assert not counts[expected == 0].any()
    usual = expected >= 5
    freedom = usual.sum() - usual.any((1, 2)).sum()
    assert freedom > 100
    chi_square = ((counts - expected)[usual] ** 2 / expected[usual]).sum()
    assert abs(chi_square - freedom) < 4 * (2 * freedom) ** 0.5


# Drafts


@pytest.mark.parametrize(
    ("tokens", "follows", "context"),
    [
        ([1, 2, 3, 4, 9, 2, 3], [4, 9, 2, 3], 2),
        ([1, 2, 3, 4, 9, 2, 3, 5, 2, 3], [5, 2, 3], 2),  # the newest of equal ones
        ([7, 2, 3, 4, 9, 2, 3, 5, 7, 2, 3], [4, 9, 2, 3, 5, 7, 2, 3], 3),  # the longest
        ([2, 3, 5, 2, 3], [5, 2, 3], 2),
        ([6, 6, 6], [6], 2),
        ([1, 2, 3, 4, 9, 3], [4, 9, 3], 0),
        ([1, 2, 3], [], 0),
        ([1], [], 0),
    ],
)
def test_a_draft_is_what_followed_the_longest_context(tokens, follows, context):
    found, length = speculation.looked_up(np.array(tokens), 2)
    assert length == context
    assert not context or found.tolist() == follows


class _Asked:
    def __init__(self, limit=100):
        self.limit, self.completion_ids = limit, ()


def test_a_draft_is_at_most_twice_its_context_and_goes_on_with_what_repeats(monkeypatch):
    monkeypatch.setattr(speculation, "_START", 2.0)
    drafts = speculation.Drafts()
    tokens = np.array([9, 1, 2, 3, 4, 5, 6, 7, 8, 10, 1, 2, 3])
    assert drafts.of(_Asked(), tokens).tolist() == [4, 5, 6, 7, 8, 10]
    assert drafts.of(_Asked(), np.array([1, 2, 1, 2, 1])).tolist() == [2, 1, 2, 1, 2, 1]
    assert drafts.of(_Asked(limit=2), tokens).tolist() == [4]


def test_two_tokens_of_context_are_enough_after_drafts_that_were_right():
    drafts, asked, tokens = speculation.Drafts(), _Asked(), np.array([1, 2, 3, 4, 1, 2])
    assert not len(drafts.of(asked, tokens))
    drafts.judge(asked, 4, 4)
    assert drafts.of(asked, tokens).tolist() == [3, 4, 1, 2]
    for _ in range(4):
        drafts.judge(asked, 4, 0)
        drafts.of(asked, tokens)
    assert not len(drafts.of(asked, tokens))


def test_requests_draft_little_while_drafts_of_others_save_nothing():
    tokens = np.array([1, 2, 3, 4, 1, 2, 3])
    drafts, wrong, right = speculation.Drafts(), _Asked(), _Asked()
    assert len(drafts.of(wrong, tokens))
    drafts.judge(wrong, 4, 0)
    assert not len(drafts.of(_Asked(), tokens))
    drafts.of(right, tokens)
    drafts.judge(right, 4, 4)
    assert len(drafts.of(_Asked(), tokens))


def test_what_has_occurred_is_found_token_by_token_as_in_a_search_of_all():
    tokens = np.random.default_rng(0).integers(0, 6, 300)
    history, steps = speculation._History(set(), 0, 0.0), [2, 9, 10, 14, *range(15, 301)]
    found = [history.repeats(tokens[:end]) for end in steps]
    assert found == [speculation.looked_up(tokens[:end], 3)[1] > 0 for end in steps]
    assert 20 < sum(found) < 250


@pytest.mark.long
async def test_drafts_that_are_always_wrong_soon_end(monkeypatch):
    model, ids = make_model(), prompt(20)
    sampling = replace(PLAIN, max_tokens=200)
    answers = whole([(ids, sampling)], await undrafted(model, [(ids, sampling)]))
    start, regain = speculation._START, speculation._REGAIN
    always_drafting(monkeypatch, answers, lambda place: True)
    monkeypatch.setattr(speculation, "_START", start)
    monkeypatch.setattr(speculation, "_REGAIN", regain)
    engine = make_engine(model)
    await engine.generate(ids, sampling, "session")
    stats = engine.stats
    assert stats.steps >= 200
    assert stats.accepted_tokens == 0
    assert 0 < stats.drafted_tokens < 40


@pytest.mark.parametrize(("count", "drafted"), [(8, True), (9, False)])
async def test_few_requests_have_drafts_and_many_have_none(count, drafted):
    requests = [(prompt(4) * 5, SamplingParams(max_tokens=20, seed=n)) for n in range(count)]
    engine = make_engine(make_model())
    await generate_all(engine, requests)
    assert bool(engine.stats.drafted_tokens) is drafted


@pytest.mark.parametrize(
    ("kind", "options", "why"),
    [
        ("qwen3", {}, ""),
        ("qwen3", {"deterministic": True}, "fixed sizes"),
        ("mamba", {}, "cannot be cut back"),
    ],
)
async def test_an_engine_says_why_it_drafts_nothing(kind, options, why, monkeypatch):
    always_drafting(monkeypatch)
    engine = make_engine(make_model(kind), **options)
    assert why in engine.no_drafts
    assert bool(why) is bool(engine.no_drafts)
    await engine.generate(prompt(20), SamplingParams(max_tokens=9), "session")
    assert bool(engine.stats.drafted_tokens) is not bool(why)
