"""One search for prompts: its directory, its budget, what is said of it and what is returned."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import random
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import openai

from tuner.config import RemoteModel
from tuner.errors import ConfigError, TrainingError
from tuner.gateway import SamplingDefaults
from tuner.rollouts.chat_models import remote_client
from tuner.runs.console import ConsoleMonitor
from tuner.runs.directory import OBJECTS, RunDirectory, reported, run_async, write_atomically
from tuner.runs.estimates import estimate
from tuner.runs.record import open_directory
from tuner.tasks.settings import PromptTuneConfig
from tuner.tools.prompt_optimizers import CandidateTree, evolve, instruct
from tuner.tools.prompt_page import leave_page
from tuner.tools.trials import (
    HELD_OUT,
    SEARCH,
    CandidateLog,
    Contender,
    Prompts,
    Spent,
    Trials,
    elsewhere,
    served_here,
)
from tuner.traces import Trace, TraceStore, Usage
from tuner.traces.reading import Count, JsonReader, Text
from tuner.traces.store import closed, cut_torn_line
from tuner.tune import Run

# The model that proposes prompts: each of its answers is on disk before it is used.


_ANSWERS = JsonReader[dict[str, Any]](
    closed(
        "Reflected",
        {"asked": Text, "prompt": Text, "answer": Text, "usage": tuple[Count, Count]},
    ),
    "a reflection",
)


class Reflection:
    """Asks a model, and gives answers that are on disk again in place of asking.

    Equal questions are separate samples: the k-th is answered by the k-th answer.

        {"asked": sha256, "prompt": "...", "answer": "...", "usage": [900, 120]}

    Args:
        client: Who is asked.
        model_name: Its name there.
        path: The file of what was said before.
        prices: Of its tokens.
        spent: Where they are counted.

    Raises:
        TunerError: A line of the file is not of this form.
    """

    def __init__(
        self,
        client: openai.AsyncOpenAI,
        model_name: str,
        path: Path,
        *,
        prices: tuple[float, float],
        spent: Callable[[], Spent],
    ) -> None:
        self._client, self._model_name = client, model_name
        self._path, self._prices, self._spent = path, prices, spent
        self._known: defaultdict[str, deque[tuple[str, Usage]]] = defaultdict(deque)
        for _, _, row in _ANSWERS.lines(path, "delete the line, and it is asked for again"):
            self._known[row["asked"]].append((row["answer"], Usage(*row["usage"])))

    async def ask(self, prompt: str) -> str:
        """The answer to a prompt, as one message of the user.

        Raises:
            TrainingError: There is none.
        """
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
                f"{who} gave no answer: {type(error).__name__}: {error}; the search goes on from "
                "here when it is started again"
            ) from error
        text = answer.choices[0].message.content if answer.choices else None
        if not text or not text.strip():
            raise TrainingError(f"{who} answered without a text: name another one")
        said = answer.usage
        return text, Usage(said.prompt_tokens, said.completion_tokens) if said else Usage()


logger = logging.getLogger("tuner")

COMPARED = 100
"""Rows that candidates are compared on, at most."""
FEW = 10
"""Of fewer rows all are reflected on and compared on."""
# Of `PromptTuneConfig`, what may change when a search goes on: what its result depends on, and who
# is asked.
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
# Candidates that a level has room for, as DSPy's optimizers have; five proposals for each.
LEVELS = {"light": 6, "medium": 12, "heavy": 18}
PROPOSALS = 5


@dataclass(eq=False)
class Search:
    """One search, from what was given to what is returned.

    Attributes:
        run: The configuration, the judge and the rows.
        workflow: The user's.
        settings: How to search.
        first: The texts to begin with.
        single: Whether the workflow is given a text, and no dict.
        model: Who makes the rollouts, where that is elsewhere.
        own_model: Whether the workflow brings its own.
        temperature: Of the rollouts, where it was given.
        proposer: Who reflects.
    """

    run: Run
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
        """What `tune_prompt()` returns, searched for or read where it was found before."""
        with open_directory(self.run.config, self.run.eval_tasks) as directory:
            if not self._continues(directory):
                directory.result.unlink(missing_ok=True)
            if directory.result.exists():
                logger.warning("%s is complete; returning its result", directory.path)
                found = OBJECTS.document(
                    directory.result, "delete it: it is written anew from traces"
                )
                prompts, metrics = found["prompts"], found["metrics"]
            else:
                with reported(directory, leave_page):
                    began = time.perf_counter()
                    prompts, metrics = run_async(self._found(directory))
                    metrics["seconds"] = time.perf_counter() - began
                    text = json.dumps({"prompts": prompts, "metrics": metrics}, indent=2)
                    write_atomically(directory.result, text)
            best = next(iter(prompts.values())) if self.single else prompts
            return best, metrics

    def _continues(self, directory: RunDirectory) -> bool:
        """Whether a result of the directory is this search's; keeps what it is.

        Raises:
            ConfigError: The directory has a run, or a search that began differently.
        """
        now = {"first": self.first, **self.settings.model_dump(mode="json")}
        file = directory.path / "search.json"
        if not file.exists() and directory.has_begun():
            raise ConfigError(
                f"{directory.path} holds a run of tune(): give this search another experiment_name"
            )
        before = now
        if file.exists():
            before = OBJECTS.document(file, "give this search another experiment_name")
        changed = [name for name in now if before.get(name) != now[name]]
        if decisive := [name for name in changed if name not in (*_RESULT, *_MAY_CHANGE)]:
            raise ConfigError(
                f"{directory.path} holds a search that was started differently: "
                f"{', '.join(decisive)} changed. Give this one another experiment_name"
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
        spent = Spent()
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
            trials = Trials(
                workflow=self.workflow,
                contender=contender,
                tasks=self.run.eval_tasks,
                store=TraceStore(directory.traces),
                log=CandidateLog(directory.path / "candidates.jsonl"),
                defaults=SamplingDefaults(**arguments.model_dump()),
                max_running=settings.eval_num_threads,
                single=self.single,
                prices=self.model.prices if self.model else (0.0, 0.0),
                on_trace=monitor.rollout_done,
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
        trials: Trials,
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

    def _spent_all(self, spent: Spent, rollouts: int | None) -> bool:
        tokens = spent.usage.input_tokens + spent.usage.output_tokens
        limits = ((spent.rollouts, rollouts), (tokens, self.settings.max_tokens))
        over = any(limit is not None and used >= limit for used, limit in limits)
        return over or (self.settings.max_cost is not None and spent.cost >= self.settings.max_cost)

    def _look_at(self, traces: Sequence[Trace], *, first: bool) -> None:
        """
        Raises:
            TrainingError: No rollout of the first prompt came to a reward.
        """
        rewards = [trace.reward for trace in traces if trace.reward is not None]
        if first and not rewards:
            trace = traces[0]
            raise TrainingError(
                f"no rollout of the first prompt came to a reward; {trace.id} for one ended with "
                f"{trace.outcome}: {trace.error}"
            )
        floor = self.settings.failure_score
        if not self._warned and min(rewards, default=floor) < floor:
            self._warned = True
            logger.warning(
                "a reward is %g: the search takes a rollout that fails for better, since "
                "PromptTuneConfig.failure_score is %g; set it below every reward",
                min(rewards),
                floor,
            )

    async def _held_out(
        self, trials: Trials, best: Prompts, monitor: ConsoleMonitor
    ) -> dict[str, float]:
        """What was gained on rows that the search has not seen."""
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
                    f"no rollout on the evaluation set came to a reward; {traces[0].error}"
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
    """Rows to reflect on, and rows to compare on: the same where there are few.

    What is reflected on may find its way into a prompt word by word, so it does not decide.
    """
    if len(rows) < FEW:
        return rows, rows
    random.Random(seed).shuffle(rows)
    compared = min(len(rows) // 2, COMPARED)
    return sorted(rows[compared:]), sorted(rows[:compared])


def _improvement(means: Mapping[str, float]) -> dict[str, float]:
    """Percent, as AgentScope has it; of a baseline of 0 it is not 0, whatever was gained."""
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
