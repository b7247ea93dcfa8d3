"""A real gateway, engine and model for episodes."""

import contextlib

import pytest

from tests.areal.queue_agents import Counting
from tuner.areal import FinetuneSpec, GRPOConfig, PPOActor, RolloutEngine
from tuner.engines.transformers.engine import TransformersEngine
from tuner.gateway import ChatRenderer, Gateway, SamplingDefaults
from tuner.rollouts import RolloutRunner, RolloutSettings
from tuner.rollouts.chat_models import PlainChatModel
from tuner.runs.models import load_model, load_tokenizer
from tuner.traces import RolloutId


@pytest.fixture(scope="session")
def random_parts(random_model_path):
    import torch

    model = load_model(str(random_model_path), device=torch.device("cpu"), dtype=torch.float32)
    return model, load_tokenizer(str(random_model_path))


@pytest.fixture
def tokenizer(random_parts):
    return random_parts[1]


@pytest.fixture
def make_gateway(random_parts):
    def make():
        model, tokenizer = random_parts
        engine = TransformersEngine(model, tokenizer, max_model_len=256)
        return Gateway(engine, ChatRenderer(tokenizer), model_name="m")

    return make


@pytest.fixture
def run(make_gateway):
    """Runs a workflow function as one rollout; gives the traces of all attempts."""

    async def run(workflow, task=None, *, retries=0, seconds=60.0, rollout=0, max_tokens=6):
        gateway = make_gateway()
        runner = RolloutRunner(
            gateway,
            workflow,
            None,
            make_model=PlainChatModel,
            auxiliary_models=lambda rollout, seed: contextlib.nullcontext({}),
            settings=RolloutSettings(timeout=seconds, max_retries=retries, seed=1),
        )
        try:
            return await runner.run(
                task or {"question": "hi"},
                RolloutId(1, 0, rollout),
                SamplingDefaults(max_tokens=max_tokens),
            )
        finally:
            await gateway.aclose()

    return run


@pytest.fixture
def make_loop(random_model_path):
    """An actor and a rollout engine of one run, initialized."""
    runs = []

    def make(staleness=0, concurrent=16, **settings):
        config = GRPOConfig(**settings)
        config.actor.path = str(random_model_path)
        config.actor.optimizer.lr = 0.01
        config.rollout.max_head_offpolicyness = staleness
        config.rollout.max_concurrent_rollouts = concurrent
        actor, rollout = PPOActor(config.actor), RolloutEngine(config.rollout)
        actor.initialize(None, FinetuneSpec(1, 8, 2))
        rollout.initialize()
        runs.append(config.actor.run)
        return actor, rollout

    yield make
    for run in runs:
        run.close()


@pytest.fixture(autouse=True)
def counts():
    Counting.made = Counting.closed = 0
