"""A run whose judge was wrong goes on from its own samples, judged again."""

import hashlib
import json
import shutil
import signal
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from tests.kit import async_runs, forked, runs
from tests.loop.test_resume import without_times
from tuner import rebase
from tuner.errors import ConfigError, FunctionError, TrainingError, TunerError
from tuner.loop import run_local
from tuner.tasks.functions import JudgeOutput, WorkflowOutput
from tuner.traces import Outcome
from tuner.traces.store import read_traces, trace_line, trace_to_json

WRONG_TASK = "train 4"


async def wrong(task, response):
    """As `runs.judge`, but for one task, of which it gives the opposite."""
    right = (await runs.judge(task, response)).reward
    return JudgeOutput(reward=1 - right if task["question"] == WRONG_TASK else right)


async def never(task, model):
    raise AssertionError("nothing is to be sampled")


async def only_evaluated(task, model):
    if task["question"].startswith("train"):
        raise AssertionError("nothing is to be sampled for training")
    return await runs.workflow(task, model)


def tune(config, *, judge, workflow=runs.workflow):
    return run_local(
        config,
        workflow=workflow,
        judge=judge,
        train_tasks=runs.TRAIN,
        eval_tasks={"held-out": runs.EVAL},
    )


def again(run, judge=runs.judge, workflow=runs.workflow, **options):
    return rebase(
        run,
        judge,
        workflow=workflow,
        train_dataset=runs.TRAIN,
        eval_dataset={"held-out": runs.EVAL},
        **{"max_reused": 1, **options},
    )


def weights(result, file="model.safetensors"):
    return load_file(result.checkpoint / file)


def equal(one, other):
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


def files(folder):
    """What is where in a folder."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def copied(run, folder, *leave_out):
    shutil.copytree(run, folder / "p" / "run")
    for name in leave_out:
        shutil.rmtree(folder / "p" / "run" / name)
    return folder / "p" / "run"


def changed_traces(run, change):
    """Change what is stored of a run's training rollouts."""
    for path in sorted((run / "traces").glob("step_*.jsonl")):
        lines = [trace_line(trace_to_json(change(trace))) for trace in read_traces(path)]
        path.write_bytes(b"".join(lines))


@pytest.fixture(scope="module")
def mistaken(random_model_path, tmp_path_factory):
    """A run with the wrong judge."""
    root = tmp_path_factory.mktemp("mistaken")
    return tune(runs.config(random_model_path, root), judge=wrong)


@pytest.fixture(scope="module")
def clean(random_model_path, tmp_path_factory):
    """The run that it should have been."""
    root = tmp_path_factory.mktemp("clean")
    return tune(runs.config(random_model_path, root), judge=runs.judge)


@pytest.fixture(scope="module")
def reused(mistaken, tmp_path_factory):
    """All that was recorded, trained again with the right rewards."""
    run = copied(mistaken.run_dir, tmp_path_factory.mktemp("reused"))
    return again(run, workflow=only_evaluated, min_effective_samples=0)


def test_with_the_same_judge_nothing_is_trained_and_nothing_sampled(mistaken, tmp_path):
    run = copied(mistaken.run_dir, tmp_path)
    before = files(run)
    found = again(run, wrong, workflow=never)
    assert found.record.first_changed is None
    assert {step.use for step in found.record.steps} == {"kept"}
    assert found.result.run_dir == tmp_path / "p" / "run-rebased"
    assert equal(weights(found.result), weights(mistaken))
    assert found.result.history == mistaken.history
    assert files(run) == before
    assert "no reward changed: all" in str(found)


def test_without_a_checkpoint_training_is_repeated_to_the_same_bits(mistaken, tmp_path):
    run = copied(mistaken.run_dir, tmp_path, "checkpoints")
    found = again(run, wrong, workflow=never)
    assert equal(weights(found.result), weights(mistaken))
    assert without_times(found.result.history) == without_times(mistaken.history)


@pytest.mark.long
def test_where_no_sample_is_used_again_it_is_the_clean_run_bit_for_bit(mistaken, clean, tmp_path):
    """Steps before the change are those of both, and of the first changed one the samples too."""
    run = copied(mistaken.run_dir, tmp_path)
    found = again(run, min_effective_samples=1, name="mended")
    record = found.record
    uses = [step.use for step in record.steps]
    first = record.first_changed
    assert first is not None
    assert 1 < first < 6
    assert uses == ["kept"] * (first - 1) + ["again"] + ["anew"] * (6 - first)
    assert record.ended == first + 1
    assert equal(weights(found.result), weights(clean))
    kept = [row["reward/mean"] for row in clean.history[1:]]
    assert [row["reward/mean"] for row in found.result.history[1:]] == kept
    # What was recorded is all there still: in the traces, or set aside.
    aside = found.result.run_dir / "set_aside"
    for step in range(1, 7):
        name = f"step_{step:06d}.jsonl"
        old = {(t.id, t.attempt): t.calls for t in read_traces(run / "traces" / name)}
        where = aside if step > first else found.result.traces
        new = {(t.id, t.attempt): t.calls for t in read_traces(where / name)}
        assert new == old
    text = str(found)
    assert f"the first step in which a reward changed: {first}" in text
    assert f"the rest is not reused because before step {first + 1} the tokens" in text


def test_samples_are_used_again_and_every_token_is_accounted_for(mistaken, clean, reused):
    record, history = reused.record, reused.result.history
    first = record.first_changed
    assert [step.use for step in record.steps] == ["kept"] * (first - 1) + ["again"] * (7 - first)
    assert record.tokens("kept", "again") == mistaken.tokens.sampled
    assert sum(step.changed for step in record.steps) > 0
    for row, old in zip(history[1:], mistaken.history[1:], strict=True):
        dropped = sum(v for name, v in row.items() if name.startswith("tokens/dropped/"))
        assert row["tokens/sampled"] == old["tokens/sampled"] == row["tokens/trained"] + dropped
        if row["step"] < first:
            assert "rebase/reused" not in row
        else:
            assert row["rebase/reused"] == 1
        assert ("rebase/effective_tokens" in row) == (row["step"] > first)
        if row["step"] > first:
            assert 0 < row["rebase/effective_tokens"] < 1
            assert 0 < row["rebase/effective_rollouts"] < 1
            assert row["train/stale_fraction"] == 1
            # The proximal policy is the one that the step began with, whatever the versions say.
            assert row["train/ratio_mean"] == pytest.approx(1, abs=1e-6)
    # The right rewards, of samples that the wrong run made.
    step = history[first]
    assert step["reward/mean"] == clean.history[first]["reward/mean"]
    assert step["reward/mean"] != mistaken.history[first]["reward/mean"]
    assert not equal(weights(reused.result), weights(mistaken))
    stored = json.loads((reused.result.run_dir / "rebase.json").read_text())
    assert [one["effective_tokens"] for one in stored["steps"]] == [
        one.effective_tokens for one in record.steps
    ]


@pytest.mark.long
def test_of_the_steps_after_the_change_as_many_are_sampled_anew_as_is_said(mistaken, tmp_path):
    run = copied(mistaken.run_dir, tmp_path)
    found = again(run, min_effective_samples=0, max_reused=0.6)
    first = found.record.first_changed
    used = int(0.6 * (7 - first))
    assert used > 1
    uses = [step.use for step in found.record.steps[first - 1 :]]
    assert uses == ["again"] * used + ["anew"] * (7 - first - used)
    assert "the rest is not reused because these are 60% of the steps (--max-reused)" in str(found)


@pytest.mark.long
def test_a_rebased_run_that_is_killed_goes_on_to_the_same_weights(
    random_model_path, mistaken, reused, tmp_path
):
    worth = [one.effective_capped for one in reused.record.steps if one.effective_capped]
    least = sorted(worth)[0] + 1e-9  # so that it ends where they are worth least
    straight = again(copied(mistaken.run_dir, tmp_path / "straight"), min_effective_samples=least)
    ended = straight.record.ended
    assert ended is not None
    run = copied(mistaken.run_dir, tmp_path / "cut")
    for moment in ("judge:7", "update:2", "set_aside:1", "move:2", "workflow:2", "log:2"):
        code = forked.run(_killed, str(run), moment, least)
        assert code == -signal.SIGKILL, moment
    found = again(run, min_effective_samples=least)
    assert equal(weights(found.result), weights(straight.result))
    assert found.record.steps == straight.record.steps
    aside = [files(one.result.run_dir / "set_aside") for one in (found, straight)]
    assert aside[0] == aside[1]
    assert without_times(found.result.history) == without_times(straight.result.history)


def _killed(run, moment, least):
    from pathlib import Path

    from tuner.runs import console as monitors
    from tuner.runs import rebased
    from tuner.training.trainer import PolicyTrainer

    what, count = moment.split(":")
    judge, workflow = runs.judge, runs.workflow
    if what == "judge":
        judge = runs.killing_itself(judge, int(count))
    elif what == "workflow":
        workflow = runs.killing_itself(workflow, int(count))
    elif what == "update":
        kill = runs.killing_itself(PolicyTrainer.step_lr_scheduler, int(count))
        PolicyTrainer.step_lr_scheduler = kill
    elif what == "set_aside":
        rebased.Rebased._move = runs.killing_itself(rebased.Rebased._move, int(count))
    elif what == "move":
        rebased.write_traces = runs.killing_itself(rebased.write_traces, int(count))
    elif what == "log":
        monitors.JsonlMonitor.log = runs.killing_itself(monitors.JsonlMonitor.log, int(count))
    again(Path(run), judge, workflow, min_effective_samples=least)


MODES = {
    "lora": ("model.lora_configs=[{lora_rank: 4}]",),
    "ppo": (
        *("algorithm.algorithm_type=ppo", "algorithm.repeat_times=1"),
        *("tuner.critic.lr=0.01", "trainer.critic_warmup=1"),
    ),
    "tree": (
        *("algorithm.algorithm_type=tree", "algorithm.repeat_times=6"),
        *("tuner.branching.ends=2", "tuner.branching.trunks=3"),
    ),
    "best": (
        *("algorithm.algorithm_type=tree", "algorithm.repeat_times=6"),
        *("tuner.branching.where=best",),
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("mode", ["lora", "best", "ppo", "tree"])
def test_other_kinds_of_runs_go_on_from_their_samples(mode, random_model_path, tmp_path):
    """With the same judge to the same bits, with another from what was recorded alone."""
    talk = runs.talk if mode in ("tree", "best") else runs.workflow
    config = runs.config(random_model_path, tmp_path, *MODES[mode])
    run = tune(config, judge=wrong, workflow=talk)
    file = "adapter_model.safetensors" if mode == "lora" else "model.safetensors"
    expected = weights(run, file)
    shutil.rmtree(run.run_dir / "checkpoints")
    same = again(run.run_dir, wrong, never, name="same")
    assert equal(weights(same.result, file), expected)
    assert without_times(same.result.history) == without_times(run.history)

    async def evaluated(task, model):
        assert task["question"].startswith("eval")
        return await talk(task, model)

    found = again(run.run_dir, workflow=evaluated, min_effective_samples=0)
    assert found.record.tokens("kept", "again") == run.tokens.sampled
    assert found.result.tokens.sampled == run.tokens.sampled
    assert not equal(weights(found.result, file), weights(same.result, file))


@pytest.mark.long
def test_asynchronous_runs_take_the_same_groups_and_then_new_ones(random_model_path, tmp_path):
    run = tune(
        async_runs.config(random_model_path, tmp_path), judge=wrong, workflow=async_runs.workflow
    )
    batches = (run.run_dir / "batches.jsonl").read_text()
    found = again(run.run_dir, workflow=only_evaluated, min_effective_samples=0, name="all")
    assert (found.result.run_dir / "batches.jsonl").read_text() == batches
    assert found.result.tokens.sampled == run.tokens.sampled
    worth = [one.effective_tokens for one in found.record.steps if one.effective_tokens]
    assert len(worth) == 6 - found.record.first_changed

    some = again(run.run_dir, workflow=async_runs.workflow, min_effective_samples=1, name="some")
    ended = some.record.ended
    assert ended == found.record.first_changed + 1
    numbers = [json.loads(line) for line in batches.splitlines()]
    taken = {group for row in numbers if row["step"] < ended for group in row["groups"]}
    for step in range(1, 7):
        for trace in read_traces(some.result.traces / f"step_{step:06d}.jsonl"):
            known = (step - 1) * 2 + trace.id.task in taken
            assert known or trace.foreign_from is None
    aside = sorted((some.result.run_dir / "set_aside").glob("step_*.jsonl"))
    assert sum(len(list(read_traces(path))) for path in aside) == 3 * 2 * (7 - ended)
    lines = (some.result.run_dir / "batches.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 7))


async def wrong_group(task, responses):
    found = [await wrong(task, response) for response in responses]
    return [JudgeOutput(reward=one.reward, metrics={"size": len(responses)}) for one in found]


async def right_group(task, responses):
    found = [await runs.judge(task, response) for response in responses]
    return [JudgeOutput(reward=one.reward, metrics={"size": len(responses)}) for one in found]


@pytest.mark.long
def test_a_judge_of_groups_sees_the_groups_again(random_model_path, tmp_path):
    run = tune(runs.config(random_model_path, tmp_path), judge=wrong_group)
    found = again(run.run_dir, right_group, only_evaluated, min_effective_samples=0)
    assert found.result.tokens.sampled == run.tokens.sampled
    assert {row["workflow/size"] for row in found.result.history[1:]} == {3}


async def asking(task, response, auxiliary_models):
    said = await runs.answer(auxiliary_models["helper"], response + "?")
    return await runs.judge(task, said)


@pytest.mark.long
def test_a_judge_that_asks_a_model_asks_it_again(random_model_path, tmp_path):
    """What a model says is drawn by the rollout's seed, so it says the same."""
    helper = f"explorer.auxiliary_models=[{{name: helper, model_path: {random_model_path}}}]"
    limit = "explorer.auxiliary_models.0.max_response_tokens=4"
    config = runs.config(random_model_path, tmp_path, helper, limit, "buffer.total_steps=2")
    run = tune(config, judge=asking)
    assert len({r for row in run.history for n, r in row.items() if n == "reward/mean"}) == 2
    found = again(run.run_dir, asking, never)
    assert found.record.first_changed is None
    assert found.record.evaluations_changed == 0


@pytest.mark.long
def test_a_judge_that_fails_gives_no_reward_and_one_that_had_failed_may(mistaken, tmp_path):
    """Neither is reward 0: how a rollout ended is what the new judge makes of it."""
    run = copied(mistaken.run_dir, tmp_path)
    rewards = {}

    async def partly(task, response):
        found = await runs.judge(task, response)
        if found.reward < 0.3:
            raise LookupError("no verdict")
        rewards[response] = found.reward
        return found

    def failed(trace):
        unjudged = {"outcome": Outcome.JUDGE_ERROR, "reward": None, "error": "KeyError: 1"}
        return replace(trace, **unjudged) if trace.id.rollout == 0 else trace

    changed_traces(run, failed)
    found = again(run, partly, only_evaluated, min_effective_samples=0)
    assert found.record.first_changed == 1
    for path in sorted(found.result.traces.glob("step_*.jsonl")):
        for trace in read_traces(path):
            if trace.response in rewards:
                assert (trace.outcome, trace.error) == ("completed", None)
                assert trace.reward == rewards[trace.response]
            else:
                assert (trace.outcome, trace.reward) == ("judge_error", None)
    assert found.result.outcomes["judge_error"] > 0


def test_evaluations_before_the_change_are_judged_again_and_later_ones_made_again(
    mistaken, tmp_path
):
    run = copied(mistaken.run_dir, tmp_path)
    asked = []

    async def half(task, response):
        found = await runs.judge(task, response)
        is_eval = task["question"].startswith("eval")
        return JudgeOutput(reward=found.reward / 2 if is_eval else found.reward)

    async def counted(task, model):
        asked.append(task["question"])
        return await only_evaluated(task, model)

    found = again(run, half, counted, min_effective_samples=0)
    first, record = found.record.first_changed, found.record
    # Evaluations are after steps 0, 3 and 6, of two tasks each.
    kept = sum(step < first for step in (0, 3, 6))
    assert (record.evaluations_judged, record.evaluations_set_aside) == (2 * kept, 6 - 2 * kept)
    assert len(asked) == 6 - 2 * kept
    old = mistaken.history[0]["eval/held-out/reward"]
    assert found.result.history[0]["eval/held-out/reward"] == pytest.approx(old / 2)


@pytest.mark.long
def test_a_reward_of_a_step_without_a_checkpoint_before_it_is_no_reason_to_sample(
    mistaken, clean, tmp_path
):
    """Of the steps before the change, those after the last checkpoint are trained from traces."""
    run = copied(mistaken.run_dir, tmp_path, "checkpoints")
    found = again(run, min_effective_samples=1)
    assert equal(weights(found.result), weights(clean))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_effective_samples": 1.5}, r"min_effective_samples is 1\.5: give a share"),
        ({"judge": "nowhere.py:judge"}, r"--judge is 'nowhere\.py:judge': there is no file"),
        ({"workflow": None}, r"names no workflow: add --workflow"),
        ({"overrides": ["algorithm.optimizer.lr=1"]}, r"algorithm\.optimizer\.lr was 0\.01"),
    ],
)
def test_what_cannot_be_asked_is_refused(options, message, mistaken):
    with pytest.raises(ConfigError, match=message):
        again(mistaken.run_dir, **options)
    assert not mistaken.run_dir.with_name("run-rebased").exists()


def test_rollouts_that_went_on_by_what_the_judge_said_are_refused(mistaken, tmp_path):
    run = copied(mistaken.run_dir, tmp_path)
    text = (run / "config.yaml").read_text()
    assert "feedback_attempts: 0" in text
    (run / "config.yaml").write_text(text.replace("attempts: 0", "attempts: 2"))
    with pytest.raises(ConfigError, match=r"tuner\.feedback_attempts is 2, so its rollouts"):
        again(run)


def test_a_run_without_a_judge_is_refused(random_model_path, tmp_path):
    async def scored(task, model):
        return WorkflowOutput(reward=len(await runs.answer(model, task["question"])) % 3)

    run = tune(
        runs.config(random_model_path, tmp_path, "buffer.total_steps=1"),
        judge=None,
        workflow=scored,
    )
    with pytest.raises(ConfigError, match="has no judge: its workflow gave the rewards"):
        again(run.run_dir)


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(TunerError, match="is not a run: give the folder"):
        again(tmp_path)


def test_another_rebase_of_the_name_is_refused(reused):
    run = reused.result.run_dir.with_name("run")
    with pytest.raises(ConfigError, match=r"whose --min-effective-samples was 0\.0, and is now 0"):
        again(run, min_effective_samples=0.25)
    with pytest.raises(ConfigError, match="run is a different run: choose another name"):
        again(run, name="run")


def test_a_mistake_of_the_judge_leaves_nothing(mistaken, tmp_path):
    async def nothing(task, response):
        return None

    run = copied(mistaken.run_dir, tmp_path)
    with pytest.raises(FunctionError, match="is a return statement missing"):
        again(run, nothing)
    assert not (tmp_path / "p" / "run-rebased").exists()


@pytest.mark.long
def test_a_reward_function_that_failed_in_the_workflow_is_not_judged(mistaken, tmp_path):
    """It has the judge's outcome, and there is no response to judge."""
    run = copied(mistaken.run_dir, tmp_path)

    def failed(trace):
        seconds = {**trace.seconds, "judge": 0.0}
        lost = {"outcome": Outcome.JUDGE_ERROR, "reward": None, "response": "", "seconds": seconds}
        return replace(trace, **lost) if trace.id.rollout == 0 else trace

    changed_traces(run, failed)
    found = again(run, workflow=only_evaluated, min_effective_samples=0)
    for path in sorted(found.result.traces.glob("step_*.jsonl")):
        for trace in read_traces(path):
            assert (trace.reward is None) == (trace.id.rollout == 0)


def test_training_that_fails_says_so(mistaken, tmp_path):
    async def same(task, response):
        return JudgeOutput(reward=1.0)

    run = copied(mistaken.run_dir, tmp_path)
    with pytest.raises(TrainingError, match="gave nothing to learn from"):
        again(run, same, only_evaluated)
