"""Collection that runs ahead of training: exactness, bounds, accounts, kills."""

import asyncio
import json
import signal
import threading
from collections import Counter
from contextlib import asynccontextmanager

import pytest
import torch
from safetensors.torch import load_file

from tests.kit import async_runs, forked, runs
from tuner.engines.transformers.engine import TransformersEngine
from tuner.errors import FunctionError
from tuner.gateway import SamplingDefaults
from tuner.loop import deterministic_torch, run_local
from tuner.rollouts import StepPlan, collect
from tuner.runs.models import ServedCopy
from tuner.runs.stack import build_stack, build_trainer, selection
from tuner.tasks.functions import WorkflowOutput
from tuner.tasks.selection import batch_indices
from tuner.traces import TraceStore
from tuner.training.batch import build_batch
from tuner.training.trainer import PolicyTrainer


def tune(config, workflow=async_runs.workflow, judge=runs.judge):
    return run_local(
        config,
        workflow=workflow,
        judge=judge,
        train_tasks=runs.TRAIN,
        eval_tasks={"held-out": runs.EVAL},
    )


def counted(row):
    dropped = sum(n for name, n in row.items() if name.startswith("tokens/dropped/"))
    return row["tokens/sampled"] == row["tokens/trained"] + dropped


def test_without_staleness_it_is_the_loop_that_takes_turns_bit_for_bit(random_model_path, tmp_path):
    """Beside a loop written out here: collect, wait for all, train, publish."""
    config = runs.config(random_model_path, tmp_path / "a", "synchronizer.sync_offset=0")
    found = tune(config, runs.workflow)

    async def by_turns():
        stack = build_stack(config, workflow=runs.workflow, judge=runs.judge)
        trainer = build_trainer(config, stack, total_steps=6)
        store = TraceStore(tmp_path / "b")
        for step in range(1, 7):
            rows = batch_indices(
                step, size=2, rows=7, selector=config.buffer.explorer_input.taskset.data_selector
            )
            tasks = [runs.TRAIN[row] for row in rows]
            plan = StepPlan("train", step, tasks, 3, SamplingDefaults(max_tokens=6))
            traces = await collect(plan, stack.runner, store, max_running=1)
            batch = build_batch(traces, selection=selection(config))
            scored = trainer.compute_ref_logp(trainer.compute_advantages(batch))
            trainer.ppo_update(scored)
            trainer.step_lr_scheduler()
            await trainer.update_weights(stack.engine)
        await stack.aclose()
        return {name: p.detach().clone() for name, p in stack.model.named_parameters()}

    with deterministic_torch(True):
        expected = asyncio.run(by_turns())
    saved = load_file(found.checkpoint / "model.safetensors")
    compared = [name for name in saved if name in expected]
    assert len(compared) > 10
    assert all(torch.equal(saved[name], expected[name]) for name in compared)


@pytest.fixture(scope="module")
def ahead(random_model_path, tmp_path_factory):
    """A run two steps ahead at most, and what happened while its updates were computed.

    The second step's rollouts begin when the first update does, and the first of each group when
    its weights are about to be published, which is then done in the middle of a completion.
    """
    seen = {"sampled during training": 0, "training": False}
    reached, judged = set(), threading.Event()
    update, pause = PolicyTrainer.ppo_update, TransformersEngine.pause
    step_of_engine = TransformersEngine._step

    def in_the_middle(engine):
        # One whose last token is sampled is not, although nobody may have been told of it yet.
        return any(
            one.completion_ids and one.finish_reason is None for one in list(engine._in_flight)
        )

    def watched_step(engine):
        # From then on nothing is sampled until the weights are published.
        if "middle" not in reached or "published" in reached:
            step_of_engine(engine)
        if "publish" in reached and in_the_middle(engine):
            reached.add("middle")

    def watched(trainer, scored):
        seen["training"] = True
        reached.add("update")
        assert judged.wait(60)
        try:
            return update(trainer, scored)
        finally:
            seen["training"] = False

    @asynccontextmanager
    async def between_two_tokens(engine):
        reached.add("publish")
        while True:
            async with pause(engine):
                if in_the_middle(engine):
                    reached.add("published")
                if "published" in reached:
                    yield
                    return
            await asyncio.sleep(0)

    async def workflow(task, model):
        split, step, _, rollout, _ = model.session.id.rsplit("-", 4)
        if (split, step) == ("train", "2"):
            while ("publish" if rollout == "0" else "update") not in reached:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        try:
            return await async_runs.workflow(task, model)
        finally:  # lest the weights wait for one that is over
            reached.update({"published"} if step == "2" and rollout == "0" else ())

    async def judge(task, response):
        if seen["training"]:
            seen["sampled during training"] += 1
            judged.set()
        return await runs.judge(task, response)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PolicyTrainer, "ppo_update", watched)
        patch.setattr(TransformersEngine, "pause", between_two_tokens)
        patch.setattr(TransformersEngine, "_step", watched_step)
        config = async_runs.config(random_model_path, tmp_path_factory.mktemp("ahead"))
        yield tune(config, workflow, judge), seen


@pytest.mark.long
def test_collection_goes_on_while_an_update_is_computed(ahead):
    result, seen = ahead
    assert result.steps == async_runs.STEPS
    assert seen["sampled during training"] > 0
    assert max(row.get("staleness/max", 0) for row in result.history) > 0


def test_every_group_is_trained_once_and_no_token_is_too_old(ahead):
    result, _ = ahead
    lines = (result.run_dir / "batches.jsonl").read_text().splitlines()
    groups = [number for line in lines for number in json.loads(line)["groups"]]
    assert sorted(groups) == list(range(2 * async_runs.STEPS))
    steps = [row for row in result.history if row["step"]]
    assert all(counted(row) for row in steps)
    assert all(row["staleness/max"] <= 2 for row in steps)
    assert not any("tokens/dropped/stale" in row for row in steps)
    assert result.outcomes == {"completed": 2 * 3 * async_runs.STEPS}


def test_every_token_has_the_log_prob_of_the_weights_that_sampled_it(ahead, random_model_path):
    """Calls of each version, computed again with the checkpoint of that version."""
    from transformers import AutoModelForCausalLM

    result, _ = ahead
    paths = {0: random_model_path}
    for folder in (result.run_dir / "checkpoints").iterdir():
        paths[json.loads((folder / "version.json").read_text())["version"]] = folder
    models = {
        version: AutoModelForCausalLM.from_pretrained(path) for version, path in paths.items()
    }
    store, checked, mixed = TraceStore(result.run_dir / "traces"), 0, 0
    for step in range(1, async_runs.STEPS + 1):
        for call in (call for trace in store.read("train", step) for call in trace.calls):
            mixed += len(set(call.versions)) > 1
            for place, version in enumerate(call.versions):
                if version not in models:
                    continue
                ids = torch.tensor([call.prompt_ids + call.completion_ids[:place]])
                with torch.no_grad():
                    logp = models[version](ids).logits[0, -1].log_softmax(-1)
                assert logp[call.completion_ids[place]].item() == pytest.approx(
                    call.logprobs[place], abs=1e-4
                )
                checked += 1
    assert checked > 100
    assert mixed > 0


@pytest.mark.long
def test_what_is_too_old_is_left_out_and_counted_where_a_step_does_not_wait(
    random_model_path, tmp_path
):
    slow = {"left": 2}

    async def workflow(task, model):
        text = await runs.answer(model, task["question"])
        if (
            slow["left"] and "train" in task["question"]
        ):  # the first rollouts go on until training is far ahead
            slow["left"] -= 1
            while not (tmp_path / "p/run/batches.jsonl").exists() or (  # noqa: ASYNC110  # a file
                (tmp_path / "p/run/batches.jsonl").read_text().count("\n") < 4
            ):
                await asyncio.sleep(0.005)
        return WorkflowOutput(response=text + await runs.answer(model, text))

    result = tune(
        async_runs.config(
            random_model_path,
            tmp_path,
            "algorithm.sample_strategy=staleness_control",
            "algorithm.sample_strategy_args.max_staleness=1",
        ),
        workflow,
    )
    steps = [row for row in result.history if row["step"]]
    assert all(counted(row) for row in steps)
    assert all(row.get("staleness/max", 0) <= 1 for row in steps)
    assert result.tokens.dropped["stale"] > 0


def start(model, root, moment):
    return forked.run(async_runs.main, str(model), str(root), moment)


@pytest.mark.long
def test_killed_run_takes_its_steps_again_and_loses_no_rollout(random_model_path, tmp_path):
    assert start(random_model_path, tmp_path, "update:4") == -signal.SIGKILL
    folder = tmp_path / "p" / "run"
    before = (folder / "batches.jsonl").read_text()
    traces = {path: path.read_bytes() for path in (folder / "traces").glob("step_*.jsonl")}
    assert before.count("\n") == 4  # one more than was trained, two more than were saved
    result = tune(async_runs.config(random_model_path, tmp_path))
    assert (folder / "batches.jsonl").read_text().startswith(before)
    for path, content in traces.items():
        assert path.read_bytes().startswith(content), "a rollout that ended was run again"
    steps = [row for row in result.history if row["step"]]
    assert [row["step"] for row in steps] == list(range(1, async_runs.STEPS + 1))
    assert all(counted(row) for row in steps)
    assert all(row["staleness/max"] <= 2 for row in steps)
    assert result.outcomes == {"completed": 2 * 3 * async_runs.STEPS}


def test_a_mistake_in_a_function_stops_the_run_while_others_are_under_way(
    random_model_path, tmp_path
):
    async def workflow(task, model):
        await runs.answer(model, task["question"])
        return [3]

    with pytest.raises(FunctionError):
        tune(async_runs.config(random_model_path, tmp_path), workflow)


def test_a_served_copy_changes_only_when_it_is_told_to():
    model = torch.nn.Linear(3, 3)
    model.bias.requires_grad_(False)
    served = ServedCopy(model)
    with torch.no_grad():
        model.weight.add_(1)
    assert not torch.equal(served.model.weight, model.weight)
    assert served.model.bias is model.bias
    served.update()
    assert torch.equal(served.model.weight, model.weight)


@pytest.mark.parametrize("partial", [False, True])
def test_the_slowest_tasks_of_a_step_are_ended_once_the_others_are_complete(
    random_model_path, tmp_path, partial
):
    """One of the two tasks of each step has a rollout that would never end."""

    ended = Counter()

    async def workflow(task, model):
        text = await runs.answer(model, task["question"])
        split, step, number, rollout, _ = model.session.id.rsplit("-", 4)
        if (split, number, rollout) == ("train", "1", "2"):
            await asyncio.Event().wait()
        ended[split, step, number] += 1
        # The first task is complete when the second can get no further.
        while (split, number) == ("train", "0") and ended[split, step, "1"] < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        return WorkflowOutput(response=text)

    result = tune(
        async_runs.config(
            random_model_path,
            tmp_path,
            "explorer.over_rollout.ratio=0.5",
            "explorer.over_rollout.wait_after_min=0.2",
            f"explorer.over_rollout.return_partial_tasks={partial}",
            "buffer.total_steps=2",
            staleness=0,
        ),
        workflow,
    )
    assert result.outcomes == {"completed": 10, "cancelled": 2}
    steps = [row for row in result.history if row["step"]]
    assert all(counted(row) for row in steps)
    assert result.tokens.dropped["cancelled"] > 0
    assert [row.get("rollouts/dropped/unfinished_group", 0) for row in steps] == (
        [0, 0] if partial else [2, 2]
    )
    assert [row["groups/used"] for row in steps] == ([2, 2] if partial else [1, 1])
