"""The user's workflow and judge as a Trinity-RFT `Workflow`.

Trinity-RFT hands over a task and how often to run it; the rollouts of the group run here together,
each attempt in a session of its own at a gateway in front of Trinity-RFT's engine. Retries and
time limits are ours (`tuner.rollouts`), so a timed-out attempt is cancelled and sealed before the
next one begins. What comes back are experiences made of the recorded token ids.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from trinity.common.experience import EID, Experience
from trinity.common.workflows.workflow import Task, Workflow

from tuner.config import RemoteModel
from tuner.errors import FunctionError, TrainingError
from tuner.gateway import ChatRenderer, Gateway, SamplingDefaults, SessionLimits
from tuner.rollouts import RolloutRunner, RolloutSettings
from tuner.rollouts.chat_models import chat_model, default_kind
from tuner.rollouts.runner import Panel, panels_of
from tuner.runs.auxiliary import AuxiliaryModels
from tuner.runs.models import load_tokenizer
from tuner.tasks.loading import load
from tuner.traces import Outcome, RolloutId, Trace, without_vote
from tuner.training.batch import alike, reward_of, unreplayed
from tuner.trinity.datafiles import task_of
from tuner.trinity.endpoints import TinkerEngine, TrinityVllmEngine
from tuner.trinity.experience import TrainedSequence, merged, one_per_call
from tuner.trinity.progress import Journal

if TYPE_CHECKING:
    from trinity.common.models.model import ModelWrapper


class TunerWorkflow(Workflow):  # type: ignore[misc]  # untyped
    """Runs a group of rollouts of one task; named in `default_workflow_type`."""

    is_async = True
    # The group is ours to run: its rollouts are concurrent, and it is known who of them failed.
    can_repeat = True

    def __init__(
        self,
        *,
        task: Task,
        model: ModelWrapper,
        auxiliary_models: list[ModelWrapper] | None = None,
    ) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        self._settings: Mapping[str, Any] = task.workflow_args["tuner"]
        folder = Path(task.workflow_args["checkpoint_job_dir"]) / self._settings["folder"]
        self._journal = Journal(folder)
        self.repeat_times = 1

    def set_repeat_times(self, repeat_times: int, run_id_base: int) -> None:
        self.repeat_times = repeat_times
        self.run_id_base = run_id_base

    async def run_async(self) -> list[Experience]:
        """The group's experiences; each rollout's first one carries its metrics.

        Raises:
            TrainingError: The group has nothing to train on, or a rollout failed and
                `tuner.on_failure` is `abort`.
            FunctionError: A function returned something of the wrong type.
        """
        host = await _host(self.model, self.auxiliary_model_wrappers or [], self._settings)
        first = self.run_id_base
        ids = [self._id(rollout) for rollout in range(first, first + self.repeat_times)]
        task, runner = task_of(self.task.raw_task), host.runner(self._settings)
        panel = next(iter(panels_of(runner, dict.fromkeys(ids, task)).values()), None)
        found = self._known(ids, whole=panel is not None)
        try:
            async with asyncio.TaskGroup() as group:
                running = [
                    group.create_task(self._rollout(runner, task, id, panel))
                    for id in ids
                    if id not in found
                ]
        except BaseExceptionGroup as errors:
            error = errors.exceptions[0]
            if isinstance(error, (FunctionError, TrainingError)):
                # Trinity-RFT would write it to a log and go on with the next task.
                self._journal.stop(error)
            raise error from None
        found |= {one.result().id: one.result() for one in running}
        return self._experiences([found[id] for id in ids])

    def _known(self, ids: Sequence[RolloutId], *, whole: bool) -> dict[RolloutId, Trace]:
        """Rollouts that a run which goes on has, and does not sample again.

        Args:
            whole: Whether they are made together or not at all.
        """
        before = _step_before(self._journal.folder, ids[0].split, ids[0].step)
        known = {trace.id: trace for trace in before if trace.final and trace.id in ids}
        return {} if whole and len(known) < len(ids) else known

    async def _rollout(
        self, runner: RolloutRunner, task: dict[str, Any], id: RolloutId, panel: Panel | None
    ) -> Trace:
        """One rollout's last attempt; all of them go to the trace store."""
        given = self.task.rollout_args
        sampling = SamplingDefaults(
            temperature=given.temperature,
            top_p=given.top_p,
            top_k=given.top_k,
            max_tokens=given.max_tokens,
        )
        make = partial(runner.run, task, id, sampling)
        attempts = await (make() if panel is None else panel.run(id, make))
        self._journal.write(attempts)
        final = attempts[-1]
        if (
            self._settings["on_failure"] == "abort"
            and final.outcome is not Outcome.COMPLETED
            and not self.task.is_eval
        ):
            raise TrainingError(
                f"rollout {id} ended with {final.outcome}: {final.error} "
                "(tuner.on_failure is 'abort')"
            )
        return final

    def _id(self, rollout: int) -> RolloutId:
        """Trinity-RFT's batch is a step, or `step/name` of an evaluation."""
        step, _, split = str(self.task.batch_id).partition("/")
        return RolloutId(
            step=int(step) if step.isdecimal() else 0,
            task=int(self.task.task_id or 0),
            rollout=rollout,
            split=split or "train",
        )

    def _experiences(self, traces: Sequence[Trace]) -> list[Experience]:
        if self.task.is_eval:
            experiences = [e for trace in traces for e in _measured(trace)]
        else:
            policy = self._settings["on_failure"]
            penalty = policy["penalize"] if isinstance(policy, Mapping) else None
            found = ((trace, reward_of(trace, penalty)) for trace in traces)
            used = [
                (trace, reward)
                for trace, reward in found
                if reward is not None and without_vote(trace, unreplayed) is None
            ]
            whole = self.repeat_times == self.task.repeat_times and self.repeat_times > 1
            if whole and len(used) < 2:
                used = []  # nothing to compare with
            if self._settings["call_rewards"]:
                used = alike(used)
            experiences = [e for trace, reward in used for e in self._trained(trace, reward)]
        if not experiences:
            whys = "; ".join(f"{one.id} {one.outcome}: {_why_unused(one)}" for one in traces)
            raise TrainingError(f"this group has nothing to train on: {whys}")
        return experiences

    def _trained(self, trace: Trace, reward: float) -> list[Experience]:
        calls = [call for call in trace.calls if unreplayed(call) is None]
        used = self._settings["call_rewards"] or self._settings["states"]
        if any(call.reward is not None for call in calls) and not used:
            error = FunctionError(
                "calls have rewards of their own, which this algorithm of Trinity-RFT does not "
                "compare: set algorithm.algorithm_type to multi_step_grpo, give the rollout one "
                "reward, or set tuner.backend to local"
            )
            self._journal.stop(error)
            raise error
        make = merged if self._settings["experiences"] == "merged" else one_per_call
        found = [
            _experience(trace, sequence, step, reward=reward)
            for step, sequence in enumerate(make(calls))
        ]
        if self._settings["states"]:
            _add_states(found, trace, reward)
        if found:
            found[0].metrics = _metrics(trace, reward)
        return found


def _experience(
    trace: Trace, sequence: TrainedSequence, step: int, *, reward: float | None
) -> Experience:
    last = sequence.calls[-1]
    versions = sorted({version for call in sequence.calls for version in call.versions})
    return Experience(
        eid=EID(run=trace.id.rollout, step=step),
        tokens=list(sequence.tokens),
        prompt_length=sequence.prompt_length,
        logprobs=list(sequence.logprobs),
        action_mask=list(sequence.action_mask),
        reward=reward,
        truncate_status="response_truncated" if last.finish_reason == "length" else None,
        messages=[*last.messages, last.response],
        tools=list(last.tools),
        response_text=trace.response,
        info={
            "calls": [call.id for call in sequence.calls],
            "weights_versions": versions,
            "rollout": str(trace.id),
            "attempt": trace.attempt,
            "call_rewards": list(_call_rewards(sequence)),
        },
    )


def _add_states(experiences: Sequence[Experience], trace: Trace, reward: float) -> None:
    """Give each experience of a rollout, which is one call, what Trinity-RFT's `gigpo` reads: its
    state, told apart from those of other tasks and roles, and what it gained."""
    calls = {call.id: call for call in trace.calls}
    told = any(call.gained is not None for call in trace.calls)
    for place, experience in enumerate(experiences):
        (call,) = (calls[id] for id in experience.info["calls"])
        last = place == len(experiences) - 1
        gained = call.gained if told else (call.reward or 0.0) + (reward if last else 0.0)
        named = call.prompt_ids if call.state is None else (call.role, call.state)
        state = repr((trace.id.step, trace.id.task, named))
        experience.info["env_state_hash"] = hashlib.sha256(
            state.encode("utf-8", "surrogatepass")
        ).hexdigest()
        experience.info["step_reward"] = gained or 0.0


def _call_rewards(sequence: TrainedSequence) -> Iterator[tuple[int, int, float, str | None]]:
    """(from, to, reward, role) in the response, of each call with a reward of its own."""
    for call in sequence.calls:
        if call.reward is not None and call.stretches:
            start = len(call.prompt_ids) - sequence.prompt_length
            yield start, start + len(call.completion_ids), call.reward, call.role


def _measured(trace: Trace) -> list[Experience]:
    """An evaluation's rollout: nothing is trained, one experience carries what was measured."""
    calls = [call for call in trace.calls if call.invalid is None]
    if trace.reward is None or not calls:
        return []
    experience = _experience(trace, one_per_call(calls[-1:])[0], 0, reward=trace.reward)
    experience.metrics = _metrics(trace, trace.reward)
    return [experience]


def _metrics(trace: Trace, reward: float) -> dict[str, float]:
    return {
        **trace.metrics,
        "reward": reward,
        "calls": float(len(trace.calls)),
        "sampled_tokens": float(trace.sampled_tokens),
    }


def _why_unused(trace: Trace) -> str:
    if trace.error is not None or not trace.calls:
        return trace.error or "no calls"
    reasons = sorted({reason for call in trace.calls if (reason := unreplayed(call)) is not None})
    return ", ".join(reasons) or "the others of its group failed"


@lru_cache(maxsize=4)
def _step_before(folder: Path, split: str, step: int) -> tuple[Trace, ...]:
    return tuple(Journal(folder.parent).recorded(split, step))


@dataclass(frozen=True)
class _Host:
    """The gateway in front of one engine, and the user's functions, in one worker."""

    gateway: Gateway
    auxiliary: AuxiliaryModels
    kind: Any

    def runner(self, settings: Mapping[str, Any]) -> RolloutRunner:
        judge = settings["judge"]
        return RolloutRunner(
            self.gateway,
            _loaded(settings["workflow"]),
            None if judge is None else _loaded(judge),
            make_model=lambda session: chat_model(session, kind=self.kind),
            auxiliary_models=self.auxiliary.opened,
            settings=RolloutSettings(
                timeout=settings["timeout"],
                max_retries=settings["max_retries"],
                seed=settings["seed"],
                limits=SessionLimits(settings["max_calls"], settings["max_tokens"]),
            ),
        )


_loaded = lru_cache(maxsize=8)(load)
# A gateway belongs to the event loop that it is made in.
_hosts: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, _Host]] = WeakKeyDictionary()


async def _host(
    model: ModelWrapper, auxiliary: Sequence[ModelWrapper], settings: Mapping[str, Any]
) -> _Host:
    here = _hosts.setdefault(asyncio.get_running_loop(), {})
    address = str(model.api_address)
    if address not in here:
        kind = default_kind()
        models = AuxiliaryModels(kind)
        for index, wrapper in enumerate(auxiliary):
            config = wrapper.config
            read_as = {
                "reasoning": "template",
                "tool_call_parser": config.tool_call_parser or "hermes",
                "reasoning_parser": config.reasoning_parser or "deepseek_r1",
            }
            models.add_local(
                config.name or f"auxiliary_{index}",
                _gateway(wrapper, read_as),
                SamplingDefaults(
                    temperature=config.temperature,
                    top_p=config.top_p,
                    top_k=config.top_k,
                    max_tokens=config.max_response_tokens,
                ),
            )
        for name, remote in settings["auxiliary_models"].items():
            models.add_remote(name, RemoteModel(**remote))
        here[address] = _Host(_gateway(model, settings), models, kind)
    return here[address]


def _adapter_folder(config: Any, version: int) -> str:
    """Where Trinity-RFT's trainer saves the adapter of a version; the first is the given one."""
    if version == 0:
        return str(config.lora_modules[0]["lora_path"])
    step = Path(config.checkpoint_job_dir) / f"global_step_{version}"
    return str(step / "actor" / "lora_adapter")


def _engine(model: ModelWrapper, end_ids: Collection[int] = ()) -> TrinityVllmEngine | TinkerEngine:
    config = model.config

    async def weights() -> str:
        return str(await model.model.get_model_path.remote())

    async def version() -> int:
        return int(await model.model_version_async)

    if config.engine_type == "tinker":
        return TinkerEngine(config.model_path, max_model_len=config.max_model_len, weights=weights)
    return TrinityVllmEngine(
        str(model.api_address),
        model_name=model.model_name,
        api_key=model.api_key,
        max_model_len=config.max_model_len,
        model_version=version,
        adapter=partial(_adapter_folder, config) if config.enable_lora else None,
        end_ids=end_ids,
    )


def _gateway(model: ModelWrapper, settings: Mapping[str, Any]) -> Gateway:
    config = model.config
    tokenizer = load_tokenizer(config.model_path)
    renderer = ChatRenderer(
        tokenizer,
        chat_template=config.chat_template,
        enable_thinking=config.enable_thinking,
        tool_call_parser=settings["tool_call_parser"],
        reasoning_parser=settings["reasoning_parser"],
    )
    return Gateway(
        _engine(model, renderer.end_ids - {tokenizer.eos_token_id}),
        renderer,
        model_name=config.model_path,
        reasoning=settings["reasoning"],
    )
