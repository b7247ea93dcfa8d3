"""A real model on a CPU: two steps of the example, bit for bit, and the template made of it."""

import hashlib
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tuner import JudgeOutput, tune
from tuner.templates import Template, create
from tuner.traces import read_traces

EXAMPLE = Path(__file__).parents[3] / "examples" / "smollm2"
# One rollout after the other, so that the same tokens are sampled each time.
SMALL = [
    "tuner.deterministic=true",
    "buffer.total_steps=2",
    "buffer.batch_size=2",
    "algorithm.repeat_times=4",
    "buffer.explorer_input.eval_tasksets=[]",
]


@pytest.fixture(params=["main", "main_openai"])
def agent(request, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLE)
    return importlib.import_module(request.param)


async def graded(task, response):
    """A reward that differs inside groups; of eight rollouts none may find the answer."""
    text = response if isinstance(response, str) else response.get_text_content() or ""
    return JudgeOutput(reward=float(len(text) % 7))


def trained(agent, folder):
    """Digests of the weights and of the sampled tokens of a short run, and its metrics."""
    overrides = [*SMALL, f"checkpoint_root_dir={folder}"]
    result = tune(agent.run_agent, graded, config_path=agent.CONFIG, overrides=overrides)
    weights = hashlib.sha256((result.checkpoint / "model.safetensors").read_bytes())
    sampled = [
        call.completion_ids
        for step in (1, 2)
        for trace in read_traces(result.traces / f"step_{step:06d}.jsonl")
        for call in trace.calls
    ]
    measured = [
        {name: value for name, value in row.items() if not re.search("time/|second", name)}
        for row in result.history
    ]
    return weights.hexdigest(), sampled, measured


@pytest.mark.nightly
def test_two_steps_are_the_same_bits_each_time(agent, tmp_path):
    first, second = trained(agent, tmp_path / "one"), trained(agent, tmp_path / "two")
    assert first == second
    _, sampled, measured = first
    assert len(sampled) >= 16
    assert max(row["train/grad_norm"] for row in measured) > 0
    assert all(row["train/logprob_mismatch_max"] < 1e-3 for row in measured)
    for row in measured:
        dropped = sum(n for name, n in row.items() if name.startswith("tokens/dropped/"))
        assert row["tokens/sampled"] == row["tokens/trained"] + dropped


@pytest.mark.nightly
def test_the_template_trains_where_it_was_copied(tmp_path):
    create(Template.REAL, tmp_path)
    subprocess.run(
        [sys.executable, "main.py", "buffer.total_steps=1", *SMALL[2:]], cwd=tmp_path, check=True
    )
    result = json.loads((tmp_path / "checkpoints/smollm2/react/result.json").read_text())
    assert result["outcomes"] == {"completed": 8}
    assert result["steps"] == 1
