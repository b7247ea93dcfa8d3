"""Loading a causal LM, its tokenizer or a stored adapter, with errors that say what to change."""

from __future__ import annotations

import copy
import json
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tuner.assembly.model_folders import described, loading, model_folder, quiet_transformers
from tuner.config.explorer import LoraSection
from tuner.config.model_paths import check_path
from tuner.errors import ConfigError, ModelLoadError
from tuner.run.directory import ADAPTER_CONFIG

if TYPE_CHECKING:
    from peft import LoraConfig


def load_model(
    path: str, *, device: torch.device, dtype: torch.dtype, setting: str = "model.model_path"
) -> PreTrainedModel:
    """A transformers causal LM on `device`, in eval mode.

    Args:
        path: As `model.model_path`: a folder, a GGUF file, `package:NAME` or a name on the Hub.
        dtype: Of its weights, whatever it was saved in.
        setting: Which setting named it, for the message.

    Raises:
        ModelLoadError: There is no such model, or it is not a causal LM, or it is an adapter.
        MissingDependencyError: What reads a GGUF file is not installed.
    """
    from transformers import AutoModelForCausalLM

    folder = model_folder(path, setting)
    if (Path(path).expanduser() / ADAPTER_CONFIG).exists():
        raise ModelLoadError(_not_an_adapter(path, setting))
    with loading(described(path, setting), "a causal language model"), quiet_transformers():
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    if hasattr(model, "peft_config"):  # on the Hub
        raise ModelLoadError(_not_an_adapter(path, setting))
    _train_every_row(model)
    model.to(device)  # type: ignore[arg-type]
    model.eval()
    return model


def _train_every_row(model: PreTrainedModel) -> None:
    """Let a token that begins or ends texts be trained where it is the padding as well (SmolLM2).

    PyTorch gives the row of `padding_idx` no gradient. Padding itself has no part in a loss that
    masks it, so without `padding_idx` the row's gradient is that of its real uses.
    """
    about = (model.config.get_text_config(), getattr(model, "generation_config", None))
    named = [getattr(one, f"{end}_token_id", None) for one in about for end in ("bos", "eos")]
    real = {id_ for ids in named for id_ in (ids if isinstance(ids, list) else [ids])} - {None}
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module.padding_idx in real:
            module.padding_idx = None


def load_tokenizer(path: str, *, setting: str = "model.model_path") -> Any:
    """The tokenizer beside a model.

    Raises:
        ModelLoadError: There is none, or it has no end-of-sequence token.
    """
    from transformers import AutoTokenizer

    folder = model_folder(path, setting)
    with loading(described(path, setting), "a tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(folder)
    if tokenizer.eos_token_id is None:
        raise ModelLoadError(
            f"{setting} = {path!r}: the tokenizer has no end-of-sequence token, so no completion "
            "would ever end; set eos_token in its tokenizer_config.json"
        )
    return tokenizer


def load_settings(path: str, *, setting: str = "model.model_path") -> Any:
    """The `config.json` of a model.

    Raises:
        ModelLoadError: There is none.
    """
    from transformers import AutoConfig

    folder = model_folder(path, setting)
    with loading(described(path, setting), "a language model"):
        return AutoConfig.from_pretrained(folder)


def check_same_vocabulary(tokenizer: Any, other: Any, *, what: str) -> None:
    """Refuse ids of another vocabulary: they would mean other tokens.

    Args:
        tokenizer: Of the model that is trained.
        other: Of the other model.
        what: The other model as the message names it.

    Raises:
        ConfigError: An id is another token in one of the two; names the first.
    """
    own, theirs = tokenizer.get_vocab(), other.get_vocab()
    if own == theirs:
        return
    by_id = {id_: token for token, id_ in own.items()}
    by_their_id = {id_: token for token, id_ in theirs.items()}
    ids = sorted(by_id.keys() | by_their_id.keys())
    first = next(id_ for id_ in ids if by_id.get(id_) != by_their_id.get(id_))
    raise ConfigError(
        f"{what} has another vocabulary than the model that is trained: token {first} is "
        f"{by_their_id.get(first)!r} there and {by_id.get(first)!r} here; choose a model of the "
        "same family"
    )


class ServedCopy:
    """A second copy of what is trained; what is frozen is shared.

    Args:
        model: The model that is trained. Of its parameters those that require a gradient are
            copied, with LoRA only the adapter's.

    Attributes:
        model: The copy. It changes in `update` only.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        frozen = {id(p): p for p in model.parameters() if not p.requires_grad}
        self.model: PreTrainedModel = copy.deepcopy(model, frozen)
        sources = {name: p for name, p in model.named_parameters() if p.requires_grad}
        targets = dict(self.model.named_parameters())
        self._pairs = [(targets[name], source) for name, source in sources.items()]
        for target, _ in self._pairs:
            target.requires_grad_(False)

    @torch.no_grad()
    def update(self) -> None:
        """Take over the weights as they are now. Nobody may compute with the copy meanwhile."""
        for target, source in self._pairs:
            target.copy_(source)


def save_model(model: PreTrainedModel, tokenizer: Any, folder: Path) -> None:
    """A Hugging Face folder that `load_model` and `load_tokenizer` read."""
    with quiet_transformers():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def checkpoint_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """What `save_model` would write, by the same names, as the tensors are: nothing is copied
    unless the checkpoint has another form than the model, as for mixtures of experts."""
    from transformers.core_model_loading import revert_weight_conversion

    parameters = {name: p.detach() for name, p in model.named_parameters()}
    stored = model.state_dict()
    buffers = {name: b for name, b in model.named_buffers() if name in stored}
    tensors: dict[str, Tensor] = revert_weight_conversion(model, parameters | buffers)
    return tensors


def choose_device(name: str) -> torch.device:
    """`auto` is the first CUDA GPU if there is one, else the CPU."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ModelLoadError("tuner.device = 'cuda', but PyTorch finds no CUDA GPU; use 'cpu'")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 on a GPU that computes with it, else float32."""
    if name == "auto":
        computes = device.type == "cuda" and torch.cuda.is_bf16_supported(False)
        name = "bfloat16" if computes else "float32"
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _not_an_adapter(path: str, setting: str) -> str:
    folder = Path(path).expanduser()
    base = "the model it belongs to"
    if (folder / ADAPTER_CONFIG).exists():
        recorded = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        base = f"{recorded.get('base_model_name_or_path')!r}, {base}"
    return (
        f"{setting} = {path!r} is an adapter, not a model. To go on training it, set "
        f"model.model_path to {base}, and model.lora_configs to [{{path: {path}}}]; to use it as a "
        "model, merge it first (docs/training.md, LoRA)"
    )


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
        with loading(str(self), errors=(ValueError, OSError, TypeError, KeyError)):
            config = PeftConfig.from_pretrained(self.path)
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

        with loading(str(self)):  # errors are of safetensors or of the Hub
            weights: dict[str, Tensor] = load_peft_weights(self.path, device="cpu")
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


def _same_model(one: str, other: str) -> bool:
    if one == other:
        return True
    folders = Path(one).expanduser(), Path(other).expanduser()
    return all(folder.is_dir() for folder in folders) and folders[0].samefile(folders[1])
