"""TRL: a GRPOTrainer's reward functions, prompts, tools and environments.

    from tuner.environments.trl import GRPOConfig, GRPOTrainer      # was: from trl import ...

Reward functions see the completions of one group at a time, those that were completed. A completion
that none of them scores has no reward, and neither teaches nor counts for the others.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.config import RunConfig
from tuner.data.dataset import DatasetConfig
from tuner.environments.seam import Environment
from tuner.environments.trl_config import (
    GRPOConfig,
    prompts_in_a_step,
    read_config,
    settings_of,
)
from tuner.environments.trl_rewards import RewardFunctions
from tuner.environments.trl_rollout import Completed, Instances, Prompted
from tuner.errors import ConfigError
from tuner.functions.loading import load_function
from tuner.functions.outputs import JudgeOutput, WorkflowOutput

if TYPE_CHECKING:
    from tuner.result import TuneResult

__all__ = ["TRL", "GRPOConfig", "GRPOTrainer", "from_trl"]


class TRL(Environment):
    """What a `GRPOTrainer` is made of, as an environment.

    Args:
        reward_funcs: One or several, sync or async, or objects with `__call__`; called with
            `prompts`, `completions`, `completion_ids`, the columns of the row, `trainer_state`,
            `log_extra`, `log_metric` and, where there are some, `environments`.
            A text refers to one, as in the file: `path/file.py:name`, `package.module:name`.
        train_dataset, eval_dataset: Rows with a `prompt`, a text or messages.
        args: A GRPOConfig, ours or TRL's, or a mapping: settings, where the file and the caller of
            `tune()` have none. None: none.
        tools: Functions that the model may call, with types and a docstring in Google's style.
        environment_factory: Makes environments, or does so by the row's field `environment`. Their
            methods are tools; `reset(**row)` may say something, `get_reward()` is one more reward.

    Raises:
        ConfigError: There is nothing that rewards, or something that cannot be had here.
    """

    def __init__(
        self,
        reward_funcs: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        *,
        args: Any = None,
        tools: Sequence[Callable[..., Any]] | None = None,
        environment_factory: Callable[[], Any] | Mapping[str, Callable[[], Any]] | None = None,
    ) -> None:
        config = GRPOConfig(max_completion_length=None) if args is None else read_config(args)
        self._instances = Instances(
            _loaded(environment_factory, "environment_factory"),
            [_loaded(one, "tools") for one in tools or ()],
        )
        given = reward_funcs if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
        functions = [_loaded(one, "reward_funcs") for one in given if one is not None]
        self._rewards = RewardFunctions(
            functions, config.reward_weights, self._instances.rewarding_classes
        )
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        if train_dataset is None and environment_factory is not None:
            # An environment that says what is asked: as many rows as a step has.
            count = prompts_in_a_step(config)
            self.train_dataset = [{"prompt": [{"role": "user", "content": ""}]}] * count
        if args is not None:
            self.settings = settings_of(config, _rows_in(self.train_dataset))
        self._config, self._steps = config, int(self.settings.get("buffer.total_steps", 0))

    def check_settings(self, config: RunConfig) -> None:
        """Take note of how long the run is; the file and overrides win over `args`."""
        self._steps = config.buffer.total_steps or self._steps

    async def workflow(self, task: dict[str, Any], model: Any) -> WorkflowOutput:
        """The completion of a prompt, with the calls of tools that it makes.

        Raises:
            DatasetError: The row has no prompt, or images.
        """
        name, instance = await self._instances.take(task)
        prompted = await Prompted.of(task, name, instance, self._instances, self._config)
        completed = await prompted.completed(model)
        return WorkflowOutput(response=completed, metrics=completed.metrics)

    async def _judge(self, task: dict[str, Any], responses: list[Completed]) -> list[JudgeOutput]:
        """The rewards of a group, weighted and added."""
        outputs = await self._rewards.of(task, responses, max_steps=self._steps)
        for one in responses:
            self._instances.give_back(one.environment_name, one.environment)
        return outputs

    @property
    def judge(self) -> Callable[..., Any]:  # type: ignore[override]  # nobody sets it
        return self._judge

    async def close(self) -> None:
        """Forget the environments that are idle."""
        self._instances.clear()


class GRPOTrainer:
    """A GRPOTrainer whose `train()` is `tune()`; what it cannot take is refused by name.

    Args: As TRL's.

    Attributes:
        environment: What `tune()` gets.

    Raises:
        ConfigError: An argument has no equal here.
    """

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: Any = None,
        optimizers: Any = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: Sequence[Callable[..., Any]] | None = None,
        rollout_func: Any = None,
        environment_factory: Any = None,
    ) -> None:
        refused = {
            "processing_class": (processing_class, "the tokenizer of the model's folder is used"),
            "reward_processing_classes": (reward_processing_classes, "there are no reward models"),
            "callbacks": (callbacks, "metrics are in metrics.jsonl, and where report_to says"),
            "optimizers": (tuple(optimizers) != (None, None), "set them in args"),
            "quantization_config": (quantization_config, "weights are trained as they are"),
            "rollout_func": (rollout_func, "a workflow is that: tune(workflow, ...)"),
        }
        for name, (value, instead) in refused.items():
            if value:
                raise ConfigError(f"GRPOTrainer's {name} is no argument here: {instead}")
        if not isinstance(model, (str, Path)):
            raise ConfigError(
                f"GRPOTrainer's model is a {type(model).__name__}: pass the name or folder that it "
                "was loaded from"
            )
        self.environment = TRL(
            reward_funcs,
            train_dataset,
            eval_dataset,
            args=args or GRPOConfig(),
            tools=tools,
            environment_factory=environment_factory,
        )
        own: dict[str, Any] = {"model.model_path": str(model)}
        if peft_config is not None:
            own |= _adapter(peft_config)
        self.environment.settings = {**self.environment.settings, **own}
        self.result: TuneResult | None = None

    def train(self, **given: Any) -> TuneResult:
        """Run it.

        Args:
            given: What else `tune()` takes, as `overrides` and `config_path`, which win over args.
        """
        from tuner.tune import tune

        self.result = tune(environment=self.environment, **given)
        return self.result

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Copy the trained model to a folder; None: `args.output_dir`.

        Raises:
            ConfigError: Nothing has been trained.
        """
        if self.result is None or self.result.checkpoint is None:
            raise ConfigError("there is no trained model yet: call train() first")
        target = output_dir or self.environment.settings["checkpoint_root_dir"]
        shutil.copytree(self.result.checkpoint, target, dirs_exist_ok=True)


def from_trl(model: Any, reward_funcs: Any = None, args: Any = None, **given: Any) -> TRL:
    """A GRPOTrainer's arguments as an environment: `tune(environment=from_trl(...))`.

    Args: As TRL's `GRPOTrainer`.

    Raises:
        ConfigError: An argument has no equal here.
    """
    return GRPOTrainer(model, reward_funcs, args, **given).environment


def _adapter(config: Any) -> dict[str, Any]:
    """peft's `LoraConfig` as keys of the file.

    Raises:
        ConfigError: It is another adapter, or has something that ours does not.
    """
    if type(config).__name__ != "LoraConfig":
        raise ConfigError(f"peft_config is a {type(config).__name__}: LoraConfig is what works")
    if config.target_modules is None:
        raise ConfigError(
            "peft_config.target_modules is not set, and peft would choose by the model: name the "
            "layers, or 'all-linear'"
        )
    for name in (
        "lora_dropout",
        "use_rslora",
        "use_dora",
        "modules_to_save",
        "layers_to_transform",
    ):
        if value := getattr(config, name, None):
            raise ConfigError(f"peft_config.{name} is {value!r}, which is no setting here")
    targets = config.target_modules
    one = {
        "lora_rank": config.r,
        "lora_alpha": config.lora_alpha,
        "target_modules": targets if isinstance(targets, str) else sorted(targets),
    }
    return {"model.lora_configs": [one]}


def _loaded(given: Any, argument: str) -> Any:
    """The function that a text refers to; a text that refers to none is a model's name."""
    refers = isinstance(given, str) and ":" in given
    return load_function(given, setting=argument) if refers else given


def _rows_in(dataset: Any) -> int | None:
    if dataset is None or isinstance(dataset, (str, Path, DatasetConfig)):
        return None
    try:
        return len(dataset)
    except TypeError:
        return None
