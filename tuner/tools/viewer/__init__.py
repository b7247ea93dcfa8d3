"""Looking at a run: a page that follows it, the same page as a file, traces judged anew."""

from tuner.tools.viewer.page import RunReader, write_report
from tuner.tools.viewer.replay import replay

__all__ = ["RunReader", "replay", "write_report"]
