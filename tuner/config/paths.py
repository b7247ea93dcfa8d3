"""Making relative paths absolute, so that a saved configuration works from anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# A file or folder of ours.
PATHS = ("checkpoint_root_dir", "model.chat_template_path")
# A path if there is one, else a name on the Hugging Face Hub.
PATHS_OR_NAMES = (
    "model.model_path",
    "model.lora_configs.*.path",
    "model.critic_model_path",
    "explorer.rollout_model.model_path",
    "explorer.auxiliary_models.*.model_path",
    "buffer.explorer_input.taskset.path",
    "buffer.explorer_input.tasksets.*.path",
    "buffer.explorer_input.eval_tasksets.*.path",
    "buffer.trainer_input.experience_buffer.path",
)
# `path/file.py:function`, or `package.module:function`, which is no path.
FUNCTIONS = ("tuner.workflow", "tuner.judge", "tuner.agent.type", "tuner.environment.type")
# `path/file.py`, or `package.module`, which is no path.
MODULES = ("tuner.imports", "tuner.imports.*")


def absolute_paths(
    value: Any, folder: Path, *, at: str = "", without: frozenset[str] = frozenset()
) -> Any:
    """`value` with the paths among its settings made absolute.

    Args:
        value: A nested dict of settings, or one setting.
        folder: Where relative paths start.
        at: Dotted path of `value` itself.
        without: Keys to leave as they are.
    """
    prefix = f"{at}." if at else ""
    if isinstance(value, dict):
        return {
            key: absolute_paths(item, folder, at=f"{prefix}{key}", without=without)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [
            absolute_paths(item, folder, at=f"{prefix}{index}", without=without)
            for index, item in enumerate(value)
        ]
    if not isinstance(value, str) or not value or "${" in value or at in without:
        return value
    pattern = ".".join("*" if part.isdecimal() else part for part in at.split("."))
    if pattern in PATHS:
        return absolute(value, folder)
    if pattern in PATHS_OR_NAMES:
        return path_or_name(value, folder)
    if pattern in MODULES and value.endswith(".py"):
        return absolute(value, folder)
    if pattern in FUNCTIONS:
        file, colon, name = value.rpartition(":")
        return f"{absolute(file, folder)}:{name}" if colon and file.endswith(".py") else value
    return value


def absolute(value: str, folder: Path) -> str:
    """An absolute path; `~` is the home folder."""
    return str((folder / Path(value).expanduser()).resolve())


def path_or_name(value: str, folder: Path) -> str:
    """An absolute path if `value` exists or can only be a path, else `value`: a Hub name, a URL."""
    if "://" in value:
        return value
    looks_like_path = (
        value.startswith((".", "/", "~"))
        or value.count("/") > 1
        or Path(value).suffix in DATA_FILES
    )
    if looks_like_path or (folder / value).exists():
        return absolute(value, folder)
    return value


DATA_FILES = (".json", ".jsonl", ".csv", ".parquet")
