"""Agents and environments by name: `register_agent("mine", MyAgent)`, then "mine" and arguments."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tuner.areal.requests import GenerationHyperparameters
from tuner.errors import ConfigError
from tuner.functions.loading import load_function

_AGENTS: dict[str, type[Any]] = {}
_ENVIRONMENTS: dict[str, type[Any]] = {}


@dataclass(frozen=True)
class AgentAbstraction:
    """An agent to be made.

    Attributes:
        type_: The name it is registered under, or `package.module:Class`, or `path/file.py:Class`.
        args: What its constructor gets.
    """

    type_: str
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class EnvServiceAbstraction:
    """An environment to be made, as `AgentAbstraction`."""

    type_: str
    args: Mapping[str, Any] = field(default_factory=dict)


def register_agent(name: str, agent_class: type[Any]) -> None:
    """Make `name` mean a class of agents.

    Raises:
        ConfigError: It means another one already.
    """
    _register(_AGENTS, "agent", name, agent_class)


def register_environment(name: str, environment_class: type[Any]) -> None:
    """Make `name` mean a class of environments.

    Raises:
        ConfigError: It means another one already.
    """
    _register(_ENVIRONMENTS, "environment", name, environment_class)


def make_agent(agent: AgentAbstraction) -> Any:
    """An agent of the class that is named.

    Raises:
        ConfigError: There is no such class, or it does not take the arguments.
    """
    return _make(_AGENTS, "agent", agent.type_, agent.args)


def make_environment(environment: EnvServiceAbstraction) -> Any:
    """An environment of the class that is named.

    Raises:
        ConfigError: There is no such class, or it does not take the arguments.
    """
    return _make(_ENVIRONMENTS, "environment", environment.type_, environment.args)


def _register(known: dict[str, type[Any]], what: str, name: str, new: type[Any]) -> None:
    old = known.setdefault(name, new)
    # A module that is imported twice under one name registers its class anew.
    if (old.__module__, old.__qualname__) != (new.__module__, new.__qualname__):
        raise ConfigError(
            f"{what} {name!r} is {old.__module__}.{old.__qualname__} already; register "
            f"{new.__module__}.{new.__qualname__} under another name"
        )
    known[name] = new


def _make(known: Mapping[str, type[Any]], what: str, name: str, args: Mapping[str, Any]) -> Any:
    if name in known:
        made: Any = known[name]
    elif ":" in name:
        made = load_function(name, setting=f"the {what}")
    else:
        names = ", ".join(sorted(known)) or "none"
        raise ConfigError(
            f"there is no {what} {name!r} (registered: {names}); import the module that registers "
            "it (tuner.imports), or write package.module:Class"
        )
    given = dict(args)
    if isinstance(given.get("gconfig"), Mapping):
        given["gconfig"] = GenerationHyperparameters(**given["gconfig"])
    try:
        inspect.signature(made).bind(**given)
    except TypeError as error:
        raise ConfigError(
            f"{what} {name!r} is {made.__qualname__}{inspect.signature(made)}, which does not take "
            f"the arguments {', '.join(given) or 'none'}: {error}"
        ) from None
    return made(**given)
