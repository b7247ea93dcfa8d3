"""Whatever stands in a file of a run, a command names it in a sentence, or says what it left out.

The space: fields of each kind of file by each wrong value, and each file by what is no file.
"""

import copy
import dataclasses
import json
import os
import re

import pytest

from tests.browser.example_run import example_trace, metrics
from tests.kit.builders import call, logged, trace
from tuner.config.load import load_config
from tuner.config.schema import BranchingSection, HistorySection
from tuner.errors import TunerError
from tuner.rollouts.allocation import Positions
from tuner.rollouts.branching import Branching, PointSelector
from tuner.rollouts.groups import BatchLog
from tuner.runs.console import JsonlMonitor
from tuner.runs.directory import RunDirectory, check_same_run, damage, read_metrics
from tuner.runs.history import read_history
from tuner.runs.rebased import RebasedStep, RebaseRecord, read_rebase
from tuner.runs.record import read_result, version_of
from tuner.runs.result import TokenCounts, TuneResult
from tuner.tasks.functions import JudgeOutput
from tuner.tools.candidates import CandidateLog, find_candidate
from tuner.tools.compare import compare
from tuner.tools.judging import replay
from tuner.tools.recorded_run import find_rollout
from tuner.tools.viewer.page import RunReader, write_report
from tuner.traces import FunctionResult, Origin, RolloutId, TraceStore, Usage, read_traces
from tuner.traces.store import (
    SavedRollout,
    read_rollouts,
    trace_line,
    trace_to_json,
    write_rollouts,
)

MISSING = object()


def nested(levels):
    value = None
    for _ in range(levels):
        value = [value]
    return value


WRONG = ["text", [], [1], {}, None, float("nan"), float("inf"), -1, 10**30, True, nested(150)]
WRONG += [MISSING, "\ud83d"]


def damaged(value):
    """Copies of JSON data, each with another place that has another wrong value; of the items of a
    list the first."""
    for place in places(value):
        for wrong in WRONG:
            changed = copy.deepcopy(value)
            *before, last = place
            inner = changed
            for part in before:
                inner = inner[part]
            if wrong is MISSING:
                del inner[last]
            else:
                inner[last] = wrong
            yield changed


def places(value, at=()):
    items = value.items() if isinstance(value, dict) else enumerate(value[:1])
    for key, inner in items:
        yield (*at, key)
        if isinstance(inner, dict | list):
            yield from places(inner, (*at, key))


async def judge(task, response):
    return JudgeOutput(reward=float(len(response)))


def rich(number=0):
    """A trace in which no field is empty."""
    made = example_trace(1, number, 0, "plain")
    first = dataclasses.replace(
        made.calls[0],
        sampling=dataclasses.replace(
            made.calls[0].sampling, stop=("x",), logit_bias=((1, 0.5),), bad_words=((3,),)
        ),
        masked=((0, 1),),
        top_logprobs=(((1, -0.5),),) * len(made.calls[0].completion_ids),
        role="writer",
        reward=0.5,
        gained=0.25,
    )
    return dataclasses.replace(
        made,
        calls=(first, dataclasses.replace(made.calls[-1], billed=Usage(3, 4))),
        metrics={"length": 3.0},
        feedback="good",
        origin=Origin(RolloutId(1, number, 1), 1, 0, 0, "differs", 0),
        results=(FunctionResult("m.f", {"a": 1}, 0, "now", 1),),
        foreign_from=2,
    )


@pytest.fixture(autouse=True)
def rough(monkeypatch):
    """Intervals are not what is looked at."""
    monkeypatch.setattr("tuner.runs.estimates.RESAMPLES", 2)


@pytest.fixture
def run(tmp_path):
    """A run directory with every kind of file, by those who write them."""
    config = load_config(
        None,
        settings={
            "project": "p",
            "name": "run",
            "checkpoint_root_dir": str(tmp_path),
            "model": {"model_path": "models/tiny_math"},
            "buffer": {"total_steps": 9},
        },
    )
    directory = RunDirectory(config.run_dir)
    directory.create()
    directory.config.write_text(config.to_yaml())
    store = TraceStore(directory.traces)
    for one in (rich(), trace(1, 0, [call("c", [1, 2], [3], [-0.5])], reward=1.0)):
        store.append(one)
    log = JsonlMonitor(directory.metrics, [])
    for row in metrics(2):
        log.log(row.pop("step"), row)
    log.close()
    result = TuneResult(
        steps=2,
        eval_before={"eval": 0.5},
        eval_after={"eval": 0.75},
        rewards=[0.5, 1.0],
        outcomes={"completed": 2},
        tokens=TokenCounts(sampled=3, trained=2, dropped={"masked": 1}),
        seconds=1.5,
        run_dir=directory.path,
        checkpoint=None,
        traces=directory.traces,
    )
    directory.result.write_text(result.model_dump_json())
    rebased = RebaseRecord(
        run=directory.path, min_effective_samples=0.9, steps=[RebasedStep(step=1)]
    )
    directory.rebase.write_text(rebased.model_dump_json())
    (directory.path / "data.json").write_text(json.dumps({"train": "12ab"}))
    BatchLog(directory.batches).append(1, [0, 1])
    note = {"step": 1, "state": {"seen": Positions().state()}}
    directory.branching.write_text(json.dumps(note) + "\n")
    CandidateLog(directory.path / "candidates.jsonl").number({"system_prompt": "Add."})
    write_rollouts(
        directory.path / "saved.jsonl", [SavedRollout("one", rich(), "m", {"top_p": 1.0})]
    )
    step = directory.checkpoint(1)
    directory.save_checkpoint(
        1, lambda folder: (folder / "version.json").write_text('{"version": 1}'), keep=0
    )
    assert not damage(step)
    return directory


# By file who reads it: each may raise a TunerError that names the file, and nothing else.
READERS = {
    "metrics.jsonl": lambda run: read_metrics(run.metrics, up_to=9),
    "result.json": lambda run: read_result(run, 2),
    "rebase.json": read_rebase,
    "data.json": lambda run: check_same_run(run, {}, {}, {"train": "12ab"}, may_change=()),
    "batches.jsonl": lambda run: (BatchLog(run.batches).read(), BatchLog(run.batches).cut(5)),
    "branching.jsonl": lambda run: restored(run.branching),
    "candidates.jsonl": lambda run: CandidateLog(run.path / "candidates.jsonl"),
    "saved.jsonl": lambda run: read_rollouts(run.path / "saved.jsonl"),
    "checkpoints/step_000001/version.json": lambda run: version_of(run.checkpoint(1)),
    "checkpoints/step_000001/manifest.json": lambda run: damage(run.checkpoint(1)),
    "config.yaml": lambda run: find_rollout(run.path, "train-1-1-0"),
    "traces/step_000001.jsonl": lambda run: list(read_traces(run.traces / "step_000001.jsonl")),
}


# By file which commands read it, too.
BESIDE = {
    "metrics.jsonl": [
        lambda run, other: compare([run.path, other]).text(10),
        lambda run, other: RunReader(run.path).metrics.refresh(),
    ],
    "result.json": [
        lambda run, other: RunReader(run.path).info(),
        lambda run, other: find_candidate(run.path),
    ],
    "data.json": [lambda run, other: compare([run.path, other])],
}


def restored(path):
    section = BranchingSection()
    Branching(PointSelector(section, 4), 0, lambda sampling: True, path).restore(9)


def commands(run, other):
    """What reads a whole run, without an end at a line that it can do without."""
    yield lambda: compare([run.path, other]).text(10)
    yield lambda: replay(run.path, judge, name="again")
    yield lambda: write_report(run.path)
    yield lambda: read_history(HistorySection(sources=[str(run.path)]))
    yield lambda: find_candidate(run.path)


def told(work, path=None):
    """The sentence of the error that a call ends with, if it does; one of another kind fails."""
    try:
        work()
    except TunerError as error:
        said = str(error)
    else:
        return None
    assert path is None or path.name in said or str(path.parent) in said
    assert "Traceback" not in said
    return said


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    path = tmp_path_factory.mktemp("other")
    TraceStore(path / "traces").append(trace(1, 0, [], reward=0.5))
    return path


def lines_of_traces():
    stored = json.loads(trace_line(trace_to_json(rich())))
    lines = list(damaged(stored))
    for number, line in enumerate(lines):  # so that the last of them does not count for all
        if isinstance(line.get("id"), dict) and line["id"].get("task") == 0:
            line["id"]["task"] = 10 + number
    return [trace_line(line) for line in lines]


@pytest.mark.long
def test_each_field_of_a_trace_is_read_or_named(run, other):
    """All in one file: a command goes on without the lines that it cannot use, and counts them."""
    path = run.traces / "step_000001.jsonl"
    lines = lines_of_traces()
    path.write_bytes(path.read_bytes() + b"".join(lines))
    good = 2
    bad = [line for line in lines if told_of_line(run, line)]
    assert 500 < len(bad) < len(lines)
    with logged() as said:
        assert len(list(read_traces(path, skip=True))) <= good + len(lines) - len(bad)
    assert f"{len(bad)} lines of {path} were left out: line 3: " in said[0]
    assert "; and " in said[0]
    reader = RunReader(run.path)
    reader.traces.refresh()
    reader.traces.count_branches()
    for row in reader.traces.rows():
        told(lambda row=row: reader.trace(row.file, row.offset))
    named = {text.partition(":")[0] for text in reader.problems}
    assert len(named) >= len(bad)
    for work in commands(run, other):
        with logged() as said:
            told(work)
    assert replay(run.path, judge, name="again").steps[1].scored >= good


def told_of_line(run, line):
    path = run.path / "line.jsonl"
    path.write_bytes(line)
    said = told(lambda: list(read_traces(path)), path)
    assert said is None or re.search(r"line 1 is not a trace: \S", said)
    return said


@pytest.mark.long
@pytest.mark.parametrize("file", [name for name in READERS if name not in ("config.yaml",)])
def test_each_field_of_each_file_is_read_or_named(run, other, file):
    path = run.path / file
    first, *rest = path.read_bytes().splitlines(keepends=True)
    whole = path.suffix == ".json"
    value = json.loads(path.read_bytes() if whole else first)
    cases = [one["x"] for one in damaged({"x": value}) if "x" in one]
    refused = 0
    for number, case in enumerate(cases[:: max(1, len(cases) // 100)]):
        text = json.dumps(case).encode()
        path.write_bytes(text if whole else text + b"\n" + b"".join(rest))
        refused += told(lambda: READERS[file](run), path) is not None
        for work in BESIDE.get(file, ()) if number % 10 == 0 else ():
            told(lambda work=work: work(run, other))
    assert refused or file.endswith("manifest.json")  # of which the text is what is damaged


def no_file(path, kind):
    content = path.read_bytes()
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "loop":
        os.symlink(path.name, path)
    else:
        path.write_bytes(
            {
                "empty": b"",
                "truncated": content[: len(content) // 2] + b"\n",
                "not UTF-8": b"\xff" + content,
                "nested": b"[" * 1000 + b"]" * 1000 + b"\n",
                "nested objects": b'{"step":' * 3000 + b"1" + b"}" * 3000 + b"\n",
                "zeros": b"\0" * 100 + b"\n",
            }[kind]
        )


KINDS = ["folder", "loop", "empty", "truncated", "not UTF-8", "nested", "nested objects", "zeros"]


@pytest.mark.parametrize("file", READERS)
def test_what_is_no_such_file_is_named(run, other, file):
    path = run.path / file
    content = path.read_bytes()
    read_by_all = file.startswith("traces") or file == "config.yaml"
    for kind in KINDS:
        no_file(path, kind)
        said = told(lambda: READERS[file](run), path)
        if kind not in ("empty", "truncated") and not file.endswith("manifest.json"):
            assert said is not None, kind
        for work in commands(run, other) if read_by_all else ():
            told(work)
        for work in BESIDE.get(file, ()):
            told(lambda work=work: work(run, other))
        path.rmdir() if kind == "folder" else path.unlink()
        path.write_bytes(content)


@pytest.mark.parametrize("key", ["model.model_path", "buffer.total_steps", "tuner", "algorithm"])
def test_a_configuration_with_another_value_is_shown_or_named(run, other, key):
    import yaml

    settings = yaml.safe_load(run.config.read_text())
    *before, last = key.split(".")
    inner = settings
    for part in before:
        inner = inner[part]
    for wrong in ("text", [1], -1, nested(20)):
        inner[last] = wrong
        run.config.write_text(yaml.safe_dump(settings))
        told(lambda: compare([run.path, other]).text(10))
        told(lambda: RunReader(run.path).info())
