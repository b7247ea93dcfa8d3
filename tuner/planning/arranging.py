"""What runs where on the hardware that the user describes, and what could be otherwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tuner.errors import ConfigError
from tuner.planning.gpus import Hardware, trainers
from tuner.planning.measured import MeasuredRun, place_of
from tuner.planning.step_model import Place


@dataclass(frozen=True)
class Asked:
    """What a plan is asked for.

    Attributes:
        settings: Effective, by dotted key.
        runs: That are measured.
        gpus: None: as the runs were, without.
        cores: Of all nodes; None: this machine's.
        assumed: Costs and numbers of `Work` that the user gives, by name.
        apart: Whether Trinity-RFT is the backend, or with several GPUs would be.
    """

    settings: Mapping[str, Any]
    runs: Sequence[MeasuredRun]
    gpus: Hardware | None = None
    cores: int | None = None
    assumed: Mapping[str, float] = field(default_factory=dict)
    apart: bool = False


def arranged(asked: Asked) -> Place:
    place = place_of(asked.settings, cores=asked.cores)
    if asked.gpus is None:
        return place
    prefix = "explorer.rollout_model"
    kind = asked.settings.get(f"{prefix}.engine_type") or "auto"
    parallel = int(asked.settings.get(f"{prefix}.tensor_parallel_size") or 1)
    if asked.gpus.gpus == 1:
        served = kind in ("vllm", "sglang")
        return replace(place, in_process=not served, engines=1, shared="device")
    left = asked.gpus.gpus - place.engines * parallel
    if left < 1:
        raise ConfigError(
            f"{prefix}.engine_num {place.engines} x tensor_parallel_size {parallel} take all "
            f"{asked.gpus.gpus} GPUs and leave none to train: lower them, or name more with --gpus"
        )
    place = replace(place, in_process=False, shared="apart")
    if not asked.apart:
        return place  # which trains on one GPU
    running = place.running * place.engines  # for each of them
    runners = min(running, place.cores)
    return replace(
        place, running=running, workers=runners, gateways=runners, trainers=trainers(left)
    )


def possible(asked: Asked, place: Place) -> list[tuple[str, dict[str, object]]]:
    """What could be set otherwise or bought."""
    found: list[tuple[str, dict[str, object]]] = []
    if not place.workers and place.cores > 1:
        found.append((f"tuner.workers: {place.cores}", {"workers": place.cores}))
    if not place.ahead:
        found.append(("synchronizer.sync_offset: 1", {"ahead": 1}))
    if place.running < place.rollouts * (place.ahead + 1):
        per = place.engines if place.gateways > 1 else 1
        settings = {"running": 2 * place.running, "slots": 2 * place.slots}
        more = f"explorer.runner_per_model: {2 * place.running // per}"
        found.append((f"{more}, tuner.max_slots: {2 * place.slots}", dict(settings)))
    elif place.slots < place.running / place.engines:
        found.append((f"tuner.max_slots: {2 * place.slots}", {"slots": 2 * place.slots}))
    doubled: dict[str, object] = {"cores": 2 * place.cores}
    if place.gateways > 1:
        runners = min(place.running, 2 * place.cores)
        doubled |= {"workers": runners, "gateways": runners}
    elif place.workers:
        doubled["workers"] = max(place.workers, 2 * place.cores)
    found.append((f"{2 * place.cores} cores", doubled))
    return found + (_of_gpus(asked, place) if asked.gpus is not None else [])


def _of_gpus(asked: Asked, place: Place) -> list[tuple[str, dict[str, object]]]:
    assert asked.gpus is not None
    key = "explorer.rollout_model.tensor_parallel_size"
    parallel = int(asked.settings.get(key) or 1)
    name, number = "explorer.rollout_model.engine_num", place.engines
    if asked.gpus.gpus == 1:
        return [("a second GPU, for the engine alone", {"shared": "apart"})]
    left = asked.gpus.gpus - number * parallel
    found: list[tuple[str, dict[str, object]]] = [
        (f"{parallel} more GPUs, {name}: {number + 1}", {"engines": number + 1}),
    ]
    if not asked.apart:
        return found
    found.append(("one more GPU, which trains", {"trainers": trainers(left + 1)}))
    if left > parallel:
        moved: dict[str, object] = {"engines": number + 1, "trainers": trainers(left - parallel)}
        found.append((f"{name}: {number + 1}, of the same GPUs", moved))
    if number > 1:
        moved = {"engines": number - 1, "trainers": trainers(left + parallel)}
        found.append((f"{name}: {number - 1}, so that more of the same GPUs train", moved))
    return found
