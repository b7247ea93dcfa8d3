"""Fixtures of the gateway's tests."""

from tests.gateway.doors import door

__all__ = ["door"]
