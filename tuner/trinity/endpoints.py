"""Engines of Trinity-RFT behind our gateway: token ids in, token ids and log-probs out.

Its inference engine is vLLM, whose completions API takes prompts as token ids, returns the sampled
ids (`return_token_ids`), and names alternatives by id (`return_tokens_as_token_ids`). Trinity-RFT
starts it with `logprobs_mode="processed_logprobs"`: log-probs of the distribution that was sampled
from. Every completion is streamed, so that the sampled tokens are known even if it is cut off.

Grammars are passed on unchanged: vLLM's backend `guidance` is the library of our own grammars,
and it masks the logits first, so the log-probs are those within the grammar.

The alternative is Tinker's service. Trinity-RFT's own client for it takes messages without their
tools and returns text. The service itself takes ids, so it is called here directly, with Tinker's
client: one sampler for each version of the weights. Versions are told apart by the name under which
Trinity-RFT's trainer saves each.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any

import httpx

from tuner.engines.base import (
    FINISH_REASONS,
    DescribedEngine,
    EngineCapabilities,
    EngineError,
    Generation,
    SamplingParams,
    TokenSink,
)
from tuner.engines.grammar_text import GrammarError, with_head
from tuner.engines.request import Progress
from tuner.engines.servers import most_probable, patient_client
from tuner.errors import ContextLengthError

if TYPE_CHECKING:
    from tinker import SamplingClient
    from tinker.types import SampledSequence

_TOKEN_ID = "token_id:"
# Arguments of vLLM. It must not have its own reasoning parser, which would not apply a grammar
# before the end of reasoning.
ENGINE_ARGS = {"structured_outputs_config": {"backend": "guidance"}}


class TrinitysEngine(DescribedEngine):
    """Base class of engines whose weights Trinity-RFT changes."""

    def pause(self) -> AbstractAsyncContextManager[None]:
        """Not supported; always raises EngineError."""
        raise EngineError("Trinity-RFT pauses its engine while it changes the weights")

    async def update_weights(self, version: int) -> None:
        """Not supported; always raises EngineError."""
        raise EngineError("Trinity-RFT changes the weights of its engine")


class TrinityVllmEngine(TrinitysEngine):
    """An `Engine` over one of Trinity-RFT's vLLM servers.

    Args:
        address: The server's URL, without `/v1`.
        model_name: The server's name of its model.
        api_key: Its key.
        max_model_len: Maximum number of tokens of prompt and completion together.
        model_version: Returns the version of the server's weights, from Trinity-RFT.
        adapter: Returns the folder of a version's LoRA adapter, if one is trained.
        end_ids: Tokens that end a completion, in addition to those that the server knows.
    """

    def __init__(
        self,
        address: str,
        *,
        model_name: str,
        api_key: str,
        max_model_len: int,
        model_version: Callable[[], Awaitable[int]],
        adapter: Callable[[int], str] | None = None,
        end_ids: Collection[int] = (),
    ) -> None:
        self._model_name = model_name
        self._adapter = adapter
        self._end_ids = sorted(end_ids)
        self._loading = asyncio.Lock()
        self._loaded = -1
        self._model_version = model_version
        self._version = 0
        self._capabilities = EngineCapabilities(max_model_len=max_model_len, grammars=True)
        self._client = patient_client(address, {"authorization": f"Bearer {api_key}"})

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        session: str,
        sink: TokenSink | None = None,
        so_far: Generation | None = None,
        adapter: str | None = None,
    ) -> Generation:
        """Like `Engine.generate`. A token's version is the one at the start of the completion."""
        version = self._version = await self._model_version()
        progress = _progress(prompt_ids, sampling, sink, so_far)
        body = self._body(prompt_ids, sampling)
        try:
            if self._adapter is not None:
                body["model"] = await self._served_adapter(self._adapter(version), version)
            async with self._client.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != 200:
                    raise _refusal(response.status_code, await response.aread())
                async for event in _events(response):
                    _read(event, progress, version)
        except httpx.HTTPError as error:
            raise EngineError(
                f"the connection to Trinity-RFT's engine at {self._client.base_url} broke: "
                f"{type(error).__name__}: {error}"
            ) from error
        if progress.finish_reason not in FINISH_REASONS:
            raise EngineError(
                f"Trinity-RFT's engine ended a completion after {len(progress.completion_ids)} "
                f"tokens with {progress.finish_reason or 'no reason'}: it was stopped or is "
                "overloaded"
            )
        return progress.generation()

    async def _served_adapter(self, folder: str, version: int) -> str:
        """The server's name of a version's adapter, after loading it.

        Every version has its own name, since vLLM's prefix cache tells adapters apart by name.
        """
        async with self._loading:
            if version > self._loaded:
                body = {"lora_name": _adapter_name(version), "lora_path": folder}
                response = await self._client.post("/v1/load_lora_adapter", json=body)
                # Another worker may have loaded it.
                if response.status_code != 200 and "already been loaded" not in response.text:
                    raise _refusal(response.status_code, response.content)
                self._loaded = version
                # A worker that is behind may still need the previous one.
                old = {"lora_name": _adapter_name(version - 2)}
                await self._client.post("/v1/unload_lora_adapter", json=old)
        return _adapter_name(version)

    def _body(self, prompt_ids: Sequence[int], sampling: SamplingParams) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model_name,
            "prompt": list(prompt_ids),
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "logprobs": sampling.top_logprobs,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "seed": sampling.seed,
        }
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        if self._end_ids:
            body["stop_token_ids"] = self._end_ids
        if sampling.grammar:
            body["structured_outputs"] = {"grammar": with_head(sampling.grammar)}
        return body

    async def close(self) -> None:
        """Close the connections; requests in flight fail."""
        await self._client.aclose()


def _adapter_name(version: int) -> str:
    return f"tuner-adapter-{version}"


def _progress(
    prompt_ids: Sequence[int],
    sampling: SamplingParams,
    sink: TokenSink | None,
    so_far: Generation | None,
) -> Progress:
    """A completion whose end is found by the server, not here."""
    if so_far is not None:
        raise EngineError("Trinity-RFT's engines begin every completion at its first token")
    prompt, never = list(prompt_ids), sys.maxsize
    return Progress(prompt, sampling, never, frozenset(), None, sink, cached_tokens=0)


def _push(progress: Progress, token_id: int, logprob: float, version: int) -> None:
    """Add a token. A greedy token has probability 1; it is reported as if sampled at
    temperature 1."""
    progress.push(token_id, 0.0 if progress.sampling.temperature == 0 else logprob, version)
    if progress.cancelled:
        raise asyncio.CancelledError


def _read(event: dict[str, Any], progress: Progress, version: int) -> None:
    """Add the content of an event of the stream."""
    if "error" in event:
        raise EngineError(f"Trinity-RFT's engine failed: {_message(event)}")
    details = (event.get("usage") or {}).get("prompt_tokens_details") or {}
    progress.cached_tokens = details.get("cached_tokens") or progress.cached_tokens
    for choice in event.get("choices", ()):
        _read_tokens(choice, progress, version)
        progress.finish_reason = choice.get("finish_reason") or progress.finish_reason


def _read_tokens(choice: dict[str, Any], progress: Progress, version: int) -> None:
    sampling = progress.sampling
    ids = choice.get("token_ids") or []
    found = choice.get("logprobs") or {}
    logprobs = found.get("token_logprobs") or []
    if len(ids) != len(logprobs):
        raise EngineError(
            f"Trinity-RFT's engine returned {len(ids)} token ids and {len(logprobs)} log-probs "
            "together; vLLM of version 0.17 or later returns one for each"
        )
    for place, (token_id, logprob) in enumerate(zip(ids, logprobs, strict=True)):
        if logprob is None or not math.isfinite(logprob):
            raise EngineError(f"Trinity-RFT's engine returned no log-prob of token {token_id}")
        if sampling.top_logprobs:
            pairs = found["top_logprobs"][place].items()
            named = ((int(name.removeprefix(_TOKEN_ID)), value) for name, value in pairs)
            progress.top_logprobs.append(most_probable(named, sampling.top_logprobs))
        _push(progress, int(token_id), float(logprob), version)


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The events of a stream up to its `[DONE]`."""
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        yield json.loads(data)


def _refusal(status: int, body: bytes) -> Exception:
    try:
        message = _message(json.loads(body))
    except ValueError:
        message = body.decode(errors="replace")[:300]
    if status == 400 and "maximum context length" in message:
        return ContextLengthError(message)
    if status == 400 and "grammar" in message.lower():
        return GrammarError(f"Trinity-RFT's engine cannot constrain a completion: {message}")
    return EngineError(f"Trinity-RFT's engine rejected a completion with {status}: {message}")


def _message(answer: dict[str, Any]) -> str:
    error = answer.get("error", answer)
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


_SAVED_WEIGHTS = re.compile(r"^tinker://.*-sampler-(?P<step>\d+)$")
# A group that is behind the newest weights may still sample from the previous ones.
_SAMPLERS_KEPT = 2


class TinkerEngine(TrinitysEngine):
    """An `Engine` over Tinker's service, with the weights that Trinity-RFT's trainer saved there.

    It does not stream: the sampled tokens of a cancelled completion are lost.

    Args:
        base_model: The service's name of the model before training.
        max_model_len: Maximum number of tokens of prompt and completion together.
        weights: Returns the weights to sample from, from Trinity-RFT: `base_model`, or the
            `tinker://` path of saved weights.
    """

    def __init__(
        self, base_model: str, *, max_model_len: int, weights: Callable[[], Awaitable[str]]
    ) -> None:
        self._base_model = base_model
        self._weights = weights
        self._version = 0
        self._capabilities = EngineCapabilities(max_model_len=max_model_len, max_top_logprobs=0)
        self._service: Any = None
        self._samplers: dict[str, SamplingClient] = {}
        self._asking = asyncio.Lock()

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        session: str,
        sink: TokenSink | None = None,
        so_far: Generation | None = None,
        adapter: str | None = None,
    ) -> Generation:
        """Like `Engine.generate`. All tokens come from one version of the weights."""
        from tinker import types

        path = await self._weights()
        version = self._version = self._version_of(path)
        try:
            sampler = await self._sampler(path)
            response = await sampler.sample_async(
                prompt=types.ModelInput.from_ints(list(prompt_ids)),
                num_samples=1,
                sampling_params=types.SamplingParams(
                    max_tokens=sampling.max_tokens,
                    temperature=sampling.temperature,
                    top_p=sampling.top_p,
                    top_k=sampling.top_k,
                    seed=sampling.seed,
                    stop=list(sampling.stop) or None,
                ),
            )
        except Exception as error:  # the client raises its own errors, httpx's and ValueErrors
            raise EngineError(
                f"Tinker's service did not complete a prompt of {len(prompt_ids)} tokens with "
                f"{path}: {type(error).__name__}: {error}"
            ) from error
        progress = _progress(prompt_ids, sampling, sink, so_far)
        _take(response.sequences[0], progress, version)
        return progress.generation()

    def _version_of(self, path: str) -> int:
        if path == self._base_model:
            return 0
        if (found := _SAVED_WEIGHTS.match(path)) is None:
            raise EngineError(
                f"Trinity-RFT samples from {path}, which does not contain the number of its step"
            )
        return int(found["step"])

    async def _sampler(self, path: str) -> SamplingClient:
        import tinker

        async with self._asking:
            if self._service is None:
                # It waits for the service's answers, and reads address and key from the
                # environment, where Trinity-RFT puts them.
                self._service = await asyncio.to_thread(tinker.ServiceClient)
            if path not in self._samplers:
                which = "base_model" if path == self._base_model else "model_path"
                made = await self._service.create_sampling_client_async(**{which: path})
                self._samplers[path] = made
                while len(self._samplers) > _SAMPLERS_KEPT:
                    del self._samplers[next(iter(self._samplers))]
            return self._samplers[path]

    async def close(self) -> None:
        """Drop the samplers; the service ends them when this process no longer calls."""
        self._samplers.clear()


def _take(found: SampledSequence, progress: Progress, version: int) -> None:
    ids, logprobs = found.tokens, found.logprobs
    if logprobs is None or len(logprobs) != len(ids):
        raise EngineError(
            f"Tinker's service returned {len(ids)} token ids and "
            f"{'no' if logprobs is None else len(logprobs)} log-probs"
        )
    if found.stop_reason not in FINISH_REASONS:
        raise EngineError(f"Tinker's service ended a completion with {found.stop_reason!r}")
    for token_id, logprob in zip(ids, logprobs, strict=True):
        _push(progress, token_id, float(logprob), version)
    progress.finish_reason = FINISH_REASONS[found.stop_reason]
