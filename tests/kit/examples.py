"""How many examples Hypothesis tries a property on."""

import os

# All of them in `make test-nightly`.
_ALL = os.environ.get("TUNER_EXAMPLES") == "all"


def few(most: int) -> int:
    """A quarter of them, but all of at most fifteen."""
    return most if _ALL else max(min(most, 15), most // 4)
