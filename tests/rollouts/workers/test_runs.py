"""Whole runs with workers: the same weights, settings that are refused, and what `auto` says."""

import hashlib

import pytest

from tests.kit.runs import EVAL, TRAIN, config, judge, workflow
from tests.rollouts.workers.functions import computing, group_judge, scored, synchronous
from tuner.areal import shared_run
from tuner.config.load import load_config
from tuner.config.schema import RaySection
from tuner.errors import ConfigError
from tuner.loop import run_local
from tuner.rollouts.worker_pool import RayPlacement, count_for
from tuner.serving.hosting import serve
from tuner.tools import candidates
from tuner.trinity.refusals import tuner_section

pytestmark = pytest.mark.usefixtures("forked_workers")


def trained(model, root, *overrides, workflow=workflow, judge=judge):
    settings = config(model, root, *overrides)
    result = run_local(
        settings,
        workflow=workflow,
        judge=judge,
        train_tasks=TRAIN,
        eval_tasks={"held-out": EVAL} if settings.buffer.explorer_input.eval_tasksets else {},
    )
    folder = settings.run_dir / "checkpoints"
    weights = {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*.safetensors"))
    }
    assert weights
    return result, weights


def test_two_workers_train_the_same_weights_bit_for_bit(random_model_path, tmp_path):
    """The functions draw from Python's global random state."""
    few = ("buffer.total_steps=2", "explorer.eval_interval=2", "explorer.eval_on_startup=false")
    here, weights = trained(random_model_path, tmp_path / "here", *few)
    there, others = trained(random_model_path, tmp_path / "there", *few, "tuner.workers=2")
    assert others == weights
    assert there.rewards == here.rewards
    assert there.outcomes == here.outcomes


def test_groups_are_judged_in_workers_of_a_run(random_model_path, tmp_path):
    few = ("buffer.total_steps=1", "algorithm.advantage_fn=reinforce", "tuner.deterministic=false")
    result, _ = trained(
        random_model_path,
        tmp_path,
        *few,
        "buffer.explorer_input.eval_tasksets=[]",
        "explorer.eval_interval=0",
        "tuner.workers=2",
        workflow=scored,
        judge=group_judge,
    )
    assert result.outcomes == {"completed": 6}


def test_an_agent_that_blocks_its_event_loop_trains(random_model_path, tmp_path):
    few = ("buffer.total_steps=1", "tuner.deterministic=false", "explorer.eval_interval=0")
    result, _ = trained(
        random_model_path, tmp_path, *few, "tuner.workers=1", workflow=synchronous, judge=None
    )
    assert result.outcomes == {"completed": 6}


def test_what_the_functions_computed_is_in_the_metrics_of_their_step(random_model_path, tmp_path):
    few = ("buffer.total_steps=2", "tuner.deterministic=false", "tuner.signal_patience=9")
    alone = ("explorer.eval_interval=0", "explorer.eval_on_startup=false")
    result, _ = trained(
        random_model_path,
        tmp_path,
        *few,
        *alone,
        "tuner.workers=2",
        workflow=computing,
        judge=None,
    )
    first, second = [row["time/workers_cpu"] for row in result.history]
    assert first >= 6 * 0.2
    assert 0 < second < first


def test_auto_says_after_the_first_step_how_many_stay_and_why(random_model_path, tmp_path, capsys):
    few = ("buffer.total_steps=2", "tuner.deterministic=false", "explorer.eval_interval=0")
    result, _ = trained(random_model_path, tmp_path, *few, "tuner.workers=auto")
    assert sum(result.outcomes.values()) == 12
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("workers: ")]
    assert len(said) == 2
    assert "after the first step it is decided anew" in said[0]
    assert "s of CPU for a rollout" in said[1]
    assert "cores busy" in said[1]


@pytest.mark.parametrize(
    ("used", "count"), [(0.01, 0), (0.2, 1), (0.9, 2), (1.9, 3), (7.0, 8), (30.0, 8)]
)
def test_auto_goes_by_the_cores_that_functions_keep_busy(used, count):
    assert count_for(used, most=8, fewest=0) == count


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("ray", r"cluster\.ray_address is \w+: set it to the cluster's address"),
        ("ray", r"tuner\.ray\.gateway is not set: set it to an address of this machine"),
        ("many", "must be 0, a number of processes, auto or ray"),
        ("-1", "tuner.workers"),
        ("true", "tuner.workers"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(value, message):
    with pytest.raises(ConfigError, match=message):
        load_config(None, overrides=[f"tuner.workers={value}"])


ON_RAY = {
    "cluster": {"ray_address": "10.0.0.1:6379"},
    "tuner": {"workers": "ray", "ray": {"gateway": "10.0.0.1:8700"}},
}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("cluster.ray_address=auto", "is auto: set it to the cluster's address"),
        ("tuner.ray.gateway=http://10.0.0.1", r"tuner\.ray\.gateway"),
        ("tuner.ray.gateway=0.0.0.0:8700", "which workers cannot connect to"),
        ("tuner.ray.base_url=https://10.0.0.1", r"tuner\.ray\.base_url"),
        ("tuner.ray.cpus=0", r"tuner\.ray\.cpus"),
    ],
)
def test_what_workers_on_a_cluster_cannot_have_is_refused_by_name(setting, message):
    assert load_config(None, settings=ON_RAY).tuner.ray.gateway == "10.0.0.1:8700"
    with pytest.raises(ConfigError, match=message):
        load_config(None, settings=ON_RAY, overrides=[setting])


def test_a_gateway_listens_where_the_file_says_and_knows_the_names_of_its_proxy():
    section = RaySection(gateway="127.0.0.1:8700", base_url="https://trainer.example/v1")
    placing = RayPlacement("10.0.0.1:6379", section)
    opening = placing.opening(2)
    assert (opening.host, opening.port) == ("127.0.0.1", 8702)
    assert {"127.0.0.1", "trainer.example"} <= opening.names
    assert placing.reached("http://127.0.0.1:8700/v1") == "https://trainer.example/v1"
    with pytest.raises(ConfigError, match=r"tuner\.ray\.gateway is a\.\.b, where this"):
        RayPlacement("", RaySection(gateway="a..b")).opening()


def test_a_share_of_requests_to_a_remote_model_is_at_least_one():
    remote = {"base_url": "http://x/v1", "model_name": "m", "max_concurrent": 1}
    with pytest.raises(ConfigError, match=r"max_concurrent is 1, but each of the tuner\.workers 2"):
        load_config(None, settings={"tuner": {"auxiliary_models": {"a": remote}, "workers": 2}})


def refused_by_serve(config):
    serve(config, host="127.0.0.1", port=0, announce=print)


@pytest.mark.parametrize(
    ("refuse", "why"),
    [
        (candidates._check_settings, "run the workflow and the judge in this process"),
        (shared_run._check_settings, "an explicit training loop runs agents in its own process"),
        (refused_by_serve, "runs its functions in its own process"),
    ],
)
def test_what_needs_its_own_process_refuses_workers(refuse, why, tmp_path):
    with pytest.raises(ConfigError, match=r"tuner\.workers is 2.*" + why):
        refuse(load_config(None, overrides=["tuner.workers=2", f"checkpoint_root_dir={tmp_path}"]))


def test_trinity_refuses_workers_by_name():
    problems = []
    tuner_section({"workers": 2}, problems)
    assert ["tuner.workers is 2: only the local backend does this" in p.text for p in problems] == [
        True
    ]
