"""A grammar as llguidance is given it, here and in an engine elsewhere, and what is wrong with one.

Apart from `grammar`, which needs PyTorch: servers elsewhere are reached without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tuner.errors import TunerError

if TYPE_CHECKING:
    from llguidance import LLParserLimits

_LARGEST = 40_000  # symbols; 400 optional properties, about as many as can be followed, have 5,000
_HEAD = '%llguidance {"no_forcing": true}\n'


class GrammarError(TunerError, ValueError):
    """A grammar cannot be compiled or followed, or ids do not follow it."""


def with_head(grammar: str) -> str:
    """The text that llguidance compiles; without forcing, so that every spelling is allowed."""
    return _HEAD + grammar


def compile_limits() -> LLParserLimits:
    """How large a grammar may be: what passes compiles in about a second.

    The limits on each step of a completion stay llguidance's own, as servers elsewhere have them.
    """
    from llguidance import LLParserLimits

    return LLParserLimits(max_grammar_size=_LARGEST)
