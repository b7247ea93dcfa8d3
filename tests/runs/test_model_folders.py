"""A GGUF file becomes a Hugging Face folder: once, whole, with the file's own numbers."""

import os
import shutil
import signal
import socket
import threading
import time
from types import SimpleNamespace

import gguf
import huggingface_hub
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from tests.kit import forked, gguf_files, runs
from tuner.config import keys
from tuner.errors import ConfigError, ModelLoadError
from tuner.loop import run_local
from tuner.runs import models as model_folders
from tuner.runs.directory import RunDirectory
from tuner.runs.models import load_model, load_settings, load_tokenizer, model_folder
from tuner.runs.placement import vllm_settings
from tuner.tools.candidates import Candidate, find_candidate
from tuner.tools.export import model_card
from tuner.trinity.installed import models_as_folders

SETTING = "model.critic_model_path"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tuner" / "models"


@pytest.fixture
def file(tmp_path):
    return gguf_files.write(tmp_path / "tiny.gguf")


def with_cache(home, function, *arguments):
    """For processes that are forked from one with another environment."""
    os.environ["XDG_CACHE_HOME"] = home
    return function(*arguments)


def loaded(path):
    return load_model(str(path), device=torch.device("cpu"), dtype=torch.float32, setting=SETTING)


def refused(path):
    with pytest.raises(ModelLoadError) as caught:
        loaded(path)
    said = str(caught.value)
    assert f"{SETTING} = {str(path)!r}" in said
    assert "\n" not in said
    return said


def complete(cache):
    return [one for one in cache.iterdir() if not one.name.startswith(".")]


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.Q8_0, Kind.Q4_1])
def test_weights_are_those_of_the_file_dequantised(tmp_path, kind):
    file = gguf_files.write(tmp_path / "tiny.gguf", kind=kind)
    stored = {one.name: gguf.dequantize(one.data, one.tensor_type) for one in reader(file).tensors}
    model = loaded(file)

    def same(name, parameter):
        return np.array_equal(stored[name], parameter.detach().numpy())

    assert same("token_embd.weight", model.model.embed_tokens.weight)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for number, layer in enumerate(model.model.layers):
        assert same(f"blk.{number}.ffn_down.weight", layer.mlp.down_proj.weight)
        assert same(f"blk.{number}.attn_v.weight", layer.self_attn.v_proj.weight)
        # llama.cpp has the halves of rotary pairs beside each other.
        rows = stored[f"blk.{number}.attn_q.weight"].reshape(gguf_files.HEADS, -1, 2, 32)
        rows = rows.swapaxes(1, 2).reshape(32, 32)
        assert np.array_equal(rows, layer.self_attn.q_proj.weight.detach().numpy())


def reader(file):
    return gguf.GGUFReader(file)


def test_an_output_of_its_own_stays_one(tmp_path):
    tensors = gguf_files.weights() | {"output.weight": gguf_files.weights(1)["token_embd.weight"]}
    model = loaded(gguf_files.write(tmp_path / "tiny.gguf", tensors=tensors))
    assert np.array_equal(model.lm_head.weight.detach().numpy(), tensors["output.weight"])


def test_tokenizer_template_and_ends_are_those_of_the_file(file):
    tokenizer, model = load_tokenizer(str(file)), loaded(file)
    assert tokenizer.chat_template == gguf_files.TEMPLATE
    assert tokenizer.eos_token_id == model.generation_config.eos_token_id == gguf_files.END
    assert load_settings(str(file)).max_position_embeddings == 256
    turn = [{"role": "user", "content": "hehe"}]
    ids = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False)
    said = tokenizer.convert_ids_to_tokens(ids)
    assert said[:1] == ["<|im_start|>"]
    assert said.count("he") == 2
    assert tokenizer.decode(ids).startswith("<|im_start|>user\nhehe<|im_end|>\n")


def test_digits_are_split_as_the_model_learned_it(file):
    tokenizer = load_tokenizer(str(file))
    assert tokenizer.tokenize("e\n\n12") == ["e", "ĊĊ", "1", "2"]
    assert tokenizer.tokenize("e  1") == ["e", "ĠĠ", "1"]


def test_a_file_is_converted_once_and_it_is_said(file, caplog, monkeypatch):
    folder = model_folder(str(file), SETTING)
    (line,) = [one.getMessage() for one in caplog.records if one.name == model_folders.__name__]
    assert all(part in line for part in (SETTING, str(file), folder, "once"))
    monkeypatch.setattr(model_folders, "_read", None)
    caplog.clear()
    assert model_folder(str(file)) == model_folder(str(file.parent)) == folder
    assert not caplog.records


def test_another_file_of_the_same_name_has_a_folder_of_its_own(file, cache):
    first = loaded(file)
    gguf_files.write(file, tensors=gguf_files.weights(seed=1))
    assert not torch.equal(loaded(file).lm_head.weight, first.lm_head.weight)
    assert len(complete(cache)) == 2


def test_a_package_loads_without_its_code(tmp_path, monkeypatch):
    gguf_files.write(tmp_path / "site" / "tiny_model" / "tiny.gguf")
    gguf_files.install(tmp_path / "site", "tiny-model", ["tiny_model/tiny.gguf"])
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert loaded("package:tiny-model").config.model_type == "llama"
    assert load_tokenizer("package:tiny-model").eos_token == "<|im_end|>"


def test_a_package_may_ship_a_hugging_face_folder(tmp_path, random_model_path, monkeypatch, cache):
    shutil.copytree(random_model_path, tmp_path / "site" / "tiny_model")
    files = [f"tiny_model/{one.name}" for one in random_model_path.iterdir()]
    gguf_files.install(tmp_path / "site", "tiny-model", files)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert model_folder("package:tiny-model") == str(tmp_path / "site" / "tiny_model")
    assert loaded("package:tiny-model").config.model_type == "qwen3"
    assert not cache.exists()


@pytest.mark.parametrize("share", [0.98, 0.5, 0.1, 0.005])
def test_a_file_that_is_cut_short_is_named(file, share):
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * share)])
    said = refused(file)
    assert "cannot be loaded as a GGUF model" in said
    assert "download the file again" in said


def test_garbage_behind_the_right_name_is_named(tmp_path):
    file = tmp_path / "tiny.gguf"
    file.write_bytes(b"GGUF\x03\0\0\0" + np.random.default_rng(0).bytes(5000))
    assert "download the file again" in refused(file)


def test_a_kind_that_transformers_does_not_know_asks_for_the_folder(tmp_path):
    said = refused(gguf_files.write(tmp_path / "tiny.gguf", architecture="rwkv6"))
    assert "rwkv6" in said
    assert "Hugging Face folder" in said


def test_weights_that_are_not_finite_are_named(tmp_path):
    tensors = gguf_files.weights()
    tensors["blk.1.ffn_up.weight"][3, 4] = np.nan
    said = refused(gguf_files.write(tmp_path / "tiny.gguf", tensors=tensors))
    assert "model.layers.1.mlp.up_proj.weight" in said
    assert "not finite" in said


def test_weights_that_are_missing_are_named_and_not_random(tmp_path):
    tensors = gguf_files.weights()
    del tensors["blk.1.ffn_up.weight"]
    said = refused(gguf_files.write(tmp_path / "tiny.gguf", tensors=tensors))
    assert "lacks 1 of the model's weights (model.layers.1.mlp.up_proj.weight)" in said
    assert "download it again" in said


def test_rotary_scaling_that_would_be_lost_is_refused(tmp_path):
    tensors = gguf_files.weights() | {"rope_freqs.weight": np.ones(4, np.float32)}
    file = gguf_files.write(tmp_path / "tensor.gguf", tensors=tensors)
    scaling = gguf.RopeScalingType.YARN
    key = gguf_files.write(
        tmp_path / "key.gguf", more=lambda writer: writer.add_rope_scaling_type(scaling)
    )
    for one in (file, key):
        assert "rotary positions" in (said := refused(one))
        assert "Hugging Face folder" in said


def test_what_a_killed_conversion_left_is_no_model(file, cache, monkeypatch):
    folder = model_folder(str(file))
    shutil.rmtree(folder)
    part = cache / f".{folder.rpartition('/')[2]}.part"
    part.mkdir()
    (part / "model.safetensors").write_bytes(b"half of it")
    assert loaded(file).config.model_type == "llama"
    assert [str(one) for one in complete(cache)] == [folder]
    assert not part.exists()


def test_a_cache_that_cannot_be_written_says_where_to(file, cache, tmp_path):
    cache.parent.parent.write_text("a file")
    said = refused(file)
    assert str(cache) in said
    assert "XDG_CACHE_HOME" in said


def test_two_processes_at_once_make_one_folder(file, cache):
    home = os.environ["XDG_CACHE_HOME"]
    both = [forked.begin(with_cache, home, model_folder, str(file)) for _ in range(2)]
    for process in both:
        process.join()
    assert [process.exitcode for process in both] == [0, 0]
    (folder,) = complete(cache)
    assert str(folder) == model_folder(str(file))
    assert loaded(file).config.model_type == "llama"


def test_vllm_and_trinity_rft_are_given_the_folder(file):
    folder = model_folder(str(file))
    config = runs.config(file, file.parent)
    colocated = SimpleNamespace(gpu_memory_utilization=0.5, sleeps=False)
    settings = vllm_settings(config, "float32", 64, {2}, 8, colocated, SimpleNamespace(kind="disk"))
    assert settings.model == settings.tokenizer == folder
    tree = {
        "model": {"model_path": str(file), "critic_model_path": "organisation/name"},
        "explorer": {"auxiliary_models": [{"name": "judge", "model_path": str(file.parent)}]},
    }
    models_as_folders(tree)
    assert tree["model"] == {"model_path": folder, "critic_model_path": "organisation/name"}
    assert tree["explorer"]["auxiliary_models"][0]["model_path"] == folder


def test_a_file_is_a_candidate(file, monkeypatch):
    monkeypatch.chdir(file.parent)
    candidates = [find_candidate(one) for one in ("tiny.gguf", file.parent)]
    assert [(one.name, one.path, one.base) for one in candidates] == [
        ("tiny.gguf", str(file), None)
    ] * 2


def test_a_card_says_what_the_base_of_an_adapter_is_for_others(tmp_path):
    candidate = Candidate("mine", str(tmp_path), base="package:tiny-model")
    text = model_card(candidate, title="mine", adapter=True).text
    assert "`BASE` is `package:tiny-model` as a Hugging Face folder" in text
    assert "vllm serve BASE" in text
    assert 'from_pretrained("BASE")' in text


@pytest.mark.long
def test_a_killed_run_resumes_with_the_same_path(file, tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text(gguf_files.TEMPLATE.replace("assistant\n", "assistant\nSo: "))
    more = ("buffer.total_steps=4", f"model.chat_template_path={template}")
    root = tmp_path / "runs"
    home = os.environ["XDG_CACHE_HOME"]
    died = forked.run(with_cache, home, runs.main, str(file), str(root), "log:4", *more)
    assert died == -signal.SIGKILL
    config = runs.config(file, root, *more)
    assert RunDirectory(config.run_dir).checkpoint_steps() == [2]
    assert config.model.model_path == str(file)

    def train():
        return run_local(
            config,
            workflow=runs.workflow,
            judge=runs.judge,
            train_tasks=runs.TRAIN,
            eval_tasks={"held-out": runs.EVAL},
        )

    result = train()
    assert [row["step"] for row in result.history] == [0, 1, 2, 3, 4]
    trained = load_model(
        str(result.checkpoint), device=torch.device("cpu"), dtype=torch.float32
    ).state_dict()
    assert not torch.equal(trained["lm_head.weight"], loaded(file).lm_head.weight)
    gguf_files.write(file, tensors=gguf_files.weights(seed=1))
    with pytest.raises(ConfigError, match=r"the weights at model\.model_path have changed"):
        train()


@pytest.fixture
def no_hub(monkeypatch, tmp_path):
    """A Hub that accepts connections and never answers; who waits to try again fails."""

    here, sleep = threading.current_thread(), time.sleep

    def retry(seconds):
        if threading.current_thread() is here:
            raise AssertionError("it waits, to try again")
        sleep(seconds)

    constants = huggingface_hub.constants
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(time, "sleep", retry)
        monkeypatch.setattr(keys, "_HUB_SECONDS", 0.2)
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setenv("NO_PROXY", "*")
        keys._hub_answers.cache_clear()
        yield
    keys._hub_answers.cache_clear()


@pytest.mark.parametrize("refuses", [False, True])
def test_a_name_on_the_hub_is_given_up_at_once_without_a_network(
    no_hub, refuses, monkeypatch, caplog
):
    if refuses:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    for load in (load_tokenizer, load_settings):
        with pytest.raises(ModelLoadError, match=r"127.0.0.1:\d+\) cannot be reached"):
            load("Org/Name")
    assert "etrying" not in caplog.text


def test_a_model_in_the_hubs_cache_is_loaded_without_a_network(no_hub, tmp_path, random_model_path):
    cached = tmp_path / "models--Org--Name"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("1")
    (cached / "snapshots").mkdir()
    (cached / "snapshots" / "1").symlink_to(random_model_path)
    assert load_tokenizer("Org/Name").get_vocab()
