"""An engine over servers with copies of the weights: affinity, parts, restarts, hand-over."""

import asyncio

import pytest

from tests.engines.conformance import (
    CONTEXT,
    LONG,
    TOLERANCE,
    Rig,
    Sink,
    error,
    make_rig_model,
)
from tests.engines.local_server import LocalServer
from tests.engines.models import VOCABULARY, change_weights, make_tokenizer, prompt
from tuner.engines import EngineError, EngineLostError, SamplingParams
from tuner.engines.remote import ServedEngine

SHORT = SamplingParams(max_tokens=3)


def make_engine(servers, model, tmp_path, **options):
    return ServedEngine(
        servers,
        save=model.save_pretrained,
        folder=tmp_path / "weights",
        tokenizer=make_tokenizer(),
        end_ids=frozenset({make_tokenizer().eos_token_id}),
        vocabulary=VOCABULARY,
        max_model_len=CONTEXT,
        max_restarts=2,
        every_setting=True,
        **options,
    )


@pytest.fixture
def fleet(tmp_path):
    """Two servers, an engine over them, and the model that is served."""
    model, servers = make_rig_model(), [LocalServer("one"), LocalServer("two")]
    return make_engine(servers, model, tmp_path), servers, model


@pytest.mark.long
async def test_the_turns_of_a_session_go_to_one_server_and_sessions_to_the_free_one(fleet):
    engine, servers, _ = fleet
    sinks = [Sink(), Sink()]
    running = [
        asyncio.ensure_future(engine.generate(prompt(5), LONG, f"session {n}", sinks[n]))
        for n in range(2)
    ]
    await asyncio.gather(*running)
    assert [len(server.asked) for server in servers] == [1, 1]
    for turn in range(3):
        await engine.generate(prompt(6 + turn), SHORT, "session 1")
    assert [len(server.asked) for server in servers] == [1, 4]
    await engine.close()


async def test_each_part_of_a_completion_has_its_own_random_numbers(fleet):
    engine, servers, _ = fleet
    sink = Sink()
    request = asyncio.ensure_future(engine.generate(prompt(9), LONG, "s", sink))
    await sink.has(5)
    async with engine.pause():
        held = [token for token, _, _ in sink.tokens]
    await request
    (first, seed), (second, other) = servers[0].asked
    assert second == [*first, *held]
    assert seed == LONG.seed
    assert other != seed
    await engine.close()


async def test_a_completion_whose_own_tokens_are_counted_is_not_cut_in_two(fleet):
    engine, servers, _ = fleet
    sink, sampling = Sink(), SamplingParams(max_tokens=40, presence_penalty=0.5)
    request = asyncio.ensure_future(engine.generate(prompt(9), sampling, "s", sink))
    await sink.has(5)
    async with engine.pause():
        assert len(sink.tokens) == 40
    await request
    assert len(servers[0].asked) == 1
    await engine.close()


async def test_a_server_that_died_is_started_with_the_weights_that_are_served(fleet):
    engine, servers, model = fleet
    await engine.start()
    change_weights(model)
    await engine.update_weights(7)
    await engine.generate(prompt(5), SHORT, "s")
    for server in servers:
        server.die()
    with pytest.raises(EngineLostError, match="one is on fire"):
        await engine.generate(prompt(5), SHORT, "s")
    assert engine.failure is None
    # A crowd that finds it dead starts it once.
    results = await asyncio.gather(*(engine.generate(prompt(5, n), SHORT, "s") for n in range(6)))
    assert {version for got in results for version in got.versions} == {7}
    assert servers[0].loaded[-1] == servers[0].loaded[-2]
    assert engine.stats.restarts == 1
    await engine.close()


async def test_a_server_that_dies_of_an_update_gets_the_new_weights(fleet):
    engine, servers, _ = fleet
    await engine.start()
    servers[1].dies_loading = True
    await engine.update_weights(1)
    assert servers[0].loaded[-1] == servers[1].loaded[-1]
    assert engine.stats.restarts == 1
    await engine.close()


async def test_too_many_deaths_are_the_end_and_say_of_what(fleet):
    engine, servers, _ = fleet
    await engine.start()
    for death in range(3):
        servers[0].die()
        with pytest.raises(EngineLostError):
            await engine.generate(prompt(5), SHORT, "s")
        if death < 2:
            await engine.generate(prompt(5), SHORT, "s")
    for _ in range(2):
        with pytest.raises(EngineError, match=r"(?s)max_restarts is 2.*one is on fire"):
            await engine.generate(prompt(5), SHORT, "s")
    assert "one is on fire" in str(engine.failure)
    with pytest.raises(EngineError, match="one is on fire"):
        await engine.update_weights(1)
    await engine.close()


async def test_weights_are_handed_over_once_and_removed(fleet, tmp_path):
    engine, servers, _ = fleet
    await engine.start()
    for version in (1, 2):
        await engine.update_weights(version)
        (folder,) = (tmp_path / "weights").iterdir()
        assert folder.name == servers[0].loaded[-1] == servers[1].loaded[-1]
        assert f"-{version}-" in folder.name
    await engine.close()
    assert not (tmp_path / "weights").exists()


async def test_close_fails_what_is_in_flight_and_what_comes_later(fleet):
    engine, _, _ = fleet
    sink = Sink()
    request = asyncio.ensure_future(engine.generate(prompt(5), LONG, "s", sink))
    await sink.has(3)
    await engine.close()
    with pytest.raises(EngineError, match="closed"):
        await request
    with pytest.raises(EngineError, match="closed"):
        await engine.generate(prompt(5), SHORT, "s")


def test_one_event_loop_after_another(fleet):
    engine, _, _ = fleet

    async def abandon():
        sink = Sink()
        task = asyncio.ensure_future(engine.generate(prompt(5), LONG, "s", sink))
        await sink.has(3)
        assert not task.done()

    for _ in range(2):
        asyncio.run(abandon())
        got = asyncio.run(asyncio.wait_for(engine.generate(prompt(5), SHORT, "s"), 30))
        assert len(got.completion_ids) == 3
    assert engine.stats.running == 0
    asyncio.run(engine.close())


def rig_of(engine, model):
    return Rig(engine, model, lambda: None, "")


@pytest.mark.parametrize("direct", [False, True])
async def test_no_server_is_started_with_weights_that_are_half_changed(tmp_path, direct):
    """A request that finds none running while weights change waits for those of the update."""
    model = make_rig_model()
    server = LocalServer(trained=model)
    engine = make_engine([server], model, tmp_path, direct=direct)
    ids = prompt(9)
    async with engine.training():
        request = asyncio.ensure_future(engine.generate(ids, SHORT, "s"))
        for _ in range(100):
            await asyncio.sleep(0)
        assert server.did == []
        change_weights(model)
        await engine.update_weights(1)
    got = await asyncio.wait_for(request, 30)
    assert server.did == ["start"]
    assert got.versions == (1, 1, 1)
    assert error(rig_of(engine, model), ids, got, SHORT) < TOLERANCE
    await engine.close()


async def test_a_server_that_dies_during_training_is_started_at_once_from_a_folder(fleet):
    """The weights that it should serve are there, whatever becomes of the trainer's."""
    engine, servers, model = fleet
    await engine.start()
    before = make_rig_model()
    servers[0].die()
    async with engine.training():
        change_weights(model)
        with pytest.raises(EngineLostError):
            await engine.generate(prompt(9), SHORT, "s")
        got = await asyncio.wait_for(engine.generate(prompt(9), SHORT, "s"), 30)
        assert got.versions == (0, 0, 0)
        assert error(rig_of(engine, before), prompt(9), got, SHORT) < TOLERANCE
        await engine.update_weights(1)
    await engine.close()


async def test_weights_that_are_sent_are_written_only_for_a_server_that_starts(tmp_path):
    model = make_rig_model()
    servers = [LocalServer("one", model), LocalServer("two", model)]
    engine = make_engine(servers, model, tmp_path, direct=True)
    await engine.start()
    (started,) = (tmp_path / "weights").iterdir()
    async with engine.training():
        change_weights(model)
        await engine.update_weights(1)
    assert [server.did for server in servers] == [["start", "send"]] * 2
    assert list((tmp_path / "weights").iterdir()) == []
    assert not started.exists()

    # It dies while weights change: those that it should serve are nowhere until the update.
    servers[0].die()
    with pytest.raises(EngineLostError):
        await engine.generate(prompt(9), SHORT, "s")
    async with engine.training():
        change_weights(model)
        request = asyncio.ensure_future(engine.generate(prompt(9), SHORT, "s"))
        other = await asyncio.wait_for(engine.generate(prompt(9), SHORT, "t"), 30)
        assert other.versions == (1, 1, 1)
        assert not request.done()
        await engine.update_weights(2)
    got = await asyncio.wait_for(request, 30)
    assert got.versions == (2, 2, 2)
    assert error(rig_of(engine, model), prompt(9), got, SHORT) < TOLERANCE
    assert [server.did for server in servers] == [
        ["start", "send", "start"],
        ["start", "send", "load"],  # of the folder that is there now
    ]

    # It dies between updates: the weights are whole, and written for it.
    servers[0].die()
    with pytest.raises(EngineLostError):
        await engine.generate(prompt(9), SHORT, "s")
    got = await engine.generate(prompt(9), SHORT, "s")
    assert got.versions == (2, 2, 2)
    assert error(rig_of(engine, model), prompt(9), got, SHORT) < TOLERANCE
    await engine.close()
    assert not (tmp_path / "weights").exists()


async def test_who_makes_room_for_training_sleeps_until_the_new_weights(tmp_path):
    did: list[str] = []
    model = make_rig_model()
    engine = make_engine([LocalServer(did=did)], model, tmp_path, sleeps=True)
    await engine.start()
    sink = Sink()
    request = asyncio.ensure_future(engine.generate(prompt(9), LONG, "s", sink))
    await sink.has(3)
    async with engine.training():
        held = len(sink.tokens)
        did.append("train")
        change_weights(model)
        await engine.update_weights(1)
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(sink.tokens) == held
    got = await asyncio.wait_for(request, 60)
    assert did == ["start", "sleep", "train", "load"]
    assert got.versions == (0,) * held + (1,) * (200 - held)

    # Nothing was trained after all: the weights as they are come back.
    async with engine.training():
        pass
    assert did[4:] == ["sleep", "load"]
    assert (await engine.generate(prompt(9), SHORT, "s")).versions == (1, 1, 1)
    await engine.close()


async def test_a_sleeper_that_has_died_is_started_with_the_new_weights(tmp_path):
    model, server = make_rig_model(), LocalServer()
    engine = make_engine([server], model, tmp_path, sleeps=True)
    await engine.start()
    server.die()
    async with engine.training():
        change_weights(model)
        await engine.update_weights(1)
    got = await engine.generate(prompt(9), SHORT, "s")
    assert server.did == ["start", "start"]
    assert error(rig_of(engine, model), prompt(9), got, SHORT) < TOLERANCE
    await engine.close()
