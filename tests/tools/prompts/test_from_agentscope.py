"""docs/migrating.md: it has every name of the released tuner, and its script runs."""

import ast
import re
from importlib.util import find_spec
from pathlib import Path
from runpy import run_path

import pytest

import tuner
from tests.kit import forked
from tests.kit.chat_server import chat_server
from tests.pages import ROOT, blocks

PAGE = (ROOT / "docs/migrating.md").read_text()


def installed(path):
    """A file of AgentScope 1.x, whose tuner does not import here: it needs DSPy."""
    spec = find_spec("agentscope")
    if spec is None or not (file := Path(spec.origin).parent / path).is_file():
        pytest.skip("AgentScope 1.x is not installed")
    return file


def released(package):
    """`__all__` of a package."""
    for node in ast.parse(installed(f"{package}/__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == "__all__":
            return ast.literal_eval(node.value)
    raise AssertionError(f"{package} exports nothing")


def told(module):
    """Ours, by the released name, in the table of a module."""
    table = PAGE.partition(f"| `{module}` | `tuner` |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", table, re.MULTILINE)
    return {name: re.findall(r"`(\w+)`", ours) for name, ours in rows}


@pytest.mark.parametrize("package", ["tuner", "tuner/prompt_tune", "tuner/model_selection"])
def test_every_name_of_agentscopes_tuner_is_told_and_here(package):
    names = told(f"agentscope.{package.replace('/', '.')}")
    assert set(names) == set(released(package))
    for name, ours in names.items():
        assert ours[0] == name
        assert all(hasattr(tuner, one) and one in tuner.__all__ for one in ours)


@pytest.mark.parametrize(
    ("file", "names"),
    [
        ("tuner/_model.py", ["TunerModelConfig", "TinkerConfig"]),
        ("tuner/_algorithm.py", ["AlgorithmConfig"]),
        ("tuner/_dataset.py", ["DatasetConfig"]),
        ("tuner/prompt_tune/_config.py", ["PromptTuneConfig"]),
    ],
)
def test_settings_have_agentscopes_fields_and_defaults(file, names):
    found = run_path(str(installed(file)))
    for name in names:
        theirs, ours = found[name].model_fields, getattr(tuner, name).model_fields
        assert {field: theirs[field].default for field in theirs} == {
            field: ours[field].default for field in theirs
        }


def test_the_pages_script_selects_a_model(tmp_path):
    pytest.importorskip("agentscope.model")
    (script,) = blocks("migrating.md", "python", "tests/tools/prompts/test_from_agentscope.py")
    (tmp_path / "test.jsonl").write_text('{"question": "2 + 2?", "answer": "4"}\n' * 20)
    with chat_server(lambda body: "4" if body["model"] == "large" else "5") as server:
        (tmp_path / "main.py").write_text(
            script.replace("http://127.0.0.1:8000/v1", server.base_url)
        )
        printed = forked.script(tmp_path / "main.py")
    assert "small is dropped after 16 tasks" in printed
    name, reward, cost = printed.splitlines()[-1].split()
    assert (name, reward) == ("large", "1.0")
    assert float(cost) == pytest.approx((7 * 0.4 + 1 * 1.2) / 1e6)


def test_the_released_tinker_config_is_ours():
    config = tuner.TinkerConfig(rank=8, train_unembed=False)
    model = tuner.TunerModelConfig(model_path="m", max_model_len=64, tinker_config=config)
    assert model.policy_settings() == {
        "model.model_path": "m",
        "model.max_model_len": 64,
        "model.tinker.enable": True,
        "model.tinker.rank": 8,
        "model.tinker.seed": None,
        "model.tinker.train_mlp": True,
        "model.tinker.train_attn": True,
        "model.tinker.train_unembed": False,
        "model.tinker.base_url": None,
    }
    with pytest.raises(tuner.ConfigError, match=r"TinkerConfig\.rank"):
        tuner.TinkerConfig(rank=0)
