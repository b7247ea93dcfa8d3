"""Candidates and their rollouts on tasks, shared by `tuner eval`, `select_model()` and
`tune_prompt()`.

A candidate is a model, a checkpoint, an adapter or a prompt. `CandidateTrials` makes its rollouts
and skips those that are on disk; torch is imported only when a model is served.
"""

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
from tuner.config.keys import check_path, located
from tuner.config.schema import FROZEN, LoraSection, SynchronizerSection
from tuner.config.source import PACKAGE, lookup
from tuner.errors import ConfigError, TrainingError, TunerError
from tuner.gateway import SamplingDefaults, Session
from tuner.rollouts import RolloutRunner, Rollouts
from tuner.rollouts.chat_models import chat_model, default_kind, remote_client
from tuner.runs.console import ConsoleMonitor
from tuner.runs.directory import ADAPTER_CONFIG, MANIFEST, OBJECTS, RunDirectory, damage
from tuner.runs.estimates import is_run
from tuner.tasks.datasets import Task
from tuner.tasks.functions import (
    WORKFLOW_VALUES,
    Signature,
    WorkflowOutput,
    as_workflow_output,
    call_function,
)
from tuner.traces import RolloutId, Trace, TraceStore, Usage
from tuner.traces.reading import Count, JsonReader, Text
from tuner.traces.store import closed, cut_torn_line
from tuner.tune import RunPlan

# Weights: a model, a checkpoint or a run.


_DAMAGED = "delete it: the checkpoint is found without it"


@dataclass(frozen=True)
class Candidate:
    """Weights to compare or export.

    Attributes:
        name: Display name.
        path: Folder of a model or an adapter, or a model as in `model.model_path`.
        base: The model of an adapter, or of those of roles, as in `model.model_path`; else None.
        roles: The folder has an adapter for each of these.
        run: The run it comes from, if available.
        step: The step of that run.
    """

    name: str
    path: str
    base: str | None = None
    run: RunDirectory | None = None
    step: int | None = None
    roles: tuple[str, ...] = ()

    @property
    def load_vision(self) -> bool:
        """Whether its run has `tuner.images.load_vision`."""
        stored = {} if self.run is None else self.run.stored_config()
        return bool(lookup(stored, "tuner.images.load_vision"))

    @property
    def recorded_base(self) -> str | None:
        """The model named in an adapter's config; None if this is not an adapter."""
        file = Path(self.path, *self.roles[:1], ADAPTER_CONFIG)
        if not file.is_file():
            return None
        return OBJECTS.document(file, "export or train it again").get("base_model_name_or_path")


def find_candidate(given: str | Path) -> Candidate:
    """Find weights by name: a run (its newest checkpoint), a checkpoint or a model."""
    folder = Path(given).expanduser()
    place = located(str(given), "the candidate")
    if place is not None and place.is_file() and not str(given).startswith(PACKAGE):
        return Candidate(place.name, str(place.resolve()))
    if not folder.is_dir():
        if place is None:
            check_path(str(given), "the candidate", what="model, a checkpoint or a run")
        return Candidate(str(given), str(given))
    folder = folder.resolve()
    run = RunDirectory(folder)
    # A folder of projects is often also called checkpoints.
    if is_run(folder) or run.checkpoint_steps():
        return _newest(run)
    if not (_roles(folder) or any((folder / name).is_file() for name in _WEIGHTS)):
        raise TunerError(
            f"{given} is not a run, a checkpoint or a model: it has no checkpoints/, "
            f"{ADAPTER_CONFIG} or config.json; give <checkpoint_root_dir>/<project>/<name> or a "
            "folder in its checkpoints/"
        )
    owner = RunDirectory(folder.parent.parent)
    of_run = folder.parent == owner.checkpoints and owner.config.is_file()
    return _of_folder(folder, owner if of_run else None)


_WEIGHTS = ("config.json", ADAPTER_CONFIG)


def _roles(folder: Path) -> tuple[str, ...]:
    """Roles of whose adapters a folder has a folder each."""
    return tuple(sorted(file.parent.name for file in folder.glob(f"*/{ADAPTER_CONFIG}")))


def _newest(run: RunDirectory) -> Candidate:
    steps = run.checkpoint_steps()
    if steps:
        return _of_folder(run.checkpoint(steps[-1]), run)
    written = OBJECTS.document(run.result, _DAMAGED) if run.result.is_file() else {}
    folder = written.get("checkpoint") if isinstance(written, dict) else None
    # Trinity-RFT stores them in another folder of the run
    if folder is None or not Path(folder).is_dir():
        raise TunerError(f"{run.path} has no checkpoint yet: wait for trainer.save_interval")
    return _of_folder(Path(folder), run)


def _of_folder(folder: Path, run: RunDirectory | None) -> Candidate:
    of_run = run is not None and folder.parent == run.checkpoints
    if (of_run or (folder / MANIFEST).is_file()) and (found := damage(folder)):
        raise TunerError(f"{folder} is damaged ({found}): take another checkpoint")
    number = folder.name.rpartition("_")[2]
    step = int(number) if run is not None and number.isdecimal() else None
    name = folder.name if run is None else run.path.name
    name = name if step is None else f"{name} step {step}"
    roles = () if any((folder / one).is_file() for one in _WEIGHTS) else _roles(folder)
    candidate = Candidate(name, str(folder), None, run, step, roles)
    if not roles and not (folder / ADAPTER_CONFIG).is_file():
        return candidate
    base = (
        lookup(run.stored_config(), "model.model_path") if run is not None else None
    ) or candidate.recorded_base
    if not base:
        raise TunerError(
            f"{folder} is an adapter that does not name its model: set "
            f"base_model_name_or_path in {ADAPTER_CONFIG}"
        )
    return replace(candidate, base=str(base))


def of_configuration(config: RunConfig) -> list[Candidate]:
    """The model that a run starts from, and its newest checkpoint if there is one."""
    model, lora = config.model.model_path, config.model.lora
    found = [find_candidate(model)]
    if lora is not None and lora.path is not None:  # those of roles may begin at different places
        found = [replace(find_candidate(lora.path), base=model)]
    if RunDirectory(config.run_dir).checkpoint_steps():
        found.append(find_candidate(config.run_dir))
    return found


def with_weights(config: RunConfig, candidate: Candidate) -> RunConfig:
    """The configuration with a candidate's weights, for generation only."""
    weights: dict[str, Any] = {"model_path": candidate.base or candidate.path}
    weights |= {"lora_configs": (), "adapters": {}}
    adapter = partial(LoraSection, base_model_name=candidate.recorded_base)
    tuner = config.tuner
    if candidate.load_vision:
        images = tuner.images.model_copy(update={"load_vision": True})
        tuner = tuner.model_copy(update={"images": images})
    if candidate.roles:
        stored = {} if candidate.run is None else candidate.run.stored_config()
        known = lookup(stored, "model.adapters", {})
        weights["adapters"] = {role: FROZEN for role, one in known.items() if one == FROZEN} | {
            role: adapter(path=str(Path(candidate.path) / role)) for role in candidate.roles
        }
    elif candidate.base is not None:
        weights["lora_configs"] = (adapter(path=candidate.path),)
    return config.model_copy(
        update={
            "model": config.model.model_copy(update=weights),
            "synchronizer": SynchronizerSection(),
            "tuner": tuner,
        }
    )


# Prompts, and workflows that take them.


Prompts = Mapping[str, str]
"""Texts of a prompt search, by component."""
COMPONENT = "system_prompt"
"""Name of the component in a search for a single text."""
SEARCH, HELD_OUT = "search", "eval"
"""Splits of the rows that a search uses, and of the held-out rows."""
SELECTION = "selection"
"""Split of the rows that models are compared on."""
Prices = tuple[float, float]
"""Price of a million input tokens, and of a million output tokens."""
WORKFLOW = Signature(
    "workflow",
    ("task", "system_prompt"),
    ("model", "auxiliary_models", "logger"),
    WorkflowOutput.__name__,
    WORKFLOW_VALUES,
)


@dataclass(frozen=True)
class PromptedWorkflow:
    """Calls a workflow `(task, system_prompt)`, optionally with `model`, as runs call workflows."""

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


# Resolve `provider/model`, as in LiteLLM and DSPy, to a URL and the variable with the key.


@dataclass(frozen=True)
class Provider:
    """A provider's OpenAI-compatible API, and the variables for its key and for another URL."""

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
    """The remote model for `provider/model`."""
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


# Models that serve rollouts without training: local, remote, or the workflow's own.


@dataclass(frozen=True)
class Contender:
    """A model that serves a candidate's rollouts; `failure()` is its engine's error, or None."""

    runner: RolloutRunner
    failure: Callable[[], Exception | None] = lambda: None


def _check_settings(config: RunConfig) -> None:
    if config.tuner.workers:
        raise ConfigError(
            f"tuner.workers is {config.tuner.workers}, but tune_prompt() and select_model() run "
            "the workflow and the judge in this process: set it to 0"
        )


@asynccontextmanager
async def served_here(run: RunPlan, *, workers: bool = False) -> AsyncIterator[Contender]:
    """Serve the configuration's model on a local engine, optionally with `tuner.workers`."""
    from tuner.runs.stack import build_stack

    if not workers:
        _check_settings(run.config)
    stack = build_stack(run.config, workflow=run.workflow, judge=run.judge, apart=workers)
    try:
        assert stack.runner is not None, "prepare_evaluation() requires a workflow"
        yield Contender(stack.runner, lambda: stack.engine.failure)
    finally:
        await stack.aclose()


@asynccontextmanager
async def elsewhere(
    run: RunPlan,
    remote: RemoteModel | None,
    make_model: Callable[[Session], Any] | None = None,
) -> AsyncIterator[Contender]:
    """Use a remote model; None if the workflow brings its own, whose calls are not recorded.

    `make_model` creates the chat model for a session's agent; None for one of the gateway's.
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
    assert run.workflow is not None, "prepare_evaluation() requires a workflow"
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
"""Number of tokens that a price covers."""


@dataclass
class SearchCost:
    """Cost of a search so far, including interrupted parts; failed rollouts by outcome."""

    rollouts: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    usage: Usage = field(default_factory=Usage)
    cost: float = 0.0
    reflections: int = 0

    def add(self, usage: Usage, prices: Prices) -> None:
        """Add tokens at these prices per million."""
        self.usage += usage
        tokens = (usage.input_tokens, usage.output_tokens)
        self.cost += sum(n * price / PER_PRICE for n, price in zip(tokens, prices, strict=True))


class CandidateLog:
    """Candidates by number, one line each, in the order of their first trial.

        {"number": 2, "prompts": {"system_prompt": "..."}}

    `what` is the candidate's key in its line.
    """

    def __init__(self, path: Path, what: str = "prompts") -> None:
        self._path, self._what = path, what
        self._numbers: dict[tuple[tuple[str, str], ...], int] = {}
        form = closed("TriedCandidate", {"number": Count, what: dict[Text, Text]})
        lines = JsonReader[dict[str, Any]](form, "a candidate").lines
        for _, _, row in lines(path, "choose another experiment_name to start over"):
            self._numbers[_key(row[what])] = row["number"]

    def number(self, prompts: Prompts) -> int:
        """The candidate's permanent number."""
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
class CandidateTrials:
    """Makes the rollouts of candidates; rollouts in the store are not run again.

    Rollout k of a task is a candidate's k-th attempt at it. Its trace has the candidate's number as
    step, and the monitor shows it when it ends.
    """

    tasks: Mapping[str, Sequence[Task]]
    store: TraceStore | None
    monitor: ConsoleMonitor
    max_running: int
    abort_on_failure: bool = False

    def known(self, split: str, number: int) -> list[Trace]:
        """All recorded attempts of a candidate."""
        return [] if self.store is None else self.store.read(split, number)

    async def run(
        self,
        contender: Contender,
        ids: Sequence[RolloutId],
        defaults: SamplingDefaults,
        *,
        known: Sequence[Trace] = (),
        workflow: Callable[..., Any] | None = None,
    ) -> list[Trace]:
        """All attempts at these rollouts, sorted by rollout; `known` ones are not run again."""
        wanted = {id: self.tasks[id.split][id.task] for id in ids}
        runner = contender.runner
        if workflow is not None:
            runner = replace(runner, workflow=workflow)
        traces = await Rollouts(runner, self.store, max_running=self.max_running).run(
            wanted,
            defaults,
            known=[trace for trace in known if trace.id in wanted],
            abort_on_failure=self.abort_on_failure,
            on_trace=lambda trace: self.monitor.rollout_done(trace) if trace.final else None,
        )
        if (failure := contender.failure()) is not None:
            raise TrainingError(str(failure))
        return traces


@dataclass(eq=False)
class PromptTrials:
    """Makes the rollouts of prompts, numbers the prompts and counts the cost.

    A search restarted with the same seed requests the same rollouts, so those on disk are not run
    again. A workflow gets a text if `single`, else a dict.
    """

    workflow: Callable[..., Any]
    contender: Contender
    trials: CandidateTrials
    log: CandidateLog
    defaults: SamplingDefaults
    single: bool
    prices: Prices
    spent: SearchCost = field(default_factory=SearchCost)
    _tries: Counter[tuple[str, int, int]] = field(default_factory=Counter, init=False)
    _known: dict[tuple[str, int], list[Trace]] = field(default_factory=dict, init=False)

    @property
    def tasks(self) -> Mapping[str, Sequence[Task]]:
        return self.trials.tasks

    async def run(self, prompts: Prompts, split: str, rows: Sequence[int]) -> list[Trace]:
        """One rollout of a candidate on each of these rows, in order."""
        number = self.log.number(prompts)
        ids = []
        for row in rows:
            ids.append(RolloutId(number, row, self._tries[split, number, row], split))
            self._tries[split, number, row] += 1
        if (split, number) not in self._known:  # as on disk at the start
            self._known[split, number] = self.trials.known(split, number)
        given = dict(prompts)
        traces = await self.trials.run(
            self.contender,
            ids,
            self.defaults,
            known=self._known[split, number],
            workflow=PromptedWorkflow(
                self.workflow, next(iter(given.values())) if self.single else given
            ),
        )
        self._count(traces)
        final = {trace.id: trace for trace in traces if trace.final}
        return [final[id] for id in ids]

    def _count(self, traces: Sequence[Trace]) -> None:
        for trace in traces:
            self.spent.add(trace.usage, self.prices)
            self.spent.cost += trace.metrics.get("judge_cost", 0.0)
            if trace.final:
                self.spent.rollouts += 1
                if trace.reward is None:
                    self.spent.failed[trace.outcome.value] += 1
