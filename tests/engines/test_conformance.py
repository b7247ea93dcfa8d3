"""The engine over transformers keeps the contract of engines, batched and one at a time."""

import pytest

from tests.engines.conformance import *  # noqa: F403
from tests.engines.conformance import CONTEXT, Rig, make_rig_model
from tests.engines.models import make_tokenizer
from tuner.engines.transformers import TransformersEngine


@pytest.fixture(params=[False, True], ids=["batched", "deterministic"])
async def rig(request):
    model = make_rig_model()
    engine = TransformersEngine(
        model, make_tokenizer(), max_model_len=CONTEXT, deterministic=request.param
    )

    def crash():
        """The next forward pass fails, once."""

        def fail(*_):
            handle.remove()
            raise RuntimeError("the machine is on fire")

        handle = model.register_forward_pre_hook(fail)

    yield Rig(engine, model, crash, "on fire", spare=CONTEXT * 20 if request.param else 1)
    await engine.close()
