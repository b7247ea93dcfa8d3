"""A run's `config.yaml` is the user's configuration again, for Trinity-RFT and for us."""

import pytest
from omegaconf import OmegaConf

from tests.integration.trinity.conftest import TINY
from tuner.config.load import read_layers
from tuner.trinity.handover import checked, install, resolve
from tuner.trinity.preparation import to_yaml

GIVEN = [
    f"model.model_path={TINY}",
    "model.max_model_len=512",
    "cluster.node_num=1",
    "cluster.gpu_per_node=2",
    "explorer.max_timeout=100",
    "explorer.max_retry_times=3",
    "explorer.rollout_model.reasoning_parser=qwen3",
    "explorer.rollout_model.extra_engine_args={max_num_seqs: 4}",
    "monitor.monitor_type=[tensorboard,wandb]",
    "monitor.monitor_args={project: mine}",
    "tuner.on_failure={penalize: -1.5}",
    "tuner.max_calls=7",
    "tuner.device=cpu",
    "tuner.trinity.experiences=calls",
]


@pytest.fixture
def saved(tmp_path):
    overrides = [*GIVEN, f"checkpoint_root_dir={tmp_path}", "name=first"]
    resolved = resolve(read_layers(None, None, overrides, backend="trinity"))
    resolved.tree["buffer"]["explorer_input"]["taskset"]["path"] = str(tmp_path)
    tree = install(resolved, workflow="pickle:gAWV", judge="pkg.judges:judge")
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(tree, resolved.references))
    return file, tree


def test_it_gives_trinity_the_same_configuration_again(saved):
    file, tree = saved
    again = resolve(read_layers(file))
    functions = again.tuner.workflow, again.tuner.judge
    assert functions == ("pickle:gAWV", "pkg.judges:judge")
    assert install(again, workflow=functions[0], judge=functions[1]) == tree


def test_it_is_for_trinity_although_it_has_no_section_of_ours(saved):
    file, _ = saved
    assert "tuner" not in OmegaConf.to_container(OmegaConf.load(file))
    assert read_layers(file, None, ["cluster.gpu_per_node=1"]).backend == "trinity"


def test_overrides_win_over_what_was_saved(saved):
    file, _ = saved
    overrides = ["name=second", "explorer.max_timeout=50", "tuner.max_calls=2",
                 "monitor.monitor_type=tensorboard"]  # fmt: skip
    again = resolve(read_layers(file, None, overrides))
    assert again.run_dir.name == "second"
    assert again.rollout["timeout"] == 50
    assert again.rollout["max_retries"] == 3
    assert (again.tuner.max_calls, again.tuner.on_failure.penalize) == (2, -1.5)
    assert again.trackers == ("tensorboard",)


def test_trinity_reads_it_as_it_is(saved):
    from trinity.common.config import load_config

    file, tree = saved
    config = load_config(str(file))
    config.monitor.monitor_args["tuner"]["trackers"] = []
    assert config.check_and_update().mode == "both"
    assert checked(tree).explorer.max_timeout == 460
