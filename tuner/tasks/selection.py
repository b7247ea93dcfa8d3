"""Which rows of a dataset each step takes, the number of steps of a run, and seeds."""

from __future__ import annotations

import hashlib
import json
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NotRequired, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tuner.config import RunConfig
from tuner.config.load import source_key
from tuner.config.schema import SELECTORS, DataSelector, SelectorSection
from tuner.errors import ConfigError, DatasetError, FunctionError, TunerError
from tuner.tasks.datasets import (
    DatasetConfig,
    StreamRows,
    check_fills_a_batch,
    described,
    load_tasks,
)
from tuner.tasks.functions import shown
from tuner.tasks.loading import load_function
from tuner.traces.reading import Count, JsonReader
from tuner.traces.store import closed, cut_torn_line


def derive_seed(*parts: object) -> int:
    """A 63-bit seed for `parts`, the same in every process and order."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def planned_steps(config: RunConfig, tasks: int) -> int:
    """Steps of the run: `total_steps`, or the number of full batches in all epochs."""
    if config.buffer.total_steps is not None:
        return config.buffer.total_steps
    return config.buffer.total_epochs * tasks // config.buffer.batch_size


def batch_indices(step: int, *, size: int, rows: int, selector: DataSelector) -> list[int]:
    """Rows of the batch of `step`; epochs follow without a gap."""
    indices = []
    for position in range((step - 1) * size, step * size):
        epoch, offset = divmod(position, rows)
        if selector.selector_type == "shuffle":
            offset = _permutation(rows, derive_seed(selector.seed, "epoch", epoch))[offset]
        indices.append(offset)
    return indices


def rows_taken(steps: int, *, size: int, rows: int, selector: DataSelector) -> frozenset[int]:
    """Rows of the dataset that any of the first `steps` steps takes."""
    if steps * size >= rows:  # every row comes once before any comes again
        return frozenset(range(rows))
    found = (batch_indices(n, size=size, rows=rows, selector=selector) for n in range(1, steps + 1))
    return frozenset(index for indices in found for index in indices)


def is_due(step: int, interval: int) -> bool:
    """Whether an event every `interval` steps happens after `step`; 0 is never."""
    return interval > 0 and step % interval == 0


@lru_cache(maxsize=2)
def _permutation(rows: int, seed: int) -> tuple[int, ...]:
    order = list(range(rows))
    random.Random(seed).shuffle(order)
    return tuple(order)


# Results of the tasks so far, and sampling weights that follow from them.


FADING = 0.75
"""Factor by which the evidence of earlier rollouts shrinks each time a task is taken."""

Task: TypeAlias = dict[str, Any]
Floats: TypeAlias = NDArray[np.float64]
Integers: TypeAlias = NDArray[np.int64]
# The row, the number of its rollouts with a reward, and how many of those passed.
Visit: TypeAlias = tuple[int, int, int]


_NOTES = JsonReader[dict[str, Any]](
    closed(
        "TasksNote",
        {
            "step": Count,
            "drawn": NotRequired[list[Count]],
            "results": NotRequired[list[tuple[Count, Count, Count]]],
        },
    ),
    "a note",
)


@dataclass(eq=False)
class TaskResults:
    """Results of the tasks so far; arrays have a number for each row of the dataset, [N].

    Attributes:
        tasks: The rows.
        visits: Number of steps that took the row.
        tries: Number of its rollouts with a reward.
        passed: How many of them passed: a reward of at least `tuner.pass_reward`.
        latest: The share that passed when it was last taken; nan if no rollout had a reward.
        last: The step that last took it, 0 before the first.
        step: The last step with results here.
    """

    tasks: Sequence[Task]
    visits: Integers = field(init=False)
    tries: Integers = field(init=False)
    passed: Integers = field(init=False)
    latest: Floats = field(init=False)
    last: Integers = field(init=False)
    step: int = 0

    def __post_init__(self) -> None:
        count = len(self.tasks)
        self.visits, self.tries, self.passed, self.last = np.zeros((4, count), np.int64)
        self.latest = np.full(count, np.nan)
        self._tries, self._passed = np.zeros((2, count))

    @property
    def rate(self) -> Floats:
        """Estimated share of a task's rollouts that would pass now, between 0 and 1, and 0.5 if
        nothing is known. Earlier visits count less, each time by `FADING`."""
        rate: Floats = (self._passed + 0.5) / (self._tries + 1.0)
        return rate

    def add(self, step: int, visits: Sequence[Visit]) -> None:
        """Add the results of a step."""
        self.step = step
        for row, tries, passed in visits:
            self.visits[row] += 1
            self.tries[row] += tries
            self.passed[row] += passed
            self.last[row] = step
            if tries:
                self.latest[row] = passed / tries
                self._tries[row] = FADING * self._tries[row] + tries
                self._passed[row] = FADING * self._passed[row] + passed


def by_success(results: TaskResults) -> Floats:
    """A weight for each task, [N]: 1 if half of its rollouts pass or nothing is known, 0 if all or
    none do. It is proportional to the variance of a rollout's success, p (1 - p), which is what a
    group can teach (arXiv 2502.12272). A task that was tried and gave no reward has 0."""
    rate = results.rate
    weights: Floats = 4 * rate * (1 - rate)
    return np.where((results.visits > 0) & (results.tries == 0), 0.0, weights)


def draw(
    rows: Integers, weights: Floats, count: int, *, floor: float, dice: np.random.Generator
) -> list[int]:
    """Draw `count` rows with the weights [rows], without repetition while there are others.

    Each is drawn in proportion to its weight among the remaining ones (Efraimidis & Spirakis 2006).
    No weight is less than `floor` of the highest; all are 1 if all are 0.
    """
    top = float(weights.max(initial=0.0))
    lifted = np.maximum(weights, floor * top) if top > 0 else np.ones(len(rows))
    found: list[int] = []
    while len(found) < count:
        waiting = -np.log1p(-dice.random(len(rows))) / lifted
        order = np.argsort(waiting, kind="stable")[: count - len(found)]
        found += rows[order].tolist()
    return found


# Drawing the tasks of a step by the results so far, instead of one order of all tasks.
#
#     tasks.jsonl   {"step": 4, "drawn": [17, 4]}                        before its first rollout
#                   {"step": 4, "results": [[17, 8, 3], [4, 8, 0]]}      when a step takes them:
#                                                       row, with a reward, those that passed
#
# The tasks of step n are drawn by the results of the steps up to n - 1 - `sync_offset`, and of no
# later one: those exist whenever its rollouts may begin, so a draw depends on the seed and on
# results, never on timing. A resumed run reads past draws from the file and drops results of steps
# that are taken again.


_PATH = "tuner.tasks.selector"


class Strata:
    """The rows of a dataset by the value of a field, each value with its share of every step.

    Args:
        tasks: The rows, [N].
        section: Names the field; may have weights of its values.

    Attributes:
        names: The values, in order.
        rows: The rows of each.

    Raises:
        DatasetError: A row lacks the field, or has something other than text or a number there.
        ConfigError: There are weights, and they do not match the values.
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
        """Tasks of each value, step by step, [values]; after any number of steps each value has had
        its share, to within as many tasks as there are values."""
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
                "tasks: give every row text or a number there"
            )
        found.setdefault(str(value), []).append(index)
    return dict(found)


class Curriculum:
    """Draws the tasks of steps.

    Args:
        config: The effective configuration, with a selector.
        tasks: Rows of the dataset.
        notes: File of draws and results, from which a killed run resumes; None: no file.
        start: The step after which the run resumes.

    Raises:
        ConfigError: The function cannot be loaded, or weights do not match the field's values.
        DatasetError: A row lacks the field, or the rows are endless.
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
                f"{_PATH} draws tasks, but a stream has a fixed order: remove it, or pass a list"
            )
        self._section, self._config, self._notes = section, config, notes
        self._weigh: Callable[[TaskResults], Any] = by_success
        if section.kind not in SELECTORS:
            self._weigh = load_function(section.kind, setting=f"{_PATH}.kind")
        self._batch, self._ahead = config.buffer.batch_size, config.synchronizer.sync_offset
        self._strata = Strata(tasks, section)
        self._names = self._strata.of(len(tasks)) if section.field is not None else []
        # With the results that a draw may use, and with all of them; and the results in between.
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
        """The rows of the dataset for a step.

        Raises:
            FunctionError: The function returned no weights.
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
        """Add the results of a step.

        Args:
            step: The step.
            rewards: Rewards of the rollouts of each of its groups, by number.
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
        """Metrics of the last step.

        `tasks/passed` is the share of its rollouts with a reward that passed; `tasks/seen` the
        share of all tasks that any step took, `tasks/always` and `tasks/never` the shares of these
        that always or never passed when they were last taken. With a field there are
        `tasks/<value>/passed` and `tasks/<value>/rollouts`.
        """
        return self._metrics

    def notice(self) -> str | None:
        """A hint if success does not distinguish tasks although rewards do; None: nothing."""
        tuner, step = self._config.tuner, self.latest.step
        if step < tuner.signal_patience or self.latest.passed.any() or not self._rewards:
            return None
        lowest, highest = self._rewards
        if self._section.kind != "success" or lowest == highest:
            return None
        return (
            f"step {step}: no rollout has passed so far: the highest reward was {highest:g}, and "
            f"tuner.pass_reward is {tuner.pass_reward:g}, so {_PATH} cannot distinguish the tasks; "
            "start again with a lower one"
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
        """Number of tasks of each stratum that the steps before took, and that this one takes."""
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
        """Restore the state after `start`; later steps are taken again."""
        cut_torn_line(notes)
        kept, rows = list[bytes](), len(self.latest.tasks)
        for number, line, noted in _NOTES.lines(notes):
            try:
                step = noted["step"]
                if "drawn" in noted:
                    if step != len(self._drawn) + 1:
                        raise ValueError(f"after the tasks of step {len(self._drawn)}")
                    self._drawn.append([range(rows)[row] for row in noted["drawn"]])
                elif step <= start:
                    if step != self.latest.step + 1:
                        raise ValueError(f"after the results of step {self.latest.step}")
                    self._add(step, [(range(rows)[r], t, p) for r, t, p in noted["results"]])
                else:
                    continue
            except (ValueError, LookupError) as error:
                raise TunerError(f"{notes}, line {number} is not a note: {error!r}") from error
            kept.append(line)
        if self.latest.step != start:
            raise TunerError(
                f"{notes} has the results of {self.latest.step} steps, and the run resumes after "
                f"step {start}: its draws are unknown; start it under another name"
            )
        if notes.exists():
            unfinished = notes.with_name(f".{notes.name}")
            unfinished.write_bytes(b"".join(kept))
            unfinished.replace(notes)


def check_selector(config: RunConfig, tasks: Sequence[Task]) -> None:
    """Draw once, to find mistakes of a selector before anything is loaded.

    Raises:
        ConfigError, DatasetError, FunctionError: As `Curriculum`.
    """
    Curriculum(config, tasks).rows(1)


# The datasets for training and evaluation: those given to `tune()`, or named by the file.


def training_tasks(config: RunConfig, dataset: Any) -> Sequence[Task]:
    """The tasks of a run, or with `mode: train` its rows.

    Args:
        config: The effective configuration; its path takes precedence.
        dataset: As given to `tune()`.

    Raises:
        DatasetError: There are none, they cannot be read, or are fewer than one batch.
    """
    recorded = config.mode == "train"
    buffer = config.buffer
    source = buffer.trainer_input.experience_buffer if recorded else buffer.explorer_input.taskset
    if source.path is not None:
        dataset = DatasetConfig(path=source.path, name=source.subset_name, split=source.split)
    if dataset is None:
        raise DatasetError(
            "there is nothing to train on: pass train_dataset, or set "
            f"{source_key(config.mode)}.path"
        )
    tasks = load_tasks(dataset, role="train_dataset", endless=not recorded)
    if isinstance(tasks, StreamRows):
        _check_stream(config)
    check_fills_a_batch(tasks, config.buffer.batch_size, described(dataset))
    if config.tuner.tasks.selector is not None:
        pass

        check_selector(config, tasks)
    return tasks


def _check_stream(config: RunConfig) -> None:
    if config.buffer.total_steps is None:
        raise DatasetError("train_dataset is a stream of unknown length: set buffer.total_steps")
    selector = config.buffer.explorer_input.taskset.data_selector.selector_type
    if selector != "sequential":
        raise DatasetError(
            f"buffer.explorer_input.taskset.data_selector.selector_type is {selector!r}, but a "
            "stream has a fixed order: set it to 'sequential', and mix with dataset.shuffle()"
        )


def evaluation_tasks(config: RunConfig, dataset: Any) -> dict[str, Sequence[Task]]:
    """The rows of each evaluation set, by name; arguments and errors as for `training_tasks`."""
    in_memory = dataset if isinstance(dataset, dict) else None
    tasks = {}
    for taskset in config.buffer.explorer_input.eval_tasksets:
        source: Any = dataset if in_memory is None else in_memory.get(taskset.name)
        if taskset.path is not None:
            source = DatasetConfig(path=taskset.path, name=taskset.subset_name, split=taskset.split)
        if source is None:
            raise DatasetError(
                f"evaluation set {taskset.name!r} has no rows: set its path in "
                "buffer.explorer_input.eval_tasksets"
            )
        tasks[taskset.name] = load_tasks(source, role=f"eval_dataset {taskset.name!r}")
    return tasks
