"""An application's requests find their session: by header, words, response, or as a repetition."""

import asyncio
import itertools

import anthropic
import pytest

from tests.serving.served import MODEL, QUESTION, say, served

HEADER = "x-tuner-session"


@pytest.fixture
async def asking(tmp_path):
    async with served(tmp_path) as asking:
        yield asking


def session_of(raw):
    return raw.headers[HEADER]


def named(name):
    return {"extra_headers": {HEADER: name}}


async def test_a_header_names_the_session_by_a_name_or_an_id(asking):
    client = asking.client(await asking.application())
    first = session_of(await say(client, [], "hi", **named("chat 1")))
    again = session_of(await say(client, [], "other words", **named("chat 1")))
    other = session_of(await say(client, [], "hi", **named("chat 2")))
    by_id = session_of(await say(client, [], "more", **named(first)))
    assert first == again == by_id != other
    assert [asking.server.store.session(id_).calls for id_ in (first, other)] == [3, 1]
    assert asking.server.store.session(first).application == "shop"


async def test_requests_that_come_together_with_a_new_name_are_one_session(asking):
    client = asking.client(await asking.application())
    raws = await asyncio.gather(*(say(client, [], f"hi {n}", **named("c")) for n in range(3)))
    assert len({session_of(raw) for raw in raws}) == 1


async def test_a_name_of_another_application_is_not_known(asking):
    shop = asking.client(await asking.application("shop"))
    bank = asking.client(await asking.application("bank"))
    theirs = session_of(await say(shop, [], "hi", **named("c")))
    ours = session_of(await say(bank, [], "hi", **named("c")))
    assert ours != theirs
    with pytest.raises(Exception, match="no session with this id"):
        await say(bank, [], "hi", **named(theirs))
    assert sorted(asking.ids()) == sorted([ours, theirs])


async def test_a_conversation_goes_on_in_its_session(asking):
    client, talk = asking.client(await asking.application()), []
    raws = [await say(client, talk, text) for text in (QUESTION, "why?", "so?")]
    assert len({session_of(raw) for raw in raws}) == 1
    calls = [one.call for one in asking.calls(session_of(raws[0]))]
    for before, after in itertools.pairwise(calls):
        whole = (*before.prompt_ids, *before.completion_ids)
        assert after.prompt_ids[: after.reused_ids] in (whole, whole[:-1])


async def test_equal_conversations_are_two_sessions_and_do_not_mix(asking):
    client = asking.client(await asking.application())
    one, two = [], []
    first = [session_of(await say(client, talk, "hi", temperature=0)) for talk in (one, two)]
    assert one == two
    assert first[0] != first[1]
    then = [session_of(await say(client, talk, "why?", temperature=0)) for talk in (one, two)]
    assert sorted(then) == sorted(first)
    last = [session_of(await say(client, talk, "so?", temperature=0)) for talk in (one, two)]
    assert sorted(last) == sorted(first)
    assert [asking.server.store.session(id_).calls for id_ in first] == [3, 3]


async def test_words_that_were_changed_begin_a_session(asking):
    client, talk = asking.client(await asking.application()), []
    first = session_of(await say(client, talk, "hi"))
    talk[-1]["content"] += " indeed"
    assert session_of(await say(client, talk, "why?")) != first


async def test_reasoning_and_ids_are_not_compared(asking):
    client, talk = asking.client(await asking.application()), []
    first = session_of(await say(client, talk, "hi"))
    talk[-1] |= {"reasoning_content": "so it seems"}
    talk[0] |= {"content": [{"type": "text", "text": "hi"}]}
    assert session_of(await say(client, talk, "why?")) == first


async def test_an_ended_session_is_not_continued(asking):
    client, talk = asking.client(await asking.application()), []
    first = session_of(await say(client, talk, "hi"))
    await asking.control("POST", f"/sessions/{first}/end")
    assert session_of(await say(client, talk, "why?")) != first
    with pytest.raises(Exception, match="has ended"):
        await say(client, talk, "so?", **named(first))


async def test_a_response_is_gone_on_from_by_its_id(asking):
    client = asking.client(await asking.application())

    async def answer(text, **asked):
        raw = await client.responses.with_raw_response.create(
            model=MODEL, input=text, max_output_tokens=16, **asked
        )
        return session_of(raw), raw.parse().id

    first, response = await answer("hi")
    other, _ = await answer("hi")
    then, response = await answer("why?", previous_response_id=response)
    last, _ = await answer("so?", previous_response_id=response)
    assert first == then == last != other
    (*_, call) = asking.calls(first)
    assert [message["role"] for message in call.call.messages] == ["user", "assistant"] * 2 + [
        "user"
    ]
    bank = asking.client(await asking.application("bank"))
    with pytest.raises(Exception, match="previous_response_id"):
        await bank.responses.create(model=MODEL, input="x", previous_response_id=response)


async def test_a_request_that_is_repeated_belongs_to_where_it_was(asking):
    client = asking.client(await asking.application())
    key = {"extra_headers": {"Idempotency-Key": "k"}}
    raws = [await say(client, [], "hi", **key) for _ in range(2)]
    assert session_of(raws[0]) == session_of(raws[1])
    assert raws[0].parse() == raws[1].parse()
    assert len(asking.calls(session_of(raws[0]))) == 1


async def test_what_is_refused_begins_no_session(asking):
    client = asking.client(await asking.application())
    for wrong in ({"temperature": -1}, {"model": "gpt-4"}, {"messages": []}):
        asked = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **wrong}
        with pytest.raises(Exception, match=next(iter(wrong))):
            await client.chat.completions.create(**asked)
    assert asking.ids() == []


async def test_anthropics_client_with_an_applications_key(asking):
    client = anthropic.AsyncAnthropic(
        base_url=asking.root, api_key=await asking.application(), max_retries=0
    )
    talk = [{"role": "user", "content": "hi"}]
    asked = {"model": MODEL, "max_tokens": 12}
    first = await client.messages.with_raw_response.create(messages=talk, **asked)
    answer = await first.parse()
    said = [block.model_dump(include={"type", "text"}) for block in answer.content]
    talk += [{"role": "assistant", "content": said}, {"role": "user", "content": "why?"}]
    async with client.messages.stream(messages=talk, **asked) as stream:
        await stream.get_final_message()
        then = stream.response.headers[HEADER]
    assert session_of(first) == then
    counted = await client.messages.count_tokens(model=MODEL, messages=talk[:1])
    assert counted.input_tokens == len(asking.calls(then)[0].call.prompt_ids)


async def test_the_admin_opens_sessions_and_does_not_talk(asking):
    from tests.serving.served import ADMIN

    with pytest.raises(Exception, match="open a session"):
        await say(asking.client(ADMIN), [], "hi")
    models = await asking.client(ADMIN).models.list()
    assert [model.id for model in models.data] == [MODEL]
