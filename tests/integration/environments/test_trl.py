"""TRL's own trainer beside ours: the same functions and completions give the same rewards."""

import functools
import math
from pathlib import Path

import pytest
import torch
import trl
from datasets import Dataset
from trl.rewards import accuracy_reward, get_soft_overlong_punishment, think_format_reward

from tests.examples.conftest import main  # noqa: F401  # a fixture
from tuner import from_trl, tune
from tuner.config.algorithms import GRPOAdvantage
from tuner.environments.trl import TRL, GRPOConfig, TrlCompletion
from tuner.environments.trl_config import _word, read_config, settings_of
from tuner.errors import ConfigError
from tuner.training.advantages import call_normalized

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "trl"
MODEL = str(ROOT / "models" / "tiny_math")


def conversation(question):
    return [{"role": "user", "content": question}]


ROWS = [
    {"prompt": conversation("2+40?"), "solution": r"$42$", "weight": 0.5},
    {"prompt": conversation("6*7?"), "solution": "no number", "weight": 2.0},
]
TEXTS = [
    "<think>\nEasy.\n</think>\n\nIt is $\\boxed{42}$.",
    "It is $\\boxed{41}$.",
    "<think>\n42\n</think>\n\n",
    "",
]


def weighed(prompts, completions, weight, **_):
    assert len(prompts) == len(completions) == len(weight)
    return [w * len(one[0]["content"]) for one, w in zip(completions, weight, strict=True)]


def sometimes(completions, completion_ids, scale, log_extra, log_metric, trainer_state, **_):
    assert trainer_state.global_step == 0
    log_extra("length", [len(ids) for ids in completion_ids])
    log_metric("seen", 1.0)
    return [scale * len(ids) if len(ids) % 2 else None for ids in completion_ids]


async def later(completions, **_):
    return [None if one[0]["content"] else -1.25 for one in completions]


class Judge:
    def __call__(self, completions, solution, **_):
        return [
            float(right in one[0]["content"])
            for one, right in zip(completions, solution, strict=True)
        ]


FUNCTIONS = [
    accuracy_reward,
    think_format_reward,
    get_soft_overlong_punishment(max_completion_len=20, soft_punish_cache=10),
    weighed,
    functools.partial(sometimes, scale=0.125),
    later,
    Judge(),
]
WEIGHTS = [1.0, 0.3, 0.7, 0.01, 2.0, 1.5, -1.0]


def trainer_of(tmp_path, functions, rows=ROWS, **fields):
    """TRL's own."""
    args = trl.GRPOConfig(
        str(tmp_path / "theirs"),
        use_cpu=True,
        bf16=False,
        report_to="none",
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=16,
        **fields,
    )
    return trl.GRPOTrainer(MODEL, functions, args=args, train_dataset=Dataset.from_list(rows))


def ids_of(trainer, text):
    return trainer.processing_class(text)["input_ids"]


def theirs(trainer, row, texts):
    """The rewards of TRL's own code: of each function [N, functions], and their sum [N]."""
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    ids = [ids_of(trainer, text) for text in texts]
    count = len(texts)
    columns = trainer._calculate_rewards([row] * count, [row["prompt"]] * count, completions, ids)
    total = (columns * trainer.reward_weights).nansum(dim=1)
    total[columns.isnan().all(dim=1)] = torch.nan
    return columns, total


async def ours(trainer, environment, row, texts):
    responses = [
        TrlCompletion(
            prompt=row["prompt"],
            completion=[{"role": "assistant", "content": text}],
            ids=ids_of(trainer, text),
            step=0,
        )
        for text in texts
    ]
    return await environment.judge(task=row, responses=responses)


@pytest.mark.parametrize("row", ROWS, ids=["scored", "not_parsed"])
async def test_rewards_are_those_of_trls_trainer(row, tmp_path):
    trainer = trainer_of(tmp_path, list(FUNCTIONS), reward_weights=WEIGHTS)
    environment = TRL(list(FUNCTIONS), ROWS, args=GRPOConfig(reward_weights=WEIGHTS))
    columns, total = theirs(trainer, row, TEXTS)
    outputs = await ours(trainer, environment, row, TEXTS)
    for i, output in enumerate(outputs):
        assert output.reward == pytest.approx(float(total[i]), rel=1e-6)
        for j, name in enumerate(trainer.reward_func_names):
            said = output.metrics.get(f"rewards/{name}", math.nan)
            assert torch.tensor(said, dtype=torch.float32).equal(columns[i, j]) or (
                math.isnan(said) and columns[i, j].isnan()
            )


async def test_what_nobody_scores_counts_for_nobody_as_in_trl(tmp_path):
    def none_of_some(completions, **_):
        return [float(len(one[0]["content"])) if one[0]["content"] else None for one in completions]

    trainer = trainer_of(tmp_path, none_of_some)
    environment = TRL(none_of_some, ROWS, args=GRPOConfig())
    texts = ["one", "", "eleven", "four"]
    _, total = theirs(trainer, ROWS[0], texts)
    outputs = await ours(trainer, environment, ROWS[0], texts)
    assert [math.isnan(one.reward) for one in outputs] == total.isnan().tolist()

    ids = [ids_of(trainer, text) or [trainer.processing_class.eos_token_id] for text in texts]
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    prompt_ids = [ids_of(trainer, "2+40?")] * 4
    trainer._generate = lambda prompts: (prompt_ids, ids, None, completions, None, {}, None, [])
    scored = trainer._generate_and_score_completions([ROWS[0]] * 4)
    kept = torch.tensor([one.reward for one in outputs if not math.isnan(one.reward)])
    own, same = torch.arange(len(kept)), torch.zeros(len(kept), dtype=torch.long)
    advantages = call_normalized(kept, own, same, GRPOAdvantage(epsilon=1e-4)).tolist()
    expected = [0.0 if math.isnan(one.reward) else advantages.pop(0) for one in outputs]
    assert scored["advantages"].tolist() == pytest.approx(expected, rel=1e-5)


def test_an_environments_reward_is_trls(tmp_path):
    class Room:
        def reset(self, **row):
            return None

        def get_reward(self):
            return 0.75

    async def reward(environments, **_):
        return [float(isinstance(one, Room)) for one in environments]

    environment = TRL(reward, ROWS, environment_factory=Room)
    assert [one.__name__ for one in environment._instances.rewarding_classes] == ["Room"]


# Configurations


def test_trls_own_configuration_says_the_same_as_ours(tmp_path):
    fields = {
        "learning_rate": 3e-5,
        "num_generations": 4,
        "per_device_train_batch_size": 16,
        "beta": 0.01,
        "loss_type": "grpo",
        "lr_scheduler_type": "cosine",
        "warmup_steps": 5,
        "scale_rewards": False,
        "max_steps": 20,
        "save_strategy": "no",
        "report_to": "none",
        "temperature": 0.7,
    }
    here = str(tmp_path)
    real = trl.GRPOConfig(here, use_cpu=True, bf16=False, logging_steps=1, **fields)
    same = GRPOConfig(here, use_cpu=True, bf16=False, **fields)
    assert settings_of(read_config(real), 64) == settings_of(same, 64)
    plain = trl.GRPOConfig(here, use_cpu=True, bf16=False, report_to="none")
    assert settings_of(read_config(plain), 64) == settings_of(
        GRPOConfig(here, use_cpu=True, bf16=False), 64
    )


def test_defaults_are_those_of_the_version_that_is_installed():
    real = {one.name: one.default for one in trl.GRPOConfig.__dataclass_fields__.values()}
    ours = vars(GRPOConfig())
    same = {name for name, value in ours.items() if _word(real[name]) == _word(value)}
    assert set(ours) - same <= {"output_dir", "report_to"}


def test_what_is_set_in_trls_configuration_and_has_no_equal_is_refused(tmp_path):
    here = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False}
    with pytest.raises(ConfigError, match=r"GRPOConfig\.top_entropy_quantile is 0\.2"):
        read_config(trl.GRPOConfig(**here, top_entropy_quantile=0.2))
    with pytest.raises(ConfigError, match=r"multi_objective_aggregation.*rewards are summed"):
        read_config(trl.GRPOConfig(**here, multi_objective_aggregation="normalize_then_sum"))
    with pytest.raises(ConfigError, match="give a GRPOConfig"):
        read_config(trl.SFTConfig(**here))


# Runs


def test_pieces_of_a_script_run_with_trls_own_configuration(tmp_path):
    def reward(completions, completion_ids, answer, trainer_state, **_):
        assert trainer_state.max_steps == 2
        return [float(len(ids)) for ids in completion_ids]

    args = trl.GRPOConfig(
        str(tmp_path),
        use_cpu=True,
        bf16=False,
        max_steps=2,
        num_generations=4,
        per_device_train_batch_size=8,
        max_completion_length=6,
        report_to="none",
    )
    rows = [{"prompt": conversation("2+40?"), "answer": "42"}] * 4
    environment = from_trl(MODEL, [reward], args, train_dataset=Dataset.from_list(rows))
    result = tune(environment=environment)
    assert result.outcomes == {"completed": 16}
    assert result.steps == 2
    assert result.run_dir == tmp_path / "trl" / "grpo"


def test_the_example_learns(main, tmp_path):  # noqa: F811
    result = main.main(["buffer.total_steps=6"], str(tmp_path))
    before, after = result.eval_before["eval"], result.eval_after["eval"]
    assert after > before + 0.2, (before, after)
