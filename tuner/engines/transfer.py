"""Handing numbers to the device without waiting for it.

A plain `.to("cuda")` from pageable memory waits until the GPU has done all that was asked before.
From page-locked memory the transfer takes its place in the queue and Python goes on.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def to_device(values: np.ndarray[Any, Any] | Tensor, device: torch.device) -> Tensor:
    """An array or tensor of main memory, on `device`."""
    tensor = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
