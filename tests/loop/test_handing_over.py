"""Where weights for an engine in another process are put."""

import shutil
import stat

import pytest

from tuner.config import load_config
from tuner.runs import placement as engines
from tuner.runs.placement import WeightPath

SHARED, DISK = WeightPath("shared_memory", ""), WeightPath("disk", "")


@pytest.fixture
def config(tmp_path, monkeypatch):
    shared = tmp_path / "shm"
    shared.mkdir()
    monkeypatch.setattr(engines, "_SHARED_MEMORY", shared)
    return load_config(None, overrides=[f"checkpoint_root_dir={tmp_path}", "model.model_path=m"])


def test_what_is_in_shared_memory_is_for_the_user_alone_and_begins_empty(config, tmp_path):
    folder = engines._folder(config, SHARED, size=1)
    assert folder.parent == tmp_path / "shm"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (folder / "of a run that was killed").mkdir()
    assert list(engines._folder(config, SHARED, size=1).iterdir()) == []


def test_a_folder_of_somebody_else_is_not_used(config, tmp_path, caplog):
    folder = engines._folder(config, SHARED, size=1)
    folder.rmdir()
    (tmp_path / "elsewhere").mkdir()
    folder.symlink_to(tmp_path / "elsewhere")
    assert (
        engines._folder(config, SHARED, size=1) == config.run_dir.resolve() / "engine" / "weights"
    )
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert "belongs to another user" in caplog.text


def test_weights_that_were_asked_for_on_disk_are_in_the_run_directory(config):
    folder = engines._folder(config, DISK, size=1)
    assert folder == config.run_dir.resolve() / "engine" / "weights"


def test_without_room_weights_go_to_the_run_directory(config):
    size = shutil.disk_usage(config.checkpoint_root_dir).free
    assert engines._folder(config, SHARED, size) == config.run_dir.resolve() / "engine" / "weights"
