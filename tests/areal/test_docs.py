"""docs/from_areal.md names a test on each line, and they are there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "from_areal.md").read_text()


def test_each_line_of_the_table_is_linked_to_a_test_that_is_there():
    table = PAGE.partition("|---|---|---|\n")[2].partition("\n\n")[0].splitlines()
    assert len(table) > 40
    for number, line in enumerate(table, start=1):
        (found,) = re.findall(r"\[(\d+)\]\(\.\./(tests/[\w/.]+) \"(\w+)\"\)", line)
        assert int(found[0]) == number
        assert f"def {found[2]}(" in (ROOT / found[1]).read_text(), found
