"""Learning-rate schedules, and AdamW in float32 for weights of any precision.

The next bfloat16 number after 1 is 1 + 2^-7, so an update of 1e-6 would be lost. The optimizer
therefore has a float32 copy of each such weight, its *master*, and the model holds the rounded
master:

    backward    grad (float32)  +=  gradient of a micro-batch (bfloat16)
    step        master (float32)  <-  AdamW(master, grad, moments)
                weight (bfloat16) <-  master, rounded

A float32 weight is its own master, and nothing is copied. With `offload` masters and moments are in
main memory, where the CPU computes the step: of 18 bytes for each bfloat16 parameter (weight 2,
gradient 4, master 4, moments 8) 6 remain on the device.

8-bit moments are bitsandbytes' (Dettmers et al., arXiv 2110.02861): quantised in blocks of 256, and
in float32 for parameters with fewer than 4096 numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tuner.errors import ConfigError, TrainingError, pip_install, quiet_library

Scheduler = Literal["constant", "linear", "cosine"]


def lr_factor(
    step: int,
    *,
    kind: Scheduler,
    warmup_steps: int,
    total_steps: int,
    min_lr_ratio: float,
) -> float:
    """Factor of the learning rate for update `step` (0 .. total_steps - 1).

    Rises linearly to 1 over `warmup_steps` updates, the first at `1 / warmup_steps`, then stays
    ("constant") or falls to `min_lr_ratio` at `total_steps` ("linear", "cosine").
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if kind == "constant":
        return 1.0
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    shape = 1 - progress if kind == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return min_lr_ratio + (1 - min_lr_ratio) * shape


OptimizerState = Literal["float32", "8bit"]

_EXACT = (torch.float32, torch.float64)


def make_optimizer(
    parameters: Iterable[nn.Parameter],
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    weight_decay: float = 0.01,
    state: OptimizerState = "float32",
    offload: bool = False,
) -> MasterAdamW:
    """AdamW over those of `parameters` that are trained.

    Args:
        lr: Learning rate; may be changed later in `param_groups`.
        weight_decay: Decoupled.
        state: Precision of the moments.
        offload: Keep masters and moments in main memory.

    Raises:
        ConfigError: 8-bit moments need bitsandbytes, which is not installed.
    """
    return MasterAdamW(
        [parameter for parameter in parameters if parameter.requires_grad],
        state=state,
        offload=offload,
        lr=lr,
        betas=betas,
        weight_decay=weight_decay,
    )


class MasterAdamW:
    """AdamW over the masters of some parameters; made by `make_optimizer`.

    From then on the gradients of parameters of lower precision are float32, and changes of weights
    by others are overwritten with their masters in the next step.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        *,
        state: OptimizerState,
        offload: bool,
        **settings: Any,
    ) -> None:
        self._state = state
        self._parameters = parameters
        self._masters = [_master(parameter, offload=offload) for parameter in parameters]
        for parameter in parameters:
            if parameter.dtype not in _EXACT:
                # In bfloat16 the sum over micro-batches would lose small contributions.
                parameter.grad = None
                parameter.grad_dtype = torch.float32
        # Fused: one kernel per step, several times as fast as torch's default on a CPU, and without
        # its temporary copies of all parameters on a GPU.
        self._adam = (
            _adam8bit(self._masters, **settings)
            if state == "8bit"
            else torch.optim.AdamW(self._masters, fused=True, **settings)
        )

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """As in torch; `lr` may be set."""
        return self._adam.param_groups

    @property
    def masters(self) -> tuple[Tensor, ...]:
        """The trained weights, in order; float32 at least."""
        return tuple(master.detach() for master in self._masters)

    def clip_grad_norm(self, limit: float) -> Tensor:
        """Scale the gradients to a norm of at most `limit`; returns their norm, a scalar."""
        return nn.utils.clip_grad_norm_(self._parameters, limit)

    def zero_grad(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """One step from the gradients of the parameters, which are kept until `zero_grad`."""
        apart = [
            (parameter, master)
            for parameter, master in zip(self._parameters, self._masters, strict=True)
            if master is not parameter
        ]
        for parameter, master in apart:
            master.grad = _beside(parameter.grad, master)
        if any(parameter.device != master.device for parameter, master in apart):
            torch.cuda.current_stream().synchronize()
        self._adam.step()
        for parameter, master in apart:
            master.grad = None
            # Rounded on the device, so that no rounded copy is made in main memory.
            parameter.copy_(master.to(parameter.device, non_blocking=True))

    def step_if_finite(self, what: str, loss: float, grad_norm: float, *, setting: str) -> None:
        """One step, unless it would spoil the weights; the gradients are cleared.

        Args:
            what: Step and name of the loss, for the message.
            setting: Key of the setting that is probably too large, for the message.

        Raises:
            TrainingError: Loss or gradient is not finite, and the weights are unchanged; or the
                step has made weights that are not finite.
        """
        if not (math.isfinite(grad_norm) and math.isfinite(loss)):
            self.zero_grad()
            raise TrainingError(
                f"{what} {loss} with gradient norm {grad_norm} is not finite; lower {setting} or "
                "trainer.grad_clip"
            )
        self.step()
        self.zero_grad()
        if not self.finite():
            raise TrainingError(
                f"{what} {loss} with gradient norm {grad_norm} has made weights that are not "
                f"finite, which are not saved; lower {setting}"
            )

    def finite(self) -> bool:
        """Whether the norm of the weights is finite; reads them once, a tenth of a step's time."""
        # torch computes the norms of plain tensors in one call, those of parameters one by one.
        return bool(nn.utils.get_total_norm([p.data for p in self._parameters]).isfinite())

    def state_dict(self) -> dict[str, Any]:
        """State for `load_state_dict`; `torch.load` reads it with `weights_only`."""
        return {
            **self._adam.state_dict(),
            "moments": self._state,
            "masters": {
                index: master.detach()
                for index, (parameter, master) in self._pairs()
                if parameter.dtype != master.dtype
            },
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of an optimizer over the same weights.

        Learning rate, betas and weight decay stay those of this optimizer; device and kernel may
        differ from those of the saved one.

        Raises:
            TrainingError: The state belongs to other weights, or to weights or moments of another
                precision.
        """
        moments = state.get("moments", "float32")
        if moments != self._state:
            raise TrainingError(
                f"the optimizer's state has moments of {moments}, and tuner.optimizer_state is "
                f"{self._state}; set it to the earlier value"
            )
        masters = state.get("masters", {})
        for index, (parameter, master) in self._pairs():
            if parameter.dtype == master.dtype:
                if index in masters:
                    raise TrainingError(
                        f"the optimizer's state is for weights of lower precision than "
                        f"{parameter.dtype}; load the model in the dtype it was trained in"
                    )
                if master is not parameter:
                    master.copy_(parameter)
                continue
            saved = masters.get(index)
            if saved is None:
                raise TrainingError(
                    f"the optimizer's state has no float32 masters for weights of "
                    f"{parameter.dtype}; load the model in the dtype it was trained in"
                )
            rounded = saved.to(parameter.dtype) if saved.shape == parameter.shape else None
            if rounded is None or not torch.equal(rounded.to(parameter.device), parameter):
                raise TrainingError(
                    "the optimizer's float32 masters do not match the model's weights; load the "
                    "model from the checkpoint that the optimizer's state comes from"
                )
            master.copy_(saved)
        groups = self._adam.state_dict()["param_groups"]
        self._adam.load_state_dict({"state": state["state"], "param_groups": groups})

    def _pairs(self) -> Iterable[tuple[int, tuple[nn.Parameter, Tensor]]]:
        return enumerate(zip(self._parameters, self._masters, strict=True))


def _master(parameter: nn.Parameter, *, offload: bool) -> nn.Parameter:
    """A float32 master, in page-locked memory if it is offloaded from a GPU; `parameter` itself if
    it needs none."""
    exact = torch.promote_types(parameter.dtype, torch.float32)
    if parameter.dtype == exact and not offload:
        return parameter
    device = torch.device("cpu") if offload else parameter.device
    copy = torch.empty(
        parameter.shape, dtype=exact, device=device, pin_memory=offload and parameter.is_cuda
    )
    return nn.Parameter(copy.copy_(parameter.detach()))


def _beside(gradient: Tensor | None, master: Tensor) -> Tensor | None:
    """A gradient on the device of its master; transfers from a GPU are asynchronous."""
    if gradient is None or gradient.device == master.device:
        return gradient
    landed = torch.empty(
        gradient.shape, dtype=gradient.dtype, device=master.device, pin_memory=gradient.is_cuda
    )
    return landed.copy_(gradient, non_blocking=True)


def _adam8bit(masters: list[nn.Parameter], **settings: Any) -> torch.optim.Optimizer:
    try:
        with quiet_library("bitsandbytes"):
            from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        raise ConfigError(
            "tuner.optimizer_state = '8bit' needs bitsandbytes, which is not installed "
            f"({error}): {pip_install('gpu')}, or use float32"
        ) from error
    optimizer: torch.optim.Optimizer = AdamW8bit(masters, **settings)
    return optimizer
