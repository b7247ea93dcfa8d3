"""The worker extension for kernels in Triton's interpreter; imported by vLLM's workers alone."""

from triton.runtime.interpreter import InterpreterBuilder
from vllm.v1.sample.ops import topk_topp_sampler
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from tuner.engines.vllm.worker import WeightsExtension

# The interpreter cannot run the kernel of top_k and top_p; PyTorch computes both.
topk_topp_sampler.HAS_TRITON = False

_load, _store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store


def _boolean(mask):
    """Masks may be numbers in a kernel, which the interpreter refuses."""
    mask.data = mask.data.astype(bool)
    return mask


InterpreterBuilder.create_masked_load = lambda self, places, mask, *rest: _load(
    self, places, _boolean(mask), *rest
)
InterpreterBuilder.create_masked_store = lambda self, places, values, mask, *rest: _store(
    self, places, values, _boolean(mask), *rest
)

_verify = RejectionSampler.__call__


def _count(self, *inputs):
    """Say in the log how many drafted tokens were accepted."""
    output = _verify(self, *inputs)
    print(f"accepted {int((output.num_sampled - 1).clamp(min=0).sum())}", flush=True)
    return output


RejectionSampler.__call__ = _count


class InterpretedExtension(WeightsExtension):
    """Brings this module into the worker."""
