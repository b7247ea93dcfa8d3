"""Which backend a configuration asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from tuner.config.load import read_layers

Backend = Literal["local", "trinity"]


def chosen_backend(
    path: Path | str | None,
    settings: Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
) -> Backend:
    """`tuner.backend`; `auto` is trinity where more than one GPU or node is declared.

    Takes what `load_config` does, and leaves every other problem to whoever reads the rest.

    Raises:
        ConfigError: The file cannot be read.
    """
    tree = read_layers(path, settings, overrides, one_total_steps=False).tree
    section = tree.get("tuner")
    backend = section.get("backend") if isinstance(section, Mapping) else None
    if backend == "trinity":
        return "trinity"
    if backend in (None, "auto") and _declared_gpus(tree.get("cluster")) > 1:
        return "trinity"
    return "local"


def _declared_gpus(cluster: Any) -> int:
    if not isinstance(cluster, Mapping):
        return 0
    sizes = [cluster.get("node_num"), cluster.get("gpu_per_node")]
    try:
        nodes, gpus = (int(size or 1) for size in sizes)
    except (TypeError, ValueError):
        return 0  # of the wrong type: its reader says so
    return nodes * gpus
