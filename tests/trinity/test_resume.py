"""A run that was killed is put back to its last checkpoint, and loses nothing that was recorded."""

import json
import sqlite3
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from tests.kit.builders import call, trace
from tuner.config.source import MASK
from tuner.errors import ConfigError
from tuner.runs.directory import RunDirectory
from tuner.traces import Outcome, TraceStore
from tuner.trinity.handover import CALL_REWARDS, restored
from tuner.trinity.preparation import to_yaml
from tuner.trinity.progress import Journal, TrinityProgress, report_file
from tuner.trinity.resume import Start, positions, require_same_run, rewind

UPDATE = {"actor/grad_norm": 0.5}
HANDED = {"experience_pipeline/experience_count": 4, "rollout/finished_task_count": 2}


class Killed:
    """A run of 2 tasks x 2 rollouts a step, as a kill left it."""

    def __init__(self, folder):
        self.folder = folder
        self.config = SimpleNamespace(
            mode="both",
            checkpoint_job_dir=str(folder),
            buffer=SimpleNamespace(
                batch_size=2,
                train_batch_size=4,
                explorer_input=SimpleNamespace(
                    tasksets=[
                        SimpleNamespace(data_selector=SimpleNamespace(selector_type="shuffle"))
                    ],
                    eval_tasksets=[SimpleNamespace(name="held")],
                ),
                trainer_input=SimpleNamespace(
                    experience_buffer=SimpleNamespace(
                        storage_type="sql", name="handed", path=f"sqlite:///{folder}/handed.db"
                    )
                ),
            ),
            explorer=SimpleNamespace(name="explorer"),
            trainer=SimpleNamespace(name="trainer"),
        )
        self.progress = TrinityProgress(
            RunDirectory(folder), explorer="explorer", trainer="trainer", evaluations=["held"]
        )
        self.store = TraceStore(folder / "traces")

    def report(self, role, rows):
        path = report_file(self.folder, role)
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def checkpoint(self, step, *, whole=True):
        folder = self.folder / f"global_step_{step}"
        (folder / "actor").mkdir(parents=True)
        (self.folder / "latest_state_dict_iteration.txt").write_text(str(step))
        if whole:
            (folder / ".full_checkpoint").touch()
            (self.folder / "latest_checkpointed_iteration.txt").write_text(str(step))
            self.meta("trainer", {"latest_iteration": step, "sample_strategy_state": {}})

    def meta(self, role, state):
        (self.folder / f"{role}_meta.json").write_text(json.dumps(state))

    def read_meta(self, role):
        return json.loads((self.folder / f"{role}_meta.json").read_text())

    def rollouts(self, step, outcomes, split="train"):
        for rollout, outcome in enumerate(outcomes):
            made = trace(
                0,
                rollout,
                [call(f"{step}-{rollout}", [1], [2], [-1.0])],
                outcome=outcome,
                reward=1.0 if outcome is Outcome.COMPLETED else None,
                step=step,
            )
            self.store.append(made)

    def rewind(self):
        return rewind(self.config, self.progress, [6])


@pytest.fixture
def killed(tmp_path):
    return Killed(tmp_path)


def test_explorer_and_trainer_go_on_from_the_checkpoint_although_they_had_got_further(killed):
    killed.report("trainer", [{"step": n, **UPDATE} for n in (1, 2, 3)])
    killed.report("explorer", [{"step": n, **HANDED} for n in (1, 2, 3, 4)])
    killed.checkpoint(2)
    killed.checkpoint(3, whole=False)
    killed.meta("explorer", {"latest_iteration": 4, "taskset_states": [{"current_index": 8}]})
    killed.rollouts(1, [Outcome.COMPLETED])
    start = killed.rewind()
    assert (start.trained, start.explored) == (2, 2)
    assert killed.read_meta("explorer") == {
        "latest_iteration": 2,
        "taskset_states": [{"current_index": 4}],
    }
    assert killed.read_meta("trainer")["latest_iteration"] == 2
    assert (killed.folder / "latest_state_dict_iteration.txt").read_text() == "2"
    assert not (killed.folder / "global_step_3").exists()
    assert killed.progress.trained_steps() == [1, 2]
    assert killed.progress.explored_steps() == [1, 2]
    assert "resuming after step 2 in" in start.said(killed.folder)


def test_tinkers_trainer_saves_weights_to_sample_from_again(killed):
    """The service may have those of the checkpoint no more."""
    killed.report("trainer", [{"step": n, **UPDATE} for n in (1, 2)])
    killed.report("explorer", [{"step": n, **HANDED} for n in (1, 2)])
    killed.checkpoint(2)
    (killed.folder / "global_step_2" / "remote_checkpoint_path.txt").write_text("tinker://a/b")
    assert killed.rewind().trained == 2
    assert not (killed.folder / "latest_state_dict_iteration.txt").exists()


def test_completed_rollouts_are_kept_for_training_and_failed_ones_set_aside(killed):
    killed.report("trainer", [{"step": 1, **UPDATE}])
    killed.report("explorer", [{"step": 1, **HANDED}])
    killed.checkpoint(1)
    killed.rollouts(1, [Outcome.COMPLETED, Outcome.WORKFLOW_ERROR])
    killed.rollouts(2, [Outcome.COMPLETED, Outcome.WORKFLOW_ERROR, Outcome.COMPLETED])
    killed.rollouts(3, [Outcome.WORKFLOW_ERROR])
    start = killed.rewind()
    assert start.recorded == 2
    journal = Journal(killed.folder)
    assert [t.id.rollout for t in journal.recorded("train", 2)] == [0, 2]
    assert journal.recorded("train", 1) == journal.recorded("train", 3) == []
    # The step that was trained stays as it is; nothing is deleted anywhere.
    assert len(killed.store.read("train", 1)) == 2
    aside = TraceStore(killed.folder / "tuner" / "replaced")
    assert [t.outcome for step in (2, 3) for t in aside.read("train", step)] == [
        Outcome.WORKFLOW_ERROR,
        Outcome.WORKFLOW_ERROR,
    ]


def test_rollouts_are_not_trained_again_where_tasks_come_in_another_order(killed):
    killed.config.buffer.explorer_input.tasksets[0].data_selector.selector_type = "difficulty_based"
    killed.rollouts(1, [Outcome.COMPLETED])
    assert killed.rewind().recorded == 0
    assert Journal(killed.folder).recorded("train", 1) == []


def test_without_a_checkpoint_a_run_starts_over_and_says_so(killed):
    killed.report("explorer", [{"step": 1, **HANDED}])
    killed.checkpoint(1, whole=False)
    killed.meta("explorer", {"latest_iteration": 1, "taskset_states": []})
    killed.rollouts(1, [Outcome.COMPLETED])
    start = killed.rewind()
    assert start == Start(0, 0, recorded=1, had_begun=True)
    assert "has no checkpoint yet: starting over; 1 recorded" in start.said(killed.folder)
    assert not (killed.folder / "explorer_meta.json").exists()
    assert not (killed.folder / "latest_state_dict_iteration.txt").exists()
    assert killed.progress.reports("explorer") == {}


def test_a_first_start_says_nothing(killed):
    assert killed.rewind() == Start()
    assert Start().said(killed.folder) is None


def test_rollouts_of_a_step_that_was_only_half_trained_are_collected_again(killed):
    # Step 1 handed over 4 experiences, step 2 only 2 of them: update 1 has used the first 4.
    killed.report("trainer", [{"step": 1, **UPDATE}])
    few = {**HANDED, "experience_pipeline/experience_count": 2}
    killed.report("explorer", [{"step": 1, **few}, {"step": 2, **HANDED}])
    killed.checkpoint(1)
    killed.rollouts(1, [Outcome.COMPLETED])
    assert killed.rewind().explored == 1


def test_leftovers_in_the_buffer_are_kept_and_not_read(killed):
    with sqlite3.connect(killed.folder / "handed.db") as database:
        database.execute("CREATE TABLE handed (id INTEGER, consumed INTEGER)")
        database.executemany("INSERT INTO handed VALUES (?, ?)", [(1, 1), (2, 0)])
    killed.rollouts(1, [Outcome.COMPLETED])
    killed.rewind()
    found = sqlite3.connect(killed.folder / "handed.db").execute("SELECT * FROM handed").fetchall()
    assert found == [(1, 1), (2, 1)]


def test_exploring_goes_on_after_the_last_step_that_was_handed_over(killed):
    killed.config.mode = "explore"
    killed.report("explorer", [{"step": n, **HANDED} for n in (1, 2)])
    killed.rollouts(1, [Outcome.COMPLETED])
    start = killed.rewind()
    assert (start.trained, start.explored) == (0, 2)
    assert killed.read_meta("explorer")["taskset_states"] == [{"current_index": 4}]


@pytest.mark.parametrize("mode", ["both", "explore"])
def test_last_steps_in_which_no_rollout_completed_are_made_again(killed, mode):
    """As where the engine's machine is gone: what asks it fails, a step in a moment."""
    killed.config.mode = mode
    nothing = {**HANDED, "experience_pipeline/experience_count": 0}
    killed.report("trainer", [{"step": n, **UPDATE} for n in (1, 2)])
    # The third taught nothing, as rewards were equal; nobody began the rollouts of the fifth.
    given = [HANDED, HANDED, nothing, nothing, nothing]
    killed.report("explorer", [{"step": n, **row} for n, row in enumerate(given, start=1)])
    killed.checkpoint(2)
    for step in (1, 2, 3):
        killed.rollouts(step, [Outcome.COMPLETED, Outcome.WORKFLOW_ERROR])
    killed.rollouts(4, [Outcome.WORKFLOW_ERROR] * 2)
    start = killed.rewind()
    assert (start.explored, start.recorded) == (3, 0)
    assert killed.read_meta("explorer")["taskset_states"] == [{"current_index": 6}]
    assert [len(killed.store.read("train", step)) for step in (2, 3, 4)] == [2, 2, 0]


def test_places_in_several_sets_add_up_to_the_tasks_that_were_taken():
    assert positions(7, [5]) == [7]
    assert positions(20, [3, 2]) == [12, 8]
    assert sum(positions(7, [3, 2])) == 7


TREE = {
    "name": "a",
    "algorithm": {"repeat_times": 2},
    "buffer": {
        "total_steps": 2,
        "explorer_input": {
            "taskset": {"path": "/old", "workflow_args": {"tuner": {"workflow": "x", "seed": 1}}}
        },
    },
}


@pytest.fixture
def begun(tmp_path):
    yaml = pytest.importorskip("omegaconf").OmegaConf.to_yaml(TREE)
    (tmp_path / "config.yaml").write_text(yaml)
    (tmp_path / "data.json").write_text(json.dumps({"train": "1"}))
    return RunDirectory(tmp_path)


def changed(**changes):
    tree = json.loads(json.dumps(TREE))
    tree["buffer"]["total_steps"] = changes.get("total_steps", 2)
    tree["algorithm"]["repeat_times"] = changes.get("repeat_times", 2)
    taskset = tree["buffer"]["explorer_input"]["taskset"]
    taskset["path"] = "/new"
    taskset["workflow_args"]["tuner"]["workflow"] = "mended"
    taskset["workflow_args"]["tuner"]["seed"] = changes.get("seed", 1)
    return tree


def test_a_longer_run_with_a_mended_workflow_goes_on(begun):
    require_same_run(begun, changed(total_steps=9), {"train": "1"})


@pytest.mark.parametrize(
    ("changes", "data", "message"),
    [
        ({"repeat_times": 4}, "1", "algorithm.repeat_times was 2 and is 4"),
        ({"seed": 2}, "1", "workflow_args.tuner.seed was 1 and is 2"),
        ({}, "2", "the rows of dataset 'train' have changed"),
    ],
)
def test_what_decides_what_is_learned_may_not_change(begun, changes, data, message):
    with pytest.raises(ConfigError, match=message):
        require_same_run(begun, changed(**changes), {"train": data})


# As a version of tuner wrote it in whose tree our classes were elsewhere.
OLD = "tuner.backends.trinity"
NOTE = {"trackers": ["wandb"], "limits": {"timeout": 1.0, "max_retries": 0}, "section": {}}


def test_a_run_goes_on_that_was_started_where_our_classes_had_other_names(begun):
    tree = changed()
    tree["algorithm"]["advantage_fn"] = f"{OLD}.advantages.CallRewards"
    yaml = pytest.importorskip("omegaconf").OmegaConf.to_yaml(tree)
    begun.config.write_text(yaml)
    tree["algorithm"]["advantage_fn"] = CALL_REWARDS
    require_same_run(begun, tree, {"train": "1"})
    tree["algorithm"]["advantage_fn"] = "rloo"
    with pytest.raises(ConfigError, match=r"advantage_fn was 'tuner\.trinity\..* and is 'rloo'"):
        require_same_run(begun, tree, {"train": "1"})


def test_its_configuration_can_be_given_again():
    own = restored(
        {
            "algorithm": {"advantage_fn": f"{OLD}.advantages.CallRewards"},
            "buffer": {
                "explorer_input": {"default_workflow_type": f"{OLD}.workflow.TunerWorkflow"}
            },
            "monitor": {
                "monitor_type": f"{OLD}.monitor.TunerMonitor",
                "monitor_args": {"tuner": {**NOTE, "reasoning_parser": None}},
            },
        }
    )
    assert own["algorithm"]["advantage_fn"] == "step_wise_grpo"
    assert own["buffer"]["explorer_input"] == {}
    assert own["monitor"]["monitor_type"] == ["wandb"]


def test_a_secret_may_be_given_in_another_way(tmp_path):
    before = {"buffer": {"path": "sql://me:gone@host"}, "agent": {"api_key": "was clear"}}
    references = {"sql://me:gone@host": "sql://me:${oc.env:GONE}@host"}
    (tmp_path / "config.yaml").write_text(to_yaml(before, references))
    assert OmegaConf.to_container(OmegaConf.load(tmp_path / "config.yaml")) == {
        "buffer": {"path": "sql://me:${oc.env:GONE}@host"},
        "agent": {"api_key": MASK},
    }
    now = {"buffer": {"path": "sql://me:clear@host"}, "agent": {"api_key": "clear"}}
    require_same_run(RunDirectory(tmp_path), now, {})
    with pytest.raises(ConfigError, match="other was None and is 1"):
        require_same_run(RunDirectory(tmp_path), {**now, "other": 1}, {})
