"""The fewest tokens of a text, against the tokens that real tokenizers make of it."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from tests.kit.examples import grid
from tuner.gateway.families.renderer import LengthBound, is_long

# What tokenizers merge, compose, replace, or know as one token.
_PIECES = [
    "a", "b", "e", "aaaa", "abcabcabc", " ", "        ", "\n\n", "12345", ".", "▁", "▁▁▁▁", "é",
    "e\u0301", "\u0301", "\u212a", "\u1fbe\u0308\u0301", "\u1112\u1161\u11ab", "漢字", "😀",
    "\u00a0", "<|im_start|>", "<|a longer token that is not special|>", "<0x0A>",
]  # fmt: skip
_CORPUS = ["abcabcabc aaaa        12345 漢字漢字 e\u0301e\u0301 é é 😀😀 ▁▁▁▁ " * 20, "a" * 64] * 3
_TOKENS = [
    AddedToken("<|im_start|>", special=True),
    AddedToken("<|a longer token that is not special|>", normalized=True),
]
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def _byte_level(
    *, normalizer: Any = None, splits: tuple[Any, ...] = (), merging: bool = True
) -> Tokenizer:
    base = Tokenizer(models.BPE())
    base.normalizer = normalizer
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    base.pre_tokenizer = pre_tokenizers.Sequence([*splits, level])
    base.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400 if merging else 256,
        initial_alphabet=alphabet,
        min_frequency=1,
        max_token_length=16,
        show_progress=False,
    )
    base.train_from_iterator(_CORPUS, trainer)
    if merging:
        base.add_tokens(_TOKENS)
    return base


def _byte_fallback(normalizer: Any, splitter: Any = None) -> Tokenizer:
    letters = Tokenizer(models.BPE())
    letters.normalizer, letters.pre_tokenizer = normalizer, splitter
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=_BYTES,
        min_frequency=1,
        max_token_length=16,
        show_progress=False,
    )
    letters.train_from_iterator([text.replace("😀", "") for text in _CORPUS], trainer)
    state = letters.model.__getstate__()
    model = models.BPE(byte_fallback=True, fuse_unk=True)
    model.__setstate__(state.replace(b'"byte_fallback":false', b'"byte_fallback":true'))
    base = Tokenizer(model)
    base.normalizer, base.pre_tokenizer = normalizer, splitter
    base.add_tokens(_TOKENS)
    return base


_ISOLATED = pre_tokenizers.Split(Regex(r" ?\w+|\s+"), "isolated")
# Tokenizers of the forms that the model families have, with a small vocabulary.
_BOUNDED: dict[str, Callable[[], Tokenizer]] = {
    "Llama 3": lambda: _byte_level(splits=(_ISOLATED,)),
    "Qwen": lambda: _byte_level(normalizer=normalizers.NFC(), splits=(_ISOLATED,)),
    "DeepSeek": lambda: _byte_level(
        normalizer=normalizers.Sequence([]),
        splits=(pre_tokenizers.Digits(individual_digits=True), _ISOLATED),
    ),
    "Llama 2": lambda: _byte_fallback(
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    ),
    "Gemma": lambda: _byte_fallback(
        normalizers.Replace(" ", "▁"), pre_tokenizers.Split(" ", "merged_with_previous")
    ),
    "Metaspace": lambda: _byte_fallback(None, pre_tokenizers.Metaspace()),
    # Every bound is tight here.
    "bytes": lambda: _byte_level(merging=False),
    "bytes of NFC": lambda: _byte_level(normalizer=normalizers.NFC(), merging=False),
}


@cache
def _bounded(name: str) -> Tokenizer:
    return _BOUNDED[name]()


@cache
def _spoken(base: Tokenizer) -> tuple[PreTrainedTokenizerFast, LengthBound]:
    spoken = PreTrainedTokenizerFast(tokenizer_object=base)
    return spoken, LengthBound(spoken)


def _fewest(base: Tokenizer, text: str) -> int:
    return _spoken(base)[1].fewest_tokens(text)


def _tokens(base: Tokenizer, text: str) -> int:
    return len(_spoken(base)[0].encode(text, add_special_tokens=False))


@grid("name", _BOUNDED, quick=3)
@given(data=st.data())
def test_no_text_has_fewer_tokens_than_the_bound(name: str, data: st.DataObject) -> None:
    pieces = st.one_of(
        st.sampled_from(_PIECES),
        st.text(max_size=8),
        st.tuples(st.sampled_from(_PIECES), st.integers(1, 60)).map(lambda p: p[0] * p[1]),
    )
    text = "".join(data.draw(st.lists(pieces, max_size=8)))
    if data.draw(st.booleans()):
        text = unicodedata.normalize("NFD", text)
    assert _fewest(_bounded(name), text) <= _tokens(_bounded(name), text)


@pytest.mark.parametrize("name", _BOUNDED)
def test_the_bound_is_of_use(name: str) -> None:
    base = _bounded(name)
    longest = max(len(token.encode()) for token in base.get_vocab())
    text = "a" * 64 * 50
    assert len(text) / (3 * longest) <= _fewest(base, text) <= _tokens(base, text)


def _word_level() -> Tokenizer:
    base = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    base.pre_tokenizer = pre_tokenizers.Whitespace()
    return base


def _with_added(**options: Any) -> Tokenizer:
    base = _byte_level()
    base.add_tokens([AddedToken("<s>", **options)])
    return base


def _not_every_byte() -> Tokenizer:
    base = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    base.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return base


def _affixed(pattern: str, **affix: str) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: id_ for id_, letter in enumerate(alphabet)}
    base = Tokenizer(models.BPE(vocab=vocabulary, merges=[], **affix))
    single = pre_tokenizers.Split(Regex(pattern), "isolated")
    base.pre_tokenizer = pre_tokenizers.Sequence(
        [single, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return base


def _unknown() -> Tokenizer:
    vocabulary = {"<unk>": 0, "a": 1}
    return Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", fuse_unk=True))


# Tokenizers that may take any length of text for no or one token, and such a text.
_UNBOUNDED: dict[str, tuple[Tokenizer, str]] = {
    "word level": (_word_level(), "x" * 9000),
    "strips to the left": (_with_added(lstrip=True), " " * 9000 + "<s>"),
    "strips to the right": (_with_added(rstrip=True), "<s>" + " " * 9000),
    "strips the text": (_byte_level(normalizer=normalizers.Strip()), " " * 9000),
    "replaces": (_byte_level(normalizer=normalizers.Replace("a" * 90, "a")), "a" * 9000),
    "replaces a pattern": (
        _byte_level(normalizer=normalizers.Replace(Regex("a+"), "a")),
        "a" * 9000,
    ),
    "composes after it replaced": (
        _byte_level(
            normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.Replace("a", "")])
        ),
        "a" * 9000,
    ),
    "removes": (_byte_level(splits=(pre_tokenizers.Split(Regex("a"), "removed"),)), "a" * 9000),
    "removes white space": (_byte_level(splits=(pre_tokenizers.WhitespaceSplit(),)), " " * 9000),
    "no letters within words": (_affixed("$", continuing_subword_prefix="##"), "a" * 9000),
    "no letters that end a word": (_affixed(".", end_of_word_suffix="</w>"), "a " * 4500),
    "not every byte": (_not_every_byte(), "b" * 9000),
    "one token for all that is unknown": (_unknown(), "b" * 9000),
}


@pytest.mark.parametrize("name", _UNBOUNDED)
def test_nothing_is_said_where_text_may_be_lost(name: str) -> None:
    base, text = _UNBOUNDED[name]
    longest = max(map(len, base.get_vocab()))
    assert _tokens(base, text) * longest < len(text)  # a bound by bytes would be wrong
    assert _fewest(base, text) == 0


def test_nothing_is_said_of_what_is_written_in_python() -> None:
    class Shortening:
        def normalize(self, text: Any) -> None:
            text.replace("a", "")

    assert LengthBound(object()).fewest_tokens("a" * 9000) == 0
    spoken = PreTrainedTokenizerFast(tokenizer_object=_byte_level())
    spoken.backend_tokenizer.normalizer = normalizers.Normalizer.custom(Shortening())
    assert len(spoken.encode("a" * 9000, add_special_tokens=False)) == 0
    assert LengthBound(spoken).fewest_tokens("a" * 9000) == 0


@pytest.mark.parametrize(
    ("value", "long"),
    [
        ("a" * 16_379, False),
        ("a" * 16_380, True),
        ([{"role": "user", "content": "a" * 100}] * 100, False),
        ([{"role": "user", "content": "a" * 100}] * 200, True),
        ({f"key_{i}": {"type": "null"} for i in range(2000)}, True),
        ([1] * 20_000, True),
        (None, False),
    ],
)
def test_what_is_long(value: Any, long: bool) -> None:
    assert is_long("short", value) is long
