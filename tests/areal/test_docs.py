"""docs/migrating.md names a test on each line, and they are there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "migrating.md").read_text()


def test_each_line_of_the_table_is_linked_to_a_test_that_is_there():
    table = PAGE.partition("|---|---|---|\n")[2].partition("\n\n")[0].splitlines()
    assert len(table) > 40
    number = 0
    for line in table:
        links = re.findall(r"\[(\d+)\]\(\.\./(tests/[\w/.]+) \"(\w+)\"\)", line)
        assert links, line
        for shown, path, name in links:
            number += 1
            assert int(shown) == number
            assert f"def {name}(" in (ROOT / path).read_text(), name
