"""`prompts.html` of a search: what is on it, and that nothing of it is more than text."""

import json
import re
import shutil

import pytest
from typer.testing import CliRunner

from tests.kit.chat_server import chat_server
from tests.kit.examples import grid
from tests.tools.test_damaged_files import KINDS, damaged, no_file, told
from tuner import JudgeOutput, PromptTuneConfig, RemoteModel, WorkflowOutput, tune_prompt
from tuner.cli import app
from tuner.errors import TrainingError
from tuner.tools.prompt_page import difference, page, write_page
from tuner.tools.viewer import RunReader, write_report
from tuner.tools.viewer.page import report_data
from tuner.traces import Outcome, RolloutId, Trace, TraceStore

EVIL = "<script>alert(1)</script></pre></details>"
ROWS = [{"number": n, "text": EVIL} for n in range(20)]
FAILS = 2
"""Of the rows that decide."""


async def workflow(task, system_prompt):
    if task["number"] == FAILS:
        raise ValueError(f"no {EVIL}")
    return WorkflowOutput(response=f"{task['number'] + system_prompt.count('one')} {EVIL}")


async def judge(task, response):
    right = response.split()[0] == str(task["number"] + 1)
    return JudgeOutput(reward=float(right), feedback=f"Judged {right}. {EVIL}")


def search(root, answers, **options):
    left = list(answers)
    with chat_server(lambda _: f"```\n{left.pop(0) if left else 'Nothing.'}\n```") as server:
        return tune_prompt(
            options.pop("workflow", workflow),
            judge,
            ROWS,
            ROWS[:5],
            "Answer.",
            PromptTuneConfig(
                reflection_model=RemoteModel(base_url=server.base_url, model_name="big"),
                max_rollouts=60,
                eval_display_progress=False,
                **options,
            ),
            project_name="p",
            experiment_name="n",
            overrides=[f"checkpoint_root_dir={root}"],
        )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = tmp_path_factory.mktemp("search")
    search(root, ["Be brief.", f"Answer. Add one. {EVIL}"])
    return root / "p" / "n"


def test_the_page_has_candidates_scores_rollouts_and_what_was_gained(run):
    text = (run / "prompts.html").read_text()
    assert "rejected proposals: 1" in text
    assert "+1.000" in text
    assert "<ins> Add one. &lt;script&gt;" in text
    assert re.search(r'<td class="h8 b">1</td>', text)
    assert "Judged True. &lt;script&gt;" in text
    assert "workflow_error" in text


def test_a_failed_rollout_is_no_score_of_zero_on_the_page(run):
    row = re.search(rf'<tr><th><a href="#search-{FAILS}">.*', (run / "prompts.html").read_text())
    cells = row[0].partition("</th>")[2]
    assert cells.count('class="f">failed') == cells.count("<td") >= 2
    assert "best on 0 of 10 tasks" in (run / "prompts.html").read_text()


def test_scores_are_under_the_rows_that_they_are_of(run):
    tree = json.loads((run / "tree.json").read_text())
    assert tree["compare_on"] != list(range(10))
    for one in tree["candidates"]:
        assert [int(row) for row in one["scores"]] == tree["compare_on"]


def test_nothing_of_a_task_a_prompt_or_a_response_is_more_than_text(run):
    text = (run / "prompts.html").read_text()
    assert "<script" not in text
    assert "default-src 'none'" in text
    nonces = re.findall(r"nonce[-=]\"?([\w-]+)", text)
    assert len(nonces) == 2
    assert len(set(nonces)) == 1
    assert not re.findall(r"(?:src|href)=\"(?!#|data:,)", text)


def test_the_command_line_writes_the_page_again(run):
    (run / "prompts.html").unlink()
    result = CliRunner().invoke(app, ["view", str(run), "--report"])
    assert str(run / "prompts.html") in result.output
    assert (run / "prompts.html").exists()


def test_a_search_that_stops_leaves_a_page_that_says_why(tmp_path):
    async def failing(task, system_prompt):
        raise ValueError("nobody is there")

    with pytest.raises(TrainingError) as raised:
        search(tmp_path, [], workflow=failing)
    page = tmp_path / "p" / "n" / "prompts.html"
    assert str(page) in "".join(raised.value.__notes__)
    assert "no rollout of the first prompt got a reward" in page.read_text()
    assert "nobody is there" in page.read_text()


def test_the_viewer_shows_a_search_whose_models_bill_tokens_without_ids(tmp_path):
    async def asking(task, model, system_prompt):
        messages = [{"role": "user", "content": str(task["number"])}]
        for _ in range(2):
            answer = await model.client.chat.completions.create(
                model=model.model_name, messages=messages
            )
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        return WorkflowOutput(response="2")

    with chat_server(lambda body: "```\n2 words\n```") as server:
        remote = RemoteModel(base_url=server.base_url, model_name="big")
        tune_prompt(
            asking,
            judge,
            ROWS[:4],
            None,
            "Answer.",
            PromptTuneConfig(reflection_model=remote, max_rollouts=5, eval_display_progress=False),
            model=remote,
            project_name="p",
            experiment_name="n",
            overrides=[f"checkpoint_root_dir={tmp_path}"],
        )
    reader = RunReader(tmp_path / "p" / "n")
    data = report_data(reader, trace_bytes=10**6)
    assert data["run"]["status"] == "completed"
    assert {row["tokens"] for row in data["traces"]} == {8}  # two calls of four words
    assert {row["split"] for row in data["traces"]} == {"search"}
    assert not any(row["causes"] for row in data["traces"])
    write_report(tmp_path / "p" / "n")


@pytest.mark.parametrize(
    ("before", "after", "pieces"),
    [
        ("Be brief.", "Be very brief.", [("same", "Be"), ("ins", " very"), ("same", " brief.")]),
        ("a b", "c b", [("del", "a"), ("ins", "c"), ("same", " b")]),
        ("a.", "a. b", [("same", "a."), ("ins", " b")]),
        ("same", "same", [("same", "same")]),
    ],
)
def test_a_difference_is_word_by_word(before, after, pieces):
    assert difference(before, after) == pieces


def test_the_tree_nests_who_came_of_whom_however_deep(tmp_path):
    parents = {1: 0, 2: 1, 3: 1, 4: 0} | {number: number - 1 for number in range(5, 500)}
    candidates = [
        {
            "number": number,
            "parents": [parents[number]] if number else [],
            "prompts": {"system_prompt": f"Text {number}."},
            "scores": {"0": 0.0},
            "mean": 0.0,
            "rollouts": number,
        }
        for number in range(500)
    ]
    tree = {"compare_on": [0], "candidates": candidates, "rejected": []}
    (tmp_path / "tree.json").write_text(json.dumps(tree))
    (tmp_path / "search.json").write_text(json.dumps({"first": {"system_prompt": "Text."}}))
    text = write_page(tmp_path).read_text()
    open_now, nested = [], {}
    for end, number in re.findall(r'<(/?)li(?: id="c(\d+)")?>', text):
        if end:
            open_now.pop()
        else:
            nested[int(number)] = open_now[-1] if open_now else None
            open_now.append(int(number))
    assert not open_now
    assert nested == {0: None} | parents
    assert text.count("<ul>") == text.count("</ul>")


@pytest.mark.long
def test_a_page_of_a_thousand_tasks_and_forty_candidates_stays_small(tmp_path):
    words = "word " * 400
    store, rows = TraceStore(tmp_path / "traces"), range(1000)
    for number in range(40):
        for row in rows[:: 1 if number < 4 else 25]:
            id = RolloutId(number, row, 0, "search")
            store.append(Trace(id, {"text": words}, (), Outcome.COMPLETED, row / 7, {}, words))
    candidates = [
        {
            "number": number,
            "parents": [number - 1] if number else [],
            "prompts": {"system_prompt": f"{words} {number}"},
            "scores": {str(row): row / 7 for row in rows},
            "mean": number / 40,
            "rollouts": number * 1000,
        }
        for number in range(40)
    ]
    tree = {"compare_on": list(rows), "candidates": candidates, "rejected": []}
    (tmp_path / "tree.json").write_text(json.dumps(tree))
    first = {"first": {"system_prompt": words}}
    (tmp_path / "search.json").write_text(json.dumps(first))
    page = write_page(tmp_path).read_text()
    assert len(page) < 4_000_000
    assert "others are omitted" in page


@grid("file", ["tree.json", "result.json", "search.json"], quick=1)
def test_each_field_of_a_search_is_shown_or_named(run, tmp_path, file):
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    path = folder / file
    cases = [one["x"] for one in damaged({"x": json.loads(path.read_bytes())}) if "x" in one]
    refused = 0
    for case in cases[:: max(1, len(cases) // 40)]:
        path.write_text(json.dumps(case))
        refused += told(lambda: page(folder), path) is not None
    for kind in KINDS:
        path.unlink(missing_ok=True)
        shutil.copy(run / file, path)
        no_file(path, kind)
        assert kind == "truncated" or told(lambda: page(folder), path) is not None
        if kind == "folder":
            path.rmdir()
    assert refused > 5
