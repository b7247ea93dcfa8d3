"""A recorded prompt with another system prompt is the one that an agent with it would have had."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.gateway.drift import USER, Scripted, ask, gateway_of, letters, merging
from tests.gateway.families import TEMPLATES
from tests.gateway.template_matrix import speech_of, spelled
from tests.kit.examples import grid
from tests.kit.toy import ADD_TOOL, TEMPLATE, tokenizer
from tuner.errors import ConfigError
from tuner.gateway import ChatRenderer, Gateway
from tuner.gateway.families.renderer import SystemPrompt
from tuner.traces import Call

PROMPT = "Think hard.\nBe brief."
SURE = {"role": "user", "content": "Sure?"}
REAL = [f"real/{file.stem}" for file in sorted((TEMPLATES / "real").glob("*.jinja"))]
PARSERS = {
    "qwen2_5": "hermes",
    "qwen3": "hermes",
    "qwen3_5": "qwen3_coder",
    "llama3": "llama3_json",
    "mistral_v3": "mistral",
    "mistral_v11": "mistral",
    "mistral_v13": "mistral",
    "deepseek_v3": "deepseek_v3",
    "gpt_oss": "openai",
}


def renderer_of(name: str) -> ChatRenderer:
    template = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    return ChatRenderer(
        speech_of(template, merging),
        chat_template=template,
        tool_call_parser=PARSERS.get(name, "none"),
        reasoning_parser="none",
    )


async def calls_of(renderer: ChatRenderer, system: str | None, **fields: Any) -> tuple[Call, ...]:
    """Two turns of an agent with this system prompt, whose model writes letter by letter."""
    end = "".join(map(renderer.special_tokens.text, renderer.turn_ends[:1]))
    said = [spelled(renderer, f"answer {number}{end}") for number in ("one", "two")]
    session = Gateway(Scripted(*said), renderer, model_name="tiny").open_session("r")
    messages: list[Any] = [] if system is None else [{"role": "system", "content": system}]
    messages.append(USER)
    messages += [await ask(session, messages, **fields), SURE]
    await ask(session, messages, **fields)
    return session.calls


@pytest.mark.parametrize("own", [None, "I add."])
@pytest.mark.parametrize("fields", [{}, {"tools": [ADD_TOOL]}], ids=["plain", "tools"])
@grid("name", [*PARSERS, *REAL], quick=5)
async def test_the_teacher_reads_what_an_agent_with_the_prompt_would_have_sent(name, fields, own):
    renderer = renderer_of(name)
    exchanged = SystemPrompt(renderer, PROMPT, limit=10_000)
    recorded = await calls_of(renderer, own, **fields)
    wanted = await calls_of(renderer, PROMPT, **fields)
    found = [exchanged(call) for call in recorded]
    assert found[0] == wanted[0].prompt_ids != recorded[0].prompt_ids
    if name in ("mistral_v3", "real/mistralai-Mistral-Nemo-Instruct-2407"):
        # These write the system prompt into the last question, behind what was sampled.
        assert found[1] == "prompt_has_no_place"
    else:
        assert found[1] == wanted[1].prompt_ids


async def test_sampled_ids_stay_as_they_were():
    gateway = gateway_of(letters("the answer"))
    session = gateway.open_session("r")
    answer = await ask(session, [USER])
    await ask(session, [USER, answer, SURE])
    first, second = session.calls
    found = SystemPrompt(gateway.renderer, PROMPT, limit=10_000)(second)
    assert second.reused_ids == len(first.prompt_ids) + len(first.completion_ids)
    assert found[-len(second.prompt_ids) :] == second.prompt_ids
    assert letters("the answer") != tuple(merging().encode("the answer<|im_end|>"))


async def test_tools_that_a_request_does_not_show_are_not_in_the_teachers_prompt_either():
    renderer = renderer_of("qwen3")
    hidden = {"tools": [ADD_TOOL], "tool_choice": "none"}
    exchanged = SystemPrompt(renderer, PROMPT, limit=10_000)
    recorded = await calls_of(renderer, None, **hidden)
    wanted = await calls_of(renderer, PROMPT, **hidden)
    assert [exchanged(call) for call in recorded] == [call.prompt_ids for call in wanted]


async def test_a_call_that_would_be_too_long_or_has_no_messages_says_so():
    gateway = gateway_of(letters("yes"))
    session = gateway.open_session("r")
    await ask(session, [USER])
    client = session.async_client()
    await client.completions.create(model="tiny", prompt="Once upon a time")
    chat, text = session.calls
    head = len(tokenizer().encode(f"<|im_start|>system\n{PROMPT}<|im_end|>\n"))
    whole = head + len(chat.prompt_ids) + len(chat.completion_ids)
    assert len(SystemPrompt(gateway.renderer, PROMPT, limit=whole)(chat)) == head + len(
        chat.prompt_ids
    )
    assert SystemPrompt(gateway.renderer, PROMPT, limit=whole - 1)(chat) == "prompt_too_long"
    exchanged = SystemPrompt(gateway.renderer, PROMPT, limit=10_000)
    assert exchanged(text) == "prompt_has_no_place"
    # Not what the template makes of its messages.
    assert exchanged(replace(chat, prompt_ids=text.prompt_ids)) == "prompt_has_no_place"


def test_a_prompt_that_the_model_cannot_be_given_is_refused():
    with pytest.raises(ConfigError, match=r"would change nothing.*set model.chat_template_path"):
        SystemPrompt(renderer_of("deepseek_v31"), PROMPT, limit=10_000)
    without = TEMPLATE.replace(
        "{%- if tools %}",
        "{{- raise_exception('no') if messages[0].role == 'system' }}{%- if tools %}",
        1,
    )
    with pytest.raises(ConfigError, match="has no system message"):
        SystemPrompt(ChatRenderer(tokenizer(), chat_template=without), PROMPT, limit=10_000)
    renderer = ChatRenderer(tokenizer(), chat_template=TEMPLATE)
    with pytest.raises(ConfigError, match=r"has 811 tokens.*context of 800: shorten it"):
        SystemPrompt(renderer, "Be brief. " * 80, limit=800)
