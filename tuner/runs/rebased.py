"""A run that continues from the samples of another, whose rewards a fixed judge gave again.

    steps before the first in which a reward changed     are kept, weights included
    that one and later ones, while samples are worth it  are trained again from recorded rollouts
    from the first in which they are not                 are sampled; recorded ones are set aside

The weights differ from the first changed step on, so from then on another policy sampled than is
trained. The effective sample size of its tokens (`tuner.training.likelihood`), computed before each
such step, says what they are worth. The decisions are in `rebase.json`, by which a killed run
resumes.
"""

from __future__ import annotations

import io
import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, Field

from tuner.encoding import model_json
from tuner.rollouts.groups import BatchLog, taken_until
from tuner.runs.directory import RunDirectory, write_atomically
from tuner.traces import Trace, read_traces
from tuner.traces.reading import JsonReader
from tuner.traces.store import trace_line, trace_to_json

if TYPE_CHECKING:
    from tuner.training.likelihood import EffectiveSamples

EFFECTIVE = ("effective_capped", "effective_tokens", "effective_calls", "effective_rollouts")
Use = Literal["kept", "again", "anew", ""]


class RebasedStep(BaseModel):
    """A step of the other run.

    Attributes:
        judged, changed: Rollouts that were judged again; those whose reward is another one.
        rollouts, tokens: Last attempts that were recorded, and tokens sampled for all attempts.
        use: "kept": before the first change; "again": trained again from what was recorded;
            "anew": sampled again, with the recorded rollouts set aside; "": not yet decided.
        effective_tokens, effective_capped, effective_calls, effective_rollouts: Worth of those that
            are trained to the weights before the step, as shares (`EffectiveSamples`); `capped`
            decides.
    """

    step: int
    judged: int = 0
    changed: int = 0
    rollouts: int = 0
    tokens: int = 0
    use: Use = ""
    effective_tokens: float | None = None
    effective_capped: float | None = None
    effective_calls: float | None = None
    effective_rollouts: float | None = None


class RebaseRecord(BaseModel):
    """`rebase.json`.

    Attributes:
        run: The other run's directory.
        judge: The fixed judge, if it has a name.
        min_effective_samples, max_reused: As for `rebase()`.
        last_again: Last step that `max_reused` allows to train again; None: no reward changed.
        first_changed: First step in which a reward changed; None: none did.
        foreign_from: First version of the weights that the runs do not share; likewise.
        trained: Last step that the other run trained.
        ended: First step that is sampled again; None: none is.
        evaluations_judged, evaluations_changed: Rollouts of evaluations that were judged again, and
            those with another reward.
        evaluations_set_aside: Rollouts of evaluations of weights that this run does not have.
    """

    run: Path
    judge: str | None = None
    min_effective_samples: float
    max_reused: float = 1.0
    last_again: int | None = None
    first_changed: int | None = None
    foreign_from: int | None = None
    trained: int = 0
    ended: int | None = None
    evaluations_judged: int = 0
    evaluations_changed: int = 0
    evaluations_set_aside: int = 0
    steps: list[RebasedStep] = Field(default_factory=list)

    def of_step(self, step: int) -> RebasedStep:
        """The record of a step, which may have no samples."""
        found = next((one for one in self.steps if one.step == step), None)
        if found is None:
            found = RebasedStep(step=step)
            self.steps = sorted([*self.steps, found], key=lambda one: one.step)
        return found

    def tokens(self, *uses: Use) -> int:
        """Sampled tokens of the steps with these uses."""
        return sum(one.tokens for one in self.steps if one.use in uses)

    def __str__(self) -> str:
        return table(self)


_RECORDS = JsonReader[RebaseRecord](RebaseRecord, "the record of a rebase")


def read_rebase(directory: RunDirectory) -> RebaseRecord | None:
    """The record in a run directory; None if the run continues from no other."""
    if not os.path.lexists(directory.rebase):
        return None
    return _RECORDS.document(directory.rebase, f"delete {directory.path} and rebase again")


class Rebased:
    """Decides, step by step, how long a run is trained from recorded samples."""

    def __init__(self, directory: RunDirectory, record: RebaseRecord, *, batch: int) -> None:
        self.record = record
        self._directory = directory
        self._batch = batch
        if record.ended is not None:  # it may have been killed meanwhile
            self._move(record.ended)

    @staticmethod
    def of(directory: RunDirectory, *, batch: int) -> Rebased | None:
        """For a run directory; None if the run continues from no other."""
        record = read_rebase(directory)
        return None if record is None else Rebased(directory, record, batch=batch)

    def whole(self) -> set[int]:
        """The groups that were complete when the other run took them, which are still there."""
        last = self.record.trained
        if self.record.ended is not None:
            last = min(last, self.record.ended - 1)
        taken = BatchLog(self._directory.batches).read()
        return taken_until(taken, last, batch=self._batch)

    def asks(self, step: int, traces: Sequence[Trace]) -> bool:
        """Whether a step trains samples that may be worth less than in the other run."""
        first = self.record.first_changed
        recorded = any(trace.foreign_from is not None for trace in traces)
        return first is not None and step > first and recorded

    def goes_on(self, step: int, effective: EffectiveSamples | None) -> bool:
        """Whether a step is trained from recorded rollouts; stored, so it is decided once.

        `effective` is their worth to the weights before the step; None: nothing of it is trained,
        or those are the weights that sampled.
        """
        noted = self.record.of_step(step)
        if effective is not None:
            noted.effective_tokens = effective.tokens.share
            noted.effective_capped = effective.capped.share
            noted.effective_calls = effective.calls.share
            noted.effective_rollouts = effective.rollouts.share
        worth = effective is None or effective.capped.share >= self.record.min_effective_samples
        last = self.record.last_again
        if noted.use == "":
            noted.use = "again" if worth and (last is None or step <= last) else "anew"
        self.write()
        return noted.use == "again"

    def set_aside(self, step: int) -> None:
        """Sample from this step on: move the recorded rollouts that no step has used."""
        self.record.ended = step
        for one in self.record.steps:
            if one.step >= step:
                one.use = "anew"
        self.write()
        self._move(step)

    def _move(self, step: int) -> None:
        """Into `set_aside/`, file by file; what has been moved stays as it is."""
        log = BatchLog(self._directory.batches)
        log.cut(step)
        taken = taken_until(log.read(), step - 1, batch=self._batch)
        self._directory.set_aside.mkdir(exist_ok=True)
        for planned, path in training_files(self._directory.traces):
            kept: list[Trace] = []
            aside: list[Trace] = []
            for trace in read_traces(path):
                number = (planned - 1) * self._batch + trace.id.task
                old = trace.foreign_from is not None and number not in taken
                (aside if old else kept).append(trace)
            if aside:
                write_traces(self._directory.set_aside / path.name, aside)
                write_traces(path, kept)

    def write(self) -> None:
        """Into `rebase.json`."""
        write_atomically(self._directory.rebase, model_json(self.record))

    def metrics(self, step: int, traces: Sequence[Trace]) -> dict[str, float]:
        """Metrics of a step that trains these traces, every attempt."""
        first = self.record.first_changed
        if first is None or step < first:
            return {}
        sampled = Counter[bool]()
        for trace in traces:
            sampled[trace.foreign_from is not None] += trace.sampled_tokens
        found = {"rebase/reused": sampled[True] / max(1, sampled.total())}
        noted = {one.step: one for one in self.record.steps}.get(step)
        for name in EFFECTIVE:
            value = getattr(noted, name, None)
            found |= {} if value is None else {f"rebase/{name}": value}
        return found


def training_files(folder: Path) -> list[tuple[int, Path]]:
    """The steps whose training rollouts are in a folder of traces, with their files, in order."""
    named = ((re.fullmatch(r"step_(\d+)\.jsonl", path.name), path) for path in folder.iterdir())
    return sorted((int(match[1]), path) for match, path in named if match)


def write_traces(path: Path, traces: Sequence[Trace]) -> None:
    """Replace a file of traces; delete it if there are no traces."""
    if not traces:
        path.unlink(missing_ok=True)
        return
    unfinished = path.with_name(f".{path.name}")
    with unfinished.open("wb") as file:
        file.writelines(trace_line(trace_to_json(trace)) for trace in traces)
    unfinished.replace(path)


def table(record: RebaseRecord) -> str:
    """Table of the steps and their reuse, and the reason why it ends; then sentences."""
    from rich.console import Console
    from rich.table import Table

    shown = Table(title=f"rebase of {record.run.name}")
    worth = ("worth: capped", "tokens", "calls", "rollouts")
    for name in ("step", "judged", "changed", "tokens", *worth, ""):
        shown.add_column(name, justify="left" if not name else "right")
    for one in record.steps:
        values = (getattr(one, name) for name in EFFECTIVE)
        shares = ["" if share is None else f"{share:.3f}" for share in values]
        counts = (one.step, one.judged, one.changed, f"{one.tokens:,}")
        shown.add_row(*map(str, counts), *shares, _SAID[one.use])
    output = io.StringIO()
    Console(file=output, width=100, highlight=False).print(shown)
    return "\n".join([output.getvalue().rstrip(), *sentences(record)])


_SAID: dict[Use, str] = {
    "kept": "kept",
    "again": "trained again",
    "anew": "sampled anew",
    "": "not reached",
}


def sentences(record: RebaseRecord) -> list[str]:
    """Steps that were used again, what that saved, and why no more."""
    tried, changed = record.evaluations_judged, record.evaluations_changed
    evaluations = [f"evaluations: {tried:,} rollouts judged again, {changed:,} changed"]
    total = sum(one.tokens for one in record.steps)
    if record.first_changed is None:
        return [*evaluations, f"no reward changed: all {total:,} sampled tokens are kept"]
    if record.evaluations_set_aside:
        evaluations.append(
            f"{record.evaluations_set_aside:,} rollouts of evaluations after step "
            f"{record.first_changed - 1} were of other weights and are in set_aside/"
        )
    used = record.tokens("kept", "again")
    lines = [
        f"the first step in which a reward changed: {record.first_changed}",
        *evaluations,
        f"not sampled again: {used:,} of {total:,} tokens ({used / max(1, total):.0%}), "
        f"{record.tokens('kept'):,} of steps that are kept and {record.tokens('again'):,} of steps "
        "that are trained again",
    ]
    if record.ended is not None:
        share = record.of_step(record.ended).effective_capped
        worth = f"before step {record.ended} the tokens that were recorded for it were worth "
        worth += "nothing" if share is None else f"{share:.3f} of theirs to the current weights"
        why = f"{worth}, less than {record.min_effective_samples:g} (--min-effective-samples)"
        if share is None or share >= record.min_effective_samples:
            why = f"these are {record.max_reused:.0%} of the steps (--max-reused); {worth}"
        aside = sum(one.rollouts for one in record.steps if one.use == "anew")
        lines.append(
            f"the rest is not reused because {why}: {aside:,} rollouts, "
            f"{record.tokens('anew'):,} tokens, are in set_aside/"
        )
    return lines
