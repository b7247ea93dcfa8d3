"""Which backend a configuration asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from tuner.config.load import read_layers

Backend = Literal["local", "trinity"]
# Trinity-RFT's algorithms that train on recorded data, and make no rollouts.
RECORDED = ("sft", "cpt", "dpo")


def chosen_backend(
    path: Path | str | None,
    settings: Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
) -> Backend:
    """`tuner.backend`; `auto` is trinity where more than one GPU or node is declared, or Tinker.

    Takes what `load_config` does, and leaves every other problem to whoever reads the rest.

    Raises:
        ConfigError: The file cannot be read.
    """
    tree = read_layers(path, settings, overrides, one_total_steps=False).tree
    if _was_given_to_trinity(tree):
        return "trinity"
    section = tree.get("tuner")
    backend = section.get("backend") if isinstance(section, Mapping) else None
    if backend == "trinity":
        return "trinity"
    if backend in (None, "auto") and (
        _declared_gpus(tree.get("cluster")) > 1 or _asks_for_tinker(tree.get("model"))
    ):
        return "trinity"
    return "local"


def trinity_mode(
    path: Path | str | None,
    settings: Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
) -> str:
    """`mode` of a configuration for Trinity-RFT; not set: what its algorithm needs.

    Raises:
        ConfigError: The file cannot be read.
    """
    return mode_of(read_layers(path, settings, overrides, one_total_steps=False).tree)


def mode_of(tree: Mapping[str, Any]) -> str:
    """`mode`, or where it is not set, `train` for recorded data and else `both`."""
    algorithm = tree.get("algorithm")
    kind = algorithm.get("algorithm_type") if isinstance(algorithm, Mapping) else None
    return str(tree.get("mode") or ("train" if kind in RECORDED else "both"))


def _was_given_to_trinity(tree: Mapping[str, Any]) -> bool:
    """Whether it is the `config.yaml` of a run on Trinity-RFT (`tuner.trinity.saved`)."""
    for key in ("monitor", "monitor_args", "tuner"):
        value = tree.get(key)
        if not isinstance(value, Mapping):
            return False
        tree = value
    return True


def _asks_for_tinker(model: Any) -> bool:
    tinker = model.get("tinker") if isinstance(model, Mapping) else None
    return isinstance(tinker, Mapping) and tinker.get("enable") is True


def _declared_gpus(cluster: Any) -> int:
    if not isinstance(cluster, Mapping):
        return 0
    sizes = [cluster.get("node_num"), cluster.get("gpu_per_node")]
    try:
        nodes, gpus = (int(size or 1) for size in sizes)
    except (TypeError, ValueError):
        return 0  # of the wrong type: its reader says so
    return nodes * gpus
