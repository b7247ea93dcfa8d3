"""Our sampling settings as vLLM's, and vLLM's outputs as ours.

vLLM edits logits, scales by temperature, then keeps min_p, top_k and top_p, as we do; with
`logprobs_mode="processed_logprobs"` its log-probs are those of the distribution at the end of that
line. Three things differ: it serves a temperature between 0 and 0.01 as 0.01, and takes none above
2, which are both refused here; and it reports greedy tokens with the log-probs of temperature 1,
which become 0.

The tokens that a cut left are those with a log-prob among the most probable, as many of which are
listed as there can be: top_k and a few with the same logit, or `max_logprobs` where top_k leaves
that open. (`return_sampling_mask` lists them too, but on GPUs alone, and then refuses every request
without a top_k, and greedy ones.)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
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
_TIES = 8
"""Tokens beside the top_k that may have the logit of the last of them."""


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


def listed(sampling: SamplingParams, longest: int) -> int:
    """How many of the most probable tokens vLLM lists for each sampled one.

    Args:
        longest: The most that it can: its `max_logprobs`, or the size of the vocabulary.
    """
    if not sampling.cuts:
        return sampling.top_logprobs
    left = sampling.top_k + _TIES if sampling.top_k > 0 else longest
    return min(max(sampling.top_logprobs, left), longest)


def vllm_sampling(
    sampling: SamplingParams, end_ids: Iterable[int], longest: int
) -> vllm.SamplingParams:
    """vLLM's settings for one part of a completion; stop strings are not vLLM's to find.

    Args:
        longest: As for `listed`.
    """
    from vllm import SamplingParams as VllmSampling
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    form = None
    if sampling.grammar:
        form = StructuredOutputsParams(grammar=with_head(sampling.grammar))
    asked = VllmSampling(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=dict(sampling.logit_bias) or None,
        seed=sampling.seed,
        logprobs=listed(sampling, longest),
        flat_logprobs=True,
        # Every end is ours: what the model's folder says may be something else.
        stop_token_ids=sorted({*end_ids, *sampling.stop_token_ids}),
        ignore_eos=True,
        detokenize=False,
        skip_special_tokens=False,
        output_kind=RequestOutputKind.DELTA,
        structured_outputs=form,
    )
    if sampling.bad_words:
        # It would make ids of texts, and look for those alone: these are the ones that replay has.
        asked._bad_words_token_ids = [list(word) for word in sampling.bad_words]
    return asked


def sampled(output: vllm.RequestOutput, sampling: SamplingParams, longest: int) -> Sampled:
    """The tokens of one of vLLM's outputs.

    Args:
        longest: As for `listed`.

    Raises:
        EngineError: One has no finite log-prob, or vLLM ended the completion for a reason that is
            neither its end nor its length.
    """
    (completion,) = output.outputs
    ids = tuple(completion.token_ids)
    found = _by_place(completion.logprobs)
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
        tuple(_kept(at, listed(sampling, longest)) for at in found) if sampling.cuts else (),
    )


def _by_place(found: Any) -> list[dict[int, float]]:
    """The listed tokens of each place with their log-probs."""
    if not found:
        return []
    return [
        dict(zip(found.token_ids[start:stop], found.logprobs[start:stop], strict=True))
        for start, stop in zip(found.start_indices, found.end_indices, strict=True)
    ]


def _logprob(token: int, found: Mapping[int, float], sampling: SamplingParams) -> float:
    if sampling.temperature == 0:
        return 0.0
    return finite_logprob("vLLM", token, found[token])


def _alternatives(
    token: int, found: Mapping[int, float], sampling: SamplingParams
) -> tuple[tuple[int, float], ...]:
    if sampling.temperature == 0:
        return ((token, 0.0),)
    return most_probable(found.items(), sampling.top_logprobs)


def _kept(found: Mapping[int, float], asked: int) -> tuple[int, ...]:
    """The tokens that can be sampled; none where there may be more than the list has."""
    left = tuple(sorted(token for token, logprob in found.items() if logprob > -math.inf))
    return left if len(left) < asked else ()
