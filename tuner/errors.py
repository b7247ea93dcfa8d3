"""The errors of `tuner`. Each says what was found, where, and how to fix it."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[1]


def pip_install(extra: str) -> str:
    """The command that installs an extra: for the checkout, if this is one, else for the wheel."""
    if (_ROOT / "pyproject.toml").is_file():
        return f"pip install -e '{_ROOT}[{extra}]'"
    return f"pip install 'agentscope-tuner[{extra}]'"


def debugging() -> bool:
    """Whether the variable TUNER_DEBUG asks for whole tracebacks."""
    return os.environ.get("TUNER_DEBUG", "") not in ("", "0")


def problem_text(detail: Mapping[str, Any]) -> str:
    """The text of a problem that pydantic found, without its prefix of those that we raise."""
    return str(detail["msg"]).removeprefix("Value error, ")


class TunerError(Exception):
    """Base of every error that `tuner` raises on purpose."""


class ConfigError(TunerError, ValueError):
    """A setting is unknown, unsupported, of the wrong type or in conflict with another."""


class DatasetError(TunerError, ValueError):
    """A dataset, split or field is missing, empty or too small for one step."""


class FunctionError(TunerError, TypeError):
    """The workflow or judge cannot be called, or returned the wrong type."""


class ModelLoadError(TunerError):
    """A model path does not exist or holds something that cannot be loaded."""


class MissingDependencyError(TunerError, ImportError):
    """A library is missing, or has an unsupported version; names the extra."""


class ContextLengthError(TunerError, ValueError):
    """A prompt leaves no room for an answer within `model.max_model_len`."""


class RewardError(TunerError, RuntimeError):
    """A reward function failed, or its process died. The rollout is a `judge_error`."""


class ProgramError(TunerError, RuntimeError):
    """A program failed, or was stopped at a limit."""


class SandboxError(ProgramError):
    """A program could not be started within limits."""


class RewardTimeout(RewardError):
    """A reward function exceeded its time limit. The rollout is a `judge_timeout`."""


class ProofError(TunerError, ValueError):
    """A proof is not possible: with this plan, or with rewards outside its range."""


class TrainingError(TunerError, RuntimeError):
    """Training cannot continue; the message is the diagnosis."""


class WorkerError(TunerError, RuntimeError):
    """A worker process for the workflow and the judge cannot be started (`tuner.workers`)."""


class ServingError(TunerError, RuntimeError):
    """A server of `tuner serve` rejected a request, or could not be reached.

    Attributes:
        message: The sentence for a person; the server's, if it answered.
        status: HTTP status; None if there was no answer or no request.
        code: A word for programs ("unreachable", "invalid_api_key"), or None.
    """

    def __init__(self, message: str, *, status: int | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code
