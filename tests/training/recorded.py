"""Traces of a tool agent, recorded through the gateway from a small model."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from tests.kit import toy
from tests.kit.builders import trace
from tests.training.exact import model_of
from tuner.engines.grammar import Grammars
from tuner.engines.transformers.engine import TransformersEngine
from tuner.gateway import ChatRenderer, Gateway, SamplingDefaults, Session
from tuner.traces import Trace

TINY_MATH = Path(__file__).parents[2] / "models" / "tiny_math"
# Names of tools and no descriptions: with one token per byte these would be most of a prompt.
TEMPLATE = toy.TEMPLATE.replace("tool | tojson", "tool.function.name")
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"enum": [3, 30]}, "b": {"enum": [4, 40]}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}


@dataclass(frozen=True)
class Recorded:
    """Traces with their rewards, and what the model that made them was served with."""

    model: PreTrainedModel
    traces: list[Trace]
    grammars: Grammars


async def _agent(session: Session, question: str) -> None:
    """Calls a tool, which is held to its form; answers twice at once; asks a sub-agent; and goes
    on from a history that leaves the tool out and has another question."""
    client = session.async_client()

    async def ask(messages: list[Any], **fields: Any) -> list[Any]:
        quiet = {"chat_template_kwargs": {"enable_thinking": False}}
        reply = await client.chat.completions.create(
            model="tiny", messages=messages, extra_body=quiet, **fields
        )
        return [choice.message for choice in reply.choices]

    messages: list[Any] = [{"role": "user", "content": question}]
    tools = {"tools": [ADD], "parallel_tool_calls": False}
    (asked,) = await ask(messages, **tools, tool_choice="required", max_tokens=200, temperature=0.4)
    (call,) = asked.tool_calls
    total = sum(json.loads(call.function.arguments).values())
    messages += [
        asked.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": str(total)},
    ]
    answers = await ask(messages, **tools, n=2, temperature=0.7, top_p=0.9)
    await ask([{"role": "user", "content": f"Is it {total}?"}], temperature=1.3)
    await ask(
        [
            {"role": "user", "content": f"{question} Be short."},
            {"role": "assistant", "content": answers[0].content or "no"},
            {"role": "user", "content": "Sure?"},
        ],
        temperature=1.0,
    )


async def _record(model: PreTrainedModel, tokenizer: Any, template: str | None) -> Recorded:
    engine = TransformersEngine(model, tokenizer, max_model_len=512)
    renderer = ChatRenderer(tokenizer, chat_template=template, reasoning_parser="none")
    gateway = Gateway(engine, renderer, model_name="tiny")
    sessions = [
        gateway.open_session(f"r{i}", seed=i, defaults=SamplingDefaults(max_tokens=6))
        for i in range(2)
    ]
    await asyncio.gather(*(_agent(session, "3 and 4?") for session in sessions))
    traces = [
        trace(0, i, session.seal(), reward=float(i % 2)) for i, session in enumerate(sessions)
    ]
    await gateway.aclose()
    await engine.close()
    return Recorded(model, traces, engine.grammars)


@cache
def recorded(kind: str) -> Recorded:
    """Two rollouts of one task by the model `tiny_math`, or by a random one of this kind."""
    if kind == "tiny_math":
        model = AutoModelForCausalLM.from_pretrained(TINY_MATH).eval()
        tokenizer = AutoTokenizer.from_pretrained(TINY_MATH)
    else:
        model, tokenizer = model_of(kind), toy.tokenizer()
    return asyncio.run(_record(model, tokenizer, None if kind == "tiny_math" else TEMPLATE))
