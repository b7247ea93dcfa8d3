"""Checks of a configuration for `tuner serve --train`, and the parts made from it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tuner.config import RunConfig
from tuner.config.algorithms import ADVANTAGES, ALGORITHMS
from tuner.config.schema import SynchronizerSection
from tuner.errors import ConfigError

if TYPE_CHECKING:
    from tuner.runs.directory import RunDirectory
    from tuner.runs.stack import Stack
    from tuner.serving.asking import ServedModels
    from tuner.serving.hosting import Beside, Server
    from tuner.serving.learning.learner import Learner
    from tuner.serving.serving_store import ServingStore

Task = dict[str, Any]


def check_can_learn(config: RunConfig) -> None:
    """Raise ConfigError for a setting that does not fit a learning server, or if promotions could
    not be proven."""
    if problems := list(_unfit(config)):
        raise ConfigError("; ".join(f"tuner serve --train: {one}" for one in problems))


def learning_config(config: RunConfig) -> RunConfig:
    """The configuration that a server learns with: its engine has a copy of the weights."""
    engine = config.explorer.rollout_model.model_copy(update={"engine_type": "transformers"})
    explorer = config.explorer.model_copy(update={"rollout_model": engine})
    ahead = SynchronizerSection(sync_offset=max(1, config.synchronizer.sync_offset))
    return config.model_copy(update={"explorer": explorer, "synchronizer": ahead})


def _unfit(config: RunConfig) -> Iterator[str]:
    """Reasons this configuration cannot be used with `--train`."""
    algorithm, tuner = config.algorithm, config.tuner
    name, advantage = algorithm.algorithm_type, ADVANTAGES[algorithm.advantage_fn]
    if ALGORITHMS[name].recorded is not None:
        yield (
            f"algorithm.algorithm_type {name} trains on recorded data; set one that learns from "
            "rewards, such as multi_step_grpo"
        )
    elif not advantage.needs_reward or algorithm.advantage_fn == "tree":
        yield (
            f"algorithm.advantage_fn {algorithm.advantage_fn} does not learn from the rewards of "
            "whole sessions; set algorithm.algorithm_type to multi_step_grpo, rloo or ppo"
        )
    if algorithm.optimizer.lr_scheduler_type != "constant":
        yield (
            f"algorithm.optimizer.lr_scheduler_type is {algorithm.optimizer.lr_scheduler_type}, "
            "but a server has no last step: set it to constant"
        )
    if algorithm.optimizer.lr_warmup_steps_ratio:
        yield (
            "algorithm.optimizer.lr_warmup_steps_ratio is set, but a server has no last step: set "
            "lr_warmup_steps"
        )
    if advantage.needs_group and config.buffer.batch_size < 2:
        yield (
            f"buffer.batch_size is {config.buffer.batch_size}, but {algorithm.advantage_fn} "
            "compares sessions: set it to 2 or more"
        )
    if tuner.algorithm.proximal == "loglinear":
        yield (
            "tuner.algorithm.proximal loglinear counts the updates between two policies, which is "
            "meaningless after a rollback: set it to auto"
        )
    if config.model.adapters:
        yield (
            "model.adapters trains each role on its own calls, but a server promotes one version "
            "for all: set model.lora_configs instead"
        )
    if tuner.branching is not None:
        yield "tuner.branching starts rollouts, but users start sessions: remove it"
    if tuner.tasks.selector is not None:
        yield "tuner.tasks.selector draws tasks, but users start sessions: remove it"
    if tuner.deterministic:
        yield (
            "tuner.deterministic is true, but which weights sample a token depends on timing: "
            "remove it"
        )
    by, tried = tuner.serving.promotion.by, config.buffer.explorer_input.eval_tasksets
    if by in ("held_out", "both") and not tried:
        yield (
            f"tuner.serving.promotion.by is {by}, but there is no evaluation set: set "
            "buffer.explorer_input.eval_tasksets and tuner.workflow, or promotion.by to live"
        )
    engine = config.explorer.rollout_model.engine_type
    if engine not in ("auto", "transformers"):
        yield (
            f"explorer.rollout_model.engine_type is {engine}, but only the transformers engine can "
            "serve promoted weights so far: set it to transformers"
        )


def build_learner(
    config: RunConfig,
    stack: Stack,
    store: ServingStore,
    directory: RunDirectory,
    eval_tasks: Mapping[str, Sequence[Task]],
) -> Learner:
    """A learner next to a stack, for the weights that the configuration names.

    Args:
        config: As returned by `learning_config`.
        stack: Built from it, with the user's functions if there are evaluation sets.
        store: The server's store.
        directory: The run directory.
        eval_tasks: Rows of each evaluation set, by its name.
    """
    from tuner.runs.stack import build_trainer
    from tuner.serving.learning.learner import Learner
    from tuner.serving.learning.proving import HeldOut

    directory.create()
    held_out = None
    if config.tuner.serving.promotion.by in ("held_out", "both"):
        held_out = HeldOut(config, stack, eval_tasks, directory)
    trainer = build_trainer(config, stack, total_steps=_ENDLESS)
    return Learner(config, stack, trainer, store, directory, held_out)


_ENDLESS = 2**31
"""Number of steps of a server: the learning rate does not depend on them."""


@dataclass(frozen=True)
class LearnerModels:
    """The models of a learning server, for its control API."""

    learner: Learner

    def models(self) -> ServedModels:
        from tuner.serving.asking import ServedModels

        return ServedModels(**self.learner.models())

    async def rollback(self) -> ServedModels:
        """Raises RequestError 409 if nothing was promoted."""
        from tuner.gateway.request_error import RequestError

        try:
            await self.learner.rollback()
        except ConfigError as error:
            raise RequestError(str(error), status=409, code="nothing_promoted") from None
        return self.models()


def learning(eval_tasks: Mapping[str, Sequence[Task]]) -> Beside:
    """Runs a learner next to a server.

    Args:
        eval_tasks: Rows of each evaluation set, by its name.
    """

    @asynccontextmanager
    async def beside(server: Server) -> AsyncIterator[None]:
        learner = build_learner(
            server.config, server.stack, server.store, server.directory, eval_tasks
        )
        await learner.begin()
        server.models, server.live.onlooker = LearnerModels(learner), learner
        server.metrics.learns(lambda: learner.updates, lambda: learner.failure is not None)
        task = asyncio.ensure_future(learner.run())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            await learner.aclose()

    return beside
