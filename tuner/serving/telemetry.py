"""What a server says of itself: metrics for Prometheus, and a line of JSON for each request.

Neither holds anything of what was asked or answered, nor a key. Sessions are named by their ids.
"""

from __future__ import annotations

import json
import logging
import sys
import time
import traceback
from collections.abc import Callable
from functools import cache
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tuner.gateway.routes import COUNT_TOKENS, EXCHANGES
from tuner.serving.restoring import Noted
from tuner.serving.serving_store import ServingStore

_KNOWN = {*EXCHANGES, COUNT_TOKENS, "/v1/models"}
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_log = logging.getLogger("tuner.serving.requests")


class Metrics:
    """The numbers of one server.

    Args:
        version: Which weights are serving.
        live: How many sessions are in memory.
    """

    def __init__(self, version: Callable[[], int], live: Callable[[], int]) -> None:
        self._registry = registry = CollectorRegistry()

        def counted(name: str, what: str, *labels: str) -> Counter:
            return Counter(f"tuner_{name}", what, labels, registry=registry)

        def gauge(name: str, what: str, *labels: str) -> Gauge:
            return Gauge(f"tuner_{name}", what, labels, registry=registry)

        self.requests = counted("requests", "Requests, by path and status.", "path", "status")
        self.seconds = Histogram(
            "tuner_request_seconds",
            "Time until an answer, or a stream's beginning, by path.",
            ("path",),
            buckets=_SECONDS,
            registry=registry,
        )
        self.calls = counted("calls", "Calls that were recorded, by kind.", "kind")
        self.tokens = counted("sampled_tokens", "Sampled tokens that were recorded.")
        self.rewards = counted("rewards", "Rewards that were given, to what.", "to")
        self._sessions = gauge("sessions", "Sessions in the store, by state.", "state")
        self._unjudged = gauge("sessions_unjudged", "Sessions in the store without a reward.")
        self._untrained = gauge("sessions_untrained", "Judged ones that no update has trained.")
        self._bytes = gauge("store_bytes", "Size of the store's file.")
        gauge("sessions_in_memory", "Sessions in memory.").set_function(live)
        self._gauge = gauge
        self._of_request = cache(self._labelled)
        gauge("weights_version", "Version of the weights that serve.").set_function(version)

    def learns(self, updates: Callable[[], int], failed: Callable[[], bool]) -> None:
        """Somebody learns beside.

        Args:
            updates: How many were made.
            failed: Whether nothing is learned any more.
        """
        self._gauge("updates", "Updates that were made.").set_function(updates)
        self._gauge("learning_failed", "1 where nothing is learned any more.").set_function(failed)

    def request(self, path: str, status: int, seconds: float) -> None:
        """A request to the gateway has got an answer, or its stream has begun."""
        requests, spent = self._of_request(path if path in _KNOWN else "other", status)
        requests.inc()
        spent.observe(seconds)

    def _labelled(self, path: str, status: int) -> tuple[Counter, Histogram]:
        return self.requests.labels(path, str(status)), self.seconds.labels(path)

    def noted(self, noted: Noted) -> None:
        """Calls were recorded."""
        for call in noted.calls:
            kind = "undelivered" if call.undelivered else "delivered"
            self.calls.labels("redacted" if noted.redacted else kind).inc()
            self.tokens.inc(call.usage.output_tokens)

    def text(self, store: ServingStore) -> tuple[bytes, str]:
        """All of it as Prometheus reads it, and its media type; in any thread that may read."""
        ((ended, unjudged, untrained, total),) = store.ask(
            "SELECT (SELECT COUNT(*) FROM sessions WHERE ended IS NOT NULL), "
            "(SELECT COUNT(*) FROM sessions WHERE NOT judged), "
            "(SELECT COUNT(*) FROM sessions WHERE judged AND trained IS NULL), "
            "(SELECT COUNT(*) FROM sessions)"
        )
        self._sessions.labels("ended").set(ended)
        self._sessions.labels("open").set(total - ended)
        self._unjudged.set(unjudged)
        self._untrained.set(untrained)
        self._bytes.set(store.path.stat().st_size)
        return generate_latest(self._registry), "text/plain; version=0.0.4; charset=utf-8"


def log_request(
    method: str, path: str, status: int, seconds: float, *, session: str | None, who: str
) -> None:
    """Write the line of a request.

    Args:
        seconds: Until the answer, or the beginning of its stream.
        session: Its id, where one is known.
        who: Whose key it came with.
    """
    if _log.isEnabledFor(logging.INFO):
        said = {"method": method, "path": path, "status": status, "ms": round(1000 * seconds, 2)}
        # Made here: a logger looks for who called it, and this is always the same.
        record = logging.LogRecord(_log.name, logging.INFO, __file__, 0, "request", None, None)
        record.__dict__["said"] = {**said, "session": session, "who": who}
        _log.handle(record)


class JsonLines(logging.Formatter):
    """A line of JSON for each record. Of an error its type and its place, and not its words, which
    may repeat what was asked."""

    def format(self, record: logging.LogRecord) -> str:
        said: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + "Z",
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **getattr(record, "said", {}),
        }
        if record.exc_info and record.exc_info[0] is not None:
            said["error"] = record.exc_info[0].__name__
            said["at"] = [
                f"{frame.filename}:{frame.lineno}"
                for frame in traceback.extract_tb(record.exc_info[2])[-5:]
            ]
        return json.dumps(said)


def log_as_json() -> None:
    """Let what `tuner` and its HTTP server log be lines of JSON on the standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    for name in ("tuner", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
    logging.getLogger("tuner").setLevel(logging.INFO)
