"""Our sampling settings as vLLM's, and vLLM's outputs as ours.

vLLM scales by temperature, then keeps top_k, then top_p, as we do; with
`logprobs_mode="processed_logprobs"` its log-probs are those of the distribution at the end of that
line. Three things differ: it serves a temperature between 0 and 0.01 as 0.01, and takes none above
2, which are both refused here; and it reports greedy tokens with the log-probs of temperature 1,
which become 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from tuner.engines.base import FINISH_REASONS, EngineError, SamplingParams
from tuner.engines.grammar_text import with_head
from tuner.engines.sampling import check_sampling
from tuner.engines.token_server import Sampled, finite_logprob, most_probable
from tuner.errors import ConfigError

if TYPE_CHECKING:
    import vllm

_LOWEST = 0.01
_HIGHEST = 2.0


def check_for_vllm(sampling: SamplingParams) -> None:
    """Refuse settings that define no distribution, or that vLLM would change.

    Raises:
        ConfigError: Names the setting, its value and what is allowed.
    """
    check_sampling(sampling)
    if sampling.temperature > _HIGHEST:
        raise ConfigError(
            f"sampling: temperature is {sampling.temperature!r}, and vLLM takes {_HIGHEST} at most"
        )
    if 0 < sampling.temperature < _LOWEST:
        raise ConfigError(
            f"sampling: temperature is {sampling.temperature!r}, which vLLM would take for "
            f"{_LOWEST}; set it to 0, or to {_LOWEST} or more"
        )


def vllm_sampling(sampling: SamplingParams, end_ids: Iterable[int]) -> vllm.SamplingParams:
    """vLLM's settings for one part of a completion; stop strings are not vLLM's to find."""
    from vllm import SamplingParams as VllmSampling
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    form = None
    if sampling.grammar:
        form = StructuredOutputsParams(grammar=with_head(sampling.grammar))
    return VllmSampling(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        logprobs=sampling.top_logprobs,
        # Every end is ours: what the model's folder says may be something else.
        stop_token_ids=sorted(end_ids),
        ignore_eos=True,
        detokenize=False,
        skip_special_tokens=False,
        output_kind=RequestOutputKind.DELTA,
        structured_outputs=form,
    )


def sampled(output: vllm.RequestOutput, sampling: SamplingParams) -> Sampled:
    """The tokens of one of vLLM's outputs.

    Raises:
        EngineError: One has no finite log-prob, or vLLM ended the completion for a reason that is
            neither its end nor its length.
    """
    (completion,) = output.outputs
    ids = tuple(completion.token_ids)
    found: Sequence[Any] = completion.logprobs or ()
    if len(found) != len(ids):
        raise EngineError(f"vLLM returned {len(ids)} token ids and {len(found)} log-probs together")
    reason = completion.finish_reason
    if reason is not None and reason not in FINISH_REASONS:
        raise EngineError(f"vLLM ended a completion with {reason}")
    return Sampled(
        ids,
        tuple(_logprob(token, at, sampling) for token, at in zip(ids, found, strict=True)),
        tuple(_alternatives(token, at, sampling) for token, at in zip(ids, found, strict=True))
        if sampling.top_logprobs
        else (),
        -1 if output.num_cached_tokens is None else output.num_cached_tokens,
        None if reason is None else FINISH_REASONS[reason],
    )


def _logprob(token: int, found: Any, sampling: SamplingParams) -> float:
    if sampling.temperature == 0:
        return 0.0
    return finite_logprob("vLLM", token, found[token].logprob)


def _alternatives(
    token: int, found: Any, sampling: SamplingParams
) -> tuple[tuple[int, float], ...]:
    if sampling.temperature == 0:
        return ((token, 0.0),)
    return most_probable(((one, at.logprob) for one, at in found.items()), sampling.top_logprobs)
