"""LoRA: the adapter that is trained in place of the model's own weights, through peft.

A new adapter changes nothing: its second factor is zero. It is never merged into the weights, so
the engine samples from the very function that is trained, and without the adapter the model is the
reference.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tuner.assembly.model_folders import quiet_transformers
from tuner.assembly.models import SETTING, StoredAdapter, save_model
from tuner.config.explorer import DEFAULT_ALPHA, DEFAULT_RANK, DEFAULT_TARGETS, LoraSection
from tuner.data.order import derive_seed
from tuner.errors import ConfigError, MissingDependencyError, ModelLoadError, pip_install
from tuner.training.references import AdapterReference

if TYPE_CHECKING:
    from peft import PeftModel


@dataclass(frozen=True)
class Adapter:
    """The adapter of a policy.

    Attributes:
        model: peft's wrapper; the transformers model inside it has the adapter's layers.
        start: The adapter that training began with, None where it was new.
    """

    model: PeftModel
    start: StoredAdapter | None = None

    @property
    def trained_parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)

    def __str__(self) -> str:
        """What is trained and what is not, for people."""
        frozen = sum(p.numel() for p in self.model.parameters() if not p.requires_grad)
        base: Any = self.model.base_model
        layers = len(base.targeted_module_names)
        return (
            f"training a LoRA adapter: {self.trained_parameters:,} parameters in {layers} layers, "
            f"beside {frozen:,} that stay as they are"
        )

    def reference(self) -> AdapterReference:
        """The policy's frozen start: the model without the adapter, or with what it started as."""
        if self.start is None:
            return AdapterReference(self.model)
        return AdapterReference.of_weights(self.model, self.start.weights())

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Take over the weights of an adapter of the same form.

        Args:
            weights: By peft's names.
        """
        from peft import set_peft_model_state_dict

        set_peft_model_state_dict(self.model, dict(weights))

    def save(self, folder: Path) -> None:
        """Write peft's `adapter_config.json` and `adapter_model.safetensors`."""
        with quiet_transformers():
            self.model.save_pretrained(
                str(folder), selected_adapters=["default"], save_embedding_layers=False
            )


def require_peft() -> None:
    """Raises MissingDependencyError where peft is not installed."""
    try:
        import peft  # noqa: F401  # whether it can be
    except ImportError as error:
        raise MissingDependencyError(
            f"model.lora_configs needs the library peft ({error}): {pip_install('lora')}"
        ) from error


def add_adapter(
    model: PreTrainedModel,
    settings: LoraSection,
    *,
    model_path: str,
    seed: int,
    checkpoint: Path | None = None,
) -> Adapter:
    """Put the adapter that is trained into `model`; its own weights are frozen.

    Args:
        model: The model as it is without an adapter; gets the adapter's layers.
        settings: Which adapter.
        model_path: What the run calls the model.
        seed: Of a new adapter's random first factor.
        checkpoint: Folder of an adapter to go on with, in place of a new one or that at `path`.

    Raises:
        ConfigError: The settings name layers that the model does not have or that cannot have an
            adapter, or do not agree with the adapter at `path`.
        ModelLoadError: An adapter cannot be loaded, or was made for another model.
    """
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict

    base = settings.base_model_name or model_path
    start = StoredAdapter(settings.path, f"the adapter {SETTING}.path =") if settings.path else None
    source = StoredAdapter(str(checkpoint), "the checkpoint") if checkpoint else start
    if source:
        config = source.config()
        if checkpoint is None:
            source.check_agrees(config, settings, base)
    else:
        config = LoraConfig(
            task_type="CAUSAL_LM",
            r=settings.lora_rank or DEFAULT_RANK,
            lora_alpha=settings.lora_alpha or DEFAULT_ALPHA,
            target_modules=_names(settings.target_modules) or DEFAULT_TARGETS,
            exclude_modules=_names(settings.exclude_modules),
        )
        _check_names(model, settings)
    recorded = config.base_model_name_or_path
    config.base_model_name_or_path = None  # peft would take the folder's name, and say so
    shared = _shared_layers(model)
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            # On deprecated names that peft uses, and on tied layers, which are refused below.
            warnings.simplefilter("ignore")
            torch.manual_seed(derive_seed(seed, "lora"))
            wrapped: Any = get_peft_model(model, config)
    except (ValueError, TypeError, NotImplementedError) as error:
        first = next(iter(str(error).strip().splitlines()), "no reason given")
        if source:
            raise ModelLoadError(f"{source} does not fit this model: {first}") from error
        raise ConfigError(
            f"{SETTING}.target_modules is {settings.target_modules or DEFAULT_TARGETS!r} and "
            f"exclude_modules {settings.exclude_modules!r}: {first} This model's linear layers "
            f"are {_linear_layers(model)}"
        ) from error
    targeted = wrapped.base_model.targeted_module_names
    if both := shared & set(targeted):
        raise ConfigError(
            f"{SETTING}.target_modules: an adapter on {' and '.join(sorted(both))} could not be "
            "merged, because this model's input embeddings and output layer are one matrix "
            "(tie_word_embeddings); leave them out"
        )
    config.base_model_name_or_path = base
    if isinstance(config.target_modules, set):
        config.target_modules = sorted(config.target_modules)  # files are equal where runs are
    if source:
        weights = source.weights()
        try:
            found: Any = set_peft_model_state_dict(wrapped, weights)
        except RuntimeError as error:  # the sizes differ
            raise _other_model(source, model_path, recorded, str(error)) from error
        if unmatched := [*found.unexpected_keys, *(k for k in found.missing_keys if "lora_" in k)]:
            raise _other_model(source, model_path, recorded, f"such as {unmatched[0]}")
    return Adapter(wrapped, start)


def _check_names(model: PreTrainedModel, settings: LoraSection) -> None:
    """Each name that was given must be one of the model's, not just one of them."""
    modules = [name for name, module in model.named_modules() if not any(module.children())]
    for key in ("target_modules", "exclude_modules"):
        given = getattr(settings, key)
        if given is None or given == DEFAULT_TARGETS:
            continue
        for name in (given,) if isinstance(given, str) else given:
            try:
                known = any(
                    re.fullmatch(name, module)
                    if isinstance(given, str)
                    else module == name or module.endswith(f".{name}")
                    for module in modules
                )
            except re.error as error:
                raise ConfigError(
                    f"{SETTING}.{key} is {name!r}: not a regular expression ({error})"
                ) from None
            if not known:
                hint = ""
                if isinstance(given, str) and re.fullmatch(r"\w+", given):
                    hint = f"; a text is an expression for a whole name, [{given}] is a list"
                raise ConfigError(
                    f"{SETTING}.{key}: no layer of this model is called {name!r}{hint}; its linear "
                    f"layers are {_linear_layers(model)}"
                )


def _linear_layers(model: PreTrainedModel) -> str:
    names = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    } - {"base_layer", "default"}
    return ", ".join(sorted(names))


def _shared_layers(model: PreTrainedModel) -> set[str]:
    """Names of the input embeddings and the output layer, where they are one matrix."""
    ends: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
    if any(end is None for end in ends) or ends[0].weight is not ends[1].weight:
        return set()
    return {name for name, module in model.named_modules() if module in ends}


def _other_model(
    source: StoredAdapter, model_path: str, recorded: str | None, reason: str
) -> ModelLoadError:
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    return ModelLoadError(
        f"{source} does not fit the model {model_path!r}: it was made for {recorded!r} or for "
        f"other layers ({lines[-1]}); set model.model_path to the model it was made for"
    )


def _names(given: str | tuple[str, ...] | None) -> str | list[str] | None:
    return list(given) if isinstance(given, tuple) else given


def save_policy(
    model: PreTrainedModel, adapter: Adapter | None, tokenizer: Any, folder: Path
) -> None:
    """Write what is trained, the adapter where there is one, and the tokenizer."""
    if adapter is None:
        return save_model(model, tokenizer, folder)
    adapter.save(folder)
    tokenizer.save_pretrained(folder)
