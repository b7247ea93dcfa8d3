"""A server of tools, which verifiers starts as a program of its own."""

from __future__ import annotations

import os

import verifiers.v1 as vf


class Own(vf.Toolset[vf.ToolsetConfig, vf.State]):
    @vf.tool
    async def own_process(self) -> str:
        """The process of this server."""
        return str(os.getpid())


if __name__ == "__main__":
    Own.run()
