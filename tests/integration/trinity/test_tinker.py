"""Tinker's own client against a small service on this machine, and what is refused without it.

The service is ours (`tinker_service.py`): what is shown is the protocol's use and what is computed
from its answers, not that Tinker's own service behaves as it does.
"""

import pytest

from tests.integration.trinity.conftest import TINY
from tests.integration.trinity.test_on_ray import ROWS, by_length
from tests.integration.trinity.tinker_agent import SETTINGS, two_turns_with_a_tool
from tuner import tune
from tuner.config.load import read_layers
from tuner.engines.base import EngineError, SamplingParams
from tuner.errors import ConfigError
from tuner.trinity.endpoints import TinkerEngine
from tuner.trinity.handover import resolve
from tuner.trinity.preparation import check_trinity

pytestmark = pytest.mark.usefixtures("tinker_key")


TINKER = ["model.tinker.enable=true", f"model.model_path={TINY}"]


def sampling(**given):
    return SamplingParams(max_tokens=8, seed=3, **given)


@pytest.fixture
def make_engine(tinker_address, monkeypatch):
    monkeypatch.setenv("TINKER_BASE_URL", tinker_address)

    def make(path):
        async def weights():
            return path

        return TinkerEngine(str(TINY), max_model_len=512, weights=weights)

    return make


async def test_a_completion_is_what_the_service_sampled(make_engine):
    engine = make_engine(str(TINY))
    pushed = []

    class Sink:
        def push(self, token_id, logprob, version):
            pushed.append((token_id, logprob, version))
            return True

    found = await engine.generate([5, 6, 7], sampling(), "a", Sink())
    assert len(found.completion_ids) == len(found.logprobs) > 0
    assert all(logprob < 0 for logprob in found.logprobs)
    assert pushed == list(zip(found.completion_ids, found.logprobs, found.versions, strict=True))
    greedy = await engine.generate([5, 6, 7], sampling(temperature=0.0), "a")
    assert set(greedy.logprobs) == {0.0}


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("tinker://run/sampler_weights/latest", "does not contain the number of its step"),
        ("tinker://run/sampler_weights/x-sampler-9", "there are no weights"),
    ],
)
async def test_weights_that_cannot_be_sampled_from_are_an_error(make_engine, path, said):
    with pytest.raises(EngineError, match=said):
        await make_engine(path).generate([5], sampling(), "a")


def enabled(address):
    return ["model.tinker.enable=true", f"model.tinker.base_url={address}"]


def test_the_check_says_where_is_sampled_and_trained(tinker_address, tmp_path):
    verdict = check_trinity(
        None,
        [
            *SETTINGS,
            *enabled(tinker_address),
            "model.tinker.rank=4",
            f"checkpoint_root_dir={tmp_path}",
            "buffer.explorer_input.taskset.path=" + str(TINY.parents[1] / "examples/gsm8k/data"),
        ],
        workflow=two_turns_with_a_tool,
        judge=by_length,
    )
    assert verdict.ready
    assert f"an adapter of rank 4, at {tinker_address}" in verdict.text


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("mode=bench", "Tinker's weights are at its service"),
        ("algorithm.loss_agg_mode=token-mean", "each sequence's own tokens"),
        ("model.temperature=0.7", "trains at 1"),
        ("algorithm.entropy_loss_fn_args.entropy_coef=0.01", "would take those for the entropy"),
        ("model.lora_configs=[{lora_rank: 8}]", "described by model.tinker"),
        ("explorer.rollout_model.engine_type=sglang", "Tinker's service samples"),
        ("algorithm.algorithm_type=ppo", "does not compute its advantages with Tinker"),
        ("algorithm.algorithm_type=dpo", "a pair is two"),
    ],
)
def test_what_the_service_would_compute_otherwise_is_refused(override, said):
    with pytest.raises(ConfigError, match=said):
        resolve(read_layers(None, None, [*TINKER, override]))


def test_the_loss_is_named_as_it_is_computed():
    settings = resolve(read_layers(None, None, TINKER))
    assert settings.get("algorithm.loss_agg_mode") == "seq-mean-token-mean"
    # A run that goes on may not begin with the weights before training.
    assert settings.get("synchronizer.sync_method") == "memory"
    assert read_layers(None, None, ["model.tinker.enable=true"]).backend == "trinity"


@pytest.mark.parametrize(
    ("environment", "url", "said"),
    [
        ({"TINKER_API_KEY": ""}, None, "TINKER_API_KEY is not set"),
        ({}, "http://127.0.0.1:9", "nothing answers at http://127.0.0.1:9"),
    ],
)
def test_a_service_that_cannot_be_used_is_named_at_once(
    environment, url, said, tinker_address, tmp_path, monkeypatch
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=said):
        tune(
            two_turns_with_a_tool,
            by_length,
            ROWS,
            backend="trinity",
            overrides=[
                f"checkpoint_root_dir={tmp_path}",
                *SETTINGS,
                *enabled(url or tinker_address),
            ],
        )
