"""The engine serves the adapter as it is now, and never what was computed with another."""

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model

from tests.engines.models import crowd, error, generate_all, make_engine, make_model, prompt
from tests.training.lora import change_adapter, wrapped
from tuner.engines import SamplingParams
from tuner.engines.transformers.passes import WeightsGuard
from tuner.errors import ConfigError
from tuner.training.references import AdapterReference


@pytest.mark.parametrize(
    ("kind", "deterministic"),
    [("qwen3", True), *((kind, False) for kind in ("qwen3", "llama", "mistral", "gemma3"))],
)
async def test_log_probs_are_those_of_the_live_adapter_before_and_after_an_update(
    kind, deterministic
):
    model, base = wrapped(make_model(kind)), make_model(kind)
    engine = make_engine(model, deterministic=deterministic)
    assert engine.batched
    requests = list(crowd())[:6]
    for version in range(2):
        results = await generate_all(engine, requests)
        for (ids, sampling), got in zip(requests, results, strict=True):
            assert error(model, ids, got, sampling) < 1e-5
            assert set(got.versions) == {version}
        assert max(error(base, *requests[i][:1], results[i], requests[i][1]) for i in (0, 1)) > 0.1
        async with engine.pause():
            change_adapter(model)
            await engine.update_weights(version + 1)
    assert engine.stats.unannounced_updates == 0
    assert engine.stats.prompt_tokens_reused > 0


def switched_off(model):
    model.base_model.disable_adapter_layers()


def merged(model):
    model.merge_adapter()


def scaled(model):
    model.get_base_model().model.layers[0].self_attn.q_proj.set_scale("default", 3.0)


def another(model):
    model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    model.set_adapter("other")


@pytest.mark.parametrize("change", [switched_off, merged, scaled, another, change_adapter])
def test_the_guard_notices_a_change_of_adapters_once(change):
    model = wrapped(make_model())
    guard = WeightsGuard(model)
    assert not guard.changed()
    change(model)
    assert guard.changed()
    guard.remember()
    assert not guard.changed()


async def test_cached_prefixes_do_not_outlive_a_switch_that_nobody_announced():
    model = wrapped(make_model())
    engine = make_engine(model)
    ids, sampling = prompt(40), SamplingParams(max_tokens=8)
    await engine.generate(ids, sampling, "session")
    with AdapterReference(model).active():
        during = await engine.generate(ids, sampling, "session")
        assert error(model, ids, during, sampling) < 1e-5
    after = await engine.generate(ids, sampling, "session")
    assert during.cached_tokens == after.cached_tokens == 0
    assert error(model, ids, after, sampling) < 1e-5
    assert engine.stats.unannounced_updates == 2


async def test_paused_switches_to_the_reference_cost_no_cached_prefix():
    model = wrapped(make_model())
    engine = make_engine(model)
    ids, sampling = prompt(40), SamplingParams(max_tokens=8)
    await engine.generate(ids, sampling, "session")
    async with engine.pause():
        with AdapterReference(model).active() as reference, torch.no_grad():
            reference(input_ids=torch.tensor([ids]))
    got = await engine.generate(ids, sampling, "session")
    assert got.cached_tokens == 39
    assert engine.stats.unannounced_updates == 0
    assert error(model, ids, got, sampling) < 1e-5


@pytest.mark.parametrize(
    "config",
    [
        PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
        LoraConfig(task_type="CAUSAL_LM", alora_invocation_tokens=[5], target_modules=["q_proj"]),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_an_adapter_that_acts_on_prompts_is_refused(config):
    with pytest.raises(ConfigError, match="changes prompts"):
        make_engine(get_peft_model(make_model(), config))
