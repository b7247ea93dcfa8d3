"""Recorded rollouts as training data: read, filtered, and grouped by task.

    sources -> rollouts -> filters -> tasks -> held out
                                        |
                                        +----> groups of rollouts, for algorithms that read rewards
                                        +----> the best of each task, for sft
                                        +----> a better and a worse one of each task, for dpo

The ids are the sampled ones; text is not tokenized again. Unused data is counted by reason, both
rollouts and tokens. Logs without tokens become conversations (`tuner.runs.history`), which only
sft and dpo can use.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sqlite3
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from importlib import import_module
from itertools import combinations
from pathlib import Path
from typing import Any

from tuner.config.algorithms import Recorded
from tuner.config.schema import FormatSection, HistorySection, unix_seconds
from tuner.encoding import NotText, decoded
from tuner.errors import ConfigError, DatasetError, TunerError
from tuner.gateway import ChatRenderer
from tuner.runs.recorded import (
    Example,
    Examples,
    RecordedTurn,
    UnusableConversation,
    conversation,
    pair,
    trained_turns,
)
from tuner.tasks.datasets import described, row_text
from tuner.traces import Call, Outcome, RolloutId, Trace, read_traces
from tuner.traces.reading import InvalidRecord, JsonReader, complete_lines
from tuner.traces.store import SERVED

# Logs of chats without tokens, read as conversations: OpenAI's JSON lines and spans of
# OpenTelemetry.
#
# Each line is one of
#
#     {"messages": [...], "tools": [...]}                               a conversation
#     {"input": {"messages": [...]}, "preferred_output": [...],
#      "non_preferred_output": [...]}                                   a pair, as for fine-tuning
#     {"request": {"messages": [...]}, "response": {"choices": [...]}}  a request and its answer
#     {"attributes": {"gen_ai.output.messages": ...}}                   a span of a model call
#     {"resourceSpans": [...]}                                          many, as OTLP sends them
#
# and becomes a row of `tuner.runs.recorded`, which the chat template turns into ids. The sampled
# tokens are unknown, so there are no log-probs. Only the answer of a request or a span is trained:
# earlier turns are the answers of earlier ones.


Row = dict[str, Any]
Message = dict[str, Any]
# Spans of model calls, by `gen_ai.operation.name`; other spans are of agents, tools and embeddings.
OF_MODEL = ("chat", "text_completion", "generate_content")


@dataclass(frozen=True)
class LogLine:
    """One line of a log.

    Attributes:
        row: Its content in the columns of `tuner.runs.recorded`; None if there is nothing to learn
            from.
        started: Unix time, if the line has one.
        reason: Why there is no row.
    """

    row: Row | None
    started: float | None = None
    reason: str | None = None


def is_trace(line: Any) -> bool:
    """Whether a line is a rollout recorded by tuner."""
    return isinstance(line, Mapping) and {"id", "calls", "outcome"} <= line.keys()


def logged(line: Any) -> Iterator[LogLine]:
    """Parse a line of a log: one conversation or pair, or the spans of several."""
    if not isinstance(line, Mapping):
        raise DatasetError(f"{line!r:.80} is not an object")
    for keys, read in _FORMS.items():
        if all(line.get(key) is not None for key in keys):
            yield from read(line)
            return
    raise DatasetError(
        f"it has the keys {', '.join(map(str, line)) or 'none'}, but must be a recorded rollout or "
        "have messages, a request with its response, a pair with preferred_output, or a span with "
        "attributes"
    )


def _conversation(line: Mapping[str, Any]) -> Iterator[LogLine]:
    yield LogLine({"messages": line["messages"], "tools": line.get("tools")})


def _pair(line: Mapping[str, Any]) -> Iterator[LogLine]:
    asked = line["input"]
    if not isinstance(asked, Mapping):
        raise DatasetError(f"input is {asked!r:.80}, but must be an object with messages")
    row = {
        "messages": asked.get("messages"),
        "tools": asked.get("tools"),
        "chosen": line["preferred_output"],
        "rejected": line.get("non_preferred_output"),
    }
    yield LogLine(row)


def _exchange(line: Mapping[str, Any]) -> Iterator[LogLine]:
    request, response = (_body(line, key) for key in ("request", "response"))
    created = response.get("created")
    started = float(created) if isinstance(created, int | float) else None
    choices = response.get("choices")
    if not isinstance(choices, list) or not choices:
        yield LogLine(None, started, "no_answer")
        return
    if len(choices) > 1:
        raise DatasetError(f"the response has {len(choices)} choices; put each on its own line")
    message = choices[0].get("message") if isinstance(choices[0], Mapping) else None
    if not isinstance(message, Mapping):
        raise DatasetError("response.choices[0] has no message")
    # Fields of OpenAI's answers in addition to the message itself.
    beside = ("refusal", "annotations", "audio", "function_call")
    answer = {key: value for key, value in message.items() if key not in beside or value}
    yield LogLine(_answered(request.get("messages"), answer, request.get("tools")), started)


def _body(line: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = line[key]
    if isinstance(found, Mapping) and isinstance(found.get("body"), Mapping):
        found = found["body"]
    if not isinstance(found, Mapping):
        raise DatasetError(f"{key} is {found!r:.80}, but must be the body of a chat completion")
    return found


def _answered(asked: Any, answer: Message, tools: Any) -> Row:
    """A row in which only the last message is trained."""
    if not isinstance(asked, list):
        raise DatasetError(f"the request's messages are {asked!r:.80}, but must be a list")
    before = [
        {**one, "weight": 0} if isinstance(one, Mapping) and one.get("role") == "assistant" else one
        for one in asked
    ]
    return {"messages": [*before, answer], "tools": tools}


# Spans ------------------------------------------------------------------------------------------


def _batch(line: Mapping[str, Any]) -> Iterator[LogLine]:
    for resource in line["resourceSpans"]:
        for scope in resource.get("scopeSpans", ()):
            for span in scope.get("spans", ()):
                yield from _span(span)


def _span(span: Mapping[str, Any]) -> Iterator[LogLine]:
    attributes, started = _attributes(span.get("attributes")), _started(span)
    operation = attributes.get("gen_ai.operation.name")
    if operation is not None and operation not in OF_MODEL:
        yield LogLine(None, started, "no_model_call")
        return
    status = span.get("status") or {}
    if status.get("status_code") == "ERROR" or status.get("code") in (2, "STATUS_CODE_ERROR"):
        yield LogLine(None, started, "failed_call")
        return
    answers = _plain(attributes.get("gen_ai.output.messages"))
    if not answers:
        yield LogLine(None, started, "no_answer")
        return
    if len(answers) > 1:
        raise DatasetError(f"gen_ai.output.messages has {len(answers)} choices, but must have one")
    try:
        asked = [*_instructions(attributes), *_asked(attributes)]
        (answer,) = _of_parts(answers[0])
    except UnusableConversation as unusable:
        yield LogLine(None, started, unusable.reason)
        return
    if not asked:
        yield LogLine(None, started, "no_prompt")
        return
    yield LogLine(_answered(asked, answer, _tools(attributes)), started)


def _attributes(found: Any) -> dict[str, Any]:
    """Attributes by name, from the object of a printed span or from OTLP's list."""
    if isinstance(found, Mapping):
        return dict(found)
    return {one["key"]: _value(one.get("value")) for one in found or ()}


def _value(found: Any) -> Any:
    """Convert a value of OTLP: `{"stringValue": ...}`, `{"arrayValue": {"values": [...]}}`."""
    if not isinstance(found, Mapping):
        return found
    kind: str
    value: Any
    kind, value = next(iter(found.items()), ("", None))
    if kind == "arrayValue":
        return [_value(one) for one in value.get("values", ())]
    if kind == "kvlistValue":
        return {one["key"]: _value(one.get("value")) for one in value.get("values", ())}
    return value


def _plain(found: Any) -> Any:
    """Structured data, which may be JSON text in a span."""
    if not isinstance(found, str):
        return found
    try:
        return json.loads(found)
    except ValueError:
        raise DatasetError(f"{found!r:.80} is not JSON") from None


def _started(span: Mapping[str, Any]) -> float | None:
    from datetime import datetime

    nanoseconds, text = span.get("startTimeUnixNano"), span.get("start_time")
    try:
        if nanoseconds is not None:
            return int(nanoseconds) / 1e9
        return datetime.fromisoformat(text).timestamp() if isinstance(text, str) else None
    except ValueError:
        raise DatasetError(f"{nanoseconds or text!r} is not a time") from None


def _instructions(attributes: Mapping[str, Any]) -> list[Message]:
    parts = _plain(attributes.get("gen_ai.system_instructions"))
    if not parts:
        return []
    return _of_parts({"role": "system", "parts": parts})


def _asked(attributes: Mapping[str, Any]) -> list[Message]:
    """Input messages of the model. AgentScope 1.x uses an attribute of its own."""
    found = _plain(attributes.get("gen_ai.input.messages"))
    if found is not None:
        return [message for one in found for message in _of_parts(one)]
    called = _plain(attributes.get("agentscope.function.input"))
    if not isinstance(called, Mapping):
        return []
    given, named = called.get("args") or (), called.get("kwargs") or {}
    messages = given[0] if given else named.get("messages")
    if not isinstance(messages, list):
        return []
    return [_without_nothing(one) for one in messages if isinstance(one, Mapping)]


def _without_nothing(message: Mapping[str, Any]) -> Message:
    """A message without its empty fields."""
    return {key: value for key, value in message.items() if value is not None}


def _tools(attributes: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Tools in OpenAI's form; the conventions omit the level `function`."""
    return [
        one
        if "function" in one
        else {
            "type": one.get("type", "function"),
            "function": {key: value for key, value in one.items() if key != "type"},
        }
        for one in _plain(attributes.get("gen_ai.tool.definitions")) or ()
    ]


def _of_parts(message: Any) -> list[Message]:
    """Convert a message made of parts to OpenAI's form; one message for each result of a tool.
    Raises Unusable if a part is not text, reasoning, a tool call or a tool result."""
    if not isinstance(message, Mapping) or not isinstance(message.get("parts"), list):
        raise DatasetError(f"{message!r:.80} is not a message with parts")
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    results: list[Message] = []
    for part in message["parts"]:
        kind = part.get("type")
        if kind == "text":
            texts.append(part.get("content") or "")
        elif kind == "reasoning":
            reasoning.append(part.get("content") or "")
        elif kind == "tool_call":
            calls.append(_call(part))
        elif kind == "tool_call_response":
            results.append(_result(part))
        else:
            raise UnusableConversation("not_text")
    if results:
        return results
    shaped: Message = {"role": message.get("role"), "content": "\n".join(texts)}
    if reasoning:
        shaped["reasoning_content"] = "\n".join(reasoning)
    if calls:
        shaped["tool_calls"] = calls
    return [shaped]


def _call(part: Mapping[str, Any]) -> dict[str, Any]:
    arguments = part.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    function = {"name": part.get("name"), "arguments": text}
    return {"id": part.get("id"), "type": "function", "function": function}


def _result(part: Mapping[str, Any]) -> Message:
    found = part.get("response", part.get("result"))
    text = found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)
    return {"role": "tool", "tool_call_id": part.get("id"), "content": text}


_FORMS = {
    ("resourceSpans",): _batch,
    ("attributes",): _span,
    ("input", "preferred_output"): _pair,
    ("request", "response"): _exchange,
    ("messages",): _conversation,
}


def read_log(path: Path, lines: Iterator[tuple[int, Any]]) -> Iterator[tuple[int, LogLine]]:
    """Parse each line of a log; yields the line's number and its content."""
    for number, line in lines:
        try:
            for found in logged(line):
                yield number, found
        except (DatasetError, AttributeError, LookupError, TypeError) as error:
            said = str(error) if isinstance(error, DatasetError) else f"cannot be read: {error!r}"
            raise DatasetError(f"{path}, line {number}: {said}") from None


logger = logging.getLogger("tuner")

# Sources of recorded rollouts: runs, files of traces, a server's store, logs of chats.


# Reads the sessions of a server; of a higher layer, so named here and not imported.
SESSIONS = "tuner.serving.serving_store", "ServingStore"


@dataclass(frozen=True)
class StoredRollout:
    """A recorded rollout as it was found.

    Attributes:
        trace: One attempt of the rollout.
        source: The run, file or server that it comes from.
        group: The group of a served session.
        tags, metadata: Those of a served session.
    """

    trace: Trace
    source: str
    group: str | None = None
    tags: frozenset[str] = frozenset()
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def task(self) -> str:
        """Key of its task: group, row, or the first prompt."""
        if self.group is not None:
            return f"group {self.group}"
        if self.trace.task or not self.trace.calls:
            return row_text(self.trace.task)
        return row_text({"messages": self.trace.calls[0].messages})


@dataclass(frozen=True)
class LogRow:
    """A conversation or a pair from a log.

    Attributes:
        where: File and line.
        row: Its content in the columns of `tuner.runs.recorded`.
        started: Unix time, if the log has one.
    """

    where: str
    row: Row
    started: float | None

    @property
    def task(self) -> str:
        """Key of its task: the prompt."""
        messages = self.row["messages"] if isinstance(self.row["messages"], list) else []
        return row_text({"messages": messages if "chosen" in self.row else messages[:-1]})


def found_in(source: Path) -> Iterator[StoredRollout | LogRow | str]:
    """Read a source: yields rollouts, rows of logs, and for each unusable line of a log the
    reason."""
    if source.is_dir():
        folder = source / "traces" if (source / "traces").is_dir() else source
        served = source / SERVED
        files = sorted(folder.glob("*.jsonl"))
        if served.is_file():
            yield from _served(served)
        elif not files:
            raise DatasetError(
                f"tuner.history.sources: {source} has neither a folder traces/, nor .jsonl files, "
                f"nor a {SERVED}; name a run, a folder of logs or a server's folder"
            )
        for file in files:
            yield from _of_file(file)
    elif source.is_file():
        with source.open("rb") as opened:
            is_database = opened.read(16).startswith(b"SQLite format 3")
        yield from _served(source) if is_database else _of_file(source)
    else:
        raise DatasetError(f"tuner.history.sources: {source} does not exist")


def _of_file(path: Path) -> Iterator[StoredRollout | LogRow | str]:
    begun = fnmatch(path.name, "*step_*.jsonl") and next(complete_lines(path), None) is None
    first = None if begun else next(_objects(path), None)
    if first is None:  # a run may have been killed while it wrote its first line
        return
    if is_trace(first[1]):
        folder = str(path.parent.resolve())
        yield from (StoredRollout(trace, folder) for trace in read_traces(path, skip=True))
        return
    for number, found in read_log(path, _objects(path)):
        if found.row is None:
            yield found.reason or "nothing"
        else:
            yield LogRow(f"{path}, line {number}", found.row, found.started)


_VALUES = JsonReader[Any](Any, "JSON")


def _objects(path: Path) -> Iterator[tuple[int, Any]]:
    """The number (from 1) and the value of each line that is not empty."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                yield number, _VALUES.parse(decoded(line, number).encode())
            except NotText as error:
                raise DatasetError(f"{path} cannot be read: {error}") from None
            except InvalidRecord as error:
                raise DatasetError(f"{path}, line {number} is not JSON: {error}") from None


def _served(path: Path) -> Iterator[StoredRollout | str]:
    """The sessions in a server's store; the server may be running."""
    module, name = SESSIONS
    try:
        store: Any = getattr(import_module(module), name)(path, readonly=True)
    except (ImportError, sqlite3.Error, TunerError) as error:
        raise DatasetError(f"{path} cannot be read as a server's sessions: {error}") from error
    try:
        for session in store.every():
            group = session.group and f"{session.application}: {session.group}"
            try:
                trace = store.trace(session.id)
            except TunerError as error:
                logger.warning("left out: %s", error)
                yield "damaged_session"
                continue
            yield StoredRollout(
                trace,
                str(path.resolve()),
                group=group,
                tags=frozenset(session.tags),
                metadata=session.metadata,
            )
    finally:
        store.close()


Group = tuple[Trace, ...]
# Splits of training rollouts: those of runs, and those of served sessions. All others are
# evaluations.
LEARNED = ("train", "serve")


@dataclass
class LeftOut:
    """Unused data by reason.

    Attributes:
        rollouts: Number of rollouts, attempts and lines of logs.
        tokens: Number of sampled tokens.
    """

    rollouts: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)

    def add(self, trace: Trace, reason: str) -> None:
        self.rollouts[reason] += 1
        self.tokens[reason] += trace.sampled_tokens

    def __add__(self, other: LeftOut) -> LeftOut:
        return LeftOut(self.rollouts + other.rollouts, self.tokens + other.tokens)


@dataclass(frozen=True)
class History:
    """Recorded data after the filters.

    Attributes:
        groups: The rollouts of each task that is trained. `RolloutId.task` is the index of the
            group, `rollout` the index in the group.
        held_out: The rollouts of each held-out task.
        rows: Conversations or pairs from logs, as rows of `tuner.runs.recorded`, each with file and
            line.
        held_out_rows: Those that are held out.
        left_out: Data removed by the filters.
    """

    groups: tuple[Group, ...]
    held_out: tuple[Group, ...] = ()
    rows: tuple[LogRow, ...] = ()
    held_out_rows: tuple[LogRow, ...] = ()
    left_out: LeftOut = field(default_factory=LeftOut)

    @property
    def fingerprint(self) -> list[dict[str, Any]]:
        """Rows that identify this data, as for a dataset."""
        traces = (trace for group in (*self.groups, *self.held_out) for trace in group)
        return [
            *(
                {
                    "id": str(trace.id),
                    "task": trace.task,
                    "reward": trace.reward,
                    "calls": [[call.id, list(call.completion_ids)] for call in trace.calls],
                }
                for trace in traces
            ),
            *(one.row for one in (*self.rows, *self.held_out_rows)),
        ]


def read_history(section: HistorySection, given: Any = None) -> History:
    """Read all sources and apply the filters.

    Args:
        section: Sources and filters.
        given: The training data passed to `tune()`: rollouts in memory, used in addition to the
            sources, or None.
    """
    left_out, rows = LeftOut(), list[LogRow]()
    if given is not None and not all(isinstance(one, Trace) for one in given):
        raise DatasetError(
            f"train_dataset is {described(given)}, but tuner.history.sources already names the "
            "training data: remove one of them"
        )
    stored = {(one.source, one.trace.id, one.trace.attempt): one for one in _in_memory(given or ())}
    for source in section.sources:
        for one in found_in(Path(source)):
            if isinstance(one, StoredRollout):
                key = one.source, one.trace.id, one.trace.attempt
                if key in stored:
                    left_out.rollouts["given_twice"] += 1
                stored[key] = one
            elif isinstance(one, LogRow):
                rows.append(one)
            else:
                left_out.rollouts[one] += 1
    if not stored and not rows:
        where = ", ".join(section.sources) or "train_dataset"
        raise DatasetError(f"tuner.history.sources: nothing is recorded in {where}")
    _check_filters(section, rows)
    kept = []
    for one in stored.values():
        reason = unwanted(one, section)
        if reason is None:
            kept.append(one)
        else:
            left_out.add(one.trace, reason)
    groups, held_out = _grouped(_with_beginnings(kept, left_out), section.held_out)
    trained, aside = _split_rows(rows, section, left_out)
    if aside:
        left_out.rollouts["held_out"] += len(aside)
    for group in held_out:
        for trace in group:
            left_out.add(trace, "held_out")
    if not groups and not trained:
        reasons = ", ".join(f"{n} {why}" for why, n in sorted(left_out.rollouts.items()))
        raise DatasetError(
            f"tuner.history: nothing is left to learn from ({reasons}); see "
            "docs/recorded_data.md for the reasons"
        )
    return History(groups, held_out, trained, aside, left_out)


def _in_memory(given: Iterable[Trace]) -> list[StoredRollout]:
    """Rollouts of consecutive runs: a repeated id starts another run."""
    times: Counter[tuple[RolloutId, int]] = Counter()
    found = []
    for trace in given:
        times[trace.id, trace.attempt] += 1
        found.append(StoredRollout(trace, f"run {times[trace.id, trace.attempt]}"))
    return found


def unwanted(one: StoredRollout, section: HistorySection) -> str | None:
    """Reason why the filters remove a rollout, or None."""
    trace = one.trace
    if not trace.final:
        return "retried_attempt"
    if trace.id.split not in (LEARNED if section.split is None else (section.split,)):
        return "other_split"
    if not _within(trace.id.step, section.min_step, section.max_step):
        return "other_step"
    if section.outcomes and trace.outcome not in section.outcomes:
        return "other_outcome"
    if section.after is not None and trace.started < unix_seconds(section.after):
        return "too_early"
    if section.before is not None and trace.started >= unix_seconds(section.before):
        return "too_late"
    versions = [version for call in trace.calls for version in call.versions]
    if not all(_within(v, section.min_version, section.max_version) for v in versions):
        return "other_version"
    known = {**trace.task, **one.metadata}
    if not set(section.tags) <= one.tags:
        return "other_tags"
    if any(known.get(key) != value for key, value in section.metadata.items()):
        return "other_metadata"
    if section.min_reward is not None or section.max_reward is not None:
        if trace.reward is None:
            return "no_reward"
        if not _within(trace.reward, section.min_reward, section.max_reward):
            return "other_reward"
    return None


def _within(value: float, low: float | None, high: float | None) -> bool:
    return (low is None or value >= low) and (high is None or value <= high)


def _check_filters(section: HistorySection, rows: Sequence[LogRow]) -> None:
    """Raises ConfigError if an outcome is unknown or a filter cannot be applied to logs."""
    for name in section.outcomes:
        if name not in set(Outcome):
            raise ConfigError(
                f"tuner.history.outcomes has {name!r}, which is not an outcome: use "
                f"{', '.join(outcome.value for outcome in Outcome)}"
            )
    if not rows:
        return
    of_logs = {"sources", "held_out", "after", "before", "best", "pairs", "min_gap"}
    if section.after is not None or section.before is not None:
        for row in rows:
            if row.started is None:
                raise ConfigError(
                    f"tuner.history.after or before is set, but {row.where} has no time: remove "
                    "the setting or that source"
                )
    plain = HistorySection()
    for name in sorted(set(HistorySection.model_fields) - of_logs):
        if getattr(section, name) == getattr(plain, name):
            continue
        raise ConfigError(
            f"tuner.history.{name} is {getattr(section, name)}, but {rows[0].where} is in a log "
            "without tokens, which does not record that: remove the setting or that source"
        )


def _with_beginnings(stored: Iterable[StoredRollout], left_out: LeftOut) -> list[StoredRollout]:
    """Rollouts whose beginning is available: the rollout in which they begin must be kept, too."""
    kept = list(stored)
    while True:
        there = {(one.source, one.trace.id) for one in kept}
        orphans = [
            one
            for one in kept
            if one.trace.origin is not None and (one.source, one.trace.origin.rollout) not in there
        ]
        if not orphans:
            return kept
        for one in orphans:
            left_out.add(one.trace, "begins_in_one_left_out")
        gone = {id(one) for one in orphans}
        kept = [one for one in kept if id(one) not in gone]


def _grouped(
    stored: Sequence[StoredRollout], held_out: float
) -> tuple[tuple[Group, ...], tuple[Group, ...]]:
    """Group rollouts by task, in order of first appearance, and renumber them."""
    tasks: dict[str, list[StoredRollout]] = defaultdict(list)
    for one in stored:
        tasks[one.task].append(one)
    aside = [name for name in tasks if is_held_out(name, held_out)]
    names = [*(name for name in tasks if name not in set(aside)), *aside]
    numbers: dict[tuple[str, RolloutId], RolloutId] = {}
    for index, name in enumerate(names):
        for place, one in enumerate(tasks[name]):
            numbers[one.source, one.trace.id] = RolloutId(1, index, place)
    groups = [tuple(_numbered(one, numbers) for one in tasks[name]) for name in names]
    trained = len(names) - len(aside)
    return tuple(groups[:trained]), tuple(groups[trained:])


def _numbered(one: StoredRollout, numbers: Mapping[tuple[str, RolloutId], RolloutId]) -> Trace:
    origin = one.trace.origin
    if origin is not None:
        origin = replace(origin, rollout=numbers[one.source, origin.rollout])
    return replace(one.trace, id=numbers[one.source, one.trace.id], origin=origin)


def is_held_out(task: str, share: float) -> bool:
    """Whether a task is in the held-out share; the same in every run."""
    digest = hashlib.blake2b(task.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


def _split_rows(
    rows: Iterable[LogRow], section: HistorySection, left_out: LeftOut
) -> tuple[tuple[LogRow, ...], tuple[LogRow, ...]]:
    """Split rows of logs into trained and held-out ones, by their prompt."""
    trained, aside = list[LogRow](), list[LogRow]()
    for row in rows:
        started = row.started or 0.0
        if section.after is not None and started < unix_seconds(section.after):
            left_out.rollouts["too_early"] += 1
        elif section.before is not None and started >= unix_seconds(section.before):
            left_out.rollouts["too_late"] += 1
        else:
            (aside if is_held_out(row.task, section.held_out) else trained).append(row)
    return tuple(trained), tuple(aside)


# Examples from recorded rollouts: rows for sft, pairs for dpo.


def examples_of_history(
    history: History,
    section: HistorySection,
    renderer: ChatRenderer,
    *,
    recorded: Recorded,
    longest: int,
) -> Examples:
    """The best rollouts of each task, or a better and a worse one, as the sampled ids.

    Args:
        history: The recorded data.
        section: How many rollouts of a task, and which pairs.
        renderer: The chat form of the trained model; for logs.
        recorded: Rows or pairs.
        longest: Maximum number of tokens of a prompt and its completion; longer rollouts are
            dropped.
    """
    choose = _best if recorded == "conversations" else _pairs
    left_out = LeftOut(Counter(history.left_out.rollouts), Counter(history.left_out.tokens))
    turns = _Turns(frozenset(section.roles), longest)
    used = [one for group in history.groups for one in choose(group, section, turns, left_out)]
    tokens = left_out.tokens + turns.inside
    used += _of_logs(history.rows, renderer, recorded, longest, left_out)
    unseen = LeftOut()  # all of the held-out data is used
    held_out = [one for group in history.held_out for one in choose(group, section, turns, unseen)]
    held_out += _of_logs(history.held_out_rows, renderer, recorded, longest, unseen)
    if not used:
        reasons = ", ".join(f"{n} {why}" for why, n in sorted(left_out.rollouts.items()))
        raise DatasetError(
            f"tuner.history: nothing is left to learn from ({reasons}); see "
            "docs/recorded_data.md for the reasons"
        )
    return Examples(
        tuple(used),
        dict(sorted(left_out.rollouts.items())),
        tokens_left_out={reason: n for reason, n in sorted(tokens.items()) if n},
        held_out=tuple(held_out),
    )


class _Turns:
    """Converts the calls of rollouts to turns.

    Attributes:
        inside: Sampled tokens of used rollouts that are not trained, by reason.
    """

    def __init__(self, roles: frozenset[str], longest: int) -> None:
        self._roles = roles
        self._longest = longest
        self.inside: Counter[str] = Counter()

    def of(self, trace: Trace) -> tuple[RecordedTurn, ...]:
        """Turns of a rollout that is used."""
        turns: list[RecordedTurn] = []
        for call in trace.calls:
            reason = self.unused(call)
            if reason is not None:
                self.inside[reason] += call.sampled_tokens
                continue
            self.inside["masked"] += call.sampled_tokens - _trained(call)
            turns += _stretches(call)
        return tuple(turns)

    def unusable(self, trace: Trace) -> str | None:
        """Reason why a rollout cannot be ranked, or None."""
        if trace.outcome is not Outcome.COMPLETED:
            return trace.outcome.value
        if trace.reward is None:
            return "no_reward"
        calls = [call for call in trace.calls if self.unused(call) is None and _trained(call)]
        if not calls:
            return "no_call_to_train"
        most = max(len(call.prompt_ids) + len(call.completion_ids) for call in calls)
        return "too_long" if most > self._longest else None

    def unused(self, call: Call) -> str | None:
        """Reason why a call is not imitated, or None. Greedy and constrained calls are allowed,
        unlike in algorithms that compare log-probs."""
        if call.invalid is not None:
            return "invalid_call"
        if call.undelivered:
            return "undelivered_call"
        if call.excluded:
            return "excluded_call"
        if call.images:
            return "call_with_images"
        return other_role(call, self._roles)


def other_role(call: Call, roles: frozenset[str]) -> str | None:
    """Reason why a call is not trained if only some roles are, or None."""
    return "other_role" if roles and call.role not in roles else None


def _trained(call: Call) -> int:
    return sum(stop - start for start, stop in call.stretches)


def _stretches(call: Call) -> list[RecordedTurn]:
    call = call.compared
    return [
        RecordedTurn(
            array("I", call.prompt_ids + call.completion_ids[:start]),
            array("I", call.completion_ids[start:stop]),
        )
        for start, stop in call.stretches
    ]


def _ranked(group: Group, turns: _Turns, left_out: LeftOut) -> list[tuple[float, Trace]]:
    """Usable rollouts of a group with their rewards, best first."""
    found = []
    for trace in group:
        reason = turns.unusable(trace)
        if reason is not None:
            left_out.add(trace, reason)
        else:
            assert trace.reward is not None, "unusable() leaves out what has none"
            found.append((trace.reward, trace))
    return sorted(found, key=lambda one: (-one[0], one[1].id))


def _best(
    group: Group, section: HistorySection, turns: _Turns, left_out: LeftOut
) -> Iterator[Example]:
    for place, (_, trace) in enumerate(_ranked(group, turns, left_out)):
        if place < section.best:
            yield (turns.of(trace),)
        else:
            left_out.add(trace, "not_best_of_task")


def _pairs(
    group: Group, section: HistorySection, turns: _Turns, left_out: LeftOut
) -> Iterator[Example]:
    ranked = _ranked(group, turns, left_out)
    chosen: Iterator[tuple[int, int]] = combinations(range(len(ranked)), 2)
    if section.pairs == "best":
        chosen = iter([(0, len(ranked) - 1)] if len(ranked) > 1 else [])
    of_trace: dict[int, tuple[RecordedTurn, ...]] = {}
    for better, worse in chosen:
        gap = ranked[better][0] - ranked[worse][0]
        if gap > 0 and gap >= section.min_gap:
            for place in (better, worse):
                if place not in of_trace:
                    of_trace[place] = turns.of(ranked[place][1])
            yield of_trace[better], of_trace[worse]
    for place, (_, trace) in enumerate(ranked):
        if place not in of_trace:
            left_out.add(trace, "not_in_a_pair")


def _of_logs(
    rows: Iterable[LogRow],
    renderer: ChatRenderer,
    recorded: Recorded,
    longest: int,
    left_out: LeftOut,
) -> Iterator[Example]:
    """Examples from rows of logs; the chat template makes their ids."""
    form = FormatSection(prompt_type="messages")
    for one in rows:
        where, row = one.where, one.row
        has_pair = row.get("chosen") is not None and row.get("rejected") is not None
        if has_pair != (recorded == "pairs"):
            wanted = "one conversation per line" if recorded == "conversations" else "pairs"
            raise DatasetError(
                f"{where}: it is {'a pair' if has_pair else 'one conversation'}, but the algorithm "
                f"needs {wanted}: set algorithm.algorithm_type to {'dpo' if has_pair else 'sft'}"
            )
        try:
            both = pair(row, form) if has_pair else (conversation(row, form),)
            yield tuple(trained_turns(renderer, talk, longest=longest) for talk in both)
        except UnusableConversation as unusable:
            left_out.rollouts[unusable.reason] += 1
        except DatasetError as error:
            raise DatasetError(f"{where}: {error}") from None
