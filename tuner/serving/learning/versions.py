"""The weights of a learning server, each version by the number of updates that it has seen.

There are up to three at a time: the trainer's, the serving ones, and those of a candidate that some
sessions use. The last two are copies that change between two tokens. Every version that serves, or
served, is a checkpoint of the run directory; version 0 is one too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tuner.config import RunConfig
from tuner.engines import TrainingEngine
from tuner.errors import TunerError
from tuner.runs.directory import TRAINER_STATE, RunDirectory, damage, write_atomically
from tuner.runs.models import ServedCopy, StoredAdapter, load_model
from tuner.runs.placement import build_engine
from tuner.runs.stack import Stack
from tuner.traces.reading import JsonReader
from tuner.traces.store import stored_form
from tuner.training.trainer import PolicyTrainer

LEARNED = "learned.json"
"""File of a checkpoint with the sessions of its update, and its metrics."""


@dataclass(frozen=True)
class UpdateRecord:
    """The record of an update next to its weights."""

    sessions: tuple[str, ...] = ()
    metrics: Mapping[str, float] | None = None


_LEARNED = JsonReader[dict[str, Any]](stored_form(UpdateRecord), "what an update left")


class Versions:
    """Loads versions of the weights where they are used.

    Args:
        config: The effective configuration.
        stack: Its engine generates with a copy of the weights (`stack.served`).
        trainer: Trains `stack.model`.
        directory: The run directory with the checkpoints.
    """

    def __init__(
        self, config: RunConfig, stack: Stack, trainer: PolicyTrainer, directory: RunDirectory
    ) -> None:
        assert stack.served is not None, "a server that learns generates with a copy"
        self._config = config
        self._stack = stack
        self._trainer = trainer
        self._directory = directory
        self._served: ServedCopy = stack.served
        self._canary: ServedCopy | None = None
        self._own_engine: TrainingEngine | None = None
        self._canary_engine: TrainingEngine | None = None
        self._names = [name for name, p in stack.model.named_parameters() if p.requires_grad]
        self._in_trainer: int | None = None

    @property
    def serving(self) -> int:
        """The version that serves."""
        return self._stack.engine.version

    def save(self, learned: UpdateRecord, *, spared: Collection[int]) -> set[int]:
        """Write the checkpoint of the trainer's weights, and delete those that are no longer
        needed.

        Args:
            learned: Record of the update; it becomes visible at the same moment as the weights.
            spared: Versions that are kept.

        Returns:
            The deleted versions.
        """
        step = self._trainer.step

        def write(folder: Path) -> None:
            self._stack.save_weights(folder)
            self._trainer.save(folder / TRAINER_STATE)
            write_atomically(folder / "version.json", json.dumps({"version": step}))
            data = {"sessions": learned.sessions, "metrics": learned.metrics}
            write_atomically(folder / LEARNED, json.dumps(data))

        self._directory.save_checkpoint(step, write, keep=0)
        self._in_trainer = step
        gone = set(self._directory.checkpoint_steps()) - {step, *spared}
        self._directory.remove(gone)
        return gone

    def learned(self, version: int) -> UpdateRecord:
        """The record of the update to a version; empty if a run made it.

        Raises:
            TunerError: It is damaged.
        """
        folder = self._directory.checkpoint(version)
        if not (folder / LEARNED).exists():
            return UpdateRecord()
        found = _LEARNED.document(folder / LEARNED, f"move {folder} away, and it is trained again")
        return UpdateRecord(tuple(found["sessions"]), found["metrics"])

    def check(self, version: int) -> None:
        """Raise TunerError if the checkpoint of a version that must serve is missing or damaged."""
        folder = self._directory.checkpoint(version)
        if not folder.is_dir() or (found := damage(folder)):
            what = "is missing" if not folder.is_dir() else f"is damaged ({found})"
            raise TunerError(
                f"{folder} {what}, but its weights serve: restore it from a copy, or give the "
                "server another `name`"
            )

    def tensors(self, version: int) -> Mapping[str, Tensor]:
        """The trained weights of a version, by their names in the model; in any thread.

        Raises:
            TunerError: Its checkpoint cannot be read.
        """
        if version == self._in_trainer:
            return dict(self._stack.model.named_parameters())
        folder = str(self._directory.checkpoint(version).absolute())
        if self._stack.adapter is not None:
            stored = StoredAdapter(folder, "the checkpoint").weights()
            return {_in_model(name): tensor for name, tensor in stored.items()}
        model = load_model(
            folder,
            device=torch.device("cpu"),
            dtype=self._stack.model.dtype,
            setting="the checkpoint",
        )
        return dict(model.named_parameters())

    async def serve(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Let all sessions continue with a version, between two tokens."""
        await self._publish(self._stack.engine, self._served, version, tensors)

    async def try_out(self, version: int, tensors: Mapping[str, Tensor]) -> TrainingEngine:
        """Let the candidate's sessions continue with a version, on the returned engine, which is
        always the same."""
        if self._canary is None or self._canary_engine is None:
            self._canary = ServedCopy(self._stack.model)
            self._canary_engine = self._engine(self._canary.model)
        await self._publish(self._canary_engine, self._canary, version, tensors)
        return self._canary_engine

    async def _publish(
        self,
        engine: TrainingEngine,
        copy: ServedCopy,
        version: int,
        tensors: Mapping[str, Tensor],
    ) -> None:
        async with engine.pause():
            take_over(copy.model, tensors, self._names)
            await engine.update_weights(version)

    async def own(self) -> TrainingEngine:
        """An engine over the trainer's current weights; no training while it is used."""
        if self._own_engine is None:
            self._own_engine = self._engine(self._stack.model)
        await self._own_engine.update_weights(self._trainer.step)
        return self._own_engine

    def _engine(self, model: Any) -> TrainingEngine:
        engine, _ = build_engine(
            self._stack.choice.applied(self._config),
            model,
            self._stack.tokenizer,
            max_model_len=self._stack.engine.capabilities.max_model_len,
            version=self._trainer.step,
            save=self._stack.save_weights,
            needs=self._stack.needs,
        )
        return engine

    def train_from(self, version: int, tensors: Mapping[str, Tensor], *, step: int) -> None:
        """Let training continue from a version, with the optimizer's state at that time; in any
        thread.

        Args:
            step: Total number of updates, so that no two versions have the same number.
        """
        take_over(self._stack.model, tensors, self._names)
        self._trainer.load(self._directory.checkpoint(version) / TRAINER_STATE)
        self._trainer.step = step
        self._trainer.step_lr_scheduler()
        self._in_trainer = version

    def changing(self) -> None:
        """The trainer's weights are about to change to those of no checkpoint."""
        self._in_trainer = None

    async def aclose(self) -> None:
        for engine in (self._canary_engine, self._own_engine):
            if engine is not None:
                await engine.close()


@torch.no_grad()
def take_over(model: nn.Module, tensors: Mapping[str, Tensor], names: Sequence[str]) -> None:
    """Copy weights into a model by their names. Nobody may compute with it meanwhile."""
    targets = dict(model.named_parameters())
    for name in names:
        targets[name].copy_(tensors[name])


def _in_model(name: str) -> str:
    """The name in the model of an adapter's weight, from the one that peft stores."""
    inner = name.removeprefix("base_model.model.")
    inner = re.sub(r"(lora_[AB])\.weight$", r"\1.default.weight", inner)
    return re.sub(r"(lora_embedding_[AB])$", r"\1.default", inner)
