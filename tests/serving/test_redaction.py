"""What is redacted is not on disk: neither as words, nor as ids, nor in replies."""

import json
import re
from dataclasses import replace

import openai
import pytest

from tests.kit.builders import call
from tests.serving.served import MODEL, say, served
from tuner.serving.serving_store import ServingStore, SessionSink, redacted
from tuner.traces.store import to_plain

REDACTED = "\n".join(
    [
        "def hide(messages):",
        "    for message in messages:",
        "        if isinstance(message.get('content'), str):",
        "            message['content'] = message['content'].replace('Tom', '[name]')",
        "    return messages",
        "def fail(messages):",
        "    raise ValueError(messages)",
        "def wrong(messages):",
        "    return None",
    ]
)


@pytest.fixture
def setting(tmp_path):
    path = tmp_path / "privacy.py"
    path.write_text(REDACTED)
    return f"tuner.serving.redact={path}:"


async def test_a_call_that_is_redacted_keeps_no_tokens_and_is_counted(tmp_path, setting):
    async with served(tmp_path, f"{setting}hide") as asking:
        id_, key = await asking.opened()
        headers = {"extra_headers": {"Idempotency-Key": "k"}}
        client, talk = asking.client(key), []
        first = await say(client, talk, "Tom has 5 pens", **headers)
        again = await say(client, [], "Tom has 5 pens", **headers)
        assert first.parse() == again.parse()
        assert asking.server.store.ask("SELECT COUNT(*) FROM replies") == [(0,)]
        used = first.parse().usage
        (stored,) = asking.calls(id_)
        session = asking.server.store.session(id_)
        assert (session.redacted, session.sampled_tokens) == (1, used.completion_tokens)
        assert stored.redacted
        assert stored.call.messages == [{"role": "user", "content": "[name] has 5 pens"}]
        assert (stored.call.prompt_ids, stored.call.completion_ids) == ((), ())
        assert stored.call.invalid is not None
        assert stored.call.invalid.startswith("redacted")
        info = (await asking.control("GET", f"/sessions/{id_}/calls")).json()["calls"]
        assert [(one["redacted"], one["tokens"]) for one in info] == [
            (True, used.completion_tokens)
        ]
        await say(client, talk, "why?")  # the conversation goes on in memory
        await asking.control("POST", f"/sessions/{id_}/reward", json={"reward": 1})
        await asking.control("POST", f"/sessions/{id_}/end")
        assert asking.server.store.untrained() == []
        await asking.server.tidy()
    for path in (tmp_path / "p/served").rglob("*"):
        if path.is_file():
            assert b"Tom" not in path.read_bytes(), path


async def test_of_a_session_with_something_redacted_no_answer_is_stored(tmp_path, setting):
    async with served(tmp_path, f"{setting}hide") as asking:
        _, key = await asking.opened()
        for number, text in enumerate(("How many?", "Tom has 5 pens", "How many?")):
            headers = {"Idempotency-Key": f"k{number}"}
            await say(asking.client(key), [], text, extra_headers=headers)
        assert asking.server.store.ask("SELECT key FROM replies") == [("k0",)]


@pytest.mark.long
async def test_a_redacted_question_may_be_asked_again_after_a_restart(tmp_path, setting):
    ids = []
    for _ in range(3):
        async with served(tmp_path, f"{setting}hide") as asking:
            if not ids:
                id_, key = await asking.opened()
            await say(asking.client(key), [], "Tom has 5 pens")
            ids = [one.call.id for one in asking.calls(id_)]
    assert len(set(ids)) == 3


async def test_what_has_nothing_to_redact_is_as_it_was(tmp_path, setting):
    async with served(tmp_path, f"{setting}hide") as asking:
        id_, key = await asking.opened()
        await say(asking.client(key), [], "somebody has 5 pens")
        (stored,) = asking.calls(id_)
        assert not stored.redacted
        assert stored.call.completion_ids


async def test_a_redacted_conversation_finds_its_session(tmp_path, setting):
    async with served(tmp_path, f"{setting}hide") as asking:
        client, talk = asking.client(await asking.application()), []
        raws = [await say(client, talk, text) for text in ("Tom has 5 pens", "why?")]
        assert len({raw.headers["x-tuner-session"] for raw in raws}) == 1


async def test_a_response_with_something_redacted_is_gone_on_from_in_memory(tmp_path, setting):
    async with served(tmp_path, f"{setting}hide") as asking:
        client = asking.client(await asking.application())
        asked = {"model": MODEL, "max_output_tokens": 16}
        first = await client.responses.create(input="Tom has 5 pens", **asked)
        await client.responses.create(input="why?", previous_response_id=first.id, **asked)
        assert len(asking.ids()) == 1
        assert asking.server.store.ask("SELECT COUNT(*) FROM responses") == [(0,)]


def hidden(messages):
    return [{**one, "content": one["content"].replace("Tom", "[name]")} for one in messages]


def test_nothing_that_spells_a_redacted_call_is_left_of_it():
    whole = replace(
        call(
            "c",
            [7_770],
            [7_771],
            [-7.772],
            stop=("Tom",),
            grammar='start: "Tom"',
            logit_bias=((7_773, 1.0),),
            bad_words=((7_774,),),
            stop_token_ids=(7_775,),
        ),
        response={"role": "assistant", "content": "Tom"},
        tools=[{"type": "function", "function": {"name": "Tom"}}],
        kept=("Tom",),
        top_logprobs=(((7_776, -7.777),),),
        masked=((0, 1),),
    )
    bare = redacted(whole, hidden)
    stored = json.dumps(to_plain(bare))
    assert "[name]" in stored
    assert not re.search("Tom|7.?77", stored)
    assert (bare.masked, bare.usage) == ((), whole.usage)
    assert redacted(replace(whole, response={"content": "Tim"}), hidden) is None
    assert redacted(whole, lambda messages: []).response["content"] is None


def test_the_choices_of_a_request_are_redacted_together(tmp_path):
    store = ServingStore(tmp_path / "store.sqlite")
    store.open("s", key=b"k", seed=1)
    told = []
    sink = SessionSink(store, "s", application=None, redact=hidden, opening=None, noted=told.append)
    said = ("Tom", "Tim")
    sink.add(
        [
            replace(call(name, [1], [2], [-0.5]), response={"role": "assistant", "content": name})
            for name in said
        ],
        None,
    )
    found = store.calls("s")
    assert [one.call.response["content"] for one in found] == ["[name]", "Tim"]
    assert [(one.redacted, one.call.prompt_ids) for one in found] == [(True, ())] * 2
    assert [noted.redacted for noted in told] == [True]
    store.close()


@pytest.mark.parametrize("function", ["fail", "wrong"])
async def test_a_function_that_fails_lets_nothing_be_answered_or_stored(
    tmp_path, setting, function
):
    async with served(tmp_path, f"{setting}{function}") as asking:
        id_, key = await asking.opened()
        with pytest.raises(openai.InternalServerError) as error:
            await say(asking.client(key), [], "Tom has 5 pens")
        assert "tuner.serving.redact" in str(error.value)
        assert "Tom" not in str(error.value)
        assert asking.calls(id_) == []
