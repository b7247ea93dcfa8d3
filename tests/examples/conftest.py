"""Examples are scripts: they import their neighbours, which several folders may name alike."""

import importlib.util
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def main(request):
    """`main.py` of the example in the test module's `EXAMPLE`, as it is run from its folder."""
    folder: Path = request.module.EXAMPLE
    spec = importlib.util.spec_from_file_location(f"{folder.name}_main", folder / "main.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setitem(sys.modules, spec.name, module)  # dataclasses look there
        spec.loader.exec_module(module)
        yield module
    for neighbour in folder.glob("*.py"):
        sys.modules.pop(neighbour.stem, None)
