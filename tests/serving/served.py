"""A server of the tiny model in this process, and what asks it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai

from tuner.config.load import checked, read_layers
from tuner.runs.directory import RunDirectory
from tuner.serving.hosting import Server, running
from tuner.serving.serving_store import StoredCall
from tuner.tune import TINY_MODEL, with_default_model

ADMIN = "sk-admin-of-the-tests"
MODEL = "tiny_math"
QUESTION = "Tom has 5 pens. He buys 3 more pens. How many pens does Tom have now?"


def config_of(folder: Path, *settings: str) -> Any:
    """A configuration of the tiny model whose run is in `folder`."""
    own = [
        "project=p",
        "name=served",
        f"checkpoint_root_dir={folder}",
        f"model.model_path={TINY_MODEL}",
        "model.max_model_len=512",
        "tuner.device=cpu",
        "tuner.reasoning=keep",  # the tiny model thinks, and agents do not send that back
        "tuner.serving.log=false",
    ]
    return with_default_model(checked(read_layers(None, overrides=[*own, *settings])))


@asynccontextmanager
async def served(folder: Path, *settings: str) -> AsyncIterator[Asking]:
    """A server on a free port, and the admin who asks it."""
    config = config_of(folder, *settings)
    directory = RunDirectory(config.run_dir)
    directory.create()
    async with running(config, directory, ADMIN) as server:
        assert server.door is not None
        root = server.door.base_url.removesuffix("/v1")
        async with httpx.AsyncClient(base_url=root, trust_env=False) as http:
            asking = Asking(http, root, server)
            yield asking
            for client in asking.clients:
                await client.close()


class Asking:
    """Asks a server as one of its callers.

    Args:
        http: Knows where it is.
        root: Likewise, for libraries.
        server: It itself, for what is stored.
    """

    def __init__(self, http: httpx.AsyncClient, root: str, server: Server) -> None:
        self.http, self.root, self.server = http, root, server
        self.clients: list[openai.AsyncOpenAI] = []

    async def control(
        self, method: str, path: str, key: str | None = ADMIN, **rest: Any
    ) -> httpx.Response:
        """Ask the control API."""
        headers = dict(rest.pop("headers", {}))
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        return await self.http.request(method, f"/tuner/v1{path}", headers=headers, **rest)

    async def opened(self, key: str = ADMIN, **given: Any) -> tuple[str, str]:
        """Id and key of a new session."""
        answer = await self.control("POST", "/sessions", key, json=given)
        assert answer.status_code == 201, answer.text
        return answer.json()["id"], answer.json()["key"]

    async def application(self, name: str = "shop") -> str:
        """The key of a new application."""
        answer = await self.control("POST", "/applications", json={"name": name})
        assert answer.status_code == 201, answer.text
        return str(answer.json()["key"])

    def client(self, key: str, **options: Any) -> openai.AsyncOpenAI:
        """OpenAI's client with a key."""
        options = {"max_retries": 0, **options}
        client = openai.AsyncOpenAI(base_url=f"{self.root}/v1", api_key=key, **options)
        self.clients.append(client)
        return client

    def calls(self, session: str) -> list[StoredCall]:
        """What is stored of a session."""
        return self.server.store.calls(session)

    def ids(self) -> list[str]:
        """The sessions that are stored."""
        return [one.id for one in self.server.store.sessions()]


async def say(client: openai.AsyncOpenAI, messages: list[Any], text: str, **asked: Any) -> Any:
    """One turn: `messages` grow by what is said and answered; the raw response."""
    messages.append({"role": "user", "content": text})
    asked = {"max_tokens": 40, "temperature": 0, **asked}
    raw = await client.chat.completions.with_raw_response.create(
        model=MODEL, messages=list(messages), **asked
    )
    said = raw.parse().choices[0].message
    messages.append({"role": "assistant", "content": said.content})
    return raw


async def until(condition: Any) -> None:
    """Wait until `condition()` holds."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
