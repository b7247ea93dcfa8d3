"""Errors are found in the logs of Trinity-RFT's processes."""

import os
from types import SimpleNamespace

import pytest

from tuner.trinity.actors import printed_by
from tuner.trinity.logs import advice, last_errors

LOG = (
    "INFO 11-21 18:09:54 [trainer.py:90] Sample data for step 1 started.\n"
    "ERROR 11-21 18:09:55 [trainer.py:145] Error in Trainer:\n"
    "\r\nERROR 11-21 18:09:55 [trainer.py:145] first failure\n"
    "INFO 11-21 18:09:56 [trainer.py:90] going on\n"
    "ERROR 11-21 18:09:57 [trainer.py:145] Error in Trainer:\n"
    "ERROR 11-21 18:09:57 [trainer.py:145] ModuleNotFoundError: No module named 'flash_attn'\n"
    "INFO 11-21 18:09:58 [trainer.py:170] Trainer finished.\n"
)


def test_the_last_error_of_a_log_is_quoted_without_its_prefixes(tmp_path):
    (tmp_path / "trainer.log").write_text(LOG)
    (tmp_path / "explorer.log").write_text("INFO 11-21 18:09:54 [a.py:1] fine\n")
    said = last_errors(tmp_path)
    assert "trainer.log:\n    Error in Trainer:\n    ModuleNotFoundError" in said
    assert "first failure" not in said
    assert "explorer.log" not in said


def test_what_a_process_printed_is_kept_and_quoted_where_an_error_names_it(tmp_path):
    logs = tmp_path / "session" / "logs"
    logs.mkdir(parents=True)
    (logs / "worker-ab-01000000-25226.err").write_text(
        ":job_id:01000000\nEngineCore failed\nRuntimeError: Found no NVIDIA driver\n"
    )
    (logs / "worker-cd-01000000-25.err").write_text("somebody else\n")
    said = (
        "ray.exceptions.RayTaskError(RuntimeError): ray::vLLMRolloutModel.prepare() "
        "(pid=25226, ip=10.0.0.1, actor_id=9d11)\n  See root cause above. (pid=25226, ip=10.0.0.1)"
    )
    keep = tmp_path / "log" / "ray"
    quoted = printed_by(said, tmp_path / "session", keep)
    copy = keep / "process_25226.err"
    assert quoted == f"  {copy}:\n    EngineCore failed\n    RuntimeError: Found no NVIDIA driver"
    assert copy.read_text().startswith(":job_id")
    # Once: as of an actor whose death has quoted it.
    assert printed_by(said, tmp_path / "session", keep) == ""
    assert printed_by(said, None, tmp_path) == printed_by("ValueError", tmp_path, keep) == ""


def test_logs_of_an_earlier_run_are_left_out(tmp_path):
    old = tmp_path / "trainer.log"
    old.write_text(LOG)
    os.utime(old, (1000, 1000))
    assert last_errors(tmp_path, newer_than=2000) == ""


@pytest.mark.parametrize(
    ("said", "advised"),
    [
        ("File synchronizer.py, in wait_new_model_state_dict", "synchronizer.sync_timeout (900 s)"),
        ("TimeoutError: Read incomplete batch (2/4)", "max_read_timeout (60 s)"),
        ("torch.OutOfMemoryError: CUDA out of memory", "lower trainer.max_token_len_per_gpu"),
    ],
)
def test_what_to_try_follows_from_what_the_logs_say(said, advised):
    config = SimpleNamespace(
        synchronizer=SimpleNamespace(sync_timeout=900),
        buffer=SimpleNamespace(
            trainer_input=SimpleNamespace(experience_buffer=SimpleNamespace(max_read_timeout=60))
        ),
    )
    assert advised in "".join(advice(said, config))
    assert list(advice("ValueError: no such tool", config)) == []
