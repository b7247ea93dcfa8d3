"""reasoning_gym's sets: questions that a generator makes, and the set's own scores of answers."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import lru_cache
from typing import Any

from tuner.environments.conversation import Dialogue
from tuner.errors import ConfigError, FunctionError, importing
from tuner.rewards import in_process
from tuner.runs.environment import HELD_OUT, Environment, near
from tuner.tasks.functions import (
    JudgeOutput,
    WorkflowOutput,
    call_workflow,
    check_workflow_function,
    response_text,
)
from tuner.tasks.loading import function_of

_log = logging.getLogger("tuner.rollout")


class ReasoningGym(Environment):
    """One of reasoning_gym's sets.

    A row has `question`, `answer`, the set's own `difficulty`, with `levels` a `level`, and `seed`
    and `index`, from which its entry is made again. Training has no question of the evaluation.
    The set scores the text in the last `<answer>` tags, in a separate process with a time limit,
    because several sets evaluate it as Python. Replies without tags are counted by `no_answer`.

    Args:
        name: Name of the set, such as "chain_sum".
        config: Fields of the set's configuration, without `seed` and `size`.
        levels: Levels of the set's curriculum, with equal shares of the tasks. None: `config` only.
        agent: A workflow that answers `task["question"]`, or its name. None: one call.
        system_prompt: The name of one of reasoning_gym's (`default`, `direct`, ...), or a text;
            None: none. Without `agent`.
        seed: First seed of training; that of evaluation is 1,000,000 more.
        train_tasks, eval_tasks: Number of generated tasks for training and evaluation; 0: none.

    Raises:
        ConfigError: The set, a field, a value or a level is wrong.
        MissingDependencyError: reasoning_gym is not installed.
    """

    def __init__(
        self,
        name: str,
        *,
        config: Mapping[str, Any] | None = None,
        levels: Sequence[int] | None = None,
        agent: Callable[..., Any] | str | None = None,
        system_prompt: str | None = "default",
        seed: int = 0,
        train_tasks: int = 1024,
        eval_tasks: int = 64,
    ) -> None:
        with importing("sets of reasoning_gym need the package reasoning_gym", "reasoning-gym"):
            from reasoning_gym.factory import DATASETS
            from reasoning_gym.utils import SYSTEM_PROMPTS
        if name not in (known := DATASETS.keys() - {"composite"}):  # a mixture of ours is one
            raise ConfigError(f"reasoning_gym has no set {name!r}{near(name, known)}")
        own = {one.name for one in fields(DATASETS[name][1])} - {"seed", "size"}
        self._name, self._config = name, dict(config or {})
        for key in self._config.keys() - own:
            raise ConfigError(
                f"config has {key!r}, which is no field of reasoning_gym's {name} to set there"
                f"{near(key, own)}; seed, train_tasks and eval_tasks are beside config"
            )
        self._agent = function_of(agent, setting="agent") or self._ask
        check_workflow_function(self._agent)
        self._system_prompt = SYSTEM_PROMPTS.get(system_prompt or "", system_prompt)
        self._size = max(train_tasks, eval_tasks, 1)
        self._entries: dict[tuple[Any, ...], dict[str, Any]] = {}
        held_out = self._rows(seed + HELD_OUT, eval_tasks, levels)
        asked = {row["question"] for row in held_out}
        made = self._rows(seed, train_tasks, levels)
        train = [row for row in made if row["question"] not in asked]
        if left := len(made) - len(train):
            said = "%d of %d training tasks of %s are left out: the evaluation asks the same"
            _log.warning(said, left, len(made), name)
        if made and not train:
            raise ConfigError(
                f"reasoning_gym's {name} has no other questions than the {len(asked)} of the "
                "evaluation set: lower eval_tasks, or let config allow more"
            )
        self.train_dataset, self.eval_dataset = train or None, held_out or None

    def __getstate__(self) -> dict[str, Any]:
        """State for another process, which makes the entries again."""
        return {**super().__getstate__(), "_entries": {}}

    def _rows(self, seed: int, count: int, levels: Sequence[int] | None) -> list[dict[str, Any]]:
        """Tasks of each level in turn; an index counts inside a level."""
        each: list[dict[str, Any]] = [{}] if levels is None else [{"level": n} for n in levels]
        rows = []
        for number in range(count):
            row = {**each[number % len(each)], "seed": seed, "index": number // len(each)}
            try:
                entry = self._entry(row)
            except Exception as error:
                raise ConfigError(
                    f"reasoning_gym's {self._name} makes no task from {self._config}: "
                    f"{str(error) or type(error).__name__}"
                ) from error
            row |= {"question": entry["question"], "answer": entry["answer"]}
            if difficulty := entry["metadata"].get("difficulty"):
                row["difficulty"] = json.loads(json.dumps(difficulty, default=str))
            rows.append(row)
        return rows

    def _maker(self, row: Mapping[str, Any]) -> tuple[str, str, int | None]:
        """Arguments of `_generator`."""
        given = {**self._config, "seed": row["seed"], "size": self._size}
        return self._name, json.dumps(given), row.get("level")

    def _entry(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The set's own entry of a row, with the metadata that its scorer needs."""
        key = (row.get("level"), row["seed"], row["index"])
        if key not in self._entries:
            self._entries[key] = _generator(*self._maker(row))[row["index"]]
        entry = self._entries[key]
        if row.get("question", entry["question"]) != entry["question"]:
            raise FunctionError(
                f"reasoning_gym's {self._name} makes another question from seed {row['seed']} and "
                f"index {row['index']} than the task has: use the version and the config that made "
                "the task, and set the environment variable PYTHONHASHSEED to 0"
            )
        return entry

    async def workflow(
        self, task: dict[str, Any], model: Any, auxiliary_models: Any = None, logger: Any = None
    ) -> WorkflowOutput:
        """Ask the question, or run the given agent on it."""
        others = {"auxiliary_models": auxiliary_models, "logger": logger}
        return await call_workflow(self._agent, task=task, model=model, **others)

    async def _ask(self, task: dict[str, Any], model: Any) -> str:
        conversation = Dialogue(model, self._system_prompt)
        conversation.tell(task["question"])
        return (await conversation.answer()).content or ""

    async def judge(self, task: dict[str, Any], response: Any) -> JudgeOutput:
        """The set's score of the answer in the response."""
        from reasoning_gym.utils import extract_answer

        answer = extract_answer(response_text(response))
        score = await _score(*self._maker(task), answer, self._entry(task))
        return JudgeOutput(reward=score, metrics={"no_answer": float(answer is None)})


@lru_cache(maxsize=64)
def _generator(name: str, config: str, level: int | None) -> Any:
    """A set with its configuration, given as JSON; raises the set's errors, and ValueError."""
    from reasoning_gym.coaching.base_curriculum import DefaultCurriculumContext, RangeAttributeMode
    from reasoning_gym.factory import CURRICULA, DATASETS

    dataset, configuration = DATASETS[name]
    given = json.loads(config)
    made = configuration(**given)
    if level is not None:
        if name not in CURRICULA:
            raise ValueError("the set has no curriculum: remove levels")
        curriculum = CURRICULA[name]()
        highest = max(len(one.levels) for one in curriculum.attributes.values()) - 1
        if not 0 <= level <= highest:
            raise ValueError(f"levels has {level!r}, but they are 0 to {highest}")
        curriculum.set_global_level(level)
        # Each level by itself, without those below.
        apart = DefaultCurriculumContext(mode=RangeAttributeMode.UPPER_BOUND)
        made = curriculum.generate_configuration(given, apart)
        if lost := [key for key, value in given.items() if getattr(made, key) != value]:
            raise ValueError(f"config has {', '.join(lost)}, which levels set: remove one")
    return dataset(made)


def _score_of(
    name: str, config: str, level: int | None, answer: str | None, entry: dict[str, Any]
) -> float:
    return float(_generator(name, config, level).score_answer(answer, entry))


# The first call takes seconds, in which the sets are imported.
_score = in_process(_score_of, timeout=30)
