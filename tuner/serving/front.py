"""What the door of a server leads to: a request by its key to its session, and to the gateway."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import replace

from tuner.gateway import Gateway, Session
from tuner.gateway.request_error import RequestError
from tuner.gateway.routes import EXCHANGES, presented_key, served_path
from tuner.gateway.service import Reply, StreamReply
from tuner.serving.callers import Caller, Keys, Rates, not_allowed, unknown_key
from tuner.serving.exposition import Metrics, log_request
from tuner.serving.routing import LiveSessions

logger = logging.getLogger(__name__)

_GONE = 499  # the client left before there was an answer; nobody gets this
_AFTER_THE_END = 0.05  # seconds until a request of an ended session is refused


class Front:
    """What the door leads to: finds the session of a request, and lets the gateway answer it.

    Args:
        gateway: Where sessions are open.
        live: Finds them.
        keys, rates: Who asks, and how often.
        metrics: What is counted.
        header: In which answers say their session.
        log: Whether each request is logged.
    """

    def __init__(
        self,
        gateway: Gateway,
        live: LiveSessions,
        *,
        keys: Keys,
        rates: Rates,
        metrics: Metrics,
        header: str,
        log: bool,
    ) -> None:
        self._gateway, self._live = gateway, live
        self._keys, self._rates, self._metrics = keys, rates, metrics
        self._header, self._log = header.lower(), log

    async def handle(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> Reply | StreamReply:
        """As `Gateway.handle`, for keys of the store's sessions and applications."""
        begun, who, status = time.perf_counter(), "nobody", _GONE
        session: Session | None = None
        reply: Reply | StreamReply
        try:
            caller = self._keys.caller(headers)
            who = caller.kind
            self._rates.take(caller.key)
            session = await self._session(caller, method, path, headers, body)
            reply = await self._gateway.handle(method, path, _with_key(headers, session), body)
            if session is not self._live.reader:
                said = (*reply.headers, (self._header, session.id))
                reply = replace(reply, headers=said)
            status = reply.status if isinstance(reply, Reply) else 200
        except RequestError as error:
            if error.code == "session_sealed":  # agents that go on regardless, in a loop
                await asyncio.sleep(_AFTER_THE_END)
            reply = self.refusal(path, headers, error)
            status = error.status
        except Exception as error:
            logger.exception("a request failed before it reached its session")
            failed = RequestError(f"the server failed: {type(error).__name__}", status=500)
            reply = self.refusal(path, headers, failed)
            status = reply.status
        finally:
            seconds = time.perf_counter() - begun
            self._metrics.request(served_path(path), status, seconds)
            if self._log:
                of = None if session is None or session is self._live.reader else session.id
                log_request(method, path, status, seconds, session=of, who=who)
        return reply

    def refusal(self, path: str, headers: Mapping[str, str], error: RequestError) -> Reply:
        """As `Gateway.refusal`; the control API's errors are OpenAI's."""
        if not path.startswith("/v1/"):
            return Reply(error.status, error.body())
        reply = self._gateway.refusal(path, headers, error)
        return replace(reply, headers=getattr(error, "headers", ()))

    def check_not_stuck(self, headers: Mapping[str, str]) -> None:
        """As `Gateway.check_not_stuck`: here nobody keeps the event loop."""

    async def _session(
        self, caller: Caller, method: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> Session:
        """The session that a request belongs to; the reader for what belongs to none.

        Counts that an application asks for belong to none: they are without the reasoning that
        `tuner.reasoning = keep` would put back.
        """
        path = served_path(path)
        try:
            if caller.session is not None:
                return await self._live.of_id(caller.session)
            if method != "POST" or path not in EXCHANGES:
                return self._live.reader
            if caller.application is None:
                raise not_allowed("the key of a session or an application: open a session")
            return await self._live.of_application(caller.application, path, headers, body)
        except LookupError:  # it was deleted this moment
            raise unknown_key() from None


def _with_key(headers: Mapping[str, str], session: Session) -> dict[str, str]:
    """Headers with the key that a session has in this process, and the role that was named."""
    _, role = presented_key(headers)
    key = f"{session.key}.{role}" if role else session.key
    return {**headers, "authorization": f"Bearer {key}"}
