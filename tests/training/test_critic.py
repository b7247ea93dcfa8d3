"""PPO with a critic: values on the tree, what they are trained towards, and that they learn."""

from __future__ import annotations

import copy
import random
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.engines.models import make_model
from tests.kit.builders import call, trace
from tests.kit.examples import grid
from tests.training.configured import changed, training
from tests.training.exact import all_float64
from tests.training.test_trainer import VOCABULARY, random_batch, tiny_model
from tests.training.test_turn_discount import agent, short
from tuner.config.algorithms import KLPenalty, PPOAdvantage
from tuner.errors import TrainingError
from tuner.runs.metrics import has_signal
from tuner.training.batch import Selection, build_batch
from tuner.training.trainer import Critic, PolicyTrainer

ALONE = Selection(needs_group=False, lone_rewards=True)
PPO = training(total_steps=10, advantage="ppo", kl="none", grad_clip=1e9)


def with_head(critic: Critic, seed: int = 0) -> Critic:
    """A head that is not 0, so that the layers have a gradient from the first update on."""
    torch.manual_seed(seed)
    nn.init.normal_(critic.model["head"].weight, std=0.3)
    nn.init.constant_(critic.model["head"].bias, 0.2)
    return critic


def agents(seed: int):
    """Rollouts whose calls go on from each other, branch and stand alone."""
    dice = random.Random(seed)
    return [
        *(agent(i, dice.random(), own=dice.random()) for i in range(2)),
        short(3, dice.random()),
        *(replace(t, id=replace(t.id, task=t.id.task + 1)) for t in random_batch(seed)[:2]),
    ]


# Values ---------------------------------------------------------------------------------------


def gradient_of(critic: Critic, batch) -> torch.Tensor:
    """What `update` hands to the optimizer, of a loss that some tokens are clipped in."""
    found = []
    critic.optimizer.step = lambda: found.append(
        torch.cat([p.grad.flatten().double() for p in critic.model.parameters()])
    )
    values = critic.values(batch)
    generator = torch.Generator().manual_seed(1)
    old = [v + 0.4 * torch.randn(v.shape, generator=generator).to(v) for v in values]
    returns = [v + torch.randn(v.shape, generator=generator).to(v) for v in values]
    metrics = critic.update(batch, old, returns)
    assert 0 < metrics["value_clip_fraction"] < 1
    return found[0]


@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
@grid("dtype, tolerance", [(torch.float64, 1e-10), (torch.float32, 1e-5)], quick=1)
def test_tree_and_cuts_do_not_change_the_critics_gradient(kind, dtype, tolerance):
    batch = build_batch(agents(0), selection=ALONE)
    wanted = wanted_values = None
    for layout, tokens in (("padded", 1), ("tree", 10_000), ("tree", 20), ("packed", 40)):
        model = make_model(kind)
        model = all_float64(model) if dtype == torch.float64 else model
        settings = changed(PPO, layout=layout, max_tokens_per_micro_batch=tokens)
        critic = with_head(Critic(model, settings))
        values = torch.cat(critic.values(batch))
        gradient = gradient_of(critic, batch)
        if wanted is None:
            wanted, wanted_values = gradient, values
        assert (values - wanted_values).abs().max() < 10 * tolerance
        assert (gradient - wanted).norm() < tolerance * wanted.norm()
    assert wanted.norm() > 0


def test_a_value_is_read_before_its_token():
    model = tiny_model()
    critic = with_head(Critic(copy.deepcopy(model), PPO))
    batch = build_batch(
        [trace(0, 0, [call("a", [1, 2], [3, 4], [-1, -1])], reward=1)], selection=ALONE
    )
    with torch.no_grad():
        hidden = model.model(torch.tensor([[1, 2, 3, 4]])).last_hidden_state[0]
        expected = critic.model["head"](hidden[1:3])[:, 0]
    assert critic.values(batch)[0].tolist() == pytest.approx(expected.tolist(), abs=1e-6)


def test_the_critics_loss_and_gradient_follow_the_formula():
    """mean_t max((V-R)^2, (clip(V)-R)^2) / 2, of rows computed one by one."""
    batch = build_batch(agents(1), selection=ALONE)
    settings = changed(PPO, critic_clip=0.1)
    critic = with_head(Critic(tiny_model().double(), settings))
    exact = copy.deepcopy(critic.model)
    generator = torch.Generator().manual_seed(0)
    old = [v + 0.2 * torch.randn(v.shape, generator=generator) for v in critic.values(batch)]
    returns = [torch.randn(v.shape, generator=generator).double() for v in old]
    total = 0.0
    for row, before, aim in zip(batch.rows, old, returns, strict=True):
        ids = torch.tensor([row.prompt_ids + row.completion_ids])
        states = exact["layers"](ids).last_hidden_state[0, len(row.prompt_ids) - 1 : -1]
        values = exact["head"](states)[:, 0]
        near = before + (values - before).clamp(-0.1, 0.1)
        total = total + torch.maximum((values - aim) ** 2, (near - aim) ** 2).sum() / 2
    total = total / batch.trained_tokens
    total.backward()
    wanted = torch.cat([p.grad.flatten() for p in exact.parameters()])
    found = []
    critic.optimizer.step = lambda: found.append(
        torch.cat([p.grad.flatten() for p in critic.model.parameters()])
    )
    metrics = critic.update(batch, old, returns)
    assert metrics["value_loss"] == pytest.approx(float(total.detach()), rel=1e-6)
    assert metrics["critic_grad_norm"] == pytest.approx(float(wanted.norm()), rel=1e-6)
    assert (found[0] - wanted).norm() < 1e-6 * wanted.norm()


# Advantages -----------------------------------------------------------------------------------


def test_advantages_go_on_through_the_calls_of_a_rollout():
    """The tree of `agent`, token by token; every leaf gains the reward, calls their own too."""
    batch = build_batch([agent(0, 1.0, own=0.25), short(1, 0.5)], selection=ALONE)
    settings = changed(PPO, advantage_args=PPOAdvantage(gamma=0.9, lam=0.8))
    trainer = PolicyTrainer(tiny_model().double(), settings)
    with_head(trainer.critic)
    scored = trainer.compute_advantages(batch)
    v = {
        row.call_id: values.tolist()
        for row, values in zip(batch.rows, trainer.compute_values(batch), strict=True)
    }
    gl = 0.9 * 0.8
    raw = {"0d": [1.0 - v["0d"][0]], "0c": [1.0 - v["0c"][0]], "1a": [0.5 - v["1a"][0]]}
    raw["0b"] = [0.9 * v["0d"][0] - v["0b"][0] + gl * raw["0d"][0]]
    last = 1.0 - v["0e"][1]
    raw["0e"] = [0.9 * v["0e"][1] - v["0e"][0] + gl * last, last]
    behind = (v["0b"][0] + v["0c"][0]) / 2, (raw["0b"][0] + raw["0c"][0]) / 2
    last = 0.25 + 0.9 * behind[0] - v["0a"][1] + gl * behind[1]
    raw["0a"] = [0.9 * v["0a"][1] - v["0a"][0] + gl * last, last]
    everything = torch.tensor([a for row in batch.rows for a in raw[row.call_id]]).double()
    expected = (everything - everything.mean()) / (everything.var() + 1e-8).sqrt()
    got = torch.cat(scored.advantages)
    assert torch.allclose(got, expected, rtol=1e-6)
    returns = {row.call_id: r.tolist() for row, r in zip(batch.rows, scored.returns, strict=True)}
    for name, values in returns.items():
        wanted = [a + value for a, value in zip(raw[name], v[name], strict=True)]
        assert values == pytest.approx(wanted)


def test_order_of_arrival_does_not_change_the_update():
    traces = agents(2)
    dice = random.Random(0)
    found = []
    for mixed in (
        traces,
        [
            replace(t, calls=tuple(dice.sample(t.calls, len(t.calls))))
            for t in dice.sample(traces, len(traces))
        ],
    ):
        trainer = PolicyTrainer(tiny_model().double(), PPO)
        with_head(trainer.critic)
        trainer.ppo_update(trainer.compute_advantages(build_batch(mixed, selection=ALONE)))
        parameters = [*trainer.model.parameters(), *trainer.critic.model.parameters()]
        found.append(torch.cat([p.detach().flatten() for p in parameters]))
    assert (found[0] - found[1]).norm() < 1e-10 * found[0].norm()


def test_every_token_pays_for_its_own_distance_to_the_reference():
    batch = build_batch(
        [trace(0, 0, [call("a", [1], [2, 3], [-1, -2])], reward=1.0)], selection=ALONE
    )
    settings = changed(PPO, kl_penalty="k1", kl_penalty_args=KLPenalty(kl_coef=0.5))
    trainer = PolicyTrainer(tiny_model(), settings, reference=tiny_model(seed=1))
    ref = trainer.compute_logp(batch, model=trainer.reference)[0].tolist()
    paid = [0.5 * (-1 - ref[0]), 0.5 * (-2 - ref[1])]
    returns = trainer.compute_advantages(batch).returns[0].tolist()
    assert returns == pytest.approx([1 - paid[0] - paid[1], 1 - paid[1]], rel=1e-5)


# Groups of one --------------------------------------------------------------------------------


@pytest.mark.parametrize("advantage", ["ppo", "reinforceplusplus", "reinforce"])
def test_a_group_of_one_is_trained_where_nothing_is_compared_inside_it(advantage):
    traces = [
        trace(task, 0, [call(str(task), [task], [3, 4], [-1, -1])], reward=task) for task in (0, 1)
    ]
    batch = build_batch(traces, selection=ALONE)
    assert batch.trained_tokens == 4
    assert has_signal(batch, advantage)
    trainer = PolicyTrainer(tiny_model(), changed(PPO, advantage=advantage))
    before = copy.deepcopy(trainer.model.state_dict())
    trainer.ppo_update(trainer.compute_advantages(batch))
    assert not all(torch.equal(before[k], v) for k, v in trainer.model.state_dict().items())
    assert build_batch(traces).dropped_tokens == {"group_of_one": 4}


def test_one_rollout_a_step_is_something_to_learn_from_for_a_critic():
    batch = build_batch([short(0, 1.0)], selection=ALONE)
    assert has_signal(batch, "ppo")
    assert not has_signal(batch, "reinforceplusplus")
    assert not has_signal(build_batch([short(0, 1.0), short(1, 1.0)], selection=ALONE), "ppo")


# The update -----------------------------------------------------------------------------------


def test_while_the_critic_warms_up_the_policy_stays():
    settings = changed(PPO, critic_lr=1e-3, critic_warmup=2, lr=1e-2)
    trainer = PolicyTrainer(tiny_model(), settings)
    start = copy.deepcopy(trainer.model.state_dict())
    for step in range(3):
        value = trainer.critic.model["head"].weight.detach().clone()
        metrics = trainer.ppo_update(
            trainer.compute_advantages(build_batch(agents(step), selection=ALONE))
        )
        assert trainer.step == step + 1
        assert not torch.equal(value, trainer.critic.model["head"].weight)
        same = all(torch.equal(start[k], v) for k, v in trainer.model.state_dict().items())
        assert same == (step < 2)
        assert ("policy_loss" in metrics) == (step == 2)


def test_several_updates_of_a_step_keep_its_values_and_returns():
    batch = build_batch(agents(3), selection=ALONE)
    twice = PolicyTrainer(tiny_model(), changed(PPO, updates=2, critic_lr=1e-2))
    scored = twice.compute_advantages(batch)
    twice.ppo_update(scored)
    by_hand = Critic(tiny_model(), changed(PPO, critic_lr=1e-2))
    for _ in range(2):
        by_hand.update(batch, scored.values, scored.returns)
    pairs = zip(twice.critic.model.parameters(), by_hand.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_saved_critic_goes_on_bit_for_bit(tmp_path):
    settings = changed(PPO, lr=1e-2, critic_lr=1e-2)
    straight, resumed = PolicyTrainer(tiny_model(), settings), None
    for step in range(4):
        batch = build_batch(agents(step), selection=ALONE)
        if step == 2:
            straight.save(tmp_path / "state.pt")
            resumed = PolicyTrainer(
                copy.deepcopy(straight.model), settings, critic=tiny_model(seed=5)
            )
            resumed.load(tmp_path / "state.pt")
        for trainer in filter(None, (straight, resumed)):
            trainer.ppo_update(trainer.compute_advantages(batch))
    for one, other in (
        (straight.model, resumed.model),
        (straight.critic.model, resumed.critic.model),
    ):
        pairs = zip(one.parameters(), other.parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


def test_a_trainer_without_a_critic_is_not_taken_up_with_one(tmp_path):
    PolicyTrainer(tiny_model(), changed(PPO, advantage="rloo")).save(tmp_path / "state.pt")
    with pytest.raises(TrainingError, match="has no critic"):
        PolicyTrainer(tiny_model(), PPO).load(tmp_path / "state.pt")


def test_infinite_value_raises_and_leaves_the_critic_alone():
    trainer = PolicyTrainer(tiny_model(), PPO)
    batch = build_batch(agents(0), selection=ALONE)
    scored = trainer.compute_advantages(batch)
    before = copy.deepcopy(trainer.critic.model.state_dict())
    endless = tuple(torch.full_like(r, float("inf")) for r in scored.returns)
    with pytest.raises(TrainingError, match=r"not finite; lower tuner\.critic\.lr"):
        trainer.ppo_update(replace(scored, returns=endless))
    assert all(torch.equal(before[k], v) for k, v in trainer.critic.model.state_dict().items())


def test_only_ppo_has_values():
    trainer = PolicyTrainer(tiny_model(), changed(PPO, advantage="rloo"))
    assert trainer.critic is None
    with pytest.raises(TrainingError, match="has no critic"):
        trainer.compute_values(build_batch(agents(0), selection=ALONE))


def test_the_critic_learns_what_states_are_worth():
    """Three prompts with rewards of 1, 0 and -1, whatever the answer."""
    settings = changed(PPO, critic_lr=1e-2)
    trainer = PolicyTrainer(tiny_model(), settings)
    dice = random.Random(0)
    history = []
    for step in range(15):
        traces = []
        for task, reward in enumerate((1.0, 0.0, -1.0)):
            for number in range(2):
                answer = [dice.randrange(VOCABULARY) for _ in range(2)]
                one = call(f"{task}-{number}", [task, 7], answer, [-1.0] * 2)
                traces.append(trace(task, number, [one], reward=reward, step=step))
        batch = build_batch(traces, selection=ALONE)
        scored = trainer.compute_advantages(batch)
        history.append(trainer.critic.update(batch, scored.values, scored.returns))
    assert history[0]["explained_variance"] == 0  # the head starts at 0
    assert history[0]["value_loss"] == pytest.approx(1 / 3, rel=1e-6)  # mean of (1, 0, 1) / 2
    assert history[-1]["explained_variance"] > 0.9
    assert history[-1]["value_loss"] < 0.05 * history[0]["value_loss"]
    assert history[-1]["return_mean"] == pytest.approx(0, abs=1e-6)
    assert all(row["critic_grad_norm"] > 0 for row in history)
