"""What a notebook shows of a run and its result."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from rich.console import Console

from tuner.runs.console import ConsoleMonitor
from tuner.runs.result import TokenCounts, TuneResult

METRICS = {"reward/mean": 0.5, "tokens_per_second": 10.0, "time/step": 1.0}


@pytest.fixture
def cell():
    """The outputs of a cell that runs in the block."""
    InteractiveShell.instance()
    try:
        with capture_output() as captured:
            yield captured
    finally:
        InteractiveShell.clear_instance()


def test_progress_is_one_output_that_is_updated(cell):
    with ConsoleMonitor(3, Console(force_jupyter=True)) as console:
        console.begin("step 1", 4, step=1)
        for _ in range(4):
            console.rollout_done()
        console.log(1, METRICS)
        console.say("<careful>")
        console.log(2, {**METRICS, "reward/mean": 0.75})
    first, *later = cell._outputs
    assert not first["update"]
    assert later
    assert all(output["update"] for output in later)
    assert len({output["transient"]["display_id"] for output in cell._outputs}) == 1
    last = later[-1]["data"]["text/html"]
    assert "2/3" in last
    assert "step 1/3  reward 0.500" in last
    assert "&lt;careful&gt;" in last
    assert "0.5 to 0.75, 2 steps" in last
    assert cell.stdout == ""


def result(rewards):
    return TuneResult(
        steps=len(rewards),
        eval_before={"held-out": 0.1},
        eval_after={"held-out": 0.9},
        rewards=rewards,
        history=[{"step": float(n), "reward/mean": r} for n, r in enumerate(rewards)],
        outcomes={"completed": 8},
        tokens=TokenCounts(sampled=10, trained=7, dropped={"stale & old": 3}),
        seconds=61.0,
        run_dir=Path("runs/p/<name>"),
        checkpoint=None,
        traces=Path("runs/p/<name>/traces"),
    )


def test_a_result_shows_a_table_and_the_curve():
    page = ElementTree.fromstring(f"<div>{result([0.0, 0.5, 1.0])._repr_html_()}</div>")
    cells = {row[0].text: row[1].text for row in page.iter("tr")}
    assert cells["held-out reward (held-out)"] == "0.100 -> 0.900"
    assert cells["tokens"] == "10 sampled = 7 trained + 3 dropped (stale & old)"
    (line,) = page.iter("polyline")
    points = [tuple(map(float, point.split(","))) for point in line.get("points").split()]
    assert points == [(4, 116), (240, 60), (476, 4)]
    assert "<svg" not in result([0.5])._repr_html_()


def test_a_results_evaluations_have_their_intervals_where_they_were_measured():
    measured = result([0.5, 1.0])
    measured.history[0] |= {"eval/held-out/reward": 0.1, "eval/held-out/reward_low": 0.05}
    measured.history[0]["eval/held-out/reward_high"] = 0.2
    measured.history[1]["eval/held-out/reward"] = 0.9  # of a single task
    assert "0.100 [0.050, 0.200] -> 0.900 " in str(measured)


def test_a_results_table_has_the_curve_in_blocks():
    text = str(result([0.0, 0.5, 1.0]))
    lines = [line.split("│")[2].rstrip() for line in text.splitlines() if "█" in line]
    assert [line.count("█") for line in lines] == [20, 20, 40, 40]
    assert lines[0].endswith("█ 1.00")
    assert lines[-1].endswith("█ 0.00")
    assert "curve" not in str(result([0.5, 0.6]))


def test_a_long_runs_result_is_short():
    long = result([0.5] * 1000)
    assert len(repr(long)) < 1000
    assert "history" not in json.loads(long.model_dump_json())
    assert len(long._repr_html_()) < 20_000
