"""`tuner serve`: engine, gateway, store and control API in one process, from start to end.

    request ──▶ port ──▶ /v1/...        Front ──▶ Gateway ──▶ engine
                  │                       └──▶ LiveSessions ──▶ store (a file in the run directory)
                  └────▶ /tuner/v1/...  control API ──┘

What the process has in memory may be lost at any moment: it is restored from the store.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tuner.config import RunConfig
from tuner.errors import ConfigError
from tuner.gateway import SamplingDefaults, SessionLimits
from tuner.gateway.http import HttpDoor, Opening
from tuner.gateway.request_error import RequestError
from tuner.runs.directory import RunDirectory, held, write_atomically
from tuner.runs.record import version_of
from tuner.runs.stack import Stack, build_stack
from tuner.serving.asking import ServedModels
from tuner.serving.control import Control, Models
from tuner.serving.control_routes import control_app
from tuner.serving.learning.ledger import promoted_versions
from tuner.serving.routing import (
    ApiKeys,
    Front,
    LiveSessions,
    Metrics,
    Rates,
    log_as_json,
    log_event,
)
from tuner.serving.serving_store import ServingStore
from tuner.tasks.loading import load_function
from tuner.traces.store import SERVED

logger = logging.getLogger(__name__)

_PATIENCE = 10  # seconds that requests in flight get when the server ends
_REPLIES_SECONDS = 86400.0
_TIDY_SECONDS = 5.0


class ServedFromTheStart:
    """The initial weights of a server that does not learn."""

    def __init__(self, version: int) -> None:
        self._serving = {"version": version, "since": time.time()}

    def models(self) -> ServedModels:
        return ServedModels(serving=self._serving)

    async def rollback(self) -> ServedModels:
        raise RequestError(
            "nothing was promoted, so there is nothing to roll back to",
            status=409,
            code="nothing_promoted",
        )


@dataclass
class Server:
    """The parts of a running server.

    Attributes:
        config: The effective configuration.
        directory: The run directory.
        stack: Engine and gateway.
        store: Its database; changed only in the event loop.
        live: Its open sessions.
        models: Decides which weights serve; a learner replaces it before the port opens.
        admin_key: The admin's key.
        door: The HTTP server, once it is open.
    """

    config: RunConfig
    directory: RunDirectory
    stack: Stack
    store: ServingStore
    live: LiveSessions
    models: Models
    admin_key: str
    metrics: Metrics
    door: HttpDoor | None = None

    def app(self, keys: ApiKeys, rates: Rates) -> Any:
        """The control API."""
        control = Control(
            self.store,
            self.live,
            keys=keys,
            rates=rates,
            models=self.models,
            metrics=self.metrics,
            failure=lambda: self.stack.engine.failure,
            logs=self.config.tuner.serving.log,
        )
        return control_app(control)

    async def tidy(self) -> None:
        """End idle sessions, delete old ones and old replies, drop resting ones from memory."""
        settings, now = self.config.tuner.serving, time.time()
        if settings.idle_minutes is not None:
            for id_ in self.store.idle(now - 60 * settings.idle_minutes):
                if not self.live.busy(id_):
                    self.live.end(id_)
                    if settings.log:
                        log_event("end", session=id_, who="idle_minutes")
                await asyncio.sleep(0)  # let other tasks run between two sessions
        if settings.keep_days is not None:
            for id_ in self.store.expired(now - 86400 * settings.keep_days):
                self.live.delete(id_)
                await asyncio.sleep(0)
        self.store.forget_replies(now - _REPLIES_SECONDS)
        self.live.rest()
        await asyncio.to_thread(self.store.checkpoint)


Beside = Callable[[Server], AbstractAsyncContextManager[None]]
"""Runs next to a server from before its port opens until it has closed."""


def serve(
    config: RunConfig,
    *,
    host: str = "127.0.0.1",
    port: int = 8700,
    announce: Callable[[Server], None] = lambda server: None,
    workflow: Callable[..., Any] | None = None,
    judge: Callable[..., Any] | None = None,
    beside: Beside | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM. Must be called where no event loop is running.

    Args:
        config: The effective configuration, with a model.
        host, port: Address; port 0 takes a free one.
        announce: Called when the port is open.
        workflow, judge: For evaluations next to the server; else None.
        beside: Runs meanwhile.

    Raises:
        ConfigError: The run directory or the port is in use, or the host needs an admin key.
        ModelLoadError, MissingDependencyError: As `build_stack`.
        TunerError: The store is damaged, or of another version.
    """
    if config.tuner.workers:
        raise ConfigError(
            f"tuner.workers is {config.tuner.workers}, but `tuner serve` runs its functions in its "
            "own process: set it to 0"
        )
    admin_key = admin_key_for(config, host)
    log_as_json()
    with held(config.run_dir):
        directory = RunDirectory(config.run_dir)
        directory.create()
        if not directory.has_begun():  # the folder may be that of a run, which has its own
            write_atomically(directory.config, config.to_yaml())
        asyncio.run(
            _until_stopped(
                running(
                    config,
                    directory,
                    admin_key,
                    host=host,
                    port=port,
                    workflow=workflow,
                    judge=judge,
                    beside=beside,
                ),
                announce,
            )
        )


def admin_key_for(config: RunConfig, host: str) -> str:
    """The admin key: from the environment, or on loopback one generated for this start.

    Raises:
        ConfigError: The host is not loopback and there is no key, or the key is invalid.
    """
    name = config.tuner.serving.admin_key_env
    found = os.environ.get(name, "").strip()
    if not found and not (host in ("localhost", "::1") or host.startswith("127.")):
        raise ConfigError(
            f"--host is {host}, which other machines can reach, and the variable {name} "
            "(tuner.serving.admin_key_env) is not set: set it to a long random key"
        )
    if "." in found or not found.isascii():
        raise ConfigError(
            f"the environment variable {name} holds a key with a dot or non-ASCII characters: a "
            "dot separates the role; use another key"
        )
    return found or f"sk-admin-{secrets.token_urlsafe(24)}"


@asynccontextmanager
async def running(
    config: RunConfig,
    directory: RunDirectory,
    admin_key: str,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    workflow: Callable[..., Any] | None = None,
    judge: Callable[..., Any] | None = None,
    beside: Beside | None = None,
) -> AsyncIterator[Server]:
    """A server that answers while the block runs; the caller owns the directory.

    Raises:
        As `serve`.
    """
    settings = config.tuner.serving
    redact = settings.redact and load_function(settings.redact, setting="tuner.serving.redact")
    store = ServingStore(directory.path / SERVED)
    try:
        # A learner replaces it before the port opens.
        weights = None if beside is not None else weights_to_serve(directory, store)
        stack = build_stack(
            config,
            workflow=workflow,
            judge=judge,
            weights=weights,
            version=0 if weights is None else version_of(weights),
        )
        try:
            server = _assembled(config, directory, stack, store, admin_key, redact or None)
            goes_on = nullcontext() if beside is None else beside(server)
            async with goes_on, _open(server, host, port):
                yield server
        finally:
            await stack.aclose()  # calls in flight are stored as undelivered
    finally:
        store.close()


def weights_to_serve(directory: RunDirectory, store: ServingStore) -> Path | None:
    """The checkpoint that a server last promoted, else the run's newest valid one, or None: then
    the configuration's model serves."""
    promoted = promoted_versions(store)
    if promoted:
        return directory.checkpoint(promoted[-1])
    step = directory.sound_checkpoint(logger.warning)
    return None if step is None else directory.checkpoint(step)


def _assembled(
    config: RunConfig,
    directory: RunDirectory,
    stack: Stack,
    store: ServingStore,
    admin_key: str,
    redact: Any,
) -> Server:
    gateway, path = stack.gateway, config.model.model_path
    # Not the folder: it is private, and clients would have to know it.
    gateway.service = replace(gateway.service, model_name=Path(path).name)
    model = config.model
    metrics = Metrics(lambda: stack.engine.version, lambda: live.count)
    live = LiveSessions(
        gateway,
        store,
        names=(path, config.name),
        defaults=SamplingDefaults(
            temperature=model.temperature,
            top_p=model.top_p,
            top_k=model.top_k,
            max_tokens=model.max_response_tokens,
        ),
        limits=SessionLimits(config.tuner.max_calls, config.tuner.max_tokens),
        header=config.tuner.serving.session_header,
        redact=redact,
        noted=metrics.noted,
    )
    models = ServedFromTheStart(stack.engine.version)
    return Server(config, directory, stack, store, live, models, admin_key, metrics)


@asynccontextmanager
async def _open(server: Server, host: str, port: int) -> AsyncIterator[None]:
    """Keep the port open while the block runs."""
    settings = server.config.tuner.serving
    keys = ApiKeys(server.store, server.admin_key)
    rates = Rates(settings.requests_per_minute)
    front = Front(
        server.stack.gateway,
        server.live,
        keys=keys,
        rates=rates,
        metrics=server.metrics,
        header=settings.session_header,
        log=settings.log,
    )
    opening = Opening(
        host,
        port,
        names=frozenset(name.lower() for name in settings.allowed_hosts),
        max_body_bytes=settings.max_body_bytes,
        beside=server.app(keys, rates),
        patience=_PATIENCE,
    )
    try:
        server.door = HttpDoor(front, asyncio.get_running_loop(), opening)
    except OSError as error:
        raise ConfigError(f"--host {host} --port {port}: {error.strerror or error}") from error
    tidying = asyncio.ensure_future(_tidying(server))
    try:
        yield
    finally:
        tidying.cancel()
        await server.door.aclose()


async def _tidying(server: Server) -> None:
    while True:
        await asyncio.sleep(_TIDY_SECONDS)
        try:
            await server.tidy()
        except Exception:  # e.g. a full disk: the next attempt may succeed
            logger.exception("the store could not be tidied")


async def _until_stopped(
    server: AbstractAsyncContextManager[Server], announce: Callable[[Server], None]
) -> None:
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    async with server as running:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stopped.set)
        announce(running)
        await stopped.wait()
        for number in (signal.SIGINT, signal.SIGTERM):  # a second signal does not wait
            with suppress(ValueError):
                loop.remove_signal_handler(number)
