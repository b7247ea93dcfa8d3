"""`RunConfig`: every setting of a run, in the tree of Trinity-RFT's YAML.

The attributes are the YAML's keys: `config.algorithm.optimizer.lr`. Our own keys are under
`config.tuner`. A value here is used by the local backend; what it cannot use is refused when the
configuration is loaded (`tuner.config.foreign`), and never gets this far.
"""

from __future__ import annotations

import secrets
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PrivateAttr, field_validator, model_validator

from tuner.algorithms.table import ALGORITHMS
from tuner.config.algorithm import AlgorithmSection
from tuner.config.buffer import BufferSection, EvalTasksetSection, RolloutArgs, TasksetSection
from tuner.config.explorer import ExplorerSection, ModelSection, SynchronizerSection
from tuner.config.section import Arguments, Section
from tuner.config.source import concealed
from tuner.config.tuner_section import TunerSection

MonitorName = Literal["tensorboard", "wandb", "mlflow", "swanlab"]


class TrainerSection(Section):
    """`trainer.*`"""

    save_interval: int = Field(
        default=0, ge=0, description="Checkpoint after every so many steps; 0: only at the end."
    )
    grad_clip: float = Field(default=1.0, gt=0, description="Upper limit of the gradient's norm.")
    max_token_len_per_gpu: int | None = Field(
        default=None,
        ge=1,
        description="Tokens in a micro-batch, of no effect on the gradient. Not set: 2 contexts.",
    )
    optimizer_offload: bool = Field(
        default=False,
        description="Optimizer state in main memory, where the CPU computes the step. It changes "
        "memory and speed, not the result.",
    )
    critic_warmup: int = Field(
        default=0,
        ge=0,
        description="For the first so many steps only the critic is trained. For ppo.",
    )
    max_checkpoints_to_keep: int = Field(
        default=0, ge=0, description="Delete older checkpoints beyond so many; 0 keeps all."
    )


class ClusterSection(Section):
    """`cluster.*`"""

    ray_address: str | None = Field(
        default=None,
        description="The Ray cluster, `host:port`, that workers run on where `tuner.workers` is "
        "`ray`; the local backend has no other use for one.",
    )


class MonitorSection(Section):
    """`monitor.*`"""

    monitor_type: tuple[MonitorName, ...] = Field(
        default=("tensorboard",),
        description="Where metrics go besides the console and `metrics.jsonl`: tensorboard, "
        "wandb, mlflow, swanlab, or a list of them.",
    )
    monitor_args: Arguments = Field(
        default_factory=dict,
        description="Given to each monitor as it is; what stands below a monitor's name is for "
        "that one alone (docs/trackers.md). Passwords and keys best as `${oc.env:NAME}`.",
    )

    @field_validator("monitor_type", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value


class RunConfig(Section):
    """Every setting of a run."""

    _references: dict[str, str] = PrivateAttr(default_factory=dict)
    mode: Literal["both", "explore", "train"] = Field(
        default="both",
        description="Rollouts and training (`both`); rollouts of the model as it is, which are "
        "recorded and not trained (`explore`); or training on what was recorded before (`train`). "
        "Not set: what the algorithm and `tuner.history` need.",
    )
    project: str = Field(default="AgentScope", min_length=1, description="Folder of related runs.")
    name: str = Field(
        # Runs that begin in one second are not one run.
        default_factory=lambda: f"{datetime.now():Experiment-%Y%m%d%H%M%S}-{secrets.token_hex(4)}",
        min_length=1,
        description="Name of the run. Not set: `Experiment-<time>`, a new run each time.",
    )
    checkpoint_root_dir: Path = Field(
        default=Path("./checkpoints"),
        description="The run directory is `<checkpoint_root_dir>/<project>/<name>`.",
    )
    continue_from_checkpoint: bool = Field(
        default=True,
        description="Go on where a run of this name stopped. false: a new run beside it.",
    )
    algorithm: AlgorithmSection = AlgorithmSection()
    model: ModelSection = ModelSection()
    buffer: BufferSection = BufferSection()
    explorer: ExplorerSection = ExplorerSection()
    synchronizer: SynchronizerSection = SynchronizerSection()
    trainer: TrainerSection = TrainerSection()
    monitor: MonitorSection = MonitorSection()
    cluster: ClusterSection = ClusterSection()
    tuner: TunerSection = TunerSection()

    @model_validator(mode="before")
    @classmethod
    def _mode_of_the_algorithm(cls, given: Any) -> Any:
        if not isinstance(given, dict) or given.get("mode") is not None:
            return given
        algorithm, tuner = given.get("algorithm"), given.get("tuner")
        name = algorithm.get("algorithm_type") if isinstance(algorithm, dict) else None
        recorded = any(row.recorded and key == name for key, row in ALGORITHMS.items())
        if isinstance(tuner, dict) and tuner.get("history") is not None:
            recorded = True
        return {**given, "mode": "train" if recorded else "both"}

    @field_validator("project", "name")
    @classmethod
    def _names_a_folder(cls, value: str) -> str:
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError("Input should be text that UTF-8 can write") from None
        return value

    @property
    def run_dir(self) -> Path:
        """`<checkpoint_root_dir>/<project>/<name>`."""
        return self.checkpoint_root_dir / self.project / self.name

    def rollout_args(self, taskset: TasksetSection | EvalTasksetSection) -> RolloutArgs:
        """The sampling settings of a set of tasks, with `model.*` filled in for what it leaves out.

        Only `max_tokens` may still be None: the room left in the context.
        """
        own, model = taskset.rollout_args, self.model
        return RolloutArgs(
            temperature=model.temperature if own.temperature is None else own.temperature,
            top_p=model.top_p if own.top_p is None else own.top_p,
            top_k=model.top_k if own.top_k is None else own.top_k,
            max_tokens=model.max_response_tokens if own.max_tokens is None else own.max_tokens,
        )

    def to_yaml(self) -> str:
        """The effective configuration as YAML; `load_config` reads it back unchanged, but for the
        secrets that were given in clear."""
        from omegaconf import OmegaConf

        escaped = _escaped(self.model_dump(mode="json"))
        return OmegaConf.to_yaml(OmegaConf.create(concealed(escaped, self._references)))

    def public(self) -> dict[str, Any]:
        """The effective configuration without secrets, as JSON."""
        return dict(concealed(self.model_dump(mode="json"), {}))


def _escaped(value: Any) -> Any:
    """`value` with every `${` marked as text, so that it is not taken for an interpolation."""
    if isinstance(value, dict):
        return {key: _escaped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escaped(item) for item in value]
    return value.replace("${", r"\${") if isinstance(value, str) else value
