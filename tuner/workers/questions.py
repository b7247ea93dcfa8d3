"""What a worker may ask a session of the run's gateway, or tell it."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from tuner.gateway import Session


class _Pickled:
    """Arrives as what it was made of, which is pickled once for all workers."""

    def __init__(self, value: Any) -> None:
        self._data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)

    def __reduce__(self) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
        return pickle.loads, (self._data,)


_pickled: WeakKeyDictionary[Any, _Pickled] = WeakKeyDictionary()


def _tokenizer(session: Session) -> _Pickled:
    tokenizer = session.tokenizer
    if tokenizer not in _pickled:
        _pickled[tokenizer] = _Pickled(tokenizer)
    return _pickled[tokenizer]


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
    "complete_tokens": lambda session, ids, more: session.complete_tokens(ids, **more),
    "warn": lambda session, *said: session.warn_once(*said),
    "given": lambda session, *of: session.results.given(*of),
    "keep": lambda session, *of: session.results.keep(*of),
}
"""By its name; an awaitable is awaited for the worker."""
