"""`engine.agenerate` inside an episode: every answer is a call of the rollout's trace."""

from __future__ import annotations

import time
from typing import Any, Protocol

from tuner.areal.requests import GenerationHyperparameters, ModelRequest, ModelResponse
from tuner.engines.base import Generation
from tuner.errors import ConfigError
from tuner.gateway import Session
from tuner.gateway.tokens import complete_tokens


class InferenceEngine(Protocol):
    """What a token-level workflow generates with."""

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """Sample one answer."""


class SessionEngine:
    """The engine that an episode gets: the gateway's, through the rollout's own session.

    Args:
        session: Whose calls the answers become.

    Attributes:
        tokenizer: The model's.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.tokenizer: Any = session.gateway.renderer.tokenizer

    def get_version(self) -> int:
        """Updates that the weights have seen which sample the next token."""
        return self._session.gateway.engine.version

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """Sample one answer and record it.

        Raises:
            ConfigError: A setting is out of its range, or cannot be honoured.
            RequestError: The prompt is empty, unknown to the model or too long; or the rollout has
                ended or used up its limits.
            EngineError: The engine failed.
        """
        if req.gconfig.n_samples != 1:
            raise ConfigError(
                f"gconfig.n_samples is {req.gconfig.n_samples}, but agenerate gives one answer: "
                "use gconfig.new(n_samples=1) and gather, or group_size"
            )
        started = time.perf_counter()
        (generation,) = await self.sample(req.input_ids, req.gconfig)
        return ModelResponse(
            input_tokens=list(req.input_ids),
            output_tokens=list(generation.completion_ids),
            output_logprobs=list(generation.logprobs),
            output_versions=list(generation.versions),
            stop_reason=generation.finish_reason,
            latency=time.perf_counter() - started,
        )

    async def sample(
        self, prompt_ids: list[int], gconfig: GenerationHyperparameters
    ) -> tuple[Generation, ...]:
        """`gconfig.n_samples` answers to one prompt, each a call of the trace.

        Raises:
            As `agenerate`.
        """
        unknown = set(gconfig.stop_token_ids) - self._session.gateway.engine.capabilities.end_ids
        if unknown:
            ends = sorted(self._session.gateway.engine.capabilities.end_ids)
            raise ConfigError(
                f"gconfig.stop_token_ids has {sorted(unknown)}, but this engine ends an answer at "
                f"{ends} alone; leave them out, or name the text in gconfig.stop"
            )
        room = gconfig.max_tokens - len(prompt_ids)
        if room < 1:
            raise ConfigError(
                f"the prompt has {len(prompt_ids)} tokens and gconfig.max_tokens is "
                f"{gconfig.max_tokens}: no room for an answer"
            )
        return await complete_tokens(
            self._session,
            prompt_ids,
            n=gconfig.n_samples,
            temperature=0.0 if gconfig.greedy else gconfig.temperature,
            top_p=gconfig.top_p,
            top_k=gconfig.top_k,
            max_tokens=min(gconfig.max_new_tokens, room),
            stop=gconfig.stop,
        )
