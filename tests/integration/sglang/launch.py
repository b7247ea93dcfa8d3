"""SGLang's own server on a CPU, with what a run of ours asks of it.

    python tests/integration/sglang/launch.py --model-path FOLDER --port 30000 ...

SGLang's wheel is for GPUs: it has no kernels for CPUs. Three things stand in for them, and nothing
else of SGLang is changed: `import sgl_kernel` finds a libcuda.so.1 (see `test_server.py`); the hash
that turns seeds into random numbers is computed by PyTorch; and deterministic inference, which lets
seeds work, keeps PyTorch's matrix products and attention, so that numbers depend on the batch.
"""

# At the top, because SGLang's scheduler is a process that imports this module again.
import sys

import sgl_kernel  # noqa: F401  # makes torch.ops.sgl_kernel
import sglang.srt.batch_invariant_ops as batch_invariant_ops
import torch
from sglang.srt.arg_groups import choices

_LOW = 0xFFFFFFFF
_library = torch.library.Library("sgl_kernel", "FRAGMENT")
_library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor columns) -> Tensor")


def _rotated(x: torch.Tensor, by: int) -> torch.Tensor:
    return ((x << by) | (x >> (32 - by))) & _LOW


def _product(x: torch.Tensor, factor: int) -> torch.Tensor:
    """The low 32 bits of a product, in 64 bits with a sign."""
    return ((x & 0xFFFF) * factor + (((x >> 16) * factor & 0xFFFF) << 16)) & _LOW


def _mixed(state: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    key = _product(_rotated(_product(key, 0xCC9E2D51), 15), 0x1B873593)
    return (_product(_rotated(state ^ key, 13), 5) + 0xE6546B64) & _LOW


def _murmur_hash32(
    seed: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor
) -> torch.Tensor:
    """MurmurHash3 of seed, position and column, [n], [n], [m] -> [n, m]."""
    seed = seed.to(torch.int64)[:, None]
    state = torch.zeros(1, dtype=torch.int64)
    for key in (seed & _LOW, seed >> 32 & _LOW, positions[:, None], columns[None]):
        state = _mixed(state, key.to(torch.int64))
    state = state ^ 16
    state = _product(state ^ state >> 16, 0x85EBCA6B)
    state = _product(state ^ state >> 13, 0xC2B2AE35)
    return state ^ state >> 16


_library.impl("murmur_hash32_cpu", _murmur_hash32, "CPU")
batch_invariant_ops.enable_batch_invariant_mode = lambda *_, **__: None
choices.add_deterministic_attention_backend_choices(["torch_native"])
choices.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])

if __name__ == "__main__":
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args

    run_server(prepare_server_args(sys.argv[1:]))
