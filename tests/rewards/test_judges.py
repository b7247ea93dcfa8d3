"""Judges that compare with a field of the task, and judges of judges; each says why."""

import asyncio
import sys
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

from tests.rewards import functions
from tuner.errors import (
    FunctionError,
    MissingDependencyError,
    RewardError,
    RewardTimeout,
)
from tuner.rewards import (
    exact_judge,
    f1_judge,
    final_answer,
    form_judge,
    in_process,
    math_equal,
    math_judge,
    rouge_judge,
    schema_judge,
    weighted,
)
from tuner.tasks.functions import JudgeOutput, MissingFieldError, call_judge


async def judged(judge, response, **task):
    """As a run calls it."""
    return await call_judge(judge, task=task, response=response, auxiliary_models={}, logger=None)


async def test_words_are_compared_with_a_field_of_the_task():
    right = await judged(exact_judge(), "The old bridge.", answer="old bridge")
    assert (right.reward, right.feedback) == (1.0, "The answer is right.")
    wrong = await judged(exact_judge(field="truth"), "the tower", truth="old bridge")
    assert (wrong.reward, wrong.feedback) == (
        0.0,
        "The answer is 'old bridge', and not 'the tower'.",
    )
    part = await judged(f1_judge(), "bridge", answer="old bridge")
    assert part.reward == pytest.approx(2 / 3)
    assert "'old bridge', and not 'bridge'" in part.feedback


async def test_of_several_right_answers_the_best_counts():
    assert (await judged(exact_judge(), "4", answer=["four", 4])).reward == 1.0
    assert (await judged(f1_judge(), "old bridge", answer=["tower", "bridge"])).reward > 0.6
    assert (await judged(math_judge(), "so 0.5", answer=["1", "1/2"])).reward == 1.0


async def test_the_answer_is_taken_out_of_the_response():
    judge = exact_judge(extract=final_answer)
    assert (await judged(judge, "First 3, then 4", answer="4")).reward == 1.0


async def test_solutions_are_right_by_their_last_number_or_expression():
    judge = math_judge()
    solution = "Dan gets 14 * 2 = <<14*2=28>>28 dollars.\n#### 28"
    assert (await judged(judge, "It is $28.", answer=solution)).reward == 1.0
    wrong = await judged(judge, "It is 27", answer=solution)
    assert (wrong.reward, "and not '27'" in wrong.feedback) == (0.0, True)
    assert (await judged(judge, "\\boxed{1 + x}", answer="x + 1")).reward == 1.0
    assert (await judged(judge, "\\boxed{silent}", answer="listen")).reward == 0.0
    assert (await judged(judge, "so 7.0", answer=np.int64(7))).reward == 1.0


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("It is 1e-05.", 0.00001),
        ("It is 0.3.", 0.1 + 0.2),
        ("It is 10000000000000000", 1e16),
        ("so 7", np.int64(7)),
        ("so 0.1", np.float32(0.1)),
        ("so 0.50", Decimal("0.5")),
        ("so 1/3", Fraction(1, 3)),
        ("pages 5-10", "5-10"),
        ("at 12:30:00", "12:30:00"),
        ("so 1,2", "1, 2"),
        ("3 \u00d7 10^5 m\u00b2", 300000),
        ("it is \u22125", -5),
        ("half, or 50%", 0.5),
    ],
)
async def test_the_last_number_is_read_with_what_belongs_to_it(response, answer):
    assert math_equal(final_answer(response), str(answer)) == 1.0
    assert (await judged(exact_judge(), str(answer), answer=answer)).reward == 1.0


async def test_a_form_is_a_reward():
    judge = form_judge(r"<answer>.*</answer>")
    assert (await judged(judge, "<answer>4</answer>")).reward == 1.0
    assert "does not have the form <answer>" in (await judged(judge, "4")).feedback


@pytest.mark.parametrize("judge", [exact_judge(), f1_judge(), math_judge(), rouge_judge()])
async def test_a_task_without_a_right_answer_is_an_error_and_no_reward(judge):
    with pytest.raises(MissingFieldError, match="the task has no field 'answer'"):
        await judged(judge, "4", question="2 + 2")
    infinite = float("inf"), float("nan"), Decimal("nan"), np.float32("inf"), [1, float("nan")]
    for answer in (None, [], {"is": 4}, 2j, *infinite):
        with pytest.raises(RewardError, match=r"'answer' is .*must be text, a finite number, or"):
            await judged(judge, "4", answer=answer)


async def test_rouge_is_that_of_the_library():
    from rouge_score.rouge_scorer import RougeScorer

    truth, text = "the quick brown fox jumps over the lazy dog", "the brown dog jumped over a fox"
    for kind in ("rouge1", "rouge2", "rougeL"):
        expected = RougeScorer([kind], use_stemmer=True).score(truth, text)[kind]
        for measure in ("precision", "recall", "fmeasure"):
            judge = rouge_judge(kind=kind, measure=measure, stemmer=True)
            found = await judged(judge, text, answer=truth)
            assert found.reward == getattr(expected, measure)
            assert found.metrics[f"{kind}_recall"] == expected.recall
            assert f"recall {expected.recall:.3f}" in found.feedback
    best = await judged(rouge_judge(), "a fox", answer=["a dog", "a fox"])
    assert best.reward == 1.0 and "rougeL with 'a fox'" in best.feedback  # noqa: PT018


async def test_rouge_says_that_its_words_are_english_instead_of_giving_nothing():
    with pytest.raises(RewardError, match="supports only a to z and digits: pass another as"):
        await judged(rouge_judge(), "古い橋", answer="古い橋")
    assert (await judged(rouge_judge(tokenizer=list), "古い橋", answer="古い塔")).reward > 0.6


@pytest.mark.parametrize("wrong", [{"kind": "rouge"}, {"measure": "f1"}])
def test_rouge_of_another_name_is_refused_when_it_is_made(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} is"):
        rouge_judge(**wrong)


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "ages": {"type": "array", "items": {"minimum": 0}}},
    "required": ["name"],
    "additionalProperties": False,
}


async def test_json_is_what_its_schema_allows_and_each_mistake_is_told():
    judge = schema_judge(SCHEMA)
    for text in (
        '{"name": "Mia", "ages": [1]}',
        '```json\n{"name": "Mia"}\n```',
        'Hm.</think>\n{"name": ""}',
    ):
        assert (await judged(judge, text)).reward == 1.0
    wrong = await judged(judge, '{"ages": [1, -2], "age": 3}')
    assert wrong.reward == 0.0
    assert wrong.metrics == {"mistakes": 3.0}
    assert "$.ages[1]: -2 is less than the minimum of 0" in wrong.feedback
    assert "$: 'name' is a required property" in wrong.feedback


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('Here it is: {"name": "Mia"}', "not JSON: Expecting value"),
        ('{"name": "Mia", "ages": [NaN]}', "NaN is no JSON"),
        ("[" * 100_000, "not JSON"),
        ("", "not JSON"),
    ],
)
async def test_what_is_no_json_has_no_reward_and_the_reason(text, said):
    found = await judged(schema_judge(SCHEMA), text)
    assert (found.reward, said in found.feedback) == (0.0, True)


async def test_of_many_mistakes_the_first_are_told():
    found = await judged(schema_judge({"items": {"minimum": 0}}), str([-1] * 50))
    assert found.metrics == {"mistakes": 50.0}
    assert found.feedback.endswith("and 40 more")


async def test_a_task_may_bring_its_schema():
    judge = schema_judge(field="schema")
    for schema in (SCHEMA, '{"required": ["name"]}', True):
        assert (await judged(judge, '{"name": "Mia"}', schema=schema)).reward == 1.0
    for schema in ('{"type": "name"}', "{", {"type": 3}, None, 7):
        with pytest.raises(RewardError, match="the task's 'schema' is"):
            await judged(judge, "{}", schema=schema)


async def test_a_schema_that_refers_to_another_document_is_an_error_and_nothing_is_fetched(
    monkeypatch,
):
    asked = []
    monkeypatch.setattr("urllib.request.urlopen", lambda *given, **named: asked.append(given))
    with pytest.raises(RewardError, match="refers to something outside it"):
        await judged(schema_judge(field="is"), "{}", **{"is": {"$ref": "http://a.example/b.json"}})
    assert asked == []


def test_a_schema_that_is_none_is_refused_when_the_judge_is_made():
    with pytest.raises(ValueError, match=r"the schema is invalid at \$\.type: 'text' is not valid"):
        schema_judge({"type": "text"})
    for given in ({}, {"schema": {}, "field": "schema"}):
        with pytest.raises(ValueError, match="give either a schema for all tasks, or the field"):
            schema_judge(**given)


@pytest.mark.parametrize(
    ("module", "make", "library"),
    [
        ("rouge_score.rouge_scorer", rouge_judge, "rouge-score"),
        ("jsonschema", lambda: schema_judge({}), "jsonschema"),
    ],
)
def test_a_library_that_is_not_there_is_named_with_its_extra(module, make, library, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingDependencyError, match=rf"{library} .*pip install .*\[rewards\]"):
        make()


async def test_several_judges_are_one_by_weight():
    judges = {
        "right": math_judge(),
        "form": form_judge(r"<answer>.*</answer>"),
        "words": f1_judge(),
    }
    weights = {"right": 0.5, "form": 0.3, "words": 0.2}
    found = await judged(weighted(judges, weights), "<answer>5</answer>", answer="4")
    assert found.reward == pytest.approx(0.3)
    assert found.metrics == {"right": 0.0, "form": 1.0, "words": 0.0}
    assert found.feedback.splitlines()[:2] == [
        "right: The answer is '4', and not '5'.",
        "form: The form is right.",
    ]
    mean = await judged(weighted(judges), "<answer>5</answer>", answer="4")
    assert mean.reward == pytest.approx(1 / 3)


async def test_metrics_of_each_stay_apart_and_judges_get_what_they_name():
    def plain(task, response):
        return JudgeOutput(reward=2, metrics={"length": len(response)})

    async def asks(task, response, auxiliary_models, logger):
        return JudgeOutput(reward=1, metrics={"length": auxiliary_models["helper"]})

    judge = weighted({"plain": plain, "asks": asks}, {"plain": 1, "asks": -1})
    found = await call_judge(
        judge, task={}, response="abc", auxiliary_models={"helper": 7}, logger=None
    )
    assert found.reward == 1
    assert found.metrics == {"plain": 2, "plain/length": 3, "asks": 1, "asks/length": 7}
    assert found.feedback is None


async def test_a_part_that_fails_is_an_error_and_ends_the_others():
    ended = asyncio.Event()

    async def waits(task, response):
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def fails(task, response):
        raise RewardError("no verdict")

    with pytest.raises(RewardError, match="broken: no verdict"):
        await judged(weighted({"slow": waits, "broken": fails}), "a")
    assert ended.is_set()

    def wrong(task, response):
        return "1.0"

    with pytest.raises(FunctionError, match=r"returned '1\.0'"):
        await judged(weighted({"wrong": wrong}), "a")


async def test_a_part_that_takes_too_long_is_a_timeout():
    hangs = in_process(functions.hang, timeout=0.2, workers=1)

    async def slow(task, response):
        return JudgeOutput(reward=await hangs(response))

    with pytest.raises(RewardTimeout, match=r"slow: judge timed out: hang took more than 0\.2 s"):
        await judged(weighted({"slow": slow, "fine": form_judge("a")}), "a")


def test_what_cannot_be_weighed_is_refused_when_it_is_made():
    async def of_groups(task, responses):
        return []

    with pytest.raises(FunctionError, match="'all' judges the responses of a group together"):
        weighted({"all": of_groups})
    with pytest.raises(FunctionError, match="cannot be used as a judge"):
        weighted({"bad": lambda task: None})
    for judges, weights in (({}, None), ({"a": exact_judge()}, {"b": 1})):
        with pytest.raises(ValueError, match="give each judge one"):
            weighted(judges, weights)
