"""What of Tinker needs neither its client nor Trinity-RFT; see `tests/integration/trinity`."""

import pytest

from tuner.errors import ConfigError, MissingDependencyError
from tuner.trinity import installed as tinker

ENABLED = {"model": {"tinker": {"enable": True}}}


def test_the_workers_get_the_key_where_it_is_needed(monkeypatch):
    monkeypatch.setenv("TINKER_API_KEY", "tml-k")
    assert tinker.environment(ENABLED) == {"TINKER_API_KEY": "tml-k"}
    assert tinker.environment({"model": {}}) == {}


@pytest.mark.parametrize(
    ("found", "error", "said"),
    [
        (None, MissingDependencyError, "pip install 'tinker"),
        (object(), ConfigError, "TINKER_API_KEY is not set"),
    ],
)
def test_what_is_missing_is_named_before_anything_is_asked(found, error, said, monkeypatch):
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    monkeypatch.setattr(tinker, "find_spec", lambda name: found)
    with pytest.raises(error, match=said):
        tinker.require_service(ENABLED)
