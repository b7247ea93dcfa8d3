"""A taskset of verifiers': word problems, the reward for the right number, and a plain chat.

It is a package as verifiers' hub has them: its id is the module's name, and `__all__` exports one
`Taskset` and one `Harness`, which is then the taskset's default.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from tuner.rewards import final_answer, math_equal

__all__ = ["Chat", "WordProblems"]

DATA = Path(__file__).resolve().parent.parent / "gsm8k" / "data"


class Problem(vf.TaskData):
    """One row."""

    answer: str


class ProblemTask(vf.Task[Problem]):
    """A word problem and what an answer to it is worth."""

    @vf.reward(weight=1.0)
    async def correct(self, trace: vf.Trace) -> float:
        """1 if the reply ends in the right number."""
        return math_equal(final_answer(trace.last_reply), final_answer(self.data.answer))

    @vf.metric
    async def characters(self, trace: vf.Trace) -> float:
        """Length of the last reply."""
        return len(trace.last_reply)


class WordProblems(vf.Taskset[ProblemTask, vf.TasksetConfig]):
    """The problems of examples/gsm8k: those to train on, then those held out."""

    def load(self) -> Iterable[ProblemTask]:
        for split in ("train", "test"):
            for line in (DATA / f"{split}.jsonl").read_text(encoding="utf-8").splitlines():
                row = json.loads(line)
                problem = Problem(id=split, prompt=row["question"], answer=row["answer"])
                yield ProblemTask(problem, self.config.task)


class ChatConfig(vf.HarnessConfig):
    """Nothing besides what every harness has."""


class Chat(vf.Harness[ChatConfig]):
    """One question, one answer, in this process; verifiers' `null` is a program that does more."""

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
        """Ask the model that verifiers' interception server passes on to."""
        _, prompt = self.resolve_prompt(data)
        messages: list[Any] = [{"role": "user", "content": prompt}]
        # It is on this machine, and certificates take longer to read than the model to answer.
        http = DefaultAsyncHttpxClient(verify=False)
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, http_client=http) as client:
            await client.chat.completions.create(model=ctx.model, messages=messages)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
