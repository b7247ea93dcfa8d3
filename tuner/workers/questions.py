"""What a worker may ask a session of the run's gateway, or tell it."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from tuner.engines.base import Generation
from tuner.gateway import Session

_pickled: WeakKeyDictionary[Any, bytes] = WeakKeyDictionary()


def _tokenizer(session: Session) -> bytes:
    """Pickled once for all workers, and read where somebody waits for it and hears of an error."""
    tokenizer = session.tokenizer
    if tokenizer not in _pickled:
        _pickled[tokenizer] = pickle.dumps(tokenizer, pickle.HIGHEST_PROTOCOL)
    return _pickled[tokenizer]


async def _complete_tokens(
    session: Session, prompt_ids: list[int], settings: dict[str, Any]
) -> tuple[Generation, ...]:
    return await session.complete_tokens(prompt_ids, **settings)


ASKED: Mapping[str, Callable[..., Any]] = {
    "base_url": lambda session: session.base_url,
    "quiet": lambda session: time.perf_counter() - session.in_flight.moved,
    "other_names": lambda session: session.other_names,
    "call_also": lambda session, names: setattr(session, "other_names", names),
    "calls": lambda session: [one.call for one in session.calls_so_far()],
    "credit": lambda session, *said: session.recording.credit(*said),
    "text_of": lambda session, ids: session.text_of(ids),
    "encode": lambda session, prompt: session.encode(prompt),
    "tokenizer": _tokenizer,
    "end_ids": lambda session: session.end_ids,
    "version": lambda session: session.version,
    "complete_tokens": _complete_tokens,
    "warn": lambda session, *said: session.warn_once(*said),
    "given": lambda session, *of: session.results.given(*of),
    "keep": lambda session, *of: session.results.keep(*of),
}
"""By its name; what an async function gives is awaited for the worker."""
