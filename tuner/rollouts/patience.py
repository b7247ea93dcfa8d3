"""Requests to remote APIs that obey rate limits, shared by all rollouts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import nullcontext
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import openai

TRIES = 10
"""Maximum number of attempts while the API answers that there are too many requests."""
_FIRST, _LONGEST = 0.5, 60.0
"""Seconds to wait if the API does not say; doubled with each answer."""


class PatientClient(openai.DefaultAsyncHttpxClient):
    """Limits the requests in flight, and obeys `retry-after`.

    One client serves all rollouts of a run. When one request is told to wait (429, or 503 with
    `retry-after`), all wait until then; that request is sent again, at most `TRIES` times.

    Args:
        max_concurrent: Maximum number of requests in flight; None: any number.
        options: For the client of the library that openai uses, httpx or httpx2.
    """

    def __init__(self, *, max_concurrent: int | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._slots = None if max_concurrent is None else asyncio.Semaphore(max_concurrent)
        self._not_before = 0.0

    async def send(self, request: Any, **options: Any) -> Any:
        """Waiting here counts in no time limit except the rollout's own."""
        async with self._slots or nullcontext():
            for number in range(1, TRIES + 1):
                # Others may have been told to wait longer meanwhile.
                while (left := self._not_before - time.monotonic()) > 0:  # noqa: ASYNC110  # a time, no event
                    await asyncio.sleep(left)
                response = await super().send(request, **options)
                wait = _asked_to_wait(response, number)
                if wait is None:
                    break
                self._not_before = max(self._not_before, time.monotonic() + wait)
                if number == TRIES:
                    # openai's client would send it all over again.
                    response.headers["x-should-retry"] = "false"
                    break
                await response.aclose()
            return response


def _asked_to_wait(response: Any, number: int) -> float | None:
    """Seconds until the request may be sent again, or None if the answer is not about that."""
    asked = _retry_after(response.headers)
    if response.status_code == 429 or (response.status_code == 503 and asked is not None):
        return min(_LONGEST, _FIRST * 2 ** (number - 1)) if asked is None else asked
    return None


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """The header's seconds, from milliseconds, seconds or a date; None if there is none."""
    try:
        if "retry-after-ms" in headers:
            return max(0.0, float(headers["retry-after-ms"]) / 1000)
        return max(0.0, float(headers["retry-after"]))
    except KeyError:
        return None
    except ValueError:
        pass
    try:
        when = parsedate_to_datetime(headers["retry-after"])
    except ValueError:
        return None
    return max(0.0, (when - datetime.now(UTC)).total_seconds())
