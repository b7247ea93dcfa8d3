"""The table of real templates says what becomes of them; those that are here are tried again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gateway.drift import merging
from tests.gateway.families import TEMPLATES
from tests.gateway.qwen import qwen
from tests.gateway.template_matrix import DOCUMENTS, USER, Speech, cells, digest
from tests.kit.examples import grid
from tests.kit.toy import tokenizer
from tuner.gateway import ChatRenderer

REAL = sorted((TEMPLATES / "real").glob("*.jinja"))
ROWS = [line for page in DOCUMENTS for line in page.read_text(encoding="utf-8").splitlines()]


@grid(
    "file, speech",
    [(file, merging) for file in REAL]
    + [(file, qwen) for file in REAL if file.stem.startswith("Qwen")],
    quick=4,
    ids=lambda given: given.stem if isinstance(given, Path) else given.__name__,
)
def test_a_real_template_does_what_the_table_says(file: Path, speech: Speech) -> None:
    template = file.read_text(encoding="utf-8")
    (row,) = (row for row in ROWS if f"| {digest(template)} |" in row)
    assert f"`{file.name}`" in row
    assert row.endswith(f" | {cells(template, speech)} |")


@pytest.mark.parametrize("file", REAL, ids=lambda file: file.stem)
def test_a_real_template_takes_a_tool_that_has_a_name_alone(file: Path) -> None:
    renderer = ChatRenderer(
        tokenizer(),
        chat_template=file.read_text(encoding="utf-8"),
        tool_call_parser="none",
        reasoning_parser="none",
    )
    tool = {"type": "function", "function": {"name": "look_around"}}
    text = renderer.render_text([USER], [tool])
    assert ("look_around" in text) is (file.stem != "HuggingFaceTB-SmolLM3-3B")  # shows no tools


def test_every_template_that_is_here_names_its_maker() -> None:
    notice = (TEMPLATES / "real" / "README.md").read_text(encoding="utf-8")
    assert REAL
    assert all(f"| `{file.name}` |" in notice for file in REAL)
