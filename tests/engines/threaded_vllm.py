"""A started vLLM server whose process is a thread of this one, so that a test can look into it."""

from __future__ import annotations

import socket
import threading
from typing import Any

import uvicorn

from tuner.engines.vllm.client import VllmProcess
from tuner.engines.vllm.server import VllmHost, make_app


class ThreadedVllm(VllmProcess):
    """Everything but the process is what a run has: client, HTTP and server.

    Attributes:
        host: Has vLLM.
    """

    host: VllmHost
    _server: uvicorn.Server | None = None

    def _launch(self, door: socket.socket) -> Any:
        self.host = VllmHost()
        app = make_app(self.host, self._headers["authorization"].removeprefix("Bearer "))
        config = uvicorn.Config(app, lifespan="off", log_level="warning", access_log=False)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([door.dup()],), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread, and vLLM."""
        if self._server is not None:
            self._server.should_exit = self._server.force_exit = True
            self._thread.join(30)
            self.host.close()
            self._server = None
