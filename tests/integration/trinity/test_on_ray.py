"""Real runs: vLLM's rollouts, verl's training and Ray's actors, on a CPU.

Three things that need a GPU are replaced (`shim/`): the base of vLLM's worker, the transfer of
weights, and verl's device. What NCCL, CUDA kernels or several engines do is not seen here. Each run
takes minutes, so each proves what it can.
"""

import contextlib
import json
import os
from pathlib import Path

import pytest

from tests.integration.trinity.on_ray import (
    ON_A_CPU,
    RUN,
    check_exact,
    handed_over,
    none_is_left,
)
from tuner import Dataset, JudgeOutput, WorkflowOutput, tune
from tuner.errors import DatasetError, FunctionError, TrainingError
from tuner.traces import TraceStore

ROWS = [{"question": f"What is {a} plus 4?", "answer": str(a + 4)} for a in range(8)]
EVAL = [{"question": f"What is {a} plus 5?", "answer": str(a + 5)} for a in range(2)]


@pytest.fixture(autouse=True)
def run(tmp_path):
    """Nothing that a run has started may be left."""
    os.environ[RUN] = str(tmp_path)
    yield
    del os.environ[RUN]
    assert none_is_left(str(tmp_path), seconds=20)


async def two_turns(task, model):
    """A plain call, then a streamed one that continues it."""
    messages = [{"role": "user", "content": task["question"]}]
    first = await model.client.chat.completions.create(model=model.model_name, messages=messages)
    text = first.choices[0].message.content or ""
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Again?"}]
    stream = await model.client.chat.completions.create(
        model=model.model_name, messages=messages, stream=True
    )
    async with stream:
        parts = [c.choices[0].delta.content or "" async for c in stream if c.choices]
    return WorkflowOutput(response="".join(parts))


async def by_length(task, response):
    return JudgeOutput(reward=float(len(response)))


async def forgets(task, model):
    await model.client.chat.completions.create(
        model=model.model_name, messages=[{"role": "user", "content": task["question"]}]
    )


async def always_fails(task, model):
    raise ValueError("no such tool: calculator")


def started(folder: Path, workflow, judge, *overrides: str, rows=ROWS, **given):
    return tune(
        workflow,
        judge,
        rows,
        backend="trinity",
        overrides=[f"checkpoint_root_dir={folder}", *ON_A_CPU, *overrides],
        **given,
    )


def test_the_tutorials_agent_with_a_tool_is_trained(tmp_path, capsys):
    from tests.integration.trinity.tool_agent import by_length, run_react_agent
    from tests.integration.trinity.tool_agent import taught_to_call_the_tool as taught

    model = taught(tmp_path / "taught")
    result = started(
        tmp_path,
        run_react_agent,
        by_length,
        f"model.model_path={model}",
        "model.max_model_len=1024",
        "model.max_response_tokens=64",
        "algorithm.repeat_times=4",
        "explorer.runner_per_model=2",
        "explorer.eval_on_startup=true",
        "explorer.eval_interval=2",
        experiment_name="tool",
        eval_dataset=EVAL,
    )
    run_dir = result.run_dir
    assert (result.steps, result.outcomes) == (2, {"completed": 16})
    check_exact(run_dir, steps=2)
    # A call of the tool and the answer after it are one experience, where the tool was called.
    store = TraceStore(result.traces)
    with_tool = [t for s in (1, 2) for t in store.read("train", s) if len(t.calls) > 1]
    assert with_tool
    assert all(trace.calls[0].response.get("tool_calls") for trace in with_tool)
    merged = [e for e in handed_over(run_dir) if len(e.info["calls"]) > 1]
    assert merged
    assert {e.info["rollout"] for e in merged} <= {str(trace.id) for trace in with_tool}
    for experience in merged:
        assert 0 < int(experience.action_mask.sum()) < len(experience.action_mask)
    # The second step was sampled by the weights of the first, and the log-probs are right.
    assert {
        tuple(e.info["weights_versions"]) for e in handed_over(run_dir) if e.eid.batch == 2
    } == {(1,)}
    rows = {int(row["step"]): row for row in result.history}
    for step in (1, 2):
        assert rows[step]["trainer/actor/grad_norm"] > 0
        assert abs(rows[step]["trainer/actor/ppo_kl"]) < 0.01
    check_places(result)
    said = capsys.readouterr().out
    assert "step 1/2  reward" in said
    assert " left" in said


def check_places(result) -> None:
    """Everything is where a local run has it."""
    run_dir = result.run_dir
    kept = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in kept] == [0, 1, 2]
    assert all("reward/mean" in row and "time/step" in row for row in kept[1:])
    assert json.loads((run_dir / "result.json").read_text())["steps"] == 2
    assert (run_dir / "report.html").stat().st_size > 1000
    assert (run_dir / "config.yaml").exists()
    assert any(result.checkpoint.glob("*.safetensors"))
    assert result.checkpoint.is_relative_to(run_dir)
    assert any(result.tensorboard.rglob("events.out.tfevents.*"))
    assert set(result.eval_before) == set(result.eval_after) == {"eval"}
    assert len(TraceStore(result.traces).read("eval", 0)) == 2


def test_a_mistake_in_the_workflow_ends_the_run_with_its_own_words(tmp_path):
    with pytest.raises(FunctionError, match="is a return statement missing"):
        started(tmp_path, forgets, by_length, "mode=explore", experiment_name="wrong")


def test_rollouts_that_all_fail_end_the_run_with_a_diagnosis(tmp_path, caplog):
    with pytest.raises(TrainingError) as caught:
        started(
            tmp_path,
            always_fails,
            by_length,
            "tuner.signal_patience=2",
            "explorer.max_retry_times=0",
            "buffer.total_steps=3",
            experiment_name="fails",
        )
    message = str(caught.value)
    assert "2 steps in a row gave nothing to learn from" in message
    assert "ValueError: no such tool: calculator" in message
    # The second step was reached although the first one gave the trainer nothing.
    assert "leave the trainer with 0 of 4 experiences" in caplog.text


def test_a_dataset_smaller_than_a_batch_is_refused_before_ray_starts(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS[:1]))
    with pytest.raises(DatasetError, match="has 1 rows but batch_size is 2"):
        started(tmp_path, two_turns, by_length, rows=Dataset(path=str(file)))


@pytest.fixture
def without_ray(monkeypatch):
    """A stage that does nothing, and a cluster that is none."""
    from tuner.trinity import workers as cluster
    from tuner.trinity.stage import Stage

    @contextlib.contextmanager
    def joined(address, **_):
        yield cluster.Cluster("127.0.0.1:1", None)

    def stage(run):
        monkeypatch.setattr(Stage, "run", lambda self: run(self.config))

    monkeypatch.setattr(cluster, "joined", joined)
    monkeypatch.setattr("tuner.trinity.launch.deaths", lambda *_: [])
    return stage


@pytest.mark.parametrize("reason", [None, FunctionError("judge returned None")])
def test_a_dead_actor_is_told_from_a_mistake(reason, tmp_path, without_ray):
    """What Trinity-RFT raises when an actor is gone."""
    from tuner.trinity.progress import Journal

    def died(config):
        if reason is not None:
            Journal(Path(config.checkpoint_job_dir)).stop(reason)
        raise RuntimeError("the actor died unexpectedly")

    without_ray(died)
    expected = TrainingError if reason is None else FunctionError
    message = "It said: RuntimeError: the actor died" if reason is None else "judge returned None"
    with pytest.raises(expected, match=message):
        started(tmp_path, two_turns, by_length, experiment_name="dead")


def test_a_new_run_beside_one_of_the_same_name_gets_the_next_name(tmp_path, without_ray):
    without_ray(lambda config: None)
    for name in ("again", "again-2", "again-3"):
        with pytest.raises(TrainingError) as caught:
            started(
                tmp_path,
                two_turns,
                by_length,
                "continue_from_checkpoint=false",
                experiment_name="again",
            )
        assert f"The run is in {tmp_path / 'runs' / name};" in str(caught.value)
        found = sorted(path.name for path in (tmp_path / "runs").iterdir())
        assert found[-1] == name


def test_another_setting_is_not_gone_on_with(tmp_path, without_ray):
    from tuner.errors import ConfigError

    without_ray(lambda config: (Path(config.checkpoint_job_dir) / "metrics.jsonl").touch())
    with pytest.raises(TrainingError):
        started(tmp_path, two_turns, by_length, experiment_name="same")
    with pytest.raises(TrainingError):
        started(tmp_path, two_turns, by_length, "buffer.total_steps=3", experiment_name="same")
    with pytest.raises(ConfigError, match=r"algorithm\.optimizer\.lr was 0\.01 and is 0\.5"):
        started(
            tmp_path, two_turns, by_length, "algorithm.optimizer.lr=0.5", experiment_name="same"
        )
