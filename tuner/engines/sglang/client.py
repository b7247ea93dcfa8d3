"""SGLang on other machines: its HTTP server, which somebody runs with the flags of `demands`.

| what | how |
|---|---|
| a part of a completion | `/generate` with ids, streamed; each chunk says whose weights it is of |
| a part that ends early | `/abort_request` with its `rid` |
| new weights | `/pause_generation` (abort), `/update_weights_from_disk`, `/continue_generation` |

Written against SGLang 0.5.23: `entrypoints/http_server.py`, `managers/io_struct.py`.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any

import httpx

from tuner.engines.base import EngineError, EngineLostError, SamplingParams
from tuner.engines.remote import RemoteServer
from tuner.engines.sglang.demands import (
    SglangSettings,
    check_logprobs,
    check_server,
    logprob_probe,
)
from tuner.engines.sglang.sampling import sampled, sglang_request
from tuner.engines.token_server import Sampled, Weights

_ABORT_SECONDS = 10.0
_DATA, _DONE = "data: ", "[DONE]"


class SglangServer(RemoteServer):
    """An SGLang server at an address, that somebody else runs.

    Args:
        url: As in `http://10.0.0.2:30000`.
        key: Its --api-key; empty where it has none.
        settings: What the run needs of it.
    """

    def __init__(self, url: str, key: str, settings: SglangSettings) -> None:
        super().__init__("SGLang", url, key)
        self._settings = settings
        self._first_version: str | None = None
        self._widest = 0

    def start(self, weights: Weights) -> None:
        """Give it the weights, as soon as it can be reached.

        Raises:
            EngineLostError: It cannot be reached for five minutes, or dies.
            EngineError: It was not started as it must be, or cannot load them.
        """
        # Not /health, which generates and so fails where a run died in the middle of an update.
        self._wait_for("/server_info")
        info = self._ask("/server_info")
        check_server(self.name, info, self._settings)
        self._first_version = info["weight_version"]
        self._widest = info["sampling_mask_max_tokens"]
        self.load(weights)
        cool, hot = (self._ask("/generate", logprob_probe(heat)) for heat in (1.0, 2.0))
        check_logprobs(self.name, cool, hot)

    def load(self, weights: Weights) -> None:
        """See `TokenServer.load`."""
        # Whatever is left of requests that were cancelled would be computed with both.
        self._ask("/pause_generation", {"mode": "abort"})
        try:
            self._ask(
                "/update_weights_from_disk",
                {
                    "model_path": str(weights.folder),
                    "load_format": "auto",
                    "weight_version": weights.label,
                    "flush_cache": True,
                },
            )
        finally:
            self._ask("/continue_generation", {})

    async def stream(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, label: str
    ) -> AsyncGenerator[Sampled, None]:
        """See `TokenServer.stream`."""
        # SGLang aborts every request whose id begins like this one: all are of one length.
        rid = uuid.uuid4().hex
        end_ids, widest = self._settings.end_ids, self._widest
        body = {"rid": rid, **sglang_request(prompt_ids, sampling, end_ids, widest)}
        over = False
        try:
            async with aclosing(self._chunks(body)) as chunks:
                async for chunk in chunks:
                    one = sampled(chunk, sampling, end_ids, widest)
                    self._check_weights(chunk["meta_info"], label)
                    over = one.finish_reason is not None
                    yield one
        except EngineLostError:
            over = True
            raise
        finally:
            if not over:
                with suppress(httpx.HTTPError):
                    await self._client().post(
                        "/abort_request", json={"rid": rid}, timeout=_ABORT_SECONDS
                    )

    async def _chunks(self, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        async with aclosing(self._lines("/generate", body)) as lines:
            async for line in lines:
                if not line.startswith(_DATA) or line == _DATA + _DONE:
                    continue
                chunk = json.loads(line.removeprefix(_DATA))
                if "error" in chunk:
                    error = chunk["error"]
                    raise self._refusal(error.get("code", 200), line.removeprefix(_DATA).encode())
                yield chunk

    def _check_weights(self, meta: Mapping[str, Any], label: str) -> None:
        """Refuse tokens of other weights than were asked for.

        Raises:
            EngineLostError: The server has been started again since.
            EngineError: Somebody else has loaded others.
        """
        spans = meta.get("weight_versions") or ()
        others = {meta.get("weight_version"), *(span["version"] for span in spans)} - {label}
        if not others:
            return
        other = min(others, key=str)
        if other == self._first_version:
            raise EngineLostError(f"{self.name} was started again: it has the weights {other!r}")
        raise EngineError(
            f"{self.name}: the weights {label} were asked for; it has {other!r}, of somebody else"
        )
