"""Several named sets of tasks in one run, each with its own environment or functions."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tuner.config import RunConfig
from tuner.errors import ConfigError, DatasetError, FunctionError, RewardError
from tuner.runs.environment import Environment, brought, from_settings
from tuner.tasks.datasets import load_tasks
from tuner.tasks.functions import (
    JudgeOutput,
    WorkflowOutput,
    call_judge,
    call_workflow,
    check_judge_function,
    check_settings,
    check_workflow_function,
    end_run,
    judges_groups,
    response_text,
    shown,
)
from tuner.tasks.loading import function_of

_NAME = re.compile(r"[\w-]+")
_KEYS = ("environment", "workflow", "judge", "train_dataset", "eval_dataset")


@dataclass
class ScoredResponse:
    """The response of a set without a judge, and the workflow's reward."""

    response: Any
    reward: float | None

    def get_text_content(self) -> str:
        """The response in readable form."""
        return response_text(self.response)


class Functions(Environment):
    """A set with its own functions."""

    def __init__(self, workflow: Callable[..., Any], judge: Callable[..., Any] | None) -> None:
        check_workflow_function(workflow)
        if judge is not None:
            check_judge_function(judge)
        self._workflow, self.judge = workflow, judge

    @property
    def workflow(self) -> Callable[..., Any]:
        """The user's workflow."""
        return self._workflow


class Mixture(Environment):
    """Several sets of tasks, drawn by weight.

    Each row has an additional field with the name of its set. `tuner.tasks.selector` draws by it,
    so draws depend on `tuner.seed`, and a resumed run continues them. Metrics of each set are
    `rollout/<set>/reward`, `tasks/<set>/passed` and `eval/<set>/reward`: each has its own
    evaluation set.

    Args:
        sets: By name: an environment, like that of `tune()`; or a mapping of `environment` or
            `workflow` and `judge` (functions, or references as in the file), `train_dataset` and
            `eval_dataset`, which win over the environment's; or `{kind: ...}`, as in the file.
        weights: Relative share of each set in a step; None: by its number of tasks.
        field: The rows' field with the name of their set.

    Raises:
        ConfigError: A name, weight or key is wrong, or a set cannot be loaded.
        FunctionError: A set has no workflow, or a judge of whole groups.
        DatasetError: A set has nothing to train on, or its rows already have the field.
    """

    def __init__(
        self,
        sets: Mapping[str, Any],
        *,
        weights: Mapping[str, float] | None = None,
        field: str = "set",
    ) -> None:
        _check(sets, weights)
        self._field = field
        self._sets = {name: _environment(name, given) for name, given in sets.items()}
        train, held_out = list[dict[str, Any]](), dict[str, Any]()
        for name, environment in self._sets.items():
            given = sets[name] if isinstance(sets[name], Mapping) else {}
            if (rows := given.get("train_dataset", environment.train_dataset)) is None:
                raise DatasetError(f"set {name!r} has nothing to train on: give it a train_dataset")
            train += self._marked(name, rows)
            rows = given.get("eval_dataset", environment.eval_dataset)
            if isinstance(rows, Mapping):
                held_out |= {f"{name}.{one}": self._marked(name, rows[one]) for one in rows}
            elif rows is not None:
                held_out[name] = self._marked(name, rows)
        self.train_dataset, self.eval_dataset = train, held_out or None
        judged = [one.judge for one in self._sets.values() if one.judge is not None]
        if any(map(judges_groups, judged)):
            raise FunctionError("a set of a mixture has a judge of whole groups: judge responses")
        if judged:
            self.judge = self._judge
        settings = [one.settings for one in self._sets.values()]
        self.settings = {key: each[key] for each in settings for key in each}
        self.settings |= _selector(field, weights)

    def _marked(self, name: str, dataset: Any) -> list[dict[str, Any]]:
        rows = [dict(row) for row in load_tasks(dataset, role=f"set {name!r}")]
        if any(self._field in row for row in rows):
            raise DatasetError(
                f"set {name!r}: its rows have a field {self._field!r}, which a mixture uses for "
                "the name of the set: set the mixture's `field` to another name"
            )
        return [{**row, self._field: name} for row in rows]

    def _of(self, task: Mapping[str, Any]) -> tuple[Environment, dict[str, Any]]:
        """The set of a task, and its row without the mixture's field."""
        row = dict(task)
        name = row.pop(self._field, None)
        if name not in self._sets:
            raise FunctionError(
                f"the task has {shown(name)} as {self._field!r}; the sets of the mixture are "
                f"{', '.join(self._sets)}"
            )
        return self._sets[name], row

    async def workflow(
        self, task: dict[str, Any], model: Any, auxiliary_models: Any = None, logger: Any = None
    ) -> WorkflowOutput:
        """Run the workflow of the task's set."""
        environment, row = self._of(task)
        others = {"auxiliary_models": auxiliary_models, "logger": logger}
        output = await call_workflow(environment.workflow, task=row, model=model, **others)
        if self.judge is None or environment.judge is not None:
            return output
        scored = ScoredResponse(output.response, output.reward)
        return output.model_copy(update={"response": scored})

    async def _judge(
        self, task: dict[str, Any], response: Any, auxiliary_models: Any = None, logger: Any = None
    ) -> JudgeOutput:
        """Call the judge of the task's set; without one, the workflow's reward counts."""
        environment, row = self._of(task)
        if environment.judge is not None:
            others = {"auxiliary_models": auxiliary_models, "logger": logger}
            return await call_judge(environment.judge, task=row, response=response, **others)
        if not isinstance(response, ScoredResponse):
            raise RewardError(f"set {task[self._field]!r} has no judge to call again")
        if response.reward is None:
            name = task[self._field]
            raise FunctionError(f"set {name!r} has no judge, and its workflow gave no reward")
        return JudgeOutput(reward=response.reward)

    def check_settings(self, config: RunConfig) -> None:
        """Let each set check the settings."""
        for environment in self._sets.values():
            check_settings(environment.workflow, config)

    async def close(self) -> None:
        """Close each set's environment."""
        for environment in self._sets.values():
            await end_run(environment.workflow)


def _check(sets: Mapping[str, Any], weights: Mapping[str, float] | None) -> None:
    """Raises ConfigError if a name or a weight is wrong."""
    if not isinstance(sets, Mapping) or not sets:
        raise ConfigError(f"sets is {shown(sets)}, but must be a mapping of sets by name")
    for name in sets:
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name == "train":
            raise ConfigError(
                f"{name!r} is not a name of a set: use letters, digits, _ and -, and not train"
            )
    for name, weight in (weights or {}).items():
        if name not in sets or not isinstance(weight, int | float) or not weight > 0:
            raise ConfigError(
                f"weights has {weight!r} for {name!r}: use numbers above 0 for the sets "
                f"{', '.join(sets)}"
            )
    if weights and (missing := [name for name in sets if name not in weights]):
        raise ConfigError(f"weights lacks {', '.join(missing)}: name all sets, or none")


def _environment(name: str, given: Any) -> Environment:
    if not isinstance(given, Mapping):
        return brought(given)
    setting = f"sets.{name}"
    if "kind" in given:
        return from_settings(given, setting)
    if unknown := [key for key in given if key not in _KEYS]:
        raise ConfigError(f"{setting} has {', '.join(unknown)}; its keys are {', '.join(_KEYS)}")
    environment, workflow = given.get("environment"), given.get("workflow")
    if (environment is None) == (workflow is None):
        raise ConfigError(f"{setting}: give either an environment or a workflow")
    if environment is None:
        return Functions(
            function_of(workflow, setting=f"{setting}.workflow"),
            function_of(given.get("judge"), setting=f"{setting}.judge"),
        )
    if given.get("judge") is not None:
        raise ConfigError(f"{setting}.judge is set, but the environment has its own: remove it")
    if isinstance(environment, str | Mapping):
        return from_settings(environment, f"{setting}.environment")
    return brought(environment)


def _selector(field: str, weights: Mapping[str, float] | None) -> dict[str, Any]:
    path = "tuner.tasks.selector"
    given = {f"{path}.weights.{name}": weight for name, weight in (weights or {}).items()}
    return {f"{path}.kind": "stratified", f"{path}.field": field, **given}
