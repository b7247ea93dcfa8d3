"""What `optimizer: mipro` wants before it begins; the search is in tests/integration/frameworks."""

import sys

import pytest

from tuner import PromptTuneConfig, RemoteModel, tune_prompt
from tuner.errors import ConfigError, MissingDependencyError

REMOTE = RemoteModel(base_url="http://127.0.0.1:9/v1", model_name="big")


def search(root, workflow, **options):
    config = PromptTuneConfig(optimizer="mipro", reflection_model=REMOTE, **options)
    rows = [{"number": 1}]
    tune_prompt(
        workflow,
        None,
        rows,
        None,
        "Answer.",
        config,
        overrides=[f"checkpoint_root_dir={root}"],
    )


async def never(task, system_prompt):
    pytest.fail("a rollout was made")


def test_the_extra_is_named_before_anything_is_spent(tmp_path, monkeypatch):
    for module in ("dspy", "dspy.lm15"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingDependencyError, match=r"pip install .*\[dspy\]"):
        search(tmp_path, never)
    assert not list(tmp_path.iterdir())


def test_settings_of_the_other_optimizer_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"perfect_score is set"):
        search(tmp_path, never, perfect_score=1.0)
