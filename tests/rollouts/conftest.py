"""A runner over a real gateway, engine and model, for the user's functions."""

import contextlib

import pytest

from tuner.engines.transformers.engine import TransformersEngine
from tuner.gateway import ChatRenderer, Gateway
from tuner.rollouts import RolloutRunner, RolloutSettings
from tuner.rollouts.chat_models import chat_model
from tuner.runs.models import load_model, load_tokenizer


@pytest.fixture
def make_runner(random_model_path):
    import torch

    model = load_model(str(random_model_path), device=torch.device("cpu"), dtype=torch.float32)
    tokenizer = load_tokenizer(str(random_model_path))

    def make(workflow, judge=None, *, timeout=60.0, retries=0, auxiliary=None):
        engine = TransformersEngine(model, tokenizer, max_model_len=128)
        return RolloutRunner(
            Gateway(engine, ChatRenderer(tokenizer), model_name="m"),
            workflow,
            judge,
            make_model=lambda session: chat_model(session, kind="plain"),
            auxiliary_models=lambda rollout, seed: contextlib.nullcontext(auxiliary or {}),
            settings=RolloutSettings(timeout=timeout, max_retries=retries, seed=1),
        )

    return make
