"""Configurations as dataclasses: derived from, read from YAML, overridden, checked, written."""

import dataclasses
import stat
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.areal import seed_agent  # noqa: F401  # registers agent and environment
from tests.kit import forked
from tuner.areal import (
    AgentAbstraction,
    AgentExperiment,
    EnvServiceAbstraction,
    GenerationHyperparameters,
    GRPOConfig,
    load_expr_config,
)
from tuner.areal.experiment import help_lines
from tuner.errors import ConfigError


@dataclass
class AgentRLConfig(GRPOConfig):
    max_turns: int = field(default=128, metadata={"help": "maximum number of turns per trajectory"})


@dataclass
class AsyncPPOMATHConfig(AgentExperiment, GRPOConfig):
    # Add any new CLI arguments your agent needs
    my_param: float = 1.0

    @property
    def agent(self) -> AgentAbstraction:
        return AgentAbstraction(
            "math-multi-turn",  # Your registered agent name
            args=dict(  # noqa: C408  # as in the document
                gconfig=self.gconfig,
                tokenizer_path=self.actor.path,
                my_param=self.my_param,
            ),
        )

    @property
    def env(self) -> EnvServiceAbstraction:
        return EnvServiceAbstraction("math-code-single-step", args={"solutions": {"q": "7"}})


@pytest.fixture
def write(tmp_path):
    def write(text):
        path = tmp_path / "x.yaml"
        path.write_text(f"fileroot: {tmp_path}\n{text}")
        return ["--config", str(path)]

    return write


def test_the_notebooks_configuration_is_read(write):
    args = write(
        "max_turns: 16\nturn_discount: 0.5\nactor: {path: some/model}\n"
        "rollout: {max_head_offpolicyness: 2}\n"
    )
    config, written = load_expr_config(args, AgentRLConfig)
    assert isinstance(config, AgentRLConfig)
    assert (config.max_turns, config.actor.path) == (16, "some/model")
    assert config.actor.run is config.rollout.run
    assert config.rollout.max_head_offpolicyness == 2
    assert config.run_config().tuner.algorithm.turn_discount == 0.5
    assert OmegaConf.load(written).max_turns == 16
    assert stat.S_IMODE(Path(written).parent.stat().st_mode) == 0o700


def test_the_legacy_subclass_takes_its_own_parameter_from_the_command_line(
    write, random_model_path
):
    args = write(f"actor:\n  path: {random_model_path}\ngconfig: {{max_new_tokens: 9}}\n")
    config, written = load_expr_config([*args, "my_param=5.0"], AsyncPPOMATHConfig)
    agent = config.workflow()._agent
    assert (agent.my_param, agent.gconfig.max_new_tokens) == (5.0, 9)
    again, _ = load_expr_config(["--config", written], AsyncPPOMATHConfig)
    assert dataclasses.asdict(again) == dataclasses.asdict(config)


MAIN = """
import sys
from dataclasses import dataclass, field

from tuner.areal import GRPOConfig, load_expr_config


@dataclass
class Mine(GRPOConfig):
    my_param: float = field(default=1.0, metadata={"help": "what is mine"})


config, written = load_expr_config(sys.argv[1:], Mine)
print(config.my_param, config.seed, written)
"""


def test_a_script_takes_its_file_overrides_and_help_from_the_command_line(write, tmp_path):
    script = tmp_path / "main.py"
    script.write_text(MAIN)
    args = write("my_param: 2.0\nseed: 7\n")
    param, seed, written = forked.script(script, *args, "my_param=5.0").split()
    assert (param, seed) == ("5.0", "7")
    assert OmegaConf.load(written).my_param == 5.0
    (line,) = [line for line in forked.script(script, "--help").splitlines() if "my_param" in line]
    assert "what is mine" in line
    assert "1.0" in line


def test_every_setting_reaches_the_run(tmp_path):
    config, _ = load_expr_config(
        [
            f"fileroot={tmp_path}",
            "experiment_name=e",
            "trial_name=t",
            "seed=7",
            "total_train_epochs=3",
            "gconfig.max_new_tokens=32",
            "gconfig.temperature=0.8",
            "gconfig.top_p=0.9",
            "gconfig.top_k=5",
            "gconfig.n_samples=6",
            "actor.path=/m",
            "actor.eps_clip=0.3",
            "actor.eps_clip_higher=0.4",
            "actor.c_clip=4",
            "actor.kl_ctl=0.1",
            "actor.reward_scaling=10",
            "actor.reward_bias=-0.5",
            "actor.behav_imp_weight_cap=5",
            "actor.max_tokens_per_mb=777",
            "actor.optimizer={lr: 0.1, weight_decay: 0.2, beta1: 0.3, beta2: 0.4, "
            "lr_scheduler_type: cosine, min_lr_ratio: 0.5, warmup_steps_proportion: 0.6, "
            "gradient_clipping: 0.7}",
            "rollout.max_concurrent_rollouts=3",
            "rollout.request_timeout=11",
            "rollout.request_retries=4",
            "train_dataset={path: d.jsonl, batch_size: 5, shuffle: false}",
            "success_rate_lb=0.05",
            "success_rate_ub=0.95",
            "turn_discount=0.7",
            "tuner.model.max_model_len=99",
        ],
        GRPOConfig,
    )
    run = config.run_config()
    algorithm, extras, optimizer = run.algorithm, run.tuner.algorithm, run.algorithm.optimizer
    taskset = run.buffer.explorer_input.taskset
    loss = algorithm.policy_loss
    assert run.run_dir == tmp_path / "e" / "t"
    assert (run.tuner.seed, run.buffer.total_epochs, run.buffer.batch_size) == (7, 3, 5)
    assert (run.model.model_path, run.model.max_model_len) == ("/m", 99)
    assert run.rollout_args(taskset).model_dump() == {
        "temperature": 0.8,
        "top_p": 0.9,
        "top_k": 5,
        "max_tokens": 32,
    }
    assert algorithm.repeat_times == 6
    assert (loss.low, loss.high, loss.clip_ratio_c) == (0.3, 0.4, 4)
    assert (algorithm.kl_penalty_fn, algorithm.kl_penalty.kl_coef) == ("k1", 0.1)
    assert algorithm.kl_loss_fn == "none"
    assert (extras.reward_scale, extras.reward_bias, extras.importance_cap) == (10, -0.5, 5)
    assert (extras.success_rate_lb, extras.success_rate_ub) == (0.05, 0.95)
    assert extras.turn_discount == 0.7
    assert (optimizer.lr, optimizer.weight_decay, optimizer.betas) == (0.1, 0.2, (0.3, 0.4))
    assert (optimizer.lr_scheduler_type, optimizer.min_lr_ratio) == ("cosine", 0.5)
    assert optimizer.lr_warmup_steps_ratio == 0.6
    assert (run.trainer.grad_clip, run.trainer.max_token_len_per_gpu) == (0.7, 777)
    assert (run.explorer.runner_per_model, run.explorer.max_timeout) == (3, 11)
    assert run.explorer.max_retry_times == 4
    assert taskset.path.endswith("/d.jsonl")
    assert taskset.data_selector.selector_type == "sequential"


def test_defaults_make_a_run_and_need_no_file(tmp_path, monkeypatch):
    config = GRPOConfig()
    run = config.run_config()
    assert run.algorithm.kl_penalty_fn == "none"
    assert run.model.max_response_tokens is None
    assert run.tuner.algorithm.turn_discount is None
    assert config.tokenizer_path.endswith("tiny_math")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("max_turn=3", "max_turn is unknown: is max_turns meant"),
        ("actor.eps_clips=3", r"actor\.eps_clips is unknown: is actor\.eps_clip meant"),
        ("max_turns=many", "max_turns is 'many': must be a valid integer"),
        ("actor.optimizer.lr=x", r"actor\.optimizer\.lr is 'x': must be a valid number"),
        ("gconfig.min_new_tokens=3", r"gconfig\.min_new_tokens is unknown"),
        ("gconfig.max_new_tokens=0", "max_new_tokens is 0"),
        ("success_rate_lb=2", r"tuner\.algorithm\.success_rate_lb"),
    ],
)
def test_what_is_unknown_or_wrong_is_refused_by_name(write, override, message):
    with pytest.raises(ConfigError, match=message):
        load_expr_config([*write(""), override], AgentRLConfig)


def test_what_contradicts_is_refused_when_the_run_is_made():
    config = GRPOConfig(success_rate_lb=2.0)
    with pytest.raises(ConfigError, match=r"tuner\.algorithm\.success_rate_lb"):
        config.run_config()


def test_help_comes_from_the_fields(capsys):
    with pytest.raises(SystemExit):
        load_expr_config(["--help"], AgentRLConfig)
    shown = capsys.readouterr().out
    assert "  max_turns (int, 128)  maximum number of turns per trajectory" in shown
    assert "  actor.optimizer.lr (float, 1e-06)  learning rate" in shown
    assert all(")  " in line for line in help_lines(AgentRLConfig))


def test_a_gconfig_is_made_of_a_dict(write):
    config, _ = load_expr_config(write("gconfig: {stop: [a, b], n_samples: 2}\n"), GRPOConfig)
    assert config.gconfig == GenerationHyperparameters(stop=("a", "b"), n_samples=2)


def test_a_configuration_without_its_agent_says_what_to_add():
    with pytest.raises(ConfigError, match="add a property `agent` that returns an AgentAbstr"):
        AgentExperiment().workflow()


def test_a_wrong_override_is_refused_before_pytorch_is_imported():
    main = Path(__file__).parents[2] / "examples" / "search_agent" / "main.py"
    program = (
        "import runpy, sys\n"
        "sys.modules['torch'] = sys.modules['transformers'] = None\n"  # importing them fails
        "sys.argv[1:] = ['actor.eps_clipp=1']\n"
        f"sys.path.insert(0, {str(main.parent)!r})\n"
        f"runpy.run_path({str(main)!r}, run_name='__main__')\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    said = "SearchAgentConfig: actor.eps_clipp is unknown: is actor.eps_clip meant?"
    assert process.stderr.splitlines() == [f"ConfigError: {said} (--help lists all)"]
