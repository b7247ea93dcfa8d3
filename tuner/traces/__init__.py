"""Traces: what a rollout leaves behind, exactly."""

from tuner.traces.call import Call, Rerendered
from tuner.traces.store import TraceStore, read_traces
from tuner.traces.trace import Outcome, RolloutId, Trace

__all__ = ["Call", "Outcome", "Rerendered", "RolloutId", "Trace", "TraceStore", "read_traces"]
