"""`tuner doctor`: what is installed, which engines and backends work here, and how to fix the rest.

Reads only the metadata of installed packages and `nvidia-smi`, so it answers in a second and also
when a library fails to import. It does not check whether installed libraries import.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from pydantic import BaseModel

DISTRIBUTION = "agentscope-tuner"
# Features that need each extra; the extras that are missing here are for developing tuner.
_USES = {
    "agentscope1": "agents of AgentScope 1.x",
    "agentscope": "agents of AgentScope 2.x",
    "lora": "model.lora_configs",
    "gguf": "models in GGUF files",
    "gpu": "tuner.optimizer_state: 8bit",
    "gymnasium": "environments of gymnasium",
    "openenv": "environments of OpenEnv",
    "reasoning-gym": "sets of reasoning_gym",
    "textarena": "games of TextArena",
    "trl": "pieces of TRL's scripts, in tuner.from_trl",
    "verifiers": "environments of verifiers",
    "wandb": "monitor.monitor_type: wandb",
    "mlflow": "monitor.monitor_type: mlflow",
    "swanlab": "monitor.monitor_type: swanlab",
    "math": "formulas as answers, in tuner.rewards",
    "rewards": "ROUGE, JSON schemas and unit tests, in tuner.rewards",
    "examples": "examples/search_agent, examples/multi_turn_math",
}
_SMI = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
_SMI_SECONDS = 10
_HIDES = "CUDA_VISIBLE_DEVICES"


class DoctorFinding(BaseModel):
    """One finding.

    Attributes:
        area: "system", "extras", "engines" or "backends".
        name: The part that was examined.
        state: "ok"; "missing" if it is not installed and not required; "broken" if it must be
            fixed.
        found: What is installed, or why it would not work.
        mend: A command that fixes it, or None.
    """

    area: str
    name: str
    state: Literal["ok", "missing", "broken"]
    found: str
    mend: str | None = None


class Examination(BaseModel):
    """All findings. `well` is True if runs of the local backend can start."""

    well: bool
    findings: list[DoctorFinding]

    def __str__(self) -> str:
        lines: list[str] = []
        marks = {"ok": "ok", "missing": "-", "broken": "!!"}
        width = max(len(one.name) for one in self.findings)
        area = None
        for one in self.findings:
            if one.area != area:
                lines += ["", one.area.upper()] if lines else [one.area.upper()]
                area = one.area
            lines.append(f"  {marks[one.state]:<2}  {one.name:<{width}}  {one.found}")
            if one.mend is not None:
                lines.append(f"      {'':<{width}}  {one.mend}")
        broken = [one.name for one in self.findings if one.state == "broken"]
        verdict = f"to fix: {', '.join(broken)}" if broken else "nothing to fix"
        return "\n".join([*lines, "", verdict])


def examine() -> Examination:
    """Examine this machine and this environment. Raises nothing; unreadable parts become
    findings."""
    try:
        there = metadata.distribution(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        there = None
    gpus = _gpus()
    has_gpu = any(one.name == "GPU 0" for one in gpus) and _visible()
    findings = [_python(there), _tuner(there), *gpus, _torch(has_gpu)]
    if there is not None:
        requirements = [Requirement(line) for line in there.requires or ()]
        findings.insert(2, _base(_of_extra(requirements, "")))
        findings += _extras(requirements)
        findings += _engines(requirements, has_gpu)
        findings += _backends(requirements, has_gpu)
    return Examination(well=all(one.state != "broken" for one in findings), findings=findings)


def _python(there: metadata.Distribution | None) -> DoctorFinding:
    version = platform.python_version()
    system = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    found = f"{version}, {sys.executable} ({system})"
    said = {} if there is None else there.metadata.json
    wanted = SpecifierSet(str(said.get("requires_python", "")))
    if not wanted.contains(version, prereleases=True):
        found = f"{found}, and {wanted} is needed"
        return DoctorFinding(area="system", name="Python", state="broken", found=found)
    return DoctorFinding(area="system", name="Python", state="ok", found=found)


def _tuner(there: metadata.Distribution | None) -> DoctorFinding:
    place = Path(__file__).resolve().parents[1]
    if there is None:
        return DoctorFinding(
            area="system",
            name=DISTRIBUTION,
            state="broken",
            found=f"{place} is on the path but not installed: its requirements are unknown",
            mend=f"pip install -e '{place.parent}'",
        )
    return DoctorFinding(
        area="system", name=DISTRIBUTION, state="ok", found=f"{there.version}, {place}"
    )


def _base(requirements: list[Requirement]) -> DoctorFinding:
    wrong = [text for one in requirements if (text := _lack(one)) is not None]
    lacking = [str(one) for one in requirements if _lack(one) is not None]
    return DoctorFinding(
        area="system",
        name="libraries",
        state="broken" if wrong else "ok",
        found="; ".join(wrong) or f"all {len(requirements)} in supported versions",
        mend=f"pip install {' '.join(map(repr, lacking))}" if lacking else None,
    )


def _lack(requirement: Requirement) -> str | None:
    """Why the installed version does not meet a requirement; None if it does."""
    version = _version(requirement.name)
    if version is None:
        return f"{requirement.name} is not installed"
    if not requirement.specifier.contains(version, prereleases=True):
        return f"{requirement.name} is {version}, and {requirement.specifier} is needed"
    return None


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _gpus() -> list[DoctorFinding]:
    """A finding for each GPU, or one that says why there is none."""

    def one(name: str, state: Literal["ok", "missing", "broken"], found: str) -> DoctorFinding:
        return DoctorFinding(area="system", name=name, state=state, found=found)

    if shutil.which(_SMI[0]) is None:
        return [one("GPU", "missing", "nvidia-smi is missing: runs use the CPU")]
    try:
        said = subprocess.run(_SMI, capture_output=True, text=True, timeout=_SMI_SECONDS)
    except (OSError, subprocess.SubprocessError) as error:
        return [one("GPU", "broken", f"nvidia-smi does not answer: {type(error).__name__}")]
    lines = [line for line in said.stdout.splitlines() if line.count(",") == 2]
    if said.returncode or not lines:
        why = (said.stdout + said.stderr).strip().splitlines() or ["it says nothing"]
        return [one("GPU", "broken", f"nvidia-smi: {why[0]}")]
    found = []
    for index, line in enumerate(lines):
        name, memory, driver = (part.strip() for part in line.split(","))
        found.append(one(f"GPU {index}", "ok", f"{name}, {memory}, driver {driver}"))
    if _HIDES in os.environ:
        shown = "runs see only these" if _visible() else "runs see no GPU"
        found.append(one(_HIDES, "ok", f"is {os.environ[_HIDES]!r}: {shown}"))
    return found


def _visible() -> bool:
    return os.environ.get(_HIDES, "0").strip() not in ("", "-1")


def _torch(has_gpu: bool) -> DoctorFinding:
    """Check that PyTorch was built for the GPU, reading only its `version.py`."""
    version = _version("torch")
    if version is None:
        return DoctorFinding(
            area="system",
            name="PyTorch",
            state="broken",
            found="not installed",
            mend="pip install torch",
        )
    built = _cuda_of_torch()
    text = f"{version}, {f'built for CUDA {built}' if built else 'built for the CPU'}"
    if has_gpu and not built:
        return DoctorFinding(
            area="system",
            name="PyTorch",
            state="broken",
            found=f"{text}, so the GPU is not used",
            mend="pip install --force-reinstall torch  (https://pytorch.org has the index)",
        )
    driver = _cuda_of_driver() if has_gpu else None
    if built and driver and int(built.partition(".")[0]) > int(driver.partition(".")[0]):
        return DoctorFinding(
            area="system",
            name="PyTorch",
            state="broken",
            found=f"{text}, but the driver supports CUDA up to {driver}: the GPU is not used",
            mend="a newer driver, or PyTorch for that CUDA  (https://pytorch.org has the index)",
        )
    return DoctorFinding(area="system", name="PyTorch", state="ok", found=text)


def _cuda_of_driver() -> str | None:
    """The latest CUDA version that the driver supports, from the header of nvidia-smi's table."""
    try:
        said = subprocess.run(_SMI[:1], capture_output=True, text=True, timeout=_SMI_SECONDS)
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(r"CUDA Version:\s*([\d.]+)", said.stdout)
    return None if match is None else match[1]


def _cuda_of_torch() -> str | None:
    try:
        spec = find_spec("torch")
        assert spec is not None
        assert spec.origin is not None
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except (AssertionError, ImportError, OSError, ValueError):
        return None
    match = re.search(r"^cuda\b[^=]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return None if match is None else match[1]


def _of_extra(requirements: list[Requirement], extra: str) -> list[Requirement]:
    """Requirements that an extra adds to the base ones; "" gives the base ones."""
    return [
        one
        for one in requirements
        if (one.marker is None or one.marker.evaluate({"extra": extra}))
        and (not extra or (one.marker is not None and not one.marker.evaluate({"extra": ""})))
    ]


def _command(extra: str) -> str:
    """The command that installs an extra; uses the checkout if tuner is installed from one."""
    try:
        told = metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
        where = json.loads(told or "{}")
    except (metadata.PackageNotFoundError, ValueError):
        where = {}
    if where.get("dir_info", {}).get("editable"):
        return f"pip install -e '{where['url'].removeprefix('file://')}[{extra}]'"
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def _needing(
    area: str, name: str, use: str, extra: str, wanted: list[Requirement]
) -> DoctorFinding:
    """Report whether the requirements of an extra are installed."""
    wrong = [text for one in wanted if (text := _lack(one)) is not None]
    if not wrong:
        versions = ", ".join(f"{one.name} {_version(one.name)}" for one in wanted)
        return DoctorFinding(area=area, name=name, state="ok", found=f"{versions} (for {use})")
    found, mend = f"{'; '.join(wrong)} (for {use})", _command(extra)
    if extra.startswith("agentscope") and _version("agentscope") is not None:
        found += "; an environment can hold only one of AgentScope 1.x and 2.x"
        mend = f"{mend}  (in another environment)"
    return DoctorFinding(area=area, name=name, state="missing", found=found, mend=mend)


def _extras(requirements: list[Requirement]) -> Iterator[DoctorFinding]:
    for extra, use in _USES.items():
        if wanted := _of_extra(requirements, extra):
            yield _needing("extras", extra, use, extra, wanted)


def _engines(requirements: list[Requirement], has_gpu: bool) -> Iterator[DoctorFinding]:
    place = "on the GPU" if has_gpu else "on the CPU"
    use = "explorer.rollout_model.engine_type: vllm"
    vllm = _needing("engines", "vllm", use, "vllm", _of_extra(requirements, "vllm"))
    if platform.system() != "Linux":
        vllm = vllm.model_copy(
            update={"state": "missing", "found": "vLLM runs on Linux", "mend": None}
        )
    elif vllm.state == "ok" and not has_gpu and "cpu" not in (_version("vllm") or ""):
        found = f"{vllm.found}: built for GPUs, and this machine has none"
        vllm = vllm.model_copy(update={"state": "missing", "found": found})
    default = "vllm" if has_gpu and vllm.state == "ok" else "transformers"
    found = f"{place}; vllm is the default here" if default == "vllm" else f"the default, {place}"
    yield DoctorFinding(area="engines", name="transformers", state="ok", found=found)
    yield vllm
    server = _needing("", "", "", "sglang", _of_extra(requirements, "sglang"))
    can_serve = "and can run here" if server.state == "ok" else f"to run one: {server.mend}"
    yield DoctorFinding(
        area="engines",
        name="sglang",
        state="ok",
        found=f"a run connects to servers (tuner.engine.urls); {can_serve}",
    )


def _backends(requirements: list[Requirement], has_gpu: bool) -> Iterator[DoctorFinding]:
    yield DoctorFinding(
        area="backends", name="local", state="ok", found="in one process, the default"
    )
    use = "tuner.backend: trinity"
    if not has_gpu:
        use += "; without a GPU it only checks configurations or trains with Tinker's service"
    wanted = _of_extra(requirements, "trinity")
    yield _needing("backends", "trinity", use, "trinity", wanted)
