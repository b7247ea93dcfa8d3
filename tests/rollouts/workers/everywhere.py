"""A plugin of pytest by which runs and rollouts have workers whose settings do not say:

    pytest -p tests.rollouts.workers.everywhere tests/loop tests/rollouts

What a test asks of a session itself, as a chat model or a client of it, goes the way of a worker,
too: `Beside`. Tests that cannot pass so are in `LEFT_OUT`, each with its reason.
"""

import asyncio
import json
import sys
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import wraps
from weakref import WeakKeyDictionary

import pytest

from tests.kit import forked
from tuner.gateway import Session, session_api
from tuner.gateway.session_api import RemoteSession
from tuner.rollouts import RolloutRunner, any_worker, chat_models
from tuner.rollouts import worker_pool as pool
from tuner.rollouts.worker_pool import Pool
from tuner.runs import stack

COUNT = 2

_RUNNER, _PANEL = "tests/rollouts/test_runner.py", "tests/rollouts/test_panel.py"
_RECORDED = "tests/rollouts/test_recorded_functions.py"
_LOCAL, _AHEAD = "tests/loop/test_local.py", "tests/loop/test_asynchronous.py"
_ENVIRONMENTS = "tests/areal/test_environments.py"
_UNSAFE = "tests/integration/agentscope2/test_unsafe_settings.py"

LEFT_OUT = {
    "it looks in this process at what its function kept, or did": [
        f"{_RUNNER}::test_a_retry_has_a_session_of_its_own",
        f"{_RUNNER}::test_failing_judge_is_asked_again_with_the_same_response",
        f"{_RUNNER}::test_plain_functions_run_beside_the_loop",
        f"{_RUNNER}::test_collect_runs_only_what_is_not_on_disk",
        f"{_RUNNER}::test_collect_keeps_to_its_limit",
        f"{_RUNNER}::test_waiting_for_room_is_told_apart_from_running",
        f"{_PANEL}::test_a_group_is_judged_together_when_its_last_rollout_has_ended",
        f"{_PANEL}::test_a_judge_of_groups_is_asked_again_with_the_same_responses",
        f"{_PANEL}::test_a_group_of_which_a_part_is_on_disk_is_made_again",
        f"{_PANEL}::test_feedback_leads_to_a_second_attempt_in_the_same_rollout",
        f"{_RECORDED}::test_behind_the_point_functions_run",
        f"{_RECORDED}::test_an_agent_that_has_diverged_runs_its_functions",
        f"{_RECORDED}::test_what_raised_is_not_recorded_and_runs_again",
        f"{_RECORDED}::test_threads_that_the_agent_makes_itself_are_outside",
        f"{_LOCAL}::test_auxiliary_model_is_served_by_name_and_never_recorded",
        "tests/loop/test_rebase.py::"
        "test_evaluations_before_the_change_are_judged_again_and_later_ones_made_again",
        "tests/areal/test_agents.py::test_an_instance_keeps_its_state",
        f"{_ENVIRONMENTS}::test_an_environment_is_used_again_unless_its_episode_failed",
        f"{_ENVIRONMENTS}::test_an_instance_is_shared_by_all_rollouts",
        "tests/areal/test_queues.py::test_a_bundle_has_whole_sequences_logprobs_and_versions",
        "tests/areal/test_tokens.py::"
        "test_every_answer_is_a_call_with_exact_ids_and_the_mask_has_a_row_per_stretch",
        f"{_UNSAFE}::test_timed_out_agent_is_a_timeout_although_it_swallows_its_cancellation",
    ],
    "its rollouts wait for each other, or for what the test does, by a variable of this process": [
        f"{_AHEAD}::test_collection_goes_on_while_an_update_is_computed",
        f"{_AHEAD}::test_every_group_is_trained_once_and_no_token_is_too_old",
        f"{_AHEAD}::test_every_token_has_the_log_prob_of_the_weights_that_sampled_it",
        f"{_AHEAD}::test_the_slowest_tasks_of_a_step_are_ended_once_the_others_are_complete",
    ],
    "it and its function wait for each other by an event of this process": [
        f"{_RUNNER}::test_a_rollout_that_is_ended_from_outside_keeps_what_it_sampled",
        f"{_RUNNER}::test_an_agent_that_catches_everything_is_cut_off_at_its_deadline",
        f"{_RUNNER}::test_a_second_cancellation_leaves_no_agent_for_the_loop_to_wait_for",
    ],
    "its function moves the clock of this process": [
        f"{_ENVIRONMENTS}::test_an_environment_that_fails_is_a_typed_outcome"
        "[hanging-timeout-no result within 60 s]",
        f"{_RUNNER}::test_timed_out_attempt_never_reaches_the_retry_trace",
    ],
    "its function interrupts its process, which is not the run's": [
        "tests/loop/test_history.py::test_explored_rollouts_are_taken_up_after_an_interruption",
    ],
    "its judge asks a model of one request at a time, of which two workers have no share": [
        "tests/loop/test_rate_limits.py",
    ],
    "one process only; workers: tests/rollouts/workers/test_ending.py": [
        "tests/rollouts/test_watchdog.py",
    ],
}
"""Tests that cannot pass so, by the reason: files, functions or cases of them."""


def _with_workers(config, *functions):
    found = config.tuner.model_copy(update={"workers": config.tuner.workers or COUNT})
    return pool.pool_of(config.model_copy(update={"tuner": found}), *functions)


stack.pool_of = _with_workers
any_worker.subprocess = forked.SUBPROCESS


# Runners that a test makes itself.


async def _closing(pool):
    try:
        yield
    finally:
        await pool.aclose()


@dataclass(eq=False)
class Later:
    """Workers of a runner, which begin with its first rollout and end with the event loop."""

    runner: RolloutRunner
    count: int = COUNT
    _pools: WeakKeyDictionary = field(default_factory=WeakKeyDictionary)

    async def _pool(self, session):
        loop = asyncio.get_running_loop()
        if loop not in self._pools:
            runner = self.runner
            plain = isinstance(runner.make_model(session), chat_models.PlainChatModel)
            kind = "plain" if plain else chat_models.default_kind()
            made = Pool(COUNT, runner.workflow, runner.judge, kind, runner.settings.timeout)
            closing = _closing(made)
            await anext(closing)  # which the loop runs to its end when it is closed
            self._pools[loop] = made, closing
        return self._pools[loop][0]

    @asynccontextmanager
    async def calling(self, session, *of, **more):
        made = await self._pool(session)
        async with made.calling(session, *of, **more) as caller:
            yield caller


def _by_a_test():
    """Whether a test calls the function that asks: much of `tuner` refuses workers."""
    return sys._getframe(2).f_globals["__name__"].startswith("tests.")


_init = RolloutRunner.__init__


@wraps(_init)
def _init_with_workers(self, *given, **named):
    _init(self, *given, **named)
    if _by_a_test() and "workers" not in named:
        self.workers = Later(self)


RolloutRunner.__init__ = _init_with_workers


# Runs in processes of their own.


def _forked(function, *arguments):
    """As `forked._forked`; that this module is imported for it is what it is for."""
    forked.mend_thread_pool()
    function(*arguments)


forked._forked = _forked


# Sessions that a test gives to an agent itself.


class Beside(RemoteSession):
    """A session of this process as a worker would have it: its calls go by HTTP. Who asks it waits
    in the gateway's own event loop, so that what is asked is answered at once."""

    def __init__(self, session):
        self._session = session
        self.sharing = ExitStack()
        super().__init__(self.sharing.enter_context(session_api.shared(session)))

    def ask(self, operation, /, **arguments):
        path, body = session_api.PATH + operation, json.dumps(arguments).encode()
        try:
            session_api.answer(self._session, path, body).send(None)
        except StopIteration as ended:
            return session_api.value_of(ended.value)
        raise AssertionError(f"{operation} awaits")


BESIDE = WeakKeyDictionary()


def over_http(session):
    """What a worker would have for this session."""
    if not isinstance(session, Session):
        return session
    if session not in BESIDE:
        BESIDE[session] = Beside(session)
    return BESIDE[session]


def _patched(owner, name):
    """Let a method, or a function of a module, get that where a test calls it with a session."""
    found = getattr(owner, name)

    @wraps(found)
    def patched(session, *given, **named):
        return found(over_http(session) if _by_a_test() else session, *given, **named)

    setattr(owner, name, patched)


for _name in ("async_client", "async_anthropic", "http_client"):
    _patched(Session, _name)
_patched(chat_models, "chat_model")


@pytest.fixture(autouse=True)
def _sessions_beside_end():
    yield
    for session in list(BESIDE.values()):
        session.sharing.close()
    BESIDE.clear()


# What cannot pass.


def pytest_collection_modifyitems(config, items):
    """Leave out what cannot pass, and fail where a name of the list is nobody's."""
    names = {name for of_reason in LEFT_OUT.values() for name in of_reason}
    used, left, kept = set(), [], []
    for item in items:
        mine = _names(item) & names
        used |= mine
        (left if mine else kept).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=left)
    files = {item.nodeid.partition("::")[0] for item in (*kept, *left)}
    whole = {one for one in files if not any(f"{one}::" in given for given in config.args)}
    if unused := {n for n in names - used if n.partition("::")[0] in whole}:
        raise pytest.UsageError(f"no test has the name {', '.join(sorted(unused))}")


def _names(item):
    """Of its file, its function and itself."""
    file, _, case = item.nodeid.partition("::")
    return {file, item.nodeid, f"{file}::{case.partition('[')[0]}"}
