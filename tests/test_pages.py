"""The pages: links lead somewhere, settings are settings, and the code of the how-tos runs."""

import inspect
import re
import shutil
from collections.abc import Iterator
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from itertools import pairwise
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

from tests import forked
from tests.loop import runs
from tuner.config import load_config
from tuner.loop import run_local

ROOT = Path(__file__).parents[1]
PAGES = [
    page for place in ("*.md", "docs/*.md", "examples/*/*.md") for page in sorted(ROOT.glob(place))
]
MARKDOWN = MarkdownIt("commonmark").enable("table")


def parsed(page: Path) -> Iterator[Token]:
    for token in MARKDOWN.parse(page.read_text(encoding="utf-8")):
        yield token
        yield from token.children or ()


def anchors(page: Path) -> set[str]:
    """What a code host makes of headings: lower case, no punctuation, a hyphen for each space."""
    tokens = list(MARKDOWN.parse(page.read_text(encoding="utf-8")))
    headings = [
        "".join(part.content for part in inline.children or ())
        for opening, inline in pairwise(tokens)
        if opening.type == "heading_open"
    ]
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}


def blocks(page: Path, language: str) -> list[str]:
    return [t.content for t in parsed(page) if t.type == "fence" and t.info == language]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings_that_are_there(page):
    for token in parsed(page):
        target = str(token.attrGet("href") or token.attrGet("src") or "")
        if not target or "://" in target:
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{page.name}: {target}: there is no such file"
        if anchor:
            assert anchor in anchors(linked), f"{page.name}: {target}: there is no such heading"


def test_the_reference_has_everything_that_is_public():
    told = set(re.findall(r"^::: (\S+)$", (ROOT / "docs/reference.md").read_text(), re.MULTILINE))
    values = [
        getattr(import_module(name), known)
        for name in (
            "tuner",
            "tuner.traces",
            "tuner.rewards",
            "tuner.serving",
            "tuner.testing",
            "tuner.areal",
            "tuner.environments",
        )
        for known in import_module(name).__all__
        if known != "TrinityChatModel"  # depends on what is installed
    ]
    public = [value for value in values if inspect.isclass(value) or inspect.isfunction(value)]
    assert told == {f"{value.__module__}.{value.__qualname__}" for value in public}


LOCAL = [page for page in PAGES if page.name not in ("trinity.md", "capabilities.md")]


@pytest.mark.parametrize(
    ("page", "settings"),
    [(page.name, text) for page in LOCAL for text in blocks(page, "yaml")],
)
def test_settings_on_a_page_are_accepted(page, settings, tmp_path):
    (tmp_path / "config.yaml").write_text(settings)
    load_config(tmp_path / "config.yaml")


# Pages with code, and how it runs: as scripts, from top to bottom or block by block; as functions
# of a run; in another environment; or beside a run, below.
WHOLE = ("tutorial.md", "from_areal.md")
EACH = ("offline.md", "from_others.md")
FUNCTIONS = ("dialects.md", "recording.md", "rewards.md")
BESIDE_A_RUN = ("reward_does_not_rise.md", "traces.md", "history.md")
ELSEWHERE = {
    "README.md": "tests/test_readme.py",
    "curriculum.md": "tests/loop/test_curriculum_runs.py",
    "agentscope2.md": "tests/integration/agentscope2/test_docs.py",
    "judges.md": "tests/rewards/test_model_judges.py",
    "environments.md": "tests/integration/environments/test_page.py",
    "from_agentscope.md": "tests/tools/prompts/test_from_agentscope.py",
    "frameworks.md": "tests/integration/frameworks/test_docs.py",
    "not_python.md": "tests/test_pages.py",
    "prompts.md": "tests/tools/prompts/test_tuning.py",
    "serving.md": "tests/serving/test_page.py",
    "testing_agents.md": "tests/test_testing.py",
    "trinity.md": "tests/integration/trinity/test_examples.py",
}
# Blocks that need what is not here: models of the Hub.
NOT_RUN = {("offline.md", 2)}


def code(page: str) -> list[str]:
    folder = ROOT if page == "README.md" else ROOT / "docs"
    return blocks(folder / page, "python")


def test_code_of_every_page_is_run():
    told = {*WHOLE, *EACH, *FUNCTIONS, *BESIDE_A_RUN, *ELSEWHERE}
    assert {page.name for page in PAGES if blocks(page, "python")} == told
    assert all((ROOT / test).is_file() for test in ELSEWHERE.values())


@pytest.mark.learning
@pytest.mark.parametrize(
    ("page", "script"),
    [(page, "\n".join(code(page))) for page in WHOLE]
    + [
        (page, script)
        for page in EACH
        for number, script in enumerate(code(page))
        if (page, number) not in NOT_RUN
    ],
)
def test_scripts_run_as_they_stand(page, script, tmp_path):
    (tmp_path / "main.py").write_text(script)
    (tmp_path / "config.yaml").write_text(SETTINGS)
    (tmp_path / "my_dataset").mkdir()
    for split in ("train", "test"):
        rows = (ROOT / f"examples/gsm8k/data/{split}.jsonl").read_text().splitlines()[:8]
        (tmp_path / f"my_dataset/{split}.jsonl").write_text("\n".join(rows))
    printed = forked.script(tmp_path / "main.py")
    assert "Traceback" not in printed
    assert page == "from_areal.md" or "step 2/2" in printed


# What the tutorial's `config.yaml` is here: as small as can be.
SETTINGS = f"""
algorithm: {{repeat_times: 4}}
model: {{model_path: {ROOT}/models/tiny_math, max_model_len: 512, max_response_tokens: 32}}
buffer: {{batch_size: 4, total_steps: 2}}
"""


@pytest.mark.parametrize(
    ("page", "judge"), [*((page, "judge") for page in FUNCTIONS), ("rewards.md", "combined")]
)
def test_functions_of_a_page_are_those_of_a_run(page, judge, random_model_path, tmp_path):
    path = tmp_path / "functions.py"
    # What a random model writes is no number, and what compares it takes seconds to import.
    path.write_text("\n".join(code(page)).replace("timeout=5)", "timeout=100)"))
    spec = spec_from_file_location("functions", path)
    functions = module_from_spec(spec)
    spec.loader.exec_module(functions)
    result = run_local(
        runs.config(random_model_path, tmp_path, "buffer.total_steps=1"),
        workflow=getattr(functions, "workflow", runs.workflow),
        judge=getattr(functions, judge, runs.judge),
        train_tasks=[{**task, "answer": "4"} for task in runs.TRAIN],
        eval_tasks={"held-out": [{**task, "answer": "4"} for task in runs.EVAL]},
    )
    assert result.outcomes == {"completed": 6}


@pytest.mark.skipif(shutil.which("curl") is None, reason="the page's program is curl")
def test_a_program_that_is_not_python_is_trained(tmp_path):
    (program,) = blocks(ROOT / "docs/not_python.md", "bash")
    (script,) = code("not_python.md")
    (tmp_path / "agent.sh").write_text(program)
    (tmp_path / "main.py").write_text(script)
    printed = forked.script(tmp_path / "main.py")
    assert "step 2/2" in printed
    assert "32 completed" in printed


def test_what_to_look_at_in_a_run(random_model_path, tmp_path):
    config = runs.config(random_model_path, tmp_path / "checkpoints", "project=AgentScope")
    run_local(
        config.model_copy(update={"name": "GSM8K-tiny"}),
        workflow=runs.workflow,
        judge=runs.judge,
        train_tasks=runs.TRAIN,
        eval_tasks={"held-out": runs.EVAL},
    )
    (tmp_path / "main.py").write_text("\n".join(code("reward_does_not_rise.md")))
    printed = forked.script(tmp_path / "main.py")
    assert re.search(r"^reward/mean \[[\d., -]+\]$", printed, re.MULTILINE)
    assert "'rollouts/completed': 6" in printed
    assert len(re.findall(r"^-?[\d.]+ \['(?:length|stop)", printed, re.MULTILINE)) == 2
    (tmp_path / "main.py").write_text("\n".join(code("traces.md")))
    forked.script(tmp_path / "main.py")
    (tmp_path / "main.py").write_text("\n".join(code("history.md")))
    assert "step 2/2" in forked.script(tmp_path / "main.py")
