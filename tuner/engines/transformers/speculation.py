"""Drafts of the next tokens of a request, looked up in its own prompt and completion.

Tool agents repeat what they have read: names, arguments, the form of a call. Where the last tokens
have occurred before, those that followed are the draft, and one forward pass computes it together
with the newest token:

    tokens      ... <tool_call> {"name": "try_number" ... <tool_call> {"name":
    draft                                                                      "try_number" ...

Tokens are then sampled one by one from the pass's logits, as without a draft, for as long as they
equal it (`SlotRunner`). So every token is a sample of the model's own distribution.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from tuner.engines.request import Request

Ints = NDArray[np.int64]

_FEW, _FEWER, _MOST = 3, 2, 8
"""Number of last tokens that must have occurred before, also after drafts that have saved passes,
and that are compared at most."""
_LONGEST = 16
"""Maximum number of tokens of a draft."""
FEW_REQUESTS = 8
"""Maximum number of requests that decode with drafts: more make the pass over them large."""
_COST, _COST_OF_TOKEN = 0.3, 0.03
"""How much longer a pass takes with a draft, and with each of its tokens, in passes without one.
Measured with 1 to 4 rows of models of 0.8M to 135M parameters: 0.2 to 0.5 in all with 4 tokens, 0.3
to 1 with 16."""
_START, _REGAIN, _SAVED = 0.75, 0.02, 2.0
"""Passes that a request may lose by drafts, more for each of its passes up to this, and at most
after drafts that have saved passes."""
_TRIAL = 0.1
"""Part of `_START` and `_REGAIN` that requests get while drafts of other requests saved nothing."""
_MEMORY = 0.1
"""Weight of a draft in the average of what drafts saved."""


def looked_up(tokens: Ints, fewest: int) -> tuple[Ints, int]:
    """The tokens that followed where the last ones have occurred before.

    Args:
        tokens: Prompt and completion, shape [T].
        fewest: Minimum length of a common context.

    Returns:
        All tokens behind the newest of the places with the longest common context, and the length
        of this context; 0 if it is too short.
    """
    ends = np.flatnonzero((tokens[1:-1] == tokens[-1]) & (tokens[:-2] == tokens[-2:-1])) + 1
    context = 2
    while len(ends) and context < _MOST:
        longer = ends[ends >= context]
        longer = longer[tokens[longer - context] == tokens[-1 - context]]
        if not len(longer):
            break
        ends, context = longer, context + 1
    if not len(ends) or context < fewest:
        return tokens[:0], 0
    return tokens[ends[-1] + 1 :], context


@dataclass(slots=True)
class _History:
    """The token sequences of a request so far, and what drafts may cost it.

    Attributes:
        seen: Every `_FEW` tokens in a row.
        count: Number of tokens looked at.
        credit: Passes that may be lost.
    """

    seen: set[tuple[int, ...]]
    count: int
    credit: float

    def repeats(self, tokens: Ints) -> bool:
        """Whether the last `_FEW` tokens have occurred before. Looks at new tokens only: most steps
        find nothing, and a search through all takes several percent of a small model's step."""
        new = tokens[max(0, self.count - _FEW + 1) :].tolist()
        self.count = len(tokens)
        if len(new) < _FEW:
            return False
        self.seen.update(zip(*(new[at:-1] for at in range(_FEW)), strict=False))
        last = tuple(new[-_FEW:])
        known = last in self.seen
        self.seen.add(last)
        return known


class Drafts:
    """Drafts of requests, as long as passes that they save make up for their cost."""

    def __init__(self) -> None:
        self._histories: WeakKeyDictionary[Request, _History] = WeakKeyDictionary()
        self._saved = 0.0  # passes by a draft, on average

    def of(self, request: Request, tokens: Ints) -> Ints:
        """A draft of the tokens behind those of the request, at most twice as long as what is
        repeated. A repetition that reaches the end is continued."""
        part = 1.0 if self._saved >= 0 else _TRIAL
        history = self._histories.get(request)
        if history is None:
            history = self._histories[request] = _History(set(), 0, part * _START)
        regained = min(history.credit + part * _REGAIN, _START)
        credit = history.credit = max(history.credit, regained)
        left = request.limit - len(request.completion_ids) - 1
        longest = min(int((credit - _COST) / _COST_OF_TOKEN), left, _LONGEST)
        if longest < 1 or not (history.repeats(tokens) or credit > _START):
            return tokens[:0]
        found, context = looked_up(tokens, _FEWER if credit > _START else _FEW)
        return np.resize(found, min(longest, 2 * context))

    def judge(self, request: Request, drafted: int, right: int) -> None:
        """Take in how many tokens of a draft were right."""
        if drafted:
            history = self._histories[request]
            saved = right - _COST - drafted * _COST_OF_TOKEN
            self._saved += _MEMORY * (saved - self._saved)
            history.credit = min(history.credit + saved, _SAVED)
