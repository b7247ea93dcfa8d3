"""Every way of changing weights that trainers use is noticed."""

import pytest
import torch

from tests.engines.models import make_model
from tuner.engines.transformers.passes import WeightsGuard


def adamw(**options):
    def change(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, **options)
        model(input_ids=torch.tensor([[1, 2, 3]])).logits.square().sum().backward()
        optimizer.step()

    return change


@torch.no_grad()
def add_in_place(model):
    model.lm_head.weight[-1, -1] += 1


def add_behind_autograd(model):
    for parameter in model.parameters():
        parameter.data.add_(1e-3)


def replace_data(model):
    model.model.norm.weight.data = model.model.norm.weight.data.clone()


def replace_parameter(model):
    model.model.norm.weight = torch.nn.Parameter(model.model.norm.weight.detach().clone())


def load(model):
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()})


def load_by_assignment(model):
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)


@pytest.mark.parametrize(
    "change",
    [
        adamw(),
        adamw(foreach=True),
        adamw(foreach=False),
        adamw(fused=True),
        add_in_place,
        add_behind_autograd,
        replace_data,
        replace_parameter,
        load,
        load_by_assignment,
    ],
)
def test_a_change_is_noticed_once(change):
    model = make_model("llama")
    guard = WeightsGuard(model)
    assert not guard.changed()
    change(model)
    assert guard.changed()
    guard.remember()
    assert not guard.changed()


def test_forward_and_backward_change_nothing():
    model = make_model()
    guard = WeightsGuard(model)
    model(input_ids=torch.tensor([[1, 2, 3]])).logits.sum().backward()
    model.zero_grad()
    model.train()
    assert not guard.changed()


def test_weights_that_are_nan_do_not_look_changed_for_ever():
    model = make_model()
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    guard = WeightsGuard(model)
    assert not guard.changed()
