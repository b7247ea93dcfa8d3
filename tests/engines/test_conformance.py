"""The engine over transformers keeps the contract of engines, batched and one at a time.

So does the one over servers, on a server in this process.
"""

import pytest

from tests.engines.conformance import *  # noqa: F403  # pytest collects the suite
from tests.engines.conformance import CONTEXT, Rig, make_rig_model
from tests.engines.local_server import LocalServer
from tests.engines.models import VOCABULARY, make_tokenizer
from tuner.engines.remote import ServedEngine
from tuner.engines.transformers.engine import TransformersEngine


@pytest.fixture(params=["batched", pytest.param("deterministic", marks=pytest.mark.long), "served"])
async def rig(request, tmp_path):
    made = served(tmp_path) if request.param == "served" else shared(request.param)
    yield made
    await made.engine.close()


def shared(kind):
    """On the weights that are trained."""
    model, deterministic = make_rig_model(), kind == "deterministic"
    engine = TransformersEngine(
        model, make_tokenizer(), max_model_len=CONTEXT, deterministic=deterministic
    )

    def crash():
        """The next forward pass fails, once."""

        def fail(*_):
            handle.remove()
            raise RuntimeError("the machine is on fire")

        handle = model.register_forward_pre_hook(fail)

    return Rig(engine, model, crash, "on fire", spare=CONTEXT * 20 if deterministic else 1)


def served(folder):
    """On a copy of them."""
    model, server = make_rig_model(), LocalServer()
    engine = ServedEngine(
        [server],
        save=model.save_pretrained,
        folder=folder / "weights",
        tokenizer=make_tokenizer(),
        end_ids=frozenset({make_tokenizer().eos_token_id}),
        vocabulary=VOCABULARY,
        max_model_len=CONTEXT,
        grammars=True,
        every_setting=True,
    )
    return Rig(engine, model, server.die, "on fire")
