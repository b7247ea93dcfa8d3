"""What is redacted is not on disk: neither as words, nor as ids, nor in replies."""

import openai
import pytest

from tests.serving.served import MODEL, say, served

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
