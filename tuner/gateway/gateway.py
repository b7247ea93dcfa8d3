"""The gateway: finds the session behind a key and answers its requests, in process or over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tuner.engines.base import Engine
from tuner.gateway.chat import chat_completion
from tuner.gateway.errors import RequestError
from tuner.gateway.renderer import ChatRenderer
from tuner.gateway.session import Replay, SamplingDefaults, Session

if TYPE_CHECKING:
    from tuner.gateway.http import HttpDoor

logger = logging.getLogger(__name__)

IDEMPOTENCY_HEADER = "idempotency-key"
_REMEMBERED_KEYS = 100_000  # sealed keys that still get a sentence of their own


@dataclass(frozen=True)
class Reply:
    """An HTTP response with a JSON body, wherever it goes."""

    status: int
    body: bytes


class Gateway:
    """Speaks OpenAI to agents and token ids to one engine, and records calls.

    It belongs to the event loop that it is made in, or that first uses it: the engine is called
    there, also for clients in other threads and loops.

    Args:
        engine: What generates.
        renderer: The model family's chat form.
        model_name: What requests must give as `model`.
    """

    def __init__(self, engine: Engine, renderer: ChatRenderer, *, model_name: str) -> None:
        self.engine = engine
        self.renderer = renderer
        self.model_name = model_name
        self._sessions: dict[str, Session] = {}
        self._ended: OrderedDict[str, RequestError] = OrderedDict()
        self._door: HttpDoor | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        with contextlib.suppress(RuntimeError):
            self._loop = asyncio.get_running_loop()

    def open_session(
        self,
        session_id: str,
        *,
        seed: int = 0,
        recorded: bool = True,
        defaults: SamplingDefaults | None = None,
    ) -> Session:
        """A new session with a key of its own, open until it is sealed.

        Args:
            session_id: A name for people, unique among the caller's; ids of calls depend on it.
            seed: Equal seeds, ids and requests give equal completions on equal weights.
            recorded: Whether its calls are kept.
            defaults: What a request that does not say is sampled with.
        """
        session = Session(
            self,
            session_id,
            seed=seed,
            recorded=recorded,
            defaults=defaults or SamplingDefaults(),
        )
        self._sessions[session.key] = session
        return session

    def forget(self, session: Session) -> None:
        """Take a sealed session's key out of service."""
        self._sessions.pop(session.key, None)
        self._ended[session.key] = session.sealed_error()
        if len(self._ended) > _REMEMBERED_KEYS:
            self._ended.popitem(last=False)

    @property
    def base_url(self) -> str:
        """Where HTTP clients find this gateway; the first use opens the door.

        Raises:
            RuntimeError: The gateway has no event loop yet to serve from.
        """
        if self._door is None:
            from tuner.gateway.http import HttpDoor

            self._door = HttpDoor(self, self._home())
        return self._door.base_url

    async def aclose(self) -> None:
        """Seal every session and close the HTTP door."""
        for session in list(self._sessions.values()):
            session.seal()
        if self._door is not None:
            door, self._door = self._door, None
            await door.aclose()

    async def handle(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> Reply:
        """Answer one request; every door leads here. Never raises, unless it is cancelled.

        Args:
            method: "GET" or "POST".
            path: Below the base URL's host, e.g. "/v1/chat/completions".
            headers: By lower-case name.
            body: The whole body.
        """
        home = self._home()
        if asyncio.get_running_loop() is home:
            return await self._answer(method, path, headers, body)
        future = asyncio.run_coroutine_threadsafe(self._answer(method, path, headers, body), home)
        return await asyncio.wrap_future(future)

    def _home(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            try:
                self._loop = asyncio.get_running_loop()
            except RuntimeError:
                raise RuntimeError(
                    "the gateway was made outside an event loop and has none to serve from: "
                    "make it, or call it first, inside the loop that the engine runs in"
                ) from None
        return self._loop

    async def _answer(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> Reply:
        session: Session | None = None
        try:
            session = self._session(headers)
            if (method, path) == ("POST", "/v1/chat/completions"):
                key = headers.get(IDEMPOTENCY_HEADER)
                if key:
                    return Reply(200, await self._once(session, key, body))
                return Reply(200, await self._complete(session, body))
            if (method, path) == ("GET", "/v1/models"):
                return Reply(200, self._models())
            raise RequestError(
                f"{method} {path} is not served here: this gateway answers "
                "POST /v1/chat/completions and GET /v1/models",
                status=404,
            )
        except RequestError as error:
            return Reply(error.status, error.body())
        except Exception as error:
            logger.exception("a call of session %s failed", session.id if session else None)
            if session is not None:
                session.errors.append(error)
            failure = RequestError(
                f"the call failed inside the engine or the gateway: "
                f"{type(error).__name__}: {error}",
                status=500,
            )
            return Reply(failure.status, failure.body())

    def _session(self, headers: Mapping[str, str]) -> Session:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        session = self._sessions.get(key.strip()) if scheme.lower() == "bearer" else None
        if session is not None:
            return session
        if key.strip() in self._ended:
            raise self._ended[key.strip()]
        raise RequestError(
            "the API key belongs to no open session: use the api_key and base_url of the model "
            "that the workflow was given",
            status=401,
            code="invalid_api_key",
        )

    async def _complete(self, session: Session, body: bytes) -> bytes:
        return await chat_completion(self.engine, self.renderer, self.model_name, session, body)

    async def _once(self, session: Session, key: str, body: bytes) -> bytes:
        """The answer to a request with an idempotency key: sampled once, then replayed."""
        while (known := session.replays.get(key)) is not None:
            if known.request != body:
                raise RequestError(
                    f"the idempotency key {key!r} was used for another request before: send each "
                    "request with a key of its own",
                    param="Idempotency-Key",
                )
            if known.answer is not None:
                return known.answer
            await known.done.wait()  # a retry that overtook the first attempt
        replay = session.replays[key] = Replay(body)
        try:
            replay.answer = await self._complete(session, body)
            return replay.answer
        finally:
            if replay.answer is None:
                session.replays.pop(key, None)
            replay.done.set()

    def _models(self) -> bytes:
        model = {"id": self.model_name, "object": "model", "created": 0, "owned_by": "tuner"}
        return json.dumps({"object": "list", "data": [model]}).encode()
