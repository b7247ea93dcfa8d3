"""Where metrics go: console, JSONL, TensorBoard and trackers."""

from tuner.monitors.base import JsonlMonitor, Monitor, open_tracker
from tuner.monitors.console import ConsoleMonitor

__all__ = ["ConsoleMonitor", "JsonlMonitor", "Monitor", "open_tracker"]
