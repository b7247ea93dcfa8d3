"""`tuner check` says what a run on Trinity-RFT would do, or why not, without Ray and a GPU."""

import json

import pytest
from typer.testing import CliRunner

from tests.integration.trinity.conftest import REPOSITORY, TINY
from tuner import WorkflowOutput
from tuner.cli import app
from tuner.errors import ConfigError, DatasetError, FunctionError
from tuner.trinity.preparation import check_trinity

ROWS = [{"question": f"{n}?"} for n in range(8)]


async def workflow(task, model):
    return WorkflowOutput(reward=1.0)


@pytest.fixture
def check(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    (data / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))

    def make(*overrides, func=workflow, judge=None):
        given = [
            f"model.model_path={TINY}", "model.max_model_len=512", "tuner.device=cpu",
            "cluster.gpu_per_node=2", "buffer.batch_size=4", f"checkpoint_root_dir={tmp_path}/runs",
            "name=run", f"buffer.explorer_input.taskset.path={data}", "algorithm.repeat_times=2",
            *overrides,
        ]  # fmt: skip
        return check_trinity(None, given, workflow=func, judge=judge)

    return make


def test_a_run_is_described_and_leaves_nothing_behind(check, tmp_path):
    verdict = check()
    assert verdict.ready
    assert "2 steps x 4 tasks x 2 rollouts = 16 rollouts" in verdict.text
    assert "multi_step_grpo, lr 1e-06, 8 experiences in a step" in verdict.text
    assert "one of its own: 1 x 2 GPUs, 1 for rollouts" in verdict.text
    assert "sent by value" in verdict.text
    assert not (tmp_path / "runs" / "runs").exists()


def test_missing_gpus_are_named_after_trinitys_check_has_passed(check):
    verdict = check("tuner.device=auto")
    assert not verdict.ready
    assert "Trinity-RFT's own check accepts this configuration." in verdict.text
    assert "NOT READY on this machine: cluster.gpu_per_node is 2, but this machine has" in (
        verdict.text
    )


@pytest.mark.parametrize(
    ("overrides", "error", "text"),
    [
        (["mode=bench"], ConfigError, "nothing to evaluate on"),
        (["mode=benches"], ConfigError, "mode is benches: Trinity-RFT has both, colocate"),
        (["mode=train"], FunctionError, "mode train runs no rollouts"),
        (["buffer.batch_size=9"], DatasetError, "8 rows but batch_size is 9"),
        (["explorer.rollout_model.engine_num=8"], ConfigError, "Trinity-RFT rejects"),
        (["algorithm.algorithm_type=raft"], ConfigError, "algorithm_type is raft"),
        (["mode=bench", "explorer.bench_on_latest_checkpoint=true"], ConfigError,
         "looks for global_step_0"),
    ],
)  # fmt: skip
def test_what_would_be_refused_is_refused_with_its_reason(check, overrides, error, text):
    with pytest.raises(error) as caught:
        check(*overrides)
    assert text in str(caught.value)


def test_modes_are_described(check, tmp_path):
    (tmp_path / "runs" / "runs" / "run" / "global_step_3").mkdir(parents=True)
    evaluated = (
        "buffer.explorer_input.eval_tasksets="
        f"[{{name: held, path: {tmp_path}/data/train.jsonl, repeat_times: 2}}]"
    )
    bench = check("mode=bench", evaluated)
    assert "32 rollouts: every evaluation set with the checkpoints 0, 3" in bench.text
    assert "run/bench" in bench.text
    served = check("mode=serve", func=None)
    assert "a server on 127.0.0.1:8010 until it is asked to stop" in served.text


def test_recorded_data_is_given_to_trinitys_own_algorithms(check, tmp_path, monkeypatch):
    monkeypatch.delenv("VERL_USE_EXTERNAL_MODULES")  # the check imports verl here, for this one
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]
    file = tmp_path / "sft.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows * 8))
    verdict = check(
        "algorithm.algorithm_type=sft",
        "buffer.trainer_input.experience_buffer="
        f"{{path: {file}, format: {{messages_key: messages}}}}",
        "buffer.explorer_input.taskset=null",
        func=None,
    )
    assert "mode           train" in verdict.text
    assert "rows           train: 8" in verdict.text
    assert "  2 steps" in verdict.text


def test_the_command_prints_it():
    result = CliRunner().invoke(app, ["check", str(REPOSITORY / "config.yaml"),
                                      "tuner.backend=trinity", "cluster.gpu_per_node=2",
                                      "tuner.device=cpu"])  # fmt: skip
    assert result.exit_code == 0, result.output
    assert result.output.endswith("READY.\n")
    assert "rows           train: 3000, test: 200" in result.output


def test_groups_that_a_judge_is_to_see_whole_may_not_be_split(check):
    async def judge(task, responses):
        return []

    assert check(judge=judge).ready
    with pytest.raises(FunctionError, match="max_repeat_times_per_runner is 2, which splits"):
        check("explorer.max_repeat_times_per_runner=2", judge=judge)
