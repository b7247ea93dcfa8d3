"""A taskset of verifiers' whose tasks share a server of tools, and have one each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI
from verifiers.v1.harnesses.utils.mcp import mcp_client
from vf_own_tool import Own
from vf_shared_tool import Shared

__all__ = ["AsksTools", "WithTools"]


class ToolTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def called(self, trace: vf.Trace) -> float:
        return float(len(trace.info)) + len(trace.last_reply) % 3

    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [Own(vf.ToolsetConfig())]


class WithTools(vf.Taskset[ToolTask, vf.TasksetConfig]):
    def load(self) -> Iterable[ToolTask]:
        for index in range(4):
            yield ToolTask(vf.TaskData(prompt=f"task {index}"), self.config.task)

    @classmethod
    def toolsets(cls, config: vf.TasksetConfig) -> list[vf.Toolset]:
        return [Shared(vf.SharedToolsetConfig())]


class AsksToolsConfig(vf.HarnessConfig):
    pass


class AsksTools(vf.Harness[AsksToolsConfig]):
    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False
    SUPPORTS_MCP = True

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        for url in mcp_urls.values():
            async with mcp_client({"url": url}) as client:
                (tool,) = (await client.list_tools()).tools
                result = await client.call_tool(tool.name, {})
                trace.info[tool.name] = int(result.content[0].text)
        messages: list[Any] = [{"role": "user", "content": data.prompt}]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            await client.chat.completions.create(model=ctx.model, messages=messages)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
