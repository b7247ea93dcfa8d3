"""Our sampling settings as SGLang's, and SGLang's chunks as ours.

SGLang divides by the temperature and takes the softmax; `output_token_logprobs` are of that
distribution. Then it cuts to top_k and top_p, and these log-probs are not those of what was
sampled: they come as `output_token_sampling_logprobs` where a request sets `return_sampling_mask`,
together with the tokens that were left. That needs a top_k, of as many tokens as the server lists
at most (`widest`): where top_p alone is set it is this number, and a token for which as many are
left is refused, because top_p might have left more.

Three things differ from ours: SGLang cuts top_k and top_p both from the whole distribution, where
we cut top_p from what top_k left, so both together are refused; it takes a temperature under 1e-6
for 0; and it reports greedy tokens with the log-probs of temperature 1, which become 0.

Read in SGLang 0.5.23: `sampling/sampling_params.py`, `layers/sampler.py`,
`managers/tokenizer_manager.py`, `managers/scheduler.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from tuner.engines.base import FINISH_REASONS, EngineError, FinishReason, SamplingParams
from tuner.engines.grammar_text import with_head
from tuner.engines.sampling import check_sampling
from tuner.engines.token_server import Sampled, finite_logprob, most_probable
from tuner.errors import ConfigError

_LOWEST = 1e-6
_NEVER = -1e29
"""SGLang has finite log-probs for tokens that cannot be sampled; they are under this one."""


def check_for_sglang(sampling: SamplingParams) -> None:
    """Refuse settings that define no distribution, or for which SGLang's is another.

    Raises:
        ConfigError: Names the setting, its value and what is allowed.
    """
    check_sampling(sampling)
    if 0 < sampling.temperature < _LOWEST:
        raise ConfigError(
            f"sampling: temperature is {sampling.temperature!r}, which SGLang would take for 0; "
            f"set it to 0, or to {_LOWEST} or more"
        )
    if sampling.temperature > 0 and sampling.top_k > 0 and sampling.top_p < 1:
        raise ConfigError(
            f"sampling: top_k is {sampling.top_k} and top_p is {sampling.top_p}, and SGLang cuts "
            "both from the whole distribution, where top_p is meant of what top_k keeps; set one "
            "of them alone"
        )


def sglang_request(
    prompt_ids: Sequence[int], sampling: SamplingParams, end_ids: Iterable[int], widest: int
) -> dict[str, Any]:
    """The body of `/generate` for one part of a completion; stop strings are not SGLang's to find.

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
        # With the grammar backend llguidance, text that is not GBNF is taken for its Lark.
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
) -> Sampled:
    """The tokens of one chunk of a stream, each of which is new.

    Raises:
        EngineError: SGLang failed, ended the completion for a reason that is neither its end nor
            its length, top_p leaves more tokens than it lists, or a token has no log-prob, or none
            that is finite.
    """
    try:
        meta = chunk["meta_info"]
        ids = tuple(int(token) for token in chunk["output_ids"])
        reason = _reason(meta["finish_reason"], ids, sampling, end_ids)
        by_top_p = sampling.cuts and sampling.top_k < 0
        if by_top_p and any(len(mask) >= widest for mask in meta["output_token_sampling_mask"]):
            raise EngineError(
                f"top_p = {sampling.top_p} leaves {widest} tokens or more, and SGLang lists "
                f"{widest} at most: lower top_p, or start the server with a larger "
                "--sampling-mask-max-tokens"
            )
        return Sampled(
            ids,
            _logprobs(meta, ids, sampling),
            _alternatives(meta, ids, sampling),
            meta["cached_tokens"],
            reason,
            _kept(meta, ids, sampling),
        )
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise EngineError(
            f"SGLang's answer is not of the form that is known, of version 0.5.23: {error!r} in "
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
            f"SGLang ended a completion at token {found['matched']}, which does not end one of "
            f"this model (those are {sorted(end_ids)}): start it with the model that is trained"
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
    # JSON has null for what is not a number.
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
    """The tokens that were left at each place; empty where nothing was cut."""
    if not sampling.cuts:
        return ()
    kept = tuple(tuple(int(token) for token in mask) for mask in meta["output_token_sampling_mask"])
    if len(kept) != len(ids):
        raise ValueError(f"{len(kept)} masks for {len(ids)} tokens")
    return kept


def _supports(meta: dict[str, Any]) -> list[list[tuple[int, float]]]:
    """The tokens that were left at each place, with their log-probs."""
    return [
        list(zip(ids, values, strict=True))
        for ids, values in zip(
            meta["output_token_sampling_mask"], meta["output_token_sampling_logprobs"], strict=True
        )
    ]
