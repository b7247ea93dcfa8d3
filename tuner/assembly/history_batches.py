"""What a step trains on of rollouts that were recorded before, by the configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tuner.assembly.models import load_settings, load_tokenizer
from tuner.assembly.parameters import selection
from tuner.assembly.stack import chat_renderer
from tuner.config import RunConfig
from tuner.config.history import HistorySection
from tuner.config.tuner_section import Penalize
from tuner.data.history_examples import other_role
from tuner.data.order import batch_indices, planned_steps, rows_taken
from tuner.data.recorded import Examples
from tuner.data.recorded_traces import Group, History, LeftOut
from tuner.errors import ConfigError, DatasetError
from tuner.traces import Call, Outcome, Trace
from tuner.training import Batch, OffPolicyBatch, Selection, TeacherPrompt, build_batch
from tuner.training.batch import reward_of, untrainable


@dataclass(frozen=True)
class Comparable:
    """The groups that can teach something: unlike those that are sampled as a run goes on, they are
    known before it begins.

    Attributes:
        groups: What is trained.
        held_out: What is not.
        left_out: By the filters; by the selection; groups whose rewards are all equal, where
            rewards are compared; and those that no step comes to.
        used: How many rollouts the others are.
    """

    groups: tuple[Group, ...]
    held_out: tuple[Group, ...]
    left_out: LeftOut
    used: int


def comparable(config: RunConfig, history: History) -> Comparable:
    """What of recorded rollouts an algorithm that learns from rewards, or from a teacher, trains.

    Raises:
        ConfigError: A source is a log without tokens.
        DatasetError: The rollouts were recorded with another model, or are fewer groups than a step
            takes.
    """
    name = config.algorithm.algorithm_type
    if logs := (*history.rows, *history.held_out_rows):
        raise ConfigError(
            f"tuner.history.sources: {logs[0].where} has no tokens, and algorithm.algorithm_type "
            f"{name} learns from the log-probs that tokens were sampled with, which nobody knows: "
            "set it to sft or dpo, or remove that source"
        )
    check_same_tokenizer(config, history)
    left_out = history.left_out + LeftOut()
    groups = [group for found in history.groups if (group := _that_teach(config, found, left_out))]
    size, reasons = config.buffer.batch_size, sorted(left_out.rollouts.items())
    if len(groups) < size:
        why = ", ".join(f"{count} {reason}" for reason, count in reasons) or "none"
        raise DatasetError(
            f"tuner.history: {len(groups)} tasks have rollouts to compare but batch_size is "
            f"{size}: no step can run; lower buffer.batch_size, or record more (rollouts left out: "
            f"{why})"
        )
    taken, used = _taken(config, len(groups)), 0
    for index, group in enumerate(groups):
        used += len(group) * (index in taken)
        for trace in group if index not in taken else ():
            left_out.add(trace, "not_taken")
    return Comparable(tuple(groups), history.held_out, left_out, used)


def without_late(config: RunConfig, examples: Examples) -> Examples:
    """The same examples, with those that no step comes to counted as left out."""
    taken = _taken(config, len(examples.used))
    late = [one for index, one in enumerate(examples.used) if index not in taken]
    tokens = sum(len(turn.completion_ids) for one in late for turns in one for turn in turns)
    counted = {**examples.tokens_left_out, **({"not_taken": tokens} if late else {})}
    return replace(examples, tokens_left_out=counted, not_taken=len(late))


def _taken(config: RunConfig, rows: int) -> frozenset[int]:
    return rows_taken(
        planned_steps(config, rows),
        size=config.buffer.batch_size,
        rows=rows,
        selector=config.buffer.trainer_input.experience_buffer.data_selector,
    )


def _that_teach(config: RunConfig, group: Group, left_out: LeftOut) -> Group:
    """The rollouts of a group that can be compared; none where they teach nothing."""
    chosen, penalty, members = selection(config), penalty_of(config), list[tuple[Trace, float]]()
    for trace in group:
        reward = reward_of(trace, penalty, needed=chosen.needs_reward)
        if reward is not None:
            members.append((trace, reward))
        elif trace.outcome is Outcome.COMPLETED:
            left_out.add(trace, "no_reward")
        else:
            left_out.add(trace, trace.outcome.value)
    reason = _quiet(chosen, members) if members else None
    if reason is None:
        return tuple(trace for trace, _ in members)
    for trace, _ in members:
        left_out.add(trace, reason)
    return ()


def _quiet(chosen: Selection, members: Sequence[tuple[Trace, float]]) -> str | None:
    """Why a group teaches nothing, or None."""
    reason = chosen.reason(members)
    calls = [call for trace, _ in members for call in trace.calls]
    own = any(call.reward is not None or call.gained is not None for call in calls)
    # Discounted by their turns, equal rewards differ.
    compares = chosen.needs_group and not chosen.lone_rewards and not own
    if reason is None and compares and len({reward for _, reward in members}) == 1:
        reason = "equal_rewards"
    return reason


def off_policy_batch(
    config: RunConfig, groups: Sequence[Group], teacher_prompt: TeacherPrompt, *, step: int
) -> OffPolicyBatch:
    """What step `step` trains on of recorded rollouts."""
    indices = batch_indices(
        step,
        size=config.buffer.batch_size,
        rows=len(groups),
        selector=config.buffer.trainer_input.experience_buffer.data_selector,
    )
    section = history_of(config)
    batch = build_batch(
        # Where an epoch ends inside a step, a group may come twice.
        [trace for index in dict.fromkeys(indices) for trace in groups[index]],
        penalty=penalty_of(config),
        selection=selection(config),
        left_out=unused_call(config),
        teacher_prompt=teacher_prompt,
    )
    return OffPolicyBatch.of(batch, least_effective=section.min_effective_samples)


def held_out_batch(config: RunConfig, groups: Sequence[Group]) -> Batch:
    """Recorded rollouts that are not trained, as a batch; each counts by itself."""
    return build_batch(
        [trace for group in groups for trace in group],
        penalty=penalty_of(config),
        selection=Selection(needs_group=False, lone_rewards=True),
        left_out=unused_call(config),
    )


def unused_call(config: RunConfig) -> Callable[[Call], str | None]:
    """Why a recorded call is not trained, or None."""
    roles = frozenset(history_of(config).roles)
    return lambda call: untrainable(call) or other_role(call, roles)


def penalty_of(config: RunConfig) -> float | None:
    given = config.tuner.on_failure
    return given.penalize if isinstance(given, Penalize) else None


def history_of(config: RunConfig) -> HistorySection:
    """The settings of recorded rollouts, which there are."""
    assert config.tuner.history is not None, "mode train without them is of rows"
    return config.tuner.history


# Calls whose text is looked at.
SEEN = 8


def check_same_tokenizer(config: RunConfig, history: History) -> None:
    """Refuse ids of another tokenizer: they would mean other text.

    Raises:
        DatasetError: A token was recorded that the model does not have, or most of the first calls
            do not read as the agent got them.
        ModelLoadError: The model has no tokenizer.
    """
    path = config.model.model_path
    vocabulary = load_settings(path).get_text_config().vocab_size
    calls = [
        call
        for group in (*history.groups, *history.held_out)
        for trace in group
        for call in trace.calls
    ]
    mend = "it was recorded with another model; set model.model_path to one with the same tokenizer"
    largest = max((max(c.prompt_ids + c.completion_ids, default=0) for c in calls), default=0)
    if largest >= vocabulary:
        raise DatasetError(
            f"tuner.history: a recorded call has the token id {largest}, and the model has "
            f"{vocabulary} tokens: {mend}"
        )
    renderer = chat_renderer(config, load_tokenizer(path))
    told = [(c, c.response.get("content")) for c in calls if c.invalid is None]
    texts = [(call, said.strip()) for call, said in told if isinstance(said, str) and said.strip()]
    seen = texts[:SEEN]
    other = [(c, said) for c, said in seen if said not in renderer.decode(list(c.completion_ids))]
    if len(other) > len(seen) / 2:  # of single ones the text may have been mended
        call, said = other[0]
        raise DatasetError(
            f"tuner.history: a recorded answer is {said!r:.60}, and its tokens are "
            f"{renderer.decode(list(call.completion_ids))!r:.60} for this model: {mend}"
        )
