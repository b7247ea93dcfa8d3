"""Runs of vision models: what is trained, recorded and saved."""

import base64

import pytest
import torch

from tests.kit.models import png, save_chat_model, save_vision_model
from tuner import tune
from tuner.engines.images import ALBUM
from tuner.engines.transformers.vision import vision_of, vision_parameters
from tuner.errors import ConfigError
from tuner.runs.models import load_model
from tuner.traces.store import read_traces
from tuner.training.batch import build_batch
from tuner.training.forward.layouts import exact_forward


async def look(task, model):
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=model.base_url, api_key=model.api_key)
    data = base64.b64encode(png(20, 12, seed=task["seed"])).decode()
    shown = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "What?"}, shown]}]
    for _ in range(2):
        answer = await client.chat.completions.create(
            model=model.model_name, messages=messages, max_tokens=3
        )
        said = answer.choices[0].message.content
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": [shown]}]
    return said


def judge(task, response):
    return float(sum(response.encode()) % 7)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_vision_model(tmp_path_factory.mktemp("vision"))


def run(folder, path, **settings):
    given = {
        "model.model_path": folder,
        "checkpoint_root_dir": path,
        "buffer.batch_size": 2,
        "buffer.total_steps": 1,
        "algorithm.repeat_times": 3,
        "algorithm.optimizer.lr": 0.01,
        "tuner.device": "cpu",
        **settings,
    }
    overrides = [f"{key}={value}" for key, value in given.items()]
    return tune(look, judge, [{"seed": seed} for seed in range(2)], overrides=overrides)


CASES = {
    "frozen": {},
    "trained": {"tuner.images.train_vision": "true"},
    "adapter": {"model.lora_configs": "[{lora_rank: 2}]"},
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_trains_what_it_is_asked_to(folder, tmp_path, case):
    result = run(folder, tmp_path, **CASES[case])
    start = load_model(str(folder), device=torch.device("cpu"), dtype=torch.float32)
    # As another process reads them.
    ALBUM._content.clear()
    traces = list(read_traces(result.run_dir / "traces" / "step_000001.jsonl"))
    batch = build_batch(traces)
    assert batch.trained_tokens
    got = exact_forward(start, None, compiled=False).logprobs(start, batch.rows, with_entropy=False)
    recorded = torch.tensor([one for row in batch.rows for one in row.logprobs])
    assert torch.allclose(got.logp_T, recorded, atol=1e-5)
    saved = result.run_dir / "checkpoints" / "step_000001"
    assert (saved / "preprocessor_config.json").exists()
    if case == "adapter":
        from safetensors.torch import load_file

        names = list(load_file(saved / "adapter_model.safetensors"))
        assert names
        assert all("language_model" in name for name in names)
        return
    end = load_model(str(saved), device=torch.device("cpu"), dtype=torch.float32)
    assert vision_of(end) is not None
    seen = {id(p) for p in vision_parameters(start)}
    pairs = list(zip(start.parameters(), end.parameters(), strict=True))
    moved = [not torch.equal(p, other) for p, other in pairs if id(p) in seen]
    assert any(moved) is (case == "trained")
    assert any(not torch.equal(p, other) for p, other in pairs if id(p) not in seen)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"algorithm.algorithm_type": "ppo"}, "does not support vision models"),
        ({"explorer.rollout_model.engine_type": "vllm"}, "explorer.rollout_model.engine_type"),
    ],
)
def test_what_does_not_see_is_refused_by_name(folder, tmp_path, settings, why):
    with pytest.raises(ConfigError, match=why):
        run(folder, tmp_path, **settings)


def test_a_model_of_text_has_no_vision_to_train(tmp_path):
    with pytest.raises(ConfigError, match="the model reads text only"):
        run(save_chat_model(tmp_path / "model"), tmp_path, **CASES["trained"])
