"""`tuner rebase` from the command line: functions and data that the run's configuration names."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.kit import runs
from tuner.cli import functions_of
from tuner.traces.store import read_traces
from tuner.tune import tune

pytestmark = pytest.mark.long

FUNCTIONS = """
from tuner import JudgeOutput, WorkflowOutput

async def workflow(task, model):
    messages = [{"role": "user", "content": task["question"]}]
    completion = await model.client.chat.completions.create(
        model=model.model_name, messages=messages
    )
    return WorkflowOutput(response=completion.choices[0].message.content)

async def judge(task, response):
    return JudgeOutput(reward=sum(map(ord, response)) % 17 / 17)

async def wrong(task, response):
    return JudgeOutput(reward=-(await judge(task, response)).reward)
"""


@pytest.fixture(scope="module")
def run(random_model_path, tmp_path_factory):
    root = tmp_path_factory.mktemp("run")
    (root / "functions.py").write_text(FUNCTIONS)
    (root / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in runs.TRAIN))
    settings = {
        "project": "p",
        "name": "run",
        "checkpoint_root_dir": str(root),
        "model": {"model_path": str(random_model_path), "max_response_tokens": 6},
        "algorithm": {"repeat_times": 3, "optimizer": {"lr": 0.01}},
        "buffer": {
            "batch_size": 2,
            "total_steps": 2,
            "explorer_input": {"taskset": {"path": str(root), "split": "train"}},
        },
        "tuner": {
            "workflow": str(root / "functions.py:workflow"),
            "judge": str(root / "functions.py:wrong"),
            "deterministic": True,
        },
    }
    (root / "config.yaml").write_text(yaml.safe_dump(settings))
    workflow, judge, *_ = functions_of(root / "config.yaml", [])
    return tune(workflow, judge, config_path=root / "config.yaml")


def test_the_mended_judge_is_named_in_the_new_run_and_the_table_printed(run, said):
    root = run.run_dir.parents[1]
    mended = f"{root}/functions.py:judge"
    options = ("--judge", mended, "--min-effective-samples", 0, "--max-reused", 1)
    status, output, _ = said("rebase", run.run_dir, *options)
    assert not status
    assert "the first step in which a reward changed: 1" in output
    assert "trained again" in output
    new = run.run_dir.with_name("run-rebased")
    named = yaml.safe_load((new / "config.yaml").read_text())["tuner"]
    assert named["judge"] == mended
    assert named["workflow"] == f"{root}/functions.py:workflow"
    for path in sorted((run.run_dir / "traces").iterdir()):
        old = {trace.id: trace.reward for trace in read_traces(path)}
        found = {trace.id: trace.reward for trace in read_traces(new / "traces" / path.name)}
        assert found == {id_: -reward for id_, reward in old.items()}


def test_what_is_wrong_is_said_in_a_sentence_before_pytorch_is_imported(run):
    """A share that is none, and a run without a file that it can be told by."""
    script = (
        "import sys\n"
        "from tuner import cli\n"
        "try:\n"
        "    cli.main()\n"
        "finally:\n"
        "    print('torch' in sys.modules)\n"
    )
    judge = f"{run.run_dir.parents[1]}/functions.py:judge"
    for arguments, wanted in (
        ([str(run.run_dir), "--judge", judge, "--min-effective-samples", "7"], "give a share"),
        ([str(Path(__file__).parent), "--judge", judge], "is not a run: give the folder"),
        ([str(run.run_dir), "--judge", judge, "algorithm.nonsense=1"], "algorithm.nonsense"),
    ):
        command = [sys.executable, "-c", script, "rebase", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 2, done.stderr
        assert done.stdout.strip() == "False"
        assert wanted in done.stderr
        assert "Traceback" not in done.stderr
