"""The pages: links lead somewhere, settings are settings, and the code of the how-tos runs."""

import inspect
import re
import shutil
from collections.abc import Iterator
from importlib import import_module
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
PAGES = sorted(ROOT.glob("*.md")) + sorted((ROOT / "docs").glob("*.md"))
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


def blocks(page: str, language: str) -> list[str]:
    return [
        token.content
        for token in parsed(ROOT / page)
        if token.type == "fence" and token.info == language
    ]


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
        for name in ("tuner", "tuner.traces", "tuner.rewards", "tuner.areal")
        for known in import_module(name).__all__
        if known != "TrinityChatModel"  # depends on what is installed
    ]
    public = [value for value in values if inspect.isclass(value) or inspect.isfunction(value)]
    assert told == {f"{value.__module__}.{value.__qualname__}" for value in public}


LOCAL = [page for page in PAGES if page.name not in ("trinity.md", "capabilities.md")]


@pytest.mark.parametrize(
    ("page", "settings"),
    [
        (page.name, token.content)
        for page in LOCAL
        for token in parsed(page)
        if token.type == "fence" and token.info == "yaml"
    ],
)
def test_settings_on_a_page_are_accepted(page, settings, tmp_path):
    (tmp_path / "config.yaml").write_text(settings)
    load_config(tmp_path / "config.yaml")


@pytest.mark.parametrize("number", range(3))
def test_scripts_for_those_who_come_from_elsewhere_train(number, tmp_path):
    script = blocks("docs/from_others.md", "python")[number]
    (tmp_path / "main.py").write_text(script)
    assert "step 2/2" in forked.script(tmp_path / "main.py")


@pytest.mark.skipif(shutil.which("curl") is None, reason="the page's program is curl")
def test_a_program_that_is_not_python_is_trained(tmp_path):
    (program,) = blocks("docs/not_python.md", "bash")
    (script,) = blocks("docs/not_python.md", "python")
    (tmp_path / "agent.sh").write_text(program)
    (tmp_path / "main.py").write_text(script)
    printed = forked.script(tmp_path / "main.py")
    assert "step 2/2" in printed
    assert "32 completed" in printed


def test_what_to_look_at_when_the_reward_does_not_rise(random_model_path, tmp_path):
    config = runs.config(random_model_path, tmp_path / "checkpoints", "project=AgentScope")
    config = config.model_copy(update={"name": "GSM8K-tiny"})
    run_local(
        config, workflow=runs.workflow, judge=runs.judge, train_tasks=runs.TRAIN,
        eval_tasks={"held-out": runs.EVAL},
    )  # fmt: skip
    looking = "\n".join(blocks("docs/reward_does_not_rise.md", "python"))
    (tmp_path / "main.py").write_text(looking)
    printed = forked.script(tmp_path / "main.py")
    assert re.search(r"^reward/mean \[[\d., -]+\]$", printed, re.MULTILINE)
    assert "'rollouts/completed': 6" in printed
    assert len(re.findall(r"^-?[\d.]+ \['(?:length|stop)", printed, re.MULTILINE)) == 2
