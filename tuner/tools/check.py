"""`tuner check`: sample two rollouts of the first task, or read the recorded data, and report.

Writes nothing to the run directory and leaves the weights unchanged.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path

from tuner.config import RunConfig
from tuner.config.algorithms import ADVANTAGES
from tuner.engines.transformers.engine import TransformersEngine
from tuner.gateway import SamplingDefaults
from tuner.gateway.service import LONG_THREADS
from tuner.rollouts import StepPlan, collect
from tuner.rollouts.chat_models import default_kind
from tuner.rollouts.worker_pool import pool_of
from tuner.runs.directory import run_async
from tuner.runs.metrics import batch_metrics, has_signal
from tuner.runs.models import RoleAdapters
from tuner.runs.notices import CallSettings, call_findings, untrained
from tuner.runs.placement import generating, layout_of, pass_tokens, peak_of
from tuner.runs.recorded import Examples
from tuner.runs.result import Verdict, counted
from tuner.runs.sources import (
    ComparableGroups,
    batch_of,
    by_role,
    history_of,
    off_policy_batch,
    training_data,
)
from tuner.runs.stack import Stack, build_stack, build_trainer, build_trainers
from tuner.tasks.functions import where
from tuner.tasks.selection import planned_steps
from tuner.traces import Outcome, Trace, TraceStore, without_vote
from tuner.training.batch import Batch, RoleBatches, Row, Selection, build_batch
from tuner.training.likelihood import EffectiveSamples, RecordedBatch, effective_samples
from tuner.training.memory import ImageMemory, tokens_of_pass
from tuner.training.trainer import PolicyTrainer, RoleTrainers
from tuner.tune import RunPlan

ROLLOUTS = 2
# Tokens of a call to show: the end of the prompt, both ends of the answer.
SHOWN_PROMPT, SHOWN_START, SHOWN_END = 4, 10, 3
# A backward pass costs about two forward passes.
FORWARDS_PER_UPDATE = 3


def check_run(run: RunPlan) -> Verdict:
    """Load the model, look at two rollouts of the first task or at the data, describe the run.

    Must not be called from a running event loop.
    """
    if run.config.mode == "train":
        return run_async(check_recorded(run))
    with tempfile.TemporaryDirectory() as folder:
        return run_async(_check(run, TraceStore(Path(folder))))


async def _check(run: RunPlan, store: TraceStore) -> Verdict:
    config = run.config
    # fails if the functions cannot be sent
    workers = pool_of(config, run.workflow, run.judge, default_kind())
    apart = None if workers is None else workers.looked_at()
    async with aclosing(build_stack(config, workflow=run.workflow, judge=run.judge)) as stack:
        taskset = config.buffer.explorer_input.taskset
        plan = StepPlan(
            split="train",
            step=1,
            tasks=run.train_tasks[:1],
            repeat=ROLLOUTS,
            defaults=SamplingDefaults(**config.rollout_args(taskset).model_dump()),
        )
        assert stack.runner is not None, "prepare() requires a workflow for rollouts"
        traces = await collect(plan, stack.runner, store, max_running=ROLLOUTS)
        final = [trace for trace in traces if trace.final]
        fastest = min(map(_seconds, final))  # the first one also warms up
        build = partial(
            build_batch,
            selection=Selection(
                needs_reward=ADVANTAGES[config.algorithm.advantage_fn].needs_reward
            ),
            teacher_prompt=stack.teacher_prompt,
        )
        batch = by_role(config, traces, build)
        forward = 0.0
        if batch.rows:
            forward = _forward_seconds(build_trainers(config, stack, total_steps=1), batch)
        settings = CallSettings.of(config, stack.engine.capabilities.max_model_len)
        reasons = "" if config.mode == "explore" else untrained(batch_metrics(batch))
        silent = config.mode != "explore" and not has_signal(
            batch, config.algorithm.advantage_fn, config.call_discount
        )
        words = list(_last_words(final, reasons, settings, silent=silent))
        sections = [
            inputs(run, stack, apart),
            _one_call(stack, final),
            _rewards(final, settings),
            _plan(run, stack, final, batch.rows, rollout=fastest, forward=forward),
            words,
        ]
        return Verdict.of(not words[0].startswith("NOT READY"), sections)


def _forward_seconds(
    trainer: PolicyTrainer | RoleTrainers, batch: Batch | RoleBatches | RecordedBatch
) -> float:
    """Seconds that a forward pass over the rows of a batch takes."""
    started = time.perf_counter()
    if isinstance(trainer, RoleTrainers):
        assert isinstance(batch, RoleBatches), "each role has a batch"
        trainer.each(batch, PolicyTrainer.compute_logp)
    else:
        assert not isinstance(batch, RoleBatches), "all calls have the same weights"
        trainer.compute_logp(batch)
    return time.perf_counter() - started


def _seconds(trace: Trace) -> float:
    return sum(trace.seconds.get(part, 0.0) for part in ("workflow", "judge"))


def inputs(run: RunPlan, stack: Stack, workers: str | None = None) -> Iterator[str]:
    """Yield the main settings and the outcome of the workers' check."""
    config = run.config
    parameters = sum(p.numel() for p in stack.model.parameters())
    device = next(stack.model.parameters()).device
    context = stack.engine.capabilities.max_model_len
    evaluated = ", ".join(f"{name}: {len(rows)}" for name, rows in run.eval_tasks.items())
    yield "SETTINGS"
    yield f"  run directory  {config.run_dir}"
    if run.workflow is not None:
        judge = "none: the workflow gives the reward" if run.judge is None else where(run.judge)
        yield f"  workflow       {where(run.workflow)}"
        yield f"  judge          {judge}"
    if run.history is None:
        evaluated = f"train: {len(run.train_tasks)}{', ' + evaluated if evaluated else ''}"
    if evaluated:
        yield f"  rows           {evaluated}"
    yield f"  model          {config.model.model_path}"
    yield f"                 {parameters / 1e6:.2f}M parameters on {device}, context {context}"
    why = f", {stack.choice.why}" if stack.choice.why else ""
    yield f"  engine         {stack.choice.engine_type}{why}"
    if stack.arrangement is not None:
        yield f"                 {stack.arrangement.placement}"
        yield f"                 {stack.arrangement.weights}"
    if stack.turn_ends is not None:
        yield f"  end of a turn  {stack.turn_ends}"
    if workers is not None:
        yield f"  {workers.replace('workers:', 'workers       ', 1)}"


def _one_call(stack: Stack, traces: Sequence[Trace]) -> Iterator[str]:
    """The prompt of the first call as text, and the tokens around the start of its answer."""
    calls = next((trace.calls for trace in traces if trace.calls), ())
    yield "PROMPT, as the model sees it"
    if not calls:
        yield "  none: the workflow never called `model`"
        return
    call = calls[0]
    yield from (f"  | {line}" for line in stack.tokenizer.decode(call.prompt_ids).split("\n"))
    yield ""
    told = stack.teacher_prompt(call)
    if isinstance(told, str):
        yield f"NO PROMPT for the teacher: {told}\n"
    elif told:
        yield "PROMPT, as the teacher sees it"
        yield from (f"  | {line}" for line in stack.tokenizer.decode(told).split("\n"))
        yield ""
    yield "TOKENS AND MASK of this call (1: sampled, so trained; 0: prompt)"
    yield from prompt_lines(stack, call.prompt_ids, "log-prob")
    logprobs = [f"{logprob:.3f}" for logprob in call.logprobs]
    yield from completion_lines(stack, call.completion_ids, logprobs)
    yield (
        f"  {len(call.prompt_ids)} prompt tokens, {len(call.completion_ids)} sampled, "
        f"finish_reason {call.finish_reason}; {counted(len(calls), 'call')} in this rollout"
    )


def prompt_lines(stack: Stack, ids: Sequence[int], numbers: str) -> Iterator[str]:
    """The header of a table of tokens, and the last tokens of a prompt, which are not trained."""
    yield f"  {'mask':>4}  {'id':>7}  {numbers:>8}  text"
    skipped = len(ids) - SHOWN_PROMPT
    if skipped > 0:
        yield f"     0  ... {skipped} more"
    for id in ids[-SHOWN_PROMPT:]:
        yield f"     0  {id:>7}  {'':>8}  {stack.tokenizer.decode([id])!r}"


def completion_lines(stack: Stack, ids: Sequence[int], logprobs: Sequence[str]) -> Iterator[str]:
    """The first and the last tokens of a completion, which are trained."""
    hidden = len(ids) - SHOWN_START - SHOWN_END
    for index, (id, logprob) in enumerate(zip(ids, logprobs, strict=True)):
        if hidden > 0 and SHOWN_START <= index < SHOWN_START + hidden:
            if index == SHOWN_START:
                yield f"     1  ... {hidden} more"
            continue
        yield f"     1  {id:>7}  {logprob:>8}  {stack.tokenizer.decode([id])!r}"


def _rewards(traces: Sequence[Trace], settings: CallSettings) -> Iterator[str]:
    yield "ROLLOUTS"
    for trace in traces:
        size = f"{counted(trace.sampled_tokens, 'token')} in {counted(len(trace.calls), 'call')}"
        reward = "no reward" if trace.reward is None else f"reward {trace.reward:g}"
        yield f"  {trace.outcome.value}, {reward}, {size}, {_seconds(trace):.1f} s"
        if trace.error is not None:
            yield f"    {trace.error}"
        elif trace.response:
            yield f"    {' '.join(trace.response.split())[:90]}"
    for finding in call_findings(traces, settings):
        yield f"  {finding.sentence}"
    rewards = [
        trace.reward for trace in traces if trace.reward is not None and without_vote(trace) is None
    ]
    if rewards:
        mean, variance = statistics.fmean(rewards), statistics.pvariance(rewards)
        meaning = "they differ" if variance else "they are equal; larger groups may differ"
        yield f"  mean {mean:g}, variance {variance:g}: {meaning}"


def _plan(
    run: RunPlan,
    stack: Stack,
    traces: Sequence[Trace],
    rows: Sequence[Row],
    *,
    rollout: float,
    forward: float,
) -> Iterator[str]:
    """Estimate from the seconds of one rollout in parallel and of a forward pass over `rows`."""
    config = run.config
    batch, group = config.buffer.batch_size, config.algorithm.repeat_times
    rollouts, steps = batch * group, planned_steps(config, len(run.train_tasks))
    sampled = sum(trace.sampled_tokens for trace in traces) / len(traces)
    yield "TRAINING"
    yield (
        f"  {steps} steps x {batch} tasks x {group} rollouts = {steps * rollouts} rollouts, about "
        f"{steps * rollouts * sampled:.0f} trained tokens"
    )
    yield f"  {_trained(stack)}, {algorithm_line(config)}"
    slots = min(config.concurrent_rollouts, config.tuner.max_slots)
    evaluated = max(map(len, run.eval_tasks.values()), default=0)
    together = min(slots, max(rollouts, evaluated))
    yield memory_line(config, stack, rows, rollouts / len(traces), together)
    concurrent = min(slots, rollouts)
    train = FORWARDS_PER_UPDATE * forward * rollouts / len(traces)
    slow = rollout * rollouts / len(traces) + train
    fast = rollout * rollouts / concurrent + train
    yield (
        f"  time    {fast:.1f} to {slow:.1f} s per step, {duration(fast * steps)} to "
        f"{duration(slow * steps)} in all, without evaluations"
    )
    yield (
        f"          (low: {concurrent} rollouts in parallel take as long as {len(traces)}; "
        "high: they take turns)"
    )


def _trained(stack: Stack) -> str:
    if stack.adapter is None:
        return "all weights"
    size = f"{stack.adapter.trained_parameters / 1e6:.2f}M parameters"
    if isinstance(stack.adapter, RoleAdapters):
        return f"LoRA adapters of {', '.join(stack.adapter)} with {size}"
    return f"a LoRA adapter of {size}"


def algorithm_line(config: RunConfig) -> str:
    """Algorithm, learning rate and KL term."""
    algorithm = config.algorithm
    kl = algorithm.kl_loss_fn
    penalty = "no KL" if kl == "none" else f"KL {kl} x {algorithm.kl_loss.kl_coef:g}"
    return f"{algorithm.algorithm_type}, lr {algorithm.optimizer.lr:g}, {penalty}"


def memory_line(
    config: RunConfig, stack: Stack, rows: Sequence[Row], times: float, together: int = 0
) -> str:
    """Expected memory of an update, in which a step has `times` as many rows, and of generation
    with `together` requests at a time."""
    needs = stack.needs()
    line = f"  memory  about {needs.trainer / 2**30:.2f} GiB for weights, gradients and optimizer"
    if not rows:
        return line
    context = stack.engine.capabilities.max_model_len
    tokens = int(tokens_of_pass(rows, layout_of(config, stack.model)) * times)
    most = pass_tokens(config, stack.model, context)
    largest = min(tokens, max(most, *map(len, rows)))
    peak = peak_of(config, stack.model, needs, largest, alone=tokens <= most)
    group = config.algorithm.repeat_times
    images = ImageMemory.of(stack.model, rows, tasks=config.buffer.batch_size, group=group)
    if images is not None:
        peak += images.saved * math.ceil(images.count * largest / tokens)
        peak = images.kept + max(peak, needs.trainer + images.computing)
    line = f"{line}, {peak / 2**30:.2f} with micro-batches of {largest} tokens"
    if together and isinstance(stack.engine, TransformersEngine):
        together = together if stack.engine.batched else 1
        prompts, longest = [row.prompt_ids for row in rows], max(map(len, rows))
        held = generating(
            config,
            needs,
            context,
            prompts,
            longest=longest,
            together=together,
            limit=stack.engine.cached_tokens,
        )
        if images is not None:
            held += images.generating(together, LONG_THREADS)
        line = f"{line}, {held / 2**30:.2f} with {together} answers generated at once"
    if images is not None:
        line += f"; both include {images.kept / 2**30:.2f} for {counted(images.count, 'image')}"
    return line


def _last_words(
    traces: Sequence[Trace], reasons: str, settings: CallSettings, *, silent: bool
) -> Iterator[str]:
    """Say if the run can start, and if not, or if it may not learn, why.

    Args:
        traces: The rollouts.
        reasons: Why none of their calls can be trained (`untrained`).
        settings: The run's call settings.
        silent: Whether there is no difference between them to learn from.
    """
    cut = [trace for trace in traces if trace.calls and trace.calls[-1].finish_reason == "length"]
    failed = [trace for trace in traces if trace.outcome is not Outcome.COMPLETED]
    if failed:
        yield f"NOT READY: {len(failed)} of {len(traces)} rollouts did not complete."
        for outcome in sorted({trace.outcome.value for trace in failed}):
            error = next(trace.error for trace in failed if trace.outcome == outcome)
            yield f"  {outcome}: {error}"
    elif reasons:
        yield f"NOT READY: no call can be trained; dropped tokens by reason: {reasons}."
    elif cut:
        finding = call_findings(traces, settings)[0].sentence
        if len(cut) == len(traces):
            yield f"NOT READY: no rollout finished: {finding}."
        else:
            yield f"DOUBTFUL: {len(cut)} of {len(traces)} rollouts did not finish: {finding}."
    elif silent:
        rewards = ", ".join(dict.fromkeys(f"{t.reward:g}" for t in traces if t.reward is not None))
        yield (
            f"DOUBTFUL: both rollouts completed, but nothing can be learned from them: reward "
            f"{rewards or 'none'}, and training uses differences."
        )
        yield (
            "  The run can start, and larger groups (algorithm.repeat_times) may differ; after its "
            "first step it says in how many they do."
        )
    else:
        yield "READY: both rollouts completed."


def duration(seconds: float) -> str:
    """Seconds in a readable unit."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


# In addition to the update: the log-probs of the policy and of the reference.
FORWARDS_OF_PAIRS = 2


async def check_recorded(run: RunPlan) -> Verdict:
    """Read the data, load the model, show the trained part of the first row, describe the run."""
    data = training_data(run.config, run.train_tasks, run.history)
    async with aclosing(build_stack(run.config, workflow=run.workflow, judge=run.judge)) as stack:
        assert isinstance(data, Examples), "history_check handles data with rewards"
        examples = data
        sections = [
            inputs(run, stack),
            _recorded_rows(examples),
            _first_row(stack, examples),
            _recorded_plan(run, stack, examples),
            iter([f"READY: {len(examples.used)} rows can be trained."]),
        ]
        return Verdict.of(True, sections)


def _recorded_rows(examples: Examples) -> Iterator[str]:
    yield "ROWS"
    for name, count in examples.rows.items():
        yield f"  {count:>7}  {name}"
    turns = sum(len(turns) for example in examples.used for turns in example)
    yield f"  {turns:>7}  assistant turns are trained"
    if examples.held_out:
        yield f"  {len(examples.held_out):>7}  held out; their loss is logged"
    if examples.tokens_left_out:
        yield f"  tokens that are not trained: {counts(examples.tokens_left_out)}"


def _first_row(stack: Stack, examples: Examples) -> Iterator[str]:
    conversations = examples.used[0]
    turn = conversations[0][0]
    yield "PROMPT of the first row, as the model sees it"
    yield from (f"  | {line}" for line in stack.tokenizer.decode(turn.prompt_ids).split("\n"))
    for name, turns in zip(("chosen", "rejected"), conversations, strict=False):
        which = f" of the {name} answer" if len(conversations) > 1 else ""
        yield ""
        yield f"TOKENS AND MASK of its first turn{which} (1: trained; 0: prompt)"
        yield from prompt_lines(stack, turns[0].prompt_ids, "")
        ids = turns[0].completion_ids
        yield from completion_lines(stack, ids, [""] * len(ids))


def _recorded_plan(run: RunPlan, stack: Stack, examples: Examples) -> Iterator[str]:
    config = run.config
    size, steps = config.buffer.batch_size, planned_steps(config, len(examples.used))
    batch = batch_of(config, examples, step=1)
    trainer = build_trainer(config, stack, total_steps=1)
    pairs = FORWARDS_OF_PAIRS if trainer.reference is not None else 0
    seconds = _forward_seconds(trainer, batch) * (FORWARDS_PER_UPDATE + pairs)
    yield "TRAINING"
    yield (
        f"  {steps} steps x {size} rows = {steps * size} rows, about "
        f"{batch.trained_tokens * steps} trained tokens"
    )
    yield f"  all weights, {algorithm_line(config)}"
    yield memory_line(config, stack, batch.rows, 1)
    yield (
        f"  time    {seconds:.1f} s per step, {duration(seconds * steps)} in all, evaluations not "
        "counted"
    )


def counts(found: Mapping[str, int]) -> str:
    """Counts by reason as text."""
    return ", ".join(f"{count} {reason}" for reason, count in sorted(found.items()))


# `tuner check` of recorded rollouts for algorithms that learn from rewards or from a teacher.


def check_history(run: RunPlan) -> Verdict:
    """Report the rollouts, the trained tokens and their effective sample size.

    For sft and dpo reports their rows. Must not be called from a running event loop.
    """
    data = training_data(run.config, run.train_tasks, run.history)
    return (
        run_async(_check_history(run, data))
        if isinstance(data, ComparableGroups)
        else check_run(run)
    )


async def _check_history(run: RunPlan, data: ComparableGroups) -> Verdict:
    async with aclosing(build_stack(run.config, workflow=run.workflow, judge=run.judge)) as stack:
        return _verdict(run, stack, data)


def _verdict(run: RunPlan, stack: Stack, data: ComparableGroups) -> Verdict:
    config = run.config
    trainer = build_trainer(config, stack, total_steps=1)
    batch = off_policy_batch(config, data.groups, stack.teacher_prompt, step=1)
    started = time.perf_counter()
    effective = effective_samples(trainer, batch)
    seconds = (time.perf_counter() - started) * (FORWARDS_PER_UPDATE + 1)
    least = history_of(config).min_effective_samples
    weighed = config.algorithm.policy_loss.ratio_to != "nothing"
    last = f"READY: {data.used} recorded rollouts can be trained."
    if not batch.rows:
        last = "NOT READY: no call of the first step can be trained."
    elif weighed and effective.tokens.share < least:
        last = (
            "NOT READY: the effective sample size of the tokens is below "
            f"tuner.history.min_effective_samples, {least:g}."
        )
    sections = [
        inputs(run, stack),
        _recorded_rollouts(data),
        _worth(batch, effective),
        _history_plan(config, stack, data, batch, seconds),
        iter([last]),
    ]
    return Verdict.of(last.startswith("READY"), sections)


def _recorded_rollouts(data: ComparableGroups) -> Iterator[str]:
    yield "RECORDED ROLLOUTS"
    yield f"  {data.used:>7}  used, of {len(data.groups)} tasks"
    for why, count in sorted(data.left_out.rollouts.items()):
        yield f"  {count:>7}  {why}"


def _worth(batch: Batch, effective: EffectiveSamples) -> Iterator[str]:
    yield "EFFECTIVE SAMPLE SIZE in the first step, under the run's initial weights"
    dropped = counts(batch.dropped_tokens) or "0"
    yield f"  {batch.sampled_tokens} tokens sampled = {batch.trained_tokens} trained + {dropped}"
    for name in ("tokens", "calls", "rollouts"):
        one = getattr(effective, name)
        yield f"  {one.size:>9.1f} of {one.count} {name} ({one.share:.1%})"


def _history_plan(
    config: RunConfig, stack: Stack, data: ComparableGroups, batch: Batch, seconds: float
) -> Iterator[str]:
    steps = planned_steps(config, len(data.groups))
    yield "TRAINING"
    yield f"  {steps} steps x {config.buffer.batch_size} tasks, {algorithm_line(config)}"
    yield memory_line(config, stack, batch.rows, 1)
    yield f"  time    {seconds:.1f} s per step, {duration(seconds * steps)} in all"
