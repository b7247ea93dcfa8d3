"""Plugins that Trinity-RFT loads by name, except the workflow: a monitor and an advantage
function."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import torch
from trinity.algorithm.advantage_fn.multi_step_grpo_advantage import StepWiseGRPOAdvantageFn
from trinity.utils.monitor import MONITOR, Monitor

from tuner.config.algorithms import GRPOAdvantage
from tuner.config.source import MASK, concealed
from tuner.training.advantages import call_normalized
from tuner.training.batch import peer_sets
from tuner.trinity.progress import report_file
from tuner.trinity.stage import SERVE_KEY, KeyGuard

if TYPE_CHECKING:
    from trinity.common.experience import Experience


class TunerMonitor(Monitor):  # type: ignore[misc]  # untyped
    """A Trinity-RFT monitor; each of its processes (`role`) creates one.

    Writes `tuner/<role>.jsonl`, a line per report, and passes everything on to the trackers named
    in `monitor.monitor_args.tuner.trackers`. In mode `serve` it is also our way into the server's
    process before it listens, to add the check of the key.
    """

    def __init__(self, project: str, group: str, name: str, role: str, config: Any = None) -> None:
        ours = config.monitor.monitor_args["tuner"]
        folder = Path(config.checkpoint_job_dir) / ours["folder"]
        self._path = report_file(folder, role)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        sent = _without_secrets(config)
        self._trackers = [
            MONITOR.get(kind)(project=project, group=group, name=name, role=role, config=sent)
            for kind in ours["trackers"]
        ]
        if config.mode == "serve" and (key := os.environ.get(SERVE_KEY)):
            from trinity.explorer.proxy.app import app

            app.add_middleware(KeyGuard, key=key)

    def log(self, data: Mapping[str, Any], step: int, commit: bool = False) -> None:
        row = {"step": step, **{name: float(value) for name, value in data.items()}}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        for tracker in self._trackers:
            tracker.log(dict(data), step, commit)

    def log_table(self, table_name: str, experiences_table: Any, step: int) -> None:
        for tracker in self._trackers:
            tracker.log_table(table_name, experiences_table, step)

    def close(self) -> None:
        for tracker in getattr(self, "_trackers", ()):
            tracker.close()


def _without_secrets(config: Any) -> Any:
    """The configuration for trackers; their own secrets go into their variables."""
    args = dict(config.monitor.monitor_args)
    if found := _USERINFO.fullmatch(str(args.get("uri", ""))):
        args["uri"] = found["scheme"] + found["rest"]
        args |= {"username": unquote(found["user"]), "password": unquote(found["password"])}
    for name, variable in _VARIABLES.items():
        if args.get(name):
            os.environ[variable] = str(args[name])
    sent = concealed(config, {})
    shown = concealed(args, {}, "monitor.monitor_args")
    sent.monitor.monitor_args = {key: item for key, item in shown.items() if item != MASK}
    return sent


_USERINFO = re.compile(r"(?P<scheme>.+://)(?P<user>[^/@:]*):(?P<password>[^/@]+)@(?P<rest>.*)")
_VARIABLES = {"api_key": "WANDB_API_KEY", "password": "MLFLOW_TRACKING_PASSWORD"}


@dataclass(frozen=True)
class _Rewarded:
    """A call with its own reward, in its experience."""

    experience: Experience
    start: int
    stop: int
    reward: float
    role: str | None

    @property
    def peers(self) -> tuple[Any, str | None]:
        """The calls it is compared with."""
        return self.experience.eid.tid, self.role

    def mask(self) -> Any:
        """The call's trained tokens, shape [response]."""
        inside = torch.zeros_like(self.experience.action_mask, dtype=torch.bool)
        inside[self.start : self.stop] = True
        return inside & self.experience.action_mask.bool()


class CallRewards(StepWiseGRPOAdvantageFn):  # type: ignore[misc]  # untyped
    """Trinity-RFT's `step_wise_grpo`, with rewards of single calls like on the local backend;
    named in `advantage_fn`.

    A rollout's reward is compared inside its group by Trinity-RFT's own function. A call with its
    own reward is compared instead with the calls of its group that have the same role
    (`tuner.training.advantages.call_normalized`); if fewer than two rollouts have such calls, there
    is nothing to compare with, and its tokens leave the mask.
    """

    def process(self, exps: list[Experience]) -> tuple[list[Experience], dict[str, Any]]:
        """Like Trinity-RFT's; experiences without rewards of calls are returned as it returns
        them."""
        rewarded = [
            _Rewarded(one, *call) for one in exps for call in one.info.get("call_rewards", ())
        ]
        found, metrics = super().process(exps)
        kept = {id(experience) for experience in found}
        # A group dropped because of its rollouts' rewards still has those of its calls.
        left = [call for call in rewarded if id(call.experience) not in kept]
        for experience in {id(call.experience): call.experience for call in left}.values():
            own = [call.mask() for call in left if call.experience is experience]
            experience.action_mask = torch.stack(own).any(0)
            experience.advantages = torch.zeros_like(experience.logprobs)
            found.append(experience)
        return found, metrics | self._compare(rewarded)

    def _compare(self, rewarded: Sequence[_Rewarded]) -> dict[str, float]:
        sets = peer_sets((call.peers, call.experience.eid.rid) for call in rewarded)
        compared = [call for call in rewarded if call.peers in sets]
        for call in rewarded:
            if call.peers not in sets:
                call.experience.action_mask &= ~call.mask()
        if compared:
            made_by = [call.experience.eid.rid for call in compared]
            rollouts = list(dict.fromkeys(made_by))
            advantages = call_normalized(
                torch.tensor([call.reward for call in compared], dtype=torch.float64),
                torch.tensor([rollouts.index(rollout) for rollout in made_by]),
                torch.tensor([sets[call.peers] for call in compared]),
                GRPOAdvantage(epsilon=self.epsilon, std_cal_level=self.std_cal_level),
            )
            for call, advantage in zip(compared, advantages.tolist(), strict=True):
                call.experience.advantages[call.mask()] = advantage
                call.experience.returns = call.experience.advantages.clone()
        return {
            "calls_with_rewards": float(len(compared)),
            "calls_without_peer": len(rewarded) - len(compared),
        }
