"""`tuner doctor` on environments made by hand: metadata of packages, and a stand-in nvidia-smi."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tuner import cli
from tuner.tools.doctor import examine

ROOT = Path(__file__).resolve().parents[2]
REQUIRES = (
    "fakebase>=2",
    'fakewandb>=0.19; extra == "wandb"',
    'fakepeft>=0.20; extra == "lora"',
    'vllm>=0.32; extra == "vllm"',
    'fakesglang>=0.5; extra == "sglang"',
    'faketrinity>=0.6,<0.7; extra == "trinity"',
)
SMI = """#!/bin/sh
if [ $# = 0 ]; then echo '| NVIDIA-SMI 550.54  Driver Version: 550.54  CUDA Version: 12.4 |'; exit
fi
echo 'NVIDIA H100 80GB HBM3, 81559 MiB, 550.54.15'
"""


def install(folder, name, version, *, requires=(), editable=False):
    """What pip leaves of a package but its code."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nRequires-Python: >=3.11"]
    lines += [f"Requires-Dist: {line}" for line in requires]
    (info / "METADATA").write_text("\n".join(lines) + "\n")
    if editable:
        told = {"url": "file:///home/me/tuner", "dir_info": {"editable": True}}
        (info / "direct_url.json").write_text(json.dumps(told))


@pytest.fixture
def site(tmp_path, monkeypatch):
    """An environment of packages that are found before all others, and no GPU."""
    folder = tmp_path / "site"
    install(folder, "agentscope-tuner", "9.9", requires=REQUIRES)
    install(folder, "fakebase", "2.1")
    install(folder, "torch", "2.11.0")
    torch = folder / "torch"
    torch.mkdir()
    (torch / "__init__.py").write_text("raise RuntimeError('must not be imported')\n")
    (torch / "version.py").write_text("cuda: Optional[str] = '12.8'\n")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "bin").mkdir()
    return folder


def smi(tmp_path, text=SMI):
    program = tmp_path / "bin/nvidia-smi"
    program.write_text(text)
    program.chmod(0o755)


def found(name):
    return next(one for one in examine().findings if one.name == name)


def test_what_is_missing_and_what_installs_it(site):
    install(site, "fakepeft", "0.21")
    assert examine().well
    assert found("lora").state == "ok"
    wandb = found("wandb")
    assert (wandb.state, wandb.mend) == ("missing", "pip install 'agentscope-tuner[wandb]'")
    assert wandb.found == "fakewandb is not installed (for monitor.monitor_type: wandb)"
    assert found("GPU").state == "missing"
    assert found("transformers").found == "the default, on the CPU"
    assert "trains with Tinker's service" in found("trinity").found


def test_a_wrong_version_is_named_with_the_right_one(site):
    install(site, "faketrinity", "0.7.1")
    trinity = found("trinity")
    assert trinity.state == "missing"
    assert trinity.found.startswith("faketrinity is 0.7.1, and <0.7,>=0.6 is needed")


def test_a_checkout_is_installed_from_where_it_is(site):
    for old in (site / "agentscope_tuner-9.9.dist-info").iterdir():
        old.unlink()
    (site / "agentscope_tuner-9.9.dist-info").rmdir()
    install(site, "agentscope-tuner", "9.9", requires=REQUIRES, editable=True)
    assert found("vllm").mend == "pip install -e '/home/me/tuner[vllm]'"


def test_a_library_that_is_always_needed_is_to_be_mended(site):
    (site / "fakebase-2.1.dist-info/METADATA").write_text("Name: fakebase\nVersion: 1.0\n")
    result = examine()
    assert not result.well
    base = found("libraries")
    assert base.found == "fakebase is 1.0, and >=2 is needed"
    assert base.mend == "pip install 'fakebase>=2'"
    assert str(result).endswith("to fix: libraries")


def test_the_gpu_its_driver_and_a_pytorch_that_fits(site, tmp_path):
    smi(tmp_path)
    assert found("GPU 0").found == "NVIDIA H100 80GB HBM3, 81559 MiB, driver 550.54.15"
    assert found("PyTorch").state == "ok"
    assert found("transformers").found == "the default, on the GPU"


@pytest.mark.parametrize(
    ("cuda", "text"),
    [
        ("'13.0'", "built for CUDA 13.0, but the driver supports CUDA up to 12.4"),
        ("None", "built for the CPU, so the GPU is not used"),
    ],
)
def test_a_pytorch_that_cannot_use_the_gpu_is_to_be_mended(site, tmp_path, cuda, text):
    smi(tmp_path)
    (site / "torch/version.py").write_text(f"cuda: Optional[str] = {cuda}\n")
    assert found("PyTorch").state == "broken"
    assert text in found("PyTorch").found


def test_a_gpu_that_is_hidden_is_not_counted(site, tmp_path, monkeypatch):
    smi(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert found("CUDA_VISIBLE_DEVICES").found == "is '': runs see no GPU"
    assert found("transformers").found == "the default, on the CPU"
    install(site, "vllm", "0.32.0")
    assert found("vllm").found.endswith("built for GPUs, and this machine has none")
    assert found("transformers").found == "the default, on the CPU"


def test_vllm_is_the_default_on_a_gpu(site, tmp_path):
    smi(tmp_path)
    install(site, "vllm", "0.32.0")
    assert found("vllm").state == "ok"
    assert found("transformers").found == "on the GPU; vllm is the default here"


@pytest.mark.parametrize(
    ("program", "text"),
    [
        ("#!/bin/sh\necho 'Driver/library version mismatch'; exit 18\n", "version mismatch"),
        ("#!/bin/sh\nexit 0\n", "it says nothing"),
        ("not a program", "does not answer"),
    ],
)
def test_a_driver_that_does_not_answer_is_no_traceback(site, tmp_path, program, text):
    smi(tmp_path, program)
    assert found("GPU").state == "broken"
    assert text in found("GPU").found


def test_without_metadata_it_says_so(site, monkeypatch):
    monkeypatch.setattr("tuner.tools.doctor.DISTRIBUTION", "nobody-has-this")
    result = examine()
    assert not result.well
    assert "not installed" in found("nobody-has-this").found
    assert {one.area for one in result.findings} == {"system"}


def test_the_command_loads_no_library_that_it_looks_at():
    code = (
        "import sys; from tuner import cli; sys.argv = ['tuner', 'doctor', '--json']\n"
        "try: cli.main()\n"
        "except SystemExit: pass\n"
        "loaded = {'torch', 'transformers', 'vllm', 'datasets', 'openai'} & set(sys.modules)\n"
        "sys.exit(f'loaded {loaded}' if loaded else 0)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert ended.returncode == 0, ended.stderr
    assert {one["area"] for one in json.loads(ended.stdout)["findings"]} == {
        "system",
        "extras",
        "engines",
        "backends",
    }


def test_something_to_mend_is_status_1(site, capsys, monkeypatch):
    (site / "fakebase-2.1.dist-info/METADATA").write_text("Name: fakebase\nVersion: 1.0\n")
    monkeypatch.setattr(sys, "argv", ["tuner", "doctor"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    assert "!!  libraries" in capsys.readouterr().out
