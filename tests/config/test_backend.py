"""Which backend a configuration asks for, and what is said where it is not there."""

import pytest

from tuner import WorkflowOutput, tune
from tuner.config import load
from tuner.config.load import read_layers
from tuner.config.source import read_yaml
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


@pytest.mark.parametrize(
    ("overrides", "section"),
    [
        ([], "explorer_input.taskset"),
        (["algorithm.algorithm_type=sft"], "trainer_input.experience_buffer"),
        (["algorithm.algorithm_type=dpo", "mode=both"], "trainer_input.experience_buffer"),
        (["tuner.backend=trinity"], "explorer_input.taskset"),
        (["tuner.backend=trinity", "algorithm.algorithm_type=cpt"],
         "trainer_input.experience_buffer"),
        (["tuner.backend=trinity", "mode=train"], "trainer_input.experience_buffer"),
    ],
)  # fmt: skip
def test_where_training_data_belongs_depends_on_the_algorithm(overrides, section):
    tree = read_layers(None, None, overrides, train={"path": "org/rows", "split": "a"}).tree
    first, second = section.split(".")
    assert tree["buffer"] == {first: {second: {"path": "org/rows", "split": "a"}}}


def test_the_file_is_read_once_whatever_was_given(monkeypatch, tmp_path):
    read = []
    monkeypatch.setattr(load, "read_yaml", lambda path: read.append(path) or read_yaml(path))
    file = tmp_path / "c.yaml"
    file.write_text("buffer: {batch_size: 1}\nmodel: {model_path: org/name}\n")
    run = prepare(workflow, None, [{"a": 1}], eval_dataset=[{"a": 2}], config_path=file)
    assert (run.train_tasks, run.eval_tasks) == ([{"a": 1}], {"eval": [{"a": 2}]})
    assert read == [file]
