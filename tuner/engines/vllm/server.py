"""vLLM over HTTP, token ids in and out, for one training run at a time.

    TUNER_ENGINE_KEY=... python -m tuner.engines.vllm.server [--host H] [--port P]

It starts empty; the run that connects sends settings and weights. A request names the weights that
it wants and gets 409 if the server has others, so after a crash the server never answers with
weights that the run no longer uses. Every path requires the key.

| path | body | answer |
|---|---|---|
| `GET /health` | | `{"label"}` |
| `POST /sleep` | | `{}` when the GPU's memory is released, until the next weights |
| `POST /load` | `{"settings", "folder", "label"}` | `{}` when only these are served |
| `POST /transfer` | `{"verb", "info"}` | `{}` when this step of a transfer is done |
| `POST /generate` | `{"prompt_ids", "sampling", "label", "adapter"}` | a line of JSON per step |

`settings` has the fields of `VllmSettings`, `sampling` those of `SamplingParams`. A line is `[ids,
logprobs, top_logprobs, cached_tokens, finish_reason, kept]`, or `{"error", "lost"}` if the
completion fails; `lost` says whether vLLM has died. The steps of a transfer are those of
`VllmCore.transfer`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import fields
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tuner.engines.base import EngineError, EngineLostError, SamplingParams
from tuner.engines.servers import SampledTokens, Weights
from tuner.engines.vllm.core import TransferVerb, VllmCore, VllmSettings
from tuner.errors import TunerError

KEY = "TUNER_ENGINE_KEY"
_NO_KEY = (
    f"the key is missing or wrong: the variable named by tuner.engine.api_key_env must hold the "
    f"key that the server was given as {KEY}"
)
Endpoint = Callable[[Request], Awaitable[Response]]


class VllmHost:
    """The vLLM of this process, started by the first weights it is given."""

    def __init__(self) -> None:
        self._settings: VllmSettings | None = None
        self._core: VllmCore | None = None
        self._loading = asyncio.Lock()

    @property
    def label(self) -> str | None:
        """Label of the weights being served; None if there are none or vLLM has died."""
        return None if self._core is None or self._core.dead else self._core.label

    async def load(self, settings: VllmSettings, weights: Weights) -> None:
        """Serve these weights; restarts vLLM if it died or has other settings.

        Calls run one at a time, since a client whose connection broke repeats its call.

        Raises:
            EngineLostError: vLLM does not start, or died.
            EngineError: It cannot load them.
        """
        async with self._loading:
            if settings != self._settings or weights.label != self.label:
                _require_folders(settings, weights)
                await self._serve(settings, weights)

    async def _serve(self, settings: VllmSettings, weights: Weights) -> None:
        if self._core is None or self._core.dead or settings != self._settings:
            self.close()
            self._core, self._settings = VllmCore(settings, weights), settings
            if settings.lora_rank is None:
                return  # it was started with them
        await self._core.load(weights)

    async def transfer(self, verb: TransferVerb, info: dict[str, Any]) -> None:
        await self._started.transfer(verb, info)

    async def sleep(self) -> None:
        await self._started.sleep()

    def stream(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, label: str, adapter: str | None
    ) -> AsyncGenerator[SampledTokens, None]:
        return self._started.stream(prompt_ids, sampling, label, adapter)

    @property
    def _started(self) -> VllmCore:
        if self._core is None:
            raise EngineLostError("vLLM has not been given any weights")
        return self._core

    def close(self) -> None:
        if self._core is not None:
            self._core.close()
        self._core = None


def _require_folders(settings: VllmSettings, weights: Weights) -> None:
    """Raise EngineError for a folder that exists only on the run's machine."""
    assert weights.folder is not None
    named = [(weights.folder, "the weights are handed over in", "the run directory")]
    for path in (settings.model, settings.tokenizer):
        if path is not None and Path(path).is_absolute():
            named.append((Path(path), "model.model_path is", "the model's folder"))
    for folder, what, which in named:
        if not folder.is_dir():
            raise EngineError(
                f"{what} {folder}, which does not exist on the engine's machine: {which} must be "
                "on a disk that both machines see under the same path"
            )


def make_app(host: VllmHost, key: str) -> Starlette:
    """The HTTP interface of `host`."""

    def guarded(answer: Endpoint) -> Endpoint:
        """Check the key, and return errors as JSON."""

        async def guarded_answer(request: Request) -> Response:
            given = request.headers.get("authorization", "")
            if not secrets.compare_digest(given.encode(), f"Bearer {key}".encode()):
                return JSONResponse({"error": _NO_KEY, "lost": False}, 401)
            try:
                return await answer(request)
            except TunerError as error:
                return JSONResponse(_error(error), 500)

        return guarded_answer

    async def health(request: Request) -> Response:
        return JSONResponse({"label": host.label})

    async def load(request: Request) -> Response:
        body = await request.json()
        weights = Weights(Path(body["folder"]), body["label"])
        await host.load(settings_from(body["settings"]), weights)
        return JSONResponse({})

    async def sleep(request: Request) -> Response:
        await host.sleep()
        return JSONResponse({})

    async def transfer(request: Request) -> Response:
        body = await request.json()
        await host.transfer(body["verb"], body["info"])
        return JSONResponse({})

    async def generate(request: Request) -> Response:
        body = await request.json()
        if body["label"] != host.label:
            message = f"the request wants the weights {body['label']}; this server has {host.label}"
            return JSONResponse({"error": message, "lost": host.label is None}, 409)
        sampling = SamplingParams(**{**body["sampling"], "stop": tuple(body["sampling"]["stop"])})

        async def lines() -> AsyncIterator[bytes]:
            try:
                async with aclosing(
                    host.stream(body["prompt_ids"], sampling, body["label"], body["adapter"])
                ) as stream:
                    async for one in stream:
                        yield _line(one)
            except EngineError as error:
                yield json.dumps(_error(error)).encode() + b"\n"

        return StreamingResponse(lines(), media_type="application/x-ndjson")

    return Starlette(
        routes=[
            Route("/health", guarded(health)),
            Route("/load", guarded(load), methods=["POST"]),
            Route("/sleep", guarded(sleep), methods=["POST"]),
            Route("/transfer", guarded(transfer), methods=["POST"]),
            Route("/generate", guarded(generate), methods=["POST"]),
        ]
    )


def settings_from(fields: dict[str, Any]) -> VllmSettings:
    """Restore `VllmSettings` from JSON."""
    return VllmSettings(**{**fields, "end_ids": tuple(fields["end_ids"])})


def _line(one: SampledTokens) -> bytes:
    parts = [getattr(one, field.name) for field in fields(one)]
    return json.dumps(parts, separators=(",", ":")).encode() + b"\n"


def _error(error: TunerError) -> dict[str, Any]:
    return {"error": str(error), "lost": isinstance(error, EngineLostError)}


def _end_with_parent() -> None:
    """End this process and its children when the other end of stdin is closed."""

    def wait() -> None:
        sys.stdin.buffer.read()
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


def main() -> None:
    """Run the server."""
    parser = argparse.ArgumentParser(prog="python -m tuner.engines.vllm.server")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8100)
    parser.add_argument("--fd", type=int, help="a listening socket, from the run that starts this")
    options = parser.parse_args()
    key = os.environ.pop(KEY, "")
    if not key:
        parser.error(f"set {KEY} in the environment: every request must bring it")
    if options.fd is not None:
        _end_with_parent()
        door = socket.socket(fileno=options.fd)
    else:
        door = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        door.bind((options.host, options.port))
    host = VllmHost()
    config = uvicorn.Config(
        make_app(host, key), lifespan="off", log_level="warning", access_log=False
    )
    try:
        asyncio.run(uvicorn.Server(config).serve([door]))
    finally:
        host.close()


if __name__ == "__main__":
    main()
