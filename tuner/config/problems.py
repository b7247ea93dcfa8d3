"""What is wrong with a configuration, as sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from tuner.config.section import section_of


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        path: Dotted path of the key.
        text: What is wrong and what to do; begins with the key.
    """

    path: str
    text: str


def describe(error: ValidationError, model: type[BaseModel], known: Sequence[str]) -> list[Problem]:
    """One problem for each key that pydantic refused.

    Args:
        error: What pydantic found.
        model: The class that was validated.
        known: Dotted paths of its fields; `*` stands for an index or a name.
    """
    found: dict[str, Problem] = {}
    for detail in error.errors():
        path, pattern = _key(detail, known)
        if path not in found:
            found[path] = Problem(path, _sentence(detail, path, _description(model, pattern)))
    return list(found.values())


def _key(detail: ErrorDetails, known: Sequence[str]) -> tuple[str, str]:
    """The key an error is about: its location without pydantic's own additions."""
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
        return f"{path} is {detail['input']!r}: must have keys under it{hint}"
    message = detail["msg"].removeprefix("Value error, ")
    message = message.replace("Input should be", "must be").replace("String should", "must")
    return f"{path} is {detail['input']!r}: {message}{hint}"
