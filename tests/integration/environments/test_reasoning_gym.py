"""reasoning_gym itself: its questions as tasks, and its own scores."""

from __future__ import annotations

import json
import pickle
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reasoning_gym.factory import CURRICULA, DATASETS
from reasoning_gym.utils import extract_answer

from tests.environments.training import trained
from tuner import WorkflowOutput
from tuner.environments import Mixture, ReasoningGym, reasoning_gym_sets
from tuner.errors import ConfigError, FunctionError, MissingDependencyError, RewardTimeout
from tuner.runs.environment import from_settings
from tuner.tune import prepare

SUMS = {"min_terms": 2, "max_terms": 2, "max_digits": 1}
SLOW = {"knight_swap", "intermediate_integration", "arc_agi"}
# Their entries have no answer: only the scorer knows what is right.
WITHOUT_ANSWER = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
REPLIES = st.text(max_size=20).map(lambda text: f"so <answer>{text}</answer>")


@pytest.fixture
def here(monkeypatch):
    """Scores in this process, which has imported the sets."""

    async def score(*given):
        return reasoning_gym_sets._score_of(*given)

    monkeypatch.setattr(reasoning_gym_sets, "_score", score)


@pytest.mark.parametrize("name", sorted(DATASETS.keys() - SLOW - {"composite"})[::3])
async def test_sets_make_tasks_and_score_their_own_answers(here, name):
    environment = ReasoningGym(name, train_tasks=2, eval_tasks=1)
    rows = [*(environment.train_dataset or ()), *environment.eval_dataset]
    assert json.loads(json.dumps(rows)) == rows
    for row in rows:
        assert row["question"]
        if name in WITHOUT_ANSWER:
            continue
        found = await environment.judge(row, f"It is <answer>{row['answer']}</answer>")
        assert found.reward == 1, row
        assert found.metrics == {"no_answer": 0}
        none = await environment.judge(row, "I do not know")
        assert none.reward < 0.1
        assert none.metrics == {"no_answer": 1}


@settings(max_examples=25, deadline=None)
@given(
    terms=st.integers(1, 3),
    seed=st.integers(0, 10**6),
    train=st.integers(1, 60),
    held_out=st.integers(1, 30),
)
def test_no_question_is_in_both_splits(terms, seed, train, held_out):
    config = {"min_terms": 1, "max_terms": terms, "max_digits": 1}
    sizes = {"seed": seed, "train_tasks": train, "eval_tasks": held_out}
    try:
        environment = ReasoningGym("chain_sum", config=config, **sizes)
    except ConfigError:  # all questions are in the evaluation set
        return
    asked = {row["question"] for row in environment.eval_dataset}
    assert len(environment.eval_dataset) == held_out
    assert environment.train_dataset
    assert not asked & {row["question"] for row in environment.train_dataset}
    again = ReasoningGym("chain_sum", config=config, **sizes)
    assert again.train_dataset == environment.train_dataset


def test_questions_that_are_left_out_are_counted(caplog):
    environment = ReasoningGym("chain_sum", config=SUMS, train_tasks=200)
    left = 200 - len(environment.train_dataset)
    assert left > 0
    assert f"{left} of 200 training tasks of chain_sum are left out" in caplog.text


@pytest.mark.parametrize("name", sorted(CURRICULA.keys() - SLOW)[::12])
def test_levels_share_the_tasks_and_grow_with_the_sets_own_parameters(name):
    environment = ReasoningGym(name, levels=[0, 1], train_tasks=6, eval_tasks=2)
    assert {row["level"] for row in environment.eval_dataset} == {0, 1}
    configs = [
        reasoning_gym_sets._generator(*environment._maker({"seed": 0, "level": level})).config
        for level in (0, 1)
    ]
    assert configs[0] != configs[1]


def test_a_level_by_itself_has_no_tasks_of_those_below():
    rows = ReasoningGym("chain_sum", levels=[0, 3], train_tasks=20).train_dataset
    assert {row["difficulty"]["num_terms"][0] for row in rows if row["level"] == 3} == {5}
    assert all(row["question"].count(" ") >= 16 for row in rows if row["level"] == 3)


@given(reply=REPLIES)
@settings(max_examples=30, deadline=None)
async def test_a_score_is_the_sets_with_its_partial_credit(reply):
    environment = ReasoningGym("chain_sum", config=SUMS, train_tasks=1, eval_tasks=0)
    (row,) = environment.train_dataset
    made = environment._maker(row)
    answer = extract_answer(reply)
    score = reasoning_gym_sets._score_of(*made, answer, environment._entry(row))
    assert score == reasoning_gym_sets._generator(*made).score_answer(answer, row)
    longer = f"{row['answer']} or so"
    partial = reasoning_gym_sets._score_of(*made, longer, environment._entry(row))
    assert partial == len(row["answer"]) / len(longer)


async def test_an_answer_that_is_evaluated_cannot_stop_the_run(monkeypatch):
    """countdown computes the answer, here for longer than anybody waits."""
    environment = ReasoningGym("countdown", train_tasks=1, eval_tasks=0)
    (row,) = environment.train_dataset
    assert (await environment.judge(row, f"<answer>{row['answer']}</answer>")).reward == 1
    monkeypatch.setattr(reasoning_gym_sets._score, "_timeout", 1)
    with pytest.raises(RewardTimeout):
        await environment.judge(row, "<answer>9**9**9**9</answer>")


def test_a_run_asks_and_scores(here, random_model_path, tmp_path):
    environment = ReasoningGym(
        "chain_sum", config=SUMS, system_prompt="direct", train_tasks=9, eval_tasks=0
    )
    for trace in trained(environment, random_model_path, tmp_path, "buffer.batch_size=2"):
        assert trace.outcome == "completed", trace.error
        (call,) = trace.calls
        assert call.messages[-1]["content"] == trace.task["question"]
        assert "<answer>" in call.messages[0]["content"]
        assert trace.reward == 0
        assert trace.metrics["no_answer"] == 1


def test_a_text_names_it(random_model_path):
    given = {"overrides": [f"model.model_path={random_model_path}"]}
    run = prepare(environment="reasoning_gym:chain_sum", **given)
    assert set(run.train_tasks[0]) == {"question", "answer", "seed", "index", "difficulty"}
    with pytest.raises(ConfigError, match="there is chain_sum"):
        prepare(environment="reasoning_gym:chainsum", **given)


def test_an_agent_of_ones_own(here, random_model_path, tmp_path):
    async def twice(task, model, auxiliary_models):
        for _ in range(2):
            messages = [{"role": "user", "content": task["question"]}]
            await model.client.chat.completions.create(model=model.model_name, messages=messages)
        return WorkflowOutput(
            response=f"<answer>{task['answer']}</answer>", metrics={"own": len(task)}
        )

    environment = ReasoningGym("chain_sum", config=SUMS, agent=twice, eval_tasks=0)
    for trace in trained(environment, random_model_path, tmp_path, "buffer.batch_size=2"):
        assert (len(trace.calls), trace.reward, trace.metrics["own"]) == (2, 1, 5)


async def test_sets_are_mixed(here):
    legs = {"kind": "reasoning_gym", "name": "leg_counting", "train_tasks": 3}
    mixture = Mixture({"sums": "reasoning_gym:chain_sum", "legs": legs})
    assert {row["set"] for row in mixture.train_dataset} == {"sums", "legs"}
    row = mixture.train_dataset[-1]
    assert (await mixture.judge(row, f"<answer>{row['answer']}</answer>")).reward == 1


async def test_another_process_makes_the_same_entry(here):
    environment = ReasoningGym("chain_sum", levels=[0, 1], train_tasks=3)
    other = pickle.loads(pickle.dumps(environment.judge)).__self__
    assert (other._entries, other.train_dataset) == ({}, None)
    for row in environment.train_dataset:
        assert other._entry(row) == environment._entry(row)
        with pytest.raises(FunctionError, match="makes another question"):
            other._entry({**row, "question": "1 + 1?"})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"name": "chain_sums"}, "no set 'chain_sums'; there is chain_sum"),
        ({"name": "chain_sum", "config": {"max_term": 3}}, "'max_term', which is .* max_terms"),
        ({"name": "chain_sum", "config": {"seed": 3}}, "'seed', .* are beside config"),
        ({"name": "chain_sum", "config": {"max_terms": 0}}, "max_terms must be >= min_terms"),
        ({"name": "chain_sum", "levels": [99]}, "levels has 99, but they are 0 to"),
        ({"name": "syllogism", "levels": [-1]}, "levels has -1|has no curriculum"),
        ({"name": "chain_sum", "levels": [0], "config": {"max_terms": 6}}, "which levels set"),
        ({"name": "list_functions", "levels": [0]}, "the set has no curriculum"),
        (
            {"name": "spell_backward", "config": {"min_word_len": 90, "max_word_len": 99}},
            "no task from .*: Cannot choose",
        ),
        (
            {"name": "quantum_lock", "config": {"difficulty": "x"}},
            "no task from {'difficulty': 'x'}: ",
        ),
        ({"name": "composite"}, "no set 'composite'"),
        ({"name": "chain_sum", "agent": "nowhere.py:play"}, "there is no file"),
        ({"name": "chain_sum", "agents": 3}, "unexpected keyword argument 'agents'"),
    ],
)
def test_what_cannot_be_made_is_refused(given, said):
    with pytest.raises(ConfigError, match=said):
        from_settings({"kind": "reasoning_gym", **given}, "tuner.environment")


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    for module in [name for name in sys.modules if name.partition(".")[0] == "reasoning_gym"]:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingDependencyError, match=r"\[reasoning-gym\]"):
        ReasoningGym("chain_sum")
