"""A model, a checkpoint or a run, as the weights that are meant by it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tuner.config.model_paths import check_path, located
from tuner.config.source import PACKAGE, lookup
from tuner.errors import TunerError
from tuner.run.directory import ADAPTER_CONFIG, MANIFEST, RunDirectory, damage, read_json
from tuner.run.summary import is_run

_DAMAGED = "delete it, and what it says is found without it"


@dataclass(frozen=True)
class Candidate:
    """Weights that are compared with others, or exported.

    Attributes:
        name: What people call it.
        path: Folder of a model or an adapter, or a model as `model.model_path` names it.
        base: Of an adapter, the model that it belongs to, as `model.model_path`; else None.
        run: Where it comes from, if that is here.
        step: The step of that run.
    """

    name: str
    path: str
    base: str | None = None
    run: RunDirectory | None = None
    step: int | None = None

    @property
    def recorded_base(self) -> str | None:
        """What an adapter itself calls the model that it belongs to; None where it is elsewhere."""
        if not (Path(self.path) / ADAPTER_CONFIG).is_file():
            return None
        config = read_json(Path(self.path) / ADAPTER_CONFIG, "export or train it again")
        return config.get("base_model_name_or_path") or None


def find_candidate(given: str | Path) -> Candidate:
    """What a person names: a run (its newest checkpoint), a checkpoint, a model, an adapter.

    Args:
        given: A folder, or a model as `model.model_path` names it.

    Raises:
        MissingDependencyError: It names a package that is not installed.
        TunerError: It is a folder with none of these, a run without a checkpoint, or a checkpoint
            that is not as it was written.
        ModelLoadError: It can only be a folder, and there is none.
    """
    folder = Path(given).expanduser()
    place = located(str(given), "the candidate")
    if place is not None and place.is_file() and not str(given).startswith(PACKAGE):
        return Candidate(place.name, str(place.resolve()))
    if not folder.is_dir():
        if place is None:
            check_path(str(given), "the candidate", what="model, a checkpoint or a run")
        return Candidate(str(given), str(given))
    folder = folder.resolve()
    run = RunDirectory(folder)
    # A folder of projects is often called checkpoints, too.
    if is_run(folder) or run.checkpoint_steps():
        return _newest(run)
    if not any((folder / name).is_file() for name in ("config.json", ADAPTER_CONFIG)):
        raise TunerError(
            f"{given} is neither a run, nor a checkpoint, nor a model: it holds no checkpoints/, "
            f"{ADAPTER_CONFIG} or config.json; give <checkpoint_root_dir>/<project>/<name> or a "
            "folder in its checkpoints/"
        )
    owner = RunDirectory(folder.parent.parent)
    of_run = folder.parent == owner.checkpoints and owner.config.is_file()
    return _of_folder(folder, owner if of_run else None)


def _newest(run: RunDirectory) -> Candidate:
    steps = run.checkpoint_steps()
    if steps:
        return _of_folder(run.checkpoint(steps[-1]), run)
    written = read_json(run.result, _DAMAGED) if run.result.is_file() else {}
    folder = written.get("checkpoint") if isinstance(written, dict) else None
    if folder is None or not Path(folder).is_dir():  # Trinity-RFT's are elsewhere in the run
        raise TunerError(f"{run.path} has no checkpoint yet: wait for trainer.save_interval")
    return _of_folder(Path(folder), run)


def _of_folder(folder: Path, run: RunDirectory | None) -> Candidate:
    if (folder / MANIFEST).is_file() and (found := damage(folder)):
        raise TunerError(f"{folder} is damaged ({found}): take another checkpoint")
    number = folder.name.rpartition("_")[2]
    step = int(number) if run is not None and number.isdecimal() else None
    name = folder.name if run is None else run.path.name
    name = name if step is None else f"{name} step {step}"
    candidate = Candidate(name, str(folder), None, run, step)
    if not (folder / ADAPTER_CONFIG).is_file():
        return candidate
    base = (
        lookup(run.stored_config(), "model.model_path") if run is not None else None
    ) or candidate.recorded_base
    if not base:
        raise TunerError(
            f"{folder} is an adapter and does not say of which model: write its name as "
            f"base_model_name_or_path into {ADAPTER_CONFIG}"
        )
    return Candidate(name, str(folder), str(base), run, step)
