"""The actor of an explicit training loop: the trainer's operations on dicts of tensors."""

from __future__ import annotations

import json
import re
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from tuner.areal.experiment import PPOActorConfig
from tuner.areal.shared_run import Run
from tuner.areal.trajectory_batch import Place, gathered, scattered, to_batch
from tuner.errors import ConfigError, TrainingError
from tuner.runs.directory import TRAINER_STATE
from tuner.runs.models import Adapter, StoredAdapter, load_model
from tuner.runs.stack import build_trainer, selection
from tuner.training.batch import Batch
from tuner.training.scoring import ScoredBatch
from tuner.training.trainer import PolicyTrainer

_PART = re.compile(r"(?:[a-z]+:)?(?P<sizes>(?:[a-z]\d+)+)")


@dataclass(frozen=True)
class AllocationMode:
    """Devices of generation and training, such as `sglang:d1p1t1+d1p1t1`; one of each here.

    Attributes:
        text: The given string.
    """

    text: str

    @classmethod
    def from_str(cls, text: str) -> Self:
        """Parse an allocation.

        Raises:
            ConfigError: It is not an allocation, or has more than one device in a part.
        """
        for part in text.split("+"):
            match = _PART.fullmatch(part.strip())
            if match is None:
                raise ConfigError(f"allocation {text!r}: {part!r} is not of the form sglang:d1p1t1")
            if any(int(size) != 1 for size in re.findall(r"\d+", match["sizes"])):
                raise ConfigError(
                    f"allocation {text!r}: {part!r} has more than one device, but the local "
                    "loop generates and trains on one; make every size 1"
                )
        return cls(text)


@dataclass(frozen=True)
class WeightUpdateMeta:
    """Method of weight updates. The engine generates with the trained weights themselves, so an
    update only announces the change; nothing is sent.

    Attributes:
        allocation: Devices.
    """

    allocation: AllocationMode | None = None

    @classmethod
    def from_fsdp_xccl(cls, allocation: AllocationMode) -> Self:
        """AReaL's name for an update from a trainer to an engine next to it."""
        return cls(allocation)


@dataclass(frozen=True)
class FinetuneSpec:
    """Length of a run, for the learning rate's schedule.

    Attributes:
        total_train_epochs: Number of passes over the dataset.
        dataset_size: Rows of the dataset.
        train_batch_size: Rows in a step.
    """

    total_train_epochs: int
    dataset_size: int
    train_batch_size: int

    @property
    def total_train_steps(self) -> int:
        """Number of full batches of all epochs together."""
        return max(1, self.total_train_epochs * self.dataset_size // self.train_batch_size)


Tensors = MutableMapping[str, Tensor]


class PPOActor:
    """Trains the run's model on batches of the rollout engine.

        batch["prox_logp"] = actor.compute_logp(batch)   # optional
        actor.compute_advantages(batch)
        actor.ppo_update(batch)
        actor.step_lr_scheduler()
        actor.update_weights()

    A batch may be changed in between: rewards before the advantages, advantages before the update,
    zeros in the mask at any time. Tokens removed from the mask are counted as dropped.

    Args:
        config: The section of a `GRPOConfig`; or the run that it shares with a rollout engine.
    """

    def __init__(self, config: PPOActorConfig | Run) -> None:
        self._run = config if isinstance(config, Run) else config.run
        self._trainer: PolicyTrainer | None = None

    def initialize(self, addr: str | None = None, ft_spec: FinetuneSpec | None = None) -> None:
        """Load the model, unless the rollout engine did, and create the optimizer; with
        `algorithm_type: ppo` also the critic and its optimizer.

        Args:
            addr: None; the actor runs in this process.
            ft_spec: Length of the run, if the learning rate follows a schedule.

        Raises:
            ConfigError: An address is given, or a schedule without its length.
        """
        if addr is not None:
            raise ConfigError(f"addr is {addr!r}, but training runs in this process: remove it")
        config = self._run.config
        kind = config.algorithm.optimizer.lr_scheduler_type
        if ft_spec is None and kind != "constant":
            raise ConfigError(
                f"the learning rate's schedule is {kind}, which depends on the length of the run: "
                "pass initialize(ft_spec=FinetuneSpec(...))"
            )
        steps = 1 if ft_spec is None else ft_spec.total_train_steps
        self._trainer = build_trainer(config, self._run.stack, total_steps=steps)

    @property
    def trainer(self) -> PolicyTrainer:
        """The underlying trainer.

        Raises:
            ConfigError: The actor is not initialized.
        """
        if self._trainer is None:
            raise ConfigError("the actor is not initialized: call actor.initialize(None, ft_spec)")
        return self._trainer

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return next(self._run.stack.model.parameters()).device

    def compute_logp(self, batch: Tensors) -> Tensor:
        """Log-probs of the trained tokens under the current weights, 0 elsewhere.

        Returns:
            Shape [B, L], aligned with `input_ids`.
        """
        found, places = self._read(batch)
        with self._run.computing():
            logp = self.trainer.compute_logp(found)
        return scattered(logp, places, batch["input_ids"])

    def compute_advantages(self, batch: Tensors) -> None:
        """Put the algorithm's advantages into `batch["advantages"]`, shape [B, L].

        If KL is subtracted from the rewards, the reference's log-probs go to `batch["ref_logp"]`;
        with a critic, its values and their targets go to `batch["values"]` and `batch["returns"]`.

        Raises:
            TrainingError: No two rollouts can be compared.
        """
        found, places = self._read(batch)
        with self._run.computing():
            scored = self.trainer.compute_advantages(found)
        for key in ("advantages", "ref_logp", "values", "returns"):
            if values := getattr(scored, key):
                batch[key] = scattered(values, places, batch["input_ids"])

    def ppo_update(self, batch: Tensors) -> dict[str, float]:
        """Update the weights, those of a critic first. Generation is held from now until
        `update_weights`.

        If the batch has `prox_logp`, ratios are relative to that policy, and tokens are weighted by
        its distance to the sampling policy.

        Returns:
            Like `PolicyTrainer.ppo_update`, and the tokens sampled, trained, and dropped by reason.

        Raises:
            TrainingError: The batch has no advantages, or none of the critic's values, no two
                rollouts can be compared, or loss or gradient is not finite.
        """
        trainer, device = self.trainer, self.device
        needed = ("advantages",) if trainer.critic is None else ("advantages", "values", "returns")
        if missing := [key for key in needed if key not in batch]:
            raise TrainingError(
                f"the batch has no {', '.join(missing)}: call actor.compute_advantages(batch)"
            )
        found, places = self._read(batch)

        def given(key: str) -> tuple[Tensor, ...] | None:
            return gathered(batch[key].to(device), places) if key in batch else None

        scored = ScoredBatch(
            found,
            gathered(batch["advantages"].double().cpu(), places),
            given("ref_logp"),
            given("prox_logp"),
            values=given("values") or (),
            returns=gathered(batch["returns"].double().cpu(), places) if trainer.critic else (),
        )
        self._hold_generation()
        try:
            metrics = trainer.ppo_update(trainer.compute_ref_logp(scored))
        except BaseException:
            self._run.release("training")
            raise
        return {
            **metrics,
            "tokens/sampled": float(found.sampled_tokens),
            "tokens/trained": float(found.trained_tokens),
            **{f"tokens/dropped/{name}": float(n) for name, n in found.dropped_tokens.items()},
        }

    def step_lr_scheduler(self) -> None:
        """Set the learning rate of the next update."""
        self.trainer.step_lr_scheduler()

    def update_weights(self, meta: WeightUpdateMeta | None = None) -> None:
        """Let the engine serve the new weights, and generate again unless it is paused.

        Args:
            meta: Only checked: the weights are in the same process.
        """
        trainer, stack = self.trainer, self._run.stack
        self._run.call(lambda: stack.publish(trainer))
        self._run.release("training")

    def get_version(self) -> int:
        """Number of updates of the weights."""
        return self.trainer.step

    def set_version(self, version: int) -> None:
        """Check the caller's version; it counts updates and cannot be set.

        Raises:
            TrainingError: It differs.
        """
        if version != self.trainer.step:
            raise TrainingError(
                f"set_version({version}), but the actor has made {self.trainer.step} updates: "
                "versions count updates; number steps from actor.get_version()"
            )

    def save(self, folder: Path | str) -> None:
        """Save the model in a form that transformers can load (or the adapter in peft's), and
        tokenizer, optimizers, critic and version."""
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        self.trainer.save(path / TRAINER_STATE)  # refuses weights that are not finite
        self._run.stack.save_weights(path)
        (path / "version.json").write_text(json.dumps({"version": self.trainer.step}))

    def load(self, folder: Path | str) -> None:
        """Resume from files of `save`: the engine serves these weights, and their version.

        Raises:
            ModelLoadError: There is no such model, or adapter.
        """
        path, trainer, stack = Path(folder), self.trainer, self._run.stack
        if stack.adapter is None:
            saved = load_model(
                str(path), device=self.device, dtype=stack.model.dtype, setting="actor.load"
            )
            self._hold_generation()
            stack.model.load_state_dict(saved.state_dict())
        else:
            weights = StoredAdapter(str(path), "the adapter of actor.load,").weights()
            self._hold_generation()
            assert isinstance(stack.adapter, Adapter), "build_trainer() refuses those of roles"
            stack.adapter.load(weights)
        trainer.load(path / TRAINER_STATE)
        self.update_weights()

    def _hold_generation(self) -> None:
        """Hold generation until `update_weights`, unless the engine has its own weights and
        keeps its memory."""
        self._run.hold("training", self._run.stack.training)

    def _read(self, batch: Tensors) -> tuple[Batch, tuple[Place, ...]]:
        found, places = to_batch(batch, selection(self._run.config), self._run.defaults)
        if not found.rows:
            raise TrainingError(
                f"the batch has nothing to train: {found.sampled_tokens} tokens were sampled and "
                f"dropped ({found.dropped_tokens}); a group needs two rollouts: raise group_size, "
                "or gather several in the workflow"
            )
        return found, places
