"""What `select_model()` chooses among: each candidate with a name, a price, and a way to ask it."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from tuner.chat_models.observed import is_chat_model, name_of, observed
from tuner.commands.candidates import Candidate, find_candidate
from tuner.commands.evaluation import with_weights
from tuner.config import RemoteModel
from tuner.config.model_paths import located, require_model_libraries
from tuner.errors import ConfigError
from tuner.prompts.contenders import Contender, elsewhere, served_here
from tuner.prompts.prompted import Prices
from tuner.run.record import fingerprint_of_weights
from tuner.settings import TunerModelConfig
from tuner.tune import Run

_KINDS = (
    "a chat model of AgentScope, a RemoteModel(base_url=..., model_name=...), a "
    "TunerModelConfig(model_path=..., max_model_len=...), or the path of a model, a checkpoint or "
    "a run"
)


@dataclass(frozen=True)
class ModelCandidate:
    """One of the models.

    Attributes:
        name: What people call it; no other has it.
        given: What the user gave, and gets back.
        identity: What tells it from others, when a selection goes on another day.
        run: The configuration that it is run with, and the rows.
        open: Whom rollouts are asked of, for as long as it is open.
        prices: Of its tokens; None where they are not known.
    """

    name: str
    given: Any
    identity: Mapping[str, Any]
    run: Run
    open: Callable[[Run], AbstractAsyncContextManager[Contender]]
    prices: Prices | None = None


def model_candidates(
    given: Sequence[Any],
    run: Run,
    prepared: Callable[[TunerModelConfig], Run],
    prices: Mapping[str, Prices],
) -> list[ModelCandidate]:
    """The candidates in the order in which they are given.

    Args:
        given: What the user calls models.
        run: The configuration, and the rows.
        prepared: The same with a model in place of the file's.
        prices: By name; they win over a `RemoteModel`'s own.

    Raises:
        ConfigError: There are fewer than two, one is there twice or is nothing that can be asked,
            or a price is for none of them or is no price.
        TunerError: A path is nothing that can be loaded.
    """
    if isinstance(given, str | Path) or len(given) < 2:
        raise ConfigError(
            f"candidate_models is {given!r:.80}: give a list of two models or more, each of them "
            f"{_KINDS}"
        )
    found = _distinct([_candidate(one, run, prepared) for one in given])
    for name, price in prices.items():
        if not isinstance(price, Sequence) or len(price) != 2:
            raise ConfigError(
                f"prices[{name!r}] is {price!r:.40}: give money for a million tokens read, and "
                "for a million written, as in (0.5, 1.5)"
            )
    called = [_priced_as(one) for one in found]
    if unknown := prices.keys() - called - {one.name for one in found}:
        raise ConfigError(
            f"prices has {', '.join(sorted(unknown))}, and the candidates are {', '.join(called)}"
        )
    return [
        replace(one, prices=prices.get(one.name, prices.get(name, one.prices)))
        for one, name in zip(found, called, strict=True)
    ]


def _candidate(given: Any, run: Run, prepared: Callable[[TunerModelConfig], Run]) -> ModelCandidate:
    if is_chat_model(given):
        return ModelCandidate(name_of(given), given, _chat_identity(given), run, _asked(given))
    if isinstance(given, RemoteModel):
        given.api_key(f"candidate_models: {given.model_name}")  # before anybody is asked
        name, identity = given.model_name, given.model_dump(include={"base_url", "model_name"})
        prices = None if given.cost(0, 0) is None else given.prices
        return ModelCandidate(name, given, identity, run, partial(elsewhere, remote=given), prices)
    if isinstance(given, TunerModelConfig):
        of_model = prepared(given)
        said = given.model_dump(mode="json", exclude_unset=True)
        return _weights(given, find_candidate(of_model.config.model.model_path), of_model, said)
    if isinstance(given, str | Path):
        return _weights(given, find_candidate(given), run, {})
    raise ConfigError(f"a candidate is {given!r:.80} ({type(given).__name__}); pass {_KINDS}")


def _weights(given: Any, weights: Candidate, run: Run, said: Mapping[str, Any]) -> ModelCandidate:
    place = located(weights.path, "candidate_models")
    identity = {
        **said,
        "path": weights.path,
        "weights": None if place is None else fingerprint_of_weights(place),
    }
    served = replace(run, config=with_weights(run.config, weights))
    require_model_libraries(served.config)
    return ModelCandidate(weights.name, given, identity, served, served_here)


def _asked(model: Any) -> Callable[[Run], AbstractAsyncContextManager[Contender]]:
    return partial(elsewhere, remote=None, make_model=partial(observed, model))


def _chat_identity(model: Any) -> dict[str, Any]:
    """A chat model's class, name and, as a digest, those of its settings that are plain values."""
    plain = {
        name: value.model_dump(mode="json") if hasattr(value, "model_dump") else value
        for name, value in vars(model).items()
        if not name.endswith(("key", "credential"))
    }
    client = getattr(model, "client", None)
    plain["client"] = str(getattr(client, "base_url", ""))
    # What is no plain value says where it is in memory.
    text = json.dumps(plain, sort_keys=True, default=lambda value: type(value).__name__)
    return {
        "class": f"{type(model).__module__}.{type(model).__qualname__}",
        "model_name": name_of(model),
        "settings": hashlib.sha256(text.encode()).hexdigest(),
    }


def _priced_as(candidate: ModelCandidate) -> str:
    """The name that its price goes by: equal models have one price."""
    named = candidate.identity.get("model_name")
    return candidate.name if named is None else str(named)


def _distinct(candidates: Sequence[ModelCandidate]) -> list[ModelCandidate]:
    """The same, each with a name and an identity of its own.

    Raises:
        ConfigError: One is there twice.
    """
    found, names, alike = [], Counter[str](), Counter[str]()
    for number, one in enumerate(candidates):
        key = json.dumps(one.identity, sort_keys=True)
        before = [other.given for other in candidates[:number]]
        same = any(one.given is other for other in before)
        if same or (alike[key] and not is_chat_model(one.given)):
            raise ConfigError(f"the candidate {one.name} is given twice: leave one out")
        names[one.name] += 1
        alike[key] += 1
        name = one.name
        if names[name] > 1:
            name = str(one.identity.get("path") or f"{name} ({names[name]})")
        found.append(replace(one, name=name, identity={**one.identity, "number": alike[key]}))
    return found
