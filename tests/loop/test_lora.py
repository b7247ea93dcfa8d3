"""Runs that train a LoRA adapter: what they learn, write and go on from."""

import json
import re
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from tests.engines.models import make_model
from tests.kit import runs
from tests.loop.test_resume import without_times
from tests.training.lora import change_adapter
from tuner import tune
from tuner.config.schema import LoraSection
from tuner.engines.transformers.engine import TransformersEngine
from tuner.errors import ConfigError, MissingDependencyError, ModelLoadError
from tuner.loop import run_local
from tuner.runs.models import add_adapter, load_model
from tuner.training.trainer import PolicyTrainer

REPOSITORY = Path(__file__).parents[2]
NEW = "model.lora_configs=[{lora_rank: 4}]"
STEPS = "buffer.total_steps=4"
IDS = torch.tensor([[5, 9, 40, 60, 80]])


def run(model, root, *overrides):
    return run_local(
        runs.config(model, root, *overrides),
        workflow=runs.workflow,
        judge=runs.judge,
        train_tasks=runs.TRAIN,
        eval_tasks={"held-out": runs.EVAL},
    )


def adapter_weights(folder):
    return load_file(folder / "adapter_model.safetensors")


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


@pytest.fixture(scope="module")
def trained(random_model_path, tmp_path_factory):
    """A run that nobody killed."""
    return run(random_model_path, tmp_path_factory.mktemp("trained"), NEW, STEPS)


@pytest.mark.long
def test_the_tiny_model_learns_with_an_adapter(tmp_path):
    """A few steps of the shipped example, with ten times the learning rate of all weights."""
    sys.path.insert(0, str(REPOSITORY / "examples" / "gsm8k"))
    try:
        import main as example
    finally:
        sys.path.pop(0)
    result = tune(
        example.run_react_agent,
        example.judge_function,
        config_path=REPOSITORY / "config.yaml",
        overrides=[
            f"checkpoint_root_dir={tmp_path}",
            "model.lora_configs=[{lora_rank: 16}]",
            "algorithm.optimizer.lr=5e-3",
            "buffer.total_steps=3",
            "buffer.batch_size=8",
            "buffer.explorer_input.eval_tasksets=[]",
        ],
    )
    assert result.rewards[-1] >= result.rewards[0] + 0.2
    assert result.tokens.sampled == result.tokens.trained
    assert max(row["train/logprob_mismatch_max"] for row in result.history) < 1e-4


@pytest.mark.long
def test_a_checkpoint_is_a_peft_adapter_that_plain_scripts_load(
    trained, random_model_path, tmp_path
):
    folder = trained.checkpoint
    recorded = json.loads((folder / "adapter_config.json").read_text())
    assert recorded["base_model_name_or_path"] == str(random_model_path)
    assert (recorded["r"], recorded["lora_alpha"], recorded["lora_dropout"]) == (4, 32, 0.0)
    assert not (folder / "model.safetensors").exists()
    base = AutoModelForCausalLM.from_pretrained(random_model_path)
    without = logits(base)
    adapted = logits(PeftModel.from_pretrained(base, folder))
    assert not torch.allclose(adapted, without, atol=1e-2)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(folder)), adapted)
    assert AutoTokenizer.from_pretrained(folder).eos_token_id is not None
    # docs/training.md: merging
    merged = AutoPeftModelForCausalLM.from_pretrained(folder).merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    again = logits(
        load_model(str(tmp_path / "merged"), device=torch.device("cpu"), dtype=torch.float32)
    )
    torch.testing.assert_close(again, adapted, atol=1e-4, rtol=0)


@pytest.mark.long
@pytest.mark.parametrize("origin", ["new", "path"])
def test_interrupted_run_ends_with_the_same_adapter(
    origin, random_model_path, trained, tmp_path, monkeypatch
):
    """With an adapter to begin with, the reference is that one after the interruption, too."""
    overrides, straight, began = [NEW, STEPS], trained, None
    if origin == "path":
        began = trained.checkpoint.with_name("step_000002")
        overrides[0] = f"model.lora_configs=[{{path: {began}}}]"
        straight = run(random_model_path, tmp_path / "straight", *overrides)

    def stop(self):  # after the checkpoint of step 2, in the update of step 3
        if self.step == 3:
            raise InterruptedError

    with monkeypatch.context() as patched:
        patched.setattr(PolicyTrainer, "step_lr_scheduler", stop)
        with pytest.raises(InterruptedError):
            run(random_model_path, tmp_path, *overrides)
    assert (tmp_path / "p/run/checkpoints/step_000002").exists()
    result = run(random_model_path, tmp_path, *overrides)
    expected, found = adapter_weights(straight.checkpoint), adapter_weights(result.checkpoint)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert without_times(result.history) == without_times(straight.history)
    config = (result.checkpoint / "adapter_config.json").read_text()
    assert config == (straight.checkpoint / "adapter_config.json").read_text()
    if began is not None:
        first = adapter_weights(began)
        assert any(not torch.equal(first[name], found[name]) for name in found)


@pytest.mark.long
def test_no_library_says_anything_in_a_run_or_an_export(random_model_path, tmp_path):
    """In a new process, where the libraries are imported for the first time."""
    settings = (str(random_model_path), str(tmp_path), NEW, "buffer.total_steps=1")
    export = ("export", str(tmp_path / "p/run"), str(tmp_path / "out"), "--merge")
    code = (
        "from tests.kit import runs; from tuner import cli\n"
        f"runs.run_local(runs.config(*{settings}), workflow=runs.workflow, judge=runs.judge,"
        " train_tasks=runs.TRAIN, eval_tasks={'held-out': runs.EVAL})\n"
        f"cli.app({export})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert not re.search(r"warn|deprecat|kernel", done.stdout, re.IGNORECASE)
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_an_adapter_to_start_from_is_policy_and_reference(
    trained, random_model_path, tmp_path, monkeypatch, capsys
):
    """Its weights sample and are the reference: the first step's distance to it is 0.

    And nobody can sample while the model acts as the reference.
    """
    seen, pauses = [], []
    original, pause = PolicyTrainer.compute_ref_logp, TransformersEngine.pause

    @asynccontextmanager
    async def counted(self):
        async with pause(self):
            pauses.append(self)
            yield
            pauses.pop()

    def watch(self, scored):
        assert pauses
        done = original(self, scored)
        now = self.compute_logp(scored.batch)
        seen.append(
            max(float((a - b).abs().max()) for a, b in zip(now, done.ref_logp, strict=True))
        )
        return done

    monkeypatch.setattr(PolicyTrainer, "compute_ref_logp", watch)
    monkeypatch.setattr(TransformersEngine, "pause", counted)
    path = f"model.lora_configs=[{{path: {trained.checkpoint}}}]"
    result = run(random_model_path, tmp_path, path, "buffer.total_steps=2")
    assert seen[0] == 0
    assert seen[1] > 1e-4
    assert result.history[1]["train/logprob_mismatch_max"] < 1e-4
    written = adapter_weights(result.checkpoint)
    assert not any("reference" in name for name in written)
    size = sum(value.numel() for value in written.values())
    said = " ".join(capsys.readouterr().out.split())
    assert f"training a LoRA adapter: {size:,} parameters in 7 layers" in said


def test_an_adapter_is_no_model(trained, random_model_path, tmp_path):
    with pytest.raises(ModelLoadError) as caught:
        run(trained.checkpoint, tmp_path)
    assert f"model.model_path = '{trained.checkpoint}' is an adapter" in str(caught.value)
    assert f"set model.model_path to '{random_model_path}'" in str(caught.value)
    assert f"model.lora_configs to [{{path: {trained.checkpoint}}}]" in str(caught.value)


def test_without_peft_the_extra_is_named(random_model_path, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingDependencyError, match=r"pip install .*\[lora\]'"):
        run(random_model_path, tmp_path, NEW)


def add(model, **settings):
    return add_adapter(model, LoraSection(**settings), model_path="org/base", seed=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_modules": ("q_proj", "typo")}, "no layer of this model is called 'typo'"),
        ({"target_modules": "q_proj"}, r"\[q_proj\] is a list; its linear layers are down_proj"),
        ({"target_modules": "("}, "not a regular expression"),
        ({"target_modules": ("norm",)}, "Qwen3RMSNorm.*not supported"),
        ({"exclude_modules": ("mlp",)}, "no layer of this model is called 'mlp'"),
        ({"exclude_modules": ".*"}, "All modules were excluded"),
        ({"target_modules": ("lm_head",)}, "lm_head could not be merged"),
    ],
)
def test_layers_that_cannot_have_an_adapter_are_named(settings, message):
    with pytest.raises(ConfigError, match=r"model\.lora_configs\.0\.\w+_modules") as caught:
        add(make_model(), **settings)
    assert re.search(message, str(caught.value))


def stored(folder, model=None, *, base="org/base", **options):
    config = LoraConfig(
        **{"r": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"} | options
    )
    adapted = get_peft_model(model or make_model(), config)
    config.base_model_name_or_path = base
    change_adapter(adapted)
    adapted.save_pretrained(folder)
    return str(folder)


def test_an_adapter_made_elsewhere_is_taken_as_it_is(tmp_path):
    options = {"rank_pattern": {"0.self_attn.q_proj": 2}, "use_rslora": True}
    path = stored(tmp_path, exclude_modules=["o_proj"], **options)
    found = add(make_model(), path=path, lora_rank=4).model
    wanted = PeftModel.from_pretrained(make_model(), path)
    assert torch.equal(logits(found), logits(wanted))
    assert all(p.requires_grad == ("lora_" in name) for name, p in found.named_parameters())


@pytest.mark.parametrize(
    ("options", "settings", "message"),
    [
        ({}, {"lora_rank": 9}, "lora_rank is 9, but the adapter .* has 4"),
        ({}, {"lora_alpha": 9}, "lora_alpha is 9, but the adapter .* has 8"),
        ({"base": "org/other"}, {}, "made for the model 'org/other', not for 'org/base'"),
        ({"lora_dropout": 0.1}, {}, "lora_dropout = 0.1 .* set it to 0 there"),
        ({"use_dora": True}, {}, "use_dora = True"),
        ({"bias": "all"}, {}, "bias = 'all'"),
        ({"modules_to_save": ["lm_head"]}, {}, r"modules_to_save = \['lm_head'\]"),
        ({"init_lora_weights": "pissa"}, {}, "changes the model's weights, too"),
        ({"task_type": "FEATURE_EXTRACTION"}, {}, "is for FEATURE_EXTRACTION"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_an_adapter_that_does_not_belong_is_refused(options, settings, message, tmp_path):
    path = stored(tmp_path, **options)
    with pytest.raises((ConfigError, ModelLoadError), match=message):
        add(make_model(), path=path, **settings)


def test_an_adapter_for_other_layers_or_sizes_is_refused(tmp_path):
    smaller = make_model()
    smaller.model.layers = smaller.model.layers[:1]
    narrower = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=300,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            intermediate_size=64,
        )
    )
    other = make_model("bloom")
    for number, (model, target) in enumerate(
        [(smaller, "q_proj"), (narrower, "q_proj"), (other, "query_key_value")]
    ):
        path = stored(tmp_path / str(number), model, target_modules=[target])
        with pytest.raises(ModelLoadError, match="does not fit"):
            add(make_model(), path=path)


def test_another_name_of_the_same_model_can_be_given(tmp_path):
    path = stored(tmp_path, base="org/other")
    adapter = add(make_model(), path=path, base_model_name="org/other")
    adapter.save(tmp_path / "again")
    recorded = json.loads((tmp_path / "again" / "adapter_config.json").read_text())
    assert recorded["base_model_name_or_path"] == "org/other"


def test_missing_and_foreign_folders_are_named(tmp_path):
    with pytest.raises(
        ModelLoadError, match=r"model\.lora_configs\.0\.path.*this folder does not exist"
    ):
        add(make_model(), path=str(tmp_path / "none"))
    with pytest.raises(ModelLoadError, match="cannot be loaded: ValueError: Can't find 'adapter_"):
        add(make_model(), path=str(tmp_path))
