"""The servers of an engine, and the weights they have."""

from __future__ import annotations

import logging
import shutil
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tuner.engines.base import EngineError, EngineLostError
from tuner.engines.token_server import TokenServer, Weights

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Seat:
    """One server.

    Attributes:
        up: Whether it serves the fleet's weights, as far as is known.
        load: Requests that it is sampling for.
        sessions: Sessions whose turns go to it.
        lost: Why it is not up any more.
        doubtful: Whether that was a stream that broke off, and it may be as it was.
    """

    server: TokenServer
    up: bool = False
    load: int = 0
    sessions: int = 0
    starts: int = 0
    lost: EngineLostError | None = None
    doubtful: bool = False

    def lose(self, error: EngineLostError, *, doubtful: bool = False) -> None:
        """It died, or its connection did."""
        self.up, self.lost, self.doubtful = False, error, doubtful


class Fleet:
    """Starts servers, gives them weights, and starts those again that died.

    Its methods block, and are called one at a time.

    Args:
        servers: None of them runs yet, or with whatever weights.
        save: Writes the weights as they are now into a folder.
        folder: Where weights are handed over.
        direct: Whether servers that run take new weights from the trainer's memory. A folder is
            then written only for those that are started.
        max_restarts: How often servers that died are started again, in all.

    Attributes:
        weights: What is served; None before the first start.
        restarts: How often one was started again.
        failure: Why nothing can be served any more.
    """

    def __init__(
        self,
        servers: Sequence[TokenServer],
        *,
        save: Callable[[Path], None],
        folder: Path,
        direct: bool,
        max_restarts: int,
    ) -> None:
        self.seats = [Seat(server) for server in servers]
        self.weights: Weights | None = None
        self.restarts = 0
        self.failure: EngineError | None = None
        self._save = save
        self._folder = folder
        self._direct = direct
        self._max_restarts = max_restarts
        self._run = uuid.uuid4().hex[:12]

    def bring_up(self, seat: Seat, version: int) -> None:
        """Start a server that is not up, with the weights that are served.

        Raises:
            EngineLostError: It does not come up; the next call tries again.
            EngineError: It died too often, or cannot have the weights; so will every later call.
        """
        if self.failure is not None:
            raise EngineError(str(self.failure)) from self.failure
        self._look_again(seat)
        if seat.up:
            return
        if not self.can_start:
            label = self._label(version) if self.weights is None else self.weights.label
            self.weights = self._written(label)
        assert self.weights is not None
        if seat.starts:
            self._count_restart(seat)
        seat.starts += 1
        try:
            seat.server.start(self.weights)
        except EngineLostError as error:
            seat.lose(error)
            if seat.starts == 1:
                self.failure = error
            raise
        except EngineError as error:
            self.failure = error
            raise
        seat.up = True

    def _look_again(self, seat: Seat) -> None:
        """Take a server for up that still has what is served. To start it anew would end what
        others are sampling on it, and a few cut connections would be the end of the run."""
        if seat.up or not seat.doubtful or self.weights is None:
            return
        try:
            seat.up = seat.server.serves(self.weights.label)
        except EngineLostError as error:
            seat.lose(error)
        if seat.up:
            _log.warning("%s is as it was: %s", seat.server.name, seat.lost)
        seat.doubtful = False

    def _count_restart(self, seat: Seat) -> None:
        if self.restarts >= self._max_restarts:
            self.failure = EngineError(
                f"{seat.server.name} died after {self.restarts} restarts of the run's servers, and "
                f"tuner.engine.max_restarts is {self._max_restarts}: nothing can be generated any "
                f"more. {seat.lost}"
            )
            raise self.failure from seat.lost
        self.restarts += 1
        _log.warning("starting %s again: %s", seat.server.name, seat.lost)

    def change_weights(self, version: int) -> None:
        """Serve the weights as they are now, everywhere, with nothing computed by others.

        Raises:
            EngineError: A server cannot have them, or died too often.
        """
        for seat in self.seats:
            self._look_again(seat)
        before, label = self.weights, self._label(version)
        self.weights = Weights(None, label) if self._direct else self._written(label)
        for seat in self.seats:
            if seat.up:
                self._tell(seat, partial(seat.server.load, self.weights))
            if not seat.up:
                self.bring_up(seat, version)
        if before is not None:
            self._remove(before)

    def sleep(self) -> None:
        """Let every server that runs give back its memory until the weights change.

        Raises:
            EngineError: One cannot.
        """
        for seat in self.seats:
            if seat.up:
                self._tell(seat, seat.server.sleep)

    def _tell(self, seat: Seat, work: Callable[[], None]) -> None:
        """Have a server do something; one that dies of it is not up any more."""
        try:
            work()
        except EngineLostError as error:
            seat.lose(error)
        except EngineError as error:
            seat.up, self.failure = False, error
            raise

    def stop(self) -> None:
        """End every server, and remove the weights that were handed over."""
        for seat in self.seats:
            seat.up = False
            seat.server.stop()
        if self.weights is not None:
            self._remove(self.weights)
            with suppress(OSError):
                self._folder.rmdir()

    @property
    def can_start(self) -> bool:
        """Whether the weights that are served are there as a folder."""
        return self.weights is not None and self.weights.folder is not None

    def _label(self, version: int) -> str:
        return f"{self._run}-{version}-{uuid.uuid4().hex[:8]}"

    def _remove(self, weights: Weights) -> None:
        if weights.folder is not None:
            shutil.rmtree(weights.folder, ignore_errors=True)

    def _written(self, label: str) -> Weights:
        folder = self._folder / label
        folder.mkdir(parents=True)
        self._save(folder)
        return Weights(folder, label)
