"""A run that was recorded: one of its rollouts, and what that was run with."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NotRequired

from tuner.config import RunConfig
from tuner.config.load import checked, read_layers
from tuner.environments.seam import Environment, from_settings
from tuner.errors import ConfigError, TunerError
from tuner.gateway import SamplingDefaults
from tuner.runs.directory import RunDirectory
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
        directory: The run's.
        config: What it was run with; secrets are masked.
        trace: What it left behind.
    """

    directory: RunDirectory
    config: RunConfig
    trace: Trace

    @property
    def relayed(self) -> bool:
        """Whether a model behind a URL answered, so that no ids are known."""
        return any(call.billed is not None for call in self.trace.calls)

    @property
    def defaults(self) -> SamplingDefaults:
        """What a request that did not say was sampled with."""
        inputs, split = self.config.buffer.explorer_input, self.trace.id.split
        sets = {one.name: one for one in inputs.eval_tasksets}
        arguments = self.config.rollout_args(sets.get(split, inputs.taskset))
        return SamplingDefaults(**arguments.model_dump())

    @property
    def context(self) -> int:
        """Tokens of prompt and answer together.

        Raises:
            ModelLoadError: The model's settings cannot be read.
        """
        from tuner.runs.models import load_settings
        from tuner.runs.stack import context_length

        model = self.config.model
        settings = load_settings(model.model_path)
        return context_length(model.max_model_len, settings, "model.max_model_len")

    @property
    def function_seed(self) -> int | None:
        """What the random states were set to when it began; None where they were not."""
        from tuner.runs.stack import rollout_settings

        settings, trace = rollout_settings(self.config), self.trace
        if not settings.seeds_functions:
            return None
        while trace.origin is not None:  # the one that begins at the beginning
            trace = _trace(self.directory, None, f"{trace.origin.rollout}-{trace.origin.attempt}")
        return derive_seed(settings.seed, trace.id, trace.attempt)

    def saved(self, name: str) -> SavedRollout:
        """The rollout as tests have it, without the run.

        Raises:
            ModelLoadError: The model's settings cannot be read.
        """
        path = self.config.model.model_path
        if self.relayed:
            return SavedRollout(name, self.trace, path)
        # What is left of a budget depends on what ran in parallel.
        context = None if self.config.tuner.max_tokens is not None else self.context
        return SavedRollout(name, self.trace, path, vars(self.defaults), context)

    @cached_property
    def _environment(self) -> Environment:
        named = self.config.tuner.environment
        assert named is not None
        return from_settings(named, f"{self.directory.config}: tuner.environment")

    def workflow(self, given: str | None) -> Callable[..., Any]:
        """The workflow that is named, or that of the run, as a run calls it.

        Raises:
            ConfigError: It cannot be loaded, or nothing names one.
        """
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
                f"{self.directory.config} does not say which workflow it was run with: give "
                "--workflow package.module:function or path/file.py:function"
            )
        return self._prompted(load_function(given, setting=setting))

    def judge(self, given: str | None) -> Callable[..., Any] | None:
        """The judge that is named, or that of the run; None where it had none that it can name.

        Raises:
            ConfigError: It cannot be loaded.
        """
        if given is not None:
            return load_function(given, setting="--judge")
        if self.config.tuner.environment is not None and self.config.tuner.agent is None:
            return self._environment.judge
        named = self.config.tuner.judge
        where = f"{self.directory.config}: tuner.judge"
        return None if named is None else load_function(named, setting=where)

    def _prompted(self, workflow: Callable[..., Any]) -> Callable[..., Any]:
        """In a search for prompts the step is the number of those that the workflow was given."""
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
    """Copy rollouts of a run into a file for tests, which needs the run no more.

    What is in the traces is in the file: tasks, messages, results of tools.

    Args:
        run: The run directory.
        rollouts: Their names in the run, as in `train-3-0-2`; or a dict of these by the names that
            they are to have in the file.
        path: The file, which is made if need be; rollouts with other names stay in it.

    Raises:
        TunerError: There is no such rollout, or the file has another one of a name.
        ConfigError: The run's configuration cannot be read.
        ModelLoadError: The settings of the run's model cannot be read.
    """
    names = rollouts if isinstance(rollouts, Mapping) else {name: name for name in rollouts}
    known = read_rollouts(path)
    found = [find_rollout(Path(run), of).saved(name) for name, of in names.items()]
    for one in found:
        if one.name in known and known[one.name].trace != one.trace:
            raise TunerError(
                f"{path} has another rollout {one.name!r}: give this one another name, or delete "
                "the line"
            )
    write_rollouts(path, found)


def find_rollout(run: Path, name: str) -> RecordedRollout:
    """A rollout by its name.

    Args:
        run: The run directory, or one of the files in its traces/.
        name: `<split>-<step>-<task>-<rollout>`, as in `train-3-0-2`: its last attempt; with
            `-<attempt>` behind it another.

    Raises:
        TunerError: There is no such run, or no such rollout in it.
        ConfigError: The run's configuration cannot be read.
    """
    file = run if run.is_file() else None
    directory = RunDirectory(run if file is None else file.absolute().parent.parent)
    if not directory.traces.is_dir() or not directory.config.is_file():
        raise TunerError(
            f"{run} is not a run: give the folder <checkpoint_root_dir>/<project>/<name>, with "
            "config.yaml and traces/ in it, or a file of its traces/"
        )
    layers = read_layers(directory.config, stored=True)
    if layers.backend == "trinity":
        raise TunerError(
            f"{directory.path} is a run on Trinity-RFT, whose rollouts are not run again here"
        )
    config = with_default_model(checked(layers))
    return RecordedRollout(directory, config, _trace(directory, file, name))


def _trace(directory: RunDirectory, file: Path | None, name: str) -> Trace:
    meant = list(_meant(name))
    if not meant:
        raise TunerError(
            f"{name!r} is not the name of a rollout: write <split>-<step>-<task>-<rollout>, as in "
            "train-3-0-2, and -<attempt> behind it for another attempt than the last"
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
    """What a name can mean: a split may have hyphens and numbers in it, too."""
    head, _, last = name.rpartition("-")
    for text, attempt in ((name, None), (head, last)):
        match = _NAME.fullmatch(text)
        if match and (attempt is None or attempt.isdecimal()):
            step, task, rollout = (int(match[part]) for part in ("step", "task", "rollout"))
            id_ = RolloutId(step, task, rollout, match["split"])
            yield id_, None if attempt is None else int(attempt)
