"""The table of training tasks over time: what is in it, in the page and in the report."""

import dataclasses

from tests.tools.viewer.stored import read_data, small, store_run
from tuner.tools.viewer import RunReader, write_report
from tuner.tools.viewer.queries import TASK_COLUMNS, TASKS_BY_ORDER, summary, tasks_over_time
from tuner.traces import Outcome, RolloutId


def tasks_of(path, traces, settings=""):
    run = store_run(path, traces)
    with (run / "config.yaml").open("a") as file:
        file.write(settings)
    reader = RunReader(run)
    reader.traces.refresh()
    found = tasks_over_time(reader.traces)
    again = any(row["taken"] > 1 for row in found["rows"])
    assert summary(reader.traces)["tasks"] is again  # without, the page does not show them
    return found


def test_each_task_has_its_mean_reward_by_step(tmp_path):
    traces = [
        *(small(0, n, float(n == 0)) for n in range(4)),
        small(1, 0, 0.5, step=2),
        *(small(0, n, float(n < 3), step=3) for n in range(4)),
        small(0, 4, None, step=3, outcome=Outcome.TIMEOUT),
        small(0, 5, 0.0, step=3, final=False),
        dataclasses.replace(small(0, 0, 1.0), id=RolloutId(3, 0, 0, "test")),
    ]
    found = tasks_of(tmp_path, traces)
    assert (found["total"], found["field"]) == (2, None)
    assert found["steps"] == [(1, 1), (2, 2), (3, 3)]
    first, second = found["rows"]
    assert first["asked"] == "task 0"
    assert (first["taken"], first["n"], first["mean"], first["change"]) == (2, 8, 0.5, 0.5)
    assert first["cells"] == [(0, 4, 0.25), (2, 4, 0.75)]
    assert (second["taken"], second["mean"], second["change"]) == (1, 0.5, None)
    assert second["cells"] == [(1, 1, 0.5)]


def test_a_run_without_rewards_has_no_tasks(tmp_path):
    found = tasks_of(tmp_path, [small(0, 0, None, outcome=Outcome.TIMEOUT)])
    assert found == {"total": 0, "field": None, "steps": [], "rows": []}


def test_many_steps_are_put_together_in_columns(tmp_path):
    found = tasks_of(tmp_path, [small(0, 0, float(s % 2), step=s) for s in range(1, 101)])
    assert len(found["steps"]) <= TASK_COLUMNS
    assert (found["steps"][0], found["steps"][-1]) == ((1, 3), (100, 102))
    assert found["rows"][0]["cells"][:2] == [(0, 3, 2 / 3), (1, 3, 1 / 3)]


def test_of_many_tasks_the_first_by_each_order_are_there(tmp_path):
    count = 6 * TASKS_BY_ORDER
    traces = [small(n, 0, n / count, step=1 + n // 20) for n in range(count)]
    traces += [small(7, 0, 0.9, step=99), *(small(9, 0, 9 / count, step=s) for s in range(50, 60))]
    found = tasks_of(tmp_path, traces)
    assert found["total"] == count
    shown = {row["asked"] for row in found["rows"]}
    assert 2 * TASKS_BY_ORDER <= len(shown) <= 4 * TASKS_BY_ORDER
    assert {"task 7", "task 9", "task 0", f"task {count - 1}"} <= shown


def test_the_value_of_the_field_that_draws_them_is_with_the_tasks(tmp_path):
    traces = [
        dataclasses.replace(small(n, 0, 1.0), task={"question": f"{n}", "source": source})
        for n, source in enumerate(["math", "code", 3])
    ]
    settings = "tuner: {tasks: {selector: {kind: stratified, field: source}}}\n"
    found = tasks_of(tmp_path, traces, settings)
    assert found["field"] == "source"
    assert {row["asked"][:1]: row["stratum"] for row in found["rows"]} == {
        "0": "math",
        "1": "code",
        "2": "3",
    }


def test_the_report_has_all_tasks_whatever_traces_are_in_it(tmp_path):
    run = store_run(tmp_path, [small(n, 0, 1.0, step=1 + n) for n in range(9)])
    data = read_data(write_report(run, trace_bytes=1).read_text(encoding="utf-8"))
    assert data["traces"] == []
    assert len(data["tasks"]["rows"]) == 9
