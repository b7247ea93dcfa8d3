"""`tuner rerun`: run the user's workflow again on a recorded rollout, in this process.

Recorded answers take the model's place, so no model is loaded and the agent repeats what it did,
with breakpoints, prints and later changes to its code. The first request that differs from the
recorded one is reported.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

from rich.console import Console
from rich.text import Text

from tuner.engines.base import EngineCapabilities
from tuner.errors import ConfigError, FunctionError, debugging
from tuner.gateway import Gateway, SamplingDefaults, Session, SessionLimits
from tuner.gateway.playback import MessageScript, Playback
from tuner.gateway.request_diff import difference_of, difference_of_texts
from tuner.gateway.script import Script
from tuner.rollouts.chat_models import chat_model, default_kind
from tuner.rollouts.limits import contained
from tuner.rollouts.runner import being_cancelled, describe
from tuner.runs.directory import outside_event_loop, run_async
from tuner.runs.models import load_tokenizer
from tuner.runs.stack import build_stack, chat_renderer, roles_of
from tuner.tasks.functions import (
    Rejected,
    call_judge,
    call_workflow,
    judges_groups,
    raised_in,
    response_text,
    traceback_of,
)
from tuner.tasks.random_states import seed_everything
from tuner.tasks.selection import derive_seed
from tuner.tools.candidates import Candidate, find_candidate, of_configuration, with_weights
from tuner.tools.recorded_run import RecordedRollout, find_rollout
from tuner.traces import Call, Outcome

logger = logging.getLogger("tuner.rollout")


class NoModel:
    """Takes the place of an auxiliary model and rejects every call."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise FunctionError(
            f"the auxiliary model {self._name!r} was called, but no model is loaded: add --sample, "
            "or decorate the function that calls it with @tuner.recorded before the run"
        )

    __call__ = _refuse

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()


class SilentEngine:
    """An engine without a model; requests that the script does not answer wait forever."""

    version = 0

    def __init__(self, context: int) -> None:
        self.capabilities = EngineCapabilities(
            context, grammars=True, every_setting=True, goes_on="always"
        )

    async def generate(self, *_: Any, **__: Any) -> NoReturn:
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")

    async def close(self) -> None:
        """Do nothing."""


@dataclass
class Rerun:
    """Result of running a rollout again.

    Attributes:
        recorded: The rollout.
        script: The script of recorded answers; its `divergence` is the first differing request.
        point: Index of the call, from 0, at which it stops; None to run to the end.
        sampled: True if a model continues after the script.
        calls: Its calls.
        reached: True if the call at `point` was requested.
        response: The workflow's answer as text, or None.
        reward: The reward from the judge or the workflow this time.
        unjudged: Why there is no reward to compare, or None.
        error: The workflow's exception, or None.
    """

    recorded: RecordedRollout
    script: Script
    point: int | None
    sampled: bool
    calls: tuple[Call, ...] = ()
    reached: bool = False
    response: str | None = None
    reward: float | None = None
    unjudged: str | None = None
    error: BaseException | None = None

    @property
    def same_answer(self) -> bool:
        """True if the workflow returned, or failed, as recorded."""
        trace = self.recorded.trace
        if isinstance(self.error, Rejected):
            return trace.outcome is Outcome.REJECTED
        if self.error is not None:
            return describe(self.error, None) == trace.error
        return self.response == trace.response

    @property
    def same_reward(self) -> bool:
        """True if the reward equals the recorded one; also if one of them is missing."""
        old = self.recorded.trace.reward
        return self.unjudged is not None or self.reward == old or None in (self.reward, old)

    @property
    def well(self) -> bool:
        """True if everything was as recorded, up to the requested point."""
        if self.sampled:
            return self.error is None
        if self.script.divergence is not None:
            return False
        if self.point is not None:
            return self.reached
        return self.same_answer and self.same_reward


def run_again(
    run: str | Path,
    name: str,
    *,
    until: int | None = None,
    workflow: str | Callable[..., Any] | None = None,
    judge: str | Callable[..., Any] | None = None,
    sample: bool = False,
    candidate: str | Path | None = None,
    seed: int = 0,
) -> Rerun:
    """Run a workflow on a recorded rollout, in this process and without time limits.

    Args:
        run: The run directory, or one of the files in its traces/.
        name: The rollout, `<split>-<step>-<task>-<rollout>`, followed by `-<attempt>` for an
            attempt that is not the last.
        until: The call, from 1, at which it stops; with `sample`, the first call to sample. None
            replays everything.
        workflow, judge: Functions, or their names; None for those of the run.
        sample: Sample from a model after the script ends or diverges.
        candidate: The weights of that model, as for `tuner.evaluate`; None for the run's newest.
        seed: Seed for sampling.
    """
    recorded = find_rollout(Path(run), name)
    point = _point(recorded, until)
    if sample and recorded.relayed:
        raise ConfigError(
            f"{name} was answered by a remote model, whose address is not in the run: omit --sample"
        )
    own = workflow if callable(workflow) else recorded.workflow(workflow)
    scorer = judge if callable(judge) else recorded.judge(judge)
    again = _RerunArguments(recorded, own, scorer, point, sample, candidate, seed)
    return outside_event_loop(lambda: run_async(again.result()))


def _point(recorded: RecordedRollout, until: int | None) -> int | None:
    if until is None:
        return None
    count = len(recorded.trace.calls)
    if not 1 <= until <= count:
        raise ConfigError(
            f"--until is {until}, and {recorded.trace.id} has {count} calls: give 1 to {count}"
        )
    return until - 1


@dataclass
class _RerunArguments:
    """One rerun of a rollout; the fields are the arguments of `run_again`."""

    recorded: RecordedRollout
    workflow: Callable[..., Any]
    judge: Callable[..., Any] | None
    point: int | None
    sample: bool
    candidate: str | Path | None
    seed: int

    async def result(self) -> Rerun:
        trace, config = self.recorded.trace, self.recorded.config
        self._reached = asyncio.Event()
        script = self._script()
        found = Rerun(self.recorded, script, self.point, self.sample)
        async with self._served() as (gateway, auxiliary, defaults):
            if (seed := self.recorded.function_seed) is not None:
                seed_everything(seed)
            session = gateway.open_session(
                f"{trace.id}-{trace.attempt}-again",
                seed=derive_seed(config.tuner.seed, trace.id, "again", self.seed),
                defaults=defaults,
                limits=SessionLimits(config.tuner.max_calls, config.tuner.max_tokens),
                script=script,
            )
            session.other_names = (config.model.model_path,)
            with auxiliary(session.id, session.seed) as models, session.results.collecting():
                await self._until_its_end(session, dict(models), found)
            found.calls = session.seal()
        if not found.reached:
            script.end()
        return found

    def _script(self) -> Script:
        trace, beyond = self.recorded.trace, self._asked_beyond
        if self.recorded.relayed:
            return MessageScript(trace, self.point, beyond=beyond)
        if self.sample:
            return Script(trace, self.point)
        return Script(trace, self.point, ends=True, beyond=beyond)

    def _asked_beyond(self, number: int) -> None:
        """Handle a request without a recorded answer; calls after `point` may come first."""
        if number == self.point:
            self._reached.set()

    @asynccontextmanager
    async def _served(self) -> AsyncIterator[tuple[Gateway, Any, SamplingDefaults]]:
        """Yield a gateway, the auxiliary models' opener, and the defaults of requests."""
        config, defaults = self.recorded.config, self.recorded.defaults
        if self.sample:
            weights = with_weights(config, _weights(self.recorded, self.candidate))
            stack = build_stack(weights, workflow=None, judge=None)
            try:
                yield stack.gateway, stack.auxiliary.opened, defaults
            finally:
                await stack.aclose()
            return
        names = [one.name for one in config.explorer.auxiliary_models]
        absent = {name: NoModel(name) for name in (*names, *config.tuner.auxiliary_models)}
        gateway = self._without_a_model()
        try:
            yield gateway, lambda *_: nullcontext(absent), defaults
        finally:
            await gateway.aclose()

    def _without_a_model(self) -> Gateway:
        config = self.recorded.config
        path = config.model.model_path
        if self.recorded.relayed:
            return Playback(path)
        return Gateway(
            cast(Any, SilentEngine(self.recorded.context)),
            chat_renderer(config, load_tokenizer(path)),
            model_name=path,
            reasoning=config.tuner.reasoning,
            roles=roles_of(config),
        )

    async def _until_its_end(
        self, session: Session, auxiliary: Mapping[str, Any], found: Rerun
    ) -> None:
        """Run the functions until they finish or `point` is reached."""
        work = asyncio.ensure_future(contained(self._functions(session, auxiliary, found), session))
        reached = asyncio.ensure_future(self._reached.wait())
        try:
            await asyncio.wait([work, reached], return_when=asyncio.FIRST_COMPLETED)
        finally:
            reached.cancel()
            found.reached = not work.done()
            work.cancel()
        if found.reached:
            await asyncio.wait([work])
        else:
            await work

    async def _functions(
        self, session: Session, auxiliary: Mapping[str, Any], found: Rerun
    ) -> None:
        """Run the workflow and the judge, and repeat as often as the run does with feedback."""
        settings, feedback = self.recorded.config.tuner, None
        for _ in range(settings.feedback_attempts + 1):
            try:
                response = await self._workflow(session, auxiliary, found, feedback)
            except FunctionError:
                raise
            except (Exception, asyncio.CancelledError) as error:
                if being_cancelled():
                    raise
                found.error = error
                return
            if found.script.divergence is not None and not self.sample:
                return
            feedback = await self._judge(response, auxiliary, found)
            enough = found.reward is not None and found.reward >= settings.pass_reward
            if feedback is None or enough:
                return

    async def _workflow(
        self, session: Session, auxiliary: Mapping[str, Any], found: Rerun, feedback: str | None
    ) -> Any:
        model = chat_model(session, kind=default_kind())
        output = await call_workflow(
            self.workflow,
            task=dict(self.recorded.trace.task),
            model=model,
            auxiliary_models=auxiliary,
            logger=logger,
            feedback=feedback,
        )
        if hasattr(model, "workflow_ended"):
            model.workflow_ended()
        found.response, found.reward = response_text(output.response), output.reward
        return output.response

    async def _judge(self, response: Any, auxiliary: Mapping[str, Any], found: Rerun) -> str | None:
        """The judge's feedback; stores its reward in `found`."""
        if self.judge is None:
            if found.reward is None:
                found.unjudged = "the run names no judge: add --judge"
            return None
        if judges_groups(self.judge):
            found.unjudged = "the judge takes whole groups"
            return None
        try:
            verdict = await call_judge(
                self.judge,
                task=dict(self.recorded.trace.task),
                response=response,
                auxiliary_models=auxiliary,
                logger=logger,
            )
        except Exception as error:
            found.unjudged = f"the judge failed: {describe(error, None)}"
            return None
        found.reward = verdict.reward
        return verdict.feedback


def _weights(recorded: RecordedRollout, given: str | Path | None) -> Candidate:
    """The candidate given, else the run's newest checkpoint, else its initial weights."""
    if given is not None:
        return find_candidate(given)
    if recorded.directory.checkpoint_steps():
        return find_candidate(recorded.directory.path)
    return of_configuration(recorded.config)[0]


# The output of `tuner rerun`: where it stopped, what differs, what was sampled.


_STYLES = {"+": "green", "-": "red", "@": "cyan"}
_SHOWN = 200
"""Maximum number of characters of an answer."""


def say(result: Rerun, console: Console) -> None:
    """Print the result of running a rollout again."""
    if result.reached:
        return console.print(_at_the_point(result))
    if result.sampled:
        for line in _calls(result):
            console.print(line, markup=False)
    if result.script.divergence is not None:
        _say_divergence(result, console)
        if not result.sampled:
            return None
    elif result.point is not None and not result.sampled and result.error is None:
        return console.print(
            f"{result.recorded.trace.id}: the agent finished without requesting call "
            f"{result.point + 1}"
        )
    if result.error is not None:
        return _say_error(result, console)
    if not result.sampled:
        count = len(result.calls)
        which = "the only call was" if count == 1 else f"all {count} calls were"
        console.print(f"{result.recorded.trace.id}: {which} replayed, as recorded")
    return _say_answer(result, console)


def diff_text(lines: Sequence[str]) -> Text:
    """A unified diff in color."""
    text = Text()
    for line in lines:
        bold = line.startswith(("+++", "---"))
        style = "bold" if bold else _STYLES.get(line[:1], "")
        text.append(f"{line}\n", style=style)
    return text


def _at_the_point(result: Rerun) -> str:
    trace, point = result.recorded.trace, result.point or 0
    return (
        f"{trace.id}: call {point + 1} of {len(trace.calls)} was requested, as recorded; stopped "
        "before its answer"
    )


def _say_divergence(result: Rerun, console: Console) -> None:
    trace, divergence = result.recorded.trace, result.script.divergence
    assert divergence is not None
    number = divergence.call if divergence.number is None else divergence.number
    count = len(trace.calls)
    at = f"call {number + 1} of {count}" if number < count else "its end"
    console.print(f"{trace.id} diverges at {at}: {divergence.what}", markup=False)
    if result.error is not None and (place := raised_in(result.error)) is not None:
        console.print(f"asked for in {place}", markup=False)
    if lines := difference_of(divergence):
        console.print(diff_text(lines), end="")


def _say_error(result: Rerun, console: Console) -> None:
    error = result.error
    assert error is not None
    if not isinstance(error, Rejected):
        said = traceback_of(error)
        if not debugging():
            said += "".join(traceback.format_exception_only(error))
        console.print(said, end="", markup=False)
    what = "rejected the rollout" if isinstance(error, Rejected) else "failed"
    then = "as recorded" if result.same_answer else "but not when it was recorded"
    if not result.same_answer and result.recorded.trace.error:
        then = f"and the recorded error was: {result.recorded.trace.error}"
    console.print(f"{result.recorded.trace.id}: the workflow {what}, {then}", markup=False)


def _say_answer(result: Rerun, console: Console) -> None:
    trace = result.recorded.trace
    if result.same_answer:
        console.print(f"answer  {_short(trace.response)} as recorded", markup=False)
    elif result.sampled:
        console.print(f"answer  {_short(result.response or '')}", markup=False)
    else:
        console.print("answer  differs:")
        console.print(diff_text(difference_of_texts(trace.response, result.response or "")), end="")
    now, then = _number(result.reward), _number(trace.reward)
    if result.unjudged is not None:
        console.print(f"reward  not compared: {result.unjudged}", markup=False)
    elif result.reward == trace.reward:
        console.print(f"reward  {now} as recorded", markup=False)
    else:
        console.print(f"reward  {now}, recorded was {then}", markup=False)


def _calls(result: Rerun) -> Iterator[str]:
    """One line for each call of a rollout that a model continued."""
    for number, call in enumerate(result.calls, 1):
        given, tokens = call.replayed, len(call.completion_ids)
        how = "replayed" if given == tokens else f"sampled, {tokens - given} tokens"
        yield f"call {number}  {how}: {_said(call)}"


def _said(call: Call) -> str:
    names = [one["function"]["name"] for one in call.response.get("tool_calls") or ()]
    called = f" -> {', '.join(names)}" if names else ""
    return f"{_short(call.response.get('content') or '')}{called}"


def _short(text: str) -> str:
    shown = repr(text)
    return shown if len(shown) <= _SHOWN else f"{shown[: _SHOWN - 4]} ...'"


def _number(reward: float | None) -> str:
    return "none" if reward is None else f"{reward:g}"
