"""Progress in a notebook: one output of the cell, which is updated."""

from __future__ import annotations

import time
from html import escape
from typing import Any

from tuner.result import curve

LINES = 200
"""Latest lines that are shown."""
SECONDS = 0.2
"""Between two updates for a rollout that ended."""


class CellOutput:
    """A bar for the run and one for the step's rollouts, the curve of the rewards, and the lines.

    Args:
        total_steps: Length of the run.
    """

    def __init__(self, total_steps: int) -> None:
        from IPython.display import HTML, display

        self._html: Any = HTML
        # IPython has no types.
        self._handle: Any = display(HTML(""), display_id=True)  # type: ignore[no-untyped-call]
        self._total = total_steps
        self._step, self._note = 0, ""
        self._what, self._done, self._count, self._of = "", 0, 0, ""
        self._lines: list[str] = []
        self._rewards: list[float] = []
        self._updated = 0.0

    def say(self, line: str) -> None:
        self._lines.append(line)
        self._update()

    def begin(self, what: str, count: int, *, done: int, note: str, of: str) -> None:
        """Rollouts start; `done` steps are behind us."""
        self._step, self._note = done, note
        self._what, self._done, self._count, self._of = what, 0, count, of
        self._update()

    def rollout_done(self) -> None:
        self._done += 1
        if time.monotonic() - self._updated > SECONDS:
            self._update()

    def step_done(self, step: int, reward: float | None) -> None:
        self._step = step
        if step and reward is not None:
            self._rewards.append(reward)

    def _update(self) -> None:
        bars = f"{_bar(self._step, self._total)} steps {escape(self._note)}"
        if self._count:
            what = escape(f"{self._of}, {self._what}")
            bars += f"<br>{_bar(self._done, self._count)} {what}"
        lines = escape("\n".join(self._lines[-LINES:]))
        scrolled = f"<pre style='max-height:24em;overflow:auto;white-space:pre-wrap'>{lines}</pre>"
        self._handle.update(self._html(f"<div>{bars}</div>{curve(self._rewards)}{scrolled}"))
        self._updated = time.monotonic()


def _bar(done: int, total: int) -> str:
    return f"<progress value='{done}' max='{total}'></progress> {done}/{total}"
