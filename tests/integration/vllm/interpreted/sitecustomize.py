"""Makes vLLM use on a CPU what it uses on GPUs: its second model runner, and kernels in Triton.

Python imports this module at its start where this folder is in PYTHONPATH. With TRITON_INTERPRET=1
Triton's interpreter runs the kernels (tests/integration/vllm/interpreted_worker.py).
"""

from types import SimpleNamespace

from triton.backends import backends

# vLLM wants a backend of this name; the interpreter needs no driver.
backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))
