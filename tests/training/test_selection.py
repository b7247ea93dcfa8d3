"""Which groups are trained, and with which rewards; every token that is not has a reason."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kit.builders import call, trace
from tests.kit.examples import grid
from tuner.config import load_config
from tuner.config.algorithms import ADVANTAGES, ALGORITHMS, TURN_DISCOUNTED
from tuner.errors import TrainingError
from tuner.rollouts import Rollouts
from tuner.rollouts.branching import PointSelector
from tuner.rollouts.groups import BatchLog, TrainingGroups
from tuner.runs.history import History
from tuner.runs.metrics import batch_metrics, has_signal
from tuner.runs.notices import SignalHistory, equal_groups
from tuner.runs.sources import by_role, comparable, off_policy_batch
from tuner.runs.stack import selection
from tuner.tasks.selection import Curriculum
from tuner.traces import Origin, Outcome, TraceStore
from tuner.training.batch import Overlong, Selection, build_batch
from tuner.training.scoring import critic_advantages, row_advantages


def group(task, *rewards, tokens=2):
    return [
        trace(
            task,
            i,
            [call(f"{task}-{i}", [1], [2] * tokens, [-1.0] * tokens)],
            reward=reward,
        )
        for i, reward in enumerate(rewards)
    ]


GROUPS = [
    *group(0, 0, 0, 0, 0),
    *group(1, 1, 0, 0, 0),
    *group(2, 1, 1, 1, 0),
    *group(3, 1, 1, 1, 1),
]


def tasks(batch):
    return sorted({one.task for one in batch.ids})


def test_groups_outside_the_success_rates_are_dropped_and_counted():
    batch = build_batch(GROUPS, selection=Selection(success_rate=(0.25, 0.5)))
    assert tasks(batch) == [1]
    assert batch.dropped_tokens == {"success_rate_too_high": 16, "success_rate_too_low": 8}
    assert batch.dropped_rollouts == {"success_rate_too_high": 8, "success_rate_too_low": 4}
    assert tasks(build_batch(GROUPS, selection=Selection())) == [0, 1, 2, 3]


def test_dynamic_sampling_drops_groups_of_equal_rewards():
    batch = build_batch(GROUPS, selection=Selection(varied_only=True))
    assert tasks(batch) == [1, 2]
    assert batch.dropped_tokens == {"equal_rewards": 16}
    assert batch_metrics(batch)["groups/zero_variance"] == 0


def test_dynamic_sampling_keeps_groups_whose_calls_have_rewards_of_their_own():
    traces = [
        replace(item, calls=(replace(item.calls[0], reward=float(i), role="a"),))
        for i, item in enumerate(group(0, 1, 1))
    ]
    assert len(build_batch(traces, selection=Selection(varied_only=True)).rows) == 2


def test_only_the_best_rollouts_are_imitated():
    traces = [*group(0, 0.2, 0.9, 0.9), *group(1, 0.5, 0.5), *group(2, 0.1, 0.7)]
    batch = build_batch(traces, selection=Selection(best_only=True))
    assert [row.call_id for row in batch.rows] == ["0-1", "0-2", "2-1"]
    assert batch.dropped_tokens == {"equal_rewards": 4, "not_best_of_group": 4}
    assert has_signal(batch, "best_of_group")
    assert batch_metrics(batch)["groups/used"] == 2


def test_best_of_group_refuses_rewards_of_calls():
    traces = group(0, 0, 1)
    traces[0] = replace(traces[0], calls=(replace(traces[0].calls[0], reward=1.0),))
    with pytest.raises(TrainingError, match="rewards of single calls"):
        build_batch(traces, selection=Selection(best_only=True))


def test_rewards_are_shifted_and_scaled_after_the_filters():
    traces = group(0, 1.0, 0.0)
    traces = [
        replace(item, calls=(replace(item.calls[0], reward=0.5, role="a"),)) for item in traces
    ]
    shaped = Selection(success_rate=(0.5, 0.5), bias=-0.5, scale=10)
    batch = build_batch(traces, selection=shaped)
    assert batch.rewards_R.tolist() == [5.0, -5.0]
    assert [row.reward for row in batch.rows] == [0.0, 0.0]


@pytest.mark.parametrize(("tokens", "lost"), [(6, 0.0), (7, 0.125), (10, 0.5), (12, 0.5)])
def test_long_answers_lose_reward_over_the_buffer(tokens, lost):
    selection = Selection(overlong=Overlong(longest=10, buffer=4, penalty=0.5))
    traces = [*group(0, 1.0, tokens=tokens), replace(group(0, 1.0)[0], id=group(0, 0, 0)[1].id)]
    assert build_batch(traces, selection=selection).rewards_R.tolist() == [1.0 - lost, 1.0]


def test_an_answer_that_was_cut_off_is_punished_in_full():
    traces = group(0, 1.0, 1.0)
    traces[0] = replace(traces[0], calls=(replace(traces[0].calls[0], finish_reason="length"),))
    selection = Selection(overlong=Overlong(longest=10, buffer=4))
    assert build_batch(traces, selection=selection).rewards_R.tolist() == [0.0, 1.0]


def test_algorithms_that_compare_all_rewards_of_a_step_see_signal_between_groups():
    batch = build_batch([*group(0, 0, 0), *group(1, 1, 1)])
    assert not has_signal(batch)
    assert has_signal(batch, "reinforceplusplus")
    assert not has_signal(build_batch(group(0, 1, 1)), "reinforce")


# A rollout of which nothing is trained is as good as absent, except in the counts.


def each_call(**fields):
    return lambda one: replace(one, calls=tuple(replace(c, **fields) for c in one.calls))


def greedy(one):
    calls = (replace(c, sampling=replace(c.sampling, temperature=0.0)) for c in one.calls)
    return replace(one, calls=tuple(calls))


SILENCED = {
    "excluded_call": each_call(excluded=True),
    "masked": each_call(masked=((0, 2),)),
    "greedy_call": greedy,
    "undelivered_call": each_call(undelivered=True),
    "invalid_call": each_call(invalid="damaged"),
    "reward_without_peer": each_call(reward=1.0, role="alone"),
}
REWARDED = {name: row for name, row in ALGORITHMS.items() if row.recorded is None}
GIVEN = {
    "prompt_distill": ["tuner.algorithm.prompt=Hi"],
    "on_policy_distill": ["explorer.auxiliary_models=[{name: t, model_path: t}]"],
}
FILTERS = {
    "": [],
    "dynamic sampling": ["tuner.algorithm.dynamic_sampling=true"],
    "success rate": ["tuner.algorithm.success_rate_lb=0.2", "tuner.algorithm.success_rate_ub=0.6"],
    "turn discount": ["tuner.algorithm.turn_discount=0.5"],
    "batch deviation": ["algorithm.advantage_fn_args.std_cal_level=batch"],
    "threshold": ["algorithm.advantage_fn_args.std_threshold=0.1"],
}


def allowed(algorithm, filters):
    advantage = REWARDED[algorithm].advantage_fn
    if not ADVANTAGES[advantage].needs_reward:
        return not filters
    if filters == "turn discount":
        return advantage in TURN_DISCOUNTED
    return filters not in ("batch deviation", "threshold") or advantage == "grpo"


def advantages(batch, config):
    if not batch.rows:
        return []
    zeros = tuple(torch.zeros(len(row.completion_ids), dtype=torch.float64) for row in batch.rows)
    if config.algorithm.uses_critic:
        return [one.tolist() for one in critic_advantages(batch, config, zeros)[0]]
    return [one.tolist() for one in row_advantages(batch, config, teacher_logp=zeros)]


@grid(
    "algorithm, filters",
    [(name, some) for name in REWARDED for some in FILTERS if allowed(name, some)],
    quick=16,
)
def test_a_rollout_without_a_trained_token_has_no_vote(algorithm, filters):
    config = load_config(
        overrides=[
            f"algorithm.algorithm_type={algorithm}",
            *GIVEN.get(algorithm, []),
            *FILTERS[filters],
        ]
    )
    chosen = selection(config)
    told = algorithm == "prompt_distill"

    def built(traces):
        return build_batch(
            map(each_call(), traces),
            selection=chosen,
            oldest=1,
            teacher_prompt=lambda call: (9,) if told else (),
        )

    @settings(max_examples=25)
    @given(
        st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=4),
        st.sampled_from([100.0, -100.0, 0.0]),
        st.sampled_from(sorted(SILENCED)),
        st.integers(0, 4),
    )
    def test(rewards, reward, reason, place):
        compares_calls = not (chosen.lone_rewards or chosen.best_only) and chosen.needs_reward
        if reason == "reward_without_peer" and not compares_calls:
            reason = "masked"
        voters = [
            trace(
                task,
                number + (number >= place),
                [replace(call(f"{task}-{number}", [1, task], [2, 3], [-1.0] * 2), versions=(1, 1))],
                reward=one,
            )
            for task in (0, 1)
            for number, one in enumerate(rewards)
        ]
        made = replace(call("silent", [1, 0], [4, 5], [-1.0] * 2), versions=(1, 1))
        silent = SILENCED[reason](trace(0, place, [made], reward=reward))
        found, wanted = built([*voters, silent]), built(voters)
        assert found.rows == wanted.rows
        assert found.ids == wanted.ids
        assert found.rewards_R.tolist() == wanted.rewards_R.tolist()
        assert found.group_R.tolist() == wanted.group_R.tolist()
        assert Counter(found.dropped_tokens) - Counter(wanted.dropped_tokens) == {reason: 2}
        assert Counter(found.dropped_rollouts) - Counter(wanted.dropped_rollouts) == {reason: 1}
        assert advantages(found, config) == advantages(wanted, config)
        signals = [has_signal(one, config.algorithm.advantage_fn) for one in (found, wanted)]
        assert signals[0] == signals[1]

    test()


CALLS = st.lists(
    st.tuples(
        st.sampled_from(["writer", "critic", "guard", "other", None]),
        st.integers(1, 3),  # sampled tokens
        st.sampled_from(["", "undelivered", "excluded"]),
        st.sampled_from([None, 0.0, 1.0]),  # its own reward
    ),
    max_size=4,
)
ATTEMPTS = st.lists(
    st.tuples(CALLS, st.sampled_from([None, 0.0, 1.0]), st.booleans()), min_size=2, max_size=6
)


@settings(max_examples=60, deadline=None)
@given(ATTEMPTS)
def test_every_token_is_of_one_role_and_a_role_sees_no_other(attempts):
    """Trained by the adapter of its role or dropped with a reason; what a role is trained on does
    not change if the others make no calls."""
    config = load_config(overrides=["model.adapters={writer: {}, guard: frozen, default: {}}"])
    key = {"writer": "writer", "guard": "guard"}
    build = partial(build_batch, selection=selection(config))
    traces = []
    for number, (calls, reward, final) in enumerate(attempts):
        made = [
            replace(
                call(f"{role}-{number}-{place}", [1], [2] * tokens, [-1.0] * tokens),
                role=role,
                reward=own,
                **({state: True} if state else {}),
            )
            for place, (role, tokens, state, own) in enumerate(calls)
        ]
        outcome = Outcome.WORKFLOW_ERROR if reward is None else Outcome.COMPLETED
        fields = {"outcome": outcome, "reward": reward, "final": final or number < 2}
        traces.append(trace(number % 2, number, made, **fields))
    found = by_role(config, traces, build)
    assert list(found.of_roles) == ["writer", "default"]
    assert found.sampled_tokens == sum(one.sampled_tokens for one in traces)
    assert found.sampled_tokens == found.trained_tokens + sum(found.dropped_tokens.values())
    guards = [c.sampled_tokens for one in traces for c in one.calls if c.role == "guard"]
    assert found.dropped_tokens.get("frozen_role", 0) == sum(guards)
    metrics = batch_metrics(found)
    assert metrics["tokens/trained"] == found.trained_tokens
    for role, batch in found.of_roles.items():
        assert {key.get(row.call_id.split("-")[0], "default") for row in batch.rows} <= {role}
        alone = [
            replace(one, calls=tuple(c for c in one.calls if key.get(c.role, "default") == role))
            for one in traces
        ]
        same = by_role(config, alone, build).of_roles[role]
        assert (same.rows, same.ids) == (batch.rows, batch.ids)
        assert same.rewards_R.tolist() == batch.rewards_R.tolist()
        assert same.dropped_tokens == batch.dropped_tokens


@pytest.mark.parametrize("silenced", [SILENCED[name] for name in ("excluded_call", "greedy_call")])
def test_a_branch_without_a_trained_token_has_no_vote_on_its_trunk(silenced):
    """The tree is that of a branch that failed."""
    config = load_config(overrides=["algorithm.algorithm_type=tree"])

    def calls(name):
        return [call(f"{name}{n}", [1] * (n + 1), [2, 3], [-1.0] * 2) for n in (0, 1)]

    trunks = [trace(0, n, calls(n), reward=float(n)) for n in (0, 1)]
    shared = replace(trunks[0].calls[0], replayed=2)
    origin = Origin(trunks[0].id, attempt=0, calls=1)
    own = silenced(trace(0, 2, calls("b")[1:]))
    branch = replace(own, calls=(shared, *own.calls), origin=origin, reward=100.0)
    failed = replace(branch, outcome=Outcome.WORKFLOW_ERROR, reward=None)
    trees = [build_batch([*trunks, one], selection=selection(config)) for one in (branch, failed)]
    assert trees[0].rows == trees[1].rows
    assert advantages(trees[0], config) == advantages(trees[1], config)
    assert trees[0].sampled_tokens == trees[0].trained_tokens + 2


@pytest.fixture
def step():
    """Two groups whose rewards are equal, but for a rollout that is not trained."""
    return [
        trace(task, number, [call(f"{task}-{number}", [1], [2, 3], [-1.0] * 2)], reward=1.0)
        for task in (0, 1)
        for number in (0, 1)
    ] + [
        each_call(excluded=True)(
            trace(task, 2, [call(f"{task}-2", [1], [2, 3], [-1.0] * 2)], reward=0.0)
        )
        for task in (0, 1)
    ]


async def test_curricula_notices_and_branching_learn_from_voters(step, tmp_path):
    config = load_config(
        overrides=[
            "tuner.tasks.selector.kind=success",
            "buffer.batch_size=2",
            "algorithm.repeat_times=3",
        ]
    )
    store = TraceStore(tmp_path)
    for one in step:
        store.append(one)
    curriculum = Curriculum(config, [{"q": 0}, {"q": 1}])
    groups = TrainingGroups(
        config,
        BatchLog(tmp_path / "batches.jsonl"),
        [{"q": 0}, {"q": 1}],
        start=0,
        total_steps=1,
        rollouts=Rollouts(None, store, max_running=1),
        on_rollout=lambda one: None,
        curriculum=curriculum,
    )
    await groups.take(1)
    assert curriculum.metrics()["tasks/passed"] == 1.0

    where = PointSelector(config.tuner.branching, repeat=3)
    where.learn(step)
    voters = PointSelector(config.tuner.branching, repeat=3)
    voters.learn(step[:4])
    assert where.state() == voters.state()

    found = equal_groups(step, SignalHistory())
    assert found is not None
    assert found.share == 1


def test_history_is_compared_between_voters(step, random_model_path):
    silent = replace(step[4], reward=100.0)
    groups = (tuple(step[:2]), (*step[2:4], silent), (replace(step[0], reward=0.0), *step[1:2]))
    numbered = tuple(
        tuple(
            replace(
                one,
                id=replace(one.id, task=task, rollout=number),
                calls=tuple(replace(c, response={}) for c in one.calls),
            )
            for number, one in enumerate(group)
        )
        for task, group in enumerate(groups)
    )
    config = load_config(
        overrides=[
            "mode=train",
            "buffer.batch_size=1",
            f"model.model_path={random_model_path}",
            "tuner.history.sources=[run]",
        ]
    )
    found = comparable(config, History(numbered))
    assert len(found.groups) == 1
    assert found.left_out.rollouts == {"equal_rewards": 4, "excluded_call": 1}
    assert found.left_out.tokens == {"equal_rewards": 8, "excluded_call": 2}
    batch = off_policy_batch(config, found.groups, lambda call: (), step=1)
    assert batch.rewards_R.tolist() == [0.0, 1.0]
