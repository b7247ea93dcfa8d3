"""`tuner check --branching` on a real (random) model: would branches pay?"""

import random

import pytest

from tuner import WorkflowOutput
from tuner.commands.branching_check import check_branching
from tuner.errors import ConfigError
from tuner.tune import prepare

TURNS = 4


async def ask(model, messages):
    answer = await model.client.chat.completions.create(model=model.model_name, messages=messages)
    return answer.choices[0].message.content or ""


async def decided_by_the_last(task, model):
    messages = [{"role": "user", "content": task["question"]}]
    for _ in range(TURNS):
        text = await ask(model, messages)
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "?"}]
    return WorkflowOutput(response=text, reward=len(text) % 7 / 7)


async def forgetful(task, model):
    await ask(model, [{"role": "user", "content": "hi"}])
    await ask(model, [{"role": "user", "content": str(random.random())}])
    return WorkflowOutput(reward=random.random())


async def content(task, model):
    for _ in range(2):
        await ask(model, [{"role": "user", "content": "hi"}])
    return WorkflowOutput(reward=1.0)


@pytest.fixture
def checked(random_model_path, tmp_path):
    def check(workflow, *overrides, tasks=6):
        run = prepare(
            workflow,
            None,
            [{"question": f"number {n}"} for n in range(8)],
            overrides=[
                f"model.model_path={random_model_path}",
                f"checkpoint_root_dir={tmp_path}",
                "model.max_response_tokens=6",
                "buffer.batch_size=2",
                "algorithm.repeat_times=12",
                *overrides,
            ],
        )
        return check_branching(run, tasks=tasks)

    return check


def test_it_finds_where_the_reward_is_decided(checked):
    verdict = checked(decided_by_the_last)
    assert verdict.ready
    assert "72 rollouts, 48 of them begin inside others" in verdict.text
    shares = [line.split() for line in verdict.text.splitlines() if line.endswith("%")]
    decided = [int(row[2].rstrip("%")) for row in shares]
    assert len(decided) == TURNS
    assert decided[-1] == max(decided)
    assert "rollouts from the beginning" in verdict.text
    assert "from 6 tasks" in verdict.text


def test_it_names_what_keeps_an_agent_from_going_back(checked):
    verdict = checked(forgetful, tasks=2)
    assert "16 asked for something else than before the point" in verdict.text
    assert "messages[0].content is '" in verdict.text


def test_rewards_that_are_all_the_same_advise_nothing(checked):
    verdict = checked(content, tasks=2)
    assert not verdict.ready
    assert "the rollouts of every group were given the same reward" in verdict.text


def test_too_few_rollouts_are_refused(checked):
    with pytest.raises(ConfigError, match="repeat_times is 3: a pilot has two trunks"):
        checked(content, "algorithm.repeat_times=3")
