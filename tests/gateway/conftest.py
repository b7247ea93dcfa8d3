"""Fixtures of the gateway's tests."""

from tests.gateway.doors import door
from tests.gateway.drift import vocabulary

__all__ = ["door", "vocabulary"]
