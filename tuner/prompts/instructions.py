"""The search by MIPROv2 (Opsahl-Ong et al., arXiv 2406.11695), with instructions alone.

DSPy lets the reflecting model propose texts, by what rows and rollouts look like, and Optuna
chooses which combinations of them are tried. Rollouts and answers are ours; what its loop would
swallow, or take for a score of 0, ends the search.
"""

from __future__ import annotations

import logging
import random
import re
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import log2
from statistics import fmean
from types import SimpleNamespace
from typing import Any, TypeVar

from tuner.data.dataset import Task, row_text
from tuner.errors import TrainingError
from tuner.prompts.candidate_tree import CandidateTree
from tuner.prompts.evolution import Ask, Bridge, Evaluate, record, score_of
from tuner.prompts.prompted import Prompts
from tuner.traces import Trace

logger = logging.getLogger("tuner")

T = TypeVar("T")
SHOWN = 10
"""Rollouts of the first texts, of which proposals are shown some that went well."""
DEMONSTRATIONS = 3
"""Of those, in one proposal."""
DESCRIBED = 100
"""Rows that the reflecting model describes before it proposes."""
# MIPROv2's: with more rows that decide, most combinations are tried on a part of them.
FULL, MINIBATCH = 50, 35


class _Ended(BaseException):
    """Ends the search. MIPROv2 catches every Exception, and goes on with a score of 0."""


@dataclass(eq=False)
class _Scores:
    """What combinations of texts score; each is tried on a row once, as with DSPy's own cache.

    Args:
        bridge: Into the event loop.
        evaluate: Makes the rollouts of a candidate on some rows.
        tree: Takes candidates that were tried on all rows that decide.
        first: The texts to begin with, which are tried whatever the budget.
        failure_score: What a rollout counts as that has no reward.
        spent_all: Whether the budget is used up.
    """

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
        """The result of `work()`; a failure, which the bridge keeps, ends the search."""
        try:
            return self.bridge.result(work)
        except Exception as error:
            raise _Ended from error

    def traces(self, prompts: Prompts, rows: Sequence[int]) -> list[Trace]:
        """A rollout of each of these rows."""
        known = self.known[tuple(prompts.values())]
        if wanted := [row for row in rows if row not in known]:
            if prompts != self.first and self.spent_all():
                raise _Ended
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
    """The reflecting model, as DSPy asks it: a request becomes one text."""

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
    """Search by MIPROv2; what was compared is in `tree`, the first texts at least.

    Args:
        first: What the search begins with.
        tasks: The rows.
        reflect_on: Those that proposals are made from; the tree has those that decide.
        evaluate, ask: Make rollouts and reflections.
        tree: Its budget says, where it has one, how many texts are proposed.
        spent_all: Whether the budget is used up; looked at before each trial.
        most: Texts for each component, with the first.
        failure_score, seed: As `PromptTuneConfig` has them.

    Raises:
        TrainingError, FunctionError: As `evaluate` and `ask`, or the reflecting model does not
            answer in the form that DSPy asks for.
    """
    bridge = Bridge()
    scores = _Scores(bridge, evaluate, tree, first, failure_score, spent_all)
    if tree.budget is not None:
        most = max(2, min(most, (tree.budget - SHOWN) // len(tree.compare_on)))

    def answer(question: str) -> str:
        if spent_all():
            raise _Ended
        return scores.waited(lambda: ask(question))

    def search() -> None:
        chosen = random.Random(seed).sample(list(reflect_on), min(SHOWN, len(reflect_on)))
        try:
            scores.traces(first, tree.compare_on)
            shown = scores.traces(first, chosen)
            rows = [row_text(tasks[row]) for row in reflect_on[:DESCRIBED]]
            with _quiet():
                _compile(scores, answer, rows, shown, most, seed)
        except _Ended:
            pass

    await bridge.run(search)
    if len(scores.known) == 1 and spent_all():
        logger.warning(
            "the budget was spent before a proposed text was tried: raise max_rollouts, max_tokens "
            "or max_cost, and the search goes on from here"
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
    # DSPy removes indentation: texts that it did not propose stay as they were given.
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
        """Its own would make one rollout after the other, and many of the first texts."""

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
            "the reflecting model does not answer in the form that DSPy asks for: name another "
            f"one, or leave optimizer at 'gepa'; {error}"
        ) from error


def _instructions(program: Any) -> list[str]:
    return [predictor.signature.instructions for predictor in program.predictors()]


def _field(component: str) -> str:
    """The name in a signature, where not every character may be, of what a component brings."""
    return "response_with_" + re.sub(r"\W", "_", component)


def _demonstrations(
    first: Mapping[str, str], good: Sequence[Trace], count: int, seed: int
) -> dict[int, list[list[Any]]]:
    """For each component and proposal the rollouts that it is shown; the first has none."""
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
    """DSPy's lines only where something fails: what is worth telling, we tell."""
    library = logging.getLogger("dspy")
    level = library.level
    library.setLevel(logging.ERROR)
    try:
        yield
    finally:
        library.setLevel(level)
