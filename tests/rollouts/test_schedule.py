"""Staleness never exceeds its bound, whatever rollouts take, fail or are killed in between."""

import asyncio
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.kit.clock import simulate
from tests.kit.examples import few
from tuner.rollouts.groups import Schedule, admissible, in_time


@dataclass
class Disk:
    """What survives a kill: which versions sampled the tokens of each rollout that ended, what each
    step took, and the last checkpoint."""

    rollouts: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    batches: dict[int, list[int]] = field(default_factory=dict)
    checkpoint: int = 0


@dataclass(frozen=True)
class Case:
    batch: int
    steps: int
    repeat: int
    max_running: int
    staleness: int
    waits: bool
    save_interval: int
    durations: list[float]  # of the tokens of the rollouts, gone through again and again
    failures: list[bool]
    training: list[float]
    kills: list[float]


class Run:
    """A run in which a token is nothing but the version that sampled it."""

    def __init__(self, case, disk):
        self.case, self.disk = case, disk
        self.version = disk.checkpoint
        self.trained = []  # (staleness, trained or left out) of every token
        done = [n for step, ns in disk.batches.items() if step <= disk.checkpoint for n in ns]
        complete, begun = {}, {}
        for number in range(case.batch * case.steps):
            known = [r for r in range(case.repeat) if (number, r) in disk.rollouts]
            if not known or number in done:
                continue
            versions = [v for r in known for v in disk.rollouts[number, r]]
            if len(known) == case.repeat:
                complete[number] = (self.group(number), min(versions, default=case.steps))
            elif versions:
                begun[number] = min(versions)
        self.schedule = Schedule(
            self.run_group,
            batch=case.batch,
            total=case.batch * case.steps,
            repeat=case.repeat,
            max_running=case.max_running,
            staleness=case.staleness,
            waits=case.waits,
            version=self.version,
            hold=max(disk.batches, default=1) - 1,
        )
        self.schedule.restore(trained=done, complete=complete, begun=begun)
        self.slots = asyncio.Semaphore(case.max_running)

    def group(self, number):
        return [self.disk.rollouts[number, r] for r in range(self.case.repeat)]

    async def run_group(self, number):
        await asyncio.gather(*(self.rollout(number, r) for r in range(self.case.repeat)))
        return self.group(number)

    async def rollout(self, number, index):
        case, key = self.case, (number, index)
        if key not in self.disk.rollouts:
            async with self.slots:
                versions, place = [], number * case.repeat + index
                for token in range(1 + place % 3):
                    await asyncio.sleep(case.durations[(place + token) % len(case.durations)])
                    versions.append(self.version)
                if case.failures[place % len(case.failures)]:
                    versions = []
                self.disk.rollouts[key] = versions
        self.schedule.rollout_ended(number)

    async def train(self):
        case, disk = self.case, self.disk
        for step in range(disk.checkpoint + 1, case.steps + 1):
            groups = await self.schedule.take(disk.batches.get(step))
            assert len(groups) == case.batch
            disk.batches[step] = list(groups)
            for versions in (v for group in groups.values() for v in group):
                for version in versions:
                    age = self.version - version
                    self.trained.append((age, case.waits or age <= case.staleness))
            await asyncio.sleep(case.training[step % len(case.training)])
            self.version = step
            self.schedule.advance(step)
            if step % case.save_interval == 0:
                disk.checkpoint = step


seconds = st.floats(0.01, 100)
cases = st.builds(
    Case,
    batch=st.integers(1, 4),
    steps=st.integers(1, 8),
    repeat=st.integers(1, 3),
    max_running=st.integers(1, 20),
    staleness=st.integers(0, 4),
    waits=st.booleans(),
    save_interval=st.integers(1, 8),
    durations=st.lists(seconds, min_size=1, max_size=17),
    failures=st.lists(st.booleans(), min_size=1, max_size=7),
    training=st.lists(st.floats(0, 50), min_size=1, max_size=5),
    kills=st.lists(st.floats(0, 300), max_size=3),
)


@example(Case(1, 4, 2, 4, 2, True, 1, [1.0, 1.0, 1.0, 3.0], [False], [0.0], [4.0]))
@example(Case(1, 4, 2, 4, 2, True, 1, [1.0, 1.0, 1.0, 3.0], [False], [0.0], [4.0]))
@example(Case(2, 4, 3, 9, 1, True, 3, [3.0, 18.0], [True, False], [0.0], [61.0]))
@settings(max_examples=few(200), deadline=None)
@given(cases)
def test_staleness_never_exceeds_the_bound(case):
    async def go():
        disk, trained = Disk(), []
        for limit in [*case.kills, None]:
            run = Run(case, disk)
            task = asyncio.ensure_future(run.train())
            await asyncio.wait([task], timeout=limit)
            killed = not task.done()
            task.cancel()
            await run.schedule.cancel()
            trained += run.trained
            if not killed:
                await task
                break
        return disk, trained

    disk, trained = simulate(go())
    assert all(0 <= age <= case.staleness for age, used in trained if used)
    # Every group was in one step, and every rollout ended.
    numbers = [number for step in range(1, case.steps + 1) for number in disk.batches[step]]
    assert sorted(numbers) == list(range(case.batch * case.steps))
    assert len(disk.rollouts) == case.batch * case.steps * case.repeat


def run_times(durations, *, staleness, waits, training=1.0, batch=2, steps=8):
    """Seconds until each step is trained, and what each step took."""
    disk = Disk()
    case = Case(batch, steps, 1, 100, staleness, waits, 1, durations, [False], [training], [])

    async def go():
        run, ends = Run(case, disk), []
        task = asyncio.ensure_future(run.train())
        while not task.done():
            before = run.version
            await asyncio.sleep(0.01)
            ends += [asyncio.get_running_loop().time()] * (run.version - before)
        await task
        return ends

    return simulate(go()), disk.batches


def test_without_staleness_a_step_is_its_own_rollouts_and_then_its_training():
    ends, batches = run_times([10.0], staleness=0, waits=True, batch=2, steps=2)
    assert batches == {1: [0, 1], 2: [2, 3]}
    # The second rollout of a step has two tokens, the first of the next three.
    assert ends == pytest.approx([21, 52], abs=0.1)


def test_collection_goes_on_while_training_does():
    ends, _ = run_times([10.0], staleness=1, waits=True, training=15.0, batch=1, steps=4)
    # Rollouts take 10, 20, 30, 10 s; the first two begin at once, each other with a new version.
    assert ends == pytest.approx([25, 40, 70, 85], abs=0.1)


def test_a_slow_group_is_overtaken_until_it_would_be_too_old():
    # One rollout of a hundred seconds, the others of one.
    durations = [100.0] + [1.0] * 16
    _, waiting = run_times(durations, staleness=3, waits=True)
    _, going_on = run_times(durations, staleness=3, waits=False)
    step = {n: s for s, numbers in waiting.items() for n in numbers}
    assert 1 < step[0] <= 4
    assert next(s for s, numbers in going_on.items() if 0 in numbers) > 4


def test_what_must_be_trained_by_a_step_fits_into_the_steps_until_then():
    bound = {"batch": 1, "version": 2, "staleness": 2}
    assert in_time([1, 2], **bound)
    assert not in_time([1, 1], **bound)
    assert not in_time([0], **bound)
    assert in_time([], **bound)


def test_admission_counts_what_runs_and_what_waits():
    state = {"max_running": 10, "batch": 4}
    assert admissible(running=0, accepted=0, version=0, staleness=0, **state) == 4
    assert admissible(running=2, accepted=4, version=1, staleness=1, **state) == 6
    assert admissible(running=9, accepted=0, version=5, staleness=1, **state) == 1
    assert admissible(running=0, accepted=9, version=0, staleness=1, **state) == 0


def ages(case, disk):
    async def go():
        run = Run(case, disk)
        await run.train()
        return [age for age, _ in run.trained]

    return simulate(go())


def test_a_group_that_is_begun_again_waits_for_the_steps_that_are_taken_again():
    # Steps 1 to 5 had begun when the run was killed, and group 3 had not ended.
    disk = Disk({(n, 0): [0] for n in (0, 1, 2)} | {(n, 0): [3] for n in (4, 5)})
    disk.batches = {step: [n] for step, n in enumerate((0, 1, 2, 4, 5), 1)}
    case = Case(1, 8, 1, 100, 2, True, 8, [1.0], [False], [1.0], [])
    assert max(ages(case, disk)) <= 2


def test_what_is_left_of_a_group_counts_from_its_first_tokens():
    # Of group 5 one rollout ended under version 4, the other takes long; group 6 is quick.
    disk = Disk({(5, 0): [4]}, {step: [step - 1] for step in range(1, 6)}, checkpoint=5)
    durations = [1.0] * 11 + [50.0] + [1.0] * 9
    case = Case(1, 9, 2, 100, 1, True, 8, durations, [False], [1.0], [])
    assert max(ages(case, disk)) <= 1
