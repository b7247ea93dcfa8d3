"""These tests need vLLM, in an environment of its own: `make test-vllm`."""

import importlib.util
import os

import pytest

from tests.integration.vllm import ON_A_CPU

HERE = importlib.util.find_spec("vllm") is not None
collect_ignore_glob = [] if HERE else ["test_*.py"]

if HERE:
    os.environ.update(ON_A_CPU)


@pytest.fixture(scope="session")
def toy_folder(tmp_path_factory):
    """The model of the conformance suite, with its tokenizer, as a folder."""
    from tests.engines.conformance import make_rig_model
    from tests.engines.models import make_tokenizer

    folder = tmp_path_factory.mktemp("toy")
    make_rig_model().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder
