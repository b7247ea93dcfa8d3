"""Whatever runs an agent, as one kind of workflow function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tuner.areal.agents import AgentWorkflow
from tuner.areal.episodes import Episode, TokenWorkflow
from tuner.areal.queue_workflow import QueueWorkflow
from tuner.config import RunConfig
from tuner.errors import FunctionError
from tuner.functions.calling import call_workflow, check_settings, check_workflow_function
from tuner.functions.outputs import WorkflowOutput
from tuner.gateway import Session


class Runnable:
    """A workflow of any kind, which keeps the trajectories that it names.

    Args:
        workflow: A token-level workflow (an object with `arun_episode`), a `QueueWorkflow`, a
            workflow function `(task, model)`, or an agent as `AgentWorkflow` takes.

    Raises:
        FunctionError: It is none of these.
    """

    def __init__(self, workflow: Any) -> None:
        self._episode: Callable[[dict[str, Any], Session], Any] | None = None
        if isinstance(workflow, (TokenWorkflow, QueueWorkflow)):
            self._episode = workflow.episode
        elif hasattr(workflow, "arun_episode"):
            self._episode = TokenWorkflow(workflow).episode
        elif isinstance(workflow, str) or hasattr(workflow, "run"):
            workflow = AgentWorkflow(workflow)
        elif callable(workflow):
            check_workflow_function(workflow)
        else:
            raise FunctionError(
                f"{workflow!r:.80} is no workflow: pass an object with arun_episode, a "
                "QueueWorkflow, a workflow function, or an agent with run"
            )
        self._workflow = workflow
        self.episodes: dict[str, Episode] = {}

    def check_settings(self, config: RunConfig) -> None:
        """Let the workflow refuse settings that do not go with it.

        Raises:
            ConfigError: It does.
        """
        check_settings(self._workflow, config)

    async def __call__(
        self, task: dict[str, Any], model: Any, auxiliary_models: Any, logger: Any
    ) -> WorkflowOutput:
        """Run one rollout; `episodes` has its trajectories by the session's id."""
        if self._episode is None:
            return await call_workflow(
                self._workflow,
                task=task,
                model=model,
                auxiliary_models=auxiliary_models,
                logger=logger,
            )
        session: Session = model.session
        episode: Episode = await self._episode(task, session)
        self.episodes[session.id] = episode
        return WorkflowOutput(reward=episode.reward)
