"""A stand-in for an SGLang server: its wire protocol over a small model, in a process of its own.

Paths, fields, names and errors are those of SGLang 0.5.23 (`entrypoints/http_server.py`,
`managers/io_struct.py`, `managers/tokenizer_manager.py`, `managers/scheduler.py`), as far as an
engine for training needs them. A field that it does not know it refuses, where SGLang ignores it.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tests.engines.sglang_model import Draw, Model, allowed

FIELDS = {
    *("rid", "input_ids", "sampling_params", "return_logprob", "top_logprobs_num"),
    *("return_sampling_mask", "sampling_logprobs_mode", "stream"),
}
PARAMS = {
    *("max_new_tokens", "temperature", "top_p", "top_k", "sampling_seed", "stop_token_ids"),
    *("ignore_eos", "skip_special_tokens", "no_stop_trim", "ebnf"),
}
STARTED_WITH = {
    "version": "0.5.23",
    "enable_deterministic_inference": True,
    "incremental_streaming_output": True,
    "grammar_backend": "llguidance",
    "rl_on_policy_target": None,
    "speculative_algorithm": None,
    "preferred_sampling_params": None,
    "enable_watermark": False,
    "tokenizer_worker_num": 1,
    "dtype": "float32",
    "weight_version": "default",
    "sampling_mask_max_tokens": 4096,
}


@dataclass(eq=False)
class Running:
    """A request; `end` is why it was ended from outside."""

    rid: str
    body: dict[str, Any]
    end: dict[str, Any] | None = None
    output_ids: list[int] = field(default_factory=list)


class Server:
    """What the tokenizer manager and the scheduler are in SGLang.

    Attributes:
        info: What `/server_info` says besides.
        original_logprobs: Whether SGLANG_RETURN_ORIGINAL_LOGPROB is set.
    """

    def __init__(self, folder: Path) -> None:
        self.model = Model(folder)
        self.info: dict[str, Any] = dict(STARTED_WITH)
        self.original_logprobs = False
        self.weight_version = self.info["weight_version"]
        self.running: list[Running] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.unpaused = asyncio.Event()
        self.unpaused.set()
        self.max_req_len = self.model.context - 1
        self.max_req_input_len = self.max_req_len - 5

    def start(self, body: dict[str, Any], chunks: asyncio.Queue[Any]) -> None:
        """Begin a request, whose chunks and error arrive in the queue, None at the end."""

        async def pump() -> None:
            try:
                async for chunk in self.generate(body):
                    chunks.put_nowait(chunk)
            except ValueError as error:
                chunks.put_nowait(error)
            finally:
                chunks.put_nowait(None)

        task = asyncio.create_task(pump())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def generate(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The chunks of a request, one for each token."""
        await self.unpaused.wait()
        request = Running(body.get("rid") or uuid.uuid4().hex, body)
        params = body["sampling_params"]
        ids = list(body["input_ids"])
        if len(ids) >= self.max_req_input_len:
            raise ValueError(
                f"Input length ({len(ids)} tokens) exceeds the maximum allowed length "
                f"({self.max_req_input_len} tokens)."
            )
        limit = min(params.get("max_new_tokens", 128), self.max_req_len - len(ids) - 1)
        matcher = self.model.matcher(params["ebnf"]) if params.get("ebnf") else None
        prefix = self.model.prefixes.longest(ids)
        cached = prefix.get_seq_length()
        self.running.append(request)
        try:
            reason = None
            widest = self.info["sampling_mask_max_tokens"]
            if body.get("return_sampling_mask") and not 1 <= params.get("top_k", -1) <= widest:
                request.end = _abort("return_sampling_mask requires finite top_k", 400)
            while reason is None:
                await asyncio.sleep(0)
                if request.end is not None:
                    yield self._chunk(request, [], request.end, cached)
                    return
                logits = self.model.logits(ids, prefix)
                if matcher is not None:
                    logits = allowed(matcher, logits)
                top = body.get("top_logprobs_num", 0)
                draw = Draw(logits, params, len(ids), top, self.original_logprobs)
                ids.append(draw.token)
                request.output_ids.append(draw.token)
                reason = self._finish_reason(request, params, limit, matcher)
                yield self._chunk(request, [draw], reason, cached)
        finally:
            self.running.remove(request)
            self.model.prefixes.store(ids, prefix)

    def _finish_reason(
        self, request: Running, params: dict[str, Any], limit: int, matcher: Any
    ) -> dict[str, Any] | None:
        token = request.output_ids[-1]
        ends = {*params.get("stop_token_ids", ()), self.model.tokenizer.eos_token_id}
        over = matcher is not None and matcher.is_stopped()
        if matcher is not None and not over:
            matcher.consume_token(token)
        if token in ends and not params.get("ignore_eos"):
            return {"type": "stop", "matched": token}
        if len(request.output_ids) >= limit:
            return {"type": "length", "length": limit}
        return {"type": "stop", "matched": token} if over else None

    def _chunk(
        self, request: Running, draws: list[Draw], reason: dict[str, Any] | None, cached: int
    ) -> dict[str, Any]:
        body, total = request.body, len(request.output_ids)
        meta: dict[str, Any] = {
            "id": request.rid,
            "finish_reason": reason,
            "prompt_tokens": len(body["input_ids"]),
            "weight_version": self.weight_version,
            "weight_versions": [{"version": self.weight_version, "start": 0, "end": total}],
            "num_retractions": 0,
            "reasoning_tokens": 0,
            "completion_tokens": total,
            "cached_tokens": cached,
        }
        if body.get("return_logprob"):
            meta["output_token_logprobs"] = [(draw.logprob, draw.token, None) for draw in draws]
            if body.get("top_logprobs_num"):
                meta["output_top_logprobs"] = [draw.top for draw in draws]
        if body.get("return_sampling_mask"):
            meta["output_token_sampling_mask"] = [draw.support for draw in draws]
            meta["output_token_sampling_logprobs"] = [
                draw.support_logprobs
                if body.get("sampling_logprobs_mode") == "support"
                else draw.support_logprobs[draw.support.index(draw.token)]
                for draw in draws
            ]
            meta["output_token_sampling_mask_length"] = total
        ids = [draw.token for draw in draws]
        return {"text": self.model.tokenizer.decode(ids), "output_ids": ids, "meta_info": meta}

    def abort(self, rid: str, abort_all: bool) -> None:
        """End requests whose id begins like this one, as the scheduler does."""
        for request in self.running:
            if abort_all or (rid and request.rid.startswith(rid)):
                request.end = _abort("Aborted", None)

    async def pause(self, mode: str) -> None:
        self.unpaused.clear()
        while mode == "abort" and self.running:
            self.abort("", True)
            await asyncio.sleep(0.001)

    def update_weights(self, body: dict[str, Any]) -> dict[str, Any]:
        try:
            self.model.load(Path(body["model_path"]))
        except Exception as error:
            message = f"Failed to update weights: {error}."
            return {"success": False, "message": message, "num_paused_requests": 0}
        if body.get("flush_cache", True):
            self.model.prefixes.flush()
        if body.get("weight_version") is not None:
            self.weight_version = body["weight_version"]
        message = "Succeeded to update model weights."
        return {"success": True, "message": message, "num_paused_requests": 0}


def _abort(message: str, status: int | None) -> dict[str, Any]:
    kind = None if status is None else "BadRequestError"
    return {"type": "abort", "message": message, "status_code": status, "err_type": kind}


def make_app(server: Server, key: str) -> Starlette:
    """The HTTP side, as in `entrypoints/http_server.py`."""

    async def server_info(_: Request) -> Response:
        current = {
            "max_req_input_len": server.max_req_input_len,
            "weight_version": server.weight_version,
        }
        return JSONResponse({**server.info, **current})

    async def generate(request: Request) -> Response:
        body = await request.json()
        unknown = {*(body.keys() - FIELDS), *(body["sampling_params"].keys() - PARAMS)}
        if unknown:
            return JSONResponse({"error": f"unknown fields: {sorted(unknown)}"}, 400)
        # It goes on when the client hangs up: SGLang notices that seconds later.
        chunks: asyncio.Queue[dict[str, Any] | ValueError | None] = asyncio.Queue()
        server.start(body, chunks)
        if not body.get("stream"):
            found = [chunk async for chunk in _taken(chunks)]
            if isinstance(found[-1], ValueError):
                return JSONResponse({"error": {"message": str(found[-1])}}, 400)
            return JSONResponse(_whole(found))

        async def events() -> AsyncIterator[bytes]:
            async for chunk in _taken(chunks):
                if isinstance(chunk, ValueError):
                    message = {"message": str(chunk), "type": "invalid_request_error"}
                    chunk = {"error": {**message, "code": 400, "retryable": False}}
                yield _event(chunk)
            yield b"data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    async def abort_request(request: Request) -> Response:
        body = await request.json()
        server.abort(body.get("rid") or "", body.get("abort_all", False))
        return Response(status_code=200)

    async def pause_generation(request: Request) -> Response:
        await server.pause((await request.json()).get("mode", "abort"))
        return JSONResponse({"message": "Generation paused successfully.", "status": "ok"})

    async def continue_generation(_: Request) -> Response:
        server.unpaused.set()
        return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})

    async def update_weights_from_disk(request: Request) -> Response:
        content = server.update_weights(await request.json())
        return JSONResponse(content, 200 if content["success"] else 400)

    post = {"methods": ["POST"]}
    return Starlette(
        routes=[
            Route("/server_info", server_info),
            Route("/generate", generate, **post),
            Route("/abort_request", abort_request, **post),
            Route("/pause_generation", pause_generation, **post),
            Route("/continue_generation", continue_generation, **post),
            Route("/update_weights_from_disk", update_weights_from_disk, **post),
        ],
        middleware=[Middleware(_Door, key=key)] if key else [],
    )


async def _taken(chunks: asyncio.Queue[Any]) -> AsyncIterator[Any]:
    while (chunk := await chunks.get()) is not None:
        yield chunk


class _Door:
    """As `utils/auth.py`: every path here demands the key."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app, self._key = app, key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not secrets.compare_digest(given, f"Bearer {self._key}".encode()):
                answer = JSONResponse({"error": "Unauthorized"}, 401)
                return await answer(scope, receive, send)
        await self._app(scope, receive, send)


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def _whole(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """All chunks as one answer."""
    whole = chunks[-1]
    whole["output_ids"] = [token for chunk in chunks for token in chunk["output_ids"]]
    for name, value in whole["meta_info"].items():
        if name.startswith("output_") and isinstance(value, list):
            whole["meta_info"][name] = [one for c in chunks for one in c["meta_info"][name]]
    return whole


def serve(folder: Path, port: int, key: str) -> None:
    """Serve the model in `folder` at this port until the process ends."""
    torch.set_num_threads(1)
    app = make_app(Server(folder), key)
    uvicorn.run(app, port=port, log_level="warning", lifespan="off", access_log=False)
