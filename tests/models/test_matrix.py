"""Four lines of docs/reference/models.md; `make test-models` makes all of it."""

from __future__ import annotations

from unittest import mock

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.kit.examples import grid
from tests.models.matrix import REFERENCE, check, pages, verdicts, vision_shape, written
from tests.models.vision_matrix import PAGE, rest
from tuner.training.forward import layouts as probing

WRITTEN = verdicts(written())


@grid("model_type", ["cohere2", "gpt_neo", "bamba", "bert"], quick=2)
def test_the_table_says_what_is_found(model_type):
    """On the tree, on packed rows, on padded ones; and an encoder, which is refused."""
    found = verdicts(pages(check(model_type)).values())
    assert model_type in found
    assert found == {name: WRITTEN[name] for name in found}


@pytest.mark.long
def test_what_is_accepted_and_not_exact_is_wrong():
    windows = {"full_attention": None}
    with mock.patch.object(probing, "_tree_windows", return_value=windows):
        (shape,) = check("mistral")
    assert shape.cells[0].startswith("**wrong**")
    assert not any("wrong" in cell for cell in shape.cells[1:])


def test_the_table_has_every_model_of_this_transformers_and_none_is_wrong():
    assert not MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - WRITTEN.keys(), (
        "run: make test-models ARGS=--write"
    )
    assert not {name for name, found in WRITTEN.items() if "**" in found}


def test_the_page_of_vision_models_says_what_is_found():
    found = verdicts([vision_shape("qwen3_vl").line()])
    assert found == {"qwen3_vl": WRITTEN["qwen3_vl"]}
    assert (REFERENCE / f"{PAGE}.md").read_text(encoding="utf-8").endswith(rest())
