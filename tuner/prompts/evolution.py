"""The search by GEPA (Agrawal et al., arXiv 2507.19457): the joint between its loop and ours.

GEPA asks for rollouts and for reflections from a thread of its own, and blocks there; both are
made in the event loop. What its loop would swallow (a failing reflection among it) is kept, ends
the search, and is raised.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from tuner.data.dataset import row_text
from tuner.functions.calling import in_thread
from tuner.prompts.prompted import Prompts
from tuner.traces import Call, Trace

T = TypeVar("T")
logger = logging.getLogger("tuner.prompts")
CHARACTERS = 4_000
"""Of a rollout's conversation, what a reflection is shown: its beginning and its end."""

Evaluate = Callable[[Prompts, Sequence[int]], Awaitable[list[Trace]]]
Ask = Callable[[str], Awaitable[str]]


class Bridge:
    """From the searching thread into the event loop.

    Attributes:
        failure: What ended the search, or None.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waited: Future[Any] | None = None
        self._closed = False
        self.failure: BaseException | None = None

    def result(self, work: Callable[[], Awaitable[T]]) -> T:
        """The result of `work()`, for which the calling thread waits; its failure is kept."""

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
        """`search()` to its end, in a thread; raises what ended it before that."""
        try:
            await in_thread(search)
        except Exception:
            if self.failure is None:
                raise
        finally:
            self._closed = True  # who is interrupted waits for nothing more
            if self._waited is not None:
                self._waited.cancel()
        if self.failure is not None:
            raise self.failure


class GepaAdapter:
    """GEPA's view of our rollouts.

    Args:
        bridge: Into the event loop.
        evaluate: Makes the rollouts of a candidate on some rows.
        failure_score: What a rollout counts as that has no reward.
    """

    propose_new_texts = None
    """Without the attribute GEPA swallows every reflection, and gives the first prompt back."""

    def __init__(self, bridge: Bridge, evaluate: Evaluate, failure_score: float) -> None:
        self._bridge = bridge
        self._evaluate = evaluate
        self._failure_score = failure_score

    def evaluate(
        self, batch: list[int], candidate: dict[str, str], capture_traces: bool = False
    ) -> Any:
        """GEPA's `EvaluationBatch` of a candidate on rows that are named by their numbers."""
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
        """What the reflecting model is shown for each component."""
        traces: list[Trace] = eval_batch.trajectories
        return {name: [record(trace, name) for trace in traces] for name in components_to_update}


def score_of(trace: Trace, failure_score: float) -> float:
    """A rollout's reward; where it has none, what the search takes it for."""
    return failure_score if trace.reward is None else trace.reward


def record(trace: Trace, component: str) -> dict[str, Any]:
    """A rollout in the words of GEPA's prompt; of several agents, what the component's own did."""
    own = [call for call in trace.calls if call.role == component]
    said = "\n\n".join(_turns(own or trace.calls)) or trace.response
    return {"Inputs": row_text(trace.task), "Generated Outputs": _cut(said), "Feedback": _of(trace)}


def _of(trace: Trace) -> str:
    if trace.reward is None:
        return f"The attempt failed and has no score ({trace.outcome.value}): {trace.error}"
    score = f"Score: {trace.reward:g}."
    return score if trace.feedback is None else f"{score} {trace.feedback}"


def _turns(calls: Sequence[Call]) -> list[str]:
    """What was said, each message once; the system's are the prompts that are searched for."""
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
    """Search by GEPA; `callbacks` are told of every candidate that is compared with the others.

    Args:
        seed_prompts: What the search begins with.
        reflect_on: Rows whose rollouts are reflected on.
        compare_on: Rows that candidates are compared on.
        evaluate, ask: Make rollouts and reflections.
        spent_all: Whether the budget is used up; looked at between proposals.
        callbacks: GEPA's, called in the searching thread.
        minibatch_size, failure_score, perfect_score, seed: As `PromptTuneConfig` has them.

    Raises:
        TrainingError, FunctionError: As `evaluate` and `ask`.
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
    """GEPA's own lines, for who asks for them: what is worth telling, we tell."""

    def log(self, message: str) -> None:
        logger.debug("%s", message)
