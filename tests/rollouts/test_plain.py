"""The chat model without a framework."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import openai

from tests.kit.toy import ADD_TOOL, StubEngine, gateway_of
from tuner.rollouts.chat_models import chat_model

USER = [{"role": "user", "content": "2 + 40?"}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 40}}\n</tool_call>'


async def test_conversation_with_a_tool_using_the_clients_own_objects() -> None:
    async with gateway_of(StubEngine([CALL, "42"])) as gateway:
        session = gateway.open_session("r")
        model = chat_model(session, kind="plain")
        message = await model(USER, tools=[ADD_TOOL], temperature=0.5)
        (tool_call,) = message.tool_calls
        result = {"role": "tool", "tool_call_id": tool_call.id, "content": "42"}
        answer = await model([*USER, message, result], tools=[ADD_TOOL])
        assert answer.content == "42"
        first, second = session.calls
        assert first.sampling.temperature == 0.5
        assert second.prompt_ids[: len(first.prompt_ids)] == first.prompt_ids


async def test_client_and_http_way_in_belong_to_the_same_session() -> None:
    async with gateway_of(StubEngine()) as gateway:
        session = gateway.open_session("r")
        model = chat_model(session, kind="plain")
        await model.client.chat.completions.create(model=model.model_name, messages=USER)

        def other_framework() -> None:
            client = openai.OpenAI(base_url=model.base_url, api_key=model.api_key)
            client.chat.completions.create(model=model.model_name, messages=USER)

        await asyncio.to_thread(other_framework)
        assert len(session.calls) == 2


async def test_the_clients_other_ways_to_call_work_in_process() -> None:
    async with gateway_of(StubEngine()) as gateway:
        session = gateway.open_session("r")
        client = chat_model(session, kind="plain").client
        chat = client.chat.completions
        raw = await chat.with_raw_response.create(model="tiny", messages=USER)
        assert raw.status_code == 200
        assert raw.parse().choices[0].message.content == "ok"
        tuples = await chat.create(model="tiny", messages=tuple(USER))
        omitted = await chat.create(
            model="tiny", messages=USER, tools=openai.omit, timeout=None, extra_query={"a": "b"}
        )
        patient = await client.with_options(timeout=30, max_retries=1).chat.completions.create(
            model="tiny", messages=USER
        )
        assert {a.choices[0].message.content for a in (tuples, omitted, patient)} == {"ok"}
        assert len(session.calls) == 4


def test_importing_chat_models_and_gateway_loads_nothing_heavy() -> None:
    script = (
        "import sys, tuner.rollouts.chat_models, tuner.gateway\n"
        "print([n for n in ('torch', 'transformers', 'agentscope', 'openai', 'uvicorn') "
        "if n in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
