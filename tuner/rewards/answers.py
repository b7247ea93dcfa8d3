"""Scores of an answer in words. Plain functions of texts, each between 0 and 1."""

from __future__ import annotations

import re
import string
from collections import Counter

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
# A sign, a point, a stroke of a fraction: without it there is another number.
_IN_NUMBERS = re.compile(r"(?<![\w.])-(?=\.?\d)|(?<![^\W\d])[./:](?=\d)")
_KEPT = {"-": "\ue000", ".": "\ue001", "/": "\ue002", ":": "\ue003"}
_BACK = str.maketrans({kept: sign for sign, kept in _KEPT.items()})


def normalized(text: str) -> str:
    """The text in lower case without punctuation, articles and further spaces, as SQuAD's
    evaluation compares answers (arXiv 1606.05250); but a number keeps its sign and its point, and a
    text of articles alone, as the answer "A", is left as it is."""
    said = _IN_NUMBERS.sub(lambda found: _KEPT[found[0]], text.lower())
    said = said.translate(_PUNCTUATION).translate(_BACK)
    return " ".join(_ARTICLES.sub(" ", said).split() or said.split())


def exact_match(answer: str, truth: str) -> float:
    """1.0 if both are the same once normalized, else 0.0."""
    return float(normalized(answer) == normalized(truth))


def f1(answer: str, truth: str) -> float:
    """The harmonic mean of precision and recall of the answer's words (arXiv 1606.05250).

    Words count as often as they occur. An answer without words is right only where the truth has
    none.
    """
    said, wanted = normalized(answer).split(), normalized(truth).split()
    if not said or not wanted:
        return float(said == wanted)
    common = (Counter(said) & Counter(wanted)).total()
    if common == 0:
        return 0.0
    precision, recall = common / len(said), common / len(wanted)
    return 2 * precision * recall / (precision + recall)


def has_form(text: str, pattern: str) -> float:
    """1.0 if the whole text matches the regular expression (dots match newlines), else 0.0.

    Raises:
        re.error: The pattern is no regular expression.
    """
    return float(re.fullmatch(pattern, text.strip(), re.DOTALL) is not None)
