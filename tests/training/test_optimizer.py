"""Float32 masters, their state and where it lies, against training in float32."""

import copy
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.training.configured import training
from tests.training.test_trainer import random_batch, tiny_model
from tuner.errors import ConfigError, TrainingError
from tuner.training.batch import build_batch
from tuner.training.optimizer import make_optimizer
from tuner.training.trainer import PolicyTrainer

SETTINGS = {"lr": 1e-6, "betas": (0.9, 0.99), "weight_decay": 0.1}


def weights(dtype, *, seed=0):
    """Three parameters, one of them small; the same numbers in every dtype."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((64, 96), (96,), (300, 64))
    drawn = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
    return [nn.Parameter(values.to(dtype)) for values in drawn]


def gradients(step):
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(p.shape, generator=generator) for p in weights(torch.float32)]


def train(optimizer, parameters, steps):
    for step in steps:
        for parameter, gradient in zip(parameters, gradients(step), strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
        optimizer.zero_grad()


def flat(tensors):
    return torch.cat([tensor.detach().flatten().float() for tensor in tensors])


def test_updates_too_small_for_bfloat16_are_those_of_float32():
    exact, rounded = weights(torch.float32), weights(torch.bfloat16)
    start = flat(exact)
    torch_adam = torch.optim.AdamW(exact, **SETTINGS)
    train(torch_adam, exact, range(30))
    optimizer = make_optimizer(rounded, **SETTINGS)
    train(optimizer, rounded, range(30))
    moved = (flat(exact) - start).norm()
    assert (flat(optimizer.masters) - flat(exact)).norm() < 1e-2 * moved
    assert torch.equal(flat(rounded), flat(exact).bfloat16().float())
    assert (flat(rounded) != start).any()  # so some weight has crossed to its neighbour


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_offloaded_state_gives_the_same_weights_bit_for_bit(dtype):
    found = []
    for offload in (False, True):
        parameters = weights(dtype)
        optimizer = make_optimizer(parameters, **SETTINGS | {"lr": 1e-2}, offload=offload)
        assert (optimizer.masters[0].data_ptr() == parameters[0].data_ptr()) == (
            dtype == torch.float32 and not offload
        )
        train(optimizer, parameters, range(3))
        found.append(flat(parameters))
    assert torch.equal(*found)


def test_frozen_parameters_have_no_state():
    parameters = weights(torch.bfloat16)
    parameters[1].requires_grad_(False)
    optimizer = make_optimizer(parameters, **SETTINGS)
    assert [master.shape for master in optimizer.masters] == [(64, 96), (300, 64)]


@pytest.mark.parametrize("state", ["float32", "8bit"])
@pytest.mark.parametrize(("before", "after"), [(False, False), (True, True), (False, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_optimizer_goes_on_bit_for_bit(tmp_path, dtype, before, after, state):
    if state == "8bit":
        pytest.importorskip("bitsandbytes")
    parameters = weights(dtype)
    optimizer = make_optimizer(parameters, **SETTINGS, state=state, offload=before)
    train(optimizer, parameters, range(3))
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    saved = [nn.Parameter(p.detach().clone()) for p in parameters]
    train(optimizer, parameters, range(3, 6))
    resumed = make_optimizer(saved, **SETTINGS, state=state, offload=after)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    train(resumed, saved, range(3, 6))
    assert torch.equal(flat(resumed.masters), flat(optimizer.masters))
    assert torch.equal(flat(saved), flat(parameters))


def test_settings_of_the_optimizer_outlive_a_state_that_was_saved_with_others():
    parameters = weights(torch.float32)
    state = make_optimizer(parameters, lr=1e-3).state_dict()
    optimizer = make_optimizer(parameters, lr=1e-2, weight_decay=0.5)
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 1e-2
    assert optimizer.param_groups[0]["weight_decay"] == 0.5


def test_the_state_of_other_weights_is_refused():
    state = make_optimizer(weights(torch.bfloat16), **SETTINGS).state_dict()
    others = make_optimizer(weights(torch.bfloat16, seed=1), **SETTINGS)
    with pytest.raises(TrainingError, match="masters do not match the model's weights"):
        others.load_state_dict(state)
    with pytest.raises(TrainingError, match=r"lower precision than torch\.float32"):
        make_optimizer(weights(torch.float32), **SETTINGS).load_state_dict(state)
    with pytest.raises(
        TrainingError, match=r"moments of 8bit, and tuner\.optimizer_state is float32"
    ):
        others.load_state_dict(state | {"moments": "8bit"})
    plain = make_optimizer(weights(torch.float32), **SETTINGS).state_dict()
    with pytest.raises(TrainingError, match=r"no float32 masters for weights of torch\.bfloat16"):
        others.load_state_dict(plain)


@pytest.mark.parametrize("offload", [False, True])
def test_moments_of_8_bits_take_the_way_of_float32(offload):
    pytest.importorskip("bitsandbytes")
    settings = SETTINGS | {"lr": 1e-3}
    exact, small = weights(torch.float32), weights(torch.bfloat16)
    start = flat(exact)
    train(make_optimizer(exact, **settings), exact, range(10))
    optimizer = make_optimizer(small, **settings, state="8bit", offload=offload)
    train(optimizer, small, range(10))
    assert (flat(optimizer.masters) - flat(exact)).norm() < 0.05 * (flat(exact) - start).norm()
    moments = [t for state in optimizer._adam.state.values() for t in state.values()]
    large = [t for t in moments if torch.is_tensor(t) and t.numel() > 4096]
    assert len(large) == 4
    assert all(t.dtype == torch.uint8 for t in large)


@pytest.mark.long
def test_the_library_of_8_bits_prints_nothing_of_its_own():
    pytest.importorskip("bitsandbytes")
    script = (
        "import torch; from tuner.training.optimizer import make_optimizer; "
        "make_optimizer([torch.nn.Parameter(torch.zeros(1))], lr=1e-3, state='8bit')"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout + done.stderr == ""


def test_8_bits_without_the_library_are_refused_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    with pytest.raises(ConfigError, match=r"needs bitsandbytes.*pip install .*\[gpu\]"):
        make_optimizer(weights(torch.float32), lr=1e-3, state="8bit")


def bfloat16_trainer(**settings):
    model = tiny_model().bfloat16()
    return PolicyTrainer(model, training(**{"total_steps": 9, "kl": "none"} | settings))


def whole_gradient(trainer, batch):
    """The gradient that an update hands to the optimizer."""
    taken = []
    parameters = list(trainer.model.parameters())
    trainer.optimizer.step = lambda: taken.append(flat([p.grad for p in parameters]))
    trainer.ppo_update(trainer.compute_advantages(batch))
    return taken[0]


def test_micro_batches_of_a_bfloat16_model_add_up_in_float32(monkeypatch):
    batch = build_batch(random_batch(0))
    settings = {"grad_clip": 1e9, "max_tokens_per_micro_batch": 1}
    found = whole_gradient(bfloat16_trainer(**settings), batch)
    wanted = torch.zeros_like(found, dtype=torch.float64)
    trainer = bfloat16_trainer(**settings)
    parameters = list(trainer.model.parameters())
    backward = torch.Tensor.backward

    def one_by_one(loss):
        backward(loss)
        for parameter, place in zip(parameters, wanted.split(sizes), strict=True):
            place += parameter.grad.flatten().double()
            parameter.grad = None

    sizes = [parameter.numel() for parameter in parameters]
    monkeypatch.setattr(torch.Tensor, "backward", one_by_one)
    monkeypatch.setattr(trainer.optimizer, "clip_grad_norm", lambda limit: torch.zeros(()))
    trainer.optimizer.step = lambda: None
    trainer.ppo_update(trainer.compute_advantages(batch))
    assert (found - wanted).norm() < 1e-6 * wanted.norm()
    monkeypatch.undo()

    rounding = bfloat16_trainer(**settings)
    for parameter in rounding.model.parameters():
        parameter.grad_dtype = torch.bfloat16
    lost = whole_gradient(rounding, batch)
    assert (lost - wanted).norm() > 1e-3 * wanted.norm()


def test_a_bfloat16_trainer_goes_where_the_float32_trainer_goes():
    start = tiny_model().bfloat16().float()
    trainers = [
        PolicyTrainer(copy.deepcopy(start).to(dtype), training(total_steps=9, lr=1e-5))
        for dtype in (torch.float32, torch.bfloat16)
    ]
    for step in range(3):
        batch = build_batch(random_batch(step))
        for trainer in trainers:
            metrics = trainer.ppo_update(
                trainer.compute_ref_logp(trainer.compute_advantages(batch))
            )
            assert metrics["grad_norm"] > 0
    exact, rounded = (
        flat(trainer.optimizer.masters) - flat(start.parameters()) for trainer in trainers
    )
    assert torch.cosine_similarity(exact, rounded, dim=0) > 0.98
    assert float(rounded.norm()) == pytest.approx(float(exact.norm()), rel=0.02)


def test_a_saved_bfloat16_trainer_goes_on_bit_for_bit(tmp_path):
    straight = bfloat16_trainer(lr=1e-5)
    batches = [build_batch(random_batch(seed)) for seed in range(2)]
    for batch in batches[:1]:
        straight.ppo_update(straight.compute_advantages(batch))
    straight.save(tmp_path / "state.pt")
    resumed = PolicyTrainer(copy.deepcopy(straight.model), straight.config)
    resumed.load(tmp_path / "state.pt")
    for batch in batches[1:]:
        for trainer in (straight, resumed):
            trainer.ppo_update(trainer.compute_advantages(batch))
    assert torch.equal(flat(straight.optimizer.masters), flat(resumed.optimizer.masters))
    assert torch.equal(flat(straight.model.parameters()), flat(resumed.model.parameters()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e38])
def test_a_step_that_makes_a_weight_that_is_not_finite_raises(dtype, offload, place, value):
    parameters = weights(dtype)
    optimizer = make_optimizer(parameters, **SETTINGS, offload=offload)
    for parameter, gradient in zip(parameters, gradients(0), strict=True):
        parameter.grad = gradient
    optimizer.step_if_finite("step 1: loss", 0.5, 1.0, setting="s.lr")  # a usual one does not
    for parameter, gradient in zip(parameters, gradients(1), strict=True):
        parameter.grad = gradient
    with torch.no_grad():
        if value == 1e38:  # a learning rate that the schema refuses
            optimizer.param_groups[0]["lr"] = value
        else:
            optimizer.masters[place].flatten()[-1] = value
    with pytest.raises(TrainingError, match=r"step 2: loss 0\.5 .* not finite.* lower s\.lr"):
        optimizer.step_if_finite("step 2: loss", 0.5, 1.0, setting="s.lr")
    assert not optimizer.finite()


@pytest.mark.parametrize("of", ["policy", "critic"])
def test_weights_that_are_not_finite_are_never_saved(of, tmp_path):
    trainer = PolicyTrainer(tiny_model(), training(total_steps=2, kl="none", advantage="ppo"))
    trainer.save(tmp_path / "state.pt")
    model = trainer.model if of == "policy" else trainer.critic.model
    with torch.no_grad():
        list(model.parameters())[-1].flatten()[-1] = float("nan")
    with pytest.raises(TrainingError, match="not finite"):
        trainer.save(tmp_path / "spoiled.pt")
    assert not (tmp_path / "spoiled.pt").exists()


@pytest.mark.parametrize(
    ("spoiled", "named"),
    [
        ("algorithm.kl_loss_fn_args.kl_coef", r"step 1: loss (inf|nan) .*kl_coef"),
        ("algorithm.optimizer.lr", r"step 1: loss .* lower algorithm\.optimizer\.lr"),
        ("tuner.critic.lr", r"step 1: the critic's loss .* lower tuner\.critic\.lr"),
    ],
)
def test_the_setting_that_spoils_a_step_is_named(spoiled, named):
    critic = {"advantage": "ppo"} if "critic" in spoiled else {}
    settings = training(total_steps=1, kl="k2" if "kl" in spoiled else "none", **critic)
    trainer = PolicyTrainer(tiny_model(), settings)
    batch = build_batch(random_batch(0))
    scored = trainer.compute_ref_logp(trainer.compute_advantages(batch))
    if "kl" in spoiled:
        scored = replace(scored, ref_logp=tuple(one + float("inf") for one in scored.ref_logp))
    else:
        optimizer = trainer.critic.optimizer if "critic" in spoiled else trainer.optimizer
        optimizer.param_groups[0]["lr"] = 1e38
    with pytest.raises(TrainingError, match=named):
        trainer.ppo_update(scored)
