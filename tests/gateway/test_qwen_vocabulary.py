"""The vocabulary that other tests speak with is Qwen's."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gateway.qwen import qwen, vocabulary_file
from tests.kit.examples import few

TEXTS = [
    "The answer is 42, isn't it? I'LL see.\n\n\n  def add(a: int) -> int:\n\treturn a + 1  \r\n",
    "通义千问的分词器。每个汉字有几个字节。",
    "Съешь ещё этих мягких французских булок, да выпей чаю.",
    "السلام عليكم، كيف حالك اليوم؟ शुभ प्रभात, आप कैसे हैं? ภาษาไทยไม่มีช่องว่าง",
    "日本語のテキストと한국어 텍스트. Ελληνικά; עברית. e\u0301 \u1e9b\u0323 ﬁ",
    "👩‍👩‍👧‍👦🇨🇳🙂 x² ∑ √ \u200b\u00a0\u3000 \U00020000",
    "<|im_start|>user\n2+40?<|im_end|>\n<|im_start|>assistant\n",
    '{"name": "add", "arguments": {"a": 1234567, "b": -0.5e10}}',
]


@pytest.fixture(scope="module")
def theirs() -> Any:
    file = vocabulary_file()
    from dashscope.tokenizers.qwen_tokenizer import QwenTokenizer

    return QwenTokenizer(str(file))


@pytest.mark.parametrize("text", TEXTS)
def test_text_gets_the_ids_of_dashscopes_tokenizer(theirs: Any, text: str) -> None:
    ids = qwen().encode(text, add_special_tokens=False)
    assert ids == theirs.encode(text)
    assert qwen().decode(ids) == theirs.decode(ids)


@settings(max_examples=few(300))
@given(text=st.text(max_size=60))
def test_any_text_gets_the_ids_of_dashscopes_tokenizer(theirs: Any, text: str) -> None:
    assert qwen().encode(text, add_special_tokens=False) == theirs.encode(text)


def test_the_vocabulary_is_all_of_it(theirs: Any) -> None:
    assert len(qwen()) == 151_643 + 7
    ids = {token: theirs.decode([token]) for token in range(0, 151_643, 97)}
    assert {token: qwen().decode([token]) for token in ids} == ids
