"""Costs that are fitted to runs, and the plan that is made of them."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.loop import runs
from tuner import cli
from tuner.config.load import load_config
from tuner.errors import ConfigError, TunerError
from tuner.loop import run_local
from tuner.planning import gpus
from tuner.planning.fitting import GATEWAY, _solved, fit
from tuner.planning.measured import MeasuredRun, MeasuredStep, place_of, read_measured
from tuner.planning.plan import plan_file
from tuner.planning.step_model import Costs, Place, Work, predict
from tuner.run.continuation import leaves
from tuner.traces import read_traces

ROOT = Path(__file__).resolve().parents[2]
TRUE = Costs(
    step=2e-3, sampled=5e-5, attended=4e-7, prefilled=1e-4, gateway=GATEWAY, agent=1e-3,
    rollout=1.5e-3, update=0.02, trained=9e-5, paired=1e-7, publish=0.005, rest=0.001,
)  # fmt: skip
WORKS = (
    Work(calls=1, completion=20, prompt=60, reused=50, first=40, own=25, depth=60),
    Work(calls=1, completion=90, prompt=60, reused=10, first=40, own=95, depth=80),
    Work(calls=4, completion=50, prompt=600, reused=550, first=300, own=300, depth=500),
    Work(calls=6, completion=10, prompt=2000, reused=1900, first=900, own=200, depth=900),
    Work(calls=2, completion=150, prompt=90, reused=20, first=80, own=320, depth=200),
    Work(calls=3, completion=30, prompt=300, reused=0, first=80, own=320, depth=200),
)
AGENTS = {"light": 0.0, "heavy": 4e-3}
SHAPES = ((8, 8, 64), (32, 8, 256), (4, 16, 32), (8, 8, 16))


def measured(name, work, place, costs, **settings):
    """A run that took what the model says."""
    time = predict(work, costs, place)
    calls = place.rollouts * work.calls
    sampled = calls * work.completion
    step = MeasuredStep(
        idle=time.collection,
        training=time.parts["training"],
        weights=costs.publish,
        rest=costs.rest,
        rollouts=place.rollouts,
        calls=calls,
        sampled=sampled,
        new=calls * work.new,
        attended=sampled * work.context,
        longest=work.calls * work.completion,
        unique=time.unique,
        depth=work.depth,
    )
    return MeasuredRun(name, settings, place, work, (step,) * 3, waits=0.1)


def synthetic():
    """Runs of both agents, of all works and shapes."""
    return [
        measured(
            f"{agent}-{number}-{groups}-{repeat}-{running}",
            work,
            Place(groups=groups, repeat=repeat, running=running, slots=running),
            replace(TRUE, agent=seconds),
            **{"tuner.workflow": f"agents.py:{agent}"},
        )
        for agent, seconds in AGENTS.items()
        for number, work in enumerate(WORKS)
        for groups, repeat, running in SHAPES
    ]


def test_a_fit_of_runs_that_follow_the_model_finds_their_costs():
    known = fit(synthetic())
    for agent, seconds in AGENTS.items():
        found = known.of(f"agents.py:{agent}")
        assert vars(found) == pytest.approx(vars(replace(TRUE, agent=seconds)), rel=1e-3, abs=1e-9)
    assert all(told == pytest.approx(took) for told, took in known.errors().values())


def test_a_step_that_something_else_held_up_changes_little():
    given = synthetic()
    first = given[0]
    slow = replace(first.steps[0], idle=5 * first.steps[0].idle)
    given[0] = replace(first, steps=(slow, *first.steps[1:]))
    told = [seconds for seconds, _ in fit(given).errors().values()]
    assert told == pytest.approx([run.middle("seconds") for run in synthetic()], rel=0.03)


def test_no_cost_is_below_zero():
    # Without bounds `a` would be -1.
    found = _solved([({"a": 1, "b": 1}, 1.0), ({"a": 2, "b": 1}, 0.1), ({"b": 1}, 2.0)])
    assert found["a"] == 0
    assert found["b"] > 0


def test_runs_that_do_not_tell_are_named_with_the_reason():
    run = synthetic()[0]
    waiting = replace(run, waits=0.8)
    ahead = replace(run, name="ahead", place=replace(run.place, ahead=1))
    known = fit([run, waiting, ahead])
    assert known.used == (run.name,)
    with pytest.raises(TunerError, match=r"80% of a rollout .*ahead: collection ran ahead"):
        fit([waiting, ahead])


def test_runs_of_models_of_different_sizes_are_refused(tmp_path):
    given = synthetic()[:2]
    for number, run in enumerate(given):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"x" * (1 + number * 100_000))
        run.settings["model.model_path"] = str(folder)
    with pytest.raises(TunerError, match="different sizes"):
        fit(given)


# GPUs


def test_costs_of_an_h100_are_those_of_the_recorded_results():
    folder = ROOT / "benchmarks" / "results" / "gpu"
    updates, passes = [], []
    for name, check in json.loads((folder / "slice_2.json").read_text())["checks"].items():
        of = {row["metric"]: row["ours"] for row in check["rows"]}
        if "unique tokens/s" in of:
            tokens, size = of["s/update"] * of["unique tokens/s"], float(name.partition("B")[0])
            updates.append(
                ({"update": 1, "token": tokens, "billion": tokens * size}, of["s/update"])
            )
    for name, check in json.loads((folder / "slice_3.json").read_text())["checks"].items():
        if found := re.match(r"distinct prompts, (\d+)", name):
            of = {row["metric"]: row["ours"] for row in check["rows"]}
            seconds = of["ms for a token of each"] / 1000
            passes.append(({"pass": 1, "answer": int(found[1])}, seconds))
    assert len(updates) == 6
    assert len(passes) == 3
    assert list(_solved(updates).values()) == pytest.approx(
        [gpus.UPDATE, gpus.TOKEN, gpus.TOKEN_BILLION], rel=2e-3
    )
    assert list(_solved(passes).values()) == pytest.approx([gpus.PASS, gpus.ANSWER], rel=2e-3)


def test_the_agent_of_the_gpu_benchmark_is_told_within_its_factor():
    # 64 rollouts of 6 calls on an H100 (slice_3.json): 5.47 s of collection were measured.
    work = Work(calls=6, completion=53, prompt=500, reused=450)
    place = Place(groups=8, repeat=8, running=64, shared="device")
    time = predict(work, gpus.costs_on("H100", 0.6, served=False), place)
    assert 5.47 / 2 < time.collection < 5.47


@pytest.mark.parametrize(
    ("text", "found"),
    [("8xH100", ("H100", 16)), ("h200", ("H200", 2)), ("2 x RTX 4090", ("RTX4090", 4))],
)
def test_gpus_are_read_as_people_write_them(text, found):
    one = gpus.Hardware.of(text, nodes=2)
    assert (one.gpu, one.gpus) == found


@pytest.mark.parametrize("text", ["8", "8xZX81", "0xH100", "", "H100x8"])
def test_other_gpus_are_refused(text):
    with pytest.raises(ConfigError, match="--gpus"):
        gpus.Hardware.of(text, nodes=1)


@pytest.mark.parametrize(
    ("name", "size"),
    [("Qwen/Qwen3-1.7B", 1.7), ("meta/Llama-3.1-8B-Instruct", 8.0), ("tiny", None)],
)
def test_the_size_of_a_model_is_read_from_its_name(name, size):
    assert gpus.billions(name) == size


# A whole plan


@pytest.fixture(scope="module")
def ran(random_model_path, tmp_path_factory):
    """A run of three steps of 2 x 3 rollouts."""
    root = tmp_path_factory.mktemp("planned")
    run_local(
        runs.config(
            random_model_path,
            root,
            "tuner.deterministic=false",
            "buffer.total_steps=3",
            "tuner.workflow=agents.py:workflow",
        ),
        workflow=runs.workflow,
        judge=runs.judge,
        train_tasks=runs.TRAIN,
        eval_tasks={"held-out": runs.EVAL},
    )
    return root / "p" / "run"


@pytest.fixture
def file(tmp_path, random_model_path):
    path = tmp_path / "config.yaml"
    path.write_text(
        f"""
model: {{model_path: "{random_model_path}"}}
buffer: {{batch_size: 4, total_steps: 3}}
algorithm: {{repeat_times: 4}}
explorer: {{runner_per_model: 8}}
tuner: {{workflow: "{tmp_path}/agents.py:workflow"}}
"""
    )
    return path


def test_a_run_tells_what_its_rollouts_come_to(ran):
    run = read_measured(ran)
    traces = [
        trace
        for step in (2, 3)
        for trace in read_traces(ran / "traces" / f"step_{step:06d}.jsonl")
        if trace.calls
    ]
    calls = [call for trace in traces for call in trace.calls]
    assert len(run.steps) == 2  # the first one loads
    assert sum(step.calls for step in run.steps) == len(calls)
    assert sum(step.sampled for step in run.steps) == sum(len(c.completion_ids) for c in calls)
    assert run.work.calls == pytest.approx(len(calls) / len(traces))
    assert run.place.rollouts == 6
    rows = [json.loads(line) for line in (ran / "metrics.jsonl").read_text().splitlines()]
    assert [step.idle for step in run.steps] == [row["time/idle"] for row in rows[-2:]]
    unique = sum(row["tokens/unique"] for row in rows[-2:]) / 2
    assert run.work.unique(2, 3) == pytest.approx(unique, rel=0.01)
    # It was evaluated after its last step, which is no part of a step.
    assert run.steps[-1].rest == 0


@pytest.mark.parametrize(
    ("workers", "many"), [("auto", 4), ("ray", 4), ("6", 6), ("ray tuner.ray.workers=9", 9)]
)
def test_workers_are_as_many_as_the_file_says(workers, many):
    cluster = ["cluster.ray_address=10.0.0.1:6379", "tuner.ray.gateway=10.0.0.1"]
    config = load_config(None, overrides=[*cluster, *f"tuner.workers={workers}".split()])
    settings = dict(leaves(config.model_dump(mode="json"), lists=True))
    assert place_of(settings, cores=4).workers == many


def test_a_plan_says_of_each_number_where_it_is_from(file, ran):
    found = plan_file(file, ["tuner.workflow=agents.py:workflow"], runs=[ran], cores=2)
    kinds = {number.name: number.kind for number in found.numbers}
    assert kinds["calls"] == "measured"
    # Of a run this small some costs come out as 0, and which is chance.
    assert "fitted" in {kind for name, kind in kinds.items() if name.endswith("(s)")}
    assert found.place.rollouts == 16
    told = found.to_json()
    assert told["seconds"] == pytest.approx(sum(told["parts"].values()))
    text = str(found)
    assert {"generation", "training"} <= told["parts"].keys()
    # A run this small may say that one of them costs nothing, which is not shown then.
    shown = {name for name, took in told["parts"].items() if took > 1e-6 * told["seconds"]}
    assert shown
    for name in (*shown, "a step", "limit: ", "within", "fitted"):
        assert name in text
    assumed = plan_file(file, ["tuner.workflow=agents.py:workflow"], runs=[ran],
                        assumed={"calls": 40.0, "agent": 0.5})  # fmt: skip
    kinds = {number.name: number.kind for number in assumed.numbers}
    assert kinds["calls"] == kinds["agent"] == "assumed"
    assert assumed.time.limit == "agent"
    assert "tuner.workers" in assumed.changes[0].what
    assert any("calls of a rollout: 40 is beyond" in warning for warning in assumed.warnings)


def test_a_folder_of_runs_is_taken_for_the_runs_in_it(file, ran, tmp_path):
    found = plan_file(file, runs=[ran.parent.parent, ran])
    assert list(found.errors) == ["run"]
    with pytest.raises(TunerError, match="is not a run"):
        plan_file(file, runs=[tmp_path])


def test_another_agent_is_assumed_and_said(file, ran):
    found = plan_file(file, ["tuner.workflow=others.py:workflow"], runs=[ran])
    assert {number.name: number.kind for number in found.numbers}["calls"] == "assumed"
    assert "no run is of" in found.warnings[0]
    assert "others.py:workflow" in found.warnings[0]


def test_without_runs_it_is_said_what_is_needed(file):
    with pytest.raises(ConfigError, match=r"--from, or --assume calls=NUMBER"):
        plan_file(file)
    work = {"calls": 2.0, "completion": 10.0, "prompt": 100.0}
    with pytest.raises(ConfigError, match=r"--assume step=SECONDS --assume trained=SECONDS"):
        plan_file(file, assumed=work)
    with pytest.raises(ConfigError, match=r"--assume call: there is no such number"):
        plan_file(file, assumed={"call": 2.0})


def planned(file, *overrides, gpus="8xH100", **options):
    work = {"calls": 6.0, "completion": 300.0, "prompt": 2000.0}
    return plan_file(
        file,
        ["model.model_path=Qwen/Qwen3-8B", *overrides],
        gpus=gpus,
        cores=64,
        assumed=work | options.pop("assumed", {}),
        **options,
    )


def test_gpus_are_divided_between_engines_and_trainer(file):
    served = ["explorer.rollout_model.engine_type=vllm"]
    cluster = ["tuner.backend=trinity", "explorer.rollout_model.engine_num=4"]
    found = planned(file, *served, *cluster, nodes=2)
    assert found.place.engines == 4
    assert found.place.trainers == pytest.approx(gpus.trainers(12))
    assert found.place.cores == 128
    assert found.place.gateways > 1
    assert any("not measured on a GPU" in warning for warning in found.warnings)
    assert any("8 is beyond" in warning for warning in found.warnings)  # billions
    with pytest.raises(ConfigError, match="leave none to train"):
        planned(file, *served, *cluster, gpus="4xH100")
    one = planned(file, gpus="H100")
    assert one.place.in_process
    assert one.place.shared == "device"


def test_a_model_whose_size_nobody_says_is_refused(file):
    with pytest.raises(ConfigError, match="--assume billions=NUMBER"):
        planned(file, "model.model_path=Owner/Model", gpus="H100")
    planned(file, "model.model_path=Owner/Model", gpus="H100", assumed={"billions": 3.0})


def test_the_command_prints_a_table_or_json(file, ran, capsys, monkeypatch):
    def say(*arguments):
        monkeypatch.setattr(sys, "argv", ["tuner", "plan", str(file), *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        output = capsys.readouterr()
        return ended.value.code, output.out, output.err

    code, out, _ = say("--from", str(ran), "--json", "--assume", "waits=0.5")
    assert not code
    assert json.loads(out)["parts"]["waiting"] > 0
    code, out, _ = say("--from", str(ran))
    assert not code
    assert "part of a step" in out
    code, _, err = say("--from", str(ran), "--assume", "calls=many")
    assert code == cli.BAD_INPUT
    assert "--assume 'calls=many'" in err
