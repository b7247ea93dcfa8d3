"""Prompt search with GEPA (Agrawal et al., arXiv 2507.19457): the interface to its loop.

GEPA requests rollouts and reflections from its own thread and blocks until it gets them; both are
made in the event loop. Errors that its loop would swallow, such as a failing reflection, are
stored, end the search, and are raised.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import re
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import log2
from statistics import fmean
from types import SimpleNamespace
from typing import Annotated, Any, NotRequired, TypeVar

from pydantic import AfterValidator, Field

from tuner.errors import TrainingError
from tuner.runs.console import ConsoleMonitor
from tuner.runs.directory import RunDirectory, write_atomically
from tuner.tasks.datasets import Task, row_text
from tuner.tasks.functions import in_thread
from tuner.tools.candidates import Prompts, PromptTrials
from tuner.traces import Call, Trace
from tuner.traces.reading import Count, JsonReader, Number, Text
from tuner.traces.store import closed

T = TypeVar("T")
logger = logging.getLogger("tuner.prompts")
CHARACTERS = 4_000
"""Maximum characters of a rollout's conversation in a reflection: its beginning and its end."""

Evaluate = Callable[[Prompts, Sequence[int]], Awaitable[list[Trace]]]
Ask = Callable[[str], Awaitable[str]]


class Bridge:
    """Runs work of the search's thread in the event loop; keeps the error that ended it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waited: Future[Any] | None = None
        self._closed = False
        self.failure: BaseException | None = None

    def result(self, work: Callable[[], Awaitable[T]]) -> T:
        """The result of `work()`; blocks the calling thread and stores an error."""

        async def awaited() -> T:
            return await work()

        if self._closed or self.failure is not None:
            raise CancelledError
        self._waited = asyncio.run_coroutine_threadsafe(awaited(), self._loop)
        try:
            value: T = self._waited.result()
        except BaseException as error:
            self.failure = self.failure or error
            raise
        return value

    async def run(self, search: Callable[[], Any]) -> None:
        """Run `search()` in a thread; raises the error that ended it early."""
        try:
            await in_thread(search)
        except Exception:
            if self.failure is None:
                raise
        finally:
            self._closed = True  # after an interruption, wait for nothing more
            if self._waited is not None:
                self._waited.cancel()
        if self.failure is not None:
            raise self.failure


class GepaAdapter:
    """GEPA's adapter for our rollouts; a rollout without a reward scores `failure_score`."""

    propose_new_texts = None
    """Without this attribute GEPA swallows every reflection and returns the first prompt."""

    def __init__(self, bridge: Bridge, evaluate: Evaluate, failure_score: float) -> None:
        self._bridge = bridge
        self._evaluate = evaluate
        self._failure_score = failure_score

    def evaluate(
        self, batch: list[int], candidate: dict[str, str], capture_traces: bool = False
    ) -> Any:
        """GEPA's `EvaluationBatch` of a candidate on rows given by index."""
        from gepa.core.adapter import EvaluationBatch

        traces = self._bridge.result(lambda: self._evaluate(candidate, batch))
        return EvaluationBatch(
            outputs=[trace.response for trace in traces],
            scores=[score_of(trace, self._failure_score) for trace in traces],
            trajectories=traces if capture_traces else None,
        )

    def make_reflective_dataset(
        self, candidate: dict[str, str], eval_batch: Any, components_to_update: list[str]
    ) -> dict[str, list[dict[str, Any]]]:
        """Records to show the reflection model, by component."""
        traces: list[Trace] = eval_batch.trajectories
        return {name: [record(trace, name) for trace in traces] for name in components_to_update}


def score_of(trace: Trace, failure_score: float) -> float:
    """The rollout's reward, or `failure_score` if it has none."""
    return failure_score if trace.reward is None else trace.reward


def record(trace: Trace, component: str) -> dict[str, Any]:
    """A rollout in the form of GEPA's prompt; with several agents, only the component's calls."""
    own = [call for call in trace.calls if call.role == component]
    said = "\n\n".join(_turns(own or trace.calls)) or trace.response
    return {"Inputs": row_text(trace.task), "Generated Outputs": _cut(said), "Feedback": _of(trace)}


def _of(trace: Trace) -> str:
    if trace.reward is None:
        return f"The attempt failed and has no score ({trace.outcome.value}): {trace.error}"
    score = f"Score: {trace.reward:g}."
    return score if trace.feedback is None else f"{score} {trace.feedback}"


def _turns(calls: Sequence[Call]) -> list[str]:
    """Each message once; system messages are omitted, since they are the prompts being searched."""
    seen, lines = set[str](), list[str]()
    for call in calls:
        for message in [*call.messages, call.response]:
            text = f"{message.get('role')}: {_content(message)}"
            if message.get("role") != "system" and text not in seen:
                seen.add(text)
                lines.append(text)
    return lines


def _content(message: Mapping[str, Any]) -> str:
    parts = [message.get("reasoning_content"), message.get("content"), message.get("tool_calls")]
    return "\n".join(part if isinstance(part, str) else repr(part) for part in parts if part)


def _cut(text: str) -> str:
    if len(text) <= CHARACTERS:
        return text
    half = CHARACTERS // 2
    return f"{text[:half]}\n[... {len(text) - CHARACTERS} characters ...]\n{text[-half:]}"


async def evolve(
    seed_prompts: Prompts,
    *,
    reflect_on: Sequence[int],
    compare_on: Sequence[int],
    evaluate: Evaluate,
    ask: Ask,
    spent_all: Callable[[], bool],
    callbacks: Sequence[Any],
    minibatch_size: int,
    failure_score: float,
    perfect_score: float | None,
    seed: int,
) -> None:
    """Search with GEPA; `callbacks` are notified of every candidate compared on `compare_on`.

    Reflections use rollouts on the rows `reflect_on`; those on `compare_on` decide. `spent_all` is
    checked between proposals.
    """
    from gepa.api import optimize

    bridge = Bridge()
    adapter: Any = GepaAdapter(bridge, evaluate, failure_score)

    def search() -> None:
        optimize(
            seed_candidate=dict(seed_prompts),
            trainset=list(reflect_on),
            valset=list(compare_on),
            adapter=adapter,
            reflection_lm=lambda prompt: bridge.result(lambda: ask(str(prompt))),
            reflection_minibatch_size=min(minibatch_size, len(reflect_on)),
            skip_perfect_score=perfect_score is not None,
            perfect_score=1.0 if perfect_score is None else perfect_score,
            stop_callbacks=lambda _: bridge.failure is not None or spent_all(),
            callbacks=list(callbacks),
            logger=_Quiet(),
            seed=seed,
            raise_on_exception=True,
        )

    await bridge.run(search)


class _Quiet:
    """Silences GEPA's logger; the search logs its own progress."""

    def log(self, message: str) -> None:
        logger.debug("%s", message)


# The compared candidates of a search: their parents and scores.


def _connected(tree: dict[str, Any]) -> dict[str, Any]:
    """Refuse a tree whose parts refer to something that is missing from it."""
    first: dict[str, Any] = next(iter(tree["candidates"]), {"prompts": {}})
    numbers = {one["number"] for one in tree["candidates"]}
    for one in tree["candidates"]:
        if one["prompts"].keys() != first["prompts"].keys():
            raise ValueError(f"candidate {one['number']} has prompts of other names")
    for one in tree["rejected"]:
        if not numbers.issuperset(one["parents"][:1] or [-1]):
            raise ValueError(f"rejected proposal {one['number']} has no parent")
    return tree


_ROW = Annotated[str, Field(pattern=r"^\d{1,15}$")]
_PROPOSAL = {"number": Count, "parents": list[Count]}
_SCORED = {"prompts": dict[Text, Text], "scores": dict[_ROW, Number], "mean": Number}
_SPENT = ("rollouts", "reflections", "input_tokens", "output_tokens")


def _tree() -> Any:
    compared = closed("ComparedCandidate", {**_PROPOSAL, **_SCORED, "rollouts": Count})
    rejected = closed("RejectedProposal", {**_PROPOSAL, "score_before": Number, "score": Number})
    # mypy does not know types that are made when the program runs.
    parts = {
        "compare_on": list[Count],
        "candidates": list[compared],  # type: ignore[valid-type]
        "rejected": list[rejected],  # type: ignore[valid-type]
        "failed": NotRequired[dict[Text, Count]],
        "cost": NotRequired[Number],
    }
    made = closed("SearchTree", parts | dict.fromkeys(_SPENT, NotRequired[Count]))
    return Annotated[made, AfterValidator(_connected)]


TREES = JsonReader[dict[str, Any]](_tree, "the tree of a search")
"""`tree.json`, as `CandidateTree` writes it."""


@dataclass(eq=False)
class CandidateTree:
    """The compared candidates, stored in `tree.json`; GEPA calls the `on_` methods."""

    directory: RunDirectory
    trials: PromptTrials
    monitor: ConsoleMonitor
    compare_on: Sequence[int]
    budget: int | None
    _accepted: list[dict[str, Any]] = field(default_factory=list, init=False)
    _rejected: list[dict[str, Any]] = field(default_factory=list, init=False)
    _proposed: dict[str, str] = field(default_factory=dict, init=False)
    _parent: int = field(default=0, init=False)
    _began: float = field(default_factory=time.perf_counter, init=False)

    def add(self, prompts: Prompts, parents: Sequence[int], scores: Mapping[int, float]) -> None:
        """Add a compared candidate with its score on each row; `parents` are indices."""
        number, mean = self.trials.log.number(prompts), fmean(scores.values())
        before = [self._accepted[place] for place in parents]
        self._accepted.append(
            {
                "number": number,
                "parents": [one["number"] for one in before],
                "prompts": dict(prompts),
                "scores": {str(row): score for row, score in scores.items()},
                "mean": mean,
                "rollouts": self.trials.spent.rollouts,
            }
        )
        came = "" if not before else f", from {before[0]['mean']:.3f}"
        self.monitor.say(
            f"candidate {number}: {mean:.3f}{came}; best {self.best['mean']:.3f}; "
            f"{self._progress()}"
        )
        self._write()

    @property
    def first(self) -> dict[str, Any]:
        """The prompts at the start of the search."""
        return self._accepted[0]

    @property
    def best(self) -> dict[str, Any]:
        """The first candidate with the highest mean."""
        return max(self._accepted, key=lambda one: float(one["mean"]))

    def on_valset_evaluated(self, event: Mapping[str, Any]) -> None:
        """A candidate was compared on all rows."""
        parents = [index for index in event["parent_ids"] if index is not None]
        scores = {self.compare_on[place]: one for place, one in event["scores_by_val_id"].items()}
        self.add(event["candidate"], parents, scores)

    def on_candidate_selected(self, event: Mapping[str, Any]) -> None:
        """A candidate was selected for a proposal."""
        self._parent, self._proposed = event["candidate_idx"], dict(event["candidate"])

    def on_proposal_end(self, event: Mapping[str, Any]) -> None:
        """The reflection model has proposed new texts."""
        self._proposed |= event["new_instructions"]

    def on_candidate_rejected(self, event: Mapping[str, Any]) -> None:
        """A proposal was no better on the tasks it was made for; the scores are sums."""
        self._rejected.append(
            {
                "number": self.trials.log.number(self._proposed),
                "parents": [self._accepted[self._parent]["number"]],
                "score_before": event["old_score"],
                "score": event["new_score"],
            }
        )
        self._write()

    def _progress(self) -> str:
        done = self.trials.spent.rollouts
        if self.budget is None or not done:
            return f"{done} rollouts"
        left = (time.perf_counter() - self._began) / done * max(0, self.budget - done)
        return f"{done} of {self.budget} rollouts, about {left:.0f} s left"

    def _write(self) -> None:
        spent = self.trials.spent
        tree = {
            "compare_on": list(self.compare_on),
            "candidates": self._accepted,
            "rejected": self._rejected,
            "rollouts": spent.rollouts,
            "failed": dict(spent.failed),
            "reflections": spent.reflections,
            "input_tokens": spent.usage.input_tokens,
            "output_tokens": spent.usage.output_tokens,
            "cost": spent.cost,
        }
        write_atomically(self.directory.path / "tree.json", json.dumps(tree, indent=2))


# Prompt search with MIPROv2 (Opsahl-Ong et al., arXiv 2406.11695), instructions only.
#
# DSPy has the reflection model propose texts from rows and rollouts, and Optuna chooses which
# combinations to try. Rollouts and answers are ours; errors that its loop would swallow, or score
# as 0, end the search.


_optuna_log = logging.getLogger("tuner")

SHOWN = 10
"""Number of rollouts of the first texts; proposals are shown some that went well."""
DEMONSTRATIONS = 3
"""Number of these that each proposal is shown."""
DESCRIBED = 100
"""Number of rows that the reflection model describes before it proposes."""
# MIPROv2's value: with more rows to compare on, most combinations are tried on a part of them.
FULL, MINIBATCH = 50, 35


class _SearchEnded(BaseException):
    """Ends the search. MIPROv2 catches every Exception and continues with a score of 0."""


@dataclass(eq=False)
class _Scores:
    """Scores of combinations of texts; each is tried once per row, as with DSPy's own cache."""

    bridge: Bridge
    evaluate: Evaluate
    tree: CandidateTree
    first: Prompts
    failure_score: float
    spent_all: Callable[[], bool]
    known: defaultdict[tuple[str, ...], dict[int, Trace]] = field(
        default_factory=lambda: defaultdict(dict), init=False
    )

    def waited(self, work: Callable[[], Awaitable[T]]) -> T:
        """The result of `work()`; an error, which the bridge stores, ends the search."""
        try:
            return self.bridge.result(work)
        except Exception as error:
            raise _SearchEnded from error

    def traces(self, prompts: Prompts, rows: Sequence[int]) -> list[Trace]:
        """One rollout for each of these rows."""
        known = self.known[tuple(prompts.values())]
        if wanted := [row for row in rows if row not in known]:
            if prompts != self.first and self.spent_all():
                raise _SearchEnded
            compared = known.keys() >= set(self.tree.compare_on)
            made = self.waited(lambda: self.evaluate(prompts, wanted))
            known |= dict(zip(wanted, made, strict=True))
            if not compared and known.keys() >= set(self.tree.compare_on):
                self.tree.add(
                    prompts,
                    [] if prompts == self.first else [0],
                    {row: score_of(known[row], self.failure_score) for row in self.tree.compare_on},
                )
        return [known[row] for row in rows]

    def mean(self, prompts: Prompts, rows: Sequence[int]) -> float:
        return fmean(score_of(trace, self.failure_score) for trace in self.traces(prompts, rows))


class _Engine:
    """The reflection model behind DSPy's interface; a request becomes one text."""

    def __init__(self, answer: Callable[[str], str]) -> None:
        self._answer = answer

    def complete(self, request: Any) -> Any:
        from dspy.lm15 import Message, Response, Usage

        said = [request.system, *(message.text for message in request.messages)]
        answer = Message.assistant(self._answer("\n\n".join(filter(None, said))))
        return Response(None, request.model, answer, finish_reason="stop", usage=Usage())


async def instruct(
    first: Prompts,
    *,
    tasks: Sequence[Task],
    reflect_on: Sequence[int],
    evaluate: Evaluate,
    ask: Ask,
    tree: CandidateTree,
    spent_all: Callable[[], bool],
    most: int,
    failure_score: float,
    seed: int,
) -> None:
    """Search with MIPROv2; `tree` receives the compared candidates, at least the first texts.

    Proposals are made from the rows `reflect_on`, a maximum of `most` for each component including
    the first text. `spent_all` is checked before each trial.
    """
    bridge = Bridge()
    scores = _Scores(bridge, evaluate, tree, first, failure_score, spent_all)
    if tree.budget is not None:
        most = max(2, min(most, (tree.budget - SHOWN) // len(tree.compare_on)))

    def answer(question: str) -> str:
        if spent_all():
            raise _SearchEnded
        return scores.waited(lambda: ask(question))

    def search() -> None:
        chosen = random.Random(seed).sample(list(reflect_on), min(SHOWN, len(reflect_on)))
        try:
            scores.traces(first, tree.compare_on)
            shown = scores.traces(first, chosen)
            rows = [row_text(tasks[row]) for row in reflect_on[:DESCRIBED]]
            with _quiet():
                _compile(scores, answer, rows, shown, most, seed)
        except _SearchEnded:
            pass

    await bridge.run(search)
    if len(scores.known) == 1 and spent_all():
        _optuna_log.warning(
            "the budget was spent before a proposed text was tried: raise max_rollouts, max_tokens "
            "or max_cost, and the search resumes from here"
        )


def _compile(
    scores: _Scores,
    answer: Callable[[str], str],
    rows: Sequence[str],
    shown: Sequence[Trace],
    count: int,
    seed: int,
) -> None:
    import dspy
    from dspy.utils.exceptions import AdapterParseError

    first, compare_on = scores.first, scores.tree.compare_on
    program = dspy.Module()
    for place, (name, text) in enumerate(first.items()):
        signature = dspy.Signature(f"task -> {_field(name)}", text)
        setattr(program, f"component_{place}", dspy.Predict(signature))
    # DSPy removes indentation: texts that it did not propose stay as given.
    unchanged = _instructions(program)
    good = [
        trace for trace in shown if score_of(trace, scores.failure_score) > scores.failure_score
    ]

    def score(program: Any, *, devset: Sequence[Any], **_: Any) -> Any:
        texts = zip(first.items(), unchanged, _instructions(program), strict=True)
        prompts = {
            name: text if text.strip() and text != same else given
            for (name, given), same, text in texts
        }
        return SimpleNamespace(score=100 * scores.mean(prompts, [one.row for one in devset]))

    class Instructions(dspy.MIPROv2):  # type: ignore[misc]  # untyped
        """Replaces MIPROv2's sequential sampling, which runs the first texts many times."""

        def _bootstrap_fewshot_examples(self, *_: Any, **__: Any) -> Any:
            return _demonstrations(first, good, count, seed)

        def _optimize_prompt_parameters(
            self, program: Any, instructions: Any, demos: Any, _: Any, *rest: Any
        ) -> Any:
            return super()._optimize_prompt_parameters(program, instructions, demos, score, *rest)

    model = dspy.LM("reflecting", engine=_Engine(answer), cache=False)
    optimizer = Instructions(
        metric=None,
        prompt_model=model,
        task_model=model,
        auto=None,
        num_candidates=count,
        max_bootstrapped_demos=0,
        max_labeled_demos=0,
        seed=seed,
        track_stats=False,
    )
    try:
        optimizer.compile(
            program,
            trainset=[dspy.Example(task=row).with_inputs("task") for row in rows],
            valset=[dspy.Example(row=row).with_inputs("row") for row in compare_on],
            num_trials=int(max(2 * len(first) * log2(count), 1.5 * count)),
            minibatch=len(compare_on) > FULL,
            minibatch_size=MINIBATCH,
            program_aware_proposer=False,
        )
    except AdapterParseError as error:
        raise TrainingError(
            "the reflection model does not answer in the form that DSPy requires: set another "
            f"model, or leave optimizer at 'gepa'; {error}"
        ) from error


def _instructions(program: Any) -> list[str]:
    return [predictor.signature.instructions for predictor in program.predictors()]


def _field(component: str) -> str:
    """Name of a component's output field in a signature, which does not allow every character."""
    return "response_with_" + re.sub(r"\W", "_", component)


def _demonstrations(
    first: Mapping[str, str], good: Sequence[Trace], count: int, seed: int
) -> dict[int, list[list[Any]]]:
    """The rollouts to show for each component and proposal; the first proposal is shown none."""
    import dspy

    chance, size = random.Random(seed), min(DEMONSTRATIONS, len(good))
    sets = [[], *(chance.sample(good, size) for _ in range(count - 1))]

    def example(trace: Trace, name: str) -> Any:
        said = record(trace, name)
        outputs = {_field(name): said["Generated Outputs"]}
        return dspy.Example(augmented=True, task=said["Inputs"], **outputs)

    return {
        place: [[example(trace, name) for trace in of_one] for of_one in sets]
        for place, name in enumerate(first)
    }


@contextmanager
def _quiet() -> Iterator[None]:
    """Let DSPy log only errors; the search logs its own progress."""
    library = logging.getLogger("dspy")
    level = library.level
    library.setLevel(logging.ERROR)
    try:
        yield
    finally:
        library.setLevel(level)
