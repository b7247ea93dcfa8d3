"""Real runs: vLLM's rollouts, verl's training and Ray's actors, on a CPU.

Three things that need a GPU are replaced (`shim/`): the base of vLLM's worker, the transfer of
weights, and verl's device. What NCCL, CUDA kernels or several engines do is not seen here. Each run
takes minutes.
"""

import json
import os
import sqlite3
import subprocess
from pathlib import Path

import pytest
from trinity.common.experience import Experience

from tests.integration.trinity.conftest import TINY
from tuner import Dataset, JudgeOutput, WorkflowOutput, tune
from tuner.errors import FunctionError
from tuner.traces import TraceStore

ROWS = [{"question": f"What is {a} plus 4?", "answer": str(a + 4)} for a in range(8)]

# Two GPUs are declared and none is used. The two actors of a CPU need no compiled kernels.
ON_A_CPU = [
    "tuner.device=cpu",
    "tuner.reasoning=keep",
    f"model.model_path={TINY}",
    "model.max_model_len=512",
    "model.max_response_tokens=32",
    "cluster.node_num=1",
    "cluster.gpu_per_node=2",
    "buffer.batch_size=2",
    "algorithm.repeat_times=2",
    "algorithm.optimizer.lr=1e-2",
    "buffer.total_steps=2",
    "explorer.runner_per_model=1",
    "explorer.rollout_model.engine_num=1",
    "explorer.rollout_model.enforce_eager=true",
    "explorer.rollout_model.dtype=float32",
    "explorer.rollout_model.gpu_memory_utilization=0.2",
    "explorer.eval_on_startup=false",
    "synchronizer.sync_method=checkpoint",
    "synchronizer.sync_timeout=900",
    "trainer.use_remove_padding=false",
    "trainer.trainer_config={model: {override_config: {attn_implementation: sdpa}}, "
    "actor: {fsdp_config: {use_torch_compile: false}}, "
    "ref: {fsdp_config: {use_torch_compile: false}}}",
    "buffer.trainer_input.experience_buffer={name: handed, storage_type: sql, "
    "max_read_timeout: 600}",
]


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


def handed_over(run_dir: Path) -> list[Experience]:
    """The experiences in the buffer between rollouts and training."""
    database = sqlite3.connect(run_dir / "buffer" / "handed.db")
    names = [name for (name,) in database.execute("SELECT name FROM sqlite_master") if name]
    found = []
    for name in names:
        columns = [row[1] for row in database.execute(f"PRAGMA table_info('{name}')")]
        if "experience_bytes" in columns:
            rows = database.execute(f"SELECT experience_bytes FROM '{name}' ORDER BY id")
            found += [Experience.deserialize(blob) for (blob,) in rows]
    return found


def check_exact(run_dir: Path, steps: int) -> None:
    """Experiences are the recorded calls: their ids, their log-probs, each of them once."""
    store = TraceStore(run_dir / "traces")
    traces = [trace for step in range(1, steps + 1) for trace in store.read("train", step)]
    calls = {(str(trace.id), call.id): call for trace in traces for call in trace.calls}
    trained = []
    for experience in handed_over(run_dir):
        keys = [(experience.info["rollout"], id) for id in experience.info["calls"]]
        parts = [calls[key] for key in keys]
        last = parts[-1]
        assert tuple(experience.tokens.tolist()) == last.prompt_ids + last.completion_ids
        mask = experience.action_mask
        sampled = experience.tokens[experience.prompt_length :][mask].tolist()
        assert sampled == [id for call in parts for id in call.completion_ids]
        assert experience.logprobs[mask].tolist() == pytest.approx(
            [logprob for call in parts for logprob in call.logprobs], abs=1e-5
        )
        trained += keys
    assert sorted(trained) == sorted(calls)
    assert len(calls) == 8 * steps
    assert sum(call.streamed for call in calls.values()) == 4 * steps


def no_ray_is_left() -> bool:
    listed = subprocess.run(
        ["ps", "-o", "pid=,args=", "--ppid", str(os.getpid())], capture_output=True, text=True
    )
    return not any("raylet" in line or "gcs_server" in line for line in listed.stdout.splitlines())


@pytest.mark.parametrize("mode", ["explore", "both"])
def test_a_run_does_what_was_asked_for(mode, tmp_path):
    result = tune(
        two_turns,
        by_length,
        ROWS,
        backend="trinity",
        experiment_name=mode,
        overrides=[f"mode={mode}", f"checkpoint_root_dir={tmp_path}", *ON_A_CPU],
    )
    assert result.run_dir == tmp_path / "AgentScope" / mode
    assert result.outcomes == {"completed": 8}
    assert len(result.rewards) == 2
    check_exact(result.run_dir, steps=2)
    # A conversation whose second call continues the first is one experience.
    first = [e for e in handed_over(result.run_dir) if e.eid.batch == 1]
    assert [len(e.info["calls"]) for e in first] == [2, 2, 2, 2]
    assert no_ray_is_left()
    if mode == "explore":
        assert (result.steps, result.checkpoint) == (0, None)
        return
    assert result.steps == 2
    rows = {int(row["step"]): row for row in result.history}
    for step in (1, 2):
        assert rows[step]["trainer/actor/grad_norm"] > 0
        assert abs(rows[step]["trainer/actor/ppo_kl"]) < 0.01
    # The second step was sampled by the weights of the first.
    for experience in handed_over(result.run_dir):
        assert experience.info["weights_versions"] == [experience.eid.batch - 1]
    assert any(result.checkpoint.glob("*.safetensors"))
    saved = json.loads((result.run_dir / "result.json").read_text())
    assert saved["steps"] == 2


def test_a_mistake_in_the_workflow_ends_the_run_with_its_own_words(tmp_path):
    with pytest.raises(FunctionError, match="is a return statement missing"):
        tune(
            forgets,
            by_length,
            ROWS,
            backend="trinity",
            experiment_name="wrong",
            overrides=["mode=explore", f"checkpoint_root_dir={tmp_path}", *ON_A_CPU],
        )
    assert no_ray_is_left()


def test_a_dataset_smaller_than_a_batch_is_refused_before_ray_starts(tmp_path):
    from tuner.errors import DatasetError

    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS[:1]))
    with pytest.raises(DatasetError, match="has 1 rows but batch_size is 2"):
        tune(
            two_turns,
            by_length,
            Dataset(path=str(file)),
            backend="trinity",
            overrides=[f"checkpoint_root_dir={tmp_path}", *ON_A_CPU],
        )


@pytest.mark.parametrize("reason", [None, FunctionError("judge returned None")])
def test_a_dead_actor_is_told_from_one_that_we_ended(reason, tmp_path, monkeypatch):
    """What Trinity-RFT raises when an actor is gone, without Ray."""
    import contextlib

    from trinity.cli import launcher

    from tuner.backends.trinity import cluster
    from tuner.backends.trinity.journal import Journal
    from tuner.errors import TrainingError

    @contextlib.contextmanager
    def joined(address, **_):
        yield "127.0.0.1:1"

    def died(config):
        if reason is not None:
            Journal(Path(config.checkpoint_job_dir)).stop(reason)
        raise RuntimeError("the actor died unexpectedly")

    monkeypatch.setattr(cluster, "joined", joined)
    monkeypatch.setattr(launcher, "run_stage", died)
    expected = TrainingError if reason is None else FunctionError
    message = "It said: RuntimeError: the actor died" if reason is None else "judge returned None"
    with pytest.raises(expected, match=message):
        tune(
            two_turns,
            by_length,
            ROWS,
            backend="trinity",
            experiment_name="dead",
            overrides=[f"checkpoint_root_dir={tmp_path}", *ON_A_CPU],
        )
