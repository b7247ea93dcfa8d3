"""What a request's settings make of single logits: bias, penalties, words that may not be written.

    logits ─grammar─▶ + bias ─▶ / or * repetition ─▶ - frequency * count - presence ─▶ / temperature

All of it follows from the settings and the tokens so far, and nothing from the weights, so that a
trainer can do it again. The formulas, their order and which tokens they look at are vLLM's (0.32,
`v1/worker/gpu/sample/`): repetition looks at prompt and completion, the others at the completion.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tuner.engines.base import SamplingParams
from tuner.engines.transfer import to_device

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Edit:
    """For each of the A tokens whose logit changes at one position what it is changed by."""

    token_A: Array
    bias_A: Array
    repetition_A: Array
    minus_A: Array


class LogitEdits:
    """The edits along one completion.

    Args:
        sampling: Settings of which `edits_logits` holds.
        prompt_ids: Shape [P].
        completion_ids: Sampled so far; may grow.
    """

    def __init__(
        self, sampling: SamplingParams, prompt_ids: Sequence[int], completion_ids: Sequence[int]
    ) -> None:
        self._sampling = sampling
        self._completion_ids = completion_ids
        repeats = sampling.repetition_penalty != 1
        self._prompt = np.unique(np.array(prompt_ids if repeats else [], dtype=np.int64))
        self._bias = dict(sampling.logit_bias)

    def banned(self, count: int) -> list[int]:
        """The tokens that would complete a bad word where the completion has `count` tokens."""
        done = self._completion_ids[:count]
        return [
            last
            for *begin, last in self._sampling.bad_words
            if list(done[len(done) - len(begin) :]) == begin
        ]

    def after(self, count: int) -> Edit:
        """What is edited where the completion has `count` tokens."""
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
    """Logits as they are sampled from but for temperature and cuts.

    Args:
        logits: Shape [n, V].
        edits: Rows of it, each at most once, with what is edited there.

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
