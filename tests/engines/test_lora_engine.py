"""The engine serves the adapter as it is now, and never what was computed with another."""

import asyncio
from threading import Thread

import pytest
import torch
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model

from tests.engines.models import (
    always_drafting,
    crowd,
    error,
    generate_all,
    make_engine,
    make_model,
    prompt,
)
from tests.kit.examples import grid
from tests.training.lora import change_adapter, wrapped
from tuner.config.schema import LoraSection
from tuner.engines import EngineError, SamplingParams
from tuner.engines.transformers import row_adapters
from tuner.engines.transformers.passes import WeightsGuard, served_model, whole_logits
from tuner.errors import ConfigError
from tuner.runs.models import ServedCopy, add_adapters, peft_name
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


def weights(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


async def test_adapters_are_merged_while_the_engine_computes_and_the_model_stays_unmerged():
    model = wrapped(make_model())
    change_adapter(model)
    engine, before = make_engine(model), weights(model)
    merged = engine._runner._row_pass.merged
    ids, sampling = prompt(40), SamplingParams(max_tokens=8)
    with torch.no_grad():
        plain = whole_logits(served_model(model), torch.tensor([ids]))
    got = await engine.generate(ids, sampling, "session")
    assert error(model, ids, got, sampling) < 1e-5
    assert len(merged._weights) == merged.layers > 0
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    with merged.in_use():
        inside = whole_logits(served_model(model), torch.tensor([ids]))
        other = []
        thread = Thread(
            target=lambda: other.append(whole_logits(served_model(model), torch.tensor([ids])))
        )
        thread.start()
        thread.join()
    assert not torch.equal(inside, plain)
    assert torch.equal(other[0], plain)
    async with engine.training():
        assert not merged._weights


async def test_adapters_whose_sum_gives_other_log_probs_are_not_merged(monkeypatch, caplog):
    monkeypatch.setattr(row_adapters, "MERGED_ERROR", 0.0)
    model = wrapped(make_model())
    change_adapter(model)
    engine = make_engine(model)
    ids, sampling = prompt(40), SamplingParams(max_tokens=8)
    got = await engine.generate(ids, sampling, "session")
    assert error(model, ids, got, sampling) < 1e-5
    assert "log-probs would differ by" in caplog.text
    assert not engine._runner._row_pass.merged._weights


@pytest.mark.parametrize(("changed", "merges"), [(1, True), (16, False)])
def test_a_rounding_error_at_one_position_of_many_does_not_prevent_merging(changed, merges):
    before, after = torch.zeros(1, 16, 2), torch.zeros(1, 16, 2)
    after[:, :changed, 0] = 3e-5
    logits = iter([before, after])
    merged = row_adapters.MergedAdapters(wrapped(make_model()), lambda: next(logits))
    with merged.in_use():
        assert merged._this.on == merges


@pytest.mark.parametrize("settings", [{"use_dora": True}, {"lora_bias": True}])
async def test_layers_that_compute_more_than_a_sum_are_not_merged(settings):
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=["o_proj"], **settings)
    engine = make_engine(get_peft_model(make_model(attention_bias=True), config))
    assert engine._runner._row_pass.merged is None


ROLES = {  # one name is part of another
    "a": {"lora_rank": 4},
    "ab": {"lora_rank": 2, "target_modules": ("q_proj", "down_proj")},
    "b": {"lora_rank": 3, "exclude_modules": ("v_proj",)},
}


def with_roles(kind):
    """A model with trained adapters for some roles."""
    sections = {role: LoraSection(**settings) for role, settings in ROLES.items()}
    adapters = add_adapters(make_model(kind), sections, model_path="org/base", seed=0)
    change_adapter(adapters.model)
    return adapters


def each_alone(adapters, kind, folder):
    """For each role a model that has only its adapter, and one that has none."""
    adapters.save(folder)
    names = {peft_name(role): folder / role for role in adapters}
    alone = {name: PeftModel.from_pretrained(make_model(kind), at) for name, at in names.items()}
    return {None: make_model(kind), **alone}


@grid(
    "kind, deterministic, drafting",
    [
        ("qwen3", True, False),
        *((kind, False, False) for kind in ("qwen3", "llama", "mistral", "gemma3")),
        *((kind, False, True) for kind in ("qwen3", "gemma3")),
    ],
    quick=3,
)
async def test_each_request_of_a_batch_has_its_own_adapter(
    kind, deterministic, drafting, tmp_path, monkeypatch
):
    """Log-probs are those of a model with that adapter alone, or with none, before and after an
    update; prefixes are shared within a role, and by no other."""
    if drafting:
        always_drafting(monkeypatch)
    adapters = with_roles(kind)
    engine = make_engine(
        adapters.model,
        deterministic=deterministic,
        adapters=[one.name for one in adapters.values()],
    )
    assert engine.batched is not deterministic
    requests = list(crowd())[: 3 if deterministic else 10]
    names = [None, *map(peft_name, adapters)]
    for version in range(2):
        alone = each_alone(adapters, kind, tmp_path / str(version))
        asked = [(names[i % 4], *one) for i, one in enumerate([*requests, *requests])]
        work = [engine.generate(ids, how, "s", adapter=name) for name, ids, how in asked]
        found = await asyncio.gather(*work)
        for (name, ids, sampling), got in zip(asked, found, strict=True):
            assert error(alone[name], ids, got, sampling) < 1e-5
            other = next(one for one in names if one != name)
            assert sampling.temperature == 0 or error(alone[other], ids, got, sampling) > 1e-3
            assert set(got.versions) == {version}
        async with engine.pause():
            change_adapter(adapters.model, seed=2 + version)
            await engine.update_weights(version + 1)
    assert engine.stats.unannounced_updates == 0
    assert (engine.stats.prompt_tokens_reused > 0) is not deterministic
    assert (engine.stats.drafted_tokens > 100) is drafting


async def test_no_prefix_is_shared_with_another_adapter():
    adapters = with_roles("qwen3")
    names = [None, *(one.name for one in adapters.values())]
    engine, ids = make_engine(adapters.model, adapters=names[1:]), prompt(120)
    sampling = SamplingParams(max_tokens=4)
    first = [await engine.generate(ids, sampling, "s", adapter=name) for name in names]
    again = [await engine.generate(ids, sampling, "s", adapter=name) for name in names]
    assert {one.cached_tokens for one in first} == {0}
    assert {one.cached_tokens for one in again} == {119}
    with pytest.raises(EngineError, match="no adapter 'x'"):
        await engine.generate(ids, sampling, "s", adapter="x")


async def test_a_copy_serves_the_adapters_of_its_last_update(tmp_path):
    """As where collection runs ahead of training, one adapter of which is alone meanwhile."""
    adapters = with_roles("qwen3")
    copy, names = ServedCopy(adapters.model.get_base_model()), [*map(peft_name, adapters)]
    engine, sampling = make_engine(copy.model, adapters=names), SamplingParams(max_tokens=6)
    before = each_alone(adapters, "qwen3", tmp_path / "before")
    change_adapter(adapters.model, seed=5)
    after = each_alone(adapters, "qwen3", tmp_path / "after")
    for alone in (before, after):
        for name in (None, *names):
            with adapters.alone("a"):
                got = await engine.generate(prompt(30), sampling, "s", adapter=name)
            assert error(alone[name], prompt(30), got, sampling) < 1e-5
        async with engine.pause():
            copy.update()
            await engine.update_weights(engine.version + 1)
    assert engine.stats.unannounced_updates == 0


def test_layers_that_rows_cannot_share_are_refused():
    model = make_model("llama")
    sections = {"a": LoraSection(target_modules=("embed_tokens",))}
    adapters = add_adapters(model, sections, model_path="org/base", seed=0)
    with pytest.raises(ConfigError, match=r"embed_tokens is a Embedding.*remove it"):
        make_engine(adapters.model, adapters=["<a>"])


def test_layers_that_see_only_some_tokens_are_served_one_request_at_a_time(caplog):
    """As the experts of some models, whose tokens cannot be assigned to rows."""
    model = make_model("llama")
    mlp = model.model.layers[0].mlp
    usual = mlp.forward
    mlp.forward = lambda x: torch.cat([usual(x[:, :-1]), usual(x[:, -1:])], dim=1)
    adapters = add_adapters(model, {"a": LoraSection()}, model_path="org/base", seed=0)
    assert not make_engine(adapters.model, adapters=["<a>"]).batched
    assert "requests cannot have different adapters" in caplog.text


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
