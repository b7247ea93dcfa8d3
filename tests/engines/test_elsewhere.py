"""Servers behind addresses: cut connections, keys, and folders that they do not see."""

import asyncio
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.engines.conformance import LONG, TOLERANCE, Rig, Sink, error, make_rig_model
from tests.engines.elsewhere import KEY, Proxy, ToyHost, each, served
from tests.engines.local_server import LocalServer
from tests.engines.models import VOCABULARY, change_weights, make_tokenizer, prompt
from tests.engines.sglang_rig import StandIn, connected
from tests.engines.sglang_rig import engine as sglang_engine
from tuner import JudgeOutput, WorkflowOutput, tune
from tuner.engines import EngineError, EngineLostError, SamplingParams
from tuner.engines.remote import ServedEngine
from tuner.engines.vllm.client import VllmServer
from tuner.engines.vllm.core import VllmSettings

TINY = Path(__file__).parents[2] / "models" / "tiny_math"
SHORT = SamplingParams(max_tokens=3)
SETTINGS = VllmSettings("float32", 256, 16, (make_tokenizer().eos_token_id,))


def engine_over(server, model, folder, **options):
    given = {"max_restarts": 2, "every_setting": True, **options}
    return ServedEngine(
        [server],
        save=model.save_pretrained,
        folder=folder,
        tokenizer=make_tokenizer(),
        end_ids=frozenset({make_tokenizer().eos_token_id}),
        vocabulary=VOCABULARY,
        max_model_len=256,
        **given,
    )


@pytest.fixture
def there():
    """A server at an address."""
    host = ToyHost(LocalServer())
    with served(host) as address, Proxy(address).running() as proxy:
        yield host, proxy


@pytest.fixture
def fleet(there, tmp_path):
    """An engine over that server behind a line that can be cut, and the model."""
    _, proxy = there
    model = make_rig_model()
    return engine_over(VllmServer(proxy.url, KEY, SETTINGS), model, tmp_path / "w"), model


def exact(engine, model, ids, got, sampling):
    return error(Rig(engine, model, lambda: None, ""), ids, got, sampling) < TOLERANCE


async def cut_once(proxy, engine):
    """A request whose connection is cut in the middle of its answer."""
    before = proxy.cut_count
    proxy.cuts = each(3, "/generate", 'tokens":199,')
    with pytest.raises(EngineLostError, match="broke off"):
        await engine.generate(prompt(9), replace(LONG, max_tokens=199), "cut")
    proxy.cuts = lambda asked, answered: False
    assert proxy.cut_count == before + 1


@pytest.mark.long
async def test_each_part_of_a_completion_has_the_adapter_of_its_request(fleet, there):
    sink, (engine, _) = Sink(), fleet
    request = asyncio.ensure_future(engine.generate(prompt(9), LONG, "s", sink, adapter="a"))
    await sink.has(5)
    async with engine.pause():
        pass
    await request
    await engine.generate(prompt(9), replace(LONG, max_tokens=1), "s")
    assert there[0].local.adapters == ["a", "a", None]


@pytest.mark.long
async def test_a_cut_line_fails_its_own_requests_and_nobody_elses(fleet, there):
    (engine, model), (host, proxy) = fleet, there
    await engine.start()
    assert len(host.local.loaded) == 1
    # More often than servers may be started again.
    for _ in range(4):
        sink = Sink()
        other = asyncio.ensure_future(engine.generate(prompt(12), LONG, "other", sink))
        await sink.has(2)
        await cut_once(proxy, engine)
        got = await engine.generate(prompt(5), SHORT, "again")
        assert not other.done() or not other.exception()
        assert exact(engine, model, prompt(12), await other, LONG)
        assert exact(engine, model, prompt(5), got, SHORT)
    assert len(host.local.loaded) == 1
    assert engine.stats.restarts == 0
    assert engine.failure is None
    await engine.close()


async def test_an_update_whose_answer_is_cut_is_done_once_and_counted(fleet, there):
    (engine, model), (host, proxy) = fleet, there
    await engine.start()
    change_weights(model)
    proxy.cuts = partial(_first, proxy, 0, "/load")
    await engine.update_weights(1)
    assert proxy.cut_count == 1
    # The server had loaded them when its answer was lost: it is asked again and has them.
    assert len(host.local.loaded) == 2
    assert engine.stats.restarts == 1
    got = await engine.generate(prompt(9), SHORT, "s")
    assert got.versions == (1, 1, 1)
    assert exact(engine, model, prompt(9), got, SHORT)
    await engine.close()


async def test_an_update_after_a_cut_stream_is_no_start(fleet, there):
    (engine, model), (_, proxy) = fleet, there
    await engine.start()
    await cut_once(proxy, engine)
    change_weights(model)
    await engine.update_weights(1)
    assert engine.stats.restarts == 0
    got = await engine.generate(prompt(9), SHORT, "s")
    assert got.versions == (1, 1, 1)
    assert exact(engine, model, prompt(9), got, SHORT)
    await engine.close()


async def test_a_server_that_was_started_again_meanwhile_gets_the_weights(fleet, there):
    (engine, model), (host, _) = fleet, there
    await engine.start()
    host._alive = False
    with pytest.raises(EngineLostError):
        await engine.generate(prompt(9), SHORT, "s")
    got = await engine.generate(prompt(9), SHORT, "s")
    assert exact(engine, model, prompt(9), got, SHORT)
    assert engine.stats.restarts == 1
    await engine.close()


async def test_loads_come_one_at_a_time_and_the_same_one_only_once(tmp_path):
    """As where the second is asked for while a lost connection's first is still under way."""
    from tuner.engines.servers import Weights

    host, model = ToyHost(LocalServer()), make_rig_model()
    model.save_pretrained(tmp_path)
    weights = Weights(tmp_path, "one")
    await asyncio.gather(*(host.load(SETTINGS, weights) for _ in range(3)))
    assert host.local.loaded == ["one"]


async def test_a_wrong_key_is_refused_by_name(there, tmp_path):
    _, proxy = there
    engine = engine_over(VllmServer(proxy.url, "guess", SETTINGS), make_rig_model(), tmp_path / "w")
    with pytest.raises(
        EngineError, match=r"(?s)key is missing or wrong.*tuner\.engine\.api_key_env"
    ):
        await engine.start()
    await engine.close()


async def test_folders_that_the_server_does_not_see_are_refused_by_name(there, tmp_path):
    _, proxy = there
    model = make_rig_model()
    nowhere = VllmSettings("float32", 256, 16, SETTINGS.end_ids, tokenizer="/nowhere/model")
    engine = engine_over(VllmServer(proxy.url, KEY, nowhere), model, tmp_path / "w")
    with pytest.raises(
        EngineError, match=r"model\.model_path is /nowhere/model, which does not exist"
    ):
        await engine.start()
    await engine.close()

    class Elsewhere(VllmServer):
        """Between two machines a path is another folder."""

        def load(self, weights):
            from tuner.engines.servers import Weights

            super().load(Weights(weights.folder.with_name("unseen"), weights.label))

    engine = engine_over(Elsewhere(proxy.url, KEY, SETTINGS), model, tmp_path / "v")
    with pytest.raises(EngineError, match=r"unseen, which does not exist .* the run"):
        await engine.start()
    assert "the run directory must be on a disk" in str(engine.failure)
    await engine.close()


@pytest.fixture(scope="module")
def sglang(tmp_path_factory):
    """A stand-in for SGLang's server."""
    folder = tmp_path_factory.mktemp("sglang")
    make_rig_model().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    server = StandIn(folder, KEY)
    yield server
    server.stop()


@pytest.mark.long
async def test_a_cut_line_to_sglang_fails_its_own_requests_and_nobody_elses(sglang, tmp_path):
    model = make_rig_model()
    with Proxy(("127.0.0.1", sglang._port)).running() as proxy:
        made = sglang_engine(
            [connected(proxy.url, KEY)], model.save_pretrained, tmp_path / "w", max_restarts=1
        )
        await made.start()
        for _ in range(3):
            sink = Sink()
            other = asyncio.ensure_future(made.generate(prompt(12), LONG, "other", sink))
            await sink.has(2)
            await cut_once(proxy, made)
            got = await made.generate(prompt(5), SHORT, "again")
            assert exact(made, model, prompt(12), await other, LONG)
            assert exact(made, model, prompt(5), got, SHORT)
        assert made.stats.restarts == 0
        # An update that is cut in any of its three requests.
        for version, path in enumerate(
            ("/pause_generation", "/update_weights_from_disk", "/continue_generation"), start=1
        ):
            made._fleet._max_restarts = version
            change_weights(model)
            before = proxy.cut_count
            proxy.cuts = partial(_first, proxy, before, path)
            await made.update_weights(version)
            assert proxy.cut_count == before + 1
            got = await asyncio.wait_for(made.generate(prompt(5), SHORT, "s"), 60)
            assert got.versions == (version,) * 3
            assert exact(made, model, prompt(5), got, SHORT)
        await made.close()


def _first(proxy, before, path, asked, answered):
    return proxy.cut_count == before and asked.startswith(b"POST " + path.encode())


async def two_turns(task, model):
    """A plain call, then a streamed one that continues it."""
    messages = [{"role": "user", "content": task["question"]}]
    first = await model.client.chat.completions.create(model=model.model_name, messages=messages)
    text = first.choices[0].message.content or ""
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "And then?"}]
    stream = await model.client.chat.completions.create(
        model=model.model_name, messages=messages, stream=True
    )
    async with stream:
        parts = [c.choices[0].delta.content or "" async for c in stream if c.choices]
    return WorkflowOutput(response=text + "".join(parts))


async def by_letters(task, response):
    return JudgeOutput(reward=sum(map(ord, response)) % 17 / 17)


def counted(row):
    dropped = sum(n for name, n in row.items() if name.startswith("tokens/dropped/"))
    return row["tokens/sampled"] == row["tokens/trained"] + dropped


def run_elsewhere(url, folder, *overrides):
    """A run of three steps whose engine is at an address."""
    return tune(
        two_turns,
        by_letters,
        [{"question": f"Tom has {n} pens. He buys 2 more. How many pens now?"} for n in range(6)],
        overrides=[
            f"model.model_path={TINY}",
            "model.max_model_len=512",
            "model.max_response_tokens=32",
            "explorer.rollout_model.engine_type=vllm",
            f"tuner.engine.urls=[{url}]",
            "tuner.device=cpu",
            f"checkpoint_root_dir={folder}",
            "buffer.batch_size=2",
            "buffer.total_steps=3",
            "algorithm.repeat_times=4",
            "explorer.max_retry_times=3",
            *overrides,
        ],
    )


@pytest.mark.long
def test_a_run_goes_on_through_cut_streams_and_a_cut_update(tmp_path, monkeypatch):
    monkeypatch.setenv("TUNER_ENGINE_KEY", KEY)
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    host = ToyHost(LocalServer(tokenizer=tokenizer, max_model_len=512))
    with served(host) as address, Proxy(address).running() as proxy:
        streams, updates = each(150, "/generate"), []

        def cuts(asked, answered):
            if asked.startswith(b"POST /load") and len(host.local.loaded) == 2 and not updates:
                updates.append(1)
                return True
            return streams(asked, answered)

        proxy.cuts = cuts
        result = run_elsewhere(proxy.url, tmp_path)
    assert proxy.cut_count > 3
    assert updates
    steps = [row for row in result.history if row["step"]]
    assert len(steps) == 3
    assert all(counted(row) for row in steps)
    # Whatever was cut was asked for again; nothing of it was trained.
    assert result.outcomes["completed"] == 24
    assert len(host.local.loaded) == 4
