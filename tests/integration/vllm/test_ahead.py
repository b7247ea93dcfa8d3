"""Collection that runs ahead of training, with vLLM: versions, staleness and log-probs."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tuner import JudgeOutput, WorkflowOutput, tune
from tuner.traces import TraceStore

TINY = Path(__file__).parents[3] / "models" / "tiny_math"
STEPS, BOUND = 5, 2


async def ask(model, *texts):
    roles = ("user", "assistant", "user")
    messages = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=False)]
    reply = await model.client.chat.completions.create(model=model.model_name, messages=messages)
    return reply.choices[0].message.content or ""


async def workflow(task, model):
    first = await ask(model, task["question"])
    return WorkflowOutput(response=first + await ask(model, task["question"], first, "And then?"))


async def judge(task, response):
    return JudgeOutput(reward=sum(map(ord, response)) % 17 / 17)


def test_a_run_ahead_of_training_is_exact_and_within_its_bound(tmp_path):
    result = tune(
        workflow,
        judge,
        [{"question": f"Tom has {n} pens. He buys 2 more. How many pens now?"} for n in range(12)],
        overrides=[
            f"model.model_path={TINY}",
            "model.max_response_tokens=48",
            "model.temperature=1.2",
            "explorer.rollout_model.engine_type=vllm",
            "explorer.rollout_model.enforce_eager=true",
            "tuner.placement=separate",
            f"synchronizer.sync_offset={BOUND}",
            f"checkpoint_root_dir={tmp_path}",
            "buffer.batch_size=2",
            f"buffer.total_steps={STEPS}",
            "algorithm.repeat_times=3",
            "algorithm.optimizer.lr=0.001",
            "trainer.save_interval=1",
            f"trainer.max_checkpoints_to_keep={STEPS}",
        ],
    )
    steps = [row for row in result.history if row["step"]]
    assert len(steps) == STEPS
    assert all(counted(row) for row in steps)
    assert all(row["staleness/max"] <= BOUND for row in steps)
    assert max(row["staleness/max"] for row in steps) > 0
    assert result.outcomes == {"completed": 2 * 3 * STEPS}
    versions = check_log_probs(result)
    assert versions >= {0, 1, 2}


def counted(row):
    dropped = sum(n for name, n in row.items() if name.startswith("tokens/dropped/"))
    return row["tokens/sampled"] == row["tokens/trained"] + dropped


def check_log_probs(result):
    """Each token's log-prob by a forward pass of the checkpoint of the version it carries.

    Returns:
        The versions that were seen.
    """
    paths = {0: TINY}
    for folder in (result.run_dir / "checkpoints").iterdir():
        paths[json.loads((folder / "version.json").read_text())["version"]] = folder
    models = {
        version: AutoModelForCausalLM.from_pretrained(path) for version, path in paths.items()
    }
    store, seen = TraceStore(result.run_dir / "traces"), set()
    for step in range(1, STEPS + 1):
        for call in (call for trace in store.read("train", step) for call in trace.calls):
            ids = torch.tensor([call.prompt_ids + call.completion_ids])
            for version in set(call.versions):
                with torch.no_grad():
                    logits = models[version](ids).logits[0, len(call.prompt_ids) - 1 : -1]
                logprobs = (logits / 1.2).log_softmax(-1)
                for place, of in enumerate(call.versions):
                    if of == version:
                        expected = logprobs[place, call.completion_ids[place]].item()
                        assert call.logprobs[place] == pytest.approx(expected, abs=1e-3)
                        seen.add(version)
    return seen
