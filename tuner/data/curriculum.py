"""Which tasks a step draws by what they have shown so far, in place of one order of all of them.

    tasks.jsonl   {"step": 4, "drawn": [17, 4]}                        before its first rollout
                  {"step": 4, "results": [[17, 8, 3], [4, 8, 0]]}      when a step takes them:
                                                      row, rollouts with a reward, those that passed

The tasks of step n are drawn by the results of the steps up to n - 1 - `sync_offset`, and of no
later one: those are there whenever its rollouts may begin, so that a draw depends on the seed and
on results, never on how long things take. A run that goes on finds what was drawn in the file, and
forgets results of steps that are taken again.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tuner.config import RunConfig
from tuner.config.tuner_section import SELECTORS, SelectorSection
from tuner.data.lazy_rows import StreamRows
from tuner.data.order import derive_seed
from tuner.data.task_results import Floats, Integers, Task, TaskResults, Visit, by_success, draw
from tuner.errors import ConfigError, DatasetError, FunctionError, TunerError
from tuner.functions.loading import load_function
from tuner.functions.outputs import shown
from tuner.traces.store import complete_lines, cut_torn_line

_PATH = "tuner.tasks.selector"


class Strata:
    """The rows of a dataset by the value of a field, each with its share of every step.

    Args:
        tasks: The rows, [N].
        section: Names the field, and may have weights of its values.

    Attributes:
        names: The values, in order.
        rows: The rows of each.

    Raises:
        DatasetError: A row has no such field, or something else there than a text or a number.
        ConfigError: There are weights, and they are not of these values.
    """

    def __init__(self, tasks: Sequence[Task], section: SelectorSection) -> None:
        found: dict[str, Sequence[int]] = {"": range(len(tasks))}
        if section.field is not None:
            found = _by_value(tasks, section.field)
        self.names = sorted(found)
        self.rows = [np.array(found[name], np.int64) for name in self.names]
        weights = section.weights or {name: float(len(rows)) for name, rows in found.items()}
        if wrong := sorted(weights.keys() ^ found.keys()):
            raise ConfigError(
                f"{_PATH}.weights names {', '.join(weights)}, but the values of "
                f"{section.field!r} are {', '.join(self.names)}: name each of them once (wrong: "
                f"{', '.join(wrong)})"
            )
        given = np.array([weights[name] for name in self.names])
        self._shares: Floats = given / given.sum()

    def of(self, count: int) -> list[str]:
        """The value of each of the `count` rows."""
        names = [""] * count
        for name, rows in zip(self.names, self.rows, strict=True):
            for row in rows.tolist():
                names[row] = name
        return names

    def counts(self, batch: int) -> Iterator[Integers]:
        """Tasks of each value in one step after the other, [values]; after any number of steps
        each has had its share, to less than as many tasks as there are values."""
        given = np.zeros(len(self.rows), np.int64)
        place = 0
        while True:
            before = given.copy()
            for _ in range(batch):
                place += 1
                given[int(np.argmax(place * self._shares - given))] += 1
            yield given - before


def _by_value(tasks: Sequence[Task], name: str) -> dict[str, Sequence[int]]:
    found: dict[str, list[int]] = {}
    for index, task in enumerate(tasks):
        value = task.get(name)
        if not isinstance(value, (str, int, float)):
            raise DatasetError(
                f"row {index} has {shown(value)} as {name!r}, by which {_PATH}.field divides the "
                "tasks: give every row a text or a number there"
            )
        found.setdefault(str(value), []).append(index)
    return dict(found)


class Curriculum:
    """Draws the tasks of steps.

    Args:
        config: The effective configuration, with a selector.
        tasks: Rows of the dataset.
        notes: The file of what was drawn and found, by which a run that was killed goes on; None:
            nowhere.
        start: The step that the run goes on after.

    Raises:
        ConfigError: The function cannot be loaded, or weights are not those of the field's values.
        DatasetError: A row does not have the field, or the rows have no end.
        TunerError: The file is damaged.
    """

    def __init__(
        self,
        config: RunConfig,
        tasks: Sequence[Task],
        *,
        notes: Path | None = None,
        start: int = 0,
    ) -> None:
        section = config.tuner.tasks.selector
        assert section is not None, "there is a selector"
        if isinstance(tasks, StreamRows):
            raise DatasetError(
                f"{_PATH} draws tasks, but a stream has one order: remove it, or pass a list"
            )
        self._section, self._config, self._notes = section, config, notes
        self._weigh: Callable[[TaskResults], Any] = by_success
        if section.kind not in SELECTORS:
            self._weigh = load_function(section.kind, setting=f"{_PATH}.kind")
        self._batch, self._ahead = config.buffer.batch_size, config.synchronizer.sync_offset
        self._strata = Strata(tasks, section)
        self._names = self._strata.of(len(tasks)) if section.field is not None else []
        # By the results that a draw may know of, and by all of them; those between the two.
        self._known, self.latest = TaskResults(tasks), TaskResults(tasks)
        self._later: deque[tuple[int, list[Visit]]] = deque()
        self._drawn: list[list[int]] = []
        self._counts = self._strata.counts(self._batch)
        self._given = [np.zeros(len(self._strata.rows), np.int64)]
        self._orders: dict[tuple[int, int], Integers] = {}
        self._metrics: dict[str, float] = {}
        self._rewards: list[float] = []  # the lowest and the highest
        if notes is not None:
            self._restore(notes, start)

    def rows(self, step: int) -> list[int]:
        """The rows of the dataset that a step is planned of.

        Raises:
            FunctionError: The function gave no weights.
        """
        while len(self._drawn) < step:
            wanted = len(self._drawn) + 1
            known = wanted - 1 - self._ahead
            assert self.latest.step >= known, "its rollouts do not begin before"
            while self._later and self._later[0][0] <= known:
                self._known.add(*self._later.popleft())
            rows = self._draw(wanted)
            self._note({"step": wanted, "drawn": rows})
            self._drawn.append(rows)
        return self._drawn[step - 1]

    def learn(self, step: int, rewards: Mapping[int, Sequence[float]]) -> None:
        """Take note of what a step takes.

        Args:
            step: The step.
            rewards: Of each of its groups, by number, those that its rollouts have.
        """
        enough = self._config.tuner.pass_reward
        visits: list[Visit] = []
        for number, found in rewards.items():
            ends = sorted([*self._rewards, *found])
            self._rewards = [ends[0], ends[-1]] if ends else []
            planned, index = divmod(number, self._batch)
            passed = sum(reward >= enough for reward in found)
            visits.append((self.rows(planned + 1)[index], len(found), passed))
        self._note({"step": step, "results": visits})
        self._add(step, visits)
        self._metrics = self._metrics_of(visits)

    def metrics(self) -> dict[str, float]:
        """Of the step that was taken last.

        `tasks/passed` is the share of its rollouts with a reward that passed; `tasks/seen` the
        share of all tasks that any step took, `tasks/always` and `tasks/never` of these those that
        passed each time or never when they were taken last. With a field there are
        `tasks/<value>/passed` and `tasks/<value>/rollouts`.
        """
        return self._metrics

    def notice(self) -> str | None:
        """What to mend where success tells no tasks apart, though rewards do; None: nothing."""
        tuner, step = self._config.tuner, self.latest.step
        if step < tuner.signal_patience or self.latest.passed.any() or not self._rewards:
            return None
        lowest, highest = self._rewards
        if self._section.kind != "success" or lowest == highest:
            return None
        return (
            f"step {step}: no rollout has passed so far: the highest reward was {highest:g}, and "
            f"tuner.pass_reward is {tuner.pass_reward:g}, so that {_PATH} cannot tell the tasks "
            "apart; start again with a lower one"
        )

    def _metrics_of(self, visits: Sequence[Visit]) -> dict[str, float]:
        latest = self.latest.latest
        seen = latest[~np.isnan(latest)]
        found = {"tasks/seen": float(np.mean(self.latest.visits > 0))}
        if len(seen):
            found["tasks/always"] = float(np.mean(seen == 1))
            found["tasks/never"] = float(np.mean(seen == 0))
        sums: dict[str, list[int]] = {}
        for row, tries, passed in visits:
            for name in ("", f"{self._names[row]}/") if self._names else ("",):
                both = sums.setdefault(name, [0, 0])
                both[0] += tries
                both[1] += passed
        for name, (tries, passed) in sums.items():
            if name:
                found[f"tasks/{name}rollouts"] = tries
            if tries:
                found[f"tasks/{name}passed"] = passed / tries
        return found

    def _draw(self, step: int) -> list[int]:
        before, counts = self._share(step)
        if self._section.kind == "stratified":
            parts = [
                self._in_order(stratum, int(before[stratum]), int(count))
                for stratum, count in enumerate(counts)
            ]
        else:
            weights = self._weights()
            dice = np.random.Generator(np.random.PCG64(self._seed("draw", step)))
            parts = [
                draw(rows, weights[rows], int(count), floor=self._section.floor, dice=dice)
                for rows, count in zip(self._strata.rows, counts, strict=True)
            ]
        return [row for part in parts for row in part]

    def _share(self, step: int) -> tuple[Integers, Integers]:
        """How many tasks of each stratum the steps before took, and this one takes."""
        while len(self._given) <= step:
            self._given.append(self._given[-1] + next(self._counts))
        before = self._given[step - 1]
        return before, self._given[step] - before

    def _in_order(self, stratum: int, first: int, count: int) -> list[int]:
        """Rows of a stratum from some place on; each comes once before any comes again."""
        rows, found = self._strata.rows[stratum], list[int]()
        for place in range(first, first + count):
            epoch, offset = divmod(place, len(rows))
            if (stratum, epoch) not in self._orders:
                self._orders.pop((stratum, epoch - 2), None)
                seed = self._seed("order", self._strata.names[stratum], epoch)
                dice = np.random.Generator(np.random.PCG64(seed))
                self._orders[stratum, epoch] = dice.permutation(rows)
            found.append(int(self._orders[stratum, epoch][offset]))
        return found

    def _weights(self) -> Floats:
        try:
            weights = np.asarray(self._weigh(self._known), dtype=np.float64)
        except Exception as error:
            raise FunctionError(
                f"{_PATH}.kind: {self._section.kind} raised {type(error).__name__}: {error}"
            ) from error
        wanted = (len(self._known.tasks),)
        if weights.shape != wanted or not np.all(np.isfinite(weights)) or np.any(weights < 0):
            raise FunctionError(
                f"{_PATH}.kind: {self._section.kind} returned {shown(weights.tolist())}: return a "
                f"number of 0 or more for each of the {wanted[0]} tasks"
            )
        return weights

    def _seed(self, *what: object) -> int:
        return derive_seed(self._config.tuner.seed, "tasks", *what)

    def _add(self, step: int, visits: list[Visit]) -> None:
        self.latest.add(step, visits)
        self._later.append((step, visits))

    def _note(self, line: dict[str, Any]) -> None:
        if self._notes is not None:
            with self._notes.open("ab") as file:
                file.write(json.dumps(line).encode() + b"\n")

    def _restore(self, notes: Path, start: int) -> None:
        """Go on with what was known when `start` had been trained; later steps are taken again."""
        cut_torn_line(notes)
        kept, rows = list[bytes](), len(self.latest.tasks)
        for number, line in complete_lines(notes):
            try:
                noted = json.loads(line)
                step = int(noted["step"])
                if "drawn" in noted:
                    if step != len(self._drawn) + 1:
                        raise ValueError(f"after the tasks of step {len(self._drawn)}")
                    self._drawn.append([range(rows)[row] for row in noted["drawn"]])
                elif step <= start:
                    if step != self.latest.step + 1:
                        raise ValueError(f"after the results of step {self.latest.step}")
                    self._add(step, [(range(rows)[row], t, p) for row, t, p in noted["results"]])
                else:
                    continue
            except (ValueError, LookupError, TypeError) as error:
                raise TunerError(f"{notes}, line {number} is no note: {error!r}") from error
            kept.append(line)
        if self.latest.step != start:
            raise TunerError(
                f"{notes} has the results of {self.latest.step} steps, and the run goes on after "
                f"step {start}: what it drew cannot be known; start it under another name"
            )
        if notes.exists():
            unfinished = notes.with_name(f".{notes.name}")
            unfinished.write_bytes(b"".join(kept))
            unfinished.replace(notes)


def check_selector(config: RunConfig, tasks: Sequence[Task]) -> None:
    """Draw once, so that what is wrong with a selector is known before anything is loaded.

    Raises:
        ConfigError, DatasetError, FunctionError: As `Curriculum`.
    """
    Curriculum(config, tasks).rows(1)
