"""Parts for tests of continued conversations: tokenizers that merge, a model that does not."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.gateway.qwen import qwen
from tests.kit.toy import TEMPLATE, StubEngine
from tuner.engines.base import FinishReason, Generation, SamplingParams, TokenSink
from tuner.gateway import ChatRenderer, Gateway, Session
from tuner.traces import Call, ReasoningPolicy

USER = {"role": "user", "content": "2+40?"}
SURE = {"role": "user", "content": "Sure?"}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 40}}\n</tool_call>'
TERSE = '<tool_call>{"name":"add","arguments":{"a":2,"b":40}}</tool_call>'


@cache
def merging() -> PreTrainedTokenizerFast:
    """Byte-level BPE that merges some words, so that their letters re-tokenize differently."""
    vocabulary = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = []
    for word in ("answer", "user", "Ġis", "ĊĊ", "Ġthe", "add", '":', '{"'):
        for end in range(2, len(word) + 1):
            left, right = word[: end - 1], word[end - 1]
            if left + right not in vocabulary:
                vocabulary[left + right] = len(vocabulary)
                merges.append((left, right))
    base = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    base.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    base.decoder = decoders.ByteLevel()
    base.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tags = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
    base.add_tokens([AddedToken(tag, normalized=False) for tag in tags])
    return PreTrainedTokenizerFast(
        tokenizer_object=base, eos_token="<|im_end|>", chat_template=TEMPLATE
    )


VOCABULARIES = {"small": merging, "qwen": qwen}
_spoken = "small"


def spoken() -> PreTrainedTokenizerFast:
    """The tokenizer that models and gateways of this module speak with."""
    return VOCABULARIES[_spoken]()


@pytest.fixture(scope="module", params=list(VOCABULARIES))
def vocabulary(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs a test with each vocabulary; its name."""
    global _spoken
    _spoken = request.param
    try:
        spoken()
        yield request.param
    finally:
        _spoken = "small"


def encoded(text: str) -> tuple[int, ...]:
    return tuple(spoken().encode(text, add_special_tokens=False))


def decoded(ids: Sequence[int]) -> str:
    return str(spoken().decode(list(ids), skip_special_tokens=False))


@cache
def _ids(vocabulary: str) -> dict[str, int]:
    return VOCABULARIES[vocabulary]().get_vocab()


def letters(text: str, end: str = "<|im_end|>") -> tuple[int, ...]:
    """What a model samples that writes letter by letter, which the tokenizer never would."""
    vocabulary = _ids(_spoken)
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found = [vocabulary[c] for piece, _ in spelled.pre_tokenize_str(text) for c in piece]
    return (*found, *encoded(end))


class Scripted(StubEngine):
    """Samples the scripted ids in turn, then the last ones for ever; cut at the limit.

    It takes any grammar: the script must keep to it.

    With `updated_after`, it gets new weights after so many tokens of each completion.
    """

    def __init__(self, *script: tuple[int, ...]) -> None:
        super().__init__(max_model_len=100_000, grammars=True)
        self.ids = script
        self.updated_after: int | None = None

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        session: str,
        sink: TokenSink | None = None,
    ) -> Generation:
        self.requests.append((tuple(prompt_ids), sampling, session))
        ids = self.ids[min(len(self.requests), len(self.ids)) - 1]
        await asyncio.sleep(0)
        reason: FinishReason = "length" if len(ids) > sampling.max_tokens else "stop"
        ids = ids[: sampling.max_tokens]
        split = len(ids) if self.updated_after is None else self.updated_after
        await self._sample(ids[:split], sink)
        before = self.version
        if ids[split:]:
            await self.update_weights(before + 1)
            await self._sample(ids[split:], sink)
        versions = (before,) * split + (self.version,) * len(ids[split:])
        return Generation(ids, (-0.25,) * len(ids), versions, reason)


def gateway_of(
    *script: tuple[int, ...],
    template: str = TEMPLATE,
    reasoning: ReasoningPolicy = "template",
    **options: Any,
) -> Gateway:
    renderer = ChatRenderer(spoken(), chat_template=template, **options)
    return Gateway(Scripted(*script), renderer, model_name="tiny", reasoning=reasoning)


async def ask(session: Session, messages: list[Any], **fields: Any) -> dict[str, Any]:
    """The answer's first message, as an agent would send it back."""
    answers = await choices(session, messages, **fields)
    return answers[0]


async def choices(session: Session, messages: list[Any], **fields: Any) -> list[dict[str, Any]]:
    client = session.async_client()
    answer = await client.chat.completions.create(model="tiny", messages=messages, **fields)
    return [choice.message.model_dump(exclude_none=True) for choice in answer.choices]


def path(call: Call) -> tuple[int, ...]:
    return (*call.prompt_ids, *call.completion_ids)


def rendered(gateway: Gateway, call: Call) -> str:
    return gateway.renderer.render_text(call.messages, call.tools)


def continues(later: Call, earlier: Call) -> bool:
    whole = path(earlier)
    return later.prompt_ids[: len(whole)] == whole and later.reused_ids == len(whole)


def fresh(gateway: Gateway, call: Call) -> bool:
    return call.reused_ids == 0 and call.prompt_ids == encoded(rendered(gateway, call))
