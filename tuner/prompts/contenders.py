"""Whom rollouts are asked of while nothing is trained: a model here, one elsewhere, or nobody."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tuner.chat_models import chat_model, default_kind, remote_client
from tuner.config import RemoteModel, RunConfig
from tuner.errors import ConfigError, TrainingError
from tuner.gateway import Session
from tuner.rollout import RolloutRunner
from tuner.tune import Run


@dataclass(frozen=True)
class Contender:
    """A model that a run's rollouts can be made with.

    Attributes:
        runner: Makes one rollout.
        failure: Why no further one can be made, or None.
    """

    runner: RolloutRunner
    failure: Callable[[], Exception | None] = lambda: None

    def check(self) -> None:
        """Raises TrainingError where its engine has failed."""
        if (failure := self.failure()) is not None:
            raise TrainingError(str(failure))


def _check_settings(config: RunConfig) -> None:
    if config.tuner.workers:
        raise ConfigError(
            f"tuner.workers is {config.tuner.workers}, but tune_prompt() and select_model() run "
            "the workflow and the judge in this process: set it to 0"
        )


@asynccontextmanager
async def served_here(run: Run) -> AsyncIterator[Contender]:
    """The model of the configuration, on an engine of ours.

    Raises:
        ModelLoadError, ConfigError: As `build_stack()`.
    """
    from tuner.assembly.stack import build_stack

    _check_settings(run.config)
    stack = build_stack(run.config, workflow=run.workflow, judge=run.judge)
    try:
        assert stack.runner is not None, "prepare_evaluation() wants a workflow"
        yield Contender(stack.runner, lambda: stack.engine.failure)
    finally:
        await stack.aclose()


@asynccontextmanager
async def elsewhere(
    run: Run,
    remote: RemoteModel | None,
    make_model: Callable[[Session], Any] | None = None,
) -> AsyncIterator[Contender]:
    """A model behind a URL; None: the workflow brings its own, and no call is seen.

    Args:
        run: What is to be run.
        remote: The model.
        make_model: The chat model that a session's agent gets; None: one of the gateway's.

    Raises:
        ConfigError: The environment variable that should hold the key is not set.
    """
    from tuner.assembly.auxiliary import AuxiliaryModels
    from tuner.assembly.models import choose_device, choose_dtype
    from tuner.assembly.parameters import rollout_settings
    from tuner.assembly.stack import add_auxiliary_models
    from tuner.gateway.relay import Relay

    _check_settings(run.config)
    config, kind = run.config, default_kind()
    auxiliary = AuxiliaryModels(kind)
    device = choose_device(config.tuner.device)
    add_auxiliary_models(auxiliary, config, device, choose_dtype(config.tuner.dtype, device))
    client = None if remote is None else remote_client(remote, "model.api_key_env")
    gateway = Relay(client, "none" if remote is None else remote.model_name)
    assert run.workflow is not None, "prepare_evaluation() wants a workflow"
    runner = RolloutRunner(
        gateway,
        run.workflow,
        run.judge,
        make_model=make_model or partial(chat_model, kind=kind),
        auxiliary_models=auxiliary.opened,
        settings=replace(rollout_settings(config), needs_calls=remote is not None),
    )
    try:
        yield Contender(runner)
    finally:
        await auxiliary.aclose()
        await gateway.aclose()
