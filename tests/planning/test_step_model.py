"""The arithmetic of a step: what must hold whatever the numbers are."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.planning.step_model import Costs, Place, Work, changes, predict


def seconds(most):
    return st.floats(0, most, allow_nan=False)


COSTS = st.builds(
    Costs,
    step=st.floats(1e-4, 0.05),
    sampled=seconds(1e-3),
    attended=seconds(1e-6),
    prefilled=seconds(1e-4),
    gateway=seconds(1e-3),
    agent=seconds(0.05),
    rollout=seconds(0.01),
    update=seconds(1),
    trained=seconds(1e-4),
    paired=seconds(1e-7),
    publish=seconds(1),
    rest=seconds(1),
)
WORK = st.builds(
    Work,
    calls=st.floats(1, 30),
    completion=st.floats(1, 1000),
    prompt=st.floats(10, 4000),
    common=seconds(100),
    first=seconds(1000),
    own=seconds(3000),
    depth=seconds(4000),
    waits=st.sampled_from([0.0, 0.01, 2.0]),
    judged=st.sampled_from([0.0, 1.0]),
    spread=st.sampled_from([(1.0,), (0.5, 1.0, 1.5)]),
)
PLACE = st.builds(
    Place,
    groups=st.integers(1, 500),
    repeat=st.integers(1, 16),
    running=st.integers(1, 2000),
    slots=st.integers(1, 512),
    ahead=st.integers(0, 2),
    reference=st.booleans(),
    engines=st.integers(1, 8),
    trainers=st.floats(1, 8),
    in_process=st.booleans(),
    workers=st.integers(0, 64),
    gateways=st.sampled_from([1, 16]),
    cores=st.integers(1, 64),
    shared=st.sampled_from(["cpu", "device", "apart"]),
)
ROUNDING = 1 + 1e-9


@given(WORK, COSTS, PLACE)
def test_parts_add_up_to_the_step(work, costs, place):
    time = predict(work, costs, place)
    assert time.seconds == pytest.approx(sum(time.parts.values()))
    assert all(s >= 0 for name, s in time.parts.items() if name != "overlap")
    shorter = min(time.collection, time.parts["training"])
    assert -shorter * ROUNDING - 1e-9 <= time.parts["overlap"] <= 0
    # Nothing is busy for longer than the collection, or the update, takes.
    longest = max(time.collection, time.parts["training"])
    assert max(time.busy.values()) <= longest * ROUNDING + 1e-9


@given(WORK, COSTS, PLACE, st.data())
def test_nothing_that_is_added_makes_a_step_longer(work, costs, place, data):
    name = data.draw(st.sampled_from(["cores", "trainers", "slots"]))
    more = replace(place, **{name: getattr(place, name) * data.draw(st.integers(1, 4))})
    before = predict(work, costs, place).seconds
    assert predict(work, costs, more).seconds <= before * ROUNDING


@given(WORK, COSTS, PLACE, st.sampled_from(list(Costs.__dataclass_fields__)))
def test_nothing_that_costs_more_makes_a_step_shorter(work, costs, place, name):
    place = replace(place, ahead=0)  # else fuller passes leave the trainer more of its GPU
    dearer = replace(costs, **{name: 1.5 * getattr(costs, name)})
    before = predict(work, costs, place).seconds
    assert predict(work, dearer, place).seconds >= before / ROUNDING


@given(WORK, COSTS, PLACE)
def test_no_more_answers_are_in_a_pass_than_there_are_slots_and_rollouts(work, costs, place):
    time = predict(work, costs, place)
    assert 0 < time.batch <= max(1, min(place.slots, place.at_once)) * ROUNDING


def test_one_loop_does_one_after_the_other():
    # 8 rollouts of 2 calls of 10 tokens at once: 20 passes; everything else once for each.
    work = Work(calls=2, completion=10, prompt=30, reused=5, first=20, own=15, depth=40)
    costs = Costs(
        step=1.0, sampled=0.1, attended=0.001, prefilled=0.01, gateway=0.5, agent=0.25,
        rollout=2.0, update=7.0, trained=0.02, paired=0.001, publish=3.0, rest=1.0,
    )  # fmt: skip
    time = predict(work, costs, Place(groups=2, repeat=4, running=8))
    assert time.parts == pytest.approx(
        {
            "generation": 20 * 1.0 + 160 * (0.1 + 0.001 * 35) + 16 * 25 * 0.01,
            "gateway": 16 * 0.5,
            "agent": 16 * 0.25,
            "rollouts": 8 * 2.0,
            "waiting": 0.0,
            "training": 7.0 + (2 * 20 + 8 * 15) * (0.02 + 0.001 * 40),
            "overlap": 0.0,
            "weights": 3.0,
            "rest": 1.0,
        }
    )
    assert time.batch == pytest.approx(8)


def test_half_the_rollouts_at_a_time_take_twice_the_passes():
    work, costs = Work(calls=2, completion=10, prompt=30), Costs(step=1.0)
    at_once, in_turn = (
        predict(work, costs, Place(groups=2, repeat=4, running=running)) for running in (8, 4)
    )
    assert (at_once.seconds, in_turn.seconds) == pytest.approx((20, 40))


def test_tools_are_waited_for_by_the_rollout_alone():
    # A pass of 1 s, 10 tokens, and 90 s of waiting: of 100 rollouts 10 are in the engine.
    work, costs = Work(calls=3, completion=10, prompt=0, waits=90), Costs(step=1.0)
    time = predict(work, costs, Place(groups=25, repeat=4, running=100, slots=100))
    assert time.batch == pytest.approx(10)
    assert time.collection == pytest.approx(3 * (90 + 10))
    few = predict(work, costs, Place(groups=25, repeat=4, running=100, slots=5))
    assert few.collection == pytest.approx(3 * 100 * 10 / 5)


def test_the_longest_rollout_is_waited_for_unless_collection_runs_ahead():
    work = Work(calls=1, completion=10, prompt=0, spread=(0.5, 0.5, 1.0, 2.0))
    place = Place(groups=1000, repeat=1, running=1000, slots=1000)
    assert predict(work, Costs(step=1.0), place).seconds == pytest.approx(20)
    ahead = replace(place, ahead=1)
    assert predict(work, Costs(step=1.0), ahead).seconds == pytest.approx(10)
    both = replace(ahead, running=2000, slots=2000)  # of two steps
    assert predict(work, Costs(step=1.0), both).seconds == pytest.approx(5)
    assert work.longest(1) == pytest.approx(1.0)


def test_workers_take_the_agents_code_off_the_loop():
    work, costs = Work(calls=4, completion=10, prompt=0), Costs(step=0.001, agent=0.02)
    one = Place(groups=16, repeat=4, running=64, cores=8)
    four = replace(one, workers=4)
    assert predict(work, costs, one).parts["agent"] == pytest.approx(256 * 0.02)
    time = predict(work, costs, four)
    assert time.limit == "agent"
    assert time.collection == pytest.approx(256 * 0.02 / 4)
    assert predict(work, costs, replace(four, cores=2)).collection > 1.9 * time.collection


def test_the_engine_and_the_workers_have_no_more_than_all_cores():
    # Of 12 s an answer is 10 in passes: 12 s of these on the loop, and 20 s of agents in workers.
    work, costs = Work(calls=1, completion=10, prompt=0), Costs(step=1.0, agent=2.0)
    place = Place(groups=1, repeat=10, running=10, workers=2, cores=2)
    assert predict(work, costs, place).collection == pytest.approx((12 + 20) / 2)
    assert predict(work, costs, replace(place, cores=4)).collection == pytest.approx(12)


def test_collection_and_training_share_cores_or_a_gpu_where_they_overlap():
    work = Work(calls=1, completion=10, prompt=0, own=1)
    costs = Costs(step=1.0, update=6.0)
    place = Place(groups=1, repeat=1, running=1, ahead=1, shared="apart", in_process=False)
    assert predict(work, costs, place).seconds == pytest.approx(10)
    assert predict(work, costs, replace(place, ahead=0)).seconds == pytest.approx(16)
    assert predict(work, costs, replace(place, shared="device")).seconds == pytest.approx(16)
    one_core = replace(place, shared="cpu", cores=1)
    assert predict(work, costs, one_core).seconds == pytest.approx(16)
    two_cores = replace(one_core, cores=2)
    assert predict(work, costs, two_cores).seconds == pytest.approx(10)
    assert predict(work, costs, replace(two_cores, in_process=True)).seconds == pytest.approx(16)


def test_what_saves_most_comes_first_and_what_saves_nothing_is_not_named():
    work, costs = Work(calls=1, completion=10, prompt=0), Costs(step=1.0, update=3.0)
    place = Place(groups=4, repeat=2, running=4)
    found = changes(
        work,
        costs,
        place,
        [("cores", {"cores": 8}), ("train", {"reference": False}), ("run", {"running": 8})],
    )
    assert [(one.what, one.time.seconds) for one in found] == [("run", pytest.approx(13.0))]
