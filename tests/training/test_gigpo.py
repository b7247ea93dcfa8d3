"""`gigpo`: rollouts compared in their group, and what follows calls compared in their state."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace
from statistics import mean, stdev

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kit.builders import call, trace
from tests.kit.examples import few
from tests.training.configured import training
from tests.training.test_trainer import tiny_model
from tests.training.test_turn_discount import advantages
from tuner.config.algorithms import GiGPOAdvantage, KLPenalty
from tuner.runs.metrics import has_signal, state_metrics
from tuner.runs.notices import lone_states
from tuner.traces import Trace
from tuner.traces.store import from_plain, to_plain
from tuner.training.batch import Selection, build_batch, unreplayed
from tuner.training.trainer import PolicyTrainer

LONE = Selection(lone_rewards=True)


def at(name: str, prompt: int, state: str | None = None, **fields):
    """A call whose prompt continues no other's: an agent that is shown what it observes alone."""
    return replace(call(name, [prompt], [1, 2], [-1.0, -1.0]), state=state, **fields)


def walk(number: int, places: str, reward: float, task: int = 0) -> Trace:
    """A rollout with a call in each of some places, which are its prompts."""
    calls = [at(f"{number}{n}", ord(place) - ord("A")) for n, place in enumerate(places)]
    return trace(task, number, calls, reward=reward)


def got(traces: list[Trace], **args) -> dict[str, float]:
    return advantages(traces, advantage="gigpo", advantage_args=GiGPOAdvantage(**args))


def test_two_walks_through_a_crossing_by_hand():
    """Both begin in A. The first comes to the goal by B, the second visits B and C twice."""
    traces = [walk(0, "AB", 1.0), walk(1, "ABCB", 0.0)]
    found = got(traces, gamma=0.5, omega=2.0)
    # Rollouts: 1 and 0, mean 0.5. Returns in A: 0.5, 0; in B: 1, 0, 0; C is alone.
    expected = {
        "00": 0.5 + 2 * (0.5 - 0.25),
        "01": 0.5 + 2 * (1 - 1 / 3),
        "10": -0.5 + 2 * (0 - 0.25),
        "11": -0.5 + 2 * (0 - 1 / 3),
        "12": -0.5,
        "13": -0.5 + 2 * (0 - 1 / 3),
    }
    assert found == pytest.approx(expected, rel=1e-5)
    spread = got(traces, gamma=0.5, omega=2.0, fnorm="std")
    assert spread["01"] == pytest.approx(
        0.5 / stdev([1, 0]) + 2 * (2 / 3) / stdev([1, 0, 0]), rel=1e-5
    )


@st.composite
def batches(draw):
    """Traces of up to three tasks whose calls meet, by name or by prompt, within and across
    rollouts, roles and tasks; some rollouts say what calls gained, some reward calls."""
    dice = random.Random(draw(st.integers(0, 2**32)))
    traces = []
    for task in range(dice.randint(1, 3)):
        for rollout in range(dice.randint(2, 4)):
            said = dice.choice(["nothing", "reward", "gained"])
            calls = []
            for turn in range(dice.randint(1, 6)):
                fields = {"role": dice.choice([None, None, "other"])}
                if said != "nothing" and dice.random() < 0.7:
                    fields[said] = dice.choice([-1.0, 0.0, 0.25, 2.0])
                if dice.random() < 0.15:
                    fields["excluded"] = True
                state = dice.choice([None, None, "x", "y"])
                calls.append(at(f"{task}{rollout}{turn}", dice.randint(3, 5), state, **fields))
            traces.append(trace(task, rollout, calls, reward=dice.choice([0.0, 0.5, 1.0])))
    return traces


def by_the_formula(traces: list[Trace], args: GiGPOAdvantage) -> dict[str, float]:
    """Trinity-RFT's function in lists, with the states of each group by themselves."""

    def norm(values: list[float]) -> list[float]:
        over = stdev(values) if args.fnorm == "std" and len(values) > 1 else 1.0
        return [(value - mean(values)) / (over + args.epsilon) for value in values]

    episodes: dict[int, dict[str, float]] = defaultdict(dict)
    states: dict[object, dict[str, float]] = defaultdict(dict)
    for one in traces:
        calls = [c for c in one.calls if unreplayed(c) is None]
        if not calls:
            continue
        rewards = [c.gained or 0.0 for c in calls]
        if all(c.gained is None for c in one.calls):
            rewards = [c.reward or 0.0 for c in calls]
            rewards[-1] += one.reward
        episodes[one.id.task][calls[0].id] = sum(rewards)
        for n, c in enumerate(calls):
            key = (c.role, c.state) if c.state else c.prompt_ids
            follows = sum(args.gamma**k * r for k, r in enumerate(rewards[n:]))
            states[one.id.task, key][c.id] = follows
    found: dict[str, float] = {}
    for group in [*episodes.values()]:
        if len(group) > 1:
            found |= dict(zip(group, norm([*group.values()]), strict=True))
    of_rollout = {id[:2]: value for id, value in found.items()}
    return {
        id: of_rollout[id[:2]] + args.omega * value
        for state in states.values()
        for id, value in zip(state, norm([*state.values()]), strict=True)
        if id[:2] in of_rollout
    }


@given(
    batches(),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.sampled_from([0.5, 0.9, 1.0]),
    st.sampled_from(["none", "std"]),
)
@settings(max_examples=few(120), deadline=None)
def test_advantages_are_those_of_the_formula(traces, omega, gamma, fnorm):
    args = GiGPOAdvantage(omega=omega, gamma=gamma, fnorm=fnorm, epsilon=0.01)
    assert got(traces, **args.model_dump()) == pytest.approx(
        by_the_formula(traces, args), rel=1e-9, abs=1e-9
    )


def test_a_state_that_was_named_is_the_state_whatever_the_prompt_is():
    def pair(*states: tuple[str | None, str | None]) -> dict[str, float]:
        calls = [at(f"{n}", 50 + n, state, role=role) for n, (state, role) in enumerate(states)]
        one, other = (trace(0, n, [c], reward=1.0 - n) for n, c in enumerate(calls))
        return got([one, other], omega=1.0)

    assert pair(("a", None), ("a", None)) == pytest.approx({"0": 1.0, "1": -1.0}, rel=1e-5)
    for alone in ((None, None), (None, None)), (("a", None), ("b", None)), (("a", "x"), ("a", "y")):
        assert pair(*alone) == pytest.approx({"0": 0.5, "1": -0.5}, rel=1e-5)


def test_states_of_different_tasks_are_different():
    alone = got([walk(0, "A", 1.0), walk(1, "B", 0.0)])
    also = got([walk(0, "A", 1.0), walk(1, "B", 0.0), walk(5, "A", 7.0, 1), walk(6, "B", 3.0, 1)])
    assert {id: also[id] for id in alone} == alone


@pytest.mark.parametrize("masked", [((1, 3),), ((0, 2),), ((0, 1), (2, 4))])
def test_a_mask_that_cuts_a_call_of_a_state_changes_no_advantage(masked):
    def traces(masked: tuple[tuple[int, int], ...]) -> list[Trace]:
        long = [
            replace(call(f"{n}a", [7], [1, 2, 3, 4, 5], [-1.0] * 5), gained=0.5 * n)
            for n in range(3)
        ]
        long[0] = replace(long[0], masked=masked)
        return [trace(0, n, [one, at(f"{n}b", 8)], reward=float(n)) for n, one in enumerate(long)]

    assert got(traces(masked), gamma=0.5) == pytest.approx(got(traces(()), gamma=0.5))


def test_recorded_traces_give_the_same_advantages_as_before_they_were_written():
    made = [
        trace(0, n, [at(f"{n}a", 5, "here"), at(f"{n}b", 6 + n, "there" * 30)], reward=float(n))
        for n in range(3)
    ]
    read = [from_plain(Trace, to_plain(one)) for one in made]
    assert got(read, gamma=0.5) == got(made, gamma=0.5)
    assert state_metrics(build_batch(read, selection=LONE))["states/shared"] == 1.0


def test_a_rollout_that_is_too_old_still_counts_in_its_group():
    fresh = [
        replace(one, calls=tuple(replace(c, versions=(1, 1)) for c in one.calls))
        for one in (walk(0, "A", 1.0), walk(1, "B", 0.0))
    ]
    batch = build_batch([*fresh, walk(2, "C", 0.5)], selection=LONE, oldest=1)
    trainer = PolicyTrainer(tiny_model(), training(total_steps=1, advantage="gigpo"))
    values = trainer.compute_advantages(batch).advantages_N.tolist()
    assert values == pytest.approx([1.0 - 0.5, 0.0 - 0.5], rel=1e-5)


def test_a_call_pays_for_its_own_distance_to_the_reference():
    traces = [walk(0, "AB", 1.0), walk(1, "C", 0.0)]
    batch = build_batch(traces, selection=LONE)
    args = {"kl_penalty": "k1", "kl_penalty_args": KLPenalty(kl_coef=1)}
    given = training(
        total_steps=1, advantage="gigpo", advantage_args=GiGPOAdvantage(omega=0.0), **args
    )
    trainer = PolicyTrainer(tiny_model(), given, reference=tiny_model(seed=1))
    paid = [
        float((-1.0 - ref_T).sum())
        for ref_T in trainer.compute_logp(batch, model=trainer.reference)
    ]
    half = (1.0 - paid[0] - paid[1] + paid[2]) / 2
    found = trainer.compute_advantages(batch).advantages_N.tolist()
    assert found == pytest.approx([half, half, -half], rel=1e-4)


def test_signal_is_what_differs_in_groups_or_states():
    def signal(traces: list[Trace], gamma: float) -> bool:
        return has_signal(build_batch(traces, selection=LONE), "gigpo", gamma)

    same = [walk(0, "ABC", 1.0), walk(1, "AC", 1.0)]
    assert not signal(same, 1.0)
    assert signal(same, 0.5)  # the second came to C, and the first to A, in fewer steps
    assert not signal([walk(0, "AB", 1.0), walk(1, "AB", 1.0)], 0.5)
    assert signal([walk(0, "A", 1.0), walk(1, "B", 0.0)], 1.0)


@pytest.mark.parametrize(
    ("walks", "expected", "said"),
    [
        (("AB", "AC"), (3, 4 / 3, 0.5, 0.0), "100% of the calls after"),
        (("ABB", "AC"), (3, 5 / 3, 0.8, 2 / 3), None),
        (("A", "A"), (1, 2.0, 1.0, None), "no rollout has a second call"),
    ],
)
def test_a_run_whose_states_hold_one_call_each_is_told(walks, expected, said):
    traces = [walk(n, places, float(n)) for n, places in enumerate(walks)]
    metrics = state_metrics(build_batch(traces, selection=LONE))
    names = ("states/count", "states/calls", "states/shared", "states/shared_later")
    assert tuple(metrics.get(name) for name in names) == pytest.approx(expected)
    found = lone_states(metrics)
    assert found is not None
    assert (found.share == 1.0) == (said is not None)
    assert (said or "33% of the calls after") in found.sentence
