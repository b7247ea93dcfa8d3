"""One choice of a request, from its prompt to its last token."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from tuner.engines.base import Engine, Generation, SamplingParams
from tuner.gateway.conversations import Prompt
from tuner.gateway.script import Given


class Pending:
    """A choice while it is sampled.

    Args:
        prompt: What it follows.
        sampling: Its settings.
        wake: Called at each token, where somebody waits for it.

    Attributes:
        given: What its session's script gives of it, or None.
        tokens: Every token so far, with its log-prob and version.
    """

    def __init__(
        self, prompt: Prompt, sampling: SamplingParams, wake: Callable[[], None] | None
    ) -> None:
        self.prompt = prompt
        self.sampling = sampling
        self.given: Given | None = None
        self.tokens: list[tuple[int, float, int]] = []
        self._closed = False
        self._lock = threading.Lock()  # the engine may push from another thread
        self._wake = wake

    @property
    def replayed(self) -> int:
        """How many of its tokens the script gives."""
        return 0 if self.given is None else len(self.given.generation.completion_ids)

    def push(self, token_id: int, logprob: float, version: int) -> bool:
        """As `TokenSink.push`."""
        with self._lock:
            if self._closed:
                return False
            self.tokens.append((token_id, logprob, version))
        if self._wake is not None:
            self._wake()
        return True

    def close(self) -> None:
        """Take no more tokens."""
        with self._lock:
            self._closed = True

    async def generation(self, engine: Engine, session: str, *, piecewise: bool) -> Generation:
        """What the script gives, and then what the engine samples for the session.

        Args:
            piecewise: Whether somebody reads each token of the script's as it comes.

        Raises:
            As `Engine.generate`.
        """
        if self.given is None:
            return await engine.generate(self.prompt.ids, self.sampling, session, self)
        so_far = self.given.generation
        for token in zip(so_far.completion_ids, so_far.logprobs, so_far.versions, strict=True):
            self.push(*token)
            if piecewise:
                await asyncio.sleep(0)
        if self.given.whole:
            return so_far
        return await engine.generate(self.prompt.ids, self.sampling, session, self, so_far)
