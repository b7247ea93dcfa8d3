"""A small Tinker service on this machine, for Tinker's own client: one process, one tiny model.

It speaks the protocol of `tinker` 0.20 (JSON, answers fetched as futures) and computes for real,
with transformers and torch. Two things are simpler than the service: all weights are trained
instead of an adapter, and requests are served one at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import socket
import threading
from collections.abc import Iterator
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from transformers import AutoModelForCausalLM

KEY = "tml-a-key-of-the-tests"


class Service:
    """The models of one service, and what was asked of it.

    Attributes:
        asked: The operations, in the order in which they were done.
        prompts: The token ids that were sampled from, with the weights' path, in that order.
    """

    def __init__(self, model_path: str) -> None:
        self.model_path = model_path
        self.asked: list[str] = []
        self.prompts: list[tuple[str, list[int]]] = []
        self._base = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
        self._ends = set(_as_list(self._base.generation_config.eos_token_id))
        self._trained: dict[str, Any] = {}
        self._optimizers: dict[str, torch.optim.AdamW] = {}
        self._saved: dict[str, Any] = {}
        self._checkpoints: dict[str, Any] = {}
        self._sessions: dict[str, str] = {}
        self._answers: dict[str, Any] = {}
        self._busy = asyncio.Lock()

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.get("/api/v1/healthz")
        async def healthz() -> Any:
            return {"status": "ok"}

        @app.get("/api/v1/get_server_capabilities")
        async def capabilities(request: Request) -> Any:
            _demand_key(request)
            return {"supported_models": [{"model_name": self.model_path}]}

        @app.get("/api/v1/samplers/{session}")
        async def sampler(session: str) -> Any:
            return {
                "sampler_id": session,
                "base_model": self.model_path,
                "model_path": self._sessions[session],
            }

        @app.delete("/api/v1/training_runs/{model_id}/checkpoints/{name:path}")
        async def delete(model_id: str, name: str) -> Any:
            self.asked.append("delete")
            return {}

        @app.post("/api/v1/{operation:path}")
        async def operation(operation: str, request: Request) -> Any:
            _demand_key(request)
            return await self._operation(operation, await request.json())

        return app

    async def _operation(self, name: str, body: dict[str, Any]) -> Any:
        at_once = {
            "client/config": lambda: {},
            "create_session": lambda: {"session_id": "a-session"},
            "session_heartbeat": lambda: {},
            "telemetry": lambda: {"status": "accepted"},
            "create_sampling_session": lambda: self._create_sampling_session(body),
            "get_info": lambda: {
                "model_id": body["model_id"],
                "model_data": {"arch": "tiny", "model_name": self.model_path},
            },
            "retrieve_future": lambda: self._answers.pop(body["request_id"]),
            "weights_info": lambda: {
                "base_model": self.model_path,
                "is_lora": True,
                "lora_rank": 16,
            },
        }
        if name in at_once:
            return at_once[name]()
        computed = {
            "create_model": self._create_model,
            "asample": self._sample,
            "forward": self._forward,
            "forward_backward": self._forward_backward,
            "optim_step": self._optim_step,
            "save_weights": self._save,
            "load_weights": self._load,
            "save_weights_for_sampler": self._save_for_sampler,
        }
        if name not in computed:
            raise HTTPException(404, f"there is no {name} here")
        async with self._busy:
            self.asked.append(name)
            answer = await asyncio.to_thread(computed[name], body)
        request_id = f"{name}-{len(self.asked)}"
        self._answers[request_id] = answer
        return {"request_id": request_id}

    def _create_sampling_session(self, body: dict[str, Any]) -> Any:
        path = body.get("model_path") or body["base_model"]
        if path not in (self.model_path, *self._saved):
            raise HTTPException(404, f"there are no weights {path}")
        session = f"sampler-{len(self._sessions)}"
        self._sessions[session] = path
        return {"sampling_session_id": session}

    def _create_model(self, body: dict[str, Any]) -> Any:
        model_id = f"model-{len(self._trained)}"
        model = copy.deepcopy(self._base)
        self._trained[model_id] = model
        self._optimizers[model_id] = torch.optim.AdamW(model.parameters())
        return {"model_id": model_id}

    def _sample(self, body: dict[str, Any]) -> Any:
        path = self._sessions[body["sampling_session_id"]]
        model = self._saved.get(path, self._base)
        prompt = _tokens(body["prompt"])
        answer: dict[str, Any] = {"type": "sample"}
        if body.get("prompt_logprobs"):
            with torch.no_grad():
                logprobs = _logprobs(model, prompt[:-1], prompt[1:])
            return {**answer, "sequences": [], "prompt_logprobs": [None, *logprobs.tolist()]}
        self.prompts.append((path, prompt))
        given = body["sampling_params"]
        generator = torch.Generator().manual_seed(given["seed"])
        ids, logprobs = list(prompt), []
        stop_reason = "length"
        with torch.no_grad():
            for _ in range(given["max_tokens"]):
                logits = model(torch.tensor([ids])).logits[0, -1]
                distribution = logits.log_softmax(-1)
                if given["temperature"] == 0:
                    sampled = int(logits.argmax())
                else:
                    sampled = int(torch.multinomial(distribution.exp(), 1, generator=generator))
                ids.append(sampled)
                logprobs.append(float(distribution[sampled]))
                if sampled in self._ends:
                    stop_reason = "stop"
                    break
        sequence = {
            "tokens": ids[len(prompt) :],
            "logprobs": logprobs,
            "stop_reason": stop_reason,
        }
        return {**answer, "sequences": [sequence]}

    def _forward(self, body: dict[str, Any]) -> Any:
        return self._computed(body["model_id"], body["forward_input"], backward=False)

    def _forward_backward(self, body: dict[str, Any]) -> Any:
        return self._computed(body["model_id"], body["forward_backward_input"], backward=True)

    def _computed(self, model_id: str, given: dict[str, Any], *, backward: bool) -> Any:
        assert given["loss_fn"] == "cross_entropy"
        outputs = []
        for datum in given["data"]:
            targets = datum["loss_fn_inputs"]["target_tokens"]["data"]
            weights = torch.tensor(datum["loss_fn_inputs"]["weights"]["data"])
            with torch.set_grad_enabled(backward):
                logprobs = _logprobs(
                    self._trained[model_id], _tokens(datum["model_input"]), targets
                )
                if backward:
                    (-(weights * logprobs).sum()).backward()
            tensor = {
                "data": logprobs.detach().tolist(),
                "dtype": "float32",
                "shape": [len(targets)],
            }
            outputs.append({"logprobs": tensor})
        return {"loss_fn_output_type": "logprobs", "loss_fn_outputs": outputs, "metrics": {}}

    def _optim_step(self, body: dict[str, Any]) -> Any:
        given = body["adam_params"]
        optimizer = self._optimizers[body["model_id"]]
        for group in optimizer.param_groups:
            group.update(
                lr=given["learning_rate"],
                betas=(given["beta1"], given["beta2"]),
                eps=given["eps"],
                weight_decay=given["weight_decay"],
            )
        parameters = self._trained[body["model_id"]].parameters()
        norm = torch.nn.utils.clip_grad_norm_(parameters, given["grad_clip_norm"] or float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        return {"metrics": {"grad_norm": float(norm)}}

    def _save(self, body: dict[str, Any]) -> Any:
        path = f"tinker://{body['model_id']}/weights/{body['path']}"
        kept = (self._trained[body["model_id"]], self._optimizers[body["model_id"]])
        self._checkpoints[path] = copy.deepcopy([one.state_dict() for one in kept])
        return {"path": path}

    def _load(self, body: dict[str, Any]) -> Any:
        weights, optimizer = copy.deepcopy(self._checkpoints[body["path"]])
        self._trained[body["model_id"]].load_state_dict(weights)
        if body["optimizer"]:
            self._optimizers[body["model_id"]].load_state_dict(optimizer)
        return {"path": body["path"]}

    def _save_for_sampler(self, body: dict[str, Any]) -> Any:
        path = f"tinker://{body['model_id']}/sampler_weights/{body['path']}"
        self._saved[path] = copy.deepcopy(self._trained[body["model_id"]]).eval()
        return {"path": path}


@contextlib.contextmanager
def served(service: Service) -> Iterator[str]:
    """The address of a service for the time of the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = uvicorn.Config(service.app(), host="127.0.0.1", port=port, log_level="error")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


def _demand_key(request: Request) -> None:
    if request.headers.get("x-api-key") != KEY:
        raise HTTPException(401, "this key is not known")


def _tokens(model_input: dict[str, Any]) -> list[int]:
    return [id for chunk in model_input["chunks"] for id in chunk["tokens"]]


def _logprobs(model: Any, ids: list[int], targets: list[int]) -> torch.Tensor:
    """The log-prob of each target after the ids up to its place, shape [T]."""
    found = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return found.gather(-1, torch.tensor(targets)[:, None])[:, 0]


def _as_list(value: Any) -> list[int]:
    return list(value) if isinstance(value, list | tuple) else [value]
