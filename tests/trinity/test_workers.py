"""Which cluster a run uses is always said by the user, or it is the run's own."""

import pytest

from tuner.errors import ConfigError
from tuner.trinity import workers as cluster


@pytest.fixture
def gpus(monkeypatch):
    def there_are(count):
        monkeypatch.setattr(cluster, "_gpus", lambda: count)

    return there_are


def sizes(*, device="auto", **given):
    return cluster.with_sizes({"cluster": given}, device=device)["cluster"]


def test_a_cluster_of_our_own_has_what_the_machine_has(gpus):
    gpus(4)
    assert sizes() == {"node_num": 1, "gpu_per_node": 4}
    assert sizes(gpu_per_node=2) == {"node_num": 1, "gpu_per_node": 2}
    assert sizes(ray_address="local", gpu_per_node=2)["gpu_per_node"] == 2


@pytest.mark.parametrize(
    ("there", "given", "message"),
    [
        (2, {"gpu_per_node": 8}, "cluster.gpu_per_node is 8, but this machine has 2"),
        (0, {}, "needs GPUs, and this machine has none"),
        (8, {"node_num": 3}, "cluster.node_num is 3, but cluster.ray_address is not set"),
    ],
)
def test_what_this_machine_has_not_is_refused_before_ray_starts(gpus, there, given, message):
    gpus(there)
    with pytest.raises(ConfigError, match=message):
        sizes(**given)


def test_on_a_cpu_declared_gpus_are_only_counted(gpus):
    gpus(0)
    assert sizes(device="cpu", gpu_per_node=2)["gpu_per_node"] == 2


def test_a_cluster_by_its_address_is_left_as_it_is_declared(gpus):
    gpus(0)
    tree = {"cluster": {"ray_address": "10.0.0.1:6379", "node_num": 4}}
    assert cluster.with_sizes(tree, device="auto") == tree
    assert not cluster.is_own(tree)


def test_the_environment_is_as_it_was_afterwards(monkeypatch):
    import os

    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    with cluster._environment({"RAY_AUTH_TOKEN": "t"}):
        assert "RAY_ADDRESS" not in os.environ
        os.environ["RAY_AUTH_MODE"] = "token"  # as Ray does
    assert os.environ["RAY_ADDRESS"] == "10.0.0.1:6379"
    assert not {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN"} & set(os.environ)
