"""The tutorial's notebook: an agent learns, and its checkpoint answers as the run did."""

import re
from pathlib import Path

import pytest

from docs.notebooks import executed, for_people
from tests.examples.notebooks import check_stored
from tests.test_tutorial import few_held_out

pytestmark = pytest.mark.long

EXAMPLE = Path(__file__).parents[2] / "examples" / "gsm8k"


def test_the_notebook_goes_from_the_agent_to_a_trained_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setenv("TUNER_CHECKPOINT_ROOT_DIR", str(tmp_path))
    monkeypatch.setenv("TUNER_DATASET", str(few_held_out(tmp_path / "data")))
    notebook = executed(EXAMPLE / "tutorial.ipynb")
    printed = "".join(
        output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ())
    )
    before, after = map(float, re.findall(r"test: ([\d.]+) -> ([\d.]+)", printed)[0])
    assert after > before + 0.25
    assert "reward=1.0" in printed  # the judge, tried by hand
    assert "reward=0.0" in printed
    assert "same tokens: True" in printed
    report = Path(printed.strip().splitlines()[-1])
    assert report.is_file()
    assert tmp_path in report.parents
    check_stored(EXAMPLE / "tutorial.ipynb", for_people(notebook, tmp_path))
