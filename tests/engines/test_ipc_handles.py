"""A tensor in a GPU's memory as JSON: nothing is lost, nothing else is understood."""

import json

import pytest
import torch
from torch.storage import TypedStorage

from tuner.engines.vllm.worker import from_plain, to_plain


def arguments(**changes):
    """As `reduce_tensor` gives them for a tensor on a GPU."""
    given = {
        "tensor": torch.Tensor,
        "size": torch.Size([4, 8]),
        "stride": (8, 1),
        "offset": 32,
        "storage class": TypedStorage,
        "dtype": torch.bfloat16,
        "device": 0,
        "storage": bytes(range(64)),
        "storage size": 2**40,
        "storage offset": 512,
        "requires grad": False,
        "counter": b"\x00/torch_1_2_3",
        "counter offset": 7,
        "event": bytes(range(255, 191, -1)),
        "event sync": True,
    }
    return tuple({**given, **changes}.values())


@pytest.mark.parametrize(
    "changes",
    [{}, {"size": torch.Size([]), "stride": (), "dtype": torch.float32, "event sync": False}],
)
def test_what_describes_a_tensor_survives_json(changes):
    handles = {"GPU-1": arguments(**changes), "GPU-2": arguments(device=1)}
    assert from_plain(json.loads(json.dumps(to_plain(handles)))) == handles


def test_a_tensor_of_another_class_is_not_sent():
    with pytest.raises(TypeError, match="Parameter"):
        to_plain({"GPU-1": arguments(tensor=torch.nn.Parameter)})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("dtype", "nn", "dtype is 'nn'"),
        ("dtype", "load", "dtype is 'load'"),
        ("size", [4, "8"], "size is"),
        ("stride", [-1, 1], "stride is"),
        ("offset", 1.5, "offset is 1.5"),
        ("storage", "not base64!", "storage is"),
        ("event", None, "event is None"),
    ],
)
def test_what_describes_no_tensor_is_refused_by_name(field, value, message):
    plain = to_plain({"GPU-1": arguments()})
    plain["GPU-1"][field] = value
    with pytest.raises(ValueError, match=message):
        from_plain(plain)
