"""Recorded data: conversations and pairs of answers as token ids to train on."""

from tuner.recorded.examples import Example, Examples, examples_of
from tuner.recorded.turns import Turn, Unusable, trained_turns

__all__ = ["Example", "Examples", "Turn", "Unusable", "examples_of", "trained_turns"]
