"""`tune_prompt` with DSPy's MIPROv2, and a reflecting model over HTTP that answers in its form."""

import json
import re

import pytest

from tests.chat_server import Refusal, chat_server
from tuner import JudgeOutput, PromptTuneConfig, RemoteModel, WorkflowOutput, tune_prompt
from tuner.errors import TrainingError

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
    assert {tuple(one["parents"]) for one in tree["candidates"][1:]} == {(0,)}
    assert all([int(row) for row in one["scores"]] == tree["compare_on"]
               for one in tree["candidates"])  # fmt: skip
    assert "Add one." in (tmp_path / "p" / "n" / "prompts.html").read_text()
    assert capsys.readouterr() == ("", "")


def test_proposals_are_shown_rows_and_rollouts_that_went_well(tmp_path):
    with proposer(PROPOSED) as server:
        search(server, tmp_path)
    asked = [body["messages"][0]["content"] for body in server.requests]
    assert 'task=\'{"number": 1' in asked[0]
    assert any(re.search(r'Task: \{"number": \d+\}\nOutput Of System Prompt: \d+', one)
               for one in asked)  # fmt: skip
    assert "Numbers." in asked[-1]
    assert "Be brief." in asked[-1]


def test_a_search_that_is_begun_again_asks_and_rolls_out_nothing_twice(tmp_path):
    made, stop = [], True

    async def counting(task, system_prompt):
        made.append((task["number"], system_prompt))
        if stop and "two" in system_prompt:
            raise KeyboardInterrupt
        return await workflow(task, system_prompt)

    with proposer(PROPOSED) as server:
        with pytest.raises(KeyboardInterrupt):
            search(server, tmp_path, counting)
        asked, stop = len(server.requests), False
        prompt, _ = search(server, tmp_path, counting)
        assert len(server.requests) == asked
    assert prompt == "Add one."
    done = [one for one in made if one[0] != 3 and "two" not in one[1]]
    assert max(done.count(one) for one in done) <= 2  # once in the search, once in the evaluation


def test_the_budget_ends_the_search_after_the_first_prompt_was_compared(tmp_path):
    with proposer(PROPOSED) as server:
        search(server, tmp_path, max_rollouts=35)
    tree = json.loads((tmp_path / "p" / "n" / "tree.json").read_text())
    assert 2 <= len(tree["candidates"]) <= 3
    assert tree["rollouts"] <= 45


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


def test_a_proposer_that_fails_ends_the_search_and_is_named(tmp_path):
    def refuse(body):
        raise Refusal(401, "no key")

    with chat_server(refuse) as server, pytest.raises(TrainingError, match="gave no answer"):
        search(server, tmp_path)


def test_a_proposer_that_does_not_keep_to_the_form_is_named(tmp_path):
    with (
        chat_server(lambda _: "I would rather not.") as server,
        pytest.raises(TrainingError, match="form that DSPy asks for"),
    ):
        search(server, tmp_path)
