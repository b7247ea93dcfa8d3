"""Which way new weights take to the engine: the fastest that both sides have."""

import pytest

from tuner.errors import ConfigError
from tuner.runs.placement import DeviceShares, choose_weight_path

GIB = 2**30


def sides(engine, **changes):
    given = {
        "adapter": False,
        "backends": frozenset({"ipc", "nccl"}),
        "size": 10 * GIB,
        "shared_memory": 64 * GIB,
    }
    return DeviceShares(engine, **{**given, **changes})


NONE = frozenset()
ONE, OTHERS = "the trainer's gpu", "other gpus"


@pytest.mark.parametrize(
    ("engine", "changes", "kind", "why"),
    [
        (ONE, {}, "cuda_ipc", "nothing is faster"),
        (OTHERS, {}, "nccl", "not cuda_ipc: trainer and engine are on different GPUs"),
        ("cpu", {}, "shared_memory", "not cuda_ipc: there is no GPU, not nccl: there is no GPU"),
        ("elsewhere", {}, "disk", "not shared_memory: tuner.engine.urls names remote servers"),
        (ONE, {"backends": NONE}, "shared_memory", "vLLM has no weight transfer 'ipc'"),
        (OTHERS, {"backends": frozenset({"ipc"})}, "shared_memory", "no weight transfer 'nccl'"),
        (ONE, {"adapter": True}, "shared_memory", "an adapter is trained, which vLLM reads"),
        (OTHERS, {"adapter": True, "size": 1}, "shared_memory", "not nccl: an adapter is trained"),
        ("cpu", {"shared_memory": 29 * GIB}, "disk", "/dev/shm has 29.00 GiB free, and three"),
        ("cpu", {"shared_memory": 30 * GIB}, "shared_memory", "there is no GPU"),
        (ONE, {"shared_memory": 0}, "cuda_ipc", "nothing is faster"),
        (ONE, {"shared_memory": 0, "backends": NONE}, "disk", "not shared_memory: /dev/shm has"),
    ],
)
def test_the_fastest_way_that_both_sides_have_is_taken_and_explained(engine, changes, kind, why):
    path = choose_weight_path("auto", sides(engine, **changes))
    assert path.kind == kind
    assert why in path.why
    assert str(path).startswith(f"weights: {kind}, ")


@pytest.mark.parametrize(
    ("asked", "engine", "changes"),
    [
        ("cuda_ipc", ONE, {}),
        ("nccl", OTHERS, {}),
        ("shared_memory", ONE, {}),
        ("shared_memory", OTHERS, {"adapter": True}),
        ("disk", ONE, {}),
        ("disk", "elsewhere", {"adapter": True}),
        ("disk", "cpu", {"shared_memory": 64 * GIB}),
    ],
)
def test_what_is_asked_for_is_taken_where_it_is_possible(asked, engine, changes):
    path = choose_weight_path(asked, sides(engine, **changes))
    assert (path.kind, path.why) == (asked, "requested")


@pytest.mark.parametrize(
    ("asked", "engine", "changes", "message"),
    [
        ("cuda_ipc", "cpu", {}, "weights is cuda_ipc, but there is no GPU: set it to auto, .*sha"),
        ("cuda_ipc", OTHERS, {}, "different GPUs: set it to auto, which chooses nccl here"),
        ("nccl", "cpu", {}, "weights is nccl, but there is no GPU"),
        ("nccl", ONE, {}, "NCCL needs different ones: .* chooses cuda_ipc here"),
        ("nccl", "elsewhere", {}, "urls names remote servers: .* chooses disk here"),
        ("shared_memory", "elsewhere", {}, "urls names remote servers"),
        ("shared_memory", ONE, {"shared_memory": GIB}, "three times 10.00 GiB are needed"),
        ("cuda_ipc", ONE, {"adapter": True}, "vLLM reads from files"),
        ("nccl", OTHERS, {"backends": NONE}, "has no weight transfer 'nccl'"),
    ],
)
def test_what_cannot_be_is_refused_with_what_would_be(asked, engine, changes, message):
    with pytest.raises(ConfigError, match=message):
        choose_weight_path(asked, sides(engine, **changes))
