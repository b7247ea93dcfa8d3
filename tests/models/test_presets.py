"""The presets and the table of the model families name parsers that exist, and all of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.gateway.families import FAMILIES
from tuner.config.load import load_config
from tuner.gateway.families.grammars import CALL_FORMS
from tuner.gateway.families.parsing import REASONING_PARSERS, TOOL_CALL_PARSERS

ROOT = Path(__file__).parents[2]
PRESETS = sorted((ROOT / "models" / "presets").glob("*.yaml"))
PAGE = (ROOT / "docs" / "model_families.md").read_text(encoding="utf-8")
# Family, tool_call_parser, reasoning_parser.
TABLE = [
    line.split(" | ")
    for line in PAGE.partition("| family |")[2].partition("\n\n")[0].splitlines()[2:]
]


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_preset_loads_and_its_parsers_exist(path: Path) -> None:
    config = load_config(path)
    assert config.model.model_path is not None
    rollout_model = config.explorer.rollout_model
    assert (rollout_model.tool_call_parser or "none") in TOOL_CALL_PARSERS
    assert (rollout_model.reasoning_parser or "none") in REASONING_PARSERS


def test_every_family_has_a_preset() -> None:
    chosen = {load_config(path).explorer.rollout_model.tool_call_parser for path in PRESETS}
    assert {family.tool_call_parser for family in FAMILIES} <= chosen


def test_the_table_of_families_names_every_parser_and_no_other() -> None:
    named = {name for _, calls, _ in TABLE for name in re.findall(r"`([\w-]+)`", calls)}
    assert named == CALL_FORMS.keys()
    reasoning = {name for *_, column in TABLE for name in re.findall(r"`([\w-]+)`", column)}
    assert reasoning - {"null"} == REASONING_PARSERS.keys() - {"none"}


def test_presets_pair_their_parsers_as_the_table_does() -> None:
    pairs = {
        (call, reasoning)
        for _, calls, column in TABLE
        for call in re.findall(r"`([\w-]+)`", calls)
        for reasoning in re.findall(r"`([\w-]+)`", column)
    }
    for path in PRESETS:
        chosen = load_config(path).explorer.rollout_model
        assert (chosen.tool_call_parser, chosen.reasoning_parser or "null") in pairs, path
