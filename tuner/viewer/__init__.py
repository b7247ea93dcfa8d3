"""Looking at a run: a page that follows it, the same page as a file, traces judged anew."""

from tuner.viewer.reader import RunReader
from tuner.viewer.replay import replay
from tuner.viewer.report import write_report

__all__ = ["RunReader", "replay", "write_report"]
