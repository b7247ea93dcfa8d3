"""Completions within a grammar: every token allowed, the log-probs those of what was sampled."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import Sequence

import jsonschema
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3ForCausalLM

from tests.engines.models import change_weights, generate_all, until
from tests.engines.test_tiny_math import PATH as TINY_MATH
from tests.kit.examples import few
from tests.kit.models import tiny_qwen3
from tests.kit.toy import ids_of, text_of, tokenizer
from tuner.engines import EngineError, SamplingParams
from tuner.engines import grammar as grammar_module
from tuner.engines.grammar import Grammars, GrammarState, unpacked
from tuner.engines.grammar_text import GrammarError
from tuner.engines.transformers.engine import TransformersEngine
from tuner.gateway.families.grammars import json_schema

PADDING = 5  # logits that stand for no token
VOCABULARY = len(tokenizer()) + PADDING
END = tokenizer().eos_token_id


def make_model() -> Qwen3ForCausalLM:
    model = tiny_qwen3(VOCABULARY, max_position_embeddings=512)
    model.generation_config.eos_token_id = None
    return model


def make_engine(**options) -> TransformersEngine:
    return TransformersEngine(make_model(), tokenizer(), **{"max_model_len": 512, **options})


def grammars() -> Grammars:
    return Grammars(tokenizer(), [END])


def may_follow(grammar: str, text: str, of: Grammars | None = None) -> set[int]:
    state = (of or grammars()).start(grammar)
    for token_id in ids_of(text):
        state.advance(token_id)
    bits = state.mask(VOCABULARY)
    return {i for i in range(8 * len(bits)) if bits[i // 8] >> (i % 8) & 1}


@torch.no_grad()
def formula(model, prompt_ids, got, grammar, sampling) -> list[float]:
    """Log-probs by a plain forward pass: the softmax over the allowed tokens alone, in float64."""
    ids = torch.tensor([[*prompt_ids, *got.completion_ids]])
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt_ids) - 1 :].double()
    state, result = grammars().start(grammar), []
    for row, token_id in zip(logits, got.completion_ids, strict=False):
        bits = state.mask(VOCABULARY)
        places = [i for i in range(8 * len(bits)) if bits[i // 8] >> (i % 8) & 1]
        assert token_id in places
        assert max(places) < len(tokenizer())
        kept = row[places] / sampling.temperature
        result.append(float(kept.log_softmax(-1)[places.index(token_id)]))
        state.advance(token_id)
    return result


ONE_OF_THREE = 'start: "abc" | "ad" | "xé"'


def allowed(grammars: Grammars, grammar: str, ids: Sequence[int], vocabulary: int) -> torch.Tensor:
    """Whether each token could follow at each position of a completion: [T, vocabulary]."""
    bits = grammars.replay(grammar, ids, vocabulary)
    return unpacked(bits, vocabulary, torch.device("cpu"))


def test_tokens_that_may_follow_are_those_of_the_form_and_the_end_only_where_it_is_whole() -> None:
    a, b, d, x = ids_of("abdx")
    first, second = ids_of("é")  # a character of two tokens
    assert may_follow(ONE_OF_THREE, "") == {a, x}
    assert may_follow(ONE_OF_THREE, "a") == {b, d}
    assert may_follow(ONE_OF_THREE, "x") == {first}
    state = grammars().start(ONE_OF_THREE)
    for token_id in (x, first):
        state.advance(token_id)
    assert state.mask(VOCABULARY).nonzero()[0].tolist() == [second // 8]
    assert may_follow(ONE_OF_THREE, "abc") == {END}
    assert may_follow('start: "a" "b"?', "a") == {b, END}


def test_a_token_that_may_not_follow_is_refused_by_its_id() -> None:
    a, d = ids_of("ad")
    state = grammars().start(ONE_OF_THREE)
    state.advance(a)
    with pytest.raises(GrammarError, match=rf"token {a} may not follow"):
        state.advance(a)
    with pytest.raises(GrammarError, match=rf"token {d} may not follow"):
        grammars().start(ONE_OF_THREE).advance(d)


def test_of_several_end_tokens_each_may_end_it_and_nothing_else() -> None:
    ends = {END, tokenizer().pad_token_id}
    assert may_follow('start: "a"', "a", of=Grammars(tokenizer(), ends)) == ends


def test_added_tokens_are_never_part_of_text_and_stand_where_they_are_named() -> None:
    think = tokenizer().convert_tokens_to_ids("<think>")
    assert max(may_follow(r"start: /(?s:.*)/", "") - {END}) < 256
    assert may_follow('start: "<think>"', "") == set(ids_of("<"))
    assert may_follow(f'start: <[{think}]> "a"', "") == {think}
    spelled = [*ids_of("<thin"), *ids_of("k>")]
    assert allowed(grammars(), 'start: "<think>"', spelled, VOCABULARY).any(1).all()


def test_masks_have_the_width_of_the_models_logits() -> None:
    ids = [*ids_of("ad"), END]
    wide = allowed(grammars(), ONE_OF_THREE, ids, 1000)
    assert wide.shape == (3, 1000)
    assert wide[2].nonzero()[:, 0].tolist() == [END]
    narrow = ids_of("x")[0]  # a model without logits for x and what is behind it
    assert allowed(grammars(), ONE_OF_THREE, ids_of("ad"), narrow).sum(1).tolist() == [1, 2]
    with pytest.raises(GrammarError, match="no token of the vocabulary"):
        allowed(grammars(), 'start: "x"', ids_of("x"), narrow)


def test_replaying_ids_that_do_not_follow_the_grammar_names_the_position() -> None:
    with pytest.raises(GrammarError, match=f"token 1 is {ids_of('c')[0]}"):
        allowed(grammars(), ONE_OF_THREE, ids_of("ac"), VOCABULARY)
    with pytest.raises(GrammarError, match="token 0"):
        allowed(grammars(), ONE_OF_THREE, [VOCABULARY + 9], VOCABULARY)


def test_masks_do_not_depend_on_when_they_are_asked_for() -> None:
    grammar = "start: %json " + json_schema({"enum": ["aaa", "aab", {"k": [1, 2]}]}, ("x",))
    text = '{"k":[1, 2]}'
    asked = allowed(grammars(), grammar, ids_of(text), VOCABULARY)
    for cut in range(len(text)):
        wanted = set(asked[cut].nonzero()[:, 0].tolist())
        assert may_follow(grammar, text[:cut]) == wanted


@pytest.mark.parametrize("grammar", ["start: nowhere", "start: /(/", "", "start: %json {]"])
async def test_a_grammar_that_does_not_compile_is_refused_with_the_compilers_message(
    grammar: str,
) -> None:
    with pytest.raises(GrammarError, match="cannot be compiled"):
        grammars().start(grammar)
    if grammar:
        engine = make_engine()
        with pytest.raises(GrammarError, match="cannot be compiled"):
            await engine.generate([1, 2], SamplingParams(max_tokens=5, grammar=grammar), "s")


async def test_an_engine_prepares_its_tokenizers_tables_once_before_any_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[threading.Thread] = []
    make = grammar_module._vocabulary
    monkeypatch.setattr(
        grammar_module,
        "_vocabulary",
        lambda *given: (made.append(threading.current_thread()), make(*given))[1],
    )
    engine = make_engine()
    tables = engine.grammars._vocabulary
    assert tables is not None
    tables.result(timeout=30)
    for grammar in ('start: "a"', 'start: "b"'):
        await engine.generate([1, 2], SamplingParams(max_tokens=5, grammar=grammar), "s")
    assert len(made) == 1
    assert made[0] is not threading.main_thread()


def test_why_a_tokenizers_tables_cannot_be_made_is_said_for_each_grammar() -> None:
    found = Grammars("no tokenizer", [])
    found.prepare()
    for _ in range(2):
        with pytest.raises(GrammarError, match=r"the tokenizer \(str\) cannot be used"):
            found.start('start: "a"')


def test_byte_fallback_tokens_spell_characters() -> None:
    letters = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocabulary = {**letters, "▁a": 256, "b": 257, "</s>": 258}
    base = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    base.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    base.add_special_tokens(["</s>"])
    spoken = PreTrainedTokenizerFast(tokenizer_object=base, eos_token="</s>")
    masks = allowed(Grammars(spoken, [258]), 'start: " abé"', [256, 257, 0xC3, 0xA9, 258], 259)
    sets = [set(row.nonzero()[:, 0].tolist()) for row in masks]
    assert sets == [{256, 0x20}, {257, 0x62}, {0xC3}, {0xA9}, {258}]


def test_the_shipped_models_tokenizer_spells_a_form_in_every_way_it_can() -> None:
    spoken = AutoTokenizer.from_pretrained(TINY_MATH)
    found = Grammars(spoken, [spoken.eos_token_id])
    state = found.start('start: "user"')
    bits = state.mask(len(spoken))
    texts = {spoken.decode([i]) for i in range(len(spoken)) if bits[i // 8] >> (i % 8) & 1}
    assert texts == {"u", "us", "user"}


REQUESTS = [
    ('start: "abc" | "ad" | "xé"', {}),
    ("start: %json " + json_schema({"type": "boolean"}, ("x",)), {"temperature": 0.7}),
    ("start: /[a-z]{3,9}/", {"temperature": 1.3}),
    ("start: /[ab]{2,30}/", {"stop": ("bb", "aaa")}),
    ("", {}),
    ("start: /[a-z ]{50}/", {"max_tokens": 7}),
]


def requests() -> list[tuple[list[int], SamplingParams]]:
    return [
        (list(ids_of("hello " + "x" * seed)), SamplingParams(grammar=grammar, seed=seed, **fields))
        for seed, (grammar, options) in enumerate(REQUESTS * 3)
        for fields in [{"max_tokens": 40, **options}]
    ]


@pytest.mark.parametrize("deterministic", [False, True])
async def test_log_probs_are_those_of_the_renormalised_distribution(deterministic: bool) -> None:
    engine = make_engine(deterministic=deterministic)
    asked = requests()
    got = await generate_all(engine, asked)
    for (prompt_ids, sampling), one in zip(asked, got, strict=True):
        if sampling.grammar:
            wanted = formula(engine._model, prompt_ids, one, sampling.grammar, sampling)
            assert list(one.logprobs) == pytest.approx(wanted, abs=1e-5)
            if sampling.stop:
                assert text_of(one.completion_ids).endswith(("bb", "aaa", "<|im_end|>"))
            elif sampling.max_tokens == 7:
                assert (one.finish_reason, len(one.completion_ids)) == ("length", 7)
            else:
                assert one.finish_reason == "stop"
                assert one.completion_ids[-1] == END


async def test_requests_without_a_grammar_are_sampled_as_if_alone() -> None:
    free = [(p, s) for p, s in requests() if not s.grammar]
    together = await generate_all(make_engine(), requests())
    alone = await generate_all(make_engine(), free)
    mixed = [got for got, (_, s) in zip(together, requests(), strict=True) if not s.grammar]
    assert [one.completion_ids for one in mixed] == [one.completion_ids for one in alone]


async def test_greedy_takes_the_best_allowed_token() -> None:
    engine = make_engine()
    sampling = SamplingParams(max_tokens=9, temperature=0, grammar='start: "q" | "z"')
    prompt_ids = list(ids_of("hello"))
    got = await engine.generate(prompt_ids, sampling, "s")
    logits = engine._model(torch.tensor([prompt_ids])).logits[0, -1]
    q, z = ids_of("qz")
    assert got.completion_ids == ((q if logits[q] > logits[z] else z), END)
    assert got.logprobs == (0.0, 0.0)


async def test_top_k_and_top_p_cut_what_the_grammar_left() -> None:
    engine = make_engine()
    prompt_ids = list(ids_of("hello"))
    logits = engine._model(torch.tensor([prompt_ids])).logits[0, -1].detach()
    letters = sorted(ids_of("qvwz"), key=lambda i: -logits[i])
    sampling = SamplingParams(max_tokens=1, top_k=2, grammar="start: /[qvwz]/", top_logprobs=5)
    for seed in range(8):
        got = await engine.generate(
            prompt_ids, SamplingParams(**{**vars(sampling), "seed": seed}), "s"
        )
        assert got.completion_ids[0] in letters[:2]
        assert [token for token, _ in got.top_logprobs[0]] == letters[:2]
        wanted = logits[letters[:2]].log_softmax(-1)
        place = letters.index(got.completion_ids[0])
        assert got.logprobs[0] == pytest.approx(float(wanted[place]), abs=1e-5)


@pytest.mark.parametrize("deterministic", [False, True])
async def test_weights_that_change_in_flight_leave_the_form_as_it_is(deterministic: bool) -> None:
    engine = make_engine(deterministic=deterministic)
    sampling = SamplingParams(max_tokens=60, grammar='start: "[" /[a-f]{40}/ "]"')
    task = asyncio.create_task(engine.generate(list(ids_of("hello")), sampling, "s"))
    await until(lambda: engine.stats.sampled_tokens >= 5)
    async with engine.pause():
        change_weights(engine._model)
        await engine.update_weights(1)
    got = await task
    text = text_of(got.completion_ids)
    assert (text[0], text[41:], len(text)) == ("[", "]<|im_end|>", 52)
    assert set(got.versions) == {0, 1}


async def test_a_form_that_cannot_be_followed_fails_its_request_alone() -> None:
    engine = make_engine()

    class Breaks:
        def mask(self, vocabulary):
            raise GrammarError("too complex")

    whole = engine._grammars.start
    engine._grammars.start = lambda text: Breaks() if text == "broken" else whole(text)
    engine._grammars.is_compiled = lambda text: True
    asked = [
        (list(ids_of("a")), SamplingParams(max_tokens=9, grammar=grammar))
        for grammar in ("broken", ONE_OF_THREE, "")
    ]
    results = await asyncio.gather(
        *(engine.generate(p, s, "s") for p, s in asked), return_exceptions=True
    )
    assert isinstance(results[0], GrammarError)
    assert "too complex" in str(results[0])
    assert text_of(results[1].completion_ids).endswith("<|im_end|>")
    assert results[2].completion_ids


words = st.text(alphabet='ab"\\é😀\n', max_size=3)
leaves = st.one_of(
    st.builds(lambda values: {"enum": values}, st.lists(words | st.integers(), min_size=1)),
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(lambda n: {"type": "string", "maxLength": n}, st.integers(0, 3)),
    st.just({"type": "string", "pattern": "^[a-c]{1,4}$"}),
    st.builds(
        lambda low, more: {"type": "integer", "minimum": low, "maximum": low + more},
        st.integers(-50, 50),
        st.integers(0, 100),
    ),
)


def containers(inner: st.SearchStrategy) -> st.SearchStrategy:
    def an_object(members: dict, needed: list[bool]) -> dict:
        required = [name for name, is_needed in zip(members, needed, strict=False) if is_needed]
        return {
            "type": "object",
            "properties": members,
            "required": required,
            "additionalProperties": False,
        }

    objects = st.builds(
        an_object,
        st.dictionaries(words, inner, max_size=3),
        st.lists(st.booleans(), min_size=3, max_size=3),
    )
    lists = st.builds(
        lambda item, low, more: {
            "type": "array",
            "items": item,
            "minItems": low,
            "maxItems": low + more,
        },
        inner,
        st.integers(0, 2),
        st.integers(0, 2),
    )
    choices = st.builds(lambda several: {"anyOf": several}, st.lists(inner, min_size=1, max_size=2))
    return objects | lists | choices


schemas = st.recursive(leaves, containers, max_leaves=4)


@settings(
    max_examples=few(40),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=True,
)
@given(schemas, st.integers(0, 2**32))
def test_whatever_the_schema_a_completion_that_stopped_is_valid(schema: dict, seed: int) -> None:
    engine = ENGINES.setdefault("one", make_engine())
    grammar = "start: %json " + json_schema(schema, ("schema",))
    sampling = SamplingParams(max_tokens=100, grammar=grammar, seed=seed)
    prompt_ids = list(ids_of("hi"))
    got = asyncio.run(engine.generate(prompt_ids, sampling, "s"))
    wanted = formula(engine._model, prompt_ids, got, grammar, sampling)
    assert list(got.logprobs) == pytest.approx(wanted, abs=1e-5)
    assert math.isfinite(sum(got.logprobs))
    if got.finish_reason == "stop":
        text = text_of(got.completion_ids[:-1])
        assert got.completion_ids[-1] == END
        jsonschema.validate(json.loads(text), schema)


ENGINES: dict[str, TransformersEngine] = {}


async def test_a_compiled_grammar_begins_at_once_while_another_one_compiles() -> None:
    some = grammars()
    some.start(ONE_OF_THREE)
    began, compiling, whole = threading.Event(), threading.Event(), some._compile

    def slow(text: str):
        began.set()
        compiling.wait(30)
        return whole(text)

    some._compile = slow
    other = asyncio.create_task(some.started('start: "b"'))
    await asyncio.to_thread(began.wait, 30)
    threading.Timer(5, compiling.set).start()
    await some.started(ONE_OF_THREE)  # in this very loop
    assert not compiling.is_set()
    compiling.set()
    await other


async def test_a_request_waits_for_its_grammar_for_so_long_and_no_longer(monkeypatch) -> None:
    monkeypatch.setattr("tuner.engines.grammar._SECONDS", 0.01)
    some, ended = grammars(), threading.Event()
    some._compile = lambda text: ended.wait(30)
    try:
        with pytest.raises(GrammarError, match=r"takes more than 0\.01 s"):
            await some.started(ONE_OF_THREE)
    finally:
        ended.set()


async def test_an_engine_that_closes_while_a_grammar_compiles_refuses_the_request() -> None:
    engine = make_engine()
    compiling, whole = threading.Event(), engine._grammars.start

    def slow(text: str) -> GrammarState:
        compiling.wait(10)
        return whole(text)

    engine._grammars.start = slow
    sampling = SamplingParams(max_tokens=9, grammar=ONE_OF_THREE)
    task = asyncio.create_task(engine.generate(list(ids_of("a")), sampling, "s"))
    await asyncio.sleep(0)
    await engine.close()
    compiling.set()
    with pytest.raises(EngineError, match="closed"):
        async with asyncio.timeout(60):
            await task
