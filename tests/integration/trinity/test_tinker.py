"""Trinity-RFT's Tinker trainer, with Tinker's own client against a small service on this machine.

The service is ours (`tinker_service.py`): what is shown is the protocol's use and what is computed
from its answers, not that Tinker's own service behaves as it does.
"""

import pytest
from trinity.common.config import TinkerConfig

from tests.integration.trinity.conftest import TINY
from tests.integration.trinity.on_ray import ON_A_CPU, check_exact, handed_over
from tests.integration.trinity.test_on_ray import ROWS, by_length
from tests.integration.trinity.tinker_service import KEY, Service, served
from tuner import TunerModelConfig, WorkflowOutput, tune
from tuner.backends.trinity.check import check_trinity
from tuner.backends.trinity.config import resolve
from tuner.backends.trinity.tinker import TinkerEngine
from tuner.config.backend import chosen_backend
from tuner.engines.base import EngineError, SamplingParams
from tuner.errors import ConfigError
from tuner.traces import TraceStore

LOCAL_ONLY = ("cluster.", "explorer.rollout_model.", "trainer.", "synchronizer.sync_method")
SETTINGS = [
    *(setting for setting in ON_A_CPU if not setting.startswith(LOCAL_ONLY)),
    "algorithm.optimizer.lr=1e-3",
]
TOOL = {
    "type": "function",
    "function": {"name": "count_sheep", "description": "Counts.", "parameters": {}},
}


async def two_turns_with_a_tool(task, model):
    """Two calls, the second of which continues the first."""
    messages = [{"role": "user", "content": task["question"]}]
    for _ in range(2):
        answer = await model.client.chat.completions.create(
            model=model.model_name, messages=messages, tools=[TOOL]
        )
        messages.append(answer.choices[0].message.model_dump(exclude_none=True))
        messages.append({"role": "user", "content": "Are you sure?"})
    return WorkflowOutput(response=answer.choices[0].message.content or "")


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    monkeypatch.setenv("TINKER_TELEMETRY", "0")


@pytest.fixture(scope="module")
def service():
    return Service(str(TINY))


@pytest.fixture(scope="module")
def address(service):
    with served(service) as url:
        yield url


def trained(address, folder, steps):
    return tune(
        two_turns_with_a_tool,
        by_length,
        ROWS,
        model=TunerModelConfig(
            model_path=str(TINY), max_model_len=512, tinker_config=TinkerConfig(base_url=address)
        ),
        experiment_name="tinker",
        overrides=[f"checkpoint_root_dir={folder}", *SETTINGS, f"buffer.total_steps={steps}"],
    )


def test_what_the_service_sampled_is_trained_there_and_the_run_goes_on(service, address, tmp_path):
    assert trained(address, tmp_path, 1).steps == 1
    remote = tmp_path / "AgentScope" / "tinker" / "global_step_1" / "remote_checkpoint_path.txt"
    assert remote.read_text().startswith("tinker://")
    # From the weights and the optimizer that the service has.
    result = trained(address, tmp_path, 2)
    assert (result.steps, result.checkpoint) == (2, None)
    assert service.asked.count("load_weights") == 1
    assert service.asked.count("forward_backward") == service.asked.count("optim_step") == 2
    check_exact(result.run_dir, 2)
    updates = [row for row in result.history if row["step"]]
    # Each step trains the weights that sampled.
    assert [abs(row["trainer/actor/ppo_kl"]) < 1e-4 for row in updates] == [True, True]
    # The second step's tokens are of the first one's weights, and say so.
    store = TraceStore(result.run_dir / "traces")
    calls = {
        step: [call for trace in store.read("train", step) for call in trace.calls]
        for step in (1, 2)
    }
    versions = {step: {v for call in found for v in call.versions} for step, found in calls.items()}
    assert versions == {1: {0}, 2: {1}}
    saved = {path for path, _ in service.prompts} - {str(TINY)}
    assert {path.rpartition("-sampler-")[2] for path in saved} == {"1"}
    # Both turns of a rollout are one experience, and the tools were in the prompt.
    assert len(handed_over(result.run_dir)) == 8
    asked = {tuple(ids) for _, ids in service.prompts}
    assert {call.prompt_ids for found in calls.values() for call in found} <= asked
    assert all(call.tools for found in calls.values() for call in found)


def sampling(**given):
    return SamplingParams(max_tokens=8, seed=3, **given)


@pytest.fixture
def engine(address, monkeypatch):
    monkeypatch.setenv("TINKER_BASE_URL", address)

    async def weights():
        return str(TINY)

    return TinkerEngine(str(TINY), max_model_len=512, weights=weights)


@pytest.mark.asyncio
async def test_a_completion_is_what_the_service_sampled(engine):
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


@pytest.mark.asyncio
async def test_weights_of_an_unknown_step_are_an_error(address, monkeypatch):
    monkeypatch.setenv("TINKER_BASE_URL", address)

    async def weights():
        return "tinker://run/sampler_weights/latest"

    engine = TinkerEngine(str(TINY), max_model_len=512, weights=weights)
    with pytest.raises(EngineError, match="does not say of which step"):
        await engine.generate([5], sampling(), "a")


@pytest.mark.asyncio
async def test_weights_that_are_gone_are_an_error_of_the_engine(address, monkeypatch):
    monkeypatch.setenv("TINKER_BASE_URL", address)

    async def weights():
        return "tinker://run/sampler_weights/x-sampler-9"

    engine = TinkerEngine(str(TINY), max_model_len=512, weights=weights)
    with pytest.raises(EngineError, match="there are no weights"):
        await engine.generate([5], sampling(), "a")


def enabled(address):
    return ["model.tinker.enable=true", f"model.tinker.base_url={address}"]


def test_the_check_says_where_is_sampled_and_trained(address, tmp_path):
    verdict = check_trinity(
        None,
        [
            *SETTINGS,
            *enabled(address),
            "model.tinker.rank=4",
            f"checkpoint_root_dir={tmp_path}",
            "buffer.explorer_input.taskset.path=" + str(TINY.parents[1] / "examples/gsm8k/data"),
        ],
        workflow=two_turns_with_a_tool,
        judge=by_length,
    )
    assert verdict.ready
    assert f"an adapter of rank 4, at {address}" in verdict.text


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
        resolve(None, None, ["model.tinker.enable=true", f"model.model_path={TINY}", override])


def test_the_loss_is_named_as_it_is_computed():
    settings = resolve(None, None, ["model.tinker.enable=true", f"model.model_path={TINY}"])
    assert settings.get("algorithm.loss_agg_mode") == "seq-mean-token-mean"
    assert chosen_backend(None, None, ["model.tinker.enable=true"]) == "trinity"


@pytest.mark.parametrize(
    ("environment", "url", "said"),
    [
        ({"TINKER_API_KEY": ""}, None, "TINKER_API_KEY is not set"),
        ({}, "http://127.0.0.1:9", "nothing answers at http://127.0.0.1:9"),
    ],
)
def test_a_service_that_cannot_be_used_is_named_at_once(
    environment, url, said, address, tmp_path, monkeypatch
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=said):
        tune(
            two_turns_with_a_tool,
            by_length,
            ROWS,
            backend="trinity",
            overrides=[f"checkpoint_root_dir={tmp_path}", *SETTINGS, *enabled(url or address)],
        )
