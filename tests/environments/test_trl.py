"""A GRPOTrainer's pieces without TRL: rewards, prompts, tools, environments, settings."""

import asyncio
import functools
import math
import sys
import threading
import types
from pathlib import Path

import pytest

from tests.gateway import drift
from tuner import from_trl, tune
from tuner.config.load import load_config
from tuner.environments import trl as trl_rewards
from tuner.environments.trl import TRL, GRPOConfig, GRPOTrainer
from tuner.environments.trl_config import settings_of
from tuner.errors import ConfigError, DatasetError, FunctionError
from tuner.rollouts.without_framework import PlainChatModel
from tuner.tasks.functions import check_settings
from tuner.traces import TraceStore
from tuner.tune import prepare

MODEL = Path(__file__).parents[2] / "models" / "tiny_math"
USER = {"role": "user", "content": "2+40?"}
ROWS = [{"prompt": [USER], "answer": "42"}] * 8


def length(completions, **columns):
    return [float(len(one if isinstance(one, str) else one[-1]["content"])) for one in completions]


def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: A number.
        b: Another one.
    """
    return a + b


async def completed(environment, task, *texts, session="train-3-0-0-1"):
    """What reward functions see, and the calls."""
    gateway = drift.gateway_of(*map(drift.letters, texts))
    try:
        model = PlainChatModel(gateway.open_session(session))
        output = await environment.workflow(task, model)
        return output.response, list(model.session.recording.calls)
    finally:
        await gateway.aclose()


async def judged(environment, task, *texts):
    """The outputs of a group, one rollout for each text."""
    responses = [(await completed(environment, task, text))[0] for text in texts]
    return await environment.judge(task=task, responses=responses)


# Rewards


async def test_functions_get_the_batch_its_columns_and_what_trl_gives_besides():
    seen = {}

    def reward(prompts, completions, completion_ids, answer, trainer_state, **rest):
        seen.update(locals())
        return [1.0] * len(prompts)

    environment = TRL(reward, ROWS, args=GRPOConfig(max_steps=7))
    await judged(environment, ROWS[0], "41", "42")
    assert seen["prompts"] == [[USER], [USER]]
    assert seen["completions"] == [
        [{"role": "assistant", "content": "41"}],
        [{"role": "assistant", "content": "42"}],
    ]
    assert [len(ids) for ids in seen["completion_ids"]] == [3, 3]  # with the turn's end
    assert seen["answer"] == ["42", "42"]
    assert seen["trainer_state"].global_step == 2  # two steps lie behind the third
    assert seen["trainer_state"].max_steps == 7
    assert set(seen["rest"]) == {"log_extra", "log_metric"}


async def test_rewards_are_weighted_and_added_and_none_is_left_out():
    async def even(completions, **columns):
        return [1.0 if len(one[0]["content"]) % 2 == 0 else None for one in completions]

    def never(completions, **columns):
        return [None] * len(completions)

    environment = TRL(
        [length, even, never], ROWS, args=GRPOConfig(reward_weights=[0.5, 10.0, 99.0])
    )
    one, two = await judged(environment, ROWS[0], "1", "42")
    assert one.reward == 0.5
    assert one.metrics == {"rewards/length": 1.0}
    assert two.reward == 11.0
    assert two.metrics == {"rewards/length": 2.0, "rewards/even": 1.0}


async def test_a_completion_that_nobody_scores_has_no_reward_of_zero():
    environment = TRL(lambda completions, **_: [None, 1.0], ROWS)
    one, two = await judged(environment, ROWS[0], "1", "42")
    assert math.isnan(one.reward)
    assert one.feedback == "no reward function scores this completion"
    assert two.reward == 1.0


async def test_functions_are_told_how_long_the_run_is():
    def reward(trainer_state, **_):
        return [float(trainer_state.max_steps)]

    environment = TRL(reward, ROWS, args=GRPOConfig(max_steps=7))
    for overrides, steps in [([], 7), (["buffer.total_steps=3"], 3)]:  # which win over args
        check_settings(environment.workflow, load_config(None, overrides=overrides))
        (output,) = await judged(environment, ROWS[0], "1")
        assert output.reward == steps


async def test_async_functions_run_together():
    here = asyncio.Barrier(2)

    async def first(completions, **_):
        await asyncio.wait_for(here.wait(), 20)
        return [1.0]

    class Second:
        async def __call__(self, completions, **_):
            await asyncio.wait_for(here.wait(), 20)
            return [2.0]

    environment = TRL([functools.partial(first), Second()], ROWS)
    (output,) = await judged(environment, ROWS[0], "1")
    assert output.reward == 3.0
    assert output.metrics == {"rewards/first": 1.0, "rewards/Second": 2.0}


async def test_plain_functions_run_one_at_a_time():
    inside, most = [], []

    def slow(completions, **_):
        inside.append(1)
        most.append(len(inside))
        threading.Event().wait(0.01)
        inside.pop()
        return [1.0]

    environment = TRL(slow, ROWS)
    await asyncio.gather(*(judged(environment, ROWS[0], "1") for _ in range(4)))
    assert most == [1, 1, 1, 1]


async def test_what_functions_log_is_of_the_rollout():
    def reward(completions, log_extra, log_metric, **_):
        log_extra("gold", ["a", "b"])
        log_extra("distance", [1, 2])
        log_metric("share", 0.25)
        log_metric("share", 0.75)
        return [1.0, 2.0]

    one, two = await judged(TRL(reward, ROWS), ROWS[0], "1", "2")
    assert one.feedback == "gold: a"
    assert one.metrics == {"rewards/reward": 1.0, "distance": 1.0, "share": 0.5}
    assert two.metrics["distance"] == 2


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        (1.0, r"returned 1\.0 \(float\); expected a list"),
        ([1.0], "returned 1 rewards for 2 completions"),
        (["good", "bad"], "expected a list with a number or None"),
    ],
)
async def test_something_else_than_a_reward_for_each_is_refused(said, problem):
    with pytest.raises(FunctionError, match=problem):
        await judged(TRL(lambda completions, **_: said, ROWS), ROWS[0], "1", "2")


def test_reward_models_and_classes_are_refused_by_name():
    from torch.nn import Linear

    with pytest.raises(ConfigError, match=r"reward_funcs\[1\] is 'org/reward'.*a reward model"):
        TRL([length, "org/reward"], ROWS)
    with pytest.raises(ConfigError, match=r"reward_funcs\[0\] is Linear\(.*a reward model"):
        TRL(Linear(1, 1), ROWS)
    with pytest.raises(ConfigError, match=r"reward_funcs\[0\] is <class 'object'>"):
        TRL(object, ROWS)
    with pytest.raises(ConfigError, match="there is no reward"):
        TRL(None, ROWS)
    with pytest.raises(ConfigError, match="has 1 weights for 2 reward functions"):
        TRL([length, length], ROWS, args=GRPOConfig(reward_weights=[1.0]))


# Prompts


async def test_a_plain_prompt_is_continued_as_it_is():
    response, calls = await completed(TRL(length, ROWS), {"prompt": "2+40="}, "42")
    assert response.completion == "42"
    assert calls[0].dialect == "completions"
    assert calls[0].prompt_ids == drift.encoded("2+40=")


async def test_a_completion_is_the_text_that_was_sampled():
    text = "<think>\nhm\n</think>\n\n42"
    response, _ = await completed(TRL(length, ROWS), ROWS[0], text)
    assert response.completion == [{"role": "assistant", "content": text}]


async def test_what_is_no_prompt_of_text_is_refused():
    environment = TRL(length, ROWS)
    for task, problem in [
        ({"question": "?"}, r"prompt is None .*expected messages, or a text"),
        ({"prompt": [USER], "image": "x.png"}, "the row has image: only text"),
    ]:
        with pytest.raises(DatasetError, match=problem):
            await completed(environment, task, "42")
    with pytest.raises(DatasetError, match=r"expected messages$"):
        await completed(TRL(length, ROWS, tools=[add]), {"prompt": "2+40="}, "42")


async def test_settings_of_a_completion_are_its_calls():
    args = GRPOConfig(min_p=0.1, repetition_penalty=1.5, max_completion_length=9)
    gateway = drift.gateway_of(drift.letters("42"))
    gateway.engine.every_setting = True
    model = PlainChatModel(gateway.open_session("eval-2-0-0-1"))
    output = await TRL(length, ROWS, args=args).workflow(ROWS[0], model)
    sampling = model.calls[0].call.sampling
    assert (sampling.min_p, sampling.repetition_penalty, sampling.max_tokens) == (0.1, 1.5, 9)
    assert output.response.step == 2
    await gateway.aclose()


async def test_a_cut_off_completion_is_not_trained_where_trl_masks_it():
    for masked in (False, True):
        args = GRPOConfig(max_completion_length=2, mask_truncated_completions=masked)
        _, calls = await completed(TRL(length, ROWS, args=args), ROWS[0], "12345")
        assert calls[0].excluded is masked


# Tools


async def test_tools_are_called_until_none_is_and_their_tokens_belong_to_the_completion():
    async def slowly(a: int, b: int) -> int:
        """Adds.

        Args:
            a: A number.
            b: Another one.
        """
        return a + b

    slowly.__name__ = "add"
    for tool in (add, slowly):
        environment = TRL(length, ROWS, tools=[tool])
        response, calls = await completed(environment, ROWS[0], drift.CALL, "It is 42.")
        called = {
            "type": "function",
            "function": {"name": "add", "arguments": {"a": 2, "b": 40}},
        }
        assert response.completion == [
            {"role": "assistant", "content": "", "tool_calls": [called]},
            {"role": "tool", "name": "add", "content": "42"},
            {"role": "assistant", "content": "It is 42."},
        ]
        first, last = calls
        assert first.tools[0]["function"]["description"] == "Adds."
        assert [*first.prompt_ids, *response.ids] == [*last.prompt_ids, *last.completion_ids]
        assert response.metrics == {"tool_calls": 1.0, "tool_failures": 0.0}


async def test_a_tool_that_fails_tells_the_model():
    def add(a: int) -> int:
        """Adds.

        Args:
            a: A number.
        """
        return a

    response, _ = await completed(TRL(length, ROWS, tools=[add]), ROWS[0], drift.CALL, "42")
    assert response.completion[1]["content"].startswith("{'error': ")
    assert response.metrics == {"tool_calls": 1.0, "tool_failures": 1.0}


@pytest.mark.parametrize(("limit", "calls"), [(0, 1), (2, 3)])
async def test_calls_of_tools_end_after_so_many_iterations(limit, calls):
    args = GRPOConfig(max_tool_calling_iterations=limit)
    environment = TRL(length, ROWS, tools=[add], args=args)
    response, made = await completed(environment, ROWS[0], drift.CALL)
    assert len(made) == calls
    assert response.completion[-1]["tool_calls"]


def test_a_tool_without_a_description_is_refused():
    def bare(a):
        return a

    with pytest.raises(ConfigError, match=r"the tool bare cannot be offered: .*no docstring"):
        TRL(length, ROWS, tools=[bare])


# Environments


class Counter:
    """Counts; its reward is how far it got."""

    made = 0

    def __init__(self):
        type(self).made += 1
        self.count = None

    def reset(self, **row):
        self.row = row
        self.count = row.get("start", 0)
        return f" From {self.count}."

    def add(self, a: int, b: int) -> int:
        """Adds.

        Args:
            a: A number.
            b: Another one.
        """
        self.count += a + b
        return self.count

    def get_reward(self):
        return self.count


async def test_an_environments_methods_are_tools_and_it_rewards():
    seen = []

    def reward(environments, **_):
        seen.extend(environments)
        return [0.5]

    environment = TRL(reward, [{**ROWS[0], "start": 1}], environment_factory=Counter)
    task = {**ROWS[0], "start": 1}
    response, calls = await completed(environment, task, drift.CALL, "Done.")
    assert calls[0].messages == [{"role": "user", "content": "2+40? From 1."}]
    assert [tool["function"]["name"] for tool in calls[0].tools] == ["add"]
    assert response.completion[1]["content"] == "43"
    assert response.environment.row == task
    (output,) = await environment.judge(task=task, responses=[response])
    assert output.reward == 43.5
    assert output.metrics == {"rewards/reward": 0.5, "rewards/Counter": 43.0}
    assert seen == [response.environment]
    assert task["prompt"] == [USER]  # the row is as it was


async def test_each_rollout_has_an_environment_and_idle_ones_are_used_again():
    Counter.made = 0
    environment = TRL(None, ROWS, environment_factory=Counter)
    assert Counter.made == 1  # to see what it can do
    responses = [(await completed(environment, ROWS[0], "No."))[0] for _ in range(3)]
    assert len({id(one.environment) for one in responses}) == Counter.made == 3
    await environment.judge(task=ROWS[0], responses=responses)
    await completed(environment, ROWS[0], "No.")
    assert Counter.made == 3


async def test_a_row_chooses_among_several_environments():
    class Other:
        async def reset(self, **row):
            self.row = row

        async def get_reward(self):
            return 7.0

    factories = {"count": Counter, "other": Other}
    environment = TRL(None, ROWS, environment_factory=factories)
    rows = [{**ROWS[0], "environment": name} for name in factories]
    found = [(await completed(environment, row, "No."))[0] for row in rows]
    assert "environment" not in found[1].environment.row
    rewards = [
        (await environment.judge(task=row, responses=[one]))[0].reward
        for row, one in zip(rows, found, strict=True)
    ]
    assert rewards == [0.0, 7.0]
    with pytest.raises(DatasetError, match="'third', but environment_factory makes count, other"):
        await completed(environment, {**ROWS[0], "environment": "third"}, "No.")


async def test_an_environment_may_say_all_that_is_asked():
    args = GRPOConfig(max_steps=1, per_device_train_batch_size=16)
    environment = TRL(None, environment_factory=Counter, args=args)
    assert environment.train_dataset == [{"prompt": [{"role": "user", "content": ""}]}] * 2
    _, calls = await completed(environment, {"start": 3}, "No.")
    assert calls[0].messages == [{"role": "user", "content": " From 3."}]


def test_an_environment_needs_a_reset():
    with pytest.raises(ConfigError, match="has no reset"):
        TRL(length, ROWS, environment_factory=object)


# Settings


def config_of(tmp_path, rows=64, **fields):
    """The configuration that TRL's settings come to."""
    args = GRPOConfig(str(tmp_path), max_steps=fields.pop("max_steps", 3), **fields)
    environment = from_trl(str(MODEL), length, args, train_dataset=ROWS * (rows // 8))
    return prepare(environment=environment).config


def test_defaults_are_trls(tmp_path):
    config = config_of(tmp_path)
    algorithm, optimizer = config.algorithm, config.algorithm.optimizer
    assert config.buffer.batch_size == 1  # 8 completions, 8 of each prompt
    assert (algorithm.repeat_times, config.buffer.total_steps) == (8, 3)
    assert (optimizer.lr, optimizer.lr_scheduler_type, optimizer.weight_decay) == (
        1e-6,
        "linear",
        0,
    )
    assert (optimizer.min_lr_ratio, optimizer.betas) == (0.0, (0.9, 0.999))
    assert (algorithm.loss_agg_mode, algorithm.kl_loss_fn) == ("token-mean", "none")
    assert algorithm.advantage_fn_args.epsilon == 1e-4
    assert algorithm.policy_loss_fn_args.clip_range_high == 0.2
    assert (config.model.max_response_tokens, config.model.temperature) == (512, 1.0)
    assert config.trainer.save_interval == 500
    assert config.model.model_path == str(MODEL)


@pytest.mark.parametrize(
    ("fields", "algorithm", "aggregation"),
    [
        ({"loss_type": "grpo"}, "grpo", "seq-mean-token-mean"),
        ({"loss_type": "dapo", "delta": 1.5}, "grpo", "token-mean"),
        ({"loss_type": "bnpo"}, "grpo", "token-mean"),
        ({"loss_type": "dr_grpo", "scale_rewards": False}, "grpo", "seq-mean-token-sum-norm"),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, "cispo", "token-mean"),
        ({"loss_type": "sapo"}, "sapo", "seq-mean-token-mean"),
        (
            {"loss_type": "grpo", "importance_sampling_level": "sequence", "beta": 0.1},
            "gspo",
            "seq-mean-token-mean",
        ),
        ({"beta": 0.04, "use_bias_correction_kl": False}, "grpo", "token-mean"),
    ],
)
def test_a_loss_of_trls_is_an_algorithm_that_can_be_loaded(
    fields, algorithm, aggregation, tmp_path
):
    found = config_of(tmp_path, **fields).algorithm
    assert (found.algorithm_type, found.loss_agg_mode) == (algorithm, aggregation)
    kl = "none" if not fields.get("beta") else "k2"
    assert found.kl_loss_fn == ("k3" if "use_bias_correction_kl" in fields else kl)


def test_batches_epochs_and_intervals_are_counted_as_trl_counts():
    def settings(rows, **fields):
        return settings_of(GRPOConfig(**fields), rows)

    found = settings(
        64,
        num_generations=4,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=4,
        num_train_epochs=2,
        save_strategy="epoch",
        eval_strategy="steps",
        eval_steps=5,
    )
    assert found["buffer.batch_size"] == 8
    assert found["buffer.total_steps"] == 16
    assert found["trainer.save_interval"] == 8
    assert found["explorer.eval_interval"] == 5
    assert settings(None, max_steps=10, num_iterations=4)["buffer.total_steps"] == 3
    warm = settings(8, warmup_steps=0.1, max_steps=10)
    assert warm["algorithm.optimizer.lr_warmup_steps"] == -1
    assert warm["algorithm.optimizer.lr_warmup_steps_ratio"] == 0.1


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"multi_objective_aggregation": "normalize_then_sum"}, "rewards are summed"),
        ({"fp16": True}, "GRPOConfig.fp16 is True"),
        ({"learning_rat": 0}, "GRPOConfig.learning_rat is 0"),
        ({"learning_rat": 1e-5}, "GRPOConfig.learning_rat is 1e-05, which is not supported here"),
        ({"loss_type": "vespo"}, "GRPOConfig.loss_type is 'vespo'"),
        ({"loss_type": "bnpo", "gradient_accumulation_steps": 2}, "use 'dapo'"),
        ({"loss_type": "cispo"}, "epsilon_high is None: cispo's bound"),
        ({"steps_per_generation": 4}, "steps_per_generation is 4: a step trains what it sampled"),
        ({"num_generations": 3}, "a step's 8 completions are not a multiple of it"),
        ({"lr_scheduler_type": "polynomial"}, "one of linear, cosine"),
        ({"optim": "adafactor"}, "GRPOConfig.optim is 'adafactor': one of adamw_torch,"),
        ({"vllm_mode": "server", "use_vllm": True}, "the engine is started here"),
        ({"model_init_kwargs": {"attn_implementation": "x"}}, "only dtype is supported"),
        ({"num_generations_eval": 4}, "evaluation is greedy"),
        ({"eval_strategy": "steps"}, "'steps' with eval_steps"),
    ],
)
def test_what_has_no_equal_is_refused_by_name(fields, problem):
    with pytest.raises(ConfigError, match=problem):
        TRL(length, ROWS, args=GRPOConfig(max_steps=3, **fields))


def test_what_is_off_may_be_given_and_what_has_no_effect_is_said(caplog):
    fields = {"fp16": False, "entropy_coef": 0.0, "sync_ref_model": False, "push_to_hub": False}
    with caplog.at_level("INFO", "tuner"):
        GRPOConfig(**fields, logging_steps=1, optim="adamw_torch")
    assert caplog.messages == ["GRPOConfig: logging_steps: no effect on the result here"]


def test_arguments_of_the_trainer_that_have_no_equal_are_refused_by_name():
    for name, value in {
        "processing_class": object(),
        "callbacks": [object()],
        "optimizers": (object(), None),
        "rollout_func": print,
        "quantization_config": object(),
    }.items():
        with pytest.raises(ConfigError, match=f"GRPOTrainer's {name} is not supported"):
            GRPOTrainer(str(MODEL), length, train_dataset=ROWS, **{name: value})
    with pytest.raises(ConfigError, match="model is a object: pass the name or folder"):
        GRPOTrainer(object(), length, train_dataset=ROWS)


def test_several_processes_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="WORLD_SIZE is more than 1"):
        TRL(length, ROWS, args=GRPOConfig(max_steps=1))


def test_an_adapter_is_pefts(tmp_path):
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["v_proj", "q_proj"])
    args = GRPOConfig(str(tmp_path), max_steps=1)
    environment = from_trl(str(MODEL), length, args, train_dataset=ROWS, peft_config=lora)
    (found,) = prepare(environment=environment).config.model.lora_configs
    assert (found.lora_rank, found.lora_alpha) == (4, 8)
    assert list(found.target_modules) == ["q_proj", "v_proj"]
    with pytest.raises(ConfigError, match="target_modules is not set"):
        from_trl(str(MODEL), length, args, train_dataset=ROWS, peft_config=peft.LoraConfig())
    dropped = peft.LoraConfig(target_modules=["q_proj"], lora_dropout=0.1)
    with pytest.raises(ConfigError, match=r"peft_config.lora_dropout is 0\.1"):
        from_trl(str(MODEL), length, args, train_dataset=ROWS, peft_config=dropped)


# Runs


def some(completions, **_):
    """Scores each second completion."""
    return [float(i) if i % 2 else None for i, _ in enumerate(completions)]


def test_a_run_leaves_out_what_nobody_scores_and_saves_its_model(tmp_path):
    args = GRPOConfig(
        str(tmp_path), max_steps=1, max_completion_length=4, per_device_train_batch_size=8
    )
    trainer = GRPOTrainer(str(MODEL), some, args, ROWS)
    with pytest.raises(ConfigError, match=r"call train\(\) first"):
        trainer.save_model()
    result = trainer.train()
    assert result.outcomes == {"completed": 4, "invalid_reward": 4}
    trainer.save_model(tmp_path / "model")
    assert (tmp_path / "model" / "model.safetensors").is_file()
    traces = TraceStore(tmp_path / "trl" / "grpo" / "traces").read("train", 1)
    (error,) = {trace.error for trace in traces if trace.error}
    assert error == "the judge gave reward nan; a reward must be a finite number"


def test_a_reward_function_that_raises_is_an_outcome(tmp_path):
    raised = []

    def moody(completions, **_):
        if not raised:
            raised.append(1)
            raise ValueError("no mood")
        return [float(i) for i, _ in enumerate(completions)]

    args = GRPOConfig(str(tmp_path), max_steps=2, max_completion_length=4)
    environment = from_trl(str(MODEL), moody, args, train_dataset=ROWS)
    result = tune(environment=environment, overrides=["explorer.max_retry_times=0"])
    assert result.outcomes == {"completed": 8, "judge_error": 8}


def test_a_file_names_the_pieces(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pieces.py").write_text(
        "def reward(completions, **_):\n    return [float(len(c)) for c in completions]\n"
    )
    from tuner.runs.environment import from_settings

    environment = from_settings(
        {"kind": "trl", "reward_funcs": ["pieces.py:reward"], "args": {"max_steps": 2}},
        "tuner.environment",
    )
    assert isinstance(environment, TRL)
    assert environment.settings["buffer.total_steps"] == 2


def test_transformers_is_imported_by_one_thread_at_a_time(monkeypatch):
    """Of two that import it at once one may find half of it."""

    class Library:
        def __getattr__(self, name):
            assert trl_rewards._IMPORTING.locked()
            return types.SimpleNamespace

    monkeypatch.setitem(sys.modules, "transformers", Library())
    assert trl_rewards._state(1, 2).max_steps == 2
