"""Outputs of commands on pages are what the commands print, apart from numbers."""

import re

import pytest

from docs import samples


def form(text: str) -> list[str]:
    """The words of each line."""
    return [" ".join(re.sub(r"-?\d[\d.,e+-]*", "#", line).split()) for line in text.splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("samples")
    samples.prepare(folder)
    return folder


@pytest.mark.long
@pytest.mark.parametrize(
    ("page", "command", "shown"),
    [
        pytest.param(page, command, shown, id=command)
        for page in samples.PAGES
        for command, shown in samples.samples(page)
    ],
)
def test_a_page_shows_what_the_command_prints(page, command, shown, folder):
    printed = samples.run(command, folder)
    assert form(shown.strip()) == form(printed.strip()), f"{page.name}: python -m docs.samples"


def test_each_output_on_a_page_is_made_by_the_script():
    """An indented block of a prompt would be one that nobody runs."""
    made = [command for page in samples.PAGES for command, _ in samples.samples(page)]
    shown = [
        line
        for page in samples.PAGES
        for line in re.findall(r"^ *\$ (tuner .+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert made == shown
    assert len(made) >= 3
