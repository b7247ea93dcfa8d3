"""An engine over servers with copies of the weights: affinity, parts, restarts, hand-over."""

import asyncio

import pytest

from tests.engines.conformance import CONTEXT, LONG, Sink, make_rig_model
from tests.engines.local_server import LocalServer
from tests.engines.models import VOCABULARY, change_weights, make_tokenizer, prompt
from tuner.engines import EngineError, EngineLostError, SamplingParams
from tuner.engines.served import ServedEngine

SHORT = SamplingParams(max_tokens=3)


@pytest.fixture
def fleet(tmp_path):
    """Two servers, an engine over them, and the model that is served."""
    model, servers = make_rig_model(), [LocalServer("one"), LocalServer("two")]
    engine = ServedEngine(
        servers,
        save=model.save_pretrained,
        folder=tmp_path / "weights",
        tokenizer=make_tokenizer(),
        end_ids=frozenset({make_tokenizer().eos_token_id}),
        vocabulary=VOCABULARY,
        max_model_len=CONTEXT,
        max_restarts=2,
    )
    return engine, servers, model


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
