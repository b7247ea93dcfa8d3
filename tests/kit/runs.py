"""A small run, which may be made to kill itself at a named moment.

MOMENT:COUNT names one of `workflow`, `judge`, `update`, `log`, `checkpoint`, `rename`: the process
kills itself with SIGKILL when it gets there for the COUNTth time.
"""

import functools
import os
import signal

from tests.kit.agents import answer as answer
from tests.kit.agents import judge, workflow
from tests.kit.agents import talk as talk
from tuner.config.load import load_config
from tuner.loop import run_local
from tuner.runs import console as base
from tuner.runs import directory as run_directory
from tuner.training.trainer import PolicyTrainer

TRAIN = [{"question": f"train {i}"} for i in range(7)]
EVAL = [{"question": f"eval {i}"} for i in range(2)]


def config(model, root, *overrides, name="run"):
    return load_config(
        None,
        settings={
            "project": "p",
            "name": name,
            "checkpoint_root_dir": str(root),
            "model": {"model_path": str(model), "max_response_tokens": 6},
            "algorithm": {"repeat_times": 3, "optimizer": {"lr": 0.01}},
            "buffer": {
                "batch_size": 2,
                "total_steps": 6,
                "explorer_input": {
                    "taskset": {"data_selector": {"selector_type": "shuffle"}},
                    "eval_tasksets": [{"name": "held-out"}],
                },
            },
            "explorer": {"eval_interval": 3},
            "trainer": {"save_interval": 2},
            "tuner": {"deterministic": True},
        },
        overrides=overrides,
    )


def killing_itself(function, count):
    left, process = [count], os.getpid()  # its own, wherever the function runs

    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        left[0] -= 1
        if left[0] == 0:
            os.kill(process, signal.SIGKILL)
        return function(*args, **kwargs)

    return wrapped


def main(model, root, moment, *overrides, workflow=workflow):
    what, count = moment.split(":")
    functions = {"workflow": workflow, "judge": judge}
    if what in functions:
        functions[what] = killing_itself(functions[what], int(count))
    elif what == "update":
        PolicyTrainer.step_lr_scheduler = killing_itself(
            PolicyTrainer.step_lr_scheduler, int(count)
        )
    elif what == "log":
        base.JsonlMonitor.log = killing_itself(base.JsonlMonitor.log, int(count))
    elif what == "checkpoint":
        # Between the files of a checkpoint: the model is written, the trainer's state is not.
        PolicyTrainer.save = killing_itself(PolicyTrainer.save, int(count))
    elif what == "rename":
        run_directory.os.replace = killing_itself(os.replace, int(count))
    run_local(
        config(model, root, *overrides),
        workflow=functions["workflow"],
        judge=functions["judge"],
        train_tasks=TRAIN,
        eval_tasks={"held-out": EVAL},
    )
