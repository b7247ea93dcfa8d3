"""A session made again from its calls, and conversations that are known by their words."""

from tests.kit.toy import StubEngine, gateway_of
from tuner.serving.serving_store import (
    ServingStore,
    SessionSink,
    beginnings,
    digest,
    restored_conversations,
    talk_of,
)

CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1, "b": 2}'}}
    ],
}
USER = {"role": "user", "content": "hi"}


def with_arguments(text):
    (call,) = CALLED["tool_calls"]
    return {**CALLED, "tool_calls": [{**call, "id": "2", "function": {"name": "f", **text}}]}


def known(*messages):
    return beginnings(list(messages))


def test_the_same_words_are_the_same_conversation():
    same = with_arguments({"arguments": '{"b":2,"a":1}'})
    assert known(USER, CALLED) == known(USER, {**same, "content": ""})
    parts = {"role": "user", "content": [{"type": "text", "text": "hi"}], "name": "tom"}
    assert known(USER, CALLED) == known(parts, {**CALLED, "reasoning_content": "hm"})


def test_other_words_roles_and_tool_calls_are_another_conversation():
    others = [
        (USER, with_arguments({"arguments": '{"a": 1, "b": 3}'})),
        ({**USER, "content": "ho"}, CALLED),
        ({**USER, "role": "system"}, CALLED),
        (USER, {**CALLED, "content": "so"}),
        (USER, USER, CALLED),
    ]
    found = {known(*messages)[0] for messages in [(USER, CALLED), *others]}
    assert len(found) == 1 + len(others)


def test_the_longest_beginning_comes_first():
    long = known(USER, CALLED, USER, {**CALLED, "content": "so"}, USER)
    assert long[1:] == known(USER, CALLED, USER)
    assert len(long) == 2


async def test_conversations_are_made_again_but_for_what_they_cannot_be_made_of(tmp_path):
    """Template arguments are not recorded: a prompt that they changed is not gone on from."""
    engine = StubEngine(["one", "two", "three", "four"])
    async with gateway_of(engine) as gateway:
        session = gateway.open_session("r")
        client = session.async_client()
        talk = [USER]

        async def ask(**other):
            answer = await client.chat.completions.create(model="tiny", messages=talk, **other)
            talk.append({"role": "assistant", "content": answer.choices[0].message.content})
            talk.append({"role": "user", "content": "why?"})

        await ask()
        await ask()
        talk = [{"role": "user", "content": "other"}]
        await ask(extra_body={"chat_template_kwargs": {"enable_thinking": False}})
        plain, then, other = session.calls
        assert talk_of(plain) in known(*then.messages)
        restored = restored_conversations(gateway.renderer, "template", session.calls)

        def prompt(call):
            messages = [*call.messages, call.response, USER]
            text = gateway.renderer.render_text(messages, [])
            turns = sum(message["role"] == "assistant" for message in messages)
            return restored.prompt(text, turns, messages)

        for call in (plain, then):
            assert prompt(call).reused == len(call.prompt_ids) + len(call.completion_ids)
        assert prompt(other).reused == 0


async def test_what_was_answered_is_on_disk_before_the_answer_is_sent(tmp_path):
    path = tmp_path / "s.sqlite"
    store = ServingStore(path)
    store.open("s-1", key=digest("k"), seed=1)
    sink = SessionSink(
        store, "s-1", application=None, redact=None, opening=None, noted=lambda _: None
    )
    async with gateway_of(StubEngine(["one"])) as gateway:
        session = gateway.open_session("s-1", recorded=False, key="sk-own", sink=sink)
        assert session.key == "sk-own"
        stream = await session.async_client().chat.completions.create(
            model="tiny", messages=[USER], stream=True
        )
        seen = []
        async for chunk in stream:
            with store.reader() as beside:
                seen.append((chunk.choices[0].finish_reason, len(beside.calls("s-1"))))
    assert seen[0] == (None, 0)
    assert seen[-1] == ("stop", 1)
    store.close()


async def test_what_cannot_be_kept_is_not_answered(tmp_path):
    store = ServingStore(tmp_path / "s.sqlite")
    sink = SessionSink(
        store, "s-gone", application=None, redact=None, opening=None, noted=lambda _: None
    )
    async with gateway_of(StubEngine(["forty-two"])) as gateway:
        session = gateway.open_session("s-gone", recorded=False, sink=sink)
        answer = await gateway.handle(
            "POST",
            "/v1/chat/completions",
            {"authorization": f"Bearer {session.key}"},
            b'{"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}',
        )
    assert answer.status == 500
    assert b"forty" not in answer.body
    store.close()
