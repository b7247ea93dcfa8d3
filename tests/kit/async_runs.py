"""A small asynchronous run in a process of its own, which may be made to kill itself."""

import asyncio

from tests.kit import runs
from tuner.loop import run_local
from tuner.runs import directory as run_directory
from tuner.tasks.functions import WorkflowOutput
from tuner.training.trainer import PolicyTrainer

STEPS = 6


def config(model, root, *overrides, staleness=2):
    return runs.config(
        model,
        root,
        "tuner.deterministic=false",
        f"synchronizer.sync_offset={staleness}",
        f"buffer.total_steps={STEPS}",
        "explorer.runner_per_model=6",
        *overrides,
    )


async def workflow(task, model):
    """Two answers, with a tool between them that takes some rollouts much longer than others."""
    first = await runs.answer(model, task["question"])
    for _ in range(sum(map(ord, first)) % 5 * 20):
        await asyncio.sleep(0)
    return WorkflowOutput(response=first + await runs.answer(model, first))


def main(model, root, moment):
    what, count = moment.split(":")
    judge = runs.judge
    if what == "judge":
        judge = runs.killing_itself(judge, int(count))
    elif what == "update":
        PolicyTrainer.step_lr_scheduler = runs.killing_itself(
            PolicyTrainer.step_lr_scheduler, int(count)
        )
    elif what == "rename":
        run_directory.os.replace = runs.killing_itself(run_directory.os.replace, int(count))
    run_local(
        config(model, root),
        workflow=workflow,
        judge=judge,
        train_tasks=runs.TRAIN,
        eval_tasks={"held-out": runs.EVAL},
    )
