"""A workflow that is given prompts, as a run calls workflows. Nothing here needs torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tuner.data.dataset import Task
from tuner.functions.calling import Signature, as_workflow_output, call_function
from tuner.functions.outputs import WorkflowOutput

Prompts = Mapping[str, str]
"""The texts that are searched for, by the names of the components."""
COMPONENT = "system_prompt"
"""The name of the only component, where one text is searched for."""
SEARCH, HELD_OUT = "search", "eval"
"""The splits of the rows that are searched with, and of those that the search never sees."""
SELECTION = "selection"
"""The split of the rows that models are compared on."""
Prices = tuple[float, float]
"""Money for a million tokens read, and written."""
WORKFLOW = Signature(
    "workflow",
    ("task", "system_prompt"),
    ("model", "auxiliary_models", "logger"),
    WorkflowOutput.__name__,
)


@dataclass(frozen=True)
class Prompted:
    """A workflow that is given its prompts, as a run calls workflows.

    Attributes:
        workflow: Takes `task` and `system_prompt`, and `model` if it likes.
        system_prompt: A text, or a dict of them where there are several components.
    """

    workflow: Callable[..., Any]
    system_prompt: str | dict[str, str]

    async def __call__(
        self, task: Task, model: Any, auxiliary_models: Mapping[str, Any], logger: Any
    ) -> WorkflowOutput:
        arguments = {
            "task": task,
            "model": model,
            "system_prompt": self.system_prompt,
            "auxiliary_models": auxiliary_models,
            "logger": logger,
        }
        return as_workflow_output(await call_function(self.workflow, arguments), self.workflow)
