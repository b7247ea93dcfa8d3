"""Tasks are drawn by what they have shown, by the seed, and by nothing else."""

import json
import random
from collections import Counter
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.examples import grid
from tests.tasks import curriculum_functions
from tuner.config.load import load_config
from tuner.config.schema import SelectorSection
from tuner.errors import ConfigError, DatasetError, FunctionError, TunerError
from tuner.runs.directory import may_change_here
from tuner.tasks.datasets import StreamRows
from tuner.tasks.selection import (
    Curriculum,
    Strata,
    TaskResults,
    batch_indices,
    by_success,
    check_selector,
    draw,
)
from tuner.trinity.refusals import tuner_section

FUNCTIONS = curriculum_functions.__name__
TASKS = [{"question": str(n), "hard": n % 3, "source": "ab"[n % 4 == 0]} for n in range(24)]


def config(*overrides, batch=4, ahead=0, **selector):
    return load_config(
        None,
        settings={
            "buffer": {"batch_size": batch},
            "synchronizer": {"sync_offset": ahead},
            "tuner": {"tasks": {"selector": selector}},
        },
        overrides=overrides,
    )


def chance(row):
    """Whether a task is always solved, never, or sometimes."""
    return (0.0, 1.0, 0.5)[row % 3]


def rollouts(row, step, count=8, chance=chance):
    dice = random.Random(f"{row} {step}")
    return [float(dice.random() < chance(row)) for _ in range(count)]


def go_on(curriculum, steps, *, batch=4, ahead=0, rewards=rollouts):
    """Steps that take what was planned for them; returns the rows of each."""
    drawn = []
    for step in steps:
        for planned in range(step, step + ahead + 1):
            curriculum.rows(planned)
        rows = curriculum.rows(step)
        groups = {(step - 1) * batch + n: rewards(row, step) for n, row in enumerate(rows)}
        curriculum.learn(step, groups)
        drawn.append(list(rows))
    return drawn


def test_what_is_always_or_never_solved_is_drawn_less_and_still_drawn():
    tasks = [{"n": n} for n in range(60)]
    steps = go_on(Curriculum(config(), tasks), range(1, 601))
    counts = Counter(row for rows in steps for row in rows)
    kinds = [[counts[row] for row in range(60) if row % 3 == kind] for kind in range(3)]
    never, always, sometimes = (sum(kind) / len(kind) for kind in kinds)
    assert sometimes > 4 * max(never, always)
    # The floor: a tenth as often as the one drawn most, but for chance.
    assert min(counts[row] for row in range(60)) > 0.1 * max(counts.values()) / 2
    assert all(len(set(rows)) == len(rows) for rows in steps)


def test_a_task_that_nobody_tried_is_as_good_as_one_that_is_solved_half_the_time():
    results = TaskResults(TASKS[:4])
    results.add(1, [(1, 8, 4), (2, 8, 0), (3, 0, 0)])
    unseen, half, never, broken = by_success(results)
    assert unseen == half == 1
    assert 0 < never < 0.3
    assert broken == 0


def test_earlier_rollouts_of_a_task_count_less_than_its_last():
    learned, forgotten = TaskResults(TASKS[:1]), TaskResults(TASKS[:1])
    for step, (first, second) in enumerate([(0, 8), (0, 8), (8, 0)], 1):
        learned.add(step, [(0, 8, first)])
        forgotten.add(step, [(0, 8, second)])
    assert learned.rate[0] > 0.4  # 0.34 if all counted alike
    assert forgotten.rate[0] < 0.6  # 0.66 then
    assert (learned.tries[0], learned.passed[0], learned.visits[0], learned.last[0]) == (
        24,
        8,
        3,
        3,
    )
    assert learned.latest[0] == 1


def test_a_floor_of_one_draws_all_alike():
    steps = go_on(Curriculum(config(floor=1), TASKS), range(1, 601))
    counts = Counter(row for rows in steps for row in rows)
    assert all(70 < counts[row] < 130 for row in range(24))  # 100 each


def test_failures_are_no_tries_and_do_not_make_a_task_look_new():
    """A task whose rollouts all fail has no reward, and is drawn at the floor."""

    def rewards(row, step):
        return [] if row < 12 else rollouts(row, step, chance=lambda _: 0.5)

    curriculum = Curriculum(config(), TASKS)
    counts = Counter(
        row for rows in go_on(curriculum, range(1, 301), rewards=rewards) for row in rows
    )
    failing, working = (sum(counts[row] for row in rows) for rows in (range(12), range(12, 24)))
    assert curriculum.latest.tries[:12].sum() == 0
    assert 0 < failing < working / 4


def test_draws_are_by_the_seed():
    first, same, other = (
        go_on(Curriculum(config(f"tuner.seed={seed}"), TASKS), range(1, 9)) for seed in (1, 1, 2)
    )
    assert first == same != other


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_a_draw_depends_on_results_up_to_the_step_that_is_named_and_on_no_later_one(ahead):
    """Step 5 ends otherwise: the tasks of the steps up to 5 + `sync_offset` are the same."""
    runs = []
    for better in (False, True):

        def rewards(row, step, better=better):
            return [1.0, 0.0] * 4 if better and step == 5 else [0.0] * 8

        runs.append(
            go_on(
                Curriculum(config(ahead=ahead), TASKS), range(1, 14), ahead=ahead, rewards=rewards
            )
        )
    same = [one == other for one, other in zip(*runs, strict=True)]
    assert all(same[: 5 + ahead])
    assert not all(same[5 + ahead :])


def lines(path):
    return sorted(path.read_text().splitlines())


@grid("selector", [{}, {"kind": "stratified", "field": "source"}, {"field": "source"}], quick=1)
@pytest.mark.parametrize("ahead", [0, 2])
def test_a_run_that_goes_on_after_any_checkpoint_draws_what_it_would_have_drawn(
    tmp_path, selector, ahead
):
    settings = config(ahead=ahead, **selector)
    straight = tmp_path / "straight.jsonl"
    whole = go_on(Curriculum(settings, TASKS, notes=straight), range(1, 13), ahead=ahead)
    for start in range(9):
        for killed in range(start, 10):
            notes = tmp_path / f"{start}-{killed}.jsonl"
            go_on(Curriculum(settings, TASKS, notes=notes), range(1, killed + 1), ahead=ahead)
            with notes.open("a") as file:
                file.write('{"step": 11, "dra')  # a torn line
            curriculum = Curriculum(settings, TASKS, notes=notes, start=start)
            assert go_on(curriculum, range(start + 1, 13), ahead=ahead) == whole[start:]
            assert lines(notes) == lines(straight)


def test_without_its_file_a_run_draws_again_what_its_recorded_rollouts_are_of(tmp_path):
    """They are asked for in the order in which steps take them, with nothing drawn between."""
    settings = config(ahead=2)
    whole = go_on(Curriculum(settings, TASKS), range(1, 7), ahead=2)
    again = Curriculum(settings, TASKS, notes=tmp_path / "tasks.jsonl")
    found = []
    for step in range(1, 7):
        groups = {(step - 1) * 4 + n: rollouts(row, step) for n, row in enumerate(whole[step - 1])}
        again.learn(step, groups)
        found.append(again.rows(step))
    assert found == whole


def test_what_a_file_does_not_tell_is_an_error_and_no_guess(tmp_path):
    notes = tmp_path / "tasks.jsonl"
    go_on(Curriculum(config(), TASKS, notes=notes), range(1, 5))
    whole = notes.read_text().splitlines(keepends=True)
    with pytest.raises(TunerError, match="results of 4 steps, and the run resumes after step 7"):
        Curriculum(config(), TASKS, notes=notes, start=7)
    for damaged, said in (
        ([*whole[:3], *whole[4:]], "after the results of step 1"),
        (whole[2:], "after the tasks of step 0"),
        (["nonsense\n", *whole], "line 1 is not a note"),
        ([whole[0].replace("[", "[99, ", 1), *whole[1:]], "line 1 is not a note"),
    ):
        notes.write_text("".join(damaged))
        with pytest.raises(TunerError, match=said):
            Curriculum(config(), TASKS, notes=notes, start=4)


@given(
    weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=6),
    batch=st.integers(1, 9),
)
def test_every_value_has_its_share_after_any_number_of_steps(weights, batch):
    tasks = [{"source": str(n)} for n in range(len(weights))]
    named = {str(n): weight for n, weight in enumerate(weights)}
    strata = Strata(tasks, SelectorSection(kind="stratified", field="source", weights=named))
    given = np.zeros(len(weights))
    for step, counts in enumerate(islice(strata.counts(batch), 30), 1):
        given += counts
        assert counts.sum() == batch
        due = np.array(weights) / sum(weights) * batch * step
        assert np.all(np.abs(given - due) < max(1, len(weights) - 1) + 1e-6)


def test_of_each_value_every_task_comes_once_before_any_comes_again():
    weights = {"a": 1, "b": 3}
    curriculum = Curriculum(config(kind="stratified", field="source", weights=weights), TASKS)
    steps = go_on(curriculum, range(1, 25))
    assert all(Counter(TASKS[row]["source"] for row in rows) == {"a": 1, "b": 3} for rows in steps)
    for source, each in (("a", 18), ("b", 6)):
        rows = [row for step in steps for row in step if TASKS[row]["source"] == source]
        for start in range(0, len(rows) - each + 1, each):
            assert len(set(rows[start : start + each])) == each
    epochs = [rows[start : start + 6] for start in range(0, len(rows), 6)]  # of "b"
    assert len(set(map(tuple, epochs))) > 1, "another order each time"


def test_without_weights_a_step_is_divided_as_the_tasks_are():
    steps = go_on(Curriculum(config(kind="stratified", field="source"), TASKS), range(1, 7))
    assert Counter(row for rows in steps for row in rows) == dict.fromkeys(range(24), 1)


def test_success_draws_inside_the_values_of_a_field():
    curriculum = Curriculum(config(field="source", weights={"a": 1, "b": 1}), TASKS)
    steps = go_on(curriculum, range(1, 301))
    assert all(Counter(TASKS[row]["source"] for row in rows) == {"a": 2, "b": 2} for rows in steps)
    counts = Counter(row for rows in steps for row in rows)
    for source in "ab":
        rows = [row for row in range(24) if TASKS[row]["source"] == source]
        half, rest = (
            np.mean([counts[row] for row in rows if (chance(row) == 0.5) is wanted])
            for wanted in (True, False)
        )
        assert half > 2 * rest


def test_a_value_with_fewer_tasks_than_its_share_has_some_of_them_twice():
    found = draw(np.array([3, 5]), np.ones(2), 5, floor=0.1, dice=np.random.default_rng(0))
    assert sorted(Counter(found).values()) == [2, 3]


def test_a_function_says_how_often_each_task_is_drawn():
    steps = go_on(
        Curriculum(config(kind=f"{FUNCTIONS}:unseen_first", floor=1e-9), TASKS), range(1, 7)
    )
    assert Counter(row for rows in steps for row in rows) == dict.fromkeys(range(24), 1)
    hard = go_on(Curriculum(config(kind=f"{FUNCTIONS}:only_hard"), TASKS), range(1, 301))
    counts = Counter(TASKS[row]["hard"] for rows in hard for row in rows)
    assert counts[2] > counts[1] > counts[0] > 0
    alike = go_on(Curriculum(config(kind=f"{FUNCTIONS}:nothing"), TASKS), range(1, 301))
    assert min(Counter(row for rows in alike for row in rows).values()) > 25  # 50 each


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("too_few", r"returned \[1\.0\] \(list\): return a number of 0 or more for each of the 24"),
        ("negative", "return a number of 0 or more for each of the 24 tasks"),
        ("unknown", "return a number of 0 or more for each of the 24 tasks"),
        ("broken", "raised LookupError: no such table"),
    ],
)
def test_a_function_without_usable_weights_is_refused_before_anything_is_loaded(kind, said):
    with pytest.raises(FunctionError, match=said) as error:
        check_selector(config(kind=f"{FUNCTIONS}:{kind}"), TASKS)
    assert str(error.value).startswith(f"tuner.tasks.selector.kind: {FUNCTIONS}:{kind}")


def test_a_function_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match=r"tuner\.tasks\.selector\.kind is .*has no function 'x'"):
        check_selector(config(kind=f"{FUNCTIONS}:x"), TASKS)


def test_tasks_without_the_field_or_with_something_else_there_are_named():
    settings = config(kind="stratified", field="level")
    with pytest.raises(DatasetError, match=r"row 0 has None \(NoneType\) as 'level'"):
        check_selector(settings, TASKS)
    with pytest.raises(DatasetError, match=r"row 1 has \[2\] \(list\) as 'level'"):
        check_selector(settings, [{"level": 1}, {"level": [2]}])


def test_weights_must_name_the_values_of_the_field():
    with pytest.raises(ConfigError, match=r"names a, c, .* are a, b: .*\(wrong: b, c\)"):
        check_selector(config(field="source", weights={"a": 1, "c": 2}), TASKS)


def test_a_stream_has_one_order():
    with pytest.raises(DatasetError, match="a stream has a fixed order: remove it"):
        check_selector(config(), StreamRows(iter(())))


def test_metrics_say_what_the_tasks_have_shown():
    curriculum = Curriculum(config(field="source"), TASKS)
    rows = curriculum.rows(1)
    assert curriculum.metrics() == {}
    source = [TASKS[row]["source"] for row in rows]
    rewards = {n: [1.0, 1.0] if source[n] == "a" else [0.0, 0.0] for n in range(4)}
    rewards[source.index("a")] = [0.0, 1.0]
    rewards[len(source) - 1 - source[::-1].index("a")] = []
    curriculum.learn(1, rewards)
    assert source == ["a", "a", "a", "b"]
    assert curriculum.metrics() == {
        "tasks/seen": 4 / 24,
        "tasks/always": 1 / 3,
        "tasks/never": 1 / 3,
        "tasks/passed": 3 / 6,
        "tasks/a/rollouts": 4,
        "tasks/a/passed": 3 / 4,
        "tasks/b/rollouts": 2,
        "tasks/b/passed": 0.0,
    }


def test_rewards_that_never_pass_are_told_once_they_should_have():
    settings = config("tuner.pass_reward=2", "tuner.signal_patience=2")
    curriculum = Curriculum(settings, TASKS)
    go_on(curriculum, [1])
    assert curriculum.notice() is None
    go_on(curriculum, [2])
    assert "the highest reward was 1, and tuner.pass_reward is 2" in curriculum.notice()
    solved = Curriculum(config("tuner.signal_patience=2"), TASKS)
    go_on(solved, [1, 2, 3])
    assert solved.notice() is None


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["tuner.tasks.selector.kind=stratified"], "name a field of the tasks"),
        (["tuner.tasks.selector.kind=hardest"], "must be success, stratified or module:function"),
        (["tuner.tasks.selector.weights={a: 1}"], "set it to the field that they belong to"),
        (["tuner.tasks.selector={field: a, weights: {a: 0}}"], "greater than 0"),
        (["tuner.tasks.selector.floor=0"], "greater than 0"),
        (
            ["tuner.tasks.selector={kind: stratified, field: a, floor: 0.5}"],
            "stratified does not weight tasks: remove it",
        ),
        (
            [
                "tuner.tasks.selector={}",
                "buffer.explorer_input.taskset.data_selector.selector_type=shuffle",
            ],
            "tuner.tasks.selector already selects the tasks of a step: remove one of them",
        ),
        (
            ["tuner.tasks.selector={}", "algorithm.algorithm_type=sft"],
            "tuner.tasks.selector is set, but mode train makes no rollouts: remove it",
        ),
    ],
)
def test_settings_without_use_are_refused_by_name(overrides, said):
    with pytest.raises(ConfigError) as error:
        load_config(None, overrides=overrides)
    assert said in str(error.value)


def test_trinity_refuses_it_by_name():
    problems = []
    tuner_section({"tasks": {"selector": {"kind": "success"}}}, problems)
    (problem,) = problems
    assert problem.path == "tuner.tasks"
    assert "selector" in problem.text and "set tuner.backend to local" in problem.text  # noqa: PT018


def test_what_passes_may_not_change_where_it_draws_tasks():
    assert "tuner.pass_reward" in may_change_here(load_config(None))
    assert "tuner.pass_reward" not in may_change_here(config())
    assert "tuner.pass_reward" not in may_change_here(
        load_config(None, overrides=["tuner.feedback_attempts=1"])
    )


def test_notes_are_of_the_form_that_is_described(tmp_path):
    notes = tmp_path / "tasks.jsonl"
    (rows,) = go_on(Curriculum(config(), TASKS, notes=notes), [1])
    first, second = map(json.loads, notes.read_text().splitlines())
    assert first == {"step": 1, "drawn": rows}
    assert second == {"step": 1, "results": [[r, 8, sum(rollouts(r, 1))] for r in rows]}


def rollouts_until_learned(rows_of, learn, seed, *, batch=4, group=8):
    """Of a learner whose skill grows with the spread of rewards inside groups, until it passes nine
    rollouts of ten; a fifth of the tasks teach, the others are always solved, or never."""
    dice, skill = random.Random(seed), 0.0
    for step in range(1, 2001):
        spreads, rewards = [], {}
        for number, row in enumerate(rows_of(step)):
            kind = row % 5
            passes = 1 / (1 + np.exp(1.5 - skill)) if kind == 0 else float(kind % 2)
            found = [float(dice.random() < passes) for _ in range(group)]
            rewards[(step - 1) * batch + number] = found
            spreads.append(np.std(found))
        skill += 0.2 * float(np.mean(spreads))
        if 1 / (1 + np.exp(1.5 - skill)) > 0.9:
            return step * batch * group
        learn(step, rewards)
    raise AssertionError("it never learned")


def test_a_learner_gets_there_with_half_the_rollouts():
    tasks = [{"n": n} for n in range(40)]
    selector = config().buffer.explorer_input.taskset.data_selector
    shuffle = selector.model_copy(update={"selector_type": "shuffle"})
    for seed in range(5):
        in_order = shuffle.model_copy(update={"seed": seed})

        def rows(step, in_order=in_order):
            return batch_indices(step, size=4, rows=40, selector=in_order)

        drawn = Curriculum(config(f"tuner.seed={seed}"), tasks)
        shuffled = rollouts_until_learned(rows, lambda step, rewards: None, seed)
        assert rollouts_until_learned(drawn.rows, drawn.learn, seed) < shuffled / 2
