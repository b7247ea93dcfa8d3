"""Rollouts of prompts: each candidate has a number, each rollout a trace, and all of it a price."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from tuner.config import RemoteModel, RunConfig
from tuner.errors import ConfigError, TrainingError
from tuner.gateway import SamplingDefaults, Session
from tuner.rollouts import RolloutRunner, Rollouts
from tuner.rollouts.chat_models import chat_model, default_kind, remote_client
from tuner.tasks.datasets import Task
from tuner.tasks.functions import Signature, WorkflowOutput, as_workflow_output, call_function
from tuner.traces import RolloutId, Trace, TraceStore, Usage
from tuner.traces.reading import Count, JsonReader, Text
from tuner.traces.store import closed, cut_torn_line
from tuner.tune import Run

# A workflow that is given prompts, as a run calls workflows. Nothing here needs torch.


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


# `provider/model`, as LiteLLM and DSPy name models, as a URL and the name of a key's variable.


@dataclass(frozen=True)
class Provider:
    """Where a provider's models are.

    Attributes:
        base_url: Of its OpenAI-compatible API.
        key: Environment variable that holds the API key; None where none is needed.
        base_url_variables: Environment variables with another URL, of which the first that is set
            wins.
    """

    base_url: str
    key: str | None
    base_url_variables: tuple[str, ...] = ()


PROVIDERS = {
    "anthropic": Provider("https://api.anthropic.com/v1", "ANTHROPIC_API_KEY"),
    "dashscope": Provider(
        "https://dashscope.aliyuncs.com/compatible-mode/v1",
        "DASHSCOPE_API_KEY",
        ("DASHSCOPE_API_BASE",),
    ),
    "deepseek": Provider("https://api.deepseek.com/v1", "DEEPSEEK_API_KEY", ("DEEPSEEK_API_BASE",)),
    "gemini": Provider("https://generativelanguage.googleapis.com/v1beta/openai", "GEMINI_API_KEY"),
    "groq": Provider("https://api.groq.com/openai/v1", "GROQ_API_KEY"),
    "mistral": Provider("https://api.mistral.ai/v1", "MISTRAL_API_KEY"),
    "ollama": Provider("http://localhost:11434/v1", None, ("OLLAMA_API_BASE",)),
    "openai": Provider(
        "https://api.openai.com/v1", "OPENAI_API_KEY", ("OPENAI_BASE_URL", "OPENAI_API_BASE")
    ),
    "openrouter": Provider("https://openrouter.ai/api/v1", "OPENROUTER_API_KEY"),
    "together_ai": Provider("https://api.together.xyz/v1", "TOGETHERAI_API_KEY"),
}


def remote_named(name: str) -> RemoteModel:
    """The model that `provider/model` stands for.

    Raises:
        ConfigError: There is no such provider here.
    """
    provider, _, model = name.partition("/")
    found = PROVIDERS.get(provider)
    if found is None or not model:
        raise ConfigError(
            f"PromptTuneConfig.lm_model_name is {name!r}: give provider/model with a provider of "
            f"{', '.join(PROVIDERS)}, or set reflection_model to a RemoteModel(base_url=..., "
            "model_name=..., api_key_env=...)"
        )
    urls = (os.environ.get(variable) for variable in found.base_url_variables)
    url = next(filter(None, urls), found.base_url)
    return RemoteModel(base_url=url, model_name=model, api_key_env=found.key)


# Whom rollouts are asked of while nothing is trained: a model here, one elsewhere, or nobody.


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
    from tuner.runs.stack import build_stack

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
    from tuner.gateway.relay import Relay
    from tuner.runs.auxiliary import AuxiliaryModels
    from tuner.runs.models import choose_device, choose_dtype
    from tuner.runs.stack import add_auxiliary_models, rollout_settings

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


PER_PRICE = 1_000_000
"""Tokens that a price is for."""


@dataclass
class Spent:
    """What a search took so far, with what an interrupted part of it took.

    Attributes:
        rollouts: That ended, in whatever way.
        failed: Those without a reward, by outcome.
        usage: Tokens of rollouts and reflections.
        cost: By the prices that are known.
        reflections: Prompts that were asked for.
    """

    rollouts: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    usage: Usage = field(default_factory=Usage)
    cost: float = 0.0
    reflections: int = 0

    def add(self, usage: Usage, prices: tuple[float, float]) -> None:
        """Count tokens, at prices for a million of them."""
        self.usage += usage
        tokens = (usage.input_tokens, usage.output_tokens)
        self.cost += sum(n * price / PER_PRICE for n, price in zip(tokens, prices, strict=True))


class CandidateLog:
    """The candidates by number, one line each, in the order in which they were first tried.

        {"number": 2, "prompts": {"system_prompt": "..."}}

    Args:
        path: The file; what it holds is known from the beginning.
        what: What a candidate is, as a line calls it.

    Raises:
        TunerError: A line is not of this form.
    """

    def __init__(self, path: Path, what: str = "prompts") -> None:
        self._path, self._what = path, what
        self._numbers: dict[tuple[tuple[str, str], ...], int] = {}
        form = closed("TriedCandidate", {"number": Count, what: dict[Text, Text]})
        lines = JsonReader[dict[str, Any]](form, "a candidate").lines
        for _, _, row in lines(path, "give this search another experiment_name to begin it anew"):
            self._numbers[_key(row[what])] = row["number"]

    def number(self, prompts: Prompts) -> int:
        """The number of a candidate, which it keeps."""
        key = _key(prompts)
        if key not in self._numbers:
            number = max(self._numbers.values(), default=-1) + 1
            cut_torn_line(self._path)
            with self._path.open("ab") as file:
                line = json.dumps({"number": number, self._what: dict(prompts)}, ensure_ascii=False)
                file.write(line.encode(errors="backslashreplace") + b"\n")
            self._numbers[key] = number
        return self._numbers[key]


def _key(prompts: Prompts) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(prompts.items()))


@dataclass(eq=False)
class Trials:
    """Makes the rollouts of candidates, and knows those that were made before.

    The k-th time that a candidate is tried on a task is rollout k of that task, and its trace is
    stored under the candidate's number as step. So a search that is begun again with the same seed
    asks for the same rollouts, and those on disk are not run again.

    Args:
        workflow: The user's.
        contender: Whom rollouts are asked of.
        tasks: Rows of each split.
        store: Where traces are.
        log: The candidates.
        defaults: What calls that do not say are sampled with.
        max_running: Rollouts at the same time.
        single: Whether the workflow is given a text, and no dict.
        prices: Of the contender's tokens.
        on_trace: Sees every rollout that ends, known ones too.

    Attributes:
        spent: What was spent so far.
    """

    workflow: Callable[..., Any]
    contender: Contender
    tasks: Mapping[str, Sequence[Task]]
    store: TraceStore
    log: CandidateLog
    defaults: SamplingDefaults
    max_running: int
    single: bool
    prices: tuple[float, float]
    on_trace: Callable[[Trace], None]
    spent: Spent = field(default_factory=Spent)
    _tries: Counter[tuple[str, int, int]] = field(default_factory=Counter, init=False)
    _known: dict[tuple[str, int], list[Trace]] = field(default_factory=dict, init=False)

    async def run(self, prompts: Prompts, split: str, rows: Sequence[int]) -> list[Trace]:
        """One rollout of a candidate on each of these rows, in their order.

        Raises:
            FunctionError: A function returned something of the wrong type.
            TrainingError: The engine failed.
        """
        number = self.log.number(prompts)
        ids = []
        for row in rows:
            ids.append(RolloutId(number, row, self._tries[split, number, row], split))
            self._tries[split, number, row] += 1
        known = self._recorded(split, number)
        wanted = {id: self.tasks[split][id.task] for id in ids}
        given = dict(prompts)
        prompted = Prompted(self.workflow, next(iter(given.values())) if self.single else given)
        runner = replace(self.contender.runner, workflow=prompted)
        traces = await Rollouts(runner, self.store, max_running=self.max_running).run(
            wanted,
            self.defaults,
            known=[trace for trace in known if trace.id in wanted],
            on_trace=lambda trace: self.on_trace(trace) if trace.final else None,
        )
        self.contender.check()
        self._count(traces)
        final = {trace.id: trace for trace in traces if trace.final}
        return [final[id] for id in ids]

    def _recorded(self, split: str, number: int) -> list[Trace]:
        """What was on disk of a candidate when this began."""
        if (split, number) not in self._known:
            self._known[split, number] = self.store.read(split, number)
        return self._known[split, number]

    def _count(self, traces: Sequence[Trace]) -> None:
        for trace in traces:
            self.spent.add(trace.usage, self.prices)
            self.spent.cost += trace.metrics.get("judge_cost", 0.0)
            if trace.final:
                self.spent.rollouts += 1
                if trace.reward is None:
                    self.spent.failed[trace.outcome.value] += 1
