"""Whole runs whose rollouts begin inside others: killed, resumed, and what they advise."""

import functools
import json
import signal

import pytest
import torch
from safetensors.torch import load_file

from tests.kit import forked, runs
from tests.kit.agents import answer
from tuner.errors import ConfigError, TunerError
from tuner.loop import run_local
from tuner.tasks.functions import JudgeOutput, WorkflowOutput
from tuner.traces.store import read_traces

TREE = (
    "algorithm.algorithm_type=tree",
    "algorithm.repeat_times=6",
    "tuner.branching.ends=2",
    "tuner.branching.trunks=3",
)
MODES = {
    "inside, in rounds": (*TREE, "tuner.branching.inside=true", "tuner.branching.rounds=2"),
    "best": (
        *("algorithm.algorithm_type=tree", "algorithm.repeat_times=6"),
        *("tuner.branching.where=best", "buffer.total_steps=5"),
    ),
}


def tune(model, root, *overrides, judge=runs.judge, workflow=runs.talk):
    return run_local(
        runs.config(model, root, *overrides),
        workflow=workflow,
        judge=judge,
        train_tasks=runs.TRAIN,
        eval_tasks={"held-out": runs.EVAL},
    )


async def repeatable(task, model):
    """Two to four turns, as the first answer has it; draws nothing."""
    messages = [{"role": "user", "content": task["question"]}]
    texts = []
    while not texts or len(texts) < 2 + len(texts[0]) % 3:
        texts.append(await answer(model, messages))
        said = {"role": "assistant", "content": texts[-1]}
        messages += [said, {"role": "user", "content": "More."}]
    return WorkflowOutput(response=texts[-1])


def traces_of(result):
    files = sorted((result.run_dir / "traces").glob("step_*.jsonl"))
    return [trace for path in files for trace in read_traces(path)]


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_a_killed_run_ends_with_the_same_weights(mode, random_model_path, tmp_path):
    overrides = MODES[mode]
    straight = tune(random_model_path, tmp_path / "straight", *overrides)
    begin = functools.partial(runs.main, workflow=runs.talk)
    for moment in ("judge:9", "log:3"):
        code = forked.run(begin, str(random_model_path), str(tmp_path / "cut"), moment, *overrides)
        assert code == -signal.SIGKILL, moment
    again = tune(random_model_path, tmp_path / "cut", *overrides)
    expected, found = (load_file(r.checkpoint / "model.safetensors") for r in (straight, again))
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    sampled = [[row.get("tokens/sampled") for row in r.history] for r in (straight, again)]
    assert sampled[0] == sampled[1]
    assert {t.id: t.origin for t in traces_of(again)} == {
        t.id: t.origin for t in traces_of(straight)
    }
    notes = [(r.run_dir / "branching.jsonl").read_bytes() for r in (straight, again)]
    assert notes[0] == notes[1]
    begun = [trace for trace in traces_of(straight) if trace.origin is not None]
    assert begun
    assert all(trace.origin.diverged is None for trace in begun)
    if "inside" in mode:
        assert any(trace.origin.token for trace in begun)
        assert any(trace.origin.rollout.rollout >= 3 for trace in begun)


@pytest.mark.long
@pytest.mark.parametrize(
    "mode",
    [
        (),
        ("model.lora_configs=[{lora_rank: 4}]",),
        ("algorithm.policy_loss_fn=gspo", "tuner.algorithm.updates=2"),
        (
            *("tuner.deterministic=false", "synchronizer.sync_offset=2"),
            *("explorer.runner_per_model=6", "tuner.branching.where=uncertain"),
        ),
    ],
    ids=["plain", "LoRA", "gspo, two updates", "ahead"],
)
def test_the_account_of_a_run_has_a_column_for_what_was_replayed(mode, random_model_path, tmp_path):
    overrides = (*TREE, "buffer.total_steps=3", *mode)
    result = tune(random_model_path, tmp_path, *overrides, workflow=repeatable)
    for row in result.history[1:]:
        dropped = sum(n for name, n in row.items() if name.startswith("tokens/dropped/"))
        assert row["tokens/sampled"] == row["tokens/trained"] + dropped
        assert row.get("branches/diverged", 0) == 0
    names = ("tokens/sampled", "tokens/replayed", "branches/rollouts")
    found = {name: sum(row.get(name, 0) for row in result.history) for name in names}
    traces = traces_of(result)
    begun = sum(trace.origin is not None for trace in traces)
    assert found["branches/rollouts"] == begun > 0
    assert found["tokens/replayed"] == sum(t.replayed_tokens for t in traces) > 0
    assert found["tokens/sampled"] == sum(t.sampled_tokens for t in traces)


@pytest.mark.long
def test_best_says_what_it_does(random_model_path, tmp_path, capsys):
    result = tune(random_model_path, tmp_path, *MODES["best"])
    notes = (result.run_dir / "branching.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in notes] == list(range(1, 6))
    printed = "".join(capsys.readouterr())
    assert "branching: " in printed
    assert "rollouts from the beginning" in " ".join(printed.split())


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algorithm.algorithm_type=grpo", "advantage_fn is grpo"),
        ("tuner.branching.trunks=6", "no rollout is left to branch"),
        ("tuner.branching.where=best", r"tuner\.branching\.ends is 2, but .* best, which chooses"),
        ("algorithm.kl_penalty_fn=k2", "kl_penalty_fn is k2"),
        ("tuner.branching.seed_functions=true", "random states belong to the process"),
        ("explorer.over_rollout.ratio=0.2", r"explorer\.over_rollout\.ratio is 0\.2"),
        ("tuner.branching.where=nowhere", "spread, uncertain, best or module:function"),
        ("tuner.branching.where=open", "open was removed: set it to best"),
        ("tuner.branching.ends=1", "greater than or equal to 2"),
    ],
)
def test_settings_that_do_not_go_together_are_named(override, message, random_model_path, tmp_path):
    with pytest.raises(ConfigError, match=message):
        runs.config(random_model_path, tmp_path, *TREE, "explorer.runner_per_model=4", override)


@pytest.mark.long
def test_a_damaged_note_is_named(random_model_path, tmp_path):
    begin = functools.partial(runs.main, workflow=runs.talk)
    forked.run(begin, str(random_model_path), str(tmp_path), "update:4", *TREE)
    notes = tmp_path / "p" / "run" / "branching.jsonl"
    notes.write_text("{}\n" + notes.read_text())
    with pytest.raises(TunerError, match=r"branching\.jsonl, line 1 is not a note"):
        tune(random_model_path, tmp_path, *TREE)


def test_judges_of_groups_are_refused(random_model_path, tmp_path):
    async def judge(task, responses):
        return [JudgeOutput(reward=1.0) for _ in responses]

    with pytest.raises(ConfigError, match="the judge takes the rollouts of a group together"):
        tune(random_model_path, tmp_path, *TREE, judge=judge)
