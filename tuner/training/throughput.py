"""How fast an update is, how much memory it takes, and its share of what the GPU could do (MFU).

MFU counts what the update has to compute and nothing that is computed twice (PaLM, arXiv
2204.02311, appendix B). For a token tree that is each distinct token of the batch once, however it
is cut into micro-batches, and no recomputed activations:

    FLOPs = nodes x (4 weights + 2 trained weights) + 12 heads head_dim x pairs x layers
            + logits x (4 or 6) hidden vocabulary

`weights` are those of the layers, pairs are those of a node and an ancestor or itself that it
attends to, logits are the distinct positions that are trained.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from tuner.engines.transformers.model_shape import head_width, layer_windows
from tuner.traces import TokenTree
from tuner.training.batch import Row

logger = logging.getLogger("tuner")

# Dense TFLOPS in bfloat16 with float32 sums, and in float32 without TF32, from NVIDIA's data
# sheets. A name comes before another that it contains.
_PEAK = (
    ("B200", 2250, 75),
    ("H100 PCIe", 756, 51),
    ("H100 NVL", 835, 60),
    ("H100", 989, 67),
    ("H200", 989, 67),
    ("GH200", 989, 67),
    ("A100", 312, 19.5),
    ("L40S", 362, 91.6),
    ("L40", 181, 90.5),
    ("L4", 121, 30.3),
    ("RTX 5090", 209.5, 104.8),
    ("RTX 4090", 165.2, 82.6),
    ("RTX 3090", 71, 35.6),
)


def peak_flops(device: str, dtype: torch.dtype, *, tf32: bool = False) -> float | None:
    """FLOPs per second that a GPU of this name can do; None where that is not known.

    Args:
        device: As `torch.cuda.get_device_name` gives it.
        dtype: Of the weights.
        tf32: Whether products in float32 are computed in TF32.
    """
    words = f" {device.replace('-', ' ')} "
    for name, half, single in _PEAK:
        if f" {name} " in words:
            match dtype:
                case torch.bfloat16 | torch.float16:
                    return half * 1e12
                case torch.float32:
                    return (half / 2 if tf32 else single) * 1e12
    return None


@dataclass(frozen=True)
class ModelFlops:
    """What forward and backward pass of a model cost, in multiplications and additions.

    Attributes:
        node: One token through the layers, without attention.
        pair: One query with one key, in one layer.
        logits: One position at the output head.
        layers: Layers of each kind, with the windows that they attend within.
    """

    node: float
    pair: float
    logits: float
    layers: tuple[tuple[int | None, int], ...]

    @staticmethod
    def of(model: PreTrainedModel) -> ModelFlops | str:
        """From a model's sizes, or why they do not say it."""
        config = model.config.get_text_config(decoder=True)
        windows = layer_windows(model)
        if isinstance(windows, str):
            return windows
        for key in ("num_experts", "num_local_experts", "n_routed_experts"):
            if getattr(config, key, None):
                return f"not every token passes all weights ({key})"
        if getattr(config, "is_heterogeneous", False):
            return f"its layers differ ({', '.join(sorted(config.per_layer_attributes or ()))})"
        head = model.get_output_embeddings().weight
        embeddings = {id(head), id(model.get_input_embeddings().weight)}
        matrices = [p for p in model.parameters() if p.ndim > 1 and id(p) not in embeddings]
        kinds = getattr(config, "layer_types", None) or list(windows) * config.num_hidden_layers
        return ModelFlops(
            node=sum(_both_passes(matrix) for matrix in matrices),
            pair=12 * config.num_attention_heads * head_width(config),
            logits=_both_passes(head),
            layers=tuple((windows[kind], count) for kind, count in Counter(kinds).items()),
        )

    def __call__(self, tree: TokenTree) -> float:
        """Forward and backward pass over a tree, with logits before each distinct sampled token."""
        pairs = 0.0
        for window, layers in self.layers:
            seen = tree.depth + 1 if window is None else np.minimum(tree.depth + 1, window)
            pairs += layers * float(seen.sum())
        logits = np.count_nonzero(tree.samples)
        return self.node * tree.unique_tokens + self.pair * pairs + self.logits * logits


class Throughput:
    """Measures updates of one model; says once where MFU cannot be told."""

    def __init__(self, model: PreTrainedModel, device: torch.device) -> None:
        self._device = device
        self._peak: float | None = None
        self._flops: ModelFlops | None = None
        if device.type != "cuda":
            return
        name = torch.cuda.get_device_name(device)
        tf32 = torch.get_float32_matmul_precision() != "highest"
        self._peak = peak_flops(name, model.dtype, tf32=tf32)
        found = ModelFlops.of(model)
        if self._peak is None:
            found = f"the peak of {name!r} in {model.dtype} is not known"
        if isinstance(found, str):
            logger.info("no MFU is reported: %s", found)
        else:
            self._flops = found

    @contextmanager
    def of(self, rows: Sequence[Row], passes: int, metrics: dict[str, float]) -> Iterator[None]:
        """Add to `metrics` what `passes` forward and backward passes over `rows` took inside."""
        on_gpu = self._device.type == "cuda"
        if on_gpu:
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        started = time.perf_counter()
        yield
        if on_gpu:
            torch.cuda.synchronize(self._device)
            peak = torch.cuda.max_memory_allocated(self._device)
            metrics["peak_memory_gib"] = peak / 2**30
        seconds = time.perf_counter() - started
        tree = TokenTree.build(rows)
        metrics["unique_tokens_per_second"] = passes * tree.unique_tokens / seconds
        metrics["row_tokens_per_second"] = passes * tree.row_tokens / seconds
        if self._flops is not None and self._peak is not None:
            metrics["mfu"] = passes * self._flops(tree) / seconds / self._peak


def _both_passes(matrix: nn.Parameter) -> int:
    """FLOPs of a row times a matrix, of the row's gradient and, if it is trained, the matrix's."""
    return (6 if matrix.requires_grad else 4) * matrix.numel()
