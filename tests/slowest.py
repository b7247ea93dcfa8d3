"""Writes the slowest fifty tests into CONTRIBUTING, from what pytest printed on standard input."""

import re
import sys
from collections import Counter
from pathlib import Path

PAGE = Path(__file__).parents[1] / "CONTRIBUTING.md"
# "1.23s setup    tests/loop/test_local.py::test_a_run": a test has up to three of these.
LINE = re.compile(r"^(\d+\.\d+)s (?:setup|call|teardown) +(tests/\S.*)$", re.MULTILINE)
TABLE = re.compile(r"(?<=\nseconds \| test\n--- \| ---\n)(?:.+ \| `tests/.+`\n)*")


def main() -> None:
    seconds = Counter[str]()
    for spent, test in LINE.findall(sys.stdin.read()):
        seconds[test.strip()] += float(spent)
    if not seconds:
        sys.exit("no test has a duration: give pytest --durations=0")
    slowest = seconds.most_common(50)
    rows = "".join(f"{spent:.1f} | `{test.replace('|', '/')}`\n" for test, spent in slowest)
    PAGE.write_text(TABLE.sub(lambda _: rows, PAGE.read_text("utf-8"), count=1), "utf-8")
    print(f"{sum(seconds.values()):.0f} s in all, {sum(n for _, n in slowest):.0f} s in the table")


if __name__ == "__main__":
    main()
