"""Every recorded request is read, honoured or refused as when it was recorded, and a refusal is
worded as in `sentences.json`."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.golden.requests import PATHS, differences, load, names_its_field, recorded, sentences


@pytest.mark.parametrize("path", PATHS)
async def test_the_same_comes_of_every_request(path: str) -> None:
    decided, worded = await differences(path)
    assert not decided, f"{len(decided)} decisions differ\n" + "\n".join(decided[:5])
    assert not worded, (
        f"{len(worded)} refusals are worded differently; if this is intended, run "
        "`python -m tests.golden.requests sentences`\n" + "\n".join(worded[:5])
    )


def test_every_refusal_has_a_sentence_that_names_its_field() -> None:
    texts, used = sentences(), set[int]()
    for case in load()["cases"]:
        decisions, numbers = recorded(case)
        assert numbers.keys() == {ask for ask, one in decisions.items() if "error" in one}
        for ask, number in numbers.items():
            assert names_its_field(texts[number], decisions[ask]["error"]["param"]), case
        used.update(numbers.values())
    assert used == texts.keys()


def test_every_dialect_has_requests_that_are_honoured_and_such_that_are_refused() -> None:
    found = Counter(
        (case["path"], "request" in case["outcome"]["read"]) for case in load()["cases"]
    )
    assert all(found[path, honoured] > 50 for path in PATHS for honoured in (True, False)), found
