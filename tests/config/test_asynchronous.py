"""Settings of running ahead that contradict each other, or that nothing would read."""

import pytest

from tuner.config.load import load_config
from tuner.errors import ConfigError

OFFSET = "synchronizer.sync_offset=2"
STRATEGY = "algorithm.sample_strategy=staleness_control"
LIMIT = "algorithm.sample_strategy_args.max_staleness=2"


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ([OFFSET, "tuner.deterministic=true"], "synchronizer.sync_offset is 2 and tuner.determin"),
        ([STRATEGY, LIMIT], "with synchronizer.sync_offset 0 no token is too old"),
        ([OFFSET, STRATEGY], "sample_strategy_args.max_staleness is not set"),
        ([OFFSET, LIMIT], "max_staleness is 2, but algorithm.sample_strategy is default"),
        (["explorer.over_rollout.wait_after_min=1"], "explorer.over_rollout.ratio is 0"),
        (["explorer.over_rollout.ratio=1"], "less than 1"),
        ([OFFSET, "algorithm.algorithm_type=sft", "model.model_path=m"], "makes no rollouts"),
        (["synchronizer.sync_offset=-1"], "greater than or equal to 0"),
    ],
)
def test_contradictions_are_refused_by_name(overrides, text):
    with pytest.raises(ConfigError) as error:
        load_config(overrides=overrides)
    assert text in str(error.value)


def test_a_file_of_trinitys_for_asynchronous_training_is_read(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(
        "synchronizer: {sync_style: explorer_driven, sync_method: nccl, sync_offset: 4}\n"
        "algorithm:\n"
        "  sample_strategy: staleness_control\n"
        "  sample_strategy_args: {max_staleness: 4}\n"
        "explorer:\n"
        "  over_rollout: {ratio: 0.2, wait_after_min: 10, return_partial_tasks: true}\n"
    )
    config = load_config(path)
    assert config.synchronizer.sync_offset == 4
    assert config.algorithm.sample_strategy_args.max_staleness == 4
    assert config.explorer.over_rollout.ratio == 0.2
    assert load_config(overrides=["synchronizer.sync_offset=0"]).tuner.deterministic is False
