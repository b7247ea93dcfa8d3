"""Engines over vLLM with the toy of the conformance suite."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from tests.engines.conformance import CONTEXT
from tests.engines.models import VOCABULARY, make_tokenizer
from tuner.engines.remote import ServedEngine
from tuner.engines.servers import TokenServer
from tuner.engines.vllm.core import VllmSettings, check_for_vllm

BLOCK = 32
"""Tokens of a block of keys and values on a CPU."""
CORE_DIED = r"(?s)EngineDeadError|it ended with -?\d+\).*last lines of its log:"
"""A server whose vLLM is killed says so, unless it ends too: then its log does."""


def settings(folder: Path, **changes: Any) -> VllmSettings:
    """How the toy in `folder` is served."""
    given: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": CONTEXT,
        "max_slots": 16,
        "end_ids": (make_tokenizer().eos_token_id,),
        "tokenizer": str(folder),
        "enforce_eager": True,
    }
    return VllmSettings(**{**given, **changes})


def saver(model: Any) -> Callable[[Path], None]:
    """Writes a model with its tokenizer, which vLLM reads for grammars."""

    def save(folder: Path) -> None:
        model.save_pretrained(folder)
        make_tokenizer().save_pretrained(folder)

    return save


def engine(
    servers: Sequence[TokenServer], save: Callable[[Path], None], folder: Path, **options: Any
) -> ServedEngine:
    """The engine over these servers."""
    given: dict[str, Any] = {
        "tokenizer": make_tokenizer(),
        "end_ids": frozenset({make_tokenizer().eos_token_id}),
        "vocabulary": VOCABULARY,
        "max_model_len": CONTEXT,
        "grammars": True,
        "every_setting": True,
        "check": check_for_vllm,
        "max_restarts": 10,
    }
    return ServedEngine(servers, save=save, folder=folder, **{**given, **options})


def kill_engine_core(server: int | None = None) -> None:
    """As vLLM's own process may die that a server has for it; None: a server in this process."""
    for child in psutil.Process(server).children():
        with suppress(psutil.NoSuchProcess):  # dead, and perhaps not yet waited for
            if "EngineCore" in child.name() or "EngineCore" in " ".join(child.cmdline()):
                child.kill()
