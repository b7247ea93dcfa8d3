"""What a step of a file would take on hardware, what limits it, and what to change first.

Each number is measured (counted in a run, or in a benchmark that is named), fitted (the cost that
explains runs best) or assumed (by the user, or of a data sheet), and says which.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path

from tuner.config import RunConfig
from tuner.config.load import checked, read_layers
from tuner.errors import ConfigError
from tuner.planning.answer import Kind, Number, Plan
from tuner.planning.arranging import Asked, arranged, possible
from tuner.planning.fitting import GATEWAY, Fit, extent, fit
from tuner.planning.gpus import (
    FURTHER_TRAINER,
    MEASURED,
    Hardware,
    billions,
    costs_on,
)
from tuner.planning.measured import agent_of, read_measured, runs_in
from tuner.planning.step_model import Costs, Place, Work, changes, predict
from tuner.run.continuation import leaves
from tuner.run.summary import is_run

_COSTS = tuple(one.name for one in fields(Costs))
_WORK = tuple(one.name for one in fields(Work) if one.name != "spread")
_NEEDED = ("calls", "completion", "prompt")
_BEYOND = 1.25
"""From so many times the largest that was fitted on, or as much below the smallest, it is said."""


def plan_file(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    runs: Sequence[Path] = (),
    gpus: str | None = None,
    cores: int | None = None,
    nodes: int = 1,
    assumed: Mapping[str, float] | None = None,
) -> Plan:
    """Seconds of a step of a file.

    Args:
        path: YAML file in Trinity-RFT's form.
        overrides: `a.b=c`, which win over it.
        runs: Run directories, or folders of some; none: the file's own, where it is there.
        gpus: Of each node, as `8xH100`; None: none.
        cores: Of each node; None: this machine's.
        nodes: Machines.
        assumed: Costs and numbers of a rollout that are known otherwise.

    Raises:
        ConfigError: The file or an argument is wrong, or what a rollout comes to is known from
            nowhere.
        TunerError: A run tells nothing.
    """
    layers = read_layers(path, overrides=list(overrides))
    own: list[Path] = []
    if layers.backend == "local":
        config = checked(layers)
        settings = dict(leaves(config.model_dump(mode="json"), lists=True))
        own = [config.run_dir] if is_run(config.run_dir) and not runs else []
    else:  # its keys are checked by `tuner check`
        settings = dict(leaves(RunConfig().model_dump(mode="json"), lists=True))
        settings |= dict(leaves(layers.tree, lists=True))
    if settings.get("mode") not in (None, "both", "explore"):
        raise ConfigError(
            f"{path}: mode is {settings['mode']!r}, and a plan is of steps with rollouts: set both"
        )
    hardware = None if gpus is None else Hardware.of(gpus, nodes)
    several = hardware is not None and hardware.gpus > 1
    asked = Asked(
        settings,
        [read_measured(run) for run in runs_in([*runs, *own])],
        hardware,
        None if cores is None else cores * nodes,
        assumed or {},
        apart=layers.backend == "trinity" or (several and settings["tuner.backend"] != "local"),
    )
    return plan(asked, title=path.name)


def plan(asked: Asked, *, title: str) -> Plan:
    """Seconds of a step, from what was asked."""
    unknown = sorted(set(asked.assumed) - {*_COSTS, *_WORK, "billions"})
    if unknown:
        raise ConfigError(
            f"--assume {unknown[0]}: there is no such number; there are "
            f"{', '.join((*_WORK, *_COSTS, 'billions'))}"
        )
    known = fit(asked.runs) if any(run.unfit is None for run in asked.runs) else None
    numbers: dict[str, Number] = {}
    warnings: list[str] = []
    work = _work(asked, numbers, warnings)
    place = arranged(asked)
    costs = _costs(asked, known, place, numbers, warnings)
    for name, value in asked.assumed.items():
        numbers[name] = Number(name, value, "assumed", "--assume")
        if name in _COSTS:
            costs = replace(costs, **{name: value})
    warnings += _beyond(asked, known, work, place, costs)
    return Plan(
        title=f"{title} on {_where(asked, place)}",
        place=place,
        time=predict(work, costs, place),
        numbers=list(numbers.values()),
        changes=changes(work, costs, place, possible(asked, place))[:5],
        warnings=warnings,
        errors={} if known is None else known.errors(),
    )


def _where(asked: Asked, place: Place) -> str:
    cores = f"{place.cores} core{'s' * (place.cores > 1)}"
    if asked.gpus is None:
        return cores
    return f"{asked.gpus.gpus} x {asked.gpus.gpu}, {cores}"


# What a rollout comes to


def _work(asked: Asked, numbers: dict[str, Number], warnings: list[str]) -> Work:
    agent = agent_of(asked.settings)
    same = [run for run in asked.runs if run.agent == agent]
    given = {name: value for name, value in asked.assumed.items() if name in _WORK}
    lacking = [name for name in _NEEDED if name not in given]
    if not asked.runs and lacking:
        raise ConfigError(
            f"nothing says what a rollout comes to: give a run of this agent with --from, or "
            f"{' '.join(f'--assume {name}=NUMBER' for name in lacking)} (calls of a rollout, "
            "tokens of an answer and of a prompt)"
        )
    if not asked.runs:
        # Each call goes on from the one before, and tasks share nothing.
        first = max(0.0, given["prompt"] - (given["calls"] - 1) * given["completion"] / 2)
        own = given["calls"] * given["completion"]
        base = Work(0, 0, 0, first=first, own=own, depth=given["prompt"])
        source, kind = "of the others: each call goes on from the one before", "assumed"
    else:
        of = same or list(asked.runs)
        base = of[-1].work
        source, kind = of[-1].name, "measured"
        if not same:
            kind = "assumed"
            warnings.append(
                f"no run is of {agent}: what its rollouts come to is assumed to be as in {source}"
            )
    work = replace(base, **given)  # type: ignore[arg-type]  # all but the spread are numbers
    for name in _WORK:
        if getattr(work, name):
            numbers[name] = Number(name, getattr(work, name), kind, source)  # type: ignore[arg-type]
    if base.waits and "waits" not in given:
        warnings.append(
            f"{source}: what its agents do beside the model's calls is taken for waiting; if their "
            "code computes, say --assume waits=0 --assume agent=SECONDS"
        )
    return work


# What each part costs


def _costs(
    asked: Asked, known: Fit | None, place: Place, numbers: dict[str, Number], warnings: list[str]
) -> Costs:
    agent = agent_of(asked.settings)
    here = Costs(gateway=GATEWAY)
    source: dict[str, tuple[Kind, str]] = dict.fromkeys(_COSTS, ("assumed", "nothing is known"))
    source["gateway"] = ("measured", "benchmarks/results/gateway.json, another machine")
    if known is not None:
        here = known.of(agent)
        of = f"{len(known.used)} runs"
        source |= dict.fromkeys(set(_COSTS) - {"gateway"}, ("fitted", of))
        source |= dict.fromkeys(("publish", "rest"), ("measured", of))
        if agent not in known.agents:
            source["agent"] = ("assumed", f"mean of {len(known.agents)} other agents")
            warnings.append(
                f"no fitted run is of {agent}: what its code costs is assumed to be the mean of "
                "the others (--assume agent=SECONDS of CPU for a call)"
            )
    costs = here
    if asked.gpus is not None:
        costs = _on_gpu(asked, here, place, source)
    elif known is None:
        lacking = [name for name in ("step", "trained") if name not in asked.assumed]
        if lacking:
            raise ConfigError(
                "nothing says what an engine and an update cost here: give a run of this machine "
                "with --from (a few steps are enough), name GPUs with --gpus, or "
                f"{' '.join(f'--assume {name}=SECONDS' for name in lacking)}"
            )
    for name in _COSTS:
        if getattr(costs, name):
            numbers[f"{name} (s)"] = Number(f"{name} (s)", getattr(costs, name), *source[name])
    return costs


def _on_gpu(asked: Asked, here: Costs, place: Place, source: dict[str, tuple[Kind, str]]) -> Costs:
    """Costs of a GPU for engine and trainer, and of this machine for agents and gateway."""
    assert asked.gpus is not None
    size = _billions(asked)
    prefix = "explorer.rollout_model.tensor_parallel_size"
    costs = costs_on(
        asked.gpus.gpu,
        size,
        served=not place.in_process,
        tensor_parallel=int(asked.settings.get(prefix) or 1),
    )
    sheet = f"{asked.gpus.gpu}'s data sheet, {size:g}B parameters in bfloat16"
    source |= dict.fromkeys(("step", "sampled", "attended", "prefilled"), ("assumed", sheet))
    source["publish"] = ("assumed", "10 GB/s")
    measured: tuple[Kind, str] = ("fitted", "benchmarks/results/gpu/slice_2.json (H100)")
    scaled: tuple[Kind, str] = ("assumed", f"{measured[1]}, by {sheet}")
    source["update"] = measured
    source["trained"] = measured if asked.gpus.gpu == "H100" else scaled
    if place.in_process:
        of = "benchmarks/results/gpu/slice_3.json (H100, 0.6B)"
        source |= dict.fromkeys(("step", "sampled"), ("fitted", of))
    return replace(
        costs, gateway=here.gateway, agent=here.agent, rollout=here.rollout, rest=here.rest
    )


def _billions(asked: Asked) -> float:
    model = str(asked.settings.get("model.model_path") or "")
    size = asked.assumed.get("billions") or billions(model)
    if size is None:
        raise ConfigError(
            f"neither files nor name of model.model_path {model!r} say how large it is: add "
            "--assume billions=NUMBER (of parameters)"
        )
    return size


def _beyond(asked: Asked, known: Fit | None, work: Work, place: Place, costs: Costs) -> list[str]:
    """What lies outside of what costs were measured in, by name."""
    now: dict[str, float] = extent(work, place)
    ranges = dict(known.ranges) if known is not None and asked.gpus is None else {}
    found = []
    if asked.gpus is not None:
        found.append(
            "on GPUs take the seconds for the least: of the one step of an agent that was measured "
            "(slice_3.json) the model tells 4.0 of 5.5 s of collection and 0.6 of 3.6 s of training"
        )
        ranges = dict(MEASURED)
        now["rollouts at a time"] /= place.engines
        now["billions of parameters"] = _billions(asked)
        if not place.in_process:
            found.append("generation of vLLM and SGLang was not measured on a GPU: data sheets")
        if place.trainers > 1:
            found.append(
                f"training on several GPUs was not measured: each further one is taken for "
                f"{FURTHER_TRAINER:g} of the first"
            )
    if known is not None and asked.gpus is None:
        paths = [run.settings.get("model.model_path") for run in known.runs]
        models = {os.path.basename(str(path)) for path in paths}
        model = os.path.basename(str(asked.settings.get("model.model_path")))
        if model not in models:
            found.append(f"costs are of {', '.join(sorted(models))}, and the file trains {model}")
        if place.workers:
            found.append("the runs had no workers: what their requests cost is not known")
        if place.ahead:
            found.append("the runs took turns: how well both go beside each other is not known")
    for name, (low, high) in ranges.items():
        if not low / _BEYOND <= now[name] <= high * _BEYOND:
            seen = f"{low:.4g} to {high:.4g}" if high > low else f"{low:.4g}"
            found.append(
                f"{name}: {now[name]:.4g} is beyond what costs were measured with ({seen})"
            )
    if work.waits == 0 and costs.agent == 0:
        found.append("agents are taken for costing nothing (--assume agent=SECONDS, waits=SECONDS)")
    return found
