"""`tuner check --branching`: would rollouts that begin inside others pay? What a pilot says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from tuner.algorithms.allocation import Advice
from tuner.assembly.stack import build_stack
from tuner.config.explorer import BranchingSection
from tuner.errors import ConfigError
from tuner.gateway import SamplingDefaults
from tuner.result import Verdict
from tuner.rollout import Rollouts
from tuner.rollout.attempt import Again
from tuner.rollout.branching import Branching
from tuner.rollout.where import Where
from tuner.run.interrupts import run_async
from tuner.traces import Outcome, RolloutId, Trace
from tuner.tune import Run

ENOUGH = 200
"""Tasks below which what is advised is mostly chance where successes are rare."""


def check_branching(run: Run, *, tasks: int) -> Verdict:
    """Run groups of the first tasks, a part of which begins anywhere inside the others.

    Must be called where no event loop is running.

    Args:
        run: Whose workflow, judge and `algorithm.repeat_times` it is; its `tuner.branching` need
            not be set, and its `where` is not asked.
        tasks: How many groups.

    Returns:
        `ready` is whether there is advice: rollouts of some group ended differently.

    Raises:
        ConfigError: A group has too few rollouts for a pilot.
        FunctionError: A function returned something of the wrong type.
        ModelLoadError: The model cannot be loaded.
    """
    repeat = run.config.algorithm.repeat_times
    if repeat < 4:
        raise ConfigError(
            f"algorithm.repeat_times is {repeat}: a pilot has two trunks and a branch of each; set "
            "it to 4 or more"
        )
    return run_async(_check(run, tasks, repeat))


async def _check(run: Run, tasks: int, repeat: int) -> Verdict:
    config = run.config
    # It learns at the end, so until then each group explores.
    where = Where(BranchingSection(where="best"), repeat)
    defaults = SamplingDefaults(
        **config.rollout_args(config.buffer.explorer_input.taskset).model_dump()
    )
    alone = config.tuner.deterministic
    running = 1 if alone else config.explorer.runner_per_model
    found: list[Trace] = []
    async with aclosing(build_stack(config, workflow=run.workflow, judge=run.judge)) as stack:
        assert stack.runner is not None, "there is a workflow"
        rollouts = Rollouts(stack.runner, None, max_running=running)
        goes_on = stack.engine.capabilities.can_go_on
        branching = Branching(where, config.tuner.seed, goes_on)
        for number, task in enumerate(run.train_tasks[:tasks]):

            async def begin(
                ids: Sequence[RolloutId],
                again: Mapping[RolloutId, Again],
                task: dict[str, Any] = task,
            ) -> list[Trace]:
                return await rollouts.run(dict.fromkeys(ids, task), defaults, again=again)

            ids = [RolloutId(1, number, rollout) for rollout in range(repeat)]
            found += await branching.run(ids, begin)
    where.learn(found)
    advice = where.seen.best(rollouts=repeat) if where.seen.totals["variance"] else None
    return Verdict.of(advice is not None, [_pilot(found), _advised(advice, tasks)])


def _pilot(traces: Sequence[Trace]) -> Iterator[str]:
    final = [trace for trace in traces if trace.final]
    begun = [trace for trace in final if trace.origin is not None]
    left = [trace for trace in begun if trace.origin and trace.origin.diverged is not None]
    sampled = sum(trace.sampled_tokens for trace in traces)
    yield "PILOT"
    yield (
        f"  {len(final)} rollouts, {len(begun)} of them begin inside others, {sampled} sampled "
        f"tokens and {sum(trace.replayed_tokens for trace in traces)} given back"
    )
    failed = sum(trace.outcome is not Outcome.COMPLETED for trace in final)
    yield f"  {failed} did not complete, {len(left)} asked for something else than before the point"
    for trace in left[:3]:
        assert trace.origin is not None
        yield f"    {trace.id} {trace.origin.diverged}"


def _advised(advice: Advice | None, tasks: int) -> Iterator[str]:
    yield "ADVICE"
    if advice is None:
        yield "  none: the rollouts of every group were given the same reward"
        return
    yield f"  {advice}"
    yield "  call  expected tokens  share of the return's variance that it decides"
    for call, (cost, decided) in enumerate(zip(advice.cost, advice.decided, strict=True)):
        yield f"  {call:>4}  {cost:>15.0f}  {max(decided, 0):.0%}"
    if tasks < ENOUGH:
        yield f"  from {tasks} tasks: where successes are rare, some hundred say more (--tasks)"
