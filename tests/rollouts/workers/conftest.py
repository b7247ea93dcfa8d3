"""A runner over a real gateway, engine and model, whose functions run here or in workers."""

import asyncio
import contextlib

import pytest

from tuner.config.schema import RaySection
from tuner.engines.transformers.engine import TransformersEngine
from tuner.gateway import ChatRenderer, Gateway, SamplingDefaults, SessionLimits
from tuner.rollouts import RolloutRunner, RolloutSettings
from tuner.rollouts.any_worker import WorkerProcess
from tuner.rollouts.chat_models import chat_model
from tuner.rollouts.worker_pool import Pool, RayPlacement
from tuner.runs.models import load_model, load_tokenizer
from tuner.traces import RolloutId

DEFAULTS = SamplingDefaults(max_tokens=4)


@pytest.fixture(scope="session")
def make_runners(random_model_path):
    import torch

    model = load_model(str(random_model_path), device=torch.device("cpu"), dtype=torch.float32)
    tokenizer = load_tokenizer(str(random_model_path))

    def make(
        workflow,
        judge=None,
        *,
        workers=None,
        timeout=120.0,
        retries=0,
        calls=None,
        auxiliary=None,
        **more,
    ):
        engine = TransformersEngine(model, tokenizer, max_model_len=128, deterministic=True)
        return RolloutRunner(
            Gateway(engine, ChatRenderer(tokenizer), model_name="m"),
            workflow,
            judge,
            make_model=lambda session: chat_model(session, kind="plain"),
            auxiliary_models=auxiliary or (lambda rollout, seed: contextlib.nullcontext({})),
            settings=RolloutSettings(
                timeout=timeout, max_retries=retries, seed=1, limits=SessionLimits(calls), **more
            ),
            workers=workers,
        )

    return make


@pytest.fixture
def make_runner(make_runners):
    return make_runners


@contextlib.asynccontextmanager
async def waiting(runner, count):
    """Rollouts of `functions.dying` that have made their call and wait; what each further call
    releases."""
    began, handle = asyncio.Semaphore(0), runner.gateway.handle

    async def seen(*request):
        reply = await handle(*request)
        began.release()
        return reply

    runner.gateway.handle = seen
    tasks = [
        asyncio.ensure_future(runner.run({"dies": "waits"}, RolloutId(1, n, 0), DEFAULTS))
        for n in range(count)
    ]
    for _ in tasks:
        await began.acquire()
    yield tasks, began
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


class ByPort(RayPlacement):
    """Processes of this machine that reach the gateway as those of other machines do."""

    def __init__(self):
        super().__init__("nowhere:0", RaySection(gateway="127.0.0.1"))

    def worker(self, setup, on_end):
        return WorkerProcess(setup, on_end)

    def joined(self):
        return contextlib.nullcontext()

    def count(self, most):
        return most


@contextlib.asynccontextmanager
async def pool_of(count, workflow, judge=None, **more):
    """Workers for the time of the block; afterwards none is left."""
    pool = Pool(count, workflow, judge, **{"kind": "plain", "timeout": 120.0, **more})
    try:
        yield pool
    finally:
        await pool.aclose()
        assert pool.pids == []
