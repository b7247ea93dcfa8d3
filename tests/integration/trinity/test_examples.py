"""Configurations that were written for Trinity-RFT alone, as they are.

The tutorial's script runs with a file in the form of its own, up to where the cluster would start.
"""

import json
import runpy
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.integration.trinity.conftest import TINY
from tests.integration.trinity.examples import ALL, FOR_AGENTS
from tests.test_tutorial import COMPLETE_EXAMPLE
from tuner.config.load import read_layers
from tuner.trinity import launch as run
from tuner.trinity import workers as cluster
from tuner.trinity.handover import WORKFLOW, checked, install, resolve

TUTORIAL = f"""
project: AgentScope-ReAct
name: GSM8K-Qwen3-1.7B
checkpoint_root_dir: ${{oc.env:TRINITY_CHECKPOINT_ROOT_DIR,./checkpoints}}
algorithm:
  algorithm_type: multi_step_grpo
  repeat_times: 8
model:
  model_path: ${{oc.env:TRINITY_MODEL_PATH,{TINY}}}
  max_model_len: 512
cluster:
  node_num: 1
  gpu_per_node: 2
buffer:
  total_epochs: 1
  batch_size: 32
  train_batch_size: 256
explorer:
  runner_per_model: 16
  max_timeout: 600
synchronizer:
  sync_style: dynamic_by_explorer
  sync_method: nccl
  sync_interval: 2
  sync_timeout: 1800
trainer:
  save_interval: 100
  use_dynamic_bsz: true
  ulysses_sequence_parallel_size: 1
monitor:
  monitor_type: tensorboard
"""


class ClusterWouldStart(Exception):
    pass


def test_the_tutorials_script_with_its_file_is_accepted_as_it_is(tmp_path, monkeypatch):
    (tmp_path / "main.py").write_text(COMPLETE_EXAMPLE)
    (tmp_path / "config.yaml").write_text(TUTORIAL)
    (tmp_path / "my_dataset").mkdir()
    rows = [{"question": f"What is {n} plus 1?", "answer": str(n + 1)} for n in range(64)]
    (tmp_path / "my_dataset" / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    accepted = []

    def stop(self, address):
        accepted.append((self._config, address))
        raise ClusterWouldStart

    monkeypatch.setattr(run._Run, "execute", stop)
    monkeypatch.setattr(cluster, "_gpus", lambda: 2)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ClusterWouldStart):
        runpy.run_path("main.py", run_name="__main__")
    ((config, address),) = accepted
    assert address == cluster.LOCAL
    assert Path(config.checkpoint_job_dir) == (
        tmp_path / "checkpoints" / "AgentScope-ReAct" / "GSM8K-Qwen3-1.7B"
    )
    (tasks,) = config.buffer.explorer_input.tasksets
    assert (tasks.path, tasks.split) == (str(tmp_path / "my_dataset"), "train")
    assert tasks.default_workflow_type == WORKFLOW
    ours = tasks.workflow_args["tuner"]
    assert ours["workflow"].startswith("pickle:")
    assert ours["judge"].startswith("pickle:")
    assert ours["timeout"] == 600
    assert (config.buffer.train_batch_size, config.synchronizer.sync_interval) == (256, 2)
    assert config.algorithm.repeat_times == tasks.repeat_times == 8


@pytest.mark.parametrize("name", FOR_AGENTS)
def test_trinitys_examples_for_agents_are_accepted_as_they_are(name, tmp_path, monkeypatch):
    monkeypatch.setenv("TRINITY_TASKSET_PATH", "some/tasks")
    monkeypatch.setenv("TRINITY_MODEL_PATH", str(TINY))
    monkeypatch.setenv("TRINITY_CHECKPOINT_ROOT_DIR", str(tmp_path))
    monkeypatch.setenv("TRINITY_RAY_ADDRESS", "10.0.0.1:6379")  # theirs would join any cluster
    settings = [*ALL.strip().splitlines(), *FOR_AGENTS[name].strip().splitlines()]
    path = tmp_path / "example.yaml"
    OmegaConf.save(OmegaConf.from_dotlist(settings), path)
    resolved = resolve(read_layers(path, backend="trinity"))
    config = checked(install(resolved, workflow="a:b", judge=None))
    for tasks in config.buffer.explorer_input.tasksets:
        assert tasks.default_workflow_type == WORKFLOW
        assert tasks.repeat_times == config.algorithm.repeat_times > 1
