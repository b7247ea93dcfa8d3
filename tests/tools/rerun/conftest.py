"""Runs that were recorded, without a model: a tokenizer's folder, and an engine of the tests."""

import contextlib
from functools import partial

import openai
import pytest

from tests.kit.chat_server import chat_server
from tests.kit.toy import TEMPLATE, StubEngine, tokenizer
from tests.tools.rerun import agents
from tuner.config import load_config
from tuner.gateway import Gateway, SamplingDefaults
from tuner.gateway.relay import Relay
from tuner.rollouts import RolloutRunner
from tuner.rollouts.chat_models import chat_model
from tuner.runs.directory import RunDirectory
from tuner.runs.models import load_tokenizer
from tuner.runs.stack import chat_renderer, rollout_settings
from tuner.traces import RolloutId, TraceStore

ID = RolloutId(3, 0, 2)
ADDED = (agents.call(2, 3), "It is 5.", "yes")


@pytest.fixture(autouse=True)
def nothing_done():
    agents.DID.clear()
    agents.CLOCK[:] = ["10:41"]


@pytest.fixture(scope="session")
def no_weights(tmp_path_factory):
    """A model's folder with everything but the weights."""
    from transformers import Qwen3Config

    path = tmp_path_factory.mktemp("no-weights")
    spoken = tokenizer()
    spoken.chat_template = TEMPLATE
    spoken.save_pretrained(path)
    Qwen3Config(vocab_size=len(spoken), max_position_embeddings=8192).save_pretrained(path)
    return path


@pytest.fixture
def make_run(no_weights, tmp_path):
    """Makes a run directory with one rollout, train-3-0-2, as a run would have left it."""

    async def make(
        workflow="workflow",
        *overrides,
        texts=ADDED,
        judge="judge",
        question="2+3?",
        kind="plain",
        relayed=False,
        auxiliary=None,
        id=ID,
    ):
        config = load_config(
            None,
            settings={
                "project": "p",
                "name": workflow,
                "checkpoint_root_dir": str(tmp_path),
                "model": {"model_path": str(no_weights), "max_response_tokens": 500},
                "tuner": {
                    "workflow": f"tests.tools.rerun.agents:{workflow}",
                    "judge": judge and f"tests.tools.rerun.agents:{judge}",
                },
            },
            overrides=overrides,
        )
        directory = RunDirectory(config.run_dir)
        directory.create()
        directory.config.write_text(config.to_yaml())
        with contextlib.ExitStack() as stack:
            if relayed:
                left = iter(texts)
                server = stack.enter_context(chat_server(lambda body: next(left)))
                gateway = Relay(
                    openai.AsyncOpenAI(base_url=server.base_url, api_key="k"), str(no_weights)
                )
            else:
                gateway = Gateway(
                    StubEngine(list(texts), max_model_len=8192),
                    chat_renderer(config, load_tokenizer(str(no_weights))),
                    model_name=str(no_weights),
                )
            function = getattr(agents, workflow)
            if workflow == "prompted":
                function = partial(function, system_prompt="You are number 3.")
            runner = RolloutRunner(
                gateway,
                function,
                judge and getattr(agents, judge),
                make_model=partial(chat_model, kind=kind),
                auxiliary_models=lambda *_: contextlib.nullcontext(auxiliary or {}),
                settings=rollout_settings(config),
            )
            taskset = config.buffer.explorer_input.taskset
            defaults = SamplingDefaults(**config.rollout_args(taskset).model_dump())
            traces = await runner.run({"question": question}, id, defaults)
            await gateway.aclose()
        store = TraceStore(directory.traces)
        for trace in traces:
            store.append(trace)
        agents.DID.clear()
        return directory.path

    return make
