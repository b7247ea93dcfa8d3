"""Workers share a run's folder."""

import multiprocessing

from tests.builders import call, trace
from tuner.errors import FunctionError, TrainingError
from tuner.traces import TraceStore
from tuner.trinity.journal import Journal


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
