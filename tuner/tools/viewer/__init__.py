"""View a run: a page that follows it, and the same page as a file."""

from tuner.tools.viewer.page import RunReader, write_report

__all__ = ["RunReader", "write_report"]
