"""What requests have in common is stored once, attended to once, and changes no number."""

import gc
import weakref

import pytest
import torch
from torch.nn import functional as F

from tests.engines.models import error, generate_all, make_engine, make_model, prompt
from tuner.engines import SamplingParams
from tuner.engines.transformers import cascade
from tuner.engines.transformers import slot_rows as rows
from tuner.engines.transformers.cascade import RowAttention, levels_of
from tuner.engines.transformers.kv_cache import Placement, Prefix, SlotCache
from tuner.engines.transformers.passes import is_plain
from tuner.engines.transformers.threads import FewThreads

HEADS, KV_HEADS, WIDTH = 4, 2, 8
CPU = torch.device("cpu")


def prefix(parent, length):
    states = [[torch.randn(1, KV_HEADS, length, WIDTH)] for _ in range(2)]
    start = parent.end if parent else 0
    return Prefix(parent, start, start + length, *states)


def chain(leaf):
    return [*chain(leaf.parent), leaf] if leaf else []


def wanted(leaf, keys, values, query, position, window):
    """Attention of one token to all that comes before it, one head after the other."""
    parts = chain(leaf)
    key = torch.cat([*(p.keys[0][0] for p in parts), keys.transpose(0, 1)], 1)[:, : position + 1]
    value = torch.cat([*(p.values[0][0] for p in parts), values.transpose(0, 1)], 1)
    value = value[:, : position + 1]
    if window:
        key, value = key[:, -window:], value[:, -window:]
    group = HEADS // KV_HEADS
    key, value = key.repeat_interleave(group, 0), value.repeat_interleave(group, 0)
    return F.scaled_dot_product_attention(query[:, None], key, value, scale=0.3)[:, 0]


@pytest.mark.parametrize("window", [None, 4, 9])
@pytest.mark.parametrize("columns", [1, 3])
def test_attention_over_prefixes_and_rows_is_that_over_all_tokens(window, columns):
    torch.manual_seed(0)
    system = prefix(None, 5)
    task, other = prefix(system, 3), prefix(system, 7)
    leaves = [task, None, other, task, system]
    own = torch.tensor([[2, 3, 4], [5, 6, 7], [0, 1, 2], [1, 2, 3], [3, 4, 5]])[:, -columns:]
    base = torch.tensor([[leaf.end if leaf else 0] for leaf in leaves])
    cache = SlotCache(1, len(leaves), 12)
    layer = cache.rows[0]
    filled = torch.arange(len(leaves) * cache.width)
    cache.placement = Placement(slice(0, 5), 8, filled, None, own, levels_of(leaves, CPU))
    layer.write(*torch.randn(2, len(filled), KV_HEADS, WIDTH))
    query = torch.randn(5, columns, HEADS, WIDTH)
    attention = RowAttention(cache, cache.placement, own + base, window, torch.float32)
    got = attention.attend(layer, query, 0.3)
    assert [len(level.parts) for level in cache.placement.levels] == [1, 2]
    for row, leaf in enumerate(leaves):
        for column in range(columns):
            position = int(own[row, column] + base[row])
            exact = wanted(
                leaf, layer.keys[row], layer.values[row], query[row, column], position, window
            )
            torch.testing.assert_close(got[row, column], exact, atol=1e-5, rtol=1e-5)


@pytest.fixture
def prefixes(monkeypatch):
    """Those that are held. Not by `gc.get_objects`, which breaks what other threads are making."""
    made, begin = [], Prefix.__init__

    def begun(self, *args):
        begin(self, *args)
        made.append(weakref.ref(self))

    def held():
        gc.collect()
        return [prefix for found in made if (prefix := found()) is not None]

    monkeypatch.setattr(Prefix, "__init__", begun)
    return held


@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
async def test_a_group_reads_its_prompt_once_a_step_and_keeps_it_once(kind, prefixes, monkeypatch):
    model = make_model(kind)
    engine = make_engine(model, max_slots=8, max_model_len=500)
    read, flash = [], cascade.flash

    def counted(query, key, value, **options):
        read.append((len(key), key.shape[2]))
        return flash(query, key, value, **options)

    monkeypatch.setattr(cascade, "flash", counted)
    ids = prompt(300)
    asked = [(ids, SamplingParams(max_tokens=12, seed=seed)) for seed in range(8)]
    for (_, sampling), got in zip(asked, await generate_all(engine, asked), strict=True):
        assert error(model, ids, got, sampling) < 1e-5
    # After the first token, which one request computed for all, in each of two layers.
    steps = [size for size in read if size == (1, 299)]
    assert len(steps) == 2 * 12
    assert not [size for size in read if size[0] > 1 and size[1] > 128]
    (kept,) = prefixes()
    assert (kept.start, kept.end, kept.parent) == (0, 299, None)
    assert engine._runner._cache.capacity == 128


async def test_groups_of_groups_are_found_from_their_tokens(prefixes):
    model = make_model()
    engine = make_engine(model, max_slots=8, max_model_len=500)
    tasks = [[*prompt(150), *prompt(120, seed)] for seed in (1, 2)]
    asked = [(ids, SamplingParams(max_tokens=9, seed=seed)) for ids in tasks for seed in range(4)]
    for (ids, sampling), got in zip(asked, await generate_all(engine, asked), strict=True):
        assert error(model, ids, got, sampling) < 1e-5
    held = sorted((p.start, p.end) for p in prefixes())
    assert held == [(0, 150), (150, 269), (150, 269)]
    # Weights that change leave none of it.
    await engine.update_weights(1)
    assert not prefixes()


async def test_conversations_keep_what_they_share_from_turn_to_turn(prefixes):
    model = make_model("mistral", sliding_window=200)
    engine = make_engine(model, max_slots=4)
    histories = [prompt(200) for _ in range(4)]
    for turn in range(4):
        asked = [
            (ids, SamplingParams(max_tokens=7, seed=10 * turn + n))
            for n, ids in enumerate(histories)
        ]
        answers = await generate_all(engine, asked)
        for n, ((ids, sampling), got) in enumerate(zip(asked, answers, strict=True)):
            assert error(model, ids, got, sampling) < 1e-5
            assert not turn or got.cached_tokens == len(ids) - 6
            histories[n] = [*ids, *got.completion_ids, *prompt(5, turn)]
        assert [(p.start, p.end) for p in prefixes()] == [(0, 199)]


@pytest.mark.long
@pytest.mark.parametrize("little", [0, 8192])
@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
async def test_one_long_conversation_costs_short_ones_neither_time_nor_memory(
    kind, little, prefixes, monkeypatch
):
    monkeypatch.setattr(rows, "_LITTLE", little)
    monkeypatch.setattr(rows, "_OPERATION", 4096)
    model = make_model(kind)
    engine = make_engine(model, max_slots=8, max_model_len=500)
    read, room, flash = [], set(), cascade.flash

    def counted(query, key, value, **options):
        read.append((len(key), key.shape[2]))
        room.add(engine._runner._cache.capacity)
        return flash(query, key, value, **options)

    monkeypatch.setattr(cascade, "flash", counted)
    history = prompt(230, 9)
    for turn in range(3):
        short = [(prompt(20, 8 * turn + n), SamplingParams(max_tokens=9)) for n in range(7)]
        asked = [*short, (history, SamplingParams(max_tokens=30, seed=turn))]
        answers = await generate_all(engine, asked)
        for (ids, sampling), got in zip(asked, answers, strict=True):
            assert error(model, ids, got, sampling) < 1e-5
        history += [*answers[-1].completion_ids, *prompt(40, turn)]
    # What the long one has is read by itself, and held as one, whenever it was stored. Where room
    # behind all rows is much, none is made for its prompt, which is computed in parts.
    assert max(length for count, length in read if count > 1) <= (170 if little else 128)
    assert room == ({128, 256} if little else {128})
    assert engine._runner._cache.capacity == max(room)
    (kept,) = prefixes()
    assert (kept.start, kept.parent) == (0, None)
    assert kept.end > (190 if little else 256)


@pytest.mark.parametrize("lengths", [(140, 120, 140), (120, 140, 120)])
async def test_a_prompt_that_is_computed_in_parts_is_computed_alone(lengths, monkeypatch):
    monkeypatch.setattr(rows, "_LITTLE", 0)
    engine = make_engine(model := make_model(), max_slots=8, max_model_len=500)
    short = [(prompt(20, n), SamplingParams(max_tokens=1)) for n in range(5)]
    await generate_all(engine, short)
    asked = [(prompt(n, n + at), SamplingParams(max_tokens=4)) for at, n in enumerate(lengths)]
    for (ids, sampling), got in zip(asked, await generate_all(engine, asked), strict=True):
        assert error(model, ids, got, sampling) < 1e-5
    assert engine._runner._cache.capacity == 128


async def test_conversations_that_go_on_at_once_need_no_more_room(prefixes, monkeypatch):
    monkeypatch.setattr(rows, "_LITTLE", 0)
    engine = make_engine(model := make_model(), max_slots=8, max_model_len=500)
    short = [(prompt(9, n), SamplingParams(max_tokens=1)) for n in range(5)]
    asked = [(prompt(100, 7 + n), SamplingParams(max_tokens=4)) for n in range(2)]
    answers = (await generate_all(engine, [*short, *asked]))[5:]
    asked = [
        ([*ids, *got.completion_ids, *prompt(40, n)], SamplingParams(max_tokens=4))
        for n, ((ids, _), got) in enumerate(zip(asked, answers, strict=True))
    ]
    asked = [(prompt(40, 20), SamplingParams(max_tokens=4)), *asked]
    for (ids, sampling), got in zip(asked, await generate_all(engine, asked), strict=True):
        assert error(model, ids, got, sampling) < 1e-5
        assert got.cached_tokens == (103 if len(ids) > 100 else 0)
    assert engine._runner._cache.capacity == 128
    assert [kept.end for kept in prefixes()] == [103, 103]


async def test_rows_that_are_about_as_long_stay_together(prefixes, monkeypatch):
    monkeypatch.setattr(rows, "_OPERATION", 4096)
    engine = make_engine(make_model(), max_slots=8, max_model_len=500)
    lengths = (200, 210, 220, 230, 240, 250, 260, 270)
    asked = [(prompt(length, length), SamplingParams(max_tokens=5)) for length in lengths]
    await generate_all(engine, asked)
    assert not prefixes()


# The forward pass that is ours


@pytest.mark.parametrize(
    ("kind", "plain"),
    [("qwen3", True), ("llama", True), ("mistral", True), ("gemma3", False), ("phi3", False)],
)
def test_models_are_known_by_their_modules(kind, plain):
    model = make_model(kind)
    assert is_plain(model) == plain
    if plain:
        model.model.layers[0].self_attn.gate = torch.nn.Linear(2, 2)
        assert not is_plain(model)


def code_run(model, monkeypatch):
    """Notes each time that the model's own code is run."""
    runs, forward = [], type(model).forward

    def noted(self, *args, **kwargs):
        runs.append(1)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(model), "forward", noted)
    return runs


async def test_where_somebody_watches_a_module_the_models_own_code_is_run(monkeypatch):
    model = make_model()
    engine = make_engine(model)
    runs = code_run(model, monkeypatch)
    ids, sampling = prompt(20), SamplingParams(max_tokens=5)
    got = await engine.generate(ids, sampling, "session")
    assert not runs
    seen = []
    handle = model.model.layers[1].self_attn.register_forward_hook(lambda *_: seen.append(1))
    again = await engine.generate(prompt(20, 1), sampling, "session")
    assert len(seen) == len(runs) == 5
    handle.remove()
    assert error(model, ids, got, sampling) < 1e-5
    assert error(model, prompt(20, 1), again, sampling) < 1e-5


async def test_a_model_whose_code_does_more_than_its_modules_say_is_run_by_its_own(monkeypatch):
    model = make_model()
    with torch.no_grad():
        model.lm_head.weight.mul_(0.5)
    plainly = type(model).forward

    def capped(self, *args, **kwargs):
        output = plainly(self, *args, **kwargs)
        output.logits = 3 * torch.tanh(output.logits / 3)
        return output

    monkeypatch.setattr(type(model), "forward", capped)
    engine = make_engine(model)
    runs = code_run(model, monkeypatch)
    ids, sampling = prompt(20), SamplingParams(max_tokens=5)
    got = await engine.generate(ids, sampling, "session")
    assert len(runs) == 5
    assert error(model, ids, got, sampling) < 1e-5


async def test_small_steps_are_computed_with_one_thread_and_large_ones_with_all(monkeypatch):
    model = make_model()
    engine = make_engine(model, max_slots=8)
    used, flash = {}, cascade.flash

    def noted(query, *args, **options):
        used.setdefault(query.shape[2] > 4, set()).add(torch.get_num_threads())
        return flash(query, *args, **options)

    monkeypatch.setattr(cascade, "flash", noted)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        # A product of 32 x 32 numbers with so many tokens is worth two.
        monkeypatch.setattr(engine._runner._threads, "_most_tokens", 40)
        await engine.generate(prompt(60), SamplingParams(max_tokens=3), "session")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert used == {True: {2}, False: {1}}


def test_what_is_worth_threads_is_a_models_own_products():
    few = FewThreads(make_model())._most_tokens
    assert FewThreads(make_model(hidden_size=64, intermediate_size=128))._most_tokens < few / 2
