"""The Hugging Face folder behind a model path. A GGUF file is converted to one, once.

A GGUF's weights are dequantised to float32 and saved with its tokenizer in the user's cache:

    ~/.cache/tuner/models/SmolLM2-135M-Instruct.Q4_1-<key>/

The key changes with the file, with transformers and with `_FORM`. A folder gets its name when it is
complete. Refused: files in several parts, and scaled rotary positions, which transformers does not
read from a GGUF.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor

from tuner.config.model_paths import check_path, located, require_gguf
from tuner.errors import ModelLoadError
from tuner.run.record import fingerprint_of_weights

_log = logging.getLogger(__name__)
_FORM = 1  # of what is saved; a change in this file that changes it needs a new one
# Vocabularies whose digits stand alone, by llama.cpp's names for how a text is split.
_SINGLE_DIGITS = ("codeshell", "command-r", "exaone", "minerva-7b", "refact", "smollm", "starcoder")


def model_folder(path: str, setting: str = "model.model_path") -> str:
    """What transformers and vLLM load: the folder of a model, or its name on the Hub.

    Args:
        path: As people write it (`tuner.config.model_paths`).
        setting: Which setting said it, for the message.

    Raises:
        ModelLoadError: There is no such model, or its GGUF file cannot be converted.
        MissingDependencyError: It names a package that is not installed, or what reads a GGUF file
            is not.
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
    """Turns what goes wrong with `what`, which should be of some `kind`, into a ModelLoadError."""
    try:
        yield
    except errors as error:
        first_line = next(iter(str(error).strip().splitlines()), "")
        wanted = f" as {kind}" if kind else ""
        raise ModelLoadError(
            f"{what} cannot be loaded{wanted}: {type(error).__name__}: {first_line}{advice}"
        ) from error


def described(path: str, setting: str) -> str:
    """A model as messages name it; a name on the Hub may have been meant for a folder."""
    place = located(path, setting)
    if place is not None:
        here = place == Path(path).expanduser()
        return f"{setting} = {path!r}" if here else f"{setting} = {path!r} ({place})"
    return (
        f"{setting} = {path!r} (taken for a name on the Hub: there is no such folder beside the "
        f"file that says so, or in {Path.cwd()})"
    )


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars of transformers' own between the lines of a run."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _converted(file: Path, path: str, setting: str) -> Path:
    """The Hugging Face folder of a GGUF file, which is made where it is not there."""
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
        with FileLock(cache / f".{folder.name}.lock"):  # another process may be at it
            if folder.is_dir():
                return folder
            named = described(path, setting)
            _log.warning("%s is dequantised to float32 into %s, once", named, folder)
            model, tokenizer = _read(file, named)
            shutil.rmtree(part, ignore_errors=True)  # of a process that was killed
            part.mkdir()
            with quiet_transformers():
                model.save_pretrained(part)
                tokenizer.save_pretrained(part)
            part.replace(folder)
    except ModelLoadError:
        raise
    except Exception as error:  # of the system, or of safetensors
        shutil.rmtree(part, ignore_errors=True)
        raise ModelLoadError(
            f"{setting} = {path!r} cannot be converted into {folder}: {type(error).__name__}: "
            f"{error}; make room there, or set XDG_CACHE_HOME to a folder that can be written"
        ) from error
    return folder


def _read(file: Path, named: str) -> tuple[Any, Any]:
    """A model of float32 weights and a tokenizer, from a GGUF file.

    Raises:
        ModelLoadError: transformers cannot read it, it lacks weights or has some that are not
            finite, or transformers would read another model from it.
    """
    import transformers
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, AutoTokenizer

    given: dict[str, Any] = {"gguf_file": file.name}
    # Else transformers may keep the blocks, where a kernel for them is installed.
    kept = getattr(transformers, "GgufConfig", None)
    quantization = {} if kept is None else {"quantization_config": kept(dequantize=True)}
    advice = (
        "; download the file again if it may be damaged, and if transformers "
        f"{transformers.__version__} does not know its kind, give the model's Hugging Face folder "
        "(config.json and *.safetensors) instead"
    )
    with loading(named, "a GGUF model", advice=advice), quiet_transformers():
        reader = GGUFReader(file)
        load: Any = AutoModelForCausalLM.from_pretrained  # its type leaves out what it found
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
    """The same model, which transformers will save: it refuses one that came of a GGUF file."""
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
    """Refuse rotary positions that are scaled in the file and would not be in the model."""
    kind = reader.get_field(f"{_text(reader, 'general.architecture')}.rope.scaling.type")
    scaled = kind is not None and kind.contents() != "none"
    scaled = scaled or any(tensor.name.startswith("rope_f") for tensor in reader.tensors)
    read = getattr(config, "rope_parameters", None) or {}
    if scaled and read.get("rope_type", "default") == "default":
        raise ModelLoadError(
            f"{named} scales its rotary positions, which transformers does not read from a GGUF "
            "file, so it would be another model; give the model's Hugging Face folder (config.json "
            "and *.safetensors) instead"
        )


def _split_digits(reader: Any, tokenizer: Any) -> None:
    """Let each digit be a token of its own where the model learned that: transformers 5.23 splits
    such texts as GPT-2's, which differs where several spaces or lines stand before a digit."""
    from tokenizers import pre_tokenizers

    backend = tokenizer.backend_tokenizer
    plain = isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel)
    if plain and _text(reader, "tokenizer.ggml.pre") in _SINGLE_DIGITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])


def _text(reader: Any, key: str) -> str:
    field = reader.get_field(key)
    return "" if field is None else str(field.contents())
