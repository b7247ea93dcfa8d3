"""A `TokenServer` in this process: a model of its own, loaded from the folder it is handed."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.engines.conformance import CONTEXT
from tests.engines.models import make_tokenizer
from tuner.engines import EngineLostError, SamplingParams
from tuner.engines.sampling import kept_ids
from tuner.engines.servers import SampledTokens, Weights
from tuner.engines.transformers.engine import TransformersEngine


class LocalServer:
    """Serves until `die()`; counts what is asked of it.

    Attributes:
        asked: The prompt and seed of each part.
        adapters: The adapter of each part, with none of which it generates.
        loaded: The label of each start and load.
        did: What was asked of it besides generating, in order.
        trained: The model that new weights are copied from where there is no folder.
    """

    def __init__(
        self,
        name: str = "the server",
        trained: PreTrainedModel | None = None,
        did: list[str] | None = None,
        tokenizer: Any = None,
        max_model_len: int = CONTEXT,
    ) -> None:
        self.name = name
        self.tokenizer = tokenizer or make_tokenizer()
        self.max_model_len = max_model_len
        self.trained = trained
        self.did: list[str] = [] if did is None else did
        self.asked: list[tuple[list[int], int]] = []
        self.adapters: list[str | None] = []
        self.loaded: list[str] = []
        self.dies_loading = False
        self._engine: TransformersEngine | None = None
        self._death: asyncio.Event | None = None

    def die(self) -> None:
        self._engine = None
        if self._death is not None:
            self._death.set()

    def start(self, weights: Weights) -> None:
        self.did.append("start")
        self._serve(AutoModelForCausalLM.from_pretrained(weights.folder), weights)

    def _serve(self, model: PreTrainedModel, weights: Weights) -> None:
        self._engine = TransformersEngine(model, self.tokenizer, max_model_len=self.max_model_len)
        self.loaded.append(weights.label)

    def load(self, weights: Weights) -> None:
        if self.dies_loading:
            self.dies_loading = False
            self._engine = None
        if self._engine is None:
            raise EngineLostError(f"{self.name} is on fire")
        self.did.append("load" if weights.folder else "send")
        if weights.folder is None:
            self._serve(copy.deepcopy(self.trained), weights)
        else:
            self._serve(AutoModelForCausalLM.from_pretrained(weights.folder), weights)

    def sleep(self) -> None:
        if self._engine is None:
            raise EngineLostError(f"{self.name} is on fire")
        self.did.append("sleep")

    def serves(self, label: str) -> bool:
        return self._engine is not None and self.loaded[-1] == label

    def stop(self) -> None:
        self._engine = None

    async def stream(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        label: str,
        adapter: str | None = None,
    ) -> AsyncGenerator[SampledTokens, None]:
        self.asked.append((list(prompt_ids), sampling.seed))
        self.adapters.append(adapter)
        if self._engine is None:
            raise EngineLostError(f"{self.name} is on fire")
        assert label == self.loaded[-1]
        tokens: asyncio.Queue[tuple[int, float]] = asyncio.Queue()
        self._death = death = asyncio.Event()

        class Sink:
            def push(self, token_id: int, logprob: float, version: int) -> bool:
                tokens.put_nowait((token_id, logprob))
                return True

        work = asyncio.ensure_future(self._engine.generate(prompt_ids, sampling, "any", Sink()))
        try:
            while not work.done() or not tokens.empty():
                if death.is_set():
                    raise EngineLostError(f"{self.name} is on fire")
                # The last token waits for the end, with which the cache is known.
                if tokens.qsize() > 1 and not (sampling.top_logprobs or sampling.cuts):
                    token, logprob = tokens.get_nowait()
                    yield SampledTokens((token,), (logprob,))
                elif work.done():
                    got = work.result()
                    rest = [tokens.get_nowait() for _ in range(tokens.qsize())]
                    yield SampledTokens(
                        tuple(token for token, _ in rest),
                        tuple(logprob for _, logprob in rest),
                        got.top_logprobs,
                        got.cached_tokens,
                        got.finish_reason,
                        tuple(tuple(kept_ids(kept).tolist()) for kept in got.kept),
                    )
                else:
                    await asyncio.sleep(0)
        finally:
            work.cancel()
