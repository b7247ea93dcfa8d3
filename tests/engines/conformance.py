"""What every engine must do, as one suite that a module runs by bringing a `rig` fixture.

    from tests.engines.conformance import *  # noqa: F403

    @pytest.fixture
    async def rig() -> AsyncIterator[Rig]: ...

The model is a toy of random weights; log-probs are compared with one plain forward pass of it at
1e-4, whatever computed them.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from tests.engines.models import (
    VOCABULARY,
    change_weights,
    edited_by_definition,
    make_tokenizer,
    prompt,
)
from tests.kit.examples import grid
from tuner.engines import EngineError, Generation, SamplingParams, TrainingEngine
from tuner.engines.grammar import unpacked
from tuner.engines.sampling import kept_ids, sampled_logprobs
from tuner.errors import ConfigError, ContextLengthError

TOLERANCE = 1e-4
CONTEXT = 256
LONG = SamplingParams(max_tokens=200)
LAST_WORD = 299


@torch.no_grad()
def make_rig_model() -> PreTrainedModel:
    """A toy that ends after the token LAST_WORD and never elsewhere; its embeddings are tied."""
    end = make_tokenizer().eos_token_id
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # the least that vLLM computes on a CPU
        max_position_embeddings=512,
        initializer_range=0.2,
        tie_word_embeddings=True,
        eos_token_id=end,
        bos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).eval()
    # One direction that every hidden state keeps, against which the end token points.
    embeddings: Any = model.get_input_embeddings().weight
    embeddings[[end, LAST_WORD]] = 0
    embeddings[:, 0] = 8
    embeddings[LAST_WORD, 0] = -8
    embeddings[end, 0] = -12
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[0] = 0
        layer.mlp.down_proj.weight[0] = 0
    return model


@dataclass
class Rig:
    """An engine under test, and the model that it generates with.

    Attributes:
        crash: Makes what generates die, as a machine would.
        cause: What the error of a request in flight then says.
        spare: Tokens of a prefix that are computed again at most where it is reused.
        both_cuts: Whether top_k and top_p can be asked for together; else that is refused.
        refused: Further settings that are refused.
    """

    engine: TrainingEngine
    model: PreTrainedModel
    crash: Callable[[], None]
    cause: str
    spare: int = 1
    both_cuts: bool = True
    refused: tuple[str, ...] = ()


async def as_new(engine: TrainingEngine, model: PreTrainedModel) -> None:
    """The weights that the model began with, under a version of their own."""
    model.load_state_dict(make_rig_model().state_dict())
    await engine.update_weights(engine.version + 1)


@dataclass
class Sink:
    """Sees the tokens as they come."""

    room: int = 10**9
    tokens: list[tuple[int, float, int]] = field(default_factory=list)

    def push(self, token_id: int, logprob: float, version: int) -> bool:
        if len(self.tokens) >= self.room:
            return False
        self.tokens.append((token_id, logprob, version))
        return True

    async def has(self, count: int) -> None:
        async with asyncio.timeout(300):  # the first tokens after a start take long
            while len(self.tokens) < count:  # noqa: ASYNC110  # called from other threads
                await asyncio.sleep(0.001)


@torch.no_grad()
def distributions(
    rig: Rig, ids: list[int], got: Generation, sampling: SamplingParams
) -> torch.Tensor:
    """Log-probs at each place of the completion by one plain forward pass, shape [T, V]."""
    logits = rig.model(torch.tensor([[*ids, *got.completion_ids]]), use_cache=False).logits
    logits = logits[0, len(ids) - 1 : -1]
    if sampling.grammar:
        vocabulary = logits.shape[-1]
        bits = rig.engine.grammars.replay(sampling.grammar, got.completion_ids, vocabulary)
        logits = logits.masked_fill(~unpacked(bits, vocabulary, logits.device), -torch.inf)
    rows = [
        edited_by_definition(row, sampling, ids, got.completion_ids[:place])
        for place, row in enumerate(logits)
    ]
    return sampled_logprobs(
        torch.stack(rows),
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        min_p=sampling.min_p,
    )


def recomputed(rig: Rig, ids: list[int], got: Generation, sampling: SamplingParams) -> torch.Tensor:
    """Log-probs of the completion by one plain forward pass, shape [T]."""
    logprobs = distributions(rig, ids, got, sampling)
    return logprobs.gather(-1, torch.tensor(got.completion_ids)[:, None])[:, 0]


def error(rig: Rig, ids: list[int], got: Generation, sampling: SamplingParams) -> float:
    """Largest difference between recorded and recomputed log-probs."""
    return float((recomputed(rig, ids, got, sampling) - torch.tensor(got.logprobs)).abs().max())


SETTINGS = {
    "plain": SamplingParams(max_tokens=20, seed=1),
    "cool": SamplingParams(max_tokens=20, temperature=0.7, seed=2),
    "top-k": SamplingParams(max_tokens=20, temperature=1.3, top_k=7, seed=3),
    "top-p": SamplingParams(max_tokens=20, top_p=0.8, seed=4),
    "all": SamplingParams(max_tokens=20, temperature=0.6, top_k=12, top_p=0.9, seed=5),
    "greedy": SamplingParams(max_tokens=20, temperature=0.0),
    "min-p": SamplingParams(max_tokens=20, min_p=0.2, seed=6),
    "repetition": SamplingParams(max_tokens=20, repetition_penalty=1.7, seed=7),
    "counted": SamplingParams(max_tokens=20, presence_penalty=1.5, frequency_penalty=-0.7, seed=8),
    "bias": SamplingParams(max_tokens=20, logit_bias=((5, 3.0), (9, -100.0)), seed=9),
    "bad-words": SamplingParams(max_tokens=20, bad_words=((3,), (7, 8), (8, 7)), top_k=4, seed=10),
    "qwen": SamplingParams(
        max_tokens=20,
        temperature=0.8,
        min_p=0.01,
        top_k=20,
        top_p=0.95,
        repetition_penalty=1.05,
        presence_penalty=1.5,
        logit_bias=((4, 2.0),),
        seed=11,
    ),
    "greedy-repetition": SamplingParams(max_tokens=20, temperature=0.0, repetition_penalty=1.3),
}


@pytest.mark.parametrize("sampling", SETTINGS.values(), ids=SETTINGS)
async def test_log_probs_are_those_of_the_sampled_distribution(rig, sampling):
    ids = prompt(40)
    if sampling.rare and not rig.engine.capabilities.every_setting:
        with pytest.raises(ConfigError, match=r"not support|top_k is 20 and top_p is"):
            await rig.engine.generate(ids, sampling, "session")
        return
    if not rig.both_cuts and sampling.top_k > 0 and sampling.top_p < 1:
        with pytest.raises(ConfigError, match=r"top_k is 12 and top_p is 0\.9"):
            await rig.engine.generate(ids, sampling, "session")
        return
    if refused := set(sampling.rare) & set(rig.refused):
        with pytest.raises(ConfigError, match="|".join(refused)):
            await rig.engine.generate(ids, sampling, "session")
        return
    got = await rig.engine.generate(ids, sampling, "session")
    assert len(got.completion_ids) == len(got.logprobs) == len(got.versions) == 20
    assert error(rig, ids, got, sampling) < TOLERANCE
    left = distributions(rig, ids, got, sampling).isfinite()
    assert len(got.kept) == (20 if sampling.cuts else 0)
    for kept, wanted in zip(got.kept, left, strict=False):
        assert kept_ids(kept).tolist() == wanted.nonzero()[:, 0].tolist()


def first_tokens(got: Generation, count: int) -> Generation:
    return replace(
        got,
        completion_ids=got.completion_ids[:count],
        logprobs=got.logprobs[:count],
        versions=got.versions[:count],
        top_logprobs=got.top_logprobs[:count],
        kept=got.kept[:count],
    )


def takes(rig: Rig, sampling: SamplingParams) -> bool:
    two_cuts = sampling.top_k > 0 and sampling.top_p < 1
    known = rig.engine.capabilities.every_setting or not sampling.rare
    known = known and not set(sampling.rare) & set(rig.refused)
    return known and (rig.both_cuts or not two_cuts)


@grid("sampling", SETTINGS.values(), quick=4, ids=SETTINGS)
async def test_a_completion_goes_on_from_its_first_tokens(rig, sampling):
    if not takes(rig, sampling):
        return
    ids = prompt(40)
    so_far = first_tokens(await rig.engine.generate(ids, sampling, "session"), 8)
    other, sink = replace(sampling, seed=99), Sink()
    if not rig.engine.capabilities.can_go_on(sampling):
        with pytest.raises(EngineError, match="cannot continue"):
            await rig.engine.generate(ids, other, "session", sink, so_far)
        return
    got = await rig.engine.generate(ids, other, "session", sink, so_far)
    assert first_tokens(got, 8) == replace(so_far, cached_tokens=got.cached_tokens)
    assert len(got.completion_ids) == 20
    assert len(got.kept) == (20 if sampling.cuts else 0)
    assert error(rig, ids, got, sampling) < TOLERANCE
    assert tuple(token for token, _, _ in sink.tokens) == got.completion_ids[8:]


async def test_a_stop_string_may_have_begun_before(rig):
    ids, decode = prompt(20), make_tokenizer().decode
    free = await rig.engine.generate(ids, SamplingParams(max_tokens=30), "session")
    texts = [decode([token]) for token in free.completion_ids]
    stops = [a[-1:] + b[:1] for a, b in itertools.pairwise(texts[4:])]
    place, stop = next(
        (place, stop)
        for place, stop in enumerate(stops, 4)
        if stop.isascii()
        and len(stop) == 2
        and stop not in decode(free.completion_ids[: place + 1])
    )
    so_far, ends = first_tokens(free, place + 1), free.completion_ids[place + 1]
    only = SamplingParams(max_tokens=30, stop=(stop,), logit_bias=((ends, 100.0),))
    if takes(rig, only):
        got = await rig.engine.generate(ids, only, "session", None, so_far)
        assert got.completion_ids == free.completion_ids[: place + 2]
        assert got.finish_reason == "stop"


async def test_a_form_goes_on_from_where_it_was(rig):
    if not rig.engine.capabilities.grammars:
        return
    sampling = SamplingParams(max_tokens=30, grammar="start: /[0-9]{3,12}x/", seed=1)
    ids = prompt(20)
    whole = await rig.engine.generate(ids, sampling, "session")
    so_far = first_tokens(whole, 2)
    if not rig.engine.capabilities.can_go_on(sampling):
        with pytest.raises(EngineError, match="cannot continue"):
            await rig.engine.generate(ids, sampling, "session", None, so_far)
        return
    for seed in range(4):
        got = await rig.engine.generate(ids, replace(sampling, seed=seed), "session", None, so_far)
        text = make_tokenizer().decode(got.completion_ids, skip_special_tokens=True)
        assert re.fullmatch("[0-9]{3,12}x", text)
        assert got.completion_ids[:2] == so_far.completion_ids
        assert error(rig, ids, got, sampling) < TOLERANCE


async def test_what_has_ended_is_not_gone_on_from(rig):
    ids, sampling = prompt(20), SamplingParams(max_tokens=5)
    whole = await rig.engine.generate(ids, sampling, "session")
    with pytest.raises(EngineError, match="nothing to continue"):
        await rig.engine.generate(ids, sampling, "session", None, whole)
    wrong = replace(first_tokens(whole, 1), completion_ids=(VOCABULARY + 1,))
    with pytest.raises(EngineError, match=f"the completion has token id {VOCABULARY + 1}"):
        await rig.engine.generate(ids, sampling, "session", None, wrong)


async def test_a_stop_token_ends_a_completion_and_is_kept(rig):
    if not rig.engine.capabilities.every_setting:
        return
    ids, sampling = prompt(40), SamplingParams(max_tokens=20, seed=1)
    got = await rig.engine.generate(ids, sampling, "session")
    token = got.completion_ids[5]
    stopped = await rig.engine.generate(ids, replace(sampling, stop_token_ids=(token,)), "session")
    assert stopped.finish_reason == "stop"
    first = got.completion_ids.index(token) + 1
    assert stopped.completion_ids == got.completion_ids[:first]


async def test_a_crowd_is_sampled_as_exactly_as_one(rig):
    asked = [
        (prompt(8 + 5 * n, n), SamplingParams(max_tokens=12, seed=n, temperature=0.5 + n / 10))
        for n in range(12)
    ]
    results = await asyncio.gather(*(rig.engine.generate(i, s, str(s.seed)) for i, s in asked))
    for (ids, sampling), got in zip(asked, results, strict=True):
        assert error(rig, ids, got, sampling) < TOLERANCE


async def test_a_seed_gives_its_completion_again_and_others_differ(rig):
    ids, sampling = prompt(30), SamplingParams(max_tokens=16, seed=7)
    first = await rig.engine.generate(ids, sampling, "one")
    again = await rig.engine.generate(ids, sampling, "two")
    others = await asyncio.gather(  # n of one prompt
        *(rig.engine.generate(ids, replace(sampling, seed=n), "n") for n in range(20, 24))
    )
    assert again.completion_ids == first.completion_ids
    assert len({first.completion_ids, *(got.completion_ids for got in others)}) == 5
    assert all(error(rig, ids, got, sampling) < TOLERANCE for got in [first, again, *others])


async def test_alternatives_are_the_most_probable_tokens(rig):
    sampling = SamplingParams(max_tokens=6, temperature=0.7, top_k=3, top_logprobs=5)
    got = await rig.engine.generate(prompt(10), sampling, "session")
    assert len(got.top_logprobs) == 6
    for token, logprob, pairs in zip(
        got.completion_ids, got.logprobs, got.top_logprobs, strict=True
    ):
        assert len(pairs) == 3
        assert dict(pairs)[token] == pytest.approx(logprob, abs=1e-6)
        assert sum(torch.tensor([p for _, p in pairs]).exp()) == pytest.approx(1, abs=1e-4)
    greedy = await rig.engine.generate(
        prompt(10), SamplingParams(max_tokens=2, temperature=0.0, top_logprobs=2), "session"
    )
    assert greedy.top_logprobs == tuple(((token, 0.0),) for token in greedy.completion_ids)


async def test_an_end_token_stops_and_is_kept(rig):
    ids, (end,) = [*prompt(20), LAST_WORD], rig.engine.capabilities.end_ids
    sampling = replace(LONG, temperature=0.5)
    got = await rig.engine.generate(ids, sampling, "session")
    assert (got.completion_ids, got.finish_reason) == ((end,), "stop")
    assert error(rig, ids, got, sampling) < TOLERANCE


async def test_a_stop_string_ends_it_and_its_tokens_are_kept(rig):
    ids, decode = prompt(20), make_tokenizer().decode
    free = await rig.engine.generate(ids, SamplingParams(max_tokens=30), "session")
    stop = re.findall(r"[!-~]{2,4}", decode(free.completion_ids))[-1]
    sampling = SamplingParams(max_tokens=30, stop=("not there", stop))
    got = await rig.engine.generate(ids, sampling, "session")
    assert got.finish_reason == "stop"
    assert got.completion_ids == free.completion_ids[: len(got.completion_ids)]
    assert stop in decode(got.completion_ids)
    assert stop not in decode(got.completion_ids[:-1])


async def test_the_sink_sees_what_is_returned(rig):
    sink = Sink()
    got = await rig.engine.generate(prompt(9), SamplingParams(max_tokens=15), "session", sink)
    assert sink.tokens == list(zip(got.completion_ids, got.logprobs, got.versions, strict=True))


async def test_a_sink_that_wants_no_more_ends_the_request(rig):
    sink = Sink(room=4)
    request = asyncio.ensure_future(rig.engine.generate(prompt(9), LONG, "session", sink))
    await sink.has(4)
    await nobody_runs(rig)
    request.cancel()
    with suppress(asyncio.CancelledError):
        await asyncio.wait_for(request, 30)
    assert len(sink.tokens) == 4


async def test_a_cancelled_request_ends(rig):
    sink = Sink()
    request = asyncio.ensure_future(rig.engine.generate(prompt(5), LONG, "session", sink))
    await sink.has(3)
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    await nobody_runs(rig)
    seen, sampled = len(sink.tokens), rig.engine.stats.sampled_tokens
    got = await rig.engine.generate(prompt(5), SamplingParams(max_tokens=3), "session")
    assert len(got.completion_ids) == 3
    assert len(sink.tokens) == seen
    assert rig.engine.stats.sampled_tokens == sampled + 3


async def nobody_runs(rig: Rig) -> None:
    async with asyncio.timeout(30):
        # An engine has no event for this.
        while rig.engine.stats.running or rig.engine.stats.waiting:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_a_prompt_without_room_is_refused_with_both_numbers(rig):
    with pytest.raises(ContextLengthError, match=rf"{CONTEXT} tokens.*max_model_len is {CONTEXT}"):
        await rig.engine.generate(prompt(CONTEXT), SamplingParams(max_tokens=1), "session")


async def test_the_end_of_the_context_is_a_length_stop(rig):
    ids, sampling = prompt(CONTEXT - 5), SamplingParams(max_tokens=100)
    got = await rig.engine.generate(ids, sampling, "session")
    assert (len(got.completion_ids), got.finish_reason) == (5, "length")
    assert error(rig, ids, got, sampling) < TOLERANCE


@pytest.mark.parametrize("ids", [[], [1, 300], [-1]], ids=["empty", "unknown", "negative"])
async def test_prompts_that_the_model_cannot_read_are_refused(rig, ids):
    with pytest.raises(EngineError, match="prompt"):
        await rig.engine.generate(ids, SamplingParams(max_tokens=1), "session")


@pytest.mark.parametrize(
    "wrong",
    [{"max_tokens": 0}, {"temperature": -1.0}, {"top_p": 0.0}, {"top_k": 0}, {"stop": ("",)}],
)
async def test_settings_without_a_meaning_are_refused_by_name(rig, wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        await rig.engine.generate(prompt(5), replace(LONG, **wrong), "session")


async def test_new_weights_serve_their_own_log_probs_and_no_old_prefix(rig):
    ids, sampling = prompt(100), SamplingParams(max_tokens=10, seed=3)
    before = rig.engine.version
    old = await rig.engine.generate(ids, sampling, "session")
    warm = await rig.engine.generate(ids, sampling, "session")
    assert error(rig, ids, old, sampling) < TOLERANCE
    change_weights(rig.model)
    await rig.engine.update_weights(before + 1)
    assert rig.engine.version == before + 1
    new = await rig.engine.generate(ids, sampling, "session")
    assert new.versions == (before + 1,) * 10
    assert error(rig, ids, new, sampling) < TOLERANCE
    assert error(rig, ids, old, sampling) > 0.01
    assert warm.cached_tokens >= 100 - rig.spare
    assert new.cached_tokens == 0


async def test_a_pause_holds_generation_and_it_goes_on_where_it_was(rig):
    """Of many requests, so that an engine of its own is not done before it is told to pause."""
    settings = [SamplingParams(max_tokens=200, seed=seed) for seed in range(6)]
    for _ in range(9):
        sinks = [Sink() for _ in settings]
        requests = [
            asyncio.ensure_future(rig.engine.generate(prompt(20), sampling, "session", sink))
            for sampling, sink in zip(settings, sinks, strict=True)
        ]
        await sinks[0].has(5)
        async with rig.engine.pause():
            held = [len(sink.tokens) for sink in sinks]
            late = asyncio.ensure_future(
                rig.engine.generate(prompt(9), SamplingParams(max_tokens=2), "late")
            )
            async with rig.engine.pause():
                await asyncio.sleep(0.05)
            await asyncio.sleep(0.05)
            assert [len(sink.tokens) for sink in sinks] == held
            assert not late.done()
        got = await asyncio.wait_for(asyncio.gather(*requests), 120)
        await asyncio.wait_for(late, 60)
        if min(held) < 200:  # all may be done before a busy machine lets us hold them
            break
    assert min(held) < 200
    assert {len(generation.completion_ids) for generation in got} == {200}
    cut = held.index(min(held))
    assert error(rig, prompt(20), got[cut], settings[cut]) < TOLERANCE


async def test_new_weights_in_the_middle_of_a_completion(rig):
    """Its tokens before are of the old weights, those after of the new ones, alone."""
    before = rig.engine.version
    ids, length = prompt(10), CONTEXT - 12
    sampling = SamplingParams(max_tokens=length, seed=5, temperature=0.9)
    held = length
    while held == length:
        sink = Sink()
        request = asyncio.ensure_future(rig.engine.generate(ids, sampling, "session", sink))
        await sink.has(5)
        async with rig.engine.pause():
            held = len(sink.tokens)
            if held < length:  # a server may be done before a busy machine lets us hold it
                old = recomputed(rig, ids, as_generation(sink), sampling)
                change_weights(rig.model)
                await rig.engine.update_weights(before + 1)
        got = await asyncio.wait_for(request, 60)
    assert got.versions == (before,) * held + (before + 1,) * (length - held)
    new = recomputed(rig, ids, got, sampling)
    logprobs = torch.tensor(got.logprobs)
    assert float((logprobs[:held] - old).abs().max()) < TOLERANCE
    assert float((logprobs[held:] - new[held:]).abs().max()) < TOLERANCE
    assert float((logprobs[:held] - new[:held]).abs().max()) > 0.01


def as_generation(sink: Sink) -> Any:
    ids, logprobs, versions = zip(*sink.tokens, strict=True)
    return Generation(ids, logprobs, versions, "length")


async def test_a_conversation_computes_each_token_once_per_version(rig):
    """Twenty turns: what is computed is what is new, but for the unfinished block of a cache."""
    engine, turns, sampled, added = rig.engine, 20, 4, 6
    talk = prompt(30)
    for version in (0, 1):
        if version:
            change_weights(rig.model, 0.05)
            await engine.update_weights(engine.version + 1)
            talk = prompt(30, 9)
        before = engine.stats
        for turn in range(turns):
            got = await engine.generate(
                talk, SamplingParams(max_tokens=sampled, seed=turn), "agent"
            )
            talk = [*talk, *got.completion_ids, *prompt(added, turn)]
        now = engine.stats
        computed = now.prompt_tokens_computed - before.prompt_tokens_computed
        reused = now.prompt_tokens_reused - before.prompt_tokens_reused
        distinct = 30 + added * (turns - 1)
        asked = sum(30 + (sampled + added) * turn for turn in range(turns))
        assert computed + reused == asked
        assert distinct <= computed <= distinct + turns * rig.spare
        assert now.sampled_tokens - before.sampled_tokens == sampled * turns


GRAMMAR = "start: /[0-9]{3,12}/"


async def test_a_completion_keeps_to_its_form_and_its_log_probs_are_exact(rig):
    if not rig.engine.capabilities.grammars:
        with pytest.raises(EngineError, match="grammar"):
            await rig.engine.generate(prompt(9), replace(LONG, grammar=GRAMMAR), "session")
        return
    for seed in range(4):
        sampling = SamplingParams(max_tokens=30, grammar=GRAMMAR, seed=seed, temperature=0.8)
        ids = prompt(20, seed)
        got = await rig.engine.generate(ids, sampling, "session")
        text = make_tokenizer().decode(got.completion_ids, skip_special_tokens=True)
        assert re.fullmatch("[0-9]{3,12}", text)
        assert got.finish_reason == "stop"
        assert error(rig, ids, got, sampling) < TOLERANCE


async def test_a_form_stays_whole_through_new_weights(rig):
    if not rig.engine.capabilities.grammars:
        pytest.skip("it has no grammars")
    sampling = SamplingParams(max_tokens=200, grammar="start: /[0-9]{150}/", seed=1)
    sink = Sink()
    request = asyncio.ensure_future(rig.engine.generate(prompt(20), sampling, "session", sink))
    await sink.has(3)
    change_weights(rig.model, 0.05)
    await rig.engine.update_weights(rig.engine.version + 1)
    got = await asyncio.wait_for(request, 60)
    text = make_tokenizer().decode(got.completion_ids, skip_special_tokens=True)
    assert re.fullmatch("[0-9]{150}", text)


async def crashed(engine: TrainingEngine, crash: Callable[[], None]) -> EngineError:
    """What a request says that is in flight at a crash."""
    sink = Sink()
    request = asyncio.ensure_future(engine.generate(prompt(9), LONG, "session", sink))
    await sink.has(3)
    crash()
    try:
        await asyncio.wait_for(request, 300)
    except EngineError as error:
        return error
    # It had been sampled to its end before a busy machine let us see its third token; so it is the
    # next one that finds what has died.
    with pytest.raises(EngineError) as caught:
        await asyncio.wait_for(engine.generate(prompt(9), LONG, "session"), 300)
    return caught.value


async def test_a_crash_fails_what_is_in_flight_and_the_next_request_is_served(rig):
    engine, before = rig.engine, rig.engine.version
    change_weights(rig.model, 0.05)
    await engine.update_weights(before + 1)
    message = str(await crashed(engine, rig.crash))
    assert re.search(rig.cause, message)
    ids, sampling = prompt(30), SamplingParams(max_tokens=5)
    got = await asyncio.wait_for(engine.generate(ids, sampling, "session"), 600)
    assert got.versions == (before + 1,) * 5
    assert error(rig, ids, got, sampling) < TOLERANCE
