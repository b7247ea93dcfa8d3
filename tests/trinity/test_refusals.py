"""The table of both backends says what the code does."""

from tuner.trinity.refusals import PAGE, page


def test_the_table_of_both_backends_is_current():
    current = PAGE.read_text(encoding="utf-8") == page()
    assert current, "run: python -m tuner.trinity.refusals"
