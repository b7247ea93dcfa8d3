"""What is uploaded to PyPI: what is in it, and that it trains where there is nothing else."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
README = ROOT / "README.md"
MODEL = ("config.json", "chat_template.jinja", "model.safetensors", "tokenizer.json")
EXAMPLE = "examples/smollm2"
DIST = Path(os.environ["TUNER_DIST"])


@pytest.fixture(scope="module")
def wheel() -> Path:
    (found,) = DIST.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with the wheel and, by a .pth file, the packages that it
    needs. Of a folder that a .pth file names no other is read: the checkout is not importable."""
    folder = tmp_path_factory.mktemp("installed") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    (site,) = folder.glob("lib/python3*/site-packages")
    (site / "needed.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps",
         "--no-index", "--no-compile", wheel],
        check=True,
    )  # fmt: skip
    return python.parent


def run(installed: Path, program: str, *arguments: str, folder: Path) -> str:
    """What an installed program prints in `folder`, without a hub."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [installed / program, *arguments],
        cwd=folder,
        env={**env, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_fifteen_lines_train_in_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    (script,) = re.findall(r"```python\n(.*?)```", README.read_text("utf-8"), re.DOTALL)
    # That all of its steps learn is in tests/test_readme.py.
    short = script.replace("buffer.total_steps=12", "buffer.total_steps=2")
    assert short != script
    where = "import tuner\nprint(tuner.__file__)\n"
    (tmp_path / "script.py").write_text(where + short, encoding="utf-8")
    printed = run(installed, "python", "script.py", folder=tmp_path)
    assert Path(printed.splitlines()[0]).is_relative_to(installed.parent)
    assert len(re.findall(r"^step \d/2  reward [\d.]+", printed, re.MULTILINE)) == 2
    assert len(list(tmp_path.glob("checkpoints/*/*/traces/step_*.jsonl"))) == 2


def test_the_command_is_there(installed: Path, tmp_path: Path) -> None:
    version = wheel_metadata(next(DIST.glob("*.whl")))["Version"]
    assert run(installed, "tuner", "--version", folder=tmp_path) == f"agentscope-tuner {version}\n"


def test_a_folder_begins_with_the_templates_of_the_wheel(installed: Path, tmp_path: Path) -> None:
    printed = run(installed, "tuner", "init", "agent", "--template", "queue", folder=tmp_path)
    assert printed.endswith("Start with: python agent/main.py\n")
    assert (tmp_path / "agent" / "data" / "train.jsonl").is_file()
    assert "MathEnvironment" in (tmp_path / "agent" / "config.yaml").read_text("utf-8")
    run(installed, "tuner", "init", "real", "--template", "real", folder=tmp_path)
    assert (tmp_path / "real" / "chat_template.jinja").is_file()


def wheel_metadata(wheel: Path) -> dict[str, str]:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        head = archive.read(name).decode().partition("\n\n")[0]
    return dict(line.split(": ", 1) for line in head.splitlines() if ": " in line)


def test_the_wheel_has_the_whole_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    listed = subprocess.run(
        ["git", "ls-files", "tuner", EXAMPLE], cwd=ROOT, capture_output=True, text=True, check=True
    )
    # The example is a template, too.
    package = {name.replace(EXAMPLE, "tuner/templates/real") for name in listed.stdout.split()}
    kinds = {Path(name).suffix for name in package}
    assert {"tuner/py.typed", "tuner/config/foreign_keys.yaml", "tuner/config/rules.yaml"} < package
    assert {".html", ".jsonl", ".md"} < kinds  # the page of a run, and the templates
    model = {name for name in found if name.startswith("tuner/models/tiny_math/")}
    assert {f"tuner/models/tiny_math/{name}" for name in MODEL} < model
    assert not any(name.endswith(".py") for name in model)
    assert found - model == package


def test_the_sdist_has_what_the_wheel_is_built_of_and_nothing_else() -> None:
    (sdist,) = DIST.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        found = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml"} < found
    assert {name.partition("/")[0] for name in found if "/" in name} == {
        "tuner",
        "models",
        "examples",
    }


def test_the_metadata_says_what_it_is(wheel: Path) -> None:
    metadata = wheel_metadata(wheel)
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["Description-Content-Type"] == "text/markdown"
    with zipfile.ZipFile(wheel) as archive:
        assert any(name.endswith(".dist-info/licenses/LICENSE") for name in archive.namelist())
