"""`make gpu`: a check that fails, hangs or crashes stops no other. CI rehearses the real ones."""

import importlib
import inspect
import os

import pytest

from benchmarks._readme import on_a_gpu
from benchmarks._report import Row
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu.check import CHECKS, SLICES, Check, Skipped


def passes(device):
    yield Row("a case", "ms", 1.0, "allowed", 2.0, 1.0, more_is_better=False)


def misses(device):
    yield from passes(device)
    yield Row("a case", "tokens/s", 1.0, "allowed", 2.0, 1.0)


def breaks(device):
    yield from passes(device)
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def asserts(device):
    raise AssertionError("the layout is padded")


def lacks(device):
    importlib.import_module("no_such_package")


def skips(device):
    raise Skipped("a GPU with more memory")


def dies(device):
    os._exit(7)


def hangs(device):
    while True:
        pass


WANTED = {
    "hangs": ("error", "not done after 2 s"),
    "dies": ("error", "its process ended"),
    "breaks": ("error", "an illegal memory access"),
    "asserts": ("failed", "the layout is padded"),
    "misses": ("failed", "a case: tokens/s"),
    "lacks": ("skipped", "no_such_package is not installed"),
    "skips": ("skipped", "a GPU with more memory"),
    "passes": ("passed", ""),
}


def run(folder, *names, **settings):
    checks = [Check(name, 1, 2, f"tests.test_gpu.{name}") for name in names]
    good = gpu.run_slice(1, checks, folder, device="cpu", **settings)
    return good, gpu.results_of(folder / "slice_1.json")


@pytest.fixture(autouse=True)
def nothing_preloaded(monkeypatch):
    monkeypatch.setattr(gpu, "PRELOADED", [])


@pytest.mark.long
def test_what_becomes_of_one_check_stops_no_other(tmp_path):
    good, found = run(tmp_path, *WANTED)
    assert not good
    for name, (outcome, why) in WANTED.items():
        assert found[name]["outcome"] == outcome, found[name]
        assert why in found[name]["why"]
        assert found[name]["here"]["hardware"]
    assert [len(found[name]["rows"]) for name in ("passes", "misses", "breaks")] == [1, 2, 1]


@pytest.mark.long
def test_what_passed_is_run_again_only_with_other_code_or_where_it_is_asked_for(
    tmp_path, capsys, monkeypatch
):
    def begun(**settings):
        capsys.readouterr()
        run(tmp_path, "passes", "skips", **settings)
        return capsys.readouterr().out.splitlines()[0]

    assert begun() == "slice 1, correct: 2 of 2 checks"
    assert begun() == "slice 1, correct: 1 of 2 checks"
    assert begun(again=True) == "slice 1, correct: 2 of 2 checks"
    now = gpu.here()
    monkeypatch.setattr(gpu, "here", lambda: {**now, "code": "other"})
    assert begun() == "slice 1, correct: 2 of 2 checks"


def test_nothing_begins_when_the_minutes_are_over_and_a_rerun_goes_on(tmp_path):
    good, found = run(tmp_path, "passes", minutes=-1)
    assert good
    assert found["passes"]["outcome"] == "not run"
    assert run(tmp_path, "passes")[1]["passes"]["outcome"] == "passed"


def test_without_a_gpu_it_says_so(capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert gpu.main([]) == 2
    assert "there is no GPU" in capsys.readouterr().out


def test_every_check_is_a_generator_and_has_a_name_of_its_own():
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    for check in CHECKS:
        module, function = check.function.split(".")
        found = getattr(importlib.import_module(f"benchmarks.gpu.{module}"), function)
        assert inspect.isgeneratorfunction(found)
        inspect.signature(found).bind("cpu", *check.args)


def test_the_documentation_has_what_was_measured(tmp_path):
    run(tmp_path, "passes", "skips")
    written = "\n".join(on_a_gpu(tmp_path))
    assert "| passes | a case | ms | 1 | allowed | 2 | 2.00 | 1 | yes |" in written
    assert "| skips | skipped: a GPU with more memory |" in written
    assert f"## Slice 2: {SLICES[2]}\n\nNot run." in written
