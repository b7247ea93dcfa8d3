"""The engine over SGLang's protocol keeps the contract of engines, on a stand-in for its server."""

from functools import partial

import pytest

from tests.engines.conformance import *  # noqa: F403  # pytest collects the suite
from tests.engines.conformance import Rig, as_new
from tests.engines.sglang_rig import StandIn, served_toy
from tuner.engines import EngineError, SamplingParams

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """One server for all tests."""
    start = partial(StandIn, key="sesame")
    with served_toy(start, tmp_path_factory.mktemp("sglang")) as parts:
        yield parts


@pytest.fixture
async def rig(parts):
    made, model, server = parts
    await as_new(made, model)
    return Rig(made, model, server.kill, "broke off", both_cuts=False)


async def test_there_is_no_adapter(rig):
    with pytest.raises(EngineError, match="there is no adapter 'a'"):
        await rig.engine.generate([1], SamplingParams(max_tokens=1), "session", adapter="a")
