"""Which backend a configuration asks for, and what is said where it is not there."""

import pytest

from tuner import WorkflowOutput, tune
from tuner.config.load import read_layers
from tuner.errors import ConfigError, MissingDependencyError
from tuner.tune import prepare


async def workflow(task, model):
    return WorkflowOutput(reward=1.0)


@pytest.mark.parametrize(
    ("overrides", "backend"),
    [
        ([], "local"),
        (["cluster.node_num=1", "cluster.gpu_per_node=1"], "local"),
        (["cluster.node_num=1", "cluster.gpu_per_node=8"], "trinity"),
        (["cluster.node_num=2"], "trinity"),
        (["tuner.backend=trinity"], "trinity"),
        (["tuner.backend=local", "cluster.gpu_per_node=8"], "local"),
        (["tuner.backend=nowhere"], "local"),  # whose reader refuses it
    ],
)
def test_more_than_one_gpu_or_node_is_for_a_cluster(overrides, backend):
    assert read_layers(None, None, overrides).backend == backend


def test_a_file_for_both_backends_may_have_steps_of_the_trainer(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("buffer: {total_steps: 2}\ntrainer: {total_steps: 4}\n")
    assert read_layers(file).backend == "local"


def test_without_trinity_the_extra_is_named_before_anything_runs():
    pytest.importorskip("tuner.trinity.installed")
    try:
        import trinity  # noqa: F401  # whether it can be
    except ImportError:
        with pytest.raises(MissingDependencyError, match=r"pip install .*\[trinity\]"):
            tune(workflow, None, [{"a": 1}], backend="trinity")


def test_prepare_says_that_it_is_for_the_local_backend():
    with pytest.raises(ConfigError, match=r"set tuner.backend to local, or use `tuner check`"):
        prepare(workflow, None, [{"a": 1}], backend="trinity")
