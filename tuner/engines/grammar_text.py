"""A grammar as llguidance is given it, here and in an engine elsewhere, and what is wrong with one.

Apart from `grammar`, which needs PyTorch: servers elsewhere are reached without it.
"""

from tuner.errors import TunerError

_HEAD = '%llguidance {"no_forcing": true}\n'


class GrammarError(TunerError, ValueError):
    """A grammar cannot be compiled or followed, or ids do not follow it."""


def with_head(grammar: str) -> str:
    """The text that llguidance compiles; without forcing, so that every spelling is allowed."""
    return _HEAD + grammar
