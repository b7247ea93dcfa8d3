"""Chat completions through the real OpenAI client, in process."""

from __future__ import annotations

from datetime import date
from typing import Any

import openai
import pytest

from tests.engines.models import until
from tests.kit.toy import (
    ADD_TOOL,
    TEMPLATE,
    StubEngine,
    gateway_of,
    ids_of,
    text_of,
    tokenizer,
)
from tuner.engines.base import Generation, SamplingParams
from tuner.errors import ConfigError, ContextLengthError
from tuner.gateway import ChatRenderer, SamplingDefaults, Session

USER = [{"role": "user", "content": "hi"}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


async def ask(session: Session, messages: list | None = None, **fields: object):
    client = session.async_client()
    return await client.chat.completions.create(model="tiny", messages=messages or USER, **fields)


async def test_completion_is_a_real_openai_answer_and_a_recorded_call() -> None:
    engine = StubEngine(["  Hello. "])
    async with gateway_of(engine) as gateway:
        session = gateway.open_session("r", seed=5)
        answer = await ask(session)
        choice = answer.choices[0]
        assert choice.message.content == "  Hello. "
        assert choice.message.tool_calls is None
        assert choice.finish_reason == "stop"
        assert answer.model == "tiny"
        (call,) = session.calls
        assert call.id == f"{answer.id}-0"
        assert call.messages == USER
        assert call.response["content"] == "  Hello. "
        assert call.completion_ids == (*ids_of("  Hello. "), *ids_of("<|im_end|>"))
        assert call.logprobs == (-0.25,) * len(call.completion_ids)
        assert call.versions == (3,) * len(call.completion_ids)
        assert call.sampling == engine.requests[0][1]
        assert text_of(call.prompt_ids).endswith("<|im_start|>assistant\n")
        assert answer.usage.prompt_tokens == len(call.prompt_ids)
        assert answer.usage.completion_tokens == len(call.completion_ids)
        assert answer.usage.prompt_tokens_details.cached_tokens == 7
        assert call.cached_tokens == 7


async def test_parts_and_strings_render_the_same_prompt() -> None:
    async with gateway_of(StubEngine()) as gateway:
        session = gateway.open_session("r")
        await ask(session, [{"role": "user", "content": "a\nb"}])
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        await ask(session, [{"role": "user", "name": "bob", "content": parts}])
        first, second = session.calls
        assert first.prompt_ids == second.prompt_ids


async def test_every_role_reaches_the_template() -> None:
    async with gateway_of(StubEngine()) as gateway:
        session = gateway.open_session("r")
        call = {"name": "add", "arguments": '{"a":1,"b":2}'}
        await ask(
            session,
            [
                {"role": "developer", "content": "SYS"},
                {"role": "user", "content": "U"},
                {
                    "role": "assistant",
                    "content": None,
                    "reasoning_content": "WHY",
                    "tool_calls": [{"id": "c", "type": "function", "function": call}],
                },
                {"role": "tool", "tool_call_id": "c", "content": "3"},
            ],
            tools=[ADD_TOOL],
        )
        prompt = text_of(session.calls[0].prompt_ids)
        assert prompt.startswith("<|im_start|>system\nSYS\n\n# Tools")
        assert '{"name": "add", "arguments": {"a": 1, "b": 2}}' in prompt
        assert "<think>\nWHY\n</think>" in prompt
        assert "<tool_response>\n3\n</tool_response>" in prompt


async def test_tool_calls_have_unique_ids_and_the_models_own_argument_text() -> None:
    other = CALL.replace('{"a": 1, "b": 2}', '{"a":1,  "b":2}')
    text = f"Sum.\n{CALL}\n{other}"
    async with gateway_of(StubEngine([text])) as gateway:
        answer = await ask(gateway.open_session("r"), tools=[ADD_TOOL])
        message = answer.choices[0].message
        assert message.content == "Sum."
        assert [call.function.arguments for call in message.tool_calls] == [
            '{"a": 1, "b": 2}',
            '{"a":1,  "b":2}',
        ]
        assert len({call.id for call in message.tool_calls}) == 2
        assert answer.choices[0].finish_reason == "tool_calls"


async def test_malformed_tool_call_is_returned_as_text_and_counted() -> None:
    text = 'Sum.\n<tool_call>\n{"name": "add", "arguments": {"a": 1,\n</tool_call>'
    async with gateway_of(StubEngine([text])) as gateway:
        session = gateway.open_session("r")
        answer = await ask(session, tools=[ADD_TOOL])
        assert answer.choices[0].message.content == text
        assert answer.choices[0].message.tool_calls is None
        assert answer.choices[0].finish_reason == "stop"
        assert session.calls[0].malformed_tool_calls == 1


async def test_tool_choice_none_hides_the_tools_and_reads_no_calls() -> None:
    async with gateway_of(StubEngine([CALL])) as gateway:
        session = gateway.open_session("r")
        answer = await ask(session, tools=[ADD_TOOL], tool_choice="none")
        assert answer.choices[0].message.content == CALL
        (call,) = session.calls
        assert "# Tools" not in text_of(call.prompt_ids)
        assert call.tools == [ADD_TOOL]


async def test_three_choices_are_three_calls_with_different_seeds() -> None:
    engine = StubEngine(["a", "b", "c"])
    async with gateway_of(engine) as gateway:
        session = gateway.open_session("r")
        answer = await ask(session, n=3)
        assert [choice.message.content for choice in answer.choices] == ["a", "b", "c"]
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert [call.id for call in session.calls] == [f"{answer.id}-{i}" for i in range(3)]
        assert len({call.sampling.seed for call in session.calls}) == 3
        assert len({call.prompt_ids for call in session.calls}) == 1


async def test_of_three_choices_the_first_has_the_seed_that_was_asked_for() -> None:
    async with gateway_of(StubEngine(["a", "b", "c"])) as gateway:
        session = gateway.open_session("r")
        await ask(session, n=3, seed=42)
        seeds = [call.sampling.seed for call in session.calls]
    assert seeds[0] == 42
    assert len(set(seeds)) == 3


async def test_one_failing_choice_cancels_the_others_and_commits_none() -> None:
    class OneFails(StubEngine):
        async def generate(self, prompt_ids, sampling, session, sink=None) -> Generation:
            if len(self.requests) == 2:
                raise ValueError("the third")
            return await super().generate(prompt_ids, sampling, session, sink)

    engine = OneFails()
    engine.gate.clear()
    async with gateway_of(engine) as gateway:
        session = gateway.open_session("r")
        with pytest.raises(openai.InternalServerError):
            await ask(session, n=3)
        await until(lambda: engine.waiting == 0)
        assert engine.cancelled == 2
        assert session.calls == ()


async def test_stop_string_is_cut_from_the_text_and_kept_in_the_ids() -> None:
    async with gateway_of(StubEngine(["one STOP two"])) as gateway:
        session = gateway.open_session("r")
        answer = await ask(session, stop=["STOP", "zzz"])
        assert answer.choices[0].message.content == "one "
        assert text_of(session.calls[0].completion_ids) == "one STOP"


async def test_request_settings_win_over_the_sessions_defaults() -> None:
    async with gateway_of(StubEngine()) as gateway:
        defaults = SamplingDefaults(temperature=0.7, top_p=0.9, top_k=20, max_tokens=11)
        session = gateway.open_session("r", defaults=defaults)
        await ask(session)
        await ask(
            session,
            temperature=0.2,
            top_p=0.5,
            max_completion_tokens=4,
            seed=42,
            extra_body={"top_k": 3},
        )
        first, second = (call.sampling for call in session.calls)
        assert (first.temperature, first.top_p, first.top_k, first.max_tokens) == (0.7, 0.9, 20, 11)
        assert second == SamplingParams(max_tokens=4, temperature=0.2, top_p=0.5, top_k=3, seed=42)


async def test_max_tokens_is_capped_to_the_room_in_the_context() -> None:
    async with gateway_of(StubEngine(["x" * 100], max_model_len=60)) as gateway:
        session = gateway.open_session("r")
        answer = await ask(session, max_tokens=10_000)
        (call,) = session.calls
        assert call.sampling.max_tokens == 60 - len(call.prompt_ids)
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage.total_tokens == 60


async def test_prompt_without_room_says_the_numbers_and_what_to_do() -> None:
    async with gateway_of(StubEngine(max_model_len=40)) as gateway:
        session = gateway.open_session("r")
        with pytest.raises(
            openai.BadRequestError, match=r"tokens.*context of 40.*max_model_len"
        ) as e:
            await ask(session, [{"role": "user", "content": "x" * 50}])
        assert e.value.code == "context_length_exceeded"


async def test_room_for_a_single_token_is_room() -> None:
    async with gateway_of(StubEngine()) as gateway:
        session = gateway.open_session("r")
        prompt_tokens = (await ask(session)).usage.prompt_tokens
    for max_model_len, fits in ((prompt_tokens, False), (prompt_tokens + 1, True)):
        async with gateway_of(StubEngine(max_model_len=max_model_len)) as gateway:
            session = gateway.open_session("r")
            if fits:
                assert (await ask(session)).usage.completion_tokens == 1
            else:
                with pytest.raises(openai.BadRequestError, match="no room"):
                    await ask(session)


async def test_the_engines_context_error_is_the_callers_too() -> None:
    async with gateway_of(StubEngine([ContextLengthError("the prompt has 9 tokens")])) as gateway:
        session = gateway.open_session("r")
        with pytest.raises(openai.BadRequestError, match="the prompt has 9 tokens") as e:
            await ask(session)
        assert e.value.code == "context_length_exceeded"
        assert session.errors == []


async def test_engine_failure_is_a_500_that_stays_on_the_session(caplog) -> None:
    cause = RuntimeError("out of memory")
    async with gateway_of(StubEngine([cause])) as gateway:
        session = gateway.open_session("r")
        with pytest.raises(openai.InternalServerError, match="RuntimeError: out of memory"):
            await ask(session)
        assert session.errors == [cause]
        assert session.calls == ()
        assert "out of memory" in caplog.text


async def test_logprobs_name_each_token_with_its_bytes_and_alternatives() -> None:
    async with gateway_of(StubEngine(["né"])) as gateway:
        session = gateway.open_session("r")
        answer = await ask(session, logprobs=True, top_logprobs=2)
        content = answer.choices[0].logprobs.content
        assert [entry.bytes for entry in content] == [[110], [0xC3], [0xA9], list(b"<|im_end|>")]
        assert content[0].token == "n"
        assert {entry.logprob for entry in content} == {-0.25}
        assert [len(entry.top_logprobs) for entry in content] == [2] * 4
        assert content[0].top_logprobs[0].logprob == -0.5


async def test_token_ids_are_returned_when_asked_for() -> None:
    async with gateway_of(StubEngine()) as gateway:
        session = gateway.open_session("r")
        answer = await ask(session, extra_body={"return_token_ids": True})
        (call,) = session.calls
        assert tuple(answer.prompt_token_ids) == call.prompt_ids
        assert tuple(answer.choices[0].token_ids) == call.completion_ids


async def test_template_keywords_of_a_request_win_over_the_runs() -> None:
    async with gateway_of(StubEngine(), enable_thinking=False) as gateway:
        session = gateway.open_session("r")
        await ask(session)
        await ask(session, extra_body={"chat_template_kwargs": {"enable_thinking": True}})
        without, with_ = (text_of(call.prompt_ids) for call in session.calls)
        assert without.endswith("</think>\n\n")
        assert with_.endswith("assistant\n")


async def test_completion_that_starts_inside_the_prompts_reasoning_is_split() -> None:
    async with gateway_of(StubEngine(["hm\n</think>\n\nyes", "hm and"])) as gateway:
        session = gateway.open_session("r")
        body = {"chat_template_kwargs": {"open_thinking": True}}
        first = (await ask(session, extra_body=body)).choices[0].message
        assert (first.reasoning_content, first.content) == ("hm", "yes")
        second = (await ask(session, extra_body=body)).choices[0].message
        assert (second.reasoning_content, second.content) == ("hm and", None)


async def test_equal_runs_give_equal_seeds_and_ids_in_any_order_of_arrival() -> None:
    async def run(order: list[str]) -> dict[str, list[tuple[str, int]]]:
        async with gateway_of(StubEngine([CALL])) as gateway:
            session = gateway.open_session("train-1-0-0", seed=11)
            seen: dict[str, list[tuple[str, int]]] = {}
            for text in order:
                await ask(session, [{"role": "user", "content": text}], tools=[ADD_TOOL])
                call = session.calls[-1]
                tool_call = call.response["tool_calls"][0]["id"]
                seen.setdefault(text, []).append((tool_call, call.sampling.seed))
            return seen

    one = await run(["a", "a", "b"])
    assert one == await run(["b", "a", "a"])
    pairs = [pair for pairs in one.values() for pair in pairs]
    assert len({tool_call for tool_call, _ in pairs}) == 3
    assert len({seed for _, seed in pairs}) == 3


async def test_another_sessions_seed_gives_other_samples() -> None:
    async with gateway_of(StubEngine()) as gateway:
        seeds = set()
        for seed in range(5):
            session = gateway.open_session(f"r{seed}", seed=seed)
            await ask(session)
            seeds.add(session.calls[0].sampling.seed)
        assert len(seeds) == 5
        assert all(0 <= seed < 2**63 for seed in seeds)


async def test_sessions_that_are_not_recorded_keep_no_calls() -> None:
    async with gateway_of(StubEngine()) as gateway:
        session = gateway.open_session("judge", recorded=False)
        assert (await ask(session)).choices[0].message.content == "ok"
        assert session.calls == ()
        assert session.seal() == ()


async def test_call_with_data_that_disagree_is_answered_and_marked() -> None:
    class Broken(StubEngine):
        async def generate(self, prompt_ids, sampling, session, sink=None) -> Generation:
            return Generation(ids_of("x"), (float("nan"),), (0,), "stop")

    async with gateway_of(Broken()) as gateway:
        session = gateway.open_session("r")
        answer = await ask(session, logprobs=True)
        assert answer.choices[0].message.content == "x"
        assert answer.choices[0].logprobs.content[0].logprob == -9999.0
        assert session.calls[0].invalid == "a log-prob is not finite"


async def test_models_are_listed() -> None:
    async with gateway_of(StubEngine()) as gateway:
        page = await gateway.open_session("r").async_client().models.list()
        assert [model.id for model in page.data] == ["tiny"]


@pytest.mark.parametrize("setting", ["tool_call_parser", "reasoning_parser"])
async def test_unknown_parser_names_the_known_ones(setting: str) -> None:
    with pytest.raises(ConfigError, match=r"hermess.*none"):
        async with gateway_of(StubEngine(), **{setting: "hermess"}):
            pass


async def test_thinking_asked_of_a_template_that_knows_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="enable_thinking"):
        async with gateway_of(StubEngine(), enable_thinking=True, chat_template="{{ messages }}"):
            pass


def test_a_prompt_that_comes_again_is_rendered_once_and_a_dated_one_each_time(monkeypatch) -> None:
    for dated in (False, True):
        template = TEMPLATE + ("{{- strftime_now('%Y') }}" if dated else "")
        renderer = ChatRenderer(tokenizer(), chat_template=template)
        rendered = []
        apply = renderer.tokenizer.apply_chat_template

        def counted(
            *args: Any, apply: Any = apply, rendered: Any = rendered, **options: Any
        ) -> Any:
            rendered.append(1)
            return apply(*args, **options)

        monkeypatch.setattr(renderer.tokenizer, "apply_chat_template", counted)
        messages = [{"role": "user", "content": "hi"}]
        texts = {renderer.render_text(messages, ()) for _ in range(3)}
        texts |= {renderer.render_text(messages, (), add_generation_prompt=False)}
        assert len(texts) == 2
        assert len(rendered) == (4 if dated else 2)


def test_messages_that_are_no_json_are_rendered_all_the_same() -> None:
    renderer = ChatRenderer(tokenizer(), chat_template=TEMPLATE)
    when = [{"role": "user", "content": "hi", "at": date(2026, 1, 2)}]
    assert renderer.render_text(when, ()) == renderer.render_text([when[0] | {"at": ""}], ())
