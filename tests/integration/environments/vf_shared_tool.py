"""A server of tools, which verifiers starts as a program of its own."""

from __future__ import annotations

import os

import verifiers.v1 as vf


class Shared(vf.Toolset[vf.SharedToolsetConfig, vf.State]):
    @vf.tool
    async def shared_process(self) -> str:
        """The process of this server."""
        return str(os.getpid())


if __name__ == "__main__":
    Shared.run()
