"""Success means that the steps that were asked for were done, whatever Trinity-RFT says."""

import json
import socket
import stat
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from tests.kit.builders import call, trace
from tuner.config.schema import TunerSection
from tuner.errors import ConfigError, DatasetError, FunctionError, TrainingError
from tuner.traces import Outcome, RolloutId
from tuner.trinity import launch
from tuner.trinity.handover import TrinitySettings
from tuner.trinity.launch import _Run
from tuner.trinity.preparation import PreparedRun
from tuner.trinity.progress import Journal, report_file
from tuner.trinity.stage import SERVE_KEY, GaveUp

UPDATE = {"actor/grad_norm": 0.5, "actor/ppo_kl": 0.001}


@pytest.fixture
def run(tmp_path):
    """A run of 2 steps, 2 tasks x 2 rollouts each, and what its processes reported."""

    def make(
        *,
        mode="both",
        trained=2,
        handed=(4, 4),
        error=None,
        log=None,
        trainer_steps=None,
        **tuner,
    ):
        config = SimpleNamespace(
            mode=mode,
            checkpoint_job_dir=str(tmp_path),
            algorithm=SimpleNamespace(repeat_times=2, algorithm_type="multi_step_grpo"),
            buffer=SimpleNamespace(
                batch_size=2,
                train_batch_size=4,
                total_steps=2,
                total_epochs=1,
                trainer_input=SimpleNamespace(
                    experience_buffer=SimpleNamespace(max_read_timeout=1800)
                ),
                explorer_input=SimpleNamespace(eval_tasksets=[SimpleNamespace(name="held")]),
            ),
            explorer=SimpleNamespace(name="explorer"),
            trainer=SimpleNamespace(name="trainer", total_steps=trainer_steps),
            synchronizer=SimpleNamespace(sync_timeout=3600),
        )
        settings = TrinitySettings({}, TunerSection(**tuner), {}, ("tensorboard",))
        made = _Run(PreparedRun(settings, {}, config, 4, [4], {}, {}, own_cluster=True))
        made._error = error
        report(tmp_path, "trainer", [{"step": n + 1, **UPDATE} for n in range(trained)])
        report(
            tmp_path,
            "explorer",
            [
                {"step": n + 1, "experience_pipeline/experience_count": count}
                for n, count in enumerate(handed)
            ],
        )
        if log is not None:
            (tmp_path / "log").mkdir()
            (tmp_path / "log" / "trainer.log").write_text(log)
        return made

    return make


def report(folder, role, rows):
    path = report_file(folder, role)
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_finished_run_has_its_rewards_outcomes_tokens_and_checkpoint(run, tmp_path):
    made = run()
    journal = Journal(tmp_path)
    for step in (1, 2):
        for task in (0, 1):
            for rollout in (0, 1):
                calls = [call("c", [1, 2], [3, 4, 5], [-1.0] * 3)]
                journal.write([trace(task, rollout, calls, reward=float(step), step=step)])
    for step, reward in ((0, 0.25), (2, 0.75)):
        measured = trace(0, 0, [], reward=reward)
        journal.write([replace(measured, id=RolloutId(step, 0, 0, "held"))])
    folder = tmp_path / "global_step_2" / "actor" / "huggingface"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"")
    (tmp_path / "global_step_10").mkdir()
    result = made.result()
    assert result.steps == 2
    assert result.rewards == [1.0, 2.0]
    assert (result.eval_before, result.eval_after) == ({"held": 0.25}, {"held": 0.75})
    assert result.checkpoint == folder
    assert result.outcomes == {"completed": 8}
    assert (result.tokens.sampled, result.tokens.trained) == (24, 24)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows[1]["trainer/actor/grad_norm"] == 0.5
    assert rows[1]["reward/mean"] == 1.0
    assert json.loads((tmp_path / "result.json").read_text())["steps"] == 2


def test_a_trainer_that_died_is_an_error_with_its_log_although_trinity_says_success(run):
    log = "ERROR 11-21 18:09:57 [trainer.py:145] ModuleNotFoundError: No module named 'flash_attn'"
    with pytest.raises(TrainingError) as caught:
        run(trained=1, log=log).result()
    message = str(caught.value)
    assert "1 of 2 steps were trained" in message
    assert "No module named 'flash_attn'" in message


def test_what_trinity_raised_is_quoted(run):
    with pytest.raises(TrainingError, match="It said: ActorDiedError: the engine is gone"):
        run(error="ActorDiedError: the engine is gone").result()


@pytest.mark.parametrize("said", [GaveUp("the explorer gave up"), RuntimeError("a call failed")])
@pytest.mark.parametrize("seen_after", [3, None])
def test_why_it_ended_is_what_is_seen_a_moment_later(run, monkeypatch, said, seen_after):
    monkeypatch.setattr(launch, "POLL_SECONDS", 0)
    looked = []

    def look():
        looked.append(1)
        if len(looked) == seen_after:
            raise TrainingError("the actor engine (process 7 on 10.0.0.3) died: its node has died")

    made = run(trained=1)
    stage = SimpleNamespace(run=Mock(side_effect=said))
    made._run(stage, SimpleNamespace(look=look, say=lambda: None))
    with pytest.raises(TrainingError, match="1 of 2 steps were trained") as caught:
        made.result()
    expected = said if seen_after is None else "(process 7 on 10.0.0.3) died: its node has died"
    assert str(expected) in str(caught.value)


def test_steps_that_reported_no_gradient_were_not_trained(run, tmp_path):
    made = run()
    report(tmp_path, "trainer", [{"step": 1, "sample/task_count": 2}, {"step": 2}])
    with pytest.raises(TrainingError, match="0 of 2 steps were trained"):
        made.result()


def test_too_few_experiences_for_all_steps_are_no_failure_and_are_said(run, caplog):
    result = run(trained=1, handed=(4, 3)).result()
    assert result.steps == 1
    assert "1 of 2 steps were trained: rollouts gave 7 experiences" in caplog.text


def test_the_trainers_own_number_of_steps_counts_where_it_is_set(run):
    assert run(trained=1, trainer_steps=1).result().steps == 1
    with pytest.raises(TrainingError, match="2 of 3 steps were trained"):
        run(trainer_steps=3, handed=(8, 8)).result()


def test_exploring_is_done_when_every_step_was_handed_over(run):
    result = run(mode="explore", trained=0).result()
    assert (result.steps, result.checkpoint) == (0, None)
    with pytest.raises(TrainingError, match="1 of 2 steps of rollouts were done"):
        run(mode="explore", trained=0, handed=(4,)).result()


def test_a_mistake_in_a_function_comes_up_as_what_it_is(run, tmp_path):
    made = run(trained=0)
    Journal(tmp_path).stop(FunctionError("judge returned None"))
    with pytest.raises(FunctionError, match="judge returned None"):
        made.result()


def test_tokens_of_failed_and_lonely_rollouts_are_counted_as_dropped(run, tmp_path):
    journal = Journal(tmp_path)
    made = run()
    calls = [call("c", [1], [2, 3], [-1.0] * 2)]
    journal.write([trace(0, 0, calls, reward=1.0), trace(0, 1, calls, reward=0.0)])
    journal.write([trace(1, 0, calls, reward=1.0)])
    failed = trace(1, 1, calls, outcome=Outcome.WORKFLOW_ERROR)
    journal.write([failed])
    tokens = made.result().tokens
    assert (tokens.sampled, tokens.trained) == (8, 4)
    assert tokens.dropped == {"group_of_one": 2, "workflow_error": 2}


def test_tokens_of_failed_rollouts_that_are_penalized_are_counted_as_trained(run, tmp_path):
    made = run(on_failure={"penalize": -1.0})
    calls = [call("c", [1], [2, 3], [-1.0] * 2)]
    failed = trace(0, 1, calls, outcome=Outcome.WORKFLOW_ERROR)
    Journal(tmp_path).write([trace(0, 0, calls, reward=1.0), failed])
    tokens = made.result().tokens
    assert (tokens.sampled, tokens.trained, tokens.dropped) == (4, 4, {})


def test_tokens_of_lonely_rollouts_are_counted_as_trained_where_no_group_is_compared(run, tmp_path):
    made = run(handed=(2, 2), trainer_steps=2, trained=2)
    made._config.algorithm.repeat_times = 1
    calls = [call("c", [1], [2, 3], [-1.0] * 2)]
    Journal(tmp_path).write([trace(0, 0, calls, reward=1.0), trace(1, 0, calls, reward=0.0)])
    tokens = made.result().tokens
    assert (tokens.sampled, tokens.trained, tokens.dropped) == (4, 4, {})


def test_a_run_directory_is_its_owners_alone_before_anything_is_in_it(tmp_path, monkeypatch):
    tree = {"project": "p", "group": "g", "name": "n", "checkpoint_root_dir": str(tmp_path)}
    settings = TrinitySettings(tree, TunerSection(), {}, ())
    modes = []

    def prepare(settings, **_):
        modes.append(stat.S_IMODE(settings.run_dir.stat().st_mode))
        raise DatasetError("no rows")

    monkeypatch.setattr(launch, "resolve", lambda layers: settings)
    monkeypatch.setattr(launch, "prepare", prepare)
    functions = dict.fromkeys(("workflow", "judge", "train_dataset", "eval_dataset", "report"))
    with pytest.raises(DatasetError):
        launch.run_trinity(None, **functions)
    assert modes == [0o700]


def test_a_server_is_started_where_nobody_listens_and_with_its_key(run, tmp_path, monkeypatch):
    given = []

    def joined(address, **options):
        given.append(options["env"])
        raise ConnectionError("no Ray here")

    monkeypatch.setattr(launch.workers, "joined", joined)
    monkeypatch.setenv(SERVE_KEY, "k1")
    made = run(mode="serve")
    config, before = made._config, tmp_path / "explorer_server_url.txt"
    config.get_envs, config.ray_namespace = dict, "n"
    config.cluster = SimpleNamespace(gpu_per_node=1)
    with socket.create_server(("127.0.0.1", 0)) as other:
        config.explorer.listen_address, config.explorer.proxy_port = other.getsockname()
        with pytest.raises(ConfigError, match=r"proxy_port: cannot listen"):
            made.execute(launch.workers.LOCAL)
    before.write_text("http://what-an-earlier-server-said:1")
    with pytest.raises(ConnectionError):
        made.execute(launch.workers.LOCAL)
    assert given == [{SERVE_KEY: "k1"}]
    assert not before.exists()
