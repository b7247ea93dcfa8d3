"""The engine over SGLang's protocol keeps the contract of engines, on a stand-in for its server."""

import pytest

from tests.engines.conformance import *  # noqa: F403  # pytest collects the suite
from tests.engines.conformance import Rig, make_rig_model
from tests.engines.models import make_tokenizer
from tests.engines.sglang_rig import connected, engine, stand_in


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """One server for all tests."""
    folder, model = tmp_path_factory.mktemp("sglang"), make_rig_model()
    model.save_pretrained(folder / "toy")
    make_tokenizer().save_pretrained(folder / "toy")
    server = stand_in(folder / "toy", "sesame")
    made = engine([connected(server.url, "sesame")], model.save_pretrained, folder / "weights")
    yield made, model, server
    server.stop()


@pytest.fixture
async def rig(parts):
    made, model, server = parts
    model.load_state_dict(make_rig_model().state_dict())
    await made.update_weights(made.version + 1)
    return Rig(made, model, server.kill, "broke off", both_cuts=False)
