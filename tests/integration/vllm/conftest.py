"""These tests need vLLM, in an environment of its own: `make test-vllm`."""

import importlib.util
import os

import pytest

HERE = importlib.util.find_spec("vllm") is not None
collect_ignore_glob = [] if HERE else ["test_*.py"]

if HERE:
    os.environ.update(
        {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            # Two cores that others use: vLLM binds each of its threads to a core otherwise.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            # vLLM's processes otherwise call g++ for helpers; our few tokens do not pay for that.
            "TORCH_COMPILE_DISABLE": "1",
        }
    )


@pytest.fixture(scope="session")
def toy_folder(tmp_path_factory):
    """The model of the conformance suite, with its tokenizer, as a folder."""
    from tests.engines.conformance import make_rig_model
    from tests.engines.models import make_tokenizer

    folder = tmp_path_factory.mktemp("toy")
    make_rig_model().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder
