"""Messages about lost training signal, and the reasons why a run ends before its last step.

The rule that ends a run uses only the metrics of its steps, including those in `metrics.jsonl`, so
a killed and resumed run decides like an uninterrupted one.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from tuner.config import RunConfig
from tuner.runs.console import CHARACTERS, said
from tuner.runs.result import counted
from tuner.traces import Call, Outcome, Trace, without_vote
from tuner.traces.trace import failed_result

Metrics = Mapping[str, float]
"""The metrics of a step."""


@dataclass(frozen=True)
class CallSettings:
    """Settings that cut calls off and parse their tool calls; None if unknown.

    Attributes:
        context: Maximum number of tokens of prompt and answer together: `model.max_model_len`, or
            the model's own.
        answer: Maximum number of tokens of an answer whose request sets no limit; None also if
            there is no limit.
        answer_setting: The setting of `answer`.
        parser: `explorer.rollout_model.tool_call_parser`.
    """

    context: int | None = None
    answer: int | None = None
    answer_setting: str = "model.max_response_tokens"
    parser: str | None = None

    @staticmethod
    def of(config: RunConfig, context: int) -> CallSettings:
        """Settings of a run on the local backend whose engine has this context."""
        taskset = config.buffer.explorer_input.taskset
        setting = CallSettings.answer_setting
        if taskset.rollout_args.max_tokens is not None:
            setting = "buffer.explorer_input.taskset.rollout_args.max_tokens"
        return CallSettings(
            context,
            config.rollout_args(taskset).max_tokens,
            setting,
            config.explorer.rollout_model.tool_call_parser,
        )


@dataclass(frozen=True)
class Finding:
    """A share of a step's calls or groups that teach little or nothing, and the reason.

    Attributes:
        kind: A key of `LEVELS`.
        share: From 0 to 1.
        sentence: The counts, the responsible setting and the fix; a clause without a full stop.
    """

    kind: str
    share: float
    sentence: str


LEVELS: Mapping[str, tuple[float, ...]] = {
    "cut off": (0.2, 0.5),
    "unreadable": (0.2, 0.5),
    "equal": (0.75,),
    "lone states": (0.9,),
    "not offered": (0.05, 0.2, 0.5),
    "failed tools": (0.2, 0.5),
}
"""Shares at which a finding is reported. A small model that begins to learn has smaller ones."""


def call_findings(traces: Sequence[Trace], settings: CallSettings) -> list[Finding]:
    """Share of final attempts' calls that were cut off, and share with unreadable tool calls; each
    only if there are some. A tool call that was cut off counts as cut off."""
    calls = [c for trace in traces if trace.final for c in trace.calls if not c.given_back]
    cut = [call for call in calls if call.finish_reason == "length"]
    unreadable = [c for c in calls if c.malformed_tool_calls and c.finish_reason != "length"]
    found = []
    if cut:
        sentence = f"{len(cut)} of {len(calls)} calls were cut off {_limit(cut, settings)}"
        found.append(Finding("cut off", len(cut) / len(calls), sentence))
    if unreadable:
        parser = "" if settings.parser is None else f"; it is {settings.parser}"
        sentence = (
            f"{len(unreadable)} of {len(calls)} calls contain unreadable tool calls, such as "
            f"{_example(unreadable[0])!r} (explorer.rollout_model.tool_call_parser must be the "
            f"model's{parser})"
        )
        found.append(Finding("unreadable", len(unreadable) / len(calls), sentence))
    return found


@dataclass(frozen=True)
class ToolUse:
    """A readable tool call of a model's answer.

    Attributes:
        name: The tool.
        offered: Names of the tools that the request offers; empty if they are not known.
        failure: The result, if it says that the tool failed.
    """

    name: str
    offered: Sequence[str]
    failure: str | None


def tool_calls(traces: Sequence[Trace]) -> list[ToolUse]:
    """The tool calls of final attempts, in chat completions."""
    found = []
    for trace in traces:
        calls = [call for call in trace.calls if trace.final and not call.given_back]
        results: dict[Any, str] = {
            message.get("tool_call_id"): str(message.get("content"))
            for call in calls
            for message in call.messages
            if message.get("role") == "tool"
        }
        for call in calls:
            offered = [str(one.get("function", one).get("name")) for one in call.tools]
            for made in call.response.get("tool_calls") or ():
                result = results.get(made.get("id"), "")
                failure = result if failed_result(result) else None
                found.append(ToolUse(str(made["function"]["name"]), offered, failure))
    return found


def tool_findings(traces: Sequence[Trace]) -> list[Finding]:
    """Share of the tool calls whose tool was not offered, and of the others that failed."""
    calls = tool_calls(traces)
    invented = [call for call in calls if call.offered and call.name not in call.offered]
    made = [call for call in calls if not call.offered or call.name in call.offered]
    failed = [call for call in made if call.failure is not None]
    found = []
    if invented:
        names = Counter(call.name for call in invented)
        sentence = (
            f"{len(invented)} of {len(calls)} tool calls are of tools that the request does not "
            f"offer, most often {names.most_common(1)[0][0]!r:.60}; it offers "
            f"{', '.join(invented[0].offered)}: name them in the system prompt"
        )
        found.append(Finding("not offered", len(invented) / len(calls), sentence))
    if failed:
        name, count = Counter(call.name for call in failed).most_common(1)[0]
        example = next(call.failure for call in failed if call.name == name) or ""
        sentence = (
            f"{len(failed)} of {len(made)} tool calls failed, most often ({count} times) {name}: "
            f"{' '.join(example.split()):.{CHARACTERS}}"
        )
        found.append(Finding("failed tools", len(failed) / len(made), sentence))
    return found


def figures(traces: Sequence[Trace]) -> list[str]:
    """Calls, reward and share that was cut off of each role, and calls and failures of each tool;
    nothing without roles and tools."""
    roles: defaultdict[str, list[tuple[Call, float | None]]] = defaultdict(list)
    for trace in traces:
        for call in trace.calls if trace.final else ():
            if call.role is not None and not call.given_back:
                own = trace.reward if call.reward is None else call.reward
                roles[call.role].append((call, own))
    lines = []
    for role, calls in sorted(roles.items()):
        rewards = [reward for _, reward in calls if reward is not None]
        cut = fmean(call.finish_reason == "length" for call, _ in calls)
        reward = f", reward {fmean(rewards):.3f}" if rewards else ""
        lines.append(f"role {role}: {counted(len(calls), 'call')}{reward}, {cut:.0%} cut off")
    tools: defaultdict[str, list[bool]] = defaultdict(list)
    for made in tool_calls(traces):
        offered = not made.offered or made.name in made.offered
        name = made.name if offered else "(not offered)"
        tools[name].append(made.failure is not None or not offered)
    for name, failures in sorted(tools.items()):
        lines.append(f"tool {name}: {counted(len(failures), 'call')}, {fmean(failures):.0%} failed")
    return lines


def _limit(cut: Sequence[Call], settings: CallSettings) -> str:
    """The limit at which most of these calls were cut off, its setting, and the fix."""
    context, answer, setting = settings.context, settings.answer, settings.answer_setting
    if context is None and answer is None:
        return f"at the token limit ({setting}, or the request's own max_tokens; raise it)"
    sizes = [len(call.prompt_ids) + len(call.completion_ids) for call in cut]
    if context is not None and sum(size >= context for size in sizes) > len(cut) / 2:
        return (
            f"at the end of the context (model.max_model_len, {context} tokens of prompt and "
            "answer together; raise it if the model allows that, or shorten the prompts)"
        )
    limits = Counter(call.sampling.max_tokens for call in cut)
    limit = limits.most_common(1)[0][0]
    if limit == answer:
        return f"at the token limit ({setting}, {limit}; raise it)"
    return (
        f"at {limit} tokens (the request's own max_tokens, or the rest of the rollout's "
        "tuner.max_tokens; raise it)"
    )


def _example(call: Call) -> str:
    """The end of the text, where tool calls are."""
    text = " ".join(said(call).split())
    return text if len(text) <= CHARACTERS else f"...{text[3 - CHARACTERS :]}"


def equal_groups(traces: Sequence[Trace], signal: SignalHistory) -> Finding | None:
    """Groups whose rollouts all have the same reward, except those with the best reward of the
    run: a task that is always solved is no problem. None if there are none.

    Args:
        traces: Those of a step.
        signal: History of the run, including this step.
    """
    groups = _groups(traces)
    alike = [rewards[0] for rewards in groups if len(set(rewards)) == 1]
    best = signal.highest if signal.lowest < signal.highest else None
    equal = [reward for reward in alike if reward != best]
    if not equal:
        return None
    return Finding(
        "equal",
        len(equal) / len(groups),
        f"in {len(equal)} of {len(groups)} groups all rollouts have the same reward, most often "
        f"{Counter(equal).most_common(1)[0][0]:g}: training uses the differences between the "
        "rewards of a group, so these groups teach nothing; easier tasks, partial credit, a larger "
        "algorithm.repeat_times or a higher model.temperature make differences more likely",
    )


def lone_states(metrics: Metrics) -> Finding | None:
    """Calls, except the first of each rollout, whose state `gigpo` compares with no other call.

    Args:
        metrics: Those of a step, with `tuner.runs.metrics.state_metrics` if states are compared.
    """
    if "states/count" not in metrics:
        return None
    if "states/shared_later" not in metrics:
        why = "no rollout has a second call"
    else:
        why = (
            f"{1 - metrics['states/shared_later']:.0%} of the calls after the first of their "
            "rollout were made in a state that no other call of their group was made in"
        )
    return Finding(
        "lone states",
        1 - metrics.get("states/shared_later", 0.0),
        f"{why}: gigpo then learns little that multi_step_grpo does not; name the states of calls "
        "(docs/algorithms.md#states-of-calls), raise algorithm.repeat_times, or set "
        "algorithm.algorithm_type to multi_step_grpo",
    )


def _groups(traces: Sequence[Trace]) -> list[list[float]]:
    """Rewards of each group with at least two, unless calls have their own rewards."""
    groups: dict[tuple[int, int], list[Trace]] = defaultdict(list)
    for trace in traces:
        if trace.final and trace.reward is not None and without_vote(trace) is None:
            groups[trace.id.step, trace.id.task].append(trace)
    return [
        [trace.reward for trace in group if trace.reward is not None]
        for group in groups.values()
        if len(group) > 1
        and all(c.reward is None and c.gained is None for trace in group for c in trace.calls)
    ]


class Notices:
    """Reports lost signal: when a share reaches one of `LEVELS`, and again only when it reaches a
    higher level or has been below half of the lowest in between. The first step's figures of roles
    and tools are reported, too.

    Args:
        settings: Those of the run.
        compared: Whether training uses differences of rewards inside groups.
    """

    def __init__(self, settings: CallSettings, *, compared: bool) -> None:
        self._settings = settings
        self._compared = compared
        self._reached: dict[str, int] = {}
        self._figures_said = False

    def of(
        self,
        step: int,
        traces: Sequence[Trace],
        signal: SignalHistory,
        metrics: Metrics | None = None,
    ) -> list[str]:
        """Messages that are due after a step, whose `metrics` `signal` includes."""
        found_now = [*call_findings(traces, self._settings), *tool_findings(traces)]
        findings = {one.kind: one for one in found_now}
        if self._compared and (equal := equal_groups(traces, signal)) is not None:
            findings[equal.kind] = equal
        if (lone := lone_states(metrics or {})) is not None:
            findings[lone.kind] = lone
        due = [] if self._figures_said else [f"step {step}: {line}" for line in figures(traces)]
        self._figures_said = self._figures_said or bool(due)
        for kind, levels in LEVELS.items():
            found = findings.get(kind)
            reached = sum(found.share >= level for level in levels) if found else 0
            if found and reached > self._reached.get(kind, 0):
                due.append(f"step {step}: {found.sentence}")
                self._reached[kind] = reached
            elif found is None or found.share < levels[0] / 2:
                self._reached[kind] = 0
        return due


BY_REWARD = ("equal_rewards", "success_rate_too_low", "success_rate_too_high", "not_best_of_group")
"""Reasons for dropped tokens that other rewards would make trainable."""


def untrained(row: Metrics) -> str:
    """Reasons why no call of a step could be trained; empty if one was, or if rewards are the
    reason."""
    if row.get("tokens/trained", 1):
        return ""
    prefix = "tokens/dropped/"
    dropped = {k.removeprefix(prefix): n for k, n in row.items() if k.startswith(prefix)}
    if any(reason in BY_REWARD for reason in dropped):
        return ""
    return ", ".join(f"{n:.0f} {reason}" for reason, n in dropped.items()) or "none was sampled"


def _failed(row: Metrics) -> float:
    """Number of a step's rollouts that did not complete."""
    others = (outcome for outcome in Outcome if outcome is not Outcome.COMPLETED)
    return sum(row.get(f"rollouts/{outcome.value}", 0) for outcome in others)


@dataclass(frozen=True)
class SignalHistory:
    """Training signal of a run's steps so far, by their metrics.

    Attributes:
        learned: Whether a step had calls whose rewards differ from those they are compared with.
        quiet: Number of latest steps in a row without such calls.
        broken: Number of latest of these in a row in which most rollouts failed or no call could be
            trained.
        solved: Number of latest of these in a row in which every rollout completed with the highest
            reward of the run, and calls could be trained. If tasks are drawn by their results, only
            steps after each task was drawn once: others may be harder.
        lowest, highest: Rewards of the run. If its first steps did not log them, the highest is
            unknown, and infinite.
    """

    learned: bool = False
    quiet: int = 0
    broken: int = 0
    solved: int = 0
    lowest: float = math.inf
    highest: float = -math.inf

    def after(self, row: Metrics) -> SignalHistory:
        """The history with one more step; an evaluation changes nothing."""
        if "signal" not in row:
            return self
        unknown = math.inf if "reward/mean" in row else -math.inf
        least, most = row.get("reward/min", math.inf), row.get("reward/max", unknown)
        lowest, highest = min(self.lowest, least), max(self.highest, most)
        if row["signal"]:
            return SignalHistory(learned=True, lowest=lowest, highest=highest)
        broken = _failed(row) > row.get("rollouts/completed", 0) or bool(untrained(row))
        alike = least == most == highest and row.get("tasks/seen", 1) == 1
        solved = alike and not _failed(row) and not broken
        before = self.solved if highest == self.highest else 0
        return replace(
            self,
            quiet=self.quiet + 1,
            broken=self.broken + 1 if broken else 0,
            solved=before + 1 if solved else 0,
            lowest=lowest,
            highest=highest,
        )

    def nothing_left(self, patience: int) -> str | None:
        """Reason why the run is complete before its last step, or None if there is something to
        learn."""
        if self.solved < patience or not self.learned or not self.lowest < self.highest:
            return None
        steps = f"{patience} steps in a row" if patience > 1 else "this step"
        return (
            f"every rollout of {steps} had the highest reward, {self.highest:g}: nothing is left "
            "to learn from these tasks, so the run ends early, as completed; use harder tasks, or "
            "raise tuner.signal_patience to continue"
        )


def diagnosis(
    traces: Sequence[Trace],
    steps: int,
    *,
    of_rewards: bool = True,
    reasons: str = "",
    settings: CallSettings = CallSettings(),
) -> str:
    """Reason why `steps` steps in a row taught nothing, judged by the last of them.

    Args:
        traces: Every attempt of the last step.
        of_rewards: Whether training uses rewards.
        reasons: Reasons why no call of the step could be trained (`untrained`).
        settings: Those of the run.
    """
    counted = f"{steps} steps in a row" if steps > 1 else "The last step"
    why = _why_quiet(traces, of_rewards, reasons, settings)
    return f"{counted} gave nothing to learn from, so the run stops. {why}"


def quiet_warning(traces: Sequence[Trace], step: int, steps: int, settings: CallSettings) -> str:
    """Like `diagnosis`, for a run that continues because earlier steps had signal."""
    groups = _groups(traces)
    alike = sum(len(set(rewards)) == 1 for rewards in groups)
    counted = f"{steps} steps in a row" if steps > 1 else "this step"
    return (
        f"warning: step {step}: {counted} gave nothing to learn from: in {alike} of {len(groups)} "
        "groups of the last one all rollouts have the same reward. Earlier steps did, so the run "
        f"continues. {_why_quiet(traces, True, '', settings)}"
    )


def _why_quiet(
    traces: Sequence[Trace], of_rewards: bool, reasons: str, settings: CallSettings
) -> str:
    final = [trace for trace in traces if trace.final]
    failed = [trace for trace in final if trace.outcome is not Outcome.COMPLETED]
    rewards = {
        trace.reward for trace in final if trace.reward is not None and without_vote(trace) is None
    }
    if len(failed) > len(final) / 2:
        (outcome, error), count = Counter(
            (trace.outcome, trace.error) for trace in failed
        ).most_common(1)[0]
        return (
            f"{len(failed)} of {len(final)} rollouts of the last step failed, most often ({count} "
            f"times) with {outcome.value}: {error}"
        )
    if not rewards or not of_rewards or reasons:
        return (
            "No call of the last step could be trained: see tokens/dropped in metrics.jsonl for "
            f"the reasons{f' ({reasons})' if reasons else ''}"
        )
    most = [one.sentence for one in call_findings(final, settings) if one.share > 0.5]
    common = f"{' and '.join(most)}. Besides, " if most else ""
    if len(rewards) == 1:
        return (
            f"Every rollout of the last step had the same reward, {rewards.pop():g}: "
            f"{common}training uses the differences between the rewards of a group. If that reward "
            "is the lowest, start with easier tasks or a stronger model, or give partial credit; "
            "if it is the highest, the model has nothing left to learn here. Raising "
            "algorithm.repeat_times or model.temperature also makes differences more likely"
        )
    return (
        "Within every group all rollouts had the same reward, though rewards differ between "
        f"tasks: {common}raise algorithm.repeat_times or model.temperature, or choose tasks that "
        "the model solves sometimes"
    )


# Where the time of a run goes, and which setting changes that.


DOMINANT = 0.6
"""Minimum share of the time for advice."""
STEPS, SECONDS = 10, 120.0
"""Minimum number of steps, and of their seconds, for advice; the first step loads and compiles."""
SLOTS, AHEAD = 64, 4
"""Answers at a time, and steps ahead, up to which benchmarks measured that more are faster."""


def advice(history: Iterable[Metrics], config: RunConfig) -> str | None:
    """Advice on the dominant part of a run's time; None if nothing dominates, the run was short, or
    no setting changes it.

    Each advised change has its gain in a benchmark: `advice` (more rollouts at a time), `async`
    (collection ahead of training) or `engine` (more answers at a time).

    Args:
        history: Metrics of all steps.
        config: The effective configuration.
    """
    rows = [row for row in history if "time/idle" in row][1:]
    if len(rows) < STEPS or sum(row["time/step"] for row in rows) < SECONDS:
        return None

    def seconds(name: str) -> float:
        return fmean(row.get(name, 0.0) for row in rows)

    of_rollouts = ("generation", "agent", "judge")
    whole, parts = seconds("time/step"), {name: seconds(f"time/{name}") for name in of_rollouts}
    busy = sum(seconds(f"rollout_seconds/{name}") for name in of_rollouts)
    queue = seconds("rollout_seconds/queue")
    more, answers, ahead = _more_at_once(config)
    name = max(parts, key=lambda part: parts[part])
    if more and name != "generation" and queue > busy and sum(parts.values()) >= DOMINANT * whole:
        return (
            f"advice: rollouts wait {queue:.1f} s for a free slot and then take {busy:.1f} s: "
            f"{more}, if tools and memory allow it"
        )
    changes = (answers,) if name == "generation" else (ahead, more)
    if parts[name] < DOMINANT * whole or not any(changes):
        return None
    what = {"agent": "the agents' own code and tools", "judge": "the judge"}.get(name, name)
    return (
        f"advice: {parts[name] / whole:.0%} of the time is {what}: "
        f"{', or '.join(filter(None, changes))} (docs/training.md)"
    )


def _more_at_once(config: RunConfig) -> tuple[str, str, str]:
    """Settings that run more rollouts at a time, generate more answers at a time, and collect
    further ahead of training; each empty if it would change nothing, or its gain is unknown."""
    offset, runners = config.synchronizer.sync_offset, config.concurrent_rollouts
    under_way = config.buffer.batch_size * config.algorithm.repeat_times * (1 + offset)
    slots, useful = config.tuner.max_slots, min(under_way, SLOTS)
    limits = {"explorer.runner_per_model": runners, "tuner.max_slots": slots}
    low = [f"{name} (now {value})" for name, value in limits.items() if value < useful]
    further = f"raise synchronizer.sync_offset (now {offset})" if offset < AHEAD else ""
    if not offset:
        further = "set synchronizer.sync_offset, so that collection runs ahead of training"
    return (
        f"raise explorer.runner_per_model (now {runners})" if runners < under_way else "",
        f"raise {' and '.join(low)} to {useful}" if low else "",
        "" if config.tuner.deterministic else further,  # it would depend on timing
    )
