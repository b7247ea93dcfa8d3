"""Sources of settings: a YAML file, `key=value` overrides, and the paths in both."""

from __future__ import annotations

import copy
import json
import os
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tuner.encoding import NotText, decoded
from tuner.errors import ConfigError

MOST_BYTES = 2**20
# Of values whose tag does not fit their text (`!!int abc`, 5,000 digits), PyYAML's constructors
# raise what they stumble over.
_NOT_YAML = (
    *(yaml.YAMLError, OmegaConfBaseException, ValueError, KeyError, AttributeError),
    RecursionError,  # by OmegaConf 2.3, of a list that contains itself
)


@dataclass(frozen=True)
class YamlFile:
    """A file's settings with unresolved interpolations, and the line of each key."""

    path: Path
    tree: dict[str, Any]
    lines: dict[str, int]


@dataclass(frozen=True)
class Override:
    """One `key=value`, the value read as YAML; `text` is for messages."""

    key: str
    value: Any
    text: str


def lookup(tree: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """The value of a dotted key; `default` if it is not set or null."""
    value: Any = tree
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return default
        value = value[part]
    return default if value is None else value


def register_resolvers() -> None:
    """Register `${tuner.when_set:NAME,a,b}`: `a` if the environment variable is set, otherwise
    `b`."""

    def when_set(name: str, value: Any, otherwise: Any) -> Any:
        return value if os.environ.get(name) else otherwise

    with warnings.catch_warnings():
        # OmegaConf 2.4 renames the function; in 2.3 the new name is a different function.
        warnings.simplefilter("ignore")
        OmegaConf.register_new_resolver("tuner.when_set", when_set, replace=True)


# libyaml is ten times as fast as PyYAML's own parser.
LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
MOST_LEVELS = 100


def check_levels(text: str | bytes) -> None:
    """Refuse nesting that would overflow the stack of libyaml.

    Raises:
        YAMLError: The text is nested deeper than `MOST_LEVELS`, or is not YAML.
    """
    level = 0
    for event in yaml.parse(text, Loader=LOADER):
        level += isinstance(event, yaml.CollectionStartEvent)
        level -= isinstance(event, yaml.CollectionEndEvent)
        if level > MOST_LEVELS:
            raise yaml.YAMLError(f"nested too deeply: in more than {MOST_LEVELS} levels")


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]  # one of two
    """Quotes strings that OmegaConf, unlike YAML 1.1, reads as numbers, such as 1e3."""

    def ignore_aliases(self, _: Any) -> bool:
        """Write a value that occurs twice, twice."""
        return True

    def text(self, value: str) -> yaml.ScalarNode:
        try:
            float(value)
        except ValueError:
            plain: yaml.ScalarNode = self.represent_str(value)
            return plain
        quoted: yaml.ScalarNode = self.represent_scalar("tag:yaml.org,2002:str", value, style="'")
        return quoted


_Dumper.add_representer(str, _Dumper.text)


def as_yaml(tree: Mapping[str, Any]) -> str:
    """Plain settings as YAML, which `read_yaml` reads back unchanged. `OmegaConf.to_yaml` gives the
    same in ten times as long, since it builds its own objects first."""
    return yaml.dump(dict(tree), Dumper=_Dumper, allow_unicode=True, sort_keys=False)


def read_yaml(path: Path) -> YamlFile:
    """Read a configuration file.

    Raises:
        ConfigError: The file does not exist or is not YAML with keys at the top level.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise ConfigError(
                f"configuration file {str(path)!r} is larger than {MOST_BYTES // 2**20} MB: put "
                "data into separate files, and name them here"
            )
        text = decoded(data)
    except FileNotFoundError:
        raise ConfigError(
            f"configuration file {str(path)!r} does not exist (looked in {Path.cwd()})"
        ) from None
    except (OSError, NotText) as error:
        raise ConfigError(f"configuration file {str(path)!r} cannot be read: {error}") from None
    try:
        check_levels(text)
        node = yaml.compose(text, Loader=LOADER)
        tree = OmegaConf.create(text) if node is not None else OmegaConf.create({})
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark is not None else 1
        there = text.splitlines()[line - 1 : line]
        tab = "; indent with spaces, not with tabs" if re.match(r" *\t", "".join(there)) else ""
        raise ConfigError(f"{path}:{line}: not valid YAML: {error.problem}{tab}") from None
    except _NOT_YAML as error:
        raise ConfigError(f"{path}: not valid YAML: {_first_line(error)}") from None
    if not isinstance(tree, DictConfig) or (node is not None and node.tag.endswith(":str")):
        raise ConfigError(f"{path}: expected keys such as `project: ...` at the top level")
    plain = OmegaConf.to_container(tree, resolve=False)
    assert isinstance(plain, dict)
    return YamlFile(path, {str(key): value for key, value in plain.items()}, _lines(node))


MOST_INTERPOLATIONS = 10_000
# A key that is itself computed, `${a.${b}}`, may refer to any value.
STEPS_OF_A_COMPUTED_KEY = MOST_INTERPOLATIONS // 5
# `${key}` and `${oc.select:key}`; `next` is another resolver's colon, or the rest of a computed
# key.
_REFERENCE = re.compile(
    r"\$\{\s*(?:oc\.(?:select|deprecated|dict\.(?:keys|values))\s*:\s*)?"
    r"['\"]?(?P<dots>\.*)(?P<key>[^\s${},:'\"]*)['\"]?\s*(?P<next>:|\$?)"
)


def check_interpolations(tree: Any) -> None:
    """Refuse interpolations that multiply: `a: ${b}${b}`, `b: ${c}${c}`, and so on.

    OmegaConf resolves the values that a value refers to once for each mention, so their number is
    counted beforehand, each value once.

    Raises:
        ConfigError: Names the setting that needs the most.
    """
    counts: dict[tuple[str, ...], int] = {}
    texts: dict[str, int] = {}

    def count(path: tuple[str, ...], value: Any) -> int:
        if path in counts:
            return counts[path]
        counts[path] = 0  # of itself, in a circle
        if isinstance(value, str):
            steps = len(value) // 1000
            for found in _REFERENCE.finditer(value):
                match found["next"]:
                    case "":
                        steps += 1 + count(*_referred(tree, path, found))
                    case "$":
                        steps += STEPS_OF_A_COMPUTED_KEY
            counts[path] = texts[".".join(path)] = steps
        else:
            counts[path] = sum(count((*path, key), one) for key, one in _items(value))
        return counts[path]

    try:
        total = count((), tree)
    except RecursionError:  # a chain of hundreds
        total = sys.maxsize
    if total > MOST_INTERPOLATIONS:
        worst = max(texts, key=texts.__getitem__, default="")
        raise ConfigError(
            f"{worst or 'the configuration'}: resolving the interpolations (${{...}}) takes more "
            f"than {MOST_INTERPOLATIONS} steps, most of them here: write the values out"
        )


def _items(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [(str(key), one) for key, one in value.items()]
    return [(str(at), one) for at, one in enumerate(value)] if isinstance(value, list) else []


def _referred(
    tree: Any, path: tuple[str, ...], found: re.Match[str]
) -> tuple[tuple[str, ...], Any]:
    """Path and value that an interpolation at `path` refers to, or the last one before a part that
    is missing or itself an interpolation."""
    above = len(found["dots"])
    parts = [part for part in re.split(r"[.\[\]]", found["key"]) if part]
    there: tuple[str, ...] = ()
    for part in (*path[: max(0, len(path) - above)], *parts) if above else parts:
        inside = dict(_items(tree))
        if part not in inside:
            break
        there, tree = (*there, part), inside[part]
    return there, tree


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _lines(node: yaml.Node | None, prefix: str = "") -> dict[str, int]:
    """Line of each key, counted from 1, by dotted path."""
    lines: dict[str, int] = {}
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            path = f"{prefix}{key.value}"
            lines[path] = key.start_mark.line + 1
            lines |= _lines(value, f"{path}.")
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            lines[f"{prefix}{index}"] = value.start_mark.line + 1
            lines |= _lines(value, f"{prefix}{index}.")
    return lines


def parse_override(text: str) -> Override:
    """Read `key=value`.

    Raises:
        ConfigError: There is no `=`, no key before it, or no YAML value after it.
    """
    key, equals, value = text.partition("=")
    key = key.strip().replace("[", ".").replace("]", "")
    if not equals:
        raise ConfigError(
            f"override {text!r} has no '=': write key=value, as in buffer.batch_size=8"
        )
    if not key or any(not part for part in key.split(".")):
        raise ConfigError(f"override {text!r} has no key before '=': write key=value")
    try:
        check_levels(value)
        node = OmegaConf.from_dotlist([f"value={value}"])
        parsed = OmegaConf.to_container(node, resolve=False)
    except _NOT_YAML as error:
        problem = getattr(error, "problem", None) or _first_line(error)
        raise ConfigError(
            f"override {text[:200]!r}: the value does not parse as YAML ({problem}); "
            "quote it if it is text"
        ) from None
    assert isinstance(parsed, dict)
    found = parsed["value"]
    if any(_is_secret(path, one) or names_key(path) for path, one in _leaves(found, key)):
        text = f"{key}={MASK}"
    return Override(key, found, text)


# Placeholder in files and trackers for a secret that was given in clear text.
MASK = "(a secret, not written down)"
_SECRET_KEY = re.compile(
    r"(.*_)?(api_?key|access_?key|secret|secret_key|private_key|password|passwd|credentials?)"
    r"|((access|api|auth|bearer|hf|refresh)_)?token",
    re.IGNORECASE,
)
# Words are shorter than these, and have no digit.
_NO_WORD = r"(?=[\w+/=.~*-]*[\d*]|[\w+/=.~*-]{20})"
# Credentials of a URL: before its host, and in its query.
_SECRET_IN_URL = re.compile(
    r"(?<=://)[^/\s]*:[^/\s]+(?=@)"
    r"|(?<=[?&])(?P<name>(?:[\w-]*[_-])?(?:key|token|secret|password|passwd|sig|signature)=)"
    r"(?!\(a secret)[^&#\s'\"<>]+",
    re.IGNORECASE,
)
# Credentials of a request's header.
_HEADER = re.compile(
    r"(?P<name>\b(?:bearer|basic)\s+|\b(?:x-)?api[-_]key\b['\"]?\s*[:=]\s*['\"]?)"
    rf"{_NO_WORD}[\w+/=.~-]{{8,}}",
    re.IGNORECASE,
)
# Providers' keys, and JSON Web Tokens.
_SHAPES = re.compile(
    rf"(?<![\w-])(?:sk-{_NO_WORD}[\w*-]{{8,}}|(?:gsk|hf|xai|pplx|nvapi|r8|glpat|github_pat"
    rf"|gh[oprsu]|[rs]k_(?:live|test))[_-]{_NO_WORD}[\w-]{{16,}}|AKIA[0-9A-Z]{{12,}}"
    r"|AIza[\w-]{30,}|ya29\.[\w.-]{16,}|xox[a-z]-[\w-]{10,}|eyJ[\w-]{6,}\.[\w-]{6,}\.[\w-]*)"
)
_SECRET_VARIABLE = re.compile(r"(?:.*_)?(?:KEY|APIKEY|TOKEN|SECRET|PASSWORD|PASSWD)", re.IGNORECASE)
_SHORTEST = 8  # of known secrets: shorter ones would hide words
_VARIABLES = set[str]()
_SECRETS = set[str]()
_FROM_ENVIRONMENT = re.compile(r"\$\{oc\.env:\s*([^,}\s]+)[^}]*\}")


def _is_secret(path: str, value: Any) -> bool:
    """Whether the value is a secret, which must not be written."""
    if not _may_be_secret(value):
        return False
    unresolved = _watched(path) and "${oc.env:" in str(value)
    return unresolved or _has_secret_name(path, value) or bool(_SECRET_IN_URL.search(str(value)))


def _may_be_secret(value: Any) -> bool:
    return (
        isinstance(value, str | int) and not isinstance(value, bool) and value not in ("", "EMPTY")
    )


def _has_secret_name(path: str, value: Any) -> bool:
    name = next((part for part in reversed(path.split(".")) if not part.isdecimal()), "")
    return _may_be_secret(value) and bool(_SECRET_KEY.fullmatch(name))


def names_key(path: str) -> bool:
    """Whether a setting names the variable with a key: people give the key itself by mistake."""
    return path.endswith("key_env")


def secret_variable(name: str) -> str:
    """The name of an environment variable whose value is a secret, which texts do not show.

    Raises:
        ValueError: It is a key, not a name; the message does not contain it.
    """
    long_word = re.fullmatch(r"(?=.*\d)[A-Za-z0-9]{20,}", name)
    if long_word or not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII) or _SHAPES.match(name):
        raise ValueError(
            "must be the name of an environment variable, and looks like a key: set a variable to "
            "the key, and name the variable here (the value is not repeated, since it may be one)"
        )
    _VARIABLES.add(name)
    return name


def remember_secrets(tree: Any, references: Iterable[str] = ()) -> None:
    """Let no text show the secrets among these settings, nor those of `secret_references`."""
    clear = (str(value) for path, value in _leaves(tree) if _has_secret_name(path, value))
    _SECRETS.update(clear, references)


def without_secrets(text: str) -> str:
    """A text from other code, such as an exception's message, with each secret replaced by `MASK`.

    Secrets are the values of the configuration and the environment that are known to be, keys and
    credentials that look like such, and the user, password and keys of URLs.
    """
    named = (
        value
        for name, value in os.environ.items()
        if name in _VARIABLES or _SECRET_VARIABLE.fullmatch(name)
    )
    known = {one for one in (*_SECRETS, *named) if len(one) >= _SHORTEST and one != MASK}
    for one in sorted(known, key=len, reverse=True):
        forms = (one, quote(one, safe="", errors="replace"), repr(one)[1:-1], json.dumps(one)[1:-1])
        for form in (*forms, " ".join(one.split())):
            text = text.replace(form, MASK)
    text = _SECRET_IN_URL.sub(lambda found: (found["name"] or "") + MASK, text)
    text = _HEADER.sub(lambda found: found["name"] + MASK, text)
    return _SHAPES.sub(MASK, text)


def secret_references(raw: Any, resolved: Any, path: str = "") -> dict[str, str]:
    """Secrets from the environment with their source, `${oc.env:NAME}`; below `monitor` every value
    from the environment is a secret.

    Args:
        raw, resolved: The same settings before and after interpolation.
        path: Dotted path of both.
    """
    if isinstance(raw, dict | list) and type(raw) is type(resolved):
        items = raw.items() if isinstance(raw, dict) else enumerate(raw)
        keys = range(len(resolved)) if isinstance(resolved, list) else resolved
        found: dict[str, str] = {}
        for key, item in items:
            if key in keys:
                inner = f"{path}.{key}" if path else str(key)
                found |= secret_references(item, resolved[key], inner)
        return found
    # Without the default, which may itself be a secret.
    reference = _FROM_ENVIRONMENT.sub(r"${oc.env:\1}", raw) if isinstance(raw, str) else ""
    rest = _FROM_ENVIRONMENT.sub("", reference)
    if reference == rest or "${" in rest or _is_secret(path, rest):
        return {}
    return {str(resolved): reference} if _is_secret(path, resolved) or _watched(path) else {}


def _watched(path: str) -> bool:
    return path.startswith("monitor.")


def concealed(value: Any, references: Mapping[str, str], path: str = "") -> Any:
    """A copy of settings that is safe to write or send: each secret is its source or `MASK`.

    Args:
        value: Nested dicts, lists and dataclasses of settings, or one setting.
        references: The result of `secret_references`; none: every secret is masked.
        path: Dotted path of `value` itself.
    """
    prefix = f"{path}." if path else ""
    if value is None or isinstance(value, str | int | float):
        # First, since nearly all are: whether a text is a Mapping takes Python a tenth of a second
        # to find out among that class's many subclasses.
        if _is_secret(path, value):
            return references.get(str(value), MASK)
        return references.get(value, value) if isinstance(value, str) and _watched(path) else value
    if isinstance(value, Mapping):
        return {key: concealed(item, references, f"{prefix}{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [concealed(item, references, f"{prefix}{at}") for at, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if is_dataclass(value) and not isinstance(value, type):
        value = copy.copy(value)
        for field in fields(value):
            inner = concealed(getattr(value, field.name), references, f"{prefix}{field.name}")
            object.__setattr__(value, field.name, inner)
    return value


def masked(tree: Any) -> list[str]:
    """Dotted paths of secrets that are masked in stored settings."""
    return [path for path, value in _leaves(tree) if value == MASK]


def _leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Nested settings by dotted path."""
    if not isinstance(tree, Mapping | list):
        yield path, tree
        return
    for key, item in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
        yield from _leaves(item, f"{path}.{key}" if path else str(key))


# Paths of our own files or folders.
PATHS = (
    "checkpoint_root_dir",
    "model.chat_template_path",
    "tuner.history.sources.*",
    "tuner.environment.folder",
    "tuner.environment.eval_folder",
    "tuner.environment.keep",
    "tuner.environment.readable.*",
)
# A path if it exists, otherwise a name on the Hugging Face Hub.
PATHS_OR_NAMES = (
    "model.model_path",
    "model.lora_configs.*.path",
    "model.adapters.*.path",
    "model.critic_model_path",
    "explorer.rollout_model.model_path",
    "explorer.auxiliary_models.*.model_path",
    "buffer.explorer_input.taskset.path",
    "buffer.explorer_input.tasksets.*.path",
    "buffer.explorer_input.eval_tasksets.*.path",
    "buffer.trainer_input.experience_buffer.path",
    "tuner.environment.template",
)
# `path/file.py:function`, or `package.module:function`, which is not a path.
FUNCTIONS = (
    "tuner.workflow",
    "tuner.judge",
    "tuner.agent.type",
    "tuner.environment",
    "tuner.environment.*",
    "tuner.serving.redact",
)
# `harbor:FOLDER`, an environment.
HARBOR = "harbor:"
# `path/file.py`, or `package.module`, which is not a path.
MODULES = ("tuner.imports", "tuner.imports.*")


def absolute_paths(
    value: Any, folder: Path, *, at: str = "", without: frozenset[str] = frozenset()
) -> Any:
    """`value` with the paths among its settings made absolute.

    Args:
        value: A nested dict of settings, or one setting.
        folder: Base of relative paths.
        at: Dotted path of `value` itself.
        without: Keys to leave unchanged.
    """
    prefix = f"{at}." if at else ""
    if isinstance(value, dict):
        return {
            key: absolute_paths(item, folder, at=f"{prefix}{key}", without=without)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [
            absolute_paths(item, folder, at=f"{prefix}{index}", without=without)
            for index, item in enumerate(value)
        ]
    if not isinstance(value, str) or not value or "${" in value or at in without:
        return value
    pattern = ".".join("*" if part.isdecimal() else part for part in at.split("."))
    pattern = re.sub(r"^model\.adapters\.[^.]*", "model.adapters.*", pattern)  # a role
    if pattern in PATHS:
        return absolute(value, folder)
    if pattern in PATHS_OR_NAMES:
        return path_or_name(value, folder)
    if pattern.startswith("tuner.environment."):  # arguments of a class, at any depth
        pattern = "tuner.environment.*"
    if pattern in MODULES and value.endswith(".py"):
        return absolute(value, folder)
    if pattern == "tuner.environment" and value.startswith(HARBOR):
        return HARBOR + absolute(value.removeprefix(HARBOR), folder)
    if pattern in FUNCTIONS:
        file, colon, name = value.rpartition(":")
        return f"{absolute(file, folder)}:{name}" if colon and file.endswith(".py") else value
    return value


def absolute(value: str, folder: Path) -> str:
    """An absolute path; `~` is the home folder."""
    return str((folder / Path(value).expanduser()).resolve())


def path_or_name(value: str, folder: Path) -> str:
    """An absolute path if `value` exists or can only be a path, otherwise `value` (a Hub name,
    a URL or `package:NAME`)."""
    if "://" in value or value.startswith(PACKAGE):
        return value
    looks_like_path = (
        value.startswith((".", "/", "~"))
        or value.count("/") > 1
        or uncompressed(Path(value)).suffix in (*DATA_FILES, GGUF)
        or ("/" in value and (folder / value).parent.is_dir())
    )
    if looks_like_path or (folder / value).exists():
        return absolute(value, folder)
    return value


def uncompressed(path: Path) -> Path:
    """`rows.jsonl` for `rows.jsonl.gz`; other names are returned unchanged."""
    return path.with_suffix("") if path.suffix in COMPRESSED else path


DATA_FILES = (".json", ".jsonl", ".csv", ".parquet")
COMPRESSED = (".gz", ".bz2", ".xz")
GGUF = ".gguf"
# Prefix of an installed package that contains a model.
PACKAGE = "package:"
