"""No request means anything else, and none is refused in other words, than when it was written."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.golden.requests import PATHS, differences, load


@pytest.mark.parametrize("path", PATHS)
async def test_the_same_comes_of_every_request(path: str) -> None:
    different = await differences(path)
    assert not different, f"{len(different)} differ\n" + "\n".join(different[:5])


def test_every_dialect_has_requests_that_are_honoured_and_such_that_are_refused() -> None:
    found = Counter(
        (case["path"], "request" in case["outcome"]["read"]) for case in load()["cases"]
    )
    assert all(found[path, honoured] > 50 for path in PATHS for honoured in (True, False)), found
