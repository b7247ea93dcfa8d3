"""The two ways of an OpenAI client to a session, for every test that asks for `door`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from tuner.gateway import Session


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
