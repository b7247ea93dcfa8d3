"""`tune_prompt` with DSPy's MIPROv2, and a reflecting model over HTTP that answers in its form."""

import json
import re
import sys
from collections import Counter

import pytest

from tests.kit.chat_server import Refusal, chat_server
from tuner import JudgeOutput, PromptTuneConfig, RemoteModel, WorkflowOutput, tune_prompt
from tuner.errors import MissingDependencyError, TrainingError

ROWS = [{"number": n} for n in range(20)]
FIRST = "Answer.\n    Be brief."
PROPOSED = ["Nothing.", "Be good.", "Add one.", "Add one, then two.", "Say it."]


def in_form(said):
    """Answers with `said(field, text)` in the form that DSPy asks for."""

    def answer(body):
        (message,) = body["messages"]
        field = re.findall(r"with the field `\[\[ ## (\w+) ## \]\]`", message["content"])[-1]
        return f"[[ ## {field} ## ]]\n{said(field, message['content'])}\n\n[[ ## completed ## ]]"

    return chat_server(answer)


def proposer(proposals):
    left = iter(proposals)
    return in_form(
        lambda field, _: next(left, "More.") if field == "proposed_instruction" else "Numbers."
    )


async def workflow(task, system_prompt):
    if task["number"] == 3:
        raise ValueError("not three")
    return WorkflowOutput(response=str(task["number"] + system_prompt.count("one")))


async def judge(task, response):
    return JudgeOutput(reward=0.25 + 0.75 * (response == str(task["number"] + 1)))


def search(server, root, given=workflow, first=FIRST, rows=ROWS, **options):
    remote = RemoteModel(base_url=server.base_url, model_name="big")
    config = PromptTuneConfig(
        optimizer="mipro", reflection_model=remote, **{"eval_display_progress": False} | options
    )
    return tune_prompt(
        given,
        judge,
        rows,
        rows[:5],
        first,
        config,
        project_name="p",
        experiment_name="n",
        overrides=[f"checkpoint_root_dir={root}"],
    )


def test_the_best_of_the_proposed_instructions_is_found(tmp_path, capsys):
    with proposer(PROPOSED) as server:
        prompt, metrics = search(server, tmp_path)
    assert prompt == "Add one."
    assert (metrics["eval_before"], metrics["eval_after"]) == (0.25, 1.0)
    tree = json.loads((tmp_path / "p" / "n" / "tree.json").read_text())
    assert tree["candidates"][0]["prompts"] == {"system_prompt": FIRST}
    texts = [one["prompts"]["system_prompt"] for one in tree["candidates"]]
    assert len({" ".join(text.split()) for text in texts}) == len(texts) > 2
    assert {tuple(one["parents"]) for one in tree["candidates"][1:]} == {(0,)}
    assert all([int(row) for row in one["scores"]] == tree["compare_on"]
               for one in tree["candidates"])  # fmt: skip
    assert "Add one." in (tmp_path / "p" / "n" / "prompts.html").read_text()
    assert capsys.readouterr() == ("", "")


def test_proposals_are_shown_rows_and_rollouts_that_went_well(tmp_path):
    with proposer(PROPOSED) as server:
        search(server, tmp_path)
    asked = [body["messages"][0]["content"] for body in server.requests]
    assert """Example({'task': '{"number": 1}'})""" in asked[0]
    assert any(re.search(r'Task: \{"number": \d+\}\nResponse With System Prompt: \d+', one)
               for one in asked)  # fmt: skip
    assert "Numbers." in asked[-1]
    assert "Be brief." in asked[-1]


def test_a_search_that_is_begun_again_asks_and_rolls_out_nothing_twice(tmp_path):
    made, asked = Counter(), Counter()

    async def counting(task, system_prompt):
        made[task["number"], system_prompt] += 1
        return await workflow(task, system_prompt)

    def said(field, text):
        if sum(asked.values()) == 5:
            asked.clear()
            raise Refusal(401, "no more today")
        asked[field] += 1
        return PROPOSED[asked[field] - 1] if field == "proposed_instruction" else "Numbers."

    with in_form(said) as server:
        with pytest.raises(TrainingError, match="no more today"):
            search(server, tmp_path, counting)
        assert made
        search(server, tmp_path, counting)
        assert len(server.requests) == 5 + 1 + 3
    of_first = [count for (number, text), count in made.items() if text == FIRST and number > 5]
    assert of_first
    assert set(of_first) == {1}


def test_the_budget_ends_the_search_between_trials(tmp_path):
    async def joined(task, system_prompt):
        return await workflow(task, " ".join(system_prompt.values()))

    with proposer(f"{n}." for n in range(99)) as server:
        search(server, tmp_path, joined, {"a": "First.", "b": "Second."}, max_rollouts=60)
    tree = json.loads((tmp_path / "p" / "n" / "tree.json").read_text())
    assert len(tree["candidates"]) == 5
    assert tree["rollouts"] == 60


def test_a_budget_for_the_first_prompt_alone_is_said(tmp_path, caplog):
    with proposer(PROPOSED) as server:
        prompt, _ = search(server, tmp_path, max_rollouts=20)
    assert prompt == FIRST
    assert not server.requests
    assert "the budget was spent before a proposed text was tried" in caplog.text


def test_many_rows_are_tried_in_parts_and_several_texts_together(tmp_path):
    seen = {"writer": 0, "critic 1": 0}

    async def both(task, system_prompt):
        count = system_prompt["writer"].count("one") + system_prompt["critic 1"].count("one")
        return WorkflowOutput(response=str(task["number"] + count))

    def said(field, text):
        name = "critic 1" if "Critique." in text else "writer"
        seen[name] += field == "proposed_instruction"
        return "Add one." if (name, seen[name]) == ("critic 1", 2) else f"{name}: {seen[name]}."

    with in_form(said) as server:
        prompts, metrics = search(
            server,
            tmp_path,
            both,
            {"writer": "Write.", "critic 1": "Critique."},
            [{"number": n} for n in range(110)],
            max_rollouts=1500,
        )
    assert prompts["critic 1"] == "Add one."
    assert metrics["search_after"] == 1.0
    tree = json.loads((tmp_path / "p" / "n" / "tree.json").read_text())
    tried = (tmp_path / "p" / "n" / "candidates.jsonl").read_text().splitlines()
    assert 2 <= len(tree["candidates"]) < len(tried)


def test_a_proposer_that_fails_ends_the_search_and_is_named(tmp_path):
    def refuse(body):
        raise Refusal(401, "no key")

    with chat_server(refuse) as server, pytest.raises(TrainingError, match="gave no answer"):
        search(server, tmp_path)


def test_a_proposer_that_does_not_keep_to_the_form_is_named(tmp_path):
    with (
        chat_server(lambda _: "I would rather not.") as server,
        pytest.raises(TrainingError, match="form that DSPy requires"),
    ):
        search(server, tmp_path)


def test_optuna_is_missed_before_anything_is_spent(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with proposer([]) as server, pytest.raises(MissingDependencyError, match="optuna"):
        search(server, tmp_path)
    assert not server.requests
    assert not list(tmp_path.rglob("*.jsonl"))
