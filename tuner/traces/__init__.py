"""Traces: exact records of rollouts, and the token tree over a batch of them."""

from tuner.traces.branches import Branch, BranchCause, branches, successors
from tuner.traces.call import Call, Dialect, ReasoningPolicy, Rerendered, Usage
from tuner.traces.store import TraceStore, read_traces
from tuner.traces.trace import (
    FunctionResult,
    Origin,
    Outcome,
    RolloutId,
    Trace,
    untrainable,
    without_vote,
)
from tuner.traces.tree import TokenTree, TreeRow

__all__ = [
    "Branch",
    "BranchCause",
    "Call",
    "Dialect",
    "FunctionResult",
    "Origin",
    "Outcome",
    "ReasoningPolicy",
    "Rerendered",
    "RolloutId",
    "TokenTree",
    "Trace",
    "TraceStore",
    "TreeRow",
    "Usage",
    "branches",
    "read_traces",
    "successors",
    "untrainable",
    "without_vote",
]
