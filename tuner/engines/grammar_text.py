"""A grammar as llguidance is given it, here and in an engine elsewhere."""

_HEAD = '%llguidance {"no_forcing": true}\n'


def with_head(grammar: str) -> str:
    """The text that llguidance compiles; without forcing, so that every spelling is allowed."""
    return _HEAD + grammar
