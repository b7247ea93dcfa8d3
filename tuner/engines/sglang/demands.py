"""How an SGLang server must have been started, for exact log-probs, seeds and forms.

`/server_info` says how it was. What an environment variable changes it does not say; that is
measured with `logprob_probe`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tuner.engines.base import EngineError


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


@dataclass(frozen=True)
class _Demand:
    """A field of `/server_info`, what it must be, and why."""

    field: str
    value: Any
    mend: str
    why: str


_MISSING = object()
_DEMANDS = (
    _Demand(
        "enable_deterministic_inference",
        True,
        "start it with --enable-deterministic-inference",
        "seeds are ignored otherwise",
    ),
    _Demand(
        "incremental_streaming_output",
        True,
        "start it with --incremental-streaming-output",
        "each chunk repeats the whole completion otherwise",
    ),
    _Demand(
        "grammar_backend",
        "llguidance",
        "start it with --grammar-backend llguidance",
        "the trainer replays forms with it",
    ),
    _Demand(
        "rl_on_policy_target",
        None,
        "start it without --rl-on-policy-target",
        "log-probs of top_p and top_k are rounded otherwise",
    ),
    _Demand(
        "speculative_algorithm",
        None,
        "start it without speculative decoding",
        "its log-probs have not been checked",
    ),
    _Demand(
        "preferred_sampling_params",
        None,
        "start it without --preferred-sampling-params",
        "they would change what is sampled",
    ),
    _Demand(
        "enable_watermark",
        False,
        "start it without --enable-watermark",
        "a watermark changes what is sampled",
    ),
    _Demand(
        "tokenizer_worker_num",
        1,
        "start it with --tokenizer-worker-num 1",
        "the others are not told of new weights",
    ),
)


def check_server(name: str, info: Mapping[str, Any], settings: SglangSettings) -> None:
    """Refuse a server on which something would not be exact.

    Args:
        name: What messages call it.
        info: Its answer to `/server_info`.

    Raises:
        EngineError: Names all that is wrong and how to mend it.
    """
    dtype = _Demand(
        "dtype", settings.dtype, f"start it with --dtype {settings.dtype}", "tuner.dtype says so"
    )
    wrong = [
        f"{one.field} is {info.get(one.field, 'not there')!r}: {one.mend}, because {one.why}"
        for one in (*_DEMANDS, dtype)
        if info.get(one.field, _MISSING) != one.value
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
