"""`tuner check` on a real (random) model."""

from __future__ import annotations

import pytest

from tests.kit.agents import answer
from tests.loop.test_local import TINY_MATH
from tuner import JudgeOutput, WorkflowOutput
from tuner.runs.stack import build_stack
from tuner.tools.check import check_run
from tuner.tune import prepare


async def workflow(task, model):
    return WorkflowOutput(response=await answer(model, task["question"]))


async def judge(task, response):
    return JudgeOutput(reward=len(response))


async def breaks(task, model):
    raise RuntimeError("no such tool")


@pytest.fixture
def prepared(random_model_path, tmp_path):
    def prepare_with(func, *overrides, judge=judge):
        return prepare(
            func,
            judge,
            [{"question": "What is 2 + 2?"}] * 4,
            overrides=[
                f"model.model_path={random_model_path}",
                f"checkpoint_root_dir={tmp_path / 'runs'}",
                "model.max_response_tokens=20",
                "buffer.batch_size=2",
                *overrides,
            ],
        )

    return prepare_with


def test_verdict_shows_prompt_mask_rewards_and_costs_and_writes_nothing(prepared, tmp_path):
    enough = (f"model.model_path={TINY_MATH}", "model.max_response_tokens=100")
    rewards = iter([1.0, 0.0])
    verdict = check_run(
        prepared(workflow, *enough, judge=lambda task, response: JudgeOutput(reward=next(rewards)))
    )
    assert verdict.ready, verdict.text
    assert verdict.text.endswith("READY: both rollouts completed.")
    for text in (
        "What is 2 + 2?",
        "TOKENS AND MASK",
        "sampled, finish_reason",
        "completed, reward",
        "variance",
        "2 steps x 2 tasks x 8 rollouts = 32 rollouts",
        "memory  about",
        "s per step",
    ):
        assert text in verdict.text
    assert not (tmp_path / "runs").exists()


def test_adapters_of_roles_are_described(prepared):
    async def ask_both(task, model):
        for role in ("writer", "critic"):
            text = await answer(model.role(role), task["question"])
        return WorkflowOutput(response=text)

    roles = "model.adapters={writer: {lora_rank: 2}, critic: {lora_rank: 4}}"
    verdict = check_run(prepared(ask_both, roles))
    assert "LoRA adapters of writer, critic with 0.00M parameters" in verdict.text
    assert "s per step" in verdict.text
    assert "completed, reward" in verdict.text


def test_rollouts_of_which_one_was_cut_off_or_that_teach_nothing_are_doubtful(prepared):
    enough = (f"model.model_path={TINY_MATH}", "model.max_response_tokens=100")
    verdict = check_run(
        prepared(workflow, *enough, judge=lambda task, response: JudgeOutput(reward=0.0))
    )
    assert verdict.ready
    assert "DOUBTFUL: both rollouts completed, but nothing can be learned" in verdict.text
    assert "READY" not in verdict.text
    limits = iter([1, 100])

    async def cut(task, model):
        made = await model.client.chat.completions.create(
            model=model.model_name,
            messages=[{"role": "user", "content": task["question"]}],
            max_tokens=next(limits),
        )
        return WorkflowOutput(response=made.choices[0].message.content or "")

    verdict = check_run(prepared(cut, *enough))
    assert verdict.ready
    assert "DOUBTFUL: 1 of 2 rollouts did not finish: 1 of 2 calls were cut off" in verdict.text


def test_workflow_that_fails_is_not_ready_and_says_why(prepared):
    verdict = check_run(prepared(breaks))
    assert not verdict.ready
    assert "NOT READY: 2 of 2 rollouts did not complete" in verdict.text
    assert "RuntimeError: no such tool" in verdict.text
    assert "none: the workflow never called `model`" in verdict.text


def test_rollouts_that_are_all_cut_off_are_not_ready(prepared):
    verdict = check_run(prepared(workflow))
    assert not verdict.ready
    last = verdict.text.splitlines()[-1]
    assert last.startswith("NOT READY: no rollout finished: 2 of 2 calls were cut off")
    assert "(model.max_response_tokens, 20; raise it)" in last


def test_calls_that_cannot_be_trained_are_not_ready(prepared):
    async def greedy(task, model):
        answer = await model.client.chat.completions.create(
            model=model.model_name,
            messages=[{"role": "user", "content": task["question"]}],
            temperature=0,
        )
        return WorkflowOutput(response=answer.choices[0].message.content or "")

    verdict = check_run(prepared(greedy))
    assert not verdict.ready
    assert "NOT READY: no call can be trained" in verdict.text
    assert "40 greedy_call" in verdict.text


def test_an_adapter_is_named_and_its_memory_is_its_own(prepared):
    adapter = "model.lora_configs=[{lora_rank: 4}]"
    assert (
        "a LoRA adapter of 0.00M parameters, multi" in check_run(prepared(workflow, adapter)).text
    )
    sizes = []
    for overrides in ((), (adapter,)):
        config = prepared(workflow, *overrides).config
        stack = build_stack(config, workflow=workflow, judge=judge)
        model = list(stack.model.parameters())
        trained = sum(p.numel() for p in model if p.requires_grad)
        sizes.append((stack.needs().trainer, sum(p.numel() for p in model), trained))
    (full, base, every), (lora, both, adapter_size) = sizes
    assert (every, both) == (base, base + adapter_size)
    assert full == 4 * 5 * base  # weights, gradients, two averages, reference
    assert lora == 4 * (base + 4 * adapter_size)
