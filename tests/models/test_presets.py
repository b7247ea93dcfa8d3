"""The presets of the model families load, and name parsers that exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gateway.families import FAMILIES
from tuner.config.load import load_config
from tuner.gateway.families.parsing import REASONING_PARSERS, TOOL_CALL_PARSERS

PRESETS = sorted((Path(__file__).parents[2] / "models" / "presets").glob("*.yaml"))


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
