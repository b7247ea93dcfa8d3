"""What the real runs share: a configuration for a CPU, and a look at what a run left behind."""

import os
import sqlite3
import time
from pathlib import Path

import pytest
from trinity.common.experience import Experience

from tests.integration.trinity.conftest import TINY
from tuner.traces import TraceStore

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
    "synchronizer.sync_timeout=1800",
    "trainer.use_remove_padding=false",
    "trainer.trainer_config={model: {override_config: {attn_implementation: sdpa}}, "
    "actor: {fsdp_config: {use_torch_compile: false}}, "
    "ref: {fsdp_config: {use_torch_compile: false}}}",
    "buffer.trainer_input.experience_buffer={name: handed, storage_type: sql, "
    "max_read_timeout: 1800}",
]

# Every process of a run inherits it, whatever the run itself does to find them.
RUN = "TUNER_TEST_RUN"


def processes(run: str, title: str = "") -> list[int]:
    """The processes that a run has started and that live, or those with this in their titles."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            environment = (entry / "environ").read_bytes().split(b"\0")
            called = (entry / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if f"{RUN}={run}".encode() in environment and title in called:
            found.append(int(entry.name))
    return found


def none_is_left(run: str, *, seconds: float = 60) -> bool:
    """Whether every process of a run ends."""
    deadline = time.monotonic() + seconds
    while (left := set(processes(run)) - {os.getpid()}) and time.monotonic() < deadline:
        time.sleep(0.2)
    return not left


def handed_over(run_dir: Path) -> list[Experience]:
    """The experiences in the buffer between rollouts and training, in the order of their coming."""
    database = sqlite3.connect(run_dir / "buffer" / "handed.db")
    found = database.execute("SELECT experience_bytes FROM handed_blob ORDER BY id")
    return [Experience.deserialize(blob) for (blob,) in found]


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
