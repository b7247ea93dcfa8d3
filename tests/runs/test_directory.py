"""One run at a time in a directory."""

import errno
import os
import shutil
import signal
import socket
import threading

import pytest

from tests.kit import forked, runs
from tuner.config import load_config
from tuner.errors import ConfigError, TunerError
from tuner.loop import run_local
from tuner.runs import directory as run_directory
from tuner.runs.directory import WEIGHTS, RunDirectory, held, make_private
from tuner.runs.record import fingerprint_of_weights, open_directory


def hold_and_die(path):
    with held(path):
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_second_run_is_told_who_has_the_directory(tmp_path):
    with (
        held(tmp_path),
        pytest.raises(ConfigError, match=f"process {os.getpid()} on {socket.gethostname()}"),
        held(tmp_path),
    ):
        pass
    with held(tmp_path):
        pass


def test_a_killed_run_gives_its_directory_up(tmp_path):
    assert forked.run(hold_and_die, tmp_path) == -signal.SIGKILL
    with held(tmp_path):
        pass


def test_a_run_that_is_started_twice_writes_nothing_the_second_time(
    random_model_path, tmp_path, monkeypatch
):
    config = runs.config(random_model_path, tmp_path, "buffer.total_steps=1")
    refused = []

    def start(workflow):
        return run_local(
            config, workflow=workflow, judge=runs.judge, train_tasks=runs.TRAIN, eval_tasks={}
        )

    def again():
        before = {path: path.read_bytes() for path in config.run_dir.rglob("*.json*")}
        with monkeypatch.context() as patched:
            patched.setattr("tuner.loop._THE_RUN", threading.Lock())  # as in another process
            with pytest.raises(ConfigError) as caught:
                start(runs.workflow)
        refused.append(str(caught.value))
        assert before == {path: path.read_bytes() for path in config.run_dir.rglob("*.json*")}

    def workflow(task, model):  # a plain function: in a thread, where a loop may be started
        if not refused:
            again()
        return runs.workflow(task, model)

    result = start(workflow)
    assert "is in use by process" in refused[0]
    assert result.steps == 1


def test_a_checkpoint_that_is_deleted_in_part_has_no_name_of_one(tmp_path, monkeypatch):
    directory = RunDirectory(tmp_path)
    directory.create()

    def save(step):
        directory.save_checkpoint(step, lambda path: (path / "weights").write_text("1"), keep=1)

    def fails(path, ignore_errors=False):
        if not ignore_errors:
            (path / "weights").unlink()
            raise OSError(errno.EIO, "I/O error")

    save(1)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", fails)
        with pytest.raises(OSError, match="I/O error"):
            save(2)
    assert directory.checkpoint_steps() == [2]
    directory.create()
    assert [path.name for path in directory.checkpoints.iterdir()] == ["step_000002"]


def test_runs_without_a_name_are_never_one_run():
    assert len({load_config().name for _ in range(20)}) == 20


def test_weights_are_told_from_others_by_name_size_and_both_ends(tmp_path):
    assert fingerprint_of_weights(tmp_path) is fingerprint_of_weights(tmp_path / "no") is None
    half, found = b"a" * (3 << 20), []
    for name, data in [
        ("model.safetensors", half + half),
        ("model.safetensors", half + b"b" + half),
        ("model.safetensors", b"b" + half + half[1:]),
        ("model.safetensors", half + half[1:] + b"b"),
        ("pytorch_model.bin", half + half),
        ("pytorch_model.bin", half),
    ]:
        (tmp_path / name).write_bytes(data)
        found.append(fingerprint_of_weights(tmp_path))
        assert fingerprint_of_weights(tmp_path) == found[-1]
    assert len(set(found)) == len(found)


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        (WEIGHTS[0], []),
        (WEIGHTS[1], ["algorithm.algorithm_type=ppo", "model.critic_model_path={}"]),
        (WEIGHTS[2], ["model.lora_configs=[{{path: {}}}]"]),
    ],
)
def test_a_run_does_not_go_on_with_other_weights_than_it_began_with(tmp_path, name, overrides):
    model, other = tmp_path / "model", tmp_path / "other"
    for folder in (model, other):
        folder.mkdir()
        (folder / "x.safetensors").write_bytes(b"a")
    config = runs.config(model, tmp_path, *(one.format(other) for one in overrides))
    with open_directory(config, {}) as directory:
        directory.metrics.write_text("{}")
    with open_directory(config, {}):
        pass
    changed = (other if overrides else model) / "x.safetensors"
    changed.write_bytes(b"b")
    with (
        pytest.raises(ConfigError, match=rf": the weights at {name} have changed\. "),
        open_directory(config, {}),
    ):
        pass
    changed.unlink()  # as on the Hub: there is nothing to compare
    with open_directory(config, {}):
        pass


@pytest.mark.parametrize("reason", [errno.EIO, errno.EACCES])
def test_a_checkpoint_that_cannot_be_read_is_damaged_only_where_the_disk_fails(
    tmp_path, monkeypatch, reason
):
    directory, said = RunDirectory(tmp_path), []
    directory.create()
    for step in (1, 2):
        directory.save_checkpoint(step, lambda folder: (folder / "w").write_text("w"), keep=0)

    def failing(file, digest, real=run_directory.hashlib.file_digest):
        if "step_000002" in file.name:
            raise OSError(reason, os.strerror(reason))
        return real(file, digest)

    monkeypatch.setattr(run_directory.hashlib, "file_digest", failing)
    if reason == errno.EIO:
        assert directory.sound_checkpoint(said.append) == 1
        assert "step_000002 is damaged (OSError" in said[0]
        return
    with pytest.raises(PermissionError):
        directory.sound_checkpoint(said.append)
    assert (directory.checkpoint_steps(), said) == ([1, 2], [])


def test_of_a_checkpoint_that_a_library_could_not_write_nothing_is_left(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.create()

    def write(folder):
        (folder / "half").write_text("h")
        raise RuntimeError("PytorchStreamWriter failed writing file")

    with pytest.raises(TunerError, match=r"step_000001 cannot be written: .*start the run again"):
        directory.save_checkpoint(1, write, keep=0)
    assert list(directory.checkpoints.iterdir()) == []


@pytest.mark.parametrize("where", ["file/run", "p/" + "n" * 999])
def test_a_run_directory_that_cannot_be_made_is_a_wrong_setting(tmp_path, where):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"checkpoint_root_dir: .* cannot be made: "):
        make_private(tmp_path / where)
