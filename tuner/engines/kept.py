"""Which tokens a cut left at one position, as text that a trace can hold.

top_k, top_p and min_p are functions of the weights: applied again under other weights they leave
other tokens, and a ratio of two such log-probs compares two distributions. So what was left is
written down where it was sampled:

    "" : not cut, or not known      "i..." : k ids, 32 bits each      "b..." : one bit a token

whichever of the two is shorter, in base64.
"""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

_IDS = np.dtype("<u4")


def packed_kept(ids: np.ndarray[Any, Any], vocabulary: int) -> str:
    """The tokens that were left, shape [k], of a model with so many logits."""
    if ids.size * _IDS.itemsize * 8 <= vocabulary:
        return "i" + base64.b64encode(np.sort(ids).astype(_IDS).tobytes()).decode()
    left = np.zeros(vocabulary, dtype=np.uint8)
    left[ids] = 1
    return "b" + base64.b64encode(np.packbits(left, bitorder="little").tobytes()).decode()


def kept_ids(kept: str) -> np.ndarray[Any, Any]:
    """The ids again, ascending, shape [k].

    Raises:
        ValueError: It is not of this form.
    """
    data = base64.b64decode(kept[1:], validate=True)
    if kept[:1] == "i":
        return np.frombuffer(data, dtype=_IDS).astype(np.int64)
    if kept[:1] == "b":
        bits = np.frombuffer(data, dtype=np.uint8)
        return np.flatnonzero(np.unpackbits(bits, bitorder="little"))
    raise ValueError(f"a set of kept tokens begins with 'i' or 'b', not {kept[:1]!r}")
