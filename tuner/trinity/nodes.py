"""Check the machines of a Ray cluster before anything is started on them.

Ray starts the actors of a run on any machine with room, so every machine needs all of: the run
directory under the same path, through which data, traces and checkpoints pass; the model and the
data, if these are folders; `tuner` and Trinity-RFT in the same versions as here; and the imports of
the user's functions. Otherwise a missing part would be found by an actor in the middle of the run,
as an unrelated error or as missing files.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.errors import ConfigError, FunctionError

if TYPE_CHECKING:
    from trinity.common.config import Config

_SECONDS = 300.0
"""Maximum seconds for a machine to answer: it starts a worker, which imports the functions'
modules."""


@dataclass(frozen=True)
class Node:
    """A machine of the cluster.

    Attributes:
        id: Ray's name of it.
        address: Its address.
        cpus, gpus: Its declared numbers.
    """

    id: str
    address: str
    cpus: float
    gpus: float


@dataclass(frozen=True)
class MachineRequirements:
    """Requirements for every machine.

    Attributes:
        shared: The folder that all of them must share.
        functions: The results of `workers.ship`, by role.
        folders: Local folders, by the setting that names them; each machine may have its own copy.
    """

    shared: Path
    functions: Mapping[str, str] = field(default_factory=dict)
    folders: Mapping[str, str] = field(default_factory=dict)


def alive() -> list[Node]:
    """Machines of the joined cluster, ordered by address."""
    import ray

    found = [
        Node(
            node["NodeID"],
            node["NodeManagerAddress"],
            node["Resources"].get("CPU", 0.0),
            node["Resources"].get("GPU", 0.0),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]
    return sorted(found, key=lambda node: ([*map(_number, node.address.split("."))], node.id))


def _number(part: str) -> int:
    return int(part) if part.isdecimal() else 0


def needed(
    config: Config, *, shared: Path, functions: Mapping[str, str | None]
) -> MachineRequirements:
    """Requirements of a configuration for every machine.

    Args:
        config: After Trinity-RFT's check.
        shared: The run's folder.
        functions: The results of `workers.ship`, by role.
    """
    inputs, model = config.buffer.explorer_input, config.model
    paths = {
        "model.model_path": model.model_path,
        "model.critic_model_path": model.critic_model_path,
    }
    for index, auxiliary in enumerate(config.explorer.auxiliary_models):
        paths[f"explorer.auxiliary_models.{index}.model_path"] = auxiliary.model_path
    for taskset in (*inputs.tasksets, *inputs.eval_tasksets):
        paths[f"the path of the data set {taskset.name}"] = taskset.path
    here = {
        setting: str(path)
        for setting, path in paths.items()
        if path and Path(path).exists() and not Path(path).is_relative_to(shared)
    }
    return MachineRequirements(
        shared, {role: text for role, text in functions.items() if text is not None}, here
    )


def require_alike(needed: MachineRequirements, nodes: Sequence[Node]) -> None:
    """Reject a cluster with a machine that lacks something the run needs."""
    problems = list(_problems(needed, nodes))
    if not problems:
        return
    text = "the machines of the cluster (cluster.ray_address) do not all have what the run needs"
    lines = [f"- {node.address}: {said}" for node, said, _ in problems]
    only_functions = all(of_function for *_, of_function in problems)
    raise (FunctionError if only_functions else ConfigError)("\n".join([f"{text}:", *lines]))


def _problems(
    needed: MachineRequirements, nodes: Sequence[Node]
) -> Iterator[tuple[Node, str, bool]]:
    """(machine, what it lacks, whether that is a function)."""
    token = secrets.token_hex(8)
    meeting = needed.shared / "tuner" / f"machines-{token}"
    meeting.mkdir(parents=True)
    (meeting / "here").write_text(token, encoding="utf-8")
    try:
        yield from _answers(needed, nodes, meeting, token)
    finally:
        shutil.rmtree(meeting, ignore_errors=True)


def _answers(
    needed: MachineRequirements, nodes: Sequence[Node], meeting: Path, token: str
) -> Iterator[tuple[Node, str, bool]]:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = {path: _listing(path) for path in needed.folders.values()}
    probe = ray.remote(_probe())
    asked = [
        probe.options(
            num_cpus=0,
            max_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
        ).remote(str(meeting), node.id, dict(needed.functions), list(here))
        for node in nodes
    ]
    ray.wait(asked, num_returns=len(asked), timeout=_SECONDS)
    for node, answer in zip(nodes, asked, strict=True):
        try:
            found = ray.get(answer, timeout=0.1)
        except Exception as error:  # it died, or takes too long
            said = str(error).strip().splitlines() or [type(error).__name__]
            yield node, f"it does not answer: {type(error).__name__}: {said[-1]}", False
            continue
        seen = found["token"] == token and (meeting / node.id).exists()
        if not seen:
            yield node, _not_shared(needed.shared, found["cannot"]), False
        for package, version in found["versions"].items():
            if version != (own := _version(package)):
                has = f"version {version} of it" if version else "none of it"
                lacks_it = (
                    f"{package} {own} is here, but {has} is there: install the same everywhere"
                )
                yield node, lacks_it, False
        for setting, path in needed.folders.items():
            if (lacks := _differs(here[path], found["folders"][path])) is not None:
                yield node, f"{setting} is {path}, {lacks}", False
        for role, said in found["functions"].items():
            what = f"the {role} cannot be loaded: {said}"
            yield node, f"{what}; install what it imports on every machine", True


def _not_shared(folder: Path, why: str | None) -> str:
    reason = f" ({why})" if why else ""
    return (
        f"{folder} is not the same folder as here{reason}: data, traces and checkpoints pass "
        "through it; set checkpoint_root_dir to a disk that every machine mounts at the same path"
    )


def _differs(here: Mapping[str, int], there: Mapping[str, int] | None) -> str | None:
    put = "put the same there, or on a disk that every machine mounts at the same path"
    if there is None:
        return f"which is missing there: {put}"
    others = sorted(name for name in {*here, *there} if here.get(name) != there.get(name))
    if not others:
        return None
    return f"which is different there ({', '.join(others[:3])}): {put}"


def _listing(path: str) -> dict[str, int]:
    """Sizes of the files in a folder, or of a file, by name."""
    place = Path(path)
    files = [place] if place.is_file() else [file for file in place.iterdir() if file.is_file()]
    return {file.name: file.stat().st_size for file in files}


def _version(package: str) -> str | None:
    from importlib import metadata

    return metadata.version(package)


_PACKAGES = ("agentscope-tuner", "trinity-rft")


def _probe() -> Callable[..., dict[str, Any]]:
    """The function that a machine runs. It travels by value, being inside a function, so that
    it works even if `tuner` is missing there."""
    packages = _PACKAGES

    def probe(
        meeting: str, node: str, functions: dict[str, str], folders: list[str]
    ) -> dict[str, Any]:
        from importlib import metadata
        from pathlib import Path

        def version(package: str) -> str | None:
            try:
                return metadata.version(package)
            except metadata.PackageNotFoundError:
                return None

        def listing(path: str) -> dict[str, int] | None:
            place = Path(path)
            if not place.exists():
                return None
            files = [place] if place.is_file() else list(place.iterdir())
            return {file.name: file.stat().st_size for file in files if file.is_file()}

        found: dict[str, Any] = {
            "token": None,
            "cannot": None,
            "versions": {package: version(package) for package in packages},
            "folders": {path: listing(path) for path in folders},
            "functions": {},
        }
        try:
            found["token"] = (Path(meeting) / "here").read_text(encoding="utf-8")
            (Path(meeting) / node).touch()
        except OSError as error:
            found["cannot"] = f"{type(error).__name__}: {error}"
        try:
            from tuner.tasks.loading import load
        except ImportError:
            return found  # its version tells
        for role, text in functions.items():
            try:
                load(text)
            except Exception as error:
                found["functions"][role] = f"{type(error).__name__}: {error}"
        return found

    return probe


def end_leftovers(namespace: str) -> None:
    """End actors on the cluster that a killed part of this run left.

    Trinity-RFT's synchronizer outlives its driver, by design, until nobody needs it; one that is
    found again has the counts of the killed run, and deletes weights.
    """
    import ray
    from ray._private.state import actors, jobs

    ended = {job["JobID"] for job in jobs() if job["IsDead"]}
    for info in actors().values():
        if not info["Name"] or info["State"] == "DEAD" or info["JobID"] not in ended:
            continue
        try:
            left = ray.get_actor(info["Name"], namespace=namespace)
        except ValueError:
            continue  # another run's
        if left._actor_id.hex() == info["ActorID"]:
            ray.kill(left, no_restart=True)


def lacking(config: Config, nodes: Sequence[Node]) -> str | None:
    """What the cluster lacks for a configuration; None if the models fit.

    Training uses fixed shares of some machines, and engines the rest.
    """
    sizes = config.cluster
    free = sorted(node.gpus for node in nodes)
    share, machines = sizes.trainer_gpu_num_per_node or 0, sizes.trainer_node_num or 0
    if config.mode in ("explore", "bench", "serve"):
        machines = 0
    for _ in range(machines):
        place = next((index for index, gpus in enumerate(free) if gpus >= share), None)
        if place is None:
            return _too_few(nodes, f"training takes {machines} x {share} GPUs, each on one machine")
        free[place] -= share
    if config.mode in ("train", "colocate"):
        return None
    for bundle in sorted(_bundles(config), reverse=True):
        place = next((index for index, gpus in enumerate(free) if gpus >= bundle), None)
        if place is None:
            beside = f" in addition to training's {machines} x {share}" if machines else ""
            return _too_few(nodes, f"an engine takes {bundle} GPUs of one machine{beside}")
        free[place] -= bundle
    return None


def _bundles(config: Config) -> list[int]:
    """GPUs of one machine used by each engine, or by each part of one."""
    models = (config.explorer.rollout_model, *config.explorer.auxiliary_models)
    return [
        model.gpu_per_engine // model.nnodes
        for model in models
        for _ in range(model.engine_num * model.nnodes)
    ]


def _too_few(nodes: Sequence[Node], what: str) -> str:
    there = ", ".join(f"{node.address} has {node.gpus:g}" for node in nodes)
    return f"{what}, for which the cluster has no room ({there})"


def placed(config: Config, nodes: Sequence[Node]) -> Iterator[str]:
    """The placement, in words."""
    for node in nodes:
        yield f"{node.address}: {node.cpus:g} CPUs, {node.gpus:g} GPUs"
    sizes = config.cluster
    if config.mode not in ("explore", "bench", "serve") and sizes.trainer_gpu_num:
        yield (
            f"training on {sizes.trainer_node_num} machine(s), "
            f"{sizes.trainer_gpu_num_per_node} GPUs of each"
        )
    if config.mode != "train":
        shares = ", ".join(f"{bundle} GPUs" for bundle in _bundles(config))
        yield f"engines on as few machines as possible: {shares or 'none'}"
        runners = config.explorer.runner_per_model * config.explorer.rollout_model.engine_num
        yield f"agents and judges in {runners} processes, spread over all machines"
