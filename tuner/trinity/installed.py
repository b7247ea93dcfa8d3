"""Whether Trinity-RFT is here."""

from __future__ import annotations

from importlib import metadata

from tuner.errors import MissingDependencyError

SUPPORTED = "0.6"
_TOO_NEW_PEFT = (0, 21)


def require_trinity() -> None:
    """Refuse to go on without a Trinity-RFT that this backend was written for.

    Raises:
        MissingDependencyError: It is not installed, in another version, or does not import.
    """
    how = 'pip install "agentscope-tuner[trinity]"'
    try:
        version = metadata.version("trinity-rft")
    except metadata.PackageNotFoundError:
        raise MissingDependencyError(
            "this run is for Trinity-RFT (tuner.backend is trinity, or `cluster` declares more "
            f"than one GPU), which is not installed: {how}, or set tuner.backend to local"
        ) from None
    if not version.startswith(f"{SUPPORTED}."):
        raise MissingDependencyError(
            f"this version of tuner works with Trinity-RFT {SUPPORTED}, and {version} is "
            f"installed: {how}"
        )
    try:
        import trinity.common.config  # noqa: F401  # whether it can be
    except Exception as error:
        raise MissingDependencyError(
            f"Trinity-RFT {version} is installed, but importing it fails: "
            f"{type(error).__name__}: {error}"
        ) from error


def refuse_peft_without_weights() -> None:
    """Refuse to train an adapter with a peft whose adapters verl saves without weights.

    Raises:
        MissingDependencyError: It is such a one.
    """
    try:
        version = metadata.version("peft")
    except metadata.PackageNotFoundError:
        version = None
    if version is None or tuple(int(part) for part in version.split(".")[:2]) >= _TOO_NEW_PEFT:
        found = "it is not installed" if version is None else f"{version} is installed"
        raise MissingDependencyError(
            "model.lora_configs trains an adapter, which Trinity-RFT 0.6 saves with peft: with "
            f"0.21 it would have no weights, and {found}; pip install 'peft>=0.18,<0.21'"
        )
