"""A taskset and a harness of verifiers', whose tasks say what happens to them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI

__all__ = ["Cases", "OneQuestion"]


class Case(vf.TaskData):
    happens: str = "nothing"


class CaseTask(vf.Task[Case]):
    @vf.reward(weight=2.0)
    async def long(self, trace: vf.Trace) -> float:
        if self.data.happens == "the reward is None":
            return None  # type: ignore[return-value]
        if self.data.happens == "the reward is NaN":
            return float("nan")
        if self.data.happens == "the reward raises":
            raise ZeroDivisionError("no reward for this")
        if self.data.happens == "scoring never ends":
            await asyncio.sleep(3600)
        return float(len(trace.last_reply) % 5)

    @vf.reward(weight=0.5)
    async def always(self) -> float:
        return 1.0

    @vf.metric
    async def letters(self, trace: vf.Trace) -> float:
        return len(trace.last_reply)

    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        if self.data.happens == "setup raises":
            raise OSError("no room")


class Cases(vf.Taskset[CaseTask, vf.TasksetConfig]):
    def load(self) -> Iterable[CaseTask]:
        for index in range(8):
            yield CaseTask(Case(prompt=f"case {index}"), self.config.task)


class OneQuestionConfig(vf.HarnessConfig):
    pass


class OneQuestion(vf.Harness[OneQuestionConfig]):
    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

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
        happens = trace.task.data.happens
        messages: list[Any] = [{"role": "user", "content": data.prompt}]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            for _ in range(3 if happens == "three turns" else 1):
                completion = await client.chat.completions.create(
                    model=ctx.model, messages=messages
                )
                answer = completion.choices[0].message.content or ""
                messages += [
                    {"role": "assistant", "content": answer},
                    {"role": "user", "content": "Go on."},
                ]
        if happens == "the program never ends":
            await runtime.run(["sh", "-c", "sleep 3600 & sleep 3600"], {})
        if happens == "the program fails":
            return await runtime.run(["sh", "-c", "echo out of luck >&2; exit 3"], {})
        if happens == "the program looks around":
            found = await runtime.run(["env"], {})
            trace.info["keys"] = "API_KEY" in found.stdout
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
