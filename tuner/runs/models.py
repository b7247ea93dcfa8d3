"""Load a causal LM, its tokenizer or a stored adapter, with errors that say what to change."""

from __future__ import annotations

import copy
import hashlib
import logging
import os
import re
import shutil
import threading
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from filelock import FileLock
from torch import Tensor, nn
from transformers import PreTrainedModel

from tuner.config.keys import check_path, hub_or_cache, located, require_gguf
from tuner.config.schema import DEFAULT_ALPHA, DEFAULT_RANK, DEFAULT_TARGETS, LoraSection
from tuner.engines.request import end_ids_of
from tuner.engines.transformers.vision import (
    decoder_name,
    give_vision,
    load_processor,
    vision_of,
)
from tuner.errors import (
    ConfigError,
    MissingDependencyError,
    ModelLoadError,
    pip_install,
    quiet_library,
)
from tuner.runs.directory import ADAPTER_CONFIG, OBJECTS
from tuner.runs.record import fingerprint_of_weights
from tuner.tasks.selection import derive_seed
from tuner.training.references import AdapterReference

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel


# The Hugging Face folder of a model path. A GGUF file is converted to one, once.
#
# A GGUF's weights are dequantised to float32 and saved with its tokenizer in the user's cache:
#
#     ~/.cache/tuner/models/SmolLM2-135M-Instruct.Q4_1-<key>/
#
# The key changes with the file, with transformers and with `_FORM`. A folder gets its name when it
# is complete. Rejected: files in several parts, and scaled rotary positions, which transformers
# does not read from a GGUF.


_log = logging.getLogger(__name__)
# While transformers loads a model, it replaces some functions of torch and of transformers. If a
# second thread loads at the same time, its weights have no data, and torch stays changed.
_LOADING = threading.RLock()
_FORM = 1  # version of the saved form; change it if a change here changes what is saved
# Vocabularies that split every digit, by llama.cpp's names of pre-tokenizers.
_SINGLE_DIGITS = ("codeshell", "command-r", "exaone", "minerva-7b", "refact", "smollm", "starcoder")


def model_folder(path: str, setting: str = "model.model_path") -> str:
    """The model folder that transformers and vLLM load, or the model's name on the Hub.

    Args:
        path: A path as users write it (`tuner.config.keys`).
        setting: The setting it comes from, for the message.
    """
    place = located(path, setting)
    if place is None or (place.is_dir() and place == Path(path).expanduser()):
        check_path(path, setting)
        return path
    return str(place if place.is_dir() else _converted(place, path, setting))


@contextmanager
def loading(
    what: str,
    kind: str = "",
    *,
    advice: str = "",
    errors: type[Exception] | tuple[type[Exception], ...] = Exception,
) -> Iterator[None]:
    """Turn errors about `what`, which should be of some `kind`, into a ModelLoadError. Other
    threads wait before they load something."""
    try:
        with _LOADING:
            yield
    except errors as error:
        first_line = next(iter(str(error).strip().splitlines()), "")
        wanted = f" as {kind}" if kind else ""
        raise ModelLoadError(
            f"{what} cannot be loaded{wanted}: {type(error).__name__}: {first_line}{advice}"
        ) from error


def described(path: str, setting: str) -> str:
    """Description of a model for messages; a name on the Hub may have been meant as a folder."""
    place = located(path, setting)
    if place is not None:
        here = place == Path(path).expanduser()
        return f"{setting} = {path!r}" if here else f"{setting} = {path!r} ({place})"
    return (
        f"{setting} = {path!r} (used as a name on the Hub: there is no such folder next to the "
        f"file that sets it, or in {Path.cwd()})"
    )


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hide transformers' progress bars."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


# A user cannot act on names that these libraries will change or remove; Python itself hides
# DeprecationWarnings. Appended, so that `python -W` and the user's filters come first.
_LIBRARIES = r"(torch|transformers|peft|accelerate|bitsandbytes|datasets|huggingface_hub|tuner)\b"
warnings.filterwarnings("ignore", category=FutureWarning, module=_LIBRARIES, append=True)


@contextmanager
def from_hub(path: str, setting: str) -> Iterator[None]:
    """While the block runs, transformers shows no progress bars, and loads a name on the Hub from
    the cache if the Hub cannot be reached."""
    named = located(path, setting) is None
    with quiet_transformers(), hub_or_cache() if named else nullcontext():
        yield


def _converted(file: Path, path: str, setting: str) -> Path:
    """The Hugging Face folder of a GGUF file, converted if it is missing."""
    import transformers

    content = f"{fingerprint_of_weights(file)} {transformers.__version__} {_FORM}"
    key = hashlib.blake2b(content.encode(), digest_size=8).hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "tuner" / "models"
    folder = cache / f"{file.stem}-{key}"
    if folder.is_dir():
        return folder
    require_gguf(path, setting)
    part = cache / f".{folder.name}.part"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / f".{folder.name}.lock"):  # another process may be converting it
            if folder.is_dir():
                return folder
            named = described(path, setting)
            _log.warning("%s is dequantised to float32 into %s, once", named, folder)
            model, tokenizer = _read(file, named)
            shutil.rmtree(part, ignore_errors=True)  # left by a killed process
            part.mkdir()
            with quiet_transformers():
                model.save_pretrained(part)
                tokenizer.save_pretrained(part)
            part.replace(folder)
    except ModelLoadError:
        raise
    except Exception as error:  # errors of the system or of safetensors
        shutil.rmtree(part, ignore_errors=True)
        raise ModelLoadError(
            f"{setting} = {path!r} cannot be converted into {folder}: {type(error).__name__}: "
            f"{error}; free space there, or set XDG_CACHE_HOME to a writable folder"
        ) from error
    return folder


def _read(file: Path, named: str) -> tuple[Any, Any]:
    """A model of float32 weights and a tokenizer, from a GGUF file; raises ModelLoadError if
    transformers would read a different model from it."""
    import transformers
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, AutoTokenizer

    given: dict[str, Any] = {"gguf_file": file.name}
    # Otherwise transformers may keep the blocks, if a kernel for them is installed.
    kept = getattr(transformers, "GgufConfig", None)
    quantization = {} if kept is None else {"quantization_config": kept(dequantize=True)}
    advice = (
        "; download the file again if it may be damaged, or, if transformers "
        f"{transformers.__version__} does not support its architecture, use the model's Hugging "
        "Face folder (config.json and *.safetensors)"
    )
    with loading(named, "a GGUF model", advice=advice), quiet_transformers():
        reader = GGUFReader(file)
        load: Any = AutoModelForCausalLM.from_pretrained  # its type omits what it found
        model, found = load(
            file.parent, **given, **quantization, dtype=torch.float32, output_loading_info=True
        )
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **given)
    weights = model.state_dict()
    _check_weights(weights, found["missing_keys"], named)
    _check_rotary(reader, model.config, named)
    _split_digits(reader, tokenizer)
    with loading(named, "a GGUF model", advice=advice):
        return _unquantized(model, weights), tokenizer


def _unquantized(model: Any, weights: Mapping[str, Tensor]) -> Any:
    """The same model in a form that transformers saves: it rejects one loaded from a GGUF file."""
    from transformers import AutoModelForCausalLM

    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(weights, assign=True)  # nothing is copied
    plain.tie_weights()
    plain.generation_config = model.generation_config
    return plain


def _check_weights(weights: Mapping[str, Tensor], missing: Any, named: str) -> None:
    again = "the file is damaged or incomplete: download it again"
    if missing:
        few = ", ".join(sorted(missing)[:3])
        raise ModelLoadError(
            f"{named} lacks {len(missing)} of the model's weights ({few}), which would be random "
            f"numbers; {again}"
        )
    for name, tensor in weights.items():
        if not torch.isfinite(tensor).all():
            raise ModelLoadError(f"{named} has weights in {name} that are not finite; {again}")


def _check_rotary(reader: Any, config: Any, named: str) -> None:
    """Reject rotary positions that are scaled in the file but would not be in the model."""
    kind = reader.get_field(f"{_text(reader, 'general.architecture')}.rope.scaling.type")
    scaled = kind is not None and kind.contents() != "none"
    scaled = scaled or any(tensor.name.startswith("rope_f") for tensor in reader.tensors)
    read = getattr(config, "rope_parameters", None) or {}
    if scaled and read.get("rope_type", "default") == "default":
        raise ModelLoadError(
            f"{named} scales its rotary positions, which transformers does not read from a GGUF "
            "file, so the result would be a different model; use the model's Hugging Face folder "
            "(config.json and *.safetensors)"
        )


def _split_digits(reader: Any, tokenizer: Any) -> None:
    """Make each digit its own token if the model was trained that way: transformers 5.23 splits
    such texts like GPT-2's, which differs if several spaces or newlines come before a digit."""
    from tokenizers import pre_tokenizers

    backend = tokenizer.backend_tokenizer
    plain = isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel)
    if plain and _text(reader, "tokenizer.ggml.pre") in _SINGLE_DIGITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])


def _text(reader: Any, key: str) -> str:
    field = reader.get_field(key)
    return "" if field is None else str(field.contents())


def load_model(
    path: str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    setting: str = "model.model_path",
    load_vision: bool = False,
) -> PreTrainedModel:
    """A transformers causal LM on `device`, in eval mode; raises ModelLoadError if there is none.

    Args:
        path: Like `model.model_path`: a folder, a GGUF file, `package:NAME` or a name on the Hub.
        dtype: The dtype of its weights, whatever they were saved in.
        setting: The setting that named it, for the message.
        load_vision: `tuner.images.load_vision`.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    folder = model_folder(path, setting)
    images = reads_images(path, setting=setting, load_vision=load_vision)
    loader: Any = AutoModelForImageTextToText if images else AutoModelForCausalLM
    if (Path(path).expanduser() / ADAPTER_CONFIG).exists():
        raise ModelLoadError(_not_an_adapter(path, setting))
    with loading(described(path, setting), "a causal language model"), from_hub(path, setting):
        model: PreTrainedModel = loader.from_pretrained(folder, dtype=dtype)
    if hasattr(model, "peft_config"):  # on the Hub
        raise ModelLoadError(_not_an_adapter(path, setting))
    _train_every_row(model)
    model.to(device)  # type: ignore[arg-type]
    model.eval()
    if images:
        if load_vision:
            setattr(model.config, _READS_IMAGES, True)  # for checkpoints
        tokenizer = load_tokenizer(path, setting=setting)
        give_vision(model, load_processor(folder, model.config, tokenizer))
    return model


_READS_IMAGES = "reads_images"
"""Name in the configuration of a model that was loaded with its vision tower."""


def reads_images(
    path: str, *, setting: str = "model.model_path", load_vision: bool = False
) -> bool:
    """Whether a model is loaded as one of images and text.

    Models that transformers also has as language models read text only, unless `load_vision` is set
    or the model is a checkpoint of one that was loaded so.

    Raises:
        ConfigError: `load_vision` is set and transformers has the model for text only.
    """
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    if (Path(path).expanduser() / ADAPTER_CONFIG).exists():
        return False
    settings = load_settings(path, setting=setting)
    kind = settings.model_type
    if kind not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        if load_vision:
            raise ConfigError(
                f"tuner.images.load_vision is true, but models of type {kind!r} read text only: "
                "set it to false"
            )
        return False
    text = kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return load_vision or not text or getattr(settings, _READS_IMAGES, False)


def _train_every_row(model: PreTrainedModel) -> None:
    """Train a token that begins or ends texts even if it is also the padding (SmolLM2).

    PyTorch gives the row of `padding_idx` no gradient. The loss masks padding, so without
    `padding_idx` the row's gradient is that of its real uses.
    """
    about = (model.config.get_text_config(), getattr(model, "generation_config", None))
    named = [getattr(one, f"{end}_token_id", None) for one in about for end in ("bos", "eos")]
    real = {id_ for ids in named for id_ in (ids if isinstance(ids, list) else [ids])} - {None}
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module.padding_idx in real:
            module.padding_idx = None


def stop_at_turns(model: PreTrainedModel, tokenizer: Any, ends: Collection[int]) -> str | None:
    """Name in the model's generation settings every token that ends a completion, so that what is
    saved of it stops where its rollouts do.

    Args:
        ends: Tokens with which the chat template ends a turn.

    Returns:
        A sentence about those that the settings did not name, or None.
    """
    named = end_ids_of(model.generation_config, None)
    if new := stopping(model.generation_config, tokenizer, ends):
        model.generation_config = new
        _train_every_row(model)
    if not (missing := sorted(frozenset(ends) - named)):
        return None
    theirs, others = (
        ", ".join(f"{tokenizer.decode([id_])!r} ({id_})" for id_ in sorted(ids)) or "none"
        for ids in (missing, named)
    )
    return (
        f"the chat template ends a turn with {theirs}, and the model's generation_config names "
        f"{others} as the end: rollouts stop at each of them, and checkpoints and exports name all"
    )


def stopping(settings: Any, tokenizer: Any, ends: Collection[int]) -> Any:
    """Generation settings that name every token that ends a completion; None if these do.

    Args:
        settings: A model's `GenerationConfig`.
        ends: Tokens with which the chat template ends a turn.
    """
    named = end_ids_of(settings, None)
    missing = sorted(end_ids_of(settings, tokenizer).union(ends) - named)
    if not missing:
        return None
    changed = copy.deepcopy(settings)
    every = [*sorted(named), *missing]
    changed.eos_token_id = every if len(every) > 1 else every[0]
    return changed


def load_tokenizer(path: str, *, setting: str = "model.model_path") -> Any:
    """The tokenizer of a model; raises ModelLoadError if it is missing or has no end-of-sequence
    token."""
    from transformers import AutoTokenizer

    folder = model_folder(path, setting)
    with loading(described(path, setting), "a tokenizer"), from_hub(path, setting):
        tokenizer = AutoTokenizer.from_pretrained(folder)
    if tokenizer.eos_token_id is None:
        raise ModelLoadError(
            f"{setting} = {path!r}: the tokenizer has no end-of-sequence token, so no completion "
            "would ever end; set eos_token in its tokenizer_config.json"
        )
    return tokenizer


def load_settings(path: str, *, setting: str = "model.model_path") -> Any:
    """The `config.json` of a model; raises ModelLoadError if there is none."""
    from transformers import AutoConfig

    folder = model_folder(path, setting)
    with loading(described(path, setting), "a language model"), from_hub(path, setting):
        return AutoConfig.from_pretrained(folder)


def check_same_vocabulary(tokenizer: Any, other: Any, *, what: str) -> None:
    """Reject a model with a different vocabulary: its ids would mean other tokens.

    Args:
        tokenizer: That of the trained model.
        other: That of the other model.
        what: The other model's name in the message.
    """
    own, theirs = tokenizer.get_vocab(), other.get_vocab()
    if own == theirs:
        return
    by_id = {id_: token for token, id_ in own.items()}
    by_their_id = {id_: token for token, id_ in theirs.items()}
    ids = sorted(by_id.keys() | by_their_id.keys())
    first = next(id_ for id_ in ids if by_id.get(id_) != by_their_id.get(id_))
    raise ConfigError(
        f"{what} has a different vocabulary than the trained model: token {first} is "
        f"{by_their_id.get(first)!r} there and {by_id.get(first)!r} here; choose a model of the "
        "same family"
    )


class ServedCopy:
    """A second copy of the trained parameters; frozen ones are shared.

    Args:
        model: The trained model. Parameters that require a gradient are copied; with LoRA only the
            adapter's.

    Attributes:
        model: The copy. Only `update` changes it.
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
        """Copy the current weights. The copy must not be in use."""
        for target, source in self._pairs:
            target.copy_(source)


def save_model(model: PreTrainedModel, tokenizer: Any, folder: Path) -> None:
    """Save a Hugging Face folder that `load_model` and `load_tokenizer` read."""
    with quiet_transformers():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    save_processor(model, folder)


def save_processor(model: PreTrainedModel, folder: Path) -> None:
    """Write the files of the processor of a vision model, as they were loaded."""
    vision = vision_of(model)
    for name, content in () if vision is None else vision.files.items():
        (folder / name).write_bytes(content)


def checkpoint_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Tensors that `save_model` would write, under the same names. Nothing is copied unless the
    checkpoint has a different form than the model, as for mixtures of experts."""
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
    base = "its base model"
    if (folder / ADAPTER_CONFIG).exists():
        recorded = OBJECTS.document(folder / ADAPTER_CONFIG, "download the adapter again")
        base = f"{recorded.get('base_model_name_or_path')!r}, {base}"
    return (
        f"{setting} = {path!r} is an adapter, not a model. To continue its training, set "
        f"model.model_path to {base}, and model.lora_configs to [{{path: {path}}}]; to use it as a "
        "model, merge it first (docs/training.md, LoRA)"
    )


_SETTING = "model.lora_configs.0"
# Fields that an adapter from elsewhere may set: sizes and places, and what has no effect on a
# loaded adapter. Everything else of peft's LoRA (dropout, trained biases or whole modules, DoRA,
# activation by tokens, ...) must be at its default.
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


_ADVICE = {"lora_dropout": "sampling and training must use the same function: set it to 0 there"}


@dataclass(frozen=True)
class StoredAdapter:
    """A stored adapter: its folder or Hub name, its name in messages, and the key of its
    settings."""

    path: str
    called: str
    setting: str = _SETTING

    def __str__(self) -> str:
        return f"{self.called} {self.path!r}"

    def config(self) -> LoraConfig:
        """Its configuration; raises ModelLoadError if it is missing, or not plain LoRA: then the
        sampled function would differ from the trained one, or the saved one."""
        from peft import LoraConfig, PeftConfig

        check_path(self.path, f"{self.setting}.path", what="adapter")
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
                "adapter_config.json, which changes the model's weights, too; convert it "
                "to a plain LoRA adapter (peft: path_initial_model_for_weight_conversion)"
            )
        if config.task_type not in (None, "CAUSAL_LM"):
            raise ModelLoadError(f"{self} is for {config.task_type}, not for CAUSAL_LM")
        config.task_type = "CAUSAL_LM"
        config.inference_mode = False
        return config

    def weights(self) -> dict[str, Tensor]:
        """Its weights by peft's names, on the CPU; raises ModelLoadError if they cannot be read."""
        from peft import load_peft_weights

        with loading(str(self)):  # errors of safetensors or of the Hub
            weights: dict[str, Tensor] = load_peft_weights(self.path, device="cpu")
        return weights

    def check_agrees(self, config: LoraConfig, settings: LoraSection, base: str) -> None:
        """Compare with the settings of a run, in which the model is called `base`."""
        for key, mine, theirs in (
            ("lora_rank", settings.lora_rank, config.r),
            ("lora_alpha", settings.lora_alpha, config.lora_alpha),
        ):
            if mine is not None and mine != theirs:
                raise ConfigError(
                    f"{self.setting}.{key} is {mine}, but {self} has {theirs}; remove it"
                )
        recorded = config.base_model_name_or_path
        if recorded and not _same_model(recorded, base):
            raise ModelLoadError(
                f"{self} was made for the model {recorded!r}, not for {base!r}; set "
                f"model.model_path to that model or, if they are the same, "
                f"{self.setting}.base_model_name to {recorded!r}"
            )


def _same_model(one: str, other: str) -> bool:
    if one == other:
        return True
    folders = Path(one).expanduser(), Path(other).expanduser()
    return all(folder.is_dir() for folder in folders) and folders[0].samefile(folders[1])


# LoRA: an adapter, through peft, that is trained in place of the model's weights.
#
# A new adapter changes nothing: its second factor is zero. It is never merged into the weights, so
# the engine samples from exactly the function that is trained, and without the adapter the model is
# the reference.


@dataclass(frozen=True)
class Adapter:
    """An adapter of a policy.

    Attributes:
        model: peft's wrapper; the transformers model inside it has the adapter's layers.
        start: The adapter that training began with; None if it was new.
        name: Its name in peft.
    """

    model: PeftModel
    start: StoredAdapter | None = None
    name: str = "default"

    @property
    def trained_parameters(self) -> int:
        return sum(p.numel() for name, p in self.model.named_parameters() if self._has(name))

    def _has(self, parameter: str) -> bool:
        return f".{self.name}." in f"{parameter}."

    def __str__(self) -> str:
        """What is trained and what is frozen, for people."""
        parts = [name for name, _ in self.model.named_parameters() if self._has(name)]
        layers = len({name.partition(".lora_")[0] for name in parts})
        return (
            f"training a LoRA adapter: {self.trained_parameters:,} parameters in {layers} layers, "
            f"with {_frozen(self.model):,} frozen parameters"
        )

    def reference(self) -> AdapterReference:
        """The policy at the start, frozen: the model without the adapter, or with the initial
        adapter."""
        if self.start is None:
            return AdapterReference(self.model)
        return AdapterReference.of_weights(self.model, self.start.weights())

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Load the weights of an adapter of the same form, by peft's names."""
        from peft import set_peft_model_state_dict

        set_peft_model_state_dict(self.model, dict(weights), adapter_name=self.name)

    def save(self, folder: Path) -> None:
        """Write peft's `adapter_config.json` and `adapter_model.safetensors`."""
        with quiet_transformers():
            self.model.save_pretrained(
                str(folder), selected_adapters=[self.name], save_embedding_layers=False
            )


class RoleAdapters(dict[str, Adapter]):
    """The trained adapters of a policy, by role. While none is `alone`, all have gradients, and
    only an engine that is told the adapter of each request computes with the model."""

    @property
    def model(self) -> PeftModel:
        return next(iter(self.values())).model

    @property
    def trained_parameters(self) -> int:
        return sum(one.trained_parameters for one in self.values())

    def __str__(self) -> str:
        each = ", ".join(f"{role} {one.trained_parameters:,}" for role, one in self.items())
        return (
            f"training a LoRA adapter for each role: {each} parameters, with "
            f"{_frozen(self.model):,} frozen parameters"
        )

    @contextmanager
    def alone(self, role: str) -> Iterator[None]:
        """Let the model compute with a role's adapter, and train no other, while the block runs."""
        self.model.set_adapter(self[role].name)
        try:
            yield
        finally:
            self.rest()

    def rest(self) -> None:
        base: Any = self.model.base_model
        base.set_adapter([one.name for one in self.values()])

    def save(self, folder: Path) -> None:
        """Write a folder for each role, as `Adapter.save` does."""
        for role, adapter in self.items():
            adapter.save(folder)
            (folder / adapter.name).replace(folder / role)


def peft_name(role: str) -> str:
    """The name of a role's adapter in peft, which looks for names inside names."""
    return f"<{role}>"


def _frozen(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters() if not p.requires_grad)


def require_peft() -> None:
    """Raises MissingDependencyError if peft is not installed."""
    try:
        with quiet_library("bitsandbytes"):  # which peft imports where it is installed
            import peft  # noqa: F401  # only to see whether it is installed and works
    except ImportError as error:
        raise MissingDependencyError(
            f"LoRA (model.lora_configs, model.adapters) needs the library peft ({error}): "
            f"{pip_install('lora')}"
        ) from error


def add_adapter(
    model: PreTrainedModel,
    settings: LoraSection,
    *,
    model_path: str,
    seed: int,
    checkpoint: Path | None = None,
) -> Adapter:
    """Add the trained adapter to `model` and freeze the model's weights.

    Args:
        model: The model without an adapter; gets the adapter's layers.
        settings: Which adapter.
        model_path: The run's name of the model.
        seed: For a new adapter's random first factor.
        checkpoint: Folder of an adapter to resume from, in place of a new one or that at `path`.
    """
    new = _NewAdapter.of(model, settings, _SETTING, model_path, checkpoint)
    return new.added(model, "default", seed=derive_seed(seed, "lora"))


def add_adapters(
    model: PreTrainedModel,
    settings: Mapping[str, LoraSection],
    *,
    model_path: str,
    seed: int,
    checkpoint: Path | None = None,
) -> RoleAdapters:
    """Add an adapter for each role to `model`, and freeze the model's weights; see `add_adapter`.

    Args:
        settings: By role. An adapter does not depend on those of other roles.
        checkpoint: Folder with a folder for each role.
    """
    new = {
        role: _NewAdapter.of(
            model, one, f"model.adapters.{role}", model_path, checkpoint and checkpoint / role
        )
        for role, one in settings.items()
    }
    found = RoleAdapters()
    for role, one in new.items():
        wrapped = found.model if found else None
        seed_of_role = derive_seed(seed, "lora", role)
        found[role] = one.added(model, peft_name(role), seed=seed_of_role, wrapped=wrapped)
    found.rest()
    return found


@dataclass(frozen=True)
class _NewAdapter:
    """An adapter that is being added to a model.

    Attributes:
        key: The key of its settings.
        start: The adapter that training begins with; `source` is that of a checkpoint, or the same.
        shared: Layers of the model that cannot have an adapter, as `_shared_layers` names them.
        linear: The model's linear layers, for messages.
    """

    config: LoraConfig
    settings: LoraSection
    key: str
    model_path: str
    start: StoredAdapter | None
    source: StoredAdapter | None
    shared: set[str]
    linear: str

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        settings: LoraSection,
        key: str,
        model_path: str,
        checkpoint: Path | None,
    ) -> _NewAdapter:
        """Check the settings with a model that has no adapter yet."""
        from peft import LoraConfig

        start = None
        if settings.path:
            start = StoredAdapter(settings.path, f"the adapter {key}.path =", key)
        source = StoredAdapter(str(checkpoint), "the checkpoint", key) if checkpoint else start
        if source:
            config = source.config()
            if checkpoint is None:
                source.check_agrees(config, settings, settings.base_model_name or model_path)
        else:
            config = LoraConfig(
                task_type="CAUSAL_LM",
                r=settings.lora_rank or DEFAULT_RANK,
                lora_alpha=settings.lora_alpha or DEFAULT_ALPHA,
                target_modules=_names(settings.target_modules) or DEFAULT_TARGETS,
                exclude_modules=_names(settings.exclude_modules),
            )
            _check_names(model, settings, key)
        vision = vision_of(model)
        if vision is not None and not vision.trained and config.exclude_modules is None:
            config.exclude_modules = rf"(?!{re.escape(decoder_name(model))}\.).*"
        shared, linear = _shared_layers(model), _linear_layers(model)
        return cls(config, settings, key, model_path, start, source, shared, linear)

    def added(
        self, model: PreTrainedModel, name: str, *, seed: int, wrapped: Any = None
    ) -> Adapter:
        """Add it to the model, or to peft's wrapper of it, under a name."""
        from peft import get_peft_model, set_peft_model_state_dict

        config, settings, source = self.config, self.settings, self.source
        recorded = config.base_model_name_or_path
        config.base_model_name_or_path = None  # peft would use the folder's name, and print it
        try:
            # peft warns of deprecated names that it uses, and of tied layers, which are rejected
            # below.
            with torch.random.fork_rng(devices=[]), quiet_library("peft"):
                torch.manual_seed(seed)
                if wrapped is None:
                    wrapped = get_peft_model(model, config, adapter_name=name)
                else:
                    wrapped.add_adapter(name, config)
        except (ValueError, TypeError, NotImplementedError) as error:
            first = next(iter(str(error).strip().splitlines()), "no reason given")
            if source:
                raise ModelLoadError(f"{source} does not fit this model: {first}") from error
            raise ConfigError(
                f"{self.key}.target_modules is {settings.target_modules or DEFAULT_TARGETS!r} and "
                f"exclude_modules {settings.exclude_modules!r}: {first} This model's linear layers "
                f"are {self.linear}"
            ) from error
        targeted = wrapped.base_model.targeted_module_names
        if both := self.shared & set(targeted):
            raise ConfigError(
                f"{self.key}.target_modules: an adapter on {' and '.join(sorted(both))} could not "
                "be merged, because this model's input embeddings and output layer are one matrix "
                "(tie_word_embeddings); remove them"
            )
        config.base_model_name_or_path = settings.base_model_name or self.model_path
        if isinstance(config.target_modules, set):
            config.target_modules = sorted(config.target_modules)  # equal runs write equal files
        if source:
            weights = source.weights()
            try:
                found: Any = set_peft_model_state_dict(wrapped, weights, adapter_name=name)
            except RuntimeError as error:  # the sizes differ
                raise _other_model(source, self.model_path, recorded, str(error)) from error
            missing = [key for key in found.missing_keys if "lora_" in key and f".{name}" in key]
            if unmatched := [*found.unexpected_keys, *missing]:
                raise _other_model(source, self.model_path, recorded, f"such as {unmatched[0]}")
        return Adapter(wrapped, self.start, name)


def _check_names(model: PreTrainedModel, settings: LoraSection, setting: str) -> None:
    """Check that every given name is one of the model's; peft checks that one of them is."""
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
                    f"{setting}.{key} is {name!r}: not a regular expression ({error})"
                ) from None
            if not known:
                hint = ""
                if isinstance(given, str) and re.fullmatch(r"\w+", given):
                    hint = f"; a string is a regex for a whole name, [{given}] is a list"
                raise ConfigError(
                    f"{setting}.{key}: no layer of this model is called {name!r}{hint}; its linear "
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
    """Names of the input embeddings and the output layer, if they are one matrix."""
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
        f"other layers ({lines[-1]}); set model.model_path to its base model"
    )


def _names(given: str | tuple[str, ...] | None) -> str | list[str] | None:
    return list(given) if isinstance(given, tuple) else given


def save_policy(
    model: PreTrainedModel, adapter: Adapter | RoleAdapters | None, tokenizer: Any, folder: Path
) -> None:
    """Save the adapter, those of all roles, or else the model; and the tokenizer."""
    if adapter is None:
        return save_model(model, tokenizer, folder)
    adapter.save(folder)
    tokenizer.save_pretrained(folder)
    save_processor(model, folder)
    for role in adapter if isinstance(adapter, RoleAdapters) else ():
        tokenizer.save_pretrained(folder / role)  # each folder can be used alone
