"""`algorithm.*`: defaults from the table, and settings that the algorithm has no use for."""

from __future__ import annotations

import pytest

from tests.training.configured import training
from tuner.config import load_config
from tuner.config.algorithms import ALGORITHMS, NOT_HERE, GSPOLoss, PPOAdvantage
from tuner.errors import ConfigError
from tuner.runs.stack import for_trainer, selection
from tuner.training.batch import Overlong

# Without which an algorithm cannot be loaded.
NEEDED = {
    "on_policy_distill": "explorer.auxiliary_models=[{name: teacher, model_path: org/teacher}]",
    "prompt_distill": "tuner.algorithm.prompt=Be brief.",
}


def load(*overrides):
    chosen = (f"algorithm.algorithm_type={name}" in overrides for name in NEEDED)
    needed = [one for one, is_chosen in zip(NEEDED.values(), chosen, strict=True) if is_chosen]
    return load_config(overrides=[*needed, *overrides])


def settings(*overrides):
    return for_trainer(load(*overrides), 10, 16384)


def refusal(*overrides):
    with pytest.raises(ConfigError) as error:
        load(*overrides)
    return str(error.value)


def test_nothing_set_is_the_trainers_own_defaults():
    default = training(total_steps=10, max_tokens_per_micro_batch=16384, layout="auto")
    found = settings()
    assert found.model_dump(exclude={"name"}) == default.model_dump(exclude={"name"})


@pytest.mark.parametrize("name", ALGORITHMS)
def test_each_algorithm_starts_from_its_row(name):
    row, algorithm = ALGORITHMS[name], load(f"algorithm.algorithm_type={name}").algorithm
    for key in ("advantage_fn", "policy_loss_fn", "kl_loss_fn", "entropy_loss_fn", "loss_agg_mode"):
        assert getattr(algorithm, key) == getattr(row, key)
    for key, value in row.policy_loss_args.items():
        assert getattr(algorithm.policy_loss_fn_args, key) == value


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_effective_configuration_is_read_back_unchanged(name, tmp_path):
    config = load(f"algorithm.algorithm_type={name}", "name=x")
    path = tmp_path / "config.yaml"
    path.write_text(config.to_yaml())
    assert load_config(path).algorithm == config.algorithm


def test_null_is_the_algorithms_default():
    config = load("algorithm.algorithm_type=gspo", "algorithm.loss_agg_mode=null")
    assert config.algorithm.loss_agg_mode == "seq-mean-token-mean"
    assert (
        settings("algorithm.policy_loss_fn_args.clip_range=null").algorithm.policy_loss.low == 0.2
    )


def test_what_was_set_wins_over_the_row():
    got = settings(
        "algorithm.algorithm_type=dapo",
        "algorithm.policy_loss_fn_args.clip_range_high=0.4",
        "algorithm.kl_loss_fn=k3",
        "algorithm.kl_loss_fn_args.kl_coef=0.5",
        "algorithm.loss_agg_mode=rollout-mean",
    )
    assert (got.algorithm.policy_loss.low, got.algorithm.policy_loss.high) == (0.2, 0.4)
    assert (got.algorithm.kl_loss_fn, got.algorithm.kl_loss.kl_coef) == ("k3", 0.5)
    assert got.algorithm.loss_agg_mode == "rollout-mean"


@pytest.mark.parametrize("name", ["multi_step_grpo", "dapo", "gspo"])
def test_a_clip_range_that_was_set_stands_for_both_sides(name):
    clip = "algorithm.policy_loss_fn_args.clip_range=0.1"
    got = settings(f"algorithm.algorithm_type={name}", clip)
    assert (got.algorithm.policy_loss.low, got.algorithm.policy_loss.high) == (0.1, 0.1)


def test_an_exchanged_part_comes_with_its_own_numbers():
    got = settings("algorithm.algorithm_type=dapo", "algorithm.policy_loss_fn=gspo")
    assert (got.algorithm.policy_loss_fn, got.algorithm.policy_loss) == ("gspo", GSPOLoss())


@pytest.mark.parametrize("name", NOT_HERE)
def test_algorithms_of_trinity_that_are_not_here_are_refused_with_the_reason(name):
    message = refusal(f"algorithm.algorithm_type={name}")
    assert f"algorithm.algorithm_type is '{name}': not on this backend: {NOT_HERE[name]}" in message


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (
            "algorithm.algorithm_type=gigpo tuner.algorithm.turn_discount=0.9",
            "set algorithm.advantage_fn_args.gamma instead",
        ),
        (
            "algorithm.algorithm_type=gigpo tuner.branching={}",
            "which needs independent rollouts: set algorithm.algorithm_type to tree",
        ),
        (
            "algorithm.advantage_fn_args.omega=2",
            "set algorithm.advantage_fn to gigpo",
        ),
        ("algorithm.policy_loss_fn_args.tau_pos=1.5", "set algorithm.policy_loss_fn to sapo"),
        (
            "algorithm.algorithm_type=gspo algorithm.policy_loss_fn_args.clip_ratio_c=3",
            "algorithm.policy_loss_fn is gspo (of algorithm.algorithm_type gspo), which does not "
            "use it",
        ),
        (
            "algorithm.advantage_fn=rloo algorithm.advantage_fn_args.epsilon=1e-6",
            "set algorithm.advantage_fn to step_wise_grpo or grpo",
        ),
        ("algorithm.kl_penalty_fn_args.kl_coef=0.1", "algorithm.kl_penalty_fn is none"),
        ("algorithm.kl_loss_fn=none algorithm.kl_loss_fn_args.kl_coef=1", "does not use it"),
        (
            "algorithm.algorithm_type=raft algorithm.entropy_loss_fn_args.entropy_coef=0.1",
            "set algorithm.entropy_loss_fn to default",
        ),
        ("algorithm.policy_loss_fn=sft", "are incompatible"),
        ("algorithm.algorithm_type=raft algorithm.kl_penalty_fn=k1", "set algorithm.kl_loss_fn"),
        (
            "algorithm.algorithm_type=sapo algorithm.policy_loss_fn_args.tau_neg=0.5",
            "below tau_pos",
        ),
        ("algorithm.policy_loss_fn_args.clip_range_low=1", "nothing would be clipped"),
        ("algorithm.algorithm_type=topr tuner.algorithm.importance_cap=3", "remove it"),
        ("algorithm.algorithm_type=opmd tuner.algorithm.proximal=recompute", "remove it"),
        ("tuner.algorithm.success_rate_ub=0.2 tuner.algorithm.success_rate_lb=0.8", "skipped"),
        ("tuner.algorithm.rejection_low=0.5", "set both or neither"),
        ("tuner.algorithm.overlong_buffer=20", "set model.max_response_tokens"),
        (
            "model.max_response_tokens=10 tuner.algorithm.overlong_buffer=20",
            "maximum answer length is 10 tokens",
        ),
        ("tuner.algorithm.overlong_penalty=2", "set tuner.algorithm.overlong_buffer"),
        (
            "tuner.algorithm.importance_sampling=none tuner.algorithm.importance_cap=3",
            "tuner.algorithm.importance_sampling is none",
        ),
        ("algorithm.loss_agg_mode=seq-mean-token-sum-norm", "set model.max_response_tokens"),
        ("algorithm.repeat_times=1", "set it to 2 or more, or algorithm.algorithm_type to ppo"),
        (
            "algorithm.algorithm_type=ppo algorithm.repeat_times=1 "
            "tuner.algorithm.dynamic_sampling=true",
            "every group would be skipped",
        ),
        (
            "algorithm.algorithm_type=ppo algorithm.advantage_fn_args.std_threshold=0.1",
            "set algorithm.advantage_fn to step_wise_grpo or grpo",
        ),
        ("algorithm.advantage_fn_args.lam=0.9", "set algorithm.advantage_fn to ppo"),
        (
            "algorithm.algorithm_type=ppo tuner.algorithm.turn_discount=0.9",
            "algorithm.advantage_fn ppo does not credit calls with later rewards: set "
            "algorithm.advantage_fn_args.gamma",
        ),
        (
            "algorithm.algorithm_type=reinforceplusplus tuner.algorithm.turn_discount=0.9",
            "set algorithm.advantage_fn_args.gamma",
        ),
        ("algorithm.algorithm_type=raft tuner.algorithm.turn_discount=0.9", "remove it"),
        ("tuner.algorithm.turn_discount=0", "must be greater than 0"),
        ("tuner.critic.lr=1e-4", "algorithm.advantage_fn step_wise_grpo has no critic"),
        ("tuner.critic.cliprange_value=0.2", "or set algorithm.algorithm_type to ppo"),
        ("trainer.critic_warmup=2", "has no critic: remove it"),
        ("algorithm.algorithm_type=rloo model.critic_model_path=x/y", "rloo has no critic"),
        ("algorithm.advantage_fn_args.rank_penalty=0.1", "not in this version"),
        ("algorithm.rollout_correction.rollout_is=token", "tuner.algorithm.importance_sampling"),
    ],
)
def test_settings_that_would_have_no_use_or_no_sense_are_refused_by_name(overrides, text):
    message = refusal(*overrides.split())
    assert text in message
    assert overrides.split()[-1].partition("=")[0] in message or "are incompatible" in message


def test_our_own_settings_reach_the_trainer():
    got = settings(
        "tuner.algorithm.updates=3",
        "tuner.algorithm.proximal=loglinear",
        "tuner.algorithm.importance_sampling=none",
        "tuner.algorithm.rejection_low=0.5",
        "tuner.algorithm.rejection_high=2",
    )
    assert (got.tuner.algorithm.updates, got.tuner.algorithm.proximal, got.tuner.algorithm.cap) == (
        3,
        "loglinear",
        None,
    )
    assert got.tuner.algorithm.rejection == (0.5, 2.0)
    chosen = selection(
        load(
            "tuner.algorithm.reward_scale=2",
            "tuner.algorithm.reward_bias=-0.5",
            "tuner.algorithm.overlong_buffer=4",
            "model.max_response_tokens=10",
            "tuner.algorithm.success_rate_lb=0.1",
            "tuner.algorithm.dynamic_sampling=true",
        )
    )
    assert (chosen.scale, chosen.bias, chosen.success_rate) == (2.0, -0.5, (0.1, 1.0))
    assert chosen.overlong == Overlong(10, 4, 1.0)
    assert chosen.varied_only


def test_the_critics_settings_reach_it():
    got = settings(
        "algorithm.algorithm_type=ppo",
        "algorithm.advantage_fn_args.gamma=0.99",
        "algorithm.advantage_fn_args.lam=0.95",
        "trainer.critic_warmup=4",
        "tuner.critic.lr=1e-4",
        "tuner.critic.betas=[0.8,0.9]",
        "tuner.critic.weight_decay=0",
        "tuner.critic.cliprange_value=0.2",
    )
    assert got.algorithm.uses_critic
    assert got.algorithm.advantage == PPOAdvantage(gamma=0.99, lam=0.95)
    assert got.trainer.critic_warmup == 4
    assert not settings().algorithm.uses_critic
    assert settings("algorithm.algorithm_type=ppo").algorithm.advantage == PPOAdvantage()


@pytest.mark.parametrize("name", [name for name, row in ALGORITHMS.items() if not row.recorded])
def test_groups_of_one_are_for_advantages_that_compare_nothing_inside_a_group(name):
    alone = name in ("ppo", "reinforceplusplus", "topr", *NEEDED)
    key = f"algorithm.algorithm_type={name}"
    chosen = selection(load(key))
    assert (chosen.needs_group, chosen.lone_rewards) == (not alone, alone or name == "gigpo")
    if alone:
        assert load(key, "algorithm.repeat_times=1").algorithm.repeat_times == 1
    else:
        assert "algorithm.repeat_times is 1" in refusal(key, "algorithm.repeat_times=1")


def test_turn_discount_reaches_the_trainer_and_needs_no_others_rewards():
    assert settings("tuner.algorithm.turn_discount=0.9").tuner.algorithm.turn_discount == 0.9
    chosen = selection(load("tuner.algorithm.turn_discount=0.9"))
    assert (chosen.needs_group, chosen.lone_rewards) == (True, True)


def test_dapo_samples_dynamically_unless_told_not_to():
    dapo = "algorithm.algorithm_type=dapo"
    assert selection(load(dapo)).varied_only
    assert not selection(load(dapo, "tuner.algorithm.dynamic_sampling=false")).varied_only
    assert selection(load("algorithm.algorithm_type=raft")).best_only
