"""OpenAI's completions: text and token ids as they are, recorded like any other call."""

from __future__ import annotations

import copy
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from tests.gateway.drift import merging
from tests.kit.examples import few
from tests.kit.toy import StubEngine, gateway_of, ids_of, text_of, tokenizer
from tuner.gateway import ChatRenderer, Gateway


async def test_text_is_completed_without_a_template() -> None:
    engine = StubEngine([" is blue"])
    async with gateway_of(engine) as gateway:
        session = gateway.open_session("r")
        answer = await session.async_client().completions.create(model="tiny", prompt="The sky")
        assert answer.choices[0].text == " is blue"
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == len(" is blue") + 1
        (call,) = session.calls
        assert call.dialect == "completions"
        assert call.prompt_ids == ids_of("The sky")
        assert text_of(call.completion_ids) == " is blue<|im_end|>"
        assert call.messages == [{"role": "prompt", "content": "The sky"}]
        assert call.response["content"] == " is blue"


async def test_token_ids_reach_the_engine_as_they_are() -> None:
    engine = StubEngine(["x"])
    async with gateway_of(engine) as gateway:
        session = gateway.open_session("r")
        ids = [3, 1, 4, 1, 5]
        await session.async_client().completions.create(model="tiny", prompt=ids)
        assert engine.requests[0][0] == session.calls[0].prompt_ids == tuple(ids)


async def test_a_completion_is_text_also_where_it_looks_like_reasoning_or_a_call() -> None:
    text = '<think>a</think><tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
    async with gateway_of(StubEngine([text])) as gateway:
        client = gateway.open_session("r").async_client()
        answer = await client.completions.create(model="tiny", prompt="p")
        assert answer.choices[0].text == text


async def test_several_prompts_and_choices_are_each_recorded_and_numbered() -> None:
    async with gateway_of(StubEngine(["a", "b", "c", "d"])) as gateway:
        session = gateway.open_session("r")
        answer = await session.async_client().completions.create(
            model="tiny", prompt=["one", "two"], n=2
        )
        assert [(c.index, c.text) for c in answer.choices] == list(enumerate("abcd"))
        assert [text_of(call.prompt_ids) for call in session.calls] == ["one", "one", "two", "two"]
        assert len({call.id for call in session.calls}) == 4
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len("onetwo")


async def test_logprobs_have_the_old_form() -> None:
    async with gateway_of(StubEngine(["ab"])) as gateway:
        client = gateway.open_session("r").async_client()
        answer = await client.completions.create(model="tiny", prompt="p", logprobs=2)
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.tokens == ["a", "b", "<|im_end|>"]
        assert logprobs.token_logprobs == [-0.25] * 3
        assert logprobs.text_offset == [0, 1, 2]
        assert logprobs.top_logprobs is not None
        assert len(logprobs.top_logprobs[0]) == 2


async def test_a_streamed_completion_adds_up() -> None:
    async with gateway_of(StubEngine(["abc END more"])) as gateway:
        session = gateway.open_session("r")
        stream = await session.async_client().completions.create(
            model="tiny",
            prompt="p",
            stream=True,
            stop=["END"],
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].text for c in chunks if c.choices) == "abc "
        assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
        assert chunks[-1].usage is not None
        assert session.calls[0].streamed


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, r"prompt\[0\]"),
    ({"prompt": []}, "0 prompts"),
    ({"prompt": [99999]}, "does not know"),
    ({"prompt": [-1]}, "does not know"),
    ({"prompt": [[1], "a", 2]}, r"prompt\[2\]"),
    ({"prompt": "p", "echo": True}, "not repeated"),
    ({"prompt": "p", "suffix": "s"}, "cannot be inserted"),
    ({"prompt": "p", "best_of": 3}, "best_of differs"),
    ({"prompt": ["p"] * 60, "n": 60}, "more than 128"),
    ({"prompt": "p", "logprobs": 9}, "reports at most 5"),
]


@pytest.mark.parametrize(("fields", "sentence"), REFUSED)
async def test_refusals_name_the_field(fields: dict[str, Any], sentence: str) -> None:
    async with gateway_of(StubEngine()) as gateway:
        session = gateway.open_session("r")
        with pytest.raises(openai.BadRequestError, match=sentence):
            await session.async_client().completions.create(model="tiny", **fields)
        assert session.calls == ()


def beginning() -> PreTrainedTokenizerFast:
    """The toy tokenizer, which adds a token before and after a text."""
    spoken = copy.deepcopy(tokenizer())
    added = [("<|endoftext|>", ids_of("<|endoftext|>")[0]), ("<|im_end|>", ids_of("<|im_end|>")[0])]
    spoken.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A <|im_end|>", special_tokens=added
    )
    return spoken


@pytest.mark.parametrize("stream", [False, True])
async def test_text_gets_the_tokens_that_its_tokenizer_adds_unless_they_are_switched_off(
    stream: bool,
) -> None:
    engine = StubEngine(["a"] * 12)
    renderer = ChatRenderer(beginning())
    gateway = Gateway(engine, renderer, model_name="tiny")
    session = gateway.open_session("r")
    client = session.async_client()
    whole, bare = "<|endoftext|>The sky<|im_end|>", "The sky"
    switches: list[tuple[dict[str, Any], str]] = [
        ({}, whole),
        ({"add_special_tokens": None}, whole),
        ({"add_special_tokens": True}, whole),
        ({"add_special_tokens": False}, bare),
    ]
    for switch, expected in switches:
        for prompt in (bare, list(ids_of(bare))):
            answer: Any = await client.completions.create(
                model="tiny", prompt=prompt, stream=stream, extra_body=switch
            )
            if stream:
                assert [chunk async for chunk in answer]
            wanted = expected if prompt == bare else bare
            assert (
                text_of(engine.requests[-1][0]) == text_of(session.calls[-1].prompt_ids) == wanted
            )
    await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}])
    assert not text_of(session.calls[-1].prompt_ids).startswith("<|endoftext|>")
    await gateway.aclose()


@settings(max_examples=few(80), deadline=None)
@given(st.text("answer isth\n.", min_size=1, max_size=8) | st.sampled_from([" the", " answer"]))
def test_a_bad_word_cannot_be_sampled_as_it_is_written_or_after_a_space(word: str) -> None:
    for spoken in (tokenizer(), merging()):
        banned = ChatRenderer(spoken).word_ids([word])
        bare = word.lstrip()
        for text in {word, bare, f" {bare}" if bare else ""} - {""}:
            ids = tuple(spoken.encode(text, add_special_tokens=False))
            assert any(ids[-len(form) :] == form for form in banned)
        ends = [one for one in banned for other in banned if one != other and ends_with(one, other)]
        assert len(set(banned)) == len(banned)
        assert not ends


def ends_with(ids: tuple[int, ...], end: tuple[int, ...]) -> bool:
    return ids[-len(end) :] == end


async def test_a_bad_word_of_one_token_reaches_the_engine() -> None:
    engine = StubEngine(every_setting=True)
    gateway = Gateway(engine, ChatRenderer(merging()), model_name="tiny")
    await (
        gateway.open_session("r")
        .async_client()
        .completions.create(model="tiny", prompt="x", extra_body={"bad_words": [" the"]})
    )
    (token,) = merging().encode(" the", add_special_tokens=False)
    assert (token,) in engine.requests[0][1].bad_words
    await gateway.aclose()
