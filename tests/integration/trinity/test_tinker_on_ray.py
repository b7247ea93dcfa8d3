"""Trinity-RFT's Tinker trainer on Ray, against a small service on this machine."""

import pytest
from trinity.common.config import TinkerConfig

from tests.integration.trinity.conftest import TINY
from tests.integration.trinity.on_ray import check_exact, handed_over
from tests.integration.trinity.test_on_ray import ROWS, by_length
from tests.integration.trinity.tinker_agent import SETTINGS, two_turns_with_a_tool
from tuner import TunerModelConfig, tune
from tuner.traces import TraceStore

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("tinker_key")]


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


def test_what_the_service_sampled_is_trained_there_and_the_run_goes_on(
    tinker_service, tinker_address, tmp_path
):
    assert trained(tinker_address, tmp_path, 1).steps == 1
    remote = tmp_path / "runs" / "tinker" / "global_step_1" / "remote_checkpoint_path.txt"
    assert remote.read_text().startswith("tinker://")
    # From the weights and the optimizer that the service has.
    result = trained(tinker_address, tmp_path, 2)
    assert (result.steps, result.checkpoint) == (2, None)
    assert tinker_service.asked.count("load_weights") == 1
    assert (
        tinker_service.asked.count("forward_backward")
        == tinker_service.asked.count("optim_step")
        == 2
    )
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
    saved = {path for path, _ in tinker_service.prompts} - {str(TINY)}
    assert {path.rpartition("-sampler-")[2] for path in saved} == {"1"}
    # Both turns of a rollout are one experience, and the tools were in the prompt.
    assert len(handed_over(result.run_dir)) == 8
    asked = {tuple(ids) for _, ids in tinker_service.prompts}
    assert {call.prompt_ids for found in calls.values() for call in found} <= asked
    assert all(call.tools for found in calls.values() for call in found)
