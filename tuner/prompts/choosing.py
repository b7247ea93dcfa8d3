"""One selection of a model, from its candidates to where they stand."""

from __future__ import annotations

import gc
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from tuner.chat_models.observed import session_of
from tuner.config.tuner_section import Penalize
from tuner.errors import TrainingError
from tuner.functions.calling import call_workflow
from tuner.functions.outputs import WorkflowOutput, response_text
from tuner.gateway import SamplingDefaults
from tuner.prompts.model_candidates import ModelCandidate
from tuner.prompts.prompted import SELECTION
from tuner.prompts.standings import Standings, Tried, standings
from tuner.prompts.trials import CandidateLog
from tuner.rollout import Rollouts
from tuner.rollout.groups import Wanted
from tuner.run.console import ConsoleMonitor
from tuner.run.directory import RunDirectory, write_atomically
from tuner.settings import TunerModelConfig
from tuner.traces import RolloutId, Trace, TraceStore, Usage
from tuner.tune import Run

FIRST_ROUND = 16
"""Tasks of the first round where hopeless candidates are let go; each further one has twice as
many."""


@dataclass(eq=False)
class Selection:
    """One selection, from its candidates to where they stand.

    Attributes:
        workflow: The user's.
        run: The configuration and the rows.
        tried: The candidates, with what is known of them.
        rounds: The further rows of each round.
        max_running: Rollouts at the same time.
        directory: Where all is kept.
    """

    workflow: Callable[..., Any]
    run: Run
    tried: list[Tried]
    rounds: Sequence[Sequence[int]]
    max_running: int
    directory: RunDirectory
    _monitor: ConsoleMonitor = field(default_factory=lambda: ConsoleMonitor(1), init=False)

    def __post_init__(self) -> None:
        self._store = TraceStore(self.directory.traces)
        self._log = CandidateLog(self.directory.path / "candidates.jsonl", "model")

    def given(self, name: str) -> Any:
        """The candidate of a name, as the user gave it."""
        return next(one.candidate.given for one in self.tried if one.candidate.name == name)

    async def result(self) -> Standings:
        """Where all stand in the end, which is also written and shown.

        Raises:
            TrainingError: No rollout of any candidate came to a reward, or an engine failed.
        """
        with self._monitor:
            await self._try_all()
            found = standings(self.tried, len(self.run.eval_tasks[SELECTION]))
            write_atomically(self.directory.result, found.model_dump_json(indent=2))
            for sentence in (str(found), *found.doubts()):
                self._monitor.say(sentence)
            self._monitor.say(f"chosen: {found.candidates[0].name}; {self.directory.path}")
        return found

    async def _try_all(self) -> None:
        left = list(self.tried)
        for number, rows in enumerate(self.rounds, 1):
            for one in left:
                await self._try(one, rows)
            best = max(left, key=lambda one: one.mean)
            if not best.rewards:
                raise TrainingError(
                    "no rollout of any candidate came to a reward. "
                    + "; ".join(f"{one.candidate.name}: {one.first_error}" for one in left)
                )
            if number < len(self.rounds):
                left = [one for one in left if one is best or not self._let_go(one, best)]
            if len(left) == 1:
                return

    def _let_go(self, one: Tried, best: Tried) -> bool:
        if not one.worse_than(best):
            return False
        behind = one.against(best)
        why = one.first_error if behind is None else f"{behind.text('+.3f')} against the best"
        self._monitor.say(
            f"{one.candidate.name} is let go after {len(one.final)} tasks: {why} "
            f"({best.candidate.name})"
        )
        return True

    async def _try(self, one: Tried, rows: Sequence[int]) -> None:
        """Try a candidate on further rows; what is on disk of it is not run again."""
        candidate, tasks = one.candidate, self.run.eval_tasks[SELECTION]
        number = self._log.number({"identity": json.dumps(candidate.identity, sort_keys=True)})
        wanted = {RolloutId(number, row, 0, SELECTION): tasks[row] for row in rows}
        known = [trace for trace in self._store.read(SELECTION, number) if trace.id in wanted]
        self._monitor.begin(candidate.name, len(wanted), step=1)
        if {trace.id for trace in known if trace.final} != wanted.keys():
            known = await self._run(candidate, wanted, known)
        one.traces += known
        one.rounds += 1
        self._monitor.say(one.summary())

    async def _run(
        self, candidate: ModelCandidate, wanted: Wanted, known: Sequence[Trace]
    ) -> list[Trace]:
        async with candidate.open(candidate.run) as contender:
            runner = replace(contender.runner, workflow=_Measured(self.workflow))
            traces = await Rollouts(runner, self._store, max_running=self.max_running).run(
                wanted,
                _defaults(candidate),
                known=known,
                abort_on_failure=self.run.config.tuner.on_failure == "abort",
                on_trace=lambda trace: self._monitor.rollout_done(trace) if trace.final else None,
            )
            contender.check()
        gc.collect()  # a model that is in a circle would be in the way of the next one
        return traces


@dataclass(frozen=True)
class _Measured:
    """A workflow whose response comes with what it took, as judges are given it."""

    workflow: Callable[..., Any]

    async def __call__(self, model: Any, **given: Any) -> WorkflowOutput:
        began = time.perf_counter()
        output = await call_workflow(self.workflow, model=model, **given)
        seconds = time.perf_counter() - began
        usage = sum((call.usage for call in session_of(model).calls), Usage())
        metrics = {
            **(output.metrics or {}),
            "execution_time": seconds,
            "input_tokens": float(usage.input_tokens),
            "output_tokens": float(usage.output_tokens),
            "total_tokens": float(usage.input_tokens + usage.output_tokens),
        }
        judged = JudgedResponse(response=output.response, metrics=metrics)
        return WorkflowOutput(reward=output.reward, response=judged, metrics=metrics)


class JudgedResponse(dict[str, Any]):
    """`{"response": ..., "metrics": ...}`, whose text in traces is the response's alone."""

    def get_text_content(self) -> str:
        """As AgentScope's messages have it."""
        return response_text(self["response"])


def penalty_of(run: Run) -> float | None:
    """The reward of a rollout that gives none; None leaves it out."""
    failure = run.config.tuner.on_failure
    return failure.penalize if isinstance(failure, Penalize) else None


def _defaults(candidate: ModelCandidate) -> SamplingDefaults:
    config, given = candidate.run.config, candidate.given
    arguments = config.rollout_args(config.buffer.explorer_input.eval_tasksets[0]).model_dump()
    if isinstance(given, TunerModelConfig) and "temperature" in given.model_fields_set:
        arguments["temperature"] = given.temperature
    return SamplingDefaults(**arguments)


def rounds_of(rows: int, seed: int) -> list[list[int]]:
    """Rows in any order, cut so that each round doubles those that have been tried."""
    order = list(range(rows))
    random.Random(seed).shuffle(order)
    ends = [FIRST_ROUND]
    while ends[-1] < rows:
        ends.append(2 * ends[-1])
    return [order[begin:end] for begin, end in pairwise([0, *ends])]
