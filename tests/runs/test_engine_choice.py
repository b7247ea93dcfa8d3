"""`engine_type: auto`: what it comes to on which machine, and the line that says so."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.kit import runs
from tuner.config import load_config
from tuner.errors import ConfigError
from tuner.runs import placement as arrangement
from tuner.runs.placement import Machine, Needs, choose_engine
from tuner.runs.stack import build_stack

GIB = 2**30
MODEL = Path(__file__).parents[2] / "models" / "tiny_math"
NEEDS = Needs(trainer=20 * GIB, weights=4 * GIB, request=GIB)
PLAIN = {
    "use_dora": False,
    "modules_to_save": None,
    "bias": "none",
    "rank_pattern": {},
    "alpha_pattern": {},
    "r": 8,
}


@pytest.fixture
def installed(monkeypatch):
    """Whether there is a vLLM, and what its metadata says."""

    def found(version):
        monkeypatch.setattr(arrangement, "find_spec", lambda name: version and object())
        monkeypatch.setattr(arrangement.metadata, "version", lambda name: version)

    found("0.32.0")
    return found


def choose(*overrides, gpus=(80,), adapter=None, needs=NEEDS):
    config = load_config(overrides=overrides)
    machine = Machine(tuple(gpu * GIB for gpu in gpus), 200 * GIB)
    return choose_engine(config, machine, lambda: needs, adapter=adapter)


def adapter(*changed):
    """A model with one adapter, or with as many as there are changes."""
    each = [SimpleNamespace(**{**PLAIN, **one}) for one in changed or [{}]]
    return SimpleNamespace(peft_config=dict(enumerate(each)))


LORA = "model.lora_configs=[{lora_rank: 8}]"
ROLES = "model.adapters={w: {lora_rank: 4}, f: frozen, c: {lora_rank: 16}}"


@pytest.mark.usefixtures("installed")
def test_a_gpu_and_a_vllm_for_it_are_used():
    chosen = choose()
    assert str(chosen).startswith("engine: vllm, because there is a GPU and it is installed")
    assert choose(LORA, adapter=adapter()).engine_type == "vllm"
    assert choose(ROLES, adapter=adapter({"r": 4}, {"r": 16})).engine_type == "vllm"


@pytest.mark.usefixtures("installed")
def test_without_a_gpu_transformers_generates_and_what_is_needed_is_not_asked():
    config = load_config()
    chosen = choose_engine(config, Machine((), GIB), lambda: pytest.fail("asked"))
    assert str(chosen) == ("engine: transformers, with the trainer's weights: there is no GPU")


@pytest.mark.parametrize(
    ("version", "says"),
    [
        (None, "because vLLM is not installed, which would generate faster here: pip install"),
        ("0.32.0+cpu", r"because vLLM 0\.32\.0\+cpu is not built for GPUs"),
    ],
)
def test_a_vllm_that_is_missing_is_named_with_what_installs_it(installed, version, says):
    installed(version)
    chosen = choose()
    assert chosen.engine_type == "transformers"
    assert re.search(says, str(chosen))


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (
            {"overrides": ["tuner.deterministic=true"]},
            "tuner.deterministic is true, which vLLM cannot do",
        ),
        (
            {"overrides": ["model.lora_configs=[{lora_rank: 600}]"]},
            "model.lora_configs.0.lora_rank is 600, which vLLM cannot do",
        ),
        (
            {"overrides": [LORA], "adapter": adapter({"use_dora": True})},
            "the adapter at model.lora_configs.0.path has use_dora True, which vLLM does not serve",
        ),
        (
            {"overrides": [ROLES], "adapter": adapter({}, {"bias": "all"})},
            "the adapter at model.adapters.c.path has bias 'all', which vLLM does not serve",
        ),
        ({"gpus": [24]}, "vLLM needs 6.00 GiB for the weights"),
        ({"gpus": [16]}, "training needs 22.00 GiB"),
    ],
)
def test_what_vllm_cannot_do_with_the_rest_is_not_asked_for(asked, says):
    overrides = asked.pop("overrides", [])
    chosen = choose(*overrides, **asked)
    assert chosen.engine_type == "transformers"
    assert says in chosen.why
    assert chosen.why.endswith("; vLLM would generate faster here")


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("asked", ["transformers", "vllm"])
def test_what_is_asked_for_is_taken_without_a_word(asked):
    chosen = choose(f"explorer.rollout_model.engine_type={asked}")
    assert (chosen.engine_type, chosen.why) == (asked, "")


def test_the_choice_replaces_auto_and_nothing_else():
    config = load_config(overrides=["tuner.seed=7", "explorer.runner_per_model=3"])
    chosen = arrangement.EngineChoice("vllm").applied(config)
    assert chosen.explorer.rollout_model.engine_type == "vllm"
    assert chosen.model_dump() == {
        **config.model_dump(),
        "explorer": chosen.explorer.model_dump(),
    }
    assert chosen.explorer.runner_per_model == 3


def test_settings_of_servers_are_refused_where_there_may_be_none():
    with pytest.raises(ConfigError, match=r"engine_type: auto\) runs in this process.*to vllm"):
        load_config(overrides=["explorer.rollout_model.engine_num=2"])


async def test_vllm_serves_the_adapters_of_all_roles_with_room_for_the_largest(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("TUNER_ENGINE_KEY", "sesame")
    config = load_config(
        overrides=[
            ROLES,
            f"model.model_path={MODEL}",
            "explorer.rollout_model.engine_type=vllm",
            "tuner.engine.urls=[http://127.0.0.1:9]",
            f"checkpoint_root_dir={tmp_path}",
        ]
    )
    stack = build_stack(config, workflow=runs.workflow, judge=runs.judge)
    settings = stack.engine._fleet.seats[0].server._settings
    await stack.aclose()
    assert (settings["lora_rank"], settings["adapters"]) == (16, {"<w>": "w", "<c>": "c"})
    roles = stack.gateway.service.roles
    assert {role: roles.adapter(role) for role in "wfc"} == {"w": "<w>", "f": None, "c": "<c>"}


async def test_a_run_says_what_generates(tmp_path):
    config = load_config(overrides=[f"model.model_path={MODEL}", f"checkpoint_root_dir={tmp_path}"])
    stack = build_stack(config, workflow=runs.workflow, judge=runs.judge)
    await stack.aclose()
    assert stack.choice.engine_type == "transformers"
    assert str(stack.choice) in stack.decisions
