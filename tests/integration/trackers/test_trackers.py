"""Runs with the trackers themselves: what arrives there, and what must not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.trackers import stored
from tests.kit.builders import call, trace
from tuner.errors import ConfigError
from tuner.runs.trackers import open_trackers

REPOSITORY = Path(__file__).parents[3]
MAIN = """
from tuner import JudgeOutput, WorkflowOutput

async def workflow(task, model):
    reply = await model.client.chat.completions.create(
        model=model.model_name, messages=[{"role": "user", "content": task["question"]}])
    return WorkflowOutput(response=reply.choices[0].message.content or "", metrics={"f1@1": 0.5})

async def judge(task, response):
    return JudgeOutput(reward=len(response) % 7)
"""
CONFIG = f"""
project: trackers
name: all
algorithm: {{repeat_times: 2}}
model: {{model_path: {REPOSITORY}/models/tiny_math, max_response_tokens: 12}}
buffer:
  batch_size: 2
  total_steps: 2
  explorer_input:
    taskset: {{path: data.jsonl}}
    eval_tasksets: [{{name: asked, path: data.jsonl}}]
monitor:
  monitor_type: [tensorboard, wandb, mlflow, swanlab]
  monitor_args:
    wandb: {{mode: offline, samples: 1}}
    swanlab: {{mode: offline}}
tuner: {{workflow: "main.py:workflow", judge: "main.py:judge"}}
"""
SECRETS = ("hunter1", "hunter2", "hunter3")
QUESTIONS = ["How much is 2 | 3?", "What is <b>4 + 5</b>?"]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """The folder of a run, begun on the command line with secrets in it."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "main.py").write_text(MAIN)
    (folder / "config.yaml").write_text(CONFIG)
    rows = [json.dumps({"question": question}) for question in QUESTIONS]
    (folder / "data.jsonl").write_text("\n".join(rows))
    command = [sys.executable, "-m", "tuner", "run", "config.yaml"]
    command += [
        f"monitor.monitor_args.wandb.api_key={SECRETS[0]}",
        f"monitor.monitor_args.mlflow={{password: {SECRETS[1]}}}",
        f"monitor.monitor_args.mlflow.uri={(folder / 'mlruns').as_uri()}",
        f"monitor.monitor_args.swanlab.api_key={SECRETS[2]}",
    ]
    surroundings = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "HOME": str(folder / "home"),
        "MLFLOW_ALLOW_FILE_STORE": "true",
    }
    done = subprocess.run(
        command, cwd=folder, env=surroundings, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "checkpoints" / "trackers" / "all"


def recorded(run: Path) -> dict[int, dict[str, float]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row.pop("step"): row for row in rows}


def read(kind: str, run: Path) -> stored.Stored:
    if kind == "mlflow":
        runs = stored.mlflow_runs((run.parents[2] / "mlruns").as_uri(), "trackers")
    else:
        runs = getattr(stored, kind)(run)
    (only,) = runs
    return only


KINDS = ["wandb", "mlflow", "swanlab"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_number_of_every_step_is_there(kind, run):
    found = read(kind, run)
    assert found.well
    assert found.name == "all"
    wanted = recorded(run)
    assert found.metrics.keys() == wanted.keys() == {0, 1, 2}
    for step, row in wanted.items():
        if kind == "mlflow":  # which refuses such names
            row = {name.replace("@", "_"): value for name, value in row.items()}
            assert "workflow/f1_1" in row or step == 0
        assert found.metrics[step] == pytest.approx(row, nan_ok=True)


def test_tensorboard_has_the_same_numbers_and_tables_as_text(run):
    metrics, texts = stored.tensorboard(run)
    for step, row in recorded(run).items():
        assert metrics[step] == pytest.approx(row, rel=1e-5)
    assert texts.keys() == {"samples/train", "samples/asked"}
    for table in texts["samples/asked"]:
        head, rule, *rows = table.split("\n")
        assert len(rows) == 2
        assert {line.count("|") for line in (head, rule, *rows)} == {8}  # | of the texts is no cell
        assert "2 &#124; 3" in rows[0]
        assert "&lt;b&gt;4 + 5" in rows[1]


@pytest.mark.parametrize("kind", KINDS)
def test_some_traces_are_a_table(kind, run):
    found = read(kind, run)
    steps = {name: [row["step"] for row in rows] for name, rows in found.tables.items()}
    if kind == "wandb":  # of which one is wanted
        assert steps == {"samples/train": [1, 2], "samples/asked": [0, 2]}
    else:
        assert steps == {"samples/train": [1] * 4 + [2] * 4, "samples/asked": [0, 0, 2, 2]}
    first = found.tables["samples/asked"][0]
    assert QUESTIONS[0] in first["task"]
    assert first["last_call"].startswith(f"user: {QUESTIONS[0]}\n\nassistant: ")
    assert first["reward"] == len(first["response"]) % 7
    assert first["outcome"] == "completed"


@pytest.mark.parametrize("kind", KINDS)
def test_settings_are_there_and_no_secret_is_anywhere(kind, run):
    config = read(kind, run).config
    section = config["monitor"].get("value", config["monitor"])
    assert "mode" in json.dumps(section)
    holding = [
        path
        for path in (run.parents[2]).rglob("*")
        if path.is_file() and any(secret.encode() in path.read_bytes() for secret in SECRETS)
    ]
    assert not holding


def opened(kinds, folder, *, project="again", first_step=0, **args):
    folder.mkdir(exist_ok=True)
    return open_trackers(
        kinds, project=project, folder=folder, first_step=first_step, config={"a": 1}, args=args
    )


def test_a_run_that_stopped_is_said_to_and_goes_on_as_the_same(tmp_path):
    folder, uri = tmp_path / "run", (tmp_path / "mlruns").as_uri()
    args = {
        "wandb": {"mode": "offline", "name": "mine"},
        "swanlab": {"mode": "offline", "experiment_name": "mine"},
        "mlflow": {"uri": uri},
    }
    ids = []
    for step, well in ((1, False), (2, True)):
        for tracker in opened(KINDS, folder, **args):
            tracker.show(step, "train", [trace(0, 0, [call("a", [1], [2], [-0.5])], step=step)])
            tracker.log_step({"loss": 1 / step}, step)
            tracker.end(well)
        runs = [stored.wandb(folder), stored.swanlab(folder), stored.mlflow_runs(uri, "again")]
        assert [one[-1].well for one in runs] == [well] * 3
        assert [one[-1].metrics[step] for one in runs] == [{"loss": 1 / step}] * 3
        assert [one[-1].tables["samples/train"][-1]["step"] for one in runs] == [step] * 3
        assert [one[-1].name for one in runs] == ["mine", "mine", "run"]
        ids.append([one[-1].id for one in runs])
    assert ids[0] == ids[1]
    assert len(stored.mlflow_runs(uri, "again")) == 1
    # Another folder is another run, though runs of one name are in the same project.
    for tracker in opened(["mlflow"], tmp_path / "other", **{"uri": uri}):
        tracker.end(True)
    assert len(stored.mlflow_runs(uri, "again")) == 2


@pytest.mark.parametrize(
    ("kind", "args", "said"),
    [
        ("wandb", {"mode": "offline", "entitty": "me"}, "entitty"),
        ("swanlab", {"mode": "ofline"}, "ofline"),
        ("mlflow", {"uri": "nothing://here"}, "nothing"),
    ],
)
def test_what_a_tracker_does_not_take_is_one_sentence_and_the_others_are_ended(
    kind, args, said, tmp_path
):
    with pytest.raises(ConfigError, match=rf"{kind} could not be started: .*{said}"):
        opened(["tensorboard", kind], tmp_path / "run", **{kind: args})
    import swanlab
    import wandb

    assert wandb.run is None
    assert not swanlab.has_run()


def test_a_folder_of_files_that_mlflow_no_longer_takes_is_said_in_its_words(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE")
    with pytest.raises(ConfigError, match="MLFLOW_ALLOW_FILE_STORE=true"):
        opened(["mlflow"], tmp_path / "run", uri=(tmp_path / "mlruns").as_uri())
