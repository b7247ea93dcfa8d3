"""An adapter on disk or on the Hub: whether it can be trained exactly, and its weights."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from tuner.backends.models import check_path
from tuner.config.lora import LoraSection
from tuner.errors import ConfigError, ModelLoadError

if TYPE_CHECKING:
    from peft import LoraConfig

SETTING = "model.lora_configs.0"
# What an adapter that somebody else made may say: sizes and places, and what has no effect on an
# adapter that is loaded. Everything else of peft's LoRA (dropout, trained biases or whole modules,
# DoRA, activation by tokens, ...) must be at its default.
_SUPPORTED = {
    "alpha_pattern",
    "auto_mapping",
    "base_model_name_or_path",
    "exclude_modules",
    "fan_in_fan_out",
    "inference_mode",
    "init_lora_weights",
    "layers_pattern",
    "layers_to_transform",
    "lora_alpha",
    "megatron_core",
    "peft_type",
    "peft_version",
    "r",
    "rank_pattern",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
    "use_rslora",
}


_ADVICE = {
    "lora_dropout": "what is sampled and what is trained must be one function: set it to 0 there"
}


@dataclass(frozen=True)
class StoredAdapter:
    """A stored adapter: its folder or Hub name, and how messages call it."""

    path: str
    called: str

    def __str__(self) -> str:
        return f"{self.called} {self.path!r}"

    def config(self) -> LoraConfig:
        """Its configuration.

        Raises:
            ModelLoadError: There is none, or it is not one of plain LoRA: what is sampled would
                not be what is trained, or what is saved not what was trained.
        """
        from peft import LoraConfig, PeftConfig

        check_path(self.path, f"{SETTING}.path", what="adapter")
        try:
            config = PeftConfig.from_pretrained(self.path)
        except (ValueError, OSError, TypeError, KeyError) as error:
            raise self._cannot_be_loaded(error) from error
        if not isinstance(config, LoraConfig):
            kind = getattr(config.peft_type, "value", config.peft_type)
            raise ModelLoadError(f"{self} is of peft's type {kind}; only LORA can be trained")
        for field in fields(config):
            value = getattr(config, field.name)
            default = field.default if field.default_factory is MISSING else field.default_factory()
            if field.name not in _SUPPORTED and value != default and (value or default):
                raise ModelLoadError(
                    f"{self} has {field.name} = {value!r} in adapter_config.json, which is not "
                    f"supported; {_ADVICE.get(field.name, 'train an adapter without it')}"
                )
        if config.init_lora_weights not in (True, False, "gaussian"):
            raise ModelLoadError(
                f"{self} has init_lora_weights = {config.init_lora_weights!r} in "
                "adapter_config.json, which changes the weights of the model as well; convert it "
                "to a plain LoRA adapter (peft: path_initial_model_for_weight_conversion)"
            )
        if config.task_type not in (None, "CAUSAL_LM"):
            raise ModelLoadError(f"{self} is for {config.task_type}, not for CAUSAL_LM")
        config.task_type = "CAUSAL_LM"
        config.inference_mode = False
        return config

    def weights(self) -> dict[str, Tensor]:
        """Its weights by peft's names, on the CPU.

        Raises:
            ModelLoadError: They cannot be read.
        """
        from peft import load_peft_weights

        try:
            weights: dict[str, Tensor] = load_peft_weights(self.path, device="cpu")
        except Exception as error:  # of safetensors or of the Hub
            raise self._cannot_be_loaded(error) from error
        return weights

    def check_agrees(self, config: LoraConfig, settings: LoraSection, base: str) -> None:
        """Compare with what a run asks for.

        Args:
            base: What the run calls the model.

        Raises:
            ConfigError: The settings give it another rank or alpha.
            ModelLoadError: It was made for another model.
        """
        for key, mine, theirs in (
            ("lora_rank", settings.lora_rank, config.r),
            ("lora_alpha", settings.lora_alpha, config.lora_alpha),
        ):
            if mine is not None and mine != theirs:
                raise ConfigError(f"{SETTING}.{key} is {mine}, but {self} has {theirs}; remove it")
        recorded = config.base_model_name_or_path
        if recorded and not _same_model(recorded, base):
            raise ModelLoadError(
                f"{self} was made for the model {recorded!r}, not for {base!r}; set "
                f"model.model_path to that model or, if they are the same, "
                f"{SETTING}.base_model_name to {recorded!r}"
            )

    def _cannot_be_loaded(self, error: Exception) -> ModelLoadError:
        first = str(error).strip().splitlines()[0] if str(error).strip() else ""
        return ModelLoadError(f"{self} cannot be loaded: {type(error).__name__}: {first}")


def _same_model(one: str, other: str) -> bool:
    if one == other:
        return True
    folders = Path(one).expanduser(), Path(other).expanduser()
    return all(folder.is_dir() for folder in folders) and folders[0].samefile(folders[1])
