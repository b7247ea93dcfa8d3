"""A session of the run's gateway, as a worker has it."""

from __future__ import annotations

import math
import pickle
import time
from collections.abc import Callable, Sequence
from typing import Any

from tuner.engines.base import Generation
from tuner.gateway import RecordedCall
from tuner.gateway.access import Access
from tuner.gateway.credit import Credit, Credits
from tuner.gateway.in_flight import InFlight
from tuner.gateway.model.template import Message
from tuner.gateway.results import Results
from tuner.gateway.service import Door
from tuner.rollout.watchdog import QUIET
from tuner.traces import FunctionResult
from tuner.workers.line import HttpClientDoor, Line, LineDoor
from tuner.workers.messages import Opened


class RemoteSession(Access):
    """What a session is asked and told goes through the line, to the session itself.

    Args:
        line: The line.
        opened: Which session.
    """

    def __init__(self, line: Line, opened: Opened) -> None:
        self._line = line
        self._opened = opened
        self._base_url: str | None = None
        self._credits = _Told(line, opened)
        self.in_flight = _InFlight(self._quiet)
        self.host: Door = LineDoor(line, opened.door, self.in_flight)
        if opened.base_url is not None:
            self.host = HttpClientDoor(opened.base_url, self.in_flight)
        self.id, self.key = opened.id, opened.key
        self.errors: list[Exception] = []
        self.results: Results = _RemoteResults(line, opened)

    def _quiet(self) -> float:
        """Seconds since a call of any client began or ended; only with a port are there others."""
        if self._base_url is None:
            return math.inf
        return float(self._line.ask(self._opened.number, "quiet"))

    @property
    def model_name(self) -> str:
        return self._opened.model_name

    @property
    def max_model_len(self) -> int:
        return self._opened.max_model_len

    @property
    def keeps_calls(self) -> bool:
        return self._opened.keeps_calls

    @property
    def base_url(self) -> str:
        """On the run's machine a port of loopback, which the first use opens."""
        if self._base_url is None:
            known = self._opened.base_url
            self._base_url = known or str(self._line.ask(self._opened.number, "base_url"))
        return self._base_url

    @property
    def other_names(self) -> Sequence[str]:
        """What requests may give as `model` besides its name."""
        found: Sequence[str] = self._line.ask(self._opened.number, "other_names")
        return found

    @other_names.setter
    def other_names(self, names: Sequence[str]) -> None:
        self._line.ask(self._opened.number, "call_also", tuple(names))

    def calls_so_far(self) -> list[RecordedCall]:
        """As the session has them now; waits for that."""
        calls = self._line.ask(self._opened.number, "calls")
        return [RecordedCall(self._credits, call) for call in calls]

    def text_of(self, ids: Sequence[int]) -> str:
        """As the session has it; waits for that."""
        return str(self._line.ask(self._opened.number, "text_of", tuple(ids)))

    def encode(self, prompt: str | Sequence[Message]) -> list[int]:
        """As the session has it; waits for that."""
        found: list[int] = self._line.ask(self._opened.number, "encode", prompt)
        return found

    @property
    def tokenizer(self) -> Any:
        """A copy of the model's."""
        return self._line.ask_once(self._opened, "tokenizer", pickle.loads)

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end a completion."""
        found: frozenset[int] = self._line.ask_once(self._opened, "end_ids")
        return found

    @property
    def version(self) -> int:
        """As the session has it; waits for that."""
        return int(self._line.ask(self._opened.number, "version"))

    async def complete_tokens(
        self, prompt_ids: Sequence[int], **settings: Any
    ) -> tuple[Generation, ...]:
        """As the session does it; in any event loop."""
        with self.in_flight.here():
            found: tuple[Generation, ...] = await self._line.ask_async(
                self._opened.number, "complete_tokens", [*prompt_ids], settings
            )
        return found

    def warn_once(self, setting: str, sentence: str) -> None:
        self._line.tell(self._opened.number, "warn", setting, sentence)

    def seal(self) -> None:
        """Nothing more is said of its calls; the session itself refuses what is asked of it."""
        self._credits.sealed = True


class _InFlight(InFlight):
    """What is being generated, of clients that come by a port as well."""

    def __init__(self, quiet: Callable[[], float]) -> None:
        self._moved = 0.0
        self._quiet = quiet
        super().__init__()

    @property
    def moved(self) -> float:
        """When a call last began or ended; asks the session where that seems to be long ago."""
        now = time.perf_counter()
        if now - self._moved > QUIET / 2:
            self._moved = max(self._moved, now - self._quiet())
        return self._moved

    @moved.setter
    def moved(self, value: float) -> None:
        self._moved = value


class _Told(Credits):
    """What is said of calls here is said to the session as well."""

    def __init__(self, line: Line, opened: Opened) -> None:
        super().__init__(opened.id)
        self._line = line
        self._number = opened.number

    def of(self, call_id: str) -> Credit:
        if call_id not in self._by_call:
            self._by_call[call_id] = _Telling(self._line, self._number, call_id)
        return self._by_call[call_id]


class _Telling(Credit):
    """The credit of one call, of which every change is told."""

    def __init__(self, line: Line, number: int, call_id: str) -> None:
        self.__dict__["_tells"] = line, number, call_id
        self.__dict__.update(vars(Credit()))

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        line, number, call_id = self.__dict__["_tells"]
        line.tell(number, "credit", call_id, name, value)


class _RemoteResults(Results):
    """Results of recorded functions, which the session keeps and gives."""

    def __init__(self, line: Line, opened: Opened) -> None:
        super().__init__(None, lambda: 0)
        self._line = line
        self._opened = opened

    def given(
        self, function: str, arguments: dict[str, Any], occurrence: int
    ) -> FunctionResult | None:
        if not self._opened.scripted:
            return None
        found: FunctionResult | None = self._line.ask(
            self._opened.number, "given", function, arguments, occurrence
        )
        return found

    def keep(self, function: str, arguments: dict[str, Any], occurrence: int, value: Any) -> None:
        # Waits, so that it is known how many calls were committed before.
        self._line.ask(self._opened.number, "keep", function, arguments, occurrence, value)
