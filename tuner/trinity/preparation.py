"""Everything that can be done without a cluster, for a run and for `tuner check`.

The check needs neither a GPU nor Ray, and writes into a temporary folder. A rejection, by us or by
Trinity-RFT's own check, is the same error that would have ended the run.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.config.load import read_layers
from tuner.config.source import as_yaml, concealed, lookup
from tuner.errors import ConfigError, FunctionError
from tuner.rollouts.worker_pool import require_answer
from tuner.runs.directory import free_name
from tuner.runs.result import Verdict
from tuner.tasks.functions import judges_groups, where
from tuner.tasks.loading import PICKLE, ship
from tuner.tasks.settings import location, settings_of
from tuner.trinity.datafiles import put_evaluations, put_recorded, put_tasks
from tuner.trinity.handover import TrinitySettings, checked, install, resolve
from tuner.trinity.installed import SERVICE, require_service, tasksets, uses_tinker
from tuner.trinity.nodes import MachineRequirements, alive, lacking, needed, placed, require_alike
from tuner.trinity.stage import (
    READS_TASKS,
    ROLLS_OUT,
    checkpoints,
    planned_steps,
    recorded_steps,
)
from tuner.trinity.workers import is_own, joined, with_sizes

if TYPE_CHECKING:
    from trinity.common.config import Config


@dataclass(frozen=True)
class PreparedRun:
    """A run that Trinity-RFT accepts.

    Attributes:
        settings: The user's settings.
        tree: The YAML for Trinity-RFT.
        config: The same after its own check.
        rows: Number of training rows; in mode `train` rows or experiences of the buffer.
        sizes: Rows of each training set.
        fingerprint: Fingerprint of each dataset's rows, by name.
        evaluations: Rollouts of each evaluation set.
        own_cluster: Whether the run starts its own Ray cluster.
        functions: Names of the user's functions, from `workers.ship`, by role.
    """

    settings: TrinitySettings
    tree: dict[str, Any]
    config: Config
    rows: int
    sizes: list[int]
    fingerprint: dict[str, str]
    evaluations: dict[str, int]
    own_cluster: bool
    functions: Mapping[str, str | None] = field(default_factory=dict)

    @property
    def needed(self) -> MachineRequirements:
        """Requirements for every machine of a cluster."""
        shared = Path(self.config.checkpoint_job_dir)
        return needed(self.config, shared=shared, functions=self.functions)


def with_own_name(settings: TrinitySettings) -> TrinitySettings:
    """Give a new run a free name if the name is taken, like on the local backend."""
    if not settings.get("continue_from_checkpoint", True):
        settings.tree["name"] = free_name(settings.run_dir).name
        # Trinity-RFT renames a run whose folder exists, and our data is already in that folder.
        settings.tree["continue_from_checkpoint"] = True
    return settings


def prepare(
    settings: TrinitySettings,
    *,
    workflow: Callable[..., Any] | None,
    judge: Callable[..., Any] | None,
    train_dataset: Any,
    eval_dataset: Any,
    counted_gpus: bool = True,
) -> PreparedRun:
    """Pack the functions, write the data for Trinity-RFT, and run its check.

    Args:
        settings: From `handover.resolve`; gets the data's new paths.
        workflow, judge, train_dataset, eval_dataset: Those given to `tune()`.
        counted_gpus: Whether the declared GPUs must exist here, if the run is to start a cluster.
    """
    _check_functions(settings, workflow, judge)
    sent = None if workflow is None else ship(workflow, role="workflow")
    sent_judge = None if judge is None else ship(judge, role="judge")
    rows, sizes = 0, [0]
    fingerprint: dict[str, str] = {}
    if settings.mode in READS_TASKS:
        sizes = put_tasks(settings, train_dataset, fingerprint)
        rows = sum(sizes)
    elif settings.mode == "train":
        rows = put_recorded(settings, train_dataset)
    evaluations = {}
    if settings.mode in ROLLS_OUT:
        evaluations = put_evaluations(settings, eval_dataset, fingerprint)
    tree = install(settings, workflow=sent, judge=sent_judge)
    if counted_gpus:
        tree = with_sizes(tree, device=settings.tuner.device)
    own = is_own(tree)
    if own:
        tree["cluster"].pop("ray_address", None)
    if uses_tinker(tree):
        require_service(tree)
    config = checked(tree)
    if settings.mode == "bench" and not checkpoints(config):
        raise ConfigError(
            f"mode is bench, but {settings.run_dir} has no checkpoint (global_step_*): set "
            "project, name and checkpoint_root_dir to those of a run that saved some, or "
            "explorer.eval_on_startup to true to evaluate the untrained model"
        )
    functions = {"workflow": sent, "judge": sent_judge}
    return PreparedRun(
        settings, tree, config, rows, sizes, fingerprint, evaluations, own, functions
    )


def to_yaml(tree: Mapping[str, Any], references: Mapping[str, str]) -> str:
    """The configuration as a file for Trinity-RFT and `tuner run`, without secrets."""
    return as_yaml(concealed(tree, references))


def _check_functions(
    settings: TrinitySettings,
    workflow: Callable[..., Any] | None,
    judge: Callable[..., Any] | None,
) -> None:
    mode = settings.mode
    if mode in ROLLS_OUT and workflow is None:
        raise FunctionError(
            f"there is no workflow, but mode {mode} runs it: pass workflow_func, or set mode to "
            "train (on an existing buffer) or serve"
        )
    if mode not in ROLLS_OUT and (workflow is not None or judge is not None):
        raise FunctionError(
            f"mode {mode} runs no rollouts, so workflow_func and judge_func have no effect: "
            "remove them"
        )
    split = lookup(settings.tree, "explorer.max_repeat_times_per_runner")
    if split and judge is not None and judges_groups(judge):
        raise FunctionError(
            f"explorer.max_repeat_times_per_runner is {split}, which splits groups, but the "
            "judge needs whole groups: remove it, or judge each `response`"
        )


def check_trinity(
    path: str | Path | None,
    overrides: Sequence[str] = (),
    *,
    workflow: Callable[..., Any] | None,
    judge: Callable[..., Any] | None,
    train_dataset: Any = None,
    eval_dataset: Any = None,
) -> Verdict:
    """Check a configuration like a run would.

    Args:
        path: Its file; None for the defaults.
        overrides: `key=value` strings.
        workflow, judge, train_dataset, eval_dataset: Those given to `tune()`.
    """
    given = None
    if train_dataset is not None or eval_dataset is not None:
        given = settings_of(None, None, train_dataset, eval_dataset=eval_dataset, config_path=path)
    train = None if train_dataset is None else location(train_dataset)
    settings = resolve(read_layers(path, given, overrides, backend="trinity", train=train))
    missing = None  # the needs of a cluster that the run starts
    try:
        with_sizes(settings.tree, device=settings.tuner.device)
    except ConfigError as error:
        if not lookup(settings.tree, "cluster.gpu_per_node"):
            raise
        missing = f"NOT READY on this machine: {error}"
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        # Trinity-RFT logs what it fills in, and raises what it rejects.
        stack.callback(logging.disable, logging.root.manager.disable)
        logging.disable(logging.CRITICAL)
        prepared = prepare(
            _elsewhere(settings, Path(folder)),
            workflow=workflow,
            judge=judge,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            counted_gpus=not missing,
        )
        asked = [] if prepared.own_cluster else list(_asked(settings, prepared))
        missing = missing or next((line for line in asked if line.startswith("NOT READY")), None)
        sections = [
            _inputs(settings, prepared, workflow, judge),
            _plan(settings, prepared),
            [line for line in asked if line != missing],
            [
                "Trinity-RFT's own check accepts this configuration.",
                missing or ("READY." if prepared.own_cluster or len(asked) > 1 else _NOT_ASKED),
            ],
        ]
        return Verdict.of(missing is None, sections)


_NOT_ASKED = "READY, if the cluster is there."


def _asked(settings: TrinitySettings, prepared: PreparedRun) -> Iterator[str]:
    """The state of an existing cluster; one line if it cannot be reached from here."""
    config, address = prepared.config, str(prepared.tree["cluster"]["ray_address"])
    try:
        require_answer(address)
        with joined(address, gpus=0, namespace=config.ray_namespace, env={}):
            yield "ON THE CLUSTER"
            nodes = alive()
            yield from (f"  {line}" for line in placed(config, nodes))
            if (few := lacking(config, nodes)) is not None:
                yield f"NOT READY: {few}"
            # A check does not create the run directory, so its parent is checked.
            with tempfile.TemporaryDirectory(
                prefix=".tuner-check-", dir=_there_already(settings.run_dir)
            ) as folder:
                require_alike(replace(prepared.needed, shared=Path(folder)), nodes)
    except (ConfigError, FunctionError) as error:
        if "where no Ray cluster can be joined" in str(error):
            yield f"The cluster was not asked: {error}"
        else:
            yield f"NOT READY: {error}"


def _there_already(folder: Path) -> Path:
    return next(place for place in (folder, *folder.parents) if place.is_dir())


def _elsewhere(settings: TrinitySettings, folder: Path) -> TrinitySettings:
    """The settings with a temporary run folder, with the files of the real one that a benchmark
    needs."""
    tree = copy.deepcopy(settings.tree)
    tree["checkpoint_root_dir"] = str(folder)
    if not lookup(tree, "cluster.node_num"):
        tree.setdefault("cluster", {})["node_num"] = 1
    moved = replace(settings, tree=tree)
    for checkpoint in settings.run_dir.glob("global_step_*/"):
        (moved.run_dir / checkpoint.name).mkdir(parents=True)
    return moved


def _inputs(
    settings: TrinitySettings,
    prepared: PreparedRun,
    workflow: Callable[..., Any] | None,
    judge: Callable[..., Any] | None,
) -> Iterator[str]:
    config = prepared.config
    yield "SETTINGS"
    yield f"  mode           {config.mode}"
    yield f"  run directory  {settings.results_dir}"
    sent: dict[str, Any] = next(
        (
            taskset["workflow_args"]["tuner"]
            for taskset in tasksets(lookup(prepared.tree, "buffer.explorer_input", {}))
        ),
        {},
    )
    for role, function in (("workflow", workflow), ("judge", judge)):
        if function is not None:
            yield f"  {role:<13}  {where(function)}, {_travels(sent[role])}"
    rows = [f"{name}: {count}" for name, count in prepared.evaluations.items()]
    if prepared.rows:
        rows.insert(0, f"train: {prepared.rows}")
    yield f"  rows           {', '.join(rows) or 'none'}"
    yield f"  model          {config.model.model_path}, context {config.model.max_model_len}"
    sizes = config.cluster
    address = "one of its own" if prepared.own_cluster else sizes.ray_address
    if (tinker := config.model.tinker).enable:
        yield f"  cluster        {address}, without GPUs"
        yield (
            f"  Tinker         samples and trains an adapter of rank {tinker.rank}, at "
            f"{tinker.base_url or SERVICE}"
        )
    else:
        yield (
            f"  cluster        {address}: {sizes.node_num} x {sizes.gpu_per_node} GPUs, "
            f"{sizes.rollout_gpu_num} for rollouts, {sizes.auxiliary_model_gpu_num} for auxiliary "
            f"models, {sizes.trainer_gpu_num or 0} for training"
        )
    yield (
        f"  weights        every {config.synchronizer.sync_interval} steps by "
        f"{config.synchronizer.sync_method.value}, {config.synchronizer.sync_style.value}"
    )


def _travels(text: str) -> str:
    if text.startswith(PICKLE):
        return f"sent by value ({len(text) * 3 // 4 / 1024:.0f} KiB)"
    return "found by its import path on the workers"


def _plan(settings: TrinitySettings, prepared: PreparedRun) -> Iterator[str]:
    config = prepared.config
    buffer, group = config.buffer, config.algorithm.repeat_times
    yield "WHAT WOULD HAPPEN"
    if config.mode in READS_TASKS:
        steps = planned_steps(config, prepared.rows, buffer.batch_size)
        yield (
            f"  {steps} steps x {buffer.batch_size} tasks x {group} rollouts = "
            f"{steps * buffer.batch_size * group} rollouts"
        )
    if config.mode in ("both", "colocate", "train"):
        algorithm = config.algorithm
        yield (
            f"  {algorithm.algorithm_type}, lr {algorithm.optimizer.lr:g}, "
            f"{buffer.train_batch_size} experiences in a step"
        )
    if config.mode == "train":
        yield f"  {recorded_steps(config, prepared.rows)} steps"
    if config.mode == "bench":
        saved = checkpoints(config)
        total = sum(prepared.evaluations.values()) * len(saved)
        names = ", ".join(map(str, saved))
        yield f"  {total} rollouts: every evaluation set with the checkpoints {names}"
    if config.mode == "serve":
        listens = f"{config.explorer.listen_address}:{config.explorer.proxy_port}"
        yield f"  a server on {listens} until it is asked to stop"
    for name in settings.trackers:
        yield f"  metrics to {name} and metrics.jsonl"
