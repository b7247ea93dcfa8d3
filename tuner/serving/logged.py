"""A candidate's log-probs of what was logged: sessions of a run or a server, as weights see them.

The log-probs are the trainer's (`tuner.training.forward`): of the distribution that each token was
sampled from, at its temperature, within what top_k, top_p and min_p left and the call's form, with
its penalties. Where a cut left only some tokens, the candidate is taken as choosing among these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from tuner.commands.candidates import Candidate, find_candidate
from tuner.config.source import lookup
from tuner.data.dataset import row_text
from tuner.errors import ProofError
from tuner.run.directory import RunDirectory
from tuner.run.offpolicy import (
    CLIP,
    LEAST_EFFECTIVE,
    LoggedSession,
    OffPolicy,
    check_enough,
    off_policy,
)
from tuner.run.proof import Plan
from tuner.traces import Call, Outcome, Trace, read_traces
from tuner.traces.store import SERVED

if TYPE_CHECKING:
    from torch import nn

    from tuner.training.forward.layouts import Forward

_LEARNED = ("train", "serve")
"""Splits whose steps are the updates that learned from them; 0: none did."""
_ALL = 10**9
_TOKENS = 16_384
"""Tokens of one forward pass; fewer where there is no room for them."""


class LoggedComparison(BaseModel):
    """What logged traffic says of a candidate.

    Attributes:
        run, candidate: Their names.
        versions: The first and the last version of the weights that sampled the sessions.
        cut_calls: Calls that were sampled with top_k, top_p or min_p.
        found: The estimates.
    """

    run: str
    candidate: str
    versions: tuple[int, int]
    cut_calls: int
    found: OffPolicy

    def text(self) -> str:
        """For people."""
        found = self.found
        versions = " to ".join(str(one) for one in dict.fromkeys(self.versions))
        lines = [
            f"{self.candidate} on the traffic of {self.run}, weights of version {versions}",
            f"{found.sessions} sessions of {found.tasks} tasks, {found.calls} calls; "
            f"effective sample size {found.effective_sessions:.1f} of sessions, "
            f"{found.effective_calls:.1f} of calls; mean weight {found.mean_weight:.3f}; "
            f"log-ratio of a session {found.log_ratio:+.4f}",
        ]
        if found.left_out:
            reasons = ", ".join(f"{count} {reason}" for reason, count in found.left_out.items())
            lines.append(f"left out: {reasons}")
        if self.cut_calls:
            lines.append(
                f"{self.cut_calls} calls were cut by top_k, top_p or min_p: the candidate is taken "
                "as choosing among what was left"
            )
        if found.refused is None:
            lines += _estimates(found)
        return "\n".join([*lines, found.text])


def _estimates(found: OffPolicy) -> list[str]:
    rows = [
        ("serving", found.serving, "mean of what was logged"),
        ("candidate, doubly robust", found.doubly_robust, "no bias"),
        ("candidate, plain", found.plain, "no bias, heavy weights make it jump"),
        ("candidate, self-normalised", found.self_normalised, "bias of order 1 / sessions"),
        (
            f"candidate, clipped at {found.clip:g}",
            found.clipped,
            f"{found.lost:.2%} of its sessions cut away: too low by at most so much of the range",
        ),
    ]
    return [f"{name:<28}{value:8.4f}   {what}" for name, value, what in rows]


def compare_logged(
    run: Path,
    candidate: str | Path,
    plan: Plan,
    *,
    split: str = "train",
    steps: tuple[int, int] | None = None,
    least_effective: float = LEAST_EFFECTIVE,
    clip: float = CLIP,
    device: str = "auto",
    dtype: str = "auto",
) -> LoggedComparison:
    """What the recorded traffic of a run or a server says of a candidate; nothing is sampled.

    Args:
        run: A run's or a server's directory.
        candidate: A checkpoint, model, adapter or run, as `tuner eval` takes it.
        plan: The range of rewards, alpha, effect and margin.
        split: Of a run: "train" or the name of an evaluation set.
        steps: Of a run: the first and the last step; None: all.
        least_effective: Effective sessions below which nothing is said.
        clip: Largest weight of the clipped estimate.
        device, dtype: As `tuner.device` and `tuner.dtype`.

    Raises:
        TunerError: There is no such run or candidate, or it has no such sessions.
        ConfigError: The candidate has another vocabulary.
        ProofError: Fewer than two sessions can be used, or a reward is outside of the plan's range.
    """
    chosen = find_candidate(candidate)
    served = (run.expanduser() / SERVED).is_file()
    traces = _served(run) if served else list(_recorded(run, split, steps))
    own = chosen.run is not None and chosen.run.path.resolve() == run.expanduser().resolve()
    used, left_out = usable(traces, trained_by=(chosen.step or _ALL) if own else 0)
    for trace in used:
        plan.scaled(trace.reward if trace.reward is not None else 0.0, f"session {trace.id}")
    check_enough(len(used), left_out)
    forward, model = _loaded(chosen, run, device, dtype)
    ratios = log_ratios(used, forward, model)
    sessions = [
        LoggedSession(
            task=str(trace.id.task) if served else row_text(trace.task),
            reward=trace.reward if trace.reward is not None else 0.0,
            log_ratios=of_calls,
        )
        for trace, of_calls in zip(used, ratios, strict=True)
    ]
    found = off_policy(
        sessions, plan, least_effective=least_effective, clip=clip, left_out=left_out
    )
    calls = [call for trace in used for call in trace.calls]
    versions = [version for call in calls for version in call.versions]
    return LoggedComparison(
        run=run.resolve().name,
        candidate=chosen.name,
        versions=(min(versions, default=0), max(versions, default=0)),
        cut_calls=sum(call.sampling.cuts for call in calls),
        found=found,
    )


def _recorded(run: Path, split: str, steps: tuple[int, int] | None) -> Iterable[Trace]:
    """The traces of a run's steps, those of replaced attempts left out."""
    directory = RunDirectory(run.expanduser())
    prefix = "" if split == "train" else f"{split}_"
    first, last = steps or (0, _ALL)
    paths = sorted(directory.traces.glob(f"{prefix}step_[0-9]*.jsonl"))
    chosen = [path for path in paths if first <= int(path.stem.rpartition("_")[2]) <= last]
    if not chosen:
        raise ProofError(
            f"{run} has no traces of {split!r}"
            + (f" in steps {first} to {last}" if steps else "")
            + ": name a split and steps that it has"
        )
    for path in chosen:
        yield from (trace for trace in read_traces(path) if trace.final)


def _served(run: Path) -> list[Trace]:
    """The judged sessions of a server."""
    from tuner.serving.serving_store import ServingStore

    with closing(ServingStore(run.expanduser() / SERVED, readonly=True)) as store:
        return [store.trace(session.id) for session in store.every(judged=True)]


def usable(traces: Iterable[Trace], *, trained_by: int = 0) -> tuple[list[Trace], dict[str, int]]:
    """The traces whose weight is known, and how many are left out by reason.

    Args:
        traces: In any order.
        trained_by: The candidate has learned from the sessions of updates up to this one. Of what
            it was made to do more often it would be said that it is good.
    """
    used, reasons = [], Counter[str]()
    for trace in traces:
        learned = trace.id.split in _LEARNED and 0 < trace.id.step <= trained_by
        if (reason := "trained_the_candidate" if learned else _why_not(trace)) is None:
            used.append(trace)
        else:
            reasons[reason] += 1
    return used, dict(sorted(reasons.items()))


def _why_not(trace: Trace) -> str | None:
    """Why a session says nothing of a candidate, or None."""
    if trace.outcome is not Outcome.COMPLETED:
        return trace.outcome.value
    if trace.reward is None:
        return "no_reward"
    if trace.origin is not None:
        return "branch"
    return next(filter(None, map(_unweighed, trace.calls)), None)


def _unweighed(call: Call) -> str | None:
    """Why a call's weight is not known, or None; what is masked or excluded was sampled, too."""
    if not call.prompt_ids or not call.completion_ids:
        return "call_without_ids"
    if call.invalid is not None:
        return "invalid_call"
    if call.undelivered:
        return "undelivered_call"
    if call.replayed:
        return "replayed_call"
    return "greedy_call" if call.sampling.temperature == 0 else None


def _loaded(candidate: Candidate, run: Path, device: str, dtype: str) -> tuple[Forward, nn.Module]:
    """The candidate's model, without gradients, and how its log-probs are computed."""
    from tuner.assembly.adapters import add_adapter, require_peft
    from tuner.assembly.models import (
        check_same_vocabulary,
        choose_device,
        choose_dtype,
        load_model,
        load_tokenizer,
    )
    from tuner.config.explorer import LoraSection
    from tuner.engines.grammar import Grammars
    from tuner.engines.request import end_ids_of
    from tuner.training.forward.probing import exact_forward

    where, path = choose_device(device), candidate.base or candidate.path
    named = "the candidate"
    loaded = load_model(path, device=where, dtype=choose_dtype(dtype, where), setting=named)
    tokenizer = load_tokenizer(path, setting=named)
    recorded = lookup(RunDirectory(run.expanduser()).stored_config() or {}, "model.model_path")
    if recorded is not None:
        of_run = load_tokenizer(recorded, setting=f"model.model_path of {run}")
        check_same_vocabulary(of_run, tokenizer, what=f"the candidate {candidate.name!r}")
    grammars = Grammars(tokenizer, end_ids_of(loaded.generation_config, tokenizer))
    model: nn.Module = loaded
    if candidate.base is not None:
        require_peft()
        settings = LoraSection(path=candidate.path, base_model_name=candidate.recorded_base)
        model = add_adapter(loaded, settings, model_path=candidate.base, seed=0).model
    model.requires_grad_(False)
    return exact_forward(model, grammars), model


def log_ratios(traces: Sequence[Trace], forward: Forward, model: Any) -> list[tuple[float, ...]]:
    """Of each call of each trace the log-prob of its completion under a model, less the recorded.

    Args:
        traces: Those that `usable` gave.
        forward: Made for the model.
        model: The candidate's.
    """
    from tuner.training.batch import Row

    rows = [
        Row(
            call_id=call.id,
            rollout=number,
            prompt_ids=call.prompt_ids,
            completion_ids=call.completion_ids,
            logprobs=call.logprobs,
            sampling=call.sampling,
            kept=call.kept,
        )
        for number, trace in enumerate(traces)
        for call in trace.calls
    ]
    found: list[list[float]] = [[] for _ in traces]
    if rows:
        for row, logp_T in zip(rows, forward.all_logprobs(model, rows, _TOKENS), strict=True):
            found[row.rollout].append(float(logp_T.double().sum()) - sum(row.logprobs))
    return [tuple(of_trace) for of_trace in found]
