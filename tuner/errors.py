"""The errors of `tuner`. Each says what was found, where, and how to fix it."""

import errno
import logging
import os
import pathlib
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[1]


def pip_install(extra: str) -> str:
    """The command that installs an extra: for the checkout, if this is one, else for the wheel."""
    if (_ROOT / "pyproject.toml").is_file():
        return f"pip install -e '{_ROOT}[{extra}]'"
    return f"pip install 'agentscope-tuner[{extra}]'"


@contextmanager
def quiet_library(library: str) -> Iterator[None]:
    """Hide Python's warnings, and those that the library logs, while the block runs."""
    log = logging.getLogger(library)
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)


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


@contextmanager
def importing(what: str, extra: str) -> Iterator[None]:
    """Raise MissingDependencyError, which says what is needed, if an import in the block fails."""
    try:
        yield
    except (ImportError, SyntaxError) as error:  # an older Python cannot read some libraries
        raise MissingDependencyError(
            f"{what}, which cannot be imported ({error}): {pip_install(extra)}"
        ) from error


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


# What the operating system refuses, by error number, and what to do about it.
DISK_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "make room there"),
    **dict.fromkeys((errno.EACCES, errno.EPERM), "let this user read and write there"),
    errno.EROFS: "make it writable, or give another folder",
    errno.EIO: "look after the disk",
}
_MEMORY = "free memory, or raise the limit of this process (ulimit -v)"
# Those of the system, which name no file.
_SYSTEM_REMEDIES = {
    **{number: DISK_REMEDIES[number] for number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS)},
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "raise the limit of open files (ulimit -n)"),
    errno.ENOMEM: _MEMORY,
}
_NAMES = (errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EEXIST)
_PATH_REMEDIES = {
    **DISK_REMEDIES,
    **_SYSTEM_REMEDIES,
    **dict.fromkeys(_NAMES, "give another path"),
}


@contextmanager
def system_faults(near: str | Path | None = None) -> Iterator[None]:
    """Turn what the operating system refuses about files and memory into TunerErrors; also a
    decorator. Other errors are left as they are.

    Args:
        near: Where files are written, for an error that names none.
    """
    try:
        yield
    except (OSError, RuntimeError, MemoryError, ImportError, SystemError) as error:
        if isinstance(error, TunerError) or (said := _refused(error, near)) is None:
            raise
        raise TunerError(said) from error


def _refused(error: Exception, near: str | Path | None) -> str | None:
    """Message: what the system refused, where, and what to do; None for other errors."""
    if _short_of_memory(error):
        return f"there is too little memory ({type(error).__name__}: {error}); {_MEMORY}"
    if isinstance(error, RuntimeError):
        return f"a path cannot be used: {error}; give another" if _of_pathlib(error) else None
    if not isinstance(error, OSError):
        return None
    if error.errno == errno.ENOENT and error.filename is None and _nowhere():
        return "the working directory does not exist any more: change to one that does (cd)"
    number = error.errno or 0
    if isinstance(error.filename, str | os.PathLike):
        remedy = _PATH_REMEDIES.get(number)
        return remedy and f"{os.fspath(error.filename)}: {error.strerror}; {remedy}"
    remedy = _SYSTEM_REMEDIES.get(number)
    at = f"a file, most likely in {near}: " if near is not None else ""
    return remedy and f"{at}{error.strerror}; {remedy}"


def _short_of_memory(error: Exception) -> bool:
    import resource

    if isinstance(error, SystemError):  # libraries that do not check what they get
        return resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
    return isinstance(error, MemoryError) or "failed to map segment" in str(error)


def _of_pathlib(error: RuntimeError) -> bool:
    """Whether a path is a loop of links, or in an unknown user's home."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    return place is not None and place.tb_frame.f_code.co_filename == pathlib.__file__


def _nowhere() -> bool:
    try:
        return not os.getcwd()
    except FileNotFoundError:
        return True
