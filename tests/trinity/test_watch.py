"""What is seen while a run is going on, without Ray: reports, traces and logs are on disk."""

from __future__ import annotations

import io
import json
import os
from types import SimpleNamespace

import pytest
from rich.console import Console

from tests.kit.builders import call, trace
from tuner.errors import FunctionError, TrainingError
from tuner.runs.console import ConsoleMonitor
from tuner.runs.directory import RunDirectory
from tuner.traces import Outcome
from tuner.trinity import watch as watching
from tuner.trinity.progress import Journal, TrinityProgress, report_file
from tuner.trinity.watch import Death, Watch, advice, last_errors, printed_by

UPDATE = {"actor/grad_norm": 0.5, "time/read_experience": 3.0, "time/train_step": 1.0}


class Explorer:
    """Trinity-RFT's synchronizer as far as a waiting explorer is concerned."""

    def __init__(self):
        self.waits = False
        self.let_go = 0

    def explorer_waits(self):
        return self.waits

    def let_explorer_go_on(self):
        self.let_go += 1
        self.waits = False


class Run:
    def __init__(self, folder, monkeypatch, *, patience=2):
        monkeypatch.setattr(watching, "_ASK_RAY_EVERY", 0.0)
        self.folder = folder
        self.dead = []
        self.explorer = Explorer()
        self.journal = Journal(folder)
        self.journal.forget_reason()
        self.out = io.StringIO()
        config = SimpleNamespace(
            mode="both",
            buffer=SimpleNamespace(batch_size=2, train_batch_size=4),
            algorithm=SimpleNamespace(repeat_times=2),
        )
        progress = TrinityProgress(
            RunDirectory(folder), explorer="explorer", trainer="trainer", evaluations=[]
        )
        self.watch = Watch(
            config,
            progress,
            self.journal,
            ConsoleMonitor(3, Console(file=self.out, highlight=False, soft_wrap=True)),
            folder / "metrics.jsonl",
            patience=patience,
            deaths=lambda: self.dead,
            synchronizer=self.explorer,
        )

    def report(self, role, **row):
        path = report_file(self.folder, role)
        path.parent.mkdir(exist_ok=True)
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def rollouts(self, step, rewards, *, handed=None):
        """Rollouts of two tasks; None is one that failed."""
        calls = [call("c", [1, 2], [3, 4], [-1.0] * 2)]
        for number, reward in enumerate(rewards):
            made = trace(
                number // 2,
                number % 2,
                calls,
                reward=reward,
                step=step,
                outcome=Outcome.WORKFLOW_ERROR if reward is None else Outcome.COMPLETED,
                error="ValueError: no such tool" if reward is None else None,
            )
            self.journal.write([made])
        count = {} if handed is None else {"experience_pipeline/experience_count": handed}
        self.report("explorer", step=step, **{"rollout/finished_task_count": 2}, **count)


@pytest.fixture
def run(tmp_path, monkeypatch):
    return Run(tmp_path, monkeypatch)


def test_a_step_is_shown_with_its_reward_and_the_time_left_and_its_metrics_are_kept(run):
    run.rollouts(1, [0.0, 1.0, 1.0, 1.0], handed=4)
    run.watch.look()
    assert run.out.getvalue() == ""
    run.report("trainer", step=1, **UPDATE)
    run.watch.look()
    run.watch.look()
    [line] = run.out.getvalue().splitlines()
    assert line.startswith("step 1/3  reward 0.750  2 tokens/call  2 tokens/s  4.0 s")
    assert line.endswith("8 s left")
    [row] = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert (row["step"], row["reward/mean"], row["time/step"], row["signal"]) == (1, 0.75, 4.0, 1.0)


def test_a_mistake_in_a_function_ends_the_run_with_its_own_words(run):
    run.journal.stop(FunctionError("judge returned None"))
    with pytest.raises(FunctionError, match="judge returned None"):
        run.watch.look()


def test_a_dead_actor_ends_the_run_with_what_it_printed(run):
    run.dead = [Death("trainer", 7, "10.0.0.1", "killed", "  trainer.err:\n    loading")]
    with pytest.raises(TrainingError) as caught:
        run.watch.look()
    assert str(caught.value) == (
        "the actor trainer (process 7 on 10.0.0.1) died: killed\n"
        "It printed last:\n  trainer.err:\n    loading"
    )


def test_steps_without_signal_end_the_run_with_a_diagnosis(run):
    run.rollouts(1, [1.0, 1.0, 0.0, 0.0], handed=4)
    run.watch.look()
    run.rollouts(2, [None] * 4)
    with pytest.raises(TrainingError) as caught:
        run.watch.look()
    message = str(caught.value)
    assert message.startswith("2 steps in a row gave nothing to learn from")
    assert "4 of 4 rollouts of the last step failed" in message
    assert "ValueError: no such tool" in message


def test_a_run_that_has_learned_is_warned_once_and_continues(run):
    run.rollouts(1, [0.0, 1.0, 0.0, 1.0], handed=4)
    for step in (2, 3, 4):
        run.rollouts(step, [1.0] * 4, handed=4)
        run.watch.look()
    [warned] = [line for line in run.out.getvalue().splitlines() if line.startswith("warning")]
    assert "step 3: 2 steps in a row gave nothing to learn from: in 2 of 2 groups" in warned


def test_what_was_learned_before_a_resume_counts(run, monkeypatch):
    run.rollouts(1, [0.0, 1.0, 0.0, 1.0], handed=4)
    resumed = Run(run.folder, monkeypatch)
    for step in (2, 3):
        resumed.rollouts(step, [1.0] * 4, handed=4)
    resumed.watch.look()
    assert "warning: step 3" in resumed.out.getvalue()


@pytest.mark.parametrize("saved", [True, False])
def test_a_run_that_breaks_after_it_has_learned_ends_with_its_last_checkpoint(run, saved):
    run.rollouts(1, [0.0, 1.0, 0.0, 1.0], handed=4)
    folder = run.folder / "global_step_1/actor/huggingface"
    if saved:
        folder.mkdir(parents=True)
        (folder / "model.safetensors").touch()
    for step in (2, 3):
        run.rollouts(step, [None] * 4)
    with pytest.raises(TrainingError) as caught:
        run.watch.look()
    assert "4 of 4 rollouts of the last step failed" in str(caught.value)
    kept = f"The last checkpoint is {folder}" if saved else "had saved no checkpoint"
    assert kept in str(caught.value)


def test_groups_that_all_fail_alike_are_said_after_the_first_step(run):
    for step in (1, 2):
        run.rollouts(step, [0.0] * 4, handed=4)
        if step == 1:
            run.watch.look()
    assert run.out.getvalue().startswith("step 1: in 2 of 2 groups all rollouts have the same")


def test_a_step_with_signal_begins_the_count_anew(run):
    run.rollouts(1, [1.0] * 4, handed=4)
    run.rollouts(2, [1.0, 0.0, 0.0, 0.0], handed=4)
    run.rollouts(3, [1.0] * 4, handed=4)
    run.watch.look()


def test_an_explorer_that_waits_for_a_batch_which_cannot_fill_is_let_go_on(run, caplog):
    run.rollouts(1, [1.0, 0.0, None, None], handed=2)
    run.explorer.waits = True
    run.watch.look()
    assert run.explorer.let_go == 0  # a report of the trainer may be late
    run.watch.look()
    assert run.explorer.let_go == 1
    assert "leave the trainer with 2 of 4 experiences" in caplog.text


def test_an_explorer_that_waits_for_a_trainer_at_work_is_left_waiting(run):
    run.rollouts(1, [1.0, 0.0, 1.0, 0.0], handed=4)
    run.explorer.waits = True
    for _ in range(4):
        run.watch.look()
    assert run.explorer.let_go == 0


def test_experiences_that_were_trained_are_not_counted_for_the_next_batch(run):
    run.rollouts(1, [1.0, 0.0, 1.0, 0.0], handed=4)
    run.report("trainer", step=1, **UPDATE)
    run.rollouts(2, [1.0, 0.0, None, None], handed=2)
    run.explorer.waits = True
    run.watch.look()
    run.watch.look()
    assert run.explorer.let_go == 1


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
