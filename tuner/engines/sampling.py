"""The distribution that tokens are sampled from, and the sampling itself, for a whole batch.

    logits ─grammar─edits─/ temperature─▶ min_p ─▶ top_k ─▶ top_p ─renormalise─▶ log-probs ─u─▶ ids

Log-probs are those of the final distribution. A trainer gets the same quantity by doing the same
with its own logits: it removes tokens outside the grammar (`tuner/engines/grammar.py`), applies
penalties and bias (`LogitEdits`), and keeps the tokens that were kept when the call was sampled.

The kept tokens are recorded because top_k, top_p and min_p are functions of the weights: applied
again under other weights they keep other tokens, and a ratio of two such log-probs compares two
distributions. A trace stores them for each position as text:

    "" : not cut, or not known      "i..." : k ids, 32 bits each      "b..." : one bit a token

whichever of the two is shorter, in base64.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tuner.engines.base import COLDEST, SamplingError, SamplingParams
from tuner.engines.grammar import to_device
from tuner.engines.images import IMAGE_IDS

_TWO = "from -2 to 2"


def check_sampling(sampling: SamplingParams) -> None:
    """Reject settings that define no distribution.

    Raises:
        SamplingError: Names the setting, its value and what is allowed.
    """
    rules = (
        ("max_tokens", sampling.max_tokens, sampling.max_tokens >= 1, "at least 1"),
        (
            "temperature",
            sampling.temperature,
            sampling.temperature == 0 or COLDEST <= sampling.temperature < math.inf,
            f"0, or {COLDEST:g} or more",
        ),
        ("top_p", sampling.top_p, 0 < sampling.top_p <= 1, "in (0, 1]"),
        (
            "top_k",
            sampling.top_k,
            sampling.top_k == -1 or 1 <= sampling.top_k < 2**31,
            "-1 or at least 1",
        ),
        ("top_logprobs", sampling.top_logprobs, 0 <= sampling.top_logprobs <= 20, "0 to 20"),
        ("min_p", sampling.min_p, 0 <= sampling.min_p <= 1, "in [0, 1]"),
        (
            "repetition_penalty",
            sampling.repetition_penalty,
            0.01 <= sampling.repetition_penalty <= 100,
            "from 0.01 to 100",
        ),
        ("presence_penalty", sampling.presence_penalty, abs(sampling.presence_penalty) <= 2, _TWO),
        (
            "frequency_penalty",
            sampling.frequency_penalty,
            abs(sampling.frequency_penalty) <= 2,
            _TWO,
        ),
        (
            "logit_bias",
            sampling.logit_bias,
            all(abs(bias) <= 100 for _, bias in sampling.logit_bias),
            "from -100 to 100 for each token",
        ),
        ("bad_words", sampling.bad_words, all(sampling.bad_words), "at least one token each"),
    )
    for name, value, allowed, wanted in rules:
        if not allowed:
            raise SamplingError(name, f"is {value!r}, but must be {wanted}")
    if "" in sampling.stop:
        raise SamplingError("stop", "contains an empty string, which would stop at once")


def sampled_logprobs(
    logits: Tensor,
    temperature: float | Tensor = 1.0,
    top_k: int | Tensor = -1,
    top_p: float | Tensor = 1.0,
    *,
    min_p: float | Tensor = 0.0,
    largest_k: int | None = None,
) -> Tensor:
    """Log-probs of the distribution that a token is sampled from.

    Args:
        logits: Shape [..., V]; half precision is raised to float32, float64 stays.
        temperature: A number, or one per row with the shape of `logits[..., 0]`; 0 is greedy.
        top_k: Likewise; -1 keeps every token. Ties with the k-th token are kept.
        top_p: Likewise; keeps the smallest set of most probable tokens with this mass.
        min_p: Likewise; keeps tokens with at least this share of the highest probability. top_k
            and top_p see only these.
        largest_k: The largest `top_k`, if the caller knows it; otherwise a tensor is read, for
            which Python waits for the device.

    Returns:
        Shape [..., V], natural logarithm, `-inf` for tokens that cannot be sampled.
        Differentiable with respect to `logits`.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    shape = logits.shape[:-1]
    greedy = None
    if isinstance(temperature, Tensor) or temperature != 1.0:
        heat = torch.as_tensor(temperature, device=logits.device).to(logits.dtype).expand(shape)
        greedy = heat == 0
        logits = logits / torch.where(greedy, 1.0, heat)[..., None]
    if isinstance(min_p, Tensor) or min_p > 0:
        share = torch.as_tensor(min_p, device=logits.device).to(logits.dtype).expand(shape)
        least = logits.amax(dim=-1) + share.log()
        logits = logits.masked_fill(logits < least[..., None], -math.inf)
    if isinstance(top_k, Tensor) or top_k > 0:
        wanted = torch.as_tensor(top_k, device=logits.device).expand(shape)
        logits = _keep_top_k(logits, wanted, largest_k)
    logprobs = torch.log_softmax(logits, dim=-1)
    if isinstance(top_p, Tensor) or top_p < 1.0:
        mass = torch.as_tensor(top_p, device=logits.device).to(torch.float64).expand(shape)
        logprobs = _keep_top_p(logprobs, mass)
    if greedy is not None and bool(greedy.any()):
        point = torch.full_like(logprobs, -math.inf)
        point.scatter_(-1, logits.argmax(dim=-1, keepdim=True), 0.0)
        logprobs = torch.where(greedy[..., None], point, logprobs)
    return logprobs


def _keep_top_k(logits: Tensor, top_k: Tensor, largest_k: int | None) -> Tensor:
    vocabulary = logits.shape[-1]
    wanted = torch.where(top_k > 0, top_k, vocabulary).clamp(max=vocabulary)
    if largest_k is None:
        limited = wanted[wanted < vocabulary]
        largest_k = int(limited.max()) if limited.numel() else 0
    if largest_k <= 0:
        return logits
    ordered = logits.topk(min(largest_k, vocabulary), dim=-1).values
    last = ordered.gather(-1, wanted.clamp(max=ordered.shape[-1])[..., None] - 1)
    removed = (logits < last) & (wanted < vocabulary)[..., None]
    return logits.masked_fill(removed, -math.inf)


def _keep_top_p(logprobs: Tensor, top_p: Tensor) -> Tensor:
    ordered, order = logprobs.sort(dim=-1, descending=True, stable=True)
    probs = ordered.double().exp()
    before = probs.cumsum(dim=-1) - probs
    keep = (before < top_p[..., None]) | (top_p >= 1)[..., None]
    keep[..., 0] = True
    removed = torch.empty_like(keep).scatter_(-1, order, ~keep)
    kept = torch.log_softmax(logprobs.masked_fill(removed, -math.inf), dim=-1)
    # Rows of which nothing is cut have the bits that they have in a batch without top_p.
    return torch.where((top_p >= 1)[..., None], logprobs, kept)


@dataclass(frozen=True)
class SamplingBatch:
    """Settings of a batch as tensors, or as plain numbers if they are off for the whole batch.

    Attributes:
        temperature, top_k, top_p, min_p: Shape [n], or 1.0, -1, 1.0 and 0.0.
        constrained: Indices of requests with a grammar.
        edited: Indices of requests that change single logits.
        cut: Indices of requests that keep a part of the vocabulary.
        top_logprobs: The most alternatives that any request asks for.
    """

    temperature: Tensor | float
    top_k: Tensor | int
    top_p: Tensor | float
    min_p: Tensor | float
    top_logprobs: int
    constrained: tuple[int, ...]
    edited: tuple[int, ...]
    cut: tuple[int, ...]

    @staticmethod
    def of(settings: Sequence[SamplingParams], device: torch.device) -> SamplingBatch:
        temperature: Tensor | float = 1.0
        top_k: Tensor | int = -1
        top_p: Tensor | float = 1.0
        min_p: Tensor | float = 0.0
        if any(s.temperature != 1.0 for s in settings):
            temperature = torch.tensor([s.temperature for s in settings], device=device)
        if any(s.top_k > 0 for s in settings):
            top_k = torch.tensor([s.top_k for s in settings], device=device)
        if any(s.top_p < 1.0 for s in settings):
            top_p = torch.tensor([s.top_p for s in settings], device=device, dtype=torch.float64)
        if any(s.min_p > 0 for s in settings):
            min_p = torch.tensor([s.min_p for s in settings], device=device)
        return SamplingBatch(
            temperature,
            top_k,
            top_p,
            min_p,
            max((s.top_logprobs for s in settings), default=0),
            tuple(place for place, s in enumerate(settings) if s.grammar),
            tuple(place for place, s in enumerate(settings) if s.edits_logits),
            tuple(place for place, s in enumerate(settings) if s.cuts),
        )

    def logprobs(self, logits: Tensor) -> Tensor:
        """Log-probs of the sampled distributions: logits [n, V] -> [n, V]."""
        return sampled_logprobs(logits, self.temperature, self.top_k, self.top_p, min_p=self.min_p)


def choose(logprobs: Tensor, uniforms: Sequence[float]) -> tuple[list[int], list[float]]:
    """Sample one token per row by inverting the cumulative distribution in float64.

    Args:
        logprobs: Shape [n, V].
        uniforms: n numbers in [0, 1), one from each request's own stream.

    Returns:
        The ids and their log-probs, n of each. A row without a finite distribution (NaN logits)
        gives a log-prob that is not finite.
    """
    cumulative = logprobs.double().exp_().cumsum_(dim=-1)
    # u <= 1 - 2**-53, so u * total rounds to less than total; `right` then skips every token of
    # probability zero, whose cumulative value equals its predecessor's.
    draws = torch.tensor(uniforms, dtype=torch.float64).to(logprobs.device)[:, None]
    ids = torch.searchsorted(cumulative, draws * cumulative[:, -1:], right=True)
    ids.clamp_(max=logprobs.shape[-1] - 1)
    chosen = logprobs.gather(-1, ids)
    return ids[:, 0].tolist(), chosen[:, 0].tolist()


def most_probable(logprobs: Tensor, count: int) -> list[list[tuple[int, float]]]:
    """For each row the `count` most probable (id, log-prob), or fewer if fewer can be sampled."""
    values, ids = logprobs.topk(min(count, logprobs.shape[-1]), dim=-1)
    return [
        [(token, value) for token, value in zip(row_ids, row, strict=True) if value > -math.inf]
        for row_ids, row in zip(ids.tolist(), values.tolist(), strict=True)
    ]


# The kept tokens as text

_IDS = np.dtype("<u4")


def packed_kept(ids: np.ndarray[Any, Any], vocabulary: int) -> str:
    """Encode the kept tokens, shape [k], of a model with `vocabulary` logits."""
    if ids.size * _IDS.itemsize * 8 <= vocabulary:
        return "i" + base64.b64encode(np.sort(ids).astype(_IDS).tobytes()).decode()
    left = np.zeros(vocabulary, dtype=np.uint8)
    left[ids] = 1
    return "b" + base64.b64encode(np.packbits(left, bitorder="little").tobytes()).decode()


def kept_ids(kept: str) -> np.ndarray[Any, Any]:
    """Decode kept tokens: ascending ids, shape [k].

    Raises:
        ValueError: The text does not have this form.
    """
    data = base64.b64decode(kept[1:], validate=True)
    if kept[:1] == "i":
        return np.frombuffer(data, dtype=_IDS).astype(np.int64)
    if kept[:1] == "b":
        bits = np.frombuffer(data, dtype=np.uint8)
        return np.flatnonzero(np.unpackbits(bits, bitorder="little"))
    raise ValueError(f"a set of kept tokens begins with 'i' or 'b', not {kept[:1]!r}")


# Changes of single logits by a request's settings: bias, penalties, bad words.
#
#     logits ─grammar─▶ + bias ─▶ / or * repetition ─▶ - frequency * count - presence
#            ─▶ / temperature
#
# They depend on the settings and the tokens so far, not on the weights, so a trainer can apply them
# again. The formulas, their order and the tokens they look at are vLLM's (0.32,
# `v1/worker/gpu/sample/`): repetition looks at prompt and completion, the others at the completion.


Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Edit:
    """Changes of logits at one position, for A tokens."""

    token_A: Array
    bias_A: Array
    repetition_A: Array
    minus_A: Array


class LogitEdits:
    """The edits along one completion.

    Args:
        sampling: Settings with `edits_logits`.
        prompt_ids: Shape [P].
        completion_ids: Sampled so far; may grow.
    """

    def __init__(
        self, sampling: SamplingParams, prompt_ids: Sequence[int], completion_ids: Sequence[int]
    ) -> None:
        self._sampling = sampling
        self._completion_ids = completion_ids
        repeats = sampling.repetition_penalty != 1
        prompt = np.unique(np.array(prompt_ids if repeats else [], dtype=np.int64))
        self._prompt = prompt[prompt < IMAGE_IDS]  # images repeat nothing
        self._bias = dict(sampling.logit_bias)

    def banned(self, count: int) -> list[int]:
        """The tokens that would complete a bad word after `count` tokens of completion."""
        done = self._completion_ids[:count]
        return [
            last
            for *begin, last in self._sampling.bad_words
            if list(done[len(done) - len(begin) :]) == begin
        ]

    def after(self, count: int) -> Edit:
        """The edit after `count` tokens of completion."""
        s, done = self._sampling, self._completion_ids[:count]
        seen, counts = np.unique(np.array(done, dtype=np.int64), return_counts=True)
        bias = {**self._bias, **dict.fromkeys(self.banned(count), -math.inf)}
        token_A = np.unique(
            np.concatenate([self._prompt, seen, np.array(list(bias), dtype=np.int64)])
        )
        in_completion = np.searchsorted(token_A, seen)
        repetition_A, minus_A = np.ones(len(token_A)), np.zeros(len(token_A))
        repetition_A[np.searchsorted(token_A, self._prompt)] = s.repetition_penalty
        repetition_A[in_completion] = s.repetition_penalty
        minus_A[in_completion] = s.frequency_penalty * counts + s.presence_penalty
        bias_A = np.array([bias.get(token, 0.0) for token in token_A.tolist()])
        return Edit(token_A, bias_A, repetition_A, minus_A)


def edited(logits: Tensor, edits: Sequence[tuple[int, Edit]]) -> Tensor:
    """Apply edits to logits, before temperature and cuts.

    Args:
        logits: Shape [n, V].
        edits: Row numbers, each at most once, with the edit of each.

    Returns:
        Shape [n, V], float32 at least; differentiable with respect to `logits`.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    places = np.repeat([place for place, _ in edits], [len(e.token_A) for _, e in edits])

    def of(arrays: Sequence[Array]) -> Tensor:
        return to_device(np.concatenate(arrays), logits.device)

    at = of([places]), of([e.token_A for _, e in edits])
    repetition = of([e.repetition_A for _, e in edits]).to(logits.dtype)
    values = logits[at] + of([e.bias_A for _, e in edits]).to(logits.dtype)
    values = torch.where(values > 0, values / repetition, values * repetition)
    return logits.index_put(at, values - of([e.minus_A for _, e in edits]).to(logits.dtype))
