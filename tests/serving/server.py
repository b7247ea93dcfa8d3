"""`tuner serve` as a process that has imported what it needs already."""

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.kit import forked
from tuner import Client

ADMIN_KEY = "sk-admin-of-a-test"


def serve(config: Path, port: int, *overrides: str, admin_key: str = ADMIN_KEY) -> None:
    """What the command does, in this process."""
    from tuner import cli

    os.environ["TUNER_ADMIN_KEY"] = admin_key
    sys.argv = ["tuner", "serve", str(config), *overrides, "--port", str(port)]
    cli.main()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def served(config: Path, *overrides: str) -> Iterator[str]:
    """Where a server listens while the block runs; it is killed then."""
    port = free_port()
    process = forked.begin(serve, config, port, *overrides)
    url = f"http://127.0.0.1:{port}"
    try:
        with Client(url, key=ADMIN_KEY, patience=120) as client:
            client.models()  # once it is there
        yield url
    finally:
        process.kill()
        process.join()
