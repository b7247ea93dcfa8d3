"""What can be done before a cluster is touched: functions, data, and Trinity-RFT's own check."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tuner.errors import ConfigError, FunctionError
from tuner.run.directory import free_name
from tuner.trinity import cluster, functions, modes
from tuner.trinity.config import TrinitySettings, checked, install
from tuner.trinity.dataset import put_evaluations, put_recorded, put_tasks
from tuner.trinity.tinker import require_service, uses_tinker

if TYPE_CHECKING:
    from trinity.common.config import Config


@dataclass(frozen=True)
class Prepared:
    """A run that Trinity-RFT accepts.

    Attributes:
        settings: What was asked for.
        tree: The YAML that Trinity-RFT is given.
        config: The same after its own check.
        rows: Rows that are trained on; in mode `train` rows or experiences of the buffer.
        sizes: Rows of each set of tasks that is trained on.
        fingerprint: What tells the rows of each dataset from others, by its name.
        evaluations: Rollouts of each evaluation set.
        own_cluster: Whether the run starts a Ray cluster of its own.
    """

    settings: TrinitySettings
    tree: dict[str, Any]
    config: Config
    rows: int
    sizes: list[int]
    fingerprint: dict[str, str]
    evaluations: dict[str, int]
    own_cluster: bool


def with_own_name(settings: TrinitySettings) -> TrinitySettings:
    """A new run gets a free name beside one of the same name, as on the local backend."""
    if not settings.get("continue_from_checkpoint", True):
        settings.tree["name"] = free_name(settings.run_dir).name
        # Trinity-RFT gives another name to a run whose folder is there, and ours has its data
        # already.
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
) -> Prepared:
    """Pack the functions, put the data where Trinity-RFT reads it, and let it check all.

    Args:
        settings: What `config.resolve` gave; the data's new places are noted there.
        workflow, judge, train_dataset, eval_dataset: As given to `tune()`.
        counted_gpus: Whether the declared GPUs must be here, where the run is to start a cluster.

    Raises:
        ConfigError, DatasetError, FunctionError: As `run_trinity`.
    """
    _check_functions(settings, workflow, judge)
    sent = None if workflow is None else functions.ship(workflow, role="workflow")
    sent_judge = None if judge is None else functions.ship(judge, role="judge")
    rows, sizes = 0, [0]
    fingerprint: dict[str, str] = {}
    if settings.mode in modes.READS_TASKS:
        sizes = put_tasks(settings, train_dataset, fingerprint)
        rows = sum(sizes)
    elif settings.mode == "train":
        rows = put_recorded(settings, train_dataset)
    evaluations = {}
    if settings.mode in modes.ROLLS_OUT:
        evaluations = put_evaluations(settings, eval_dataset, fingerprint)
    tree = install(settings, workflow=sent, judge=sent_judge)
    if counted_gpus:
        tree = cluster.with_sizes(tree, device=settings.tuner.device)
    own = cluster.is_own(tree)
    if own:
        tree["cluster"].pop("ray_address", None)
    if uses_tinker(tree):
        require_service(tree)
    config = checked(tree)
    if settings.mode == "bench" and not modes.checkpoints(config):
        raise ConfigError(
            f"mode is bench, and {settings.run_dir} holds no checkpoint (global_step_*): set "
            "project, name and checkpoint_root_dir to those of a run that saved some, or "
            "explorer.eval_on_startup to true to evaluate the model as it is"
        )
    return Prepared(settings, tree, config, rows, sizes, fingerprint, evaluations, own)


def to_yaml(tree: Mapping[str, Any]) -> str:
    """The configuration as a file that Trinity-RFT and `tuner run` read."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(dict(tree)))


def _check_functions(
    settings: TrinitySettings,
    workflow: Callable[..., Any] | None,
    judge: Callable[..., Any] | None,
) -> None:
    mode = settings.mode
    if mode in modes.ROLLS_OUT and workflow is None:
        raise FunctionError(
            f"there is no workflow, and mode {mode} runs it: pass workflow_func, or set mode to "
            "train (on a buffer that is there) or serve"
        )
    if mode not in modes.ROLLS_OUT and (workflow is not None or judge is not None):
        raise FunctionError(
            f"mode {mode} runs no rollouts, so workflow_func and judge_func have nothing to do: "
            "leave them out"
        )
