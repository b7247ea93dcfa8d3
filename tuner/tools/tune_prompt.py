"""`tune_prompt()`: search for the prompt that gives a workflow the best rewards."""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import math
import random
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from statistics import fmean
from typing import Any

import openai

from tuner.config import RemoteModel
from tuner.config.source import concealed
from tuner.errors import (
    ConfigError,
    FunctionError,
    MissingDependencyError,
    TrainingError,
    pip_install,
    system_faults,
)
from tuner.gateway import SamplingDefaults
from tuner.rollouts.chat_models import quiet_agents, remote_client
from tuner.runs.console import ConsoleMonitor
from tuner.runs.directory import (
    OBJECTS,
    RunDirectory,
    outside_event_loop,
    reported,
    run_async,
    write_atomically,
)
from tuner.runs.estimates import estimate
from tuner.tasks.datasets import DatasetConfig, Task, load_tasks
from tuner.tasks.functions import OwnFrames, check_function, judges_groups, where
from tuner.tasks.loading import require_nothing_loads
from tuner.tasks.settings import PromptTuneConfig, TunerModelConfig
from tuner.tools.candidates import (
    COMPONENT,
    HELD_OUT,
    SEARCH,
    WORKFLOW,
    CandidateLog,
    CandidateTrials,
    Contender,
    PromptedWorkflow,
    Prompts,
    PromptTrials,
    SearchCost,
    elsewhere,
    remote_named,
    served_here,
)
from tuner.tools.prompt_optimizers import CandidateTree, evolve, instruct
from tuner.tools.prompt_page import PROMPT_RESULTS, leave_page
from tuner.traces import Trace, TraceStore, Usage
from tuner.traces.reading import Count, JsonReader, Text
from tuner.traces.store import closed, cut_torn_line
from tuner.tune import RunPlan, prepare_evaluation

GEPAS = ("minibatch_size", "perfect_score")
"""Settings that MIPROv2 does not use."""


@OwnFrames()
@system_faults()
def tune_prompt(
    workflow_func: Callable[..., Any] | None = None,
    judge_func: Callable[..., Any] | None = None,
    train_dataset: Any = None,
    eval_dataset: Any = None,
    init_system_prompt: str | Mapping[str, str] = "",
    config: PromptTuneConfig | None = None,
    *,
    workflow: Callable[..., Any] | None = None,
    model: TunerModelConfig | RemoteModel | None = None,
    auxiliary_models: Mapping[str, TunerModelConfig | RemoteModel | Mapping[str, Any]]
    | None = None,
    project_name: str | None = None,
    experiment_name: str | None = None,
    config_path: Any = None,
    overrides: Sequence[str] = (),
) -> Any:
    """Search for a better system prompt, or for several texts together; no weights change.

    The run directory has every rollout as a trace, every reflection, the candidates and a page. An
    interrupted search resumes when it is called again with the same `experiment_name`. Also works
    inside a running event loop.

    Args:
        workflow_func: Runs the agent on one task: `(task, model, system_prompt)`, or `(task,
            system_prompt)` if it brings its model; `auxiliary_models` and `logger` are optional.
            Async or plain.
        judge_func: Scores the response, as for `tune()`; reflections use its feedback. None: the
            workflow gives the reward.
        train_dataset: A `DatasetConfig`, a `datasets.Dataset`, a list of dicts or a path. One half
            is reflected on, the other decides which prompt is better; `total_steps` is the number
            of rows to use.
        eval_dataset: Held-out rows that measure the improvement; None skips that.
        init_system_prompt: The initial text; or texts by component, in which case the workflow
            gets a dict.
        config: How to search, and how long.
        workflow: AgentScope's name of `workflow_func`.
        model: The model for rollouts of a workflow that takes `model`: one to serve here, or a
            `RemoteModel`. None: the file's, else the tiny model included with tuner.
        auxiliary_models, project_name, experiment_name, config_path, overrides: As for `tune()`.

    Returns:
        The best prompt found, a text or a dict like the initial one, and metrics: "eval_before",
        "eval_after" and "valset_improvement" (percent) with an evaluation set and
        `compare_performance`; "search_before", "search_after", "rollouts", "failed", "reflections",
        "input_tokens", "output_tokens", "cost" and "seconds".

    Raises:
        FunctionError: A function cannot be called, or returned the wrong type.
        ConfigError: A setting is unknown, unsupported, of the wrong type or in conflict.
        MissingDependencyError: The optimizer is `mipro`, and the extra `dspy` is not installed.
        DatasetError: A dataset is missing or empty.
        TrainingError: No rollout of the first prompt got a reward, or an engine or the reflection
            model failed.
    """
    require_nothing_loads("tune_prompt()")
    given = _function(workflow_func, workflow)
    settings = config or PromptTuneConfig()
    if settings.optimizer == "mipro":
        _check_mipro(settings)
    texts = _texts(init_system_prompt)
    check_judges_alone(judge_func)
    own_model = _brings_its_model(given, model)
    proposer = settings.reflection_model or remote_named(settings.lm_model_name)
    proposer.api_key("PromptTuneConfig.reflection_model")
    _check_budget(settings, [proposer, *([model] if isinstance(model, RemoteModel) else [])])
    tasks = {SEARCH: rows_of(train_dataset, "train_dataset")}
    if eval_dataset is not None:
        tasks[HELD_OUT] = rows_of(eval_dataset, "eval_dataset")
    single = isinstance(init_system_prompt, str)
    run = prepare_evaluation(
        PromptedWorkflow(given, texts[COMPONENT] if single else texts),
        judge_func,
        eval_dataset=tasks,
        model=model if isinstance(model, TunerModelConfig) else None,
        auxiliary_models=auxiliary_models,
        project_name=project_name,
        experiment_name=experiment_name,
        config_path=config_path,
        overrides=[*overrides, f"tuner.seed={settings.seed}"],
    )
    search = PromptSearch(
        run=run,
        workflow=given,
        settings=settings,
        first=texts,
        single=single,
        model=model if isinstance(model, RemoteModel) else None,
        own_model=own_model,
        temperature=model.temperature
        if isinstance(model, TunerModelConfig) and "temperature" in model.model_fields_set
        else None,
        proposer=proposer,
    )
    return outside_event_loop(search.result)


def _function(
    workflow_func: Callable[..., Any] | None, workflow: Callable[..., Any] | None
) -> Callable[..., Any]:
    if workflow_func is not None and workflow is not None:
        raise FunctionError("workflow and workflow_func are the same argument: give one")
    given = workflow_func if workflow is None else workflow
    if given is None:
        raise FunctionError(f"no workflow: pass workflow_func, {WORKFLOW}")
    check_function(given, WORKFLOW)
    return given


def _check_mipro(settings: PromptTuneConfig) -> None:
    """Reject settings that MIPROv2 does not support, before any request or rollout."""
    if given := [name for name in GEPAS if name in settings.model_fields_set]:
        raise ConfigError(
            f"PromptTuneConfig.{given[0]} is set, but optimizer='mipro' does not reflect on single "
            "tasks: remove it, or leave optimizer at 'gepa'"
        )
    try:
        import_module("dspy.lm15")
        import_module("optuna")  # MIPROv2 imports it only after rollouts were paid for
    except ImportError as error:
        raise MissingDependencyError(
            f"optimizer='mipro' needs DSPy and Optuna: {error}; {pip_install('dspy')}, "
            "or leave optimizer at 'gepa'"
        ) from error


def _texts(init: Any) -> dict[str, str]:
    """The initial texts, by component."""
    texts = {COMPONENT: init} if isinstance(init, str) else init
    if not isinstance(texts, Mapping) or not texts:
        raise ConfigError(
            f"init_system_prompt is {init!r:.60} ({type(init).__name__}); pass a text, or a dict "
            "of texts by the names of components"
        )
    for name, text in texts.items():
        if not isinstance(name, str) or not isinstance(text, str) or not text.strip():
            of = "" if isinstance(init, str) else f"[{name!r}]"
            raise ConfigError(
                f"init_system_prompt{of} is {text!r:.60}; pass the text that the search begins with"
            )
    return dict(texts)


def _brings_its_model(workflow: Callable[..., Any], model: Any) -> bool:
    """True if the workflow takes no `model`; rejects a model that is given anyway."""
    if model is not None and not isinstance(model, TunerModelConfig | RemoteModel):
        raise ConfigError(
            f"model is {model!r:.80} ({type(model).__name__}); pass a TunerModelConfig, or a "
            "RemoteModel(base_url=..., model_name=...)"
        )
    parameters = inspect.signature(workflow).parameters
    takes = "model" in parameters or any(
        parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()
    )
    if model is not None and not takes:
        raise ConfigError(
            "model is given, but the workflow does not take it: define it as `(task, model, "
            "system_prompt)`, or omit `model`"
        )
    return not takes


def check_judges_alone(judge_func: Callable[..., Any] | None) -> None:
    if judge_func is not None and judges_groups(judge_func):
        raise FunctionError(
            f"{where(judge_func)} judges groups, so its rewards depend on the other responses: a "
            "search compares separate rollouts, so pass a judge that takes `response`"
        )


def rows_of(dataset: Any, role: str) -> list[Task]:
    """The rows of a dataset, limited to its `total_steps`."""
    if dataset is None:
        raise ConfigError(f"no tasks: pass {role}")
    fields: frozenset[str] = getattr(dataset, "model_fields_set", frozenset())
    if "total_epochs" in fields:
        raise ConfigError(
            f"{role}: total_epochs is set, but a search does not use epochs; remove it"
        )
    limit = dataset.total_steps if "total_steps" in fields else None
    if isinstance(dataset, DatasetConfig) or not fields:
        return list(load_tasks(dataset, role=role)[:limit])
    # AgentScope's class of this name.
    same = DatasetConfig(path=dataset.path, name=dataset.name, split=dataset.split)
    return list(load_tasks(same, role=role)[:limit])


def _check_budget(settings: PromptTuneConfig, models: Sequence[RemoteModel]) -> None:
    limits = (settings.max_rollouts, settings.max_tokens, settings.max_cost)
    if settings.optimization_level is None and limits == (None, None, None):
        raise ConfigError(
            "PromptTuneConfig.optimization_level is None, and nothing else limits the search: set "
            "max_rollouts, max_tokens or max_cost"
        )
    unpriced = [model.model_name for model in models if not any(model.prices)]
    if settings.max_cost is not None and unpriced:
        raise ConfigError(
            f"PromptTuneConfig.max_cost is set, but {unpriced[0]} has no prices: set input_price "
            "and output_price of its RemoteModel, the prices of a million tokens"
        )


# The model that proposes prompts; each answer is written to disk before it is used.


_ANSWERS = JsonReader[dict[str, Any]](
    closed(
        "Reflected",
        {"asked": Text, "prompt": Text, "answer": Text, "usage": tuple[Count, Count]},
    ),
    "a reflection",
)


class Reflection:
    """Calls the model that proposes prompts; answers on disk are not requested again.

    Equal questions are separate samples: the k-th gets the k-th answer.

        {"asked": sha256, "prompt": "...", "answer": "...", "usage": [900, 120]}
    """

    def __init__(
        self,
        client: openai.AsyncOpenAI,
        model_name: str,
        path: Path,
        *,
        prices: tuple[float, float],
        spent: Callable[[], SearchCost],
    ) -> None:
        self._client, self._model_name = client, model_name
        self._path, self._prices, self._spent = path, prices, spent
        self._known: defaultdict[str, deque[tuple[str, Usage]]] = defaultdict(deque)
        for _, _, row in _ANSWERS.lines(path, "delete the line to request it again"):
            self._known[row["asked"]].append((row["answer"], Usage(*row["usage"])))

    async def ask(self, prompt: str) -> str:
        """The answer to a prompt, sent as one user message."""
        asked = hashlib.sha256(prompt.encode(errors="surrogatepass")).hexdigest()
        if self._known[asked]:
            answer, usage = self._known[asked].popleft()
        else:
            answer, usage = await self._asked(prompt)
            row = {"asked": asked, "prompt": prompt, "answer": answer}
            used = [usage.input_tokens, usage.output_tokens]
            cut_torn_line(self._path)
            with self._path.open("ab") as file:
                file.write(json.dumps({**row, "usage": used}).encode() + b"\n")
        spent = self._spent()
        spent.reflections += 1
        spent.add(usage, self._prices)
        return answer

    async def _asked(self, prompt: str) -> tuple[str, Usage]:
        who = f"the reflecting model {self._model_name!r} at {self._client.base_url}"
        try:
            answer = await self._client.chat.completions.create(
                model=self._model_name, messages=[{"role": "user", "content": prompt}]
            )
        except openai.OpenAIError as error:
            raise TrainingError(
                f"{who} gave no answer: {type(error).__name__}: {error}; start the search again to "
                "resume from here"
            ) from error
        text = answer.choices[0].message.content if answer.choices else None
        if not text or not text.strip():
            raise TrainingError(f"{who} answered without text: set another model")
        said = answer.usage
        return text, Usage(said.prompt_tokens, said.completion_tokens) if said else Usage()


logger = logging.getLogger("tuner")

COMPARED = 100
"""Maximum number of rows that candidates are compared on."""
FEW = 10
"""With fewer rows, all are used for reflection and for comparison."""
# Fields of `PromptTuneConfig` that may change in a resumed search: those that affect its result,
# and the others.
_RESULT = (
    "compare_performance",
    "max_cost",
    "max_rollouts",
    "max_tokens",
    "optimization_level",
)
_MAY_CHANGE = (
    "eval_display_progress",
    "eval_display_table",
    "eval_num_threads",
    "lm_model_name",
    "reflection_model",
)
# Number of candidates of a level, as in DSPy's optimizers; five proposals for each.
LEVELS = {"light": 6, "medium": 12, "heavy": 18}
PROPOSALS = 5


@dataclass(eq=False)
class PromptSearch:
    """One search: its directory, its budget, its messages and its result."""

    run: RunPlan
    workflow: Callable[..., Any]
    settings: PromptTuneConfig
    first: dict[str, str]
    single: bool
    model: RemoteModel | None
    own_model: bool
    temperature: float | None
    proposer: RemoteModel
    _warned: bool = field(default=False, init=False)

    def result(self) -> tuple[Any, dict[str, float]]:
        """The result of `tune_prompt()`, from the search or from an earlier one on disk."""
        from tuner.runs.record import open_directory

        with open_directory(self.run.config, self.run.eval_tasks) as directory:
            if not self._continues(directory):
                directory.result.unlink(missing_ok=True)
            if directory.result.exists():
                logger.warning("%s is complete; returning its result", directory.path)
                found = PROMPT_RESULTS.document(
                    directory.result, "delete it: it is rewritten from the traces"
                )
                prompts, metrics = found["prompts"], found["metrics"]
            else:
                with reported(directory, leave_page):
                    began = time.perf_counter()
                    with quiet_agents():
                        prompts, metrics = run_async(self._found(directory))
                    metrics["seconds"] = time.perf_counter() - began
                    text = json.dumps({"prompts": prompts, "metrics": metrics}, indent=2)
                    write_atomically(directory.result, text)
            best = next(iter(prompts.values())) if self.single else prompts
            return best, metrics

    def _continues(self, directory: RunDirectory) -> bool:
        """True if the directory's result is from this search; writes `search.json`."""
        now = {"first": self.first, **concealed(self.settings.model_dump(mode="json"), {})}
        file = directory.path / "search.json"
        if not file.exists() and directory.has_begun():
            raise ConfigError(
                f"{directory.path} holds a run of tune(): choose another experiment_name"
            )
        before = now
        if file.exists():
            before = OBJECTS.document(file, "choose another experiment_name")
        changed = [name for name in now if before.get(name) != now[name]]
        if decisive := [name for name in changed if name not in (*_RESULT, *_MAY_CHANGE)]:
            raise ConfigError(
                f"{directory.path} holds a search that was started with other settings: "
                f"{', '.join(decisive)} changed. Choose another experiment_name"
            )
        write_atomically(file, json.dumps(now, indent=2))
        return not any(name in _RESULT for name in changed)

    def _contender(self) -> AbstractAsyncContextManager[Contender]:
        if self.own_model or self.model is not None:
            return elsewhere(self.run, self.model)
        return served_here(self.run)

    async def _found(self, directory: RunDirectory) -> tuple[dict[str, str], dict[str, float]]:
        config, settings = self.run.config, self.settings
        monitor = ConsoleMonitor(1, _console(quiet=not settings.eval_display_progress))
        client = remote_client(self.proposer, "PromptTuneConfig.reflection_model")
        spent = SearchCost()
        reflection = Reflection(
            client,
            self.proposer.model_name,
            directory.path / "reflections.jsonl",
            prices=self.proposer.prices,
            spent=lambda: spent,
        )
        arguments = config.rollout_args(config.buffer.explorer_input.eval_tasksets[0])
        if self.temperature is not None:
            arguments = arguments.model_copy(update={"temperature": self.temperature})
        async with self._contender() as contender:
            trials = PromptTrials(
                workflow=self.workflow,
                contender=contender,
                trials=CandidateTrials(
                    self.run.eval_tasks,
                    TraceStore(directory.traces),
                    monitor,
                    settings.eval_num_threads,
                ),
                log=CandidateLog(directory.path / "candidates.jsonl"),
                defaults=SamplingDefaults(**arguments.model_dump()),
                single=self.single,
                prices=self.model.prices if self.model else (0.0, 0.0),
                spent=spent,
            )
            with monitor:
                try:
                    return await self._searched(directory, trials, reflection, monitor)
                finally:
                    await client.close()

    async def _searched(
        self,
        directory: RunDirectory,
        trials: PromptTrials,
        reflection: Reflection,
        monitor: ConsoleMonitor,
    ) -> tuple[dict[str, str], dict[str, float]]:
        settings, rows = self.settings, range(len(trials.tasks[SEARCH]))
        reflect_on, compare_on = _halves(list(rows), settings.seed)
        budget = self._rollouts(len(compare_on))
        monitor.say(
            f"{len(reflect_on)} tasks to reflect on, {len(compare_on)} to compare on; "
            f"{self._limits(budget)}; {directory.path}"
        )

        async def evaluate(prompts: Prompts, asked: Sequence[int]) -> list[Trace]:
            number = trials.log.number(prompts)
            monitor.begin(f"candidate {number}", len(asked), step=1)
            traces = await trials.run(prompts, SEARCH, asked)
            self._look_at(traces, first=number == 0)
            return traces

        tree = CandidateTree(directory, trials, monitor, compare_on, budget)
        common: dict[str, Any] = {
            "reflect_on": reflect_on,
            "evaluate": evaluate,
            "ask": reflection.ask,
            "spent_all": lambda: self._spent_all(trials.spent, budget),
            "failure_score": settings.failure_score,
            "seed": settings.seed,
        }
        if settings.optimizer == "mipro":
            most = LEVELS[settings.optimization_level or "light"]
            await instruct(self.first, tasks=trials.tasks[SEARCH], tree=tree, most=most, **common)
        else:
            await evolve(
                self.first,
                compare_on=compare_on,
                callbacks=[tree],
                minibatch_size=settings.minibatch_size,
                perfect_score=settings.perfect_score,
                **common,
            )
        best = tree.best["prompts"]
        metrics = {"search_before": tree.first["mean"], "search_after": tree.best["mean"]}
        metrics |= await self._held_out(trials, best, monitor)
        spent = trials.spent
        metrics |= {
            "rollouts": spent.rollouts,
            "failed": spent.failed.total(),
            "reflections": spent.reflections,
            "input_tokens": spent.usage.input_tokens,
            "output_tokens": spent.usage.output_tokens,
            "cost": spent.cost,
        }
        return best, metrics

    def _rollouts(self, compared: int) -> int | None:
        settings = self.settings
        if settings.max_rollouts is not None or settings.optimization_level is None:
            return settings.max_rollouts
        if settings.max_tokens is not None or settings.max_cost is not None:
            return None
        tried = compared + PROPOSALS * 2 * settings.minibatch_size
        return compared + LEVELS[settings.optimization_level] * tried

    def _limits(self, rollouts: int | None) -> str:
        settings = self.settings
        found = {"rollouts": rollouts, "tokens": settings.max_tokens, "money": settings.max_cost}
        said = [f"{limit:g} {name}" for name, limit in found.items() if limit is not None]
        return f"at most {' or '.join(said)}"

    def _spent_all(self, spent: SearchCost, rollouts: int | None) -> bool:
        tokens = spent.usage.input_tokens + spent.usage.output_tokens
        limits = ((spent.rollouts, rollouts), (tokens, self.settings.max_tokens))
        over = any(limit is not None and used >= limit for used, limit in limits)
        return over or (self.settings.max_cost is not None and spent.cost >= self.settings.max_cost)

    def _look_at(self, traces: Sequence[Trace], *, first: bool) -> None:
        rewards = [trace.reward for trace in traces if trace.reward is not None]
        if first and not rewards:
            trace = traces[0]
            raise TrainingError(
                f"no rollout of the first prompt got a reward; for example, {trace.id} ended with "
                f"{trace.outcome}: {trace.error}"
            )
        floor = self.settings.failure_score
        if not self._warned and min(rewards, default=floor) < floor:
            self._warned = True
            logger.warning(
                "a reward is %g: the search prefers failed rollouts, since "
                "PromptTuneConfig.failure_score is %g; set it below every reward",
                min(rewards),
                floor,
            )

    async def _held_out(
        self, trials: PromptTrials, best: Prompts, monitor: ConsoleMonitor
    ) -> dict[str, float]:
        """Scores before and after on held-out rows."""
        rows = range(len(trials.tasks.get(HELD_OUT, ())))
        if not rows:
            return {}
        means: dict[str, float] = {}
        compared = {"before": self.first} if self.settings.compare_performance else {}
        for when, prompts in {**compared, "after": best}.items():
            monitor.begin(f"{HELD_OUT}, {when}", len(rows), step=1)
            traces = await trials.run(prompts, HELD_OUT, rows)
            rewards = [trace.reward for trace in traces if trace.reward is not None]
            if not rewards:
                raise TrainingError(
                    f"no rollout on the evaluation set got a reward; {traces[0].error}"
                )
            means[when] = fmean(rewards)
            monitor.say(f"{HELD_OUT}, {when}: {_interval(rewards)}{_failed(traces)}")
            if when == "after":
                self._show(traces, monitor)
        return {f"eval_{when}": mean for when, mean in means.items()} | _improvement(means)

    def _show(self, traces: Sequence[Trace], monitor: ConsoleMonitor) -> None:
        for trace in traces[: self.settings.eval_display_table]:
            reward = "no reward" if trace.reward is None else f"reward {trace.reward:.3g}"
            said = " ".join((trace.response or trace.error or "").split())
            monitor.say(f"  {reward}  {said[:90]}")


def _halves(rows: list[int], seed: int) -> tuple[list[int], list[int]]:
    """Rows to reflect on, and rows to compare on: the same if there are few.

    A prompt may quote the rows it was reflected on, so those do not decide.
    """
    if len(rows) < FEW:
        return rows, rows
    random.Random(seed).shuffle(rows)
    compared = min(len(rows) // 2, COMPARED)
    return sorted(rows[compared:]), sorted(rows[:compared])


def _improvement(means: Mapping[str, float]) -> dict[str, float]:
    """Improvement in percent, as in AgentScope; infinite for a change from a baseline of 0."""
    if "before" not in means:
        return {}
    before, gained = means["before"], means["after"] - means["before"]
    if before:
        return {"valset_improvement": gained / abs(before) * 100}
    return {"valset_improvement": math.copysign(math.inf, gained) if gained else 0.0}


def _interval(rewards: Sequence[float]) -> str:
    found = estimate(rewards)
    return "" if found is None else f"reward {found.text()}"


def _failed(traces: Sequence[Trace]) -> str:
    failed = sum(trace.reward is None for trace in traces)
    return f", {failed} failed" if failed else ""


def _console(*, quiet: bool) -> Any:
    from rich.console import Console

    return Console(quiet=quiet, highlight=False, soft_wrap=True)
