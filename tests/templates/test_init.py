"""`tuner init`: every template trains as it is copied, and nothing of the user's is overwritten."""

import ast
import json
import tomllib
from pathlib import Path

import pytest

from tests.kit import forked
from tests.test_command_line import said
from tuner import templates
from tuner.cli import functions_of
from tuner.errors import ConfigError
from tuner.templates import Template, create, missing

ROOT = Path(__file__).parents[2]


def main_of(template):
    return templates._folders(template)[-1] / "main.py"


# The real model is trained in tests/integration/real.
@pytest.fixture(params=[template for template in Template if template is not Template.REAL])
def template(request):
    if requirements := missing(request.param):
        pytest.skip(f"not installed: {requirements}")
    return request.param


@pytest.mark.long
@pytest.mark.parametrize(
    "template", [template for template in Template if template is not Template.REAL], indirect=True
)
def test_a_template_trains(template, tmp_path):
    create(template, tmp_path)
    forked.script(tmp_path / "main.py", "buffer.total_steps=2", "algorithm.repeat_times=4")
    run = tmp_path / "checkpoints" / "my-agent" / "run-1"
    result = json.loads((run / "result.json").read_text())
    assert result["outcomes"] == {"completed": 2 * 8 * 4}
    assert result["tokens"]["sampled"] > result["tokens"]["trained"] * 0.9 > 0
    assert result["eval_before"]["test"] != result["eval_after"]["test"]


def test_its_file_names_its_functions(template, tmp_path):
    create(template, tmp_path)
    workflow, judge, backend, _ = functions_of(tmp_path / "config.yaml", [])
    assert callable(workflow)
    assert (judge is None) == (template is Template.QUEUE)  # whose environment judges
    assert backend == "local"


@pytest.mark.parametrize("template", Template)
def test_its_script_trains_only_when_it_is_run(template):
    script = ast.parse(main_of(template).read_text())
    calls = [
        [ast.unparse(node.test) for node in ast.walk(top) if isinstance(node, ast.If)]
        for top in script.body
        if "tune(" in ast.unparse(top)
    ]
    assert calls == [["__name__ == '__main__'"]]


def test_its_tasks_are_those_of_the_example():
    """Which the tiny model was not taught."""
    for split in ("train", "test"):
        lines = (ROOT / f"examples/gsm8k/data/{split}.jsonl").read_text().splitlines()
        known = [json.loads(line) for line in lines]
        answers = {row["question"]: row["answer"].rpartition("#### ")[2] for row in known}
        rows = (ROOT / f"tuner/templates/shared/data/{split}.jsonl").read_text().splitlines()
        for row in map(json.loads, rows):
            assert row == {"question": row["question"], "answer": answers[row["question"]]}


def test_the_example_is_copied_without_its_runs(tmp_path, monkeypatch):
    example = tmp_path / "example"
    (example / "checkpoints" / "smollm2").mkdir(parents=True)
    (example / "checkpoints" / "smollm2" / "config.yaml").write_text("")
    (example / "main.py").write_text("")
    monkeypatch.setattr(templates, "_EXAMPLE", example)
    assert create(Template.REAL, tmp_path / "mine") == [tmp_path / "mine" / "main.py"]


def test_the_real_models_file_names_its_functions(tmp_path):
    create(Template.REAL, tmp_path)
    workflow, judge, backend, _ = functions_of(tmp_path / "config.yaml", [])
    assert (workflow.__name__, judge.__name__, backend) == ("run_agent", "judge", "local")


def test_help_lists_the_templates(capsys, monkeypatch):
    status, output, _ = said(capsys, monkeypatch, "init", "--help")
    assert not status
    for template in Template:
        assert f"{template}: " in output
        assert main_of(template).is_file()
    assert "Example: tuner init " in output


def test_the_page_has_every_template_and_every_extra():
    page = (ROOT / "docs" / "install.md").read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for name in [*Template, *extras["optional-dependencies"]]:
        assert f"`{name}`" in page, name


def test_the_command_says_what_it_wrote_and_how_to_begin(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    status, output, _ = said(capsys, monkeypatch, "init", "agent", "--template", "multi-agent")
    assert not status
    *files, begin = output.splitlines()
    written = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*"))
    assert files == written
    assert begin == "Start with: python agent/main.py"
    assert (tmp_path / "agent/main.py").read_text() == main_of(Template.MULTI_AGENT).read_text()


def test_what_is_not_installed_is_named(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(templates._NEEDS, Template.QUEUE, [("no_such_package", "'that[one]'")])
    _, output, _ = said(capsys, monkeypatch, "init", str(tmp_path), "--template", "queue")
    assert output == f"pip install 'that[one]' && python {tmp_path}/main.py\n"


def test_what_is_there_is_not_overwritten(capsys, monkeypatch, tmp_path):
    (tmp_path / "config.yaml").write_text("mine")
    status, _, errors = said(capsys, monkeypatch, "init", str(tmp_path))
    assert status == 2
    assert errors == (
        f"ConfigError: would overwrite {tmp_path}/config.yaml: "
        "name another folder, or move what is there\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]
    assert (tmp_path / "config.yaml").read_text() == "mine"


def test_a_folder_that_cannot_be_one_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"folder '.*/file/agent' cannot be written .*another"):
        create(Template.OPENAI, tmp_path / "file" / "agent")


def test_an_unknown_template_is_refused_with_those_there_are(capsys, monkeypatch, tmp_path):
    status, _, errors = said(capsys, monkeypatch, "init", str(tmp_path), "--template", "crewai")
    assert status == 2
    assert errors.count("\n") == 1
    assert all(str(template) in errors for template in Template)
