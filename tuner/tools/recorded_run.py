"""Load a rollout of a recorded run, with the configuration and functions it was run with."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NotRequired

from tuner.config import RunConfig
from tuner.config.load import checked, read_layers
from tuner.errors import ConfigError, TunerError
from tuner.gateway import SamplingDefaults
from tuner.runs.directory import RunDirectory
from tuner.runs.environment import Environment, from_settings
from tuner.tasks.functions import WorkflowOutput, call_function
from tuner.tasks.loading import load_function
from tuner.tasks.selection import derive_seed
from tuner.traces import RolloutId, Trace, read_traces
from tuner.traces.reading import Count, JsonReader, Text
from tuner.traces.store import SavedRollout, closed, read_rollouts, write_rollouts
from tuner.tune import with_default_model

_NAME = re.compile(r"(?P<split>.+?)-(?P<step>\d+)-(?P<task>\d+)-(?P<rollout>\d+)")


_CANDIDATES = JsonReader[dict[str, Any]](
    closed(
        "SearchCandidate",
        {
            "number": Count,
            "prompts": NotRequired[dict[Text, Text]],
            "model": NotRequired[dict[Text, Text]],
        },
    ),
    "a candidate",
)


@dataclass(frozen=True)
class RecordedRollout:
    """One attempt at a rollout of a run.

    Attributes:
        directory: The run directory.
        config: The run's configuration, with masked secrets.
        trace: Its trace.
    """

    directory: RunDirectory
    config: RunConfig
    trace: Trace

    @property
    def relayed(self) -> bool:
        """True if a remote model answered, so there are no token ids."""
        return any(call.billed is not None for call in self.trace.calls)

    @property
    def defaults(self) -> SamplingDefaults:
        """Sampling settings of requests that did not set their own."""
        inputs, split = self.config.buffer.explorer_input, self.trace.id.split
        sets = {one.name: one for one in inputs.eval_tasksets}
        arguments = self.config.rollout_args(sets.get(split, inputs.taskset))
        return SamplingDefaults(**arguments.model_dump())

    @property
    def context(self) -> int:
        """Maximum tokens of prompt and answer together."""
        from tuner.runs.models import load_settings
        from tuner.runs.stack import context_length

        model = self.config.model
        settings = load_settings(model.model_path)
        return context_length(model.max_model_len, settings, "model.max_model_len")

    @property
    def function_seed(self) -> int | None:
        """The seed of the random states at its start; None if they were not seeded."""
        from tuner.runs.stack import rollout_settings

        settings, trace = rollout_settings(self.config), self.trace
        if not settings.seeds_functions:
            return None
        while trace.origin is not None:  # the one that starts at the beginning
            trace = _trace(self.directory, None, f"{trace.origin.rollout}-{trace.origin.attempt}")
        return derive_seed(settings.seed, trace.id, trace.attempt)

    def saved(self, name: str) -> SavedRollout:
        """The rollout as stored in a file for tests, which does not need the run."""
        path = self.config.model.model_path
        if self.relayed:
            return SavedRollout(name, self.trace, path)
        # The remaining budget depends on what ran in parallel.
        context = None if self.config.tuner.max_tokens is not None else self.context
        return SavedRollout(name, self.trace, path, vars(self.defaults), context)

    @cached_property
    def _environment(self) -> Environment:
        named = self.config.tuner.environment
        assert named is not None
        return from_settings(named, f"{self.directory.config}: tuner.environment")

    def workflow(self, given: str | None) -> Callable[..., Any]:
        """The given workflow, or the run's, wrapped as in a run."""
        names, setting = self.config.tuner, "--workflow"
        if given is None and names.agent is not None:
            from tuner.areal import configured_agent

            return configured_agent(names)
        if given is None and names.environment is not None:
            return self._environment.workflow
        if given is None:
            given, setting = names.workflow, f"{self.directory.config}: tuner.workflow"
        if given is None:
            raise ConfigError(
                f"{self.directory.config} names no workflow: add --workflow "
                "package.module:function or path/file.py:function"
            )
        return self._prompted(load_function(given, setting=setting))

    def judge(self, given: str | None) -> Callable[..., Any] | None:
        """The given judge, or the run's; None if the run's configuration names none."""
        if given is not None:
            return load_function(given, setting="--judge")
        if self.config.tuner.environment is not None and self.config.tuner.agent is None:
            return self._environment.judge
        named = self.config.tuner.judge
        where = f"{self.directory.config}: tuner.judge"
        return None if named is None else load_function(named, setting=where)

    def _prompted(self, workflow: Callable[..., Any]) -> Callable[..., Any]:
        """For a prompt search: the step selects the prompts that the workflow is given."""
        path = self.directory.path / "candidates.jsonl"
        rows = [row for _, _, row in _CANDIDATES.lines(path)]
        known = {row["number"]: row["prompts"] for row in rows if "prompts" in row}
        if (prompts := known.get(self.trace.id.step)) is None:
            return workflow
        single = list(prompts) == ["system_prompt"]
        given = {"system_prompt": prompts["system_prompt"] if single else prompts}

        async def prompted(
            task: Any, model: Any, auxiliary_models: Any, logger: Any
        ) -> WorkflowOutput:
            own = {"auxiliary_models": auxiliary_models, "logger": logger}
            output = await call_function(workflow, {"task": task, "model": model, **own, **given})
            return output  # type: ignore[no-any-return]  # checked by who calls this

        return prompted


def save_rollouts(
    run: str | Path, rollouts: Sequence[str] | Mapping[str, str], path: str | Path
) -> None:
    """Copy rollouts of a run into a file for tests, which no longer needs the run.

    The file contains what the traces contain: tasks, messages, results of tools.

    Args:
        run: The run directory.
        rollouts: Their names in the run, as in `train-3-0-2`; or a dict from the names in the file
            to the names in the run.
        path: The file, created if missing; rollouts with other names stay in it.

    Raises:
        TunerError: A rollout is missing, or the file has a different rollout of that name.
        ConfigError: The run's configuration cannot be read.
        ModelLoadError: The settings of the run's model cannot be read.
    """
    names = rollouts if isinstance(rollouts, Mapping) else {name: name for name in rollouts}
    known = read_rollouts(path)
    found = [find_rollout(Path(run), of).saved(name) for name, of in names.items()]
    for one in found:
        if one.name in known and known[one.name].trace != one.trace:
            raise TunerError(
                f"{path} already has a different rollout {one.name!r}: choose another name, or "
                "delete the line"
            )
    write_rollouts(path, found)


def find_rollout(run: Path, name: str) -> RecordedRollout:
    """Find a rollout by its name; raises TunerError if the run or the rollout is missing.

    Args:
        run: The run directory, or one of the files in its traces/.
        name: `<split>-<step>-<task>-<rollout>`, as in `train-3-0-2`, for its last attempt; followed
            by `-<attempt>` for another.
    """
    file = run if run.is_file() else None
    directory = RunDirectory(run if file is None else file.absolute().parent.parent)
    if not directory.traces.is_dir() or not directory.config.is_file():
        raise TunerError(
            f"{run} is not a run: give the folder <checkpoint_root_dir>/<project>/<name> that has "
            "config.yaml and traces/, or a file of its traces/"
        )
    layers = read_layers(directory.config, stored=True)
    if layers.backend == "trinity":
        raise TunerError(
            f"{directory.path} is a run on Trinity-RFT, whose rollouts cannot be rerun here"
        )
    config = with_default_model(checked(layers))
    return RecordedRollout(directory, config, _trace(directory, file, name))


def _trace(directory: RunDirectory, file: Path | None, name: str) -> Trace:
    meant = list(_meant(name))
    if not meant:
        raise TunerError(
            f"{name!r} is not the name of a rollout: write <split>-<step>-<task>-<rollout>, as in "
            "train-3-0-2, followed by -<attempt> for an attempt that is not the last"
        )
    nearby: list[Trace] = []
    for id_, attempt in meant:
        prefix = "" if id_.split == "train" else f"{id_.split}_"
        path = file or directory.traces / f"{prefix}step_{id_.step:06d}.jsonl"
        traces = list(read_traces(path))
        found = [t for t in traces if t.id == id_ and attempt in (None, t.attempt)]
        if found:
            return max(found, key=lambda trace: trace.attempt)
        nearby += traces
    known = sorted({trace.id for trace in nearby})
    names = ", ".join(map(str, known[:8]))
    dots = ", ..." if len(known) > 8 else ""
    raise TunerError(
        f"{directory.path} has no rollout {name}"
        + (f"; those of its step: {names}{dots}" if nearby else f", and nothing of step {id_.step}")
    )


def _meant(name: str) -> Iterator[tuple[RolloutId, int | None]]:
    """The possible meanings of a name: a split may contain hyphens and numbers."""
    head, _, last = name.rpartition("-")
    for text, attempt in ((name, None), (head, last)):
        match = _NAME.fullmatch(text)
        if match and (attempt is None or attempt.isdecimal()):
            step, task, rollout = (int(match[part]) for part in ("step", "task", "rollout"))
            id_ = RolloutId(step, task, rollout, match["split"])
            yield id_, None if attempt is None else int(attempt)
