"""SGLang on other machines: its HTTP server, and how it must have been started.

For exact log-probs, seeds and forms it needs some flags. `/server_info` says how it was started.
What an environment variable changes it does not say; that is measured with `logprob_probe`.

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
from dataclasses import dataclass
from typing import Any

import httpx

from tuner.engines.base import EngineError, EngineLostError, SamplingParams
from tuner.engines.sglang.sampling import sampled, sglang_request
from tuner.engines.token_server import RemoteServer, Sampled, Weights


@dataclass(frozen=True)
class SglangSettings:
    """What the run needs of a server.

    Attributes:
        dtype: "float32", "bfloat16" or "float16".
        max_model_len: Prompt and completion tokens of one request at most.
        end_ids: Token ids that end a completion.
    """

    dtype: str
    max_model_len: int
    end_ids: frozenset[int]


_MISSING = object()
_DEMANDS: dict[str, tuple[Any, str]] = {
    "enable_deterministic_inference": (True, "seeds are ignored otherwise"),
    "incremental_streaming_output": (True, "each chunk repeats the whole completion otherwise"),
    "grammar_backend": ("llguidance", "the trainer replays forms with it"),
    "rl_on_policy_target": (None, "log-probs of top_p and top_k are rounded otherwise"),
    "speculative_algorithm": (None, "its log-probs have not been checked"),
    "preferred_sampling_params": (None, "they would change what is sampled"),
    "enable_watermark": (False, "a watermark changes what is sampled"),
    "tokenizer_worker_num": (1, "the others are not told of new weights"),
}
"""Fields of `/server_info`, what they must be, and why."""


def _start_it(field: str, value: Any) -> str:
    """With which flag a field of `/server_info` has this value."""
    if field == "speculative_algorithm":
        return "start it without speculative decoding"
    flag = f"--{field.replace('_', '-')}"
    if not value:
        return f"start it without {flag}"
    return f"start it with {flag}" if value is True else f"start it with {flag} {value}"


def check_server(name: str, info: Mapping[str, Any], settings: SglangSettings) -> None:
    """Refuse a server on which something would not be exact.

    Args:
        name: What messages call it.
        info: Its answer to `/server_info`.

    Raises:
        EngineError: Names all that is wrong and how to mend it.
    """
    demands = _DEMANDS | {"dtype": (settings.dtype, "tuner.dtype says so")}
    wrong = [
        f"{field} is {info.get(field, 'not there')!r}: {_start_it(field, value)}, because {why}"
        for field, (value, why) in demands.items()
        if info.get(field, _MISSING) != value
    ]
    if "sampling_mask_max_tokens" not in info:
        wrong.append(
            "it cannot list the tokens that top_k and top_p leave: install a later version"
        )
    room = info.get("max_req_input_len", 0)
    if room < settings.max_model_len:
        wrong.append(
            f"max_req_input_len is {room}: set model.max_model_len, which is "
            f"{settings.max_model_len}, to {room} at most, or start it with --context-length "
            f"{settings.max_model_len + 6} and memory for that"
        )
    if wrong:
        raise EngineError(
            f"{name} (version {info.get('version', 'unknown')}; this is written for 0.5.23) cannot "
            "be used:\n" + "\n".join(f"- {line}" for line in wrong)
        )


def logprob_probe(temperature: float) -> dict[str, Any]:
    """A request of `/generate` for one token, with the log-probs of the twenty most probable."""
    return {
        "input_ids": [0],
        "sampling_params": {"max_new_tokens": 1, "temperature": temperature, "ignore_eos": True},
        "return_logprob": True,
        "top_logprobs_num": 20,
    }


def check_logprobs(name: str, cool: Mapping[str, Any], hot: Mapping[str, Any]) -> None:
    """Refuse a server whose log-probs are those of another temperature than it samples with.

    Args:
        cool, hot: Its answers to the probe at temperatures 1 and 2, which halves every difference
            of two log-probs.

    Raises:
        EngineError: SGLANG_RETURN_ORIGINAL_LOGPROB is set.
    """
    spread = [
        places[0][0][0] - places[0][-1][0]
        for places in (answer["meta_info"]["output_top_logprobs"] for answer in (cool, hot))
    ]
    if spread[1] > 0.75 * spread[0]:
        raise EngineError(
            f"{name} reports log-probs of temperature 1, whatever it samples with: start it "
            "without SGLANG_RETURN_ORIGINAL_LOGPROB in its environment"
        )


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

    def serves(self, label: str) -> bool:
        """See `TokenServer.serves`; waits for it as `start` does."""
        self._wait_for("/server_info")
        return bool(self._ask("/server_info")["weight_version"] == label)

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
