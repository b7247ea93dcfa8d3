"""A killed run goes on where it stopped and ends with the very same weights."""

import dataclasses
import errno
import hashlib
import json
import os
import re
import shutil
import signal
import sys

import pytest
import torch
from safetensors.torch import load_file

from tests.kit import forked, runs
from tests.kit.examples import grid
from tuner.errors import ConfigError, ModelLoadError, TunerError
from tuner.loop import run_local
from tuner.runs import directory as run_directory
from tuner.runs.console import JsonlMonitor
from tuner.runs.record import command
from tuner.runs.result import TuneResult
from tuner.traces import TraceStore
from tuner.traces.store import read_traces
from tuner.training.trainer import PolicyTrainer
from tuner.tune import leave_report

# In the first step's rollouts, in its update, in the second step's rollouts, before metrics are
# written, between the files of a checkpoint, and before a checkpoint gets its name.
MOMENTS = ["workflow:5", "update:1", "judge:4", "log:2", "checkpoint:1", "rename:4"]


def start(model, root, moment):
    return forked.run(runs.main, str(model), str(root), moment)


def tune(config, **functions):
    return run_local(
        config,
        workflow=functions.get("workflow", runs.workflow),
        judge=functions.get("judge", runs.judge),
        train_tasks=runs.TRAIN,
        eval_tasks={"held-out": runs.EVAL},
        report=leave_report,
    )


def weights(result: TuneResult):
    return load_file(result.checkpoint / "model.safetensors")


@pytest.fixture(scope="module")
def straight(random_model_path, tmp_path_factory):
    """A run that nobody killed."""
    return tune(runs.config(random_model_path, tmp_path_factory.mktemp("straight")))


TIMES = re.compile(r"^(time|rollout_seconds)/|_per_second$|_seconds$")


def without_times(history):
    return [
        {name: value for name, value in row.items() if not TIMES.search(name)} for row in history
    ]


@pytest.mark.long
def test_run_killed_at_any_moment_ends_with_the_same_weights(random_model_path, straight, tmp_path):
    for moment in MOMENTS:
        assert start(random_model_path, tmp_path, moment) == -signal.SIGKILL, moment
    result = tune(runs.config(random_model_path, tmp_path))
    expected, found = weights(straight), weights(result)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert without_times(result.history) == without_times(straight.history)
    assert result.outcomes == straight.outcomes


def test_deterministic_runs_are_equal_bit_for_bit(random_model_path, straight, tmp_path):
    again = weights(tune(runs.config(random_model_path, tmp_path)))
    assert all(torch.equal(again[name], value) for name, value in weights(straight).items())


@pytest.mark.long
@pytest.mark.parametrize("running", [1, 3])
def test_number_of_concurrent_rollouts_changes_no_bit(
    random_model_path, straight, tmp_path, running
):
    more = f"explorer.runner_per_model={running}"
    assert same(tune(runs.config(random_model_path, tmp_path, more)), straight)


def test_interrupted_step_is_trained_from_its_recorded_traces(random_model_path, tmp_path, capsys):
    """No rollout that ended is run again, no finished step is lost, and none is shown as new."""
    assert start(random_model_path, tmp_path, "update:2") == -signal.SIGKILL
    traces = sorted((tmp_path / "p" / "run" / "traces").glob("step_*.jsonl"))
    assert [path.name for path in traces] == ["step_000001.jsonl", "step_000002.jsonl"]
    before = [path.read_bytes() for path in traces]
    capsys.readouterr()
    tune(runs.config(random_model_path, tmp_path))
    assert [path.read_bytes() for path in traces] == before
    said = capsys.readouterr().out.splitlines()
    folder = tmp_path / "p" / "run"
    assert said[0] == (
        f"resuming from the beginning in {folder}; the recorded rollouts of steps 1 to 2 are "
        "trained again"
    )
    steps = [line for line in said if line.startswith("step ")]
    assert [line.endswith("(rollouts as recorded)") for line in steps[:2]] == [True, True]
    assert "tokens/s" not in steps[0]
    assert "tokens/s" in " ".join(steps[2:])
    assert not any(line.startswith("sample rollouts") for line in said)


@pytest.mark.long
def test_step_trained_from_its_traces_knows_the_states_of_its_calls(random_model_path, tmp_path):
    async def walk(task, model):
        text = ""
        for _ in range(3):
            text += await runs.answer(model, f"{task['question']} {text}")
            model.calls[-1].state = str(len(text) % 2)
        return text

    asked = ("gigpo", "2", "1")
    keys = ("algorithm.algorithm_type", "buffer.total_steps", "trainer.save_interval")
    config = runs.config(
        random_model_path,
        tmp_path,
        "algorithm.advantage_fn_args.gamma=0.5",
        *(f"{key}={value}" for key, value in zip(keys, asked, strict=True)),
    )
    straight = tune(config, workflow=walk)
    expected = weights(straight)
    (straight.run_dir / "result.json").unlink()
    shutil.rmtree(straight.checkpoint)
    again = tune(config, workflow=walk)
    assert all(torch.equal(expected[name], value) for name, value in weights(again).items())
    assert without_times(again.history) == without_times(straight.history)
    assert straight.history[-1]["states/shared_later"] > 0.5


def test_finished_run_is_not_run_again_and_says_how_to_begin_a_new_one(
    straight, random_model_path, caplog, monkeypatch
):
    monkeypatch.setattr(sys, "argv", ["/bin/tuner"])
    monkeypatch.setattr(sys, "orig_argv", ["python", "/bin/tuner", "run", "my file.yaml"])
    root = straight.run_dir.parents[1]

    async def never(task, model):
        raise AssertionError("the run is complete")

    for steps in (6, 5, 1):
        shorter = runs.config(random_model_path, root, f"buffer.total_steps={steps}")
        assert tune(shorter, workflow=never) == straight
    begin = "to begin a new run (run-2): tuner run 'my file.yaml' continue_from_checkpoint=false"
    assert caplog.text.count("is complete, with 6 steps") == 3
    assert begin in caplog.text


@pytest.mark.parametrize(
    ("given", "settings", "shown"),
    [
        (["python", "main.py"], (), "python main.py"),
        (["python", "main.py", "seed=1"], ("name=b",), "python main.py seed=1 name=b"),
        (
            ["python", "main.py"],
            ("name=b",),
            "python main.py, after adding overrides=['name=b'] to tune()",
        ),
        (
            ["python", "-m", "tuner", "run", "f.yaml", "name=a", "seed=1"],
            ("continue_from_checkpoint=true", "name=b"),
            "python -m tuner run f.yaml seed=1 continue_from_checkpoint=true name=b",
        ),
    ],
)
def test_the_command_that_starts_a_run_again_is_the_one_that_was_given(
    given, settings, shown, monkeypatch
):
    monkeypatch.setattr(sys, "argv", ["main.py"])
    monkeypatch.setattr(sys, "orig_argv", given)
    assert command(*settings) == shown


def test_finished_run_that_was_killed_before_its_report_gets_it(
    straight, random_model_path, tmp_path
):
    shutil.copytree(straight.run_dir, tmp_path / "p" / "run")
    report = tmp_path / "p" / "run" / "report.html"
    report.write_text("of an earlier part, which stopped")
    tune(runs.config(random_model_path, tmp_path))
    assert report.read_text().startswith("<!doctype html>")


def test_run_with_other_settings_or_data_is_refused_by_name(straight, random_model_path):
    root = straight.run_dir.parents[1]
    with pytest.raises(ConfigError, match=r"algorithm\.optimizer\.lr was 0\.01 and is 0\.5"):
        tune(runs.config(random_model_path, root, "algorithm.optimizer.lr=0.5"))
    with pytest.raises(ConfigError, match="the rows of dataset 'train' have changed"):
        run_local(
            runs.config(random_model_path, root),
            workflow=runs.workflow,
            judge=runs.judge,
            train_tasks=runs.TRAIN[1:],
            eval_tasks={"held-out": runs.EVAL},
        )


@pytest.mark.parametrize("part", [slice(-1, None), slice(600, 601)], ids=["a value", "a header"])
def test_run_with_other_weights_under_the_same_path_is_refused(random_model_path, tmp_path, part):
    model = tmp_path / "model"
    shutil.copytree(random_model_path, model)
    config = runs.config(model, tmp_path, "buffer.total_steps=1")
    tune(config)
    path = model / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[part] = bytes([data[part][0] ^ 1])
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"the weights at model\.model_path have changed"):
        tune(config)


def test_start_that_failed_does_not_bind_the_next_one(random_model_path, tmp_path):
    wrong = runs.config(random_model_path, tmp_path, "model.model_path=no/such/model")
    with pytest.raises(ModelLoadError):
        tune(wrong)
    assert tune(runs.config(random_model_path, tmp_path, "buffer.total_steps=1")).steps == 1


def test_run_beside_a_finished_one_gets_a_name_of_its_own(straight, random_model_path):
    root = straight.run_dir.parents[1]
    overrides = ["continue_from_checkpoint=false", "buffer.total_steps=1"]
    result = tune(runs.config(random_model_path, root, *overrides))
    assert result.run_dir == straight.run_dir.with_name("run-2")


@pytest.mark.long
def test_moved_run_directory_goes_on(random_model_path, tmp_path):
    first = tune(runs.config(random_model_path, tmp_path / "a", "buffer.total_steps=1"))
    (tmp_path / "b" / "p").mkdir(parents=True)
    first.run_dir.rename(tmp_path / "b" / "p" / "moved")
    config = runs.config(random_model_path, tmp_path / "b", "name=moved", "buffer.total_steps=2")
    result = tune(config)
    assert result.steps == 2
    assert without_times(result.history)[1] == without_times(first.history)[1]


@pytest.mark.long
def test_longer_run_goes_on_from_the_end(random_model_path, tmp_path):
    short = tune(runs.config(random_model_path, tmp_path, "buffer.total_steps=2"))
    longer = tune(runs.config(random_model_path, tmp_path, "buffer.total_steps=4"))
    assert (short.steps, longer.steps) == (2, 4)
    assert without_times(longer.history)[1] == without_times(short.history)[1]


def test_result_is_written_and_counts_every_token(straight):
    stored = json.loads((straight.run_dir / "result.json").read_text())
    assert "history" not in stored
    assert "history" not in repr(straight)
    assert TuneResult.model_validate({**stored, "history": straight.history}) == straight
    tokens = straight.tokens
    assert tokens.sampled == tokens.trained + sum(tokens.dropped.values()) > 0
    assert straight.outcomes == {"completed": 36}
    assert straight.eval_before.keys() == straight.eval_after.keys() == {"held-out"}
    assert [row["step"] for row in straight.history] == list(range(7))
    assert straight.checkpoint.name == "step_000006"
    for path in (straight.checkpoint, straight.traces, straight.tensorboard):
        assert any(path.iterdir())
    text = str(straight)
    assert "->" in text
    assert str(tokens.sampled) in text


def test_the_end_names_whole_paths_and_the_command_that_shows_the_run(straight):
    folder, (title, *lines) = straight.run_dir, str(straight).splitlines()
    assert title.strip() == "run: 6 steps"
    assert str(straight.model_copy(update={"steps": 1})).split("\n")[0].strip() == "run: 1 step"
    assert lines[-5:] == [
        f"checkpoint   {folder}/checkpoints/step_000006",
        f"traces       {folder}/traces",
        f"report       {folder}/report.html",
        f"TensorBoard  tensorboard --logdir {folder}/tensorboard",
        f"next:        tuner view {folder}",
    ]


@pytest.fixture
def unfinished(straight, tmp_path):
    """The run directory of a run that was killed after its checkpoint of step 4."""
    path = tmp_path / "p" / "run"
    shutil.copytree(straight.run_dir, path)
    (path / "result.json").unlink()
    shutil.rmtree(path / "checkpoints" / "step_000006")
    return path


def same(result, straight):
    expected, found = weights(straight), weights(result)
    return all(torch.equal(expected[name], found[name]) for name in expected) and (
        without_times(result.history) == without_times(straight.history)
    )


def test_strays_among_checkpoints_are_ignored(random_model_path, straight, unfinished, tmp_path):
    checkpoints = unfinished / "checkpoints"
    shutil.copytree(checkpoints / "step_000002", checkpoints / "step_000005.bak")
    (checkpoints / "step_9").mkdir()
    for name in (".DS_Store", "step_000007", "step_notes.txt"):
        (checkpoints / name).write_text("not a checkpoint")
    assert same(tune(runs.config(random_model_path, tmp_path)), straight)
    assert (checkpoints / ".DS_Store").read_text() == "not a checkpoint"


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "flipped": lambda folder: flip(folder / "model.safetensors"),
    "truncated": lambda folder: (folder / "trainer_state.pt").write_bytes(b"PK"),
    "missing": lambda folder: (folder / "version.json").unlink(),
    "manifest": lambda folder: (folder / "manifest.json").write_text("{"),
    "no manifest": lambda folder: (folder / "manifest.json").unlink(),
}


@grid("damage", DAMAGES, quick=2)
def test_damaged_checkpoint_is_passed_over_for_the_one_before(
    random_model_path, straight, unfinished, tmp_path, capsys, damage
):
    DAMAGES[damage](unfinished / "checkpoints" / "step_000004")
    assert same(tune(runs.config(random_model_path, tmp_path)), straight)
    said = " ".join(capsys.readouterr().out.split())
    assert "is damaged" in said
    assert "resuming after step 2" in said
    names = {path.name for path in (unfinished / "checkpoints").iterdir()}
    assert {"step_000004", "step_000004.damaged"} <= names


def test_run_whose_checkpoints_are_all_damaged_begins_again_from_its_traces(
    random_model_path, straight, unfinished, tmp_path
):
    for folder in (unfinished / "checkpoints").iterdir():
        flip(folder / "trainer_state.pt")
    before = (unfinished / "traces" / "step_000001.jsonl").read_bytes()
    assert same(tune(runs.config(random_model_path, tmp_path)), straight)
    assert (unfinished / "traces" / "step_000001.jsonl").read_bytes() == before


@pytest.mark.long
def test_file_of_a_checkpoint_that_was_written_wrong_is_named(
    random_model_path, straight, unfinished, tmp_path
):
    newest = unfinished / "checkpoints" / "step_000004"
    manifest = newest / "manifest.json"
    sums = json.loads(manifest.read_text())
    for file in ("trainer_state.pt", "version.json"):
        content = (newest / file).read_bytes()
        for wrong in (b"{", b"[]"):
            (newest / file).write_bytes(wrong)
            manifest.write_text(json.dumps(sums | {file: hashlib.sha256(wrong).hexdigest()}))
            with pytest.raises(TunerError, match=rf"{file} is .*damaged.* move .*step_000004 away"):
                tune(runs.config(random_model_path, tmp_path))
        (newest / file).write_bytes(content)
    manifest.write_text(json.dumps(sums))
    assert same(tune(runs.config(random_model_path, tmp_path)), straight)


@grid(
    "file, content",
    [
        ("data.json", "{"),
        ("data.json", "[]"),
        ("metrics.jsonl", "[1]\n"),
        ("metrics.jsonl", '{"loss": 1}\n'),
        ("result.json", "{"),
        ("result.json", "\x00"),
    ],
    quick=3,
)
def test_damaged_file_of_a_run_is_named_with_what_to_do(
    random_model_path, straight, tmp_path, file, content
):
    shutil.copytree(straight.run_dir, tmp_path / "p" / "run")
    if file != "result.json":
        (tmp_path / "p" / "run" / "result.json").unlink()
    damaged = tmp_path / "p" / "run" / file
    damaged.write_text(content)
    with pytest.raises(TunerError, match=rf"{file}.* delete ") as caught:
        tune(runs.config(random_model_path, tmp_path))
    assert str(damaged) in str(caught.value)
    damaged.unlink()
    result = tune(runs.config(random_model_path, tmp_path))
    assert (result.checkpoint / "model.safetensors").exists()
    if file == "result.json":
        assert result.history == straight.history


WRITERS = {
    "trace": (TraceStore, "append"),
    "metrics": (JsonlMonitor, "log"),
    "trainer state": (PolicyTrainer, "save"),
    "name of a file": (run_directory.os, "replace"),
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("writer", "reason"),
    [(writer, errno.ENOSPC) for writer in WRITERS]
    + [("trace", errno.EACCES), ("metrics", errno.EROFS), ("trainer state", errno.EIO)],
)
def test_run_that_cannot_write_says_so_and_goes_on_later(
    random_model_path, tmp_path, writer, reason
):
    owner, name = WRITERS[writer]
    original, calls = getattr(owner, name), []

    def failing(*args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            raise OSError(reason, os.strerror(reason))
        return original(*args, **kwargs)

    overrides = ["buffer.total_steps=2", "trainer.save_interval=1"]
    config = runs.config(random_model_path, tmp_path, *overrides)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(owner, name, failing)
        with pytest.raises(TunerError, match=os.strerror(reason)) as caught:
            tune(config)
    assert str(tmp_path / "p" / "run") in str(caught.value)
    assert "start the run again" in str(caught.value)
    assert tune(config).steps == 2


@pytest.mark.long
@pytest.mark.parametrize("field", ["prompt_ids", "completion_ids"])
@pytest.mark.parametrize("token", [10**6, -1])
def test_recorded_token_that_the_model_does_not_have_is_named(
    random_model_path, unfinished, tmp_path, field, token
):
    path = unfinished / "traces" / "step_000005.jsonl"
    first, *others = read_traces(path)
    ids = (*getattr(first.calls[0], field)[:-1], token)
    call = dataclasses.replace(first.calls[0], **{field: ids})
    changed = dataclasses.replace(first, calls=[call, *first.calls[1:]])
    path.unlink()
    for trace in (changed, *others):
        TraceStore(path.parent).append(trace)
    with pytest.raises(
        TunerError, match=rf"step_000005.* {token}(, and the|;) .*move the file away"
    ):
        tune(runs.config(random_model_path, tmp_path))
    path.unlink()
    assert tune(runs.config(random_model_path, tmp_path)).steps == 6
