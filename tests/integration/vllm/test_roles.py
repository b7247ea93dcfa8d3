"""Roles with their own adapters under one vLLM: exact in one batch, through updates and runs."""

import asyncio

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.engines.conformance import TOLERANCE, Rig, error, make_rig_model
from tests.engines.models import make_tokenizer, prompt
from tests.engines.threaded_vllm import ThreadedVllm
from tests.integration.vllm.rigs import BLOCK, engine, settings
from tests.integration.vllm.test_ahead import TINY, counted, judge
from tests.integration.vllm.test_lora import TARGETS
from tests.training.lora import change_adapter
from tuner import WorkflowOutput, tune
from tuner.config.schema import LoraSection
from tuner.engines import EngineError, SamplingParams
from tuner.runs.models import add_adapters, peft_name, save_policy
from tuner.traces import TraceStore

SECTIONS = {
    "a": LoraSection(lora_rank=4, target_modules=TARGETS[:2]),
    "ab": LoraSection(lora_rank=9, lora_alpha=64, target_modules=TARGETS),
}


async def test_requests_of_all_roles_in_one_batch_have_their_own_adapter(
    toy_folder, tmp_path, monkeypatch, request
):
    adapters = add_adapters(make_rig_model(), SECTIONS, model_path="org/base", seed=0)
    change_adapter(adapters.model)
    served = settings(
        toy_folder,
        model=str(toy_folder),
        lora_rank=9,
        adapters={peft_name(role): role for role in SECTIONS},
    )
    server = ThreadedVllm(served, log=tmp_path / "log.txt")
    request.addfinalizer(server.stop)

    def save(folder):
        save_policy(adapters.model, adapters, make_tokenizer(), folder)

    made = engine([server], save, tmp_path / "weights")
    names, ids = [None, *map(peft_name, SECTIONS)], prompt(3 * BLOCK + 4)
    sampling = SamplingParams(max_tokens=12)

    def numbers():
        return [adapter.lora_int_id for _, adapter in server.host._core._adapters.values()]

    async def check(version, cached):
        """The same prompt for all at once; only what an adapter computed itself is reused."""
        save(folder := tmp_path / f"version_{version}_{sum(cached)}")
        alone = {None: make_rig_model()}
        for role in SECTIONS:
            alone[peft_name(role)] = PeftModel.from_pretrained(make_rig_model(), folder / role)
        rigs = {name: Rig(made, model, lambda: None, "") for name, model in alone.items()}
        found = await asyncio.gather(
            *(made.generate(ids, sampling, "session", adapter=name) for name in names)
        )
        for name, got in zip(names, found, strict=True):
            assert got.versions == (version,) * 12
            errors = {other: error(rigs[other], ids, got, sampling) for other in names}
            assert errors.pop(name) < TOLERANCE
            assert min(errors.values()) > 0.01
        assert [got.cached_tokens for got in found] == cached

    await check(0, [0, 0, 0])
    await check(0, [3 * BLOCK] * 3)
    assert server.host._core._engine.vllm_config.lora_config.max_loras >= 2  # in one batch
    with pytest.raises(EngineError, match="there is no adapter 'a'"):
        await made.generate(ids, sampling, "session", adapter="a")

    # One role is trained: the other's adapter stays where it is.
    before = numbers()
    with adapters.alone("ab"):
        change_adapter(adapters.model, seed=2)
    await made.update_weights(1)
    assert [old == new for old, new in zip(before, numbers(), strict=True)] == [True, False]
    await check(1, [0, 0, 0])

    # Even if nothing were forgotten, no adapter finds what another version of it computed.
    async def forget_nothing() -> bool:
        return True

    monkeypatch.setattr(server.host._core._engine, "reset_prefix_cache", forget_nothing)
    with adapters.alone("ab"):
        change_adapter(adapters.model, seed=3)
    await made.update_weights(2)
    await check(2, [3 * BLOCK, 3 * BLOCK, 0])
    await made.close()


def agents(*roles):
    """A workflow that these roles answer in, and the model without a role."""

    async def workflow(task, model):
        texts = []
        for one in (model, *map(model.role, roles)):
            reply = await one.client.chat.completions.create(
                model=model.model_name, messages=[{"role": "user", "content": task["question"]}]
            )
            texts.append(reply.choices[0].message.content or "")
        return WorkflowOutput(response="".join(texts))

    return workflow


def run(folder, workflow, steps):
    return tune(
        workflow,
        judge,
        [{"question": f"Tom has {n} pens. He buys 2 more. How many pens now?"} for n in range(12)],
        overrides=[
            f"model.model_path={TINY}",
            "model.adapters={writer: {lora_rank: 4}, critic: {lora_rank: 2}, default: frozen}",
            "model.max_response_tokens=32",
            "explorer.rollout_model.engine_type=vllm",
            "explorer.rollout_model.enforce_eager=true",
            f"checkpoint_root_dir={folder}",
            "name=run",
            "buffer.batch_size=2",
            f"buffer.total_steps={steps}",
            "algorithm.repeat_times=3",
            "algorithm.optimizer.lr=0.01",
            "trainer.save_interval=1",
            "trainer.max_checkpoints_to_keep=3",
        ],
    )


def checkpoint(result, step):
    return result.run_dir / "checkpoints" / f"step_{step:06}"


def weights(result, role, step):
    return load_file(checkpoint(result, step) / role / "adapter_model.safetensors")


def equal(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


def test_a_run_trains_the_roles_that_call_and_resumes(tmp_path):
    first = run(tmp_path, agents("writer"), 2)
    assert equal(weights(first, "critic", 1), weights(first, "critic", 2))
    assert not any(v.any() for name, v in weights(first, "critic", 2).items() if "lora_B" in name)
    assert not equal(weights(first, "writer", 1), weights(first, "writer", 2))

    result = run(tmp_path, agents("writer", "critic"), 3)
    for role in ("writer", "critic"):
        assert not equal(weights(result, role, 2), weights(result, role, 3))
    assert all(counted(row) for row in [*first.history, *result.history] if row["step"])

    store = TraceStore(result.run_dir / "traces")
    for step in (1, 2, 3):
        calls = [call for trace in store.read("train", step) for call in trace.calls]
        assert {call.role for call in calls} == {None, "writer", *(["critic"] if step > 2 else [])}
        for call in calls:
            assert set(call.versions) == {step - 1}
            assert mismatch(result, call, step - 1) < 1e-3
    assert max(mismatch(result, call, 1) for call in calls if call.role == "writer") > 0.01


@torch.no_grad()
def mismatch(result, call, version):
    """Of a call's log-probs and those of its role's adapter in a version, the largest."""
    model = AutoModelForCausalLM.from_pretrained(TINY)
    if call.role is not None and version:
        model = PeftModel.from_pretrained(model, checkpoint(result, version) / call.role)
    ids = torch.tensor([call.prompt_ids + call.completion_ids])
    logprobs = model(ids).logits[0, len(call.prompt_ids) - 1 : -1].log_softmax(-1)
    expected = logprobs.gather(-1, ids[0, len(call.prompt_ids) :, None])[:, 0]
    return float((expected - torch.tensor(call.logprobs)).abs().max())
