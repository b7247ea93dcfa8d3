"""Qwen's real vocabulary, from the file that dashscope brings with it."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path

import pytest
from tokenizers import normalizers
from transformers import PreTrainedTokenizerFast

from tests.kit.toy import with_qwen3s_tokens

_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@cache
def qwen() -> PreTrainedTokenizerFast:
    """151,643 tokens of byte-level BPE, and the same added tokens as the small tokenizers have.

    Where dashscope is not installed, the test that asks is skipped.
    """
    from transformers.convert_slow_tokenizer import TikTokenConverter

    base = TikTokenConverter(str(vocabulary_file()), pattern=_PATTERN).converted()
    base.normalizer = normalizers.NFC()
    return with_qwen3s_tokens(base)


def vocabulary_file() -> Path:
    found = importlib.util.find_spec("dashscope")
    if found is None or found.submodule_search_locations is None:
        pytest.skip("dashscope, which has Qwen's vocabulary, is not installed")
    return Path(found.submodule_search_locations[0]) / "resources" / "qwen.tiktoken"
