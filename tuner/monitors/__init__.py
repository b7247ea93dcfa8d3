"""Where metrics go: console, JSONL, TensorBoard and trackers; and the timeline."""

from tuner.monitors.base import JsonlMonitor, Monitor, open_tracker
from tuner.monitors.console import ConsoleMonitor
from tuner.monitors.timeline import Timeline

__all__ = ["ConsoleMonitor", "JsonlMonitor", "Monitor", "Timeline", "open_tracker"]
