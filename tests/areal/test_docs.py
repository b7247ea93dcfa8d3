"""docs/migrating.md says where AReaL's names are, and they are there."""

import re

import pytest

import tuner
from tests.pages import ROOT
from tuner import areal

PAGE = (ROOT / "docs" / "migrating.md").read_text().partition("\n## AReaL\n")[2]
ROWS = re.findall(r"^\|(.*)\| (.*) \|$", PAGE.partition("|---|---|\n")[2], re.MULTILINE)


@pytest.mark.parametrize(("theirs", "ours"), ROWS)
def test_a_row_of_the_table_names_what_is_there(theirs, ours):
    named = theirs + ours if ours.startswith("the same") else ours
    code = re.sub(r'".*?"', "", " ".join(re.findall(r"`([^`]+)`", named)))
    for name in re.findall(r"\b[A-Z]\w+", code):
        assert hasattr(areal, name) or hasattr(tuner, name), name


def test_the_table_is_read():
    assert len(ROWS) > 35
