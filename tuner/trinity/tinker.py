"""Tinker's service behind our gateway: token ids in, token ids and log-probs out.

Trinity-RFT's own way to it takes messages without their tools and returns text. The service itself
takes ids, so it is asked here, with Tinker's client: one sampler for each version of the weights.
What tells the versions apart is the name under which Trinity-RFT's trainer saves each.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import httpx

from tuner.engines.base import (
    EngineCapabilities,
    EngineError,
    FinishReason,
    Generation,
    SamplingParams,
    TokenSink,
)
from tuner.errors import ConfigError, MissingDependencyError
from tuner.trinity.engine import TrinitysEngine
from tuner.trinity.tree import lookup

if TYPE_CHECKING:
    from tinker import SamplingClient
    from tinker.types import SampledSequence

SERVICE = "https://tinker.thinkingmachines.dev/services/tinker-prod"
# What a checkpoint's folder holds: the service's path of weights and optimizer.
TINKERS_CHECKPOINT = "remote_checkpoint_path.txt"
_KEY = "TINKER_API_KEY"
_SECONDS_TO_ANSWER = 30.0
_SAVED_WEIGHTS = re.compile(r"^tinker://.*-sampler-(?P<step>\d+)$")
# A group that is behind the newest weights may still sample from the ones before.
_SAMPLERS_KEPT = 2


def uses_tinker(tree: Mapping[str, Any]) -> bool:
    """Whether a configuration trains with Tinker's service."""
    return bool(lookup(tree, "model.tinker.enable"))


def require_service(tree: Mapping[str, Any]) -> None:
    """Refuse to go on without Tinker's client, a key, and a service that answers.

    Raises:
        MissingDependencyError: The package `tinker` is not installed.
        ConfigError: There is no key, or nothing answers; Tinker's client would try for minutes.
    """
    if find_spec("tinker") is None:
        raise MissingDependencyError(
            "model.tinker.enable is true, and the package tinker is not installed: "
            "pip install 'tinker>=0.20,<0.25'"
        )
    if not os.environ.get(_KEY):
        raise ConfigError(f"model.tinker.enable is true, and {_KEY} is not set in the environment")
    url = lookup(tree, "model.tinker.base_url") or os.environ.get("TINKER_BASE_URL") or SERVICE
    try:
        answer = httpx.get(f"{url.rstrip('/')}/api/v1/healthz", timeout=_SECONDS_TO_ANSWER)
    except httpx.HTTPError as error:
        raise ConfigError(
            f"model.tinker.enable is true, and nothing answers at {url} "
            f"(model.tinker.base_url): {type(error).__name__}: {error}"
        ) from error
    if answer.is_server_error:
        raise ConfigError(
            f"model.tinker.enable is true, and Tinker's service at {url} is not well: it answers "
            f"{answer.status_code}"
        )


def environment(tree: Mapping[str, Any]) -> dict[str, str]:
    """What the workers need besides the address, which Trinity-RFT gives them: the key."""
    return {_KEY: os.environ[_KEY]} if uses_tinker(tree) else {}


class TinkerEngine(TrinitysEngine):
    """An `Engine` over Tinker's service, with the weights that Trinity-RFT's trainer saved there.

    It streams nothing: a completion that is cancelled leaves nothing of what the service sampled.

    Args:
        base_model: What the service calls the model before training.
        max_model_len: Tokens of prompt and completion together.
        weights: Asks Trinity-RFT for the weights to sample from: `base_model`, or the
            `tinker://` path of weights that were saved.
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
    ) -> Generation:
        """As `Engine.generate`. All tokens are of one version of the weights."""
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
        except Exception as error:  # the client raises its own, httpx's and ValueErrors
            raise EngineError(
                f"Tinker's service did not complete a prompt of {len(prompt_ids)} tokens with "
                f"{path}: {type(error).__name__}: {error}"
            ) from error
        generation = _generation(response.sequences[0], sampling, version)
        if sink is not None:
            for token_id, logprob in zip(
                generation.completion_ids, generation.logprobs, strict=True
            ):
                if not sink.push(token_id, logprob, version):
                    raise asyncio.CancelledError
        return generation

    def _version_of(self, path: str) -> int:
        if path == self._base_model:
            return 0
        if (found := _SAVED_WEIGHTS.match(path)) is None:
            raise EngineError(
                f"Trinity-RFT samples from {path}, which does not say of which step it is"
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
        """Forget the samplers; the service ends them when it hears no more of this process."""
        self._samplers.clear()


def _generation(found: SampledSequence, sampling: SamplingParams, version: int) -> Generation:
    ids = tuple(found.tokens)
    logprobs = found.logprobs
    if logprobs is None or len(logprobs) != len(ids):
        raise EngineError(
            f"Tinker's service returned {len(ids)} token ids and "
            f"{'no' if logprobs is None else len(logprobs)} log-probs"
        )
    reasons: dict[str, FinishReason] = {"stop": "stop", "length": "length"}
    if found.stop_reason not in reasons:
        raise EngineError(f"Tinker's service ended a completion with {found.stop_reason!r}")
    # A greedy token was certain; the service reports it as if it had been sampled at 1.
    certain = sampling.temperature == 0
    return Generation(
        completion_ids=ids,
        logprobs=tuple(0.0 if certain else float(logprob) for logprob in logprobs),
        versions=(version,) * len(ids),
        finish_reason=reasons[found.stop_reason],
    )
