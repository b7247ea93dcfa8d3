"""What runs are compared by: their settings without names, and their curves."""

import pytest

from tests.tools.viewer.stored import small, store_run
from tuner.errors import TunerError
from tuner.runs.estimates import differing_settings, find_runs, read_run


def test_settings_that_differ_are_named_with_the_value_of_each_run(tmp_path):
    texts = {
        "a": "name: a\nalgorithm: {algorithm_type: ppo, optimizer: {lr: 0.1}}\nseed: 1\n",
        "b": "name: b\nalgorithm: {algorithm_type: ppo, optimizer: {lr: 0.2}}\nseed: 1\n",
        "c": "name: c\nalgorithm: {algorithm_type: ppo}\nseed: 1\nextra: [1, 2]\n",
    }
    runs = []
    for name, text in texts.items():
        run = store_run(tmp_path / name, [], metrics=[{"step": 1, "reward/mean": 0.5}])
        (run / "config.yaml").write_text(text)
        runs.append(read_run(run))
    assert [run.name for run in runs] == ["a", "b", "c"]
    assert runs[0].metrics == [{"step": 1, "reward/mean": 0.5}]
    assert runs[0].settings["algorithm.optimizer.lr"] == 0.1
    assert differing_settings(runs) == {
        "algorithm.optimizer.lr": [0.1, 0.2, None],
        "extra.0": [None, None, 1],
        "extra.1": [None, None, 2],
    }
    assert differing_settings(runs[:1]) == {}


def test_a_run_that_goes_on_is_read_up_to_its_last_whole_row(tmp_path):
    run = store_run(tmp_path, [], metrics=[{"step": 1}])
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2')
    (run / "config.yaml").unlink()
    assert read_run(run).metrics == [{"step": 1}]
    assert read_run(run).settings == {}


def test_runs_are_found_in_a_project_and_in_the_folder_of_projects(tmp_path):
    for name in ("p/b", "p/a", "q/c"):
        store_run(tmp_path / name, [small(0, 0, 1.0)])
    store_run(tmp_path / "p/a/bench", [])  # inside a run none is looked for
    (tmp_path / "empty").mkdir()
    assert list(find_runs(tmp_path / "p")) == [tmp_path / "p/a", tmp_path / "p/b"]
    assert [path.name for path in find_runs(tmp_path)] == ["a", "b", "c"]
    assert list(find_runs(tmp_path, depth=1)) == []
    assert list(find_runs(tmp_path / "nowhere")) == []


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(TunerError, match=r"is not a run: it contains neither metrics\.jsonl"):
        read_run(tmp_path)
