"""Random numbers of rollouts that run at the same time are those that they draw alone."""

import asyncio
import random

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.tasks.functions import call_function
from tuner.tasks.random_states import RandomStates


def drawn():
    return random.random(), float(np.random.rand()), float(torch.rand(()))


async def child(turns):
    found = []
    for turn in turns:
        await asyncio.sleep(0)
        found += [drawn()] if turn else []
    return found


def agent(turns):
    """Draws in its own steps, in those of a task, and in a plain function."""

    async def run():
        found = [drawn()]
        for turn in turns:
            await asyncio.sleep(0)
            if turn == 2:
                found += await asyncio.create_task(child([1, 0, 1]))
            elif turn:
                found.append(drawn())
        return found

    return run


def plain(turns):
    return [drawn() for turn in turns if turn]


async def called(turns, states):
    async def both():
        found = await call_function(agent(turns), {})
        return found + await call_function(lambda: plain(turns), {})

    return await states.stepping(both())


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), max_size=6), min_size=1, max_size=5))
def test_concurrent_rollouts_draw_what_they_draw_alone(rollouts):
    async def together():
        return await asyncio.gather(
            *(called(turns, RandomStates(seed)) for seed, turns in enumerate(rollouts))
        )

    alone = [asyncio.run(called(turns, RandomStates(n))) for n, turns in enumerate(rollouts)]
    assert asyncio.run(together()) == alone


async def test_a_rollout_that_is_cancelled_while_it_waits_for_its_turn_ends():
    import threading

    entered, leave = asyncio.Event(), threading.Event()
    loop, ended = asyncio.get_running_loop(), []

    def holding():
        loop.call_soon_threadsafe(entered.set)
        leave.wait(10)
        return drawn()

    async def waiting():
        try:
            await asyncio.sleep(0)
            await asyncio.sleep(3600)
        finally:
            ended.append(True)

    holder = asyncio.ensure_future(RandomStates(1).stepping(call_function(holding, {})))
    await entered.wait()
    other = asyncio.ensure_future(RandomStates(2).stepping(waiting()))
    await asyncio.sleep(0)
    other.cancel()
    await asyncio.sleep(0)
    leave.set()
    assert await holder == await RandomStates(1).stepping(call_function(drawn, {}))
    assert await asyncio.gather(other, return_exceptions=True) != [None]
    assert other.cancelled()


async def test_plain_functions_of_one_rollout_that_overlap_do_not_block_the_next_rollout():
    import threading

    second, first_ended = threading.Event(), threading.Event()

    def first():
        assert second.wait(10)
        first_ended.set()

    def last():
        second.set()
        assert first_ended.wait(10)

    async def both():
        await asyncio.gather(call_function(first, {}), call_function(last, {}))

    await RandomStates(1).stepping(both())
    await asyncio.wait_for(RandomStates(2).stepping(child([1])), 10)
