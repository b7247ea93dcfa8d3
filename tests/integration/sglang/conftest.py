"""These tests need SGLang in an environment of its own, whose Python SGLANG_PYTHON names."""

import os

collect_ignore_glob = [] if "SGLANG_PYTHON" in os.environ else ["test_*.py"]
