"""These tests need agent frameworks, in an environment of their own: `make test-frameworks`."""

from __future__ import annotations

import importlib.util
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from tuner.gateway import Session

_NEEDS = {
    "test_docs.py": ("agents", "langchain_openai", "smolagents"),
    "test_langgraph.py": ("langchain", "langchain_openai", "langgraph"),
    "test_openai_agents.py": ("agents",),
    "test_smolagents.py": ("smolagents",),
}

collect_ignore = [
    file
    for file, packages in _NEEDS.items()
    if any(importlib.util.find_spec(package) is None for package in packages)
]


@pytest.fixture(params=["in process", "over HTTP"])
async def door(request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    """Gives the client of a session."""
    clients: list[Any] = []

    def client_of(session: Session) -> openai.AsyncOpenAI:
        if request.param == "in process":
            return session.async_client()
        clients.append(
            openai.AsyncOpenAI(base_url=session.base_url, api_key=session.key, max_retries=0)
        )
        return clients[-1]

    yield client_of
    for client in clients:
        await client.close()
