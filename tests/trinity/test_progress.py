"""What is written down of a run, by several workers at once and while it is read."""

from __future__ import annotations

import multiprocessing
from dataclasses import replace

import pytest

from tests.kit.builders import call, trace
from tuner.errors import FunctionError, TrainingError, TunerError
from tuner.runs.directory import RunDirectory
from tuner.traces import Outcome, TraceStore
from tuner.trinity.progress import Journal, TrinityProgress, _StepReport, report_file


def write_many(folder, task):
    long = [call("c", range(1, 4000), range(4000), [0.0] * 4000)]
    for rollout in range(10):
        Journal(folder).write([trace(task, rollout, long, reward=1.0)])


def test_workers_that_write_together_tear_no_trace(tmp_path):
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=write_many, args=(tmp_path, task)) for task in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    stored = TraceStore(tmp_path / "traces").read("train", 1)
    assert len(stored) == 30
    assert len({(one.id.task, one.id.rollout) for one in stored}) == 30


def test_the_first_reason_to_stop_stays_until_the_run_is_started_again(tmp_path):
    journal = Journal(tmp_path)
    assert journal.reason() is None
    journal.stop(FunctionError("returned None"))
    Journal(tmp_path).stop(TrainingError("another"))
    assert journal.reason() == {"error": "FunctionError", "message": "returned None"}
    journal.forget_reason()
    assert journal.reason() is None


def progress_of(folder):
    path = report_file(folder, "trainer")
    path.parent.mkdir()
    made = TrinityProgress(
        RunDirectory(folder), explorer="explorer", trainer="trainer", evaluations=[]
    )
    return made, path


def test_a_line_that_is_still_being_written_is_read_when_it_is_whole(tmp_path):
    progress, path = progress_of(tmp_path)
    path.write_text('{"step": 1, "actor/grad_norm": 1.0}\n{"step": 2, "actor/g')
    assert progress.trained_steps() == [1]
    with path.open("a") as file:
        file.write('rad_norm": 2.0}\n')
    assert progress.trained_steps() == [1, 2]


def test_what_is_added_to_a_step_later_belongs_to_it(tmp_path):
    progress, path = progress_of(tmp_path)
    path.write_text('{"step": 1, "a": 1.0}\n')
    assert progress.reports("trainer") == {1: {"a": 1.0}}
    with path.open("a") as file:
        file.write('{"step": 1, "b": 2.0}\n')
    assert progress.reports("trainer") == {1: {"a": 1.0, "b": 2.0}}


def test_forgotten_steps_do_not_come_back_when_the_report_goes_on(tmp_path):
    progress, path = progress_of(tmp_path)
    path.write_text("".join(f'{{"step": {n}, "a": {n}.0}}\n' for n in (1, 2, 3)))
    assert set(progress.reports("trainer")) == {1, 2, 3}
    progress.forget_after(trained=1, explored=0)
    assert set(progress.reports("trainer")) == {1}
    with path.open("a") as file:
        file.write('{"step": 2, "a": 5.0}\n')
    assert progress.reports("trainer") == {1: {"a": 1.0}, 2: {"a": 5.0}}


CALL = call("c", [1], [2], [-1.0])


@pytest.mark.parametrize(
    ("rewards", "settings", "taught"),
    [
        ([(0, 1.0), (0, 0.0)], {}, True),
        ([(0, 1.0), (0, 1.0), (1, 0.0), (1, 0.0)], {}, False),
        ([(0, 1.0), (0, 1.0)], {"compared": False}, True),
        ([(0, 1.0), (1, 1.0)], {}, True),  # groups of one are compared with nothing
        ([], {}, False),
    ],
)
def test_a_step_teaches_by_the_differences_inside_its_groups(tmp_path, rewards, settings, taught):
    progress = TrinityProgress(
        RunDirectory(tmp_path), explorer="explorer", trainer="trainer", evaluations=[], **settings
    )
    traces = [trace(task, n, [CALL], reward=reward) for n, (task, reward) in enumerate(rewards)]
    assert progress.signal(traces) is taught


def test_rewards_of_single_calls_teach_where_those_of_the_rollouts_do_not_differ(tmp_path):
    progress, _ = progress_of(tmp_path)
    same = [trace(0, n, [replace(CALL, reward=float(n))], reward=1.0) for n in range(2)]
    assert progress.signal(same)


def test_a_rollout_without_a_trained_token_teaches_nothing(tmp_path):
    progress, _ = progress_of(tmp_path)
    excluded = replace(CALL, excluded=True, reward=1.0)
    rewards = [(CALL, 1.0), (CALL, 1.0), (excluded, 0.0)]
    assert not progress.signal([trace(0, n, [c], reward=r) for n, (c, r) in enumerate(rewards)])


def test_failed_rollouts_teach_where_they_are_penalized(tmp_path):
    traces = [
        trace(0, 0, [CALL], reward=1.0),
        trace(0, 1, [CALL], outcome=Outcome.WORKFLOW_ERROR),
    ]
    for penalty, taught in ((0.0, True), (1.0, False)):
        progress = TrinityProgress(
            RunDirectory(tmp_path),
            explorer="explorer",
            trainer="trainer",
            evaluations=[],
            penalty=penalty,
        )
        assert progress.signal(traces) is taught


WRONG = [
    "{",
    "[1]",
    "{}",
    "null",
    '"x"',
    '{"error": [], "message": 1}',
    "[" * 5000,
    '{"step": "x"}',
]


@pytest.mark.parametrize("wrong", WRONG, ids=range(len(WRONG)))
def test_damaged_files_are_named_and_damaged_reports_left_out(tmp_path, caplog, wrong):
    journal = Journal(tmp_path)
    journal.stop(FunctionError("returned None"))
    (tmp_path / "tuner/stop.json").write_text(wrong)
    with pytest.raises(TunerError, match=r"stop\.json is damaged: it is not why a run stopped: "):
        journal.raise_reason()
    (tmp_path / "tuner/replay.json").write_text(wrong)
    with pytest.raises(TunerError, match=r"replay\.json is damaged: it is not a list of files: "):
        journal.recorded("train", 1)
    reports = report_file(tmp_path, "trainer")
    reports.write_text(f'{{"step": 1, "loss": 0.5}}\n{wrong}\n{{"step": 2, "loss": 0.25}}\n')
    read = _StepReport(reports)
    for _ in range(2):
        assert read.read() == {1: {"loss": 0.5}, 2: {"loss": 0.25}}
    assert [record.getMessage()[:9] for record in caplog.records] == ["a line of"]
