"""Pieces of a message as its tokens come: never taken back, and in the end the whole message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tests.gateway.families import FAMILIES, Family, texts
from tests.gateway.qwen import qwen
from tests.kit.examples import few
from tests.kit.toy import ADD_TOOL, ids_of, tokenizer
from tuner.gateway import ChatRenderer
from tuner.gateway.completion import MessageStream, TextStream
from tuner.gateway.families.parsing import Delta, ParsedMessage, joined

family_of = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
# Bytes, words, parts of characters and special tokens.
QWENS = st.integers(0, 255) | st.integers(0, 151_645)
BYTE = {letter: id_ for letter, id_ in tokenizer().get_vocab().items() if id_ < 256}


def streamed(
    renderer: ChatRenderer,
    ids: Sequence[int],
    cuts: Sequence[int],
    **settings: Any,
) -> tuple[list[list[Delta]], ParsedMessage]:
    """The pieces of each push and of the end, and the message that they must make."""
    settings = {"prompt_ids": (), "tools": [ADD_TOOL], **settings}
    stream = MessageStream(renderer, **settings)
    pushes = []
    begin = 0
    for end in [*sorted({min(cut, len(ids)) for cut in cuts}), len(ids)]:
        pushes.append(stream.push(ids[begin:end]))
        begin = end
    message = renderer.parse(ids, **settings)
    return [*pushes, stream.finish(message)], message


def check(pushes: list[list[Delta]], message: ParsedMessage) -> None:
    deltas = [delta for push in pushes for delta in push]
    for delta in deltas:
        fields = (delta.reasoning, delta.content, delta.tool_call)
        assert sum(field is not None for field in fields) == 1
    assert joined(deltas, message.malformed_tool_calls) == message
    indices = [delta.tool_call[0] for delta in deltas if delta.tool_call]
    assert indices == list(range(len(message.tool_calls)))
    # Only what is all there is may be empty.
    assert all(delta.content != "" or message.content == "" for delta in deltas)
    assert all(delta.reasoning != "" or message.reasoning == "" for delta in deltas)


@family_of
@settings(deadline=None, max_examples=few(60))
@given(data=st.data())
def test_pieces_make_the_message_that_is_parsed(family: Family, data: Any) -> None:
    text = data.draw(texts(family) | st.text(max_size=20))
    # Bytes that are no text may be sampled anywhere, and special tokens too.
    noise = data.draw(st.lists(st.sampled_from([*BYTE.values(), 256, 258]), max_size=3))
    at = data.draw(st.integers(0, len(text)))
    ids = [*ids_of(text[:at]), *noise, *ids_of(text[at:])]
    _stream_anyhow(family, family.renderer(), ids, data)


@pytest.mark.long
@pytest.mark.parametrize("name", ["qwen3", "qwen3_5"])
@settings(deadline=None, max_examples=few(80))
@given(data=st.data())
def test_pieces_of_qwens_tokens_make_the_message_that_is_parsed(name: str, data: Any) -> None:
    (family,) = (family for family in FAMILIES if family.name == name)
    renderer = family.renderer(qwen)
    # The text as its tokens or as those of its pieces; between them any other ones.
    ids: list[int] = []
    for text in data.draw(st.lists(texts(family) | st.text(max_size=8), max_size=4)):
        ids += renderer.encode(text)
        ids += data.draw(st.lists(QWENS, max_size=2))
    _stream_anyhow(family, renderer, ids, data)


def _stream_anyhow(family: Family, renderer: ChatRenderer, ids: list[int], data: Any) -> None:
    """Stream the completion with any prompt, tools and stop strings, cut anywhere."""
    end = renderer.tokenizer.eos_token_id
    ids = ids + data.draw(st.sampled_from([[], [end]]))
    prompts = [(), renderer.encode("<think>\n"), renderer.encode("[THINK]")]
    parts = st.sampled_from(["x", "</", "call", "\n\n", "é", "<|im_end|>", *family.pieces])
    settings = {
        "prompt_ids": data.draw(st.sampled_from(prompts)),
        "tools": data.draw(st.sampled_from([[], [ADD_TOOL]])),
        "stop": data.draw(st.lists(st.lists(parts, min_size=1).map("".join), max_size=2)),
    }
    every = data.draw(st.booleans())
    cuts = range(len(ids)) if every else data.draw(st.lists(st.integers(0, len(ids)), max_size=8))
    check(*streamed(renderer, ids, cuts, **settings))


@family_of
def test_words_flow_as_they_are_sampled(family: Family) -> None:
    words = "The sum of two and forty is what you are looking for."
    text, reasoning = words, None
    if family.reasoning_parser == "openai_gptoss":
        head = "<|start|>assistant<|channel|>final<|message|>"
        text = f"<|channel|>analysis<|message|>{words}<|end|>{head}{words}"
    elif family.reasoning_parser != "none":
        opener, closer = ("[THINK]", "[/THINK]") if "v13" in family.name else family.pieces[:2]
        text = f"{opener}{words}{closer}{words}"
    call = family.call % '{"a": 1}' if family.content else ""
    ids = ids_of(text + call)
    pushes, message = streamed(family.renderer(), ids, range(len(ids)))
    check(pushes, message)
    assert len(message.tool_calls) == bool(call)
    before_end = [delta for push in pushes[:-1] for delta in push]
    content = [delta.content for delta in before_end if delta.content]
    reasoning = [delta.reasoning for delta in before_end if delta.reasoning]
    assert "".join(content) == words
    assert len(content) > len(words) // 2
    if family.reasoning_parser != "none":
        assert "".join(reasoning) == words
        assert len(reasoning) > len(words) // 2


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5", "deepseek_v3", "deepseek_v31", "gpt_oss"])
def test_call_is_said_as_soon_as_it_is_closed(name: str) -> None:
    (family,) = (family for family in FAMILIES if family.name == name)
    given = "1" if name == "qwen3_5" else '{"a": 1}'
    call = (family.call % given).removesuffix("<｜tool▁calls▁end｜>")  # noqa: RUF001
    ids = ids_of(call)
    pushes, _ = streamed(family.renderer(), [*ids, *ids_of("x")], range(len(ids) + 1))
    (at,) = (index for index, push in enumerate(pushes) if any(d.tool_call for d in push))
    assert at == len(ids)


def test_text_that_may_become_part_of_the_form_waits() -> None:
    renderer = ChatRenderer(tokenizer())
    stream = MessageStream(renderer, prompt_ids=(), tools=[ADD_TOOL], stop=["END"])

    def content(text: str) -> str:
        return "".join(delta.content or "" for delta in stream.push(ids_of(text)))

    assert content("Hi") == "Hi"
    assert content("\n") == ""
    assert content("<tool") == ""
    assert content("box>") == "\n<toolbox>"
    assert content("E") == ""
    assert content("N") == ""
    assert content("d") == "ENd"
    assert content(" <|im_start|>") == " "
    assert content("x") == "<|im_start|>x"


def test_half_a_character_waits_for_its_other_half() -> None:
    stream = MessageStream(ChatRenderer(tokenizer()), prompt_ids=(), tools=[])
    said = [stream.push([id_]) for id_ in ids_of("é€🙂")]
    letters = [push[0].content if push else None for push in said]
    assert letters == [None, "é", None, None, "€", None, None, None, "🙂"]


def test_stop_string_that_begins_earlier_wins_over_one_that_is_complete() -> None:
    ids = ids_of("one abc two")
    pushes, message = streamed(
        ChatRenderer(tokenizer()), ids, range(len(ids)), stop=["b", "abc two"]
    )
    check(pushes, message)
    assert message.content == "one "
    pushes, message = streamed(ChatRenderer(tokenizer()), ids, range(len(ids)), stop=["b", "abx"])
    check(pushes, message)
    assert message.content == "one a"


def test_plain_text_is_content_whatever_it_holds() -> None:
    stream = MessageStream(
        ChatRenderer(tokenizer()), prompt_ids=(), tools=[ADD_TOOL], stop=["END"], plain=True
    )
    assert stream.push(ids_of("<think>a</think><tool_call>END")) == [
        Delta(content="<think>a</think><tool_call>")
    ]


def test_message_that_was_not_streamed_is_an_error() -> None:
    stream = MessageStream(ChatRenderer(tokenizer()), prompt_ids=(), tools=[])
    stream.push(ids_of("one"))
    with pytest.raises(RuntimeError, match="content does not begin"):
        stream.finish(ParsedMessage("two"))


def spoken_by_bytes() -> PreTrainedTokenizerFast:
    """As Llama 2's: spaces are marks, and letters out of the vocabulary are bytes."""
    vocabulary = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}}
    for piece in ("▁", "▁the", "a", "b", "▁a"):
        vocabulary[piece] = len(vocabulary)
    base = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    base.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=base)


@settings(deadline=None, max_examples=few(300))
@given(
    st.lists(st.lists(st.integers(0, 255)) | st.text("aé€🙂 ").map(lambda t: list(t.encode()))),
    st.lists(st.integers(1, 60)),
)
def test_any_bytes_are_decoded_as_the_whole_is(parts: list[list[int]], sizes: list[int]) -> None:
    values = [byte for part in parts for byte in part]
    alphabet = _byte_letters()
    decode_in_pieces(tokenizer(), [BYTE[alphabet[value]] for value in values], sizes)


@settings(deadline=None, max_examples=few(200))
@given(st.lists(st.integers(0, 261), max_size=30), st.lists(st.integers(1, 5)))
def test_tokens_that_are_bytes_are_decoded_as_the_whole_is(
    ids: list[int], sizes: list[int]
) -> None:
    decode_in_pieces(spoken_by_bytes(), ids, sizes)


@settings(deadline=None, max_examples=few(200))
@given(st.lists(QWENS, max_size=12), st.lists(st.integers(1, 5)))
def test_any_tokens_of_qwens_are_decoded_as_the_whole_is(ids: list[int], sizes: list[int]) -> None:
    decode_in_pieces(qwen(), ids, sizes)


def decode_in_pieces(spoken: PreTrainedTokenizerFast, ids: list[int], sizes: Sequence[int]) -> None:
    stream = TextStream(spoken)
    said = ""
    begin = 0
    whole = str(spoken.decode(ids, skip_special_tokens=False))
    for size in [*sizes, *([1] * len(ids))]:
        said += stream.push(ids[begin : begin + size])
        begin += size
        assert whole.startswith(said)
    if "\ufffd" not in whole and not any(1 <= id_ <= 256 for id_ in ids[-1:]):
        assert said == whole


def _byte_letters() -> dict[int, str]:
    letters: dict[int, str] = bytes_to_unicode()
    return letters


def test_endless_bytes_of_no_character_are_decoded_in_pieces() -> None:
    letters = _byte_letters()
    stream = TextStream(tokenizer())
    for _ in range(2000):
        stream.push([BYTE[letters[0x80]]])
        assert len(stream._window) < 64


@family_of
def test_work_for_a_token_does_not_grow_with_the_completion(family: Family, monkeypatch) -> None:
    decoded: list[int] = []
    renderer = family.renderer()
    decode = renderer.tokenizer.decode

    def counted(ids: list[int], **options: Any) -> Any:
        decoded.append(len(ids))
        return decode(ids, **options)

    monkeypatch.setattr(renderer.tokenizer, "decode", counted)
    stream = MessageStream(renderer, prompt_ids=(), tools=[ADD_TOOL], stop=["END"])
    for id_ in ids_of("é word\n\n<x> " * 300):
        stream.push([id_])
        scanners = (stream._scanner._reasoning, stream._scanner._calls)
        assert sum(len(getattr(scanner, "_text", "")) for scanner in scanners) < 100
    assert max(decoded) < 10
