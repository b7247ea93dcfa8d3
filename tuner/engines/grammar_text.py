"""Grammar text as llguidance gets it here and in remote engines, and its errors.

Separate from `grammar`, which needs PyTorch: remote engines are used without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tuner.errors import TunerError

if TYPE_CHECKING:
    from llguidance import LLParserLimits

# symbols; 400 optional properties, about the most that can be followed, have 5,000
_LARGEST = 40_000
_HEAD = '%llguidance {"no_forcing": true}\n'


class GrammarError(TunerError, ValueError):
    """A grammar cannot be compiled or followed, or ids do not follow it."""


def with_head(grammar: str) -> str:
    """The text that llguidance compiles; without forcing, so that every tokenization is allowed."""
    return _HEAD + grammar


def compile_limits() -> LLParserLimits:
    """Size limits of a grammar; a grammar within them compiles in about a second.

    The limits on each step of a completion stay llguidance's, as remote servers have them.
    """
    from llguidance import LLParserLimits

    return LLParserLimits(max_grammar_size=_LARGEST)
