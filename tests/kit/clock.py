"""Clocks that jump, so that hours of waiting take no time."""

import asyncio
import heapq


def jump(seconds):
    """For whatever waits in the running event loop, so many seconds have gone by."""
    loop = asyncio.get_running_loop()
    before = loop.time
    loop.time = lambda: before() + seconds


class SimulatedLoop(asyncio.SelectorEventLoop):
    """Its clock jumps to the next event."""

    def __init__(self):
        super().__init__()
        self.now = 0.0

    def time(self):
        return self.now

    def _run_once(self):
        if not self._ready:
            while self._scheduled and self._scheduled[0]._cancelled:
                self._scheduled[0]._scheduled = False
                self._timer_cancelled_count -= 1
                heapq.heappop(self._scheduled)
            if not self._scheduled:
                raise AssertionError("everything waits and nothing will ever happen")
            self.now = max(self.now, self._scheduled[0]._when)
        super()._run_once()


def simulate(work):
    """The result of a coroutine, run against the simulated clock."""
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return runner.run(work)
