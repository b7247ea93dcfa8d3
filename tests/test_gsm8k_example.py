"""The judge of the GSM8K example."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

from tuner import MissingDependencyError
from tuner.rollouts.agentscope1 import trinity_chat_model

pytest.importorskip("agentscope")
pytest.importorskip("math_verify")

EXAMPLE = Path(__file__).parents[1] / "examples" / "gsm8k" / "main.py"


@pytest.fixture(scope="module", autouse=True)
def neighbours():
    """The example imports its neighbours, as a script can."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLE.parent)
        yield


@pytest.fixture(scope="module")
def example(neighbours):
    spec = importlib.util.spec_from_file_location("gsm8k_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        ("#### 1200", 1.0),
        ("The answer is 1,200.", 1.0),
        ("It costs $1200.00.", 1.0),
        (r"so \boxed{1200}", 1.0),
        (r"\boxed{\frac{2400}{2}}", 1.0),
        ("1200 is not it, 7 is", 0.0),
        ("I do not know.", 0.0),
        ("", 0.0),
        (None, 0.0),
        (r"\boxed{9^{9^{9^{9}}}}", 0.0),
        (r"\boxed{", 0.0),
    ],
)
async def test_judge_compares_final_answers(example, reply, reward):
    task = {"answer": "Half of 2400 is <<2400/2=1200>>1200.\n#### 1,200"}
    response = SimpleNamespace(get_text_content=lambda: reply)
    assert (await example.judge_function(task, response, {})).reward == reward


def test_without_agentscope_the_example_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setattr("tuner.rollouts.agentscope1.agentscope_version", lambda: None)
    trinity_chat_model.cache_clear()
    spec = importlib.util.spec_from_file_location("gsm8k_without_agentscope", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(MissingDependencyError, match=r"pip install .*\[agentscope1\]"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    trinity_chat_model.cache_clear()
