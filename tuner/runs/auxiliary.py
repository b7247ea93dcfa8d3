"""Auxiliary models: frozen, named by the user, never recorded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tuner.config import RemoteModel
from tuner.gateway import Gateway, SamplingDefaults
from tuner.rollouts.chat_models import ChatModelKind, chat_model, remote_chat_model
from tuner.tasks.selection import derive_seed


class AuxiliaryModels:
    """Gives each rollout its own handle on every auxiliary model.

    With separate handles, an auxiliary model's samples for one rollout do not depend on the
    requests of other rollouts.
    """

    def __init__(self, kind: ChatModelKind) -> None:
        self._kind = kind
        self._local: dict[str, tuple[Gateway, SamplingDefaults]] = {}
        self._remote: dict[str, Any] = {}

    @property
    def gateways(self) -> list[Gateway]:
        """Gateways of the models that this process serves."""
        return [gateway for gateway, _ in self._local.values()]

    def add_local(self, name: str, gateway: Gateway, defaults: SamplingDefaults) -> None:
        """Add a model served by an engine of this process."""
        self._local[name] = (gateway, defaults)

    def add_remote(self, name: str, remote: RemoteModel) -> None:
        """Add a model behind any OpenAI-compatible URL."""
        self._remote[name] = remote_chat_model(
            base_url=remote.base_url,
            api_key=remote.api_key(f"tuner.auxiliary_models.{name}"),
            model_name=remote.model_name,
            kind=self._kind,
            max_concurrent=remote.max_concurrent,
        )
        self._remote[name].remote = remote  # its prices, for judges that count their cost

    @contextmanager
    def opened(self, rollout: str, seed: int) -> Iterator[dict[str, Any]]:
        """The models by name, for one attempt at a rollout."""
        sessions = {
            name: gateway.open_session(
                f"{rollout}-{name}", seed=derive_seed(seed, name), recorded=False, defaults=defaults
            )
            for name, (gateway, defaults) in self._local.items()
        }
        try:
            own = {name: chat_model(s, kind=self._kind) for name, s in sessions.items()}
            yield {**own, **self._remote}
        finally:
            for session in sessions.values():
                session.seal()

    async def aclose(self) -> None:
        for gateway, _ in self._local.values():
            await gateway.aclose()
            await gateway.engine.close()
