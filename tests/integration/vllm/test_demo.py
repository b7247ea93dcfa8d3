"""The demo learns with vLLM in a process of its own as it does with the default engine."""

import asyncio
import json
import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from tuner import JudgeOutput, WorkflowOutput, tune

REPOSITORY = Path(__file__).parents[3]
EXAMPLE = REPOSITORY / "examples" / "gsm8k"
VLLM = [
    "explorer.rollout_model.engine_type=vllm",
    "explorer.rollout_model.enforce_eager=true",
    "tuner.placement=separate",
]


@pytest.fixture
def example(monkeypatch):
    pytest.importorskip("agentscope")
    monkeypatch.syspath_prepend(EXAMPLE)
    import main

    return main


@pytest.mark.nightly
def test_the_demo_reaches_the_default_engines_accuracy(example, tmp_path):
    """Which comes to 0.95 to 0.97 on the held-out problems (benchmarks/learning.md), from 0.46."""
    result = tune(
        example.run_react_agent,
        example.judge_function,
        config_path=REPOSITORY / "config.yaml",
        overrides=[*VLLM, f"checkpoint_root_dir={tmp_path}", "buffer.total_steps=12"],
    )
    assert result.eval_before["test"] == pytest.approx(0.46, abs=0.02)
    assert result.eval_after["test"] > 0.92
    rows = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").open()]
    assert all(row["rollouts/completed"] == 128 for row in rows if row["step"] > 0)


def test_a_server_that_is_killed_during_rollouts_costs_neither_rollouts_nor_the_run(tmp_path):
    killed = []

    async def workflow(task, model):
        reply = await model.client.chat.completions.create(
            model=model.model_name, messages=[{"role": "user", "content": task["question"]}]
        )
        await asyncio.sleep(0)
        if task["question"].startswith("7 ") and not killed:
            killed.append(server_of(tmp_path))
            os.killpg(killed[0], signal.SIGKILL)
        return WorkflowOutput(response=reply.choices[0].message.content or "")

    async def judge(task, response):
        return JudgeOutput(reward=float(len(response) % 3))

    result = tune(
        workflow,
        judge,
        [{"question": f"{n} and 1"} for n in range(12)],
        overrides=[
            *VLLM,
            f"checkpoint_root_dir={tmp_path}",
            "buffer.batch_size=4",
            "buffer.total_steps=3",
            "algorithm.repeat_times=2",
            "model.max_response_tokens=8",
            "explorer.max_retry_times=2",
        ],
    )
    assert len(killed) == 1
    assert result.steps == 3
    rows = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").open()]
    assert all(row["rollouts/completed"] == 8 for row in rows if row["step"] > 0)
    log = (result.run_dir / "engine" / "vllm_0.log").read_text()
    assert log.count("Initializing a V1 LLM engine") == 2


def server_of(folder: Path) -> int:
    """The process of the server that logs under `folder`."""
    import psutil

    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # dead, and perhaps not yet waited for
            if "tuner.engines.vllm.server" in " ".join(child.cmdline()):
                return child.pid
    raise AssertionError(f"no server runs for {folder}")
