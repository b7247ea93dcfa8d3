"""Client of SGLang servers, and the flags that they must be started with.

Exact log-probs, seeds and grammars need certain flags. `/server_info` reports the flags; effects of
environment variables are measured with `logprob_probe`.

| operation | request |
|---|---|
| a part of a completion | `/generate` with ids, streamed; each chunk names its weights |
| ending a part early | `/abort_request` with its `rid` |
| new weights | `/pause_generation` (abort), `/update_weights_from_disk`, `/continue_generation` |

Written against SGLang 0.5.23: `entrypoints/http_server.py`, `managers/io_struct.py`.
"""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any

from tuner.engines.base import (
    FINISH_REASONS,
    EngineError,
    EngineLostError,
    FinishReason,
    SamplingError,
    SamplingParams,
)
from tuner.engines.grammar_text import with_head
from tuner.engines.sampling import check_sampling
from tuner.engines.servers import (
    RemoteServer,
    SampledTokens,
    Weights,
    finite_logprob,
    most_probable,
)

# Translation of our sampling settings to SGLang's, and of SGLang's chunks to ours.
#
# SGLang divides by the temperature and takes the softmax; `output_token_logprobs` belong to that
# distribution. Then it applies top_k and top_p. The log-probs after that come as
# `output_token_sampling_logprobs` if a request sets `return_sampling_mask`, together with the kept
# tokens. That needs a top_k of at most the number of tokens that the server lists (`widest`): if
# only top_p is set, top_k becomes this number, and a token for which as many are kept is rejected,
# because top_p might have kept more.
#
# There are three differences: SGLang applies top_k and top_p both to the whole distribution, while
# we apply top_p to what top_k kept, so the combination is rejected; it treats a temperature under
# 1e-6 as 0; and it reports greedy tokens with the log-probs of temperature 1, which become 0.
#
# Read in SGLang 0.5.23: `sampling/sampling_params.py`, `layers/sampler.py`,
# `managers/tokenizer_manager.py`, `managers/scheduler.py`.


_LOWEST = 1e-6
_NEVER = -1e29
"""SGLang has finite log-probs for tokens that cannot be sampled; they are below this."""


def check_for_sglang(sampling: SamplingParams) -> None:
    """Reject settings that define no distribution, or that SGLang interprets differently.

    Raises:
        SamplingError: Names the setting, its value and what is allowed.
    """
    check_sampling(sampling)
    if 0 < sampling.temperature < _LOWEST:
        raise SamplingError(
            "temperature",
            f"is {sampling.temperature!r}, which SGLang would treat as 0; set it to 0, or to "
            f"{_LOWEST} or more",
        )
    if sampling.temperature > 0 and sampling.top_k > 0 and sampling.top_p < 1:
        raise SamplingError(
            "top_k",
            f"is {sampling.top_k} and top_p is {sampling.top_p}; SGLang applies both to the whole "
            "distribution, but top_p must apply to what top_k keeps; set only one of them",
        )


def sglang_request(
    prompt_ids: Sequence[int], sampling: SamplingParams, end_ids: Iterable[int], widest: int
) -> dict[str, Any]:
    """The body of `/generate` for one part of a completion, without stop strings.

    The fields are those of `GenerateReqInput` and its `sampling_params`; `widest` is the server's
    `sampling_mask_max_tokens`.
    """
    cut = sampling.cuts
    asked: dict[str, Any] = {
        "max_new_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": widest if cut and sampling.top_k < 0 else sampling.top_k,
        "sampling_seed": sampling.seed,
        "stop_token_ids": sorted(end_ids),
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }
    if sampling.grammar:
        # With the grammar backend llguidance, text that is not GBNF is read as its Lark.
        asked["ebnf"] = with_head(sampling.grammar)
    body: dict[str, Any] = {
        "input_ids": list(prompt_ids),
        "sampling_params": asked,
        "return_logprob": True,
        "top_logprobs_num": 0 if cut else sampling.top_logprobs,
        "stream": True,
    }
    if cut:
        body["return_sampling_mask"] = True
        body["sampling_logprobs_mode"] = "support" if sampling.top_logprobs else "selected"
    return body


def sampled(
    chunk: dict[str, Any], sampling: SamplingParams, end_ids: frozenset[int], widest: int
) -> SampledTokens:
    """The tokens of one chunk of a stream, all of which are new.

    Raises:
        EngineError: SGLang failed; it ended the completion for a reason other than its end or its
            length; top_p keeps more tokens than it lists; or a log-prob is missing or not finite.
    """
    try:
        meta = chunk["meta_info"]
        ids = tuple(int(token) for token in chunk["output_ids"])
        reason = _reason(meta["finish_reason"], ids, sampling, end_ids)
        by_top_p = sampling.cuts and sampling.top_k < 0
        if by_top_p and any(len(mask) >= widest for mask in meta["output_token_sampling_mask"]):
            raise EngineError(
                f"top_p = {sampling.top_p} keeps {widest} tokens or more, and SGLang lists at "
                f"most {widest}: lower top_p, or start the server with a larger "
                "--sampling-mask-max-tokens"
            )
        return SampledTokens(
            ids,
            _logprobs(meta, ids, sampling),
            _alternatives(meta, ids, sampling),
            meta["cached_tokens"],
            reason,
            _kept(meta, ids, sampling),
        )
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise EngineError(
            f"SGLang's answer does not have the form known from version 0.5.23: {error!r} in "
            f"{str(chunk)[:300]}"
        ) from error


def _reason(
    found: dict[str, Any] | None,
    ids: tuple[int, ...],
    sampling: SamplingParams,
    end_ids: frozenset[int],
) -> FinishReason | None:
    if found is None:
        return None
    kind = found["type"]
    if kind not in FINISH_REASONS:
        raise EngineError(f"SGLang ended a completion with {kind}: {found.get('message')}")
    if kind == "stop" and not sampling.grammar and not end_ids.intersection(ids[-1:]):
        raise EngineError(
            f"SGLang ended a completion at token {found['matched']}, which is not an end token of "
            f"this model (those are {sorted(end_ids)}): start it with the model being trained"
        )
    return FINISH_REASONS[kind]


def _logprobs(
    meta: dict[str, Any], ids: tuple[int, ...], sampling: SamplingParams
) -> tuple[float, ...]:
    if sampling.temperature == 0:
        return (0.0,) * len(ids)
    if not sampling.cuts:
        found = meta["output_token_logprobs"]
        if [token for _, token, _ in found] != list(ids):
            raise ValueError("the ids of output_token_logprobs are not output_ids")
        values = [value for value, _, _ in found]
    elif sampling.top_logprobs:
        values = [dict(pairs)[token] for token, pairs in zip(ids, _supports(meta), strict=True)]
    else:
        values = meta["output_token_sampling_logprobs"]
    # JSON has null for values that are not numbers.
    return tuple(
        finite_logprob("SGLang", token, math.nan if value is None else value)
        for token, value in zip(ids, values, strict=True)
    )


def _alternatives(
    meta: dict[str, Any], ids: tuple[int, ...], sampling: SamplingParams
) -> tuple[tuple[tuple[int, float], ...], ...]:
    if not sampling.top_logprobs:
        return ()
    if sampling.temperature == 0:
        return tuple(((token, 0.0),) for token in ids)
    if sampling.cuts:
        found = _supports(meta)
    else:
        found = [
            [(token, value) for value, token, _ in at if value > _NEVER]
            for at in meta["output_top_logprobs"]
        ]
    pairs = tuple(most_probable(at, sampling.top_logprobs) for at in found)
    if len(pairs) != len(ids):
        raise ValueError(f"{len(pairs)} lists of alternatives for {len(ids)} tokens")
    return pairs


def _kept(
    meta: dict[str, Any], ids: tuple[int, ...], sampling: SamplingParams
) -> tuple[tuple[int, ...], ...]:
    """The kept tokens at each place; empty if nothing was cut."""
    if not sampling.cuts:
        return ()
    kept = tuple(tuple(int(token) for token in mask) for mask in meta["output_token_sampling_mask"])
    if len(kept) != len(ids):
        raise ValueError(f"{len(kept)} masks for {len(ids)} tokens")
    return kept


def _supports(meta: dict[str, Any]) -> list[list[tuple[int, float]]]:
    """The kept tokens at each place, with their log-probs."""
    return [
        list(zip(ids, values, strict=True))
        for ids, values in zip(
            meta["output_token_sampling_mask"], meta["output_token_sampling_logprobs"], strict=True
        )
    ]


@dataclass(frozen=True)
class SglangSettings:
    """Requirements of the run on a server.

    Attributes:
        dtype: "float32", "bfloat16" or "float16".
        max_model_len: Maximum of prompt and completion tokens of one request.
        end_ids: Token ids that end a completion.
    """

    dtype: str
    max_model_len: int
    end_ids: frozenset[int]


_MISSING = object()
_DEMANDS: dict[str, tuple[Any, str]] = {
    "enable_deterministic_inference": (True, "otherwise seeds are ignored"),
    "incremental_streaming_output": (True, "otherwise each chunk repeats the whole completion"),
    "grammar_backend": ("llguidance", "the trainer replays grammars with it"),
    "rl_on_policy_target": (None, "otherwise log-probs of top_p and top_k are rounded"),
    "speculative_algorithm": (None, "its log-probs have not been checked"),
    "preferred_sampling_params": (None, "they would change what is sampled"),
    "enable_watermark": (False, "a watermark changes what is sampled"),
    "tokenizer_worker_num": (1, "other tokenizer workers do not learn of new weights"),
}
"""Fields of `/server_info`, their required values, and why."""


def _start_it(field: str, value: Any) -> str:
    """How to start the server so that a field of `/server_info` has this value."""
    if field == "speculative_algorithm":
        return "start it without speculative decoding"
    flag = f"--{field.replace('_', '-')}"
    if not value:
        return f"start it without {flag}"
    return f"start it with {flag}" if value is True else f"start it with {flag} {value}"


def check_server(name: str, info: Mapping[str, Any], settings: SglangSettings) -> None:
    """Reject a server on which something would not be exact.

    Args:
        name: Name for messages.
        info: Its answer to `/server_info`.

    Raises:
        EngineError: Names every problem and how to fix it.
    """
    demands = _DEMANDS | {"dtype": (settings.dtype, "tuner.dtype says so")}
    wrong = [
        f"{field} is {info.get(field, 'not there')!r}: {_start_it(field, value)}, because {why}"
        for field, (value, why) in demands.items()
        if info.get(field, _MISSING) != value
    ]
    if "sampling_mask_max_tokens" not in info:
        wrong.append("it cannot list the tokens kept by top_k and top_p: install a later version")
    room = info.get("max_req_input_len", 0)
    if room < settings.max_model_len:
        wrong.append(
            f"max_req_input_len is {room}: set model.max_model_len, which is "
            f"{settings.max_model_len}, to {room} or less, or start it with --context-length "
            f"{settings.max_model_len + 6} and enough memory"
        )
    if wrong:
        raise EngineError(
            f"{name} (version {info.get('version', 'unknown')}; tested with 0.5.23) cannot be "
            "used:\n" + "\n".join(f"- {line}" for line in wrong)
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
    """Reject a server whose log-probs belong to another temperature than it samples with.

    Args:
        cool, hot: Its answers to the probe at temperatures 1 and 2, which halves every difference
            of two log-probs.
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
    """An SGLang server that somebody else runs.

    Args:
        url: For example `http://10.0.0.2:30000`.
        key: Its --api-key; empty if it has none.
        settings: Requirements of the run.
    """

    def __init__(self, url: str, key: str, settings: SglangSettings) -> None:
        super().__init__("SGLang", url, key)
        self._settings = settings
        self._first_version: str | None = None
        self._widest = 0

    def start(self, weights: Weights) -> None:
        """Load the weights as soon as the server can be reached.

        Raises:
            EngineLostError: It cannot be reached for five minutes, or dies.
            EngineError: It lacks a required flag or cannot load the weights.
        """
        # Not /health, which generates and so fails if a run died in the middle of an update.
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
        # Leftovers of cancelled requests would be computed with both versions.
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
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        label: str,
        adapter: str | None = None,
    ) -> AsyncGenerator[SampledTokens, None]:
        """See `TokenServer.stream`."""
        if adapter is not None:
            raise EngineError(f"there is no adapter {adapter!r}")
        # SGLang aborts every request whose id starts with this one, so all have the same length.
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
                import httpx  # as in `tuner.engines.servers`

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
        """Reject tokens sampled with other weights than requested."""
        spans = meta.get("weight_versions") or ()
        others = {meta.get("weight_version"), *(span["version"] for span in spans)} - {label}
        if not others:
            return
        other = min(others, key=str)
        if other == self._first_version:
            raise EngineLostError(f"{self.name} was restarted: it has the weights {other!r}")
        raise EngineError(
            f"{self.name} has the weights {other!r} instead of {label}: another run loaded them"
        )
