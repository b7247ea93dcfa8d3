"""How many examples and cases a test runs on."""

import os
from collections.abc import Iterable
from typing import Any

import pytest

# All of them in `make test-nightly`.
_ALL = os.environ.get("TUNER_EXAMPLES") == "all"


def few(most: int) -> int:
    """A quarter of the examples that Hypothesis tries, but all of at most fifteen."""
    return most if _ALL else max(min(most, 15), most // 4)


def grid(names: str, cases: Iterable[Any], *, quick: int, **options: Any) -> pytest.MarkDecorator:
    """`pytest.mark.parametrize`, but `make test` runs only `quick` of the cases, spread evenly.

    `make test-long` runs the others.

    Args:
        names: As for `parametrize`; several are separated by commas, and a case is then a tuple.
        cases: Plain ones, without `pytest.param`.
        quick: At least 1; with 1, the first case.
    """
    found = [case if "," in names else (case,) for case in cases]
    step = (len(found) - 1) / max(1, quick - 1)
    kept = {round(place * step) for place in range(quick)}
    rows = [
        pytest.param(*case, marks=[] if place in kept else pytest.mark.long)
        for place, case in enumerate(found)
    ]
    return pytest.mark.parametrize(names, rows, **options)
