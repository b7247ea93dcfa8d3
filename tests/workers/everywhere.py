"""A plugin of pytest by which runs have workers whose settings do not say:

    pytest -p tests.workers.everywhere tests/loop tests/chat_models

Tests that look, in this process, at what a function of theirs kept cannot pass so.
"""

from tuner.assembly import stack
from tuner.workers import pool

COUNT = 2


def _with_workers(config, *functions):
    tuner = config.tuner.model_copy(update={"workers": config.tuner.workers or COUNT})
    return pool.pool_of(config.model_copy(update={"tuner": tuner}), *functions)


stack.pool_of = _with_workers
