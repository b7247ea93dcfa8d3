"""Parts for gateway tests: a byte-level tokenizer, a Qwen3-like template, a scripted engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tuner.engines.base import (
    EngineCapabilities,
    FinishReason,
    Generation,
    SamplingParams,
    TokenSink,
)
from tuner.engines.images import ImageLimits
from tuner.gateway import ChatRenderer, Gateway, Roles

TEMPLATE = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.content is string %}{%- set content = message.content %}
    {%- else %}{%- set content = '' %}{%- endif %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {%- if content == 'forbidden' %}{{- raise_exception('no such word here') }}{%- endif %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content %}
            {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {%- if not loop.first or content %}{{- '\\n' }}{%- endif %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {%- if call.function.arguments is string %}{{- call.function.arguments }}
            {%- else %}{{- call.function.arguments | tojson }}{%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + content }}
        {{- '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- elif open_thinking is defined and open_thinking %}
        {{- '<think>\\n' }}
    {%- endif %}
{%- endif %}
"""

_PICTURED = """
    {%- if message.content is string %}{%- set content = message.content %}
    {%- elif message.content %}
        {%- set parts = namespace(text='') %}
        {%- for part in message.content %}
            {%- if part.type == 'text' %}{%- set parts.text = parts.text + part.text %}
            {%- else %}
                {%- set parts.text = parts.text + 'IMAGE' %}
            {%- endif %}
        {%- endfor %}
        {%- set content = parts.text %}"""
VISION_TEMPLATE = TEMPLATE.replace(
    """
    {%- if message.content is string %}{%- set content = message.content %}""",
    _PICTURED,
)

ADD_TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two integers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and Qwen3's added tokens; only the first three of these are special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    base = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    base.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    base.decoder = decoders.ByteLevel()
    return with_qwen3s_tokens(base)


def with_qwen3s_tokens(base: Tokenizer) -> PreTrainedTokenizerFast:
    """A tokenizer with Qwen3's added tokens and its template."""
    base.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tags = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
    base.add_tokens([AddedToken(tag, normalized=False) for tag in tags])
    return PreTrainedTokenizerFast(
        tokenizer_object=base,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=TEMPLATE,
    )


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(tokenizer().encode(text, add_special_tokens=False))


def text_of(ids: Sequence[int]) -> str:
    return str(tokenizer().decode(list(ids), skip_special_tokens=False))


@dataclass
class StubEngine:
    """Answers with the scripted texts in turn, then with the last one for ever.

    A text is followed by the end-of-turn token if the limit leaves room for it. An exception in
    the script is raised. While `gate` is clear, generation waits for it, before the first token or
    after `hold_after` of them.
    """

    script: list[str | Exception] = field(default_factory=lambda: ["ok"])
    max_model_len: int = 4096
    answer: Callable[[str, SamplingParams], str] | None = None
    version: int = 3
    hold_after: int | None = None
    grammars: bool = False
    every_setting: bool = False
    goes_on: Literal["never", "in_parts", "always"] = "never"

    def __post_init__(self) -> None:
        self.requests: list[tuple[tuple[int, ...], SamplingParams, str]] = []
        self.adapters: list[str | None] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.waiting = 0
        self.sampling = 0
        self.cancelled = 0

    @property
    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities(
            self.max_model_len,
            max_top_logprobs=5,
            grammars=self.grammars,
            every_setting=self.every_setting,
            goes_on=self.goes_on,
        )

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        session: str,
        sink: TokenSink | None = None,
        *,
        adapter: str | None = None,
    ) -> Generation:
        self.requests.append((tuple(prompt_ids), sampling, session))
        self.adapters.append(adapter)
        item = self.script[min(len(self.requests), len(self.script)) - 1]
        self.waiting += 1
        try:
            if self.hold_after is None:
                await self.gate.wait()
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.waiting -= 1
        if isinstance(item, Exception):
            raise item
        text = self.answer(text_of(prompt_ids), sampling) if self.answer else item
        ids = (*ids_of(text), tokenizer().eos_token_id)
        reason: FinishReason = "stop"
        cut = [text.find(stop) + len(stop) for stop in sampling.stop if stop in text]
        if cut:
            ids = ids_of(text[: min(cut)])
        if len(ids) > sampling.max_tokens:
            ids, reason = ids[: sampling.max_tokens], "length"
        await self._sample(ids, sink)
        top = tuple((id_, -0.5) for id_ in range(sampling.top_logprobs))
        return Generation(
            completion_ids=ids,
            logprobs=(-0.25,) * len(ids),
            versions=(self.version,) * len(ids),
            finish_reason=reason,
            top_logprobs=(top,) * len(ids) if top else (),
            cached_tokens=7,
        )

    async def _sample(self, ids: Sequence[int], sink: TokenSink | None) -> None:
        """Tokens one by one; after `hold_after` of them, wait for the gate."""
        self.sampling += 1
        try:
            for count, id_ in enumerate(ids):
                if count == self.hold_after:
                    await self.gate.wait()
                if sink is not None and not sink.push(id_, -0.25, self.version):
                    await asyncio.Event().wait()  # until the cancellation comes
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.sampling -= 1

    def pause(self) -> contextlib.AbstractAsyncContextManager[None]:
        raise AssertionError("nobody changes its weights")

    async def update_weights(self, version: int) -> None:
        self.version = version

    async def close(self) -> None:
        pass

    async def until_waiting(self, count: int = 1) -> None:
        while self.waiting < count:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def gateway_of(
    engine: StubEngine, roles: Roles | None = None, **settings: object
) -> AsyncIterator[Gateway]:
    renderer = ChatRenderer(tokenizer(), **settings)  # type: ignore[arg-type]
    gateway = Gateway(engine, renderer, model_name="tiny", roles=roles)
    try:
        yield gateway
    finally:
        await gateway.aclose()


@contextlib.asynccontextmanager
async def vision_gateway(
    model: Any, spoken: PreTrainedTokenizerFast, **limits: Any
) -> AsyncIterator[Gateway]:
    """A gateway whose engine computes a vision model, with limits of images."""
    from tuner.engines.transformers.engine import TransformersEngine

    engine = TransformersEngine(model, spoken, max_model_len=1024)
    renderer = ChatRenderer(spoken, vision=model.vision, image_limits=ImageLimits(**limits))
    gateway = Gateway(engine, renderer, model_name="tiny")
    try:
        yield gateway
    finally:
        await gateway.aclose()
        await engine.close()
