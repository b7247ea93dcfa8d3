"""Runs of vision models: what is trained, recorded and saved."""

import base64
import signal

import pytest
import torch
import transformers
from huggingface_hub import ModelCard
from safetensors.torch import load_file

from tests.kit import forked, runs
from tests.kit.examples import grid
from tests.kit.models import png, save_chat_model, save_vision_model
from tuner import evaluate, tune
from tuner.engines.images import ALBUM
from tuner.engines.transformers.vision import vision_of, vision_parameters
from tuner.errors import ConfigError
from tuner.runs.models import load_model
from tuner.tools.check import check_run
from tuner.tools.export import export
from tuner.traces.store import read_traces
from tuner.training.batch import build_batch
from tuner.training.forward.layouts import exact_forward
from tuner.tune import prepare


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


def run(folder, path, judge=judge, **settings):
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
    "branches": {
        "algorithm.algorithm_type": "tree",
        "algorithm.repeat_times": 6,
        "tuner.branching.ends": 2,
        "tuner.branching.trunks": 3,
    },
}


@grid("case", CASES, quick=1)
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
    assert any(trace.origin is not None for trace in traces) is (case == "branches")
    assert all(trace.origin is None or trace.origin.diverged is None for trace in traces)
    saved = result.run_dir / "checkpoints" / "step_000001"
    assert (saved / "preprocessor_config.json").exists()
    if case == "adapter":
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
def test_settings_that_do_not_support_images_are_refused_by_name(folder, tmp_path, settings, why):
    with pytest.raises(ConfigError, match=why):
        run(folder, tmp_path, **settings)


def test_a_model_of_text_has_no_vision_to_load(tmp_path):
    folder = save_chat_model(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"load_vision is true, but models of type 'qwen3' read"):
        run(folder, tmp_path, **{"tuner.images.load_vision": "true"})


def test_a_model_of_text_has_no_vision_to_train(tmp_path):
    with pytest.raises(ConfigError, match="the model reads text only"):
        run(save_chat_model(tmp_path / "model"), tmp_path, **CASES["trained"])


KILLED = {
    "name": "run",  # resumed by this name
    "buffer.total_steps": 2,
    "trainer.save_interval": 1,
    "tuner.images.train_vision": "true",
    "tuner.deterministic": "true",
}


def kill_itself(folder, path):
    run(folder, path, judge=runs.killing_itself(judge, 8), **KILLED)  # in the second step


@pytest.mark.long
def test_a_killed_run_ends_with_the_same_weights(folder, tmp_path):
    assert forked.run(kill_itself, folder, tmp_path / "cut") == -signal.SIGKILL
    results = [run(folder, tmp_path / name, **KILLED) for name in ("cut", "straight")]
    found, expected = (load_file(one.checkpoint / "model.safetensors") for one in results)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.long
def test_an_evaluation_keeps_the_images(folder, tmp_path):
    evaluate(
        look,
        judge,
        {"held-out": [{"seed": seed} for seed in range(2)]},
        overrides=[f"model.model_path={folder}", "tuner.device=cpu"],
        output=tmp_path / "out",
    )
    (file,) = (tmp_path / "out").rglob("*.jsonl")
    traces = list(read_traces(file))
    assert [len(call.images) for trace in traces for call in trace.calls] == [1, 2, 1, 2]


@pytest.mark.long
def test_a_model_of_both_forms_reads_images_where_that_is_asked_for(tmp_path):
    """Qwen3.5: a run, its adapter as a candidate, and merged."""
    folder = save_vision_model(tmp_path / "model", "qwen3_5")
    on_cpu = {"device": torch.device("cpu"), "dtype": torch.float32}
    assert vision_of(load_model(str(folder), **on_cpu)) is None
    loaded = {"tuner.images.load_vision": "true"}
    result = run(folder, tmp_path / "whole", **loaded)
    (trained,) = (one for one in tmp_path.rglob("whole/**/step_000001") if one.is_dir())
    assert vision_of(load_model(str(trained), **on_cpu)) is not None
    assert result.history[-1]["train/logprob_mismatch_max"] < 1e-5

    adapter = run(
        folder, tmp_path / "adapter", **loaded, **{"model.lora_configs": "[{lora_rank: 2}]"}
    )
    evaluate(
        look,
        judge,
        {"held-out": [{"seed": 0}]},
        candidates=adapter.run_dir,
        overrides=[f"model.model_path={folder}", "tuner.device=cpu"],
        output=tmp_path / "out",
    )
    (file,) = (tmp_path / "out").rglob("*.jsonl")
    assert [call.images for trace in read_traces(file) for call in trace.calls]
    export(adapter.run_dir, tmp_path / "merged", merge=True)
    assert vision_of(load_model(str(tmp_path / "merged"), **on_cpu)) is not None


def test_check_counts_the_memory_of_images(folder, tmp_path):
    overrides = [
        f"model.model_path={folder}",
        f"checkpoint_root_dir={tmp_path}",
        "buffer.batch_size=2",
        "buffer.total_steps=1",
        "algorithm.repeat_times=3",
    ]
    tasks = [{"seed": seed} for seed in range(2)]
    text = check_run(prepare(look, judge, train_dataset=tasks, overrides=overrides)).text
    assert "; both include 0.00 for 2 images" in text


@pytest.mark.long
def test_an_exported_model_is_loaded_by_transformers(tmp_path):
    result = run(save_vision_model(tmp_path / "model", "qwen3_vl"), tmp_path)
    export(result.run_dir, tmp_path / "out")
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.pipeline_tag == "image-text-to-text"
    assert "import AutoModelForImageTextToText, AutoProcessor\n" in card.text
    loaded = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "out")
    expected = load_file(result.checkpoint / "model.safetensors")
    assert all(torch.equal(loaded.state_dict()[name], value) for name, value in expected.items())
    # `AutoProcessor` asks for torchvision, too, for videos.
    images = transformers.AutoImageProcessor.from_pretrained(tmp_path / "out", backend="pil")
    assert images.patch_size == loaded.config.vision_config.patch_size
    transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
