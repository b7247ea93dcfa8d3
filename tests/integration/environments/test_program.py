"""The example trains a Node program: its held-out reward rises, and nothing of it is left."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest

from tests.examples.conftest import main
from tests.rewards.test_sandbox import those_in

__all__ = ["main"]
EXAMPLE = Path(__file__).parents[3] / "examples" / "program"


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_the_program_learns(main, tmp_path, monkeypatch):
    rows = (EXAMPLE.parent / "gsm8k" / "data" / "test.jsonl").read_text().splitlines()
    (tmp_path / "test.jsonl").write_text("\n".join(rows[:60]))  # each is a process
    held_out = f"[{{name: test, path: {tmp_path}, split: test}}]"
    few = ["buffer.total_steps=6", f"buffer.explorer_input.eval_tasksets={held_out}"]
    with tempfile.TemporaryDirectory() as temporary:  # a socket's path must be short
        monkeypatch.setattr(tempfile, "tempdir", temporary)
        result = main.main([f"checkpoint_root_dir={tmp_path}", *few])
        assert those_in(temporary) == []
        assert not [f for f in os.listdir(temporary) if f.startswith("tuner-")]
    assert set(result.outcomes) == {"completed"}
    assert result.eval_after["test"] >= result.eval_before["test"] + 0.2
