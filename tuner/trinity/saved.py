"""A run's `config.yaml`, which was given to Trinity-RFT, as the user's configuration again.

`config.install` puts our workflow, monitor and limits into Trinity-RFT's keys, and notes under
`monitor.monitor_args.tuner` what was there. So the file can be given to `trinity run --config` as
it is, and to `tuner run` and `tune(config_path=...)`, which take it apart first.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

from tuner.trinity.engine import ENGINE_ARGS
from tuner.trinity.tree import lookup, tasksets

NOTE = "monitor.monitor_args.tuner"
WORKFLOW = "tuner.trinity.workflow.TunerWorkflow"
MONITOR = "tuner.trinity.monitor.TunerMonitor"
CALL_REWARDS = "tuner.trinity.advantages.CallRewards"
# Seconds that Trinity-RFT waits for a group beyond what its attempts may take by themselves.
SLACK = 60


def waits_for_all(timeout: float, max_retries: int) -> int:
    """Seconds until every attempt at a rollout has had its time."""
    return math.ceil(timeout * (max_retries + 1)) + SLACK


def restored(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The user's settings of a saved configuration; any other one as it is.

    What has been set over the saved values since, by overrides or in Python, stays.
    """
    own: dict[str, Any] = copy.deepcopy(dict(tree))
    note = lookup(own, NOTE)
    if note is None:
        return own
    monitor, explorer = own["monitor"], own.get("explorer", {})
    del monitor["monitor_args"]["tuner"]
    if monitor.get("monitor_type") == MONITOR:
        monitor["monitor_type"] = list(note["trackers"])
    if lookup(own, "algorithm.advantage_fn") == CALL_REWARDS:
        own["algorithm"]["advantage_fn"] = "step_wise_grpo"
    limits = note["limits"]
    if explorer.get("max_timeout") == waits_for_all(limits["timeout"], limits["max_retries"]):
        explorer["max_timeout"] = limits["timeout"]
    if explorer.get("max_retry_times") == 0:
        explorer["max_retry_times"] = limits["max_retries"]
    policy = explorer.get("rollout_model", {})
    if policy.get("reasoning_parser") is None and note["reasoning_parser"] is not None:
        policy["reasoning_parser"] = note["reasoning_parser"]
    for model in (policy, *(explorer.get("auxiliary_models") or ())):
        for name in ENGINE_ARGS:
            (model.get("extra_engine_args") or {}).pop(name, None)
    section = dict(note["section"])
    inputs = lookup(own, "buffer.explorer_input", {})
    for key in ("default_workflow_type", "default_eval_workflow_type"):
        if inputs.get(key) == WORKFLOW:
            del inputs[key]
    for taskset in tasksets(inputs):
        ours = (taskset.get("workflow_args") or {}).pop("tuner", None)
        if ours is not None:
            section |= {"workflow": ours["workflow"], "judge": ours["judge"]}
    given = {key: value for key, value in (own.get("tuner") or {}).items() if value is not None}
    own["tuner"] = {**section, **given}
    return own
